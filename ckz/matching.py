"""Which tensor of a base each tensor of a checkpoint continues.

By name first, then by order among tensors of one dtype, shape and role (renamed, re-sharded), then
by place (parts of tensors that lie in several files). What is wrong about a pair costs bytes, never
correctness: the encoder measures on samples whether a difference pays.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from ckz.checkpoint import Checkpoint, Tensor
from ckz.container import Ref
from ckz.runs import runs_of, whole_span
from ckz.streams import SMALL

_NUMBER = re.compile(r"\d+")


class Lean(NamedTuple):
    """Ranges of bytes that a span derives from, and their dtype.

    Attributes
    ----------
    certain : whether names say so. What is guessed by order or place may be another tensor, which
        costs an exact difference only bytes.
    """

    dtype: str
    refs: tuple[Ref, ...]
    certain: bool = False


def match_base(checkpoint: Checkpoint, base: Checkpoint) -> dict[int, Lean]:
    """Pair spans with the ranges of base spans that they continue.

    Returns
    -------
    span -> what it continues, with ``where`` 1 and ``span`` an index into the base's spans. It is
    as long as the span, unless the tensor grew or shrank by rows, or had another dtype.
    """
    found: dict[int, Lean] = {}
    theirs = {t.name: t for t in base.tensors if t.pieces and not t.transform}
    plain = Counter(_plain(name) for name in theirs)
    by_plain = {_plain(name): name for name in theirs if plain[_plain(name)] == 1}
    taken: set[str] = set()
    left: list[tuple[int, Tensor]] = []
    for span, tensor in _whole_tensors(checkpoint):
        name = tensor.name if tensor.name in theirs else by_plain.get(_plain(tensor.name), "")
        if name and (refs := _continued(base, tensor, theirs[name])):
            found[span] = Lean(theirs[name].dtype, refs, certain=True)
            taken.add(name)
        else:
            left.append((span, tensor))
    kinds: dict[tuple[str, tuple[int, ...], str], deque[Tensor]] = defaultdict(deque)
    for name, tensor in theirs.items():
        if name not in taken:
            kinds[tensor.dtype, tensor.shape, tensor.role].append(tensor)
    for span, tensor in left:
        kind = kinds[tensor.dtype, tensor.shape, tensor.role]
        other = kind.popleft() if kind else None
        if other is not None and (refs := _continued(base, tensor, other)):
            found[span] = Lean(other.dtype, refs)
    theirs_by_place = _by_place(base)
    names, their_names = _names(checkpoint), _names(base)
    for place, span in _by_place(checkpoint).items():
        if span not in found and place in theirs_by_place:
            number = theirs_by_place[place]
            whole = base.spans[number]
            certain = not names[span].isdisjoint(their_names[number])
            found[span] = Lean(whole.dtype, (Ref(number, 0, whole.nbytes, where=1),), certain)
    return found


def _by_place(checkpoint: Checkpoint) -> dict[tuple[str, str, int, int], int]:
    """Number large spans by where they stand: file, dtype, size, and rank among such.

    So the parts of a tensor that lies in several files find those of the save before. Numbers in
    directory names are steps, and do not count.
    """
    places: dict[tuple[str, str, int, int], int] = {}
    ranks: Counter[tuple[str, str, int]] = Counter()
    for number, span in enumerate(checkpoint.spans):
        if span.nbytes >= SMALL and span.byteorder == "<" and not span.packed:
            folder, _, name = checkpoint.files[span.file].path.rpartition("/")
            single = not checkpoint.is_directory
            path = "" if single else f"{_NUMBER.sub('#', folder)}/{name}"
            kind = path, span.dtype, span.nbytes
            places[*kind, ranks[kind]] = number
            ranks[kind] += 1
    return places


def _names(checkpoint: Checkpoint) -> dict[int, set[tuple[object, ...]]]:
    """Give what each span holds: tensors by name, and which part of them."""
    found: dict[int, set[tuple[object, ...]]] = defaultdict(set)
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            found[piece.span].add((_plain(tensor.name), tensor.shape, piece.start))
    return found


def _plain(name: str) -> str:
    """Name a tensor without the file of a directory that it lies in."""
    return name.rpartition(":")[2]


def _whole_tensors(checkpoint: Checkpoint) -> Iterator[tuple[int, Tensor]]:
    """Give tensors that fill a span alone."""
    seen: set[int] = set()
    for tensor in checkpoint.tensors:
        span = whole_span(checkpoint, tensor)
        if span is not None and span not in seen:
            seen.add(span)
            yield span, tensor


def _continued(base: Checkpoint, tensor: Tensor, other: Tensor) -> tuple[Ref, ...]:
    """Give the base tensor's ranges, row-major, if the two differ in their first side at most."""
    if other.shape[1:] != tensor.shape[1:] or len(other.shape) != len(tensor.shape):
        return ()
    refs = tuple(Ref(*run, where=1) for run in runs_of(base, other))
    return refs if sum(ref.nbytes for ref in refs) == other.nbytes else ()
