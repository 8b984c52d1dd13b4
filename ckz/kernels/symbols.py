"""Numbers sorted into classes as symbols of a byte and planes of their lower bits; and back.

Of each class the lowest ``zeros`` bits above the last are left out, for they are the same in all of
its numbers: a zigzagged number keeps its sign in the last one. Of what remains the upper part is
the symbol, 255 standing for all that is larger; the ``4 k`` bits below it are ``k // 2`` byte
planes, the lowest first, and for an odd k nibbles, of which a byte holds one of the class's first
half and one of its second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel

ESCAPE = 255
SAMPLE = 1024
_BIAS = 1022  # a float64 with this exponent more is an integer of so many bits

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


def low_sizes(n: int, k: int) -> list[int]:
    """Give the sizes of a class's planes of lower bits."""
    return [n] * (k // 2) + [(n + 1) // 2] * (k % 2)


def _summaries_body(ordered: Words, starts: Ints, found: npt.NDArray[np.uint64]) -> None:
    one = np.uint64(1)
    mask = np.uint64((1 << 8 * ordered.itemsize - 1) - 1) << one | one
    sizes = np.empty(2 * SAMPLE, np.float64)
    exponents = sizes.view(np.int64)
    for c in range(starts.size - 1):
        found[c] = 0
        values = ordered[starts[c] : starts[c + 1]]
        if values.size == 0:
            continue
        step = max(1, values.size // SAMPLE)
        sampled = 0
        union = np.uint64(0)
        for i in range(0, values.size, step):
            value = np.uint64(values[i])
            union |= value ^ (np.uint64(0) - (value & one))
            # Or rounding to 53 bits could carry into the next power of two.
            sizes[sampled] = value & ~(value >> np.uint64(53))
            sampled += 1
        lengths = np.zeros(65, np.int64)
        for i in range(sampled):
            lengths[max(0, (exponents[i] >> 52) - _BIAS)] += 1
        if union & np.uint64(2) == 0:
            for i in range(values.size):
                value = np.uint64(values[i])
                union |= value ^ (np.uint64(0) - (value & one))
        length, below = 0, lengths[0]
        while below < sampled - sampled // 100:
            length += 1
            below += lengths[length]
        found[c, 0], found[c, 1] = union & mask, length


def _summaries_numpy(ordered: Words, starts: Ints, found: npt.NDArray[np.uint64]) -> None:
    for c in range(starts.size - 1):
        values = ordered[starts[c] : starts[c + 1]]
        found[c] = 0
        if not values.size:
            continue
        sample = values[:: max(1, values.size // SAMPLE)]
        rank = sample.size - 1 - sample.size // 100
        usual = int(np.partition(sample, rank)[rank])
        union = np.bitwise_or.reduce(sample ^ (0 - (sample & 1)))
        if not int(union) & 2:
            union = np.bitwise_or.reduce(values ^ (0 - (values & 1)))
        found[c] = int(union), usual.bit_length()


def _split_body(
    ordered: Words, starts: Ints, shapes: Ints, symbols: Bytes, low: Bytes, counts: Ints
) -> None:
    one = np.uint64(1)
    for c in range(shapes.shape[0]):
        zeros, k, at = np.uint64(shapes[c, 0]), shapes[c, 1], shapes[c, 2]
        values = ordered[starts[c] : starts[c + 1]]
        coded = symbols[starts[c] : starts[c + 1]]
        n, shift = values.size, np.uint64(4 * k)
        if zeros:
            for i in range(n):
                v = np.uint64(values[i])
                values[i] = v >> zeros + one << one | v & one
        for i in range(n):
            coded[i] = min(np.uint64(values[i]) >> shift, np.uint64(ESCAPE))
        for byte in range(k // 2):
            plane = low[at + byte * n : at + (byte + 1) * n]
            for i in range(n):
                plane[i] = np.uint64(values[i]) >> np.uint64(8 * byte) & np.uint64(255)
        if k % 2:
            half = (n + 1) // 2
            plane = low[at + k // 2 * n : at + k // 2 * n + half]
            place = np.uint64(4 * (k - 1))
            for i in range(half):
                plane[i] = np.uint64(values[i]) >> place & np.uint64(15)
            for i in range(n - half):
                plane[i] |= (np.uint64(values[half + i]) >> place & np.uint64(15)) << np.uint64(4)
        changed = escaped = 0
        for i in range(n):
            changed += coded[i] != 0
            escaped += coded[i] == ESCAPE
        counts[c, 0], counts[c, 1] = changed, escaped


def _split_numpy(
    ordered: Words, starts: Ints, shapes: Ints, symbols: Bytes, low: Bytes, counts: Ints
) -> None:
    for c, (zeros, k, at) in enumerate(shapes.tolist()):
        values = ordered[starts[c] : starts[c + 1]]
        coded = symbols[starts[c] : starts[c + 1]]
        if zeros:
            values[:] = values >> values.dtype.type(zeros + 1) << 1 | values & 1
        coded[:] = np.minimum(values >> values.dtype.type(4 * k), values.dtype.type(ESCAPE))
        sizes = low_sizes(values.size, k)
        for byte in range(k // 2):
            low[at : at + sizes[byte]] = values >> values.dtype.type(8 * byte)
            at += sizes[byte]
        if k % 2:
            nibbles = ((values >> values.dtype.type(4 * (k - 1))) & values.dtype.type(15)).astype(
                np.uint8
            )
            plane = low[at : at + sizes[-1]]
            plane[:] = nibbles[: sizes[-1]]
            plane[: values.size - sizes[-1]] |= nibbles[sizes[-1] :] << 4
        counts[c] = np.count_nonzero(coded), np.count_nonzero(coded == ESCAPE)


def _join_body(symbols: Bytes, low: Bytes, starts: Ints, shapes: Ints, ordered: Words) -> None:
    one = np.uint64(1)
    for c in range(shapes.shape[0]):
        zeros, k, at = np.uint64(shapes[c, 0]), shapes[c, 1], shapes[c, 2]
        values = ordered[starts[c] : starts[c + 1]]
        coded = symbols[starts[c] : starts[c + 1]]
        n, shift = values.size, np.uint64(4 * k)
        for i in range(n):
            values[i] = np.uint64(coded[i]) << shift
        for byte in range(k // 2):
            plane = low[at + byte * n : at + (byte + 1) * n]
            for i in range(n):
                values[i] |= np.uint64(plane[i]) << np.uint64(8 * byte)
        if k % 2:
            half = (n + 1) // 2
            plane = low[at + k // 2 * n : at + k // 2 * n + half]
            place = np.uint64(4 * (k - 1))
            for i in range(half):
                values[i] |= (np.uint64(plane[i]) & np.uint64(15)) << place
            for i in range(n - half):
                values[half + i] |= (np.uint64(plane[i]) >> np.uint64(4)) << place
        if zeros:
            ones = (one << zeros + one) - one
            for i in range(n):
                v = np.uint64(values[i])
                values[i] = v >> one << zeros + one | (np.uint64(0) - (v & one)) & ones


def _join_numpy(symbols: Bytes, low: Bytes, starts: Ints, shapes: Ints, ordered: Words) -> None:
    for c, (zeros, k, at) in enumerate(shapes.tolist()):
        values = ordered[starts[c] : starts[c + 1]]
        kind = values.dtype.type
        values[:] = symbols[starts[c] : starts[c + 1]]
        np.left_shift(values, kind(4 * k), out=values)
        sizes = low_sizes(values.size, k)
        for byte in range(k // 2):
            plane = low[at : at + sizes[byte]]
            np.bitwise_or(values, plane.astype(values.dtype) << kind(8 * byte), out=values)
            at += sizes[byte]
        if k % 2:
            plane = low[at : at + sizes[-1]]
            nibbles = np.concatenate([plane & 15, plane >> 4])[: values.size].astype(values.dtype)
            np.bitwise_or(values, nibbles << kind(4 * (k - 1)), out=values)
        values[:] = unshorten(values, zeros)


def unshorten(values: Words, zeros: int) -> Words:
    """Give numbers back the bits that were left out of them."""
    if not zeros:
        return values
    kind = values.dtype.type
    ones = (0 - (values & 1)) & kind((1 << (zeros + 1)) - 1)
    found: Words = values >> 1 << kind(zeros + 1) | ones
    return found


def _squeeze_numpy(symbols: Bytes, out: Bytes) -> None:
    out[: np.count_nonzero(symbols)] = symbols[symbols != 0]


def _squeeze_body(symbols: Bytes, out: Bytes) -> None:
    at = 0
    for i in range(symbols.size):
        out[at] = symbols[i]
        at += symbols[i] != 0


def _spread_numpy(changed: Bytes, values: Bytes, out: Bytes) -> None:
    out[:] = 0
    out[changed.view(bool)] = values


def _spread_body(changed: Bytes, values: Bytes, out: Bytes) -> None:
    at = 0
    for i in range(out.size):
        if changed[i]:
            out[i] = values[at]
            at += 1
        else:
            out[i] = 0


# Of each class: the union of the numbers' bits, those of negative ones flipped (of a sample, where
# that has bit 1 already); and how many bits 99 of 100 in a sample do not exceed.
summaries = Kernel(_summaries_body, _summaries_numpy)
# Shapes are of each class its zeros, k, and where its planes begin in low; counts are of symbols
# that are not zero and of escapes. The numbers are shortened in place.
split = Kernel(_split_body, _split_numpy)
# Undoes it, but for escapes.
join = Kernel(_join_body, _join_numpy)
# The symbols that are not zero; as long as the symbols, with room for one more.
squeeze = Kernel(_squeeze_body, _squeeze_numpy)
# Undoes it: as many values as changed elements.
spread = Kernel(_spread_body, _spread_numpy)
