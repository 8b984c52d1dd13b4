"""What the readers of one file and of a directory return, before it becomes a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckz.checkpoint import File, Span, Sum, Tensor


class Layout(NamedTuple):
    """Where the tensors of one file lie.

    Attributes
    ----------
    format : the reader's name, e.g. ``torch``.
    spans : with ``file`` 0, ordered by offset; may be empty (everything is skeleton).
    tensors : in the file's own order; piece spans index into ``spans``.
    warnings, missing : one line each, without the file's name.
    numbers : path and value of optimizer hyperparameters.
    sums : checksums that the file states of ranges that are no span, with ``file`` 0.
    """

    format: str
    spans: tuple[Span, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    sums: tuple[Sum, ...] = ()


class Scattered(NamedTuple):
    """A tensor that lies in files of a directory, in as many as it likes.

    Attributes
    ----------
    tensor : the span of each piece is numbered within the layout of that piece's file.
    files : the file of each piece, as an index into ``Directory.files``.
    """

    tensor: Tensor
    files: tuple[int, ...]


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
    scattered : tensors besides those of ``layouts``, by the names that the checkpoint gives them.
    """

    root: Path
    files: tuple[File, ...]
    layouts: tuple[Layout, ...]
    format: str = "directory"
    named: frozenset[int] = frozenset()
    missing: tuple[str, ...] = ()
    scattered: tuple[Scattered, ...] = ()


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


def distinct(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tell tensors of one name apart: ``w``, ``w#2``, ``w#3``."""
    taken = {tensor.name for tensor in tensors}
    if len(taken) == len(tensors):
        yield from tensors
        return
    count: dict[str, int] = {}
    for tensor in tensors:
        seen = count[tensor.name] = count.get(tensor.name, 0) + 1
        if seen == 1:
            yield tensor
            continue
        while (name := f"{tensor.name}#{seen}") in taken:
            seen += 1
        count[tensor.name] = seen
        taken.add(name)
        yield tensor._replace(name=name)
