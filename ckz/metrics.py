"""How good a checkpoint is, as trainers write it: in names, in logs, or in a file of one's own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckz.errors import UsageError

STATE = "trainer_state.json"
# "epoch=1-val/loss=0.30.ckpt" has an epoch and a loss.
_NAMED = re.compile(r"(?:^|-)([A-Za-z_][\w/. ]*)=(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
_COUNTERS = ("epoch", "step", "global_step")
# A log of a long run has some megabytes.
_LARGEST = 1 << 28


def metrics_in_name(name: str) -> dict[str, float]:
    """Read ``metric=value`` as Lightning writes it into names."""
    return {key: float(value) for key, value in _NAMED.findall(name) if key not in _COUNTERS}


def read_json(path: Path) -> Any:
    """Read a file as JSON; None where there is none or it is something else."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def metrics_in_state(state: Any) -> dict[int, dict[str, float]]:
    """Read the log of a Hugging Face trainer: step -> metrics."""
    found: dict[int, dict[str, float]] = {}
    log = state.get("log_history") if isinstance(state, dict) else None
    for line in log if isinstance(log, list) else ():
        if isinstance(line, dict) and isinstance(step := line.get("step"), int):
            found.setdefault(step, {}).update(_numbers(line))
    return found


def best_in_state(state: Any) -> str:
    """Give the name of the checkpoint that a trainer holds for the best, or nothing."""
    best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    # The directory may have moved since.
    return re.split(r"[/\\]", best.rstrip("/\\"))[-1] if isinstance(best, str) else ""


def read_metrics(path: Path) -> dict[str, dict[str, float]]:
    """Read a user's metrics: a JSON object of checkpoint name or step -> metric -> value.

    Raises
    ------
    UsageError
        If it is none.
    """
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
        raise UsageError(f"{path}: write a JSON object: checkpoint or step -> metric -> value")
    return {str(name): _numbers(values) for name, values in found.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    pairs: Iterable[tuple[str, Any]] = values.items()
    return {
        key: float(value)
        for key, value in pairs
        if key not in _COUNTERS[1:]
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
