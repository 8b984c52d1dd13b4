"""Sums of counts: where, in the output, each part of the input begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, cuda, each
from ckz.kernels.device import get, room

Counts = npt.NDArray[np.int64]

_THREADS = 256
# Tiles on a GPU: small ones keep it busy with little data, large ones are few to sum over.
_TILE, _MOST = 1024, 1 << 14


def tile_of(n: int) -> int:
    """Give the size of the tiles that n elements are cut into; the result does not depend on it."""
    return max(_TILE, 1 << (n // _MOST).bit_length())


def _scan_body(counts: Counts, totals: Counts) -> None:
    tiles = counts.size // totals.size
    for row in each(totals.size):
        total = 0
        for i in range(row * tiles, (row + 1) * tiles):
            value = counts[i]
            counts[i] = total
            total += value
        totals[row] = total


def _scan_gpu(counts: Counts, totals: Counts) -> None:
    # A block takes a row, a thread a run of it: one thread would wait for memory at every count.
    shared = cuda.shared.array(256, np.int64)
    me = cuda.threadIdx.x
    tiles = counts.size // totals.size
    run = -(-tiles // cuda.blockDim.x)
    for row in range(cuda.blockIdx.x, totals.size, cuda.gridDim.x):
        first = row * tiles + min(me * run, tiles)
        last = row * tiles + min((me + 1) * run, tiles)
        total = np.int64(0)
        for i in range(first, last):
            total += counts[i]
        shared[me] = total
        cuda.syncthreads()
        before = np.int64(0)
        for other in range(me):
            before += shared[other]
        if me == cuda.blockDim.x - 1:
            totals[row] = before + total
        for i in range(first, last):
            value = counts[i]
            counts[i] = before
            before += value
        cuda.syncthreads()


def _scan_numpy(counts: Counts, totals: Counts) -> None:
    rows = counts.reshape(totals.size, -1)
    sums = np.cumsum(rows, axis=1)
    totals[:] = sums[:, -1] if rows.shape[1] else 0
    rows[:] = sums - rows


_scan = Kernel(_scan_body, _scan_numpy, outputs=2, updates=True, for_gpu=_scan_gpu, in_numpy=True)


def scan(counts: Any, rows: int) -> Counts:
    """Replace each count by the sum of those before it in its row; give the sums of the rows."""
    totals = room("totals", rows, np.int64)
    _scan(counts, totals)
    return get("totals", totals)
