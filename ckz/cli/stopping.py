"""How a signal ends a run: by an exception, so that temporary files are removed on the way out.

Python raises it wherever the main thread is, and drops it when that is a destructor. So the signal
is also kept, and ``check`` raises it again between two chunks.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_caught: list[int] = []


def catch() -> None:
    """Let the signals that ask a program to stop end this run."""
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and background jobs ignore some
            signal.signal(number, _stop)
    sys.unraisablehook = _unraisable


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """Report what a destructor raised, but not the end of the run, which is raised again."""
    if not isinstance(found.exc_value, SystemExit):
        sys.__unraisablehook__(found)


def check(done: int = 0, total: int = 0, stored: int = 0) -> None:
    """Raise again what a signal raised, if that was lost; a progress callback without a bar."""
    if _caught:
        raise SystemExit(128 + _caught[0])


def _stop(number: int, frame: FrameType | None) -> None:
    # Once: a second exception would interrupt the removal of temporary files.
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)
    _caught.append(number)
    check()
