"""Reader of numpy's ``.npy`` (one array) and ``.npz`` (a zip file of them).

A ``.npy`` file is a magic number, a version, the length of a header, and a Python literal that
gives dtype, order and shape; then the values. Layout: ``numpy.lib.format``, whose own header
readers are private for version 3.0 or refuse long headers, so the header is parsed here. Object
arrays are pickles: they are never loaded, only kept.
"""

from __future__ import annotations

import ast
import math
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ckz.checkpoint import ITEMSIZE, Piece, Span, Tensor, contiguous_strides
from ckz.errors import CorruptError
from ckz.formats.layout import Layout
from ckz.formats.zips import DEFLATED, STORED, Member
from ckz.source import Source

_MAGIC = b"\x93NUMPY"
_PREFIX = 12  # magic, version and the longer of the two length fields
_MAX_HEADER = 1 << 16
_MAX_DIMENSIONS = 64
_NAME = "arr_0"  # what numpy calls an array without a name


class _Header(NamedTuple):
    """What a header says; ``dtype`` is empty if the values are not such that they can be found."""

    dtype: str
    byteorder: str
    itemsize: int
    shape: tuple[int, ...]
    fortran: bool
    warning: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize if self.dtype else 0


def sniff(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a ``.npy`` file."""
    return head.startswith(_MAGIC)


def holds_npz(members: Sequence[Member]) -> bool:
    """Whether a zip file of these members is a ``.npz`` file."""
    return bool(members) and all(member.name.endswith(".npy") for member in members)


def read(source: Source) -> Layout:
    """Find the array of a ``.npy`` file; it gets the name ``arr_0``.

    Raises
    ------
    CorruptError
        If the file is cut short or its header makes no sense.
    """
    start = _header_size(source.name, source.read(0, min(_PREFIX, source.size)))
    header = _parse_header(source.name, source.read(0, start), source.size)
    return _layout("npy", [(_NAME, Span(0, start, header.nbytes, "bytes"), 0, header)])


def read_members(source: Source, members: Sequence[Member]) -> Layout:
    """Find the arrays of a ``.npz`` file, whose members the caller has listed.

    Raises
    ------
    CorruptError
        If a member is cut short or its header makes no sense.
    """
    found = []
    skipped = []
    for member in sorted(members, key=lambda member: member.offset):
        name = member.name.removesuffix(".npy")
        if member.method not in (STORED, DEFLATED) or not member.name.endswith(".npy"):
            skipped.append(f"member {member.name!r} is no array that is read; kept as it is")
            continue
        where = f"{source.name}: member {member.name!r}"
        start, head = _member_head(source, member, where)
        header = _parse_header(where, head, member.nbytes)
        if member.method == STORED:
            span, at = Span(0, member.offset + start, header.nbytes, "bytes"), 0
        else:
            span = Span(0, member.offset, member.stored, "bytes", "<", "deflate", member.crc32)
            at = start
        found.append((name, span, at, header))
    layout = _layout("npz", found)
    return layout._replace(warnings=(*skipped, *layout.warnings))


def _layout(kind: str, found: Sequence[tuple[str, Span, int, _Header]]) -> Layout:
    """Build a layout from name, span, offset in the span and header of each array, in order."""
    spans: list[Span] = []
    tensors = []
    for name, span, at, header in found:
        if not header.dtype:
            continue
        shape = header.shape
        strides = (
            contiguous_strides(shape[::-1])[::-1] if header.fortran else contiguous_strides(shape)
        )
        if header.dtype == "bytes":  # one more dimension: an element is a run of bytes
            strides = (*(stride * header.itemsize for stride in strides), 1)
            shape = (*shape, header.itemsize)
        if not header.nbytes:
            tensors.append(Tensor(name, header.dtype, shape, ()))
            continue
        piece = Piece(len(spans), at, shape, strides, (0,) * len(shape))
        tensors.append(Tensor(name, header.dtype, shape, (piece,)))
        dtype = "bytes" if span.packed else header.dtype
        spans.append(span._replace(dtype=dtype, byteorder=header.byteorder))
    warnings = tuple(
        f"array {name!r} {header.warning}" for name, _, _, header in found if header.warning
    )
    return Layout(kind, tuple(spans), tuple(tensors), warnings)


def _member_head(source: Source, member: Member, where: str) -> tuple[int, bytes]:
    """Give the offset of a member's values, and the bytes before them."""
    if member.method == STORED:
        part = source.part(member.offset, member.stored, where)
        start = _header_size(where, part.read(0, min(_PREFIX, part.size)))
        return start, part.read(0, start)
    stored = source.read(member.offset, min(member.stored, 2 * _MAX_HEADER))
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        prefix = inflater.decompress(stored, _PREFIX)
        start = _header_size(where, prefix)
        rest = max(0, start - len(prefix))
        head = prefix + (inflater.decompress(inflater.unconsumed_tail, rest) if rest else b"")
    except zlib.error as err:
        raise CorruptError(f"{where}: is damaged: {err}") from err
    if len(head) < start:
        raise CorruptError(f"{where}: is cut short in its array header")
    return start, head


def _header_size(where: str, prefix: bytes) -> int:
    """Give the length of everything before the values."""
    if len(prefix) < _PREFIX or not prefix.startswith(_MAGIC):
        raise CorruptError(f"{where}: has no numpy header; it is cut short or damaged")
    major = prefix[6]
    if major not in (1, 2, 3):
        raise CorruptError(f"{where}: has a numpy header of unknown version {major}")
    at = 10 if major == 1 else 12
    length = int.from_bytes(prefix[8:at], "little")
    if length > _MAX_HEADER:
        raise CorruptError(f"{where}: states a numpy header of {length} bytes, which is absurd")
    return at + length


def _parse_header(where: str, head: bytes, size: int) -> _Header:
    """Parse the bytes before the values, and check that ``size`` bytes can hold them all."""
    text = head[10 if head[6] == 1 else 12 :]
    try:
        header = _parse_literal(text, "utf-8" if head[6] == 3 else "latin-1")
    except (ValueError, TypeError, SyntaxError, KeyError, AttributeError) as err:
        raise CorruptError(f"{where}: has a numpy header that makes no sense") from err
    except (RecursionError, MemoryError, OverflowError) as err:
        raise CorruptError(f"{where}: has a numpy header that is nested too deeply") from err
    if len(head) + header.nbytes > size:
        raise CorruptError(
            f"{where}: needs {header.nbytes} bytes of values, "
            f"but there are only {size - len(head)}; it is truncated or damaged"
        )
    return header


@lru_cache(maxsize=4096)
def _parse_literal(text: bytes, encoding: str) -> _Header:
    # Python 2 wrote long integers with an L.
    literal = ast.literal_eval(re.sub(r"(?<=\d)L\b", "", text.decode(encoding)).strip())
    shape, descr, fortran = literal["shape"], literal["descr"], literal["fortran_order"]
    if not isinstance(shape, tuple) or not isinstance(fortran, bool) or len(literal) != 3:
        raise ValueError("no shape or order")
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("no shape")
    try:
        dtype = np.lib.format.descr_to_dtype(descr)
    except (TypeError, ValueError):
        warning = f"has the unknown dtype {descr!r:.80}; kept as it is"
        return _Header("", "<", 0, shape, fortran, warning)
    if dtype.hasobject:
        return _Header("", "<", 0, shape, fortran, "holds Python objects; kept as it is")
    if dtype.kind in "biufc" and dtype.name in ITEMSIZE:
        byteorder = ">" if dtype.str[0] == ">" else "<"
        return _Header(dtype.name, byteorder, dtype.itemsize, shape, fortran, "")
    warning = f"has dtype {dtype.str!r}; kept as plain bytes"
    return _Header("bytes", "<", dtype.itemsize, shape, fortran, warning)
