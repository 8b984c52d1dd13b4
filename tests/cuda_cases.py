"""Every kernel that runs on a GPU, with arguments: what is written comes last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckz.kernels import (
    Kernel,
    bitmask,
    buckets,
    clusters,
    means,
    planes,
    quantize,
    scan,
    sorting,
    ulp,
)

Make = Callable[[int, np.random.Generator], list[Any]]


def words(n: int, rng: np.random.Generator, dtype: type = np.uint16) -> np.ndarray:
    """Patterns of floats: of weights, with some of every other kind among them."""
    found = (rng.standard_normal(n).astype(np.float32) * np.float32(0.02)).view(np.uint32)
    odd = rng.random(n) < 0.02
    found[odd] = rng.integers(0, 1 << 32, int(odd.sum()), dtype=np.uint32)
    if dtype is np.uint16:
        return (found >> np.uint32(16)).astype(np.uint16)
    if dtype is np.uint64:
        return found.astype(np.uint64) << np.uint64(32) | found[::-1].astype(np.uint64)
    return found.astype(dtype)


def floats(n: int, rng: np.random.Generator) -> np.ndarray:
    return words(n, rng, np.uint32).view(np.float32)


def near(base: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Patterns a few units from others, or the same."""
    moved = rng.integers(0, 9, base.size) * (rng.random(base.size) < 0.6)
    return base + moved.astype(base.dtype)


def empty(n: int, dtype: type = np.uint8) -> np.ndarray:
    return np.full(n, 0xAA, dtype)


def _split(wide: bool) -> Make:
    return lambda n, rng: [words(n, rng), *([] if wide else [0]), empty(n), empty(n)]


def _join(wide: bool) -> Make:
    def make(n: int, rng: np.random.Generator) -> list[Any]:
        symbol, rest = (rng.integers(0, 256, n, dtype=np.uint8) for _ in range(2))
        if wide:
            return [symbol, rest, empty(n, np.uint16)]
        return [symbol, rest & np.uint8(0x7F), 100, empty(n, np.uint16)]

    return make


def _based(n: int, rng: np.random.Generator) -> list[Any]:
    x = words(n, rng) & np.uint16(0x807F) | rng.integers(101, 228, n, dtype=np.uint16) << 7
    return [x, 100, empty(n), empty(n)]


def _exponents(n: int, rng: np.random.Generator) -> list[Any]:
    x = _based(n, rng)[0]
    x[:1] = 200 << 7
    return [x, np.array([0, 255], np.int32)]


def _pack(n: int, rng: np.random.Generator) -> list[Any]:
    return [rng.integers(0, 128, n // 8 * 8, dtype=np.uint8)]


def _unpack(n: int, rng: np.random.Generator) -> list[Any]:
    return [rng.integers(0, 256, n // 8 * 7, dtype=np.uint8), empty(n // 8 * 8)]


def _zigzag(dtype: type, is_float: bool) -> Make:
    def make(n: int, rng: np.random.Generator) -> list[Any]:
        base = words(n, rng, dtype)
        return [near(base, rng), base, is_float, empty(n, dtype)]

    return make


def _tiles(n: int) -> int:
    return -(-n // scan.tile_of(n))


def _mask(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.packbits(rng.random(n) < 0.3)


def _starts(mask: np.ndarray, n: int) -> tuple[np.ndarray, int]:
    counts = np.empty(_tiles(n), np.int64)
    bitmask._count_numpy(mask, n, scan.tile_of(n), counts)
    return np.cumsum(counts) - counts, int(counts.sum())


def _mark(n: int, rng: np.random.Generator) -> list[Any]:
    base = words(n, rng)
    counts = empty(_tiles(n), np.int64)
    return [near(base, rng), base, scan.tile_of(n), empty((n + 7) // 8), counts]


def _count(n: int, rng: np.random.Generator) -> list[Any]:
    return [_mask(n, rng), n, scan.tile_of(n), empty(_tiles(n), np.int64)]


def _take(n: int, rng: np.random.Generator) -> list[Any]:
    mask = _mask(n, rng)
    starts, total = _starts(mask, n)
    return [words(n, rng), mask, scan.tile_of(n), starts, empty(total, np.uint16)]


def _fill(n: int, rng: np.random.Generator) -> list[Any]:
    mask = _mask(n, rng)
    starts, total = _starts(mask, n)
    return [
        *(words(n, rng), mask, scan.tile_of(n), starts, words(total, rng), empty(n, np.uint16)),
    ]


def _scan(n: int, rng: np.random.Generator) -> list[Any]:
    return [rng.integers(0, 1000, 12 * (1 + n // 64)), np.zeros(12, np.int64)]


def _top(n: int, rng: np.random.Generator) -> list[Any]:
    return [words(n, rng), 7, 8, np.zeros(1, np.int32)]


def _rank(n: int, rng: np.random.Generator) -> list[Any]:
    base = words(n, rng)
    top = np.array([int((base >> 7 & 0xFF).max(initial=0))], np.int32)
    return [
        *(base, 7, 8, int(n < 4096), top, scan.tile_of(n)),
        *(empty(n), empty(sorting.CLASSES * _tiles(n), np.int64)),
    ]


def _move(back: bool) -> Make:
    def make(n: int, rng: np.random.Generator) -> list[Any]:
        *arguments, found, counts = _rank(n, rng)
        sorting._rank_numpy(*arguments, found, counts)
        rows = counts.reshape(sorting.CLASSES, -1)
        ends = np.cumsum(rows.sum(axis=1))
        starts = (np.cumsum(rows, axis=1) - rows).reshape(-1)
        offsets = np.concatenate([[0], ends[:-1]])
        return [
            *(words(n, rng), found, scan.tile_of(n), starts, offsets, back),
            empty(n, np.uint16),
        ]

    return make


def _indices(n: int, rng: np.random.Generator) -> list[Any]:
    units = np.abs(floats(n, rng)) * np.float32(0.1)
    values = floats(n, rng)
    values[~np.isfinite(values)] = 0
    units[~np.isfinite(units)] = 0
    return [values, values[::-1].copy(), units, True, np.float32(0.4), empty(n, np.int32)]


def _values(n: int, rng: np.random.Generator) -> list[Any]:
    indices = rng.integers(-100, 100, n, dtype=np.int32)
    base, units = floats(n, rng), np.abs(floats(n, rng))
    return [indices, base, units, True, np.float32(0.1), empty(n, np.float32)]


def _units(n: int, rng: np.random.Generator) -> list[Any]:
    second = rng.random(n, np.float32) ** 8
    return [second, np.float32(1e-8), np.float32(0.1), empty(n, np.float32)]


def _log_indices(n: int, rng: np.random.Generator) -> list[Any]:
    bits = (rng.random(n, np.float32) ** 8).view(np.int32)
    predicted = bits + rng.integers(-(1 << 24), 1 << 24, n, dtype=np.int32)
    return [bits, predicted, rng.random(n) < 0.1, 1 << 21, 1_100_000, empty(n, np.int32)]


def _log_values(n: int, rng: np.random.Generator) -> list[Any]:
    indices = rng.integers(-32, 32, n, dtype=np.int32)
    predicted = rng.integers(0, 0x7F000000, n, dtype=np.int64)
    return [indices, predicted, rng.random(n) < 0.1, 1 << 21, empty(n, np.uint32)]


def _histogram(n: int, rng: np.random.Generator) -> list[Any]:
    return [words(n, rng, np.uint32), 16, np.zeros(1 << 16, np.int64)]


def _table() -> np.ndarray:
    first = np.sort(np.random.default_rng(5).standard_normal(16).astype(np.float32)) / 16
    return np.stack([first, np.abs(first) / 256], axis=1).reshape(-1)


def _labels(root: bool) -> Make:
    def make(n: int, rng: np.random.Generator) -> list[Any]:
        values = rng.standard_normal(n).astype(np.float32) / 16
        values[1::50], values[2::50], values[3::50] = np.nan, np.inf, -np.inf
        table = np.abs(np.sort(np.abs(_table()))) if root else _table()
        return [values, table, root, empty(n, np.int32)]

    return make


def _labelled(n: int, rng: np.random.Generator) -> list[Any]:
    number = rng.integers(0, 16 * clusters.CODES, n, dtype=np.int32)
    return [(number >> 1) ^ -(number & 1), _table(), True, empty(n, np.float32)]


def _extremes(n: int, rng: np.random.Generator) -> list[Any]:
    low, high = np.full(512, 0xFFFFFFFF, np.uint32), np.zeros(512, np.uint32)
    return [words(n, rng, np.uint32), low, high]


def _numbers(n: int, rng: np.random.Generator) -> list[Any]:
    table = rng.integers(0, 8, 512, dtype=np.int32)
    return [words(n, rng, np.uint32), table, quantize.NONE, empty(n, np.int32)]


def _sums(n: int, rng: np.random.Generator) -> list[Any]:
    columns = 48
    rows = (5 + n - 1) // columns + 1 if n else 1
    tops = rng.integers(-500, 500, n, dtype=np.int16)
    return [tops, 5, *(np.zeros(size, np.int64) for size in (rows, rows, columns, columns))]


CASES: dict[str, tuple[Kernel, Make]] = {
    "planes.split_wide": (planes.split_wide, _split(True)),
    "planes.join_wide": (planes.join_wide, _join(True)),
    "planes.split_narrow": (planes.split_narrow, _split(False)),
    "planes.split_narrow, based": (planes.split_narrow, _based),
    "planes.join_narrow": (planes.join_narrow, _join(False)),
    "planes.pack7": (planes.pack7, _pack),
    "planes.unpack7": (planes.unpack7, _unpack),
    "planes.split_float32": (
        planes.split_float32,
        lambda n, rng: [words(n, rng, np.uint32), empty(n, np.uint16), empty(n), empty(n)],
    ),
    "planes.join_float32": (
        planes.join_float32,
        lambda n, rng: [
            *(words(n, rng), rng.integers(0, 256, n, dtype=np.uint8)),
            *(rng.integers(0, 256, n, dtype=np.uint8), empty(n, np.uint32)),
        ],
    ),
    "planes.exponents": (planes.exponents, _exponents),
    "ulp.zigzag": (ulp.zigzag, _zigzag(np.uint16, True)),
    "ulp.zigzag of integers": (ulp.zigzag, _zigzag(np.uint64, False)),
    "ulp.zigzag of float32": (ulp.zigzag, _zigzag(np.uint32, True)),
    "ulp.add_zigzag": (
        ulp.add_zigzag,
        lambda n, rng: [words(n, rng), words(n, rng), True, empty(n, np.uint16)],
    ),
    "sorting.top": (sorting._top, _top),
    "sorting.rank": (sorting._rank, _rank),
    "sorting.sort": (sorting._move, _move(False)),
    "sorting.unsort": (sorting._move, _move(True)),
    "bitmask.mark": (bitmask.mark, _mark),
    "bitmask.count": (bitmask.count, _count),
    "bitmask.take": (bitmask.take, _take),
    "bitmask.fill": (bitmask.fill, _fill),
    "scan": (scan._scan, _scan),
    "quantize.indices": (quantize.indices, _indices),
    "quantize.values": (quantize.values, _values),
    "quantize.units": (quantize.units, _units),
    "quantize.log_indices": (quantize.log_indices, _log_indices),
    "quantize.log_values": (quantize.log_values, _log_values),
    "clusters.histogram": (clusters.histogram, _histogram),
    "clusters.labels": (clusters.labels, _labels(False)),
    "clusters.labels of roots": (clusters.labels, _labels(True)),
    "clusters.values": (clusters.values, _labelled),
    "buckets.extremes": (buckets.extremes, _extremes),
    "buckets.numbers": (buckets.numbers, _numbers),
    "means.sums": (means.sums, _sums),
}


def copies(arguments: list[Any]) -> list[Any]:
    return [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]


def written(kernel: Kernel, arguments: list[Any]) -> list[np.ndarray]:
    return arguments[-kernel.outputs :]
