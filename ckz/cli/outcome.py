"""What a run says and how it ends: log lines, errors in one line, JSON, exit codes.

Results go to stdout, everything else to stderr. Only ``CkzError`` and ``OSError`` are turned into
messages; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from ckz.cli import names
from ckz.cli.text import change, count, printable, size
from ckz.errors import CkzError

if TYPE_CHECKING:
    from ckz.reporting import Report

SOME_FAILED = 3
# Exit codes that no error class stands for; the others are in ckz.errors.
EXIT_CODES = {
    0: "Done.",
    SOME_FAILED: "Finished, but some of several inputs failed.",
    129: "The terminal went away (SIGHUP); temporary files are removed.",
    130: "Stopped by ^C (SIGINT); temporary files are removed.",
    143: "Stopped by SIGTERM; temporary files are removed.",
}

NOTICE = 25  # a log level between INFO and WARNING: one line for each finished input
_THRESHOLDS = {
    -2: logging.CRITICAL + 1,
    -1: logging.ERROR,
    0: NOTICE,
    1: logging.INFO,
    2: logging.DEBUG,
}

log = logging.getLogger("ckz")


class _Stderr(logging.Handler):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.as_json and hasattr(record, "code"):
            text = json.dumps(
                {"version": 1, "error": record.error, "code": record.code, "message": text}  # type: ignore[attr-defined]
            )
        elif record.levelno >= logging.WARNING:
            text = f"ckz: {text}"
        print(text, file=sys.stderr, flush=True)


def configure(*, quiet: int = 0, verbose: int = 0, as_json: bool = False) -> None:
    """Set what reaches stderr; with ``as_json`` a result says itself what a notice would."""
    log.handlers = [_Stderr(as_json)]
    log.propagate = False
    level = _THRESHOLDS[max(-2, min(2, verbose - quiet))]
    log.setLevel(max(level, logging.WARNING) if as_json and not verbose else level)


def tell(source: str, report: Report, summary: str) -> None:
    """Say what came of one input: warnings, one line, and what -v asks for."""
    for warning in report.warnings:
        log.warning("%s: warning: %s", printable(source), printable(warning))
    if not report.resumable:
        log.warning(
            "%s: warning: not resumable, optimizer states are all zero in it", printable(source)
        )
    log.log(NOTICE, "%s", summary)
    log.info("  %s", count(report.tensors, "tensor"))
    for role, (raw, stored) in report.roles.items():
        log.info("  %s: %s", role, change(raw, stored))


def report_error(source: str, error: CkzError | OSError, *, least: int = 1) -> int:
    """Log an error about one input in one line.

    Returns
    -------
    The exit code that goes with it, but ``least`` where that means something else.
    """
    code = max(least, error.exit_code if isinstance(error, CkzError) else 1)
    if not log.handlers:
        configure()
    log.error("%s", _message(source, error), extra={"error": type(error).__name__, "code": code})
    return code


def _message(source: str, error: CkzError | OSError) -> str:
    text, source = str(error), names.display(source, names.STDIN)
    if isinstance(error, OSError) and error.strerror:
        source = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else source
        text = error.strerror
    for name in (source, Path(source).name):
        text = text.removeprefix(f"{name}: ")
    named = text.partition(": ")[0]
    if not source or named == names.STDOUT or os.path.lexists(named):
        return printable(text)  # it names the file at fault itself
    return printable(f"{source}: {text}")


def each(
    sources: Sequence[str],
    act: Callable[[str], Any],
    *,
    to_json: Callable[[Any], dict[str, Any]] | None = None,
) -> NoReturn:
    """Act on every source, go on after a failure, and exit with what came of it.

    Parameters
    ----------
    act : does the work for one source and says so; its result is kept.
    to_json : when given, all results are printed at the end as one JSON object.
    """
    results, codes = [], []
    for source in sources:
        try:
            results.append(act(source))
        except BrokenPipeError:
            raise
        except (CkzError, OSError) as error:
            codes.append(report_error(source, error))
    if to_json:
        print_result(
            json.dumps(
                {"version": 1, "results": [to_json(r) for r in results], "failed": len(codes)}
            )
        )
    tell_usage()
    if codes and results:
        raise typer.Exit(SOME_FAILED)
    raise typer.Exit(max(codes, default=0))


def tell_usage() -> None:
    """Say what the run took, as -vv asks for."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = size(used.ru_maxrss * 1024)
    log.debug("%.1f CPU-s, %s of memory at most", used.ru_utime + used.ru_stime, peak)


def report_to_json(report: Report) -> dict[str, Any]:
    """Give a report as the README's schema has it."""
    return {
        **asdict(report),
        "roles": roles_to_json(report.roles),
        "losses": [loss._asdict() for loss in report.losses],
    }


def inexact(report: Report) -> str:
    """Say how many tensors are not exact, if there are any."""
    return f", {count(len(report.losses), 'tensor')} not exact" if report.losses else ""


def roles_to_json(
    roles: Mapping[str, tuple[int, int | None]],
) -> dict[str, dict[str, int | None]]:
    """Give the bytes of each role, before and after."""
    return {
        role: {"raw_nbytes": raw, "stored_nbytes": stored} for role, (raw, stored) in roles.items()
    }


def print_result(text: str) -> None:
    """Print to stdout at once, so that a full disk or a closed pipe is seen here."""
    with writing_to_stdout():
        print(text, flush=True)


@contextmanager
def writing_to_stdout() -> Iterator[None]:
    """Name standard output in what goes wrong, except for a pipe that nobody reads any more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as err:
        discard_stdout()
        raise OSError(err.errno, err.strerror, names.STDOUT) from err


def discard_stdout() -> None:
    """Give up what stdout still holds: it could not be written, and would fail at exit again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
