"""From stored bytes to arrays: pieces, strides, byte orders, and what a file packed itself."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE, Checkpoint, Piece, Span, Tensor, extent, numpy_dtype
from ckz.errors import CorruptError, UnsupportedError
from ckz.formats import hdf5_filters

Bytes = npt.NDArray[np.uint8]
# Fills an array with the bytes of span number from a byte offset.
ReadSpan = Callable[[int, int, Bytes], None]


# What no piece covers is zero. So much of it is no sparse tensor but a trap.
_MAX_UNCOVERED = 1 << 30


def tensor_values(
    checkpoint: Checkpoint, tensor: Tensor, read: ReadSpan
) -> npt.NDArray[np.generic]:
    """Read a tensor as an array of its shape, in native byte order.

    Raises
    ------
    CorruptError
        If what the file packed does not unpack to what the tensor needs.
    UnsupportedError
        If it is packed in a way this installation cannot unpack.
    """
    itemsize = ITEMSIZE[tensor.dtype]
    # Values move as bits: not every dtype of ml_dtypes can be strided.
    bits = np.dtype(np.complex128 if itemsize == 16 else f"u{itemsize}")
    covered = sum(math.prod(piece.shape) for piece in tensor.pieces)
    if (math.prod(tensor.shape) - covered) * itemsize > _MAX_UNCOVERED:
        raise UnsupportedError(f"tensor {tensor.name!r}: nearly all of it lies nowhere")
    try:
        out = np.zeros(tensor.shape, bits)
    except (ValueError, MemoryError) as err:
        raise UnsupportedError(f"tensor {tensor.name!r} does not fit into memory") from err
    for piece in tensor.pieces:
        span = checkpoint.spans[piece.span]
        data = _piece_bytes(span, piece, itemsize, read)
        elements = native(data, span.byteorder, tensor.dtype).view(bits)
        strides = [stride * itemsize for stride in piece.strides]
        box = np.lib.stride_tricks.as_strided(elements, piece.shape, strides, writeable=False)
        out[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))] = box
    values = out.view(numpy_dtype(tensor.dtype))
    try:
        if tensor.transform == "conj":
            return np.conj(values)
        return np.negative(values) if tensor.transform == "neg" else values
    except TypeError as err:
        raise CorruptError(f"tensor {tensor.name!r}: its dtype has no {tensor.transform}") from err


def _piece_bytes(span: Span, piece: Piece, itemsize: int, read: ReadSpan) -> Bytes:
    nbytes = extent(piece, itemsize)
    if not span.packed:
        out = np.empty(nbytes, np.uint8)
        read(piece.span, piece.offset, out)
        return out
    stored = np.empty(span.nbytes, np.uint8)
    read(piece.span, 0, stored)
    return unpacked(span, stored, piece.offset + nbytes)[piece.offset :]


def unpacked(span: Span, stored: Bytes, nbytes: int) -> Bytes:
    """Give the first ``nbytes`` of what a file packed itself, from the span's bytes.

    Raises
    ------
    CorruptError
        If they do not unpack to so much.
    UnsupportedError
        If they are packed in a way this installation cannot unpack.
    """
    if span.packed != "deflate":
        return np.frombuffer(
            hdf5_filters.unpack(stored.tobytes(), span.packed, nbytes), np.uint8, nbytes
        )
    try:
        # The limit keeps a bomb from growing: no more comes out than the tensor needs.
        plain = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored.data, nbytes)
    except zlib.error as err:
        raise CorruptError(f"deflated tensor data are damaged ({err})") from err
    if len(plain) < nbytes:
        raise CorruptError("deflated tensor data end early")
    return np.frombuffer(plain, np.uint8, nbytes)


def native(data: Bytes, byteorder: str, dtype: str) -> Bytes:
    """Turn big-endian elements to little-endian ones; complex numbers are pairs."""
    width = ITEMSIZE[dtype] // (2 if dtype.startswith("complex") else 1)
    if byteorder == "<" or width == 1:
        return data
    return data.view(f">u{width}").astype(f"<u{width}").view(np.uint8)


def doubles(data: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Give little-endian elements as float64; a complex number is two."""
    parts = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}
    return data.view(numpy_dtype(parts.get(dtype, dtype))).astype(np.float64)
