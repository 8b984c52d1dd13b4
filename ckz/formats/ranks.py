"""Checkpoints of which each rank wrote its own files: which of them are not there, or no good."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence

from ckz.formats.layout import Directory

_MAX_LISTED = 20


def missing_ranks(
    present: Collection[tuple[int, ...]],
    name: Callable[[tuple[int, ...]], str],
    sizes: Sequence[int] = (),
) -> Iterator[str]:
    """Say which files of a grid of ranks are missing.

    Parameters
    ----------
    present : the coordinates of those that are there; not empty.
    name : gives the file's name.
    sizes : of the grid, where the checkpoint states them; it is no smaller than what is there.
    """
    there = set(present)
    highest = [max(column) + 1 for column in zip(*there, strict=True)]
    grid = [max(pair) for pair in itertools.zip_longest(highest, sizes, fillvalue=0)]
    count = math.prod(grid)
    # A file's name may claim a grid of any size: no more of it is walked than has to be.
    walked = (_coordinates(number, grid) for number in range(min(count, len(there) + _MAX_LISTED)))
    for at in itertools.islice((at for at in walked if at not in there), _MAX_LISTED):
        yield f"{name(at)!r} is missing"
    more = count - len(there) - _MAX_LISTED
    if more > 0:
        yield f"{more} more files like {name(_coordinates(count - 1, grid))!r} are missing"


def _coordinates(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    at = []
    for size in reversed(grid):
        number, place = divmod(number, size)
        at.append(place)
    return tuple(reversed(at))


def lost(found: Directory, place: int | None) -> str:
    """Say whether a file that should hold something does not: ``is missing``, ``is empty``."""
    if place is None:
        return "is missing"
    file = found.files[place]
    if file.kind == "link":
        return "" if (found.root / file.path).exists() else "is missing"
    return "" if file.size else "is empty"


def fault(found: Directory, place: int | None) -> str:
    """Say what is wrong with a file that should hold tensors; nothing if nothing is."""
    unread = place is not None and found.layouts[place].format == "opaque"
    return lost(found, place) or ("cannot be read" if unread else "")


def folder_and_name(path: str) -> tuple[str, str]:
    """Split a path at its last slash, which stays with the folder."""
    name = path.rpartition("/")[2]
    return path.removesuffix(name), name
