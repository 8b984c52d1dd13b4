"""What compress, decompress and verify say of what they did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckz.checkpoint import Checkpoint
from ckz.container import Loss
from ckz.encoding import Predicted
from ckz.partial import Partial

# Bytes done, bytes in all, bytes stored.
OnProgress = Callable[[int, int, int], None]


class NamedLoss(NamedTuple):
    """A tensor that is not restored exactly, and by how much; as in ``container.Loss``."""

    tensor: str
    method: str
    largest: float
    relative: float


@dataclass(frozen=True)
class Report:
    """What compress, decompress or verify did.

    Attributes
    ----------
    source, output : paths as text; no output for verify.
    raw_nbytes, stored_nbytes : size of the original files and of the container.
    tensors : how many there are.
    seconds : wall time.
    warnings : one line each.
    sha256 : path inside the checkpoint -> hex digest; empty unless it was asked for.
    roles : role -> (raw, stored) bytes of its chunks; ``skeleton`` is what is no tensor.
    plan : of a dry run: role, codec, bytes, and about how many they become.
    losses : what is not restored exactly.
    resumable : whether training can go on from what is restored.
    partial : of a partial snapshot its ``policy``, bytes ``fresh`` and ``carried``,
        ``fresh_by_file`` and their ``imbalance`` (how far the largest is above the mean), and for
        experts ``plt``, the proportion of tokens that would be lost; else empty.
    mean_error : of what was chosen within a budget, as ``lossy.budgeting`` measures it.
    """

    source: str
    output: str
    raw_nbytes: int
    stored_nbytes: int
    tensors: int
    seconds: float
    warnings: tuple[str, ...] = ()
    sha256: dict[str, str] = field(default_factory=dict)
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    plan: tuple[tuple[str, str, int, int], ...] = ()
    losses: tuple[NamedLoss, ...] = ()
    resumable: bool = True
    partial: Mapping[str, Any] = field(default_factory=dict)
    mean_error: float | None = None


def partial_report(part: Partial) -> dict[str, Any]:
    if not part.record:
        return {}
    found: dict[str, Any] = {"policy": part.record["policy"]}
    if "plt" in part.record:
        found["plt"] = part.record["plt"]
    found |= {"fresh": part.fresh_nbytes, "carried": part.carried_nbytes}
    # What one rank has to write more than the ranks do on average.
    loads = part.fresh_by_file
    mean = part.fresh_nbytes / max(1, len(loads))
    imbalance = max(loads.values(), default=0) / mean - 1 if mean else 0.0
    return {**found, "fresh_by_file": loads, "imbalance": imbalance}


def summarize(predicted: Iterable[Predicted]) -> tuple[tuple[str, str, int, int], ...]:
    """Total the bytes of each role and codec, before and after, largest first."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for one in predicted:
        raw, coded = totals.get((one.role, one.codec), (0, 0.0))
        totals[one.role, one.codec] = raw + one.nbytes, coded + one.stored
    rows = [(*key, raw, round(stored)) for key, (raw, stored) in totals.items()]
    return tuple(sorted(rows, key=lambda row: -row[2]))


def name_losses(checkpoint: Checkpoint, losses: Sequence[Loss]) -> tuple[NamedLoss, ...]:
    """Name the tensors that are not exact; those that share a span are named together."""
    names: dict[int, str] = {}
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            names.setdefault(piece.span, tensor.name)
    return tuple(
        NamedLoss(names.get(loss.span, ""), loss.method, loss.largest, loss.relative)
        for loss in losses
    )


class Progress:
    """Counts chunks, tells the user, and says in words what the disk would have to hold."""

    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self._total = total
        self._tell = tell
        self._done = 0
        self._stored = 0
        self.roles: dict[str, tuple[int, int]] = {}

    def add(self, role: str, raw: int, stored: int) -> None:
        self._done += raw
        self._stored += stored
        before = self.roles.get(role, (0, 0))
        self.roles[role] = before[0] + raw, before[1] + stored
        if self._tell:
            self._tell(self._done, self._total, self._stored)

    def __str__(self) -> str:
        estimate = self._stored * self._total // max(1, self._done)
        return f"about {max(estimate, self._stored)} bytes needed"


def report_on(
    source: Path,
    output: str | os.PathLike[str],
    checkpoint: Checkpoint,
    stored: int,
    began: float,
    sha256: dict[str, str] | None = None,
    roles: dict[str, tuple[int, int]] | None = None,
) -> Report:
    return Report(
        source=str(source),
        output=str(output),
        raw_nbytes=checkpoint.nbytes,
        stored_nbytes=stored,
        tensors=len(checkpoint.tensors),
        seconds=time.perf_counter() - began,
        warnings=checkpoint.warnings,
        sha256=sha256 or {},
        roles=roles or {},
    )
