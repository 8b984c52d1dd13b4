"""One lock for a directory of checkpoints: whoever removes or replaces anything in it holds it.

The lock is a file that is made only where none is, which works on every file system, network ones
included. It names host and process; on its own host a lock whose process has ended is stale and is
taken over. Of another host's nobody here can tell, so it stands until it is removed by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckz.errors import LockedError

NAME = ".ckz-lock"
_PAUSE = 0.1
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# A lock is a line; more than that is somebody else's file.
_LONGEST = 4096


@contextmanager
def locked(directory: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock of a directory.

    Parameters
    ----------
    wait : seconds to wait for another process to give it back.

    Raises
    ------
    LockedError
        If it is held then.
    """
    path = directory / NAME
    token = secrets.token_hex(4)
    draft = path.with_name(f"{NAME}.{token}.ckz-tmp")
    began = _began("self")
    own = json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), "began": began, "token": token}
    )
    until = time.monotonic() + wait
    # What a signal raises may come anywhere, between the steps of giving the lock back too. It
    # comes once, so giving it back twice is enough.
    try:
        try:
            while not _take(path, draft, own):
                other = _read(path)
                if other is not None and _stale(other):
                    _take_away(path, draft, other)
                elif time.monotonic() >= until:
                    raise LockedError(
                        f"{directory}: {_describe(other)} (remove {NAME} if that is over)"
                    )
                else:
                    time.sleep(_PAUSE)
            yield
        finally:
            _give_back(path, draft, own)
    finally:
        _give_back(path, draft, own)


def _give_back(path: Path, draft: Path, own: str) -> None:
    draft.unlink(missing_ok=True)
    if _read(path) == own:
        path.unlink(missing_ok=True)


def _take(path: Path, draft: Path, own: str) -> bool:
    """Make the lock, with its text in it from the start."""
    draft.write_text(own)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:
        return _take_without_links(path, own)
    finally:
        draft.unlink(missing_ok=True)
    return True


def _take_without_links(path: Path, own: str) -> bool:
    """Make the lock where no file can have two names: who makes it has it, whatever is in it."""
    # Interrupted before its text is written, it would be nobody's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        with path.open("x") as file:
            file.write(own)
    except FileExistsError:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return True


def _take_away(path: Path, aside: Path, held: str) -> None:
    """Remove a stale lock, but no other that has come in its place."""
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside) != held:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def _read(path: Path) -> str | None:
    try:
        with path.open() as file:
            return file.read(_LONGEST)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return ""


def _fields(text: str | None) -> tuple[str, int, str]:
    try:
        found = json.loads(text or "")
        return str(found["host"]), int(found["pid"]), str(found["began"])
    except (ValueError, KeyError, TypeError):
        return "", 0, ""


def _stale(text: str) -> bool:
    """Tell whether the process that holds a lock ended; its number may be another's by now."""
    host, pid, began = _fields(text)
    return host == socket.gethostname() and pid > 0 and _began(str(pid)) != began


def _began(process: str) -> str:
    """Give when a process started, in ticks since the machine did; empty if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # The name in parentheses may hold anything.
    return text.rpartition(")")[2].split()[19]


def _describe(text: str | None) -> str:
    host, pid, _ = _fields(text)
    return f"process {pid} on {host} holds it" if host else "another process holds it"
