"""Directories that ``torch.distributed.checkpoint`` writes: ``.metadata`` and ``*.distcp``.

A chunk of a tensor is a whole torch zip file inside of a ``.distcp`` file; what is no tensor is a
torch zip file too, or plain bytes. ``.metadata`` says what lies where. Ranks that save without
talking to each other each write a ``__RANK.metadata`` of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckz.checkpoint import Span, Tensor
from ckz.errors import CkzError, CorruptError
from ckz.formats import torch_zip, zips
from ckz.formats.dcp_metadata import Item, Metadata, Position, Saved, read_metadata
from ckz.formats.layout import Directory, Layout, Scattered
from ckz.formats.ranks import folder_and_name, lost
from ckz.source import Source, open_source

_METADATA = re.compile(r"(?:__(\d{1,9}))?\.metadata")
_SUFFIX = ".distcp"
_MAX_LISTED = 5
_FORMAT = "dcp"

# A chunk's file and the tensor that it is, by the whole tensor's name and the position in it.
Chunks = dict[tuple[str, Position], tuple[int, Tensor]]


class _Read(NamedTuple):
    """What was found in one file.

    Attributes
    ----------
    layout : its spans.
    chunks : parts of tensors.
    objects : tensors inside of what is none.
    bad : names of the items that could not be read, by what is wrong.
    """

    layout: Layout
    chunks: Chunks
    objects: list[Scattered]
    bad: dict[str, list[str]]


def arrange(found: Directory) -> Directory:
    """Give each tensor of distributed checkpoints as one, and say what is missing."""
    places = {file.path: place for place, file in enumerate(found.files) if file.kind != "dir"}
    saved = {folder_and_name(path)[0] for path in places if path.endswith(_SUFFIX)}
    described: set[str] = set()
    for path, place in places.items():
        folder, name = folder_and_name(path)
        match = _METADATA.fullmatch(name)
        if not match:
            continue
        metadata, reason = _metadata(found, place)
        if metadata is not None:
            prefix = f"{folder}__{match[1]}:" if match[1] else folder[:-1] + ":" * bool(folder)
            found = _described(found, places, place, metadata, prefix)
        elif reason and folder in saved:
            found = _noted(found, place, (), [reason])
        described.add(folder)
    unknown = sorted(saved - described)
    missing = tuple(f"'{folder}.metadata' is missing: the save did not end" for folder in unknown)
    return found._replace(missing=(*found.missing, *missing))


def _metadata(found: Directory, place: int) -> tuple[Metadata | None, str]:
    """Read a metadata file, or say why not; nothing is said of links."""
    file = found.files[place]
    if file.kind != "file":
        return None, ""
    try:
        with open_source(found.root / file.path, file.path) as source:
            return read_metadata(source), "is not what a distributed checkpoint has there"
    except CkzError as err:
        return None, f"cannot be read: {str(err).removeprefix(f'{file.path}: ')}"


def _noted(
    found: Directory, place: int, warnings: Sequence[str], missing: Sequence[str]
) -> Directory:
    """Add lines to what is said of one file."""
    layouts = list(found.layouts)
    layout = layouts[place]
    layouts[place] = layout._replace(
        warnings=(*layout.warnings, *warnings), missing=(*layout.missing, *missing)
    )
    return found._replace(layouts=tuple(layouts))


def _described(
    found: Directory, places: Mapping[str, int], place: int, metadata: Metadata, prefix: str
) -> Directory:
    """Give the tensors that one metadata file describes."""
    folder = folder_and_name(found.files[place].path)[0]
    layouts = list(found.layouts)
    chunks: Chunks = {}
    tensors: list[Scattered] = []
    warnings: list[str] = []
    missing: list[str] = []
    for path, items in metadata.files.items():
        # Only what is in the directory is opened, whatever the path says.
        held = places.get(folder + path)
        if reason := lost(found, held):
            missing.append(f"{path!r} {reason}; it should hold {_listed([i.name for i in items])}")
        elif held is None or found.files[held].kind != "file":
            continue  # a link to a file
        elif layouts[held].format == "safetensors":
            warnings.append(f"{path!r} is a safetensors file; its tensors have the names it gives")
        elif layouts[held].format == _FORMAT:
            missing.append(f"{path!r} is described by another metadata file too")
        else:
            read = _read_file(found, held, metadata, items)
            layouts[held] = read.layout
            chunks |= read.chunks
            tensors += read.objects
            missing += [f"{path!r} {why}: {_listed(names)}" for why, names in read.bad.items()]
    stored = {(item.name, item.start) for items in metadata.files.values() for item in items}
    for name, saved in metadata.tensors.items():
        here = [(name, start) for start in saved.chunks]
        if not stored.issuperset(here):
            missing.append(f"tensor {name!r}: a chunk of it is in no file")
        elif sum(map(math.prod, saved.chunks.values())) < math.prod(saved.shape):
            missing.append(f"tensor {name!r}: its chunks are not all of it")
        tensors += _joined(name, saved, [chunks[key] for key in here if key in chunks])
    named = [t._replace(tensor=t.tensor._replace(name=prefix + t.tensor.name)) for t in tensors]
    found = found._replace(
        format=_FORMAT, layouts=tuple(layouts), scattered=(*found.scattered, *named)
    )
    return _noted(found, place, warnings, missing)


def _joined(name: str, saved: Saved, chunks: Sequence[tuple[int, Tensor]]) -> Iterator[Scattered]:
    """Make one tensor of its chunks, if there are any; torch's lazy bits must be theirs alike."""
    transforms = {chunk.transform for _, chunk in chunks}
    if len(transforms) == 1:
        pieces = tuple(piece for _, chunk in chunks for piece in chunk.pieces)
        files = tuple(file for file, chunk in chunks for _ in chunk.pieces)
        tensor = Tensor(name, saved.dtype, saved.shape, pieces, "other", transforms.pop())
        yield Scattered(tensor, files)


def _read_file(found: Directory, place: int, metadata: Metadata, items: Sequence[Item]) -> _Read:
    """Read the items of one file, each a file of its own."""
    path = found.files[place].path
    needed = max(item.offset + item.length for item in items)
    spans: list[Span] = []
    read = _Read(Layout(_FORMAT), {}, [], {})
    warnings: dict[str, None] = {}
    end = 0
    with open_source(found.root / path, path) as source:
        for item in sorted(items, key=lambda item: item.offset):
            if item.offset + item.length > source.size:
                why = f"is truncated: it has {source.size} bytes of {needed}; it lacks"
                read.bad.setdefault(why, []).append(item.name)
                continue
            if item.offset < end:
                read.bad.setdefault("holds items that overlap", []).append(item.name)
                continue
            end = item.offset + item.length
            if not item.plain:
                warnings["items that an extension changed are kept as opaque bytes"] = None
                continue
            try:
                layout = _read_item(source.part(item.offset, item.length))
                _place(read, layout, len(spans), place, item, metadata)
            except CkzError as err:
                why = f"holds items that cannot be read ({str(err).removeprefix(f'{path}: ')})"
                read.bad.setdefault(why, []).append(item.name)
                continue
            if layout.missing:
                read.bad.setdefault("holds items without their values", []).append(item.name)
            spans.extend(s._replace(offset=s.offset + item.offset) for s in layout.spans)
            warnings.update(dict.fromkeys(layout.warnings))
    return read._replace(layout=Layout(_FORMAT, tuple(spans), (), tuple(warnings)))


def _read_item(source: Source) -> Layout:
    if not zips.sniff(source.read(0, min(4, source.size))):
        return Layout("opaque")
    return torch_zip.read_members(source, zips.members(source))


def _place(
    read: _Read, layout: Layout, first: int, file: int, item: Item, metadata: Metadata
) -> None:
    """Note the tensors of one item, whose spans are numbered from ``first`` on."""
    tensors = [
        tensor._replace(pieces=tuple(p._replace(span=p.span + first) for p in tensor.pieces))
        for tensor in layout.tensors
    ]
    if item.start is None:
        for tensor in tensors:
            named = tensor._replace(name=f"{item.name}.{tensor.name}")
            read.objects.append(Scattered(named, (file,) * len(tensor.pieces)))
        return
    saved = metadata.tensors[item.name]
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    if kinds != [(saved.dtype, saved.chunks[item.start])]:
        raise CorruptError("not the chunks of tensors that they should be")
    (chunk,) = tensors
    pieces = tuple(piece._replace(start=item.start) for piece in chunk.pieces)
    read.chunks[item.name, item.start] = file, chunk._replace(pieces=pieces)


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _MAX_LISTED} more" if len(distinct) > _MAX_LISTED else ""
    return ", ".join(map(repr, distinct[:_MAX_LISTED])) + more
