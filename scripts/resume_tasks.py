"""What ``resume_eval.py`` trains, behind one face: begin, and make a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import finetune
import resume_models
import resume_training
import torch
from resume_models import Model, batch_of, read_text
from torch.nn import functional

State = dict[str, Any]

# Targets by how often they stand in the text: the commonest, common ones, the rest.
CLASSES = ("frequent", "common", "rare")
_RANKS = (64, 512)


class Task(NamedTuple):
    """A training run that can be stopped and resumed.

    Attributes
    ----------
    begin : seed and beta2 -> the state before the first step.
    step : state, seed and number of the step -> sum of losses and number of tokens of each class;
        changes the state.
    base, saved : steps after which the base and the checkpoint are saved.
    resumed, longer : steps after that, of every run and of the presets'.
    fewer : whether only some of the methods are tried.
    """

    name: str
    begin: Callable[[int, float], State]
    step: Callable[[State, int, int], torch.Tensor]
    base: int
    saved: int
    resumed: int
    longer: int
    fewer: bool = False


def _by_class(losses: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Give (class, 2): sum of losses and number of tokens."""
    number = sum((ranks >= limit).long() for limit in _RANKS)
    found = torch.zeros(len(CLASSES), 2, dtype=torch.float64)
    found[:, 0].index_add_(0, number, losses.double())
    found[:, 1].index_add_(0, number, torch.ones_like(losses, dtype=torch.float64))
    return found


def _mixed(model: Model, **steps: int) -> Task:
    def begin(seed: int, beta2: float) -> State:
        generator = torch.Generator().manual_seed(seed)
        return resume_training.begin(model.begin(generator), beta2)

    def step(state: State, seed: int, number: int) -> torch.Tensor:
        tokens = batch_of(read_text(), seed, number)
        losses = resume_training.step(state, model.losses, tokens)
        return _by_class(losses.flatten(), tokens[:, 1:].flatten())

    return Task(model.name, begin, step, **steps)  # type: ignore[arg-type]


# -- a fine-tune of MiniLM's encoder, through transformers, in float32 -----------------------------

_RATE, _WARMUP = 1e-4, 20


@cache
def _encoder() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.AutoModelForMaskedLM.from_pretrained(finetune.SOURCE)
    return model.eval()


@cache
def _pieces() -> tuple[torch.Tensor, int, torch.Tensor]:
    """Give the text, the number of the mask, and each piece's rank."""
    text, mask = finetune.read_text(finetune.SOURCE / "vocab.txt")
    order = torch.bincount(text, minlength=mask + 1).argsort(descending=True, stable=True)
    ranks = torch.empty(int(text.max()) + 1 if len(order) <= text.max() else len(order)).long()
    ranks[order] = torch.arange(len(order))
    return text, mask, ranks


def _begin_encoder(seed: int, beta2: float) -> State:
    weights = {name: p.detach().clone() for name, p in _encoder().named_parameters()}
    moments = {
        number: {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(w),
            "exp_avg_sq": torch.zeros_like(w),
        }
        for number, w in enumerate(weights.values())
    }
    group = {"lr": 0.0, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.01}
    group["params"] = list(moments)
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [group]}}


def _step_encoder(state: State, seed: int, number: int) -> torch.Tensor:
    text, mask, ranks = _pieces()
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    starts = torch.randint(len(text) - finetune.LENGTH, (finetune.BATCH, 1), generator=generator)
    tokens = text[starts + torch.arange(finetune.LENGTH)]
    hidden = torch.rand(tokens.shape, generator=generator) < finetune.MASKED
    weights = {name: w.requires_grad_() for name, w in state["model"].items()}
    model = _encoder()
    bert = {name.removeprefix("bert."): w for name, w in weights.items() if name[:5] == "bert."}
    head = {name.removeprefix("cls."): w for name, w in weights.items() if name[:4] == "cls."}
    inputs = {"input_ids": tokens.masked_fill(hidden, mask)}
    states = torch.func.functional_call(model.bert, bert, (), inputs).last_hidden_state[hidden]
    tied = {"predictions.decoder.weight": bert["embeddings.word_embeddings.weight"]}
    if "predictions.bias" in head:
        tied["predictions.decoder.bias"] = head["predictions.bias"]
    logits = torch.func.functional_call(model.cls, {**head, **tied}, (states,))
    losses = functional.cross_entropy(logits, tokens[hidden], reduction="none")
    gradients = torch.autograd.grad(losses.mean(), list(weights.values()), allow_unused=True)
    _adamw(state, gradients)
    return _by_class(losses.detach(), ranks[tokens[hidden]])


@torch.no_grad()
def _adamw(state: State, gradients: tuple[torch.Tensor | None, ...]) -> None:
    group = state["optimizer"]["param_groups"][0]
    beta1, beta2 = group["betas"]
    for number, (weight, gradient) in enumerate(
        zip(state["model"].values(), gradients, strict=True)
    ):
        weight.requires_grad_(False)
        moments = state["optimizer"]["state"][number]
        moments["step"] += 1
        steps = moments["step"].item()
        group["lr"] = rate = _RATE * min(1.0, steps / _WARMUP)
        g = torch.zeros_like(weight) if gradient is None else gradient
        m, v = moments["exp_avg"], moments["exp_avg_sq"]
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(m, root, value=-rate / (1 - beta1**steps))


TASKS = {
    "gpt": _mixed(resume_models.GPT, base=160, saved=200, resumed=40, longer=200),
    "moe": _mixed(resume_models.MOE, base=160, saved=200, resumed=40, longer=200, fewer=True),
    "minilm": Task(
        "MiniLM fine-tune, 22.7 M",
        _begin_encoder,
        _step_encoder,
        base=30,
        saved=50,
        resumed=20,
        longer=200,
        fewer=True,
    ),
}
