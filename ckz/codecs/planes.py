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
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.zstd import compress, decompress_into
from ckz.errors import CorruptError

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

# 4096 samples show a gain of 0.03 bit at ten standard deviations.
_SAMPLES = 4096
_PAYS = 0.03

_local = threading.local()


def _scratch(key: str, n: int, dtype: Any = np.uint8) -> npt.NDArray[Any]:
    """Give this thread's buffer of a name: fresh pages cost as much as the codec itself."""
    cache: dict[str, npt.NDArray[Any]] = _local.__dict__.setdefault("buffers", {})
    if key not in cache or cache[key].size < n:
        cache[key] = np.empty(n, dtype)
    return cache[key][:n]


def _compressible(plane: Bytes) -> bool:
    """Tell from a sample whether Huffman coding could save anything."""
    step = max(1, plane.size // _SAMPLES)
    sample = plane[: step * _SAMPLES : step]
    counts = np.bincount(sample, minlength=256)
    n = sample.size
    # Second-order expansion of the entropy around the uniform one: exact where it matters.
    excess = (float((counts * counts).sum()) - n) * 256 / (n * max(1, n - 1)) - 1
    return bool(excess / (2 * np.log(2)) > _PAYS)


def _pack7(x: Bytes) -> Bytes:
    """Pack 7-bit values: the last eighth of them goes into the top bits of the others."""
    if x.size % 8:
        return x
    rows = x.reshape(8, -1)
    out = rows[:7]
    bit = _scratch("bit", rows.shape[1])
    for j in range(7):
        np.left_shift(rows[7], 7 - j, out=bit)
        np.bitwise_and(bit, 0x80, out=bit)
        np.bitwise_or(out[j], bit, out=out[j])
    return out.reshape(-1)


def _unpack7(packed: Bytes, x: Bytes) -> None:
    """Undo ``_pack7``, in place where ``packed`` is the front of ``x``."""
    rows = x.reshape(8, -1)
    if packed is not x:
        x[: packed.size] = packed
    rows[7] = 0
    bit = _scratch("bit", rows.shape[1])
    for j in range(7):
        np.right_shift(rows[j], 7 - j, out=bit)
        np.bitwise_and(bit, 1 << j, out=bit)
        np.bitwise_or(rows[7], bit, out=rows[7])
    np.bitwise_and(rows[:7], 0x7F, out=rows[:7])


def _split_wide(x: Words) -> tuple[Bytes, Bytes]:
    """Give bits 14 to 7 as symbol, the sign and bits 6 to 0 as rest."""
    symbol, rest = _scratch("symbol", x.size), _scratch("rest", x.size)
    word = _scratch("word", x.size, np.uint16)
    np.right_shift(x, 7, out=word)
    symbol[:] = word
    np.right_shift(x, 8, out=word)
    rest[:] = word
    np.bitwise_and(rest, 0x80, out=rest)
    np.bitwise_and(x, 0x7F, out=word)
    np.bitwise_or(rest, word, out=rest, casting="unsafe")
    return symbol, rest


def _join_wide(symbol: Bytes, rest: Bytes, x: Words) -> None:
    word = _scratch("word", x.size, np.uint16)
    np.left_shift(symbol, 7, out=x, dtype=np.uint16)
    np.bitwise_and(rest, 0x7F, out=word)
    np.bitwise_or(x, word, out=x)
    np.bitwise_and(rest, 0x80, out=word)
    np.left_shift(word, 8, out=word)
    np.bitwise_or(x, word, out=x)


def _exponent_base(x: Words) -> int | None:
    """Find the base that makes all 8-bit exponents fit in seven bits; None if there is none."""
    exponent = _scratch("exponent", x.size)
    word = _scratch("word", x.size, np.uint16)
    np.right_shift(x, 7, out=word)
    exponent[:] = word
    top = int(exponent.max(initial=0))
    if top <= 127:
        return 0
    base = top - 127
    # Zero is always representable: subtracting one wraps it out of the minimum's way.
    np.subtract(exponent, 1, out=exponent)
    return base if int(exponent.min()) >= base else None


def _split_narrow(x: Words, base: int) -> tuple[Bytes, Bytes]:
    """Give a 7-bit exponent and the top mantissa bit as symbol, seven packed bits as rest."""
    symbol, rest = _scratch("symbol", x.size), _scratch("rest", x.size)
    word = _scratch("word", x.size, np.uint16)
    if base:
        np.right_shift(x, 7, out=word)
        symbol[:] = word
        np.maximum(symbol, base, out=symbol)
        np.subtract(symbol, base, out=symbol)
        np.left_shift(symbol, 1, out=symbol)
        np.right_shift(x, 6, out=word)
        np.bitwise_and(word, 1, out=word)
        np.bitwise_or(symbol, word, out=symbol, casting="unsafe")
    else:
        np.right_shift(x, 6, out=word)
        symbol[:] = word
    np.right_shift(x, 9, out=word)
    rest[:] = word
    np.bitwise_and(rest, 0x40, out=rest)
    np.bitwise_and(x, 0x3F, out=word)
    np.bitwise_or(rest, word, out=rest, casting="unsafe")
    return symbol, _pack7(rest)


def _join_narrow(symbol: Bytes, rest: Bytes, base: int, x: Words) -> None:
    word = _scratch("word", x.size, np.uint16)
    if base:
        exponent = _scratch("exponent", x.size)
        np.right_shift(symbol, 1, out=exponent)
        np.add(exponent, base, out=exponent, where=exponent > 0)
        np.left_shift(exponent, 1, out=x, dtype=np.uint16)
        np.bitwise_and(symbol, 1, out=symbol)
        np.bitwise_or(x, symbol, out=x)
        np.left_shift(x, 6, out=x)
    else:
        np.left_shift(symbol, 6, out=x, dtype=np.uint16)
    np.bitwise_and(rest, 0x3F, out=word)
    np.bitwise_or(x, word, out=x)
    np.bitwise_and(rest, 0x40, out=word)
    np.left_shift(word, 9, out=word)
    np.bitwise_or(x, word, out=x)


@dataclass(frozen=True)
class Planes:
    """Planes of one float dtype; complex numbers are pairs of floats.

    The payload is a mode byte, a base byte, the stored length of each plane as uint32, and the
    planes; a plane stored at its full length is not coded. Bytes after the last whole element
    follow as they are.
    """

    name: ClassVar[str] = "planes"
    dtype: str = ""
    byteorder: str = "<"

    def __post_init__(self) -> None:
        if self.dtype not in _LAYOUTS or self.byteorder not in ("<", ">"):
            raise ValueError("no planes for this dtype or byte order")

    def encode(self, chunk: Bytes) -> bytes | None:
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
            if self.dtype == "float32":
                low = [_scratch("low0", x.size), _scratch("low1", x.size)]
                low[0][:] = x
                wide = _scratch("wide", x.size, np.uint32)
                np.right_shift(x, 8, out=wide)
                low[1][:] = wide
                np.right_shift(x, 16, out=wide)
                x = _scratch("upper", x.size, np.uint16)
                x[:] = wide
            if self.dtype != "float16":
                base = _exponent_base(x)
            planes = [*(_split_wide(x) if base is None else _split_narrow(x, base)), *low]
        coded = [compress(plane) if _compressible(plane) else plane for plane in planes]
        coded = [c if len(c) < p.size else p for c, p in zip(coded, planes, strict=True)]
        lengths = [len(c) for c in coded]
        if sum(lengths) >= body:
            return None
        head = struct.pack(f"<BB{len(coded)}I", base is not None, base or 0, *lengths)
        return b"".join(
            [head, *(c if isinstance(c, bytes) else c.data for c in coded), chunk[body:].data]
        )

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild one chunk."""
        bits, count = _LAYOUTS[self.dtype]
        itemsize = int(bits[1])
        n = out.size // itemsize
        tail = out.size - n * itemsize
        head = struct.calcsize(f"<BB{count}I")
        if len(payload) < head + tail:
            raise CorruptError(f"planes of {len(payload)} bytes lack their header")
        mode, base, *lengths = struct.unpack_from(f"<BB{count}I", payload)
        if head + sum(lengths) + tail != len(payload) or mode > 1 or base > 128 - (mode == 0) * 128:
            raise CorruptError("planes do not have the lengths their header states")
        if mode and self.dtype not in ("bfloat16", "float32"):
            raise CorruptError(f"planes of {self.dtype} have no 7-bit exponents")
        planes = []
        at = head
        for k, length in enumerate(lengths):
            size = n // 8 * 7 if k == 1 and mode and n % 8 == 0 else n
            plane = _scratch(f"plane{k}", n)
            if length > size:
                raise CorruptError("a plane is longer than the chunk allows")
            if length == size:
                plane[:size] = np.frombuffer(payload, np.uint8, size, at)
            else:
                decompress_into(payload[at : at + length], plane[:size])
            planes.append(plane)
            at += length
        x = out[: n * itemsize].view("<" + bits)
        if self.dtype == "float64":
            rotated = np.stack(planes, axis=1).view("<u8").reshape(-1)
            x[:] = (rotated >> np.uint64(1)) | (rotated << np.uint64(63))
        elif self.dtype == "fp8":
            x[:] = planes[0]
        else:
            symbol, rest = planes[:2]
            upper = x if itemsize == 2 else _scratch("upper", n, np.uint16)
            if mode:
                if n % 8 == 0:
                    _unpack7(rest, rest)
                _join_narrow(symbol, rest, base, upper)
            else:
                _join_wide(symbol, rest, upper)
            if itemsize == 4:
                wide = _scratch("wide", n, np.uint32)
                np.left_shift(upper, 16, out=x, dtype=np.uint32)
                np.left_shift(planes[3], 8, out=wide, dtype=np.uint32)
                np.bitwise_or(x, wide, out=x)
                np.bitwise_or(x, planes[2], out=x)
        if self.byteorder == ">":
            x.byteswap(inplace=True)
        out[n * itemsize :] = np.frombuffer(payload, np.uint8, tail, len(payload) - tail)
