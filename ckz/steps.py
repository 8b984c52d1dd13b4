"""Which step a checkpoint is of, by its own name or by what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER = re.compile(r"\d{1,18}")
_STEP = re.compile(
    r"(?:global[_-]?step|step|iter(?:ation)?|it|checkpoint|ckpt)[=_-]?(\d{1,18})", re.I
)
_KEYS = ("step", "global_step", "iteration", "iter", "current_step")


def step_of_name(name: str) -> int | None:
    """Read ``step_200.pt``, ``checkpoint-500``, ``epoch=1-step=20.ckpt``: a number that is named.

    Else the only number there is.
    """
    if found := _STEP.findall(name):
        return int(found[-1])
    numbers = _NUMBER.findall(name.split(".")[0])
    return int(numbers[0]) if len(numbers) == 1 else None


def step_of(name: str, numbers: Mapping[str, float]) -> int | None:
    """Give the step by name, or by a number of the checkpoint's that is called so."""
    if (step := step_of_name(name)) is not None:
        return step
    for key in _KEYS:
        value = numbers.get(key, numbers.get(f".{key}"))
        if value is not None and 0 <= value < 1 << 53 and value == int(value):
            return int(value)
    return None
