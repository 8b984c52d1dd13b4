"""The ``ckz`` command: one file per subcommand; this one joins them and starts them.

Only the file of the subcommand that was asked for is imported, and nothing heavy here nor at the
top of those: ``ckz --help`` answers without numpy.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated

import typer

from ckz.cli import stopping
from ckz.cli.outcome import discard_stdout, report_error
from ckz.errors import CkzError

# Each has a module of its name with a function of its name, in the order of the help.
COMMANDS = (
    "compress",
    "decompress",
    "diff",
    "inspect",
    "verify",
    "bench",
    "rebase",
    "prune",
    "watch",
)


def app_of(*commands: str) -> typer.Typer:
    """Join subcommands, or all there are, to one program."""
    app = typer.Typer(
        name="ckz",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_options,
    )
    for name in commands or COMMANDS:
        app.command()(getattr(import_module(f"ckz.cli.{name}"), name))
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from ckz import __version__

        typer.echo(f"ckz {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Make saved deep-learning checkpoints small, and get exactly the same bytes back."""


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
        app_of(*(name for name in sys.argv[1:2] if name in COMMANDS))(prog_name="ckz")
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
