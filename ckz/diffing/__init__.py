"""What changed from one checkpoint to another, by value, whatever files they lie in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ckz import kernels
from ckz.chain import Snapshot, open_snapshot
from ckz.checking import check_unchanged
from ckz.checkpoint import ITEMSIZE, Checkpoint, Tensor, extent, uncollected
from ckz.container_read import is_container
from ckz.diffing.blocks import Side
from ckz.diffing.files import FileDiff, Files, Rest
from ckz.diffing.matching import Pair, match, match_renamed
from ckz.diffing.objects import ObjectDiff
from ckz.diffing.packed import reading_unpacked
from ckz.diffing.stats import Stats, Tolerance, total
from ckz.diffing.tensors import Sides, compare_tensors, digests
from ckz.inspection import PACKED
from ckz.workers import DEFAULT_MEMORY, Workers, start_workers

# What a tensor may be, in the order of a report.
STATUSES = (
    "shape_differs",
    "only_in_a",
    "only_in_b",
    "renamed",
    "dtype_differs",
    "changed",
    "within_tolerance",
    "bits_differ",
    "equal",
)


class TensorDiff(NamedTuple):
    """A tensor of either checkpoint, or of both.

    Attributes
    ----------
    a, b : the tensor on each side; None where it is not there.
    status : one of ``STATUSES``. ``bits_differ``: the values are equal, as 0.0 and -0.0 are.
    same : whether it counts as equal, with the tolerance and what else was asked for.
    stats : how values differ; None where there is nothing to compare.
    notes : ``stored compressed``, ``big-endian in A`` or ``B``.
    """

    a: Tensor | None
    b: Tensor | None
    status: str
    same: bool
    stats: Stats | None = None
    notes: tuple[str, ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The tensor in ``a``, else that in ``b``."""
        tensor = self.a or self.b
        assert tensor is not None
        return tensor

    @property
    def name(self) -> str:
        """Its name in ``a``, else in ``b``."""
        return self.tensor.name


class RoleDiff(NamedTuple):
    """The tensors of one role: how many, how many of them differ, and how their values do.

    ``stats`` are of those on both sides; norms and counts of NaN of those that differ.
    """

    tensors: int
    differing: int
    stats: Stats


class Origin(NamedTuple):
    """One side of a comparison."""

    path: str
    format: str
    files: int
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two checkpoints.

    Attributes
    ----------
    tensors : in the order of ``a``, then what only ``b`` has.
    objects, files : other values and files without tensors, where they differ.
    roles : role -> its tensors.
    verdict : ``identical``: byte for byte. ``same_content``: the same tensors and other values in
        another container. ``same_tensors``: bytes differ that cannot be read by name. ``same``:
        with the tolerance or the choice of tensors that was asked for. ``differ``.
    warnings : one line each.
    """

    a: Origin
    b: Origin
    tensors: tuple[TensorDiff, ...]
    objects: tuple[ObjectDiff, ...]
    files: tuple[FileDiff, ...]
    roles: dict[str, RoleDiff]
    verdict: str
    warnings: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs that counts."""
        return self.verdict != "differ"


def rank(status: str, stats: Stats | None) -> tuple[int, float, float]:
    """Give a key that orders by status, then the largest change first."""
    change = share = 0.0
    if stats and stats.bits:
        relative = stats.relative_l2
        change = math.inf if relative is None else relative
        share = stats.changed / stats.elements
    return STATUSES.index(status), -change, -share


def diff(
    a: Path,
    b: Path,
    *,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    numeric: bool = False,
    base_dir: Path | None = None,
    threads: int = 0,
    memory: int = DEFAULT_MEMORY,
    spool: Path | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints: files, directories, .ckz, in any mix.

    Parameters
    ----------
    only, ignore : glob patterns of names; ``*`` also matches dots.
    atol, rtol : values of ``b`` within ``atol + rtol * |a|`` count as unchanged.
    numeric : equal values count as equal, whatever their bits and dtypes.
    base_dir : where bases of a .ckz are looked for, and beside it.
    spool : directory for temporary files; the system's if None.
    progress : called with (bytes of ``a`` compared, bytes in all, 0).

    Raises
    ------
    CkzError
        If one is damaged, not supported, changes, or lacks its base.
    """
    with ExitStack() as stack:
        with uncollected():
            first = stack.enter_context(open_snapshot(a, base_dir=base_dir))
            second = stack.enter_context(open_snapshot(b, base_dir=base_dir))
        snapshots = first, second
        sides = _side(first, spool, stack), _side(second, spool, stack)
        # Comparing costs several times what coding does, so compiling pays earlier.
        kernels.enable(2 * max(side.checkpoint.nbytes for side in sides))
        workers = stack.enter_context(start_workers(threads, memory))
        pairs = match(sides[0].checkpoint, sides[1].checkpoint)
        pairs = [pair for pair in pairs if any(_chosen(n, only, ignore) for n in pair.names)]
        pairs = match_renamed(pairs, lambda side, tensors: digests(sides[side], tensors, workers))
        tolerance = Tolerance(atol, rtol)
        stats = _compare(sides, pairs, tolerance, workers, progress)
        rows = [
            _judge(sides, pair, found, numeric=numeric, tolerant=any(tolerance))
            for pair, found in zip(pairs, stats, strict=True)
        ]
        files = Files(snapshots, spool, workers)
        rest = files.compare()
        rest = Rest(
            tuple(each for each in rest.objects if _chosen(each.name, only, ignore)),
            tuple(each for each in rest.files if _chosen(each.path, only, ignore)),
            rest.unread,
        )
        all_equal = not (only or ignore) and all(row.status == "equal" for row in rows)
        if rest.objects or rest.files or not all(row.same for row in rows):
            verdict = "differ"
        elif not all_equal:
            verdict = "same"
        elif files.identical(_equal_spans(sides, rows)):
            verdict = "identical"
        else:
            verdict = "same_tensors" if rest.unread else "same_content"
        for path, side in zip((a, b), sides, strict=True):
            if not is_container(path):
                check_unchanged(side.checkpoint)
    return Comparison(
        _origin(snapshots[0]),
        _origin(snapshots[1]),
        tuple(rows),
        rest.objects,
        rest.files,
        _roles(rows),
        verdict,
        tuple(_warnings(snapshots)),
    )


def _side(snapshot: Snapshot, spool: Path | None, stack: ExitStack) -> Side:
    reading = reading_unpacked(snapshot.checkpoint, snapshot.read, spool)
    return Side(snapshot.checkpoint, stack.enter_context(reading))


def _origin(snapshot: Snapshot) -> Origin:
    checkpoint = snapshot.checkpoint
    files = sum(file.kind == "file" for file in checkpoint.files)
    nbytes, tensors = checkpoint.nbytes, len(checkpoint.tensors)
    return Origin(str(snapshot.path), checkpoint.format, files, tensors, nbytes)


def _warnings(snapshots: Iterable[Snapshot]) -> Iterator[str]:
    for path, checkpoint, *_ in snapshots:
        yield from (f"{path}: {line}" for line in checkpoint.warnings)
        yield from (f"{path}: incomplete: {line}" for line in checkpoint.missing)


def _chosen(name: str, only: Sequence[str], ignore: Sequence[str]) -> bool:
    return (not only or any(fnmatchcase(name, glob) for glob in only)) and not any(
        fnmatchcase(name, glob) for glob in ignore
    )


def _compare(
    sides: Sides,
    pairs: Sequence[Pair],
    tolerance: Tolerance,
    workers: Workers,
    progress: Callable[[int, int, int], None] | None,
) -> list[Stats | None]:
    """Compare the values of those pairs that are of one shape."""
    comparable = [
        (at, pair.a, pair.b)
        for at, pair in enumerate(pairs)
        if pair.a and pair.b and pair.a.shape == pair.b.shape
    ]
    # An expanded tensor has more elements than bytes; its storage is what is read.
    size = sides[0].checkpoint.nbytes
    expected = sum(min(a.nbytes, size) for _, a, _ in comparable)
    done = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, max(done, expected), 0)

    stats: list[Stats | None] = [None] * len(pairs)
    tensors = [(a, b) for _, a, b in comparable]
    found = compare_tensors(sides, tensors, tolerance, workers, on_bytes)
    for (at, _, _), each in zip(comparable, found, strict=True):
        stats[at] = each
    return stats


def _judge(
    sides: Sides, pair: Pair, stats: Stats | None, *, numeric: bool, tolerant: bool
) -> TensorDiff:
    """Say what a pair of tensors is, and whether that counts as a difference."""
    a, b, _ = pair
    if a is None or b is None:
        return TensorDiff(a, b, "only_in_a" if a else "only_in_b", same=False)
    status, same = _status(pair, stats, numeric=numeric, tolerant=tolerant)
    return TensorDiff(a, b, status, same, stats, tuple(_notes(sides, (a, b))))


def _notes(sides: Sides, tensors: tuple[Tensor, Tensor]) -> Iterator[str]:
    spans = [
        [side.checkpoint.spans[piece.span] for piece in tensor.pieces]
        for side, tensor in zip(sides, tensors, strict=True)
    ]
    if any(span.packed for each in spans for span in each):
        yield PACKED
    if ITEMSIZE[tensors[0].dtype] > 1:
        big = [any(span.byteorder == ">" for span in each) for each in spans]
        if big[0] != big[1]:
            yield f"big-endian in {'A' if big[0] else 'B'}"


def _status(pair: Pair, stats: Stats | None, *, numeric: bool, tolerant: bool) -> tuple[str, bool]:
    a, b, _ = pair
    assert a is not None
    assert b is not None
    if a.shape != b.shape:
        return "shape_differs", False
    if a.dtype != b.dtype:
        return "dtype_differs", numeric and stats is not None and not stats.changed
    assert stats is not None
    if stats.changed:
        return "changed", False
    if stats.within:
        return "within_tolerance", True
    if stats.bits:
        return "bits_differ", numeric or tolerant
    return ("renamed", False) if pair.renamed else ("equal", True)


def _roles(rows: Iterable[TensorDiff]) -> dict[str, RoleDiff]:
    by_role: dict[str, list[TensorDiff]] = defaultdict(list)
    for row in rows:
        by_role[row.tensor.role].append(row)
    return {
        role: RoleDiff(
            len(members),
            sum(not row.same for row in members),
            total(row.stats for row in members if row.stats),
        )
        for role, members in sorted(by_role.items())
    }


def _equal_spans(sides: Sides, rows: Iterable[TensorDiff]) -> set[int]:
    """Give the spans that equal tensors fill, at the same place in both checkpoints."""
    found = set()
    for row in rows:
        spans = [
            _filled(side.checkpoint, tensor)
            for side, tensor in zip(sides, (row.a, row.b), strict=True)
        ]
        if row.status == "equal" and spans[0] is not None and spans[0] == spans[1]:
            found.add(spans[0][0])
    return found


def _filled(
    checkpoint: Checkpoint, tensor: Tensor | None
) -> tuple[int, str, tuple[int, ...]] | None:
    """Give the span that a tensor fills to the last byte, its byte order and strides."""
    if tensor is None or len(tensor.pieces) != 1:
        return None
    (piece,) = tensor.pieces
    span = checkpoint.spans[piece.span]
    nbytes = extent(piece, ITEMSIZE[tensor.dtype])
    if (
        span.packed
        or tensor.transform
        or piece.offset
        or not tensor.nbytes == nbytes == span.nbytes
    ):
        return None
    return piece.span, span.byteorder, piece.strides
