"""A comparison as a picture: how much each layer changed, by role."""

from __future__ import annotations

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from ckz import charts
from ckz.diffing import Comparison
from ckz.diffing.stats import Stats, total
from ckz.roles import match_optimizer

_NUMBER = re.compile(r"(^|[./])\d+(?=[./])")
_TITLE = "relative change by layer: norm of the difference / norm of A"

Changes = dict[str, list[float | None]]


def changes_by_layer(found: Comparison) -> tuple[list[str], Changes]:
    """Give layers in the file's order, and for each role the relative change of every layer.

    A layer is what a name says up to its first number, or to its last part if it has none.
    Optimizer state counts for the layer of its weight. A change is None where the layer has
    nothing of that role that can be compared.
    """
    owners = match_optimizer([row.tensor for row in found.tensors])
    stats: dict[tuple[str, str], list[Stats]] = defaultdict(list)
    for row in found.tensors:
        if row.stats is not None and row.stats.largest is not None:
            layer = _layer(owners.get(row.name, row.name))
            stats[layer, row.tensor.role].append(row.stats)
    layers = list(dict.fromkeys(layer for layer, _ in stats))
    roles = dict.fromkeys(role for _, role in stats)
    return layers, {
        role: [
            total(stats[layer, role]).relative_l2 if (layer, role) in stats else None
            for layer in layers
        ]
        for role in roles
    }


def _layer(name: str) -> str:
    number = _NUMBER.search(name)
    return name[: number.end()] if number else re.split(r"[./](?=[^./]*$)", name)[0]


def to_html(found: Comparison) -> str:
    """Draw a page that needs nothing but itself."""
    layers, changes = changes_by_layer(found)
    lead = f"A: {found.a.path}, B: {found.b.path}. Bars are logarithmic."
    drawn = charts.bars(_TITLE, layers, changes, "{:.2g}".format, _share(changes))
    return charts.page("ckz diff", lead, drawn)


def _share(changes: Changes) -> Callable[[float], float]:
    """Give the length of a bar, on a scale of whole powers of ten."""
    low, high = _bounds(changes)

    def share(value: float) -> float:
        if not 0 < value < math.inf:
            return 1.0 if value else 0.0
        return (math.log10(value) - low) / (high - low)

    return share


def _bounds(changes: Changes) -> tuple[int, int]:
    values = [v for column in changes.values() for v in column if v and v < math.inf]
    if not values:
        return -1, 0
    low = math.floor(math.log10(min(values)) - 0.2)  # the shortest bar is to be seen
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def write_png(found: Comparison, path: Path) -> None:
    """Draw the same with matplotlib."""
    layers, changes = changes_by_layer(found)
    low, high = _bounds(changes)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 2 + 0.16 * len(layers) * max(1, len(changes))), layout="constrained"
    )
    axis = figure.subplots()
    height = 0.8 / max(1, len(changes))
    for number, (role, column) in enumerate(changes.items()):
        drawn = [(at, value) for at, value in enumerate(column) if value is not None]
        places = [at + number * height for at, _ in drawn]
        ends = [min(value, 10.0**high) for _, value in drawn]
        colour = charts.COLOURS[number % len(charts.COLOURS)]
        axis.barh(places, ends, height, align="edge", label=role, color=colour)
    axis.set(title=_TITLE, xscale="log", xlim=(10.0**low, 10.0**high), yticks=range(len(layers)))
    axis.set_yticklabels(layers, va="top")
    axis.invert_yaxis()
    axis.legend()
    figure.savefig(path, format="png", dpi=120)
