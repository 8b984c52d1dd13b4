"""Models in several files: ``model-00001-of-00003.safetensors``, ..., and an index of them.

The index, ``*.index.json``, has a ``weight_map`` from each tensor's name to the file that holds it.
Loaders have served models with shards missing, so everything that does not hold is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from ckz.formats.layout import Directory, Layout

_INDEX = ".index.json"
_MAX_INDEX = 64 << 20
_SHARD = re.compile(r"(.+)-(\d{1,5})-of-(\d{1,5})(\.\w+)")


class _Model(NamedTuple):
    """The shards of one model: their places among the files, and what is wrong with them.

    ``owners`` are the places that the index gives for tensors.
    """

    shards: tuple[int, ...]
    owners: Mapping[str, int]
    missing: tuple[str, ...]


def arrange(found: Directory) -> Directory:
    """Give the tensors of sharded models the names that the model has, and say what is missing."""
    models = list(_indexed(found))
    known = {shard for model in models for shard in model.shards}
    models.extend(_numbered(found, known))
    layouts = list(found.layouts)
    missing = list(found.missing)
    taken: set[str] = set()
    for model in models:
        renamed, twice = _named(found, model, taken)
        for place, layout in renamed.items():
            layouts[place] = layout
            taken.update(tensor.name for tensor in layout.tensors)
        missing.extend((*model.missing, *twice))
    if not models:
        return found
    named = found.named.union(*(model.shards for model in models))
    return found._replace(
        layouts=tuple(layouts), format="hf-sharded", named=named, missing=tuple(missing)
    )


def _indexed(found: Directory) -> Iterator[_Model]:
    """Find the models that have an index."""
    places = {file.path: place for place, file in enumerate(found.files) if file.kind != "dir"}
    for path in places:
        weight_map = _weight_map(found, places[path]) if path.endswith(_INDEX) else None
        if weight_map is None:
            continue
        folder = path.removesuffix(path.rpartition("/")[2])
        held: dict[str, set[str] | None] = {}
        missing: list[str] = []
        for shard in dict.fromkeys(weight_map.values()):
            held[shard] = None
            place = places.get(folder + shard)
            if place is None or not (found.root / folder / shard).exists():
                missing.append(f"{path}: shard {shard!r} is missing")
            elif found.layouts[place].format == "opaque":
                missing.append(f"{path}: shard {shard!r} cannot be read")
            elif found.files[place].kind == "file":
                held[shard] = {tensor.name for tensor in found.layouts[place].tensors}
        for name, shard in weight_map.items():
            names = held[shard]
            if names is not None and name not in names:
                missing.append(f"{path}: tensor {name!r} is not in shard {shard!r}")
        owners = {
            name: places[folder + shard]
            for name, shard in weight_map.items()
            if folder + shard in places
        }
        yield _Model(tuple(dict.fromkeys(owners.values())), owners, tuple(missing))


def _weight_map(found: Directory, place: int) -> dict[str, str] | None:
    """Read an index; None if the file is not one."""
    file = found.files[place]
    if file.kind != "file" or file.size > _MAX_INDEX:
        return None
    try:
        index = json.loads((found.root / file.path).read_bytes())
    except (ValueError, RecursionError):
        return None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        return None
    return {name: shard for name, shard in weight_map.items() if isinstance(shard, str)}


def _numbered(found: Directory, known: Set[int]) -> Iterator[_Model]:
    """Find the models whose files are numbered, but that have no index."""
    models: dict[tuple[str, str, str], dict[int, int]] = {}
    for place, file in enumerate(found.files):
        match = _SHARD.fullmatch(file.path)
        if match and place not in known and found.layouts[place].tensors:
            stem, number, count, suffix = match.groups()
            models.setdefault((stem, count, suffix), {})[int(number)] = place
    for (stem, count, suffix), shards in models.items():
        first = 0 if 0 in shards else 1
        absent = [n for n in range(first, first + int(count)) if n not in shards]
        missing = tuple(
            f"shard '{stem}-{number:0{len(count)}}-of-{count}{suffix}' is missing"
            for number in absent
        )
        yield _Model(tuple(shards.values()), {}, missing)


def _named(
    found: Directory, model: _Model, taken: Set[str]
) -> tuple[dict[int, Layout], tuple[str, ...]]:
    """Name the tensors of one model; also say which are there twice.

    Where the index has a name for one shard, a tensor of that name in another is told apart by
    its file; so are all tensors of a model of whose names another model has one.
    """
    holders: dict[str, int] = {}
    twice: list[str] = []
    for shard in model.shards:
        for tensor in found.layouts[shard].tensors:
            other = holders.setdefault(tensor.name, model.owners.get(tensor.name, shard))
            if other != shard and tensor.name not in model.owners:
                files = f"{found.files[other].path} and {found.files[shard].path}"
                twice.append(f"duplicate tensor {tensor.name!r} in {files}")
    if not taken.isdisjoint(holders):
        holders = {}
    layouts = {}
    for shard in model.shards:
        layout, path = found.layouts[shard], found.files[shard].path
        layouts[shard] = layout._replace(
            tensors=tuple(
                tensor
                if holders.get(tensor.name) == shard
                else tensor._replace(name=f"{path}:{tensor.name}")
                for tensor in layout.tensors
            )
        )
    return layouts, tuple(twice)
