"""A benchmark as a picture: saved % against speed for each kind of data, and saved % by role."""

from __future__ import annotations

import html
import importlib
import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckz.bench.figures import ALL, Benchmark, Row
from ckz.errors import CkzError

# Blue, orange, green, ...: told apart by colour-blind people too (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
_WIDTH, _HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 96, 34, 40
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
svg { margin: 0 8px 16px 0; } text { font: 11px system-ui, sans-serif; fill: currentColor; }
.title { font-size: 13px; font-weight: 600; } .axis { stroke: currentColor; stroke-width: 1; }
.grid { stroke: currentColor; opacity: .15; } .faint { opacity: .7; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } }
"""


class Panel(NamedTuple):
    """Points of one scatter chart."""

    title: str
    rows: tuple[Row, ...]


def check_png() -> None:
    """Refuse early to draw what cannot be drawn.

    Raises
    ------
    CkzError
        If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CkzError("--plot to a .png needs matplotlib, which is not installed; .html does not")


def panels(found: Benchmark) -> list[Panel]:
    """Sort the rows into charts: each kind of data, then whole commands."""
    charts: dict[str, list[Row]] = {}
    for row in found.rows:
        if not row.failed:
            title = f"{row.role} {row.dtype}" if row.role != ALL else "whole commands"
            charts.setdefault(title, []).append(row)
    return [Panel(title, tuple(rows)) for title, rows in charts.items()]


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
    charts = panels(found)
    bounds = _bounds([row for chart in charts for row in chart.rows])
    drawn = [_scatter(chart, colour, bounds) for chart, colour in _coloured(charts)]
    title = html.escape(f"ckz bench {found.source}")
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n<p>{html.escape(found.advice)}</p>\n"
        f"{''.join(drawn)}{_bars(found)}</html>\n"
    )


def write_png(found: Benchmark, path: Path) -> None:
    """Draw the same with matplotlib."""
    charts = panels(found)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(6, 4 * (len(charts) + 1)), layout="constrained"
    )
    axes = figure.subplots(len(charts) + 1, 1)
    for axis, (chart, colour) in zip(axes, _coloured(charts), strict=False):
        axis.set(title=chart.title, xlabel="compress, MB/s", ylabel="saved, %", xscale="log")
        for row in chart.rows:
            at = _speed(row), 100 * row.saved
            axis.plot(*at, "o", color=colour)
            axis.annotate(_short(row.setting), at, xytext=(5, 2), textcoords="offset points")
        axis.margins(0.15)
    roles, levels = role_bars(found)
    for k, (name, values) in enumerate(levels.items()):
        places = [i + 0.25 * k for i in range(len(roles))]
        axes[-1].bar(places, values, 0.23, label=name, color=_COLOURS[k])
    axes[-1].set(title="by role", ylabel="saved, %", xticks=range(len(roles)), xticklabels=roles)
    axes[-1].legend()
    figure.savefig(path, format="png", dpi=120)


def _speed(row: Row) -> float:
    return row.raw_nbytes / max(row.compress.median, 1e-9) / 1e6


def _short(setting: str) -> str:
    """Leave out of a codec's text what a chart's title says."""
    return re.sub(r"dtype=\w+,?", "", setting).rstrip(":,")


def _coloured(charts: Sequence[Panel]) -> Iterator[tuple[Panel, str]]:
    for number, chart in enumerate(charts):
        yield chart, _COLOURS[number % len(_COLOURS)]


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

    parts = [_text(_LEFT, 16, chart.title, "title")]
    for power in range(int(left), int(right) + 1):
        at = x(10**power)
        parts.append(_line(at, y(low), at, y(high), "grid"))
        parts.append(_text(at, y(low) + 14, f"{10**power:g}", "faint", "middle"))
    step = 10 if high - low <= 50 else 20
    for value in range(int(low), int(high) + 1, step):
        parts.append(_line(x(10**left), y(value), x(10**right), y(value), "grid"))
        parts.append(_text(_LEFT - 5, y(value) + 4, f"{value} %", "faint", "end"))
    parts.append(_text(x(10**right), _HEIGHT - 8, "compress, MB/s", "faint", "end"))
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
        parts.append(_text(start, base, label))
    return _svg(_WIDTH, _HEIGHT, parts)


def _bars(found: Benchmark) -> str:
    roles, levels = role_bars(found)
    width, bar = 520, 14
    parts = [_text(4, 16, "saved by role", "title")]
    top = 30
    most = max((value for values in levels.values() for value in values), default=1)
    for i, role in enumerate(roles):
        parts.append(_text(4, top + 11, role))
        for colour, (name, values) in zip(_COLOURS, levels.items(), strict=False):
            size = max(0.0, values[i]) / max(most, 1) * (width - 260)
            parts.append(
                f'<rect x="90" y="{top}" width="{size:.1f}" height="{bar - 3}" fill="{colour}"/>'
            )
            parts.append(_text(96 + size, top + 10, f"{values[i]:.1f} %  {name}"))
            top += bar
        top += 8
    return _svg(width, top, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        f"{''.join(parts)}</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
