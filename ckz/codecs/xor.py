"""The usual delta: the bits that changed, byte plane by byte plane, through zstd.

What ZipNN and others do between two versions of a model. ckz's own codec is ``ulp``; this one is
here to be compared with.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.leaning import base_of, check_dtype
from ckz.codecs.zstd import compress, decompress_into
from ckz.errors import CorruptError

Bytes = npt.NDArray[np.uint8]

_LEVEL = 3


@dataclass(frozen=True)
class Xor:
    """Exclusive or with the references, as byte planes, each one zstd frame with its length."""

    name: ClassVar[str] = "xor"
    dtype: str = ""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code what differs from the references."""
        base = base_of(self.dtype, refs, chunk.size)
        if base is None:
            return None
        changed = (chunk.view(base.dtype) ^ base).view(np.uint8).reshape(-1, base.itemsize)
        frames = [compress(np.ascontiguousarray(plane), _LEVEL) for plane in changed.T]
        lengths = struct.pack(f"<{len(frames)}I", *map(len, frames))
        payload = b"".join([lengths, *frames])
        return payload if len(payload) < chunk.size else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Change the references."""
        base = base_of(self.dtype, refs, out.size)
        if base is None or len(payload) < 4 * base.itemsize:
            raise CorruptError("an exclusive or needs references of its own size")
        lengths = struct.unpack_from(f"<{base.itemsize}I", payload)
        at = 4 * base.itemsize
        if at + sum(lengths) != len(payload):
            raise CorruptError("an exclusive or does not have the length it states")
        planes = np.empty((base.itemsize, base.size), np.uint8)
        for plane, length in zip(planes, lengths, strict=True):
            decompress_into(payload[at : at + length], plane)
            at += length
        changed = np.ascontiguousarray(planes.T).reshape(-1).view(base.dtype)
        np.bitwise_xor(base, changed, out=out.view(base.dtype))
