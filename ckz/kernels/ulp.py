"""Differences of floats in units in the last place, sorted by what they start from.

Bits become *ordered* integers: the magnitude of negative patterns is flipped, so that neighbouring
floats are neighbouring numbers. Differences wrap and are zigzagged: 0, -1, 1, -2, ... become 0, 1,
2, 3, ... An element's *class* is how far its base's exponent lies below a chunk's largest one; the
*coarse* lowest bits of that are dropped. Sorting by class keeps the order within one; compiled, it
works at ``LANES`` parts of a chunk by turns, for each place waits for the one before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel
from ckz.kernels.buffers import scratch

CLASSES = 12
LANES = 4

Words = npt.NDArray[Any]


def _order(x: Words, out: Words) -> None:
    """Give the bits of floats as signed integers in the floats' order; its own inverse."""
    signed = np.dtype(f"i{x.itemsize}")
    bits = 8 * x.itemsize
    np.right_shift(x.view(signed), bits - 1, out=out.view(signed))
    np.bitwise_and(out, (1 << (bits - 1)) - 1, out=out)
    np.bitwise_xor(out, x, out=out)


def _zigzag_numpy(current: Words, base: Words, is_float: bool, out: Words) -> None:
    signed = np.dtype(f"i{current.itemsize}")
    other = scratch("ordered", current.size, current.dtype)
    if is_float:
        _order(current, out)
        _order(base, other)
        np.subtract(out, other, out=out)
    else:
        np.subtract(current, base, out=out)
    np.right_shift(out.view(signed), 8 * current.itemsize - 1, out=other.view(signed))
    np.add(out, out, out=out)
    np.bitwise_xor(out, other, out=out)


def _zigzag_body(current: Words, base: Words, is_float: bool, out: Words) -> None:
    bits = current.itemsize * 8
    low = (1 << (bits - 1)) - 1
    for i in range(current.size):
        a, b = np.int64(current[i]), np.int64(base[i])
        if is_float:
            a ^= (a << (64 - bits) >> 63) & low
            b ^= (b << (64 - bits) >> 63) & low
        d = (a - b) << (64 - bits) >> (64 - bits)
        out[i] = d << 1 ^ d >> 63


def _add_zigzag_numpy(base: Words, zigzag: Words, is_float: bool, out: Words) -> None:
    other = scratch("ordered", base.size, base.dtype)
    np.bitwise_and(zigzag, 1, out=other)
    np.negative(other, out=other)
    np.right_shift(zigzag, 1, out=out)
    np.bitwise_xor(other, out, out=other)
    if is_float:
        _order(base, out)
        np.add(out, other, out=other)
        _order(other, out)
    else:
        np.add(base, other, out=out)


def _add_zigzag_body(base: Words, zigzag: Words, is_float: bool, out: Words) -> None:
    bits = base.itemsize * 8
    low = (1 << (bits - 1)) - 1
    for i in range(base.size):
        b, z = np.int64(base[i]), np.int64(zigzag[i])
        if is_float:
            b ^= (b << (64 - bits) >> 63) & low
        o = b + ((z >> 1 & low) ^ -(z & 1))
        if is_float:
            o ^= (o << (64 - bits) >> 63) & low
        out[i] = o


def _classes_numpy(
    base: Words,
    shift: int,
    width: int,
    coarse: int,
    out: npt.NDArray[np.uint8],
    counts: npt.NDArray[np.int64],
) -> None:
    exponent = scratch("exponents", base.size, base.dtype)
    np.right_shift(base, shift, out=exponent)
    np.bitwise_and(exponent, (1 << width) - 1, out=exponent)
    np.subtract(exponent.max(initial=0), exponent, out=exponent)
    np.minimum(exponent, CLASSES - 1, out=exponent)
    out[:] = exponent
    np.right_shift(out, coarse, out=out)
    part = out.size // LANES
    for lane in range(LANES):
        end = (lane + 1) * part if lane < LANES - 1 else out.size
        counts[lane] = np.bincount(out[lane * part : end], minlength=CLASSES)


def _classes_body(
    base: Words,
    shift: int,
    width: int,
    coarse: int,
    out: npt.NDArray[np.uint8],
    counts: npt.NDArray[np.int64],
) -> None:
    mask = (1 << width) - 1
    top: Any = 0
    for i in range(base.size):
        top = max(top, np.int64(base[i]) >> shift & mask)
    for i in range(base.size):
        out[i] = min(top - (np.int64(base[i]) >> shift & mask), CLASSES - 1) >> coarse
    counts[:] = 0
    part = out.size // LANES
    for i in range(part):
        for lane in range(LANES):
            counts[lane, out[lane * part + i]] += 1
    for i in range(LANES * part, out.size):
        counts[LANES - 1, out[i]] += 1


def _scatter_numpy(values: Words, classes: npt.NDArray[np.uint8], starts: Any, out: Words) -> None:
    out[:] = values[np.argsort(classes, kind="stable")]


def _scatter_body(values: Words, classes: npt.NDArray[np.uint8], starts: Any, out: Words) -> None:
    at = starts.copy()
    part = values.size // LANES
    for i in range(part):
        for lane in range(LANES):
            c = classes[lane * part + i]
            out[at[lane, c]] = values[lane * part + i]
            at[lane, c] += 1
    for i in range(LANES * part, values.size):
        c = classes[i]
        out[at[LANES - 1, c]] = values[i]
        at[LANES - 1, c] += 1


def _gather_numpy(values: Words, classes: npt.NDArray[np.uint8], starts: Any, out: Words) -> None:
    out[np.argsort(classes, kind="stable")] = values


def _gather_body(values: Words, classes: npt.NDArray[np.uint8], starts: Any, out: Words) -> None:
    at = starts.copy()
    part = values.size // LANES
    for i in range(part):
        for lane in range(LANES):
            c = classes[lane * part + i]
            out[lane * part + i] = values[at[lane, c]]
            at[lane, c] += 1
    for i in range(LANES * part, values.size):
        c = classes[i]
        out[i] = values[at[LANES - 1, c]]
        at[LANES - 1, c] += 1


def _squeeze_numpy(symbols: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    out[: np.count_nonzero(symbols)] = symbols[symbols != 0]


def _squeeze_body(symbols: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    at = 0
    for i in range(symbols.size):
        out[at] = symbols[i]
        at += symbols[i] != 0


def _spread_numpy(
    changed: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]
) -> None:
    out[:] = 0
    out[changed.view(bool)] = values


def _spread_body(
    changed: npt.NDArray[np.uint8], values: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]
) -> None:
    at = 0
    for i in range(out.size):
        if changed[i]:
            out[i] = values[at]
            at += 1
        else:
            out[i] = 0


zigzag = Kernel(_zigzag_body, _zigzag_numpy)
add_zigzag = Kernel(_add_zigzag_body, _add_zigzag_numpy)
classes = Kernel(_classes_body, _classes_numpy)
scatter = Kernel(_scatter_body, _scatter_numpy)
gather = Kernel(_gather_body, _gather_numpy)
# The symbols that are not zero; as long as the symbols, with room for one more.
squeeze = Kernel(_squeeze_body, _squeeze_numpy)
# Undoes it: as many values as changed elements.
spread = Kernel(_spread_body, _spread_numpy)
