"""Deltas between checkpoints of one training run: ckz, its reference codecs, and its rivals.

Two runs, at several distances: a fine-tune of MiniLM that ``finetune.py`` really makes (once; it is
kept in ``build/delta``), and slices of a GPT trained in mixed precision, from ``../shared/data``
if that is there: small tensors, so what a file or a chunk costs whatever its size weighs more.
``make data`` fetches MiniLM, ``make peers`` installs the rivals.

Sizes are of whole files, with all that a tool adds; lmz's is what an archive of the base grows by.
Speeds are bytes of the later checkpoint per CPU second, in one thread, medians of interleaved
rounds. ckz's codecs (compiled, chunks of 1 MiB), z4ai and ZipNN go from buffer to buffer; lmz
offers only files, and zstd is its command, so theirs includes reading and writing cached files.
Everything is decoded and compared.

The static bound is the order-0 entropy of the zigzagged difference in units in the last place, in
the context of the base's exponent, over all tensors of a file together. (Of float32 differences it
counts the length and the eight leading bits, and the rest as it is.)
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import delta_tables
import finetune
import numpy as np
import report
from delta_rivals import Trial, compare, run_rivals, versions
from delta_tables import Pair, Result, State

from ckz import codecs, kernels
from ckz.codecs.leaning import EXPONENTS
from ckz.errors import CkzError
from ckz.formats import read_checkpoint
from ckz.pipeline import compress, decompress
from ckz.streams import CHUNK, Slicer, build_streams

WORK = Path("build/delta")
SERIES = Path("../shared/data/series/gpt_bf16")
RATES = ("1e-5", "1e-4")
ROUNDS, QUICK_ROUNDS = 3, 1

# Part of a state of the GPT -> its dtype, and where in the state it is.
_PARTS = {
    "GPT weights": ("bfloat16", ("model",)),
    "GPT masters": ("float32", ("optimizer", "fp32_master")),
}
# Steps back -> the share of a mixed-precision state that may be stored; 0 is alone.
_LIMITS = {0: 0.70, 1: 0.26, 10: 0.645, 20: 0.655, 40: None}

Chunks = Sequence[tuple[np.ndarray, np.ndarray]]


class Plan(NamedTuple):
    """How much is trained: layers of the model, warm-up steps, distances in steps."""

    name: str
    layers: int
    warmup: int
    gaps: tuple[int, ...]


FULL = Plan("minilm", 6, 20, (1, 10, 100))
QUICK = Plan("quick", 1, 2, (1,))


# what is measured


def apart(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process of its own, lest torch's threads count for what follows."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()


def fine_tuned(plan: Plan, rate: str, step: int, suffix: str = "safetensors") -> Path:
    """Give a checkpoint of the fine-tune."""
    return WORK / plan.name / f"lr_{rate}" / f"step_{step}.{suffix}"


def minilm_pairs(plan: Plan) -> Iterator[Pair]:
    """Fine-tune; give the weights after the warm-up with those some steps later."""
    first = plan.warmup
    for rate in RATES:
        target = fine_tuned(plan, rate, 0).parent
        with_states = rate == RATES[0]
        apart(finetune.train, target, float(rate), *plan[1:], with_states)
        for gap in plan.gaps:
            files = (fine_tuned(plan, rate, step) for step in (first, first + gap))
            yield Pair(f"MiniLM, lr {rate}", "bfloat16", gap, *files)


def series_state(step: int) -> Path:
    """Give a state of the GPT."""
    return SERIES / f"iter_{step:07}.pt"


def series_steps() -> list[tuple[int, int, int]]:
    """Give (steps apart, step, later step) for the states of the GPT, nearest first."""
    steps = sorted(int(path.stem.removeprefix("iter_")) for path in SERIES.glob("iter_*.pt"))
    found = [(0, step, step) for step in steps]
    found += [(later - step, step, later) for step, later in combinations(steps, 2)]
    return sorted(entry for entry in found if entry[0] in _LIMITS)


def series_pairs() -> Iterator[Pair]:
    """Give weights and masters of the GPT."""
    for run, (dtype, keys) in _PARTS.items():
        for gap, *steps in series_steps():
            files = [WORK / "gpt" / f"{dtype}_{step}.safetensors" for step in steps]
            for step, file in zip(steps, files, strict=True):
                if not file.exists():
                    file.parent.mkdir(exist_ok=True)
                    apart(finetune.write_part, series_state(step), file, *keys)
            if gap:
                yield Pair(run, dtype, gap, *files)


# measuring


def run_ckz(base: Path | None, target: Path) -> int:
    """Compress a file as the command does, and restore it; give what it takes."""
    with tempfile.TemporaryDirectory(dir=WORK) as work:
        container, restored = Path(work, "packed.ckz"), Path(work, "restored")
        compress(target, container, base=base)
        decompress(container, restored, base=base)
        compare(target, restored, "ckz")
        return container.stat().st_size


def chunks_of(path: Path, dtype: str) -> list[np.ndarray]:
    """Give the tensors of a file, cut as ckz cuts them."""
    checkpoint = read_checkpoint(path)
    data = np.fromfile(path, np.uint8)
    found = []
    for stream in build_streams(checkpoint):
        if stream.dtype != dtype or stream.parts[0].span < len(checkpoint.files):
            continue
        slicer = Slicer(stream.parts)
        for start in range(0, stream.nbytes, CHUNK):
            extents = slicer.extents_in(start, min(start + CHUNK, stream.nbytes))
            found.append(np.concatenate([data[e.offset : e.offset + e.nbytes] for e in extents]))
    return found


def run_codec(codec: codecs.Codec, chunks: Chunks) -> Trial:
    """Code chunks against the base's and back; one that does not pay counts as it is."""
    out = np.empty(CHUNK, np.uint8)
    stored, there, back = 0, 0.0, 0.0
    for chunk, base in chunks:
        began = time.thread_time()
        payload = codec.encode(chunk, [base])
        there += time.thread_time() - began
        stored += chunk.size if payload is None else len(payload)
        view = out[: chunk.size]
        began = time.thread_time()
        if payload is None:
            view[:] = chunk
        else:
            codec.decode(memoryview(payload), [base], view)
        back += time.thread_time() - began
        if not np.array_equal(view, chunk):
            sys.exit(f"{codecs.spec(codec)} does not give a chunk back")
    return Trial(stored, there, back)


def static_bound(dtype: str, target: np.ndarray, base: np.ndarray) -> float:
    """Give the static bound, in bits; written apart from the codec, so as to check it."""
    itemsize, shift, width = EXPONENTS[dtype]
    bits = [x.view(f"<i{itemsize}").astype(np.int64) for x in (target, base)]
    magnitude = (1 << (8 * itemsize - 1)) - 1
    ordered = [np.where(x < 0, x ^ magnitude, x) for x in bits]
    difference = ordered[0] - ordered[1]
    zigzag = difference << 1 ^ difference >> 63
    length = np.frexp(zigzag.astype(np.float64))[1].astype(np.int64)
    uncoded = np.maximum(length - 8, 0) if itemsize > 2 else np.zeros_like(length)
    symbols = uncoded << 8 | zigzag >> uncoded
    exponents = bits[1] >> shift & (1 << width) - 1
    total = float(uncoded.sum())
    for exponent in np.unique(exponents):
        counts = np.bincount(symbols[exponents == exponent])
        counts = counts[counts > 0]
        total -= float((counts * np.log2(counts / counts.sum())).sum())
    return total


def measure(pair: Pair, rounds: int) -> Result:
    """Measure a pair with everything, in turns."""
    itemsize = EXPONENTS[pair.dtype][0]
    ours, theirs = (chunks_of(path, pair.dtype) for path in (pair.target, pair.base))
    chunks = list(zip(ours, theirs, strict=True))
    target, base = np.concatenate(ours), np.concatenate(theirs)
    own = [codecs.CODECS[name](pair.dtype) for name in delta_tables.CODECS]
    for codec in own:  # Numba loads kernels at their first call
        run_codec(codec, [(chunks[0][0][:4096], chunks[0][1][:4096])])
    trials: dict[str, list[Trial]] = {}
    for _ in range(rounds):
        found = run_rivals(pair.base, pair.target, pair.dtype, WORK)
        for name, trial in (found | {c.name: run_codec(c, chunks) for c in own}).items():
            trials.setdefault(name, []).append(trial)
    medians = {
        name: Trial(several[0].stored, *map(median, list(zip(*several, strict=True))[1:]))
        for name, several in trials.items()
    }
    return Result(
        pair=pair,
        nbytes=pair.target.stat().st_size,
        raw=target.size,
        elements=target.size // itemsize,
        changed=int(np.count_nonzero(target.view(f"u{itemsize}") != base.view(f"u{itemsize}"))),
        bound=static_bound(pair.dtype, target, base),
        stored=run_ckz(pair.base, pair.target),
        rivals={name: medians[name] for name in found},
        codecs={codec.name: medians[codec.name] for codec in own},
    )


def measure_state(work: str, steps: int, base: Path, target: Path, limit: float | None) -> State:
    """Measure a state, alone if it has no base before it; rivals take it as float32."""
    rivals = run_rivals(base, target, "float32", WORK) if steps else {}
    stored = run_ckz(base if steps else None, target)
    return State(work, steps, target.stat().st_size, stored, limit, rivals)


def measure_states(plan: Plan) -> Iterator[State]:
    """Measure the GPT's states, and the fine-tune's fp32 weights with AdamW's state."""
    for gap, step, later in series_steps():
        work = f"GPT, mixed precision, step {later}"
        yield measure_state(work, gap, series_state(step), series_state(later), _LIMITS[gap])
    for gap in (0, *plan.gaps):
        base, target = (
            fine_tuned(plan, RATES[0], step, "pt") for step in (plan.warmup, plan.warmup + gap)
        )
        work = f"MiniLM, fp32 and AdamW, lr {RATES[0]}, step {plan.warmup + gap}"
        yield measure_state(work, gap, base, target, None)


def main() -> None:
    """Measure, print and write the tables."""
    quick = "--quick" in sys.argv[1:]
    plan, rounds = (QUICK, QUICK_ROUNDS) if quick else (FULL, ROUNDS)
    if not finetune.SOURCE.exists():
        sys.exit(f"{finetune.SOURCE} is not there; run `make data`")
    WORK.mkdir(parents=True, exist_ok=True)
    kernels.enable(1 << 40)
    pairs = [*minilm_pairs(plan), *series_pairs()]
    if quick:
        pairs = [pair for pair in pairs if pair.steps in plan.gaps]
    try:
        results = [measure(pair, rounds) for pair in pairs]
        states = list(measure_states(plan))
    except CkzError as err:
        sys.exit(str(err))
    text = (
        "# Deltas\n\n"
        f"`python scripts/bench_delta.py{' --quick' if quick else ''}` on {report.machine()}; "
        f"{versions()}. {rounds} rounds.\n\n"
        f"{(__doc__ or '').partition(chr(10))[2].strip()}\n\n"
        f"{delta_tables.layout(results, states)}"
    )
    path = report.write("delta", text, delta_tables.lines_of(results, states), quick=quick)
    print(f"{text}\nwritten to {path}")


if __name__ == "__main__":
    main()
