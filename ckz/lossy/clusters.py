"""One-dimensional k-means on a histogram, exactly, by dynamic programming."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckz.kernels.clusters import CODES

# The histogram is thinned to so many bins, which are about equally full.
_BINS = 1024


def find_clusters(counts: npt.NDArray[np.int64], clusters: int) -> npt.NDArray[np.float32] | None:
    """Give minimum and scale of each cluster, in ascending order; None for no values.

    Parameters
    ----------
    counts : how often each value of the top sixteen bits of a float32 stands there.

    Notes
    -----
    The optimal clusters of sorted values are intervals, so the best partition of the first n bins
    into k is found from those of fewer bins into k - 1 (Bellman 1973; Wang and Song 2011).
    """
    bits = np.flatnonzero(counts)
    if not bits.size:
        return None
    tops = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    # A bin reaches away from zero by what the lower bits can hold.
    reach = (bits.astype(np.uint32) << np.uint32(16) | np.uint32(0xFFFF)).view(np.float32)
    edges = np.stack([tops, reach.astype(np.float64)])
    low, high = edges.min(axis=0), edges.max(axis=0)
    order = np.argsort(low, kind="stable")
    low, high, weight = low[order], high[order], counts[bits][order].astype(np.float64)
    bins = _thinned(weight)
    low, high = low[bins], np.maximum.reduceat(high, bins)
    weight_sum = np.add.reduceat(weight, bins)
    middle = (low + high) / 2
    bounds = _partition(middle, weight_sum, min(clusters, middle.size))
    starts = low[bounds]
    ends = np.maximum.reduceat(high, bounds)
    table = np.stack([starts, (ends - starts) / (CODES - 1)], axis=1)
    return table.astype(np.float32)


def _thinned(weight: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Give where bins begin once neighbours are joined until few are left."""
    if weight.size <= _BINS:
        return np.arange(weight.size)
    share = np.cumsum(weight)
    group = np.floor(share * _BINS / share[-1])
    first = np.concatenate([[True], group[1:] != group[:-1]])
    return np.flatnonzero(first)


def _partition(
    values: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], clusters: int
) -> npt.NDArray[np.int64]:
    """Give the first bin of each cluster of the best partition."""
    n = values.size
    # Around their middle, so that squares do not cancel.
    x = values - values[n // 2]
    w, wx, wxx = (
        np.concatenate([[0.0], np.cumsum(part)]) for part in (weight, weight * x, weight * x * x)
    )

    def cost(end: int) -> npt.NDArray[np.float64]:
        """Give what bins from each start to ``end`` cost as one cluster."""
        sums, firsts = w[end] - w[:end], wx[end] - wx[:end]
        found: npt.NDArray[np.float64] = wxx[end] - wxx[:end] - firsts * firsts / sums
        return found

    best = np.full(n + 1, np.inf)
    best[0] = 0
    table = np.zeros((clusters, n + 1), np.int64)
    costs = [cost(end) for end in range(1, n + 1)]
    for k in range(clusters):
        after = np.full(n + 1, np.inf)
        for end in range(k + 1, n + 1):
            options = best[k:end] + costs[end - 1][k:]
            start = int(np.argmin(options))
            after[end], table[k, end] = options[start], start + k
        best = after
    bounds = []
    end = n
    for k in range(clusters - 1, -1, -1):
        end = int(table[k, end])
        bounds.append(end)
    return np.array(bounds[::-1])
