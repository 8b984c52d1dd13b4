"""Reader of Keras' ``.keras``: a zip file that holds HDF5 files of weights.

Keras stores its members without compression, so the HDF5 file inside is read in place. A member
that was deflated is unpacked to a temporary file to find its datasets; its one span is the deflated
member, and the tensors' pieces count in the unpacked one.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO

from ckz.checkpoint import Piece, Span, Tensor
from ckz.errors import CorruptError
from ckz.formats import hdf5
from ckz.formats.layout import Layout
from ckz.formats.zips import DEFLATED, STORED, Member
from ckz.source import Source

_SUFFIX = ".weights.h5"
_MAX_UNPACKED = 4 << 30
_BLOCK = 1 << 20


def holds_keras(members: Sequence[Member]) -> bool:
    """Whether a zip file of these members is one that Keras wrote."""
    return any(member.name.endswith(_SUFFIX) for member in members)


def read_members(source: Source, members: Sequence[Member]) -> Layout:
    """Find the tensors of a ``.keras`` file, whose members the caller has listed.

    Raises
    ------
    CorruptError
        If a member or the HDF5 file in it is damaged.
    """
    spans: list[Span] = []
    tensors: list[Tensor] = []
    warnings: list[str] = []
    weights = [member for member in members if member.name.endswith(_SUFFIX)]
    for member in sorted(weights, key=lambda member: member.offset):
        where = f"{source.name}: member {member.name!r}"
        if member.method == STORED:
            inner = hdf5.read(source.part(member.offset, member.nbytes, where))
            layout = _moved(inner, member.offset)
        elif member.method == DEFLATED and member.nbytes <= _MAX_UNPACKED:
            layout = _deflated(source, member, where)
        else:
            layout = Layout("hdf5", warnings=("is compressed, so its tensors are not listed",))
        prefix = f"{member.name.removesuffix(_SUFFIX)}/" if len(weights) > 1 else ""
        tensors += [
            tensor._replace(
                name=prefix + tensor.name,
                pieces=tuple(p._replace(span=p.span + len(spans)) for p in tensor.pieces),
            )
            for tensor in layout.tensors
        ]
        spans += layout.spans
        warnings += [f"member {member.name!r}: {warning}" for warning in layout.warnings]
    return Layout("keras", tuple(spans), tuple(tensors), tuple(warnings))


def _moved(layout: Layout, offset: int) -> Layout:
    spans = tuple(span._replace(offset=span.offset + offset) for span in layout.spans)
    return layout._replace(spans=spans)


def _deflated(source: Source, member: Member, where: str) -> Layout:
    with tempfile.TemporaryFile() as unpacked:
        _inflate(source, member, where, unpacked)
        inner = hdf5.read(Source(where, unpacked.fileno(), 0, member.nbytes))
    whole = Span(0, member.offset, member.stored, "bytes", "<", "deflate", member.crc32)
    tensors = []
    warnings = list(inner.warnings)
    for tensor in inner.tensors:
        pieces = []
        for piece in tensor.pieces:
            span = inner.spans[piece.span]
            if span.packed or span.byteorder != whole.byteorder:
                warnings.append(f"dataset {tensor.name!r} is compressed twice; it is not listed")
                break
            pieces.append(Piece(0, span.offset + piece.offset, *piece[2:]))
        else:
            tensors.append(tensor._replace(pieces=tuple(pieces)))
    return Layout("hdf5", (whole,), tuple(tensors), tuple(warnings))


def _inflate(source: Source, member: Member, where: str, out: BinaryIO) -> None:
    """Unpack a member, and hold it against the size and CRC-32 that the zip directory states."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    done = crc32 = 0
    try:
        for at in range(0, member.stored, _BLOCK):
            block = source.read(member.offset + at, min(_BLOCK, member.stored - at))
            while block and done <= member.nbytes:
                data = inflater.decompress(block, _BLOCK)
                block = inflater.unconsumed_tail
                crc32 = zlib.crc32(data, crc32)
                done += out.write(data)
    except zlib.error as err:
        raise CorruptError(f"{where} is damaged: {err}") from err
    if done != member.nbytes or crc32 != member.crc32:
        raise CorruptError(f"{where} is damaged: its CRC-32 does not match")
    out.flush()
