"""Carrying out what ``pruning`` planned, so that a crash at any moment loses nothing that is kept.

First checkpoints are compressed to less, each verified before what it replaces goes; then deltas
become full; then what is not kept goes, newest first, so that no delta ever lacks its base. A
directory gets a hidden name before it is emptied: what has its own name is whole. What an earlier
run could not finish is finished by the next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckz import atomic, pipeline
from ckz.errors import CkzError
from ckz.lossy import methods_of
from ckz.pruning import Action
from ckz.rebasing import rebase
from ckz.retrying import retried
from ckz.store import TRASH, Entry, Footprint
from ckz.workers import DEFAULT_MEMORY

# Seconds after which a temporary file is one that a killed process left.
_ABANDONED = 3600.0
# Gone already, or not there yet.
_VANISHED = (FileNotFoundError, NotADirectoryError)


class Done(NamedTuple):
    """What came of an action.

    Attributes
    ----------
    freed : bytes on disk.
    fault : why it failed, or empty.
    """

    action: Action
    freed: int
    fault: str = ""


def carry_out(
    root: Path,
    actions: Sequence[Action],
    *,
    threads: int = 0,
    memory: int = DEFAULT_MEMORY,
    tell: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Do what was planned; what fails is reported, and the rest is done all the same.

    Parameters
    ----------
    root : the directory, whose lock is held.
    actions : newest first.
    """
    found = [Done(a, 0) for a in actions if a.what in ("keep", "leave")]
    compress = partial(_recompress, root, threads=threads, memory=memory)
    full = partial(_make_full, root, threads=threads, memory=memory)
    kept_bases: set[str] = set()
    for kinds, act in (
        (("thin", "recompress"), compress),
        (("rebase",), full),
        (("remove",), partial(_remove, root)),
    ):
        for action in (a for a in actions if a.what in kinds):
            if action.saved.name in kept_bases:
                done = Done(action, 0, "what leans on it is still there")
            else:
                done = _attempt(root, action, act)
            if done.fault:
                # Whatever it leans on has to stay with it.
                kept_bases |= {*action.saved.bases, *_below(action, actions)}
            found.append(done)
            tell(done)
    for folder in {a.saved.name.rpartition("/")[0] for a in actions if a.what == "remove"} - {""}:
        # What was only the first half of names goes with the last of them.
        with contextlib.suppress(OSError):
            (root / folder).rmdir()
    return found


def _below(action: Action, actions: Sequence[Action]) -> set[str]:
    """Name all that a saved state leans on, however many lie between them."""
    known = {a.saved.name: a.saved for a in actions}
    seen: set[str] = set()
    waiting = [*action.saved.bases]
    while waiting:
        name = waiting.pop()
        if name not in seen and name in known:
            seen.add(name)
            waiting += known[name].bases
    return seen


def _attempt(root: Path, action: Action, act: Callable[[Action], None]) -> Done:
    paths = [root / entry.name for entry in action.saved.entries]
    try:
        for entry in action.saved.entries:
            _check_same(root, entry)
        before = sum(entry.nbytes for entry in action.saved.entries)
        act(action)
    except (CkzError, OSError) as err:
        return Done(action, 0, str(err))
    twins = {p.with_name(f"{p.name.removesuffix('.ckz')}.ckz") for p in paths}
    after = sum(_footprint(path).nbytes for path in {*paths, *twins} if os.path.lexists(path))
    return Done(action, before - after)


def _check_same(root: Path, entry: Entry) -> None:
    """Refuse what has changed since it was listed; what is gone is gone.

    Raises
    ------
    CkzError
        If anything in it is new.
    """
    try:
        now = _footprint(root / entry.name)
    except _VANISHED:
        return
    if (now.nbytes, now.changed) != (entry.nbytes, entry.changed):
        raise CkzError(f"{root / entry.name}: changed in the meantime, so it is kept")


def _footprint(path: Path) -> Footprint:
    return retried(partial(Footprint, path))


def _recompress(root: Path, action: Action, *, threads: int, memory: int) -> None:
    """Compress every entry with the preset; a checkpoint and its .ckz become one .ckz."""
    by_name: dict[str, list[Entry]] = {}
    for entry in action.saved.entries:
        if not entry.fault:
            by_name.setdefault(entry.name.removesuffix(".ckz"), []).append(entry)
    for name, entries in by_name.items():
        # What is not compressed comes first, and is the better source.
        source, output = root / entries[0].name, root / f"{name}.ckz"
        _compress(source, output, action.preset, threads=threads, memory=memory)
        if not entries[0].packed:
            discard(source)


def _compress(source: Path, output: Path, preset: str, *, threads: int, memory: int) -> None:
    with tempfile.TemporaryDirectory(
        prefix=".ckz.", suffix=".ckz-tmp", dir=output.parent
    ) as scratch:
        if source.suffix == ".ckz":
            restored = Path(scratch) / source.name.removesuffix(".ckz")
            pipeline.decompress(source, restored, device="cpu", threads=threads, memory=memory)
            source = restored
        pipeline.compress(
            source,
            output,
            methods=methods_of(preset),
            force=True,
            opaque=True,
            allow_incomplete=True,
            accept_bad_crc=True,
            verify=True,
            device="cpu",
            threads=threads,
            memory=memory,
        )


def _make_full(root: Path, action: Action, *, threads: int, memory: int) -> None:
    for entry in action.saved.entries:
        if entry.base:
            rebase(root / entry.name, threads=threads, memory=memory)


def _remove(root: Path, action: Action) -> None:
    # Deltas before what is whole: of the same state, one may be the other's base.
    for entry in sorted(action.saved.entries, key=lambda e: (not e.base, e.name)):
        discard(root / entry.name)


def discard(path: Path) -> None:
    """Remove a checkpoint: it has its name and is whole, or has no name.

    Raises
    ------
    OSError
        If something of it cannot be removed now; a later run removes that.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            trash = path.with_name(f"{TRASH}{secrets.token_hex(4)}")
            retried(partial(path.rename, trash))
            atomic.sync_directory(path.parent)
            _empty(trash)
        else:
            retried(path.unlink)
            atomic.sync_directory(path.parent)
    except _VANISHED:
        return


def empty_trash(root: Path) -> list[str]:
    """Remove what earlier runs left behind; name what still cannot be removed."""
    left = []
    for path in _trash(root):
        try:
            _empty(path)
        except OSError as err:
            left.append(f"{path.name}: {err.strerror}; left for a later run")
    return left


def _trash(root: Path) -> list[Path]:
    """List what has no name any more, and temporary files that nobody writes to."""
    found = [p for p in root.glob(f"{TRASH}*") if p.is_dir()]
    for path in root.glob(".*.ckz-tmp"):
        with contextlib.suppress(*_VANISHED):
            if time.time() - Footprint(path).changed > _ABANDONED:
                found.append(path)
    return sorted(p for p in found if not p.is_symlink())


def _empty(trash: Path) -> None:
    """Remove a file or directory; what others have open may vanish later on network systems."""
    with contextlib.suppress(*_VANISHED):
        retried(partial(shutil.rmtree, trash) if trash.is_dir() else trash.unlink)
    if trash.exists():
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(trash))
