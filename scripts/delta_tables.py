"""What ``bench_delta.py`` measured, judged and laid out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import report
from delta_rivals import RIVALS, Trial
from report import Bar

CODECS = ("bitmask", "xor", "ulp")
_TITLES = {"zstd": "zstd --patch-from", "lmz": "lmz append", "xor": "XOR + zstd"}
# Of a core, in MB/s.
_SPEED = 300
_SMALLER = 1.8


class Pair(NamedTuple):
    """Two checkpoints of a run, so many optimizer steps apart."""

    run: str
    dtype: str
    steps: int
    base: Path
    target: Path


class Result(NamedTuple):
    """A pair, measured.

    Attributes
    ----------
    nbytes : of the file.
    raw, elements, changed : bytes and elements of its tensors, and how many elements changed.
    bound : the static bound, in bits.
    stored : what ckz makes of the file.
    rivals : name -> sizes of the file; those that are not there are missing.
    codecs : name -> sizes of the tensors.
    """

    pair: Pair
    nbytes: int
    raw: int
    elements: int
    changed: int
    bound: float
    stored: int
    rivals: dict[str, Trial]
    codecs: dict[str, Trial]

    def saved(self, nbytes: float) -> float:
        """Give what is saved of the file, in percent."""
        return 100 * (1 - nbytes / self.nbytes)


class State(NamedTuple):
    """A training state, measured.

    Attributes
    ----------
    steps : back to its base; 0 is none.
    stored : what ckz makes of it.
    limit : of the share of the file that may be stored, if there is one.
    rivals : name -> sizes.
    """

    work: str
    steps: int
    nbytes: int
    stored: int
    limit: float | None
    rivals: dict[str, Trial]


def speed(nbytes: int, seconds: float) -> float:
    """Give MB/s."""
    return nbytes / 1e6 / seconds


def bars_of(result: Result) -> list[Bar]:
    """Judge a pair of bf16 files."""
    work = f"{result.pair.run}, {result.pair.steps} apart"
    bitmask, xor, ulp = (result.codecs[name] for name in CODECS)
    factor, gain = bitmask.stored / ulp.stored, xor.stored / ulp.stored
    there, back = (speed(result.raw, seconds) for seconds in ulp[1:])
    return [
        _size_bar(work, result),
        Bar(work, f">= {_SMALLER}x smaller than bitmask", f"{factor:.2f}x", factor >= _SMALLER),
        Bar(work, "smaller than XOR + zstd", f"{gain:.2f}x", gain > 1),
        Bar(
            work,
            f"ulp >= {_SPEED} MB/s a core each way",
            f"{there:.0f} / {back:.0f}",
            min(there, back) >= _SPEED,
        ),
    ]


def _size_bar(work: str, result: Result) -> Bar:
    if not result.rivals:
        return Bar(work, "saves the best rival's + half of its distance to the bound", "", None)
    name, best = min(result.rivals.items(), key=lambda item: item[1].stored)
    most = best.stored - max(0.0, best.stored - result.bound / 8) / 2
    return Bar(
        work,
        f"saves >= {result.saved(most):.2f} %, half of the way from {name}'s "
        f"{result.saved(best.stored):.2f} % to the bound's {result.saved(result.bound / 8):.2f} %",
        f"{result.saved(result.stored):.2f} %",
        result.stored <= most,
    )


def state_bar(state: State) -> Bar:
    """Judge a state that has a limit."""
    base = f"base {state.steps} back" if state.steps else "alone"
    share = state.stored / state.nbytes
    bar = f"stored <= {state.limit:g} of raw"
    return Bar(f"{state.work}, {base}", bar, f"{share:.3f}", share <= (state.limit or 0))


def layout(results: Sequence[Result], states: Sequence[State]) -> str:
    """Lay out bars, sizes and speeds."""
    bars = [bar for r in results if r.pair.dtype == "bfloat16" for bar in bars_of(r)]
    bars += [state_bar(state) for state in states if state.limit]
    starts = [[r.pair.run, str(r.pair.steps)] for r in results]
    sizes = [
        [f"{100 * r.changed / r.elements:.1f} %"]
        + [f"{r.saved(r.rivals[n].stored):.2f}" if n in r.rivals else "-" for n in RIVALS]
        + [f"{r.saved(size):.2f}" for size in (r.stored, r.bound / 8)]
        for r in results
    ]
    bits = [
        [f"{8 * size / r.elements:.3f}" for size in (*_codec_sizes(r), r.bound / 8)]
        for r in results
    ]
    speeds = [
        [_speeds(r.nbytes, r.rivals.get(name)) for name in RIVALS]
        + [_speeds(r.raw, r.codecs[name]) for name in CODECS]
        for r in results
    ]
    shares = [
        [s.work, str(s.steps or "-"), f"{s.nbytes / 1e6:.1f}"]
        + [f"{s.rivals[n].stored / s.nbytes:.3f}" if n in s.rivals else "-" for n in RIVALS]
        + [f"{s.stored / s.nbytes:.3f}"]
        for s in states
    ]
    heads = ["checkpoint", "steps apart"]

    def beside(rows: Sequence[Sequence[str]], *columns: str) -> str:
        lines = [[*start, *row] for start, row in zip(starts, rows, strict=True)]
        return report.markdown([*heads, *columns], lines)

    return "\n".join(
        [
            report.bars_table(bars),
            "## Saved, % of the file\n",
            beside(sizes, "changed", *_titles(RIVALS), "ckz", "static bound"),
            "## Bits an element, of the tensors alone\n",
            beside(bits, *_titles(CODECS), "static bound"),
            "## MB per CPU second, compress / decompress\n",
            beside(speeds, *_titles(RIVALS), *_titles(CODECS)),
            "## Training states: share of the file that is stored\n",
            report.markdown(["state", "base back", "MB", *_titles(RIVALS), "ckz"], shares),
        ]
    )


def _titles(names: Sequence[str]) -> list[str]:
    return [_TITLES.get(name, name) for name in names]


def _codec_sizes(result: Result) -> list[int]:
    return [result.codecs[name].stored for name in CODECS]


def _speeds(nbytes: int, trial: Trial | None) -> str:
    if trial is None:
        return "-"
    return " / ".join(f"{speed(nbytes, seconds):.0f}" for seconds in trial[1:])


def lines_of(results: Sequence[Result], states: Sequence[State]) -> list[tuple[object, ...]]:
    """Give everything for the CSV: a line for each tool and pair."""
    lines: list[tuple[object, ...]] = [
        (
            *("checkpoint", "dtype", "steps", "changed", "tool", "raw_nbytes", "stored_nbytes"),
            *("compress_mb_per_cpu_s", "decompress_mb_per_cpu_s"),
        )
    ]
    for r in results:
        start = r.pair.run, r.pair.dtype, r.pair.steps, round(r.changed / r.elements, 4)
        for nbytes, trials in (r.nbytes, r.rivals), (r.raw, r.codecs):
            for name, trial in trials.items():
                speeds = (round(speed(nbytes, seconds), 1) for seconds in trial[1:])
                lines.append((*start, name, nbytes, trial.stored, *speeds))
        lines.append((*start, "ckz", r.nbytes, r.stored, "", ""))
        lines.append((*start, "static bound", r.raw, round(r.bound / 8), "", ""))
    for s in states:
        sizes = {name: trial.stored for name, trial in s.rivals.items()} | {"ckz": s.stored}
        for name, stored in sizes.items():
            lines.append((s.work, "state", s.steps, "", name, s.nbytes, stored, "", ""))
    return lines
