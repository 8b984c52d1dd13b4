"""Many files open at once, few descriptors: reads and writes by extents."""

from __future__ import annotations

import ctypes
import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckz.errors import ChangedError
from ckz.retrying import retried
from ckz.streams import Extent

_OPEN_AT_ONCE = 64
_WRITEBACK = 32 << 20
_SYNC_FILE_RANGE_WRITE = 2


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of some bytes; of long files the disk gets them while more are made.

    Otherwise it would be idle until the end, and then all would wait for it.
    """
    end = offset + len(data)
    far = end // _WRITEBACK > offset // _WRITEBACK
    while data:
        done = retried(partial(os.pwrite, fd, data, offset))
        data = data[done:]
        offset += done
    if far and (start := _writeback()):
        start(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


@cache
def _writeback() -> Any:
    """Give the call that lets a file's bytes go to the disk and does not wait; None without one."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


class FileSet:
    """The files of a checkpoint, opened when needed and closed when many are; for any thread."""

    def __init__(self, paths: Sequence[Path], flags: int) -> None:
        self._paths = paths
        self._flags = flags | os.O_CLOEXEC
        self._open: OrderedDict[int, int] = OrderedDict()
        self._used: Counter[int] = Counter()
        self._lock = Lock()

    def _acquire(self, file: int) -> int:
        """Give a file's descriptor, which stays open until it is released."""
        with self._lock:
            if file not in self._open:
                self._close_unused()
                self._open[file] = os.open(self._paths[file], self._flags)
            self._open.move_to_end(file)
            self._used[file] += 1
            return self._open[file]

    def _release(self, file: int) -> None:
        with self._lock:
            self._used[file] -= 1

    def _close_unused(self) -> None:
        """Make room for one more, by closing the one whose last use began first."""
        if len(self._open) >= _OPEN_AT_ONCE:
            unused = next((file for file in self._open if not self._used[file]), None)
            if unused is not None:
                os.close(self._open.pop(unused))

    def read(self, extents: Sequence[Extent], out: npt.NDArray[np.uint8]) -> None:
        """Fill ``out`` from extents laid end to end.

        Raises
        ------
        ChangedError
            If a file became shorter since it was looked at.
        """
        view = out.data
        at = 0
        for file, offset, nbytes in extents:
            stop = at + nbytes
            fd = self._acquire(file)
            try:
                while at < stop:
                    got = retried(partial(os.preadv, fd, [view[at:stop]], offset))
                    if got == 0:
                        raise ChangedError(f"{self._paths[file]}: became shorter while it was read")
                    at += got
                    offset += got
            finally:
                self._release(file)

    def replaces(self, span: int) -> bool:
        """Whether what is read of a span is not what stands in its file."""
        return False

    def beside(self, extents: Sequence[Extent], chunk: npt.NDArray[np.uint8]) -> Any:
        """Give a chunk that was read, with what else is known of it."""
        return chunk

    def write(self, extents: Sequence[Extent], data: npt.NDArray[np.uint8]) -> None:
        """Write ``data`` to extents laid end to end."""
        view = data.data
        at = 0
        for file, offset, nbytes in extents:
            stop = at + nbytes
            fd = self._acquire(file)
            try:
                write_at(fd, view[at:stop], offset)
                at = stop
            finally:
                self._release(file)

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
