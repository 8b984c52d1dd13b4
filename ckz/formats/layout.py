"""What the readers of one file and of a directory return, before it becomes a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ckz.checkpoint import File, Span, Tensor


class Layout(NamedTuple):
    """Where the tensors of one file lie.

    Attributes
    ----------
    format : the reader's name, e.g. ``torch``.
    spans : with ``file`` 0, ordered by offset; may be empty (everything is skeleton).
    tensors : in the file's own order; piece spans index into ``spans``.
    warnings, missing : one line each, without the file's name.
    """

    format: str
    spans: tuple[Span, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class Directory(NamedTuple):
    """A directory whose files were read one by one.

    Attributes
    ----------
    root : where it lies.
    files : its entries, sorted by path.
    layouts : of each entry; without anything for links and directories.
    format : ``directory``, or the name of the arrangement found in it.
    named : files whose tensors have the names that the whole checkpoint gives them; those of
        others are told apart by their files.
    missing : one line each.
    """

    root: Path
    files: tuple[File, ...]
    layouts: tuple[Layout, ...]
    format: str = "directory"
    named: frozenset[int] = frozenset()
    missing: tuple[str, ...] = ()


def order_spans(
    spans: Sequence[Span], tensors: Sequence[Tensor]
) -> tuple[tuple[Span, ...], tuple[Tensor, ...]]:
    """Sort one file's spans by offset, and renumber the pieces that lie in them."""
    order = sorted(range(len(spans)), key=lambda i: spans[i].offset)
    place = {old: new for new, old in enumerate(order)}
    return tuple(spans[i] for i in order), tuple(
        tensor._replace(pieces=tuple(p._replace(span=place[p.span]) for p in tensor.pieces))
        for tensor in tensors
    )
