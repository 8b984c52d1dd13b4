"""Write the generated parts of README.md: the help of every command and the exit codes.

A part lies between ``<!-- generated: NAME -->`` and ``<!-- end -->``. With ``--check`` nothing is
written, and a stale part ends in exit code 1.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

from typer.testing import CliRunner

from ckz import errors
from ckz.cli import app_of
from ckz.cli.outcome import EXIT_CODES

README = Path(__file__).parent.parent / "README.md"
_PART = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def command_help(*command: str) -> str:
    """Give what ``ckz COMMAND --help`` prints on a terminal of 80 columns."""
    arguments = [*command, "--help"]
    os.environ["COLUMNS"] = "80"
    result = CliRunner().invoke(app_of(), arguments, prog_name="ckz", catch_exceptions=False)
    return f"```\n$ ckz {' '.join(arguments)}\n{result.stdout.strip()}\n```\n"


def exit_codes() -> str:
    """Give the table of exit codes, from the error classes and from what only the CLI knows."""
    meanings = defaultdict(list, {code: [text] for code, text in EXIT_CODES.items()})
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.CkzError):
            meanings[value.exit_code].append((value.__doc__ or "").strip())
    rows = [f"| {code} | {' '.join(meanings[code])} |\n" for code in sorted(meanings)]
    return "".join(["| code | meaning |\n| --- | --- |\n", *rows])


def render(text: str) -> str:
    """Give a README with its generated parts as they should be."""

    def part(match: re.Match[str]) -> str:
        name = match[2]
        content = exit_codes() if name == "exit codes" else command_help(*name.split()[1:])
        return f"{match[1]}{content}{match[3]}"

    return _PART.sub(part, text)


def main() -> None:
    """Write or check README.md."""
    text = README.read_text()
    wanted = render(text)
    if text == wanted:
        return
    if "--check" in sys.argv[1:]:
        sys.exit(f"{README.name}: the generated parts are stale; run `make docs`")
    README.write_text(wanted)


if __name__ == "__main__":
    main()
