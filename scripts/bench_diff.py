"""What ``ckz diff`` costs beside reading and comparing with numpy.

    python scripts/bench_diff.py [--gb 2] [--rounds 5]

Two checkpoints of MiniLM's weights in tiles: the later one after a step that moves all weights, or
in one of twenty. Whole commands, start-up included, files in the page cache, by turns; medians.

The numpy program reads both files in blocks of 16 MiB and counts for all of a file what differs,
the largest difference and its relative L2 norm, as float32. ``ckz diff`` says that of each tensor
and role, and cosines, NaNs, infinities, signs of zero and distances in units in the last place. The
bare program only asks whether the blocks are equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import checkpoints
import report
from report import Bar

from ckz.bench.tools import Usage, run

SLOWER, MEMORY = 2.0, 400e6
MOVE = 1e-4

NUMPY = """
import sys
import ml_dtypes
import numpy as np
dtype = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4")}[sys.argv[3]]
block = (16 << 20) // dtype.itemsize
with open(sys.argv[1], "rb") as a, open(sys.argv[2], "rb") as b:
    for file in (a, b):
        file.seek(8 + int.from_bytes(file.read(8), "little"))
    changed, most, norm, moved = 0, 0.0, 0.0, 0.0
    while (x := np.fromfile(a, dtype, block)).size:
        y = np.fromfile(b, dtype, block)
        if sys.argv[4] == "bare":
            changed += not np.array_equal(x, y)
            continue
        x, y = x.astype(np.float32), y.astype(np.float32)
        changed += np.count_nonzero(x != y)
        difference = y - x
        most = max(most, float(np.abs(difference).max()))
        norm += float(np.dot(x, x))
        moved += float(np.dot(difference, difference))
print(changed, most, (moved / max(norm, 1e-30)) ** 0.5)
"""


def pair(target: Path, source: Path, share: float) -> None:
    """Write a safetensors file again, with a share of its tensors moved a little."""
    import json

    import torch

    torch.manual_seed(1)
    with source.open("rb") as old, target.open("wb") as new:
        length = old.read(8)
        head = old.read(int.from_bytes(length, "little"))
        new.write(length + head)
        entries = [e for name, e in json.loads(head).items() if name != "__metadata__"]
        for entry in sorted(entries, key=lambda e: e["data_offsets"][0]):
            first, last = entry["data_offsets"]
            dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]
            values = torch.frombuffer(bytearray(old.read(last - first)), dtype=dtype)
            if float(torch.rand(())) < share:
                moves = MOVE * torch.randn(values.numel())
                values = (values.float() + moves).to(dtype)
            new.write(values.view(torch.uint8).numpy().data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    bars, rows = [], []
    for dtype, code in ("float32", "F32"), ("bfloat16", "BF16"):
        nbytes = int(arguments.gb * 1e9)
        source = checkpoints.tiled(nbytes, dtype)
        for share, moved in (1.0, "all tensors moved"), (0.05, "one in twenty moved"):
            name = f"moved_{share}_{dtype}_{nbytes}.safetensors"
            later = checkpoints.made(name, pair, source, share)
            files = [str(path.resolve()) for path in (source, later)]
            commands = {
                "ckz diff": [sys.executable, "-m", "ckz", "diff", *files],
                "numpy, values": [sys.executable, "-c", NUMPY, *files, code, "values"],
                "numpy, bare": [sys.executable, "-c", NUMPY, *files, code, "bare"],
            }
            found: dict[str, list[Usage]] = {name: [] for name in commands}
            for _ in range(arguments.rounds):
                for tool, command in commands.items():
                    found[tool].append(run(command, ends=(0, 1)))  # 1: they differ
            work = f"{arguments.gb:g} GB {dtype}, {moved}"
            middle = {
                tool: [statistics.median(column) for column in zip(*runs, strict=True)]
                for tool, runs in found.items()
            }
            ratio = middle["ckz diff"][0] / middle["numpy, values"][0]
            peak = middle["ckz diff"][2]
            bars += [
                Bar(work, f"<= {SLOWER:g}x numpy's time", f"{ratio:.2f}x", ratio <= SLOWER),
                Bar(work, "<= 400 MB", f"{peak / 1e6:.0f} MB", peak <= MEMORY),
            ]
            rows += [
                [work, tool, f"{seconds:.2f} s", f"{cpu:.2f}", f"{memory / 1e6:.0f} MB"]
                for tool, (seconds, cpu, memory) in middle.items()
            ]
            checkpoints.remove(later)
        checkpoints.remove(source)
    head = ["work", "tool", "time", "CPU-s", "memory"]
    text = "# Comparing two checkpoints\n\n"
    text += f"`python scripts/bench_diff.py` on {report.machine()}. "
    text += f"{arguments.rounds} rounds.\n\n"
    text += (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    text += "\n" + report.bars_table(bars) + "\n" + report.markdown(head, rows, left=2)
    print(report.write("diff", text, [head, *rows], quick=arguments.gb < 2))


if __name__ == "__main__":
    main()
