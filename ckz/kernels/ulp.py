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


zigzag = Kernel(_zigzag_body, _zigzag_numpy, outputs=1)
add_zigzag = Kernel(_add_zigzag_body, _add_zigzag_numpy, outputs=1)


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
