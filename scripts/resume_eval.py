"""Really train, stop, compress, restore and resume, against the run that nothing happened to.

    python scripts/resume_eval.py [--task gpt] [--seeds 5] [--beta2 0.95] [--report]

Every run of a seed sees the same batches, so losses differ by what was lost alone. The difference
is averaged over the resumed steps, on all tokens and by how often a token stands in the text:
averages hide damage to rare ones. A *stale* row resumes from the exact checkpoint that the base is,
as one who saves so much more rarely would. Runs are kept in build/resume, and rows that are there
are not run again; ``--report`` writes scripts/results/resume.md from what is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import resume_methods
import torch
from resume_methods import Row, Saved, by_ckz
from resume_tasks import TASKS, Task

from ckz import pipeline
from ckz.lossy import methods_of
from ckz.partial import parse_policy

KEPT = Path("build/resume")
CYCLES, CYCLE = 10, 4
PARTIAL = ("experts:1", "experts:2", "experts:1:O", "soft:0.5", "priority:0.125")
LINK = 10
AGAIN = "resume, ten times in a row"

ROWS = [
    Row("resume", by_ckz(preset="resume")),
    Row("resume, with a base", by_ckz(preset="resume"), base=1),
    Row("resume, finer", by_ckz(preset="resume", optimizer="moments:0.001")),
    Row("compact", by_ckz(preset="compact"), base=1),
    Row(
        "compact, finer",
        by_ckz(preset="compact", weights="deadzone:0.03", optimizer="moments:0.1"),
        base=1,
    ),
    Row("states: moments:0.1", by_ckz(optimizer="moments:0.1")),
    Row("states: moments:0.2", by_ckz(optimizer="moments:0.2")),
    Row("states: moments:0.4", by_ckz(optimizer="moments:0.4")),
    Row("states: cluster:16 (BitSnap)", by_ckz(optimizer="cluster:16"), published=True),
    Row(
        "BitSnap: bitmask, cluster:16",
        by_ckz(codec="bitmask", optimizer="cluster:16"),
        base=1,
        published=True,
    ),
    Row("states: 8-bit block-wise", resume_methods.block_wise, published=True),
    Row("states: dropped", resume_methods.zeroed),
    Row("weights: lc:3 (LC-Checkpoint)", by_ckz(weights="lc:3"), base=1, published=True),
    Row("weights: deadzone:0.08", by_ckz(weights="deadzone:0.08"), base=1),
    Row("weights: deadzone:0.15", by_ckz(weights="deadzone:0.15"), base=1),
    Row(
        "lc:3 and cluster:16",
        by_ckz(weights="lc:3", optimizer="cluster:16"),
        base=1,
        published=True,
    ),
    Row("lc:3 and moments:0.2", by_ckz(weights="lc:3", optimizer="moments:0.2"), base=1),
    Row("ExCP", resume_methods.excp, base=1, published=True),
]
# The rows that are run for longer, of the first seeds; all that are run with another beta2; all
# that are run of later seeds; and all that are run of tasks other than the first.
PRESETS = ("resume", "compact")
LONG_SEEDS, FULL_SEEDS = 3, 2
SHORT = ("resume", "compact", "states: moments:0.1", "states: cluster:16 (BitSnap)", "ExCP")
OWN = ("resume", "resume, with a base", "resume, finer", "compact", "compact, finer")
FEWER = (
    *OWN,
    "states: cluster:16 (BitSnap)",
    *("states: 8-bit block-wise", "lc:3 and cluster:16", "ExCP"),
)


def run(task: Task, state: dict[str, Any], seed: int, steps: int) -> list[list[list[float]]]:
    """Resume for so many steps; give sums and counts of the losses by step and class."""
    return [task.step(state, seed, task.saved + k).tolist() for k in range(steps)]


def train(task: Task, seed: int, beta2: float, scratch: Path) -> dict[int, Path]:
    """Train and save: the base, the checkpoint, and some between them."""
    state = task.begin(seed, beta2)
    saved = {}
    for number in range(task.saved + 1):
        if number >= task.base and (number - task.base) % LINK == 0:
            saved[number] = scratch / f"step_{number}.pt"
            torch.save(state, saved[number])
        if number < task.saved:
            task.step(state, seed, number)
    return saved


def evaluate(
    task: Task, seed: int, beta2: float, scratch: Path, found: dict[str, Any]
) -> dict[str, Any]:
    """Train one seed and resume it in every way that is not found already."""
    saved = train(task, seed, beta2, scratch)
    last, base = saved[task.saved], saved[task.base]
    raw = last.stat().st_size
    state = torch.load(last)
    parameters = sum(w.numel() for w in state["model"].values())
    packed_base = scratch / "base.ckz"
    pipeline.compress(base, packed_base, force=True)
    full = beta2 == 0.95
    longer = task.longer if full and seed < LONG_SEEDS else task.resumed
    if not found:
        found = {"raw": raw, "parameters": parameters, "rows": {}}
        found["reference"] = run(task, torch.load(last), seed, longer)
    rows = found["rows"]
    for back in sorted({task.saved - task.base, LINK}, reverse=True):
        if f"stale by {back} steps" in rows:
            continue
        steps = longer if back == task.saved - task.base else task.resumed
        stale = torch.load(saved[task.saved - back])
        rows[f"stale by {back} steps"] = {
            "losses": run(task, stale, seed, steps),
            "nbytes": 0,
            "published": False,
        }
    wanted = wanted_rows(task, seed, beta2)
    for row in ROWS:
        if row.name not in wanted or row.name in rows:
            continue
        done = row.save(last, packed_base if row.base else None, scratch)
        steps = longer if row.name in PRESETS else task.resumed
        rows[row.name] = {
            "losses": run(task, done.state, seed, steps),
            "nbytes": done.nbytes,
            "published": row.published,
        }
        print(f"{task.name}, seed {seed}: {row.name}: {done.nbytes / raw:.4f} of raw", flush=True)
    if full:
        chains: dict[str, dict[str, Any]] = {
            name: {"methods": methods_of(preset)} for preset, name in chain_names(task).items()
        }
        if "experts" in task.name and seed < FULL_SEEDS:
            chains |= {
                f"partial {text}, end of a chain": {"policy": parse_policy(text)}
                for text in PARTIAL
            }
        for name, options in chains.items():
            if name in rows:
                continue
            done = chained(task, saved, packed_base, scratch, **options)
            losses = run(task, done.state, seed, task.resumed)
            rows[name] = {"losses": losses, "nbytes": done.nbytes, "published": False}
        if AGAIN not in rows:
            losses = again(task, last, seed, scratch)
            rows[AGAIN] = {"losses": losses, "nbytes": 0, "published": False}
    return found


def wanted_rows(task: Task, seed: int, beta2: float) -> tuple[str, ...]:
    """Give the names of the rows of single restores that are run."""
    if beta2 != 0.95:
        return SHORT
    if task.fewer:
        return FEWER
    return OWN if seed >= FULL_SEEDS else tuple(row.name for row in ROWS)


def chain_names(task: Task) -> dict[str, str]:
    """Give the name of each preset's row of a chain."""
    links = (task.saved - task.base) // LINK
    return {preset: f"{preset}, end of a chain of {links}" for preset in PRESETS}


def is_whole(task: Task, seed: int, beta2: float, found: dict[str, Any]) -> bool:
    """Tell whether no row is missing."""
    chains = (*chain_names(task).values(), AGAIN) if beta2 == 0.95 else ()
    return {*wanted_rows(task, seed, beta2), *chains} <= {*found.get("rows", ())}


def chained(task: Task, saved: dict[int, Path], base: Path, scratch: Path, **options: Any) -> Saved:
    """Save every tenth step against the one before, and give the last."""
    before, nbytes = base, 0
    for number, source in saved.items():
        if number == task.base:
            continue
        link = scratch / f"link_{number}.ckz"
        report = pipeline.compress(source, link, base=before, anchor=1000, force=True, **options)
        before, nbytes = link, report.stored_nbytes
    restored = scratch / "restored.pt"
    pipeline.decompress(before, restored, force=True)
    return Saved(torch.load(restored), nbytes)


def again(task: Task, last: Path, seed: int, scratch: Path) -> list[list[list[float]]]:
    """Compress and restore after every few steps."""
    save = by_ckz(preset="resume")
    state, losses = torch.load(last), []
    for cycle in range(CYCLES):
        source = scratch / "again.pt"
        torch.save(state, source)
        state = save(source, None, scratch).state
        for k in range(CYCLE if cycle * CYCLE < task.resumed else 0):
            losses.append(task.step(state, seed, task.saved + cycle * CYCLE + k).tolist())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS], action="append")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="only write the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    KEPT.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        for seed in range(arguments.seeds):
            for name in arguments.task or TASKS:
                kept = KEPT / f"{name}_{arguments.beta2:g}_{seed}.json"
                found = json.loads(kept.read_text()) if kept.exists() else {}
                if is_whole(TASKS[name], seed, arguments.beta2, found):
                    continue
                with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
                    found = evaluate(TASKS[name], seed, arguments.beta2, Path(scratch), found)
                kept.write_text(json.dumps(found))
    import resume_report

    resume_report.write(KEPT)


if __name__ == "__main__":
    main()
