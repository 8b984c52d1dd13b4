"""Methods that need no codec of their own: fewer bits of an element, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckz.codecs.cast import round_to
from ckz.codecs.floats import Bytes, narrow, widen, words_of

_MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10}


def drop(chunk: Bytes, at: int) -> None:
    """Make all zero."""
    chunk[:] = 0


def round_bits(chunk: Bytes, at: int, *, low: int, casts: Sequence[str] = ()) -> None:
    """Round float32 elements so that their ``low`` bits are zero.

    Parameters
    ----------
    casts : 16-bit types that the elements must round to as before: a weight beside its master is
        not stored, it is the cast of it.
    """
    bits = chunk.view("<u4")
    unit = np.uint32(1 << low)
    mask = ~(unit - np.uint32(1))
    nearest = (bits + (unit >> np.uint32(1))) & mask
    # Not into infinity, and not out of NaN.
    magnitude = bits & np.uint32(0x7FFFFFFF)
    keep = (magnitude >= 0x7F800000) | (magnitude == 0)
    keep |= (nearest & np.uint32(0x7FFFFFFF)) >= 0x7F800000
    keep |= (nearest & np.uint32(0x7FFFFFFF)) == 0
    made = np.where(keep, bits, nearest)
    for dtype in casts:
        wanted = round_to(dtype, bits).copy()
        off = np.flatnonzero(round_to(dtype, made) != wanted)
        # Of the two neighbours on the grid at least one is on the same side of a tie.
        down = bits[off] & mask
        for other in (down, down + unit, bits[off]):
            made[off] = np.where(round_to(dtype, made[off]) != wanted[off], other, made[off])
    # With two types, what was mended for one may be off for the other.
    for dtype in casts if len(casts) > 1 else ():
        off = np.flatnonzero(round_to(dtype, made).copy() != round_to(dtype, bits))
        made[off] = bits[off]
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


def cast_of(was: Bytes, now: Bytes, chunk: Bytes, *, dtype: str, kind: str, limit: float) -> None:
    """Make elements that were the casts of float32 ones the casts of what these become.

    Parameters
    ----------
    kind, limit : a bound that the elements have to keep: ``abs`` and ``rel`` of an amount,
        ``pwrel`` of a part; any other kind is none.
    """
    words = chunk.view("<u2")
    before, after = widen(dtype, words), narrow(dtype, now.view(np.float32))
    good = narrow(dtype, was.view(np.float32)) == words
    good &= np.isfinite(before) & (before != 0)
    near = widen(dtype, after)
    good &= np.isfinite(near)
    if kind in ("abs", "rel", "pwrel"):
        old = before.astype(np.float64)
        allowed = limit * np.abs(old) if kind == "pwrel" else limit
        good &= np.abs(near.astype(np.float64) - old) <= allowed
    words[:] = np.where(good, after, words)
