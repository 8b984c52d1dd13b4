"""Random access to spans that a file itself compressed (deflated npz members, HDF5 chunks).

Small ones are unpacked into memory and kept for a while; large ones once, into a temporary file.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import IO

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Checkpoint, extent
from ckz.diffing.cache import Cache
from ckz.errors import CorruptError
from ckz.values import ReadSpan, unpacked

Bytes = npt.NDArray[np.uint8]

_KEPT = 16 << 20
_SPOOLED = 16 << 20  # bytes from which on a deflated span is unpacked into a file
_STEP = 1 << 20


@contextmanager
def reading_unpacked(
    checkpoint: Checkpoint, read: ReadSpan, spool: Path | None
) -> Iterator[ReadSpan]:
    """Give a function that reads spans as ``read`` does, and packed ones as what they hold.

    Parameters
    ----------
    spool : the directory for temporary files; the system's if None.
    """
    if not any(span.packed for span in checkpoint.spans):
        yield read
        return
    with ExitStack() as stack:
        yield _Unpacking(checkpoint, read, spool, stack).read


class _Unpacking:
    def __init__(
        self, checkpoint: Checkpoint, read: ReadSpan, spool: Path | None, stack: ExitStack
    ) -> None:
        self._spans = checkpoint.spans
        self._read = read
        self._spool = spool
        self._stack = stack
        self._kept = Cache(self._unpack, _KEPT)
        self._files: dict[int, IO[bytes]] = {}
        self._lock = Lock()
        # How much of each span tensors show: no more of it is unpacked.
        self._shown: dict[int, int] = {}
        for tensor in checkpoint.tensors:
            for piece in tensor.pieces:
                if self._spans[piece.span].packed:
                    end = piece.offset + extent(piece, ITEMSIZE[tensor.dtype])
                    self._shown[piece.span] = max(end, self._shown.get(piece.span, 0))

    def read(self, span: int, at: int, out: Bytes) -> None:
        packed = self._spans[span].packed
        if not packed:
            self._read(span, at, out)
        elif packed == "deflate" and self._shown[span] > _SPOOLED:
            with self._lock:
                if span not in self._files:
                    self._files[span] = self._unpack_to_file(span)
            os.preadv(self._files[span].fileno(), [out.data], at)
        else:
            out[:] = self._kept(span)[at : at + out.size]

    def _unpack(self, span: int) -> Bytes:
        stored = np.empty(self._spans[span].nbytes, np.uint8)
        self._read(span, 0, stored)
        return unpacked(self._spans[span], stored, self._shown[span])

    def _unpack_to_file(self, span: int) -> IO[bytes]:
        file = self._stack.enter_context(tempfile.TemporaryFile(dir=self._spool))  # noqa: SIM115
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        buffer = np.empty(_STEP, np.uint8)
        left = self._shown[span]
        try:
            for at in range(0, self._spans[span].nbytes, _STEP):
                stored = buffer[: min(_STEP, self._spans[span].nbytes - at)]
                self._read(span, at, stored)
                rest = stored.tobytes()
                while left and (plain := inflater.decompress(rest, min(left, _STEP))):
                    rest = inflater.unconsumed_tail
                    left -= file.write(plain)
        except zlib.error as err:
            raise CorruptError(f"deflated tensor data are damaged ({err})") from err
        if left:
            raise CorruptError("deflated tensor data end early")
        file.flush()
        return file
