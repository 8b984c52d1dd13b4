"""Taking 16-bit patterns of floats apart into symbols and rest, and packing seven bits in eight.

A *wide* split gives bits 14 to 7 as symbol (for float16: exponent and three mantissa bits), the
sign and bits 6 to 0 as rest. A *narrow* one gives a 7-bit exponent and the top mantissa bit as
symbol, and seven bits as rest: exponent ``base + k`` has code k, zero has code 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, each, lower_to, raise_to
from ckz.kernels.buffers import scratch

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

# What an operation reads and writes stays in the cache.
_BLOCK = 1 << 16


def _blocks(n: int) -> Iterator[slice]:
    return (slice(at, min(at + _BLOCK, n)) for at in range(0, n, _BLOCK))


def _lanes(rows: Bytes) -> tuple[npt.NDArray[Any], int]:
    """View bytes as words of eight where they divide: there are no shifts of bytes in SIMD."""
    if rows.shape[1] % 8:
        return rows, 1
    return rows.view(np.uint64), 0x0101010101010101


def _split_wide_body(x: Words, symbol: Bytes, rest: Bytes) -> None:
    for i in each(x.size):
        v = np.uint32(x[i])
        symbol[i] = np.uint8(v >> np.uint32(7))
        rest[i] = np.uint8((v & np.uint32(0x7F)) | (v >> np.uint32(8) & np.uint32(0x80)))


def _split_wide_numpy(x: Words, symbol: Bytes, rest: Bytes) -> None:
    for block in _blocks(x.size):
        part = x[block]
        word = scratch("word", part.size, np.uint16)
        np.right_shift(part, 7, out=word)
        symbol[block] = word
        _rest(part, 7, 0x7F, rest[block])


def _join_wide_body(symbol: Bytes, rest: Bytes, x: Words) -> None:
    for i in each(x.size):
        r = np.uint32(rest[i])
        low = (r & np.uint32(0x7F)) | (r & np.uint32(0x80)) << np.uint32(8)
        x[i] = np.uint16(np.uint32(symbol[i]) << np.uint32(7) | low)


def _join_wide_numpy(symbol: Bytes, rest: Bytes, x: Words) -> None:
    for block in _blocks(x.size):
        part = x[block]
        part[:] = symbol[block]
        np.left_shift(part, 7, out=part)
        _add_rest(part, rest[block], 7, 0x7F)


def _split_narrow_body(x: Words, base: int, symbol: Bytes, rest: Bytes) -> None:
    # Without a base the loop has no comparison and runs twice as fast.
    if base == 0:
        for i in each(x.size):
            symbol[i] = np.uint8(np.uint32(x[i]) >> np.uint32(6))
    else:
        for i in each(x.size):
            magnitude = int(x[i]) & 0x7FFF
            code = max(magnitude >> 7, base) - base
            symbol[i] = np.uint8(code << 1 | magnitude >> 6 & 1)
    for i in each(x.size):
        v = np.uint32(x[i])
        rest[i] = np.uint8((v & np.uint32(0x3F)) | (v >> np.uint32(9) & np.uint32(0x40)))


def _split_narrow_numpy(x: Words, base: int, symbol: Bytes, rest: Bytes) -> None:
    for block in _blocks(x.size):
        part = x[block]
        word = scratch("word", part.size, np.uint16)
        if base:
            np.bitwise_and(part, 0x7FC0, out=word)
            np.maximum(word, base << 7, out=word)
            np.subtract(word, base << 7, out=word)
            top = np.bitwise_and(part, 0x40, out=scratch("other", part.size, np.uint16))
            np.bitwise_or(word, top, out=word)
            np.right_shift(word, 6, out=word)
        else:
            np.right_shift(part, 6, out=word)
        symbol[block] = word
        _rest(part, 6, 0x3F, rest[block])


def _join_narrow_body(symbol: Bytes, rest: Bytes, base: int, x: Words) -> None:
    if base == 0:
        for i in each(x.size):
            r = np.uint32(rest[i])
            low = (r & np.uint32(0x3F)) | (r & np.uint32(0x40)) << np.uint32(9)
            x[i] = np.uint16(np.uint32(symbol[i]) << np.uint32(6) | low)
        return
    for i in each(x.size):
        code, top = int(symbol[i]) >> 1, int(symbol[i]) & 1
        exponent = code + base if code > 0 else 0
        bits = int(rest[i])
        x[i] = np.uint16(exponent << 7 | top << 6 | (bits & 0x3F) | (bits & 0x40) << 9)


def _join_narrow_numpy(symbol: Bytes, rest: Bytes, base: int, x: Words) -> None:
    for block in _blocks(x.size):
        part = x[block]
        part[:] = symbol[block]
        if base:
            np.add(part, base << 1, out=part, where=part > 1)
        np.left_shift(part, 6, out=part)
        _add_rest(part, rest[block], 6, 0x3F)


def _rest(part: Words, sign: int, low: int, out: Bytes) -> None:
    """Give the sign, moved to just above the ``low`` bits, and those bits."""
    a, b = scratch("word", part.size, np.uint16), scratch("other", part.size, np.uint16)
    np.bitwise_and(part, 0x8000 | low, out=a)
    np.right_shift(a, 15 - sign, out=b)
    np.bitwise_or(a, b, out=a)
    out[:] = a


def _add_rest(part: Words, rest: Bytes, sign: int, low: int) -> None:
    """Undo ``_rest`` into elements whose other bits are set already."""
    a, b = scratch("word", part.size, np.uint16), scratch("other", part.size, np.uint16)
    a[:] = rest
    np.left_shift(a, 15 - sign, out=b)
    np.bitwise_or(a, b, out=a)
    np.bitwise_and(a, 0x8000 | low, out=a)
    np.bitwise_or(part, a, out=part)


def _pack7_body(x: Bytes) -> None:
    size = x.size // 8
    last = x[7 * size :]
    for j in range(7):
        row = x[j * size : (j + 1) * size]
        for i in each(size):
            bit = np.uint8(last[i] << np.uint8(7 - j)) & np.uint8(0x80)
            row[i] = np.uint8(row[i] | bit)


def _pack7_numpy(x: Bytes) -> None:
    rows, ones = _lanes(x.reshape(8, -1))
    bit = scratch("bit", rows.shape[1], rows.dtype)
    for j in range(7):
        np.left_shift(rows[7], 7 - j, out=bit)
        np.bitwise_and(bit, 0x80 * ones, out=bit)
        np.bitwise_or(rows[j], bit, out=rows[j])


def _unpack7_body(packed: Bytes, out: Bytes) -> None:
    size = out.size // 8
    last = out[7 * size :]
    for i in each(size):
        last[i] = 0
    for j in range(7):
        source, row = packed[j * size : (j + 1) * size], out[j * size : (j + 1) * size]
        for i in each(size):
            last[i] = np.uint8(last[i] | source[i] >> np.uint8(7 - j) & np.uint8(1 << j))
            row[i] = np.uint8(source[i] & np.uint8(0x7F))


def _unpack7_numpy(packed: Bytes, out: Bytes) -> None:
    rows, ones = _lanes(out.reshape(8, -1))
    packed_rows = packed.view(rows.dtype).reshape(7, -1)
    bit = scratch("bit", rows.shape[1], rows.dtype)
    rows[7] = 0
    for j in range(7):
        np.right_shift(packed_rows[j], 7 - j, out=bit)
        np.bitwise_and(bit, (1 << j) * ones, out=bit)
        np.bitwise_or(rows[7], bit, out=rows[7])
        np.bitwise_and(packed_rows[j], 0x7F * ones, out=rows[j])


def _split_float32_body(x: Any, upper: Words, low1: Bytes, low0: Bytes) -> None:
    for i in each(x.size):
        v = x[i]
        upper[i] = np.uint16(v >> np.uint32(16))
        low1[i] = np.uint8(v >> np.uint32(8))
        low0[i] = np.uint8(v)


def _split_float32_numpy(x: Any, upper: Words, low1: Bytes, low0: Bytes) -> None:
    for block in _blocks(x.size):
        part = x[block]
        wide = scratch("wide", part.size, np.uint32)
        low0[block] = part
        np.right_shift(part, 8, out=wide)
        low1[block] = wide
        np.right_shift(part, 16, out=wide)
        upper[block] = wide


def _join_float32_body(upper: Words, low1: Bytes, low0: Bytes, x: Any) -> None:
    for i in each(x.size):
        high = np.uint32(upper[i]) << np.uint32(16)
        x[i] = high | np.uint32(low1[i]) << np.uint32(8) | np.uint32(low0[i])


def _join_float32_numpy(upper: Words, low1: Bytes, low0: Bytes, x: Any) -> None:
    for block in _blocks(x.size):
        part = x[block]
        wide = scratch("wide", part.size, np.uint32)
        part[:] = upper[block]
        np.left_shift(part, 8, out=part)
        wide[:] = low1[block]
        np.bitwise_or(part, wide, out=part)
        np.left_shift(part, 8, out=part)
        wide[:] = low0[block]
        np.bitwise_or(part, wide, out=part)


def _exponents_body(x: Words, found: npt.NDArray[np.int32]) -> None:
    for i in each(x.size):
        exponent = np.int32(x[i] >> 7 & 0xFF)
        # One less wraps zero, which is no exponent, out of the minimum's way.
        below = np.int32(exponent - 1 & 0xFF)
        # Looked at first, for threads would wait for each other at one place.
        if exponent > found[0]:
            raise_to(found, 0, exponent)
        if below < found[1]:
            lower_to(found, 1, below)


def _exponents_numpy(x: Words, found: npt.NDArray[np.int32]) -> None:
    if not x.size:
        return
    # The largest magnitude is the largest positive value, or the largest negative pattern.
    largest = max(int(x.view(np.int16).max()), int(x.max()) & 0x7FFF) >> 7
    found[0] = max(int(found[0]), largest)
    if largest > 127:  # or all of them fit, whatever they are
        exponent = scratch("exponent", x.size)
        word = scratch("word", x.size, np.uint16)
        np.right_shift(x, 7, out=word)
        exponent[:] = word
        np.subtract(exponent, 1, out=exponent)
        found[1] = min(int(found[1]), int(exponent.min()))


split_wide = Kernel(_split_wide_body, _split_wide_numpy, outputs=2)
join_wide = Kernel(_join_wide_body, _join_wide_numpy, outputs=1)
split_narrow = Kernel(_split_narrow_body, _split_narrow_numpy, outputs=2)
join_narrow = Kernel(_join_narrow_body, _join_narrow_numpy, outputs=1)
pack7 = Kernel(_pack7_body, _pack7_numpy, outputs=1, updates=True)
unpack7 = Kernel(_unpack7_body, _unpack7_numpy, outputs=1)
split_float32 = Kernel(_split_float32_body, _split_float32_numpy, outputs=3)
join_float32 = Kernel(_join_float32_body, _join_float32_numpy, outputs=1)
# The largest 8-bit exponent of 16-bit patterns; one less than the smallest that is not zero, needed
# where the largest is above 127. They start as 0 and 255.
exponents = Kernel(_exponents_body, _exponents_numpy, outputs=1, updates=True, in_numpy=True)
