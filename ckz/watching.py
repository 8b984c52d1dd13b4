"""Compressing what a running job saves, behind its back.

A pass looks for checkpoints that are complete and have been quiet, and compresses them in order,
each against the .ckz before it that was written and verified here. What was done is kept in a small
file, so that a restart goes on where it stopped; a .ckz has its name only once it is whole, so a
crash leaves nothing behind but hidden files.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ckz import atomic, pipeline
from ckz.container import USER_BLOCK
from ckz.errors import CkzError
from ckz.lossy import EXACTLY, Methods
from ckz.metrics import read_json
from ckz.pointers import find_pointers
from ckz.rebasing import rebase
from ckz.removal import state_of
from ckz.reporting import Report
from ckz.rotating import discard, empty_trash
from ckz.store import PIN, Entry, list_entries
from ckz.workers import DEFAULT_MEMORY

STATE = ".ckz-watch.json"
# Seconds until what failed is tried again: twice as many each time.
_PAUSE, _LONGEST_PAUSE = 30.0, 3600.0
# Times are kept in nanoseconds, and compared as seconds.
_SAME_TIME = 1e-3
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13


@dataclass(frozen=True)
class State:
    """What a watch knows of earlier passes.

    Attributes
    ----------
    last : name of the .ckz that the next one may lean on.
    seal : the first bytes of it, which are a checksum of nearly all of it.
    failed : entry -> how often it failed, and when to try again, in seconds since 1970.
    """

    last: str = ""
    seal: str = ""
    failed: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Settings:
    """How a watch works.

    Attributes
    ----------
    based : whether a .ckz leans on the one before.
    remove : whether a source goes once its .ckz is verified; so many of the newest stay.
    quiet : seconds that nothing may have changed in a checkpoint.
    marker : a file that a complete directory has, or nothing.
    """

    based: bool = True
    anchor: int | None = None
    methods: Methods = EXACTLY
    remove: bool = False
    keep_raw: int = 1
    quiet: float = 30.0
    marker: str = ""
    threads: int = 1
    memory: int = DEFAULT_MEMORY


class Event(NamedTuple):
    """What happened to an entry: ``compressed``, ``removed`` or ``failed``, and why."""

    what: str
    name: str
    report: Report | None = None
    fault: str = ""


class Seen(NamedTuple):
    """An entry as it was looked at, and since when it looks so (monotonic seconds)."""

    nbytes: int
    changed: float
    since: float


def step_aside() -> None:
    """Give way to everything else that runs: lowest priority, disk only when it is idle."""
    os.nice(19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE)


def read_state(root: Path) -> State:
    """Read what earlier passes left; of a damaged file nothing is believed."""
    found = read_json(root / STATE)
    try:
        failed = {str(k): (int(v[0]), float(v[1])) for k, v in found["failed"].items()}
        return State(str(found["last"]), str(found["seal"]), failed)
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return State()


def _write_state(root: Path, state: State) -> None:
    with atomic.new_file(root / STATE, force=True, mode=0o644) as temporary:
        temporary.write_text(json.dumps(asdict(state)))


def ready(
    entries: Sequence[Entry], seen: dict[str, Seen], state: State, settings: Settings
) -> list[Entry]:
    """Give what is complete, quiet and not compressed yet, in order; note what was looked at."""
    now, clock = time.time(), time.monotonic()
    packed = {e.name: e.time for e in entries if e.packed and not e.fault}
    found = []
    for entry in entries:
        before = seen.get(entry.name)
        same = before is not None and before[:2] == (entry.nbytes, entry.changed)
        since = before.since if before is not None and same else clock
        seen[entry.name] = Seen(entry.nbytes, entry.changed, since)
        calm = clock - since >= settings.quiet and not 0 <= now - entry.changed < settings.quiet
        waits = state.failed.get(entry.name, (0, 0.0))[1] > now
        # What was saved again under its name is another checkpoint.
        done = abs(packed.get(f"{entry.name}.ckz", -1.0) - entry.time) < _SAME_TIME
        if not (entry.packed or entry.fault or done or waits or not entry.numbered) and calm:
            found.append(entry)
    for name in seen.keys() - {e.name for e in entries}:
        del seen[name]
    return sorted(found, key=lambda e: (e.step or 0, e.time, e.name))


def look(root: Path, settings: Settings) -> list[Entry]:
    """List what is there; one alone of its kind counts, for it may be the first."""
    entries = list_entries(root, marker=settings.marker or None)
    return [replace(e, numbered=e.numbered or e.step is not None) for e in entries]


def one_pass(root: Path, seen: dict[str, Seen], settings: Settings) -> Iterator[Event]:
    """Compress what is ready; the lock of the directory is held.

    Parameters
    ----------
    seen : what earlier passes looked at; is brought up to date.
    """
    empty_trash(root)
    state = read_state(root)
    entries = look(root, settings)
    for entry in ready(entries, seen, state, settings):
        try:
            before = state_of(root / entry.name)
            if (root / f"{entry.name}.ckz").exists():
                _free(root, f"{entry.name}.ckz", settings)
            report = _compress(root, entry, entries, state, settings)
            if state_of(root / entry.name) != before:
                # The .ckz holds what was read, whole; the newer state is compressed over it later.
                (root / f"{entry.name}.ckz").unlink()
                raise CkzError(f"{entry.name}: changed while it was compressed")
        except FileNotFoundError:
            continue
        except (CkzError, OSError) as err:
            tries = state.failed.get(entry.name, (0, 0.0))[0] + 1
            pause = min(_PAUSE * 2 ** min(tries - 1, 20), _LONGEST_PAUSE)
            failed = state.failed | {entry.name: (tries, time.time() + pause)}
            state = replace(state, failed=failed)
            _write_state(root, state)
            yield Event("failed", entry.name, fault=str(err))
            continue
        name = f"{entry.name}.ckz"
        failed = {k: v for k, v in state.failed.items() if k != entry.name}
        state = State(name, _seal(root / name), failed)
        _write_state(root, state)
        yield Event("compressed", entry.name, report)
    if settings.remove:
        yield from _remove(root, settings)


def _free(root: Path, name: str, settings: Settings) -> None:
    """Make full what leans on a .ckz that is to be replaced: its source was saved again."""
    for other in look(root, settings):
        if name in other.base and not other.fault:
            rebase(root / other.name, threads=settings.threads, memory=settings.memory)


def _compress(
    root: Path, entry: Entry, entries: Sequence[Entry], state: State, settings: Settings
) -> Report:
    own = f"{entry.name}.ckz"
    base = root / state.last if settings.based and state.last not in ("", own) else None
    if base is not None and not (
        base.parent == (root / entry.name).parent
        and _holds(base, state)
        and _is_earlier(state.last, entry, entries)
    ):
        base = None
    return pipeline.compress(
        root / entry.name,
        root / own,
        base=base,
        anchor=settings.anchor,
        methods=settings.methods,
        device="cpu",  # a GPU is for those who train
        threads=settings.threads,
        memory=settings.memory,
        force=True,
        verify=True,
    )


def _is_earlier(last: str, entry: Entry, entries: Sequence[Entry]) -> bool:
    """Tell whether what was written last comes before: what leans back only can make no circle.

    An older one may come later, if its .ckz was moved away: by now another leans on that.
    """
    source = last.removesuffix(".ckz")
    before = [e for e in entries if e.name in (last, source)]
    return bool(before) and max(map(_place, before)) < _place(entry)


def _place(entry: Entry) -> tuple[int, float]:
    return entry.step or 0, entry.time


def _holds(base: Path, state: State) -> bool:
    """Tell whether a base is still the file that was verified."""
    try:
        return _seal(base) == state.seal
    except OSError:
        return False


def _seal(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(USER_BLOCK).hex()


def _remove(root: Path, settings: Settings) -> Iterator[Event]:
    """Remove sources that have a whole .ckz, but the newest ones and what is pointed to."""
    entries = look(root, settings)
    packed = {e.name: e for e in entries if e.packed and not e.fault}
    sources = [e for e in entries if not e.packed and not e.fault and e.step is not None]
    pointed = find_pointers(root, [e.name for e in entries]).to
    sources.sort(key=lambda e: (e.step or 0, e.time))
    kept = {e.name for e in sources[::-1][: settings.keep_raw]}
    for entry in sources:
        twin = packed.get(f"{entry.name}.ckz")
        if twin is None or entry.name in kept or entry.name in pointed:
            continue
        if abs(twin.time - entry.time) >= _SAME_TIME or (root / entry.name / PIN).exists():
            continue  # it was saved again since, or is pinned
        try:
            discard(root / entry.name)
        except OSError as err:
            yield Event("failed", entry.name, fault=f"{entry.name}: {err.strerror}")
        else:
            yield Event("removed", entry.name)
