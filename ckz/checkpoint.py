"""What every reader returns: a checkpoint as files, spans and tensors.

A *file* is a run of bytes that must come back exactly. *Spans* are the byte ranges of a file that
hold tensor data; what lies between them is *skeleton* (headers, pickles, padding). Spans of one
file never overlap. A *tensor* is a named view: a dtype, a shape, and one or more *pieces*, each a
strided box inside one span. Views may overlap (tied weights, slices, transposes), and a tensor may
lie in pieces across files.

The records are named tuples: a checkpoint of 100,000 tensors makes 300,000 of them, and a frozen
dataclass takes four times as long to build.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckz.errors import CorruptError

# dtype name (torch's spelling) -> bytes an element. Packed 4-bit types count packed bytes.
ITEMSIZE: dict[str, int] = {
    "bytes": 1,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

# What a .ckz begins with; stated here, for readers have to know it from HDF5.
CKZ_MAGIC = b"\x89CKZ\r\n\x1a\n"

_ML_DTYPES = {"bfloat16", *(name for name in ITEMSIZE if name.startswith("float8"))}
# Types that numpy cannot compute with are given as their stored bits.
_AS_BITS = {"bytes": "uint8", "float4_e2m1fn_x2": "uint8", "complex32": "uint32"}

# Of a tensor's dimensions; numpy cannot have more either.
MAX_RANK = 64

ROLES = ("weight", "master", "momentum", "variance", "other")


class Span(NamedTuple):
    """A byte range of one file that holds tensor data.

    Attributes
    ----------
    file : index into ``Checkpoint.files``.
    offset, nbytes : the range, in bytes from the file's start.
    dtype : coding dtype, a key of ``ITEMSIZE``; ``bytes`` when views disagree.
    byteorder : ``<`` or ``>``.
    packed : empty, or how the file itself compressed this range (``deflate``, or ``hdf5:`` and
        filters, see ``formats/hdf5_filters.py``); such a span is coded as bytes, and piece
        offsets count in the unpacked data.
    crc32 : the CRC-32 that the file states for the range, unpacked, or -1.
    """

    file: int
    offset: int
    nbytes: int
    dtype: str
    byteorder: str = "<"
    packed: str = ""
    crc32: int = -1


class Piece(NamedTuple):
    """A strided box of a tensor inside one span.

    Attributes
    ----------
    span : index into ``Checkpoint.spans``.
    offset : bytes from the span's start to the box's first element.
    shape, strides : of the box, in elements; strides may be zero or overlap, never negative.
    start : the box's position in the tensor.
    """

    span: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: tuple[int, ...]


class Tensor(NamedTuple):
    """A named view of spans.

    Attributes
    ----------
    name : as the framework names it; any string.
    dtype : a key of ``ITEMSIZE``.
    shape : extents, in elements.
    pieces : where the values lie; none for an empty tensor. What no piece covers is zero (HDF5
        does not store what was never written).
    role : one of ``ROLES``.
    transform : empty, ``conj`` or ``neg``: torch's lazy conjugate and negation bits.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    role: str = "other"
    transform: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the values, each element counted once."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class File(NamedTuple):
    """One entry of a checkpoint.

    Attributes
    ----------
    path : relative to the checkpoint's root, ``/`` between parts; the name for a single file.
    size : bytes.
    mode : permission bits.
    mtime_ns : modification time, ns since the epoch.
    kind : ``file``, ``dir`` or ``link``.
    target : of a link, as stored.
    """

    path: str
    size: int
    mode: int = 0o644
    mtime_ns: int = 0
    kind: str = "file"
    target: str = ""


class Sum(NamedTuple):
    """A CRC-32 that a file states of a range of its bytes, where that is no span."""

    file: int
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, as a reader sees it.

    Attributes
    ----------
    root : the file, or the directory that ``files`` are relative to.
    format : ``torch``, ``safetensors``, ..., ``opaque``; for a directory its layout.
    spans : ordered by (file, offset), without overlap.
    warnings : one line each, for the user.
    missing : what the checkpoint names but lacks, one line each.
    sums : checksums of ranges that were cut into several spans.
    mode, mtime_ns : of the directory itself.
    numbers : optimizer hyperparameters by their path, e.g. ``optimizer.param_groups.0.lr``.
    """

    root: Path
    format: str
    files: tuple[File, ...]
    spans: tuple[Span, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    sums: tuple[Sum, ...] = ()
    is_directory: bool = False
    mode: int = 0o755
    mtime_ns: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def path_of(self, file: int) -> Path:
        """Where a file of this checkpoint lies."""
        return self.root / self.files[file].path if self.is_directory else self.root


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Give the numpy dtype of a dtype name; ``ml_dtypes`` has bfloat16 and fp8."""
    if name in _ML_DTYPES:
        import ml_dtypes

        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(_AS_BITS.get(name, name))


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the garbage collector back: 100,000 tensors are 3,000,000 objects and no garbage.

    It would look at all of them again and again, for two fifths of the time that reading takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Shapes repeat from layer to layer, so what follows from a shape is worked out once.
@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return tuple(strides)[::-1] if shape else ()


def whole(name: str, dtype: str, shape: tuple[int, ...], span: int, *, offset: int = 0) -> Tensor:
    """Make a tensor that lies row-major and in one piece at a span's byte offset."""
    if 0 in shape:
        return Tensor(name, dtype, shape, ())
    piece = Piece(span, offset, shape, contiguous_strides(shape), (0,) * len(shape))
    return Tensor(name, dtype, shape, (piece,))


@lru_cache(maxsize=4096)
def _elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from a box's first to the end of its last one, holes included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def extent(piece: Piece, itemsize: int) -> int:
    """Bytes from a piece's first element to the end of its last one."""
    return _elements(piece.shape, piece.strides) * itemsize


@lru_cache(maxsize=4096)
def _box_fault(
    shape: tuple[int, ...], strides: tuple[int, ...], start: tuple[int, ...], whole: tuple[int, ...]
) -> str:
    """Say what is wrong with a box of a tensor; nothing if it is sound."""
    if min((*shape, *strides, *start, 0)) < 0:
        return "negative shape, stride or offset"
    if any(at + n > size for at, n, size in zip(start, shape, whole, strict=True)):
        return "a piece leaves the tensor's shape"
    return ""


def check_layout(checkpoint: Checkpoint) -> None:
    """Check that spans lie inside their files without overlap and pieces inside their spans.

    Readers handle untrusted files, so this is called once on whatever a reader returns.

    Raises
    ------
    CorruptError
        Naming the file or tensor that leaves its bounds.
    """
    previous = Span(0, 0, 0, "bytes")
    for span in checkpoint.spans:
        file = checkpoint.files[span.file]
        end = previous.offset + previous.nbytes if span.file == previous.file else 0
        if span.file < previous.file or span.offset < end:
            raise CorruptError(f"{file.path}: tensor data overlap at byte {span.offset}")
        if span.nbytes < 0 or span.offset + span.nbytes > file.size:
            raise CorruptError(
                f"{file.path}: tensor data end at byte {span.offset + span.nbytes}, "
                f"but the file has {file.size}"
            )
        previous = span
    check_pieces(checkpoint)


def check_pieces(checkpoint: Checkpoint) -> None:
    """Check that the pieces of every tensor lie inside its shape and inside their spans.

    Raises
    ------
    CorruptError
        Naming the tensor.
    """
    for tensor in checkpoint.tensors:
        itemsize = ITEMSIZE[tensor.dtype]
        if max(tensor.shape, default=0) >= 1 << 63:
            raise CorruptError(f"tensor {tensor.name!r}: absurd shape")
        for piece in tensor.pieces:
            span = checkpoint.spans[piece.span]
            fault = _box_fault(piece.shape, piece.strides, piece.start, tensor.shape)
            if fault or piece.offset < 0:
                raise CorruptError(f"tensor {tensor.name!r}: {fault or 'negative offset'}")
            # Nothing packs tighter than deflate, 1032 to 1.
            if span.packed and piece.offset + extent(piece, itemsize) > 1100 * span.nbytes + 65536:
                raise CorruptError(f"tensor {tensor.name!r}: is larger than what is packed")
            if not span.packed and piece.offset + extent(piece, itemsize) > span.nbytes:
                raise CorruptError(
                    f"{checkpoint.files[span.file].path}: tensor {tensor.name!r} leaves its "
                    f"storage of {span.nbytes} bytes"
                )


def coding_dtype(views: Sequence[Tensor]) -> str:
    """Pick the dtype a span is coded as: its views' common one, else ``bytes``."""
    dtypes = {view.dtype for view in views}
    return dtypes.pop() if len(dtypes) == 1 else "bytes"
