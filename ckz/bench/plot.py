"""A benchmark as a picture: saved % against speed for each kind of data, and saved % by role."""

from __future__ import annotations

import html
import importlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckz import charts
from ckz.bench.figures import ALL, Benchmark, Row

_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 96, 34, 40


class Panel(NamedTuple):
    """Points of one scatter chart."""

    title: str
    rows: tuple[Row, ...]


def panels(found: Benchmark) -> list[Panel]:
    """Sort the rows into charts: each kind of data, then whole commands."""
    found_rows: dict[str, list[Row]] = {}
    for row in found.rows:
        if not row.failed:
            title = f"{row.role} {row.dtype}" if row.role != ALL else "whole commands"
            found_rows.setdefault(title, []).append(row)
    return [Panel(title, tuple(rows)) for title, rows in found_rows.items()]


def role_bars(found: Benchmark) -> tuple[list[str], dict[str, list[float]]]:
    """Give the roles, and for each of ckz's levels the share saved of each role, in percent."""
    levels = [row for row in found.rows if row.roles]
    sizes: dict[str, int] = {}
    for row in levels:
        sizes.update({role: raw for role, (raw, _) in row.roles.items() if raw})
    roles = sorted(sizes, key=lambda role: -sizes[role])
    return roles, {
        row.setting: [100 * (1 - (row.roles[role][1] or 0) / sizes[role]) for role in roles]
        for row in levels
    }


def to_html(found: Benchmark) -> str:
    """Draw a page that needs nothing but itself."""
    drawings = panels(found)
    bounds = _bounds([row for chart in drawings for row in chart.rows])
    drawn = [_scatter(chart, colour, bounds) for chart, colour in _coloured(drawings)]
    roles, levels = role_bars(found)
    most = max((value for values in levels.values() for value in values), default=1)
    drawn.append(
        charts.bars("saved by role", roles, levels, "{:.1f} %".format, lambda v: v / max(most, 1))
    )
    return charts.page(f"ckz bench {found.source}", found.advice, "".join(drawn))


def write_png(found: Benchmark, path: Path) -> None:
    """Draw the same with matplotlib."""
    drawings = panels(found)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(6, 4 * (len(drawings) + 1)), layout="constrained"
    )
    axes = figure.subplots(len(drawings) + 1, 1)
    for axis, (chart, colour) in zip(axes, _coloured(drawings), strict=False):
        axis.set(title=chart.title, xlabel="compress, MB/s", ylabel="saved, %", xscale="log")
        for row in chart.rows:
            at = _speed(row), 100 * row.saved
            axis.plot(*at, "o", color=colour)
            axis.annotate(_short(row.setting), at, xytext=(5, 2), textcoords="offset points")
        axis.margins(0.15)
    roles, levels = role_bars(found)
    for k, (name, values) in enumerate(levels.items()):
        places = [i + 0.25 * k for i in range(len(roles))]
        axes[-1].bar(places, values, 0.23, label=name, color=charts.COLOURS[k])
    axes[-1].set(title="by role", ylabel="saved, %", xticks=range(len(roles)), xticklabels=roles)
    axes[-1].legend()
    figure.savefig(path, format="png", dpi=120)


def _speed(row: Row) -> float:
    return row.raw_nbytes / max(row.compress.median, 1e-9) / 1e6


def _short(setting: str) -> str:
    """Leave out of a codec's text what a chart's title says."""
    return re.sub(r"dtype=\w+,?", "", setting).rstrip(":,")


def _coloured(drawings: Sequence[Panel]) -> Iterator[tuple[Panel, str]]:
    for number, chart in enumerate(drawings):
        yield chart, charts.COLOURS[number % len(charts.COLOURS)]


def _bounds(rows: Sequence[Row]) -> tuple[float, float, float, float]:
    """Give one frame for all charts: powers of ten of MB/s, and saved % in tens."""
    speeds = [math.log10(_speed(row)) for row in rows]
    values = [100 * row.saved for row in rows]
    low = math.floor(min(*values, 0) / 10) * 10
    return (
        math.floor(min(speeds)),
        math.ceil(max(speeds)),
        low,
        math.ceil(max(*values, 1) / 10) * 10,
    )


def _scatter(chart: Panel, colour: str, bounds: tuple[float, float, float, float]) -> str:
    left, right, low, high = bounds

    def x(speed: float) -> float:
        share = (math.log10(speed) - left) / max(right - left, 1)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [charts.text(_LEFT, 16, chart.title, "title")]
    for power in range(int(left), int(right) + 1):
        at = x(10**power)
        parts.append(charts.line(at, y(low), at, y(high), "grid"))
        parts.append(charts.text(at, y(low) + 14, f"{10**power:g}", "faint", "middle"))
    step = 10 if high - low <= 50 else 20
    for value in range(int(low), int(high) + 1, step):
        parts.append(charts.line(x(10**left), y(value), x(10**right), y(value), "grid"))
        parts.append(charts.text(_LEFT - 5, y(value) + 4, f"{value} %", "faint", "end"))
    parts.append(charts.text(x(10**right), _HEIGHT - 8, "compress, MB/s", "faint", "end"))
    placed: list[tuple[float, float, float]] = []
    for row in sorted(chart.rows, key=lambda row: -row.saved):
        at, height = x(_speed(row)), y(100 * row.saved)
        label = _short(row.setting)
        start, end, base = at + 7, at + 7 + 6 * len(label), height + 4
        while any(start < b and a < end and abs(base - other) < 11 for a, b, other in placed):
            base += 11
        # The label keeps its own point free as well.
        placed += [(start, end, base), (at - 4, at + 4, height + 4)]
        told = f"{row.setting}: saved {100 * row.saved:.2f} %, {_speed(row):.0f} MB/s"
        parts.append(
            f'<circle cx="{at:.1f}" cy="{height:.1f}" r="4" fill="{colour}">'
            f"<title>{html.escape(told)}</title></circle>"
        )
        parts.append(charts.text(start, base, label))
    return charts.svg(_WIDTH, _HEIGHT, parts)
