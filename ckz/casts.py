"""Which 16-bit tensors are casts of fp32 tensors in the same checkpoint.

Candidates come from structure (as many elements), content decides: a few elements all over the
16-bit tensor are compared with the rounded elements at the same places of every fp32 tensor of its
size. Names are not asked, so a Megatron rank, a ZeRO directory and an EMA copy all work. What the
samples say is checked for every element when it is coded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Checkpoint, Piece, Tensor, contiguous_strides
from ckz.codecs.cast import round_to
from ckz.container import Ref
from ckz.files import FileSet
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
        span = _whole_span(checkpoint, tensor)
        if tensor.dtype in _TARGETS and span is not None and tensor.nbytes >= SMALL:
            halves.setdefault(math.prod(tensor.shape), []).append((span, tensor))
    if not halves:
        return {}
    paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
    found: dict[int, tuple[Ref, ...]] = {}
    with FileSet(paths, os.O_RDONLY) as files:
        known = _fingerprints(checkpoint, files, set(halves))
        for size, tensors in halves.items():
            for span, tensor in tensors:
                where = _places(size)
                values = _sample(checkpoint, files, list(_runs(checkpoint, tensor)), where, 2)
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
        runs = list(_runs(checkpoint, tensor))
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
    runs: list[tuple[int, int, int]],
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


def _whole_span(checkpoint: Checkpoint, tensor: Tensor) -> int | None:
    """Give the span that a row-major tensor fills alone."""
    if len(tensor.pieces) != 1 or tensor.transform:
        return None
    piece = tensor.pieces[0]
    span = checkpoint.spans[piece.span]
    fills = span.nbytes == tensor.nbytes and span.dtype == tensor.dtype
    plain = span.byteorder == "<" and piece.strides == contiguous_strides(tensor.shape)
    return piece.span if fills and plain else None


def _runs(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Give a tensor in row-major order as (span, byte offset, bytes), if it lies in such runs.

    A tensor that was cut anywhere in its flat order (ZeRO) lies in boxes that are runs; whatever
    else there is gives fewer bytes than the tensor has, and nobody's cast.
    """
    itemsize = ITEMSIZE[tensor.dtype]
    strides = contiguous_strides(tensor.shape)
    expected = 0
    pending: tuple[int, int, int] | None = None
    for piece in sorted(tensor.pieces, key=lambda piece: piece.start):
        span = checkpoint.spans[piece.span]
        begin = sum(a * b for a, b in zip(piece.start, strides, strict=True))
        size = math.prod(piece.shape)
        if not _is_run(piece, tensor.shape) or begin != expected or span.dtype != tensor.dtype:
            return
        if span.byteorder != "<" or span.packed or tensor.transform:
            return
        run = piece.span, piece.offset, size * itemsize
        if pending and pending[0] == run[0] and pending[1] + pending[2] == run[1]:
            pending = pending[0], pending[1], pending[2] + run[2]
        else:
            if pending:
                yield pending
            pending = run
        expected += size
    if pending:
        yield pending


def _is_run(piece: Piece, shape: tuple[int, ...]) -> bool:
    """Tell whether a box is contiguous both in its span and in the tensor's row-major order."""
    if piece.strides != contiguous_strides(piece.shape):
        return False
    inner = True
    for have, full in zip(reversed(piece.shape), reversed(shape), strict=True):
        if not inner and have != 1:
            return False
        inner = inner and have == full
    return True
