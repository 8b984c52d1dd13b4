"""Positioned reads of untrusted files: short reads are errors, nothing is mapped.

Sources are read with pread, never mmap: mapped pages count as memory and fail on some network
file systems.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckz.errors import CorruptError
from ckz.retrying import retried


@dataclass(frozen=True)
class Source:
    """A run of bytes of an open file.

    Attributes
    ----------
    name : what error messages call it.
    fd : an open file descriptor, owned by whoever opened it.
    start, size : the run, in bytes.
    """

    name: str
    fd: int
    start: int
    size: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly ``nbytes`` at ``offset``.

        Raises
        ------
        CorruptError
            If the range leaves the source or the file ends early.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CorruptError(
                f"{self.name}: needs bytes {offset} to {offset + nbytes}, "
                f"but there are only {self.size}; the file is truncated or damaged"
            )
        data = retried(partial(os.pread, self.fd, nbytes, self.start + offset))
        if len(data) == nbytes:
            return data
        out = bytearray(nbytes)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``; loops, for one pread moves at most 2 GiB."""
        done = 0
        while done < len(out):
            where = self.start + offset + done
            got = retried(partial(os.preadv, self.fd, [out[done:]], where))
            if got == 0:
                raise CorruptError(
                    f"{self.name}: ends at byte {offset + done}, "
                    f"{len(out) - done} bytes early; it is truncated or being changed"
                )
            done += got

    def part(self, offset: int, nbytes: int, name: str = "") -> Source:
        """Give a part of this source as a source of its own."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CorruptError(f"{self.name}: bytes {offset} to {offset + nbytes} are outside it")
        return Source(name or self.name, self.fd, self.start + offset, nbytes)

    def as_file(self) -> io.BufferedReader:
        """Give a seekable binary file object, for libraries that want one."""
        return io.BufferedReader(_SourceFile(self), 1 << 16)


class _SourceFile(io.RawIOBase):
    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if origin + offset < 0:
            raise OSError("negative seek position")
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        out = memoryview(buffer).cast("B")[: max(0, self._source.size - self._at)]
        self._source.read_into(self._at, out)
        self._at += len(out)
        return len(out)


@contextmanager
def open_source(path: Path, name: str | None = None) -> Iterator[Source]:
    """Open a file for positioned reads; no lock is taken."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield Source(name or str(path), fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
