"""LC-Checkpoint's buckets of a tensor's differences."""

from __future__ import annotations

import numpy as np

from ckz.codecs.floats import WIDTHS, Bytes
from ckz.kernels import buckets as kernels
from ckz.kernels.buckets import BUCKETS
from ckz.lossy.eligible import Eligible
from ckz.lossy.reading import Fit
from ckz.lossy.sampling import blocks


def find_buckets(fit: Fit, item: Eligible, bits: int) -> Bytes:
    """Give the representatives of the buckets of largest exponent."""
    low, high = np.full(BUCKETS, 0xFFFFFFFF, np.uint32), np.zeros(BUCKETS, np.uint32)
    for first, last in blocks(item.nbytes // WIDTHS[item.dtype], WIDTHS[item.dtype]):
        far = fit.differences(item, fit.base_of(item), first, last)
        kernels.extremes(np.ascontiguousarray(far).view(np.uint32), low, high)
    used = np.flatnonzero(low <= high)
    # By exponent, the eight bits below the sign.
    kept = sorted(used.tolist(), key=lambda b: (-(b & 255), b))[: 2**bits - 1]
    ends = [bits[kept].view(np.float32) / np.float32(2) for bits in (low, high)]
    table = ends[0] + ends[1]
    found: Bytes = table.astype("<f4").view(np.uint8)
    return found
