"""Tensors as runs of bytes: where a row-major tensor lies in spans, however it was cut."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ckz.checkpoint import ITEMSIZE, Checkpoint, Piece, Tensor, contiguous_strides


class Run(NamedTuple):
    """Bytes of a span that hold consecutive elements of a tensor."""

    span: int
    offset: int
    nbytes: int


def whole_span(checkpoint: Checkpoint, tensor: Tensor) -> int | None:
    """Give the span that a row-major tensor fills alone."""
    if len(tensor.pieces) != 1 or tensor.transform:
        return None
    piece = tensor.pieces[0]
    span = checkpoint.spans[piece.span]
    fills = span.nbytes == tensor.nbytes and span.dtype == tensor.dtype
    plain = span.byteorder == "<" and piece.strides == contiguous_strides(tensor.shape)
    return piece.span if fills and plain else None


def runs_of(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[Run]:
    """Give a tensor in row-major order as runs of bytes, if it lies in such.

    A tensor that was cut anywhere in its flat order (ZeRO) lies in boxes that are runs; whatever
    else there is gives fewer bytes than the tensor has, and nobody's cast.
    """
    itemsize = ITEMSIZE[tensor.dtype]
    strides = contiguous_strides(tensor.shape)
    expected = 0
    pending: Run | None = None
    for piece in sorted(tensor.pieces, key=lambda piece: piece.start):
        span = checkpoint.spans[piece.span]
        begin = sum(a * b for a, b in zip(piece.start, strides, strict=True))
        size = math.prod(piece.shape)
        if not _is_run(piece, tensor.shape) or begin != expected or span.dtype != tensor.dtype:
            return
        if span.byteorder != "<" or span.packed or tensor.transform:
            return
        run = Run(piece.span, piece.offset, size * itemsize)
        if pending and pending.span == run.span and pending.offset + pending.nbytes == run.offset:
            pending = pending._replace(nbytes=pending.nbytes + run.nbytes)
        else:
            if pending:
                yield pending
            pending = run
        expected += size
    if pending:
        yield pending


def _is_run(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Tell whether a box is contiguous both in its span and in the tensor's row-major order."""
    if piece.strides != contiguous_strides(piece.shape):
        return False
    inner = True
    for have, full in zip(reversed(piece.shape), reversed(shape), strict=True):
        if not inner and have != 1:
            return False
        inner = inner and have == full
    return True
