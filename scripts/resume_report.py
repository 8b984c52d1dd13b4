"""What ``resume_eval.py`` found: tables, bars, and curves as an SVG for the README."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
import resume_eval
from report import Bar
from resume_tasks import CLASSES, TASKS

_COLOURS = {"stale": "#d55e00", "compact": "#0072b2", "resume": "#009e73"}
_SMOOTH = 10
_SEEDS = 5
_MIXED = ("gpt", "moe")


class Figure(NamedTuple):
    """A row over all seeds.

    Attributes
    ----------
    size : bytes as a part of raw; 0 if nothing was saved.
    bits : a parameter.
    difference, error : mean of the seeds' differences in loss, and its standard error.
    classes : differences by how often a token stands in the text.
    """

    size: float
    bits: float
    difference: float
    error: float
    classes: tuple[float, ...]
    published: bool

    @property
    def shows(self) -> bool:
        """Whether the difference is more than two standard errors."""
        return abs(self.difference) > 2 * self.error


def difference(run: Any, reference: Any, first: int = 0, last: int | None = None) -> Any:
    """Give the difference in loss of each class, and of all, over some steps."""
    a, b = (np.array(losses)[first:last].sum(axis=0) for losses in (run, reference))
    by_class = (a[:, 0] - b[:, 0]) / np.maximum(b[:, 1], 1)
    return (*by_class.tolist(), float((a[:, 0] - b[:, 0]).sum() / b[:, 1].sum()))


def figures(runs: Sequence[Any], steps: int) -> dict[str, Figure]:
    """Summarize every row of a task over its first steps."""
    found = {}
    for name in runs[0]["rows"]:
        # Some rows are not run for all seeds.
        there = [run for run in runs if name in run["rows"]]
        rows = [run["rows"][name] for run in there]
        each = [
            difference(row["losses"][:steps], run["reference"][:steps])
            for row, run in zip(rows, there, strict=True)
        ]
        means = [statistics.mean(values) for values in zip(*each, strict=True)]
        overall = [values[-1] for values in each]
        error = statistics.stdev(overall) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        nbytes = statistics.mean(row["nbytes"] for row in rows)
        raw, parameters = runs[0]["raw"], runs[0]["parameters"]
        found[name] = Figure(
            nbytes / raw,
            8 * nbytes / parameters,
            means[-1],
            error,
            tuple(means[:-1]),
            rows[0]["published"],
        )
    return found


def read(kept: Path) -> dict[tuple[str, str], list[Any]]:
    """Give the runs of each task and beta2."""
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for path in sorted(kept.glob("*_*_*.json")):
        task, beta2, _ = path.stem.split("_")
        found[task, beta2].append(json.loads(path.read_text()))
    return found


def bars(task: str, found: dict[str, Figure]) -> Iterator[Bar]:
    """Say what holds of a task."""
    title = TASKS[task].name
    back = TASKS[task].saved - TASKS[task].base
    stale, short = found[f"stale by {back} steps"], found[f"stale by {resume_eval.LINK} steps"]
    names = resume_eval.chain_names(TASKS[task])
    chain = {preset: found[name] for preset, name in names.items()}
    if task in _MIXED:
        for work, bar, value in (
            ("resume, alone", 0.24, found["resume"].size),
            ("resume, base 10 steps back", 0.20, chain["resume"].size),
            (f"compact, base {back} steps back", 0.045, found["compact"].size),
            ("compact, base 10 steps back", 0.045, chain["compact"].size),
        ):
            yield Bar(f"{title}: {work}", f"<= {bar} of raw", f"{value:.4f}", value <= bar)
    again = found[resume_eval.AGAIN]
    part = abs(again.difference) / short.difference
    yield Bar(
        f"{title}: resume, ten times in a row",
        f"<= a tenth of what a checkpoint {resume_eval.LINK} steps older costs",
        f"{again.difference:+.5f} +- {again.error:.5f}, {part:.3f}",
        part <= 0.1,
    )
    for name in ("resume", "resume, with a base"):
        row = found[name]
        value = f"{row.difference:+.5f} +- {row.error:.5f}"
        yield Bar(f"{title}: {name}", "no difference seen (2 SE)", value, not row.shows)
    yield Bar(
        f"{title}: stale by {resume_eval.LINK} steps",
        "the same test sees it",
        f"{short.difference:+.4f} +- {short.error:.4f}",
        short.shows,
    )
    for name, link in (("compact", stale), (names["compact"], short)):
        row = found[name]
        worst = max(c / s for c, s in zip(row.classes, link.classes, strict=True))
        yield Bar(
            f"{title}: {name}",
            "<= a tenth of what a checkpoint as stale as its link costs, <= a quarter in any class",
            f"{row.difference / link.difference:.3f}, worst class {worst:.3f}",
            row.difference <= link.difference / 10 and worst <= 0.25,
        )
    own = [row for name, row in found.items() if name.startswith(resume_eval.PRESETS) and row.size]
    # What looks like a gain over the uninterrupted run counts as no loss.
    beaten = []
    for row in (row for row in found.values() if row.published):
        beaten.append(
            any(
                o.size <= 1.1 * row.size and o.difference <= max(0, row.difference) + 2 * o.error
                for o in own
            )
        )
    yield Bar(
        f"{title}: published methods",
        "to each a preset of at most a tenth more bytes that loses no more",
        f"{sum(beaten)} of {len(beaten)}",
        all(beaten),
    )


def table(task: str, found: dict[str, Figure]) -> str:
    """Lay out every row of a task."""
    back = TASKS[task].saved - TASKS[task].base
    stale = found[f"stale by {back} steps"].difference
    head = ["saved as", "bits a parameter", "of raw", "loss difference", "SE"]
    head += [*CLASSES, "steps lost"]
    rows = [
        [
            name,
            f"{row.bits:.2f}" if row.bits else "",
            f"{row.size:.4f}" if row.size else "",
            f"{row.difference:+.5f}",
            f"{row.error:.5f}",
            *(f"{value:+.5f}" for value in row.classes),
            f"{back * row.difference / stale:.2f}",
        ]
        for name, row in found.items()
    ]
    return report.markdown(head, rows)


def curves(task: str, runs: Sequence[Any]) -> str:
    """Draw the difference in loss over the resumed steps."""
    back = TASKS[task].saved - TASKS[task].base
    lines = {"stale": f"stale by {back} steps", "compact": "compact", "resume": "resume"}
    width, height, left, bottom = 640, 300, 60, 40
    series = {}
    for key, name in lines.items():
        each = []
        for run in runs:
            n = min(len(run["rows"][name]["losses"]), len(run["reference"]))
            a, b = (np.array(x)[:n] for x in (run["rows"][name]["losses"], run["reference"]))
            each.append((a[:, :, 0] - b[:, :, 0]).sum(axis=1) / b[:, :, 1].sum(axis=1))
        mean = np.mean(each, axis=0)
        series[key] = np.convolve(mean, np.ones(_SMOOTH) / _SMOOTH, mode="valid")
    top = max(float(values.max()) for values in series.values())
    low = min(0.0, *(float(values.min()) for values in series.values()))
    steps = max(len(values) for values in series.values())

    def at(step: float, value: float) -> str:
        x = left + step * (width - left - 10) / steps
        y = height - bottom - (value - low) * (height - bottom - 30) / (top - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="18">Loss above that of the uninterrupted run, by resumed step '
        f"({TASKS[task].name}, mean of {len(runs)} seeds)</text>",
    ]
    for k in range(5):
        value = low + (top - low) * k / 4
        begin, end = at(0, value), at(steps, value)
        (x, y), (x2, _) = begin.split(","), end.split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x2}" y2="{y}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{value:.3f}</text>')
    for step in range(0, steps + 1, 50):
        x = at(step, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - 20}" text-anchor="middle">{step}</text>')
    for place, (key, values) in enumerate(series.items()):
        points = " ".join(at(k, float(v)) for k, v in enumerate(values))
        colour = _COLOURS[key]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{width - 170}" y="{50 + 18 * place}" fill="{colour}">{lines[key]}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def write(kept: Path) -> None:
    """Write what is there."""
    all_bars: list[Bar] = []
    parts, csv_rows = [], []
    for (task, beta2), runs in read(kept).items():
        found = figures(runs, TASKS[task].resumed)
        title = f"{TASKS[task].name}, beta2 {beta2}, {len(runs)} seeds"
        # Of fewer seeds nothing can be said.
        if beta2 == "0.95" and len(runs) >= _SEEDS:
            all_bars += bars(task, found)
        if beta2 == "0.95" and task == "gpt":
            drawn = curves(task, runs[: resume_eval.LONG_SEEDS])
            (report.RESULTS / "resume.svg").write_text(drawn)
        parts.append(
            f"## {title}\n\nBase after {TASKS[task].base} steps, checkpoint after "
            f"{TASKS[task].saved}, {TASKS[task].resumed} steps resumed.\n\n{table(task, found)}"
        )
        longer = len(runs[0]["reference"])
        if longer > TASKS[task].resumed:
            parts.append(later(task, runs[: resume_eval.LONG_SEEDS], longer))
        csv_rows += [[task, beta2, name, *row[:4], *row.classes] for name, row in found.items()]
    text = "# Resuming from what was lossily saved\n\n"
    text += f"`python scripts/resume_eval.py` on {report.machine()}.\n\n"
    text += "\n\n".join((resume_eval.__doc__ or "").strip().split("\n\n")[2:]) + "\n\n"
    text += report.bars_table(all_bars) + "\n" + "\n".join(parts)
    head = ["task", "beta2", "row", "of_raw", "bits", "difference", "error", *CLASSES]
    print("written to", report.write("resume", text, [head, *csv_rows], quick=False))


def later(task: str, runs: Sequence[Any], steps: int) -> str:
    """Lay out what is left of a difference after many steps."""
    back = TASKS[task].saved - TASKS[task].base
    rows = []
    for name in (f"stale by {back} steps", *resume_eval.PRESETS):
        each = [
            difference(run["rows"][name]["losses"], run["reference"], steps - 40, steps)[-1]
            for run in runs
        ]
        error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
        rows.append([name, f"{statistics.mean(each):+.5f}", f"{error:.5f}"])
    lead = f"\nThe same over steps {steps - 40} to {steps} after resuming:\n\n"
    return lead + report.markdown(["saved as", "loss difference", "SE"], rows)
