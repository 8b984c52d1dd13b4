"""``--rm``: the source goes only if it is still what was read."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from ckz.errors import ChangedError, CkzError

_KEPT = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)

State = dict[Path, tuple[int, int, int]]


def state_of(path: Path) -> State:
    """Note inode, size and modification time of a file, or of everything in a directory.

    Raises
    ------
    CkzError
        For a symbolic link: removing it would leave what it points to.
    """
    if path.is_symlink():
        raise CkzError(f"{path}: is a symbolic link; --rm wants the file that it points to")
    state = {}
    for each in (path, *path.rglob("*")):
        found = each.lstat()
        if stat.S_IFMT(found.st_mode) not in _KEPT:
            raise CkzError(f"{each}: is not kept in a .ckz, so --rm would lose it")
        state[each] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return state


def remove(path: Path, before: State) -> None:
    """Remove a file or directory that has not changed since ``before``.

    Raises
    ------
    ChangedError
        If it has; it is kept then.
    """
    if state_of(path) != before:
        raise ChangedError(f"{path}: changed in the meantime, so it is kept")
    if path.is_dir():
        # All of it or nothing: what may not be emptied is found before anything goes.
        for folder in (each for each in before if each.is_dir() and not each.is_symlink()):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise CkzError(f"{folder}: may not be written to, so {path} is kept")
        shutil.rmtree(path)
    else:
        path.unlink()
