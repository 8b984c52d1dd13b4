"""Lossy compression: a tensor is replaced by one near it that takes fewer bits.

What is done to a tensor depends on its role, and is a *method*: a name and a number. ``fit`` works
out the numbers that a method needs of each tensor (steps, clusters), measures the error, and gives
the checkpoint as it will be restored; from there on compression is lossless. So a base of a lossy
snapshot is always a .ckz, whose restored values are the state that errors are measured against: in
a chain they do not add up.

Whatever the method: integers, scalars, vectors, routers, random states and all that has no known
role stay exact, as do infinities, NaNs and zeros; a second moment that is positive stays positive;
bounds are checked on the values as they will be restored, and what misses one stays exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckz.codecs.cluster import MAX_CLUSTERS
from ckz.codecs.lc import MAX_BITS
from ckz.errors import UsageError

PRESETS = ("exact", "resume", "compact", "archive")


class Method(NamedTuple):
    """What is done to the tensors of a role; ``exact`` is nothing."""

    name: str
    value: float = 0.0

    def __str__(self) -> str:
        """Give the words that ``parse`` reads."""
        return f"{self.name}:{self.value:g}" if self.value else self.name


EXACT = Method("exact")


class Budget(NamedTuple):
    """What a whole checkpoint may cost; zero is no limit.

    Attributes
    ----------
    ratio : how many times smaller it is to become, at the least error that allows.
    error : largest mean error, at the fewest bytes; see ``budgeting``.
    """

    ratio: float = 0.0
    error: float = 0.0


UNLIMITED = Budget()


@dataclass(frozen=True)
class Methods:
    """The methods of all roles; ``preset`` names where they came from.

    Attributes
    ----------
    fallback : for weights and masters that have nothing to lean on, where their method needs that.
    budget : decides the methods of all roles instead.
    """

    weight: Method = EXACT
    master: Method = EXACT
    momentum: Method = EXACT
    variance: Method = EXACT
    fallback: Method = EXACT
    budget: Budget = UNLIMITED
    preset: str = "exact"

    @property
    def is_lossy(self) -> bool:
        """Whether anything is."""
        roles = {self.weight, self.master, self.momentum, self.variance}
        return roles != {EXACT} or any(self.budget)

    @property
    def is_resumable(self) -> bool:
        """Whether training can go on from what is restored."""
        return self.momentum.name != "drop"

    def of(self, role: str) -> Method:
        """Give the method of a role."""
        found: Method = getattr(self, role, EXACT)
        return found


EXACTLY = Methods()

_PRESETS = {
    "exact": EXACTLY,
    "resume": Methods(
        master=Method("bits", 24),
        momentum=Method("moments", 0.004),
        variance=Method("moments", 0.004),
    ),
    "compact": Methods(
        weight=Method("deadzone", 0.08),
        master=Method("deadzone", 0.08),
        momentum=Method("moments", 0.2),
        variance=Method("moments", 0.2),
        fallback=Method("bits", 24),
    ),
    "archive": Methods(master=Method("weight"), momentum=Method("drop"), variance=Method("drop")),
}

# Name -> smallest and largest number; None: takes none.
_WEIGHTS: dict[str, tuple[float, float] | None] = {
    "exact": None,
    "fp16": None,
    "bf16": None,
    "int8": None,
    "lc": (2, MAX_BITS),
    "deadzone": (0, 1),
    "abs": (0, math.inf),
    "rel": (0, 1),
    "pwrel": (0, 1),
}
_OPTIMIZER: dict[str, tuple[float, float] | None] = {
    "exact": None,
    "moments": (0, 1),
    "cluster": (2, MAX_CLUSTERS),
    "pwrel": (0, 1),
}
_BOUNDS: dict[str, tuple[float, float] | None] = {
    "abs": (0, math.inf),
    "rel": (0, 1),
    "pwrel": (0, 1),
    "update": (0, 1),
    "mean": (0, 1),
}
_WHOLE = ("lc", "cluster")


def methods_of(
    preset: str = "exact",
    weights: str = "",
    optimizer: str = "",
    max_error: str = "",
    target_ratio: float = 0.0,
) -> Methods:
    """Give the methods that the options of a command ask for.

    Parameters
    ----------
    preset : one of ``PRESETS``.
    weights, optimizer : a method, e.g. ``lc:3``, instead of the preset's.
    max_error : a bound for all that has none otherwise: ``abs``, ``rel`` (of a tensor's range) or
        ``pwrel`` (of each element) and a number; or ``update`` and the largest normalized mean
        squared error of the optimizer's next step; or ``mean`` and the same on average over all
        parameters and their next steps.
    target_ratio : how many times smaller the whole is to become; zero leaves that open.

    Raises
    ------
    UsageError
        If there is no such preset, method or bound.
    """
    if preset not in PRESETS:
        raise UsageError(f"preset {preset!r} does not exist; there are {', '.join(PRESETS)}")
    methods = _PRESETS[preset]
    mean = max_error.startswith("mean:")
    if target_ratio or mean:  # not a number is no ratio either
        if preset != "exact" or weights or optimizer or (target_ratio and max_error):
            raise UsageError(
                f"{'--target-ratio' if target_ratio else '--max-error mean'} chooses all methods; "
                "leave out --preset, --weights, --optimizer and other bounds"
            )
        if target_ratio and not 1 < target_ratio < math.inf:
            raise UsageError(f"--target-ratio {target_ratio:g}: give a number above 1")
        error = 0.0 if target_ratio else parse(max_error, _BOUNDS, "--max-error").value
        return replace(methods, budget=Budget(target_ratio, error))
    if max_error:
        methods = _bounded(methods, parse(max_error, _BOUNDS, "--max-error"))
    if weights:
        method = parse(weights, _WEIGHTS, "--weights")
        methods = replace(methods, weight=method, master=method, fallback=EXACT)
    if optimizer:
        method = parse(optimizer, _OPTIMIZER, "--optimizer")
        methods = replace(methods, momentum=method, variance=method)
    return replace(methods, preset=preset)


def _bounded(methods: Methods, bound: Method) -> Methods:
    if bound.name == "update":
        method = Method("moments", bound.value) if bound.value else EXACT
        return replace(methods, momentum=method, variance=method)
    # A second moment may be off by a factor, never by an amount: small ones would vanish.
    variance = bound if bound.name == "pwrel" else EXACT
    return replace(
        methods, weight=bound, master=bound, momentum=bound, variance=variance, fallback=EXACT
    )


def parse(text: str, known: dict[str, tuple[float, float] | None], option: str) -> Method:
    """Read a method.

    Raises
    ------
    UsageError
        If it does not exist, or its number is out of its range.
    """
    name, colon, number = text.partition(":")
    if name not in known:
        raise UsageError(f"{option} {text}: there are {', '.join(known)}")
    limits = known[name]
    if limits is None:
        if colon:
            raise UsageError(f"{option} {text}: {name} takes no number")
        return Method(name)
    try:
        value = float(number) if colon else 16.0 if name == "cluster" else math.nan
    except ValueError:
        value = math.nan
    whole = name not in _WHOLE or value.is_integer()
    if not (limits[0] <= value <= limits[1] and math.isfinite(value) and whole):
        what = "a whole number" if name in _WHOLE else "a number"
        raise UsageError(
            f"{option} {text}: {name} takes {what} from {limits[0]:g} to {limits[1]:g}"
        )
    # No error allowed is lossless.
    return Method(name, value) if value else EXACT
