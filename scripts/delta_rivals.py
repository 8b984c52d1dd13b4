"""Deltas by other compressors: how much they store of one file beside another, and how fast.

ZipNN and z4ai are called from buffer to buffer in their own environments (``make peers``), lmz in
its own on files, which is all that it offers; zstd is the system's command. Each runs once, in one
thread, and must give the same bytes back. Times are CPU seconds. A rival that fails is left out.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ckz.bench import tools


class Trial(NamedTuple):
    """What a tool made of a file and its base: bytes it stored, CPU seconds each way."""

    stored: int
    compress: float
    decompress: float


_DRIVER = """
import json, os, resource, sys

base_path, path, work, dtype = sys.argv[1:]
base, target = (open(p, "rb").read() for p in (base_path, path))

def cpu():
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))

def timed(function, *arguments):
    began = cpu()
    result = function(*arguments)
    return result, cpu() - began

%s
packed, there = timed(encode, target, base)
stored = measure(packed)
restored, back = timed(decode, packed, base)
if bytes(restored) != target:
    sys.exit("did not give the same bytes back")
print(json.dumps([stored, there, back]))
"""
# A first call loads and prepares; it is not counted.
_WARM = "decode(encode(target[:65536], base[:65536]), base[:65536])"
_DRIVERS = {
    "zipnn": f"""
from zipnn import ZipNN
codec = ZipNN(input_format="byte", bytearray_dtype=dtype, delta_compressed_type="byte", threads=1)
def encode(data, base):
    return codec.compress(data, delta_second_data=base)
def decode(packed, base):
    return codec.decompress(packed, delta_second_data=base)
measure = len
{_WARM}
""",
    "z4ai": f"""
import z4ai
short = {{"bfloat16": "bf16", "float32": "fp32"}}[dtype]
def encode(data, base):
    return z4ai.compress_delta(data, base, dtype=short, threads=1)
def decode(packed, base):
    return z4ai.decompress_delta(packed, base)
measure = len
{_WARM}
""",
    # What the archive of the base grows by; extracting decodes the base too, as it must.
    "lmz": """
import lmz
archive, output = os.path.join(work, "base.lmz"), os.path.join(work, "restored")
lmz.compress(base_path, archive, workers=1)
before = os.path.getsize(archive)
def encode(data, base):
    lmz.append(archive, path, workers=1)
def decode(packed, base):
    lmz.extract(archive, os.path.basename(path), output, workers=1)
    return open(output, "rb").read()
def measure(packed):
    return os.path.getsize(archive) - before
""",
}
RIVALS = ("zstd", *_DRIVERS)


def run_rivals(base: Path, target: Path, dtype: str, scratch: Path) -> dict[str, Trial]:
    """Run what is installed on a whole file.

    Parameters
    ----------
    dtype : of the elements, or of most of them.
    scratch : directory for temporary files.
    """
    found = {}
    for name in RIVALS:
        python = _home(name) / "bin/python"
        if not (shutil.which("zstd") if name == "zstd" else python.exists()):
            continue
        with tempfile.TemporaryDirectory(dir=scratch) as work:
            if name == "zstd":
                found[name] = _run_zstd(base.absolute(), target.absolute(), Path(work).absolute())
                continue
            command = [python, "-I", "-c", _DRIVER % _DRIVERS[name], base, target, work, dtype]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                said = done.stderr.strip() or f"ended with code {done.returncode}"
                print(f"{name}, {target}: {said[-300:]}", file=sys.stderr)
                continue
            found[name] = Trial(*json.loads(done.stdout.splitlines()[-1]))
    return found


def _run_zstd(base: Path, target: Path, work: Path) -> Trial:
    """Run zstd with the base as its dictionary, in a window that holds both."""
    packed, restored = work / "packed.zst", work / "restored"
    command = ["zstd", "-q", "-3", "-T1", "--long=31", f"--patch-from={base}"]
    there = tools.run([*command, target, "-o", packed])
    back = tools.run([*command, "-d", packed, "-o", restored])
    compare(target, restored, "zstd")
    return Trial(packed.stat().st_size, there.cpu_seconds, back.cpu_seconds)


def compare(source: Path, restored: Path, tool: str) -> None:
    """End if two files differ."""
    if not filecmp.cmp(source, restored, shallow=False):
        sys.exit(f"{tool} does not give {source} back")


def versions() -> str:
    """Say which rivals there are."""
    found = [
        ready.read_text().split()[0].replace("==", " ")
        for name in _DRIVERS
        if (ready := _home(name) / "ready").exists()
    ]
    if shutil.which("zstd"):
        said = subprocess.run(["zstd", "-V"], capture_output=True, text=True).stdout
        found.insert(0, f"zstd {said.partition(' v')[2].partition(',')[0]}")
    return ", ".join(found) or "none"


def _home(name: str) -> Path:
    return tools.rivals_directory() / name
