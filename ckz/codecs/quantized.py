"""What codecs of quantized tensors share.

Lossy compression replaces a tensor by one near it that has few different values relative to what
the decoder knows (a base, a moment, the means of rows); these codecs name such values by small
integers, *indices*. They are lossless: an element that is not what its index says is listed with
its bits. So whatever ``snap`` leaves as it was, because the bound or a rule asks for it, is exact.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ckz.codecs.floats import WIDTHS, Bytes, Floats, narrow, widen, words_of
from ckz.codecs.indices import Indices, decode_indices, encode_indices
from ckz.errors import CorruptError
from ckz.kernels.quantize import NONE

_HEAD = struct.Struct("<QI")
# An exception costs eight bytes, about as much as two float32 elements.
_MAX_EXCEPTIONS = 1 / 16


class Quantizer(Protocol):
    """How a codec's values and indices belong together, ``first`` elements into the tensor.

    Attributes
    ----------
    dtype : of the elements.
    positive : whether a positive value must stay positive.
    """

    @property
    def dtype(self) -> str: ...

    @property
    def positive(self) -> bool: ...

    def indices(self, values: Floats, refs: Sequence[Bytes], first: int) -> Indices:
        """Give the index of each value, ``NONE`` where no value that has one is near."""
        ...

    def values(self, indices: Indices, refs: Sequence[Bytes], first: int) -> Floats:
        """Give the value of each index.

        Raises
        ------
        CorruptError
            If the references do not fit.
        """
        ...


def encode(codec: Quantizer, chunk: Bytes, refs: Sequence[Bytes], at: int) -> bytes | None:
    """Code a chunk as indices and exceptions; None if these are many."""
    width = WIDTHS[codec.dtype]
    if chunk.size % width or not chunk.size:
        return None
    words, first = words_of(codec.dtype, chunk), at // width
    with np.errstate(all="ignore"):
        indices = codec.indices(widen(codec.dtype, words), refs, first)
        indices[indices == NONE] = 0
        made = narrow(codec.dtype, codec.values(indices, refs, first))
    wrong = np.flatnonzero(made != words)
    if wrong.size > words.size * _MAX_EXCEPTIONS:
        return None
    indices[wrong] = 0
    payload = b"".join(
        [
            _HEAD.pack(first, wrong.size),
            encode_indices(indices),
            wrong.astype("<u4").tobytes(),
            words[wrong].tobytes(),
        ]
    )
    return payload if len(payload) < chunk.size else None


def decode(codec: Quantizer, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
    """Undo ``encode``.

    Raises
    ------
    CorruptError
        If the payload or the references do not fit.
    """
    width = WIDTHS[codec.dtype]
    if len(payload) < _HEAD.size or out.size % width:
        raise CorruptError("a quantized chunk lacks its header")
    first, nwrong = _HEAD.unpack_from(payload)
    words = out.view(f"<u{width}")
    indices, rest = decode_indices(payload[_HEAD.size :], words.size)
    if len(rest) != (4 + width) * nwrong or first >= 1 << 62:
        raise CorruptError("a quantized chunk does not have the exceptions it states")
    with np.errstate(all="ignore"):
        words[:] = narrow(codec.dtype, codec.values(indices, refs, first))
    if nwrong:
        wrong = np.frombuffer(rest, "<u4", nwrong)
        if int(wrong.max()) >= words.size:
            raise CorruptError("an exception lies outside its chunk")
        words[wrong] = np.frombuffer(rest, words.dtype, nwrong, 4 * nwrong)


def snap(
    codec: Quantizer, chunk: Bytes, refs: Sequence[Bytes], at: int, bound: float | None = None
) -> None:
    """Replace the elements of a chunk by near ones that have an index.

    Zeros, infinities and NaNs stay, as do elements that would miss the bound, and positive ones
    of a tensor of positive numbers that would not stay positive.

    Parameters
    ----------
    bound : largest absolute error, measured in float64 on what the element becomes.

    Notes
    -----
    Warnings of floating-point arithmetic are the caller's to silence.
    """
    words, first = words_of(codec.dtype, chunk), at // WIDTHS[codec.dtype]
    values = widen(codec.dtype, words)
    indices = codec.indices(values, refs, first)
    good = (indices != NONE) & np.isfinite(values) & (values != 0)
    indices[~good] = 0
    made = narrow(codec.dtype, codec.values(indices, refs, first))
    near = widen(codec.dtype, made)
    good &= np.isfinite(near)
    if codec.positive:
        good &= (values > 0) & (near > 0)
    if bound is not None:
        good &= np.abs(near.astype(np.float64) - values.astype(np.float64)) <= bound
    chunk.view(words.dtype)[:] = np.where(good, made, words)


def floats_of(refs: Sequence[Bytes], dtype: str, n: int) -> Floats:
    """Give references, laid end to end, as n float32 values.

    Raises
    ------
    CorruptError
        If they are not as many.
    """
    if sum(ref.size for ref in refs) != n * WIDTHS[dtype]:
        raise CorruptError("a quantized chunk needs references of its own size")
    joined = refs[0] if len(refs) == 1 else np.concatenate(refs)
    return widen(dtype, words_of(dtype, joined))
