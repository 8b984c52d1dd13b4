"""One budget for a whole checkpoint: so many times smaller, or so much error on average.

Every tensor has a few methods it may be approximated by, each with the bytes and the error that a
sample shows. At a price of an error every tensor takes what costs it least, and the price is the
one at which the budget is just kept (Shoham and Gersho, "Efficient bit allocation for an arbitrary
set of quantizers", 1988). Samples are not all: what was chosen is fitted, its size predicted or its
error measured, and where that misses the budget the choice is made again.

The error counts every parameter alike: the mean squared error of its tensor's change since the base
(of its values, without one), in parts of that change's own mean square, and an eighth of the same
of the optimizer's next step, which training forgets sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ckz.codecs.floats import WIDTHS
from ckz.errors import BoundError
from ckz.lossy import EXACT, Method
from ckz.lossy.eligible import Eligible
from ckz.lossy.pairing import eps_of
from ckz.lossy.reading import Fit
from ckz.lossy.restored import Snap
from ckz.lossy.sampling import Doubles, blocks, entropy, places, quantize, total
from ckz.lossy.steps import OFFSET
from ckz.workers import Workers, in_order

# Steps that are tried of changes and updates, in half powers of two around their root mean square;
# and of values that have no base to change from, which must be finer by the square root of this.
_STEPS = range(-10, 5)
_VALUE_STEPS = range(-24, -4)
_VALUE_WEIGHT = 30.0
_UPDATE_WEIGHT = 1 / 8
_BITS24_ERROR = 1e-6
# Runs of elements in a sample of a tensor.
_PIECES = 4
# Coarser than this nothing is left of a tensor.
_MOST_ERROR = 0.5
_TRIES = 4
# Of what is limited, from next to nothing to more than all.
_PRICES = 1e-30, 1e30
_SAME_PRICE = 1 + 1e-6
# Near enough below a budget, and what is aimed at.
_CLOSE, _AIM = 0.96, 0.985
# What is aimed at where the same choice comes out again.
_LESS = 0.97
# All moments are one choice: their steps are one for all, which is best for a sum of errors.
MOMENTS = -1

# Predicts what is stored: bytes by span, and of all that is no tensor's own under None.
Predict = Callable[[], Mapping[int | None, float]]


class Point(NamedTuple):
    """What a tensor could become: its method, bytes, and share of the error."""

    method: Method
    nbytes: float
    error: float


Points = Mapping[int, Sequence[Point]]


def solve(
    points: Points, *, nbytes: float = math.inf, error: float = math.inf
) -> dict[int, Point] | None:
    """Choose a point for each tensor: least error within bytes, or fewest bytes within an error.

    Returns
    -------
    None if the budget cannot be kept.
    """
    # What is limited, and what is to be little.
    cost, gain = (_error_of_point, _bytes_of_point)
    if math.isinf(error):
        cost, gain = gain, cost
    limit = min(nbytes, error)

    def at(price: float) -> dict[int, Point]:
        return {
            key: min(each, key=lambda point: (gain(point) + price * cost(point), cost(point)))
            for key, each in points.items()
        }

    def room(chosen: Mapping[int, Point]) -> float:
        return limit - sum(cost(point) for point in chosen.values())

    if room(best := at(_PRICES[0])) >= 0:
        return best
    if room(best := at(_PRICES[1])) < 0:
        return None
    low, high = _PRICES
    while high > low * _SAME_PRICE:
        middle = math.sqrt(low * high)
        if room(chosen := at(middle)) >= 0:
            high, best = middle, chosen
        else:
            low = middle
    # Prices see the convex hull alone; what they leave is spent point by point.
    left = room(best)
    for key in sorted(best, key=lambda key: (-gain(best[key]), key)):
        now = best[key]
        fits = [p for p in points[key] if cost(p) - cost(now) <= left and gain(p) < gain(now)]
        if fits:
            best[key] = min(fits, key=lambda point: (gain(point), cost(point)))
            left -= cost(best[key]) - cost(now)
    return best


def _bytes_of_point(point: Point) -> float:
    return point.nbytes


def _error_of_point(point: Point) -> float:
    return point.error


class _Kept(NamedTuple):
    """A choice that keeps the budget, and how much of that it takes."""

    used: float
    error: float
    fit: Fit
    snaps: dict[int, Snap]


def spend(
    fit: Fit,
    pairs: Mapping[int, Eligible],
    workers: Workers,
    predict: Predict,
    fit_all: Callable[[Fit], None],
) -> tuple[Fit, float]:
    """Fit what a budget allows.

    Parameters
    ----------
    pairs : span of a first moment -> the second one of the same parameters.
    fit_all : fits the methods chosen.

    Returns
    -------
    The choice, fitted, and the error it makes.

    Raises
    ------
    BoundError
        If the budget cannot be kept.
    """
    budget, eps = fit.methods.budget, eps_of(fit.checkpoint)
    exact = predict()
    raw = fit.checkpoint.nbytes
    points = _points(fit, pairs, eps, exact)
    fixed = sum(exact.values()) - sum(each[0].nbytes for each in points.values())
    aim = _AIM
    tried: list[dict[int, Point]] = []
    kept: _Kept | None = None
    while len(tried) < _TRIES:
        if budget.ratio:
            chosen = solve(points, nbytes=aim * raw / budget.ratio - fixed)
        else:
            chosen = solve(points, error=aim * budget.error)
        if chosen is None:
            break
        if chosen in tried:
            if kept:
                break
            aim *= _LESS
            continue
        tried.append(chosen)
        fit.files.snaps.clear()
        fit = _choosing(fit, chosen)
        fit_all(fit)
        error = _error(fit, pairs, eps, workers)
        if budget.ratio:
            used = sum(predict().values()) * budget.ratio / raw
        else:
            used = error / budget.error
        if used <= 1 and (kept is None or used > kept.used):
            kept = _Kept(used, error, fit, dict(fit.files.snaps))
        if _CLOSE <= used <= 1:
            break
        aim *= _AIM / max(used, 1e-3)
    if kept:
        fit.files.snaps = kept.snaps
        return kept.fit, kept.error
    if budget.ratio:
        smallest = fixed + sum(min(p.nbytes for p in each) for each in points.values())
        raise BoundError(
            f"{fit.checkpoint.root}: cannot be made {budget.ratio:g} times smaller, only about "
            f"{raw / smallest:.1f} times; a later base may help"
        )
    raise BoundError(
        f"{fit.checkpoint.root}: no choice of methods keeps a mean error of {budget.error:g}"
    )


def _choosing(fit: Fit, chosen: Mapping[int, Point]) -> Fit:
    moments = chosen[MOMENTS].method if MOMENTS in chosen else EXACT
    methods = replace(fit.methods, momentum=moments, variance=moments)
    own = {span: point.method for span, point in chosen.items() if span != MOMENTS}
    return replace(fit, methods=methods, chosen=own)


def _points(
    fit: Fit, pairs: Mapping[int, Eligible], eps: float, exact: Mapping[int | None, float]
) -> dict[int, list[Point]]:
    """Give what each tensor could become, exact first, then coarser and coarser."""
    parameters = [item for item in fit.eligible.values() if _is_parameter(fit, item)]
    everything = max(1, sum(_elements(item) for item in parameters))
    found = {}
    for item in parameters:
        points = [Point(EXACT, exact.get(item.span, item.nbytes), 0.0)]
        share = _elements(item) / everything
        if item.role == "master" and item.dtype == "float32" and item.span in fit.cast_types:
            least = max(0.0, points[0].nbytes - _elements(item))
            points.append(Point(Method("bits", 24), least, _BITS24_ERROR * share))
        found[item.span] = points + _coarse(fit, item, share)
    if pairs:
        found[MOMENTS] = _moments(fit, pairs, eps, exact)
    return found


def _is_parameter(fit: Fit, item: Eligible) -> bool:
    return item.role in ("weight", "master") and item.span not in fit.casts


def _elements(item: Eligible) -> int:
    return item.nbytes // WIDTHS[item.dtype]


def _coarse(fit: Fit, item: Eligible, share: float) -> list[Point]:
    source = fit.base_of(item)
    steps, weight = (_STEPS, 1.0) if source else (_VALUE_STEPS, _VALUE_WEIGHT)
    rows = []
    for first, last in places(_elements(item), _PIECES):
        size = np.abs(fit.differences(item, source, first, last).astype(np.float64))
        rows.append(size[np.isfinite(size)])
    return [
        Point(Method("deadzone", error), bits * _elements(item) / 8, weight * error * share)
        for error, bits in _curve(np.concatenate(rows), steps)
    ]


def _curve(sizes: Doubles, steps: Iterable[int]) -> Iterator[tuple[float, float]]:
    """Give errors, as a user would write them, and the bits an element that they take."""
    power = total(sizes**2)
    for k in steps if power else ():
        step = math.sqrt(power / sizes.size * 2.0**k)
        near = quantize(sizes, step, OFFSET / 100, 0.0)
        error = float(f"{total((near - sizes) ** 2) / power:.2g}")
        if 0 < error <= _MOST_ERROR:
            yield error, entropy(np.floor(sizes / step + OFFSET / 100))


def _moments(
    fit: Fit, pairs: Mapping[int, Eligible], eps: float, exact: Mapping[int | None, float]
) -> list[Point]:
    updates, logs, elements, before, seen = [], [], 0, 0.0, 0
    for span, second in pairs.items():
        first, n = fit.eligible[span], _elements(second)
        elements += n
        before += exact.get(span, first.nbytes) + exact.get(second.span, second.nbytes)
        for low, high in places(n, _PIECES):
            m = fit.original(first, low, high).astype(np.float64)
            v = fit.original(second, low, high).astype(np.float64)
            used = np.isfinite(m) & np.isfinite(v) & (v > 0)
            seen += used.size
            if used.any():
                updates.append(np.abs(m[used]) / (np.sqrt(v[used]) + eps))
                log = np.log2(v[used])
                # Row means are part of the model; those of columns a sample does not show.
                logs.append(log - total(log) / log.size)
    points = [Point(EXACT, before, 0.0)]
    if not updates:
        return points
    # Of what is zero nothing is stored.
    part = sum(each.size for each in updates) / seen
    sizes, far = np.concatenate(updates), np.abs(np.concatenate(logs))
    for half, bits in _curve(sizes, _STEPS):
        step = 2 * math.sqrt(12 * half) / math.log(2)
        nbytes = (bits + entropy(np.floor(far / step + 0.5))) * elements * part / 8
        points.append(Point(Method("moments", 2 * half), nbytes, _UPDATE_WEIGHT * 2 * half))
    return points


def _error(fit: Fit, pairs: Mapping[int, Eligible], eps: float, workers: Workers) -> float:
    """Measure the error on all that will be restored."""
    parameters = [item for item in fit.eligible.values() if _is_parameter(fit, item)]
    everything = max(1, sum(_elements(item) for item in parameters))
    jobs = [partial(_error_of, fit, item) for item in parameters if item.span in fit.files.snaps]
    error = sum(part * n / everything for part, n in in_order(workers, jobs))
    found = list(in_order(workers, [partial(_of_updates, fit, *p, eps) for p in pairs.items()]))
    squares = sum(power for _, power in found)
    return error + (_UPDATE_WEIGHT * sum(e for e, _ in found) / squares if squares else 0.0)


@np.errstate(all="ignore")
def _error_of(fit: Fit, item: Eligible) -> tuple[float, int]:
    source = fit.base_of(item)
    errors = squares = 0.0
    for first, last in blocks(_elements(item), WIDTHS[item.dtype]):
        was = fit.original(item, first, last).astype(np.float64)
        change = fit.differences(item, source, first, last).astype(np.float64)
        far = fit.restored(item, first, last) - was
        good = np.isfinite(far) & np.isfinite(change)
        errors, squares = errors + total(far[good] ** 2), squares + total(change[good] ** 2)
    weight = 1.0 if source else _VALUE_WEIGHT
    return weight * errors / squares if squares else 0.0, _elements(item)


@np.errstate(all="ignore")
def _of_updates(fit: Fit, span: int, second: Eligible, eps: float) -> tuple[float, float]:
    first = fit.eligible[span]
    errors = squares = 0.0
    for low, high in blocks(_elements(second), WIDTHS[second.dtype]):
        was, now = (
            read(first, low, high).astype(np.float64)
            / (np.sqrt(read(second, low, high).astype(np.float64)) + eps)
            for read in (fit.original, fit.restored)
        )
        good = np.isfinite(was) & np.isfinite(now)
        errors += total((was[good] - now[good]) ** 2)
        squares += total(was[good] ** 2)
    return errors, squares
