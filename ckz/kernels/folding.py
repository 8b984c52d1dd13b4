"""Numbers from zero on as indices around zero, which take as many bits; and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int32]


def fold(numbers: Indices) -> Indices:
    """Give numbers from zero on as the indices that take as many bits."""
    return (numbers >> 1) ^ -(numbers & 1)


def unfold(indices: Indices) -> Indices:
    """Undo ``fold``."""
    return (indices << 1) ^ (indices >> 31)
