"""How soon training is back where it was after a crash: LC-Checkpoint against SCAR, at equal bytes.

    python scripts/recovery.py

LeNet- and ResNet-like networks learn scikit-learn's digits with SGD and momentum. Three ways of
saving write about the same number of bytes per step: all weights rarely; an eighth of them, those
that moved most, eight times as often (SCAR: Qiao et al., ICML 2019); or ``lc:3`` of all, as much
more often as it is smaller, every link against the restored one before. At a random step all is
lost but what was saved. Counted are the steps until the loss on all digits is again what it was.
(LC-Checkpoint, ICML 2020, reports recovery up to 5.77 times as fast as SCAR's.)
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
import torch
from report import Bar
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from ckz import pipeline
from ckz.container_read import open_container
from ckz.lossy import methods_of

RATE, MOMENTUM, BATCH = 0.02, 0.9, 32
WARMUP, INTERVAL, PART = 40, 64, 8
CRASHES, PATIENCE = 12, 400

Weights = dict[str, torch.Tensor]


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + self.down(x))


def lenet() -> nn.Module:
    """Two convolutions and three dense layers, for 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 240),
        nn.ReLU(),
        nn.Linear(240, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


def resnet() -> nn.Module:
    """Three residual blocks."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Run(NamedTuple):
    """A training run: its network, data and optimizer."""

    model: nn.Module
    optimizer: torch.optim.SGD
    images: torch.Tensor
    labels: torch.Tensor
    generator: torch.Generator


def start(make: Callable[[], nn.Module], seed: int) -> Run:
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    generator = torch.Generator().manual_seed(seed)
    return Run(model, optimizer, images, torch.tensor(digits.target), generator)


def step(run: Run) -> None:
    chosen = torch.randint(1500, (BATCH,), generator=run.generator)
    loss = functional.cross_entropy(run.model(run.images[chosen]), run.labels[chosen])
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()


@torch.no_grad()
def test(run: Run) -> tuple[float, float]:
    """Give the loss on what is learned, and the accuracy on what is not."""
    run.model.eval()
    loss = functional.cross_entropy(run.model(run.images[:1500]), run.labels[:1500]).item()
    right = run.model(run.images[1500:]).argmax(1) == run.labels[1500:]
    run.model.train()
    return loss, right.double().mean().item()


def weights_of(run: Run) -> Weights:
    return {name: x.detach().clone() for name, x in run.model.state_dict().items()}


def restore(run: Run, weights: Weights) -> None:
    """Go on from these weights; momentum begins anew."""
    run.model.load_state_dict(weights)
    run.optimizer.state.clear()


class Saver:
    """``lc:3`` of all weights, against the restored ones before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.base: Path | None = None
        self.coded = self.raw = self.nbytes = 0

    def __call__(self, weights: Weights) -> Weights:
        source = self.folder / f"save_{self.number}"
        save_file(weights, source)
        packed = source.with_suffix(".ckz")
        lossy: dict[str, Any] = {"methods": methods_of(weights="lc:3")} if self.base else {}
        found = pipeline.compress(source, packed, base=self.base, anchor=10**6, force=True, **lossy)
        if self.base:
            large = [x for x in weights.values() if x.ndim > 1 and x.nbytes >= 4096]
            self.raw += sum(x.nbytes for x in large)
            self.coded += _coded(packed)
            self.nbytes += found.stored_nbytes
        out = self.folder / "restored"
        pipeline.decompress(packed, out, base=self.base, force=True)
        # The restored weights, in full, are the next base: chains do not grow.
        pipeline.compress(out, self.folder / f"base_{self.number % 2}.ckz", force=True)
        self.base = self.folder / f"base_{self.number % 2}.ckz"
        self.number += 1
        return load_file(out)


def _coded(packed: Path) -> int:
    """Give the bytes of the chunks that are buckets."""
    with open_container(packed) as container:
        names = [codec.name for codec in container.codecs]
        return sum(
            int(row["stored"]) for row in container.chunks if names[int(row["codec"])] == "lc"
        )


class Scar:
    """A running checkpoint of which the eighth that moved most is replaced."""

    def __init__(self) -> None:
        self.kept: Weights = {}

    def __call__(self, weights: Weights) -> Weights:
        if not self.kept:
            self.kept = {name: x.clone() for name, x in weights.items()}
            return self.kept
        floats = [name for name, x in weights.items() if x.is_floating_point()]
        # Blocks are rows, as SCAR's are groups of parameters.
        rows = [(name, row) for name in floats for row in range(_rows(weights[name]))]
        moved = torch.cat(
            [_by_row(weights[name] - self.kept[name]).square().sum(1) for name in floats]
        )
        sizes = torch.cat(
            [torch.full((_rows(weights[n]),), _by_row(weights[n]).shape[1]) for n in floats]
        )
        order = moved.argsort(descending=True)
        chosen = order[sizes[order].cumsum(0) <= sizes.sum() / PART]
        for index in chosen.tolist():
            name, row = rows[index]
            _by_row(self.kept[name])[row] = _by_row(weights[name])[row]
        return self.kept


def _rows(x: torch.Tensor) -> int:
    return x.shape[0] if x.ndim else 1


def _by_row(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(_rows(x), -1)


def recovery(run: Run, weights: Weights, goal: float) -> int:
    """Count the steps from these weights until the loss is what it was."""
    restore(run, weights)
    for number in range(PATIENCE):
        if test(run)[0] <= goal:
            return number
        step(run)
    return PATIENCE


def measure(make: Callable[[], nn.Module], seed: int, folder: Path) -> dict[str, Any]:
    """Train with all three ways of saving, crash now and then, and recover in each way."""
    run = start(make, seed)
    saver, scar = Saver(folder), Scar()
    often = None
    random = np.random.default_rng(seed)
    crashes = set((WARMUP + np.cumsum(random.integers(20, 60, CRASHES))).tolist())
    last: dict[str, Weights] = {}
    found: dict[str, Any] = {"full": [], "SCAR": [], "lc:3": []}
    for number in range(max(crashes) + 1):
        now = weights_of(run)
        if number >= WARMUP:
            since = number - WARMUP
            if since % INTERVAL == 0:
                last["full"] = now
            if since % (INTERVAL // PART) == 0:
                last["SCAR"] = {n: x.clone() for n, x in scar(now).items()}
            if since % (often or 1) == 0:
                last["lc:3"] = saver(now)
                if saver.nbytes and often is None:
                    raw = sum(x.nbytes for x in now.values())
                    often = max(1, round(INTERVAL * saver.nbytes / raw))
        if number in crashes:
            goal = test(run)[0]
            optimizer = {
                p: {k: v.clone() for k, v in s.items()} for p, s in run.optimizer.state.items()
            }
            place = run.generator.get_state()
            for name, weights in last.items():
                run.generator.set_state(place)
                found[name].append(recovery(run, weights, goal))
            run.model.load_state_dict(now)
            run.optimizer.state.update(optimizer)
            run.generator.set_state(place)
        step(run)
    found |= {"often": often, "ratio": saver.raw / saver.coded, "file": saver.nbytes}
    exact = test(run)[1]
    restore(run, saver(weights_of(run)))
    found |= {"exact": exact, "restored": test(run)[1]}
    return found


def main() -> None:
    torch.set_num_threads(1)
    rows, bars = [], []
    for name, make in {"LeNet-like": lenet, "ResNet-like": resnet}.items():
        runs = []
        for seed in range(3):
            with tempfile.TemporaryDirectory() as scratch:
                runs.append(measure(make, seed, Path(scratch)))
        parameters = sum(p.numel() for p in make().parameters())
        steps = {key: [n for run in runs for n in run[key]] for key in ("full", "SCAR", "lc:3")}
        mean = {key: statistics.mean(values) for key, values in steps.items()}
        ratio = statistics.mean(run["ratio"] for run in runs)
        exact, restored = (statistics.mean(run[k] for run in runs) for k in ("exact", "restored"))
        for key, values in steps.items():
            every = {"full": INTERVAL, "SCAR": INTERVAL // PART, "lc:3": runs[0]["often"]}[key]
            rows.append(
                [name, f"{parameters:,}", key, f"{every}", f"{mean[key]:.1f}", f"{max(values)}"]
            )
        faster = mean["SCAR"] / max(mean["lc:3"], 0.01)
        bars += [
            Bar(
                f"{name}: lc:3 of SGD's changes", ">= 20x of float32", f"{ratio:.1f}x", ratio >= 20
            ),
            Bar(
                f"{name}: accuracy of what is restored",
                "kept",
                f"{100 * exact:.2f} %, restored {100 * restored:.2f} %",
                restored >= exact - 0.005,
            ),
            Bar(
                f"{name}: steps to recover, SCAR over lc:3",
                "> 1x (published: up to 5.77x)",
                f"{faster:.2f}x",
                faster > 1,
            ),
        ]
        print(rows[-3:], bars[-3:], flush=True)
    lines = (__doc__ or "").strip().split("\n\n")
    head = ["network", "parameters", "saved as", "every", "steps to recover, mean", "worst"]
    text = "# Recovery after a crash\n\n"
    text += f"`python scripts/recovery.py` on {report.machine()}.\n\n{lines[-1]}\n\n"
    text += report.bars_table(bars) + "\n" + report.markdown(head, rows, left=3)
    print("written to", report.write("recovery", text, [head, *rows], quick=False))


if __name__ == "__main__":
    main()
