"""``ckz bench``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckz import charts
from ckz.cli import names, options, progress, streams, text
from ckz.cli.outcome import configure, each, print_result, roles_to_json
from ckz.errors import UsageError

if TYPE_CHECKING:
    from ckz.bench.figures import Benchmark, Cost, Row

SAMPLE = 16_000_000
_SETTING = 24  # columns of the name of a codec or command


def bench(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A file, a checkpoint directory, or - for standard input.",
            show_default=False,
        ),
    ],
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Also run the other compressors that are in $CKZ_PEERS or on PATH."
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Measure on everything; this may take long.")
    ] = False,
    sample: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=options.parse_size,
            show_default=False,
            help="Measure on SIZE bytes of each role and type: 16M (default), 100M, ...",
        ),
    ] = SAMPLE,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measure N times; slow settings only once.")
    ] = 3,
    csv_file: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write the figures to FILE.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw FILE.html, or FILE.png if matplotlib is there."),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Measure what each codec, level and rival makes of a checkpoint.

    Nothing is kept. The last line says which level to use.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    targets = [Path(name) for name in (csv_file, plot) if name]
    if plot:
        charts.check_target(Path(plot))
    if sample < 1:
        raise UsageError("--sample takes at least one byte")

    def act(source: str) -> Benchmark:
        from ckz import bench as library
        from ckz.bench import plot as drawing

        with streams.readable(source, name="stdin", beside=None) as path:
            for target in targets:
                names.check_target(path, target, force=force)
            with progress.bar(source, wanted=not (no_progress or quiet)) as on_bytes:
                found = library.bench(
                    path,
                    streams.spool_directory(),
                    rivals=peers,
                    full=full,
                    sample=sample,
                    rounds=rounds,
                    progress=on_bytes,
                )
        found = replace(found, source=source)
        if csv_file:
            _write(Path(csv_file), lambda file: file.write_text(_to_csv(found)), force=force)
        if plot:
            page, png = partial(drawing.to_html, found), partial(drawing.write_png, found)
            charts.save(Path(plot), page, png, force=force)
        if not as_json:
            print_result("\n".join(_lines(found)))
        return found

    each([source], act, to_json=_to_json if as_json else None)


def _write(target: Path, write: Callable[[Path], object], *, force: bool) -> None:
    from ckz import atomic

    with atomic.new_file(target, force=force, mode=0o644) as temporary:
        write(temporary)


def _lines(found: Benchmark) -> Iterator[str]:
    name = text.printable(names.display(found.source, names.STDIN))
    yield f"{name}: {found.format}, {text.size(found.raw_nbytes)}"
    for (role, dtype), nbytes in found.groups.items():
        rows = [row for row in found.rows if (row.role, row.dtype) == (role, dtype)]
        measured = rows[0].raw_nbytes
        part = "" if measured == nbytes else f"{text.size(measured)} sampled of "
        yield ""
        yield f"{role} {dtype}: {part}{text.size(nbytes)}, one thread, buffer to buffer"
        yield from _table(rows, last="spread")
    if found.omitted_nbytes:
        yield f"not measured by codec: {text.size(found.omitted_nbytes)} of rarer kinds"
    commands = [row for row in found.rows if row.kind == "command"]
    size = text.size(commands[0].raw_nbytes)
    yield ""
    yield f"whole commands on {'a sample of ' if found.sampled else ''}{size}"
    if found.sampled:
        yield "(start-up weighs more on it, and it may lack what tensors have in common)"
    yield from _table(commands, last="memory")
    yield ""
    yield from _role_table(commands)
    yield ""
    yield found.advice


def _table(rows: list[Row], *, last: str) -> list[str]:
    head = ["setting", "saved", "compress", "decompress", "CPU-s", last]
    cells = []
    failed = []
    for row in rows:
        if row.failed:
            failed.append(f"{row.setting}: failed: {text.printable(row.failed)}")
            continue
        there, back = row.compress, row.decompress
        memory = max(there.memory or 0, back.memory or 0)
        spread = f"{100 * max(there.spread, back.spread):.0f} %" if _repeated(row) else "once"
        cells.append(
            [
                text.shortened(row.setting, _SETTING),
                text.saved(row.raw_nbytes, row.stored_nbytes),
                text.rate(row.raw_nbytes, there.median),
                text.rate(row.raw_nbytes, back.median),
                f"{there.cpu:.2f} + {back.cpu:.2f}",
                text.size(memory) if last == "memory" else spread,
            ]
        )
    return [*text.table(head, cells, "<>>>>>"), *failed]


def _repeated(row: Row) -> bool:
    return len(row.compress.seconds) > 1


def _role_table(commands: list[Row]) -> list[str]:
    levels = [row for row in commands if row.roles]
    roles = dict.fromkeys(role for row in levels for role in row.roles)
    cells = [
        [role, text.size(levels[0].roles[role][0])]
        + [text.saved(row.roles[role][0], row.roles[role][1] or 0) for row in levels]
        for role in roles
        if levels[0].roles[role][0]
    ]
    head = ["saved by role", "size", *(row.setting for row in levels)]
    return text.table(head, cells, "<" + ">" * (len(levels) + 1))


def _to_json(found: Benchmark) -> dict[str, Any]:
    """Give a benchmark as the README's schema has it."""
    return {
        "source": found.source,
        "format": found.format,
        "raw_nbytes": found.raw_nbytes,
        "omitted_nbytes": found.omitted_nbytes,
        "sampled": found.sampled,
        "rounds": found.rounds,
        "groups": [
            {"role": role, "dtype": dtype, "nbytes": nbytes}
            for (role, dtype), nbytes in found.groups.items()
        ],
        "rows": [
            {
                "kind": row.kind,
                "setting": row.setting,
                "role": row.role,
                "dtype": row.dtype,
                "raw_nbytes": row.raw_nbytes,
                "stored_nbytes": row.stored_nbytes,
                "compress": _cost_to_json(row.compress),
                "decompress": _cost_to_json(row.decompress),
                "roles": roles_to_json(row.roles),
                "failed": row.failed,
            }
            for row in found.rows
        ],
        "level": found.level,
        "advice": found.advice,
    }


def _cost_to_json(cost: Cost) -> dict[str, Any]:
    return {"seconds": cost.seconds, "cpu_seconds": cost.cpu_seconds, "memory": cost.memory}


def _to_csv(found: Benchmark) -> str:
    """Give one line for each row; speeds are medians."""
    out = io.StringIO()
    sheet = csv.writer(out, lineterminator="\n")
    directions = ("compress", "decompress")
    figures = ("seconds", "seconds_min", "seconds_max", "cpu_seconds", "mb_per_s", "memory")
    sheet.writerow(
        ["source", "kind", "setting", "role", "dtype", "raw_nbytes", "stored_nbytes", "saved"]
        + [f"{way}_{figure}" for way in directions for figure in figures]
        + ["failed"]
    )
    for row in found.rows:
        fields: list[object] = [found.source, row.kind, row.setting, row.role, row.dtype]
        fields += [row.raw_nbytes]
        if row.failed:
            fields += [""] * (2 + len(directions) * len(figures))
        else:
            fields += [row.stored_nbytes, f"{row.saved:.6f}"]
            for cost in (row.compress, row.decompress):
                fields += [f"{cost.median:.6f}", f"{min(cost.seconds):.6f}"]
                fields += [f"{max(cost.seconds):.6f}", f"{cost.cpu:.6f}"]
                fields += [f"{row.raw_nbytes / max(cost.median, 1e-9) / 1e6:.1f}", cost.memory]
        sheet.writerow([*fields, row.failed])
    return out.getvalue()
