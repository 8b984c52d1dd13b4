"""What codecs that lean on a base share: its elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels.buffers import scratch

# dtype -> bytes, position and width of the exponent; integers have none
EXPONENTS = {
    "bfloat16": (2, 7, 8),
    "float16": (2, 10, 5),
    "float32": (4, 23, 8),
    "float64": (8, 52, 11),
    "fp8": (1, 3, 4),
    "int8": (1, 0, 0),
    "int16": (2, 0, 0),
    "int32": (4, 0, 0),
    "int64": (8, 0, 0),
}


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that there are no differences of, by ``ValueError``."""
    if dtype not in EXPONENTS:
        raise ValueError("no differences of this dtype")


def base_of(
    dtype: str, refs: Sequence[npt.NDArray[np.uint8]], nbytes: int
) -> npt.NDArray[Any] | None:
    """Give the references, laid end to end, as unsigned elements; None if they do not fit."""
    itemsize = EXPONENTS[dtype][0]
    if not nbytes or nbytes % itemsize or sum(ref.size for ref in refs) != nbytes:
        return None
    base = refs[0]
    if len(refs) > 1 or base.ctypes.data % itemsize:
        base = np.concatenate(refs, out=scratch("base", nbytes))
    return base.view(f"<u{itemsize}")
