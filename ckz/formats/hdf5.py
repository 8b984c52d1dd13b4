"""Reader of HDF5 files, Keras' ``.h5`` and ``.weights.h5`` among them.

The HDF5 library finds the datasets; their values are never read here, only their places. A
contiguous dataset is one span, an unfiltered chunked one a span and a piece a chunk (edge chunks
are stored whole, their pieces are clipped). Chunks that passed filters are kept as stored, as spans
with ``packed`` = ``hdf5:`` and the filters in the order in which they were applied; a piece of such
a span counts in what ``hdf5_filters.unpack`` makes of it. What was never written reads as zero: no
piece covers it.

Left in the skeleton, since they are no numbers or no place in the file is known: strings, variable
lengths, references, compounds, and compact datasets, which lie inside of object headers. Links to
other files and virtual datasets are not followed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ckz.checkpoint import Piece, Span, Tensor, contiguous_strides, whole
from ckz.errors import CorruptError
from ckz.formats import hdf5_filters
from ckz.formats.layout import Layout, order_spans
from ckz.source import Source

if TYPE_CHECKING:
    import h5py

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MAX_DATASETS = 1 << 20
_MAX_CHUNKS = 1 << 18  # of one file; each becomes a span and a piece
# (bytes, sign bit, exponent at, its bits, mantissa at, its bits, bias) -> dtype
_FLOATS = {
    (2, 15, 10, 5, 0, 10, 15): "float16",
    (2, 15, 7, 8, 0, 7, 127): "bfloat16",
    (4, 31, 23, 8, 0, 23, 127): "float32",
    (8, 63, 52, 11, 0, 52, 1023): "float64",
}


class _Kind(NamedTuple):
    """The element type of a dataset."""

    dtype: str
    itemsize: int
    byteorder: str = "<"


class _Found(NamedTuple):
    """What one file gave so far."""

    spans: list[Span]
    tensors: list[Tensor]
    warnings: list[str]


def sniff(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is HDF5; a user block of up to 2 KiB may precede."""
    return any(head.startswith(_SIGNATURE, at) for at in (0, 512, 1024, 2048))


def read(source: Source) -> Layout:
    """Find the numeric datasets of an HDF5 file; a tensor's name is the path of its dataset.

    Raises
    ------
    CorruptError
        If the HDF5 library refuses the file, or a dataset lies outside of it.
    """
    found = _Found([], [], [])
    with _library_errors(source.name):
        import h5py

        with source.as_file() as stream, h5py.File(stream, "r") as file:
            for path in _dataset_paths(source.name, file):
                dataset = h5py.h5d.open(file.id, path)
                _read_dataset(source, _text(path), dataset, found)
    spans, tensors = order_spans(found.spans, found.tensors)
    return Layout("hdf5", spans, tensors, tuple(found.warnings))


@contextmanager
def _library_errors(name: str) -> Iterator[None]:
    """Turn what h5py raises about a damaged file, which may be almost anything, into one error."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError,
            MemoryError, AttributeError, SystemError) as err:  # fmt: skip
        short = re.search(r"truncated file: eof = (\d+),.* stored_eof = (\d+)", str(err))
        if short:
            message = f"is truncated: expected {short[2]} bytes, have {short[1]}"
        else:
            message = f"the HDF5 library cannot read it ({' '.join(str(err).split())[:200]})"
        raise CorruptError(f"{name}: {message}") from err


def _dataset_paths(name: str, file: h5py.File) -> list[bytes]:
    """List the datasets that hard links reach, each object once."""
    import h5py

    paths: list[bytes] = []

    def visit(path: bytes, info: Any) -> int | None:
        if info.type == h5py.h5o.TYPE_DATASET:
            paths.append(path)
        return 1 if len(paths) > _MAX_DATASETS else None  # a number ends the visit

    if h5py.h5o.visit(file.id, visit, info=True):
        raise CorruptError(f"{name}: has more than {_MAX_DATASETS} datasets")
    return paths


def _text(path: bytes) -> str:
    return path.decode(errors="backslashreplace")


def _read_dataset(source: Source, path: str, dataset: Any, found: _Found) -> None:
    """Add a dataset's spans and its tensor to what was found, or a warning."""
    import h5py

    space = dataset.get_space()
    try:
        kind = _kind(dataset)
    except (TypeError, ValueError, NotImplementedError):  # a type newer than the HDF5 library
        found.warnings.append(f"dataset {path!r} is kept as stored: its type is not known")
        return
    if kind is None or space.get_simple_extent_type() == h5py.h5s.NULL:
        return
    shape = tuple(space.get_simple_extent_dims())
    if kind.dtype == "bytes":  # an element is a run of bytes
        shape = (*shape, kind.itemsize)
    creation = dataset.get_create_plist()
    layout = creation.get_layout()
    if layout == h5py.h5d.VIRTUAL or creation.get_external_count():
        found.warnings.append(f"dataset {path!r} lies in other files, which are not followed")
    elif layout == h5py.h5d.COMPACT:
        found.warnings.append(f"dataset {path!r} lies in its object header; its values stay there")
    elif 0 in shape:
        found.tensors.append(Tensor(path, kind.dtype, shape, ()))
    elif layout == h5py.h5d.CHUNKED:
        _read_chunked(source, path, shape, kind, dataset, found)
    elif (offset := dataset.get_offset()) is None:
        _add(source, path, shape, kind, dataset, (), found)
    else:
        nbytes = math.prod(shape) * (1 if kind.dtype == "bytes" else kind.itemsize)
        if offset + nbytes > source.size:
            raise CorruptError(f"{source.name}: dataset {path!r} ends outside the file")
        found.spans.append(Span(0, offset, nbytes, kind.dtype, kind.byteorder))
        found.tensors.append(whole(path, kind.dtype, shape, len(found.spans) - 1))


def _read_chunked(
    source: Source, path: str, shape: tuple[int, ...], kind: _Kind, dataset: Any, found: _Found
) -> None:
    creation = dataset.get_create_plist()
    filters = [creation.get_filter(i) for i in range(creation.get_nfilters())]
    names = [hdf5_filters.name_of(code, values) for code, _, values, _ in filters]
    if None in names:
        code, _, _, label = filters[names.index(None)]
        label = _text(label) or "unnamed"
        found.warnings.append(
            f"dataset {path!r} is kept as stored: filter {code} ({label[:40]}) is not available"
        )
        return
    box = creation.get_chunk()
    if kind.dtype == "bytes":
        box = (*box, kind.itemsize)
    if len(box) != len(shape):
        raise CorruptError(f"{source.name}: dataset {path!r} has chunks of {len(box)} dimensions")
    nbytes = math.prod(box) * (1 if kind.dtype == "bytes" else kind.itemsize)
    if len(found.spans) + dataset.get_num_chunks() > _MAX_CHUNKS or (
        names and nbytes > hdf5_filters.MAX_CHUNK
    ):
        found.warnings.append(f"dataset {path!r} is kept as stored: its chunks are too many or big")
        return
    stored: list[Any] = []
    dataset.chunk_iter(stored.append)
    pieces = []
    for start, mask, offset, size in stored:
        start = (*start, 0)[: len(shape)]
        clipped = tuple(map(min, box, (n - at for n, at in zip(shape, start, strict=True))))
        applied = [name for i, name in enumerate(names) if name and not mask >> i & 1]
        if min(clipped) < 1 or offset + size > source.size or (not applied and size != nbytes):
            raise CorruptError(f"{source.name}: dataset {path!r} has a chunk that does not fit")
        packed = "hdf5:" + ",".join(applied) if applied else ""
        dtype = "bytes" if packed else kind.dtype
        pieces.append(Piece(len(found.spans), 0, clipped, contiguous_strides(box), start))
        found.spans.append(Span(0, offset, size, dtype, kind.byteorder, packed))
    _add(source, path, shape, kind, dataset, pieces, found)


def _add(
    source: Source, path: str, shape: tuple[int, ...], kind: _Kind, dataset: Any,
    pieces: Sequence[Piece], found: _Found,
) -> None:  # fmt: skip
    """Add a tensor of which parts may never have been written, if these parts are zero."""
    import h5py
    import numpy as np

    elements = math.prod(shape)
    if sum(math.prod(piece.shape) for piece in pieces) < elements:
        fill = np.asarray(h5py.Dataset(dataset).fillvalue)
        if any(fill.tobytes()) or elements > source.size + (1 << 24):
            found.warnings.append(f"dataset {path!r} is kept as stored: most of it is a fill value")
            return
    found.tensors.append(Tensor(path, kind.dtype, shape, tuple(pieces)))


def _kind(dataset: Any) -> _Kind | None:
    """Tell the element type of a dataset; None if its elements are no numbers."""
    import h5py

    stored = dataset.get_type()
    itemsize = stored.get_size()
    if isinstance(stored, h5py.h5t.TypeOpaqueID):
        named = h5py.Dataset(dataset).attrs.get("dtype", "")
        # Keras marks bfloat16, which HDF5 did not know, by an attribute.
        known = isinstance(named, str) and named == "bfloat16" and itemsize == 2
        return _Kind("bfloat16" if known else "bytes", itemsize)
    if isinstance(stored, h5py.h5t.TypeEnumID):
        return _Kind("bool", 1) if stored.dtype == bool and itemsize == 1 else None
    if isinstance(stored, h5py.h5t.TypeCompoundID):
        return _complex(stored)
    return _number(stored)


def _number(stored: Any) -> _Kind | None:
    import h5py

    itemsize = stored.get_size()
    if isinstance(stored, h5py.h5t.TypeIntegerID):
        if itemsize not in (1, 2, 4, 8) or stored.get_precision() != 8 * itemsize:
            return _Kind("bytes", itemsize)
        signed = stored.get_sign() == h5py.h5t.SGN_2
        dtype = f"{'' if signed else 'u'}int{8 * itemsize}"
    elif isinstance(stored, h5py.h5t.TypeFloatID):
        fields = (itemsize, *stored.get_fields(), stored.get_ebias())
        if fields not in _FLOATS:
            return _Kind("bytes", itemsize)
        dtype = _FLOATS[fields]
    else:
        return None
    order = stored.get_order()
    if order not in (h5py.h5t.ORDER_LE, h5py.h5t.ORDER_BE):
        return _Kind("bytes", itemsize)
    return _Kind(dtype, itemsize, ">" if order == h5py.h5t.ORDER_BE else "<")


def _complex(stored: Any) -> _Kind | None:
    """Tell complex numbers, which h5py writes as pairs called r and i, from other compounds."""
    if stored.get_nmembers() != 2:
        return None
    names = [stored.get_member_name(i) for i in range(2)]
    parts = [_number(stored.get_member_type(i)) for i in range(2)]
    real = parts[0]
    if names != [b"r", b"i"] or real is None or parts[1] != real:
        return None
    packed = stored.get_member_offset(1) == real.itemsize and stored.get_size() == 2 * real.itemsize
    dtype = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}.get(
        real.dtype
    )
    return _Kind(dtype, 2 * real.itemsize, real.byteorder) if packed and dtype else None
