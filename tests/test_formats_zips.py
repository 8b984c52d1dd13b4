"""The member table of zip files: equal to zipfile's, and checked against the file."""

from __future__ import annotations

import io
import struct
import tempfile
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckz.errors import CkzError, CorruptError, UnsupportedError
from ckz.formats import zips
from ckz.formats.zips import Member
from ckz.source import Source


def members(data: bytes) -> tuple[Member, ...]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return zips.members(Source("file", file.fileno(), 0, len(data)))


def zipped(names: tuple[str, ...] = ("a", "dir/b", "ümlaut"), prefix: bytes = b"") -> bytes:
    out = io.BytesIO()
    out.write(prefix)
    with zipfile.ZipFile(out, "a") as file:
        for i, name in enumerate(names):
            method = zipfile.ZIP_DEFLATED if i % 2 else zipfile.ZIP_STORED
            file.writestr(name, bytes([65 + i]) * (100 + i), method)
        file.comment = b"a comment"
    return out.getvalue()


@pytest.mark.parametrize("prefix", [b"", b"#!/bin/sh\n"])
def test_members_equal_zipfiles(prefix: bytes) -> None:
    data = zipped(prefix=prefix)
    found = members(data)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert len(found) == len(file.infolist())
        for member, info in zip(found, file.infolist(), strict=True):
            assert member.name == info.filename
            assert (member.nbytes, member.stored) == (info.file_size, info.compress_size)
            assert (member.method, member.crc32) == (info.compress_type, info.CRC)
            assert member.header == info.header_offset
            assert data.startswith(b"PK\1\2", member.entry)
            if member.method == zips.STORED:
                assert data[member.offset :][: member.nbytes] == file.read(info)


def test_streamed_members_have_their_sizes_in_the_directory() -> None:
    class Pipe(io.BytesIO):
        def tell(self) -> int:
            raise OSError("a pipe has no position")

    out = Pipe()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a", b"x" * 50)
    (member,) = members(out.getvalue())
    assert member.flags & 8
    assert out.getvalue()[member.offset :][: member.nbytes] == b"x" * 50


def test_an_empty_zip_file() -> None:
    assert members(zipped(())) == ()


def test_duplicate_names_are_refused() -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        data = zipped(("a", "a"))
    with pytest.raises(CorruptError, match="the same name"):
        members(data)


def patched(data: bytes, entry: int, at: int, layout: str, value: int) -> bytes:
    """Change a field of the directory entry with that number."""
    start = [m.entry for m in members(data)][entry] + at
    out = bytearray(data)
    struct.pack_into(layout, out, start, value)
    return bytes(out)


def test_encrypted_members_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="encrypted"):
        members(patched(zipped(), 0, 8, "<H", 1))


@pytest.mark.parametrize(
    ("entry", "at", "layout", "value", "message"),
    [
        (0, 20, "<I", 99, "not compressed but states"),
        (1, 24, "<I", 1 << 31, "cannot hold"),
        (1, 20, "<I", 1 << 30, "ends outside|overlap"),
        (1, 42, "<I", 0, "local header"),
        (1, 42, "<I", 1 << 30, "there are only"),
        (0, 28, "<H", 60000, "directory is damaged"),
        (0, 0, "<I", 0, "directory is damaged"),
        (0, 42, "<I", 0xFFFFFFFF, "64-bit"),
    ],
)
def test_fields_that_cannot_be(entry: int, at: int, layout: str, value: int, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        members(patched(zipped(), entry, at, layout, value))


def test_overlapping_members_are_refused() -> None:
    data = zipped(("a", "b"))
    first, second = members(data)
    # A longer first member, in both of its headers, runs into the second.
    out = bytearray(data)
    for at in (first.header + 18, first.entry + 20):
        struct.pack_into("<II", out, at, second.offset - first.offset, second.offset - first.offset)
    with pytest.raises(CorruptError, match="overlap"):
        members(bytes(out))


def test_every_truncation_is_reported() -> None:
    data = zipped()
    for length in range(len(data) - len(b"a comment")):
        with pytest.raises(CorruptError):
            members(data[:length])


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=5))
def test_damaged_directories(changes: list[tuple[int, int]]) -> None:
    out = bytearray(zipped())
    for at, byte in changes:
        out[-1 - at % len(out)] = byte
    try:
        found = members(bytes(out))
    except CkzError:
        return
    end = 0
    for member in sorted(found, key=lambda member: member.offset):
        assert end <= member.header < member.offset
        end = member.offset + member.stored
    assert end <= len(out)
