"""The loops of the range coder: interleaved states of 32 bits that give and take 16 at a time.

A symbol of frequency f (of ``1 << BITS``) that starts at c takes a state x to
``(x // f << BITS) + x % f + c``. Encoding goes backwards, so that decoding goes forwards.

Asymmetric numeral systems are Duda's (arXiv 1311.2540); word-wise renormalization and interleaving
are those of Giesen (arXiv 1402.3392).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckz.kernels import Kernel

BITS = 14
LANES = 8
LOW = 1 << 16  # states lie between this and 1 << 32

# Division by f is multiplication: exact, because x < f << (32 - BITS) whenever it is divided.
RECIPROCAL = 32 + BITS

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.uint64]


def _count_body(data: Bytes, counts: npt.NDArray[np.int64]) -> None:
    """Add to counts how often each byte occurs."""
    # Several tables: adding to one number twice in a row takes its time.
    tables = np.zeros((4, 256), np.int64)
    for i in range(data.size):
        tables[i & 3, data[i]] += 1
    for table in tables:
        for symbol in range(256):
            counts[symbol] += table[symbol]


def _encode_body(data: Bytes, table: Longs, states: Longs, words: Any, at: Any) -> None:
    """Code data into the end of words; put there where they begin.

    Parameters
    ----------
    words : [data.size + 1] or more; the one before their begin is written, too.
    table : [3, 256], of each symbol its frequency, its start and its reciprocal.
    states : [LANES]; symbol i is in lane ``i % LANES``.
    """
    bits, low, high = np.uint64(BITS), np.uint64(16), np.uint64(32 - BITS)
    shift = np.uint64(RECIPROCAL)
    place: Any = words.size
    for i in range(data.size - 1, -1, -1):
        symbol, lane = data[i], i & (LANES - 1)
        f, x = table[0, symbol], states[lane]
        # Without a branch, which would be foretold wrongly one time in five.
        full = np.uint64(x >= f << high)
        words[place - 1] = np.uint16(x & np.uint64(LOW - 1))
        place -= np.int64(full)
        x >>= low * full
        q = x * table[2, symbol] >> shift
        states[lane] = (q << bits) + (x - q * f) + table[1, symbol]
    at[0] = place


def _decode_body(words: Any, table: Longs, lookup: Bytes, states: Longs, out: Bytes) -> None:
    """Fill out; states end as the encoder's began, or the words are not what it wrote.

    Parameters
    ----------
    lookup : [1 << BITS], the symbol of each place.
    words : [out.size + 1] or more, so that none is read past their end.
    """
    bits, low, mask = np.uint64(BITS), np.uint64(16), np.uint64((1 << BITS) - 1)
    place: Any = 0
    for i in range(out.size):
        lane = i & (LANES - 1)
        x = states[lane]
        slot = x & mask
        symbol = lookup[slot]
        out[i] = symbol
        x = table[0, symbol] * (x >> bits) + slot - table[1, symbol]
        short = np.uint64(x < np.uint64(LOW))
        states[lane] = x << (low * short) | np.uint64(words[place]) * short
        place += np.int64(short)


count = Kernel(_count_body, None)
encode = Kernel(_encode_body, None)
decode = Kernel(_decode_body, None)
