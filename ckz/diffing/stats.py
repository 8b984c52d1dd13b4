"""How two runs of values differ: counts, sums, and distances in units in the last place.

Bit patterns are compared first; values only where patterns differ. Sums are of float64 in a fixed
order, block by block, so they do not depend on threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Tensor, numpy_dtype
from ckz.kernels.buffers import scratch
from ckz.kernels.differences import LANES, STEPS, SUMS, add_sums, count_steps

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

# Elements that are looked at together: what they become stays in the cache.
_RUN = 1 << 15
# Complex numbers are pairs of these.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_BITS_ONLY = ("bytes", "float4_e2m1fn_x2")
_UNSIGNED = "float8_e8m0fnu"  # powers of two, without a sign


class Tolerance(NamedTuple):
    """Values that differ by no more than ``atol + rtol * |a|`` count as unchanged."""

    atol: float = 0.0
    rtol: float = 0.0


class Stats(NamedTuple):
    """How the values of two tensors of one shape differ; complex numbers count as two.

    Largest difference, sums and distances are of pairs of finite numbers. Where dtypes differ,
    ``bits`` counts the values that differ.

    Attributes
    ----------
    elements : how many pairs were compared.
    bits : pairs whose bits differ.
    same : of these, those that are equal by value: 0.0 and -0.0, NaN and another NaN.
    zeros : of these, 0.0 and -0.0.
    within : of ``bits``, those that are not equal but within the tolerance.
    nan_a, nan_b, inf_a, inf_b : NaN and infinities of each side.
    largest : of the absolute differences, None where values are only bits; exact for integers,
        except uint64 beside signed ones.
    dd, aa, ab : sums of (b - a)**2, a**2, a * (b - a).
    ulps : pairs that are 0, 1, 2-3, 4-7... steps apart; empty but for floats of one dtype.
    """

    elements: int
    bits: int = 0
    same: int = 0
    zeros: int = 0
    within: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    largest: float | int | None = 0
    dd: float = 0.0
    aa: float = 0.0
    ab: float = 0.0
    ulps: tuple[int, ...] = ()

    @property
    def changed(self) -> int:
        """Pairs that differ by value, and by more than the tolerance."""
        return self.bits - self.same - self.within

    @property
    def relative_l2(self) -> float | None:
        """Norm of the difference over that of a: 0 if nothing differs, infinite where a is zero."""
        if self.largest is None or math.isinf(self.aa):
            return None
        if self.dd == 0:
            return 0.0
        return math.sqrt(self.dd / self.aa) if self.aa else math.inf

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both sides; None where one is zero or overflows."""
        bb = self.aa + 2 * self.ab + self.dd
        if self.largest is None or not (0 < self.aa < math.inf and 0 < bb < math.inf):
            return None
        return max(-1.0, min(1.0, (self.aa + self.ab) / (math.sqrt(self.aa) * math.sqrt(bb))))


def total(parts: Iterable[Stats], times: int = 1) -> Stats:
    """Add up stats of parts; each counts ``times`` times over."""
    rows = list(parts)
    if len(rows) == 1 and times == 1:
        return rows[0]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(Stats._fields)
    *counts, largest, dd, aa, ab, ulps = columns
    width = max(map(len, ulps), default=0)
    return Stats._make(
        [
            *(times * sum(column) for column in counts),
            max((value for value in largest if value is not None), default=None),
            *(times * _sum(column) for column in (dd, aa, ab)),
            tuple(times * sum(u[k] for u in ulps if k < len(u)) for k in range(width)),
        ]
    )


def _sum(values: Iterable[float]) -> float:
    """Add up without rounding, so that the order does not matter."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # sums that overflow, or are infinite already
        return math.inf


def compare(a: Bytes, b: Bytes, dtypes: tuple[str, str], tolerance: Tolerance) -> Stats:
    """Compare the values of two runs of elements, in native byte order and equal in number.

    Parameters
    ----------
    a, b : the bytes of the elements.
    dtypes : of each side, keys of ``ITEMSIZE``.
    """
    parts = (_PARTS.get(dtypes[0], dtypes[0]), _PARTS.get(dtypes[1], dtypes[1]))
    p, q = (side.view(_bits(dtype)) for side, dtype in zip((a, b), parts, strict=True))
    if p.size != q.size or not is_comparable(*parts):
        raise ValueError(f"{dtypes[0]} and {dtypes[1]} have no values in common")
    with np.errstate(all="ignore"):
        return total(list(_runs(p, q, parts, tolerance)) or [Stats(0)])


def measure(a: Bytes, dtype: str) -> Stats:
    """Give what ``compare`` gives for a run of elements and itself."""
    part = _PARTS.get(dtype, dtype)
    p = a.view(_bits(part))
    if part in _BITS_ONLY:
        return Stats(p.size, largest=None)
    with np.errstate(all="ignore"):
        return total([_measure_run(p[at : at + _RUN], part) for at in range(0, p.size, _RUN)])


def _measure_run(p: Array, dtype: str) -> Stats:
    x = _values(p, dtype, "x")
    nans = infs = 0
    if not math.isfinite((sums := _sums(x, x))[1]):
        nans, infs = int(np.count_nonzero(np.isnan(x))), int(np.count_nonzero(np.isinf(x)))
        x = x[np.isfinite(x)]
        sums = _sums(x, x)
    ulps = () if _is_integer(dtype) else (x.size,)
    return Stats(p.size, nan_a=nans, nan_b=nans, inf_a=infs, inf_b=infs, aa=sums[1], ulps=ulps)


def is_comparable(a: str, b: str) -> bool:
    """Whether values of two dtypes can be compared."""
    return a == b or (
        a not in _BITS_ONLY and b not in _BITS_ONLY and (a in _PARTS) == (b in _PARTS)
    )


def numbers_in(tensor: Tensor) -> int:
    """Count a tensor's elements as ``Stats`` does."""
    return math.prod(tensor.shape) * (2 if tensor.dtype in _PARTS else 1)


def _runs(p: Array, q: Array, dtypes: tuple[str, str], tolerance: Tolerance) -> Iterator[Stats]:
    compare_run = _choose(*dtypes)
    for at in range(0, p.size, _RUN):
        yield compare_run(p[at : at + _RUN], q[at : at + _RUN], dtypes, tolerance)


def _choose(a: str, b: str) -> Callable[[Array, Array, tuple[str, str], Tolerance], Stats]:
    if a in _BITS_ONLY:
        return _compare_bits
    if _is_integer(a) and _is_integer(b) and max(ITEMSIZE[a], ITEMSIZE[b]) == 8:
        signed = a.startswith("int") or b.startswith("int")
        if not (signed and "uint64" in (a, b)):  # nothing holds all values of both
            return _compare_integers
    return _compare_floats


def _compare_bits(p: Array, q: Array, dtypes: tuple[str, str], tolerance: Tolerance) -> Stats:
    return Stats(p.size, bits=int(np.count_nonzero(p != q)), largest=None)


def _compare_floats(p: Array, q: Array, dtypes: tuple[str, str], tolerance: Tolerance) -> Stats:
    """Compare what float64 can hold, or comes close to."""
    n, of_one = p.size, dtypes[0] == dtypes[1]
    x, y = _values(p, dtypes[0], "x"), _values(q, dtypes[1], "y")
    bits = p != q if of_one else _values_differ(p, q, x, y, dtypes)
    nbits = int(np.count_nonzero(bits))
    special = [0] * 4
    same = 0
    if not math.isfinite((sums := _sums(x, y))[0]):
        nans, infs = (np.isnan(x), np.isnan(y)), (np.isinf(x), np.isinf(y))
        special = [int(np.count_nonzero(each)) for each in (*nans, *infs)]
        finite = np.isfinite(x) & np.isfinite(y)
        same = int(np.count_nonzero(bits & ~finite & ((x == y) | (nans[0] & nans[1]))))
        p, q, x, y, bits = p[finite], q[finite], x[finite], y[finite], bits[finite]
        sums = _sums(x, y)
    zeros = within = 0
    if of_one and np.count_nonzero(x != y) < np.count_nonzero(bits):
        equal = bits & (x == y)
        same += int(np.count_nonzero(equal))
        zeros = int(np.count_nonzero(equal & (x == 0.0)))
        bits = bits & ~equal
    if any(tolerance):
        a, b = x.astype(np.float64), y.astype(np.float64)
        bound = tolerance.atol + tolerance.rtol * np.abs(a)
        within = int(np.count_nonzero(bits & (np.abs(b - a) <= bound)))
    dd, aa, ab, largest = sums
    return Stats(
        elements=n,
        bits=nbits,
        same=same,
        zeros=zeros,
        within=within,
        nan_a=special[0],
        nan_b=special[1],
        inf_a=special[2],
        inf_b=special[3],
        largest=int(largest) if all(map(_is_integer, dtypes)) else largest,
        dd=dd,
        aa=aa,
        ab=ab,
        ulps=_ulps(p, q, dtypes[0]) if of_one and not _is_integer(dtypes[0]) else (),
    )


def _sums(x: Array, y: Array) -> tuple[float, float, float, float]:
    """Add up (y - x)**2, x**2 and x * (y - x), and find the largest difference."""
    sums = np.zeros((SUMS, LANES))
    add_sums(x, y, sums)
    dd, aa, ab = (sum(row) for row in sums[:3].tolist())
    return dd, aa, ab, float(sums[3].max())


def _values_differ(p: Array, q: Array, x: Array, y: Array, dtypes: tuple[str, str]) -> Array:
    """Tell where numbers of two dtypes differ; float64 does not hold every 64-bit integer."""
    differ: Array = (x != y) & ~(np.isnan(x) & np.isnan(y))
    if not any(_is_integer(dtype) and ITEMSIZE[dtype] == 8 for dtype in dtypes):
        return differ
    for i in np.flatnonzero(~differ & (np.abs(x) >= 1 << 53) & np.isfinite(x)).tolist():
        sides = zip((p, q), (x, y), dtypes, strict=True)
        exact = {
            int(bits.view(dt)[i] if _is_integer(dt) else value[i]) for bits, value, dt in sides
        }
        differ[i] = len(exact) > 1
    return differ


def _compare_integers(p: Array, q: Array, dtypes: tuple[str, str], tolerance: Tolerance) -> Stats:
    """Compare integers of which one side has 64 bits: differences are exact, sums are rounded."""
    common = np.uint64 if "uint64" in dtypes else np.int64
    x, y = (
        _integers(each, dtype).astype(common) for each, dtype in zip((p, q), dtypes, strict=True)
    )
    above = y > x
    # May wrap around, and is right as an unsigned number.
    d = np.where(above, y - x, x - y).view(np.uint64)
    size, first = d.astype(np.float64), x.astype(np.float64)
    within = 0
    if any(tolerance):
        bound = tolerance.atol + tolerance.rtol * np.abs(first)
        within = int(np.count_nonzero((d != 0) & (size <= bound)))
    return Stats(
        p.size,
        bits=int(np.count_nonzero(d)),
        within=within,
        largest=int(d.max()),
        dd=float(np.einsum("i,i->", size, size)),
        aa=float(np.einsum("i,i->", first, first)),
        ab=float(np.einsum("i,i->", first, np.where(above, size, -size))),
    )


def _integers(p: Array, dtype: str) -> Array:
    return p != 0 if dtype == "bool" else p.view(dtype)


def _values(p: Array, dtype: str, key: str) -> Array:
    """Give the values of bit patterns as floats: in 32 bits where these hold them all."""
    if dtype == "bfloat16":
        wide = np.left_shift(p, 16, out=scratch(key, p.size, np.uint32), dtype=np.uint32)
        values: Array = wide.view(np.float32)
    elif dtype == "bool":
        values = (p != 0).astype(np.float32)
    elif dtype.startswith("float8"):
        values = _table(dtype)[p]
    elif dtype in ("float32", "float64"):
        values = p.view(dtype)
    else:
        wide_enough = np.float32 if ITEMSIZE[dtype] < 4 else np.float64
        values = p.view(dtype).astype(wide_enough)
    return values


@lru_cache
def _table(dtype: str) -> npt.NDArray[np.float32]:
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)


def _ulps(p: Array, q: Array, dtype: str) -> tuple[int, ...]:
    """Count pairs of finite floats by how many steps they lie apart: 0, 1, 2-3, 4-7..."""
    bits = 8 * ITEMSIZE[dtype]
    magnitude = (1 << bits if dtype == _UNSIGNED else 1 << (bits - 1)) - 1
    counts = np.zeros(STEPS, np.int64)
    count_steps(p, q, magnitude, counts)
    used = np.flatnonzero(counts)
    return tuple(counts[: used[-1] + 1].tolist()) if used.size else ()


def _bits(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"u{ITEMSIZE[dtype]}")


def _is_integer(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def bucket_names(ulps: tuple[int, ...]) -> list[str]:
    """Name the buckets of a histogram of distances."""
    names = ["0", "1"]
    names += [f"{1 << k}-{(2 << k) - 1}" for k in range(1, max(1, len(ulps)))]
    return names[: len(ulps)]
