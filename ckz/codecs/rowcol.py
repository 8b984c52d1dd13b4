"""Optimizer moments of a matrix: exponents predicted by row mean plus column mean.

The magnitude of a gradient varies with its row and column far more than inside them. The top bits
of a float, read as an integer q (exponent and first mantissa bits: a piecewise-linear log2), are
predicted by the mean of their row plus that of their column; what remains is one byte, which a
Huffman coder takes. The sign and the other mantissa bits are noise and are stored.

========  =======================  ==============================================
signed    q, the predicted part    rest
========  =======================  ==============================================
0         e, m1-m3 (11 bits)       m4-m7: packed nibbles; two planes of eight bits
1         e, m1-m4 (12 bits)       s, m5-m7: packed nibbles; two planes of eight bits
========  =======================  ==============================================

The means are a *model*: computed over the whole tensor in a first pass and stored once, 16 bits a
row and column (stored per chunk, column means would cost 0.25 bit an element). Zeros are left out
of the means; a row of zeros is marked and predicts zero. The idea is that of Adafactor's factored
second moment (arXiv 1804.04235), on logarithms; its use for lossless coding is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.codecs.coding import check_coder, decode_planes, encode_planes
from ckz.errors import CorruptError
from ckz.kernels import means as kernels
from ckz.kernels.buffers import scratch

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_ZERO_ROW = -(1 << 15)
_HEAD = struct.Struct("<II")


class Sums(NamedTuple):
    """What a chunk adds to the means of its tensor.

    Attributes
    ----------
    first_row : that the chunk touches.
    rows, row_counts, columns, column_counts : sums of q and numbers of non-zero elements.
    """

    first_row: int
    rows: npt.NDArray[np.int64]
    row_counts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    column_counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowCol:
    """Residual of float32 matrices against row and column means; little-endian.

    References: the means of the rows that a chunk touches, and of all columns, as int16. The
    payload is the first element's column and the number of exceptions as uint32, the planes, and
    the exceptions: positions as uint32, q as uint16.
    """

    name: ClassVar[str] = "rowcol"
    signed: int = 0
    coder: str = ""

    def __post_init__(self) -> None:
        if self.signed not in (0, 1):
            raise ValueError("signed is 0 or 1")
        check_coder(self.coder)

    @property
    def _shift(self) -> int:
        return 19 if self.signed else 20

    def _top(self, x: Words) -> npt.NDArray[np.int16]:
        """Give q."""
        wide = scratch("wide", x.size, np.uint32)
        np.right_shift(x, self._shift, out=wide)
        top = scratch("top", x.size, np.int16)
        top[:] = wide
        # Without the sign bit; an unsigned tensor that has one after all makes exceptions.
        return np.bitwise_and(top, 0xFFF, out=top) if self.signed else top

    def sums(self, chunk: Bytes, columns: int, at: int) -> Sums:
        """Sum q over rows and columns.

        Parameters
        ----------
        chunk : whole float32 elements.
        columns : of the matrix.
        at : bytes from the tensor's start to the chunk's.
        """
        return sum_tops(self._top(chunk.view("<u4")), columns, at // 4)

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code one chunk; ``at`` is its place in the tensor, in bytes."""
        if chunk.size % 4 or not chunk.size or len(refs) != 2:
            return None
        x = chunk.view("<u4")
        columns = refs[1].size // 2
        column = at // 4 % columns
        top = self._top(x)
        residual = predict(refs, column, x.size)
        np.subtract(top, residual, out=residual)
        np.add(residual, 128, out=residual)
        escaped = np.flatnonzero(residual.view(np.uint16) > 255)
        if escaped.size > x.size // 32:
            return None
        symbol = scratch("symbol", x.size)
        symbol[:] = residual
        symbol[escaped] = 128
        payload = b"".join(
            [
                _HEAD.pack(column, escaped.size),
                *encode_planes([symbol, *self._split(x)], coder=self.coder),
                escaped.astype("<u4").tobytes(),
                top[escaped].astype("<u2").tobytes(),
            ]
        )
        return payload if len(payload) < chunk.size else None

    def _split(self, x: Words) -> list[Bytes]:
        """Give nibbles and the two low byte planes."""
        low0, low1, nibble = (scratch(key, x.size) for key in ("low0", "low1", "nibble"))
        wide = scratch("wide", x.size, np.uint32)
        low0[:] = x
        np.right_shift(x, 8, out=wide)
        low1[:] = wide
        np.right_shift(x, 16, out=wide)
        nibble[:] = wide
        if self.signed:
            np.bitwise_and(nibble, 7, out=nibble)
            np.right_shift(x, 28, out=wide)
            np.bitwise_and(wide, 8, out=wide)
            np.bitwise_or(nibble, wide, out=nibble, casting="unsafe")
        else:
            np.bitwise_and(nibble, 15, out=nibble)
        if x.size % 2 == 0:
            half = x.size // 2
            np.left_shift(nibble[half:], 4, out=nibble[half:])
            nibble = np.bitwise_or(nibble[:half], nibble[half:], out=nibble[:half])
        return [nibble, low1, low0]

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild one chunk."""
        n = out.size // 4
        if len(payload) < _HEAD.size or out.size % 4 or len(refs) != 2 or refs[1].size < 2:
            raise CorruptError("a row-column chunk lacks its header or its means")
        column, nescaped = _HEAD.unpack_from(payload)
        sizes = [n, n // 2 if n % 2 == 0 else n, n, n]
        planes, rest = decode_planes(payload[_HEAD.size :], sizes)
        if len(rest) != 6 * nescaped or column >= refs[1].size // 2:
            raise CorruptError("a row-column chunk does not have the exceptions it states")
        top = predict(refs, column, n)
        symbol, nibble, low1, low0 = planes
        np.add(top, symbol, out=top, casting="unsafe")
        np.subtract(top, 128, out=top)
        if nescaped:
            where = np.frombuffer(rest, "<u4", nescaped)
            if int(where.max()) >= n:
                raise CorruptError("an exception lies outside its chunk")
            top[where] = np.frombuffer(rest, "<u2", nescaped, 4 * nescaped)
        if n % 2 == 0:
            whole = scratch("nibble", n)
            np.bitwise_and(nibble, 15, out=whole[: n // 2])
            np.right_shift(nibble, 4, out=whole[n // 2 :])
            nibble = whole
        x = out.view("<u4")
        wide = scratch("wide", n, np.uint32)
        x[:] = top.view(np.uint16)
        np.left_shift(x, self._shift, out=x)
        np.left_shift(low1, 8, out=wide, dtype=np.uint32)
        np.bitwise_or(x, wide, out=x)
        np.bitwise_or(x, low0, out=x)
        if self.signed:
            np.left_shift(np.bitwise_and(nibble, 8), 28, out=wide, dtype=np.uint32)
            np.bitwise_or(x, wide, out=x)
            np.bitwise_and(nibble, 7, out=nibble)
        np.left_shift(nibble, 16, out=wide, dtype=np.uint32)
        np.bitwise_or(x, wide, out=x)


def sum_tops(top: npt.NDArray[np.int16], columns: int, first: int) -> Sums:
    """Sum tops that are not zero over the rows and columns of a matrix, from element first on."""
    height = (first % columns + top.size - 1) // columns + 1
    rows, row_counts = np.zeros((2, height), np.int64)
    by_column, column_counts = np.zeros((2, columns), np.int64)
    kernels.sums(top, first % columns, rows, row_counts, by_column, column_counts)
    return Sums(first // columns, rows, row_counts, by_column, column_counts)


def make_model(sums: Iterable[Sums], rows: int, columns: int) -> Bytes:
    """Give the means of all rows, then of all columns, as int16 in bytes."""
    row_sums, row_counts = np.zeros((2, rows), np.int64)
    column_sums, column_counts = np.zeros((2, columns), np.int64)
    for part in sums:
        where = slice(part.first_row, part.first_row + len(part.rows))
        row_sums[where] += part.rows
        row_counts[where] += part.row_counts
        column_sums += part.columns
        column_counts += part.column_counts
    row_means = np.where(row_counts > 0, _divide(row_sums, row_counts), _ZERO_ROW)
    overall = _divide(row_sums.sum(), row_counts.sum())
    column_means = np.where(column_counts > 0, _divide(column_sums, column_counts) - overall, 0)
    return np.concatenate([row_means, column_means]).astype("<i2").view(np.uint8)


def _divide(total: npt.NDArray[np.int64], count: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Divide integers, rounding half up; the same on every machine."""
    count = np.maximum(count, 1)
    quotient: npt.NDArray[np.int64] = (2 * total + count) // (2 * count)
    return quotient


def predict(refs: Sequence[Bytes], column: int, n: int) -> npt.NDArray[np.int16]:
    """Give the prediction for n elements from a column of the first row on.

    Raises
    ------
    CorruptError
        If there are too few means.
    """
    row_means, column_means = (ref[: ref.size // 2 * 2].view("<i2") for ref in refs)
    columns = column_means.size
    if (column + n - 1) // columns >= row_means.size:
        raise CorruptError("a row-column chunk has too few row means")
    out = scratch("prediction", n, np.int16)
    for row, start, block in kernels.blocks(out, column, columns):
        means = row_means[row : row + len(block), None]
        np.add(means, column_means[start : start + block.shape[1]], out=block)
        zero = np.flatnonzero(means[:, 0] == _ZERO_ROW)
        if zero.size:
            block[zero] = 0
    return out
