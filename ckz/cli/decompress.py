"""``ckz decompress``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ckz import removal
from ckz.cli import names, options, progress, streams, text
from ckz.cli.outcome import configure, each, inexact, report_to_json, tell
from ckz.errors import UsageError

if TYPE_CHECKING:
    from ckz.reporting import Report


def decompress(
    sources: options.Containers,
    output: options.Output = None,
    stdout: options.Stdout = False,
    force: options.Force = False,
    keep: options.Keep = True,
    only: options.Only = None,
    base: options.Base = None,
    base_dir: options.BaseDir = None,
    device: options.Device = "auto",
    threads: options.Threads = 0,
    memory: options.Memory = options.MEMORY,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Restore checkpoints, byte for byte: SRC.ckz becomes SRC.

    With --only, the tensors whose names match go into one file, SRC.only.safetensors.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    to_stdout = names.goes_to_stdout(sources, output, stdout)
    names.check_combination(sources, to_stdout=to_stdout, as_json=as_json, keep=keep)
    if only and not keep:
        raise UsageError("--rm would lose the tensors that --only leaves out")
    name = names.tensors_file if only else names.restored
    targets = {} if to_stdout else names.targets(sources, output, name)
    from ckz import extract, pipeline

    def act(source: str) -> Report:
        target = targets.get(source)
        with (
            streams.for_stdout(force=force) if to_stdout else nullcontext(target) as out,
            streams.readable(source, name="stdin", beside=target) as path,
            progress.bar(source, wanted=not (no_progress or quiet)) as on_bytes,
        ):
            if out is not None:
                names.check_target(path, out, force=force)
            before = None if keep else removal.state_of(path)
            if only:
                assert out is not None  # names.tensors_file always gives a name
                report = extract.extract(
                    path,
                    out,
                    only,
                    base=base,
                    force=force,
                    dry_run=dry_run,
                    progress=on_bytes,
                )
            else:
                report = pipeline.decompress(
                    path,
                    out,
                    base=base,
                    base_dir=base_dir,
                    device=device,
                    threads=threads,
                    memory=memory,
                    force=force,
                    dry_run=dry_run,
                    progress=on_bytes,
                )
        if before is not None and not dry_run:
            removal.remove(path, before)
        report = replace(report, source=source, output=names.DASH if to_stdout else report.output)
        tell(source, report, _summary(report, dry_run=dry_run))
        return report

    each(sources, act, to_json=report_to_json if as_json else None)


def _summary(report: Report, *, dry_run: bool) -> str:
    output = text.printable(names.display(report.output, names.STDOUT))
    raw, seconds = report.raw_nbytes, report.seconds
    if dry_run:
        return f"{output}: would be written, {text.size(raw)}"
    rate = text.rate(raw, seconds)
    return f"{output}: {text.size(raw)} restored{inexact(report)}, {seconds:.1f} s, {rate}"
