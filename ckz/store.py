"""What is in a directory of checkpoints: steps, times, what is complete, what leans on what.

A directory's *entries* are the checkpoints in it: files and directories of every layout that ckz
reads, and .ckz files. Entries of one step, such as a checkpoint and its .ckz or a model and its
optimizer beside it, are one *saved* state. What is not known to be a checkpoint is no entry; what
has no number of its own, such as ``best.pt``, is never counted and never touched.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

from ckz.checkpoint import Checkpoint, uncollected
from ckz.container import Container
from ckz.container_read import is_container, open_container
from ckz.errors import CkzError
from ckz.formats import read_checkpoint
from ckz.retrying import retried
from ckz.steps import step_of, step_of_name

Digests = npt.NDArray[Any]

PIN = ".keep"
TRASH = ".ckz-trash-"
# Names that trainers give to what they have not finished.
_UNFINISHED = re.compile(
    r"(?:^|[._-])(?:tmp|temp|part|partial|incomplete|unfinished|writing)(?:[._-]|\d*$)", re.I
)
_DIGITS = re.compile(r"\d+")
# A folder that is only the first half of a name: ``epoch=1-val/loss=0.3.ckpt``.
_HALF = re.compile(r"\w=")


@dataclass(frozen=True)
class Entry:
    """One file or directory that is a checkpoint.

    Attributes
    ----------
    name : path below the directory.
    step : by its own name, or by what it says; None if it has none.
    numbered : whether that step is from its name, which has siblings of its kind.
    time : when it was saved, in seconds since 1970; of a .ckz when its source was.
    changed : when it was last written to.
    nbytes : on disk.
    fault : why it is not complete; empty if it is.
    packed : whether it is a .ckz.
    preset, resumable : of a .ckz.
    base : of a .ckz, the entries it can be restored from; one of them is enough.
    full_nbytes : of a .ckz, about what it would take without its base.
    states_nbytes : of optimizer states and masters in it, uncompressed.
    """

    name: str
    step: int | None
    numbered: bool
    time: float
    changed: float
    nbytes: int
    fault: str = ""
    packed: bool = False
    preset: str = "exact"
    resumable: bool = True
    base: tuple[str, ...] = ()
    full_nbytes: int = 0
    states_nbytes: int = 0

    @property
    def kind(self) -> str:
        """Its name without numbers, which its siblings share; a .ckz is of its source's."""
        return _kind(self.name)


def list_entries(root: Path, *, marker: str | None = None) -> list[Entry]:
    """List the checkpoints in a directory; what vanishes meanwhile is left out.

    Parameters
    ----------
    marker : name of a file that a complete directory has.
    """
    with uncollected():
        looked = [(name, _look(root, name, marker)) for name in _names(root, "")]
    entries = _find_bases({name: seen for name, seen in looked if seen is not None})
    entries = _numbered(_lacking(root, entries))
    return sorted(entries, key=lambda e: (e.step is None, e.step or 0, e.name))


def _names(root: Path, folder: str) -> Iterator[str]:
    """Name what may be a checkpoint: all that is not hidden and no link."""
    try:
        entries = retried(lambda: sorted(os.scandir(root / folder), key=lambda e: e.name))
    except FileNotFoundError:
        return
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        inside = _files(entry.path)
        halves = bool(inside) and all("=" in name for name in inside)
        if not folder and halves and _HALF.search(entry.name):
            yield from _names(root, path)
        elif not _is_run(inside):
            yield path


def _files(path: str) -> list[str]:
    try:
        return [entry.name for entry in Path(path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_run(names: Sequence[str]) -> bool:
    """Tell whether a directory of these has checkpoints in it and is none itself."""
    kinds: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if "." in name and not _is_data(name.removesuffix(".ckz")):
            continue  # such as the custom_checkpoint_0.pkl that a checkpoint consists of
        if (step := step_of_name(name)) is not None:
            kinds[_kind(name)].add(step)
    return any(len(steps) > 1 for steps in kinds.values())


class Footprint:
    """Size, first trouble and newest time of all that an entry consists of."""

    def __init__(self, path: Path) -> None:
        self.nbytes, self.changed, self.saved = 0, 0.0, 0.0
        self.empty = ""
        self.own = path.lstat()
        self.is_directory = stat.S_ISDIR(self.own.st_mode)
        if self.is_directory:
            for folder, _, names in os.walk(path):
                for name in names:
                    self._add(Path(folder) / name, os.path.relpath(Path(folder) / name, path))
            self.changed = max(self.changed, self.own.st_mtime)
        else:
            self._add(path, "")
        self.saved = self.saved or self.changed

    def _add(self, path: Path, name: str) -> None:
        info = path.lstat()
        self.nbytes += info.st_blocks * 512 if stat.S_ISREG(info.st_mode) else 0
        self.changed = max(self.changed, info.st_mtime)
        if not path.name.startswith("."):  # pins and tags are put there later
            self.saved = max(self.saved, info.st_mtime)
        if stat.S_ISREG(info.st_mode) and not info.st_size and _is_data(name or path.name):
            self.empty = self.empty or f"{name or 'it'} is empty"


_DATA = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".h5", ".gguf", ".distcp")


def _is_data(name: str) -> bool:
    return name.endswith(_DATA)


class _Seen(NamedTuple):
    """An entry, the digests that its .ckz holds and needs, and its base's recorded name."""

    entry: Entry
    holds: Digests | None = None
    needs: Digests | None = None
    recorded: str = ""


def _look(root: Path, name: str, marker: str | None) -> _Seen | None:
    path = root / name
    try:
        stats = retried(partial(Footprint, path))
        if not stats.is_directory and is_container(path):
            return _look_at_container(path, name, stats)
        return _look_at_source(path, name, stats, marker)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _entry(name: str, stats: Footprint, step: int | None, fault: str) -> Entry:
    if _UNFINISHED.search(name):
        fault = "unfinished by its name"
    return Entry(name, step, False, stats.saved, stats.changed, stats.nbytes, fault)


def _look_at_source(path: Path, name: str, stats: Footprint, marker: str | None) -> _Seen | None:
    named = step_in(name, directory=stats.is_directory)
    fault, step, states = stats.empty, named, 0
    try:
        checkpoint = read_checkpoint(path)
    except CkzError as err:
        # Damaged ones are told from strangers by their name alone.
        if named is None or not (stats.is_directory or _is_data(name)):
            return None
        fault = fault or str(err).removeprefix(f"{path}: ")
    else:
        opaque = [w for w in checkpoint.warnings if w.endswith("kept as opaque bytes")]
        if not checkpoint.tensors:
            if named is None or checkpoint.format == "opaque" or not path.is_dir():
                return None
            fault = fault or "no tensors in it"
        fault = fault or "; ".join((*checkpoint.missing, *opaque)[:2])
        step = named if named is not None else step_of(Path(name).name, checkpoint.numbers)
        states = _states_nbytes(checkpoint)
    if marker and stats.is_directory and not (path / marker).exists():
        fault = fault or f"no {marker} in it"
    entry = replace(_entry(name, stats, step, fault), states_nbytes=states)
    return _Seen(entry)


def _states_nbytes(checkpoint: Checkpoint) -> int:
    return sum(t.nbytes for t in checkpoint.tensors if t.role in ("momentum", "variance", "master"))


def _look_at_container(path: Path, name: str, stats: Footprint) -> _Seen:
    named = step_in(name.removesuffix(".ckz"))
    try:
        with open_container(path) as container:
            return _from_container(container, name, stats, named)
    except CkzError as err:
        fault = str(err).removeprefix(f"{path}: ")
        entry = replace(_entry(name, stats, named, fault), packed=True)
        return _Seen(entry)


def _from_container(container: Container, name: str, stats: Footprint, named: int | None) -> _Seen:
    meta, checkpoint = container.meta, container.checkpoint
    files = [file for file in checkpoint.files if file.kind == "file"]
    times = [f.mtime_ns for f in files if not f.path.rpartition("/")[2].startswith(".")]
    base = meta["base"]
    entry = replace(
        _entry(name, stats, named if named is not None else meta["step"], ""),
        time=max(times, default=checkpoint.mtime_ns) / 1e9,
        packed=True,
        preset=meta["preset"],
        resumable=meta["resumable"],
        full_nbytes=base["full_nbytes"] if base else container.nbytes,
        states_nbytes=_states_nbytes(checkpoint),
    )
    # Copies, for the tables they are cut out of are large.
    holds = container.spans["digest"][len(container.files) : container.models].copy()
    needs = container.base_spans["digest"].copy() if base and len(container.base_spans) else None
    return _Seen(entry, holds, needs, Path(base["name"]).name if base else "")


def _find_bases(seen: Mapping[str, _Seen]) -> list[Entry]:
    """Find what each .ckz leans on: a .ckz by content, anything else by the recorded name."""
    anywhere = _holders(seen)
    found = []
    for name, (entry, _, needs, recorded) in seen.items():
        if needs is None:
            found.append(entry)
            continue
        folder = f"{name.rpartition('/')[0]}/".lstrip("/")
        first = needs[0].tobytes()
        packed = [f"{folder}{recorded}", f"{folder}{recorded}.ckz", *anywhere.get(first, ())]
        known = [n for n in packed if n != name and n in seen and _has_all(seen[n].holds, needs)]
        sources = [f"{folder}{recorded}", f"{folder}{recorded.removesuffix('.ckz')}"]
        known += [n for n in sources if n in seen and not seen[n].entry.packed]
        fault = entry.fault or ("" if known else f"its base, {recorded}, is not here")
        found.append(replace(entry, base=tuple(known[:1]), fault=fault))
    return _broken_chains(found)


def _broken_chains(entries: Sequence[Entry]) -> list[Entry]:
    """Mark what leans on something incomplete, however far away."""
    known = {entry.name: entry for entry in entries}
    waiting = list(known)
    while waiting:
        broken = {name for name in waiting if known[name].fault}
        waiting = [e.name for e in known.values() if not e.fault and broken & {*e.base}]
        for name in waiting:
            fault = f"its base, {known[name].base[0]}, is not complete"
            known[name] = replace(known[name], fault=fault)
    return list(known.values())


def _holders(seen: Mapping[str, _Seen]) -> dict[bytes, list[str]]:
    """Give the .ckz files that hold the first digest which any of them needs."""
    firsts = {s.needs[0].tobytes() for s in seen.values() if s.needs is not None}
    found: dict[bytes, list[str]] = defaultdict(list)
    for name, one in seen.items() if firsts else ():
        for digest in _as_set(one.holds) & firsts:
            found[digest].append(name)
    return found


def _has_all(holds: Digests | None, needs: Digests) -> bool:
    return _as_set(needs) <= _as_set(holds)


def _as_set(digests: Digests | None) -> set[bytes]:
    return set() if digests is None else {digest.tobytes() for digest in digests}


def _kind(name: str) -> str:
    return _DIGITS.sub("#", name.removesuffix(".ckz"))


def _lacking(root: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Find directories that lack a file which all others of their kind have."""
    kinds: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.packed and not entry.fault and (root / entry.name).is_dir():
            kinds[_kind(entry.name)].append(entry)
    faults = {}
    for group in kinds.values():
        have = {e.name: {_kind(n) for n in _files(str(root / e.name))} for e in group}
        counts = Counter(name for names in have.values() for name in names)
        common = {name for name, count in counts.items() if count >= len(group) - 1}
        for entry in group if len(group) > 2 else ():
            if lacks := common - have[entry.name]:
                faults[entry.name] = f"lacks {min(lacks)}, which all others have"
    return [replace(e, fault=faults.get(e.name, e.fault)) for e in entries]


def _numbered(entries: Sequence[Entry]) -> list[Entry]:
    """Tell members of a series from what has a number by chance."""
    kinds: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        if (step := _named_step(entry)) is not None:
            kinds[_kind(entry.name)].add(step)
    several = any(len(steps) > 1 for steps in kinds.values())
    found = []
    for entry in entries:
        step = _named_step(entry)
        series = step is not None and (len(kinds[_kind(entry.name)]) > 1 or not several)
        found.append(replace(entry, numbered=series))
    return found


def _named_step(entry: Entry) -> int | None:
    return entry.step if step_in(entry.name.removesuffix(".ckz")) == entry.step else None


def step_in(name: str, *, directory: bool = False) -> int | None:
    """Give the step, or else the epoch, that a name has; a directory must say that it is one."""
    whole = name.replace("/", "_")
    step = step_of_name(whole)
    if step is None and (epochs := re.findall(r"epoch[=_-]?(\d{1,18})", whole, re.I)):
        return int(epochs[-1])
    if step is None and (whole.isdecimal() or not directory):
        return step_of(whole, {})
    return step
