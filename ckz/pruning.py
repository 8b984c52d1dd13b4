"""What becomes of each checkpoint in a directory: a plan, made from a listing, that does nothing.

Entries of one step are one *saved* state. The policy chooses which stay; what they lean on stays
too. Whatever is not understood, not complete, not quiet or not numbered is left alone, and never
counted as kept.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from ckz import retention
from ckz.errors import CkzError, UsageError
from ckz.retention import Policy, Snapshot
from ckz.store import Entry

# From what keeps everything to what keeps least.
PRESETS = ("exact", "resume", "compact", "archive")
ACTIONS = ("keep", "thin", "recompress", "rebase", "remove", "leave")
# Times of files are not exact on every file system.
_SLACK = 1.0
_BASE = "base of "


@dataclass(frozen=True)
class Saved:
    """What was saved at one step.

    Attributes
    ----------
    fault : why it is not counted; empty if it is complete and quiet.
    bases : names of other saved states that entries of it lean on.
    """

    name: str
    step: int | None
    time: float
    entries: tuple[Entry, ...]
    fault: str = ""
    bases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes on disk, of all its entries."""
        return sum(entry.nbytes for entry in self.entries)


class Ageing(NamedTuple):
    """From which age, in seconds, a checkpoint is kept with which preset."""

    age: float
    preset: str


class Action(NamedTuple):
    """What is to be done with a saved state.

    Attributes
    ----------
    what : one of ``ACTIONS``.
    reasons : why.
    preset : that it is compressed to anew; empty if it is not.
    """

    saved: Saved
    what: str
    reasons: tuple[str, ...]
    preset: str = ""


def group(
    entries: Sequence[Entry], *, order: str, now: float, min_age: float
) -> tuple[list[Saved], list[Saved]]:
    """Join entries of the same step; give these, oldest first, and what has no place in the order.

    Parameters
    ----------
    order : ``step`` or ``mtime``; ``auto`` is by step, and refuses where times say otherwise.
    min_age : seconds that nothing of it may have changed for.

    Raises
    ------
    CkzError
        If the order is not clear.
    """
    by_time = order == "mtime"
    members: dict[object, list[Entry]] = defaultdict(list)
    others = []
    for entry in entries:
        if by_time or entry.numbered:
            members[entry.name.removesuffix(".ckz") if by_time else entry.step].append(entry)
        else:
            others.append(entry)
    names = {e.name: _name_of(each) for each in members.values() for e in each}
    found = [_saved(each, names, now, min_age) for each in members.values()]
    found.sort(key=lambda s: (s.time, s.step or 0, s.name) if by_time else (s.step or 0, s.name))
    if order == "auto":
        _check_order([s for s in found if not s.fault])
    return found, [_alone(entry, names) for entry in sorted(others, key=lambda e: e.name)]


def _alone(entry: Entry, names: Mapping[str, str]) -> Saved:
    bases = tuple(names[b] for b in entry.base if b in names)
    fault = entry.fault or "no number of a series"
    return Saved(entry.name, entry.step, entry.time, (entry,), fault, bases)


def _name_of(entries: Sequence[Entry]) -> str:
    return min((e.name.removesuffix(".ckz") for e in entries), key=lambda name: (len(name), name))


def _saved(entries: Sequence[Entry], names: Mapping[str, str], now: float, min_age: float) -> Saved:
    kinds: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        kinds[entry.kind].append(entry)
    # Of a checkpoint and its .ckz one is enough; a model and its optimizer are both needed.
    faults = [each[0].fault for each in kinds.values() if all(e.fault for e in each)]
    age = now - max(e.changed for e in entries)
    if not faults and 0 <= age < min_age:
        faults.append(f"written to {age:.0f} s ago")
    name = _name_of(entries)
    bases = dict.fromkeys(names[b] for e in entries for b in e.base if b in names)
    bases.pop(name, None)
    time = max((e.time for e in entries if not e.fault), default=entries[0].time)
    ordered = tuple(sorted(entries, key=lambda e: (e.packed, e.name)))
    return Saved(name, entries[0].step, time, ordered, next(iter(faults), ""), tuple(bases))


def _check_order(saved: Sequence[Saved]) -> None:
    for earlier, later in itertools.pairwise(saved):
        if earlier.time > later.time + _SLACK:
            raise CkzError(
                f"{later.name} of {_date(later.time)} has a higher step and is older than "
                f"{earlier.name} of {_date(earlier.time)}: likely another run's; nothing is done, "
                "say --order step or --order mtime"
            )


def _date(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def make_plan(
    saved: Sequence[Saved],
    others: Sequence[Saved],
    policy: Policy,
    now: float,
    *,
    metrics: Mapping[str, Mapping[str, float]],
    tags: Mapping[str, Sequence[str]],
    pinned: Mapping[str, Sequence[str]],
    optimizer_last: int | None = None,
    ageings: Sequence[Ageing] = (),
    rebase: bool = False,
) -> list[Action]:
    """Decide what becomes of everything, newest first.

    Parameters
    ----------
    saved : oldest first.
    others : what has no place in the order.
    metrics, tags : by name of a saved state.
    pinned : by name, why it stays as it is whatever the policy says.
    optimizer_last : so many of the newest keep their optimizer states; None: all.
    ageings : what older ones are compressed to.
    rebase : make deltas full where that frees more than keeping their bases takes.

    Raises
    ------
    UsageError
        If the policy keeps nothing.
    """
    if policy.is_empty and optimizer_last is None and not ageings:
        raise UsageError("nothing would be kept: give --keep-last or another rule")
    counted = [s for s in reversed(saved) if not s.fault]
    snapshots = [
        Snapshot(
            s.name,
            s.time,
            s.step,
            metrics.get(s.name, {}),
            tuple(tags.get(s.name, ())),
            s.bases,
            (*(("newest",) if number == 0 else ()), *pinned.get(s.name, ())),
        )
        for number, s in enumerate(counted)
    ]
    if policy.is_empty:
        # Thinning and ageing alone remove nothing.
        kept = {s.name: s.reasons or ("no rule",) for s in snapshots}
    else:
        kept = retention.keep(policy, snapshots, now)
    # What is not counted may lean on something all the same.
    for left in (*(s for s in saved if s.fault), *others):
        for base in left.bases:
            kept[base] = (*kept.get(base, ()), f"{_BASE}{left.name}")
    kept = retention.close(kept, snapshots)
    found = []
    for s in (*reversed(saved), *others):
        if s.fault:
            found.append(Action(s, "leave", (s.fault,)))
        elif s.name in kept:
            found.append(Action(s, "keep", kept[s.name]))
        else:
            found.append(Action(s, "remove", ("no rule keeps it",)))
    if rebase:
        found = _rebased(found)
    return _changed(found, pinned, now, optimizer_last, ageings)


def _only_base(action: Action) -> bool:
    return action.what == "keep" and all(why.startswith(_BASE) for why in action.reasons)


def _rebased(actions: Sequence[Action]) -> list[Action]:
    """Make all deltas full that alone keep bases, if that frees more than it takes."""
    bases = {a.saved.name: a for a in actions if _only_base(a)}
    left = {b for a in actions if a.what == "leave" for b in a.saved.bases}
    kept = [a for a in actions if a.what == "keep" and a.saved.name not in bases]
    leaning = [a for a in kept if not bases.keys().isdisjoint(a.saved.bases)]
    takes = sum(e.full_nbytes - e.nbytes for a in leaning for e in a.saved.entries if e.base)
    frees = sum(a.saved.nbytes for a in bases.values())
    if not leaning or left & bases.keys() or frees <= takes:
        return list(actions)
    names = {a.saved.name for a in leaning}
    return [
        a._replace(what="rebase", reasons=(*a.reasons, "frees its bases"))
        if a.saved.name in names
        else a._replace(what="remove", reasons=("only a base",))
        if a.saved.name in bases
        else a
        for a in actions
    ]


def _changed(
    actions: Sequence[Action],
    pinned: Mapping[str, Sequence[str]],
    now: float,
    optimizer_last: int | None,
    ageings: Sequence[Ageing],
) -> list[Action]:
    """Say which kept ones are compressed to less."""
    stays = [a for a in actions if a.what in ("keep", "rebase")]
    needed = {base for a in actions if a.what != "remove" for base in a.saved.bases}
    newest = {a.saved.name for a in stays[: max(1, optimizer_last or 0)]}
    found = []
    for action in actions:
        saved = action.saved
        exempt = saved.name in pinned or any(why.startswith("best ") for why in action.reasons)
        preset = ""
        if action.what == "keep" and not exempt and saved.name not in newest:
            preset = _preset_for(saved, now, optimizer_last, ageings)
        if not preset:
            found.append(action)
        elif saved.name in needed:
            why = (*action.reasons, f"not {preset}: others lean on it")
            found.append(action._replace(reasons=why))
        else:
            what = "thin" if preset == "archive" else "recompress"
            found.append(action._replace(what=what, preset=preset))
    return found


def _preset_for(
    saved: Saved, now: float, optimizer_last: int | None, ageings: Sequence[Ageing]
) -> str:
    """Give the preset a saved state is to have, if it has not: the smallest that applies."""
    wanted = [a.preset for a in ageings if now - saved.time >= a.age]
    if optimizer_last is not None and any(e.states_nbytes and e.resumable for e in saved.entries):
        wanted.append("archive")
    if not wanted:
        return ""
    preset = max(wanted, key=PRESETS.index)
    least = min(PRESETS.index(e.preset) if e.packed else -1 for e in saved.entries)
    return preset if PRESETS.index(preset) > least else ""


def parse_ageing(text: str) -> Ageing:
    """Read ``older:7d=archive``.

    Raises
    ------
    UsageError
        If it is none.
    """
    when, equals, preset = text.partition("=")
    if not when.startswith("older:") or not equals or preset not in PRESETS:
        raise UsageError(
            f"--recompress {text}: write older:DURATION=PRESET, with one of {', '.join(PRESETS)}"
        )
    years, months, days, hours = retention.parse_duration(when.removeprefix("older:"))
    return Ageing(((years * 365 + months * 30 + days) * 24 + hours) * 3600.0, preset)
