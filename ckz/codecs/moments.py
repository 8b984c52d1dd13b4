"""Adam's moments, quantized by what they do to the next step.

The step is ``m / (sqrt(v) + eps)``. So the first moment is quantized in units of the decoded
``sqrt(v) + eps``: uniformly, with a dead zone, one step for all tensors. The second is quantized on
the piecewise-linear logarithm that a float's bits are, where the exponents are predicted by the
means of their row and column (as in ``rowcol``), or by the base and such means of the change.
Positive stays positive and zero stays zero. This scheme is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs import quantized
from ckz.codecs.floats import WIDTHS, Bytes, Floats
from ckz.codecs.indices import Indices
from ckz.codecs.quantized import floats_of
from ckz.codecs.rowcol import predict
from ckz.errors import CorruptError
from ckz.kernels import quantize as kernels

# Bits below those that means are made of.
_SHIFT = 20
# What is added to a change of exponents, so that none is zero.
_CHANGE = 2048
_INFINITY = 0x7F800000
_LN2 = 0.6931471805599453
_TOP = (_INFINITY >> _SHIFT) - 1


@dataclass(frozen=True)
class MomentsMomentum:
    """First moments in steps of the update.

    References: the second moment of the same elements, as long as the chunk.

    Attributes
    ----------
    step, lift : of the update, and in hundredths of a step how far above it a value lies.
    eps : the optimizer's.
    offset : in hundredths of a step, what is added before rounding down.
    """

    name: ClassVar[str] = "moments-momentum"
    model: ClassVar[str] = ""
    positive: ClassVar[bool] = False
    dtype: str = "float32"
    step: float = 0.0
    eps: float = 1e-8
    offset: int = 40
    lift: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS or not (0 <= self.step < 1e30 and 0 <= self.eps < 1e30):
            raise ValueError("an optimizer has no such steps")
        if not (0 < self.offset <= 50 and 0 <= self.lift <= 50):
            raise ValueError("no quantizer has such a dead zone")

    def _units(self, refs: Sequence[Bytes], n: int) -> Floats:
        """Give what a step of the update is for each element."""
        found = np.empty(n, np.float32)
        second = floats_of(refs, self.dtype, n)
        kernels.units(second, np.float32(self.eps), np.float32(self.step), found)
        return found

    def indices(self, values: Floats, refs: Sequence[Bytes], first: int) -> Indices:
        """Give the steps of each element's update."""
        out = np.empty(values.size, np.int32)
        units = self._units(refs, values.size)
        kernels.indices(values, values, units, False, np.float32(self.offset / 100), out)
        return out

    def values(self, indices: Indices, refs: Sequence[Bytes], first: int) -> Floats:
        """Give the first moment that makes such a step."""
        out = np.empty(indices.size, np.float32)
        units = self._units(refs, indices.size)
        kernels.values(indices, units, units, False, np.float32(self.lift / 100), out)
        return out

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code the steps of a chunk."""
        return quantized.encode(self, chunk, refs, at) if len(refs) == 1 else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild a chunk."""
        if len(refs) != 1:
            raise CorruptError("first moments need the second ones")
        quantized.decode(self, payload, refs, out)


@dataclass(frozen=True)
class MomentsVariance:
    """Second moments in steps of their logarithm, away from the prediction.

    References: the means of the rows that the chunk touches and of all columns, as in ``rowcol``;
    with ``change`` those of the change, and the base.

    Attributes
    ----------
    step : in units in the last place of a float32: 2**23 is a factor of two.
    """

    name: ClassVar[str] = "moments-variance"
    model: ClassVar[str] = "rowcol"
    positive: ClassVar[bool] = True
    dtype: str = "float32"
    step: int = 1 << 22
    change: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS or not 0 < self.step < 1 << 30 or self.change not in (0, 1):
            raise ValueError("no second moments have such steps")

    def tops(self, values: Floats, base: Floats | None) -> npt.NDArray[np.int16]:
        """Give the exponents that means are made of; 0 where there is none."""
        bits = _bits(values)
        valid = (bits > 0) & (bits < _INFINITY)
        top = bits >> _SHIFT
        if base is not None:
            before = _bits(base)
            valid &= (before > 0) & (before < _INFINITY)
            # Shifted by themselves, so that rounding is the same in both directions.
            top = np.clip(top - (before >> _SHIFT) + _CHANGE, 1, 2 * _CHANGE - 1)
        return np.where(valid, top, 0).astype(np.int16)

    def _predicted(
        self, refs: Sequence[Bytes], first: int, n: int
    ) -> tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.bool_]]:
        """Give the predicted bits, and which elements are in rows of zeros."""
        if len(refs) < 2 or refs[1].size < 2 or (self.change > 0) != (len(refs) > 2):
            raise CorruptError("second moments lack their means or their base")
        top = predict(refs[:2], first % (refs[1].size // 2), n)
        empty = top == 0
        if self.change:
            change = (top.astype(np.int32) - _CHANGE) << _SHIFT
            return change + _bits(floats_of(refs[2:], self.dtype, n)).astype(np.int64), empty
        # The middle of what has these top bits.
        return (np.clip(top, 0, _TOP).astype(np.int32) << _SHIFT) + (1 << (_SHIFT - 1)), empty

    def indices(self, values: Floats, refs: Sequence[Bytes], first: int) -> Indices:
        """Give the steps between the prediction and each value."""
        predicted, empty = self._predicted(refs, first, values.size)
        out = np.empty(values.size, np.int32)
        kernels.log_indices(_bits(values), predicted, empty, self.step, _offset(self.step), out)
        return out

    def values(self, indices: Indices, refs: Sequence[Bytes], first: int) -> Floats:
        """Go so many steps from the prediction."""
        predicted, empty = self._predicted(refs, first, indices.size)
        out = np.empty(indices.size, np.uint32)
        kernels.log_values(indices, predicted, empty, self.step, out)
        return out.view(np.float32)

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code the steps of a chunk."""
        return quantized.encode(self, chunk, refs, at) if len(refs) > 1 else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild a chunk."""
        quantized.decode(self, payload, refs, out)


def _offset(step: int) -> int:
    """Give what is added to a logarithm before rounding down: half a step, and a little more.

    An update is divided by the root, and the mean of what one is divided by, over all of a step, is
    more than one divided by its middle. With this much more, updates are as large as they were.
    """
    x = min(step / (1 << 23) * _LN2 / 4, 1.25)
    # Twice ln(sinh(x) / x), as a series: the same on every machine.
    return step // 2 + int((x * x / 3 - x**4 / 90) / _LN2 * (1 << 23))


def _bits(values: Floats) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(values).view(np.int32)
