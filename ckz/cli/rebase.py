"""``ckz rebase``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckz.cli import options, progress, text
from ckz.cli.outcome import configure, each, report_to_json, tell
from ckz.errors import UsageError

if TYPE_CHECKING:
    from ckz.reporting import Report


# Seconds for another ckz to finish in the directory.
_WAIT = 60.0


def rebase(
    sources: options.Containers,
    base: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Lean on this checkpoint from now on.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Lean on nothing from now on.")] = False,
    old_base: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="What SRC.ckz leans on now, if it is not beside it."),
    ] = None,
    threads: options.Threads = 0,
    memory: options.Memory = options.MEMORY,
    as_json: options.Json = False,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Make .ckz files lean on another base, or on none; their contents stay the same.

    Each is replaced once the new one is verified. What leans on it still does.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    if (base is None) != full:
        raise UsageError("give either --base PATH or --full")
    from ckz import rebasing
    from ckz.locking import locked

    def act(source: str) -> Report:
        with (
            locked(Path(source).resolve().parent, wait=_WAIT),
            progress.bar(source, wanted=not (no_progress or quiet)) as on_bytes,
        ):
            before = Path(source).stat().st_size
            report = rebasing.rebase(
                source,
                base=base,
                old_base=old_base,
                threads=threads,
                memory=memory,
                progress=on_bytes,
            )
        report = replace(report, source=source, output=source)
        size = f"{text.size(before)} -> {text.size(report.stored_nbytes)}"
        tell(source, report, f"{text.printable(source)}: {size}, {report.seconds:.1f} s")
        return report

    each(sources, act, to_json=report_to_json if as_json else None)
