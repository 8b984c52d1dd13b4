"""What ``ckz diff`` prints for a person."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckz.cli import names, text

if TYPE_CHECKING:
    from ckz.checkpoint import Tensor
    from ckz.diffing import Comparison, TensorDiff
    from ckz.diffing.objects import ObjectDiff
    from ckz.diffing.stats import Stats

_WIDE = 100  # narrower terminals get fewer columns
_MOST = 20  # lines of other values, and of files

# Status -> how a table and how a sentence call it.
_LABELS = {
    "shape_differs": ("shape", "of other shape"),
    "only_in_a": ("only A", "only in A"),
    "only_in_b": ("only B", "only in B"),
    "renamed": ("renamed", "renamed"),
    "dtype_differs": ("dtype", "of other dtype"),
    "changed": ("changed", "changed"),
    "within_tolerance": ("close", "within the tolerance"),
    "bits_differ": ("bits", "of other bits, but equal values"),
    "equal": ("equal", "equal"),
}
_VALUED = ("changed", "within_tolerance", "bits_differ", "equal")
_VERDICTS = {
    "identical": "identical",
    "same_content": "same content, different container",
    "same_tensors": "same tensors; other bytes of the files differ",
    "same": "same",
    "differ": "differ",
}
_NUMBER = re.compile(r"\d+")


class _Group(NamedTuple):
    """Tensors that share a line, and what their values come to."""

    rows: list[TensorDiff]
    stats: Stats | None


def lines(
    found: Comparison, sources: tuple[str, str], *, everything: bool, verbose: int
) -> Iterator[str]:
    """Give the lines of a report; with ``everything`` one for each tensor."""
    width = 0 if everything else text.terminal_width()
    yield from _origins(found, sources)
    yield _summary(found)
    groups = _groups(found.tensors, everything=everything)
    structural = [group for group in groups if group.rows[0].status not in _VALUED]
    hidden = () if everything else ("equal",)
    valued = [g for g in groups if g.rows[0].status in _VALUED and g.rows[0].status not in hidden]
    if structural:
        yield ""
        yield from _structural_table(structural, width)
    if valued:
        yield ""
        yield from _value_table(valued, width, counted=not everything)
    if verbose or not found.same:
        yield ""
        yield from _role_table(found)
    if verbose and any(role.stats.ulps for role in found.roles.values()):
        yield ""
        yield from _ulp_table(found)
    rest = [*_object_lines(found, everything=everything), *_file_lines(found)]
    if rest:
        yield ""
        shown = rest if everything or len(rest) <= _MOST else rest[:_MOST]
        yield from shown
        if len(shown) < len(rest):
            yield f"... and {len(rest) - len(shown)} more; --all shows them"


def _origins(found: Comparison, sources: tuple[str, str]) -> Iterator[str]:
    for side, source, origin in zip("AB", sources, (found.a, found.b), strict=True):
        name = text.printable(names.display(source, names.STDIN))
        parts = [origin.format, text.count(origin.files, "file")]
        parts += [text.count(origin.tensors, "tensor"), text.size(origin.nbytes)]
        yield f"{side}: {name}: {', '.join(parts)}"


def _summary(found: Comparison) -> str:
    statuses = Counter(row.status for row in found.tensors)
    counts = [f"{statuses[s]:,} {phrase}" for s, (_, phrase) in _LABELS.items() if statuses[s]]
    notes = Counter(note for row in found.tensors for note in row.notes)
    counts += [f"{count:,} {note}" for note, count in sorted(notes.items())]
    counts += [text.count(len(found.objects), "other value")] if found.objects else []
    counts += [text.count(len(found.files), "other file")] if found.files else []
    return f"{_VERDICTS[found.verdict]}: {', '.join(counts) or 'no tensors'}"


def _groups(rows: Iterable[TensorDiff], *, everything: bool) -> list[_Group]:
    """Group tensors that differ in the numbers of their names only; the largest change first."""
    from ckz.diffing import rank
    from ckz.diffing.stats import total

    groups: dict[tuple[object, ...], list[TensorDiff]] = {}
    for row in rows:
        what = row.tensor.dtype if row.status in _VALUED else _what(row)
        pattern = _NUMBER.sub("*", _name(row))
        key = row.name if everything else (row.status, pattern, what, row.tensor.role)
        groups.setdefault((key,), []).append(row)
    found = []
    for members in groups.values():
        stats = [row.stats for row in members if row.stats is not None]
        found.append(_Group(members, total(stats) if stats else None))
    return sorted(found, key=lambda group: rank(group.rows[0].status, group.stats))


def _name(row: TensorDiff) -> str:
    if row.status == "renamed" and row.b:
        return f"{row.name} -> {row.b.name}"
    return row.name


def _what(row: TensorDiff) -> str:
    """Say what there is on each side."""
    kinds = [_kind(tensor) for tensor in (row.a, row.b) if tensor]
    if row.status == "shape_differs" and row.a and row.b and row.a.dtype == row.b.dtype:
        return f"{row.a.dtype} {_shape(row.a)} -> {_shape(row.b)}"
    if row.status == "dtype_differs" and row.a and row.b:
        return f"{row.a.dtype} -> {row.b.dtype}"
    return kinds[0] if len(set(kinds)) == 1 else " -> ".join(kinds)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {_shape(tensor)}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


def _structural_table(groups: Sequence[_Group], width: int) -> list[str]:
    rows = []
    for group in groups:
        first = group.rows[0]
        what = _what(first)
        if first.status == "dtype_differs":
            what += f", {_change(group.stats, wide=not width or width >= _WIDE)}"
        label = _LABELS[first.status][0]
        rows.append([label, f"{len(group.rows)}", first.tensor.role, what])
    left = text.table(["differs", "count", "role", "what"], rows, "<><<")
    return _with_names(left, groups, width)


def _change(stats: Stats | None, *, wide: bool) -> str:
    if stats is None:
        return "not comparable"
    if not stats.changed:
        return "close values" if stats.within else "same values"
    share = _percent(stats)
    return f"{share} changed, rel. L2 {_number(stats.relative_l2)}" if wide else share


def _value_table(groups: Sequence[_Group], width: int, *, counted: bool) -> list[str]:
    wide = not width or width >= _WIDE
    mixed = len({group.rows[0].status for group in groups}) > 1
    columns = [
        ("status", "<", mixed),
        ("count", ">", counted),
        ("dtype", "<", wide),
        ("role", "<", True),
        ("changed", ">", True),
        ("max |d|", ">", True),
        ("rel. L2", ">", True),
        ("cosine", ">", wide),
    ]
    rows = []
    for group in groups:
        first, stats = group.rows[0], group.stats
        assert stats is not None
        cells = [_LABELS[first.status][0], f"{len(group.rows)}", first.tensor.dtype]
        share = _percent(stats)
        cells += [first.tensor.role, f"{stats.changed:,} ({share})" if wide else share]
        cells += [_number(stats.largest), _number(stats.relative_l2), _cosine(stats)]
        rows.append([cell for cell, (*_, shown) in zip(cells, columns, strict=True) if shown])
    head = [name for name, _, shown in columns if shown]
    left = text.table(head, rows, "".join(side for _, side, shown in columns if shown))
    return _with_names(left, groups, width)


def _with_names(left: Sequence[str], groups: Sequence[_Group], width: int) -> list[str]:
    """Put names behind cells; with little room notes go first, then the middle of the name."""
    room = width - len(left[0]) - 2 if width else None
    labels = ["name"]
    for group in groups:
        name = _name(group.rows[0])
        name = text.printable(name if len(group.rows) == 1 else _NUMBER.sub("*", name))
        label = " ".join([name, *(f"({note})" for note in _notes(group))])
        if room is not None and len(label) > room:
            label = text.shortened(name, room)
        labels.append(label)
    return [f"{cells}  {label}" for cells, label in zip(left, labels, strict=True)]


def _notes(group: _Group) -> Iterator[str]:
    if stats := group.stats:
        if stats.nan_a or stats.nan_b:
            yield f"NaN {stats.nan_a:,} | {stats.nan_b:,}"
        if stats.inf_a or stats.inf_b:
            yield f"Inf {stats.inf_a:,} | {stats.inf_b:,}"
        if stats.zeros:
            yield f"0.0 and -0.0 {stats.zeros:,}"
        if stats.same > stats.zeros:
            yield f"NaN of other bits {stats.same - stats.zeros:,}"
    yield from sorted({note for row in group.rows for note in row.notes})


def _role_table(found: Comparison) -> list[str]:
    roles = {role: each for role, each in found.roles.items() if each.tensors}
    special = any(
        any((each.stats.nan_a, each.stats.nan_b, each.stats.inf_a, each.stats.inf_b))
        for each in roles.values()
    )
    head = ["role", "tensors", "differ", "changed", "max |d|", "rel. L2", "cosine"]
    rows = []
    for role, each in roles.items():
        stats = each.stats
        cells = [role, f"{each.tensors:,}", f"{each.differing:,}"]
        cells += [_percent(stats), _number(stats.largest), _number(stats.relative_l2)]
        cells.append(_cosine(stats))
        if special:
            cells += [f"{stats.nan_a:,} | {stats.nan_b:,}", f"{stats.inf_a:,} | {stats.inf_b:,}"]
        rows.append(cells)
    head += ["NaN A | B", "Inf A | B"] if special else []
    table = text.table(head, rows, "<" + ">" * (len(head) - 1))
    return [line.rstrip() for line in table]


def _ulp_table(found: Comparison) -> list[str]:
    from ckz.diffing.stats import bucket_names

    roles = {role: each.stats.ulps for role, each in found.roles.items() if each.stats.ulps}
    buckets = bucket_names(max(roles.values(), key=len))
    rows = []
    for at, bucket in enumerate(buckets):
        counts = [ulps[at] if at < len(ulps) else 0 for ulps in roles.values()]
        if any(counts):
            rows.append([bucket, *(f"{count:,}" for count in counts)])
    return text.table(["ULPs apart", *roles], rows, "<" + ">" * len(roles))


def _object_lines(found: Comparison, *, everything: bool) -> Iterator[str]:
    """Give values; those whose names differ in their numbers only by the first of them."""
    groups: dict[str, list[ObjectDiff]] = {}
    for each in found.objects:
        pattern = each.name if everything else _NUMBER.sub("*", each.name)
        groups.setdefault(pattern, []).append(each)
    for pattern, members in groups.items():
        name, a, b = members[0]
        change = f"{'not there' if a is None else a} -> {'not there' if b is None else b}"
        if len(members) > 1:
            name, change = pattern, f"{len(members):,} values, the first {change}"
        yield text.printable(f"{name}: {change}")


def _file_lines(found: Comparison) -> Iterator[str]:
    for path, status in found.files:
        yield text.printable(f"file {path}: {_LABELS[status][1]}")


def _percent(stats: Stats) -> str:
    if not stats.elements:
        return ""
    share = 100 * stats.changed / stats.elements
    if 0 < share < 0.005:
        return "<0.01 %"
    if 99.995 <= share < 100:
        return ">99.99 %"
    return f"{share:.2f} %"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value}" if isinstance(value, int) and value < 10**6 else f"{value:.2g}"


def _cosine(stats: Stats) -> str:
    return "" if stats.cosine is None else f"{stats.cosine:.6f}"
