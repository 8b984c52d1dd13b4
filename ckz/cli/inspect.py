"""``ckz inspect``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckz.cli import names, options, streams, text
from ckz.cli.outcome import configure, each, print_result, roles_to_json
from ckz.errors import UsageError

if TYPE_CHECKING:
    from ckz.inspection import Inspection, Row, Stale


def inspect(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SRC",
            help="A file, a checkpoint directory, or - for standard input.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="One line a tensor, not one for each kind of name.")
    ] = False,
    only: options.Only = None,
    device: Annotated[
        bool,
        typer.Option("--device", help="Show the GPU that kernels would run on, or why on none."),
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Show tensors, roles and sizes, compressed or not.

    Tensors whose names differ in their numbers only share a line, with * for each number.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    if device:
        _show_device(as_json=as_json)
    if not sources:
        if device:
            return
        raise UsageError("nothing to inspect: give SRC, or --device")
    from ckz import inspection

    def act(source: str) -> Inspection:
        with streams.readable(source, name="stdin", beside=None) as path:
            found = inspection.inspect(path)
        wanted = (row for row in found.tensors if not only or _matches(row.name, only))
        found = replace(found, path=source, tensors=tuple(wanted))
        if not as_json:
            print_result(
                "\n".join(_lines(found, everything=everything, totals=not only, verbose=verbose))
            )
        return found

    each(sources, act, to_json=_to_json if as_json else None)


def _show_device(*, as_json: bool) -> None:
    from ckz.kernels import device

    found = device.describe()
    capability = ".".join(map(str, found.capability)) if found else None
    if as_json:
        fields = {
            "name": found and found.name,
            "nbytes": found and found.nbytes,
            "capability": capability,
            "reason": device.why_not() or None,
        }
        print_result(json.dumps({"version": 1, "device": fields}))
    elif found:
        memory = f", {text.size(found.nbytes)}" if found.nbytes else ""
        print_result(
            f"device: {text.printable(found.name)}{memory}, compute capability {capability}"
        )
    else:
        print_result(f"device: none, {device.why_not()}")


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _lines(found: Inspection, *, everything: bool, totals: bool, verbose: int) -> Iterator[str]:
    parts = [text.printable(found.format), text.count(found.files, "file")]
    parts.append(text.count(len(found.tensors), "tensor"))
    if found.stored_nbytes is None:
        parts.append(text.size(found.raw_nbytes))
    else:
        parts.append(text.change(found.raw_nbytes, found.stored_nbytes))
    yield f"{text.printable(names.display(found.path, names.STDIN))}: {', '.join(parts)}"
    if found.tensors:
        groups = [[row] for row in found.tensors] if everything else _grouped(found.tensors)
        yield ""
        yield from _tensor_table(groups, width=0 if everything else text.terminal_width())
    if totals:
        yield ""
        yield from _role_table(found)
    if totals and found.chain:
        yield ""
        yield from _chain_table(found)
    if totals and found.preset not in (None, "exact"):
        yield ""
        yield f"preset {text.printable(found.preset or '')}: tensors with a method are not exact"
    if totals and found.carried:
        yield ""
        yield from _carried_table(found)
    if found.resumable is False:
        yield "not resumable: optimizer states are all zero in it"
    if totals and found.hidden_nbytes:
        yield f"{text.size(found.hidden_nbytes)} of storage belong to no tensor"
    if verbose and found.codecs:
        yield ""
        codecs = [[codec, f"{chunks:,}"] for codec, chunks in found.codecs.items()]
        yield from text.table(["codec", "chunks"], codecs, "<>")
    for label, remarks in (("missing", found.missing), ("warning", found.warnings)):
        yield from (f"{label}: {text.printable(remark)}" for remark in remarks)


# Compiled once: there may be 100,000 names.
_NUMBER = re.compile(r"\d+")


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Group tensors that differ in shape and in the numbers of their names only."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kind = _NUMBER.sub("*", row.name), row.dtype, row.role, row.method or ""
        groups.setdefault(kind, []).append(row)
    return list(groups.values())


def _tensor_table(groups: Sequence[Sequence[Row]], *, width: int) -> list[str]:
    compressed = groups[0][0].stored is not None
    inexact = any(row.method for group in groups for row in group)
    rows = []
    for group in groups:
        first = group[0]
        raw = sum(row.nbytes for row in group)
        cells = [f"{len(group)}", first.dtype, _shapes(group), first.role, text.size(raw)]
        if compressed:
            cells.append(text.saved(raw, sum(row.stored or 0 for row in group)))
        if inexact:
            errors = [row.relative_error or 0.0 for row in group]
            cells += [first.method or "", f"{max(errors):.1e}" if first.method else ""]
        rows.append(cells)
    head = ["count", "dtype", "shape", "role", "size", *(["saved"] if compressed else [])]
    head += ["method", "error"] if inexact else []
    left = text.table(head, rows, ("><<<>" + ">" * compressed + "<>")[: len(head)])
    room = width - len(left[0]) - 2 if width else None
    labels = ["name", *(_label(group, room) for group in groups)]
    return [f"{cells}  {label}" for cells, label in zip(left, labels, strict=True)]


def _label(group: Sequence[Row], room: int | None) -> str:
    """Name a group; with little room the notes go first, then the middle of the name."""
    name = text.printable(group[0].name if len(group) == 1 else _NUMBER.sub("*", group[0].name))
    label = " ".join([name, *sorted({f"({note})" for row in group for note in row.notes})])
    if room is None or len(label) <= room:
        return label
    return text.shortened(name, room)


def _shapes(group: Sequence[Row]) -> str:
    shapes = {row.shape for row in group}
    if len(shapes) > 1:
        return f"{len(shapes)} shapes"
    return "x".join(map(str, group[0].shape)) or "scalar"


def _role_table(found: Inspection) -> list[str]:
    compressed = found.stored_nbytes is not None
    counts = Counter(row.role for row in found.tensors)
    entries = [
        (role, f"{counts[role]}" if role in counts else "", raw, stored)
        for role, (raw, stored) in sorted(found.roles.items(), key=lambda entry: -entry[1][0])
    ]
    entries.append(("all", f"{len(found.tensors)}", found.raw_nbytes, found.stored_nbytes))
    rows = [
        [role, count, text.size(raw)]
        + ([text.size(stored), text.saved(raw, stored)] if stored is not None else [])
        for role, count, raw, stored in entries
    ]
    head = ["role", "tensors", "size", *(["stored", "saved"] if compressed else [])]
    return text.table(head, rows, "<>>>>"[: len(head)])


def _chain_table(found: Inspection) -> list[str]:
    rows = [
        [
            text.printable(link.name),
            f"{link.depth}",
            "not found" if link.stored_nbytes is None else text.size(link.stored_nbytes),
            text.printable(link.base) or "full",
        ]
        for link in found.chain
    ]
    return text.table(["snapshot", "depth", "size", "base"], rows, "<>><")


def _carried_table(found: Inspection) -> Iterator[str]:
    """Say how much is how old."""
    policy = f"partial {text.printable(found.partial or '')}"
    if found.plt is not None:
        policy += f": {100 * found.plt:.2f} % of tokens are not in the saved experts"
    yield policy
    ages: dict[tuple[int, int | None], list[Stale]] = {}
    for item in found.carried:
        ages.setdefault((item.age, item.step), []).append(item)
    rows = [
        [
            f"{age}",
            "" if step is None else f"{step}",
            "" if step is None or found.step is None else f"{found.step - step}",
            f"{len({item.expert for item in items if item.expert}) or ''}",
            f"{len({item.tensor for item in items})}",
            text.size(sum(item.nbytes for item in items)),
        ]
        for (age, step), items in sorted(ages.items(), key=lambda entry: entry[0][0])
    ]
    head = ["snapshots ago", "saved at step", "steps stale", "experts", "tensors", "size"]
    yield from text.table(head, rows, ">>>>>>")


def _to_json(found: Inspection) -> dict[str, Any]:
    """Give an inspection as the README's schema has it."""
    return {
        "source": found.path,
        "format": found.format,
        "raw_nbytes": found.raw_nbytes,
        "stored_nbytes": found.stored_nbytes,
        "hidden_nbytes": found.hidden_nbytes,
        "files": found.files,
        "tensors": [
            {
                "name": row.name,
                "dtype": row.dtype,
                "shape": row.shape,
                "role": row.role,
                "nbytes": row.nbytes,
                "stored_nbytes": row.stored,
                "notes": row.notes,
                "method": row.method,
                "largest_error": row.largest_error,
                "relative_error": row.relative_error,
            }
            for row in found.tensors
        ],
        "roles": roles_to_json(found.roles),
        "codecs": found.codecs,
        "chain": [link._asdict() for link in found.chain],
        "preset": found.preset,
        "resumable": found.resumable,
        "step": found.step,
        "partial": found.partial,
        "plt": found.plt,
        "carried": [item._asdict() for item in found.carried],
        "warnings": found.warnings,
        "missing": found.missing,
    }
