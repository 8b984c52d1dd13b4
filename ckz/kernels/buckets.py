"""LC-Checkpoint's buckets, one for each sign and exponent: their extremes and their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, each, lower_to, raise_to
from ckz.kernels.folding import fold

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]

BUCKETS = 512
_MANTISSA, _INFINITE = 23, 255


def _extremes_body(bits: Any, low: Any, high: Any) -> None:
    # Within a bucket floats are in the order of their bits, or in the opposite one.
    for i in each(bits.size):
        bucket = bits[i] >> _MANTISSA
        if bucket & _INFINITE != _INFINITE and bits[i] << 1 & 0xFFFFFFFF:
            if bits[i] < low[bucket]:
                lower_to(low, bucket, bits[i])
            if bits[i] > high[bucket]:
                raise_to(high, bucket, bits[i])


def _extremes_numpy(bits: Any, low: Any, high: Any) -> None:
    bucket = bits >> np.uint32(_MANTISSA)
    used = (bucket & np.uint32(_INFINITE) != _INFINITE) & (bits << np.uint32(1) != 0)
    np.minimum.at(low, bucket[used], bits[used])
    np.maximum.at(high, bucket[used], bits[used])


def _numbers_body(bits: Any, table: Indices, none: int, out: Indices) -> None:
    for i in each(bits.size):
        bucket = bits[i] >> _MANTISSA
        number = table[bucket]
        out[i] = none if bucket & _INFINITE == _INFINITE else number >> 1 ^ -(number & 1)


def _numbers_numpy(bits: Any, table: Indices, none: int, out: Indices) -> None:
    bucket = bits >> np.uint32(_MANTISSA)
    infinite = bucket & np.uint32(_INFINITE) == _INFINITE
    out[:] = np.where(infinite, none, fold(table[bucket]))


# Smallest and largest bits in each bucket; zeros, infinities and NaNs are left out.
extremes = Kernel(_extremes_body, _extremes_numpy, outputs=2, updates=True, in_numpy=True)
# The number that a table gives to each one's bucket, folded; ``none`` for what is not finite.
numbers = Kernel(_numbers_body, _numbers_numpy, outputs=1, in_numpy=True)
