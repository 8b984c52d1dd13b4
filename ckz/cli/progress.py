"""The progress bar: on stderr, only when that is a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckz.cli import stopping
from ckz.cli.text import printable, rate, saved, size

OnBytes = Callable[[int, int, int], None]


@contextmanager
def bar(name: str, *, wanted: bool) -> Iterator[OnBytes]:
    """Give a callback that draws (bytes done, bytes in all, bytes stored), where that is wanted.

    A ``stored`` of zero means that there is no ratio to show.
    """
    if not wanted or not sys.stderr.isatty():
        yield stopping.check
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # Room for the "^C" that the terminal echoes: it must not wrap, or the bar is not wiped.
    width = shutil.get_terminal_size().columns - 3
    started = time.monotonic()
    with Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(max_width=24)),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True, width=width, highlight=False),
        transient=True,
        expand=True,
    ) as progress:
        task = progress.add_task(printable(name), total=None, text="")

        def on_bytes(done: int, total: int, stored: int) -> None:
            stopping.check()
            text = f"{size(done)} of {size(total)}  {rate(done, time.monotonic() - started)}"
            if stored:
                text += f"  saved {saved(done, stored)}"
            progress.update(task, completed=done, total=total, text=text)

        yield on_bytes
