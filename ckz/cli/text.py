"""How numbers, names and tables look to a person."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def size(nbytes: int) -> str:
    """Give a byte count in decimal units, as ``ls --si`` and the ``--memory`` option do."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{nbytes} B"


def saved(raw: int, stored: int) -> str:
    """Give the share of ``raw`` bytes that is gone, in percent; negative when it grew."""
    return f"{100 * (1 - stored / raw):.1f} %" if raw else "n/a"


def change(raw: int, stored: int) -> str:
    """Give sizes before and after and what that saves; tables make tiny files grow."""
    gain = f"saved {saved(raw, stored)}" if stored <= raw else f"grew by {size(stored - raw)}"
    return f"{size(raw)} -> {size(stored)}, {gain}"


def rate(nbytes: int, seconds: float) -> str:
    """Give a speed; ``n/a`` when too little time passed to tell."""
    return f"{size(round(nbytes / seconds))}/s" if seconds > 0 else "n/a"


def count(n: int, noun: str) -> str:
    """Give ``1 file`` or ``2 files``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def printable(text: str) -> str:
    """Escape what would move the cursor, hide or not encode: names come from untrusted files."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def shortened(text: str, room: int) -> str:
    """Cut the middle out of a text that is too long; 16 characters are always left."""
    room = max(room, 16)
    if len(text) <= room:
        return text
    head = room // 3
    return f"{text[:head]}..{text[head + 2 - room :]}"


def terminal_width() -> int:
    """Give the columns of the terminal that stdout is, or 0 if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Lay out rows in columns under a head.

    Parameters
    ----------
    align : ``<`` or ``>`` for each column.
    """
    everything = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    cells = [f"{{:{side}{width}}}" for side, width in zip(align, widths, strict=True)]
    line = "  ".join(cells).format
    return [line(*row) for row in everything]
