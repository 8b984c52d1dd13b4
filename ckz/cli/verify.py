"""``ckz verify``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ckz.cli import names, options, progress, streams, text
from ckz.cli.outcome import configure, each, report_to_json, tell

if TYPE_CHECKING:
    from ckz.reporting import Report


def verify(
    sources: options.Sources,
    data: Annotated[
        bool, typer.Option("--data", help="Decode everything and check the original bytes too.")
    ] = False,
    base: options.Base = None,
    base_dir: options.BaseDir = None,
    device: options.Device = "auto",
    threads: options.Threads = 0,
    memory: options.Memory = options.MEMORY,
    as_json: options.Json = False,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Check every checksum of .ckz files, without their sources.

    Of a checkpoint that is not compressed, its structure, its completeness and the checksums that
    its format has are checked.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    from ckz import pipeline

    def act(source: str) -> Report:
        with (
            streams.readable(source, name="stdin", beside=None) as path,
            progress.bar(source, wanted=not (no_progress or quiet)) as on_bytes,
        ):
            report = pipeline.verify(
                path,
                data=data,
                base=base,
                base_dir=base_dir,
                device=device,
                threads=threads,
                memory=memory,
                progress=on_bytes,
            )
        report = replace(report, source=source)
        tell(source, report, _summary(report, data=data))
        return report

    each(sources, act, to_json=report_to_json if as_json else None)


def _summary(report: Report, *, data: bool) -> str:
    name = text.printable(names.display(report.source, names.STDIN))
    nbytes = report.raw_nbytes if data else report.stored_nbytes
    what = "decoded and checked" if data else "checked"
    tensors = text.count(report.tensors, "tensor")
    return f"{name}: ok, {text.size(nbytes)} {what}, {tensors}, {report.seconds:.1f} s"
