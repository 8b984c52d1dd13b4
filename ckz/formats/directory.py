"""Directories: every entry in a fixed order, and the tensors of all files under one roof.

Each file's own reader finds its tensors; here they are joined. Where files belong together in a
way that their names or an index tell, an *arrangement* gives the directory back with better names
for its tensors, with other spans, and with what is missing. To add one, write a module and put its
function into ``ARRANGEMENTS``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from ckz.checkpoint import Checkpoint, File, Span, Tensor
from ckz.formats import dcp, deepspeed, hf_trainer, megatron, sharded
from ckz.formats.layout import Directory, Layout, distinct

ARRANGEMENTS: tuple[Callable[[Directory], Directory], ...] = (
    sharded.arrange,
    dcp.arrange,
    deepspeed.arrange,
    megatron.arrange,
    hf_trainer.arrange,
)


def read(root: Path, read_file: Callable[[Path, str], tuple[File, Layout]]) -> Checkpoint:
    """Read a directory as one checkpoint.

    Parameters
    ----------
    root : the directory.
    read_file : reads one regular file, given where it lies and its path below ``root``.
    """
    files: list[File] = []
    layouts: list[Layout] = []
    warnings: list[str] = []
    for entry in sorted(_entries(root), key=lambda entry: entry.path):
        if entry.kind == "file":
            file, layout = read_file(root / entry.path, entry.path)
        elif entry.kind:
            file, layout = entry, Layout("")
        else:
            warnings.append(f"{entry.path}: is a device, socket or pipe; it is not kept")
            continue
        files.append(file)
        layouts.append(layout)
    found = Directory(root, tuple(files), tuple(layouts))
    for arrange in ARRANGEMENTS:
        found = arrange(found)
    return _joined(found, warnings)


def _entries(root: Path) -> Iterator[File]:
    """List all that lies below a directory; links are not followed, unknown kinds are ``""``."""
    unread = [""]
    while unread:
        folder = unread.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                path = f"{folder}/{entry.name}" if folder else entry.name
                target = os.fspath(Path(entry.path).readlink()) if entry.is_symlink() else ""
                kind = _KINDS.get(stat.S_IFMT(info.st_mode), "")
                if kind == "dir":
                    unread.append(path)
                size = info.st_size if kind == "file" else 0
                mode = stat.S_IMODE(info.st_mode)
                yield File(path, size, mode, info.st_mtime_ns, kind, target)


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}


def _joined(found: Directory, warnings: list[str]) -> Checkpoint:
    """Join the layouts of all files; tensors are told apart by their files where need be."""
    info = found.root.stat()
    with_tensors = [index for index, layout in enumerate(found.layouts) if layout.tensors]
    spans: list[Span] = []
    tensors: list[Tensor] = []
    firsts: list[int] = []
    missing = list(found.missing)
    for index, (file, layout) in enumerate(zip(found.files, found.layouts, strict=True)):
        first = len(spans)
        firsts.append(first)
        plain = index in found.named or len(with_tensors) == 1
        spans.extend(span._replace(file=index) for span in layout.spans)
        for tensor in layout.tensors:
            pieces = tuple(piece._replace(span=piece.span + first) for piece in tensor.pieces)
            name = tensor.name if plain else f"{file.path}:{tensor.name}"
            tensors.append(tensor._replace(name=name, pieces=pieces))
        warnings.extend(f"{file.path}: {line}" for line in layout.warnings)
        missing.extend(f"{file.path}: {line}" for line in layout.missing)
    for tensor, places in found.scattered:
        pieces = tuple(
            piece._replace(span=piece.span + firsts[place])
            for piece, place in zip(tensor.pieces, places, strict=True)
        )
        tensors.append(tensor._replace(pieces=pieces))
    return Checkpoint(
        found.root,
        found.format,
        found.files,
        tuple(spans),
        tuple(distinct(tensors)),
        tuple(warnings),
        tuple(missing),
        {path: value for layout in found.layouts for path, value in layout.numbers},
        tuple(s._replace(file=i) for i, layout in enumerate(found.layouts) for s in layout.sums),
        is_directory=True,
        mode=stat.S_IMODE(info.st_mode),
        mtime_ns=info.st_mtime_ns,
    )
