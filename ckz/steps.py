"""Which step a checkpoint is of, by its own name or by what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping

# "7", "run 7" or "save-0007", but not a word that has a number in it.
_ALONE = re.compile(r"(?:\D*[^\w]|\D*_)?(\d{1,18})")
_STEP = re.compile(
    r"(?<![a-z])(?:global[_-]?step|step|iter(?:ation)?|it|checkpoint|ckpt)[=_-]?(\d{1,18})", re.I
)
_KEYS = ("step", "global_step", "iteration", "iter", "current_step")


def step_of_name(name: str) -> int | None:
    """Read the number that a name gives as its step: ``step_200.pt``, ``epoch=1-step=20.ckpt``."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None


def step_of(name: str, numbers: Mapping[str, float]) -> int | None:
    """Give the step by name, by a number of the checkpoint's, or by the only number in the name."""
    if (step := step_of_name(name)) is not None:
        return step
    for key in _KEYS:
        value = numbers.get(key, numbers.get(f".{key}"))
        if value is not None and 0 <= value < 1 << 53 and value == int(value):
            return int(value)
    alone = _ALONE.fullmatch(name.partition(".")[0])
    return int(alone[1]) if alone else None
