"""The ``ckz`` command: one file per subcommand; this one joins them and starts them.

Nothing heavy is imported here, nor by the modules of the subcommands at their top: ``ckz --help``
answers without numpy.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ckz.cli import (
    bench,
    compress,
    decompress,
    diff,
    inspect,
    prune,
    rebase,
    stopping,
    verify,
    watch,
)
from ckz.cli.outcome import discard_stdout, report_error
from ckz.errors import CkzError

app = typer.Typer(
    name="ckz",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from ckz import __version__

        typer.echo(f"ckz {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Make saved deep-learning checkpoints small, and get exactly the same bytes back."""


for _command in (
    compress.compress,
    decompress.decompress,
    diff.diff,
    inspect.inspect,
    verify.verify,
    bench.bench,
    rebase.rebase,
    prune.prune,
    watch.watch,
):
    app.command()(_command)


def main() -> None:
    """Run the command line and exit with its code."""
    # Nothing here multiplies matrices, and starting numpy's threads for it takes 0.1 s of a core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _occupy_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end the run.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    stopping.catch()
    try:
        app(prog_name="ckz")
    except CkzError as error:
        sys.exit(report_error("", error))
    except OSError as error:
        discard_stdout()
        sys.exit(report_error("", error))


def _occupy_standard_streams() -> None:
    """Open what was closed on ckz, lest a file gets its number; using it is still an error."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_WRONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
