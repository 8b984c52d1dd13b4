"""Soft partial snapshots: the weights of all experts are coded coarsely, and none is dropped.

All of their changes get one step, which is what a budget of bits is best spent on if the error of
every element counts alike (reverse water-filling): experts that moved little cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ckz.codecs.deadzone import Deadzone
from ckz.codecs.floats import WIDTHS
from ckz.lossy import Method
from ckz.lossy.reading import Fit
from ckz.lossy.sampling import Doubles, entropy, places, rounded, total
from ckz.lossy.snapping import quantizer
from ckz.lossy.steps import OFFSET, step_model
from ckz.lossy.units import Units

# Steps that are tried: powers of two of so many parts, around the root mean square.
_FINENESS = 16
_SMALLEST, _LARGEST = -12 * _FINENESS, 8 * _FINENESS


def soften(fit: Fit, units: Units, bits: float) -> set[int]:
    """Let the weights of experts be coded in so many bits each.

    Returns
    -------
    The spans that this was done to.
    """
    spans = {
        part.span
        for parts in units.values()
        for part in parts
        if part.kind == "W" and part.span in fit.eligible and part.span not in fit.casts
        if fit.base_of(fit.eligible[part.span])
    }
    step = _find_step(_sample(fit, spans), bits) if spans else 0.0
    if not step:
        return set()
    for span in sorted(spans):
        item = fit.eligible[span]
        model = step_model(item.rows * item.columns, np.array([step]))
        codec = Deadzone(item.dtype, OFFSET)
        fit.files.snaps[span] = quantizer(fit, item, Method("soft", bits), codec, model)
    return spans


def _sample(fit: Fit, spans: Collection[int]) -> Doubles:
    """Sample the size of changes all over, as often as there are elements."""
    sizes = []
    share = max(1, sum(fit.eligible[span].nbytes for span in spans) >> 22)
    for span in sorted(spans):
        item = fit.eligible[span]
        n = item.nbytes // WIDTHS[item.dtype]
        for first, last in places(n, max(1, n // 1024 // share)):
            far = fit.differences(item, fit.base_of(item), first, last).astype(np.float64)
            sizes.append(np.abs(far[np.isfinite(far)]))
    return np.concatenate(sizes)


def _find_step(sizes: Doubles, bits: float) -> float:
    """Find the smallest step whose indices take no more bits."""
    power = total(sizes * sizes)
    if not power:
        return 0.0
    scale = (power / sizes.size) ** 0.5
    low, high, best = _SMALLEST, _LARGEST, 0.0
    while low <= high:
        middle = (low + high) // 2
        step = float(rounded(np.array([scale * 2.0 ** (middle / _FINENESS)]))[0])
        if step and entropy(np.floor(sizes / step + OFFSET / 100)) <= bits:
            best, high = step, middle - 1
        else:
            low = middle + 1
    return best
