"""What the ``.metadata`` of a distributed checkpoint says, read without executing its pickle.

For each tensor it has dtype, shape and the chunks that were saved; for each chunk and each other
object (by name, and by position in the tensor) a file, an offset and a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckz.errors import CorruptError, UnsupportedError
from ckz.formats.pickles import DICT, MAX_PICKLE, Call, Global, parse
from ckz.formats.torch_objects import dtype_of, shape_of
from ckz.source import Source

_MODULE = "torch.distributed.checkpoint"
_PROTOCOL = b"\x80"  # a pickle begins so

Position = tuple[int, ...]


class Saved(NamedTuple):
    """A tensor: ``chunks`` are the extents of each, by its position."""

    dtype: str
    shape: tuple[int, ...]
    chunks: dict[Position, tuple[int, ...]]


class Item(NamedTuple):
    """What lies at one place of a file.

    Attributes
    ----------
    name : of the tensor or object.
    start : position of the chunk in the tensor; None for an object.
    offset, length : in the file, in bytes.
    plain : whether no extension changed the bytes on their way into the file.
    """

    name: str
    start: Position | None
    offset: int
    length: int
    plain: bool


class Metadata(NamedTuple):
    """Tensors by name, and the items of each file."""

    tensors: dict[str, Saved]
    files: dict[str, list[Item]]


def read_metadata(source: Source) -> Metadata | None:
    """Read a metadata file; None if it is a file of another kind.

    Raises
    ------
    CorruptError, UnsupportedError
        If it is empty or damaged, or too large to be read.
    """
    if not source.size:
        raise CorruptError(f"{source.name}: is empty")
    if source.read(0, 1) != _PROTOCOL:
        return None
    if source.size > MAX_PICKLE:
        raise UnsupportedError(f"{source.name}: of {source.size} bytes is too large to be read")
    value = parse(source.read(0, source.size), source.name).value
    if not isinstance(value, Call) or value.func != Global(f"{_MODULE}.metadata", "Metadata"):
        return None
    tensors: dict[str, Saved] = {}
    for name, description in _pairs(_field(value, "state_dict_metadata")):
        if type(name) is str and _class_name(description) == "TensorStorageMetadata":
            tensors[name] = _saved(source.name, name, description)
    files: dict[str, list[Item]] = {}
    for index, info in _pairs(_field(value, "storage_data")):
        path, item = _item(source.name, index, info, tensors)
        files.setdefault(path, []).append(item)
    return Metadata(tensors, files)


def _field(value: Any, name: str) -> Any:
    """Give an attribute of an object that was pickled by its ``__dict__``."""
    state = value.state if isinstance(value, Call) else None
    return state.get(name) if isinstance(state, Call) and state.func == DICT else None


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    return value.pairs if isinstance(value, Call) else ()


def _class_name(value: Any) -> str:
    return value.func.name if isinstance(value, Call) and isinstance(value.func, Global) else ""


def _saved(file: str, name: str, description: Any) -> Saved:
    properties = _field(description, "properties")
    state = properties.state if isinstance(properties, Call) else None
    stated = state[0] if type(state) is tuple and state else _field(properties, "dtype")
    dtype, shape = dtype_of(stated), shape_of(_field(description, "size"))
    listed = _field(description, "chunks")
    boxes = [
        (shape_of(_field(chunk, "offsets")), shape_of(_field(chunk, "sizes")))
        for chunk in (listed if isinstance(listed, list) else (None,))
    ]
    chunks = [
        (start, extents)
        for start, extents in boxes
        if start is not None and extents is not None and _inside(start, extents, shape)
    ]
    if dtype is None or shape is None or len(chunks) < len(boxes):
        raise CorruptError(f"{file}: tensor {name!r} has no valid dtype, shape and chunks")
    return Saved(dtype, shape, dict(chunks))


def _inside(start: Position, extents: tuple[int, ...], shape: tuple[int, ...] | None) -> bool:
    """Whether a chunk lies in a tensor of this shape."""
    return (
        shape is not None
        and len(start) == len(extents) == len(shape)
        and all(a + n <= size for a, n, size in zip(start, extents, shape, strict=True))
    )


def _item(file: str, index: Any, info: Any, tensors: dict[str, Saved]) -> tuple[str, Item]:
    """Check an entry of the storage table; give the file that it speaks of, and what lies there."""
    name, path = _field(index, "fqn"), _field(info, "relative_path")
    offset, length = _field(info, "offset"), _field(info, "length")
    if type(name) is not str or type(path) is not str:
        raise CorruptError(f"{file}: its storage table is damaged")
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise CorruptError(f"{file}: item {name!r} has no valid offset and length")
    start: Position | None = None
    if name in tensors:
        stated = _field(index, "offset")
        start = (0,) * len(tensors[name].shape) if stated is None else shape_of(stated)
        if start not in tensors[name].chunks:
            raise CorruptError(f"{file}: item {name!r} is no chunk of its tensor")
    return path, Item(name, start, offset, length, not _field(info, "transform_descriptors"))
