"""Standard input and output as files: a container needs seeking, a pipe cannot.

Both are spooled to disk, never to memory: beside the output where there is one, else in TMPDIR,
else in /var/tmp, which unlike /tmp is not a memory file system.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckz.cli.names import DASH, STDIN, STDOUT
from ckz.cli.outcome import writing_to_stdout
from ckz.errors import CkzError

_BLOCK = 1 << 20


@contextmanager
def readable(source: str, *, name: str, beside: Path | None) -> Iterator[Path]:
    """Give a path to read ``source`` from; standard input becomes a temporary file.

    Parameters
    ----------
    name : of that file; a container records it.
    beside : the output, if it is a file.

    Raises
    ------
    CkzError
        If standard input is a terminal, or does not fit on the disk.
    """
    if source != DASH:
        yield Path(source)
        return
    if sys.stdin is None or sys.stdin.isatty():
        raise CkzError("is a terminal or closed; pipe a file into it")
    with _directory(beside) as directory:
        path = directory / name
        try:
            # Unbuffered: a buffered read goes on after a signal until the block is full.
            with open(sys.stdin.fileno(), "rb", 0, closefd=False) as stdin, path.open("wb") as file:
                shutil.copyfileobj(stdin, file, _BLOCK)
        except OSError as err:
            raise CkzError(
                f"cannot be spooled to {directory.parent}: {err.strerror}; set TMPDIR"
            ) from err
        try:
            yield path
        except CkzError as err:
            raise type(err)(str(err).replace(str(path), STDIN)) from err


@contextmanager
def for_stdout(*, force: bool) -> Iterator[Path]:
    """Give a path to write to; the file that lies there at the end goes to standard output.

    Raises
    ------
    CkzError
        If standard output is a terminal and ``force`` is not set, or the result is a directory.
    """
    if sys.stdout.isatty() and not force:
        raise CkzError(f"{STDOUT}: is a terminal; redirect it, use -o, or -f")
    with _directory(None) as directory:
        path = directory / "stdout"
        yield path
        if path.is_dir():
            raise CkzError("holds a directory, which cannot go to standard output; use -o")
        if path.exists():
            _copy_to_stdout(path)


def _copy_to_stdout(path: Path) -> None:
    with path.open("rb") as file, writing_to_stdout():
        shutil.copyfileobj(file, sys.stdout.buffer, _BLOCK)
        sys.stdout.buffer.flush()


@contextmanager
def _directory(beside: Path | None) -> Iterator[Path]:
    where = beside.parent if beside else spool_directory()
    with tempfile.TemporaryDirectory(prefix=".ckz.", suffix=".ckz-tmp", dir=where) as directory:
        yield Path(directory)


def spool_directory() -> Path:
    roomy = Path("/var/tmp")
    if os.environ.get("TMPDIR") or not os.access(roomy, os.W_OK):
        return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    return roomy
