"""Values in clusters: the histogram these are found from, their labels and codes, and back.

There is no step that moves centroids: the best clusters of a histogram are found exactly, on the
host (see ``lossy/clusters.py``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, add, each, times
from ckz.kernels.folding import fold, unfold

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]

CODES = 256
# Added and taken away again, it leaves a float32 rounded to an integer, half to even.
_ROUND = np.float32(1 << 23)


def _histogram_body(words: Any, shift: int, counts: npt.NDArray[np.int64]) -> None:
    for i in each(words.size):
        add(counts, words[i] >> shift, 1)


def _histogram_numpy(words: Any, shift: int, counts: npt.NDArray[np.int64]) -> None:
    counts += np.bincount(words >> words.dtype.type(shift), minlength=counts.size)


def _labels_body(values: Floats, table: Floats, root: bool, out: Indices) -> None:
    for i in each(values.size):
        x = values[i]
        if root:
            x = np.float32(math.sqrt(x)) if x >= 0 else np.float32(math.nan)
        low, high = 0, table.size >> 1
        while low < high:
            middle = (low + high) >> 1
            # NaN is sorted behind all numbers.
            if table[2 * middle] > x:
                high = middle
            else:
                low = middle + 1
        label = max(low - 1, 0)
        code = np.float32(0)
        scale = table[2 * label + 1]
        if scale > 0:
            code = (x - table[2 * label]) / scale
            code = min(max(code, np.float32(0)), np.float32(CODES - 1)) if code == code else code
            code = code + _ROUND - _ROUND if code == code else np.float32(0)
        number = label * CODES + np.int32(code)
        out[i] = number >> 1 ^ -(number & 1)


def _labels_numpy(values: Floats, table: Floats, root: bool, out: Indices) -> None:
    x = np.sqrt(values) if root else values
    first, scales = table[0::2], table[1::2]
    label = np.searchsorted(first, x, side="right") - 1
    np.clip(label, 0, len(first) - 1, out=label)
    scale = scales[label]
    code = np.where(scale > 0, (x - first[label]) / scale, 0)
    code = np.nan_to_num(np.rint(code), nan=0.0, posinf=CODES - 1, neginf=0)
    number = label.astype(np.int32) * CODES + np.clip(code, 0, CODES - 1).astype(np.int32)
    out[:] = fold(number)


def _values_body(indices: Indices, table: Floats, root: bool, out: Floats) -> None:
    for i in each(indices.size):
        number = indices[i] << 1 ^ indices[i] >> 31
        label = number // CODES
        x = times(np.float32(number & (CODES - 1)), table[2 * label + 1]) + table[2 * label]
        out[i] = x * x if root else x


def _values_numpy(indices: Indices, table: Floats, root: bool, out: Floats) -> None:
    number = unfold(indices)
    label = number // CODES
    out[:] = number % CODES
    out *= table[1::2][label]
    out += table[0::2][label]
    if root:
        out *= out


# How often each number stands in the upper bits of words.
histogram = Kernel(_histogram_body, _histogram_numpy, outputs=1, updates=True, in_numpy=True)
# Label and code of each value, folded; the table has minimum and scale of each cluster in turn.
labels = Kernel(_labels_body, _labels_numpy, outputs=1, in_numpy=True)
# Undoes it; all labels must be there.
values = Kernel(_values_body, _values_numpy, outputs=1, in_numpy=True)
