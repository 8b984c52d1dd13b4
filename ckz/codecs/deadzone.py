"""Uniform quantization, with a dead zone, of a tensor or of its difference to a base.

A value is ``base + sign * (|index| + lift) * step``. Every row of a matrix may have a step of its
own: rare rows of an embedding move more than frequent ones, and one step for all would put the
frequent ones into the dead zone. The quantizer is that of transform coders; a step a row is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckz.codecs import quantized
from ckz.codecs.floats import WIDTHS, Bytes, Floats
from ckz.codecs.indices import Indices
from ckz.codecs.quantized import floats_of
from ckz.errors import CorruptError
from ckz.kernels import quantize as kernels


@dataclass(frozen=True)
class Deadzone:
    """Indices of steps away from the references, or from zero.

    References: the number of elements in a row, uint64; the steps of the rows that the chunk
    touches, float32; the base, laid end to end, if there is one.

    Attributes
    ----------
    offset : in hundredths of a step, what is added before rounding down: 50 rounds to the nearest,
        less makes the dead zone wider.
    lift : in hundredths of a step, how far above its step a value lies.
    """

    name: ClassVar[str] = "deadzone"
    model: ClassVar[str] = "rows"
    positive: ClassVar[bool] = False
    dtype: str = "float32"
    offset: int = 50
    lift: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS or not (0 < self.offset <= 50 and 0 <= self.lift <= 50):
            raise ValueError("no quantizer has such a dead zone")

    def _steps(self, refs: Sequence[Bytes], first: int, n: int) -> Floats:
        if len(refs) < 2 or refs[0].size != 8 or refs[1].size % 4:
            raise CorruptError("a quantized chunk lacks its steps")
        columns = int(refs[0].view("<u8")[0])
        steps = refs[1].copy().view("<f4")
        column = first % columns if columns else 0
        if not columns or (column + n - 1) // columns >= steps.size:
            raise CorruptError("a quantized chunk has too few steps")
        # Python's integers, for a hostile number of columns would wrap others.
        head = min(columns - column, n)
        whole, rest = divmod(n - head, columns)
        counts = [head] + [columns] * whole + [rest] * (rest > 0)
        return np.repeat(steps[: len(counts)], counts)

    def indices(self, values: Floats, refs: Sequence[Bytes], first: int) -> Indices:
        """Give the steps between the base and each value."""
        out = np.empty(values.size, np.int32)
        steps = self._steps(refs, first, values.size)
        base = floats_of(refs[2:], self.dtype, values.size) if refs[2:] else values
        offset = np.float32(self.offset / 100)
        kernels.indices(values, base, steps, len(refs) > 2, offset, out)
        return out

    def values(self, indices: Indices, refs: Sequence[Bytes], first: int) -> Floats:
        """Go so many steps from the base."""
        out = np.empty(indices.size, np.float32)
        steps = self._steps(refs, first, indices.size)
        base = floats_of(refs[2:], self.dtype, indices.size) if refs[2:] else steps
        kernels.values(indices, base, steps, len(refs) > 2, np.float32(self.lift / 100), out)
        return out

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code the indices of a chunk."""
        return quantized.encode(self, chunk, refs, at) if len(refs) > 1 else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild a chunk."""
        quantized.decode(self, payload, refs, out)
