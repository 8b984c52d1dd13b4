"""Charts as SVG inside of HTML pages that need nothing but themselves."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckz import atomic
from ckz.errors import CkzError, UsageError

SUFFIXES = (".html", ".htm", ".png")

# Blue, orange, green, ...: told apart by colour-blind people too (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
svg { margin: 0 8px 16px 0; } text { font: 11px system-ui, sans-serif; fill: currentColor; }
.title { font-size: 13px; font-weight: 600; } .axis { stroke: currentColor; stroke-width: 1; }
.grid { stroke: currentColor; opacity: .15; } .faint { opacity: .7; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } }
"""
_BAR = 14  # pixels from one bar to the next


def check_target(target: Path) -> None:
    """Refuse early to draw what cannot be drawn.

    Raises
    ------
    UsageError
        If the name says neither HTML nor PNG.
    CkzError
        If matplotlib is not installed, which draws PNG.
    """
    if target.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{target}: --plot draws .html or .png")
    if target.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise CkzError("--plot to a .png needs matplotlib, which is not installed; .html does not")


def save(
    target: Path, to_html: Callable[[], str], write_png: Callable[[Path], None], *, force: bool
) -> None:
    """Write a chart whole or not at all, as what its name says."""
    with atomic.new_file(target, force=force, mode=0o644) as temporary:
        if target.suffix.lower() == ".png":
            write_png(temporary)
        else:
            temporary.write_text(to_html(), encoding="utf-8")


def page(title: str, lead: str, charts: str) -> str:
    """Give an HTML page: a title, a sentence, and charts as SVG."""
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n<p>{html.escape(lead)}</p>\n"
        f"{charts}</html>\n"
    )


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """Join what was drawn into one picture."""
    return (
        f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"{''.join(parts)}</svg>\n"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Draw a text; ``kind`` is a class of the page's style."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{html.escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Draw a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def bars(
    title: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    tell: Callable[[float], str],
    share: Callable[[float], float],
) -> str:
    """Draw horizontal bars, those of one label together.

    Parameters
    ----------
    series : name -> a value for each label; None draws no bar.
    tell : puts a value into words.
    share : how much of the full length a value's bar has, 0 to 1.
    """
    start = 16 + 6.5 * max(map(len, labels), default=0)
    width, full = start + 460, 300
    parts = [text(4, 16, title, "title")]
    top = 30
    for row, label in enumerate(labels):
        parts.append(text(4, top + 10, label))
        for colour, (name, values) in zip(_repeated(len(series)), series.items(), strict=True):
            value = values[row]
            if value is None:
                continue
            size = full * min(1.0, max(0.0, share(value)))
            parts.append(
                f'<rect x="{start:.1f}" y="{top}" width="{size:.1f}" height="{_BAR - 3}" '
                f'fill="{colour}"/>'
            )
            parts.append(text(start + size + 6, top + 10, f"{tell(value)}  {name}"))
            top += _BAR
        top += 8
    return svg(width, top, parts)


def _repeated(n: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(n)]
