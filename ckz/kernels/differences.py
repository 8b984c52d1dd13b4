"""Sums over two runs of numbers, and how many floats lie between each pair of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel
from ckz.kernels.buffers import scratch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Element i is added to lane i % LANES, in order: one order of adding for both forms, and fast.
LANES = 128
SUMS = 4  # of (y - x)**2, x**2 and x * (y - x); and the largest abs(y - x)
STEPS = 65  # how many bits a distance may have, from 0 on

_BIAS = 1022  # a float64 with this exponent more is an integer of so many bits


def _add_sums_body(x: Any, y: Any, sums: Floats) -> None:
    rows = x.size // LANES
    for row in range(rows + 1):
        start = row * LANES
        # A constant number of steps is what vectorizes.
        for lane in range(LANES) if row < rows else range(x.size - start):
            a = np.float64(x[start + lane])
            d = np.float64(y[start + lane]) - a
            sums[0, lane] += d * d
            sums[1, lane] += a * a
            sums[2, lane] += a * d
            sums[3, lane] = max(sums[3, lane], abs(d))


def _add_sums_numpy(x: Any, y: Any, sums: Floats) -> None:
    a = x.astype(np.float64)
    d = np.subtract(y, a, out=scratch("d", x.size, np.float64))
    product = scratch("product", x.size, np.float64)
    even = x.size // LANES * LANES
    for row, (u, v) in enumerate(((d, d), (a, a), (a, d))):
        np.multiply(u, v, out=product)
        sums[row] += product[:even].reshape(-1, LANES).sum(axis=0)
        sums[row, : x.size - even] += product[even:]
    np.abs(d, out=d)
    sums[3] = np.maximum(sums[3], d[:even].reshape(-1, LANES).max(axis=0, initial=0.0))
    sums[3, : x.size - even] = np.maximum(sums[3, : x.size - even], d[even:])


add_sums = Kernel(_add_sums_body, _add_sums_numpy)


def _count_steps_body(p: Any, q: Any, magnitude: int, counts: Ints) -> None:
    mask = np.uint64(magnitude)
    steps = np.empty(p.size, np.float64)
    for i in range(p.size):
        u, v = np.uint64(p[i]), np.uint64(q[i])
        opposite = (u > mask) != (v > mask)
        u, v = u & mask, v & mask
        apart = u + v if opposite else max(u, v) - min(u, v)
        # Or rounding to 53 bits could carry into the next power of two.
        steps[i] = apart & ~(apart >> np.uint64(53))
    exponents = steps.view(np.int64)
    # Several tables: adding to one number twice in a row takes its time.
    tables = np.zeros((4, _BIAS + STEPS), np.int64)
    for i in range(p.size):
        tables[i & 3, exponents[i] >> 52] += 1
    for table in tables:
        counts[0] += table[0]
        for bits in range(1, STEPS):
            counts[bits] += table[_BIAS + bits]


def _count_steps_numpy(p: Any, q: Any, magnitude: int, counts: Ints) -> None:
    mask = p.dtype.type(magnitude)
    apart = np.maximum(p, q) - np.minimum(p, q)
    opposite = (p > mask) != (q > mask)
    if opposite.any():
        apart[opposite] = (p[opposite] & mask) + (q[opposite] & mask)
    if apart.itemsize == 8:
        apart &= ~(apart >> np.uint64(53))
    exponents = apart.astype(np.float64).view(np.int64) >> 52
    table = np.bincount(exponents, minlength=_BIAS + STEPS)
    counts[0] += table[0]
    counts[1:] += table[_BIAS + 1 :]


count_steps = Kernel(_count_steps_body, _count_steps_numpy)
