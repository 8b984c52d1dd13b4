"""Floats as planes: exponents coded, mantissas mostly stored.

The exponents of trained weights take 2.6 of their 8 bits; mantissas are noise, except their top bit
or two, and except in values that were once of a narrower type. So the exponent and the top mantissa
bits make one byte, the *symbol*, which a Huffman coder takes; the sign and the rest make further
bytes, each coded only where that pays.

How a value is taken apart (s sign, e exponent, m mantissa):

========  ==================  =======================================================
dtype     symbol              rest
========  ==================  =======================================================
bfloat16  e (7 bits), m1      s, m2..m7: 7 bits, eight of them packed in seven bytes
float32   as bfloat16, of the upper 16 bits; the two lower bytes are planes
float16   e (5 bits), m1-m3   s, m4..m10
float64   byte by byte, after moving the sign to the low end
fp8       the byte            nothing
========  ==================  =======================================================

Eight exponent bits fit in seven when the exponents used lie within 127 of the largest, or are zero:
code 0 stands for exponent 0, code k for ``base + k``. Chunks that use a wider range (none seen in
real weights) keep all eight bits in the symbol and all of the mantissa in the rest.

The split into exponent and mantissa is that of ZipNN (arXiv 2411.05239) and DFloat11
(arXiv 2504.11651); putting mantissa bits into the symbol is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.coding import check_coder, decode_planes, encode_planes
from ckz.errors import CorruptError
from ckz.kernels import planes as kernels
from ckz.kernels.device import get, put, room

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

# dtype -> (numpy type of the bits, number of planes)
_LAYOUTS: dict[str, tuple[str, int]] = {
    "bfloat16": ("u2", 2),
    "float16": ("u2", 2),
    "float32": ("u4", 4),
    "float64": ("u8", 8),
    "fp8": ("u1", 1),
}


def _exponent_base(x: Any) -> int | None:
    """Find the base that makes all 8-bit exponents fit in seven bits; None if there is none."""
    found = np.array([0, 255], np.int32)
    kernels.exponents(x, found)
    base = int(found[0]) - 127
    if base <= 0:
        return 0
    return base if found[1] >= base else None


@dataclass(frozen=True)
class Planes:
    """Planes of one float dtype; complex numbers are pairs of floats.

    The payload is a mode byte, a base byte, and the planes, each coded only where that pays. Bytes
    after the last whole element follow as they are.
    """

    name: ClassVar[str] = "planes"
    dtype: str = ""
    byteorder: str = "<"
    coder: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in _LAYOUTS or self.byteorder not in ("<", ">"):
            raise ValueError("no planes for this dtype or byte order")
        check_coder(self.coder)

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code one chunk of whole elements."""
        bits, _ = _LAYOUTS[self.dtype]
        itemsize = int(bits[1])
        body = chunk.size // itemsize * itemsize
        if not body:
            return None
        x = chunk[:body].view(self.byteorder + bits).astype("<" + bits, copy=False)
        base: int | None = None
        if self.dtype == "float64":
            rotated = (x << np.uint64(1)) | (x >> np.uint64(63))
            planes = list(np.ascontiguousarray(rotated.view(np.uint8).reshape(-1, 8).T))
        elif self.dtype == "fp8":
            planes = [x]
        else:
            low: list[Bytes] = []
            upper = x = put("chunk", x)
            if self.dtype == "float32":
                low = [room("low1", x.size), room("low0", x.size)]
                upper = room("upper", x.size, np.uint16)
                kernels.split_float32(x, upper, *low)
            symbol, rest = room("symbol", x.size), room("rest", x.size)
            base = _exponent_base(upper) if self.dtype != "float16" else None
            if base is None:
                kernels.split_wide(upper, symbol, rest)
            else:
                kernels.split_narrow(upper, base, symbol, rest)
                if x.size % 8 == 0:
                    kernels.pack7(rest)
                    rest = rest[: x.size // 8 * 7]
            planes = [get(str(k), plane) for k, plane in enumerate([symbol, rest, *low])]
        head = struct.pack("<BB", base is not None, base or 0)
        coded = encode_planes(planes, coder=self.coder)
        payload = b"".join([head, *coded, chunk[body:].data])
        return payload if len(payload) < chunk.size else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild one chunk."""
        bits, count = _LAYOUTS[self.dtype]
        itemsize = int(bits[1])
        n = out.size // itemsize
        tail = out.size - n * itemsize
        if len(payload) < 2:
            raise CorruptError("planes lack their header")
        mode, base = payload[:2]
        if mode > 1 or base > 128 * mode or (mode and self.dtype not in ("bfloat16", "float32")):
            raise CorruptError("planes do not fit their dtype")
        sizes = [n] * count
        if mode and n % 8 == 0:
            sizes[1] = n // 8 * 7
        planes, rest = decode_planes(payload[2:], sizes)
        if len(rest) != tail:
            raise CorruptError("planes do not fill their chunk")
        x = out[: n * itemsize].view("<" + bits)
        if self.dtype == "float64":
            rotated = np.stack(planes, axis=1).view("<u8").reshape(-1)
            x[:] = (rotated >> np.uint64(1)) | (rotated << np.uint64(63))
        elif self.dtype == "fp8":
            x[:] = planes[0]
        else:
            symbol, low = put("symbol", planes[0]), put("rest", planes[1])
            upper = x if itemsize == 2 else room("upper", n, np.uint16)
            if mode:
                if n % 8 == 0:
                    packed, low = low, room("unpacked", n)
                    kernels.unpack7(packed, low)
                kernels.join_narrow(symbol, low, base, upper)
            else:
                kernels.join_wide(symbol, low, upper)
            if itemsize == 4:
                kernels.join_float32(upper, planes[2], planes[3], x)
        if self.byteorder == ">":
            x.byteswap(inplace=True)
        out[n * itemsize :] = np.frombuffer(rest, np.uint8)
