"""Outputs appear whole or not at all.

A file is written under a hidden name beside its target, synced, renamed, and the directory synced;
a directory likewise. Without the first sync a power cut can leave a file of the right length full
of zeros, because the rename may reach the disk before the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckz.errors import CkzError, ExistsError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as err:
        # Some network file systems cannot sync a directory; they are no worse off without.
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make a file's contents durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_target(target: Path, force: bool) -> Path:
    """Resolve links in a target and refuse one that must not be replaced.

    Raises
    ------
    ExistsError
        If it exists and ``force`` is not given, or is no regular file or directory.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ExistsError(f"{target}: not a regular file, will not be replaced")
    if os.path.lexists(target) and not force:
        raise ExistsError(f"{target}: exists; use --force to replace it")
    return target


def _temporary(target: Path) -> Path:
    # File names end at 255 bytes; a long target is cut in the middle of nowhere, it is only a hint.
    hint = os.fsdecode(os.fsencode(target.name)[:200])
    return target.with_name(f".{hint}.{secrets.token_hex(4)}.ckz-tmp")


@contextmanager
def new_file(target: Path, *, force: bool, mode: int) -> Iterator[Path]:
    """Give a path to write to; it becomes ``target`` when the context ends without an error.

    Parameters
    ----------
    mode : permission bits of the result; until it is done only its owner may read it.
    """
    target = check_target(target, force)
    if target.is_dir():
        raise ExistsError(f"{target}: is a directory, a file cannot replace it")
    temporary = _temporary(target)
    try:  # from here on: a signal between making the file and the try would leave it behind
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield temporary
        sync_file(temporary)
        temporary.chmod(mode)
        check_target(target, force)
        temporary.replace(target)
        sync_directory(target.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def new_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Give a directory to fill; it becomes ``target`` when the context ends without an error.

    With ``force`` an existing directory is exchanged with the new one and then removed. Whoever
    fills it syncs it (``sync_tree``), before it gets modes that may forbid to.
    """
    target = check_target(target, force)
    if target.is_file():
        raise ExistsError(f"{target}: is a file, a directory cannot replace it")
    temporary = _temporary(target)
    try:
        temporary.mkdir(mode=0o700)
        yield temporary
        check_target(target, force)
        if target.exists():
            _exchange(temporary, target)
        else:
            temporary.rename(target)
        sync_directory(target.parent)
    finally:
        _remove_tree(temporary)


def sync_tree(root: Path) -> None:
    """Make a directory and everything in it durable."""
    for path in sorted(root.rglob("*")):
        if not path.is_symlink():
            (sync_directory if path.is_dir() else sync_file)(path)
    sync_directory(root)


def _remove_tree(root: Path) -> None:
    """Remove a directory of ours, also where modes forbid to look into it."""
    shutil.rmtree(root, ignore_errors=True)
    if root.exists():
        # Top down: each becomes readable before it is looked into.
        for folder, folders, _ in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in folders)):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(root, ignore_errors=True)


def _exchange(a: Path, b: Path) -> None:
    """Swap two names in one step, where the system can; else in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):
        done = libc.renameat2(
            _AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE
        )
        if done == 0:
            return
    aside = _temporary(b)
    b.rename(aside)
    try:
        a.rename(b)
    except OSError:
        aside.rename(b)
        raise
    aside.rename(a)


@contextmanager
def explain_full_disk(target: Path, needed: object) -> Iterator[None]:
    """Turn "no space left" into a message with what was needed and what there is.

    Parameters
    ----------
    needed : its ``str`` is taken when the disk is full: bytes needed, in words.
    """
    try:
        yield
    except (OSError, RuntimeError) as err:
        # The HDF5 library reports the system's error number only inside its text.
        text = str(err)
        codes = {getattr(err, "errno", None)} | {c for c in _FULL if f"errno = {c}," in text}
        if not codes & _FULL:
            raise
        free = shutil.disk_usage(target.parent).free
        raise CkzError(
            f"{target}: no space left on the disk: {needed}, {free} bytes are free there now"
        ) from err


def check_space(target: Path, needed: int) -> None:
    """Refuse to start what the disk has no room for."""
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CkzError(
            f"{target}: no space left on the disk: {needed} bytes needed, {free} bytes are free"
        )
