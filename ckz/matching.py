"""Which tensor of a base each tensor of a checkpoint continues.

By name first, then by order among tensors of one dtype, shape and role (renamed, re-sharded). What
is wrong about a pair costs bytes, never correctness: the encoder measures on samples whether a
difference pays.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from ckz.checkpoint import Checkpoint, Tensor
from ckz.container import Ref
from ckz.runs import runs_of, whole_span
from ckz.streams import SMALL


class Lean(NamedTuple):
    """Ranges of bytes that a span derives from, and their dtype."""

    dtype: str
    refs: tuple[Ref, ...]


def match_base(checkpoint: Checkpoint, base: Checkpoint) -> dict[int, Lean]:
    """Pair spans with the ranges of base spans that they continue.

    Returns
    -------
    span -> what it continues, with ``where`` 1 and ``span`` an index into the base's spans. It is
    as long as the span, unless the tensor grew or shrank by rows, or had another dtype.
    """
    found: dict[int, Lean] = {}
    theirs = {_plain(t.name): t for t in base.tensors if t.pieces and not t.transform}
    taken: set[str] = set()
    left: list[tuple[int, Tensor]] = []
    for span, tensor in _whole_tensors(checkpoint):
        other = theirs.get(_plain(tensor.name))
        if other is not None and (refs := _continued(base, tensor, other)):
            found[span] = Lean(other.dtype, refs)
            taken.add(_plain(tensor.name))
        else:
            left.append((span, tensor))
    kinds: dict[tuple[str, tuple[int, ...], str], deque[Tensor]] = defaultdict(deque)
    for name, tensor in theirs.items():
        if name not in taken:
            kinds[tensor.dtype, tensor.shape, tensor.role].append(tensor)
    for span, tensor in left:
        kind = kinds[tensor.dtype, tensor.shape, tensor.role]
        other = kind.popleft() if kind else None
        if other is not None and (refs := _continued(base, tensor, other)):
            found[span] = Lean(other.dtype, refs)
    return found


def _plain(name: str) -> str:
    """Name a tensor without the file of a directory that it lies in."""
    return name.rpartition(":")[2]


def _whole_tensors(checkpoint: Checkpoint) -> Iterator[tuple[int, Tensor]]:
    """Give tensors that fill a span alone and have a stream of their own."""
    seen: set[int] = set()
    for tensor in checkpoint.tensors:
        span = whole_span(checkpoint, tensor)
        if span is not None and span not in seen and tensor.nbytes >= SMALL:
            seen.add(span)
            yield span, tensor


def _continued(base: Checkpoint, tensor: Tensor, other: Tensor) -> tuple[Ref, ...]:
    """Give the base tensor's ranges, row-major, if the two differ in their first side at most."""
    if other.shape[1:] != tensor.shape[1:] or len(other.shape) != len(tensor.shape):
        return ()
    refs = tuple(Ref(*run, where=1) for run in runs_of(base, other))
    return refs if sum(ref.nbytes for ref in refs) == other.nbytes else ()
