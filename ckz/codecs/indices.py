"""Quantizer indices as bytes: small integers around zero, without a floor of one bit each.

Indices are zigzagged. Where nearly all are small, four or two of them share a byte, whose Huffman
code then costs as little as a quarter or half a bit an index; what does not fit is an escape and
follows. Which of the forms is smallest is tried on a sample.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ckz.codecs.coding import decode_planes, encode_planes
from ckz.errors import CorruptError

Indices = npt.NDArray[np.int32]
Unsigned = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

# Bits an index takes in each form; in the last one every byte is a plane.
_FORMS = (2, 4, 8, 32)
_WIDE = 3
_HEAD = struct.Struct("<BI")
_SAMPLE = 1 << 14
# Escapes have escapes, each time in a wider form.
_EMPTY = np.empty(0, np.uint32)


def encode_indices(indices: Indices) -> bytes:
    """Code signed integers."""
    zigzag = (indices << 1) ^ (indices >> 31)
    return _encode(zigzag.view(np.uint32), 0)


def decode_indices(payload: memoryview, n: int) -> tuple[Indices, memoryview]:
    """Undo ``encode_indices``; also give what follows in the payload.

    Raises
    ------
    CorruptError
        If the payload does not hold n indices.
    """
    values, rest = _decode(payload, n, 0)
    return (values >> 1).view(np.int32) ^ -(values & 1).view(np.int32), rest


def _encode(values: Unsigned, narrowest: int) -> bytes:
    if not values.size:
        return b""
    # Runs from all over: what is at the start may not be what follows.
    step = max(1, values.size // _SAMPLE)
    sample = values if step == 1 else values[: step * _SAMPLE].reshape(-1, step, 256)[:, 0].ravel()
    widest = max(narrowest, _fewest(values))
    sizes = [(len(_encode_as(form, sample)), form) for form in range(narrowest, widest + 1)]
    return _encode_as(min(sizes)[1], values)


def _fewest(values: Unsigned) -> int:
    """Give the narrowest form without escapes: those after it are larger."""
    largest = int(values.max())
    return next(form for form, bits in enumerate(_FORMS) if largest < (1 << bits) - 1 or form == 3)


def _encode_as(form: int, values: Unsigned) -> bytes:
    if form == _WIDE:
        planes = [np.ascontiguousarray(plane) for plane in values.view(np.uint8).reshape(-1, 4).T]
        return b"".join([_HEAD.pack(form, 0), *encode_planes(planes)])
    bits = _FORMS[form]
    escape = (1 << bits) - 1
    symbols = np.minimum(values, np.uint32(escape)).astype(np.uint8)
    escaped = values[symbols == escape] - np.uint32(escape)
    return b"".join(
        [
            _HEAD.pack(form, escaped.size),
            *encode_planes([_packed(symbols, bits)]),
            _encode(escaped, form + 1),
        ]
    )


def _packed(symbols: Bytes, bits: int) -> Bytes:
    """Put symbols of so many bits side by side; what is missing at the end is zero."""
    each = 8 // bits
    if each == 1:
        return symbols
    padded = np.zeros(-(-symbols.size // each) * each, np.uint8)
    padded[: symbols.size] = symbols
    columns = padded.reshape(-1, each)
    packed = columns[:, 0].copy()
    for k in range(1, each):
        packed |= columns[:, k] << np.uint8(bits * k)
    return packed


def _decode(payload: memoryview, n: int, narrowest: int) -> tuple[Unsigned, memoryview]:
    if not n:
        return _EMPTY, payload
    if len(payload) < _HEAD.size:
        raise CorruptError("indices lack their header")
    form, nescaped = _HEAD.unpack_from(payload)
    payload = payload[_HEAD.size :]
    if not narrowest <= form <= _WIDE or nescaped > n:
        raise CorruptError("indices have an impossible form")
    if form == _WIDE:
        planes, rest = decode_planes(payload, [n] * 4)
        values = np.empty((n, 4), np.uint8)
        for k, plane in enumerate(planes):
            values[:, k] = plane
        return values.view(np.uint32).reshape(-1), rest
    bits = _FORMS[form]
    each, escape = 8 // bits, (1 << bits) - 1
    (packed,), rest = decode_planes(payload, [-(-n // each)])
    columns = np.empty((packed.size, each), np.uint32)
    for k in range(each):
        columns[:, k] = (packed >> np.uint8(bits * k)) & np.uint8(escape)
    found = columns.reshape(-1)[:n]
    if nescaped:
        where = np.flatnonzero(found == escape)
        if where.size != nescaped:
            raise CorruptError("indices do not have the escapes they state")
        wider, rest = _decode(rest, nescaped, form + 1)
        found[where] += wider
    return found, rest
