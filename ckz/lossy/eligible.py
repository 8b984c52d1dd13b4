"""Which spans may be approximated, and as what matrix they are seen."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from ckz.checkpoint import ITEMSIZE, Checkpoint, Piece, Tensor
from ckz.codecs.floats import WIDTHS
from ckz.plan import MAX_COLUMNS, sides_of
from ckz.roles import match_states
from ckz.streams import SMALL

_STATES = ("momentum", "variance")
_LOSSY = ("weight", "master", "momentum", "variance")
# Vectors are biases and norms, and there are few; a longer one is a flattened partition.
_MAX_VECTOR = 1 << 16
# What is no matrix, such as a flattened partition, is seen as one of so many columns.
_FLAT = 256
_MIN_COLUMNS = 8


class Eligible(NamedTuple):
    """A span that may be approximated.

    Attributes
    ----------
    name : of its first tensor.
    rows, columns : of the matrix it is seen as; the last row may be shorter.
    """

    span: int
    name: str
    role: str
    dtype: str
    nbytes: int
    rows: int
    columns: int


def find_eligible(checkpoint: Checkpoint, *, dropped: bool = False) -> dict[int, Eligible]:
    """Find the spans of large matrices of floats that all views agree about.

    A span that any view sees as another type or role, or that is not seen completely, stays exact.

    Parameters
    ----------
    dropped : optimizer states of any size count, for they are not needed.
    """
    exact = _kept(checkpoint)
    views: dict[int, list[tuple[Tensor, Piece]]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            views[piece.span].append((tensor, piece))
    found = {}
    for number, seen in views.items():
        span = checkpoint.spans[number]
        first = seen[0][0]
        if (
            span.packed
            or span.byteorder != "<"
            or span.dtype not in (WIDTHS if not dropped else (*WIDTHS, "float64"))
            or first.role not in _LOSSY
            or any(tensor.name in exact for tensor, _ in seen)
            or {(t.dtype, t.role, t.transform) for t, _ in seen} != {(span.dtype, first.role, "")}
        ):
            continue
        covering = [(t, p) for t, p in seen if _covers(p, span.nbytes, span.dtype)]
        if not covering:
            continue
        # Parameters in a flattened partition are seen as vectors, and as what they are.
        whole = max(covering, key=lambda view: len(view[0].shape))
        vector = len(whole[0].shape) < 2 and span.nbytes < 4 * _MAX_VECTOR
        drops = dropped and first.role in _STATES
        if (vector or span.nbytes < SMALL or span.dtype not in WIDTHS) and not drops:
            continue
        n = span.nbytes // ITEMSIZE[span.dtype]
        sides = sides_of(_in_memory(whole[1])) if len(whole[0].shape) > 1 else (1, n)
        if not _MIN_COLUMNS <= sides[1] <= MAX_COLUMNS:
            sides = -(-n // _FLAT), _FLAT
        found[number] = Eligible(number, first.name, first.role, span.dtype, span.nbytes, *sides)
    return found


def _kept(checkpoint: Checkpoint) -> set[str]:
    """Name the optimizer states of tensors that are kept exactly, such as routers."""
    roles = {tensor.name: tensor.role for tensor in checkpoint.tensors}
    weight_of = match_states(checkpoint.tensors)
    return {state for state, weight in weight_of.items() if roles[weight] == "other"}


def _covers(piece: Piece, nbytes: int, dtype: str) -> bool:
    """Tell whether a view shows every element of its span once, in any order of its sides."""
    if piece.offset or math.prod(piece.shape) * ITEMSIZE[dtype] != nbytes:
        return False
    expected = 1
    for stride, size in sorted(zip(piece.strides, piece.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _in_memory(piece: Piece) -> tuple[int, ...]:
    """Give the sides of a box as they lie in memory."""
    ordered = sorted(zip(piece.strides, piece.shape, strict=True), reverse=True)
    return tuple(size for _, size in ordered)
