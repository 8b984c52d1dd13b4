"""What was measured, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

ALL = "all"
# Half a point of the size is worth another level; less is not, unless it costs nothing.
_WORTH = 0.005
_CHEAPER = 1.5
# What saves less is not worth a command.
_LITTLE = 0.01


@dataclass(frozen=True)
class Cost:
    """What one direction took, in each round.

    Attributes
    ----------
    seconds, cpu_seconds : one for each round.
    memory : peak bytes of the process; None for a codec, which has none of its own.
    """

    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    memory: int | None = None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def cpu(self) -> float:
        """Median CPU seconds."""
        return statistics.median(self.cpu_seconds)

    @property
    def spread(self) -> float:
        """Half of the range of the seconds, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median if self.median else 0.0


@dataclass(frozen=True)
class Row:
    """One setting on one kind of data.

    Attributes
    ----------
    kind : ``codec`` or ``command``.
    setting : a codec's text; a command's name.
    role, dtype : of the data; ``all`` and nothing for a command.
    raw_nbytes, stored_nbytes : of what was measured.
    roles : role -> (raw, stored) bytes; of ckz's own levels only.
    failed : what went wrong with a rival; it has no figures then.
    """

    kind: str
    setting: str
    role: str
    dtype: str
    raw_nbytes: int
    stored_nbytes: int = 0
    compress: Cost = Cost()
    decompress: Cost = Cost()
    roles: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    failed: str = ""

    @property
    def saved(self) -> float:
        """Share of the raw bytes that is gone."""
        return 1 - self.stored_nbytes / self.raw_nbytes if self.raw_nbytes else 0.0


@dataclass(frozen=True)
class Benchmark:
    """A checkpoint, measured.

    Attributes
    ----------
    groups : (role, dtype) -> bytes in the checkpoint, of what codecs were measured on.
    omitted_nbytes : what is of kinds too rare to measure.
    sampled : True if commands ran on a sample and not on the checkpoint itself.
    rounds : how often what is not slow was measured.
    level : the one to use.
    advice : which it is and why, in one sentence.
    """

    source: str
    format: str
    raw_nbytes: int
    groups: dict[tuple[str, str], int]
    omitted_nbytes: int
    sampled: bool
    rounds: int
    rows: tuple[Row, ...]
    level: str
    advice: str


def advise(levels: dict[str, Row], rivals: Sequence[Row]) -> tuple[str, str]:
    """Choose a level from the figures.

    Parameters
    ----------
    levels : ``fast``, ``default`` and ``max``.
    rivals : those that did not fail.

    Returns
    -------
    The level, and a sentence that says why.
    """
    fast, default, most = (levels[name] for name in ("fast", "default", "max"))
    if most.saved - default.saved >= _WORTH:
        level = "max"
    elif (
        default.saved - fast.saved < _WORTH and fast.compress.cpu * _CHEAPER < default.compress.cpu
    ):
        level = "fast"
    else:
        level = "default"
    chosen = levels[level]
    if most.saved < _LITTLE:
        return (
            "fast",
            f"there is little to save, {100 * most.saved:.1f} %: use --level fast, if any",
        )
    reasons = [
        f"{name} {_against(row, chosen)}" for name, row in levels.items() if row is not chosen
    ]
    better = max(rivals, key=lambda row: row.saved, default=None)
    if better and better.saved - chosen.saved >= 0.0005:
        reasons.append(f"{better.setting} {_against(better, chosen)}")
    text = f"use --level {level}: it saves {100 * chosen.saved:.1f} %"
    return level, f"{text}; {', '.join(reasons)}"


def _against(row: Row, chosen: Row) -> str:
    """Say how another setting differs, in size and in CPU time to compress."""
    points = 100 * (row.saved - chosen.saved)
    size = "the same" if abs(points) < 0.05 else f"{abs(points):.1f} points "
    if size != "the same":
        size += "more" if points > 0 else "less"
    return f"saves {size} in {row.compress.cpu / max(chosen.compress.cpu, 1e-9):.1f}x the CPU time"
