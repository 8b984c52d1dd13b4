"""``ckz diff``."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckz.cli import diff_text, names, options, progress, streams, text
from ckz.cli.outcome import (
    configure,
    discard_stdout,
    log,
    print_result,
    report_error,
    tell_usage,
)
from ckz.errors import CkzError, UsageError

if TYPE_CHECKING:
    from ckz.diffing import Comparison, Origin, RoleDiff, TensorDiff
    from ckz.diffing.stats import Stats

# As diff(1) has it: 1 is no failure here.
DIFFER, TROUBLE = 1, 2
# What is said of values, of a tensor and of a role.
_FIELDS = (
    "elements",
    "changed",
    "changed_percent",
    "bits_differ",
    "values_equal",
    "signed_zeros",
    "within_tolerance",
    "nan_a",
    "nan_b",
    "inf_a",
    "inf_b",
    "max_abs",
    "relative_l2",
    "cosine",
    "ulps",
)


def _side(metavar: str) -> Any:
    return typer.Argument(
        metavar=metavar,
        help="A file, a checkpoint directory, a .ckz, or - for standard input.",
        show_default=False,
    )


def diff(
    a: Annotated[str, _side("A")],
    b: Annotated[str, _side("B")],
    only: options.Only = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Not tensors with a matching name; may be repeated."),
    ] = None,
    atol: Annotated[
        float,
        typer.Option(
            metavar="X", min=0.0, show_default=False, help="Changes of up to X do not count."
        ),
    ] = 0.0,
    rtol: Annotated[
        float,
        typer.Option(
            metavar="Y", min=0.0, show_default=False, help="Nor do those of up to X + Y * |a|."
        ),
    ] = 0.0,
    numeric: Annotated[
        bool,
        typer.Option(
            "--numeric",
            help="Equal values are equal: 0.0 and -0.0, NaN and NaN, of any two types.",
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="One line a tensor, those that are equal too.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Draw the change by layer and role: FILE.html or FILE.png."
        ),
    ] = None,
    force: options.Force = False,
    base_dir: options.BaseDir = None,
    threads: options.Threads = 0,
    memory: options.Memory = options.MEMORY,
    as_json: options.Json = False,
    no_progress: options.NoProgress = False,
    quiet: Annotated[
        int,
        typer.Option(
            "-q",
            "--quiet",
            count=True,
            show_default=False,
            help="Print nothing, only exit; -qq: no errors either.",
        ),
    ] = 0,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            show_default=False,
            help="Say more: distances in units in the last place; -vv: CPU and memory.",
        ),
    ] = 0,
) -> None:
    """Show what changed from A to B, by value.

    The exit code is 0 if they are the same, 1 if they differ, and 2 or more for trouble. Tensors
    whose names differ in their numbers only share a line, with * for each number.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    try:
        _check_options(a, b, atol, rtol)
        from ckz import charts, diffing
        from ckz.diffing import plot as drawing

        if plot:
            charts.check_target(Path(plot))
        with (
            streams.readable(a, name="stdin", beside=None) as first,
            streams.readable(b, name="stdin", beside=None) as second,
            progress.bar(b, wanted=not (no_progress or quiet)) as on_bytes,
        ):
            if plot:
                names.check_target(first, Path(plot), force=force)
                names.check_target(second, Path(plot), force=force)
            found = diffing.diff(
                first,
                second,
                only=only or (),
                ignore=ignore or (),
                atol=atol,
                rtol=rtol,
                numeric=numeric,
                base_dir=base_dir,
                threads=threads,
                memory=memory,
                spool=streams.spool_directory(),
                progress=on_bytes,
            )
        for warning in found.warnings:
            log.warning("warning: %s", text.printable(warning))
        if plot:
            page, png = partial(drawing.to_html, found), partial(drawing.write_png, found)
            charts.save(Path(plot), page, png, force=force)
        if as_json:
            _print_json([_to_json(found, a, b)])
        elif not quiet:
            lines = diff_text.lines(found, (a, b), everything=everything, verbose=verbose)
            print_result("\n".join(lines))
    except BrokenPipeError as error:  # nobody reads on: what there is to say was not said
        discard_stdout()
        raise typer.Exit(TROUBLE) from error
    except (CkzError, OSError) as error:
        code = report_error("", error, least=TROUBLE)
        if as_json:
            _print_json([])
        raise typer.Exit(code) from error
    tell_usage()
    raise typer.Exit(0 if found.same else DIFFER)


def _check_options(a: str, b: str, atol: float, rtol: float) -> None:
    if "" in (a, b):
        raise UsageError("a name is empty; perhaps a variable is not set")
    if a == b == names.DASH:
        raise UsageError("standard input (-) can be one side only")
    if not (math.isfinite(atol) and math.isfinite(rtol)):
        raise UsageError("--atol and --rtol are finite numbers")


def _print_json(results: list[dict[str, Any]]) -> None:
    print_result(json.dumps({"version": 1, "results": results, "failed": int(not results)}))


def _to_json(found: Comparison, a: str, b: str) -> dict[str, Any]:
    """Give a comparison as the README's schema has it."""
    from ckz.diffing import rank

    ranked = sorted(found.tensors, key=lambda row: rank(row.status, row.stats))
    return {
        "a": _origin_to_json(found.a, a),
        "b": _origin_to_json(found.b, b),
        "same": found.same,
        "verdict": found.verdict,
        "tensors": [_tensor_to_json(row) for row in ranked],
        "roles": {role: _role_to_json(each) for role, each in found.roles.items()},
        "objects": [each._asdict() for each in found.objects],
        "files": [each._asdict() for each in found.files],
        "warnings": found.warnings,
    }


def _origin_to_json(origin: Origin, source: str) -> dict[str, Any]:
    return {**origin._asdict(), "path": source}


def _tensor_to_json(row: TensorDiff) -> dict[str, Any]:
    return {
        "name": row.name,
        "name_b": row.b.name if row.b else None,
        "status": row.status,
        "same": row.same,
        "role": row.tensor.role,
        "dtype_a": row.a.dtype if row.a else None,
        "dtype_b": row.b.dtype if row.b else None,
        "shape_a": row.a.shape if row.a else None,
        "shape_b": row.b.shape if row.b else None,
        **_stats_to_json(row.stats),
        "notes": row.notes,
    }


def _role_to_json(role: RoleDiff) -> dict[str, Any]:
    return {
        "tensors": role.tensors,
        "differing": role.differing,
        **_stats_to_json(role.stats),
    }


def _stats_to_json(stats: Stats | None) -> dict[str, Any]:
    """Give what is known of the values; null where there is nothing, or nothing finite."""
    from ckz.diffing.stats import bucket_names

    if stats is None:
        return dict.fromkeys(_FIELDS)
    counted = stats.bits > 0
    fields = (
        stats.elements,
        stats.changed,
        100 * stats.changed / stats.elements if stats.elements else 0.0,
        stats.bits,
        stats.same,
        stats.zeros,
        stats.within,
        *((stats.nan_a, stats.nan_b, stats.inf_a, stats.inf_b) if counted else (None,) * 4),
        _finite(stats.largest),
        _finite(stats.relative_l2),
        _finite(stats.cosine),
        {
            name: count
            for name, count in zip(bucket_names(stats.ulps), stats.ulps, strict=True)
            if count
        },
    )
    return dict(zip(_FIELDS, fields, strict=True))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
