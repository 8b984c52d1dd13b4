"""Reader of GGUF, the format of llama.cpp: a header with a list of tensors, then their values.

Versions 2 and 3, either byte order. The ``gguf`` package maps the file and trusts what it says, so
the header is parsed here: magic, version, counts; key-value pairs, which are skipped but for the
alignment; then name, dimensions (the fastest first), type and offset of each tensor.

Quantized types are blocks of a few scales and codes, so such a tensor is given as ``uint8``, its
last dimension in bytes; spans of them are coded as bytes. Layout: ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import math
import struct

from ckz.checkpoint import Span, Tensor, whole
from ckz.errors import CorruptError
from ckz.formats.layout import Layout, order_spans
from ckz.source import Source

_MAGIC = b"GGUF"
_MAX_TENSORS = 1 << 18
_MAX_KEYS = 1 << 16
_MAX_ITEMS = 1 << 22  # strings and nested arrays in the metadata
_MAX_DIMENSIONS = 8
_MAX_NESTING = 8
_MAX_NAME = 1 << 16
_WINDOW = 1 << 18

# ggml type -> elements and bytes of a block, and its dtype if it holds plain numbers. Q8_1, which
# is never written, has had two sizes and is left out.
# fmt: off
_TYPES: dict[int, tuple[int, int, str]] = {
    0: (1, 4, "float32"), 1: (1, 2, "float16"), 24: (1, 1, "int8"), 25: (1, 2, "int16"),
    26: (1, 4, "int32"), 27: (1, 8, "int64"), 28: (1, 8, "float64"), 30: (1, 2, "bfloat16"),
    2: (32, 18, ""), 3: (32, 20, ""), 6: (32, 22, ""), 7: (32, 24, ""), 8: (32, 34, ""),
    10: (256, 84, ""), 11: (256, 110, ""), 12: (256, 144, ""), 13: (256, 176, ""),
    14: (256, 210, ""), 15: (256, 292, ""), 16: (256, 66, ""), 17: (256, 74, ""),
    18: (256, 98, ""), 19: (256, 50, ""), 20: (32, 18, ""), 21: (256, 110, ""),
    22: (256, 82, ""), 23: (256, 136, ""), 29: (256, 56, ""), 34: (256, 54, ""),
    35: (256, 66, ""), 39: (32, 17, ""), 40: (64, 36, ""), 41: (128, 18, ""),
}
# fmt: on
# metadata value type -> bytes; strings and arrays have no fixed size
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9


class _Cursor:
    """Reads a header from front to back, through a window, within the file's bounds."""

    def __init__(self, source: Source, byteorder: str, at: int) -> None:
        self._source = source
        self._byteorder = byteorder
        self._window, self._start = b"", 0
        self.at = at
        self.items = 0

    def take(self, nbytes: int) -> bytes:
        begin = self.at - self._start
        if begin + nbytes > len(self._window):
            length = max(nbytes, min(_WINDOW, self._source.size - self.at))
            self._window, self._start, begin = self._source.read(self.at, length), self.at, 0
        self.at += nbytes
        return self._window[begin : begin + nbytes]

    def number(self, code: str) -> int:
        layout = self._byteorder + code
        return int(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])

    def text(self) -> str:
        nbytes = self.number("Q")
        if nbytes > _MAX_NAME:
            raise self.error(f"has a name of {nbytes} bytes")
        return self.take(nbytes).decode(errors="backslashreplace")

    def skip(self, nbytes: int) -> None:
        if self.at + nbytes > self._source.size:
            raise self.error(f"has a metadata value of {nbytes} bytes")
        self.at += nbytes

    def error(self, what: str) -> CorruptError:
        return CorruptError(f"{self._source.name}: {what} at byte {self.at}; it is damaged")


def sniff(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a GGUF file."""
    return head.startswith(_MAGIC)


def read(source: Source) -> Layout:
    """Find the tensors of a GGUF file.

    Raises
    ------
    CorruptError
        If the header is damaged or states what the file cannot hold.
    """
    version = source.read(4, 4)
    byteorder = "<" if version[:2] != b"\0\0" else ">"
    number = int.from_bytes(version, "little" if byteorder == "<" else "big")
    if number not in (2, 3):
        return Layout("gguf", warnings=(f"GGUF version {number} is not read; kept as it is",))
    cursor = _Cursor(source, byteorder, 8)
    count = cursor.number("Q")
    alignment = _skip_metadata(cursor)
    if count > _MAX_TENSORS or alignment < 1:
        raise cursor.error(f"states {count} tensors, aligned to {alignment} bytes")
    infos = [_tensor_info(cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    spans: list[Span] = []
    tensors: list[Tensor] = []
    warnings: list[str] = []
    names: set[str] = set()
    for name, shape, kind, offset in infos:
        if name in names:
            raise CorruptError(f"{source.name}: has two tensors called {name!r}")
        names.add(name)
        if kind not in _TYPES:
            warnings.append(f"tensor {name!r} is of the unknown type {kind}; kept as it is")
            continue
        elements, nbytes, dtype = _TYPES[kind]
        if not dtype:
            if not shape or shape[-1] % elements:
                raise CorruptError(f"{source.name}: tensor {name!r} has a row of broken blocks")
            shape = (*shape[:-1], shape[-1] // elements * nbytes)
            nbytes = 1
        nbytes *= math.prod(shape)
        if start + offset + nbytes > source.size:
            raise CorruptError(
                f"{source.name}: tensor {name!r} ends at byte {start + offset + nbytes}, "
                f"but the file has {source.size}; it is truncated or damaged"
            )
        tensors.append(whole(name, dtype or "uint8", shape, len(spans)))
        if nbytes:
            spans.append(Span(0, start + offset, nbytes, dtype or "bytes", byteorder))
    ordered = order_spans(spans, tensors)
    return Layout("gguf", *ordered, warnings=tuple(warnings))


def _skip_metadata(cursor: _Cursor) -> int:
    """Pass over the key-value pairs; give the alignment of tensor data that they state."""
    alignment = 32
    count = cursor.number("Q")
    if count > _MAX_KEYS:
        raise cursor.error(f"states {count} metadata keys")
    for _ in range(count):
        key = cursor.text()
        kind = cursor.number("I")
        if key == "general.alignment" and kind == _UINT32:
            alignment = cursor.number("I")
        else:
            _skip_value(cursor, kind, 0)
    return alignment


def _skip_value(cursor: _Cursor, kind: int, depth: int) -> None:
    if kind in _SIZES:
        cursor.skip(_SIZES[kind])
    elif kind == _STRING:
        cursor.skip(cursor.number("Q"))
    elif kind == _ARRAY and depth < _MAX_NESTING:
        inner, count = cursor.number("I"), cursor.number("Q")
        if inner in _SIZES:
            cursor.skip(count * _SIZES[inner])
            return
        cursor.items += count
        if cursor.items > _MAX_ITEMS:
            raise cursor.error(f"states {cursor.items} metadata items")
        for _ in range(count):
            _skip_value(cursor, inner, depth + 1)
    else:
        raise cursor.error(f"has metadata of the unknown type {kind}")


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read name, shape, ggml type, and offset from the start of the tensor data."""
    name = cursor.text()
    dimensions = cursor.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")
