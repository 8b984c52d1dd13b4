"""Float types as float32 and back, by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.codecs.cast import round_to

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

# dtype -> bytes an element
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def words_of(dtype: str, data: Bytes) -> Words:
    """See little-endian bytes as bits of elements; copied only if they do not lie on the grid."""
    width = WIDTHS[dtype]
    if data.ctypes.data % width or not data.flags.c_contiguous:
        data = data.copy()
    return data.view(f"<u{width}")


def widen(dtype: str, words: Words) -> Floats:
    """Give elements as float32, which holds all of these types."""
    if dtype == "float32":
        return words.view(np.float32)
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(dtype: str, values: Floats) -> Words:
    """Round float32 to a type, half to even, and give the bits."""
    if dtype == "float32":
        return values.view(np.uint32)
    return round_to(dtype, values.view(np.uint32)).copy()
