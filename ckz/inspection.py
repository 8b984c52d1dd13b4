"""What ``inspect`` shows: every tensor with its cost, and totals by role."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.chain import Link, links
from ckz.checkpoint import ITEMSIZE, ROLES, Checkpoint, uncollected
from ckz.container import Container
from ckz.container_read import is_container, open_container
from ckz.errors import UsageError
from ckz.formats import read_checkpoint
from ckz.lossy.units import expert_units
from ckz.steps import step_of
from ckz.streams import span_roles

PACKED = "stored compressed"
SHARED = "shares memory"


class Row(NamedTuple):
    """One tensor.

    Attributes
    ----------
    nbytes : of its values.
    stored : bytes it takes in the .ckz, its share where tensors share; None for a source.
    notes : ``stored compressed``, ``shares memory``...
    method, largest_error, relative_error : of a tensor that is not exact, as in
        ``container.Loss``; None where it is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    nbytes: int
    stored: int | None
    notes: tuple[str, ...]
    method: str | None = None
    largest_error: float | None = None
    relative_error: float | None = None


class Stale(NamedTuple):
    """A part that a partial snapshot did not save anew.

    Attributes
    ----------
    expert : ``layer.number`` where it is one's, or empty.
    age : how many snapshots ago it was saved.
    step : at which, or None.
    """

    tensor: str
    expert: str
    nbytes: int
    age: int
    step: int | None


@dataclass(frozen=True)
class Inspection:
    """A checkpoint, looked at.

    Attributes
    ----------
    stored_nbytes : size of the .ckz; None for a source.
    roles : role -> (raw, stored or None) bytes; ``skeleton`` is what is no tensor.
    hidden_nbytes : bytes of storages that no tensor shows.
    codecs : codec text -> number of chunks; empty for a source.
    chain : the containers that this one leans on, itself first; empty if it is full.
    preset, resumable : what the .ckz was made with, and whether training can go on from it.
    step : that the checkpoint is of, or None.
    partial, plt : of a partial snapshot its policy, and the proportion of tokens that experts have
        seen since they were saved; else None.
    carried : what was not saved anew.
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
    chain: tuple[Link, ...]
    preset: str | None
    resumable: bool | None
    step: int | None
    partial: str | None
    plt: float | None
    carried: tuple[Stale, ...]
    warnings: tuple[str, ...]
    missing: tuple[str, ...]


def inspect(path: Path) -> Inspection:
    """Look at a .ckz, a checkpoint file or a directory; tensor data are not decoded.

    Raises
    ------
    CkzError
        If it is damaged or not supported.
    """
    if is_container(path):
        with uncollected(), open_container(path) as container:
            return _inspect(container.checkpoint, path, container)
    with uncollected():
        return _inspect(read_checkpoint(path), path, None)


def _inspect(checkpoint: Checkpoint, path: Path, container: Container | None) -> Inspection:
    nfiles = len(checkpoint.files)
    stored = _span_costs(container).tolist()[nfiles:] if container else None
    uses = Counter([piece.span for tensor in checkpoint.tensors for piece in tensor.pieces])
    losses = {loss.span: loss[1:] for loss in container.losses} if container else {}
    rows = []
    shown = [0] * len(checkpoint.spans)
    for name, dtype, shape, pieces, role, _ in checkpoint.tensors:
        nbytes = prod(shape) * ITEMSIZE[dtype]
        cost = None if stored is None else 0.0
        notes: tuple[str, ...] = ()
        loss: tuple[Any, ...] = ()
        for number in {piece.span for piece in pieces}:
            span = checkpoint.spans[number]
            shown[number] += nbytes
            if span.packed:
                notes = (PACKED,)
            if uses[number] > 1 and len(pieces) == 1:
                notes = (*notes, SHARED)
            if losses:
                loss = max(loss, losses.get(number, ()), key=lambda item: item[2:])
            if cost is not None and stored is not None:
                share = 1.0 if len(pieces) > 1 else min(1.0, nbytes / max(1, span.nbytes))
                cost += share * stored[number]
        rows.append(
            Row(
                name,
                dtype,
                shape,
                role,
                nbytes,
                None if cost is None else round(cost),
                notes,
                *loss,
            )
        )
    # At least what views fall short of: which bytes they show is not worked out.
    hidden = sum(
        max(0, span.nbytes - seen)
        for span, seen in zip(checkpoint.spans, shown, strict=True)
        if not span.packed
    )
    return Inspection(
        path=str(path),
        format=checkpoint.format,
        raw_nbytes=sum(file.size for file in checkpoint.files),
        stored_nbytes=container.nbytes if container else None,
        files=sum(file.kind == "file" for file in checkpoint.files),
        tensors=tuple(rows),
        roles=_roles(checkpoint, container),
        hidden_nbytes=hidden,
        codecs=_codecs(container) if container else {},
        chain=tuple(links(container)) if container else (),
        preset=container.meta["preset"] if container else None,
        resumable=container.meta["resumable"] if container else None,
        step=container.meta["step"] if container else step_of(path.name, checkpoint.numbers),
        partial=container.meta["partial"].get("policy") if container else None,
        plt=container.meta["partial"].get("plt") if container else None,
        carried=_stale(checkpoint, container) if container else (),
        warnings=checkpoint.warnings,
        missing=checkpoint.missing,
    )


def _stale(checkpoint: Checkpoint, container: Container) -> tuple[Stale, ...]:
    """Name what is carried, expert by expert where the policy is of these."""
    if not len(container.carried_rows):
        return ()
    names: dict[int, str] = {}
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            names.setdefault(piece.span, tensor.name)
    owners: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    with contextlib.suppress(UsageError):  # a mixture of experts is not what everyone saves
        for (layer, number), parts in expert_units(checkpoint).items():
            for part in parts:
                owner = part.start, part.start + part.nbytes, f"{layer}.{number}"
                owners[part.span].append(owner)
    found = []
    for span, start, nbytes, age, step in container.carried:
        name = names.get(span, "")
        inside = [
            (min(high, start + nbytes) - max(low, start), expert)
            for low, high, expert in owners.get(span, ())
            if low < start + nbytes and high > start
        ]
        for size, expert in inside or [(nbytes, "")]:
            found.append(Stale(name, expert, size, age, step))
    return tuple(found)


def _stream_costs(container: Container) -> npt.NDArray[np.int64]:
    """Give each stream's stored bytes."""
    ends = np.concatenate([[0], np.cumsum(container.chunks["stored"], dtype=np.int64)])
    costs: npt.NDArray[np.int64] = np.diff(ends[container.first_chunks])
    return costs


def _span_costs(container: Container) -> npt.NDArray[np.float64]:
    """Give each span's stored bytes: those of its stream, by its share of it."""
    if not len(container.streams):
        return np.zeros(len(container.spans))
    ratio = _stream_costs(container) / container.streams["nbytes"]
    costs: npt.NDArray[np.float64] = np.where(
        container.spans["nbytes"] > 0,
        ratio[np.minimum(container.spans["stream"], len(ratio) - 1)] * container.spans["nbytes"],
        0,
    )
    return costs


def _roles(
    checkpoint: Checkpoint, container: Container | None
) -> dict[str, tuple[int, int | None]]:
    """Total the bytes of every role; a model's cost counts for the tensor it is of."""
    raw: Counter[str] = Counter()
    for role, span in zip(span_roles(checkpoint), checkpoint.spans, strict=True):
        raw[role] += span.nbytes
    raw["skeleton"] = checkpoint.nbytes - raw.total()
    if container is None:
        return {role: (nbytes, None) for role, nbytes in raw.items()}
    stored: Counter[str] = Counter()
    skeletons = set(container.spans["stream"][: len(checkpoint.files)].tolist())
    for stream, nbytes in enumerate(_stream_costs(container).tolist()):
        role = ROLES[int(container.streams["role"][stream])]
        stored["skeleton" if stream in skeletons and role == "other" else role] += nbytes
    return {role: (raw[role], stored[role]) for role in raw | stored}


def _codecs(container: Container) -> dict[str, int]:
    counts = np.bincount(container.chunks["codec"], minlength=len(container.meta["codecs"]))
    return dict(zip(container.meta["codecs"], counts.tolist(), strict=True))
