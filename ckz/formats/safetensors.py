"""Reader of safetensors: 8 bytes of header length, a JSON header, and the tensors without gaps.

A tensor is ``{"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}`` with offsets from
the header's end; ``__metadata__`` is the one other key. Any order, any alignment, little-endian.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NamedTuple

from ckz.checkpoint import MAX_RANK, Piece, Span, Tensor, contiguous_strides
from ckz.errors import CorruptError
from ckz.formats.layout import Layout
from ckz.source import Source

_MAX_HEADER = 100_000_000  # as the format's own reader has it
_METADATA = "__metadata__"

# name in the header -> (dtype, bits an element). Those without a dtype of ours are bytes.
_DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("bytes", 6),
    "F6_E3M2": ("bytes", 6),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
}
# The other way round.
CODES = {dtype: code for code, (dtype, _) in _DTYPES.items() if dtype != "bytes"}


class _Entry(NamedTuple):
    """A tensor of the header; ``dtype`` as it stands there."""

    begin: int
    end: int
    order: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class _Repeated(list[tuple[str, Any]]):
    """A JSON object that has a key twice."""


def sniff(head: bytes) -> bool:
    """Whether a file that begins with ``head`` may be a safetensors file."""
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and head[8:9] == b"{" and 2 <= length <= _MAX_HEADER


def read(source: Source) -> Layout:
    """Read the header and give one span a tensor.

    Raises
    ------
    CorruptError
        If the header is damaged, names a tensor twice, or its offsets have gaps, overlap, do not
        fit shape and dtype, or do not end where the file does.
    """
    header, start = _header(source)
    entries = _entries(source.name, header)
    entries.sort()
    _check_ends(source, start, entries)
    spans: list[Span] = []
    tensors: list[Tensor] = []
    warnings: list[str] = []
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    for begin, end, _, name, stored, extents in entries:
        dtype, shape = _coded(source.name, name, stored, extents, end - begin)
        if stored not in _DTYPES:
            warnings.append(f"tensor {name!r} has the unknown dtype {stored!r}; kept as bytes")
        if begin == end:
            tensors.append(Tensor(name, dtype, shape, ()))
            continue
        if shape not in strides:
            strides[shape] = contiguous_strides(shape)
        piece = Piece(len(spans), 0, shape, strides[shape], (0,) * len(shape))
        tensors.append(Tensor(name, dtype, shape, (piece,)))
        spans.append(Span(0, start + begin, end - begin, dtype))
    in_file = sorted(range(len(entries)), key=lambda index: entries[index].order)
    return Layout(
        "safetensors", tuple(spans), tuple(tensors[index] for index in in_file), tuple(warnings)
    )


def read_metadata(source: Source) -> dict[str, Any]:
    """Give what a file says about itself besides its tensors; errors are as those of ``read``."""
    metadata = _header(source)[0].get(_METADATA)
    return metadata if isinstance(metadata, dict) else {}


def _header(source: Source) -> tuple[dict[str, Any], int]:
    """Read the header; give it and where the tensors' bytes begin."""
    if source.size < 8:
        raise CorruptError(
            f"{source.name}: truncated: {source.size} bytes, but a safetensors file has at least 8"
        )
    length = int.from_bytes(source.read(0, 8), "little")
    if length > _MAX_HEADER:
        raise CorruptError(
            f"{source.name}: states a header of {length} bytes; {_MAX_HEADER} is the most there is"
        )
    if 8 + length > source.size:
        raise CorruptError(
            f"{source.name}: truncated in its header: expected {8 + length} bytes at least, "
            f"have {source.size}, {8 + length - source.size} are missing"
        )
    try:
        text = source.read(8, length).decode()
        header = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as err:
        raise CorruptError(f"{source.name}: its header is no UTF-8 JSON: {err}") from err
    if isinstance(header, _Repeated):
        raise CorruptError(f"{source.name}: duplicate tensor {_repeated(header)!r} in its header")
    if not isinstance(header, dict):
        raise CorruptError(f"{source.name}: its header is no JSON object")
    return header, 8 + length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Repeated:
    """Make a JSON object, but tell when a key stands there twice; JSON would keep the last."""
    made = dict(pairs)
    return made if len(made) == len(pairs) else _Repeated(pairs)


def _repeated(pairs: _Repeated) -> str:
    counts = Counter(key for key, _ in pairs)
    return next(key for key, count in counts.items() if count > 1)


def _entries(file: str, header: dict[str, Any]) -> list[_Entry]:
    """Check the form of each tensor's entry."""
    entries = []
    for order, (name, entry) in enumerate(header.items()):
        if name == _METADATA:
            continue
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as err:
            raise CorruptError(
                f"{file}: tensor {name!r} lacks a valid dtype, shape or data_offsets"
            ) from err
        if len(shape) > MAX_RANK:
            raise CorruptError(f"{file}: tensor {name!r} has {len(shape)} dimensions")
        for number in (begin, end, *shape):
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise CorruptError(f"{file}: tensor {name!r} has {number!r} as size or offset")
        if type(dtype) is not str or begin > end:
            raise CorruptError(f"{file}: tensor {name!r} has no valid dtype and data_offsets")
        entries.append(_Entry(begin, end, order, name, dtype, shape))
    return entries


def _check_ends(source: Source, start: int, entries: list[_Entry]) -> None:
    """Check that tensors, ordered by offset, lie end to end and end where the file does."""
    size = source.size - start
    at, before = 0, ""
    for begin, end, _, name, _, _ in entries:
        if begin < at:
            raise CorruptError(f"{source.name}: tensors {before!r} and {name!r} overlap")
        if begin > at:
            raise CorruptError(f"{source.name}: a gap of {begin - at} bytes before tensor {name!r}")
        at, before = end, name
    if at > size:
        cut = next(entry.name for entry in entries if entry.end > size)
        raise CorruptError(
            f"{source.name}: truncated: expected {start + at} bytes, have {source.size}, "
            f"{at - size} are missing; tensor {cut!r} is the first affected"
        )
    if at < size:
        raise CorruptError(
            f"{source.name}: expected {start + at} bytes, have {source.size}: "
            f"{size - at} too many after the last tensor"
        )


def _coded(
    file: str, name: str, stored: str, shape: tuple[int, ...], nbytes: int
) -> tuple[str, tuple[int, ...]]:
    """Give dtype and shape as ckz has them, of a tensor of ``nbytes``."""
    if stored not in _DTYPES:
        return "bytes", (nbytes,)
    dtype, bits = _DTYPES[stored]
    if math.prod(shape) * bits != nbytes * 8:
        raise CorruptError(
            f"{file}: tensor {name!r} of dtype {stored} and shape {list(shape)} needs "
            f"{-(-math.prod(shape) * bits // 8)} bytes, but has {nbytes}"
        )
    if stored == "F4":
        if not shape or shape[-1] % 2:
            raise CorruptError(
                f"{file}: tensor {name!r} has two values a byte, but shape {list(shape)}"
            )
        return dtype, (*shape[:-1], shape[-1] // 2)
    return (dtype, (nbytes,)) if dtype == "bytes" else (dtype, shape)
