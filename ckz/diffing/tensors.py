"""The values of many pairs of tensors, compared by threads in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckz.checkpoint import ITEMSIZE, Tensor
from ckz.diffing.blocks import Side, Walk, Where, elements_in, read_block, walk
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
    """One block of one pair."""

    pair: int
    walk: Walk
    number: int
    where: Where


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

    work = partial(_compare, sides, tolerance)
    for task, stats in _run(_tasks(sides, pairs, order), work, workers):
        if stats is not None:
            flags = differing.setdefault(task.pair, bytearray(task.walk.block_count))
            flags[task.number] = True
            times[task.pair] = task.walk.times
            add(task, stats)
        on_bytes(elements_in(task.where) * ITEMSIZE[pairs[task.pair][0].dtype])
    # Blocks that are equal count for the norms of tensors that are not.
    rest = (
        task
        for task in _tasks(sides, pairs, [at for at in order if at in differing])
        if not differing[task.pair][task.number]
    )
    for task, stats in _run(rest, partial(_describe, sides), workers):
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
        if math.prod(a.shape):
            grid = walk(a, b, nbytes)
            for number, where in enumerate(grid.blocks()):
                yield _Task(pair, grid, number, where)


def _run(
    tasks: Iterable[_Task], work: Callable[[_Task], Stats | None], workers: Workers
) -> Iterator[tuple[_Task, Stats | None]]:
    """Do tasks in threads, tiny ones together; give each with its result, in order."""

    def jobs() -> Iterator[Callable[[], list[tuple[_Task, Stats | None]]]]:
        batch: list[_Task] = []
        nbytes = 0
        for task in tasks:
            batch.append(task)
            nbytes += elements_in(task.where) * ITEMSIZE[task.walk.a.tensor.dtype]
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


def _compare(sides: Sides, tolerance: Tolerance, task: _Task) -> Stats | None:
    """Compare a block; None where all bits are equal."""
    grid, tensors = task.walk, (task.walk.a.tensor, task.walk.b.tensor)
    a, b = (
        scratch(key, elements_in(task.where) * ITEMSIZE[tensor.dtype])
        for key, tensor in zip(("diff a", "diff b"), tensors, strict=True)
    )
    read_block(sides[0], grid.a, task.where, a)
    read_block(sides[1], grid.b, task.where, b)
    if tensors[0].transform != tensors[1].transform:
        a, b = _transformed(a, tensors[0]), _transformed(b, tensors[1])
    dtypes = tensors[0].dtype, tensors[1].dtype
    if dtypes[0] == dtypes[1] and _are_equal(a, b):
        return None
    return compare(a, b, dtypes, tolerance)


def _describe(sides: Sides, task: _Task) -> Stats:
    """Give what a block that is equal adds to the norms and counts of its tensor."""
    tensor = task.walk.a.tensor
    a = scratch("diff a", elements_in(task.where) * ITEMSIZE[tensor.dtype])
    read_block(sides[0], task.walk.a, task.where, a)
    return measure(a, tensor.dtype)


def _are_equal(a: Bytes, b: Bytes) -> bool:
    words = a.size // 8 * 8
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
