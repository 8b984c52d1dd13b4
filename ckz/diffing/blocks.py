"""Walking two tensors of one shape side by side, block by block, however each of them lies.

A *walk* is a grid over a shape: blocks of at most ``CHUNK`` bytes a side. Axes are reordered and
joined where that makes both sides contiguous; axes along which both sides repeat the same values
(expanded tensors) are walked once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Checkpoint, Piece, Tensor, contiguous_strides, extent
from ckz.errors import CkzError, UnsupportedError
from ckz.streams import CHUNK
from ckz.values import ReadSpan, native

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
Where = tuple[slice, ...]

# A box is read in one go if no more than half of that is not wanted, or if it is small.
_SMALL = 1 << 16
_PAGE = 4096
# What a file holds may unpack to a thousand times as much, but not to any number.
_MOST_TIMES = 2048


class Side(NamedTuple):
    """A checkpoint that is compared; ``read`` gives bytes of spans as they were unpacked."""

    checkpoint: Checkpoint
    read: ReadSpan


class Placed(NamedTuple):
    """A tensor, and first and last corners of its pieces if it does not lie in one box."""

    tensor: Tensor
    corners: tuple[Array, Array] | None


class Walk(NamedTuple):
    """Two tensors and the grid over them.

    Attributes
    ----------
    a, b : as they are walked: their axes may be reordered and joined.
    shape, block : of the whole and of a block; those at the end of an axis are smaller.
    times : how often each element counts.
    """

    a: Placed
    b: Placed
    shape: tuple[int, ...]
    block: tuple[int, ...]
    times: int

    @property
    def block_count(self) -> int:
        """How many blocks there are."""
        return math.prod(-(-n // size) for n, size in zip(self.shape, self.block, strict=True))

    def blocks(self) -> Iterator[Where]:
        """Give the place of each block."""
        axes = (range(0, n, size) for n, size in zip(self.shape, self.block, strict=True))
        for corner in itertools.product(*axes):
            sides = zip(corner, self.block, self.shape, strict=True)
            yield tuple(slice(at, min(at + size, n)) for at, size, n in sides)


def elements_in(where: Where) -> int:
    """Count the elements of a block."""
    return math.prod(axis.stop - axis.start for axis in where)


def walk(a: Tensor, b: Tensor, nbytes: int, *, reorder: bool = True) -> Walk:
    """Lay a grid over two tensors of one shape.

    Parameters
    ----------
    nbytes : of the files of both.
    reorder : False keeps to row-major order.

    Raises
    ------
    UnsupportedError
        If they claim to have so many elements that comparing them would never end.
    """
    limit = CHUNK // max(ITEMSIZE[a.dtype], ITEMSIZE[b.dtype])
    first = second = contiguous_strides(a.shape)
    times = 1
    if reorder and _is_one_box(a) and _is_one_box(b):
        a, b, times = _joined(a, b)
        first, second = a.pieces[0].strides, b.pieces[0].strides
    elements = math.prod(a.shape)
    if elements > (1 << 26) + _MOST_TIMES * nbytes:
        raise UnsupportedError(
            f"tensor {a.name!r} claims {elements} elements, far more than there are bytes; "
            "--ignore leaves it out"
        )
    return Walk(_placed(a), _placed(b), a.shape, _block(a.shape, first, second, limit), times)


def _is_one_box(tensor: Tensor) -> bool:
    return len(tensor.pieces) == 1 and tensor.pieces[0].shape == tensor.shape


def _joined(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int]:
    """Leave out axes of which one step is enough, order the others, join them where that is flat.

    Returns
    -------
    a, b, times : views of the same values in another shape, and how often each value occurs.
    """
    p, q = a.pieces[0], b.pieces[0]
    axes = [axis for axis in zip(p.shape, p.strides, q.strides, strict=True) if axis[0] != 1]
    times = math.prod(n for n, s, t in axes if s == t == 0)
    axes = sorted((axis for axis in axes if axis[1] or axis[2]), key=lambda axis: -sum(axis[1:]))
    flat: list[tuple[int, int, int]] = []
    for n, s, t in axes:
        if flat and flat[-1][1] == s * n and flat[-1][2] == t * n:
            flat[-1] = flat[-1][0] * n, s, t
        else:
            flat.append((n, s, t))
    shape, first, second = zip(*flat, strict=True) if flat else ((1,), (1,), (1,))
    return _reshaped(a, shape, first), _reshaped(b, shape, second), times


def _reshaped(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    piece = tensor.pieces[0]
    piece = Piece(piece.span, piece.offset, shape, strides, (0,) * len(shape))
    return tensor._replace(shape=shape, pieces=(piece,))


def _placed(tensor: Tensor) -> Placed:
    if _is_one_box(tensor):
        return Placed(tensor, None)
    count, rank = len(tensor.pieces), len(tensor.shape)
    starts, shapes = (
        np.array([piece[at] for piece in tensor.pieces], np.int64).reshape(count, rank)
        for at in (Piece._fields.index("start"), Piece._fields.index("shape"))
    )
    return Placed(tensor, (starts, starts + shapes))


def _block(
    shape: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...], limit: int
) -> tuple[int, ...]:
    """Choose a block of at most ``limit`` elements that is long along what each side has inmost."""
    block = [1] * len(shape)
    if shape:
        axes = range(len(shape))
        one, other = (min(axes, key=lambda axis: s[axis] or math.inf) for s in (first, second))
        if one != other:  # rows of one side are columns of the other: tiles
            block[one] = min(shape[one], math.isqrt(limit))
            block[other] = min(shape[other], limit // block[one])
        for axis in reversed(axes):
            others = math.prod(block) // block[axis]
            block[axis] = max(1, min(shape[axis], limit // others))
    return tuple(block)


def read_block(side: Side, placed: Placed, where: Where, out: Bytes) -> None:
    """Read a block of a tensor into its bytes: row-major, in native byte order, not transformed.

    Raises
    ------
    CkzError
        Naming file and tensor.
    """
    tensor = placed.tensor
    try:
        if placed.corners is None:
            _read_box(side, tensor.dtype, _cut(tensor.pieces[0], where, tensor.dtype), out)
        else:
            _read_pieces(side, tensor, placed.corners, where, out)
    except CkzError as err:
        raise _named(err, side, tensor) from err


def read_whole(side: Side, tensor: Tensor, out: Bytes) -> None:
    """Read a tensor that lies in one piece as it is to be read; errors are as ``read_block``'s."""
    try:
        side.read(tensor.pieces[0].span, tensor.pieces[0].offset, out)
    except CkzError as err:
        raise _named(err, side, tensor) from err


def _named(error: CkzError, side: Side, tensor: Tensor) -> CkzError:
    root = str(side.checkpoint.root)
    if str(error).startswith(root):
        return error
    return type(error)(f"{root}: tensor {tensor.name!r}: {error}")


def _cut(piece: Piece, where: Where, dtype: str) -> Piece:
    """Give the part of a piece that lies in a block, which it covers along each axis."""
    offset, shape, start = piece.offset, [], []
    for axis, at, n, stride in zip(where, piece.start, piece.shape, piece.strides, strict=True):
        low, high = max(axis.start, at), min(axis.stop, at + n)
        offset += (low - at) * stride * ITEMSIZE[dtype]
        shape.append(high - low)
        start.append(low)
    return Piece(piece.span, offset, tuple(shape), piece.strides, tuple(start))


def _read_pieces(
    side: Side, tensor: Tensor, corners: tuple[Array, Array], where: Where, out: Bytes
) -> None:
    """Read what each piece gives to a block; the rest of it is zero."""
    low, high = np.array([(at.start, at.stop) for at in where], np.int64).reshape(-1, 2).T
    inside = np.all((corners[0] < high) & (corners[1] > low), axis=1)
    out[:] = 0
    values = out.view(_item(tensor.dtype)).reshape([axis.stop - axis.start for axis in where])
    for number in np.flatnonzero(inside).tolist():
        part = _cut(tensor.pieces[number], where, tensor.dtype)
        own = np.empty(math.prod(part.shape) * ITEMSIZE[tensor.dtype], np.uint8)
        _read_box(side, tensor.dtype, part, own)
        corner = zip(part.start, part.shape, where, strict=True)
        place = tuple(slice(at - axis.start, at - axis.start + n) for at, n, axis in corner)
        values[place] = own.view(values.dtype).reshape(part.shape)


def _read_box(side: Side, dtype: str, piece: Piece, out: Bytes) -> None:
    """Read a strided box, in one go where little else lies in it, else along its longest stride."""
    reach = extent(piece, ITEMSIZE[dtype])
    if reach <= max(2 * out.size, _SMALL):
        _read_dense(side, dtype, piece, reach, out)
        return
    axes = range(len(piece.shape))
    axis = max(axes, key=lambda axis: piece.strides[axis] * (piece.shape[axis] > 1))
    n, step = piece.shape[axis], piece.strides[axis] * ITEMSIZE[dtype]
    inner = reach - (n - 1) * step
    # Steps that are close are taken together: a read costs as much as some pages.
    together = max(1, (_SMALL - inner) // step) if step <= max(2 * inner, _PAGE) else 1
    values = out.view(_item(dtype)).reshape(piece.shape)
    for at in range(0, n, together):
        count = min(together, n - at)
        shape = (*piece.shape[:axis], count, *piece.shape[axis + 1 :])
        part = np.empty(out.size // n * count, np.uint8)
        _read_box(side, dtype, piece._replace(offset=piece.offset + at * step, shape=shape), part)
        place = (slice(None),) * axis + (slice(at, at + count),)
        values[place] = part.view(values.dtype).reshape(shape)


def _read_dense(side: Side, dtype: str, piece: Piece, reach: int, out: Bytes) -> None:
    byteorder = side.checkpoint.spans[piece.span].byteorder
    flat = all(
        n == 1 or stride == row_major
        for n, stride, row_major in zip(
            piece.shape, piece.strides, contiguous_strides(piece.shape), strict=True
        )
    )
    data = out if flat else np.empty(reach, np.uint8)
    side.read(piece.span, piece.offset, data)
    if byteorder == ">":
        data[:] = native(data, byteorder, dtype)
    if not flat:
        item = _item(dtype)
        strides = [stride * item.itemsize for stride in piece.strides]
        box = np.lib.stride_tricks.as_strided(data.view(item), piece.shape, strides)
        out.view(item).reshape(piece.shape)[...] = box


def _item(dtype: str) -> np.dtype[Any]:
    """Give a dtype whose values are moved bit by bit."""
    itemsize = ITEMSIZE[dtype]
    return np.dtype(np.complex128 if itemsize == 16 else f"u{itemsize}")
