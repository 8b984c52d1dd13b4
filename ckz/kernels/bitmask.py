"""Which elements differ from a base, and these, in order; and back.

Elements are cut into *tiles* of equal size, so that a GPU works at many. The first pass marks what
differs, a bit an element as numpy's ``packbits`` has them, and counts it by tile; sums of these say
where each tile's values go; the second pass moves them. On a GPU a warp takes a tile, 32 elements
at once: ``ballot`` gives their bits, and counting those below its own tells each thread its place.
The plain bodies, a thread a tile, are what the simulator runs, which has no ballot; on a device
their reads would be tiles apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, cuda, each
from ckz.kernels.device import get, put, room
from ckz.kernels.scan import scan, tile_of

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

_ALL = 0xFFFFFFFF


def _mark_body(current: Words, base: Words, tile: int, mask: Bytes, counts: Counts) -> None:
    n = current.size
    for number in each(counts.size):
        count = 0
        for byte in range(number * tile >> 3, min((number + 1) * tile + 7, n + 7) >> 3):
            bits = 0
            for i in range(8 * byte, min(8 * byte + 8, n)):
                if current[i] != base[i]:
                    bits |= 128 >> (i & 7)
                    count += 1
            mask[byte] = bits
        counts[number] = count


def _mark_gpu(current: Words, base: Words, tile: int, mask: Bytes, counts: Counts) -> None:
    n = current.size
    lane = cuda.threadIdx.x & 31
    for number in range(cuda.grid(1) >> 5, counts.size, cuda.gridsize(1) >> 5):
        count = 0
        for first in range(number * tile, min((number + 1) * tile, n), 32):
            i = first + lane
            word = cuda.ballot_sync(_ALL, i < n and current[i] != base[i])
            count += cuda.popc(word)
            byte = (first >> 3) + lane
            if lane < 4 and 8 * byte < n:
                mask[byte] = cuda.brev(word) >> np.uint32(24 - 8 * lane)
        if lane == 0:
            counts[number] = count


def _mark_numpy(current: Words, base: Words, tile: int, mask: Bytes, counts: Counts) -> None:
    changed = current != base
    mask[:] = np.packbits(changed)
    if counts.size:
        counts[:] = np.add.reduceat(changed, np.arange(counts.size) * tile, dtype=np.int64)


def _count_body(mask: Bytes, n: int, tile: int, counts: Counts) -> None:
    for number in each(counts.size):
        count = 0
        for i in range(number * tile, min((number + 1) * tile, n)):
            if mask[i >> 3] >> (7 - (i & 7)) & 1:
                count += 1
        counts[number] = count


def _count_numpy(mask: Bytes, n: int, tile: int, counts: Counts) -> None:
    if counts.size:
        changed = np.unpackbits(mask, count=n)
        counts[:] = np.add.reduceat(changed, np.arange(counts.size) * tile, dtype=np.int64)


def _take_body(values: Words, mask: Bytes, tile: int, starts: Counts, out: Words) -> None:
    for number in each(starts.size):
        at = starts[number]
        for i in range(number * tile, min((number + 1) * tile, values.size)):
            if mask[i >> 3] >> (7 - (i & 7)) & 1:
                out[at] = values[i]
                at += 1


def _take_gpu(values: Words, mask: Bytes, tile: int, starts: Counts, out: Words) -> None:
    n = values.size
    lane = cuda.threadIdx.x & 31
    for number in range(cuda.grid(1) >> 5, starts.size, cuda.gridsize(1) >> 5):
        at = starts[number]
        for first in range(number * tile, min((number + 1) * tile, n), 32):
            i = first + lane
            changed = i < n and mask[i >> 3] >> (7 - (i & 7)) & 1 != 0
            word = cuda.ballot_sync(_ALL, changed)
            if changed:
                out[at + cuda.popc(word & cuda.lanemask_lt())] = values[i]
            at += cuda.popc(word)


def _take_numpy(values: Words, mask: Bytes, tile: int, starts: Counts, out: Words) -> None:
    out[:] = values[np.unpackbits(mask, count=values.size).view(bool)]


def _fill_body(
    base: Words, mask: Bytes, tile: int, starts: Counts, values: Words, out: Words
) -> None:
    for number in each(starts.size):
        at = starts[number]
        for i in range(number * tile, min((number + 1) * tile, base.size)):
            if mask[i >> 3] >> (7 - (i & 7)) & 1:
                out[i] = values[at]
                at += 1
            else:
                out[i] = base[i]


def _fill_gpu(
    base: Words, mask: Bytes, tile: int, starts: Counts, values: Words, out: Words
) -> None:
    n = base.size
    lane = cuda.threadIdx.x & 31
    for number in range(cuda.grid(1) >> 5, starts.size, cuda.gridsize(1) >> 5):
        at = starts[number]
        for first in range(number * tile, min((number + 1) * tile, n), 32):
            i = first + lane
            changed = i < n and mask[i >> 3] >> (7 - (i & 7)) & 1 != 0
            word = cuda.ballot_sync(_ALL, changed)
            if changed:
                out[i] = values[at + cuda.popc(word & cuda.lanemask_lt())]
            elif i < n:
                out[i] = base[i]
            at += cuda.popc(word)


def _fill_numpy(
    base: Words, mask: Bytes, tile: int, starts: Counts, values: Words, out: Words
) -> None:
    out[:] = base
    out[np.unpackbits(mask, count=base.size).view(bool)] = values


mark = Kernel(_mark_body, _mark_numpy, outputs=2, for_gpu=_mark_gpu, in_numpy=True)
count = Kernel(_count_body, _count_numpy, outputs=1, in_numpy=True)
take = Kernel(_take_body, _take_numpy, outputs=1, for_gpu=_take_gpu, in_numpy=True)
fill = Kernel(_fill_body, _fill_numpy, outputs=1, for_gpu=_fill_gpu, in_numpy=True)


def extract(current: Words, base: Words) -> tuple[Bytes, Words]:
    """Give the mask of the elements that differ, and their values."""
    current, base = put("current", current), put("base", base)
    n, tile = current.size, tile_of(current.size)
    mask, counts = room("mask", (n + 7) // 8), room("counts", -(-n // tile), np.int64)
    mark(current, base, tile, mask, counts)
    total = int(scan(counts, 1)[0])
    values = room("changed", total, current.dtype)
    take(current, mask, tile, counts, values)
    return get("mask", mask), get("changed", values)


def count_changed(mask: Bytes, n: int) -> int:
    """Give how many of the first n elements a mask marks."""
    return int(np.count_nonzero(np.unpackbits(mask, count=n)))


def restore(base: Words, mask: Bytes, values: Words, out: Words) -> None:
    """Put values where a mask says over a base; as many as it marks."""
    base, mask, values = put("base", base), put("mask", mask), put("changed", values)
    tile = tile_of(base.size)
    counts = room("counts", -(-base.size // tile), np.int64)
    count(mask, base.size, tile, counts)
    scan(counts, 1)
    fill(base, mask, tile, counts, values, out)
