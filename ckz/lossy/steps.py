"""Uniform quantizers: the step of a tensor, or of each of its rows."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ckz.codecs.deadzone import Deadzone
from ckz.codecs.floats import WIDTHS, Bytes
from ckz.container import Ref
from ckz.lossy import Method
from ckz.lossy.eligible import Eligible
from ckz.lossy.reading import Fit
from ckz.lossy.restored import Snap
from ckz.lossy.sampling import (
    Doubles,
    blocks,
    find_step,
    places,
    rounded,
    row_squares,
    total,
)
from ckz.lossy.snapping import quantizer

# A dead zone: what is added before rounding down, in hundredths of a step.
OFFSET = 40
# Rows get steps of their own where the variance of the logarithm of their power is larger.
_UNEVEN = 1.0
_MIN_COLUMNS = 64


def fit_steps(
    fit: Fit, item: Eligible, method: Method, source: tuple[Ref, ...] | None = None
) -> Snap | None:
    """Fit a uniform quantizer: ``deadzone``, ``int8``, ``abs`` or ``rel``."""
    if source is None:
        source = () if method.name == "int8" else fit.base_of(item)
    if method.name in ("abs", "rel"):
        bound = method.value
        if method.name == "rel":
            bound *= value_range(fit, item)
        width = float(np.float32(2 * bound * (1 - 2.0**-20)))
        if not (0 < width < math.inf):
            return None
        model = step_model(item.rows * item.columns, np.array([width]))
        return quantizer(fit, item, method, Deadzone(item.dtype), model, bound=bound, source=source)
    squares, largest = _rows(fit, item, source)
    if method.name == "int8":
        model = step_model(item.columns, rounded(largest / 127 * (1 + 2.0**-7)))
        return quantizer(fit, item, method, Deadzone(item.dtype), model, source=source)
    scale = _scales(squares, item)
    if scale is None:
        return None
    columns = item.columns if scale.size > 1 else item.rows * item.columns
    sizes = _normalized(fit, item, source, scale, columns)
    step, lift = find_step(sizes, method.value, OFFSET / 100)
    if not step:
        return None
    model = step_model(columns, rounded(scale * step))
    codec = Deadzone(item.dtype, OFFSET, round(100 * lift))
    return quantizer(fit, item, method, codec, model, source=source)


def _rows(fit: Fit, item: Eligible, source: tuple[Ref, ...]) -> tuple[Doubles, Doubles]:
    """Give each row's sum of squares and largest magnitude, of what is quantized."""
    squares, largest = np.zeros((2, item.rows))
    for first, last in blocks(_elements(item), WIDTHS[item.dtype]):
        values = fit.differences(item, source, first, last)
        row_squares(values, first, item.columns, squares)
        rows = np.arange(first, last) // item.columns
        size = np.abs(values, dtype=np.float64)
        np.maximum.at(largest, rows, np.where(np.isfinite(size), size, 0))
    return squares, largest


def _scales(squares: Doubles, item: Eligible) -> Doubles | None:
    """Give the root mean square of each row, or of all; None if there is nothing but zeros."""
    overall = total(squares)
    if not overall:
        return None
    used = squares[squares > 0] / item.columns
    spread = np.log2(used) - total(np.log2(used)) / used.size
    uneven = total(spread * spread) / used.size > _UNEVEN
    by_row = uneven and item.columns >= _MIN_COLUMNS
    power = squares / item.columns if by_row else np.array([overall / _elements(item)])
    found: Doubles = np.sqrt(power)
    return found


def _elements(item: Eligible) -> int:
    return item.nbytes // WIDTHS[item.dtype]


def _normalized(
    fit: Fit, item: Eligible, source: tuple[Ref, ...], scale: Doubles, columns: int
) -> Doubles:
    """Sample magnitudes in units of their row's scale."""
    sizes = []
    for first, last in places(_elements(item)):
        size = np.abs(fit.differences(item, source, first, last).astype(np.float64))
        unit = scale[np.arange(first, last) // columns]
        good = np.isfinite(size) & (unit > 0)
        sizes.append(size[good] / unit[good])
    return np.concatenate(sizes)


def step_model(columns: int, steps: npt.NDArray[np.floating]) -> Bytes:
    """Give the model of ``Deadzone``: elements in a row, and the step of each row."""
    head = np.array([columns], "<u8").view(np.uint8)
    return np.concatenate([head, steps.astype("<f4").view(np.uint8)])


def value_range(fit: Fit, item: Eligible) -> float:
    """Give the distance from the smallest to the largest finite value."""
    low, high = math.inf, -math.inf
    for first, last in blocks(_elements(item), WIDTHS[item.dtype]):
        values = fit.original(item, first, last)
        values = values[np.isfinite(values)]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    return max(0.0, high - low)
