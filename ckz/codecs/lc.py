"""LC-Checkpoint: differences in buckets of one exponent and sign.

Chen, Liu, Xue et al., "On Efficient Constructions of Checkpoints" (ICML 2020, arXiv 2009.13003):
differences to the reconstructed base are sorted by exponent and sign; a bucket is represented by
the mean of its extremes; *priority promotion* keeps the ``2**x - 1`` buckets of largest exponent
and sets the others to zero; what is stored are the buckets' numbers, entropy-coded. (The paper's
Huffman code has a floor of one bit; several numbers share a symbol here.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckz.codecs import quantized
from ckz.codecs.floats import WIDTHS, Bytes, Floats
from ckz.codecs.indices import Indices
from ckz.codecs.quantized import floats_of
from ckz.errors import CorruptError
from ckz.kernels import buckets as kernels
from ckz.kernels.buckets import BUCKETS
from ckz.kernels.folding import unfold
from ckz.kernels.quantize import NONE

MAX_BITS = 8


@dataclass(frozen=True)
class Lc:
    """Numbers of buckets; 0 is no change.

    References: the representatives of the buckets, float32; the base, laid end to end.
    """

    name: ClassVar[str] = "lc"
    model: ClassVar[str] = "whole"
    positive: ClassVar[bool] = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise ValueError("no buckets of this dtype")

    def indices(self, values: Floats, refs: Sequence[Bytes], first: int) -> Indices:
        """Give the number of each difference's bucket."""
        table = _table(refs)
        number = np.zeros(BUCKETS, np.int32)
        number[buckets_of(table)] = np.arange(1, table.size + 1)
        far = values - floats_of(refs[1:], self.dtype, values.size)
        out = np.empty(values.size, np.int32)
        kernels.numbers(far.view(np.uint32), number, NONE, out)
        return out

    def values(self, indices: Indices, refs: Sequence[Bytes], first: int) -> Floats:
        """Add each bucket's representative."""
        table = np.concatenate([np.zeros(1, np.float32), _table(refs)])
        numbers = unfold(indices)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < table.size:
            raise CorruptError("a bucket is not there")
        base = floats_of(refs[1:], self.dtype, indices.size)
        found: Floats = base + table[numbers]
        return found

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code the buckets of a chunk."""
        return quantized.encode(self, chunk, refs, at) if len(refs) > 1 else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild a chunk."""
        quantized.decode(self, payload, refs, out)


def buckets_of(values: Floats) -> Indices:
    """Give sign and exponent of each value, as one number below 512."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(23)).astype(np.int32)


def _table(refs: Sequence[Bytes]) -> Floats:
    if len(refs) < 2 or refs[0].size % 4 or refs[0].size > 4 << MAX_BITS:
        raise CorruptError("a chunk of buckets lacks its table or its base")
    return refs[0].copy().view("<f4")
