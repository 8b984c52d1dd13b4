"""A checkpoint's files as they will be restored: near values where they may be, else as they are.

Whatever reads the source of a lossy compression reads through this, so that everything behind it
is lossless. Values are replaced as they are read, and nothing is kept: a replaced element depends
on its own place and on what stands in the base or elsewhere in the checkpoint at that place.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Checkpoint
from ckz.files import FileSet
from ckz.plan import Candidate
from ckz.resident import Resident
from ckz.streams import Extent

Bytes = npt.NDArray[np.uint8]


class Snap(NamedTuple):
    """How a span's values are replaced.

    Attributes
    ----------
    replace : changes elements that begin at a byte of the span, in place.
    method : in words.
    candidate : the codec that names the new values briefly, if one must be told about them.
    """

    replace: Callable[[Bytes, int], None]
    method: str
    candidate: Candidate | None = None


class RestoredFiles(FileSet):
    """Reads a checkpoint's files with the values and checksums they will have."""

    def __init__(self, checkpoint: Checkpoint, resident: Resident | None = None) -> None:
        paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
        super().__init__(paths, os.O_RDONLY)
        self._checkpoint = checkpoint
        self._resident = resident
        self.snaps: dict[int, Snap] = {}
        self._patches: dict[int, list[tuple[int, bytes]]] = {}

    @property
    def candidates(self) -> dict[int, Candidate]:
        """Give the codecs of the spans that have one made for their new values."""
        return {span: snap.candidate for span, snap in self.snaps.items() if snap.candidate}

    @cached_property
    def _places(self) -> list[tuple[list[int], list[int]]]:
        """For each file where its spans begin, and their numbers."""
        found: list[tuple[list[int], list[int]]] = [([], []) for _ in self._checkpoint.files]
        for number, span in enumerate(self._checkpoint.spans):
            found[span.file][0].append(span.offset)
            found[span.file][1].append(number)
        return found

    def replaces(self, span: int) -> bool:
        """Whether what is read of a span is not what stands in its file."""
        return span in self.snaps

    def patch(self, file: int, offset: int, data: bytes) -> None:
        """Replace bytes that are no tensor's, such as checksums."""
        self._patches.setdefault(file, []).append((offset, data))

    def read_original(self, extents: Sequence[Extent], out: Bytes) -> None:
        """Fill ``out`` with what stands there now, in the files or in memory."""
        if self._resident:
            self._resident.read(extents, out)
        else:
            super().read(extents, out)

    def read(self, extents: Sequence[Extent], out: Bytes) -> None:
        """Fill ``out`` from extents laid end to end."""
        self.read_original(extents, out)
        if not self.snaps:
            return
        at = 0
        for extent in extents:
            self._replace(extent, out[at : at + extent.nbytes])
            at += extent.nbytes

    def beside(self, extents: Sequence[Extent], chunk: Bytes) -> Bytes:
        """Tell a chunk that was read where it lies on a device, if it does unchanged."""
        if self._resident and not self.snaps:
            return self._resident.beside(extents, chunk)
        return chunk

    def _replace(self, extent: Extent, out: Bytes) -> None:
        file, offset, nbytes = extent
        starts, numbers = self._places[file]
        index = max(0, bisect.bisect_right(starts, offset) - 1)
        while index < len(starts) and starts[index] < offset + nbytes:
            if snap := self.snaps.get(numbers[index]):
                span = self._checkpoint.spans[numbers[index]]
                first = max(offset, span.offset) - span.offset
                last = min(offset + nbytes, span.offset + span.nbytes) - span.offset
                if first < last:
                    begin = span.offset + first - offset
                    part = out[begin : begin + last - first]
                    self._replace_part(file, span.offset, first, part, snap, ITEMSIZE[span.dtype])
            index += 1
        for place, data in self._patches.get(file, ()):
            first, last = max(place, offset), min(place + len(data), offset + nbytes)
            if first < last:
                part = np.frombuffer(data, np.uint8)[first - place : last - place]
                out[first - offset : last - offset] = part

    def _replace_part(
        self, file: int, start: int, first: int, part: Bytes, snap: Snap, width: int
    ) -> None:
        """Replace the elements that a part of a span touches, whole ones."""
        last = first + part.size
        low, high = first // width * width, -(-last // width) * width
        aligned = np.empty(high - low, np.uint8)
        if high - low == part.size:
            aligned[:] = part
        else:
            super().read([Extent(file, start + low, high - low)], aligned)
        with np.errstate(all="ignore"):  # any bits may stand there, such as signaling NaNs
            snap.replace(aligned, low)
        part[:] = aligned[first - low : last - low]
