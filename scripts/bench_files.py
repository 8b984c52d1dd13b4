"""Whole commands, from file to file: ckz at its levels against what people would use instead.

Each command runs in a process of its own, start-up included; CPU is user and system time of the
process and its children, memory the peak of the largest process. Files come from the page cache
and go to the disk. All take turns; medians; what took long ran once, as did everything on the
largest file. Every restored file is compared with its source. ``make peers`` installs the rivals.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import bench_codecs
import checkpoints
import report
from report import Bar

from ckz.bench import tools
from ckz.bench.tools import Tool, Trial, Usage
from ckz.errors import CkzError
from ckz.inspection import inspect

ROUNDS = 3
# A tool that took so many seconds for a round is not run again.
PATIENCE = 10.0
GB, MB = 10**9, 10**6
TINY, TINY_ELEMENTS, TINY_NAME = 70_000, 16, 100
MANY = 100_000
# Read the whole file into memory, or take minutes for the largest.
_SMALL_ONLY = {"zipnn", "z4ai", "glyd max"}
# What rivals reach that are slow to run or do not give the same bytes: saved % of MiniLM.
_KNOWN = {"bf16": 33.94, "fp16": 15.18, "fp32": 18.18}


class File(NamedTuple):
    """A checkpoint to measure, and the type that most of it is of."""

    name: str
    path: Path
    dtype: str
    rounds: int = ROUNDS
    large: bool = False


class Outcome(NamedTuple):
    """A tool on a file; no trials if it failed."""

    file: str
    tool: str
    raw: int
    trials: list[Trial]

    @property
    def saved(self) -> float:
        return 100 * (1 - self.trials[0].stored / self.raw)

    def median(self, way: str, figure: str) -> float:
        """Median of ``seconds``, ``cpu_seconds`` or ``memory`` of one direction."""
        return statistics.median(getattr(getattr(t, way), figure) for t in self.trials)

    def memory(self) -> int:
        """Peak of both directions and all rounds."""
        return max(u.memory for t in self.trials for u in (t.compress, t.decompress))


Outcomes = dict[tuple[str, str], Outcome]


def contenders() -> list[Tool]:
    """ckz's levels and the rivals that are there; zstd also with one thread."""
    rivals = tools.find_rivals(tools.rivals_directory())
    found = tools.own_levels()
    for tool in rivals:
        if tool.name == "zstd -3":
            single = tuple("-T1" if word == "-T0" else word for word in tool.compress)
            found.append(tool._replace(name="zstd -3 -T0"))
            found.append(tool._replace(name="zstd -3 -T1", compress=single))
        elif tool.name in ("lmz", "lmz -j1", "zipnn", "z4ai", "glyd max"):
            found.append(tool)
    return found


def files(quick: bool) -> Iterator[File]:
    """Give the files one after the other; the large ones are removed by who uses them."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    for name, dtype in short.items():
        path = checkpoints.minilm(dtype)
        if quick:
            path = checkpoints.made(f"few_{dtype}.safetensors", checkpoints.part, path, 4 * MB)
        yield File(f"MiniLM {name}", path, dtype)
    yield File("13 MB bf16", small_file(), "bfloat16")
    yield File("mixed-precision state", checkpoints.trained(mixed=True, quick=quick), "float32")
    yield File("fp32 + Adam state", checkpoints.trained(mixed=False, quick=quick), "float32")
    half, most = (20 * MB, 60 * MB) if quick else (500 * MB, 4 * GB + 200 * MB)
    yield File("500 MB bf16", checkpoints.tiled(half), "bfloat16")
    yield File("4 GB bf16", checkpoints.tiled(most), "bfloat16", rounds=1, large=True)


def small_file() -> Path:
    """Give 13 MB of MiniLM in bf16."""
    source = checkpoints.minilm("bfloat16")
    return checkpoints.made("small.safetensors", checkpoints.part, source, 13 * MB)


def compare(file: File, work: Path, rounds: int) -> list[Outcome]:
    """Run all tools on a file, in turns."""
    runners = [t for t in contenders() if not (file.large and t.name in _SMALL_ONLY)]
    if file.large:
        runners = [t for t in runners if t.name not in ("ckz max", "zstd -3 -T1")]
    raw = file.path.stat().st_size
    found = {tool.name: Outcome(file.name, tool.name, raw, []) for tool in runners}
    failed: set[str] = set()
    for _ in range(min(rounds, file.rounds)):
        for tool in runners:
            trials = found[tool.name].trials
            slow = trials and trials[0].compress.seconds + trials[0].decompress.seconds > PATIENCE
            if slow or tool.name in failed:
                continue
            with tempfile.TemporaryDirectory(dir=work) as own:
                try:
                    trials.append(tools.measure(tool, file.path, Path(own), file.dtype))
                except CkzError as err:
                    failed.add(tool.name)
                    print(f"{file.name}: {tool.name}: failed: {err}", flush=True)
            print(f"{file.name}: {tool.name}", flush=True)
    return [outcome for outcome in found.values() if outcome.trials]


def run_ckz(*arguments: str | Path) -> Usage:
    """Run ckz once."""
    return tools.run([sys.executable, "-m", "ckz", *arguments])


def repeated(rounds: int, *arguments: str | Path) -> Usage:
    """Run ckz several times; give medians."""
    usages = [run_ckz(*arguments) for _ in range(rounds)]
    return Usage(*(statistics.median(column) for column in zip(*usages, strict=True)))


# bars


def saved_bars(found: Outcomes) -> Iterator[Bar]:
    """What ckz must save of weights."""
    for short, known in _KNOWN.items():
        name = f"MiniLM {short}"
        rivals = [o for (file, tool), o in found.items() if file == name and "ckz" not in tool]
        best = max([known, *(o.saved for o in rivals)])
        own = [found[name, f"ckz {level}"].saved for level in ("default", "max")]
        slack = 0.0 if short == "bf16" else 0.1
        what = "the best rival's" if not slack else "the best rival's - 0.1"
        yield Bar(
            f"{name}: saved",
            f"default or max >= {what}, {best - slack:.2f} %",
            f"{own[0]:.2f} %, max {own[1]:.2f} %",
            round(max(own), 2) >= round(best - slack, 2),
        )
    own_default = found["MiniLM bf16", "ckz default"].saved
    yield Bar(
        "MiniLM bf16: saved", "default >= 33.75 %", f"{own_default:.2f} %", own_default >= 33.75
    )
    name = "fp32 + Adam state"
    rivals = [o.saved for (file, tool), o in found.items() if file == name and "ckz" not in tool]
    own_whole = found[name, "ckz default"].saved
    yield Bar(
        f"{name}: saved",
        f"> every rival's, {max(rivals):.2f} %" if rivals else "> every rival's",
        f"{own_whole:.2f} %",
        own_whole > max(rivals) if rivals else None,
    )
    mixed = found["mixed-precision state", "ckz default"]
    share = mixed.trials[0].stored / mixed.raw
    yield Bar("mixed-precision state, alone", "<= 0.70 of raw", f"{share:.3f}", share <= 0.70)


def cost_bars(found: Outcomes, own_speeds: tuple[float, float]) -> Iterator[Bar]:
    """What whole commands may take."""
    for file, rival, slack in ("4 GB bf16", "lmz -j1", 0.0), ("500 MB bf16", "lmz", 1.0):
        for way in "compress", "decompress":
            own = found[file, "ckz default"].median(way, "cpu_seconds")
            other = found.get((file, rival))
            bar = other.median(way, "cpu_seconds") + slack if other else None
            yield Bar(
                f"{file}: {way}",
                f"<= {bar:.2f} CPU-s ({rival}{' + 1.0' if slack else ''})"
                if bar
                else f"<= {rival}'s",
                f"{own:.2f} CPU-s",
                own <= bar if bar else None,
            )
    for way, speed in zip(("compress", "decompress"), own_speeds, strict=True):
        own = found["4 GB bf16", "ckz default"]
        share = own.raw / own.median(way, "seconds") / 1e6 / speed
        yield Bar(
            f"4 GB bf16: {way}, wall",
            f">= 60 % of the codec's {speed:.0f} MB/s",
            f"{100 * share:.0f} %",
            share >= 0.6,
        )
    for way in "compress", "decompress":
        cpu = found["13 MB bf16", "ckz default"].median(way, "cpu_seconds")
        yield Bar(f"13 MB bf16: {way}", "<= 0.6 CPU-s", f"{cpu:.2f} CPU-s", cpu <= 0.6)
    for (file, tool), other in found.items():
        if tool == "zstd -3 -T0":
            own = found[file, "ckz default"]
            ours, theirs = (o.median("compress", "seconds") for o in (own, other))
            yield Bar(
                f"{file}: against zstd -3 -T0",
                "smaller, and compresses faster",
                f"{own.saved:.1f} to {other.saved:.1f} %, {ours:.2f} to {theirs:.2f} s",
                own.saved > other.saved and ours < theirs,
            )
    peaks = {o.memory(): o for (_, tool), o in found.items() if tool.startswith("ckz")}
    worst = peaks[max(peaks)]
    yield Bar(
        "peak memory",
        "<= 400 MB",
        f"{worst.memory() / MB:.0f} MB ({worst.tool}, {worst.file})",
        worst.memory() <= 400 * MB,
    )


def codec_speeds(quick: bool) -> tuple[float, float]:
    """Measure planes from buffer to buffer with two threads, on bf16 weights."""
    whole = bench_codecs.joined(bench_codecs.tensors_of(checkpoints.minilm("bfloat16"), "bfloat16"))
    weights = [bench_codecs.Matrix(whole[: 4 * MB if quick else None])]
    own = bench_codecs.planes_contenders("bfloat16")[:1]
    (result,) = bench_codecs.measure("MiniLM bf16", weights, own, 2 if quick else 7)
    return result.compress[2], result.decompress[2]


def start_bars(work: Path, rounds: int, quick: bool) -> Iterator[Bar]:
    """How long ckz takes before it does anything, and with many tensors."""
    used = repeated(rounds, "--help")
    yield Bar(
        "ckz --help", "<= 0.3 CPU-s", f"{used.cpu_seconds:.2f} CPU-s", used.cpu_seconds <= 0.3
    )
    many = 1000 if quick else MANY
    packed = work / "many.ckz"
    paths = {
        kind: checkpoints.made(f"many_{many}.{kind}", checkpoints.many, kind, many, 4, 20)
        for kind in ("safetensors", "pt")
    }
    run_ckz("compress", "-qf", paths["safetensors"], "-o", packed)
    for kind, bar in ("safetensors", 1.5), ("ckz", 1.5), ("pt", 5.0):
        path = paths.get(kind, packed)
        used = repeated(rounds, "inspect", path)
        yield Bar(
            f"ckz inspect of {many:,} tensors, {kind}",
            f"<= {bar} CPU-s",
            f"{used.cpu_seconds:.2f} CPU-s",
            used.cpu_seconds <= bar,
        )
        print(f"inspect {kind}", flush=True)
    tiny = 1000 if quick else TINY
    for kind in "safetensors", "pt":
        arguments = (kind, tiny, TINY_ELEMENTS, TINY_NAME)
        path = checkpoints.made(f"tiny_{tiny}.{kind}", checkpoints.many, *arguments)
        used = run_ckz("compress", "-qf", path, "-o", packed)
        found = inspect(packed)
        stored, source = packed.stat().st_size, path.stat().st_size
        values = sum(cost or 0 for role, (_, cost) in found.roles.items() if role != "skeleton")
        overhead = (stored - values) / tiny
        sizes = f"{source / MB:.1f} to {stored / MB:.1f} MB"
        yield Bar(
            f"{tiny:,} tensors of {TINY_ELEMENTS} floats, {kind}",
            "< 60 s, <= 130 bytes a tensor beside values, smaller",
            f"{used.seconds:.1f} s, {overhead:.0f} bytes, {sizes}",
            used.seconds < 60 and overhead <= 130 and stored < source,
        )
        print(f"tiny {kind}", flush=True)


def main() -> None:
    """Measure, print and write the tables."""
    quick = "--quick" in sys.argv[1:]
    rounds = 1 if quick else ROUNDS
    work = checkpoints.WORK / "run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    found: Outcomes = {}
    try:
        for file in files(quick):
            for outcome in compare(file, work, rounds):
                found[outcome.file, outcome.tool] = outcome
            if file.path.name.startswith("tiled"):
                checkpoints.remove(file.path)
        bars = [*saved_bars(found), *cost_bars(found, codec_speeds(quick))]
        bars += start_bars(work, rounds, quick)
    finally:
        shutil.rmtree(work)
        for path in checkpoints.WORK.glob("*tiled_*"):
            checkpoints.remove(path)
    write(found, bars, quick)


def write(found: Outcomes, bars: Sequence[Bar], quick: bool) -> None:
    """Write and print what was measured."""
    ways = ("compress", "decompress")
    head = ["file", "tool", "MB", "saved", "compress", "decompress"]
    head += ["CPU-s", "CPU-s", "memory", "runs"]
    rows = [
        [o.file, o.tool, f"{o.raw / MB:.1f}", f"{o.saved:.2f} %"]
        + [f"{o.median(way, 'seconds'):.2f} s" for way in ways]
        + [f"{o.median(way, 'cpu_seconds'):.2f}" for way in ways]
        + [f"{o.memory() / MB:.0f} MB", f"{len(o.trials)}"]
        for o in found.values()
    ]
    plain: list[list[object]] = [["file", "tool", "raw_nbytes", "stored_nbytes"]]
    figures = ("seconds", "cpu_seconds", "memory")
    plain[0] += [f"{way}_{figure}" for way in ways for figure in figures] + ["runs"]
    plain += [
        [o.file, o.tool, o.raw, o.trials[0].stored]
        + [round(o.median(way, figure), 3) for way in ways for figure in figures]
        + [len(o.trials)]
        for o in found.values()
    ]
    text = (
        "# Whole commands, file to file\n\n"
        f"`python scripts/bench_files.py{' --quick' if quick else ''}` on {report.machine()}.\n\n"
        f"{(__doc__ or '').partition(chr(10))[2].strip()}\n\n"
        f"{report.bars_table(bars)}\n{report.markdown(head, rows, left=2)}"
    )
    path = report.write("files", text, plain, quick=quick)
    print(f"\n{text}\nwritten to {path}")


if __name__ == "__main__":
    main()
