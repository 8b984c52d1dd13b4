"""Sums over the rows and columns of a matrix that a run of elements lies in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel, add, each

Tops = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int64]


def blocks(values: Tops, column: int, columns: int) -> Iterator[tuple[int, int, Tops]]:
    """Cut a run of a row-major matrix into (row, column, block): a head, whole rows, a tail."""
    row = 0
    if column:
        head = values[: columns - column]
        yield row, column, head.reshape(1, -1)
        values = values[head.size :]
        row = 1
    height = values.size // columns
    if height:
        yield row, 0, values[: height * columns].reshape(height, columns)
    if tail := values.size % columns:
        yield row + height, 0, values[values.size - tail :].reshape(1, -1)


def _sums_body(
    tops: Tops,
    first: int,
    rows: Counts,
    row_counts: Counts,
    columns: Counts,
    column_counts: Counts,
) -> None:
    for i in each(tops.size):
        if tops[i] != 0:
            row, column = (first + i) // columns.size, (first + i) % columns.size
            add(rows, row, tops[i])
            add(row_counts, row, 1)
            add(columns, column, tops[i])
            add(column_counts, column, 1)


def _sums_numpy(
    tops: Tops,
    first: int,
    rows: Counts,
    row_counts: Counts,
    columns: Counts,
    column_counts: Counts,
) -> None:
    for row, column, block in blocks(tops, first, columns.size):
        where = slice(column, column + block.shape[1])
        rows[row : row + len(block)] += block.sum(axis=1, dtype=np.int64)
        row_counts[row : row + len(block)] += np.count_nonzero(block, axis=1)
        columns[where] += block.sum(axis=0, dtype=np.int64)
        column_counts[where] += np.count_nonzero(block, axis=0)


# Of what is not zero, from a column of the first row on: sums and numbers, by row and by column.
sums = Kernel(_sums_body, _sums_numpy, outputs=4, updates=True, in_numpy=True)
