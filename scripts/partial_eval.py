"""What partial snapshots save, and what it costs to restore from them.

    build/formats/bin/python scripts/partial_eval.py

Small models of transformers' Mixtral and Qwen3-MoE kind are really trained, saved every few steps,
and compressed with each policy against the snapshot before. Bytes are compared with those that
PEC's formula gives (Cai et al., arXiv 2408.04307, section 3: what is no expert, and K of N of the
experts), norms with those of saving blocks in turn or everything more rarely (SCAR, Qiao et al.,
ICML 2019, section 4). After a fault training goes on from what is restored, on the batches that the
uninterrupted run sees, and the losses are compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
import torch
from partial_models import KINDS, Kind, Run, load, save, start, step
from report import Bar

from ckz import pipeline
from ckz.formats import read_checkpoint
from ckz.lossy.units import block_units, expert_units
from ckz.partial import balanced, parse_policy

# Steps: of training before anything is saved, between snapshots, and resumed after a fault.
WARMUP, EVERY, LINKS, RESUMED = 40, 4, 8, 24
LIMIT = 0.0375
RANKS = 8
# Of all parameters those of experts, in PEC's models of 8 and of 16 experts.
SHARES = {8: 0.697, 16: 0.86}
PUBLISHED = {8: 54.2, 16: 57.7}
PARTIAL = "experts:1"


class Chain(NamedTuple):
    """Snapshots of one run, each against the one before.

    Attributes
    ----------
    restored : path of each.
    reports : what compress said.
    """

    restored: list[Path]
    reports: list[pipeline.Report]

    @property
    def stored(self) -> float:
        """Mean bytes of a link."""
        return statistics.mean(r.stored_nbytes for r in self.reports)


def chain(folder: Path, saved: list[Path], policy: str = "", **options: Any) -> Chain:
    """Compress saved checkpoints one after the other, and restore each."""
    base = folder / "base.ckz"
    pipeline.compress(saved[0], base, force=True)
    restored, reports = [], []
    for number, source in enumerate(saved[1:]):
        packed, out = folder / f"link_{number}.ckz", folder / f"restored_{number}.pt"
        reports.append(
            pipeline.compress(
                source,
                packed,
                base=base,
                policy=parse_policy(policy) if policy else None,
                anchor=1000,
                force=True,
                **options,
            )
        )
        pipeline.decompress(packed, out, force=True)
        restored.append(out)
        base = packed
    return Chain(restored, reports)


def train(kind: Kind, seed: int, folder: Path) -> tuple[Run, list[Path], list[float]]:
    """Train, save every few steps, and go on without an interruption; give its losses then."""
    run = start(kind, seed)
    saved = []
    last = WARMUP + EVERY * LINKS
    for number in range(last + 1):
        if number >= WARMUP and (number - WARMUP) % EVERY == 0:
            saved.append(save(run, folder / f"step_{number}.pt"))
        if number < last:
            step(run, number)
    return run, saved, resume(run, saved[-1])


def resume(run: Run, path: Path) -> list[float]:
    """Go on from a checkpoint after the last step that was saved."""
    load(run, path)
    return [step(run, WARMUP + EVERY * LINKS + k) for k in range(RESUMED)]


# -- PEC's formula ---------------------------------------------------------------------------------


def formula(path: Path, kind: Kind, k: int) -> tuple[float, int]:
    """Give the bytes that PEC's formula says are saved, and all bytes of tensors."""
    checkpoint = read_checkpoint(path)
    experts = sum(p.nbytes for parts in expert_units(checkpoint).values() for p in parts)
    everything = sum(t.nbytes for t in checkpoint.tensors)
    return everything - experts + k / kind.experts * experts, everything


def pec_rows(kind: Kind, saved: list[Path], folder: Path) -> Iterator[tuple[list[str], Bar]]:
    for k in (1, 2):
        expected, everything = formula(saved[-1], kind, k)
        done = chain(folder, saved, f"experts:{k}")
        fresh = [everything - r.partial["carried"] for r in done.reports]
        off = max(abs(n / expected - 1) for n in fresh)
        row = [
            kind.name,
            f"experts:{k}",
            f"{everything / 1e6:.1f} MB",
            f"{expected / 1e6:.2f} MB",
            f"{statistics.mean(fresh) / 1e6:.2f} MB",
            f"{100 * (1 - statistics.mean(fresh) / everything):.1f} %",
            f"{100 * (1 - done.stored / everything):.1f} %",
        ]
        yield (
            row,
            Bar(
                f"{kind.name}: bytes saved anew with experts:{k}",
                "within 1 % of PEC's formula",
                f"{100 * off:.2f} % off",
                off <= 0.01,
            ),
        )


def shares(folder: Path) -> Iterator[tuple[list[str], Bar]]:
    """Save one expert of models with the shares of PEC's."""
    for experts, share in SHARES.items():
        each, layers = 32 * 1024, 4
        rest = round(each * experts * layers * (1 - share) / share) // 64
        rng = np.random.default_rng(0)
        saved = []
        for number in range(2):
            weights = {"model.embed_tokens.weight": (rest, 64)}
            weights |= {
                f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": (each // 64, 64)
                for i in range(layers)
                for e in range(experts)
            }
            state = {
                n: torch.from_numpy(rng.normal(0, 1, s).astype("f4")) for n, s in weights.items()
            }
            moments = {
                key: {n: x.clone() for n, x in state.items()} for key in ("exp_avg", "exp_avg_sq")
            }
            saved.append(folder / f"shares_{number}.pt")
            torch.save({"model": state, "optimizer": {**moments, "step": number}}, saved[-1])
        done = chain(folder, saved, PARTIAL)
        everything = 3 * 4 * sum(math.prod(s) for s in weights.values())
        less = 100 * done.reports[0].partial["carried"] / everything
        bar = {8: 61.0, 16: 80.0}[experts]
        row = [f"{experts}", f"{100 * share:.1f} %", f"{PUBLISHED[experts]} %", f"{less:.1f} %"]
        yield (
            row,
            Bar(
                f"PEC's shares, {experts} experts: saved less",
                f">= {bar:g} % (PEC reports {PUBLISHED[experts]} %)",
                f"{less:.1f} %",
                round(less, 1) >= bar,
            ),
        )


def rank_rows() -> Iterator[tuple[list[str], Bar]]:
    """Work of the busiest of eight ranks: 2 bytes a weight, 12 of master and moments."""
    weight, states, layers = 2, 12, 24
    for experts, share in SHARES.items():
        expert = share / experts / layers
        others = [(1 - share) / (8 * layers)] * (8 * layers)
        # Usually: rank 0 writes all weights that are no expert's, each rank its experts and its
        # part of the optimizer's states.
        before = (1 - share) * weight + (1 - share) * states / RANKS
        before += (weight + states) * share / RANKS
        parts = [round(1e9 * n * (weight + states)) for n in (*others, *[expert] * layers)]
        loads = balanced(parts, RANKS)
        less = 100 * (1 - max(loads) / 1e9 / before)
        even = max(loads) * RANKS / sum(loads) - 1
        row = [f"{experts}", f"{before:.3f}", f"{max(loads) / 1e9:.3f}", f"{100 * even:.1f} %"]
        row.append(f"{less:.1f} %")
        bar = Bar(
            f"busiest of {RANKS} ranks, {experts} experts",
            ">= 77 % less (PEC reports 76.9 %)",
            f"{less:.1f} %",
            less >= 77,
        )
        yield row, bar if experts == 16 else bar._replace(bar="(PEC reports none)", met=None)


# -- SCAR's norms ----------------------------------------------------------------------------------


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path)["model"]
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((a[n] - b[n]).double().square().sum()) for n in a))


def in_turns(saved: list[Path]) -> list[dict[str, torch.Tensor]]:
    """Save an eighth of all blocks each time, one after the other."""
    checkpoint = read_checkpoint(saved[0])
    blocks = [key for key in block_units(checkpoint) if key[0].startswith("model.")]
    kept = weights_of(saved[0])
    found = []
    for number, path in enumerate(saved[1:]):
        now = weights_of(path)
        for name, block in blocks[number % 8 :: 8]:
            run = slice(block << 14, (block + 1) << 14)
            kept[name[6:]].view(-1)[run] = now[name[6:]].reshape(-1)[run]
        found.append({n: x.clone() for n, x in kept.items()})
    return found


def norm_rows(kind: Kind, saved: list[Path], folder: Path) -> tuple[list[list[str]], Bar]:
    """Lose all just before the next snapshot, after each one."""
    priority = [weights_of(path) for path in chain(folder, saved, "priority:0.125").restored]
    turns, full = in_turns(saved), weights_of(saved[0])
    norms: dict[str, list[float]] = {
        "priority:0.125": [],
        "an eighth in turn": [],
        "all, rarely": [],
    }
    for number in range(len(saved) - 2):
        lost = weights_of(saved[number + 2])
        norms["priority:0.125"].append(distance(priority[number], lost))
        norms["an eighth in turn"].append(distance(turns[number], lost))
        norms["all, rarely"].append(distance(full, lost))
    means = {name: statistics.mean(values) for name, values in norms.items()}
    rows = [[kind.name, name, f"{mean:.3f}"] for name, mean in means.items()]
    least = means["priority:0.125"]
    return rows, Bar(
        f"{kind.name}: norm of what a crash loses, priority:0.125",
        "less than in turn and than all, eight times rarer",
        f"{least:.3f}; {means['an eighth in turn']:.3f}; {means['all, rarely']:.3f}",
        least < min(means["an eighth in turn"], means["all, rarely"]),
    )


# -- losses after faults ---------------------------------------------------------------------------

FAULTS: dict[str, dict[str, Any]] = {
    "experts:1": {"policy": "experts:1"},
    "experts:1, limit 3.75 %": {"policy": "experts:1", "plt_limit": LIMIT},
    "experts:1:load": {"policy": "experts:1:load"},
    "experts:1:O": {"policy": "experts:1:O"},
    "soft:0.5": {"policy": "soft:0.5"},
    "soft:1": {"policy": "soft:1"},
}


def fault_rows(kind: Kind, seeds: int, folder: Path) -> tuple[list[list[str]], list[Bar]]:
    """Resume from the end of a chain, and from exact snapshots of other ages."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(seeds):
        run, saved, reference = train(kind, seed, folder)
        for back in (1, LINKS):
            losses = resume(run, saved[-1 - back])
            row = (_mean_difference(losses, reference), 0.0, math.nan)
            found.setdefault(f"stale by {back * EVERY} steps", []).append(row)
        for name, options in FAULTS.items():
            done = chain(folder, saved, **options)
            losses = resume(run, done.restored[-1])
            plt = done.reports[-1].partial.get("plt", math.nan)
            row = (_mean_difference(losses, reference), done.stored, plt)
            found.setdefault(name, []).append(row)
        print(kind.name, seed, {n: v[-1] for n, v in found.items()}, flush=True)
    rows = []
    means = {
        name: [statistics.mean(c) for c in zip(*each, strict=True)] for name, each in found.items()
    }
    for name, each in found.items():
        difference, stored, plt = means[name]
        error = (
            statistics.stdev(e[0] for e in each) / math.sqrt(len(each)) if seeds > 1 else math.nan
        )
        rows.append(
            [
                kind.name,
                name,
                f"{stored / 1e6:.2f} MB" if stored else "",
                "" if math.isnan(plt) else f"{100 * plt:.2f} %",
                f"{difference:+.4f}",
                f"{error:.4f}",
            ]
        )
    soft, hard = means["soft:1"], means["experts:1"]
    limited = means["experts:1, limit 3.75 %"]
    short = means[f"stale by {EVERY} steps"][0]
    return rows, [
        Bar(
            f"{kind.name}: soft against hard",
            "no more bytes, less loss",
            f"{soft[1] / 1e6:.2f} against {hard[1] / 1e6:.2f} MB, "
            f"{soft[0]:+.4f} against {hard[0]:+.4f}",
            soft[1] <= hard[1] and soft[0] < hard[0],
        ),
        Bar(
            f"{kind.name}: tokens lost with a limit, and what that costs",
            f"<= 3.75 %, less than {EVERY} steps",
            f"{100 * limited[2]:.2f} %, {limited[0]:+.4f} against {short:+.4f}",
            limited[2] <= LIMIT and limited[0] <= short,
        ),
    ]


def _mean_difference(losses: list[float], reference: list[float]) -> float:
    return statistics.mean(a - b for a, b in zip(losses, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bars: list[Bar] = []
    pec: list[list[str]] = []
    norms: list[list[str]] = []
    faults: list[list[str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in KINDS:
            _, saved, _ = train(kind, 0, folder)
            for row, bar in pec_rows(kind, saved, folder):
                pec.append(row)
                bars.append(bar)
            rows, bar = norm_rows(kind, saved, folder)
            norms += rows
            bars.append(bar)
            rows, more = fault_rows(kind, arguments.seeds, folder)
            faults += rows
            bars += more
        published = list(shares(folder))
    ranks = list(rank_rows())
    bars += [bar for _, bar in (*published, *ranks)]
    lines = (__doc__ or "").strip().split("\n\n")
    tables = {
        "What PEC's formula gives, and what is saved anew": (
            ["model", "policy", "all", "formula", "saved anew", "less", "less, compressed"],
            pec,
        ),
        "Models with the shares of PEC's": (
            ["experts", "share of experts", "PEC reports", "less"],
            [row for row, _ in published],
        ),
        f"The busiest of {RANKS} ranks, bytes for a parameter of the whole": (
            ["experts", "before", "experts:1, balanced", "above the mean", "less"],
            [row for row, _ in ranks],
        ),
        "Norm of what a crash loses, just before the next snapshot": (
            ["model", "saved", "norm"],
            norms,
        ),
        f"Loss over {RESUMED} resumed steps, above the uninterrupted run's": (
            ["model", "saved as", "bytes a link", "lost tokens", "loss difference", "SE"],
            faults,
        ),
    }
    text = "# Partial snapshots\n\n"
    text += f"`python scripts/partial_eval.py` on {report.machine()}.\n\n{lines[-1]}\n\n"
    text += report.bars_table(bars)
    for title, (head, rows) in tables.items():
        text += f"\n## {title}\n\n" + report.markdown(head, rows, left=2)
    print(
        "written to",
        report.write(
            "partial",
            text,
            [["work", "bar", "value"], *([b.work, b.bar, b.value] for b in bars)],
            quick=False,
        ),
    )


if __name__ == "__main__":
    main()
