"""Whole commands, run and measured: ckz at its levels, and what people would use instead.

Each command runs in a process of its own whose time, CPU and memory the system counts. Rivals are
found in one directory with a virtual environment for each (``make peers`` makes it), or on PATH.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ckz
from ckz.errors import CkzError
from ckz.plan import LEVELS

# Seconds after which a command is given up.
_LIMIT = 3600.0

# A process inherits the peak memory of the one that starts it, so a small one stands between.
_LAUNCHER = """
import os, sys, time
null = os.open(os.devnull, os.O_RDWR)
quiet = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
began = time.perf_counter()
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, used = os.wait4(pid, 0)
seconds = time.perf_counter() - began
code = os.waitstatus_to_exitcode(status)
print(code, seconds, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss)
"""

# ZipNN and glyd have no command for files; ZipNN changes the buffer that it is given.
_ZIPNN = """
import sys
from zipnn import ZipNN
verb, source, target, dtype = sys.argv[1:]
codec = ZipNN(method="AUTO", input_format="byte", bytearray_dtype=dtype)
with open(source, "rb") as file:
    data = bytearray(file.read())
with open(target, "wb") as file:
    file.write(getattr(codec, verb)(data))
"""
_GLYD = """
import sys
import glyd
verb, source, target = sys.argv[1:]
with open(source, "rb") as file:
    data = file.read()
with open(target, "wb") as file:
    file.write(glyd.compress(data, level="max") if verb == "compress" else glyd.decompress(data))
"""

# What z4ai and ZipNN call an element type; ZipNN knows no others.
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_ZIPNN_TYPES = ("bfloat16", "float16", "float32")


class Usage(NamedTuple):
    """What a process took: wall and CPU seconds with its children's, peak memory in bytes."""

    seconds: float
    cpu_seconds: float
    memory: int


class Tool(NamedTuple):
    """A compressor's two commands.

    Attributes
    ----------
    compress, decompress : the words of each; ``SOURCE``, ``PACKED`` and ``RESTORED`` stand for
        paths, ``DTYPE`` and ``SHORT`` for the file's element type.
    suffix : that the compressed file must have.
    directories : True if it takes one; others get the files one by one.
    """

    name: str
    compress: tuple[str, ...]
    decompress: tuple[str, ...]
    suffix: str = ""
    directories: bool = False


class Trial(NamedTuple):
    """One compression and decompression: bytes stored, and what each took."""

    stored: int
    compress: Usage
    decompress: Usage


# Name -> environment, compress, decompress, suffix; commands as in ``Tool``.
_RIVALS = {
    "zstd -3": (
        "zstd",
        "zstd -qf -3 -T0 SOURCE -o PACKED",
        "zstd -qfd PACKED -o RESTORED",
        ".zst",
    ),
    "lmz": (
        "lmz",
        "lmz compress -qf SOURCE PACKED",
        "lmz decompress -qf PACKED RESTORED",
        ".lmz",
    ),
    "lmz -j1": (
        "lmz",
        "lmz compress -qf -j1 SOURCE PACKED",
        "lmz decompress -qf -j1 PACKED RESTORED",
        ".lmz",
    ),
    "zipnn": (
        "zipnn",
        "python -c ZIPNN compress SOURCE PACKED DTYPE",
        "python -c ZIPNN decompress PACKED RESTORED DTYPE",
        ".znn",
    ),
    "z4ai": (
        "z4ai",
        "z4ai compress -q --dtype SHORT SOURCE -o PACKED",
        "z4ai decompress -q PACKED -o RESTORED",
        ".z4ai",
    ),
    "glyd max": (
        "glyd",
        "python -c GLYD compress SOURCE PACKED",
        "python -c GLYD decompress PACKED RESTORED",
        ".glyd",
    ),
    "bigsmall": (
        "bigsmall",
        "bigsmall compress --no-progress SOURCE -o PACKED",
        "bigsmall decompress --no-progress PACKED -o RESTORED",
        ".bs",
    ),
    "dmx --fast": (
        "dmx",
        "dmx compress --fast SOURCE PACKED",
        "dmx decompress PACKED RESTORED",
        ".dmx",
    ),
}


def own_levels() -> list[Tool]:
    """Give ckz at each of its levels."""
    start = (sys.executable, "-m", "ckz")
    back = (*start, "decompress", "-qf", "PACKED", "-o", "RESTORED")
    return [
        Tool(
            f"ckz {level}",
            (*start, "compress", "-qf", "--level", level, "SOURCE", "-o", "PACKED"),
            back,
            ".ckz",
            directories=True,
        )
        for level in LEVELS
    ]


def find_rivals(directory: Path) -> list[Tool]:
    """Give the rivals that are installed, in a directory of environments or on PATH."""
    found = []
    for name, (home, compress, decompress, suffix) in _RIVALS.items():
        program = compress.split()[0]
        inside = directory.absolute() / home / "bin" / program
        path = str(inside) if inside.exists() else program != "python" and shutil.which(program)
        if path:
            there, back = ((path, *text.split()[1:]) for text in (compress, decompress))
            found.append(Tool(name, there, back, suffix))
    return found


def rivals_directory() -> Path:
    """Where the rivals' environments are."""
    return Path(os.environ.get("CKZ_PEERS", "build/peers"))


def run(command: Sequence[str | Path], *, ends: Sequence[int] = (0,)) -> Usage:
    """Run a command to its end, without input and output.

    Parameters
    ----------
    ends : the exit codes that are no failure.

    Raises
    ------
    CkzError
        With the last line that it said, if it fails or takes too long.
    """
    # A tool that cannot keep its bytecode compiles itself at each start; installed ones do not.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
        env=environment,
        cwd=Path(ckz.__file__).parents[1],  # for -m finds this ckz there
    ) as launcher:
        try:
            out, err = launcher.communicate(timeout=_LIMIT)
        except BaseException as why:
            os.killpg(launcher.pid, signal.SIGKILL)
            if isinstance(why, subprocess.TimeoutExpired):
                raise CkzError(f"took more than {_LIMIT:.0f} s") from why
            raise
    code, *used = out.split() or ["1"]
    if int(code) not in ends or not used:
        said = err.strip().splitlines()
        raise CkzError(said[-1] if said else f"ended with code {code}")
    return Usage(float(used[0]), float(used[1]), int(used[2]))


def measure(tool: Tool, source: Path, work: Path, dtype: str) -> Trial:
    """Compress, decompress and compare.

    Parameters
    ----------
    source : a file or directory.
    work : an empty directory; what was compressed is left there as ``packed`` and the suffix.
    dtype : the type of most elements.

    Raises
    ------
    CkzError
        If the tool fails, or does not give the same bytes back.
    """
    if source.is_dir() and not tool.directories:
        trials = []
        for number, file in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
            part = work / str(number)
            part.mkdir()
            trials.append(measure(tool, file, part, dtype))
            shutil.rmtree(part)
        return _total(trials)
    packed, restored = work / f"packed{tool.suffix}", work / f"restored{source.suffix}"
    words = {
        "SOURCE": str(source.absolute()),
        "PACKED": str(packed),
        "RESTORED": str(restored),
        "DTYPE": dtype if dtype in _ZIPNN_TYPES else "float32",
        "SHORT": _SHORT.get(dtype, "uint8"),
        "ZIPNN": _ZIPNN,
        "GLYD": _GLYD,
    }
    there = run([words.get(word, word) for word in tool.compress])
    back = run([words.get(word, word) for word in tool.decompress])
    if not (packed.is_file() and restored.exists() and _equal(source, restored)):
        raise CkzError("did not give the same bytes back")
    return Trial(packed.stat().st_size, there, back)


def _equal(a: Path, b: Path) -> bool:
    filecmp.clear_cache()  # it knows files by size and time, which decompress restores
    if a.is_file():
        return b.is_file() and filecmp.cmp(a, b, shallow=False)
    names = [str(path.relative_to(a)) for path in a.rglob("*") if path.is_file()]
    return filecmp.cmpfiles(a, b, names, shallow=False)[1:] == ([], [])


def _total(trials: Sequence[Trial]) -> Trial:
    def total(usages: list[Usage]) -> Usage:
        return Usage(
            sum(usage.seconds for usage in usages),
            sum(usage.cpu_seconds for usage in usages),
            max((usage.memory for usage in usages), default=0),
        )

    return Trial(
        sum(trial.stored for trial in trials),
        total([trial.compress for trial in trials]),
        total([trial.decompress for trial in trials]),
    )
