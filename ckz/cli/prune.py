"""``ckz prune``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ckz.cli import options, text
from ckz.cli.outcome import configure, each, log, print_result
from ckz.errors import CkzError, UsageError

if TYPE_CHECKING:
    from ckz.rotating import Done


def _count(value: str | int) -> int:
    """Read a number, or ``unlimited``."""
    if str(value) == "unlimited":
        return -1
    if not str(value).isdecimal():
        raise typer.BadParameter(f"{value!r}: give a number, or unlimited")
    return int(value)


def _rule(text: str) -> Any:
    return typer.Option(metavar="N", parser=_count, show_default=False, help=text)


def prune(
    directories: Annotated[
        list[str],
        typer.Argument(metavar="DIR", help="A directory with checkpoints.", show_default=False),
    ],
    keep_last: Annotated[int, _rule("Keep the N newest; unlimited keeps all.")] = 0,
    keep_hourly: Annotated[int, _rule("Keep the newest of each of the last N hours.")] = 0,
    keep_daily: Annotated[int, _rule("Keep the newest of each of the last N days.")] = 0,
    keep_weekly: Annotated[int, _rule("Keep the newest of each of the last N weeks.")] = 0,
    keep_monthly: Annotated[int, _rule("Keep the newest of each of the last N months.")] = 0,
    keep_yearly: Annotated[int, _rule("Keep the newest of each of the last N years.")] = 0,
    keep_within: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Keep what is not older than the newest by more: 1y5m7d2h."
        ),
    ] = "",
    keep_every: Annotated[
        int, typer.Option(metavar="STEPS", min=0, help="Keep each step that STEPS divides.")
    ] = 0,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:min|max[:N]",
            help="Keep the best by a metric from names, trainer_state.json or --metrics.",
        ),
    ] = None,
    keep_tag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TAG", help="Keep what has TAG in its .tags file (NAME.tags beside a file)."
        ),
    ] = None,
    optimizer_last: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Strip optimizer states from all but the N newest; weights stay bit-equal.",
        ),
    ] = None,
    recompress: Annotated[
        list[str] | None,
        typer.Option(
            metavar="older:DURATION=PRESET",
            help="Compress older ones to exact, resume, compact or archive.",
        ),
    ] = None,
    rebase: Annotated[
        bool,
        typer.Option(
            "--rebase", help="Make deltas full where that frees more than keeping their bases."
        ),
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON: checkpoint or step -> metric -> value."),
    ] = None,
    order: Annotated[
        Literal["auto", "step", "mtime"],
        typer.Option(help="What is newest; auto: by step, if times do not say otherwise."),
    ] = "auto",
    min_age: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Leave alone what changed this recently."),
    ] = 60.0,
    marker: Annotated[
        str, typer.Option(metavar="NAME", help="A directory is complete once it has this file.")
    ] = "",
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Wait so long for another ckz that works there."
        ),
    ] = 60.0,
    threads: options.Threads = 0,
    memory: options.Memory = options.MEMORY,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Rotate: keep what the rules keep and all that it leans on, remove or thin the rest.

    Rules are restic's, in UTC. The newest complete checkpoint, pinned ones (.keep inside, or
    NAME.keep beside), what a link or a file like latest points to and the trainer's best always
    stay. What is incomplete, being written, or not known is left alone and never counted.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    from contextlib import nullcontext

    from ckz.locking import locked
    from ckz.marks import find_marks
    from ckz.metrics import read_metrics
    from ckz.pruning import group, make_plan, parse_ageing
    from ckz.retention import Policy, parse_best, parse_duration
    from ckz.rotating import Done, carry_out, empty_trash
    from ckz.store import list_entries

    policy = Policy(
        keep_last,
        keep_hourly,
        keep_daily,
        keep_weekly,
        keep_monthly,
        keep_yearly,
        parse_duration(keep_within) if keep_within else (0, 0, 0, 0),
        keep_every,
        tuple(parse_best(each) for each in keep_best or ()),
        tuple(keep_tag or ()),
    )
    ageings = tuple(parse_ageing(each) for each in recompress or ())
    if policy.is_empty and optimizer_last is None and not ageings:
        raise UsageError("nothing would be kept: give --keep-last or another rule")
    own = read_metrics(metrics) if metrics else None

    def act(source: str) -> dict[str, Any]:
        root = Path(source)
        if not root.is_dir():
            raise CkzError(f"{source}: is no directory")
        with nullcontext() if dry_run else locked(root, wait=wait):
            warnings = [] if dry_run else empty_trash(root)
            now = time.time()
            entries = list_entries(root, marker=marker or None)
            saved, others = group(entries, order=order, now=now, min_age=min_age)
            marks = find_marks(root, saved, own)
            plan = make_plan(
                saved,
                others,
                policy,
                now,
                metrics=marks.metrics,
                tags=marks.tags,
                pinned=marks.pinned,
                optimizer_last=optimizer_last,
                ageings=ageings,
                rebase=rebase,
            )
            if dry_run:
                done = [Done(action, 0) for action in plan]
            else:
                done = carry_out(root, plan, threads=threads, memory=memory)
        for line in (*warnings, *marks.warnings):
            log.warning("%s: warning: %s", text.printable(source), text.printable(line))
        order_of = {action.saved.name: number for number, action in enumerate(plan)}
        done.sort(key=lambda each: order_of[each.action.saved.name])
        if not as_json and not quiet:
            _show(source, done, dry_run=dry_run)
        for failed in (d for d in done if d.fault):
            log.error("%s: %s", text.printable(source), text.printable(failed.fault))
        result = _to_json(source, done, [*warnings, *marks.warnings], dry_run=dry_run)
        results.append(result)
        return result

    results: list[dict[str, Any]] = []
    try:
        each(directories, act, to_json=dict if as_json else None)
    except typer.Exit as end:
        failed = any(c["fault"] for r in results for c in r["checkpoints"])
        raise typer.Exit(end.exit_code or (3 if failed else 0)) from None


def _what(done: Done) -> str:
    return f"{done.action.what} {done.action.preset}".strip() if not done.fault else "failed"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _show(source: str, done: list[Done], *, dry_run: bool) -> None:
    rows = [
        [
            _what(each),
            text.printable(each.action.saved.name),
            "" if each.action.saved.step is None else f"{each.action.saved.step}",
            _when(each.action.saved.time),
            text.size(each.action.saved.nbytes),
            text.printable(", ".join(each.action.reasons)),
        ]
        for each in done
    ]
    if rows:
        head = ["", "checkpoint", "step", "saved (UTC)", "size", "why"]
        print_result("\n".join(line.rstrip() for line in text.table(head, rows, "<<><><")))
    gone = [d for d in done if d.action.what == "remove" and not d.fault]
    changed = [d for d in done if d.action.preset and not d.fault]
    stays = sum(d.action.what in ("keep", "thin", "recompress", "rebase") for d in done)
    if dry_run:
        freed = sum(d.action.saved.nbytes for d in gone)
        what = f"would remove {len(gone)} ({text.size(freed)}), change {len(changed)}"
    else:
        freed = sum(d.freed for d in done)
        what = f"removed {len(gone)}, changed {len(changed)}, freed {text.size(freed)}"
    print_result(f"{text.printable(source)}: {what}, keep {stays}")


def _to_json(
    source: str, done: list[Done], warnings: list[str], *, dry_run: bool
) -> dict[str, Any]:
    return {
        "source": source,
        "dry_run": dry_run,
        "freed_nbytes": sum(d.freed for d in done),
        "checkpoints": [
            {
                "name": d.action.saved.name,
                "entries": [entry.name for entry in d.action.saved.entries],
                "step": d.action.saved.step,
                "time": datetime.fromtimestamp(d.action.saved.time, UTC).isoformat(),
                "nbytes": d.action.saved.nbytes,
                "action": d.action.what,
                "preset": d.action.preset or None,
                "reasons": list(d.action.reasons),
                "freed_nbytes": d.freed,
                "fault": d.fault or None,
            }
            for d in done
        ],
        "warnings": warnings,
    }
