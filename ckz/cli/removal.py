"""``--rm``: the source goes only if it is still what was read."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckz.errors import ChangedError, CkzError

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
        shutil.rmtree(path)
    else:
        path.unlink()
