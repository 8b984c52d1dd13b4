"""Bytes as they are, for chunks that coding does not make smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.errors import CorruptError

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Raw:
    """The stored bytes are the chunk."""

    name: ClassVar[str] = "raw"

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes:
        """Copy the chunk."""
        return chunk.tobytes()

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Copy the payload."""
        if len(payload) != out.size:
            raise CorruptError(f"raw chunk of {len(payload)} bytes, expected {out.size}")
        out[:] = np.frombuffer(payload, np.uint8)
