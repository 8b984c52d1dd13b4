"""The member table of a zip file, checked, without reading or unpacking any member.

The standard library's ``zipfile`` hides where a member's bytes and its directory entry lie, reads
a directory of any size at once, and cuts names at a NUL; all three matter for files that are
untrusted and must come back exactly. Layout: PKWARE APPNOTE 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckz.errors import CorruptError, UnsupportedError
from ckz.source import Source

STORED, DEFLATED = 0, 8

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_MAX_DIRECTORY = 256 << 20  # a million members with names of 200 bytes
_MAX_RATIO = 1032  # deflate cannot do better
_ENCRYPTED = 0x2041  # flag bits 0, 6 and 13


class Member(NamedTuple):
    """One member of a zip file.

    Attributes
    ----------
    name : decoded as UTF-8, else as code page 437.
    offset : of its first stored byte, from the source's start.
    nbytes, stored : bytes unpacked, and as they lie in the file.
    method : ``STORED``, ``DEFLATED``, or another number of the zip specification.
    crc32 : of the unpacked bytes, as the directory states it.
    flags : general purpose bits; bit 3 says that a data descriptor follows the stored bytes.
    header, entry : where its local header and its directory entry begin.
    """

    name: str
    offset: int
    nbytes: int
    stored: int
    method: int
    crc32: int
    flags: int
    header: int
    entry: int


def sniff(head: bytes) -> bool:
    """Whether a file that begins with ``head`` may be a zip file."""
    return head[:4] in (b"PK\3\4", b"PK\5\6")


def members(source: Source) -> tuple[Member, ...]:
    """List the members of a zip file in the directory's order.

    Raises
    ------
    CorruptError
        If the directory is missing or damaged, or members overlap, repeat a name, leave the file
        or state a size that cannot be.
    UnsupportedError
        If a member is encrypted, or the file is one of several volumes.
    """
    start, nbytes, base = _directory(source)
    table = source.read(start, nbytes)
    found = tuple(_entries(source, table, start, base))
    names = {member.name for member in found}
    if len(names) < len(found):
        raise CorruptError(f"{source.name}: two members of the zip file have the same name")
    end, before = 0, ""
    for member in sorted(found, key=lambda m: m.header):
        if member.header < end:
            raise CorruptError(f"{source.name}: members {before!r} and {member.name!r} overlap")
        end, before = member.offset + member.stored, member.name
    if end > start:
        raise CorruptError(f"{source.name}: member {before!r} runs into the zip directory")
    return found


def _directory(source: Source) -> tuple[int, int, int]:
    """Find the directory: its offset, its size, and how far all stated offsets are to be moved."""
    tail_at = max(0, source.size - _END.size - 0xFFFF)
    tail = source.read(tail_at, source.size - tail_at)
    at = tail.rfind(b"PK\5\6", 0, len(tail) - _END.size + 4)
    if at < 0:
        raise CorruptError(f"{source.name}: has no zip directory at its end; it is truncated")
    _, disk, first_disk, _, _, nbytes, offset, _ = _END.unpack_from(tail, at)
    end = tail_at + at
    locator_at = at - _LOCATOR.size
    if locator_at >= 0 and tail.startswith(b"PK\6\7", locator_at):
        end = tail_at + locator_at - _END64.size
        record = source.read(end, _END64.size) if end >= 0 else b""
        if not record.startswith(b"PK\6\6"):
            raise CorruptError(f"{source.name}: the zip64 directory record is damaged")
        _, _, _, _, disk, first_disk, _, _, nbytes, offset = _END64.unpack(record)
    if disk or first_disk:
        raise UnsupportedError(f"{source.name}: one volume of a split zip file; join them first")
    start = end - nbytes
    if start < offset:
        raise CorruptError(
            f"{source.name}: the zip directory of {nbytes} bytes at {offset} does not fit"
        )
    if nbytes > _MAX_DIRECTORY:
        raise CorruptError(f"{source.name}: a zip directory of {nbytes} bytes is absurd")
    return start, nbytes, start - offset


def _entries(source: Source, table: bytes, start: int, base: int) -> Iterator[Member]:
    at = 0
    while at < len(table):
        if not table.startswith(b"PK\1\2", at) or at + _ENTRY.size > len(table):
            raise CorruptError(f"{source.name}: the zip directory is damaged at byte {start + at}")
        (_, _, _, flags, method, _, _, crc32, stored, nbytes, name_len, extra_len, comment_len,
         _, _, _, header) = _ENTRY.unpack_from(table, at)  # fmt: skip
        name_at = at + _ENTRY.size
        extra_at = name_at + name_len
        end = extra_at + extra_len + comment_len
        if end > len(table):
            raise CorruptError(f"{source.name}: the zip directory is damaged at byte {start + at}")
        raw = table[name_at:extra_at]
        name = _decode(raw)
        if 0xFFFFFFFF in (nbytes, stored, header):
            extra = table[extra_at : extra_at + extra_len]
            nbytes, stored, header = _zip64(extra, (nbytes, stored, header), source.name, name)
        header += base
        _check_sizes(source.name, name, flags, method, nbytes, stored)
        offset = _data_offset(source, name, raw, header)
        if offset + stored > source.size:
            raise CorruptError(f"{source.name}: member {name!r} ends outside the file")
        yield Member(name, offset, nbytes, stored, method, crc32, flags, header, start + at)
        at = end


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp437")


def _zip64(
    extra: bytes, fields: tuple[int, int, int], file: str, name: str
) -> tuple[int, int, int]:
    """Replace the fields that are too large for 32 bits by those of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            body = extra[at + 4 : at + 4 + length]
            wide = iter(struct.unpack_from(f"<{len(body) // 8}Q", body))
            first, second, third = (
                next(wide, -1) if field == 0xFFFFFFFF else field for field in fields
            )
            if min(first, second, third) >= 0:
                return first, second, third
        at += 4 + length
    raise CorruptError(f"{file}: member {name!r} lacks its 64-bit sizes")


def _check_sizes(file: str, name: str, flags: int, method: int, nbytes: int, stored: int) -> None:
    if flags & _ENCRYPTED:
        raise UnsupportedError(f"{file}: member {name!r} is encrypted; decrypt the file first")
    if method == STORED and nbytes != stored:
        raise CorruptError(
            f"{file}: member {name!r} is not compressed but states {stored} and {nbytes} bytes"
        )
    if method == DEFLATED and nbytes > stored * _MAX_RATIO:
        raise CorruptError(
            f"{file}: member {name!r} cannot hold {nbytes} bytes in {stored} deflated ones"
        )


def _data_offset(source: Source, name: str, raw: bytes, header: int) -> int:
    """Read a local header and give the place of the first data byte."""
    local = source.read(header, _LOCAL.size + len(raw))
    name_len: int
    extra_len: int
    signature, *_, name_len, extra_len = _LOCAL.unpack_from(local)
    if signature != b"PK\3\4" or name_len != len(raw) or local[_LOCAL.size :] != raw:
        raise CorruptError(
            f"{source.name}: the local header of member {name!r} at byte {header} is damaged"
        )
    return header + _LOCAL.size + name_len + extra_len
