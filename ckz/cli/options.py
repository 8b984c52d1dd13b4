"""The options that several subcommands share, each stated once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

MEMORY = 160_000_000

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Read ``160M``, ``1.5G``, ``400MB`` (powers of 1000) or ``1GiB`` (of 1024) as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", str(text).strip().lower())
    if not match or (match[3] and not match[2]):
        raise typer.BadParameter(f"{text!r} is not a size: write 160M, 1.5G or 1GiB")
    size = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]]
    if size > 1 << 62:
        raise typer.BadParameter(f"{text!r} is more than any machine has")
    return int(size)


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC",
        help="A file, a checkpoint directory, or - for standard input.",
        show_default=False,
    ),
]
Containers = Annotated[
    list[str],
    typer.Argument(metavar="SRC", help="A .ckz file, or - for standard input.", show_default=False),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="PATH",
        help="Write to PATH; a directory that exists takes the results of several SRC.",
    ),
]
Stdout = Annotated[
    bool, typer.Option("-c", "--stdout", help="Write to standard output; sources are kept.")
]
Force = Annotated[bool, typer.Option("-f", "--force", help="Overwrite what is there.")]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep/--rm",
        "-k/",
        show_default=False,
        help="Keep the source (default), or remove it once the result is verified and synced.",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="What SRC.ckz leans on, if it does not lie beside it; found by content.",
    ),
]
BaseDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Look for what SRC.ckz leans on there, too.")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(
        envvar="CKZ_DEVICE",
        help="Where kernels run: auto takes a GPU, if there is one, for what is large. The result "
        "does not depend on it.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "-T",
        "--threads",
        metavar="N",
        min=0,
        envvar="CKZ_THREADS",
        show_default=False,
        help="Threads; 0 is one for each core. The result does not depend on it.",
    ),
]
Memory = Annotated[
    int,
    typer.Option(
        metavar="SIZE",
        parser=parse_size,
        show_default=False,
        help="All buffers together take no more than SIZE: 160M (default), 1G, ...",
    ),
]
DryRun = Annotated[
    bool, typer.Option("-n", "--dry-run", help="Say what would be done; write nothing.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Only tensors with a matching name; may be repeated."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and errors as JSON objects.")
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar on the terminal.")]
Quiet = Annotated[
    int,
    typer.Option(
        "-q", "--quiet", count=True, show_default=False, help="Only errors; -qq: nothing."
    ),
]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        show_default=False,
        help="Say more: sizes by role, codecs; -vv: CPU and memory.",
    ),
]
