"""Which 16-bit tensors are casts of fp32 tensors in the same checkpoint.

Candidates come from structure (as many elements), content decides: a few elements all over the
16-bit tensor are compared with the rounded elements at the same places of every fp32 tensor of its
size. Names are not asked, so a Megatron rank, a ZeRO directory and an EMA copy all work. What the
samples say is checked for every element when it is coded.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import Checkpoint, Tensor
from ckz.codecs.cast import round_to
from ckz.container import Ref
from ckz.files import FileSet
from ckz.runs import Run, runs_of, whole_span
from ckz.streams import SMALL, Extent

_SAMPLES = 24
_TARGETS = ("bfloat16", "float16")

Bytes = npt.NDArray[np.uint8]


def find_casts(checkpoint: Checkpoint) -> dict[int, tuple[Ref, ...]]:
    """Pair spans of 16-bit tensors with the fp32 ranges that they are rounded from.

    Returns
    -------
    span -> ranges that, laid end to end, have the elements of the span in order. Only spans that
    are one whole tensor, and large enough to have a stream of their own, are looked at.
    """
    halves: dict[int, list[tuple[int, Tensor]]] = {}
    for tensor in checkpoint.tensors:
        span = whole_span(checkpoint, tensor)
        if tensor.dtype in _TARGETS and span is not None and tensor.nbytes >= SMALL:
            halves.setdefault(math.prod(tensor.shape), []).append((span, tensor))
    if not halves:
        return {}
    paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
    found: dict[int, tuple[Ref, ...]] = {}
    with FileSet(paths, os.O_RDONLY) as files:
        known = _fingerprints(checkpoint, files, set(halves))
        # Samples are many small reads: of tensors that have a master's size alone.
        for size in halves.keys() & {size for size, _, _ in known}:
            for span, tensor in halves[size]:
                where = _places(size)
                values = _sample(checkpoint, files, list(runs_of(checkpoint, tensor)), where, 2)
                if source := known.get((size, tensor.dtype, values.tobytes())):
                    found[span] = source
    return found


def _fingerprints(
    checkpoint: Checkpoint, files: FileSet, sizes: set[int]
) -> dict[tuple[int, str, bytes], tuple[Ref, ...]]:
    """Give the fp32 tensors of some sizes by how their samples round; the first one counts."""
    nfiles = len(checkpoint.files)
    known: dict[tuple[int, str, bytes], tuple[Ref, ...]] = {}
    for tensor in checkpoint.tensors:
        size = math.prod(tensor.shape)
        if tensor.dtype != "float32" or size not in sizes:
            continue
        runs = list(runs_of(checkpoint, tensor))
        if sum(nbytes for _, _, nbytes in runs) != 4 * size:
            continue
        bits = _sample(checkpoint, files, runs, _places(size), 4).view("<u4")
        if not bits.any():
            continue
        source = tuple(Ref(nfiles + span, offset, nbytes) for span, offset, nbytes in runs)
        for dtype in _TARGETS:
            known.setdefault((size, dtype, round_to(dtype, bits).tobytes()), source)
    return known


def _places(size: int) -> npt.NDArray[np.int64]:
    """Give element numbers all over a tensor, at no regular distance."""
    step = np.arange(_SAMPLES, dtype=np.int64)
    return (step * size // _SAMPLES + step * step * 7 % max(1, size // _SAMPLES)) % size


def _sample(
    checkpoint: Checkpoint,
    files: FileSet,
    runs: list[Run],
    where: npt.NDArray[np.int64],
    itemsize: int,
) -> Bytes:
    """Read elements by number from runs laid end to end."""
    out = np.empty(where.size * itemsize, np.uint8)
    for k, element in enumerate(where.tolist()):
        at = element * itemsize
        for span, offset, nbytes in runs:
            if at < nbytes:
                place = checkpoint.spans[span]
                extent = Extent(place.file, place.offset + offset + at, itemsize)
                files.read([extent], out[k * itemsize : (k + 1) * itemsize])
                break
            at -= nbytes
    return out
