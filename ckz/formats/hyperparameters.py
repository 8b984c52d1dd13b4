"""The numbers of an optimizer, as a pickle has them: learning rates, betas, steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckz.formats.pickles import Call
from ckz.formats.torch_names import below

_WANTED = frozenset(
    ("lr", "betas", "beta1", "beta2", "eps", "weight_decay", "step", "iteration", "global_step")
)
_MAX_DEPTH = 12
_MAX_STEPS = 200_000
_MAX_FOUND = 1000


def numbers_of(value: Any) -> list[tuple[str, float]]:
    """Give path and value of every hyperparameter in a pickle, e.g. ``param_groups.0.lr``.

    The search is bounded: in a huge or hostile pickle some may be missed.
    """
    found: list[tuple[str, float]] = []
    stack: list[tuple[str, Any, int]] = []
    if isinstance(value, Call | list | tuple):
        stack.append(("", value, 0))
    seen: set[int] = set()
    steps = 0
    while stack and len(found) < _MAX_FOUND:
        path, holder, depth = stack.pop()
        if id(holder) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(holder))
        for key, child in _children(holder):
            steps += 1
            if steps > _MAX_STEPS:
                return found
            text = key if isinstance(key, str) else str(key) if type(key) is int else ""
            if type(child) in (int, float):
                leaf = path.rpartition(".")[2]
                if (text in _WANTED or leaf == "betas") and abs(child) < 1 << 60:
                    found.append((f"{path}.{text}", float(child)))
            elif isinstance(child, Call | list | tuple) and len(path) < 1000:
                stack.append((f"{path}.{text}", child, depth + 1))
    return found


def _children(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, Call):
        yield from below(holder, holder.func, holder.args)
    else:
        yield from enumerate(holder)
