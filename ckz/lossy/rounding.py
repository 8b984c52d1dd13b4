"""Methods that need no codec of their own: fewer bits of an element, or none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckz.codecs.cast import round_to
from ckz.codecs.floats import WIDTHS, Bytes, narrow, widen, words_of

_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}
_MAGNITUDE = {4: 0x7FFFFFFF, 2: 0x7FFF}


def drop(chunk: Bytes, at: int) -> None:
    """Make all zero."""
    chunk[:] = 0


def round_bits(chunk: Bytes, at: int, *, low: int, casts: str = "") -> None:
    """Round float32 elements so that their ``low`` bits are zero.

    Parameters
    ----------
    casts : a 16-bit type that the elements must round to as before: a weight beside its master is
        not stored, it is the cast of it.
    """
    bits = chunk.view("<u4")
    unit = np.uint32(1 << low)
    down = bits & ~(unit - np.uint32(1))
    nearest = down + np.where(bits & (unit >> np.uint32(1)), unit, np.uint32(0))
    # Not into infinity, and not out of NaN.
    magnitude = bits & np.uint32(0x7FFFFFFF)
    keep = (magnitude >= 0x7F800000) | (magnitude == 0)
    keep |= (nearest & np.uint32(0x7FFFFFFF)) >= 0x7F800000
    keep |= (nearest & np.uint32(0x7FFFFFFF)) == 0
    made = np.where(keep, bits, nearest)
    if casts:
        # Of the two neighbours on the grid at least one is on the same side of a tie.
        wanted = round_to(casts, bits).copy()
        for other in (down, down + unit, bits):
            off = np.flatnonzero(round_to(casts, made) != wanted)
            made[off] = other[off]
    bits[:] = made


def round_relative(chunk: Bytes, at: int, *, dtype: str, bound: float) -> None:
    """Keep as many bits of each mantissa as a relative error allows.

    What would be off by more, such as subnormal numbers, stays.
    """
    words = words_of(dtype, chunk)
    kept = max(0, int(np.ceil(-np.log2(bound) - 1)))
    low = _MANTISSA[dtype] - kept
    if low <= 0:
        return
    unit = words.dtype.type(1 << low)
    half = words.dtype.type(1 << (low - 1))
    # Carries into the exponent are right; one into infinity misses the bound.
    made = (words + half) & ~(unit - words.dtype.type(1))
    before, after = (widen(dtype, x).astype(np.float64) for x in (words, made))
    good = np.abs(after - before) <= bound * np.abs(before)
    chunk.view(words.dtype)[:] = np.where(good & (after != 0), made, words)


def round_type(chunk: Bytes, at: int, *, dtype: str, to: str) -> None:
    """Round to a narrower type, kept in the wider one; what overflows or vanishes stays."""
    words = words_of(dtype, chunk)
    values = widen(dtype, words)
    near = widen(to, narrow(to, values))
    good = np.isfinite(near) & ((near != 0) | (values == 0))
    chunk.view(words.dtype)[:] = np.where(good, narrow(dtype, near), words)


def cast_of(master: npt.NDArray[np.uint8], chunk: Bytes, *, dtype: str) -> None:
    """Make elements the casts of float32 ones."""
    assert WIDTHS[dtype] == 2
    chunk.view("<u2")[:] = round_to(dtype, master.view("<u4"))
