"""Flat storages, cut where the tensors in them begin and end.

Training frameworks lay many parameters end to end in one storage. As one span they would be coded
as one run of numbers; a span of its own lets each be coded as the matrix that it is, and be found
again in another precision.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckz.checkpoint import ITEMSIZE, Piece, Span, Sum, contiguous_strides
from ckz.formats.layout import Layout

# Bytes; what is smaller is coded together with other such spans, so it is not worth one.
ALONE = 4096


class Box(NamedTuple):
    """A part of a tensor: its position, and its extents."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class Cut(NamedTuple):
    """A layout whose spans were cut.

    Attributes
    ----------
    layout : with the new spans; its tensors have as many pieces more as were needed.
    first : the number of each old span's first part.
    starts : where the parts of an old span begin, in bytes from its start.
    """

    layout: Layout
    first: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Give the boxes that elements ``begin`` to ``end`` of a row-major tensor consist of.

    They come in the tensor's order, each a run of it, at most twice as many as it has dimensions.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, lead), (last, tail) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        yield from _in_row(first, shape, lead, tail)
        return
    if lead:
        yield from _in_row(first, shape, lead, inner)
        first += 1
    if first < last:
        yield Box((first, *[0] * len(shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(last, shape, 0, tail)


def _in_row(row: int, shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    for start, extents in boxes(shape[1:], begin, end):
        yield Box((row, *start), (1, *extents))


def edges_of_tensors(layout: Layout) -> dict[int, set[int]]:
    """Give where the larger tensors of each span begin and end, in bytes from its start."""
    edges: dict[int, set[int]] = {}
    for tensor in layout.tensors:
        for piece in tensor.pieces:
            nbytes = math.prod(piece.shape) * ITEMSIZE[tensor.dtype]
            if nbytes >= ALONE:
                edges.setdefault(piece.span, set()).update((piece.offset, piece.offset + nbytes))
    return edges


def cut(layout: Layout, edges: Mapping[int, Iterable[int]]) -> Cut:
    """Cut spans at byte offsets.

    Spans stay whole whose tensors are strided or differ in dtype, and packed ones. The checksum
    that the file has for a span says nothing of its parts; it is kept for all of them together.

    Parameters
    ----------
    layout : of one file.
    edges : span -> offsets; those outside of the span do not matter.
    """
    uncut = {
        piece.span
        for tensor in layout.tensors
        for piece in tensor.pieces
        if piece.strides != contiguous_strides(piece.shape) or piece.offset % ITEMSIZE[tensor.dtype]
    }
    spans: list[Span] = []
    first: list[int] = []
    starts: list[tuple[int, ...]] = []
    sums = list(layout.sums)
    for number, span in enumerate(layout.spans):
        inside = {0}
        if number not in uncut and span.dtype != "bytes":
            itemsize = ITEMSIZE[span.dtype]
            inside.update(
                edge
                for edge in edges.get(number, ())
                if 0 < edge < span.nbytes and edge % itemsize == 0
            )
        first.append(len(spans))
        starts.append(tuple(sorted(inside)))
        ends = (*starts[-1][1:], span.nbytes)
        if len(ends) == 1:
            spans.append(span)
            continue
        if span.crc32 >= 0 and not span.packed:
            sums.append(Sum(0, span.offset, span.nbytes, span.crc32))
        for begin, end in zip(starts[-1], ends, strict=True):
            part = span._replace(offset=span.offset + begin, nbytes=end - begin, crc32=-1)
            spans.append(part)
    done = Cut(layout, tuple(first), tuple(starts))
    tensors = tuple(
        tensor._replace(
            pieces=tuple(
                new
                for piece in tensor.pieces
                for new in _moved(done, piece, ITEMSIZE[tensor.dtype])
            )
        )
        for tensor in layout.tensors
    )
    cut_layout = layout._replace(spans=tuple(spans), tensors=tensors, sums=tuple(sums))
    return done._replace(layout=cut_layout)


def _moved(done: Cut, piece: Piece, itemsize: int) -> Iterator[Piece]:
    """Give what became of a piece."""
    if len(done.starts[piece.span]) == 1:
        yield piece._replace(span=done.first[piece.span])
        return
    whole = math.prod(piece.shape)
    for part in pieces_of_run(done, piece.span, piece.offset, itemsize, piece.shape, 0, whole):
        start = tuple(a + b for a, b in zip(piece.start, part.start, strict=True))
        yield part._replace(start=start)


def pieces_of_run(
    done: Cut,
    span: int,
    offset: int,
    itemsize: int,
    shape: tuple[int, ...],
    begin: int,
    end: int,
) -> Iterator[Piece]:
    """Give the pieces of a run of a row-major tensor that lies from a byte of an old span on.

    Parameters
    ----------
    shape : of the tensor.
    begin, end : the run, in elements.
    """
    starts = done.starts[span]
    number = bisect.bisect_right(starts, offset) - 1
    while begin < end:
        stop = end
        if number + 1 < len(starts):
            stop = min(end, begin + (starts[number + 1] - offset) // itemsize)
        for start, extents in boxes(shape, begin, stop):
            at = offset - starts[number]
            strides = contiguous_strides(extents)
            yield Piece(done.first[span] + number, at, extents, strides, start)
            offset += math.prod(extents) * itemsize
        begin = stop
        number += 1
