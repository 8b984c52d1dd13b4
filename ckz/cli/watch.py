"""``ckz watch``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ckz.cli import options, stopping, text
from ckz.cli.outcome import NOTICE, configure, log, print_result, report_to_json
from ckz.errors import CkzError, LockedError, UsageError

if TYPE_CHECKING:
    from ckz.watching import Event


def watch(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Where a job saves its checkpoints.", show_default=False
        ),
    ],
    base: Annotated[
        Literal["previous", "none"],
        typer.Option(help="Store what differs from the .ckz before, or each on its own."),
    ] = "previous",
    anchor: Annotated[
        str,
        typer.Option(metavar="auto|N", help="Write a full one once N lean on each other."),
    ] = "auto",
    preset: Annotated[
        Literal["exact", "resume", "compact", "archive"],
        typer.Option(help="What may be lost; see compress."),
    ] = "exact",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--rm",
            "-k/",
            show_default=False,
            help="Keep sources (default), or remove them once their .ckz is verified.",
        ),
    ] = True,
    keep_raw: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="With --rm, keep the N newest sources as they are."),
    ] = 1,
    quiet_for: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Nothing in a checkpoint may have changed for so long."
        ),
    ] = 30.0,
    marker: Annotated[
        str, typer.Option(metavar="NAME", help="A directory is complete once it has this file.")
    ] = "",
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.05, help="Look at least so often."),
    ] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="Compress what is ready and end, for cron.")
    ] = False,
    threads: options.Threads = 1,
    memory: options.Memory = options.MEMORY,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = 0,
) -> None:
    """Compress what a running job saves, in the background, at the lowest priority.

    A checkpoint is taken once it is complete and quiet. Ends on SIGTERM or ^C, and goes on where it
    was when started again. With --json every event is one line.
    """
    configure(quiet=quiet, verbose=verbose, as_json=as_json)
    from ckz.cli.compress import anchor_of
    from ckz.locking import locked
    from ckz.lossy import methods_of
    from ckz.notifying import open_waiter, wait
    from ckz.watching import Seen, Settings, look, one_pass, read_state, ready, step_aside

    if preset == "archive" and not keep:
        raise UsageError("--preset archive drops optimizer states; with --rm nothing could resume")
    settings = Settings(
        base == "previous",
        anchor_of(anchor),
        methods_of(preset),
        not keep,
        keep_raw,
        quiet_for,
        marker,
        threads,
        memory,
    )
    if not directory.is_dir():
        raise CkzError(f"{directory}: is no directory")
    if dry_run:
        calm = Settings(quiet=0, marker=marker)
        for entry in ready(look(directory, calm), {}, read_state(directory), calm):
            print_result(f"{text.printable(entry.name)}: would be compressed")
        return
    step_aside()
    seen: dict[str, Seen] = {}
    failures = 0
    with open_waiter(directory) as fd:
        rounds = 0
        while True:
            try:
                with locked(directory):
                    for event in one_pass(directory, seen, settings):
                        failures += event.what == "failed"
                        _tell(event, as_json=as_json)
                        stopping.check()
            except LockedError as err:
                log.log(NOTICE, "%s", err)
            rounds += 1
            if once and rounds > 1:
                break
            if once:
                time.sleep(quiet_for)
            else:
                wait(fd, interval)
            stopping.check()
    if failures:
        raise typer.Exit(3)


def _tell(event: Event, *, as_json: bool) -> None:
    name = text.printable(event.name)
    if as_json:
        found = {"version": 1, "type": event.what, "name": event.name}
        if event.report is not None:
            found["report"] = report_to_json(event.report)
        if event.fault:
            found["fault"] = event.fault
        print_result(json.dumps(found))
    if event.fault:
        log.error("%s", text.printable(event.fault))
    elif event.report is not None:
        change = text.change(event.report.raw_nbytes, event.report.stored_nbytes)
        log.log(NOTICE, "%s: %s, %.1f s", name, change, event.report.seconds)
    else:
        log.log(NOTICE, "%s: %s", name, event.what)
