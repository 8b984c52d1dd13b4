"""Spans laid end to end in the order they are coded: what lies between a file and its chunks.

A *stream* is one large span, or many small ones of one kind, or a file's skeleton. It is cut into
chunks of ``CHUNK`` bytes on a grid from its start, so chunks hold whole elements. An *extent* is
where a piece of a stream lies: (file, offset, bytes).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ckz.checkpoint import Checkpoint, Span

CHUNK = 1 << 20
SMALL = 4096

SKELETON = "bytes"


class Extent(NamedTuple):
    """A run of bytes of one file."""

    file: int
    offset: int
    nbytes: int


class Part(NamedTuple):
    """A span's place in a stream, or a skeleton's.

    Attributes
    ----------
    span : index into the parts of the plan; the first ones are the files' skeletons.
    extents : where its bytes lie, in order.
    nbytes : their sum.
    """

    span: int
    extents: tuple[Extent, ...]
    nbytes: int


class Stream(NamedTuple):
    """What is coded together.

    Attributes
    ----------
    parts : laid end to end.
    nbytes : their sum.
    dtype, byteorder : of every element.
    role : of every tensor in it, a key of ``ROLES``.
    """

    parts: tuple[Part, ...]
    nbytes: int
    dtype: str
    byteorder: str
    role: str

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.nbytes // CHUNK)


def skeleton_extents(file: int, size: int, spans: Iterable[Span]) -> tuple[Extent, ...]:
    """Give what a file's spans leave over, in order."""
    extents = []
    at = 0
    for span in spans:
        if span.offset > at:
            extents.append(Extent(file, at, span.offset - at))
        at = span.offset + span.nbytes
    if size > at:
        extents.append(Extent(file, at, size - at))
    return tuple(extents)


def skeletons_of(checkpoint: Checkpoint) -> list[Part]:
    """Give the skeleton of each file."""
    by_file: list[list[Span]] = [[] for _ in checkpoint.files]
    for span in checkpoint.spans:
        by_file[span.file].append(span)
    parts = []
    for index, (file, spans) in enumerate(zip(checkpoint.files, by_file, strict=True)):
        extents = skeleton_extents(index, file.size, spans)
        parts.append(Part(index, extents, sum(extent.nbytes for extent in extents)))
    return parts


def parts_of(checkpoint: Checkpoint) -> list[Part]:
    """Number what a checkpoint consists of: each file's skeleton, then the spans."""
    parts = skeletons_of(checkpoint)
    for number, span in enumerate(checkpoint.spans, start=len(checkpoint.files)):
        parts.append(Part(number, (Extent(span.file, span.offset, span.nbytes),), span.nbytes))
    return parts


def span_roles(checkpoint: Checkpoint) -> list[str]:
    """Give each span the role of the first tensor that views it; ``other`` when none does."""
    roles = ["other"] * len(checkpoint.spans)
    for tensor in reversed(checkpoint.tensors):
        for piece in tensor.pieces:
            roles[piece.span] = tensor.role
    return roles


def build_streams(checkpoint: Checkpoint, leaning: Collection[int] = ()) -> list[Stream]:
    """Group what a checkpoint consists of into streams.

    Parameters
    ----------
    leaning : spans that lean on a base; small ones are not grouped with others.

    Small spans of one dtype, byte order and role share a stream, as small skeletons do: 100,000
    tensors of 64 bytes cost no chunk each.
    """
    roles = span_roles(checkpoint)
    nfiles = len(checkpoint.files)
    kinds = [(SKELETON, "<", "other")] * nfiles + [
        ("bytes" if span.packed else span.dtype, span.byteorder, role)
        for span, role in zip(checkpoint.spans, roles, strict=True)
    ]
    streams: list[Stream] = []
    small: dict[tuple[str, str, str, bool, bool], list[Part]] = {}
    for part, kind in zip(parts_of(checkpoint), kinds, strict=True):
        if part.nbytes == 0:
            continue
        skeleton = part.span < nfiles
        if part.nbytes < (CHUNK if skeleton else SMALL):
            leans = part.span - nfiles in leaning
            small.setdefault((*kind, skeleton, leans), []).append(part)
        else:
            streams.append(Stream((part,), part.nbytes, *kind))
    for (dtype, byteorder, role, *_), parts in small.items():
        nbytes = sum(part.nbytes for part in parts)
        streams.append(Stream(tuple(parts), nbytes, dtype, byteorder, role))
    return streams


class Slicer:
    """Finds the parts and extents of byte ranges of one stream."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._starts = [0, *itertools.accumulate(part.nbytes for part in parts)]
        self._extent_starts: dict[int, list[int]] = {}

    def parts_in(self, start: int, stop: int) -> Iterable[tuple[Part, int, int]]:
        """Give (part, from, to) for the parts that a range covers, in the part's own bytes."""
        index = bisect.bisect_right(self._starts, start) - 1
        while index < len(self.parts) and (at := self._starts[index]) < stop:
            part = self.parts[index]
            yield part, max(start - at, 0), min(stop - at, part.nbytes)
            index += 1

    def extents_in(self, start: int, stop: int) -> list[Extent]:
        """Give where a range of the stream lies, neighbours joined."""
        found: list[Extent] = []
        for part, first, last in self.parts_in(start, stop):
            for extent in self._cut(part, first, last):
                if (
                    found
                    and found[-1].file == extent.file
                    and (found[-1].offset + found[-1].nbytes == extent.offset)
                ):
                    found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + extent.nbytes)
                else:
                    found.append(extent)
        return found

    def _cut(self, part: Part, first: int, last: int) -> Iterable[Extent]:
        if len(part.extents) == 1:
            whole = part.extents[0]
            yield Extent(whole.file, whole.offset + first, last - first)
            return
        starts = self._extent_starts.get(part.span)
        if starts is None:
            sizes = (extent.nbytes for extent in part.extents)
            starts = self._extent_starts[part.span] = [0, *itertools.accumulate(sizes)]
        index = bisect.bisect_right(starts, first) - 1
        while index < len(part.extents) and (at := starts[index]) < last:
            extent = part.extents[index]
            low, high = max(first - at, 0), min(last - at, extent.nbytes)
            yield Extent(extent.file, extent.offset + low, high - low)
            index += 1
