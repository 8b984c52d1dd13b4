"""The published delta for 16-bit weights: which elements changed, and their new values.

BitSnap (arXiv 2511.12376): one bit an element says whether its pattern differs from the base's,
packed eight to a byte, followed by the changed values in order. Patterns are compared, so NaN
payloads and -0.0 are exact. Of n 16-bit elements of which a fraction c changed it takes n / 8 +
2 c n bytes: at best a sixteenth. ckz's own codec is ``ulp``; this one is here to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.leaning import base_of, check_dtype
from ckz.errors import CorruptError
from ckz.kernels import bitmask as kernels

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Bitmask:
    """Bitmask of changed elements, then their values."""

    name: ClassVar[str] = "bitmask"
    dtype: str = ""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """List the elements that differ from the references."""
        base = base_of(self.dtype, refs, chunk.size)
        if base is None:
            return None
        mask, values = kernels.extract(chunk.view(base.dtype), base)
        payload = mask.tobytes() + values.tobytes()
        return payload if len(payload) < chunk.size else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Put the changed elements over the references."""
        base = base_of(self.dtype, refs, out.size)
        if base is None:
            raise CorruptError("a bitmask needs references of its own size")
        nbytes = (base.size + 7) // 8
        if len(payload) < nbytes:
            raise CorruptError("a bitmask is cut short")
        mask = np.frombuffer(payload, np.uint8, nbytes)
        values = payload[nbytes:]
        if len(values) != kernels.count_changed(mask, base.size) * base.itemsize:
            raise CorruptError("a bitmask does not have the values that it marks")
        kernels.restore(base, mask, np.frombuffer(values, base.dtype), out.view(base.dtype))
