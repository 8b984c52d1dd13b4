"""The values of many pairs of tensors, compared by threads in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckz.checkpoint import ITEMSIZE, Tensor, contiguous_strides
from ckz.diffing.blocks import Side, Walk, Where, elements_in, read_block, read_whole, walk
from ckz.diffing.stats import Stats, Tolerance, compare, is_comparable, measure, numbers_in, total
from ckz.kernels.buffers import scratch
from ckz.streams import CHUNK
from ckz.workers import Workers, in_order

Bytes = npt.NDArray[np.uint8]
Sides = tuple[Side, Side]
Pairs = Sequence[tuple[Tensor, Tensor]]

# Blocks that one job looks at, at most: those of tiny tensors are not worth a job each.
_TOGETHER = 256


class _Task(NamedTuple):
    """One block of one pair.

    ``walk`` is None where both tensors are small and lie as they are compared: most of these are
    equal, and laying a grid takes longer than to see that.
    """

    pair: int
    nbytes: int
    walk: Walk | None = None
    number: int = 0
    where: Where = ()


def compare_tensors(
    sides: Sides,
    pairs: Pairs,
    tolerance: Tolerance,
    workers: Workers,
    on_bytes: Callable[[int], None],
) -> list[Stats | None]:
    """Compare pairs of tensors of one shape: bit by bit, and by value where bits differ.

    Parameters
    ----------
    on_bytes : is told how many bytes of the first side were compared.

    Returns
    -------
    For each pair how it differs; None where the two dtypes have no values in common.

    Raises
    ------
    CkzError
        Naming file and tensor.
    """
    comparable = {at for at, (a, b) in enumerate(pairs) if is_comparable(a.dtype, b.dtype)}
    # In the order of one file at least, so that it is read from front to back.
    order = sorted(comparable, key=lambda at: _place(sides[0], pairs[at][0]))
    found: dict[int, Stats] = {}
    differing: dict[int, bytearray] = {}
    times: dict[int, int] = {}

    def add(task: _Task, stats: Stats) -> None:
        found[task.pair] = total([found[task.pair], stats]) if task.pair in found else stats

    work = partial(_compare, sides, pairs, tolerance)
    for task, stats in _run(_tasks(sides, pairs, order), work, workers):
        if stats is not None:
            blocks, times[task.pair] = (
                (task.walk.block_count, task.walk.times) if task.walk else (1, 1)
            )
            differing.setdefault(task.pair, bytearray(blocks))[task.number] = True
            add(task, stats)
        on_bytes(task.nbytes)
    # Blocks that are equal count for the norms of tensors that are not.
    rest = (
        task
        for task in _tasks(sides, pairs, [at for at in order if at in differing])
        if not differing[task.pair][task.number]
    )
    for task, stats in _run(rest, partial(_describe, sides[0], pairs), workers):
        if stats is not None:
            add(task, stats)
    return [
        (total([found[at]], times[at]) if at in found else Stats(numbers_in(a)))
        if at in comparable
        else None
        for at, (a, _) in enumerate(pairs)
    ]


def digests(side: Side, tensors: Sequence[Tensor], workers: Workers) -> Iterator[bytes]:
    """Give a digest of each tensor's values in row-major order, however it lies."""
    return in_order(workers, (partial(_digest, side, tensor) for tensor in tensors))


def _digest(side: Side, tensor: Tensor) -> bytes:
    digest = xxhash.xxh3_128()
    # By its shape alone, not by how it lies: or equal tensors would have other digests.
    grid = walk(tensor, tensor, side.checkpoint.nbytes, reorder=False)
    for where in grid.blocks():
        out = scratch("diff a", elements_in(where) * ITEMSIZE[tensor.dtype])
        read_block(side, grid.a, where, out)
        digest.update(_transformed(out, tensor).data)
    return digest.digest()


def _place(side: Side, tensor: Tensor) -> tuple[int, int]:
    piece = tensor.pieces[0] if tensor.pieces else None
    return (piece.span, piece.offset) if piece else (-1, 0)


def _tasks(sides: Sides, pairs: Pairs, order: Iterable[int]) -> Iterator[_Task]:
    nbytes = sum(side.checkpoint.nbytes for side in sides)
    for pair in order:
        a, b = pairs[pair]
        if _is_small(sides[0], a) and _is_small(sides[1], b) and a.dtype == b.dtype:
            yield _Task(pair, a.nbytes)
        elif math.prod(a.shape):
            grid = walk(a, b, nbytes)
            for number, where in enumerate(grid.blocks()):
                size = elements_in(where) * ITEMSIZE[a.dtype]
                yield _Task(pair, size, grid, number, where)


def _is_small(side: Side, tensor: Tensor) -> bool:
    """Whether a tensor is no more than one block that needs only to be read."""
    if len(tensor.pieces) != 1 or tensor.transform or tensor.nbytes > CHUNK:
        return False
    (piece,) = tensor.pieces
    return (
        piece.shape == tensor.shape
        and piece.strides == contiguous_strides(tensor.shape)
        and side.checkpoint.spans[piece.span].byteorder == "<"
    )


def _run(
    tasks: Iterable[_Task], work: Callable[[_Task], Stats | None], workers: Workers
) -> Iterator[tuple[_Task, Stats | None]]:
    """Do tasks in threads, tiny ones together; give each with its result, in order."""

    def jobs() -> Iterator[Callable[[], list[tuple[_Task, Stats | None]]]]:
        batch: list[_Task] = []
        nbytes = 0
        for task in tasks:
            batch.append(task)
            nbytes += task.nbytes
            if nbytes >= CHUNK // 2 or len(batch) == _TOGETHER:
                yield partial(_each, work, batch)
                batch, nbytes = [], 0
        yield partial(_each, work, batch)

    for results in in_order(workers, jobs()):
        yield from results


def _each(
    work: Callable[[_Task], Stats | None], tasks: list[_Task]
) -> list[tuple[_Task, Stats | None]]:
    return [(task, work(task)) for task in tasks]


def _compare(sides: Sides, pairs: Pairs, tolerance: Tolerance, task: _Task) -> Stats | None:
    """Compare a block; None where all bits are equal."""
    tensors = pairs[task.pair]
    elements = elements_in(task.where) if task.walk else math.prod(tensors[0].shape)
    a = scratch("diff a", elements * ITEMSIZE[tensors[0].dtype])
    b = scratch("diff b", elements * ITEMSIZE[tensors[1].dtype])
    if task.walk:
        read_block(sides[0], task.walk.a, task.where, a)
        read_block(sides[1], task.walk.b, task.where, b)
    else:
        read_whole(sides[0], tensors[0], a)
        read_whole(sides[1], tensors[1], b)
    if tensors[0].transform != tensors[1].transform:
        a, b = _transformed(a, tensors[0]), _transformed(b, tensors[1])
    dtypes = tensors[0].dtype, tensors[1].dtype
    if dtypes[0] == dtypes[1] and _are_equal(a, b):
        return None
    return compare(a, b, dtypes, tolerance)


def _describe(side: Side, pairs: Pairs, task: _Task) -> Stats:
    """Give what a block that is equal adds to the norms and counts of its tensor."""
    assert task.walk is not None  # a tensor of one block differs, or does not, as a whole
    dtype = pairs[task.pair][0].dtype
    a = scratch("diff a", elements_in(task.where) * ITEMSIZE[dtype])
    read_block(side, task.walk.a, task.where, a)
    return measure(a, dtype)


def _are_equal(a: Bytes, b: Bytes) -> bool:
    words = a.size // 8 * 8
    if a.size < 4096:
        return a.tobytes() == b.tobytes()
    return np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64)) and np.array_equal(
        a[words:], b[words:]
    )


def _transformed(data: Bytes, tensor: Tensor) -> Bytes:
    """Do what torch puts off: conjugate or negate, which flips signs."""
    if not tensor.transform:
        return data
    is_complex = tensor.dtype.startswith("complex")
    width = ITEMSIZE[tensor.dtype] // (2 if is_complex else 1)
    words = data.view(f"u{width}")
    if tensor.transform == "conj":
        words = words[1::2] if is_complex else words[:0]
    if is_complex or "float" in tensor.dtype:
        words ^= words.dtype.type(1 << (8 * width - 1))
    else:
        np.negative(words, out=words)
    return data
