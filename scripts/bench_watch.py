"""What ``ckz watch`` costs a training loop that runs beside it, on the same cores.

    python scripts/bench_watch.py [--seconds 40] [--rounds 4]

A transformer trains with as many threads as there are cores, and saves its state every few seconds;
without and with a watch on its directory by turns. Counted are steps a second, saving included.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
import torch
from report import Bar
from torch import nn

WIDTH, LAYERS, BATCH, LENGTH = 512, 6, 8, 64
EVERY = 8.0


def train(folder: Path, seconds: float) -> float:
    """Train and save for a while; give steps a second."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    began, saved, steps = time.monotonic(), time.monotonic(), 0
    while time.monotonic() - began < seconds:
        x = torch.randn(BATCH, LENGTH, WIDTH)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if time.monotonic() - saved > EVERY:
            path = folder / f"step_{steps}.pt"
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            saved = time.monotonic()
    return steps / (time.monotonic() - began)


def measure(folder: Path, seconds: float, *, watched: bool) -> tuple[float, int]:
    """Give steps a second, and how many checkpoints were compressed meanwhile."""
    command = [sys.executable, "-m", "ckz", "watch", str(folder), "--quiet-for", "1", "-q"]
    process = subprocess.Popen([*command, "--interval", "1"]) if watched else None
    try:
        speed = train(folder, seconds)
    finally:
        if process:
            process.send_signal(signal.SIGTERM)
            process.wait()
    return speed, len(list(folder.glob("*.ckz")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    rows, packed = [], 0
    for number in range(arguments.rounds):
        for watched in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                speed, found = measure(Path(folder), arguments.seconds, watched=watched)
            speeds[watched].append(speed)
            packed += found
            rows.append(
                [f"{number + 1}", "watched" if watched else "alone", f"{speed:.3f}", f"{found}"]
            )
            print(rows[-1], flush=True)
    alone, beside = (statistics.median(speeds[watched]) for watched in (False, True))
    slower = 100 * (1 - beside / alone)
    bar = Bar(
        "steps a second with a watch that compresses what is saved",
        "<= 5 % fewer",
        f"{slower:.1f} % fewer ({alone:.2f} -> {beside:.2f}, {packed} checkpoints compressed)",
        slower <= 5,
    )
    lines = (__doc__ or "").strip().split("\n\n")
    head = ["round", "", "steps a second", "compressed"]
    text = "# Watching a training loop\n\n"
    text += f"`python scripts/bench_watch.py` on {report.machine()}.\n\n{lines[-1]}\n\n"
    text += report.bars_table([bar]) + "\n" + report.markdown(head, rows, left=2)
    print("written to", report.write("watch", text, [head, *rows], quick=False))


if __name__ == "__main__":
    main()
