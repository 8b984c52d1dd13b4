"""Which snapshots to keep, and why: a pure function of what there is and of the time.

The rules are restic's: newest first; a snapshot is kept by a rule if its bucket (its hour, its day,
...) is another one than that of the last snapshot which the rule kept, as long as the rule has some
left; rules do not take from each other; and if a rule has some left at the end, the oldest snapshot
is kept too. Times are UTC and buckets those of the calendar. On top of them stand rules of training
(every so many steps, the best), and that what a kept snapshot leans on is kept.
"""

from __future__ import annotations

import calendar
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ckz.errors import UsageError

# No limit, as restic's ``unlimited``.
UNLIMITED = -1


class Best(NamedTuple):
    """Keep the snapshots with the smallest, or the largest, values of a metric."""

    metric: str
    largest: bool = False
    number: int = 1


@dataclass(frozen=True)
class Policy:
    """Rules; zero or empty is none. ``UNLIMITED`` keeps all that a rule finds.

    Attributes
    ----------
    within : of the newest snapshot: (years, months, days, hours).
    every : keep each step that this divides.
    tags : keep what has one of these.
    """

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    within: tuple[int, int, int, int] = (0, 0, 0, 0)
    every: int = 0
    best: tuple[Best, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it keeps nothing at all."""
        counts = (self.last, self.hourly, self.daily, self.weekly, self.monthly, self.yearly)
        return not any((*counts, *self.within, self.every, self.best, self.tags))


@dataclass(frozen=True)
class Snapshot:
    """What the rules have to know of a snapshot.

    Attributes
    ----------
    time : when it was saved, in seconds since 1970.
    bases : names of what it leans on.
    reasons : for which it is kept whatever the rules say, such as a pin.
    """

    name: str
    time: float
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


def _date(time: float) -> datetime:
    return datetime.fromtimestamp(time, UTC)


# Rule -> the bucket of a moment; None: every snapshot has one of its own.
_BUCKETS: dict[str, Callable[[datetime], object] | None] = {
    "last": None,
    "hourly": lambda t: (t.year, t.month, t.day, t.hour),
    "daily": lambda t: (t.year, t.month, t.day),
    "weekly": lambda t: t.isocalendar()[:2],
    "monthly": lambda t: (t.year, t.month),
    "yearly": lambda t: t.year,
}


def keep(
    policy: Policy, snapshots: Sequence[Snapshot], now: float, *, oldest: bool = True
) -> dict[str, tuple[str, ...]]:
    """Choose the snapshots that stay.

    Parameters
    ----------
    snapshots : newest first.
    now : in seconds since 1970; later snapshots are no measure of what is recent.
    oldest : whether rules that have some left keep the oldest (restic does since 0.16).

    Returns
    -------
    Name -> reasons, newest first; what is not in it may go.

    Raises
    ------
    UsageError
        If the policy keeps nothing, or asks for a metric that no snapshot has.
    """
    if policy.is_empty:
        raise UsageError("nothing would be kept: give --keep-last or another rule")
    found: dict[str, list[str]] = {s.name: list(s.reasons) for s in snapshots}
    for rule, bucket in _BUCKETS.items():
        left, before = getattr(policy, rule), None
        for number, snapshot in enumerate(snapshots):
            value = bucket(_date(snapshot.time)) if bucket else number
            ends = oldest and number == len(snapshots) - 1
            if left and (value != before or ends):
                found[snapshot.name].append(rule if value != before else f"oldest {rule}")
                before = value
                left -= left > 0
    if any(policy.within):
        latest = max((s.time for s in snapshots if s.time <= now), default=now)
        since = _earlier(_date(latest), policy.within)
        for snapshot in snapshots:
            if _date(snapshot.time) > since:
                found[snapshot.name].append(f"within {duration_text(policy.within)}")
    for snapshot in snapshots:
        if policy.every and snapshot.step is not None and snapshot.step % policy.every == 0:
            found[snapshot.name].append(f"every {policy.every}")
        found[snapshot.name] += [f"tag {tag}" for tag in snapshot.tags if tag in policy.tags]
    for best in policy.best:
        for snapshot in _best(best, snapshots):
            found[snapshot.name].append(f"best {best.metric}")
    return close({name: tuple(why) for name, why in found.items() if why}, snapshots)


def close(
    kept: Mapping[str, tuple[str, ...]], snapshots: Sequence[Snapshot]
) -> dict[str, tuple[str, ...]]:
    """Keep what kept snapshots lean on, too."""
    found = {name: list(why) for name, why in kept.items()}
    known = {s.name: s for s in snapshots}
    waiting = [name for name in found if name in known]
    while waiting:
        name = waiting.pop()
        for base in known[name].bases:
            if base in known:
                if base not in found:
                    waiting.append(base)
                found.setdefault(base, []).append(f"base of {name}")
    order = [s.name for s in snapshots]
    return {name: tuple(dict.fromkeys(found[name])) for name in order if name in found}


def _best(best: Best, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    there = [s for s in snapshots if not math.isnan(s.metrics.get(best.metric, math.nan))]
    if not there:
        known = sorted({metric for s in snapshots for metric in s.metrics})
        raise UsageError(
            f"no checkpoint has a metric {best.metric!r}; "
            f"{'there are ' + ', '.join(known) if known else 'give --metrics FILE'}"
        )
    sign = -1 if best.largest else 1
    # Of equal ones the newest, which come first.
    return sorted(there, key=lambda s: sign * s.metrics[best.metric])[: best.number]


def _earlier(moment: datetime, within: tuple[int, int, int, int]) -> datetime:
    years, months, days, hours = within
    # Days that a month lacks run over into the next one, as in restic (Go's AddDate).
    month = moment.month - 1 - months
    year = moment.year - years + month // 12
    month = month % 12 + 1
    if year < 1:
        return datetime.min.replace(tzinfo=UTC)
    over = max(0, moment.day - calendar.monthrange(year, month)[1])
    start = moment.replace(year=year, month=month, day=moment.day - over) + timedelta(days=over)
    try:
        return start - timedelta(days=days, hours=hours)
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


def parse_duration(text: str) -> tuple[int, int, int, int]:
    """Read ``1y5m7d2h``: years, months, days and hours.

    Raises
    ------
    UsageError
        If it is no such duration.
    """
    match = re.fullmatch(r"(?:(\d+)y)?(?:(\d+)m)?(?:(\d+)d)?(?:(\d+)h)?", text)
    if not match or not text or any(len(n) > 6 for n in match.groups("0")):
        raise UsageError(f"{text!r} is no duration: write years, months, days, hours as 1y5m7d2h")
    years, months, days, hours = (int(n) for n in match.groups("0"))
    return years, months, days, hours


def duration_text(within: tuple[int, int, int, int]) -> str:
    """Give the words that ``parse_duration`` reads."""
    return "".join(f"{n}{unit}" for n, unit in zip(within, "ymdh", strict=True) if n) or "0h"


def parse_best(text: str) -> Best:
    """Read ``METRIC:min`` or ``METRIC:max``, and how many: ``eval_loss:min:3``.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    match = re.fullmatch(r"(.+):(min|max)(?::([1-9]\d{0,8}))?", text)
    if not match:
        raise UsageError(
            f"--keep-best {text}: write METRIC:min or METRIC:max, or METRIC:min:3 for three"
        )
    return Best(match[1], match[2] == "max", int(match[3] or 1))
