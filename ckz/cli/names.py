"""Where the result of each input goes."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from ckz.errors import CkzError, ExistsError, UsageError

SUFFIX = ".ckz"
DASH = "-"
STDIN = "standard input"
STDOUT = "standard output"


def display(name: str, standard: str) -> str:
    """Give a path as it is, and ``-`` as the stream that it stands for."""
    return standard if name == DASH else name


def compressed(source: Path) -> Path:
    """``model.pt`` becomes ``model.pt.ckz``, beside it."""
    path = source if source.name not in ("", "..") else Path(os.path.realpath(source))
    if not path.name:
        raise UsageError(f"{source}: has no name to build the output's from; use -o")
    return path.with_name(path.name + SUFFIX)


def restored(source: Path) -> Path | None:
    """``model.pt.ckz`` becomes ``model.pt``; None where only the container knows the name."""
    if source.suffix != SUFFIX or source.name == SUFFIX:
        return None
    return source.with_name(source.name.removesuffix(SUFFIX))


def tensors_file(source: Path) -> Path:
    """``model.pt.ckz`` has its single tensors in ``model.pt.only.safetensors``."""
    whole = restored(source) or source
    return whole.with_name(f"{whole.name}.only.safetensors")


def goes_to_stdout(sources: Sequence[str], output: str | None, stdout: bool) -> bool:
    """Tell whether the result goes to standard output, as ``-c`` and a lone ``-`` ask.

    Raises
    ------
    UsageError
        For empty names and options that contradict each other.
    """
    if "" in (*sources, output):
        raise UsageError("a name is empty; perhaps a variable is not set")
    if stdout and output not in (None, DASH):
        raise UsageError("-o and -c exclude each other")
    if len(sources) > 1 and DASH in sources:
        raise UsageError("standard input (-) goes with no other input")
    wanted = stdout or output == DASH or (sources == [DASH] and output is None)
    if wanted and len(sources) > 1:
        raise UsageError("standard output takes one input only")
    return wanted


def check_combination(
    sources: Sequence[str], *, to_stdout: bool, as_json: bool, keep: bool
) -> None:
    """Refuse options that contradict where the data come from or go to.

    Raises
    ------
    UsageError
        Saying which.
    """
    if to_stdout and as_json:
        raise UsageError("--json prints to standard output, where the data would go; use -o")
    if not keep and (to_stdout or DASH in sources):
        raise UsageError("--rm wants files on both sides, not standard input or output")
    if not keep and any(Path(source).name in ("", "..") for source in sources):
        raise UsageError("--rm wants directories by their names")


def targets(
    sources: Sequence[str], output: str | None, name: Callable[[Path], Path | None]
) -> dict[str, Path | None]:
    """Pair each source with the path of its result, before anything is read.

    Parameters
    ----------
    name : gives a result's default path, or None where only the container knows it.

    Raises
    ------
    UsageError
        If two sources would have one target, or ``output`` cannot take them.
    """
    pairs = {source: _target(source, output, len(sources), name) for source in sources}
    by_target = defaultdict(list)
    for source in sources:
        if (target := pairs[source]) is not None:
            by_target[Path(os.path.realpath(target))].append(source)
    for target, rivals in by_target.items():
        if len(rivals) > 1:
            raise UsageError(f"{' and '.join(rivals)} would both become {target}")
    return pairs


def _target(
    source: str, output: str | None, n: int, name: Callable[[Path], Path | None]
) -> Path | None:
    if output is None:
        return name(Path(source))
    directory = Path(output)
    if n > 1 and not directory.is_dir():
        raise UsageError(f"{output}: is no directory, and there are {n} inputs")
    if not directory.is_dir():
        return directory
    own = name(Path(source)) if source != DASH else None
    if own is None:
        raise UsageError(f"{output}: is a directory; give the name of a file in it")
    return directory / own.name


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Refuse a target that is the source, lies inside it, or must not be replaced.

    Raises
    ------
    CkzError
        Saying which.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise CkzError(f"{target}: the output is the input")
    if os.path.lexists(target) and not force:
        raise ExistsError(f"{target}: exists; --force replaces it")
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ExistsError(f"{target}: not a regular file; use -c to write to it")
    if source.is_dir() and Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
        raise CkzError(f"{target}: lies inside the input; use -o to write it elsewhere")
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
