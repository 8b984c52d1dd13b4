"""Readers of checkpoint files and directories, chosen by what a file holds, never by its suffix.

A reader is a module with ``sniff`` and ``read``. To add one, write the module and put it into
``READERS``; for the layout of a whole directory, see ``directory.py``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Protocol

from ckz.checkpoint import CKZ_MAGIC, Checkpoint, File, check_layout, uncollected
from ckz.errors import CkzError, CorruptError, UnsupportedError
from ckz.formats import (
    directory,
    gguf,
    hdf5,
    keras,
    numpy,
    safetensors,
    torch_legacy,
    torch_zip,
    zips,
)
from ckz.formats.layout import Layout
from ckz.formats.zips import Member
from ckz.roles import assign_roles
from ckz.source import Source, open_source


class Reader(Protocol):
    """What a module that reads one format has."""

    def sniff(self, head: bytes, /) -> bool:
        """Whether a file that begins with ``head`` may be of this format."""

    def read(self, source: Source, /) -> Layout:
        """Find the tensors of a file."""


READERS: tuple[Reader, ...] = (safetensors, torch_legacy, gguf, numpy, hdf5)

# Formats that are zip files, told apart by what a zip file holds.
ZIP_READERS: tuple[
    tuple[Callable[[Sequence[Member]], bool], Callable[[Source, Sequence[Member]], Layout]], ...
] = (
    (torch_zip.holds_torch, torch_zip.read_members),
    (keras.holds_keras, keras.read_members),
    (numpy.holds_npz, numpy.read_members),
)

_HEAD = 4096
# What a suffix promises; a name that breaks the promise is worth a warning.
_PROMISES = {
    ".gguf": "gguf",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".keras": "keras",
    ".npy": "npy",
    ".npz": "npz",
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "safetensors",
}
_HTML = (b"<!doctype html", b"<html")


def read_checkpoint(path: Path, *, opaque: bool = False) -> Checkpoint:
    """Find the files, spans and tensors of a checkpoint.

    Parameters
    ----------
    path : a file, or a directory of any layout; a link is followed, links inside are not.
    opaque : keep a named file that is damaged, or no checkpoint at all, as it is. Files inside of
        a directory always are.

    Raises
    ------
    CorruptError
        If the file is of a known format and damaged.
    UnsupportedError
        If it is no checkpoint: a git-LFS pointer, a web page, a device.
    OSError
        If it is absent or cannot be read.
    """
    with uncollected():
        if stat.S_ISDIR(path.stat().st_mode):
            checkpoint = directory.read(path, _read_member)
        else:
            file, layout = _read_file(path, path.name, str(path), opaque=opaque)
            checkpoint = Checkpoint(
                path,
                layout.format,
                (file,),
                *layout[1:3],
                layout.warnings,
                layout.missing,
                dict(layout.numbers),
            )
        return replace(checkpoint, tensors=assign_roles(checkpoint.tensors))


def read_source(source: Source) -> Layout:
    """Find the tensors of one file, or of a file inside another; opaque if no reader knows it.

    Raises
    ------
    CorruptError, UnsupportedError
        As ``read_checkpoint``.
    """
    head = source.read(0, min(_HEAD, source.size))
    suffix = PurePosixPath(source.name).suffix.lower()
    _refuse_placeholders(source.name, suffix, head)
    layout = _choose(source, head)
    check_layout(Checkpoint(Path(), layout.format, (File(source.name, source.size),), *layout[1:3]))
    promised = _PROMISES.get(suffix, layout.format)
    if promised == layout.format or not source.size:
        return layout
    if layout.format == "opaque" and promised == "safetensors":
        # The one format without a magic number: a stump of it looks like anything.
        raise CorruptError(f"{source.name}: is no safetensors file, or a damaged one")
    real = (
        "of no format that ckz knows" if layout.format == "opaque" else f"{layout.format} in fact"
    )
    return layout._replace(warnings=(f"is named {suffix}, but is {real}", *layout.warnings))


def _choose(source: Source, head: bytes) -> Layout:
    if head.startswith(CKZ_MAGIC):
        return Layout("ckz")  # it is HDF5 too, but of no tensors
    if zips.sniff(head):
        members = zips.members(source)
        for holds, read_members in ZIP_READERS:
            if holds(members):
                return read_members(source, members)
    for reader in READERS:
        if reader.sniff(head):
            return reader.read(source)
    return Layout("opaque")


def _refuse_placeholders(name: str, suffix: str, head: bytes) -> None:
    """Refuse what lies where a checkpoint should be when a download went wrong."""
    if head.startswith(b"version https://git-lfs"):
        raise UnsupportedError(
            f"{name}: is a git-LFS pointer, not the file it stands for; run 'git lfs pull'"
        )
    if head.lstrip()[:14].lower().startswith(_HTML) and suffix not in (".html", ".htm"):
        raise UnsupportedError(f"{name}: is an HTML page, not a checkpoint; download it again")


def _read_member(path: Path, name: str) -> tuple[File, Layout]:
    """Read a file of a directory: whatever is wrong with it is a warning."""
    return _read_file(path, name, name, opaque=True)


def _read_file(path: Path, name: str, shown: str, *, opaque: bool) -> tuple[File, Layout]:
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnsupportedError(f"{shown}: is neither a file nor a directory")
    with open_source(path, shown) as source:
        info = os.fstat(source.fd)
        try:
            layout = read_source(source)
        except CkzError as err:
            if not opaque:
                raise type(err)(f"{err} (--opaque keeps the file as it is)") from err
            reason = str(err).removeprefix(f"{shown}: ")
            layout = Layout("opaque", warnings=(f"{reason}; kept as opaque bytes",))
    mode = stat.S_IMODE(info.st_mode)
    return File(name, source.size, mode, info.st_mtime_ns), layout
