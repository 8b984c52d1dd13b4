"""BitSnap's clusters for optimizer states.

Li et al., "BitSnap" (arXiv 2511.12376): the values of a tensor are clustered, and each is stored as
its cluster's label and an eight-bit code inside the cluster. The paper gives neither the number of
clusters nor the layout; sixteen clusters by one-dimensional k-means on the histogram of the top
sixteen bits, with a minimum and a scale each, are ours. The second moment is clustered by its
square root: on the raw values, small ones would become zero and the next step explode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckz.codecs import quantized
from ckz.codecs.floats import WIDTHS, Bytes, Floats
from ckz.codecs.indices import Indices
from ckz.errors import CorruptError
from ckz.kernels import clusters as kernels
from ckz.kernels.clusters import CODES
from ckz.kernels.folding import unfold

MAX_CLUSTERS = 256


@dataclass(frozen=True)
class Cluster:
    """Label and code of each value.

    References: minimum and scale of each cluster, float32, in ascending order.

    Attributes
    ----------
    root : 1 if the square roots were clustered.
    """

    name: ClassVar[str] = "cluster"
    model: ClassVar[str] = "whole"
    dtype: str = "float32"
    root: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS or self.root not in (0, 1):
            raise ValueError("no clusters of this kind")

    @property
    def positive(self) -> bool:
        """Whether a positive value must stay positive."""
        return bool(self.root)

    def indices(self, values: Floats, refs: Sequence[Bytes], first: int) -> Indices:
        """Give label and code of each value."""
        out = np.empty(values.size, np.int32)
        kernels.labels(values, _table(refs), bool(self.root), out)
        return out

    def values(self, indices: Indices, refs: Sequence[Bytes], first: int) -> Floats:
        """Give the value of each label and code."""
        table, numbers = _table(refs), unfold(indices)
        clusters = table.size // 2
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < CODES * clusters:
            raise CorruptError("a cluster is not there")
        out = np.empty(indices.size, np.float32)
        kernels.values(indices, table, bool(self.root), out)
        return out

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code the clusters of a chunk."""
        return quantized.encode(self, chunk, refs, at) if refs else None

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Rebuild a chunk."""
        quantized.decode(self, payload, refs, out)


def _table(refs: Sequence[Bytes]) -> Floats:
    """Give minimum and scale of each cluster, by turns."""
    if len(refs) != 1 or refs[0].size % 8 or not 0 < refs[0].size <= 8 * MAX_CLUSTERS:
        raise CorruptError("a clustered chunk lacks its table")
    return refs[0].copy().view("<f4")
