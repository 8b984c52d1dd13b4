"""Sorting elements by the exponent of what they are differences to.

An element's *class* is how far its base's exponent lies below a chunk's largest one; the *coarse*
lowest bits of that are dropped. Sorting by class keeps the order within one; compiled, it works at
``LANES`` parts of a chunk by turns, for each place waits for the one before it. A GPU works at many
*tiles* at once, a warp at each, whose counts of each class are summed to where its elements go.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz import kernels
from ckz.kernels import Kernel, cuda, each, raise_to
from ckz.kernels.buffers import scratch
from ckz.kernels.device import put, room
from ckz.kernels.scan import scan, tile_of

CLASSES = 12
LANES = 4

Words = npt.NDArray[Any]


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
    # With one number as its second argument minimum has no SIMD, and takes five times longer.
    last = scratch("last", base.size, base.dtype)
    last.fill(CLASSES - 1)
    np.minimum(exponent, last, out=exponent)
    out[:] = exponent
    np.right_shift(out, coarse, out=out)
    part = out.size // LANES
    for lane in range(LANES):
        end = (lane + 1) * part if lane < LANES - 1 else out.size
        # bincount would make eight bytes of each.
        counts[lane] = [np.count_nonzero(out[lane * part : end] == c) for c in range(CLASSES)]


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


classes = Kernel(_classes_body, _classes_numpy)
scatter = Kernel(_scatter_body, _scatter_numpy)
gather = Kernel(_gather_body, _gather_numpy)


# -- on a GPU --------------------------------------------------------------------------------------


def _top_body(base: Words, shift: int, width: int, top: npt.NDArray[np.int32]) -> None:
    for i in each(base.size):
        exponent = np.int32(np.int64(base[i]) >> shift & (1 << width) - 1)
        # Looked at first, for threads would wait for each other at one place.
        if exponent > top[0]:
            raise_to(top, 0, exponent)


def _top_numpy(base: Words, shift: int, width: int, top: npt.NDArray[np.int32]) -> None:
    if base.size:
        exponents = (base >> base.dtype.type(shift)).astype(np.int64) & (1 << width) - 1
        top[0] = max(int(top[0]), int(exponents.max()))


def _rank_body(
    base: Words,
    shift: int,
    width: int,
    coarse: int,
    top: npt.NDArray[np.int32],
    tile: int,
    out: npt.NDArray[np.uint8],
    counts: npt.NDArray[np.int64],
) -> None:
    mask = (1 << width) - 1
    tiles = counts.size // CLASSES
    for number in each(tiles):
        for c in range(CLASSES):
            counts[c * tiles + number] = 0
        for i in range(number * tile, min((number + 1) * tile, base.size)):
            c = min(top[0] - (np.int64(base[i]) >> shift & mask), CLASSES - 1) >> coarse
            out[i] = c
            counts[c * tiles + number] += 1


def _rank_gpu(
    base: Words,
    shift: int,
    width: int,
    coarse: int,
    top: npt.NDArray[np.int32],
    tile: int,
    out: npt.NDArray[np.uint8],
    counts: npt.NDArray[np.int64],
) -> None:
    mask = (1 << width) - 1
    tiles = counts.size // CLASSES
    lane = cuda.threadIdx.x & 31
    largest = top[0]
    for number in range(cuda.grid(1) >> 5, tiles, cuda.gridsize(1) >> 5):
        found: Any = 0  # of the class whose number is the lane's
        for first in range(number * tile, min((number + 1) * tile, base.size), 32):
            i = first + lane
            mine: Any = -1
            if i < base.size:
                mine = min(largest - (np.int64(base[i]) >> shift & mask), CLASSES - 1) >> coarse
                out[i] = mine
            for c in range(CLASSES):
                word = cuda.ballot_sync(_ALL, mine == c)
                if lane == c:
                    found += cuda.popc(word)
        if lane < CLASSES:
            counts[lane * tiles + number] = found


def _rank_numpy(
    base: Words,
    shift: int,
    width: int,
    coarse: int,
    top: npt.NDArray[np.int32],
    tile: int,
    out: npt.NDArray[np.uint8],
    counts: npt.NDArray[np.int64],
) -> None:
    exponents = (base >> base.dtype.type(shift)).astype(np.int64) & (1 << width) - 1
    out[:] = np.minimum(int(top[0]) - exponents, CLASSES - 1) >> coarse
    by_class = counts.reshape(CLASSES, -1)
    for number in range(by_class.shape[1]):
        part = out[number * tile : (number + 1) * tile]
        by_class[:, number] = np.bincount(part, minlength=CLASSES)


def _move_body(
    values: Words,
    classes: npt.NDArray[np.uint8],
    tile: int,
    starts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    back: bool,
    out: Words,
) -> None:
    tiles = starts.size // CLASSES
    for number in each(tiles):
        for c in range(CLASSES):
            at = starts[c * tiles + number] + offsets[c]
            for i in range(number * tile, min((number + 1) * tile, classes.size)):
                if classes[i] == c:
                    if back:
                        out[i] = values[at]
                    else:
                        out[at] = values[i]
                    at += 1


def _move_gpu(
    values: Words,
    classes: npt.NDArray[np.uint8],
    tile: int,
    starts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    back: bool,
    out: Words,
) -> None:
    tiles = starts.size // CLASSES
    lane = cuda.threadIdx.x & 31
    below = cuda.lanemask_lt()
    for number in range(cuda.grid(1) >> 5, tiles, cuda.gridsize(1) >> 5):
        # Where the next element goes, of the class whose number is the lane's.
        at = np.int64(0)
        if lane < CLASSES:
            at = starts[lane * tiles + number] + offsets[lane]
        for first in range(number * tile, min((number + 1) * tile, classes.size), 32):
            i = first + lane
            mine: Any = -1
            if i < classes.size:
                mine = np.int32(classes[i])
            place = cuda.shfl_sync(_ALL, at, max(mine, 0))
            for c in range(CLASSES):
                word = cuda.ballot_sync(_ALL, mine == c)
                if mine == c:
                    place += cuda.popc(word & below)
                if lane == c:
                    at += cuda.popc(word)
            if mine >= 0:
                if back:
                    out[i] = values[place]
                else:
                    out[place] = values[i]


def _move_numpy(
    values: Words,
    classes: npt.NDArray[np.uint8],
    tile: int,
    starts: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    back: bool,
    out: Words,
) -> None:
    (_gather_numpy if back else _scatter_numpy)(values, classes, None, out)


_ALL = 0xFFFFFFFF
_top = Kernel(_top_body, _top_numpy, outputs=1, updates=True)
_rank = Kernel(_rank_body, _rank_numpy, outputs=2, for_gpu=_rank_gpu)
_move = Kernel(_move_body, _move_numpy, outputs=1, for_gpu=_move_gpu)


class Order(NamedTuple):
    """How elements are sorted by class.

    Attributes
    ----------
    starts : where each class begins, and where the last one ends; on the host.
    classes : of each element.
    tile, places, offsets : where the elements of each tile or lane go; as the device needs them.
    """

    starts: npt.NDArray[np.int64]
    classes: Any
    tile: int
    places: Any
    offsets: Any


def order_by_class(base: Words, shift: int, width: int, coarse: int) -> Order:
    """Give the order of elements by the class of their base."""
    found = room("classes", base.size)
    used = max(1, CLASSES >> coarse)
    if not kernels.on_device():
        counts = np.empty((LANES, CLASSES), np.int64)
        classes(base, shift, width, coarse, found, counts)
        ends = np.cumsum(counts.sum(axis=0))
        places = np.cumsum(counts, axis=0) - counts
        places[:, 1:] += ends[:-1]
        return Order(np.concatenate([[0], ends[:used]]), found, 0, places, None)
    tile = tile_of(base.size)
    top = put("top", np.zeros(1, np.int32))
    _top(base, shift, width, top)
    places = room("places", CLASSES * -(-base.size // tile), np.int64)
    _rank(base, shift, width, coarse, top, tile, found, places)
    ends = np.cumsum(scan(places, CLASSES))
    offsets = put("offsets", np.concatenate([[0], ends[:-1]]))
    return Order(np.concatenate([[0], ends[:used]]), found, tile, places, offsets)


def sort(values: Words, order: Order, out: Words) -> None:
    """Put elements in order."""
    if kernels.on_device():
        _move(values, order.classes, order.tile, order.places, order.offsets, False, out)
    else:
        scatter(values, order.classes, order.places, out)


def unsort(values: Words, order: Order, out: Words) -> None:
    """Put sorted elements where they were."""
    if kernels.on_device():
        _move(values, order.classes, order.tile, order.places, order.offsets, True, out)
    else:
        gather(values, order.classes, order.places, out)
