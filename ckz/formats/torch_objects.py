"""The tensors of a torch file: dtype, shape and place of each, checked against its storage.

Nothing here knows how a file holds its storages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckz.checkpoint import ITEMSIZE, MAX_RANK, Piece, Span, Tensor, coding_dtype
from ckz.errors import CorruptError
from ckz.formats.hyperparameters import numbers_of
from ckz.formats.layout import Layout, distinct
from ckz.formats.pickle_warnings import warnings_of
from ckz.formats.pickles import Call, Global, PersistentId, Pickle
from ckz.formats.torch_names import View, key_text, named_views

_MAX_INDEX = 1 << 63

_STORAGE_DTYPES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "QInt32Storage": "int32",
    "QInt8Storage": "int8",
    "QUInt2x4Storage": "uint8",
    "QUInt4x2Storage": "uint8",
    "QUInt8Storage": "uint8",
    "ShortStorage": "int16",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
}
_PACKED_STORAGES = ("QUInt2x4Storage", "QUInt4x2Storage")
# torch's other dtypes, by those that have the same bits.
_SAME_BITS = {
    **{f"int{bits}": "int8" for bits in range(1, 8)},
    **{f"uint{bits}": "uint8" for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8", "quint8"), "uint8"),
    "bits16": "uint16",
    "qint32": "int32",
    "qint8": "int8",
}
# fmt: off
_SAFE = frozenset({
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2", "torch.device", "torch.nn.parameter.Parameter",
    "torch.per_channel_affine", "torch.per_channel_affine_float_qparams",
    "torch.per_channel_symmetric", "torch.per_tensor_affine", "torch.per_tensor_symmetric",
    "torch.serialization._get_layout", "torch.storage.TypedStorage", "torch.storage.UntypedStorage",
})
# fmt: on

_MAX_METADATA = 16


class Storage(NamedTuple):
    """Where the values of a storage lie in the file.

    Attributes
    ----------
    offset, stored : of its bytes in the file.
    nbytes : its size; other than ``stored`` if the file compressed it.
    byteorder, packed, crc32 : as those of ``Span``.
    """

    offset: int
    stored: int
    nbytes: int
    byteorder: str = "<"
    packed: str = ""
    crc32: int = -1


def torch_layout(
    file: str, pickles: Mapping[str, Pickle], storages: Mapping[str, Mapping[str, Storage]]
) -> Layout:
    """Give a torch file's storages as spans, and name its tensors.

    Parameters
    ----------
    file : what errors call it.
    pickles : those that describe tensors, by the prefix of the names; ``""`` in most files.
    storages : by the same prefixes, and by key.

    Raises
    ------
    CorruptError
        If a tensor leaves its storage, or its description makes no sense.
    """
    held = sorted(
        (storage.offset, prefix, key)
        for prefix, table in storages.items()
        for key, storage in table.items()
        if storage.nbytes
    )
    places = {(prefix, key): place for place, (_, prefix, key) in enumerate(held)}
    tensors: list[Tensor] = []
    views: list[list[Tensor]] = [[] for _ in held]
    missing: dict[str, None] = {}
    for prefix, pickle in pickles.items():
        for name, view in named_views(file, pickle.value, prefix):
            key = _storage_key(view.storage)
            if key is None:
                continue
            if key not in storages[prefix]:
                missing[f"tensor {name!r}: its storage {key!r} is missing"] = None
                continue
            place = places.get((prefix, key), -1)
            tensor = _tensor(file, name, view, storages[prefix][key].nbytes, place)
            tensors.append(tensor)
            if tensor.pieces:
                views[place].append(tensor)
    dtypes: dict[str, dict[str, str]] = {}
    spans = []
    for place, (_, prefix, key) in enumerate(held):
        storage = storages[prefix][key]
        if not views[place]:
            if prefix not in dtypes:
                dtypes[prefix] = storage_dtypes(pickles[prefix]) if prefix in pickles else {}
            name = f"{prefix}.storage.{key}" if prefix else f"storage.{key}"
            dtype = dtypes[prefix].get(key, "bytes")
            views[place].append(_unviewed(name, dtype, storage, place))
            tensors.append(views[place][0])
        spans.append(_span(storage, coding_dtype(views[place])))
    return Layout(
        "torch",
        tuple(spans),
        tuple(distinct(tensors)),
        tuple(
            line for pickle in pickles.values() for line in warnings_of(pickle.globals, _is_safe)
        ),
        tuple(missing),
        tuple(number for pickle in pickles.values() for number in numbers_of(pickle.value)),
    )


def storage_dtypes(pickle: Pickle) -> dict[str, str]:
    """Give the dtype that each storage of a pickle has by its class, by key."""
    found = {}
    for persistent in pickle.persistent_ids:
        key = _storage_key(persistent)
        if key is not None:
            found[key] = _STORAGE_DTYPES[persistent.value[1].name]
    return found


def _is_safe(name: Global) -> bool:
    """Whether ``torch.load(weights_only=True)`` lets a file name it."""
    if str(name) in _SAFE:
        return True
    if name.module == "torch._utils":
        return name.name.startswith("_rebuild_")
    is_tensor = name.name.endswith(("Storage", "Tensor"))
    return (name.module == "torch" and (is_tensor or dtype_of(name) is not None)) or (
        name.module in ("torch.cuda", "torch.sparse", "torch.cuda.sparse") and is_tensor
    )


def dtype_of(name: Any) -> str | None:
    """Give the dtype that a global of the module ``torch`` stands for."""
    if not isinstance(name, Global) or name.module != "torch":
        return None
    dtype = _SAME_BITS.get(name.name, name.name)
    return dtype if dtype in ITEMSIZE and dtype != "bytes" else None


def _storage_key(persistent: Any) -> str | None:
    """Give the key of the storage that a persistent id stands for."""
    if not isinstance(persistent, PersistentId):
        return None
    value = persistent.value
    if type(value) is not tuple or len(value) < 5 or value[0] not in ("storage", b"storage"):
        return None
    if not isinstance(value[1], Global) or value[1].name not in _STORAGE_DTYPES:
        return None
    key = value[2]
    if type(key) is bytes:
        return key.decode("latin-1")
    return key if type(key) is str else key_text(key)


def _tensor(file: str, name: str, view: View, nbytes: int, place: int) -> Tensor:
    """Check a view and place it in its storage, the span ``place`` of ``nbytes`` bytes."""
    persistent, storage_type = view.storage.value, view.storage.value[1].name
    class_dtype = _STORAGE_DTYPES[storage_type]
    dtype = class_dtype if view.dtype is None else dtype_of(view.dtype)
    if dtype is None:
        raise CorruptError(f"{file}: tensor {name!r} is of an unknown dtype")
    shape, strides, offset, start = _sizes(view.shape), _sizes(view.strides), view.offset, 0
    if storage_type in _PACKED_STORAGES:
        # Several elements a byte and no strides between them: all bytes, as they lie.
        shape, strides, offset = (nbytes,), (1,), 0
    if len(persistent) > 5 and persistent[5] is not None:
        start, nbytes = _part(file, name, persistent[5], ITEMSIZE[class_dtype], nbytes)
    numbers = (*shape, *strides, offset)
    if len(shape) != len(strides) or not _are_indices(numbers):
        raise CorruptError(f"{file}: tensor {name!r} has no valid shape, strides and offset")
    if len(shape) > MAX_RANK or math.prod(shape) >= _MAX_INDEX:
        raise CorruptError(f"{file}: tensor {name!r} has more elements or dimensions than can be")
    transform = "" if view.metadata is None else _transform(view.metadata)
    if 0 in shape:
        return Tensor(name, dtype, shape, (), "other", transform)
    itemsize = ITEMSIZE[dtype]
    last = offset
    for extent, stride in zip(shape, strides, strict=True):
        last += (extent - 1) * stride
    if (last + 1) * itemsize > nbytes:
        raise CorruptError(
            f"{file}: tensor {name!r} needs {(last + 1) * itemsize} bytes of a storage of {nbytes}"
        )
    piece = Piece(place, start + offset * itemsize, shape, strides, (0,) * len(shape))
    return Tensor(name, dtype, shape, (piece,), "other", transform)


def _part(file: str, name: str, part: Any, itemsize: int, nbytes: int) -> tuple[int, int]:
    """Give start and size, in bytes, of a storage that is a part of another one."""
    if type(part) is tuple and len(part) == 3 and _are_indices(part[1:]):
        start, size = part[1] * itemsize, part[2] * itemsize
        if start + size <= nbytes:
            return start, size
    raise CorruptError(f"{file}: tensor {name!r} lies in a part outside of its storage")


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Give the shape that a ``torch.Size``, a tuple or a list in a pickle stands for, if any."""
    sizes = _sizes(value)
    if len(sizes) > MAX_RANK or not _are_indices((*sizes, 0)) or math.prod(sizes) >= _MAX_INDEX:
        return None
    return sizes


def _sizes(value: Any) -> tuple[Any, ...]:
    """Give a shape as a tuple; some files hold ``torch.Size`` or a list."""
    if type(value) is tuple:
        return value
    if isinstance(value, Call) and value.args:
        value = value.args[0]
    return tuple(value) if isinstance(value, list | tuple) else (None,)


def _are_indices(values: tuple[Any, ...]) -> bool:
    return set(map(type, values)) <= {int} and min(values) >= 0 and max(values) < _MAX_INDEX


def _transform(metadata: Any) -> str:
    # Real metadata have two entries; to search thousands for each tensor would take for ever.
    if isinstance(metadata, Call) and len(metadata.pairs) <= _MAX_METADATA:
        for bit in ("conj", "neg"):
            if metadata.get(bit) is True:
                return bit
    return ""


def _unviewed(name: str, dtype: str, storage: Storage, place: int) -> Tensor:
    """Make a tensor of a storage that no name leads to."""
    if storage.nbytes % ITEMSIZE[dtype]:
        dtype = "bytes"
    count = storage.nbytes // ITEMSIZE[dtype]
    return Tensor(name, dtype, (count,), (Piece(place, 0, (count,), (1,), (0,)),))


def _span(storage: Storage, dtype: str) -> Span:
    if storage.packed or storage.stored % ITEMSIZE[dtype]:
        dtype = "bytes"
    offset, stored, _, byteorder, packed, crc32 = storage
    return Span(0, offset, stored, dtype, byteorder, packed, crc32)
