"""Which parts of a checkpoint a partial snapshot saves anew; the others are carried from its base.

``experts:K`` is PEC of MoC-System (Cai et al., arXiv 2408.04307): of each mixture-of-experts layer
K of N experts are saved, in turn or those with the most unsaved tokens. ``priority:R`` is SCAR
(Qiao et al., ICML 2019, arXiv 1810.07354): the fraction R of all blocks, those that moved most.
``soft:BITS`` is ours: the weights of all experts are coded coarsely, their optimizer states saved
in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckz.errors import UsageError

if TYPE_CHECKING:
    from ckz.chain import Before
    from ckz.container import Carried

KINDS = ("W", "O", "WO")
_CHOICES = ("sequential", "load")


class Policy(NamedTuple):
    """What a partial snapshot saves.

    Attributes
    ----------
    value : experts of a layer, a fraction of the blocks, or bits a weight.
    choice : ``sequential`` or ``load``, of experts.
    kinds : what may be carried: weights, optimizer states, or both.
    """

    name: str
    value: float
    choice: str = "sequential"
    kinds: str = "WO"

    def __str__(self) -> str:
        """Give the words that ``parse_policy`` reads."""
        words = [self.name, f"{self.value:g}"]
        words += [self.choice] * (self.choice != "sequential")
        words += [self.kinds] * (self.kinds != "WO")
        return ":".join(words)


class Ask(NamedTuple):
    """What a partial snapshot is to be.

    Attributes
    ----------
    step : of this checkpoint, or None.
    tokens : that each expert, by the number of its layer and its own, has seen since the beginning
        of training; None: all the same.
    plt_limit : proportion of lost tokens beyond which more experts are saved.
    """

    policy: Policy
    before: Before
    step: int | None
    tokens: Sequence[Sequence[float]] | None = None
    plt_limit: float | None = None


@dataclass(frozen=True)
class Partial:
    """What a partial snapshot carries.

    Attributes
    ----------
    record : what the next one has to know, for the container's description.
    fresh_nbytes, carried_nbytes : of the parts that could be carried: saved anew, and carried.
    fresh_by_file : what of each file, so of each rank that wrote one, is saved anew.
    casts : spans of 16-bit weights that follow masters which were coded coarsely.
    """

    record: dict[str, Any] = field(default_factory=dict)
    carried: tuple[Carried, ...] = ()
    fresh_nbytes: int = 0
    carried_nbytes: int = 0
    fresh_by_file: dict[str, int] = field(default_factory=dict)
    casts: frozenset[int] = frozenset()


def parse_policy(text: str) -> Policy:
    """Read ``experts:K[:load]``, ``priority:R`` or ``soft:BITS``, each with ``:W``, ``:O`` or none.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    name, *words = text.split(":")
    try:
        value = float(words.pop(0)) if words else math.nan
    except ValueError:
        value = math.nan
    choice = words.pop(0) if words and words[0] in _CHOICES and name == "experts" else "sequential"
    kinds = words.pop(0) if words and words[0] in KINDS else "WO"
    limits = {"experts": (1, 1 << 20), "priority": (0, 1), "soft": (0, 8)}.get(name)
    if limits is None or words or not limits[0] <= value <= limits[1] or value == 0:
        raise UsageError(
            f"--partial {text}: write experts:K[:load], priority:FRACTION or soft:BITS, "
            f"and :{', :'.join(KINDS)} for what may be carried"
        )
    if name == "experts" and not value.is_integer():
        raise UsageError(f"--partial {text}: the number of experts is whole")
    return Policy(name, value, choice, kinds)


def in_turn(layers: Mapping[str, int], k: int, number: int) -> set[tuple[str, int]]:
    """Choose k experts of each layer, in turn and interleaved (PEC, section 3.2).

    Parameters
    ----------
    layers : layer -> number of its experts, in the model's order.
    number : of the snapshot.
    """
    return {
        (layer, (number * k + i * k + j) % n)
        for i, (layer, n) in enumerate(layers.items())
        for j in range(min(k, n))
    }


def by_load(
    layers: Mapping[str, int], k: int, unsaved: Mapping[tuple[str, int], float]
) -> set[tuple[str, int]]:
    """Choose the k experts of each layer that have the most unsaved tokens, or moved most."""
    chosen = set()
    for layer, n in layers.items():
        ordered = sorted(range(n), key=lambda e: (-unsaved.get((layer, e), 0.0), e))
        chosen |= {(layer, e) for e in ordered[:k]}
    return chosen


def by_priority(
    sizes: Mapping[tuple[str, int], int], moved: Mapping[tuple[str, int], float], fraction: float
) -> set[tuple[str, int]]:
    """Choose the blocks that moved most for their size: a fraction of all bytes, or one."""
    ordered = sorted(sizes, key=lambda block: (-moved[block] / max(1, sizes[block]), block))
    room = fraction * sum(sizes.values())
    chosen: set[tuple[str, int]] = set()
    taken = 0
    for block in ordered:
        if chosen and taken + sizes[block] > room:
            break
        chosen.add(block)
        taken += sizes[block]
    return chosen


def lost_tokens(
    routed: Mapping[tuple[str, int], float], saved: Mapping[tuple[str, int], float]
) -> float:
    """Give the proportion of lost tokens (PEC, section 3.1) if training resumed from a snapshot.

    Parameters
    ----------
    routed : tokens that each expert has seen; ``saved``: those that its saved version has.
    """
    totals: dict[str, float] = {}
    lost: dict[str, float] = {}
    for (layer, expert), seen in routed.items():
        totals[layer] = totals.get(layer, 0.0) + seen
        missing = max(0.0, seen - saved.get((layer, expert), 0.0))
        lost[layer] = lost.get(layer, 0.0) + missing
    shares = [lost[layer] / totals[layer] for layer in totals if totals[layer]]
    return sum(shares) / len(shares) if shares else 0.0


def next_k(k: int, plt: float, limit: float, most: int) -> int:
    """Double the experts to save once too many tokens would be lost (PEC's dynamic K)."""
    return min(most, 2 * k) if plt > limit else k


def balanced(sizes: Sequence[int], ranks: int) -> list[int]:
    """Spread parts over ranks, the largest first to the least loaded; give each rank's bytes."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads
