"""Many files open at once, few descriptors: reads and writes by extents."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from ckz.errors import ChangedError
from ckz.streams import Extent

_OPEN_AT_ONCE = 64


class FileSet:
    """The files of a checkpoint, opened when needed and closed when many are."""

    def __init__(self, paths: Sequence[Path], flags: int) -> None:
        self._paths = paths
        self._flags = flags | os.O_CLOEXEC
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lock = Lock()

    def _fd(self, file: int) -> int:
        # Threads may share a set as long as they work on one file at a time.
        with self._lock:
            if file in self._open:
                self._open.move_to_end(file)
                return self._open[file]
            if len(self._open) >= _OPEN_AT_ONCE:
                os.close(self._open.popitem(last=False)[1])
            self._open[file] = os.open(self._paths[file], self._flags)
            return self._open[file]

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
            while at < stop:
                got = os.preadv(self._fd(file), [view[at:stop]], offset)
                if got == 0:
                    raise ChangedError(f"{self._paths[file]}: became shorter while it was read")
                at += got
                offset += got

    def write(self, extents: Sequence[Extent], data: npt.NDArray[np.uint8]) -> None:
        """Write ``data`` to extents laid end to end."""
        view = data.data
        at = 0
        for file, offset, nbytes in extents:
            stop = at + nbytes
            while at < stop:
                done = os.pwrite(self._fd(file), view[at:stop], offset)
                at += done
                offset += done

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> FileSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
