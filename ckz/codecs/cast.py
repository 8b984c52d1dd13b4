"""A 16-bit weight beside its fp32 master: derived, not stored.

In mixed-precision training the 16-bit weight is the round-to-nearest-even cast of the master. The
cast is made again on decoding; elements that differ are listed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.errors import CorruptError
from ckz.kernels.buffers import scratch

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

# An exception costs six bytes, an element about 1.3 without the master.
_MAX_EXCEPTIONS = 1 / 16


@dataclass(frozen=True)
class Cast:
    """float32 references, laid end to end, rounded to ``dtype``; little-endian.

    The payload is empty, or the number of exceptions as uint32, their positions as uint32, and
    their values.
    """

    name: ClassVar[str] = "cast"
    ratio: ClassVar[int] = 2
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError("casts are to bfloat16 or float16")

    def _cast(self, refs: Sequence[Bytes], nbytes: int) -> Words:
        if nbytes % 2 or sum(ref.size for ref in refs) != 2 * nbytes:
            raise CorruptError("a cast chunk needs references of twice its size")
        source = scratch("source", 2 * nbytes)
        at = 0
        for ref in refs:
            source[at : at + ref.size] = ref
            at += ref.size
        return round_to(self.dtype, source.view("<u4"))

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """List what is not the cast of the references; None if that is much."""
        if chunk.size % 2 or sum(ref.size for ref in refs) != 2 * chunk.size:
            return None
        x = chunk.view("<u2")
        different = np.flatnonzero(self._cast(refs, chunk.size) != x)
        if not different.size:
            return b""
        if different.size > x.size * _MAX_EXCEPTIONS:
            return None
        where, what = different.astype("<u4").tobytes(), x[different].tobytes()
        payload = struct.pack("<I", different.size) + where + what
        return payload if len(payload) < chunk.size else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Cast again and put the exceptions in."""
        cast = self._cast(refs, out.size)
        x = out.view("<u2")
        x[:] = cast
        if not payload:
            return
        n = int.from_bytes(payload[:4], "little")
        if len(payload) != 4 + 6 * n:
            raise CorruptError("a cast chunk does not have the exceptions it states")
        where = np.frombuffer(payload, "<u4", n, 4)
        if n and int(where.max()) >= x.size:
            raise CorruptError("an exception lies outside its chunk")
        x[where] = np.frombuffer(payload, "<u2", n, 4 + 4 * n)


def round_to(dtype: str, bits: npt.NDArray[np.uint32]) -> Words:
    """Round float32 bits to bfloat16 or float16 bits, half to even, in this thread's scratch."""
    out: Words = scratch("cast", bits.size, np.uint16)
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            out.view(np.float16)[:] = bits.view(np.float32)
        # Processors differ in what is left of a NaN's payload; ckz says: nothing.
        magnitude = np.bitwise_and(bits, 0x7FFFFFFF, out=scratch("wide", bits.size, np.uint32))
        if int(magnitude.max(initial=0)) > 0x7F800000:
            nan = magnitude > 0x7F800000
            out[nan] = (bits[nan] >> 16 & 0x8000) | 0x7E00
        return out
    # Half of the last kept bit is added, minus one when that bit is 0.
    wide = scratch("wide", bits.size, np.uint32)
    np.right_shift(bits, 16, out=wide)
    np.bitwise_and(wide, 1, out=wide)
    np.add(wide, 0x7FFF, out=wide)
    np.add(wide, bits, out=wide)
    np.right_shift(wide, 16, out=wide)
    out[:] = wide
    return out
