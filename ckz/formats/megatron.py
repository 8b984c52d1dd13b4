"""Directories that Megatron-LM writes: ``iter_0000020/mp_rank_01_003/model_optim_rng.pt``, ...

There is a folder for each rank of tensor, pipeline and expert parallelism, and beside the
iterations ``latest_checkpointed_iteration.txt``, which says where to go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

from ckz.errors import CkzError
from ckz.formats import torch_zip
from ckz.formats.cuts import cut, edges_of_tensors
from ckz.formats.layout import Directory
from ckz.formats.pickles import Call
from ckz.formats.ranks import fault, folder_and_name, missing_ranks
from ckz.source import open_source

_RANK = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?(?:_(\d{3,9}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt", "optim.pt")
_TRACKER = "latest_checkpointed_iteration.txt"
_MAX_TRACKER = 4096
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


class _Kind(NamedTuple):
    """Files that each rank of an iteration has one of; ``numbers`` a rank has."""

    folder: str
    name: str
    numbers: int


# The files of a kind, by rank.
Grids = dict[_Kind, dict[tuple[int, ...], int]]


def arrange(found: Directory) -> Directory:
    """Name tensors by rank and not by file, and say which ranks and iterations are missing."""
    grids = _grids(found)
    missing = [*_without_iteration(found), *_missing(found, grids)]
    if not grids:
        return found._replace(missing=(*found.missing, *missing))
    layouts = list(found.layouts)
    named = set(found.named)
    places = [place for grid in grids.values() for place in grid.values()]
    alone = sum(bool(layout.tensors) for layout in layouts) == 1
    taken: set[str] = set()
    for place in places:
        layout = cut(layouts[place], edges_of_tensors(layouts[place])).layout
        folder = folder_and_name(found.files[place].path)[0][:-1]
        tensors = tuple(t._replace(name=f"{folder}:{t.name}") for t in layout.tensors)
        names = {tensor.name for tensor in tensors}
        if not alone and taken.isdisjoint(names):
            layout = layout._replace(tensors=tensors)
            named.add(place)
            taken |= names
        layouts[place] = layout
    return found._replace(
        layouts=tuple(layouts),
        format="megatron",
        named=frozenset(named),
        missing=(*found.missing, *missing),
    )


def _grids(found: Directory) -> Grids:
    """Find the files of all ranks."""
    grids: Grids = {}
    for place, file in enumerate(found.files):
        folder, name = folder_and_name(file.path)
        iteration, rank = folder_and_name(folder[:-1])
        match = _RANK.fullmatch(rank)
        if match and name in _FILES and file.kind != "dir":
            numbers = tuple(int(number) for number in match.groups() if number)
            kind = _Kind(iteration, name, len(numbers))
            grids.setdefault(kind, {})[numbers] = place
    return grids


def _missing(found: Directory, grids: Grids) -> Iterator[str]:
    """Say which ranks lack a file that others have, or have nothing in it."""
    ranks: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for (folder, _, numbers), grid in grids.items():
        ranks.setdefault((folder, numbers), set()).update(grid)
    for (folder, name, numbers), grid in grids.items():
        faults = {place: fault(found, place) for place in grid.values()}
        for place, reason in faults.items():
            if reason:
                yield f"{found.files[place].path!r} {reason}"
        good = next((place for place, reason in faults.items() if not reason), None)
        stated = () if good is None else _sizes(found, good, numbers)
        highest = [max(column) + 1 for column in zip(*ranks[folder, numbers], strict=True)]
        sizes = list(map(max, zip(highest, stated or highest, strict=True)))
        yield from missing_ranks(grid, partial(_path, folder, name), sizes)


def _path(folder: str, name: str, rank: tuple[int, ...]) -> str:
    first, *others = rank
    return f"{folder}mp_rank_{first:02}{''.join(f'_{number:03}' for number in others)}/{name}"


def _sizes(found: Directory, place: int, numbers: int) -> tuple[int, ...]:
    """Give the sizes of the grid that a file states; nothing if it does not."""
    file = found.files[place]
    if file.kind != "file" or found.layouts[place].format != "torch":
        return ()
    try:
        with open_source(found.root / file.path, file.path) as source:
            value = torch_zip.read_object(source)
    except CkzError:
        return ()
    arguments = value.get("args") if isinstance(value, Call) else None
    state = arguments.state if isinstance(arguments, Call) else None
    sizes = [state.get(key, 1) if isinstance(state, Call) else 1 for key in _SIZES]
    if any(type(size) is not int or size < 1 for size in sizes):
        return ()
    # Of pipeline and expert parallelism a rank has a number only if there is more than one.
    given = (sizes[0], *(size for size in sizes[1:] if size > 1))
    return given if len(given) == numbers else ()


def _without_iteration(found: Directory) -> Iterator[str]:
    """Find trackers that name an iteration which is not there."""
    trackers = [file for file in found.files if folder_and_name(file.path)[1] == _TRACKER]
    if not trackers:
        return
    held = {file.path for file in found.files if file.kind == "link"}
    held.update(str(parent) for f in found.files for parent in PurePosixPath(f.path).parents)
    for file in trackers:
        if file.kind != "file":
            continue
        with open_source(found.root / file.path, file.path) as source:
            text = source.read(0, min(_MAX_TRACKER, source.size)).decode(errors="replace").strip()
        iteration = f"iter_{int(text):07}" if text.isdecimal() and len(text) < 10 else text
        if not iteration or folder_and_name(file.path)[0] + iteration not in held:
            yield f"{file.path!r} names the iteration {text[:99]!r}, which is missing"
