"""Scratch buffers: every thread has its own, and uses them again and again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_local = threading.local()


def scratch(key: str, n: int, dtype: Any = np.uint8) -> npt.NDArray[Any]:
    """Give this thread's buffer of a name: fresh pages cost as much as the codec itself."""
    cache: dict[str, npt.NDArray[np.uint8]] = _local.__dict__.setdefault("buffers", {})
    nbytes = n * np.dtype(dtype).itemsize
    if key not in cache or cache[key].size < nbytes:
        cache[key] = np.empty(nbytes, np.uint8)
    return cache[key][:nbytes].view(dtype)
