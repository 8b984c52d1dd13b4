"""What ``inspect`` shows: every tensor with its cost, and totals by role."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckz.checkpoint import Checkpoint
from ckz.container import Container
from ckz.container_read import is_container, open_container
from ckz.formats import read_checkpoint
from ckz.streams import span_roles


class Row(NamedTuple):
    """One tensor.

    Attributes
    ----------
    nbytes : of its values.
    stored : bytes it takes in the .ckz, its share where tensors share; None for a source.
    notes : ``stored compressed``, ``shares memory``...
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    nbytes: int
    stored: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, looked at.

    Attributes
    ----------
    stored_nbytes : size of the .ckz; None for a source.
    roles : role -> (raw, stored or None) bytes; ``skeleton`` is what is no tensor.
    hidden_nbytes : bytes of storages that no tensor shows.
    codecs : codec text -> number of chunks; empty for a source.
    """

    path: str
    format: str
    raw_nbytes: int
    stored_nbytes: int | None
    files: int
    tensors: tuple[Row, ...]
    roles: dict[str, tuple[int, int | None]]
    hidden_nbytes: int
    codecs: dict[str, int]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def inspect(path: Path) -> Inspection:
    """Look at a .ckz, a checkpoint file or a directory; tensor data are not decoded.

    Raises
    ------
    CkzError
        If it is damaged or not supported.
    """
    if is_container(path) or (path.suffix == ".ckz" and path.is_file()):
        with open_container(path) as container:
            return _inspect(container.checkpoint, path, container)
    return _inspect(read_checkpoint(path), path, None)


def _inspect(checkpoint: Checkpoint, path: Path, container: Container | None) -> Inspection:
    nfiles = len(checkpoint.files)
    stored = _span_costs(container).tolist() if container else None
    users = np.zeros(len(checkpoint.spans), np.int64)
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            users[piece.span] += 1
    shared = (users > 1).tolist()
    rows = []
    for tensor in checkpoint.tensors:
        nbytes = tensor.nbytes
        spans = {piece.span for piece in tensor.pieces}
        notes = []
        if any(checkpoint.spans[span].packed for span in spans):
            notes.append("stored compressed")
        if any(shared[span] for span in spans):
            notes.append("shares memory")
        cost = None
        if stored is not None:
            whole = sum(checkpoint.spans[span].nbytes for span in spans)
            part = min(1.0, nbytes / whole) if whole else 0.0
            cost = round(part * sum(stored[nfiles + span] for span in spans))
        rows.append(
            Row(tensor.name, tensor.dtype, tensor.shape, tensor.role, nbytes, cost, tuple(notes))
        )
    return Inspection(
        path=str(path),
        format=checkpoint.format,
        raw_nbytes=sum(file.size for file in checkpoint.files),
        stored_nbytes=container.nbytes if container else None,
        files=sum(file.kind == "file" for file in checkpoint.files),
        tensors=tuple(rows),
        roles=_roles(checkpoint, stored),
        hidden_nbytes=_hidden(checkpoint),
        codecs=_codecs(container) if container else {},
        warnings=checkpoint.warnings,
        missing=checkpoint.missing,
    )


def _span_costs(container: Container) -> np.ndarray:
    """Give each span's stored bytes: those of its stream, by its share of it."""
    if not len(container.streams):
        return np.zeros(len(container.spans))
    starts = container.first_chunks[:-1]
    per_stream = np.add.reduceat(container.chunks["stored"].astype(np.int64), starts)
    ratio = per_stream / container.streams["nbytes"]
    costs: np.ndarray = np.where(
        container.spans["nbytes"] > 0,
        ratio[np.minimum(container.spans["stream"], len(ratio) - 1)] * container.spans["nbytes"],
        0,
    )
    return costs


def _roles(checkpoint: Checkpoint, stored: list[float] | None) -> dict[str, tuple[int, int | None]]:
    nfiles = len(checkpoint.files)
    skeleton = sum(file.size for file in checkpoint.files) - sum(
        span.nbytes for span in checkpoint.spans
    )
    entries = [("skeleton", skeleton, sum(stored[:nfiles]) if stored else 0.0)]
    for number, (role, span) in enumerate(
        zip(span_roles(checkpoint), checkpoint.spans, strict=True), start=nfiles
    ):
        entries.append((role, span.nbytes, stored[number] if stored else 0.0))
    totals: dict[str, list[float]] = {}
    for role, raw, cost in entries:
        total = totals.setdefault(role, [0, 0.0])
        total[0] += raw
        total[1] += cost
    return {
        role: (int(raw), round(cost) if stored is not None else None)
        for role, (raw, cost) in totals.items()
    }


def _hidden(checkpoint: Checkpoint) -> int:
    """Count bytes of plain spans that no tensor could show: at least what views fall short of."""
    seen = [0] * len(checkpoint.spans)
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            seen[piece.span] += tensor.nbytes
    return sum(
        max(0, span.nbytes - shown)
        for span, shown in zip(checkpoint.spans, seen, strict=True)
        if not span.packed
    )


def _codecs(container: Container) -> dict[str, int]:
    counts = np.bincount(container.chunks["codec"], minlength=len(container.meta["codecs"]))
    return dict(zip(container.meta["codecs"], counts.tolist(), strict=True))
