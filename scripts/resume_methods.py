"""What becomes of a checkpoint before training resumes: presets, methods, and rivals.

ckz's own are whole commands: the checkpoint is compressed and decompressed. The published methods
that ckz has no command for, because they break its rules, are here: eight-bit block-wise states
(Dettmers et al., ICLR 2022, "8-bit Optimizers via Block-wise Quantization") and ExCP's pruning and
quantization (Li et al., ICML 2024, as its released code does it). Their sizes are those of their
codes under the same entropy coder, and of all else as ckz stores it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckz import pipeline
from ckz.codecs.indices import encode_indices
from ckz.kernels.folding import fold
from ckz.lossy import methods_of

State = dict[str, Any]
_BLOCK = 256


class Saved(NamedTuple):
    """A checkpoint that training may resume from, and the bytes it took."""

    state: State
    nbytes: int


class Row(NamedTuple):
    """A way of saving a checkpoint.

    Attributes
    ----------
    base : how many steps back its base lies; None: it has none.
    published : whether it is somebody's published method, in whole or in part.
    """

    name: str
    save: Callable[[Path, Path | None, Path], Saved]
    base: int | None = None
    published: bool = False


def by_ckz(**options: str) -> Callable[[Path, Path | None, Path], Saved]:
    """Compress with these options, decompress, and load."""
    codecs = {"weight": options.pop("codec")} if "codec" in options else None
    methods = methods_of(**options)

    def save(source: Path, base: Path | None, scratch: Path) -> Saved:
        packed, restored = scratch / "packed.ckz", scratch / "restored.pt"
        report = pipeline.compress(
            source, packed, base=base, methods=methods, codecs=codecs, anchor=1000, force=True
        )
        pipeline.decompress(packed, restored, base=base, force=True)
        return Saved(torch.load(restored), report.stored_nbytes)

    return save


def _dynamic_map(signed: bool) -> np.ndarray:
    """Give the values of dynamic tree quantization with seven exponents."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*means, *(-means if signed else [])]
    return np.sort(np.array(values, np.float32))


def block_wise(source: Path, base: Path | None, scratch: Path) -> Saved:
    """Give every moment eight bits, in blocks of 256 with a scale each; the rest stays exact."""
    state, nbytes = _without_moments(source, base, scratch)
    for moment, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        table = _dynamic_map(signed)
        middles = (table[1:] + table[:-1]) / 2
        for holder, key in _moments(state, moment):
            x = holder[key].numpy().reshape(-1)
            padded = np.zeros(-(-x.size // _BLOCK) * _BLOCK, np.float32)
            padded[: x.size] = x
            blocks = padded.reshape(-1, _BLOCK)
            scale = np.abs(blocks).max(axis=1, keepdims=True)
            codes = np.searchsorted(middles, blocks / np.where(scale > 0, scale, 1))
            near = (table[codes] * scale).reshape(-1)[: x.size]
            holder[key] = torch.from_numpy(near).view_as(holder[key])
            zero = int(np.searchsorted(table, 0))
            nbytes += len(encode_indices((codes - zero).reshape(-1).astype(np.int32)))
            nbytes += scale.nbytes
    return Saved(state, nbytes)


def excp(source: Path, base: Path | None, scratch: Path) -> Saved:
    """Prune the change of the weights and both moments, and quantize what is left to four bits."""
    assert base is not None
    state = torch.load(source)
    before = torch.load(_restored(base, scratch))
    nbytes = 0
    parameters = _parameters(state)
    for name, (holder, key) in parameters.items():
        now, was = holder[key], _parameters(before)[name][0][key]
        if now.ndim < 2:
            nbytes += 3 * now.nbytes
            continue
        (m_in, m_key), (v_in, v_key) = (
            _moment_of(state, name, moment) for moment in ("exp_avg", "exp_avg_sq")
        )
        m, v = m_in[m_key], v_in[v_key]
        change = now - was
        limit = change.abs().median() * min(2.5, 5e-5 / v.mean().sqrt().item())
        kept = change.abs() > limit
        moments = kept & (m.abs() > 2 * m.abs().mean())
        for target, field, values, mask in (
            (holder, key, change, kept),
            (m_in, m_key, m, moments),
            (v_in, v_key, v, moments),
        ):
            near, codes = _four_bits(values, mask)
            nbytes += len(encode_indices(codes)) + 64
            target[field] = was + near if field is key and target is holder else near
        if "model" in state and state["model"].get(name) is not now:
            state["model"][name] = holder[key].to(state["model"][name].dtype)
    return Saved(state, nbytes)


def _four_bits(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
    """Give fifteen means to what a mask keeps, by Lloyd's rule, and zero to the rest."""
    kept = values[mask].double().numpy()
    codes = np.zeros(values.numel(), np.int32)
    near = torch.zeros_like(values)
    if not kept.size:
        return near, codes
    means = np.quantile(kept, (np.arange(15) + 0.5) / 15)
    for _ in range(20):
        label = np.searchsorted((means[1:] + means[:-1]) / 2, kept)
        sums, counts = np.bincount(label, kept, 15), np.bincount(label, minlength=15)
        means = np.sort(np.where(counts > 0, sums / np.maximum(counts, 1), means))
    label = np.searchsorted((means[1:] + means[:-1]) / 2, kept)
    near[mask] = torch.from_numpy(means[label]).to(values.dtype)
    codes[mask.numpy().reshape(-1)] = label + 1
    return near, fold(codes)


def zeroed(source: Path, base: Path | None, scratch: Path) -> Saved:
    """Drop the moments, keep the rest exactly."""
    state, nbytes = _without_moments(source, base, scratch)
    for moment in ("exp_avg", "exp_avg_sq"):
        for holder, key in _moments(state, moment):
            holder[key] = torch.zeros_like(holder[key])
    return Saved(state, nbytes)


def _without_moments(source: Path, base: Path | None, scratch: Path) -> tuple[State, int]:
    """Give the state, and what ckz takes for all but the large moments."""
    report = pipeline.compress(source, scratch / "exact.ckz", base=base, anchor=1000, force=True)
    moments = sum(report.roles.get(role, (0, 0))[1] for role in ("momentum", "variance"))
    return torch.load(source), report.stored_nbytes - moments


def _restored(base: Path, scratch: Path) -> Path:
    restored = scratch / "base.pt"
    pipeline.decompress(base, restored, force=True)
    return restored


def _parameters(state: State) -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    """Give where each float32 parameter stands: a master, or the weight itself."""
    optimizer = state["optimizer"]
    holder = optimizer.get("fp32_master", state["model"])
    return {name: (holder, name) for name in holder}


def _moment_of(state: State, name: str, moment: str) -> tuple[dict[Any, Any], Any]:
    optimizer = state["optimizer"]
    if moment in optimizer:
        return optimizer[moment], name
    number = list(state["model"]).index(name)
    return optimizer["state"][number], moment


def _moments(state: State, moment: str) -> list[tuple[dict[Any, Any], Any]]:
    """Give where each large moment stands."""
    places = [_moment_of(state, name, moment) for name in _parameters(state)]
    return [(holder, key) for holder, key in places if holder[key].ndim > 1]
