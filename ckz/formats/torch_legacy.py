"""Reader of what ``torch.save`` wrote before torch 1.6, and still does when asked.

Four pickles stand one after another: a magic number, a version, facts of the machine, and the
objects; a fifth lists the keys of the storages. Then comes each storage in that order: its number
of elements as 8 bytes, and the elements, all little-endian whatever the machine.
"""

from __future__ import annotations

from typing import Any

from ckz.checkpoint import ITEMSIZE
from ckz.errors import CorruptError, UnsupportedError
from ckz.formats.layout import Layout
from ckz.formats.pickles import Pickle, read_pickle
from ckz.formats.torch_objects import Storage, storage_dtypes, torch_layout
from ckz.source import Source

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_PICKLED = (_MAGIC.to_bytes(10, "little"), f"L{_MAGIC}L".encode())
_COUNT = 8


def sniff(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is one of this format."""
    start = head[:32]
    return any(number in start for number in _PICKLED) and start[:1] in (b"\x80", b"L")


def read(source: Source) -> Layout:
    """Find the storages and name the tensors.

    Raises
    ------
    CorruptError
        If the file ends early, a pickle is damaged, or a tensor leaves its storage.
    UnsupportedError
        If the format's version is not 1001.
    """
    objects, keys, at = _pickles(source)
    dtypes = storage_dtypes(objects)
    storages: dict[str, Storage] = {}
    for key in keys.value:
        if type(key) is not str or key not in dtypes or key in storages:
            raise CorruptError(f"{source.name}: its list of storages is damaged")
        nbytes = int.from_bytes(source.read(at, _COUNT), "little") * ITEMSIZE[dtypes[key]]
        at += _COUNT
        if at + nbytes > source.size:
            raise CorruptError(
                f"{source.name}: truncated: expected {at + nbytes} bytes at least, have "
                f"{source.size}; storage {key!r} is the first affected"
            )
        storages[key] = Storage(at, nbytes, nbytes)
        at += nbytes
    layout = torch_layout(source.name, {"": objects}, {"": storages})
    if at < source.size:
        return layout._replace(
            warnings=(*layout.warnings, f"{source.size - at} bytes follow its last storage")
        )
    return layout


def read_object(source: Source) -> Any:
    """Give the object that such a file describes, as inert records; errors are as ``read``'s."""
    return _pickles(source)[0].value


def _pickles(source: Source) -> tuple[Pickle, Pickle, int]:
    """Read the objects and the keys of the storages, and give where what follows begins."""
    at = 0
    pickles: list[Pickle] = []
    for _ in range(5):
        pickles.append(read_pickle(source, at))
        at += pickles[-1].end
    magic, version, _, objects, keys = pickles
    if magic.value != _MAGIC or version.value != _VERSION:
        raise UnsupportedError(f"{source.name}: is of an unknown version of torch's old format")
    if not isinstance(keys.value, list):
        raise CorruptError(f"{source.name}: its list of storages is damaged")
    return objects, keys, at
