"""What in a directory points to one of its checkpoints: links, and files that name one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

_NAMES = (
    "latest",
    "latest_checkpointed_iteration.txt",
    "latest_universal",
    "last_checkpoint",
    "latest_checkpoint",
    "latest_checkpoint.txt",
    "checkpoint",
    "best",
    "best_checkpoint",
    "best_checkpoint.txt",
)
_LONGEST = 1024
# TensorFlow's: model_checkpoint_path: "ckpt-3"
_QUOTED = re.compile(r'^model_checkpoint_path:\s*"([^"]+)"', re.M)


class Pointers(NamedTuple):
    """Entry -> what points to it; and a line for each that points nowhere."""

    to: dict[str, list[str]]
    warnings: list[str]


def find_pointers(root: Path, entries: Collection[str]) -> Pointers:
    """Find what points to entries of a directory; nothing outside of it is followed.

    Parameters
    ----------
    entries : paths below the directory.
    """
    found = Pointers({}, [])
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            target = os.path.normpath(path.readlink())
            _point(found, path.name, _inside(root, target), entries, link=path)
        elif path.name in _NAMES and path.is_file() and (text := _read(path)):
            _point(found, path.name, text, entries)
    return found


def _inside(root: Path, target: str) -> str:
    """Give a link's target below the directory, if it is there."""
    if Path(target).is_absolute():
        return os.path.relpath(target, os.path.realpath(root))
    return target


def _read(path: Path) -> str:
    if path.stat().st_size > _LONGEST:
        return ""
    text = path.read_text(errors="replace").strip()
    if match := _QUOTED.search(text):
        text = match[1]
    return text if "\n" not in text else ""


def _point(
    found: Pointers, name: str, target: str, entries: Collection[str], link: Path | None = None
) -> None:
    if link is not None and target.startswith("../"):
        return
    last = target.rstrip("/").rpartition("/")[2]
    names = [target, last, f"{target}.ckz", f"{last}.ckz"]
    if target.isdecimal():
        # Megatron names the iteration alone.
        number = int(target)
        names += [e for e in entries if re.fullmatch(rf"iter_0*{number}(?:\.ckz)?", e)]
    there = [n for n in dict.fromkeys(names) if n in entries]
    # A link may lead into a checkpoint.
    there = there or [e for e in entries if target.startswith(f"{e}/")]
    for entry in there:
        found.to.setdefault(entry, []).append(name)
    stands = link is not None and link.exists()
    if not there and not stands and target != "release":
        found.warnings.append(f"{name} -> {target} (missing)")
