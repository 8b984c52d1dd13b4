"""Directories that DeepSpeed writes: a folder a tag, files a rank, and ``latest`` beside the tags.

Files are told by their names, for their ranks are stated nowhere else. Ranks are numbers and not
text: 10 comes after 9.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

from ckz.errors import CkzError
from ckz.formats import torch_zip
from ckz.formats.cuts import cut, edges_of_tensors
from ckz.formats.deepspeed_zero import Found, find_parameters, shapes_of
from ckz.formats.layout import Directory
from ckz.formats.pickles import Call
from ckz.formats.ranks import fault, folder_and_name, missing_ranks
from ckz.source import open_source

_FORMAT = "deepspeed"
# Kinds of files; what precedes some of them is ``bf16_`` or nothing.
_NAMES = {
    "partition": "zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt",
    "shard": "zero_pp_rank_{}_mp_rank_{:02}_model_states.pt",
    "model": "mp_rank_{:02}_model_states.pt",
    "expert": "layer_{}_expert_{}_mp_rank_{:02}_model_states.pt",
    "expert optimizer": "expp_rank_{}_mp_rank_{:02}_optim_states.pt",
    "pipeline": "layer_{:02}-model_{:02}-model_states.pt",
}
_SUFFIX = "_states.pt"
_PATTERNS = {
    kind: re.compile(r"((?:bf16_|fp16_)?)" + re.sub(r"\{.*?\}", r"(\\d{1,9})", name))
    for kind, name in _NAMES.items()
}
_LATEST = "latest"
_SCRIPT = "zero_to_fp32.py"  # lies beside ``latest``
_MAX_TAG = 4096

# The files of one kind, by their numbers.
Places = dict[tuple[int, ...], int]
# Gives the object in a file.
Read = Callable[[int], Any]


class _Family(NamedTuple):
    """Files of one kind in one folder: their names differ in the numbers only."""

    kind: str
    prefix: str
    places: Places

    def name(self, numbers: tuple[int, ...]) -> str:
        """Give the path of one of them."""
        return self.prefix + _NAMES[self.kind].format(*numbers)


class _Stated(NamedTuple):
    """What the files of a tag say of the whole; 0 and nothing where they do not.

    Attributes
    ----------
    ranks, model_ranks : of data parallelism, and of model parallelism.
    experts : of each mixture-of-experts layer.
    partitioned : whether there is a ZeRO optimizer.
    """

    ranks: int
    model_ranks: int
    experts: tuple[int, ...]
    partitioned: bool


def arrange(found: Directory) -> Directory:
    """Map ZeRO's flat partitions to parameters, and say which files are missing."""
    tags = _tags(found)
    missing = list(_without_tag(found, tags.keys()))
    for folder, families in tags.items():
        read = functools.lru_cache(maxsize=2)(functools.partial(_read_object, found))
        absent = list(_missing(found, folder, families, _stated(found, families, read)))
        missing += absent
        found = _mapped(found, folder, families, read, whole=not absent)
    found = found._replace(missing=(*found.missing, *missing))
    return found._replace(format=_FORMAT) if tags or missing else found


def _tags(found: Directory) -> dict[str, list[_Family]]:
    """Find the folders of tags and the files in them."""
    tags: dict[str, dict[tuple[str, str], _Family]] = {}
    for place, file in enumerate(found.files):
        if file.kind == "dir" or not file.path.endswith(_SUFFIX):
            continue
        folder, name = folder_and_name(file.path)
        for kind, pattern in _PATTERNS.items():
            if match := pattern.fullmatch(name):
                prefix, *numbers = match.groups()
                families = tags.setdefault(folder, {})
                family = families.setdefault((kind, prefix), _Family(kind, folder + prefix, {}))
                family.places[tuple(map(int, numbers))] = place
    return {folder: list(families.values()) for folder, families in tags.items()}


def _without_tag(found: Directory, tags: Set[str]) -> Iterator[str]:
    """Find files ``latest`` that name a tag which is not there."""
    parents = {folder_and_name(tag[:-1])[0] for tag in tags if tag}
    for file in found.files:
        folder, name = folder_and_name(file.path)
        if name == _SCRIPT:
            parents.add(folder)
    for file in found.files:
        folder, name = folder_and_name(file.path)
        if name == _LATEST and file.kind == "file" and folder in parents:
            with open_source(found.root / file.path, file.path) as source:
                tag = source.read(0, min(_MAX_TAG, source.size)).decode(errors="replace").strip()
            if f"{folder}{tag}/" not in tags:
                yield f"{file.path!r} names the tag {tag[:99]!r}, which is missing"


def _read_object(found: Directory, place: int) -> Any:
    """Give the object in a torch file, as inert records; None if it cannot be read."""
    file = found.files[place]
    if file.kind != "file" or found.layouts[place].format != "torch":
        return None
    try:
        with open_source(found.root / file.path, file.path) as source:
            return torch_zip.read_object(source)
    except CkzError:
        return None


def _get(record: Any, key: str) -> Any:
    return record.get(key) if isinstance(record, Call) else None


def _number(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _stated(found: Directory, families: Sequence[_Family], read: Read) -> _Stated:
    """Ask one file of model states and one partition."""
    model = _first(found, families, "model", "shard")
    state = None if model is None else read(model)
    partition = _first(found, families, "partition")
    optimizer = None if partition is None else _get(read(partition), "optimizer_state_dict")
    counts = _get(optimizer, "partition_count")
    # One for each group of parameters; experts are shared by fewer ranks.
    ranks = max(map(_number, counts if isinstance(counts, list) else [counts]), default=0)
    experts = _get(state, "num_experts")
    return _Stated(
        ranks or _number(_get(state, "dp_world_size")),
        _number(_get(state, "mp_world_size")),
        tuple(map(_number, experts)) if isinstance(experts, list) else (),
        isinstance(_get(state, "param_shapes"), list | Call),
    )


def _first(found: Directory, families: Sequence[_Family], *kinds: str) -> int | None:
    """Give the place of the first file of some kinds that can be read."""
    places = (f.places[at] for f in families if f.kind in kinds for at in sorted(f.places))
    return next((place for place in places if not fault(found, place)), None)


def _model_states(families: Sequence[_Family], rank: int) -> int | None:
    """Give the place of the model states of one rank of model parallelism."""
    for family in families:
        if family.kind in ("model", "shard"):
            numbers = (rank,) if family.kind == "model" else (0, rank)
            if numbers in family.places:
                return family.places[numbers]
    return None


def _missing(
    found: Directory, folder: str, families: Sequence[_Family], stated: _Stated
) -> Iterator[str]:
    """Say which files of a tag are missing or hold nothing."""
    for family in families:
        for place in family.places.values():
            if reason := fault(found, place):
                yield f"{found.files[place].path!r} {reason}"
    kinds = {family.kind for family in families}
    if "partition" not in kinds and stated.partitioned:
        yield f"all files like {folder + _NAMES['partition'].format(0, 0)!r} are missing"
    if "partition" in kinds and kinds.isdisjoint(("model", "shard")):
        yield f"{folder + _NAMES['model'].format(0)!r} is missing"
    for family in families:
        if family.kind in ("partition", "shard"):
            sizes = stated.ranks, stated.model_ranks
            yield from missing_ranks(family.places, family.name, sizes)
        elif family.kind == "model":
            yield from missing_ranks(family.places, family.name, (stated.model_ranks,))
        elif family.kind == "expert":
            yield from _missing_experts(family, stated.experts)
        elif family.kind == "pipeline":  # not every layer has parameters, so not each has files
            ranks = 1 + max(rank for _, rank in family.places)
            for layer, present in _by_layer(family.places).items():
                yield from _missing_in_layer(family, layer, present, (ranks,))
        else:
            yield from missing_ranks(family.places, family.name)


def _missing_experts(family: _Family, experts: Sequence[int]) -> Iterator[str]:
    if len(set(experts)) < 2:
        sizes = len(experts), max(experts, default=0)
        yield from missing_ranks(family.places, family.name, sizes)
        return
    ranks = 1 + max(rank for *_, rank in family.places)
    present = _by_layer(family.places)
    for layer, count in enumerate(experts):
        yield from _missing_in_layer(family, layer, present.get(layer, set()), (count, ranks))


def _missing_in_layer(
    family: _Family, layer: int, present: Set[tuple[int, ...]], sizes: tuple[int, ...]
) -> Iterator[str]:
    yield from missing_ranks(present, lambda numbers: family.name((layer, *numbers)), sizes)


def _by_layer(places: Places) -> dict[int, set[tuple[int, ...]]]:
    layers: dict[int, set[tuple[int, ...]]] = {}
    for layer, *numbers in places:
        layers.setdefault(layer, set()).add(tuple(numbers))
    return layers


def _mapped(
    found: Directory, folder: str, families: Sequence[_Family], read: Read, *, whole: bool
) -> Directory:
    """Name the parameters in partitions, and cut flat storages between the tensors in them."""
    layouts = list(found.layouts)
    scattered = list(found.scattered)
    uncut = {place for family in families for place in family.places.values()}
    for family in families if whole else ():
        if family.kind != "partition":
            continue
        model_ranks = sorted({model for _, model in family.places})
        for model in model_ranks:
            part = f"mp_rank_{model:02}" if len(model_ranks) > 1 else ""
            prefix = "/".join(filter(None, (folder[:-1], part)))
            states = _model_states(families, model)
            ranks = [family.places[at] for at in sorted(family.places) if at[1] == model]
            result = _parameters(found, ranks, states, read, f"{prefix}:" if prefix else "")
            if isinstance(result, str):
                line = f"its parameters are not told apart: {result}"
                first = layouts[ranks[0]]
                layouts[ranks[0]] = first._replace(warnings=(*first.warnings, line))
                continue
            scattered += result.tensors
            for place, layout in result.layouts.items():
                layouts[place] = layout
                uncut.discard(place)
    for place in uncut:
        layouts[place] = cut(layouts[place], edges_of_tensors(layouts[place])).layout
    return found._replace(layouts=tuple(layouts), scattered=tuple(scattered))


def _parameters(
    found: Directory, ranks: Sequence[int], states: int | None, read: Read, prefix: str
) -> Found | str:
    """Map the partitions of one rank of model parallelism."""
    shapes = shapes_of(_get(None if states is None else read(states), "param_shapes"))
    if shapes is None:
        return "the model states do not give their shapes"
    optimizer = _get(read(ranks[0]), "optimizer_state_dict")
    paddings = _get(optimizer, "param_alignment_paddings")
    return find_parameters(
        [(place, found.layouts[place]) for place in ranks], shapes, paddings, prefix
    )
