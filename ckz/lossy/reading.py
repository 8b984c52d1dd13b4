"""What a method is fitted to: elements of the source, as they will be restored, and of the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ckz.chain import Snapshot
from ckz.checkpoint import Checkpoint
from ckz.choosing import cut
from ckz.codecs.floats import WIDTHS, Bytes, Floats, widen, words_of
from ckz.codecs.quantized import floats_of
from ckz.container import MAX_REFS, Ref
from ckz.lossy import Method, Methods
from ckz.lossy.eligible import Eligible
from ckz.lossy.restored import RestoredFiles
from ckz.matching import Lean
from ckz.streams import Extent


@dataclass(frozen=True)
class Fit:
    """A checkpoint with what is needed to replace its values.

    Attributes
    ----------
    eligible : span -> what may be approximated.
    leans : span -> what it continues, bytes by bytes, in the base.
    casts : span -> the float32 ranges of this checkpoint that it is the cast of.
    chosen : span -> its method, where that is not the one of its role.
    tell : is told of bytes that were looked at.
    """

    checkpoint: Checkpoint
    methods: Methods
    files: RestoredFiles
    base: Snapshot | None
    eligible: Mapping[int, Eligible]
    leans: Mapping[int, Lean]
    casts: Mapping[int, tuple[Ref, ...]]
    chosen: Mapping[int, Method] = field(default_factory=dict)
    tell: Callable[[int], None] = lambda nbytes: None

    @cached_property
    def cast_types(self) -> dict[int, frozenset[str]]:
        """The types that other spans are casts of each span to."""
        found: dict[int, frozenset[str]] = {}
        for span, refs in self.casts.items():
            for ref in refs:
                number = ref.span - len(self.checkpoint.files)
                dtype = self.checkpoint.spans[span].dtype
                found[number] = found.get(number, frozenset()) | {dtype}
        return found

    def original(self, item: Eligible, first: int, last: int) -> Floats:
        """Read elements as they stand in the source."""
        return self._floats(self.files.read_original, item, first, last)

    def restored(self, item: Eligible, first: int, last: int) -> Floats:
        """Read elements as they will be restored."""
        return self._floats(self.files.read, item, first, last)

    def _floats(
        self,
        read: Callable[[list[Extent], Bytes], None],
        item: Eligible,
        first: int,
        last: int,
    ) -> Floats:
        span, width = self.checkpoint.spans[item.span], WIDTHS[item.dtype]
        data = np.empty((last - first) * width, np.uint8)
        read([Extent(span.file, span.offset + first * width, data.size)], data)
        with np.errstate(all="ignore"):
            return widen(item.dtype, words_of(item.dtype, data))

    @cached_property
    def halves(self) -> frozenset[str]:
        """The 16-bit types of weights that there are."""
        dtypes = {t.dtype for t in self.checkpoint.tensors if t.role == "weight" and t.pieces}
        return frozenset(dtypes & {"bfloat16", "float16"})

    def base_of(self, item: Eligible) -> tuple[Ref, ...]:
        """Give what a span continues in the base, element by element; nothing if it does not."""
        lean = self.leans.get(item.span)
        if lean is None or lean.dtype != item.dtype or not lean.certain:
            return ()
        if len(lean.refs) > MAX_REFS // 2:  # more than a chunk could name
            return ()
        return lean.refs if sum(ref.nbytes for ref in lean.refs) == item.nbytes else ()

    def differences(self, item: Eligible, source: tuple[Ref, ...], first: int, last: int) -> Floats:
        """Read elements less those of the base, if there is a source in it."""
        values = self.original(item, first, last)
        with np.errstate(all="ignore"):
            return values - self.read_base(item, first, last) if source else values

    def read_base(self, item: Eligible, first: int, last: int) -> Floats:
        """Read the elements of the base that a span's elements continue."""
        width = WIDTHS[item.dtype]
        parts = [self.read_ref(ref) for ref in cut(self.base_of(item), first * width, last * width)]
        return floats_of(parts, item.dtype, last - first)

    def read_original(self, ref: Ref) -> Bytes:
        """Read a range of this checkpoint as it stands in the source."""
        out = np.empty(ref.nbytes, np.uint8)
        span = self.checkpoint.spans[ref.span - len(self.checkpoint.files)]
        self.files.read_original([Extent(span.file, span.offset + ref.start, ref.nbytes)], out)
        return out

    def read_ref(self, ref: Ref) -> Bytes:
        """Read a range of the base, or of this checkpoint as it will be restored."""
        out = np.empty(ref.nbytes, np.uint8)
        if ref.where:
            assert self.base is not None
            self.base.read(ref.span, ref.start, out)
            return out
        span = self.checkpoint.spans[ref.span - len(self.checkpoint.files)]
        self.files.read([Extent(span.file, span.offset + ref.start, ref.nbytes)], out)
        return out
