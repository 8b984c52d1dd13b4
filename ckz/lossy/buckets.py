"""LC-Checkpoint's buckets of a tensor's differences."""

from __future__ import annotations

import numpy as np

from ckz.codecs.floats import WIDTHS, Bytes
from ckz.codecs.lc import buckets_of
from ckz.lossy.eligible import Eligible
from ckz.lossy.reading import Fit
from ckz.lossy.sampling import blocks


def find_buckets(fit: Fit, item: Eligible, bits: int) -> Bytes:
    """Give the representatives of the buckets of largest exponent."""
    low, high = np.full(512, np.inf, np.float32), np.full(512, -np.inf, np.float32)
    for first, last in blocks(item.nbytes // WIDTHS[item.dtype], WIDTHS[item.dtype]):
        far = fit.differences(item, fit.base_of(item), first, last)
        far = far[np.isfinite(far) & (far != 0)]
        np.minimum.at(low, buckets_of(far), far)
        np.maximum.at(high, buckets_of(far), far)
    used = np.flatnonzero(low <= high)
    # By exponent, the eight bits below the sign.
    kept = sorted(used.tolist(), key=lambda b: (-(b & 255), b))[: 2**bits - 1]
    table = low[kept] / np.float32(2) + high[kept] / np.float32(2)
    found: Bytes = table.astype("<f4").view(np.uint8)
    return found
