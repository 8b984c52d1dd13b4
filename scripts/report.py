"""How results are written down: Markdown to read, CSV to compare; bars with what was measured."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
QUICK = Path("build/bench/quick")


class Bar(NamedTuple):
    """What must hold, and what was measured.

    Attributes
    ----------
    work : what is measured.
    bar : in words.
    value : in words.
    met : or None if it could not be measured here.
    """

    work: str
    bar: str
    value: str
    met: bool | None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out a table; all columns but the first ones are numbers."""
    lines = [head, ["---"] * left + ["--:"] * (len(head) - left), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def bars_table(bars: Sequence[Bar]) -> str:
    """Lay out the bars."""
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [[bar.work, bar.bar, bar.value, words[bar.met]] for bar in bars]
    return markdown(["work", "bar", "measured", ""], rows, left=4)


def machine() -> str:
    """Say where this ran."""
    names = ["numpy", "zstandard", "numba", "torch"]
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0))
    return f"{cpu}, {cores} cores; Python {platform.python_version()}, {versions}"


def write(name: str, text: str, table: Sequence[Sequence[object]], *, quick: bool) -> Path:
    """Write a result's Markdown and CSV; a quick run's do not replace the real ones."""
    directory = QUICK if quick else RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.md").write_text(text)
    with (directory / f"{name}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table)
    return directory / f"{name}.md"
