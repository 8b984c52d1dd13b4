"""A part of a checkpoint that stands for the whole, spread evenly over it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Checkpoint, Tensor, contiguous_strides, whole
from ckz.errors import UnsupportedError
from ckz.extract import header
from ckz.files import FileSet
from ckz.streams import CHUNK, Extent, Stream

# Into so many parts a sample is split.
_PARTS = 8
# Of a tensor that is cut, so many blocks are kept.
_BLOCKS = 32


def pick_chunks(
    streams: Sequence[Stream], numbers: Sequence[int], budget: int
) -> dict[int, list[int]]:
    """Choose chunks of some streams, together about ``budget`` bytes.

    Parameters
    ----------
    numbers : of the streams to choose from.

    Returns
    -------
    number of a stream -> where the chosen chunks start in it.
    """
    places = [(n, start) for n in numbers for start in range(0, streams[n].nbytes, CHUNK)]
    sizes = np.array([min(CHUNK, streams[n].nbytes - start) for n, start in places])
    chosen: dict[int, list[int]] = {}
    met = dict.fromkeys(range(len(places)), 1)
    if sizes.sum() > budget:
        # Places in equal distances fall on large chunks more often.
        likely = float((sizes * sizes).sum()) / float(sizes.sum())
        met = _spread(sizes, max(1, round(budget / likely)))
    for index in met:
        chosen.setdefault(places[index][0], []).append(places[index][1])
    return chosen


def write_sample(checkpoint: Checkpoint, target: Path, budget: int) -> None:
    """Write parts of tensors of every role and dtype into a safetensors file, under their names.

    Of a large tensor some rows from all over it are taken, of all dtypes the same ones. If there
    are no tensors that can be cut, some of the bytes stand for all.

    Parameters
    ----------
    budget : bytes of each role and dtype, if they were float32.
    """
    groups: dict[tuple[str, str], list[tuple[Tensor, Extent]]] = {}
    for tensor in checkpoint.tensors:
        if extent := _extent(checkpoint, tensor):
            groups.setdefault((tensor.role, tensor.dtype), []).append((tensor, extent))
    parts: dict[str, tuple[Tensor, list[Extent]]] = {}
    for members in groups.values():
        # Counted as float32, so that of a weight and of its moments the same elements are taken.
        sizes = 4 * np.array([math.prod(tensor.shape) for tensor, _ in members])
        if sizes.sum() <= budget:
            parts.update((tensor.name, (tensor, [extent])) for tensor, extent in members)
            continue
        for index, times in _spread(sizes, _PARTS).items():
            tensor, extent = members[index]
            parts[tensor.name] = _cut(tensor, extent, times * budget // _PARTS)
    extents = [e for _, several in parts.values() for e in several] or _slices(checkpoint, budget)
    paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
    with FileSet(paths, os.O_RDONLY) as files, target.open("wb") as out:
        if parts:
            out.write(header([tensor for tensor, _ in parts.values()]))
        for file, offset, nbytes in extents:
            for at in range(0, nbytes, CHUNK):
                data = np.empty(min(CHUNK, nbytes - at), np.uint8)
                files.read([Extent(file, offset + at, data.size)], data)
                out.write(data.data)


def _spread(sizes: npt.NDArray[np.int64], count: int) -> dict[int, int]:
    """Look at several things, laid end to end, at ``count`` places in equal distances.

    Returns
    -------
    which was met -> how often.
    """
    ends = np.cumsum(sizes)
    targets = (np.arange(count) + 0.5) * float(ends[-1]) / count
    return Counter(np.searchsorted(ends, targets, side="right").tolist())


def _extent(checkpoint: Checkpoint, tensor: Tensor) -> Extent | None:
    """Give where a tensor lies, if that is in one run and safetensors can hold it."""
    if len(tensor.pieces) != 1 or tensor.transform:
        return None
    (piece,) = tensor.pieces
    span = checkpoint.spans[piece.span]
    if (
        span.packed
        or span.byteorder != "<"
        or piece.shape != tensor.shape
        or piece.strides != contiguous_strides(tensor.shape)
    ):
        return None
    try:
        header([tensor])
    except UnsupportedError:
        return None
    return Extent(span.file, span.offset + piece.offset, tensor.nbytes)


def _cut(tensor: Tensor, extent: Extent, budget: int) -> tuple[Tensor, list[Extent]]:
    """Take blocks of rows from all over a tensor: as many as are ``budget`` bytes in float32."""
    count = math.prod(tensor.shape)
    row = math.prod(tensor.shape[1:])
    inner = tensor.shape[1:]
    if 4 * row * _BLOCKS > budget or not inner:
        row, inner = 1, ()
    rows = count // row
    height = min(rows, max(1, budget // (4 * row))) // _BLOCKS or 1
    blocks = min(_BLOCKS, rows // height)
    step = row * ITEMSIZE[tensor.dtype]
    starts = ((2 * number + 1) * rows // (2 * blocks) - height // 2 for number in range(blocks))
    part = whole(tensor.name, tensor.dtype, (blocks * height, *inner), 0)
    return part, [Extent(extent.file, extent.offset + at * step, height * step) for at in starts]


def _slices(checkpoint: Checkpoint, budget: int) -> list[Extent]:
    """Give parts of the files, from places in equal distances."""
    size = max(1, budget // _PARTS)
    places = [
        Extent(index, at, min(size, file.size - at))
        for index, file in enumerate(checkpoint.files)
        if file.kind == "file"
        for at in range(0, file.size, size)
    ]
    return [places[i] for i in _spread(np.array([p.nbytes for p in places]), _PARTS)]
