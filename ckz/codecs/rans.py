"""A range coder for bytes: what ``--level max`` codes planes with where it is smaller.

A Huffman code gives each symbol a whole number of bits; this one comes within a thousandth of the
plane's entropy. Coding takes it twice as long, decoding half as long again; and it loads Numba.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ckz.codecs.zstd import compress as deflate
from ckz.codecs.zstd import decompress_into
from ckz.errors import CorruptError
from ckz.kernels import rans as kernels
from ckz.kernels.buffers import scratch

Bytes = npt.NDArray[np.uint8]

_TOTAL = 1 << kernels.BITS
_HEAD = struct.Struct("<H")
_STATES = 4 * kernels.LANES


def compress(data: Bytes) -> bytes:
    """Code bytes: the frequencies as a zstd frame with its length before it, states, words."""
    counts = np.zeros(256, np.int64)
    kernels.count(data, counts)
    frequencies = scale(counts)
    words = scratch("words", data.size + 1, np.uint16)
    states = np.full(kernels.LANES, kernels.LOW, np.uint64)
    at = np.zeros(1, np.int64)
    kernels.encode(data, _table(frequencies), states, words, at)
    table = deflate(frequencies.astype("<u2").view(np.uint8).reshape(-1, 2).T.tobytes())
    head = _HEAD.pack(len(table)) + table + states.astype("<u4").tobytes()
    return head + words[at[0] :].astype("<u2", copy=False).tobytes()


def decompress_to(payload: memoryview, out: Bytes) -> None:
    """Fill out from what ``compress`` gave.

    Raises
    ------
    CorruptError
        If the payload is damaged.
    """
    size = _HEAD.unpack_from(payload)[0] if len(payload) >= _HEAD.size else 0
    start = _HEAD.size + size + _STATES
    if len(payload) < start or (len(payload) - start) % 2:
        raise CorruptError("range-coded bytes lack their head")
    split = np.empty((2, 256), np.uint8)
    decompress_into(payload[_HEAD.size : _HEAD.size + size], split.reshape(-1))
    frequencies = np.ascontiguousarray(split.T).view("<u2").reshape(-1).astype(np.int64)
    count = (len(payload) - start) // 2
    if frequencies.sum() != _TOTAL or count > out.size:
        raise CorruptError("range-coded bytes do not fit their frequencies or their size")
    states = np.frombuffer(payload, "<u4", kernels.LANES, start - _STATES).astype(np.uint64)
    # What is damaged asks for more words than there are, but never for more than one a symbol.
    words = scratch("words", out.size + 1, np.uint16)
    words[:count] = np.frombuffer(payload, "<u2", count, start)
    words[count:] = 0
    lookup = np.repeat(np.arange(256, dtype=np.uint8), frequencies)
    kernels.decode(words, _table(frequencies), lookup, states, out)
    if np.any(states != kernels.LOW):
        raise CorruptError("range-coded bytes do not end as they began")


def scale(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give frequencies that sum to ``1 << BITS``; of what occurs none is zero."""
    scaled = counts * _TOTAL // max(1, int(counts.sum()))
    found = np.where(counts > 0, np.maximum(scaled, 1), 0)
    # Too much or too little is a matter of a few hundred, and hurts the most frequent least.
    while (excess := int(found.sum()) - _TOTAL) != 0:
        most = int(found.argmax())
        found[most] -= min(excess, int(found[most]) // 2)
    return found


def _table(frequencies: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    starts = np.cumsum(frequencies) - frequencies
    reciprocals = (1 << kernels.RECIPROCAL) // np.maximum(frequencies, 1) + 1
    return np.array([frequencies, starts, reciprocals], np.uint64)
