"""Reader of what ``torch.save`` writes since torch 1.6: a zip of a pickle and the storages.

``NAME/data.pkl`` describes the objects, ``NAME/data/K`` holds the bytes of storage K, aligned and
not compressed, ``NAME/byteorder`` says ``little`` or ``big``. A TorchScript archive has tensors in
``NAME/constants.pkl`` and ``NAME/constants/K`` besides. A file that was zipped again by other
means may hold them compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ckz.errors import CorruptError, UnsupportedError
from ckz.formats import zips
from ckz.formats.layout import Layout
from ckz.formats.pickles import MAX_PICKLE, Pickle, parse
from ckz.formats.torch_objects import Storage, torch_layout
from ckz.formats.zips import DEFLATED, STORED, Member
from ckz.source import Source

_PICKLE = "data.pkl"
_BYTEORDERS = {b"little": "<", b"big": ">"}


def holds_torch(members: Sequence[Member]) -> bool:
    """Whether a zip file of these members is one that torch wrote."""
    return any(member.name.rpartition("/")[2] == _PICKLE for member in members)


def read_members(source: Source, members: Sequence[Member]) -> Layout:
    """Find the storages of a torch zip file and name its tensors.

    Parameters
    ----------
    source : the zip file.
    members : all that it holds.

    Raises
    ------
    CorruptError
        If the zip file or a pickle in it is damaged, or a tensor leaves its storage.
    UnsupportedError
        If a member is compressed otherwise than by deflate.
    """
    table = {member.name: member for member in members}
    root = _root(source, table)
    byteorder = _byteorder(source, table.get(f"{root}byteorder"))
    warnings: list[str] = []
    pickles: dict[str, Pickle] = {}
    for prefix, record in (("", _PICKLE), ("constants", "constants.pkl")):
        if f"{root}{record}" in table:
            try:
                pickles[prefix] = _pickle(source, table[f"{root}{record}"])
            except UnsupportedError as err:  # the storages are there all the same, without names
                warnings.append(str(err).removeprefix(f"{source.name}: "))
    storages: dict[str, dict[str, Storage]] = {"": {}, "constants": {}}
    prefixes = {f"{root}data": "", f"{root}constants": "constants"}
    for member in members:
        folder, _, key = member.name.rpartition("/")
        if key and folder in prefixes:
            storages[prefixes[folder]][key] = _storage(source, member, byteorder)
    layout = torch_layout(source.name, pickles, storages)
    return layout._replace(warnings=(*warnings, *layout.warnings))


def read_object(source: Source) -> Any:
    """Give the object that a torch zip file's pickle describes, as inert records.

    Raises
    ------
    CorruptError, UnsupportedError
        As ``read_members``, and if the file is no such zip.
    """
    table = {member.name: member for member in zips.members(source)}
    return _pickle(source, table[_root(source, table) + _PICKLE]).value


def _root(source: Source, table: Mapping[str, Member]) -> str:
    """Give the folder that all members of torch's lie in."""
    pickled = [name for name in table if name.rpartition("/")[2] == _PICKLE]
    if not pickled:
        raise UnsupportedError(f"{source.name}: a zip file without {_PICKLE} is not torch's")
    return min(pickled, key=lambda name: (name.count("/"), name)).removesuffix(_PICKLE)


def _storage(source: Source, member: Member, byteorder: str) -> Storage:
    if member.method not in (STORED, DEFLATED):
        raise UnsupportedError(
            f"{source.name}: member {member.name!r} is compressed by method {member.method}, "
            "which is not read"
        )
    packed = "deflate" if member.method == DEFLATED else ""
    return Storage(member.offset, member.stored, member.nbytes, byteorder, packed, member.crc32)


def _byteorder(source: Source, member: Member | None) -> str:
    text = b"little" if member is None else _unpacked(source, member, 16)
    if text not in _BYTEORDERS:
        raise CorruptError(f"{source.name}: its byte order {text!r} is neither little nor big")
    return _BYTEORDERS[text]


def _pickle(source: Source, member: Member) -> Pickle:
    return parse(_unpacked(source, member, MAX_PICKLE), source.name)


def _unpacked(source: Source, member: Member, limit: int) -> bytes:
    """Read a member that is no storage.

    Raises
    ------
    CorruptError
        If its bytes are not those that the zip directory states.
    UnsupportedError
        If it is larger than ``limit``.
    """
    what = f"{source.name}: member {member.name!r}"
    if member.nbytes > limit:
        raise UnsupportedError(f"{what} of {member.nbytes} bytes is too large to be read")
    data = source.read(member.offset, member.stored)
    if member.method == DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.nbytes)
        except zlib.error as err:
            raise CorruptError(f"{what} is damaged: {err}") from err
    elif member.method != STORED:
        raise UnsupportedError(f"{what} is compressed by method {member.method}, which is not read")
    if len(data) != member.nbytes or zlib.crc32(data) != member.crc32:
        raise CorruptError(f"{what} is damaged: its CRC-32 does not match")
    return data
