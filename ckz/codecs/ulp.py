"""The difference to a base, counted in units in the last place, in the context of the base.

An optimizer step moves a weight by about the learning rate, whatever the weight; in units in the
last place that is little for large weights and much for small ones. So differences are sorted by
the exponent of the base (12 classes) and each class is coded by itself: the upper part of the
zigzagged difference as a byte, the lower ``4 k`` bits as they are.

Sorting by the base's exponent costs no side information, for the decoder has the base. The ordered
integers are those of lossy float coders (fpzip, Lindstrom and Isenburg 2006); conditioning their
differences on the base's exponent is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.coding import decode_planes, decode_planes_into, encode_planes
from ckz.codecs.leaning import EXPONENTS, base_of, check_dtype
from ckz.errors import CorruptError
from ckz.kernels import ulp as kernels
from ckz.kernels.buffers import scratch
from ckz.kernels.device import put
from ckz.kernels.sorting import order_by_class
from ckz.kernels.symbols import (
    ESCAPE,
    join,
    low_sizes,
    split,
    spread,
    squeeze,
    summaries,
    unshorten,
)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

# Symbols that say little are given as a bitmap and the others: a Huffman code has a floor of a bit.
_PLAIN, _BITMAP = 0, 1
# Elements -> bits of the class to drop: a class costs its header and its Huffman code.
_COARSE = ((1 << 15, 0), (1 << 12, 1), (1 << 10, 2), (0, 4))
_CLASS = struct.Struct("<IBBI")


@dataclass(frozen=True)
class Ulp:
    """Difference to the references, laid end to end; little-endian.

    The payload: for each class its number of elements, k, form, low bits that are zero in all of
    its differences and are left out, and number of escapes; then of each class the coded symbols,
    the low bits and the escaped values.
    """

    name: ClassVar[str] = "ulp"
    dtype: str = ""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code the difference of a chunk to its references."""
        base = base_of(self.dtype, refs, chunk.size)
        if base is None:
            return None
        payload = encode_difference(self.dtype, chunk.view(base.dtype), base)
        return payload if len(payload) < chunk.size else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Add the differences to the references."""
        base = base_of(self.dtype, refs, out.size)
        if base is None:
            raise CorruptError("a difference needs references of its own size")
        decode_difference(self.dtype, payload, base, out.view(base.dtype))


def _how(dtype: str, n: int) -> tuple[int, int, int]:
    """Give where the exponent stands, and how coarse the classes of so many elements are."""
    _, shift, width = EXPONENTS[dtype]
    return shift, width, next(coarse for size, coarse in _COARSE if n >= size)


def encode_difference(dtype: str, current: Words, base: Words) -> bytes:
    """Code elements as differences to others, both as unsigned bits."""
    ordered, starts = kernels.sorted_differences(current, base, _how(dtype, base.size))
    found = np.empty((len(starts) - 1, 2), np.uint64)
    summaries(ordered, starts, found)
    limits = list(pairwise(starts.tolist()))
    cuts = [
        _cut(last - first, *summary)
        for (first, last), summary in zip(limits, found.tolist(), strict=True)
    ]
    shapes, nbytes = _shapes(limits, cuts)
    symbols, low = scratch("symbols", ordered.size), scratch("low", nbytes)
    counts = np.empty((len(cuts), 2), np.int64)
    split(ordered, starts, shapes, symbols, low, counts)
    heads, bodies = [], []
    for (first, last), (zeros, k, at), (changed, escaped) in zip(
        limits, shapes.tolist(), counts.tolist(), strict=True
    ):
        if first == last:
            heads.append(_CLASS.pack(0, 0, _PLAIN, 0))
            continue
        form, coded = _encode_symbols(symbols[first:last], changed)
        heads.append(_CLASS.pack(last - first, k, form | zeros << 1, escaped))
        bodies += coded
        if k:
            bodies += encode_planes(_planes(low, at, last - first, k))
        if escaped:
            bodies.append(ordered[first:last][symbols[first:last] == ESCAPE].data)
    return b"".join([*heads, *bodies])


def decode_difference(dtype: str, payload: memoryview, base: Words, out: Words) -> None:
    """Undo ``encode_difference``.

    Raises
    ------
    CorruptError
        If the payload does not fit the base.
    """
    how = _how(dtype, base.size)
    base = put("base", base)
    order = order_by_class(base, *how)
    starts = order.starts
    size = _CLASS.size * (len(starts) - 1)
    if len(payload) < size:
        raise CorruptError("a difference lacks its header")
    heads = list(_CLASS.iter_unpack(payload[:size]))
    payload = payload[size:]
    limits = list(pairwise(starts.tolist()))
    _check_heads(heads, limits, out.itemsize)
    shapes, nbytes = _shapes(limits, [(form >> 1, k) for _, k, form, _ in heads])
    symbols, low = scratch("symbols", out.size), scratch("low", nbytes)
    escapes = []
    for (first, last), (n, k, form, nescaped), (zeros, _, at) in zip(
        limits, heads, shapes.tolist(), strict=True
    ):
        if not n:
            continue
        payload = _decode_symbols(form & 1, payload, symbols[first:last])
        if k:
            payload = decode_planes_into(payload, _planes(low, at, n, k))
        if nescaped:
            where = np.flatnonzero(symbols[first:last] == ESCAPE)
            if where.size != nescaped or len(payload) < nescaped * out.itemsize:
                raise CorruptError("a class of differences does not have the escapes it states")
            values = np.frombuffer(payload, out.dtype, nescaped)
            escapes.append((where + first, unshorten(values, zeros)))
            payload = payload[nescaped * out.itemsize :]
    if len(payload):
        raise CorruptError("a difference does not end where it should")
    ordered = scratch("sorted", out.size, out.dtype)
    join(symbols, low, starts, shapes, ordered)
    for where, values in escapes:
        ordered[where] = values
    kernels.add_sorted_differences(base, ordered, order, how[1], out)


def _check_heads(
    heads: list[tuple[int, int, int, int]], limits: list[tuple[int, int]], itemsize: int
) -> None:
    for (n, k, form, nescaped), (first, last) in zip(heads, limits, strict=True):
        if form >> 1 >= 8 * itemsize:
            raise CorruptError("a class of differences has no such low bits")
        if n != last - first or k > 2 * itemsize - 2 or nescaped > n:
            raise CorruptError("a class of differences does not fit its base")


def _cut(n: int, union: int, length: int) -> tuple[int, int]:
    """Give how many low bits of a class are left out, and k; see ``symbols.summaries``."""
    zeros = _common_zeros(union) if n else 0
    # The bits that are not coded: all but eight of what nearly every value has.
    return zeros, max(0, -(-(length - zeros - 8) // 4))


def _common_zeros(union: int) -> int:
    """Count the low bits that are zero in all differences: of floats that have fewer bits.

    Zigzagged, a negative one has ones there; they are flipped in the union of all.
    """
    found = union >> 1
    return (found & -found).bit_length() - 1 if found else 0


def _shapes(
    limits: list[tuple[int, int]], cuts: list[tuple[int, int]]
) -> tuple[npt.NDArray[np.int64], int]:
    """Give zeros, k and the place of the low planes of each class, and the size of all."""
    rows, at = [], 0
    for (first, last), (zeros, k) in zip(limits, cuts, strict=True):
        rows.append((zeros, k, at))
        at += sum(low_sizes(last - first, k))
    return np.array(rows, np.int64), at


def _planes(low: Bytes, at: int, n: int, k: int) -> list[Bytes]:
    planes = []
    for size in low_sizes(n, k):
        planes.append(low[at : at + size])
        at += size
    return planes


def _encode_symbols(symbols: Bytes, changed: int) -> tuple[int, list[bytes | memoryview]]:
    if changed > symbols.size // 2:
        return _PLAIN, encode_planes([symbols], always=True)
    values = scratch("changed", symbols.size + 1)
    squeeze(symbols, values)
    planes = encode_planes([np.packbits(symbols), values[:changed]], always=True)
    # The next class's values come into the same buffer.
    return _BITMAP, [b"".join([struct.pack("<I", changed), *planes])]


def _decode_symbols(form: int, payload: memoryview, symbols: Bytes) -> memoryview:
    n = symbols.size
    if form == _PLAIN:
        return decode_planes_into(payload, [symbols])
    if len(payload) < 4:
        raise CorruptError("a class of differences lacks its bitmap")
    count = int.from_bytes(payload[:4], "little")
    if count > n:
        raise CorruptError("a class of differences has more changes than elements")
    (bitmap, values), rest = decode_planes(payload[4:], [(n + 7) // 8, count])
    changed = np.unpackbits(bitmap, count=n)
    if int(np.count_nonzero(changed)) != count:
        raise CorruptError("a class of differences does not have the changes its bitmap shows")
    spread(changed, values, symbols)
    return rest
