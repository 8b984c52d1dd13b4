"""Directories of small checkpoints, as trainers leave them behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

# Of the first checkpoint; the others follow an hour apart.
START = 1_700_000_000
HOUR = 3600


def age(path: Path, time: float) -> Path:
    """Set the times of a file, or of all in a directory."""
    for each in (path, *path.rglob("*")):
        os.utime(each, (time, time), follow_symlinks=False)
    return path


def weights(step: int) -> dict[str, np.ndarray]:
    rng, drift = np.random.default_rng(0), np.random.default_rng(step)
    return {"w": (rng.normal(0, 1, (64, 64)) + 1e-3 * drift.normal(0, 1, (64, 64))).astype("f4")}


def save(root: Path, name: str, step: int, time: float | None = None) -> Path:
    """Save one file of weights."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights(step), path)
    return age(path, START + step * HOUR if time is None else time)


def save_trainer(
    root: Path,
    step: int,
    time: float | None = None,
    log: dict[int, float] | None = None,
    best: str = "",
) -> Path:
    """Save what a Hugging Face trainer does."""
    path = root / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights(step), path / "model.safetensors")
    states = {
        0: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.from_numpy(weights(step)["w"]) * 1e-3,
            "exp_avg_sq": torch.from_numpy(weights(step)["w"]) ** 2,
        }
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "params": [0]}
    torch.save({"state": states, "param_groups": [group]}, path / "optimizer.pt")
    history = [{"step": s, "eval_loss": loss, "epoch": 1.0} for s, loss in (log or {}).items()]
    state: dict[str, Any] = {"global_step": step, "log_history": history}
    state["best_model_checkpoint"] = best or None
    (path / "trainer_state.json").write_text(json.dumps(state))
    return age(path, START + step * HOUR if time is None else time)


def contents(root: Path) -> dict[str, bytes]:
    """Give every file below a directory."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file() and not p.is_symlink()
    }


def names(root: Path) -> list[str]:
    """Name what is in a directory, hidden things too."""
    return sorted(p.name for p in root.iterdir())


class Crash(BaseException):
    """The machine stops here."""


def crash_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Stop at the n-th step that changes a directory; tell whether it came to that."""
    count = [0]

    def breaking(act: Callable[..., Any]) -> Callable[..., Any]:
        def either(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                raise Crash
            if count[0] > number:  # nothing happens any more, whatever would still be tidied up
                raise Crash
            return act(*arguments, **options)

        return either

    for name in ("rename", "replace", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, breaking(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", breaking(shutil.rmtree))
    return lambda: count[0] >= number
