"""Uniform quantizers with a dead zone, in steps of a unit or of a logarithm.

A value is ``base + sign * (|index| + lift) * unit``. What is near no index gets ``NONE``. On the
logarithm a value's bits, read as an integer, are ``predicted + index * step``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, each, times

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

# The index of a value that is near none that has one.
NONE = -(1 << 30)
# The index of a zero on the logarithm, beyond all others.
ZERO = -32

_LARGEST = np.float32(1 << 24)
_INFINITY = 0x7F800000
# Between two numbers one of which is the prediction of the other: nearly all exponents.
_FAR = (1 << 31) - (1 << 29) - (1 << 23)


def _indices_numpy(
    values: Floats, base: Floats, units: Floats, based: bool, offset: Any, out: Indices
) -> None:
    far = values - base if based else values
    size = np.abs(far) / units
    size[far == 0] = 0
    size += offset
    reached = size < _LARGEST
    index = np.where(reached, size, 0).astype(np.int32)
    out[:] = np.where(reached, np.where(far < 0, -index, index), NONE)


def _indices_body(
    values: Floats, base: Floats, units: Floats, based: bool, offset: Any, out: Indices
) -> None:
    for i in each(values.size):
        far = values[i] - base[i] if based else values[i]
        if far == 0:
            out[i] = 0
        elif units[i] == 0:
            out[i] = NONE
        else:
            size = abs(far) / units[i] + offset
            if size < _LARGEST:
                index = np.int32(size)
                out[i] = -index if far < 0 else index
            else:
                out[i] = NONE


def _values_numpy(
    indices: Indices, base: Floats, units: Floats, based: bool, lift: Any, out: Floats
) -> None:
    far: Floats = np.abs(indices).astype(np.float32)
    far += lift
    far *= units
    np.negative(far, out=far, where=indices < 0)
    far[indices == 0] = 0
    np.add(base, far, out=out) if based else np.copyto(out, far)


def _values_body(
    indices: Indices, base: Floats, units: Floats, based: bool, lift: Any, out: Floats
) -> None:
    for i in each(indices.size):
        index = indices[i]
        far = np.float32(0)
        if index != 0:
            far = times(np.float32(abs(index)) + lift, units[i])
            if index < 0:
                far = -far
        out[i] = base[i] + far if based else far


def _units_numpy(second: Floats, eps: Any, step: Any, out: Floats) -> None:
    np.sqrt(second, out=out)
    np.add(out, eps, out=out)
    np.multiply(out, step, out=out)


def _units_body(second: Floats, eps: Any, step: Any, out: Floats) -> None:
    for i in each(second.size):
        out[i] = (np.float32(math.sqrt(second[i])) + eps) * step


def _log_indices_numpy(
    bits: Any, predicted: Any, empty: Mask, step: int, offset: int, out: Indices
) -> None:
    # Predicted from means alone, neither leaves the positive half of its type.
    apart = np.maximum(bits, 0) - predicted
    # With the offset, too, it has to fit.
    out[:] = (np.clip(apart, -_FAR, _FAR) + offset) // step
    out[(np.abs(out) >= -ZERO) | (np.abs(apart) >= _FAR)] = NONE
    zero = bits == 0
    out[zero] = ZERO
    out[zero & empty] = 0


def _log_indices_body(
    bits: Any, predicted: Any, empty: Mask, step: int, offset: int, out: Indices
) -> None:
    for i in each(bits.size):
        if bits[i] == 0:
            out[i] = 0 if empty[i] else ZERO
            continue
        apart = np.int64(max(bits[i], 0)) - np.int64(predicted[i])
        index: Any = NONE
        if abs(apart) < _FAR:
            index = (apart + offset) // step
            if abs(index) >= -ZERO:
                index = NONE
        out[i] = index


def _log_values_numpy(indices: Indices, predicted: Any, empty: Mask, step: int, out: Any) -> None:
    bits = indices.astype(np.int64) * step
    bits += predicted
    np.clip(bits, 1, _INFINITY - 1, out=bits)
    bits[(indices == ZERO) | empty] = 0
    out[:] = bits


def _log_values_body(indices: Indices, predicted: Any, empty: Mask, step: int, out: Any) -> None:
    for i in each(indices.size):
        bits: Any = np.int64(indices[i]) * step + np.int64(predicted[i])
        bits = min(max(bits, 1), _INFINITY - 1)
        out[i] = 0 if indices[i] == ZERO or empty[i] else bits


# Values, base (any, if not ``based``), unit of each element -> indices.
indices = Kernel(_indices_body, _indices_numpy, outputs=1)
# Undoes it.
values = Kernel(_values_body, _values_numpy, outputs=1)
# Second moments -> what a step of the update is for each element.
units = Kernel(_units_body, _units_numpy, outputs=1)
# Bits as integers, predictions, and which elements are predicted to be zero -> indices.
log_indices = Kernel(_log_indices_body, _log_indices_numpy, outputs=1)
# Undoes it.
log_values = Kernel(_log_values_body, _log_values_numpy, outputs=1)
