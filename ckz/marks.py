"""What is said about checkpoints of a directory: pins, tags, pointers, metrics, the best one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckz.chain import open_snapshot
from ckz.errors import CkzError
from ckz.metrics import STATE, best_in_state, metrics_in_name, metrics_in_state, read_json
from ckz.pointers import find_pointers
from ckz.pruning import Saved
from ckz.store import PIN

TAGS = ".tags"
_LARGEST = 1 << 28


class Marks(NamedTuple):
    """What is said about saved states, by name.

    Attributes
    ----------
    metrics : metric -> value.
    tags : of each, from its tag file.
    pinned : why it stays as it is, whatever the policy.
    warnings : one line each.
    """

    metrics: Mapping[str, Mapping[str, float]]
    tags: Mapping[str, Sequence[str]]
    pinned: Mapping[str, Sequence[str]]
    warnings: Sequence[str]


def find_marks(
    root: Path, saved: Sequence[Saved], own: Mapping[str, Mapping[str, float]] | None = None
) -> Marks:
    """Find what is said about saved states.

    Parameters
    ----------
    saved : oldest first.
    own : metrics that the user gives, by name or step.
    """
    state = _newest_state(root, saved)
    logged, best = metrics_in_state(state), best_in_state(state)
    names = {entry.name: s.name for s in saved for entry in s.entries}
    pointers = find_pointers(root, names)
    metrics: dict[str, dict[str, float]] = {}
    tags: dict[str, list[str]] = defaultdict(list)
    pinned: dict[str, list[str]] = defaultdict(list)
    for s in saved:
        found = dict(logged.get(s.step, {})) if s.step is not None else {}
        for entry in s.entries:
            found |= metrics_in_name(entry.name)
        for key in (str(s.step), s.name, *(e.name for e in s.entries)):
            found |= (own or {}).get(key, {})
        metrics[s.name] = found
        for entry in s.entries:
            if _beside(root, entry.name, PIN) is not None:
                pinned[s.name].append("pinned")
            tags[s.name] += (_beside(root, entry.name, TAGS) or "").split()
        if best and best in (e.name.removesuffix(".ckz") for e in s.entries):
            pinned[s.name].append("the trainer's best")
    for entry_name, why in pointers.to.items():
        pinned[names[entry_name]] += [f"{name} points to it" for name in why]
    merged = {name: list(dict.fromkeys(why)) for name, why in pinned.items()}
    return Marks(metrics, tags, merged, pointers.warnings)


def _beside(root: Path, name: str, mark: str) -> str | None:
    """Read a mark inside a directory, or beside a file or a .ckz under its name."""
    path = root / name
    for place in (path / mark, path.with_name(f"{path.name.removesuffix('.ckz')}{mark}")):
        try:
            with place.open(errors="replace") as file:
                return file.read(1 << 16)
        except OSError:
            continue
    return None


def _newest_state(root: Path, saved: Sequence[Saved]) -> Any:
    """Read what a Hugging Face trainer wrote last: its log is of all steps so far."""
    for s in reversed([s for s in saved if not s.fault]):
        for entry in s.entries:
            path = root / entry.name
            found = _packed_state(path) if entry.packed else read_json(path / STATE)
            if found is not None:
                return found
        if not any(e.packed for e in s.entries) and not (root / s.name).is_dir():
            break  # files have none
    return None


def _packed_state(path: Path) -> Any:
    try:
        with open_snapshot(path) as snapshot:
            for number, file in enumerate(snapshot.checkpoint.files):
                if file.path == STATE and file.size <= _LARGEST:
                    data = np.empty(file.size, np.uint8)
                    snapshot.read_skeleton(number, 0, data)
                    return json.loads(data.tobytes())
    except (CkzError, OSError, ValueError, RecursionError):
        pass
    return None
