"""Two checkpoints as files: which belong together, and what differs besides tensors."""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckz.chain import Snapshot
from ckz.checkpoint import Checkpoint, File
from ckz.diffing.objects import ObjectDiff, compare_objects, kind_of, objects_of
from ckz.streams import CHUNK, skeletons_of
from ckz.values import ReadSpan
from ckz.workers import Workers, in_order

# They say where tensors lie, which is the container's matter.
_INDEXES = (".index.json", ".metadata")


class FileDiff(NamedTuple):
    """A file without tensors that differs: ``changed``, ``only_in_a`` or ``only_in_b``."""

    path: str
    status: str


class Rest(NamedTuple):
    """What differs besides tensors.

    Attributes
    ----------
    objects : values that can be read by name.
    files : those without tensors.
    unread : where bytes beside tensors differ that cannot be read by name.
    """

    objects: tuple[ObjectDiff, ...]
    files: tuple[FileDiff, ...]
    unread: tuple[str, ...]


class Files:
    """The files of two checkpoints, and how to read them without tensors."""

    def __init__(
        self, snapshots: tuple[Snapshot, Snapshot], spool: Path | None, workers: Workers
    ) -> None:
        self._snapshots = snapshots
        self._spool = spool
        self._workers = workers
        self._a, self._b = (snapshot.checkpoint for snapshot in snapshots)
        self._parts = skeletons_of(self._a), skeletons_of(self._b)
        self._holders = _with_tensors(self._a), _with_tensors(self._b)

    def compare(self) -> Rest:
        """Compare what lies beside tensors in files that belong together."""
        objects: list[ObjectDiff] = []
        files: list[FileDiff] = []
        unread: list[str] = []
        several = self._a.is_directory and self._b.is_directory
        for path, a, b in self._pairs():
            if a is None or b is None:
                files.append(FileDiff(path, "only_in_b" if a is None else "only_in_a"))
                continue
            tensors = a in self._holders[0] or b in self._holders[1]
            if self._same_skeleton(a, b) and (tensors or self._same_entry(a, b)):
                continue
            kinds = [
                kind_of(snapshot, parts[file])
                for snapshot, parts, file in zip(self._snapshots, self._parts, (a, b), strict=True)
            ]
            found = self._objects(a, b) if kinds[0] == kinds[1] != "" else None
            if found is not None:
                prefix = f"{path}:" if several else ""
                objects.extend(each._replace(name=prefix + each.name) for each in found)
            elif not tensors:
                files.append(FileDiff(path, "changed"))
            elif several or self._a.format == self._b.format:
                unread.append(path)
        return Rest(tuple(objects), tuple(files), tuple(unread))

    def _objects(self, a: int, b: int) -> list[ObjectDiff] | None:
        """Compare what two files hold besides tensors; None where that cannot be read."""
        mine = objects_of(self._snapshots[0], self._parts[0][a], self._spool)
        theirs = objects_of(self._snapshots[1], self._parts[1][b], self._spool)
        if mine is None or theirs is None:
            return None
        return list(compare_objects(mine, theirs))

    def identical(self, equal_spans: Set[int]) -> bool:
        """Tell whether the files are the same byte for byte; names of single files do not count.

        Parameters
        ----------
        equal_spans : those that are known to be equal in both.
        """
        places = [[span[:3] for span in each.spans] for each in (self._a, self._b)]
        numbers = range(len(self._a.files))
        if (
            self._a.is_directory != self._b.is_directory
            or len(self._a.files) != len(self._b.files)
            or places[0] != places[1]
            or not all(self._same_entry(file, file) for file in numbers)
            or not all(self._same_skeleton(file, file) for file in numbers)
        ):
            return False
        reads = self._snapshots[0].read, self._snapshots[1].read
        return all(
            self._same_bytes(reads, (span, span), nbytes)
            for span, (_, _, nbytes) in enumerate(places[0])
            if span not in equal_spans
        )

    def _pairs(self) -> Iterator[tuple[str, int | None, int | None]]:
        """Pair files by their paths in two directories; a single file with the other's only one."""
        if not (self._a.is_directory and self._b.is_directory):
            sole = [
                next(iter(holders)) if len(holders) == 1 else 0 if not each.is_directory else None
                for each, holders in zip((self._a, self._b), self._holders, strict=True)
            ]
            if sole[0] is not None and sole[1] is not None:
                yield self._a.files[sole[0]].path, sole[0], sole[1]
            return
        numbers = [
            {file.path: number for number, file in enumerate(each.files) if _counts(file)}
            for each in (self._a, self._b)
        ]
        for path in dict.fromkeys([*numbers[0], *numbers[1]]):
            a, b = numbers[0].get(path), numbers[1].get(path)
            # What tensors lack a counterpart is said of each of them.
            alone = a in self._holders[0] if b is None else b in self._holders[1]
            if (a is not None and b is not None) or not alone:
                yield path, a, b

    def _same_entry(self, a: int, b: int) -> bool:
        mine, theirs = self._a.files[a], self._b.files[b]
        return mine[1:2] + mine[4:] == theirs[1:2] + theirs[4:] and (
            mine.path == theirs.path or not self._a.is_directory
        )

    def _same_skeleton(self, a: int, b: int) -> bool:
        reads = self._snapshots[0].read_skeleton, self._snapshots[1].read_skeleton
        sizes = self._parts[0][a].nbytes, self._parts[1][b].nbytes
        return sizes[0] == sizes[1] and self._same_bytes(reads, (a, b), sizes[0])

    def _same_bytes(
        self, reads: tuple[ReadSpan, ReadSpan], numbers: tuple[int, int], nbytes: int
    ) -> bool:
        jobs = (
            partial(_same_run, reads, numbers, at, min(CHUNK, nbytes - at))
            for at in range(0, nbytes, CHUNK)
        )
        return all(in_order(self._workers, jobs))


def _same_run(
    reads: tuple[ReadSpan, ReadSpan], numbers: tuple[int, int], at: int, nbytes: int
) -> bool:
    a, b = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    for read, number, out in zip(reads, numbers, (a, b), strict=True):
        read(number, at, out)
    return np.array_equal(a, b)


def _counts(file: File) -> bool:
    return file.kind != "dir" and not file.path.endswith(_INDEXES)


def _with_tensors(checkpoint: Checkpoint) -> frozenset[int]:
    return frozenset(
        checkpoint.spans[piece.span].file
        for tensor in checkpoint.tensors
        for piece in tensor.pieces
    )
