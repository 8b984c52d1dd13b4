"""Checksums that a zip file states of members whose values will be others.

torch does not look at them, but Python's ``zipfile`` and everything built on it does. A member's
CRC-32 stands in the directory, and in its local header or, where a flag says so, behind its data
(PKWARE APPNOTE 6.3.10, sections 4.3.7 to 4.3.12). A distributed checkpoint holds whole zip files,
one after the other, in one file.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ckz.checking import bad_crc, stated_crc32
from ckz.checkpoint import Checkpoint
from ckz.errors import CkzError
from ckz.formats import zips
from ckz.lossy.measuring import Measured
from ckz.lossy.restored import RestoredFiles
from ckz.source import Source, open_source
from ckz.streams import CHUNK, Extent, skeleton_extents

_END = b"PK\5\6"
_END_SIZE = 22
_DESCRIPTOR = b"PK\7\x08"
_FOLLOWS = 1 << 3


def mend_sums(
    checkpoint: Checkpoint,
    files: RestoredFiles,
    measured: Mapping[int, Measured],
    *,
    accept_bad_crc: bool,
) -> Checkpoint:
    """Give the checkpoint with the checksums its values will have; ``files`` reads them so.

    Raises
    ------
    CorruptError
        If a span does not have the checksum that its file states now, unless ``accept_bad_crc``.
    """
    spans = list(checkpoint.spans)
    # File -> (offset, bytes) of what changed, and its CRC-32.
    changed: dict[int, dict[tuple[int, int], int]] = {}
    for number, found in measured.items():
        span = spans[number]
        stated = stated_crc32(span)
        if stated not in (-1, found.before) and not accept_bad_crc:
            raise bad_crc(checkpoint, number)
        if stated != -1:
            spans[number] = span._replace(crc32=found.after)
        changed.setdefault(span.file, {})[span.offset, span.nbytes] = found.after
    for file, ranges in changed.items():
        own = [span for span in checkpoint.spans if span.file == file]
        gaps = skeleton_extents(file, checkpoint.files[file].size, own)
        with open_source(checkpoint.path_of(file)) as source:
            # What lies inside another member comes before it.
            for member in sorted(_members(source, gaps), key=lambda m: m.stored):
                end = member.offset + member.stored
                if any(at < end and at + nbytes > member.offset for at, nbytes in ranges):
                    # Most members are one span, whose checksum was worked out with its errors.
                    known = ranges.get((member.offset, member.stored))
                    crc32 = _crc32(files, file, member) if known is None else known
                    _mend(source, file, member, files, crc32)
    return replace(checkpoint, spans=tuple(spans))


def _crc32(files: RestoredFiles, file: int, member: zips.Member) -> int:
    crc32 = 0
    for at in range(0, member.stored, CHUNK):
        data = np.empty(min(CHUNK, member.stored - at), np.uint8)
        files.read([Extent(file, member.offset + at, data.size)], data)
        crc32 = zlib.crc32(data.data, crc32)
    return crc32


def _mend(source: Source, file: int, member: zips.Member, files: RestoredFiles, crc32: int) -> None:
    """Patch the checksum of a member wherever it stands."""
    stated = struct.pack("<I", crc32)
    files.patch(file, member.entry + 16, stated)
    if not member.flags & _FOLLOWS:
        files.patch(file, member.header + 14, stated)
        return
    behind = member.offset + member.stored
    signed = source.read(behind, 4) == _DESCRIPTOR
    files.patch(file, behind + 4 * signed, stated)


def _members(source: Source, gaps: tuple[Extent, ...]) -> Iterator[zips.Member]:
    """Give the members, not compressed, of every zip file in a file."""
    for end in _ends(source, gaps):
        with contextlib.suppress(CkzError):  # bytes that only look like the end of one
            for member in zips.members(source.part(0, min(end, source.size))):
                if member.method == zips.STORED:
                    yield member


def _ends(source: Source, gaps: tuple[Extent, ...]) -> Iterator[int]:
    """Find the ends of the zip files in a file, in what is no tensor's data."""
    for _, offset, nbytes in gaps:
        data = source.read(offset, nbytes)
        at = data.find(_END)
        while at >= 0 and at + _END_SIZE <= len(data):
            comment = int.from_bytes(data[at + 20 : at + 22], "little")
            yield offset + at + _END_SIZE + comment
            at = data.find(_END, at + _END_SIZE + comment)
