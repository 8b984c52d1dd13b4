"""A chunk whose bytes stand elsewhere: a tied weight saved twice, a replicated layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.errors import CorruptError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Same:
    """No payload: the chunk equals its one reference."""

    name: ClassVar[str] = "same"

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Store nothing; the pipeline has compared the chunk with its reference."""
        return b"" if len(refs) == 1 else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Copy the reference."""
        if len(payload) or len(refs) != 1 or refs[0].size != out.size:
            raise CorruptError("a repeated chunk needs one reference of its own size")
        out[:] = refs[0]
