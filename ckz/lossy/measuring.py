"""What becomes of each tensor: the error of what will be restored, and its checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import Checkpoint
from ckz.codecs.floats import WIDTHS, widen, words_of
from ckz.container import Loss
from ckz.kernels.differences import LANES, SUMS, add_sums
from ckz.lossy.restored import RestoredFiles, Snap
from ckz.lossy.sampling import Bytes, Doubles, total
from ckz.streams import CHUNK, Extent
from ckz.values import doubles
from ckz.workers import Workers, in_order

_MOST = 1e300


class Measured(NamedTuple):
    """A span's loss, and the CRC-32 of its bytes as they stand and as they will be restored."""

    loss: Loss
    before: int
    after: int


def measure_all(
    checkpoint: Checkpoint, files: RestoredFiles, workers: Workers, tell: Callable[[int], None]
) -> Mapping[int, Measured]:
    """Measure every span that is replaced; ``tell`` is told of the bytes of each."""
    jobs = (
        partial(_measure, checkpoint, files, span, snap)
        for span, snap in sorted(files.snaps.items())
    )
    measured = {}
    for found in in_order(workers, jobs):
        measured[found.loss.span] = found
        tell(checkpoint.spans[found.loss.span].nbytes)
    return measured


def _measure(checkpoint: Checkpoint, files: RestoredFiles, number: int, snap: Snap) -> Measured:
    span = checkpoint.spans[number]
    before = after = 0
    sums = np.zeros((SUMS, LANES))
    for at in range(0, span.nbytes, CHUNK):
        old = np.empty(min(CHUNK, span.nbytes - at), np.uint8)
        files.read_original([Extent(span.file, span.offset + at, old.size)], old)
        new = old.copy()
        with np.errstate(all="ignore"):  # any bits may stand there, such as signaling NaNs
            snap.replace(new, at)
            _add_errors(span.dtype, old, new, sums)
        before, after = zlib.crc32(old.data, before), zlib.crc32(new.data, after)
    errors, squares, largest = total(sums[0]), total(sums[1]), float(sums[3].max())
    # Squares may overflow, or all be zero.
    relative = (errors / squares) ** 0.5 if squares else float(errors > 0)
    largest, relative = (x if x < _MOST else _MOST for x in (largest, relative))
    return Measured(Loss(number, snap.method, largest, relative), before, after)


def _add_errors(dtype: str, old: Bytes, new: Bytes, sums: Doubles) -> None:
    """Add the errors of the elements that are finite."""
    was: npt.NDArray[np.floating]
    now: npt.NDArray[np.floating]
    if dtype in WIDTHS:
        was, now = (widen(dtype, words_of(dtype, data)) for data in (old, new))
    else:
        was, now = doubles(old, dtype), doubles(new, dtype)
    good = np.isfinite(was) & np.isfinite(now)
    if not good.all():
        was, now = was[good], now[good]
    part = np.zeros_like(sums)
    add_sums(was, now, part)
    largest = np.maximum(sums[3], part[3])
    sums += part
    sums[3] = largest
