"""The files that decompress makes, and what a .ckz is called and may be read by."""

from __future__ import annotations

import hashlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event

from ckz import atomic
from ckz.checkpoint import Checkpoint
from ckz.container import Container
from ckz.errors import CorruptError, UnsupportedError
from ckz.streams import CHUNK


def recorded_name(container: Container) -> str:
    """Give the name of the file inside; a directory is named after its container."""
    if not container.meta["directory"]:
        return container.names[0]
    own = container.path.name
    if not own.endswith(".ckz"):
        raise UnsupportedError(f"{container.path}: name the output with --output")
    return own.removesuffix(".ckz")


def mode_for(source: Path, target: Path) -> int:
    """Keep the mode of a file replaced; a new one is no more open than its source."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    return source.stat().st_mode & 0o666


def sha256_of(checkpoint: Checkpoint, ended: Event) -> dict[str, str]:
    """Give the digest of each file; whatever, once ``ended`` is set."""
    return {
        file.path: _sha256(checkpoint.path_of(index), ended)
        for index, file in enumerate(checkpoint.files)
        if file.kind == "file"
    }


def _sha256(path: Path, ended: Event | None = None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
            if ended and ended.is_set():
                break
    return digest.hexdigest()


def check_sha256(container: Container, paths: list[Path]) -> None:
    for path, file in zip(paths, container.checkpoint.files, strict=True):
        expected = container.meta["sha256"].get(file.path) if file.kind == "file" else None
        if expected and _sha256(path) != expected:
            raise CorruptError(f"{container.path}: file {file.path!r}: sha256 mismatch")


def new_output(checkpoint: Checkpoint, target: Path, force: bool) -> AbstractContextManager[Path]:
    if checkpoint.is_directory:
        return atomic.new_directory(target, force=force)
    return atomic.new_file(target, force=force, mode=checkpoint.files[0].mode & 0o1777)


def create_files(checkpoint: Checkpoint, root: Path) -> list[Path]:
    """Make directories, links and files of full length; return where each entry lies."""
    paths = [root / f.path if checkpoint.is_directory else root for f in checkpoint.files]
    for path, file in zip(paths, checkpoint.files, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.kind == "dir":
            path.mkdir(exist_ok=True)
        elif file.kind == "link":
            path.symlink_to(file.target)
        else:
            with path.open("wb") as out:
                out.truncate(file.size)
    return paths


def set_attributes(checkpoint: Checkpoint, paths: list[Path], root: Path) -> None:
    """Set modes and times, of what lies inside a directory before the directory itself.

    Files do not get back the bits that let them run as their owner: the container may be anyone's.
    """
    for path, file in reversed(list(zip(paths, checkpoint.files, strict=True))):
        if file.kind != "link":
            path.chmod(file.mode & (0o3777 if file.kind == "dir" else 0o1777))
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns), follow_symlinks=False)
    if checkpoint.is_directory:
        root.chmod(checkpoint.mode & 0o3777)
        os.utime(root, ns=(checkpoint.mtime_ns, checkpoint.mtime_ns))
