"""What ``partial_eval.py`` trains: small models of transformers' Mixtral and Qwen3-MoE kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from resume_models import VOCABULARY, batch_of, read_text
from torch.nn import functional

RATE = 1e-3
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


class Kind(NamedTuple):
    """A model, how many experts a layer of it has, and how many of these see a token."""

    name: str
    make: Callable[[], Any]
    experts: int
    chosen: int


def _mixtral() -> Any:
    config = transformers.MixtralConfig(
        **_SIZES, intermediate_size=256, num_local_experts=8, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def _qwen() -> Any:
    config = transformers.Qwen3MoeConfig(
        **_SIZES,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )
    return transformers.Qwen3MoeForCausalLM(config)


KINDS = (Kind("Mixtral", _mixtral, 8, 2), Kind("Qwen3-MoE", _qwen, 16, 4))


class Run(NamedTuple):
    """A model in training with AdamW."""

    model: Any
    optimizer: torch.optim.AdamW
    seed: int


def start(kind: Kind, seed: int) -> Run:
    """Make a model and its optimizer."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = kind.make()
    return Run(model, torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95)), seed)


def step(run: Run, number: int) -> float:
    """Learn from the batch of this step, and give its loss."""
    tokens = batch_of(read_text(), run.seed, number)
    logits = run.model(input_ids=tokens[:, :-1]).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    return float(loss.detach())


def save(run: Run, path: Path) -> Path:
    """Save as trainers do."""
    weights = {name: w.detach() for name, w in run.model.named_parameters()}
    torch.save({"model": weights, "optimizer": run.optimizer.state_dict()}, path)
    return path


def load(run: Run, path: Path) -> None:
    """Go back to what was saved."""
    saved = torch.load(path)
    with torch.no_grad():
        for name, w in run.model.named_parameters():
            w.copy_(saved["model"][name])
    run.optimizer.load_state_dict(saved["optimizer"])
