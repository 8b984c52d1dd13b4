"""What becomes of each tensor: the error of what will be restored, and its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from ckz.checkpoint import Checkpoint
from ckz.container import Loss
from ckz.lossy.restored import RestoredFiles, Snap
from ckz.lossy.sampling import Bytes, Doubles, total
from ckz.streams import CHUNK, Extent
from ckz.values import doubles
from ckz.workers import Workers, in_order


class Measured(NamedTuple):
    """A span's loss, and the CRC-32 of its bytes as they stand and as they will be restored."""

    loss: Loss
    before: int
    after: int


def measure_all(
    checkpoint: Checkpoint, files: RestoredFiles, workers: Workers
) -> Mapping[int, Measured]:
    """Measure every span that is replaced."""
    jobs = (
        partial(_measure, checkpoint, files, span, snap)
        for span, snap in sorted(files.snaps.items())
    )
    return {found.loss.span: found for found in in_order(workers, jobs)}


def _measure(checkpoint: Checkpoint, files: RestoredFiles, number: int, snap: Snap) -> Measured:
    span = checkpoint.spans[number]
    before = after = 0
    largest = errors = squares = 0.0
    for at in range(0, span.nbytes, CHUNK):
        old = np.empty(min(CHUNK, span.nbytes - at), np.uint8)
        files.read_original([Extent(span.file, span.offset + at, old.size)], old)
        new = old.copy()
        with np.errstate(all="ignore"):  # any bits may stand there, such as signaling NaNs
            snap.replace(new, at)
            error, value = _errors(span.dtype, old, new)
        before, after = zlib.crc32(old.data, before), zlib.crc32(new.data, after)
        largest = max(largest, float(error.max(initial=0)))
        errors += total(error * error)
        squares += total(value * value)
    relative = (errors / squares) ** 0.5 if squares else 0.0
    return Measured(Loss(number, snap.method, largest, relative), before, after)


def _errors(dtype: str, old: Bytes, new: Bytes) -> tuple[Doubles, Doubles]:
    """Give the error and the value of each element that is finite."""
    was, now = doubles(old, dtype), doubles(new, dtype)
    good = np.isfinite(was) & np.isfinite(now)
    return np.abs(now[good] - was[good]), was[good]
