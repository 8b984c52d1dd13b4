"""Which tensors of a checkpoint follow from its base by one optimizer step.

The optimizer's numbers are read from either checkpoint (the learning rate saved is often already
the next step's), tried on a sample of each tensor, and kept where most elements come out bit-equal.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckz import codecs
from ckz.checkpoint import Checkpoint, Tensor
from ckz.codecs.adam import ORDERS, AdamVariance, AdamWeight, adam_step
from ckz.container import Ref
from ckz.matching import Lean
from ckz.roles import match_states
from ckz.runs import whole_span
from ckz.streams import SMALL

Floats = npt.NDArray[np.float32]
ReadRef = Callable[[Ref], npt.NDArray[np.uint8]]

_SAMPLE = 4096
# Where fewer elements of a sample come out exactly, it is no step of this optimizer. Whether a
# replay pays is decided by its cost.
_MIN_EXACT = 0.05
_MAX_CANDIDATES = 256
# Parameters of one size that are tried for moments which may belong to any of them.
_MAX_WEIGHTS = 64

_MOMENT = re.compile(r"exp_avg(_sq)?|(first|second)_moment|(?<![a-z])[mv](?![a-z])")


class Replay(NamedTuple):
    """A codec that makes a span's step again, and what it needs: each as long as the span."""

    codec: str
    inputs: tuple[Ref, Ref, Ref]


class _Moments(NamedTuple):
    """Spans of two moments, and of the parameters that they may belong to."""

    first: int
    second: int
    weights: tuple[int, ...]


def find_replays(
    checkpoint: Checkpoint,
    leans: Mapping[int, Lean],
    numbers: tuple[Mapping[str, float], Mapping[str, float]],
    read: ReadRef,
) -> dict[int, Replay]:
    """Find weights and second moments that one step of Adam or AdamW explains.

    Parameters
    ----------
    leans : span -> what it continues in the base.
    numbers : of the base and of the checkpoint: path -> optimizer hyperparameter.
    read : reads a range of this checkpoint (``where`` 0) or of the base (``where`` 1).

    Returns
    -------
    span -> replay.
    """
    steps = list(itertools.islice(_steps(checkpoint, numbers, read), _MAX_CANDIDATES))
    betas = sorted({(step["beta1"], step["beta2"]) for step in steps})
    nfiles = len(checkpoint.files)
    found: dict[int, Replay] = {}
    for first, second, weights in _moments(checkpoint):
        weights = tuple(w for w in weights if w not in found and _leans(checkpoint, leans, w))
        if not (_leans(checkpoint, leans, first) and _leans(checkpoint, leans, second)):
            continue
        nbytes = checkpoint.spans[first].nbytes
        now_first, now_second = (Ref(nfiles + span, 0, nbytes) for span in (first, second))
        inputs = leans[second].refs[0], leans[first].refs[0], now_first
        if codec := _best_variance(betas, inputs, now_second, read):
            found[second] = Replay(codecs.spec(codec), inputs)
        for weight in weights[:_MAX_WEIGHTS]:
            inputs = leans[weight].refs[0], now_first, now_second
            if step := _best_weight(steps, inputs, Ref(nfiles + weight, 0, nbytes), read):
                found[weight] = Replay(codecs.spec(step), inputs)
                break
    return found


def _leans(checkpoint: Checkpoint, leans: Mapping[int, Lean], span: int) -> bool:
    lean = leans.get(span)
    return (
        lean is not None
        and lean.dtype == "float32"
        and len(lean.refs) == 1
        and lean.refs[0].nbytes == checkpoint.spans[span].nbytes
    )


def _moments(checkpoint: Checkpoint) -> Iterator[_Moments]:
    """Pair moments with the float32 parameters, or masters of 16-bit ones, that they are of.

    Where neither name nor order tells (a safetensors file lists parameters by name, the optimizer
    beside it by number), all parameters of the size without moments of their own may be meant.
    """
    spans: dict[str, int] = {}
    by_name: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors:
        span = whole_span(checkpoint, tensor)
        if span is not None and tensor.dtype == "float32" and tensor.nbytes >= SMALL:
            spans.setdefault(tensor.name, span)
            by_name[tensor.name] = tensor
    weight_of = match_states(checkpoint.tensors)
    master_of = {w: name for name, w in weight_of.items() if _role_of(by_name, name) == "master"}
    first_of = {stem(t.name): t for t in by_name.values() if t.role == "momentum"}
    taken = set(weight_of.values()) | set(master_of.values())
    free: dict[tuple[int, ...], list[int]] = {}
    for tensor in by_name.values():
        if tensor.role in ("weight", "master") and tensor.name not in taken:
            free.setdefault(tensor.shape, []).append(spans[tensor.name])
    for second in by_name.values():
        first = first_of.get(stem(second.name)) if second.role == "variance" else None
        if first is None or first.shape != second.shape:
            continue
        weight = weight_of.get(second.name, "")
        weight = master_of.get(weight, weight)
        weights = (spans[weight],) if weight in spans else tuple(free.get(second.shape, ()))
        yield _Moments(spans[first.name], spans[second.name], weights)


def _role_of(by_name: Mapping[str, Tensor], name: str) -> str:
    return by_name[name].role if name in by_name else ""


def stem(name: str) -> str:
    """Name a parameter's state without which moment it is."""
    return _MOMENT.sub("*", name)


def _steps(
    checkpoint: Checkpoint,
    numbers: tuple[Mapping[str, float], Mapping[str, float]],
    read: ReadRef,
) -> Iterator[dict[str, float]]:
    """Give the steps that may have been made: all combinations of the numbers that were found."""

    def of(*keys: str) -> list[float]:
        values = [v for side in numbers for path, v in side.items() if path.endswith(keys)]
        return list(dict.fromkeys(values))

    counts = {int(n) for n in of("step", "iteration") if 1 <= n < 1 << 40 and n == int(n)}
    counts |= _step_tensors(checkpoint, read)
    # Adam's weight decay goes into the gradient, AdamW's into the weight.
    decays = list(dict.fromkeys([*of(".weight_decay"), 0.0]))
    pairs = list(zip(of("betas.0", "beta1"), of("betas.1", "beta2"), strict=False))
    for count, lr, eps, decay, (beta1, beta2) in itertools.product(
        sorted(counts), of(".lr"), of(".eps"), decays, pairs
    ):
        if 0 <= beta1 < 1 and 0 <= beta2 < 1:
            yield {
                "lr": lr,
                "eps": eps,
                "decay": decay,
                "beta1": beta1,
                "beta2": beta2,
                "step": count,
            }


def _step_tensors(checkpoint: Checkpoint, read: ReadRef) -> set[int]:
    """Read the step that torch keeps beside each parameter's moments; they are most often equal."""
    found: set[int] = set()
    nfiles = len(checkpoint.files)
    for tensor in checkpoint.tensors:
        scalar = tensor.dtype == "float32" and not tensor.shape and tensor.pieces
        if scalar and tensor.name.endswith(".step"):
            piece = tensor.pieces[0]
            value = float(read(Ref(nfiles + piece.span, piece.offset, 4)).view("<f4")[0])
            if math.isfinite(value) and 1 <= value < 1 << 24:
                found.add(int(value))
            if len(found) > 8:
                break
    return found


def _sample(refs: tuple[Ref, ...], read: ReadRef) -> list[Floats]:
    """Read the same elements of ranges of one length, from their middle."""
    nbytes = refs[0].nbytes
    size = min(nbytes, 4 * _SAMPLE)
    start = (nbytes - size) // 8 * 4
    return [read(Ref(r.span, r.start + start, size, r.where)).view("<f4") for r in refs]


def _exact(predicted: Floats, actual: Floats) -> float:
    return float(np.mean(predicted.view(np.uint32) == actual.view(np.uint32)))


def _best_variance(
    betas: list[tuple[float, float]], inputs: tuple[Ref, Ref, Ref], now: Ref, read: ReadRef
) -> AdamVariance | None:
    *values, actual = _sample((*inputs, now), read)
    tried = [(_exact(AdamVariance(*pair).predict(*values), actual), pair) for pair in betas]
    exact, pair = max(tried, default=(0.0, (0.0, 0.0)))
    return AdamVariance(*pair) if exact >= _MIN_EXACT else None


def _best_weight(
    steps: list[dict[str, float]], inputs: tuple[Ref, Ref, Ref], now: Ref, read: ReadRef
) -> AdamWeight | None:
    """Give the first step that explains nearly all, or else the best one that explains much."""
    *values, actual = _sample((*inputs, now), read)
    best: tuple[float, int, AdamWeight | None] = (_MIN_EXACT, 0, None)
    for (place, step), order in itertools.product(enumerate(steps), ORDERS):
        codec = adam_step(**step, order=order)  # type: ignore[arg-type]
        exact = _exact(codec.predict(*values), actual)
        if exact > best[0]:
            best = exact, place, codec
        if exact == 1:
            break
    # The next tensor is most likely of the same group.
    steps[: best[1] + 1] = [*steps[best[1] : best[1] + 1], *steps[: best[1]]]
    return best[2]
