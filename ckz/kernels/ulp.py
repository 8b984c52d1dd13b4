"""Differences of floats in units in the last place, sorted by what they start from.

Bits become *ordered* integers: the magnitude of negative patterns is flipped, so that neighbouring
floats are neighbouring numbers. Differences wrap and are zigzagged: 0, -1, 1, -2, ... become 0, 1,
2, 3, ... They are sorted by the exponent of the base, see ``sorting``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, each
from ckz.kernels.buffers import scratch
from ckz.kernels.device import get, put, room
from ckz.kernels.sorting import Order, order_by_class, sort, unsort

SAMPLE = 1024

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
    for i in each(current.size):
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
    for i in each(base.size):
        b, z = np.int64(base[i]), np.int64(zigzag[i])
        if is_float:
            b ^= (b << (64 - bits) >> 63) & low
        o = b + ((z >> 1 & low) ^ -(z & 1))
        if is_float:
            o ^= (o << (64 - bits) >> 63) & low
        out[i] = o


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


def _summaries_body(
    ordered: Words, starts: npt.NDArray[np.int64], found: npt.NDArray[np.uint64]
) -> None:
    one = np.uint64(1)
    mask = np.uint64((1 << 8 * ordered.itemsize - 1) - 1) << one | one
    for c in range(starts.size - 1):
        found[c] = 0
        values = ordered[starts[c] : starts[c + 1]]
        if values.size == 0:
            continue
        # In the type of the elements, or it would not vectorize.
        largest = values[0]
        for i in range(values.size):
            if values[i] > largest:
                largest = values[i]
        step = max(1, values.size // SAMPLE)
        lengths = np.zeros(65, np.int64)
        union = np.uint64(0)
        for i in range(0, values.size, step):
            value, length = np.uint64(values[i]), 0
            union |= value ^ (np.uint64(0) - (value & one))
            while value > 0:
                value >>= one
                length += 1
            lengths[length] += 1
        if union & np.uint64(2) == 0:
            for i in range(values.size):
                value = np.uint64(values[i])
                union |= value ^ (np.uint64(0) - (value & one))
        sampled = lengths.sum()
        length, below = 0, lengths[0]
        while below < sampled - sampled // 100:
            length += 1
            below += lengths[length]
        found[c, 0], found[c, 1], found[c, 2] = union & mask, largest, length


def _summaries_numpy(
    ordered: Words, starts: npt.NDArray[np.int64], found: npt.NDArray[np.uint64]
) -> None:
    for c in range(starts.size - 1):
        values = ordered[starts[c] : starts[c + 1]]
        found[c] = 0
        if not values.size:
            continue
        sample = values[:: max(1, values.size // SAMPLE)]
        rank = sample.size - 1 - sample.size // 100
        usual = int(np.partition(sample, rank)[rank])
        union = np.bitwise_or.reduce(sample ^ (0 - (sample & 1)))
        if not int(union) & 2:
            union = np.bitwise_or.reduce(values ^ (0 - (values & 1)))
        found[c] = int(union), int(values.max()), usual.bit_length()


zigzag = Kernel(_zigzag_body, _zigzag_numpy, outputs=1)
add_zigzag = Kernel(_add_zigzag_body, _add_zigzag_numpy, outputs=1)
# Of each class: the union of the differences' bits, those of negative ones flipped (of a sample,
# where that has bit 1 already); the largest; and how many bits 99 of 100 in a sample do not exceed.
summaries = Kernel(_summaries_body, _summaries_numpy)
# The symbols that are not zero; as long as the symbols, with room for one more.
squeeze = Kernel(_squeeze_body, _squeeze_numpy)
# Undoes it: as many values as changed elements.
spread = Kernel(_spread_body, _spread_numpy)


def sorted_differences(
    current: Words, base: Words, how: tuple[int, int, int]
) -> tuple[Words, npt.NDArray[np.int64]]:
    """Give zigzagged differences sorted by class, and where each class begins.

    Parameters
    ----------
    how : position and width of the exponent, which is of no width in integers; coarseness.
    """
    base, current = put("base", base), put("current", current)
    found, ordered = (room(key, base.size, base.dtype) for key in ("zigzag", "sorted"))
    zigzag(current, base, how[1] > 0, found)
    order = order_by_class(base, *how)
    sort(found, order, ordered)
    return get("sorted", ordered), order.starts


def add_sorted_differences(
    base: Words, ordered: Words, order: Order, width: int, out: Words
) -> None:
    """Undo ``sorted_differences`` once the order is known."""
    found = room("zigzag", base.size, base.dtype)
    unsort(put("sorted", ordered), order, found)
    add_zigzag(base, found, width > 0, out)
