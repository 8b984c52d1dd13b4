"""Kernels on a GPU: bytes a second beside a copy on the same device in the same run.

    python scripts/bench_cuda.py [--elements 100000000]

Counted are the bytes that a kernel must read and write at least once; the copy reads and writes,
too. Arrays are on the device already, each kernel is compiled before it is timed, and kernels and
copies take turns; medians of several rounds, timed by the device's own events. Whole codecs go from
a bfloat16 state that is in the device's memory to payloads on the host, beside the same codec on
the CPU from the same state in the host's memory, with as many threads.

Without a GPU, the kernels are compiled, and what could not be measured stays empty.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
from report import Bar

from ckz import codecs, kernels
from ckz.kernels import Kernel, device
from ckz.kernels.device import Twin
from ckz.streams import CHUNK

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from cuda_cases import CASES, written

ROUNDS = 9
# Part of the copy's bandwidth that a kernel, or several together, must reach.
BARS = {
    "bitmask extraction": (("bitmask.mark", "bitmask.take"), 0.7),
    "ulp delta": (("ulp.zigzag",), 0.7),
    "k-means assign": (("clusters.labels",), 0.6),
}
SPEEDUP = 10


class Row(NamedTuple):
    """A kernel: the bytes that it moves, and seconds; none where there is no device."""

    name: str
    nbytes: int
    seconds: float | None = None


def moved(kernel: Kernel, arguments: list[Any]) -> int:
    """Count the bytes that are read and written at least once."""
    arrays = [a for a in arguments if isinstance(a, np.ndarray)]
    again = written(kernel, arguments) if kernel.updates else []
    return sum(a.nbytes for a in arrays) + sum(a.nbytes for a in again)


def timed(work: Callable[[], object]) -> float:
    """Give the seconds that the device takes."""
    from numba import cuda

    stream = device._stream()
    first, last = cuda.event(), cuda.event()
    first.record(stream)
    work()
    last.record(stream)
    last.synchronize()
    return float(cuda.event_elapsed_time(first, last)) / 1000


def measure(elements: int) -> tuple[list[Row], float]:
    """Time every kernel; also give the copy's bytes a second."""
    from numba import cuda

    source = cuda.device_array(2 * elements, np.uint8)
    target = cuda.device_array(2 * elements, np.uint8)

    def copy() -> None:
        target.copy_to_device(source, stream=device._stream())

    rows, copies = [], []
    for name, (kernel, make) in CASES.items():
        arguments = make(elements, np.random.default_rng(0))
        there = [cuda.to_device(a) if isinstance(a, np.ndarray) else a for a in arguments]
        kernel(*there)
        seconds = []
        for _ in range(ROUNDS):
            copies.append(timed(copy))
            seconds.append(timed(lambda kernel=kernel, there=there: kernel(*there)))
        rows.append(Row(name, moved(kernel, arguments), statistics.median(seconds)))
    return rows, 2 * source.nbytes / statistics.median(copies)


def whole(name: str, elements: int) -> tuple[float, float]:
    """Give the bytes a second of a codec, from the device's memory and from the host's."""
    from cuda_cases import near, words
    from numba import cuda

    rng = np.random.default_rng(0)
    base = words(elements, rng)
    current = near(base, rng)
    codec = codecs.parse(f"{name}:dtype=bfloat16")
    starts = range(0, current.nbytes, CHUNK)
    speeds = []
    for form in (kernels.CUDA, kernels.COMPILED):
        kernels._form = form
        here = [x.view(np.uint8) for x in (current, base)]
        there = [cuda.to_device(x) for x in here] if form == kernels.CUDA else here

        def part(key: str, number: int, start: int, there: list[Any] = there) -> Any:
            """Give bytes as the pipeline does: on the host for a checksum, and where they are."""
            bytes_there = there[number][start : start + CHUNK]
            found = device.get(key, bytes_there)
            return Twin.of(found, bytes_there) if device.is_on_device(bytes_there) else found

        def code(start: int) -> int:
            refs = [] if name == "planes" else [part("base", 1, start)]
            return len(codec.encode(part("current", 0, start), refs) or b"")

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                sum(pool.map(code, starts))
                seconds.append(time.perf_counter() - began)
        speeds.append(current.nbytes / statistics.median(seconds))
    return speeds[0], speeds[1]


def unmeasured() -> Iterator[Row]:
    """Give every kernel, compiled for lack of a device to run it."""
    from numba import cuda, typeof

    for name, (kernel, make) in CASES.items():
        arguments = make(1000, np.random.default_rng(0))
        signature = tuple(typeof(a) for a in arguments)
        cuda.compile_ptx(device.for_cuda(kernel, simulated=False), signature, cc=(9, 0))
        yield Row(name, moved(kernel, arguments))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=100_000_000)
    elements = parser.parse_args().elements
    found = device.describe()
    rows, copied = [*unmeasured()], 0.0
    speeds: dict[str, tuple[float, float]] = {}
    if found:
        kernels._form = kernels.CUDA
        rows, copied = measure(elements)
        speeds = {name: whole(name, elements) for name in ("bitmask", "ulp", "planes")}
    bars = []
    by_name = {row.name: row for row in rows}
    for work, (names, part) in BARS.items():
        seconds = [by_name[name].seconds for name in names]
        bar = f">= {part:.0%} of a copy's bandwidth"
        if None in seconds:
            bars.append(Bar(work, bar, "", None))
            continue
        share = sum(by_name[n].nbytes for n in names) / sum(s or 0 for s in seconds) / copied
        bars.append(Bar(work, bar, f"{share:.0%}", share >= part))
    for name in ("bitmask", "ulp", "planes"):
        bar = f">= {SPEEDUP}x the CPU's speed"
        if name not in speeds:
            bars.append(Bar(f"{name}, state on the GPU", bar, "", None))
            continue
        ratio = speeds[name][0] / speeds[name][1]
        bars.append(Bar(f"{name}, state on the GPU", bar, f"{ratio:.1f}x", ratio >= SPEEDUP))
    where = f"{found.name}, {found.nbytes / 1e9:.0f} GB" if found else "no GPU"
    text = (
        f"# Kernels on a GPU\n\n`python scripts/bench_cuda.py` on {where}; {report.machine()}.\n\n"
    )
    if not found:
        text += (
            f"**Nothing was measured: {device.why_not()}.** Every kernel compiles for sm_90, and "
            "gives the CPU's bytes in Numba's simulator (`tests/test_cuda.py`).\n\n"
        )
    text += "\n\n".join((__doc__ or "").strip().split("\n\n")[2:]) + "\n\n"
    text += report.bars_table(bars) + "\n"
    table = [
        [
            row.name,
            f"{row.nbytes / row.seconds / 1e9:.0f}" if row.seconds else "",
            f"{row.nbytes / row.seconds / copied:.0%}" if row.seconds else "",
        ]
        for row in rows
    ]
    text += report.markdown(["kernel", "GB/s", "of a copy"], table)
    csv = [["kernel", "bytes", "seconds"], *([*row] for row in rows)]
    print("written to", report.write("cuda", text, csv, quick=False))


if __name__ == "__main__":
    main()
