"""Models that ``resume_eval.py`` trains: a GPT, a mixture of experts, and MiniLM's encoder.

They learn to continue the sources of Python's standard library, cut into words. Models are
functions of a dictionary of weights, so that a checkpoint is that dictionary; the encoder is that
of transformers. Each gives a loss for every predicted token.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional

VOCABULARY = 4096
LENGTH, BATCH = 64, 16
_TEXT = Path("build/resume/text.pt")
_BYTES = 12_000_000

Weights = dict[str, torch.Tensor]
# Weights and tokens (batch, length + 1) -> loss of each predicted token (batch, length).
Losses = Callable[[Weights, torch.Tensor], torch.Tensor]


class Model(NamedTuple):
    """A model, and how its weights begin."""

    name: str
    begin: Callable[[torch.Generator], Weights]
    losses: Losses


def read_text() -> torch.Tensor:
    """Give the text as numbers of words; the commonest have the smallest, 0 is for the rare."""
    if _TEXT.exists():
        found: torch.Tensor = torch.load(_TEXT)
        return found
    words: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or size > _BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        words += re.findall(r"[A-Za-z]+|[0-9]+|\s+|[^\w\s]|_", text)
    common = Counter(words).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    found = torch.tensor([numbers.get(word, 0) for word in words], dtype=torch.int32)
    _TEXT.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, _TEXT)
    return found


def batch_of(text: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Give the tokens of a step, the same for every run of a seed."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def _normal(generator: torch.Generator, *shape: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * scale


def _attention(weights: Weights, x: torch.Tensor, name: str, heads: int) -> torch.Tensor:
    query, key, value = (
        part.unflatten(2, (heads, -1)).transpose(1, 2)
        for part in functional.linear(
            x, weights[f"{name}.query_key_value.weight"], weights[f"{name}.query_key_value.bias"]
        ).chunk(3, dim=2)
    )
    seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return functional.linear(
        seen.transpose(1, 2).flatten(2),
        weights[f"{name}.dense.weight"],
        weights[f"{name}.dense.bias"],
    )


def _norm(weights: Weights, x: torch.Tensor, name: str) -> torch.Tensor:
    return functional.layer_norm(
        x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"]
    )


def _embedded(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    x = functional.embedding(tokens, weights["word_embeddings.weight"])
    return x + weights["position_embeddings.weight"][: tokens.shape[1]]


def _predicted(weights: Weights, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = _norm(weights, x, "final_layernorm") @ weights["word_embeddings.weight"].T
    return functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def _begin_block(generator: torch.Generator, name: str, width: int, layers: int) -> Weights:
    narrow = 0.02 / (2 * layers) ** 0.5
    return {
        f"{name}.input_layernorm.weight": torch.ones(width),
        f"{name}.input_layernorm.bias": torch.zeros(width),
        f"{name}.attention.query_key_value.weight": _normal(generator, 3 * width, width),
        f"{name}.attention.query_key_value.bias": torch.zeros(3 * width),
        f"{name}.attention.dense.weight": _normal(generator, width, width, scale=narrow),
        f"{name}.attention.dense.bias": torch.zeros(width),
        f"{name}.post_attention_layernorm.weight": torch.ones(width),
        f"{name}.post_attention_layernorm.bias": torch.zeros(width),
    }


def _begin_ends(generator: torch.Generator, width: int) -> Weights:
    return {
        "word_embeddings.weight": _normal(generator, VOCABULARY, width),
        "position_embeddings.weight": _normal(generator, LENGTH, width),
        "final_layernorm.weight": torch.ones(width),
        "final_layernorm.bias": torch.zeros(width),
    }


# -- a GPT: 5.8 million parameters ----------------------------------------------------------------

_GPT_WIDTH, _GPT_LAYERS, _GPT_HEADS = 256, 6, 8


def _begin_gpt(generator: torch.Generator) -> Weights:
    width, layers = _GPT_WIDTH, _GPT_LAYERS
    weights = _begin_ends(generator, width)
    for layer in range(layers):
        name = f"layers.{layer}"
        weights |= _begin_block(generator, name, width, layers)
        weights |= {
            f"{name}.mlp.dense_h_to_4h.weight": _normal(generator, 4 * width, width),
            f"{name}.mlp.dense_h_to_4h.bias": torch.zeros(4 * width),
            f"{name}.mlp.dense_4h_to_h.weight": _normal(
                generator, width, 4 * width, scale=0.02 / (2 * layers) ** 0.5
            ),
            f"{name}.mlp.dense_4h_to_h.bias": torch.zeros(width),
        }
    return weights


def _gpt_losses(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    x = _embedded(weights, tokens[:, :-1])
    for layer in range(_GPT_LAYERS):
        name = f"layers.{layer}"
        seen = _norm(weights, x, f"{name}.input_layernorm")
        x = x + _attention(weights, seen, f"{name}.attention", _GPT_HEADS)
        inner = functional.linear(
            _norm(weights, x, f"{name}.post_attention_layernorm"),
            weights[f"{name}.mlp.dense_h_to_4h.weight"],
            weights[f"{name}.mlp.dense_h_to_4h.bias"],
        )
        x = x + functional.linear(
            functional.gelu(inner),
            weights[f"{name}.mlp.dense_4h_to_h.weight"],
            weights[f"{name}.mlp.dense_4h_to_h.bias"],
        )
    return _predicted(weights, x, tokens)


# -- a mixture of experts: 6.1 million parameters, two of eight experts for each token -------------

_MOE_WIDTH, _MOE_LAYERS, _MOE_HEADS = 192, 4, 6
EXPERTS, _TOP, _MOE_INNER = 8, 2, 256


def _begin_moe(generator: torch.Generator) -> Weights:
    width = _MOE_WIDTH
    weights = _begin_ends(generator, width)
    for layer in range(_MOE_LAYERS):
        name = f"layers.{layer}"
        weights |= _begin_block(generator, name, width, _MOE_LAYERS)
        weights[f"{name}.block_sparse_moe.gate.weight"] = _normal(generator, EXPERTS, width)
        for expert in range(EXPERTS):
            inside = f"{name}.block_sparse_moe.experts.{expert}"
            weights |= {
                f"{inside}.w1.weight": _normal(generator, _MOE_INNER, width),
                f"{inside}.w2.weight": _normal(generator, width, _MOE_INNER, scale=0.007),
                f"{inside}.w3.weight": _normal(generator, _MOE_INNER, width),
            }
    return weights


def _moe_losses(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    x = _embedded(weights, tokens[:, :-1])
    for layer in range(_MOE_LAYERS):
        name = f"layers.{layer}"
        seen = _norm(weights, x, f"{name}.input_layernorm")
        x = x + _attention(weights, seen, f"{name}.attention", _MOE_HEADS)
        seen = _norm(weights, x, f"{name}.post_attention_layernorm")
        x = x + _experts(weights, seen.flatten(0, 1), f"{name}.block_sparse_moe").view_as(x)
    return _predicted(weights, x, tokens)


def _experts(weights: Weights, x: torch.Tensor, name: str) -> torch.Tensor:
    """Send each token to the experts that its router prefers."""
    chosen, numbers = torch.topk((x @ weights[f"{name}.gate.weight"].T).softmax(-1), _TOP)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, place = torch.where(numbers == expert)
        w1, w2, w3 = (weights[f"{name}.experts.{expert}.w{k}.weight"] for k in (1, 2, 3))
        inner = functional.silu(x[token] @ w1.T) * (x[token] @ w3.T)
        out = out.index_add(0, token, (inner @ w2.T) * chosen[token, place, None])
    return out


GPT = Model("GPT, 5.8 M", _begin_gpt, _gpt_losses)
MOE = Model("mixture of experts, 6.1 M", _begin_moe, _moe_losses)
