"""What a quantizer is fitted to: a tensor's rows, and a sample of its elements.

All sums are in an order that is the same on every machine: numpy adds the elements of a row in
blocks whose size depends on the processor, but rows to each other one by one, as it does the
elements of a cumulative sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ckz.streams import CHUNK

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
# Gives elements of a tensor, from one to another.
Read = Callable[[int, int], Floats]

_PIECES, _PIECE = 64, 1024
_LANES = 128
# Steps that are tried: powers of two of so many parts, around the root mean square.
_FINENESS = 64
_SMALLEST, _LARGEST = -16 * _FINENESS, 4 * _FINENESS
# Larger indices are as rare as this one.
_MOST = (1 << 16) - 1


def total(values: npt.NDArray[np.floating]) -> float:
    """Add values in an order that depends on nothing but their number."""
    if not values.size:
        return 0.0
    wide = values.astype(np.float64, copy=False)
    even = wide.size // _LANES * _LANES
    lanes = wide[:even].reshape(-1, _LANES).sum(axis=0)
    return float(np.cumsum(np.concatenate([lanes, wide[even:]]))[-1])


def blocks(n: int, width: int) -> Iterator[tuple[int, int]]:
    """Cut a tensor of n elements into chunks, as element numbers from and to."""
    step = CHUNK // width
    for first in range(0, n, step):
        yield first, min(first + step, n)


def places(n: int, pieces: int = _PIECES) -> Iterator[tuple[int, int]]:
    """Give short runs of elements all over a tensor, or all of a small one."""
    if n <= pieces * _PIECE:
        yield 0, n
        return
    for k in range(pieces):
        first = (n - _PIECE) * k // max(1, pieces - 1)
        yield first, first + _PIECE


def row_squares(values: Floats, first: int, columns: int, sums: Doubles) -> None:
    """Add the squares of elements to the sums of their rows."""
    squares = values.astype(np.float64) ** 2
    squares[~np.isfinite(squares)] = 0
    row, column = divmod(first, columns)
    if column:
        head = squares[: columns - column]
        sums[row] += np.cumsum(head)[-1]
        squares = squares[head.size :]
        row += 1
    height = squares.size // columns
    if height:
        whole = squares[: height * columns].reshape(height, columns)
        sums[row : row + height] += np.cumsum(whole, axis=1)[:, -1]
    if squares.size % columns:
        sums[row + height] += np.cumsum(squares[height * columns :])[-1]


def rounded(values: npt.NDArray[np.floating]) -> Floats:
    """Keep eight bits of each mantissa, so that a step takes two bytes to store."""
    bits = values.astype(np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def quantize(sizes: Doubles, step: float, offset: float, lift: float) -> Doubles:
    """Give what a quantizer with a dead zone makes of magnitudes."""
    index = np.floor(sizes / step + offset)
    return np.where(index > 0, (index + lift) * step, 0.0)


def entropy(indices: Doubles) -> float:
    """Give the bits of an index of this magnitude, sign included."""
    counts = np.bincount(np.minimum(indices, _MOST).astype(np.int64))
    share = counts[counts > 0] / indices.size
    signs = 1 - counts[0] / indices.size
    return float(-(share * np.log2(share)).sum() + signs)


def find_step(
    sizes: Doubles, budget: float, offset: float, weights: Doubles | None = None
) -> tuple[float, float]:
    """Find the largest step whose normalized mean squared error stays within a budget.

    Values are lifted above their steps so far that their product with what they were has the sum
    that their squares have. In the middle of what becomes them they would be a little nearer, but
    shorter: as if every change, and the next step, were a few percent smaller, which training
    notices more than the noise.

    Parameters
    ----------
    sizes : magnitudes of a sample.
    weights : of each in that sum; None: all count alike.

    Returns
    -------
    step, lift : the lift as a part of the step, in hundredths.
    """
    if weights is None:
        weights = np.ones(sizes.size)
    power = total(sizes * sizes)
    if not power:
        return 0.0, 0.0
    scale = (power / sizes.size) ** 0.5
    low, high = _SMALLEST, _LARGEST
    best = 0.0, 0.0
    while low <= high:
        middle = (low + high) // 2
        step = float(rounded(np.array([scale * 2.0 ** (middle / _FINENESS)]))[0])
        if not step:  # below all float32 numbers
            low = middle + 1
            continue
        lift = _lift(sizes, step, offset, weights)
        if total((quantize(sizes, step, offset, lift) - sizes) ** 2) <= budget * power:
            best, low = (step, lift), middle + 1
        else:
            high = middle - 1
    return best


def _lift(sizes: Doubles, step: float, offset: float, weights: Doubles) -> float:
    """Give how far above its step a value lies, in hundredths rounded."""
    far = sizes / step
    index = np.floor(far + offset)
    pull = weights * far
    missing, per = total(pull * (far - index)), total(pull[index > 0])
    return min(50, max(0, round(100 * missing / per if per else 0))) / 100
