"""``ckz compress``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ckz import removal
from ckz.cli import names, options, progress, streams, text
from ckz.cli.outcome import configure, each, inexact, print_result, report_to_json, tell
from ckz.cli.tokens import read_tokens
from ckz.errors import CkzError, UsageError

if TYPE_CHECKING:
    from ckz.reporting import Report


def compress(
    sources: options.Sources,
    output: options.Output = None,
    stdout: options.Stdout = False,
    force: options.Force = False,
    keep: options.Keep = True,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Store what differs from this earlier checkpoint, compressed or not.",
        ),
    ] = None,
    anchor: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Write a full snapshot once N lean on each other; auto: once they take "
            "four times the bytes of a full one.",
        ),
    ] = "auto",
    preset: Annotated[
        Literal["exact", "resume", "compact", "archive"],
        typer.Option(
            help="What may be lost. resume: weights stay exact, masters and moments get smaller, "
            "training goes on as before; compact: all within what training does not notice, "
            "against a .ckz as base; archive: only the weights stay."
        ),
    ] = "exact",
    weights: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="Do this to weights and masters instead: exact, fp16, bf16, int8, lc:BITS, "
            "deadzone:NMSE, abs:E, rel:E, pwrel:E.",
        ),
    ] = "",
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="Do this to Adam's moments instead: exact, moments:NMSE, cluster:K, pwrel:E.",
        ),
    ] = "",
    max_error: Annotated[
        str,
        typer.Option(
            metavar="BOUND",
            help="Let nothing be off by more: abs:E, rel:E (of a tensor's range), pwrel:E (of "
            "each element), update:NMSE (of the optimizer's next step); mean:NMSE (of changes and "
            "next steps, on average) chooses a method for each tensor.",
        ),
    ] = "",
    target_ratio: Annotated[
        float,
        typer.Option(
            metavar="RATIO",
            help="Make the whole so many times smaller, and choose for each tensor what may be "
            "lost so that least is lost in all.",
        ),
    ] = 0.0,
    partial: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Save a part, and carry the rest from the base: experts:K of each layer in turn, "
            "experts:K:load those with most unsaved tokens, priority:FRACTION what moved most, "
            "soft:BITS the weights of all experts coarsely and the states of one in turn; :W or "
            ":O carries weights or optimizer states only.",
        ),
    ] = "",
    token_counts: Annotated[
        str,
        typer.Option(
            metavar="FILE|TENSOR",
            help="Tokens that each expert has seen, layers by experts: .npy, .json, or a tensor.",
        ),
    ] = "",
    plt_limit: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            min=0.0,
            max=100.0,
            help="Save twice as many experts once more tokens would be lost, e.g. 3.75.",
        ),
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Let samples choose everything, as they do where you say nothing; refuses what "
            "chooses for them.",
        ),
    ] = False,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=NAME",
            help="Prefer a codec for a role, e.g. weight=bitmask; may be repeated.",
        ),
    ] = None,
    level: Annotated[
        Literal["fast", "default", "max"],
        typer.Option(
            help="Trade speed for size; max starts half a second later, also to decompress."
        ),
    ] = "default",
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Record each file's SHA-256 too, and print it.")
    ] = False,
    opaque: Annotated[
        bool,
        typer.Option(
            "--opaque", help="Store what looks damaged or is no checkpoint as plain bytes."
        ),
    ] = False,
    allow_incomplete: Annotated[
        bool,
        typer.Option("--allow-incomplete", help="Accept a checkpoint that lacks some files."),
    ] = False,
    accept_bad_crc: Annotated[
        bool,
        typer.Option("--accept-bad-crc", help="Accept tensors whose stored CRC does not match."),
    ] = False,
    device: options.Device = "auto",
    threads: options.Threads = 0,
    memory: options.Memory = options.MEMORY,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Compress checkpoints: SRC becomes SRC.ckz.

    The source is kept, and decompress gives back exactly its bytes, unless you say what may be
    lost.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    to_stdout = names.goes_to_stdout(sources, output, stdout)
    names.check_combination(sources, to_stdout=to_stdout, as_json=as_json, keep=keep)
    targets = {} if to_stdout else names.targets(sources, output, names.compressed)
    choices = dict(_pair(text) for text in codec or ())
    if auto and (codec or weights or optimizer or preset != "exact"):
        raise UsageError("--auto chooses itself: leave out --codec, --preset and methods")
    longest = anchor_of(anchor)
    from ckz import pipeline
    from ckz.container_read import is_container
    from ckz.lossy import methods_of
    from ckz.partial import parse_policy

    methods = methods_of(preset, weights, optimizer, max_error, target_ratio)
    policy = parse_policy(partial) if partial else None

    def act(source: str) -> Report:
        target = targets.get(source)
        with (
            streams.for_stdout(force=force) if to_stdout else nullcontext(target) as out,
            streams.readable(source, name=_stdin_name(target), beside=target) as path,
            progress.bar(source, wanted=not (no_progress or quiet)) as on_bytes,
        ):
            assert out is not None  # names.compressed always gives a name
            names.check_target(path, out, force=force)
            if not force and is_container(path):
                raise CkzError("is compressed already; -f compresses it once more")
            is_directory = path.is_dir()
            before = None if keep else removal.state_of(path)
            report = pipeline.compress(
                path,
                out,
                base=base,
                anchor=longest,
                codecs=choices,
                methods=methods,
                policy=policy,
                tokens=read_tokens(token_counts, path) if token_counts else None,
                plt_limit=None if plt_limit is None else plt_limit / 100,
                level=level,
                device=device,
                threads=threads,
                memory=memory,
                force=force,
                opaque=opaque,
                allow_incomplete=allow_incomplete,
                accept_bad_crc=accept_bad_crc,
                sha256=sha256,
                verify=not keep,
                dry_run=dry_run,
                progress=on_bytes,
            )
        if before is not None and not dry_run:
            removal.remove(path, before)
        report = replace(report, source=source, output=str(target or names.DASH))
        tell(source, report, _summary(report, dry_run=dry_run))
        if sha256 and not (as_json or to_stdout):
            for name, digest in report.sha256.items():
                # As sha256sum prints them, so that `sha256sum -c` checks the restored files.
                file = f"{source.rstrip('/')}/{name}" if is_directory else source
                print_result(f"{digest}  {text.printable(file)}")
        return report

    each(sources, act, to_json=report_to_json if as_json else None)


def _pair(text: str) -> tuple[str, str]:
    role, equals, name = text.partition("=")
    if not equals:
        raise UsageError(f"--codec {text}: write ROLE=NAME")
    return role, name


def anchor_of(text: str) -> int | None:
    """Read how many snapshots may lean on each other; None decides by their bytes."""
    if text != "auto" and not text.isdecimal():
        raise UsageError(f"--anchor {text}: write auto or a number")
    return None if text == "auto" else int(text)


def _stdin_name(target: Path | None) -> str:
    """Name what came through a pipe after its container, for decompress gives that name back."""
    own = names.restored(target) if target else None
    return own.name if own else "stdin"


def _summary(report: Report, *, dry_run: bool) -> str:
    raw, stored = report.raw_nbytes, report.stored_nbytes
    output = text.printable(names.display(report.output, names.STDOUT))
    error = "" if report.mean_error is None else f", mean error {report.mean_error:.2g}"
    if dry_run:
        rows = [
            [role, text.size(raw), text.size(coded), text.saved(raw, coded), codec]
            for role, codec, raw, coded in report.plan
        ]
        plan = "\n".join(text.table(["role", "size", "about", "saved", "codec"], rows, "<>>><"))
        about = text.change(raw, stored).replace("saved", "saves")
        return f"{output}: would be written, about {about}{error}\n{plan}"
    change, rate = text.change(raw, stored), text.rate(raw, report.seconds)
    carried = ""
    if report.partial:
        carried = f", {text.size(report.partial['carried'])} carried from the base"
        if len(report.partial["fresh_by_file"]) > 1:
            carried += f" (files differ by {100 * report.partial['imbalance']:.0f} %)"
    return f"{output}: {change}{carried}{inexact(report)}{error}, {report.seconds:.1f} s, {rate}"
