"""Which parameter lies where in the flat partitions of a ZeRO optimizer.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one partition a
rank; behind the last parameter there may be padding. Stage 3 cuts each parameter into equal parts,
the last one padded, and lays a rank's parts end to end; its groups only cut that row again. The
flat moments of the optimizer are laid out as the flat parameters are.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckz.checkpoint import ITEMSIZE, Piece, Tensor
from ckz.formats.cuts import ALONE, boxes, cut, edges_of_tensors, pieces_of_run
from ckz.formats.layout import Layout, Scattered
from ckz.formats.pickles import Call
from ckz.formats.torch_objects import shape_of

_FP32 = re.compile(
    r"optimizer_state_dict\.(single_partition_of_fp32_groups|fp32_flat_groups)\.(\d{1,6})"
)
_STATE = re.compile(
    r"optimizer_state_dict\.(?:base_optimizer_state|optimizer_state_dict)(?:\.state)?"
    r"\.(\d{1,6})\.(\w+)"
)
_STAGE_3 = "fp32_flat_groups"

# Parameters of a group: names and shapes.
Group = Mapping[str, tuple[int, ...]]


class _Flat(NamedTuple):
    """A flat tensor of one rank: ``offset`` is in bytes from its span's start."""

    file: int
    dtype: str
    span: int
    offset: int
    length: int


class _Part(NamedTuple):
    """A run of a parameter, and where in a row of flat tensors it begins."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int
    at: int


class _Run(NamedTuple):
    """A part, as far as it lies in one flat tensor; ``offset`` is in bytes of its span."""

    flat: _Flat
    part: _Part
    begin: int
    end: int
    offset: int


class Found(NamedTuple):
    """The parameters of a ZeRO optimizer.

    Attributes
    ----------
    layouts : of the files, cut between parameters.
    tensors : ``zero.PARAMETER.fp32``, ``zero.PARAMETER.exp_avg``, ...
    """

    layouts: dict[int, Layout]
    tensors: list[Scattered]


def shapes_of(value: Any) -> list[Group] | None:
    """Read ``param_shapes``: of each group, or of the only one."""
    groups = value if isinstance(value, list) else [value]
    found: list[Group] = []
    for group in groups:
        if not isinstance(group, Call):
            return None
        shapes = {name: shape_of(size) for name, size in group.pairs if type(name) is str}
        known = {name: shape for name, shape in shapes.items() if shape is not None}
        if len(known) < len(group.pairs):
            return None
        found.append(known)
    return found


def find_parameters(
    ranks: Sequence[tuple[int, Layout]], groups: Sequence[Group], paddings: Any, prefix: str
) -> Found | str:
    """Tell the parameters in a ZeRO optimizer's partitions apart.

    Parameters
    ----------
    ranks : the file of each rank's partitions, in order, and its layout.
    groups : the parameters.
    paddings : ``param_alignment_paddings``: elements behind each parameter; None in most files.
    prefix : of the names.

    Returns
    -------
    What was found, or why it was not.
    """
    stages = set()
    flats: list[dict[tuple[str, int], _Flat]] = []
    for file, layout in ranks:
        stage, tensors = _flat_tensors(file, layout)
        stages.add(stage)
        flats.append(tensors)
    if len(stages) > 1 or not all(flats):
        return "not all ranks have flat parameters alike"
    rows = _rows_of_stage_3 if stages == {_STAGE_3} else _rows_of_stage_1
    runs: dict[tuple[str, int, str], list[_Run]] = defaultdict(list)
    for kind in dict.fromkeys(kind for kind, _ in flats[0]):
        try:
            found = list(rows(kind, flats, groups, paddings))
        except _Unlike as err:
            if kind == "fp32":
                return str(err)
            continue
        for group, row, parts in found:
            for run in _runs(row, parts):
                runs[kind, group, run.part.name].append(run)
    return _cut_out(ranks, runs, prefix)


class _Unlike(Exception):
    """The flat tensors are not laid out as the parameters' shapes say."""


def _flat_tensors(file: int, layout: Layout) -> tuple[str, dict[tuple[str, int], _Flat]]:
    """Find the flat tensors of one rank, by what they hold and their group."""
    found: dict[tuple[str, int], _Flat] = {}
    stage = ""
    for tensor in layout.tensors:
        match = _FP32.fullmatch(tensor.name)
        if match:
            stage = match[1]
        state = _STATE.fullmatch(tensor.name)
        if len(tensor.shape) != 1 or len(tensor.pieces) != 1 or not (match or state):
            continue
        piece = tensor.pieces[0]
        if piece.strides != (1,) or piece.offset % ITEMSIZE[tensor.dtype]:
            continue
        key = ("fp32", int(match[2])) if match else (state[2], int(state[1])) if state else None
        if key:
            found[key] = _Flat(file, tensor.dtype, piece.span, piece.offset, tensor.shape[0])
    # A state may have other tensors of one dimension.
    return stage, {
        key: flat
        for key, flat in found.items()
        if (fp32 := found.get(("fp32", key[1]))) and flat.length >= fp32.length
    }


def _rows_of_stage_1(
    kind: str,
    flats: Sequence[Mapping[tuple[str, int], _Flat]],
    groups: Sequence[Group],
    paddings: Any,
) -> Iterator[tuple[int, list[_Flat], list[_Part]]]:
    """Give the partitions of each group, rank after rank, and the parameters in them."""
    align = 2 * len(flats)
    for number, group in enumerate(groups):
        row = [rank.get((kind, number)) for rank in flats]
        behind = _paddings(paddings, number, len(group))
        parts = []
        at = 0
        for (name, shape), padding in zip(group.items(), behind, strict=True):
            count = math.prod(shape)
            parts.append(_Part(name, shape, 0, count, at))
            at += count + padding
        whole = [flat for flat in row if flat is not None]
        total = sum(flat.length for flat in whole)
        # Padding is not stored by all: the last partition ends with the parameters, or aligned.
        if len(whole) < len(row) or total < _end(parts) or -(-at // align) != -(-total // align):
            raise _Unlike(f"{kind} of group {number} has {total} elements in all, not {at}")
        _check_dtypes(kind, whole)
        yield number, whole, parts


def _rows_of_stage_3(
    kind: str,
    flats: Sequence[Mapping[tuple[str, int], _Flat]],
    groups: Sequence[Group],
    paddings: Any,
) -> Iterator[tuple[int, list[_Flat], list[_Part]]]:
    """Give all that each rank has, group after group, and the parts of parameters in it."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    _check_dtypes(kind, [t for rank in flats for (held, _), t in rank.items() if held == kind])
    for rank, tensors in enumerate(flats):
        numbers = sorted(group for name, group in tensors if name == kind)
        row = [tensors[kind, number] for number in numbers]
        parts = []
        at = 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            share = -(-count // len(flats))
            begin, end = (min(count, (rank + k) * share) for k in (0, 1))
            parts.append(_Part(name, shape, begin, end, at))
            at += share
        total = sum(flat.length for flat in row)
        if total != at:
            raise _Unlike(f"{kind} of rank {rank} has {total} elements, not {at}")
        yield 0, row, parts


def _check_dtypes(kind: str, flats: Sequence[_Flat]) -> None:
    if len({flat.dtype for flat in flats}) > 1:
        raise _Unlike(f"{kind} differs in dtype between ranks")


def _paddings(value: Any, group: int, count: int) -> Sequence[int]:
    """Give the padding behind each parameter of a group."""
    if value is None:
        return [0] * count
    behind = value[group] if isinstance(value, list) and group < len(value) else None
    if not isinstance(behind, list) or len(behind) != count:
        raise _Unlike(f"group {group} has no valid paddings")
    if any(type(padding) is not int or padding < 0 for padding in behind):
        raise _Unlike(f"group {group} has no valid paddings")
    return behind


def _end(parts: Sequence[_Part]) -> int:
    return parts[-1].at + parts[-1].end - parts[-1].begin if parts else 0


def _runs(row: Sequence[_Flat], parts: Iterable[_Part]) -> Iterator[_Run]:
    """Cut parts, which follow one another, where the flat tensors of a row end."""
    number = base = 0  # the flat tensor that parts lie in, and where in the row it begins
    for part in parts:
        at, begin = part.at, part.begin
        while begin < part.end:
            while at >= base + row[number].length:
                base += row[number].length
                number += 1
            flat = row[number]
            count = min(part.end - begin, base + flat.length - at)
            offset = flat.offset + (at - base) * ITEMSIZE[flat.dtype]
            yield _Run(flat, part, begin, begin + count, offset)
            at += count
            begin += count


def _cut_out(
    ranks: Sequence[tuple[int, Layout]],
    runs: Mapping[tuple[str, int, str], Sequence[_Run]],
    prefix: str,
) -> Found:
    """Cut the files' spans between parameters, and name each."""
    edges = {file: edges_of_tensors(layout) for file, layout in ranks}
    for several in runs.values():
        for run in several:
            at, itemsize = run.offset, ITEMSIZE[run.flat.dtype]
            known = edges[run.flat.file].setdefault(run.flat.span, set())
            for box in boxes(run.part.shape, run.begin, run.end):
                nbytes = math.prod(box.shape) * itemsize
                if nbytes >= ALONE:
                    known.update((at, at + nbytes))
                at += nbytes
    cuts = {file: cut(layout, edges[file]) for file, layout in ranks}
    tensors = []
    for (kind, _, name), several in runs.items():
        pieces: list[Piece] = []
        files: list[int] = []
        for flat, part, begin, end, offset in several:
            itemsize = ITEMSIZE[flat.dtype]
            new = list(
                pieces_of_run(cuts[flat.file], flat.span, offset, itemsize, part.shape, begin, end)
            )
            pieces += new
            files += [flat.file] * len(new)
        first = several[0]
        named = f"{prefix}zero.{name}.{kind}"
        tensor = Tensor(named, first.flat.dtype, first.part.shape, tuple(pieces))
        tensors.append(Scattered(tensor, tuple(files)))
    return Found({file: done.layout for file, done in cuts.items()}, tensors)
