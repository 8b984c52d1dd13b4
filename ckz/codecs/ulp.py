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
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.coding import decode_planes, encode_planes
from ckz.codecs.leaning import EXPONENTS, base_of, check_dtype
from ckz.errors import CorruptError
from ckz.kernels import ulp as kernels
from ckz.kernels.buffers import scratch
from ckz.kernels.device import put
from ckz.kernels.sorting import order_by_class

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

_ESCAPE = 255
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
    summaries = np.empty((len(starts) - 1, 3), np.uint64)
    kernels.summaries(ordered, starts, summaries)
    coded = [
        _encode_class(ordered[first:last], *summary)
        for first, last, summary in zip(
            starts[:-1].tolist(), starts[1:].tolist(), summaries.tolist(), strict=True
        )
    ]
    return b"".join([*(head for head, _ in coded), *(body for _, body in coded)])


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
    ordered = scratch("sorted", out.size, out.dtype)
    for first, last, head in zip(starts[:-1].tolist(), starts[1:].tolist(), heads, strict=True):
        payload = _decode_class(head, payload, ordered[first:last])
    if len(payload):
        raise CorruptError("a difference does not end where it should")
    kernels.add_sorted_differences(base, ordered, order, how[1], out)


def _common_zeros(union: int) -> int:
    """Count the low bits that are zero in all differences: of floats that have fewer bits.

    Zigzagged, a negative one has ones there; they are flipped in the union of all.
    """
    found = union >> 1
    return (found & -found).bit_length() - 1 if found else 0


def _encode_class(values: Words, union: int, largest: int, length: int) -> tuple[bytes, bytes]:
    """Code the zigzagged differences of one class; give its header and its body.

    Parameters
    ----------
    union, largest, length : see ``kernels.summaries``.
    """
    n = values.size
    if not n:
        return _CLASS.pack(0, 0, _PLAIN, 0), b""
    low = _common_zeros(union)
    if low:
        values = values >> values.dtype.type(low + 1) << 1 | values & 1
        largest = largest >> (low + 1) << 1 | largest & 1
    # The bits that are not coded: all but eight of what nearly every value has.
    k = max(0, -(-(length - low - 8) // 4))
    symbols = scratch("symbols", n)
    upper = values >> values.dtype.type(4 * k) if k else values
    escaped = values[:0]
    if largest >> 4 * k >= _ESCAPE:
        upper = np.minimum(upper, values.dtype.type(_ESCAPE))
        escaped = values[upper == _ESCAPE]
    symbols[:] = upper
    form, coded = _encode_symbols(symbols)
    planes = _low_planes(values, k)
    head = _CLASS.pack(n, k, form | low << 1, escaped.size)
    return head, b"".join([*coded, *(encode_planes(planes) if planes else []), escaped.data])


def _encode_symbols(symbols: Bytes) -> tuple[int, list[bytes | memoryview]]:
    count = int(np.count_nonzero(symbols))
    if count > symbols.size // 2:
        return _PLAIN, encode_planes([symbols], always=True)
    changed = scratch("changed", symbols.size + 1)
    kernels.squeeze(symbols, changed)
    planes = encode_planes([np.packbits(symbols), changed[:count]], always=True)
    return _BITMAP, [struct.pack("<I", count), *planes]


def _low_planes(values: Words, k: int) -> list[Bytes]:
    """Give the low ``4 k`` bits: byte planes, and packed nibbles for the odd one."""
    planes = []
    for byte in range(k // 2):
        plane = scratch(f"low{byte}", values.size)
        plane[:] = values >> values.dtype.type(8 * byte)
        planes.append(plane)
    if k % 2:
        nibbles = ((values >> values.dtype.type(4 * (k - 1))) & values.dtype.type(15)).astype("u1")
        if nibbles.size % 2:
            nibbles = np.append(nibbles, np.uint8(0))
        half = nibbles.size // 2
        planes.append(nibbles[:half] | nibbles[half:] << 4)
    return planes


def _decode_class(head: tuple[int, int, int, int], payload: memoryview, out: Words) -> memoryview:
    """Rebuild one class; give what follows in the payload."""
    n, k, form, nescaped = head
    form, low = form & 1, form >> 1
    if low >= 8 * out.itemsize:
        raise CorruptError("a class of differences has no such low bits")
    if n != out.size or k > 2 * out.itemsize or nescaped > n:
        raise CorruptError("a class of differences does not fit its base")
    if not n:
        return payload
    symbols, payload = _decode_symbols(form, payload, n)
    out[:] = symbols
    escapes = np.flatnonzero(symbols == _ESCAPE) if nescaped else None
    if k:
        np.left_shift(out, out.dtype.type(4 * k), out=out)
        sizes = [n] * (k // 2) + [(n + 1) // 2] * (k % 2)
        planes, payload = decode_planes(payload, sizes)
        for byte in range(k // 2):
            np.bitwise_or(out, planes[byte].astype(out.dtype) << out.dtype.type(8 * byte), out=out)
        if k % 2:
            nibbles = np.concatenate([planes[-1] & 15, planes[-1] >> 4])[:n].astype(out.dtype)
            np.bitwise_or(out, nibbles << out.dtype.type(4 * (k - 1)), out=out)
    if escapes is not None:
        nbytes = nescaped * out.itemsize
        if escapes.size != nescaped or len(payload) < nbytes:
            raise CorruptError("a class of differences does not have the escapes it states")
        out[escapes] = np.frombuffer(payload, out.dtype, nescaped)
        payload = payload[nbytes:]
    if low:
        ones = (0 - (out & 1)) & out.dtype.type((1 << (low + 1)) - 1)
        np.bitwise_or(out >> 1 << out.dtype.type(low + 1), ones, out=out)
    return payload


def _decode_symbols(form: int, payload: memoryview, n: int) -> tuple[Bytes, memoryview]:
    if form == _PLAIN:
        (plane,), rest = decode_planes(payload, [n])
        return plane, rest
    if len(payload) < 4:
        raise CorruptError("a class of differences lacks its bitmap")
    count = int.from_bytes(payload[:4], "little")
    if count > n:
        raise CorruptError("a class of differences has more changes than elements")
    (bitmap, values), rest = decode_planes(payload[4:], [(n + 7) // 8, count])
    changed = np.unpackbits(bitmap, count=n)
    if int(np.count_nonzero(changed)) != count:
        raise CorruptError("a class of differences does not have the changes its bitmap shows")
    symbols = scratch("symbols", n)
    kernels.spread(changed, values, symbols)
    return symbols, rest
