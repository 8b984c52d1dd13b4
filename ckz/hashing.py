"""Digests of spans whose bytes arrive chunk by chunk."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]


class SpanHasher:
    """Digests of parts whose bytes come in order, several chunks to a part or parts to a chunk."""

    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests
        self._part = -1
        self._digest = xxhash.xxh3_128()
        self._crc32 = 0

    def update(self, part: int, nbytes: int, end: int, data: Bytes, crc32: int = -1) -> bool:
        """Take the next bytes of a part, up to ``end``; False if its CRC-32 does not hold."""
        if part != self._part:
            self._part = part
            self._digest = xxhash.xxh3_128()
            self._crc32 = 0
        self._digest.update(data.data)
        if crc32 >= 0:
            self._crc32 = zlib.crc32(data.data, self._crc32)
        if end < nbytes:
            return True
        self._digests[part] = self._digest.digest()
        return crc32 < 0 or self._crc32 == crc32
