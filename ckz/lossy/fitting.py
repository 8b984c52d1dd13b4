"""From methods to numbers: steps, clusters and means of each tensor, and the error they make.

A tensor is read twice: once for the numbers, and once to measure what becomes of it. Second moments
come first, then weights and masters, then 16-bit weights that are casts of these, then first
moments, which lean on the restored second ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial as bind
from typing import NamedTuple

import numpy as np

from ckz import codecs
from ckz.chain import Snapshot
from ckz.checkpoint import Checkpoint
from ckz.choosing import cut
from ckz.codecs.cluster import Cluster
from ckz.codecs.floats import WIDTHS, Bytes
from ckz.codecs.lc import Lc
from ckz.codecs.moments import MomentsMomentum, MomentsVariance
from ckz.codecs.rowcol import Sums, make_model, sum_tops
from ckz.container import Loss, Ref
from ckz.kernels.clusters import histogram
from ckz.lossy import EXACT, Method, Methods
from ckz.lossy.buckets import find_buckets
from ckz.lossy.budgeting import Predict, spend
from ckz.lossy.carrying import carry
from ckz.lossy.clusters import find_clusters
from ckz.lossy.eligible import Eligible, find_eligible
from ckz.lossy.measuring import measure_all
from ckz.lossy.mending import mend_sums
from ckz.lossy.pairing import eps_of, find_pairs
from ckz.lossy.reading import Fit
from ckz.lossy.restored import RestoredFiles, Snap
from ckz.lossy.rounding import cast_of, drop, round_bits, round_relative, round_type
from ckz.lossy.sampling import blocks, find_step, places
from ckz.lossy.snapping import as_snap, cost_of, quantizer
from ckz.lossy.steps import OFFSET, fit_steps, value_range
from ckz.matching import Lean
from ckz.partial import Ask, Partial
from ckz.plan import Candidate
from ckz.workers import Workers, in_order

# A sample is not all.
_SAFELY = 0.95
_HUGE = 1e30
# Values may be anything, and what overflows is seen to afterwards.
_QUIETLY = np.errstate(all="ignore")
_NARROW = {"fp16": "float16", "bf16": "bfloat16"}
_SHORT = {dtype: name for name, dtype in _NARROW.items()}


class Approximated(NamedTuple):
    """What becomes of a checkpoint.

    Attributes
    ----------
    checkpoint : with the checksums it will have.
    error : the mean one, if there was a budget.
    """

    checkpoint: Checkpoint
    losses: tuple[Loss, ...]
    partial: Partial
    error: float | None = None


def approximate(
    checkpoint: Checkpoint,
    methods: Methods,
    files: RestoredFiles,
    base: Snapshot | None,
    leans: Mapping[int, Lean],
    casts: Mapping[int, tuple[Ref, ...]],
    workers: Workers,
    *,
    partial: Ask | None = None,
    predict: Predict,
    accept_bad_crc: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Approximated:
    """Decide what every tensor will be; ``files`` reads the checkpoint so from then on.

    Parameters
    ----------
    leans : span -> what it continues in the base.
    casts : span -> the float32 ranges of this checkpoint that it is the cast of.
    partial : what is to be carried from the base.
    predict : gives what would be stored of the checkpoint as ``files`` reads it now.
    tell : is told of bytes done, and in all.

    Raises
    ------
    BoundError
        If a budget cannot be kept.
    CorruptError
        If a zip's checksum does not fit its data, unless ``accept_bad_crc``.
    """
    eligible = find_eligible(checkpoint, dropped=not methods.is_resumable)
    # Everything is looked at twice, to fit and to measure; more often where a budget needs tries.
    total, done = 2 * sum(item.nbytes for item in eligible.values()), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done = min(total, done + nbytes)
        tell(done, total)

    fit = Fit(checkpoint, methods, files, base, eligible, leans, casts, tell=count)
    pairs = find_pairs(checkpoint, eligible)
    fit_all = bind(_fit_all, pairs=pairs, workers=workers)
    error = None
    if any(methods.budget):
        fit, error = spend(fit, pairs, workers, predict, fit_all)
    else:
        fit_all(fit)
    carried = Partial()
    if partial:
        carried = carry(fit, partial)
        casts_of = [item for item in fit.eligible.values() if item.span in carried.casts]
        _keep(fit, (_fit_cast(fit, item) for item in casts_of))
    measured = measure_all(checkpoint, files, workers, count)
    mended = mend_sums(checkpoint, files, measured, accept_bad_crc=accept_bad_crc)
    losses = tuple(found.loss for found in measured.values() if found.loss.largest)
    return Approximated(mended, losses, carried, error)


def _fit_all(fit: Fit, *, pairs: Mapping[int, Eligible], workers: Workers) -> None:
    by_role: dict[str, list[Eligible]] = {}
    for item in fit.eligible.values():
        by_role.setdefault(item.role, []).append(item)
    jobs = [bind(_fit_variance, fit, item) for item in by_role.get("variance", ())]
    parameters = [*by_role.get("master", ()), *by_role.get("weight", ())]
    jobs += [
        bind(_fit_parameter, fit, item, fit.cast_types.get(item.span, frozenset()))
        for item in parameters
        if item.span not in fit.casts
    ]
    _keep(fit, in_order(workers, jobs))
    _keep(fit, (_fit_cast(fit, item) for item in parameters if item.span in fit.casts))
    momenta = by_role.get("momentum", ())
    step = _moments_step(fit, [(m, pairs[m.span]) for m in momenta if m.span in pairs])
    jobs = [bind(_fit_momentum, fit, item, pairs.get(item.span), step) for item in momenta]
    _keep(fit, in_order(workers, jobs))


def _keep(fit: Fit, found: Iterable[tuple[int, Snap | None]]) -> None:
    for span, snap in found:
        fit.tell(fit.eligible[span].nbytes)
        if snap is not None:
            fit.files.snaps[span] = snap


@_QUIETLY
def _fit_parameter(fit: Fit, item: Eligible, casts: frozenset[str]) -> tuple[int, Snap | None]:
    """Fit a weight or a master."""
    if own := fit.chosen.get(item.span):
        return item.span, _fit(fit, item, own, casts)
    method = fit.methods.of(item.role)
    if item.role == "master" and not casts:
        # Of a master whose weight was not found, any 16-bit weight may be the cast.
        casts = fit.halves
        if casts and method != EXACT:
            method = fit.methods.fallback if method.name != "bits" else method
    if method.name in ("lc", "deadzone") and not fit.base_of(item):
        method = fit.methods.fallback if item.dtype == "float32" and casts else EXACT
    if method.name == "weight":
        method = Method(_SHORT[min(casts)]) if len(casts) == 1 else EXACT
    return item.span, _fit(fit, item, method, casts)


def _fit(fit: Fit, item: Eligible, method: Method, casts: frozenset[str]) -> Snap | None:
    """Fit a method that leans on nothing but a base."""
    name, value = method
    if method == EXACT:
        return None
    if name == "drop":
        return Snap(drop, str(method))
    if name == "bits":
        if item.dtype != "float32":
            return None
        return Snap(bind(round_bits, low=32 - int(value), casts=tuple(sorted(casts))), str(method))
    if name == "pwrel":
        return Snap(bind(round_relative, dtype=item.dtype, bound=value), str(method))
    if name in _NARROW:
        if _NARROW[name] == item.dtype or item.dtype != "float32":
            return None
        return Snap(bind(round_type, dtype=item.dtype, to=_NARROW[name]), str(method))
    if name == "lc":
        table = find_buckets(fit, item, int(value))
        # Nothing changed.
        return quantizer(fit, item, method, Lc(item.dtype), table) if table.size else None
    if name == "cluster":
        return _fit_clusters(fit, item, method)
    return fit_steps(fit, item, method)


def _fit_cast(fit: Fit, item: Eligible) -> tuple[int, Snap | None]:
    """Let a 16-bit weight follow the float32 one that it is the cast of, if that changes."""
    refs = fit.casts[item.span]
    nfiles = len(fit.checkpoint.files)
    changed = [fit.files.snaps.get(ref.span - nfiles) for ref in refs]
    same = all(snap is None or snap.method.startswith("bits") for snap in changed)
    if same or fit.methods.master.name == "weight":
        return item.span, None
    bound = fit.methods.of(item.role)
    limit = bound.value * value_range(fit, item) if bound.name == "rel" else bound.value

    def replace(chunk: Bytes, at: int) -> None:
        where = [*cut(refs, 2 * at, 2 * (at + chunk.size))]
        was = np.concatenate([fit.read_original(ref) for ref in where])
        now = np.concatenate([fit.read_ref(ref) for ref in where])
        cast_of(was, now, chunk, dtype=item.dtype, kind=bound.name, limit=limit)

    return item.span, Snap(replace, "cast")


@_QUIETLY
def _fit_variance(fit: Fit, item: Eligible) -> tuple[int, Snap | None]:
    method = fit.methods.variance
    if method.name != "moments":
        return item.span, _fit(fit, item, method, frozenset())
    # Half of the error of an update may come from here; a root has half of the logarithm.
    step = 2 * math.sqrt(6 * method.value) / math.log(2)
    codec = MomentsVariance(item.dtype, max(1, int(step * (1 << 23))))
    plain = _with_means(fit, item, method, codec)
    if not fit.base_of(item):
        return item.span, plain
    change = MomentsVariance(item.dtype, codec.step, change=1)
    based = _with_means(fit, item, method, change)
    costs = [cost_of(fit, item, snap) for snap in (plain, based)]
    return item.span, based if costs[1] < costs[0] else plain


def _with_means(fit: Fit, item: Eligible, method: Method, codec: MomentsVariance) -> Snap:
    def sums() -> Iterator[Sums]:
        for first, last in blocks(item.nbytes // WIDTHS[item.dtype], WIDTHS[item.dtype]):
            base = fit.read_base(item, first, last) if codec.change else None
            tops = codec.tops(fit.original(item, first, last), base)
            yield sum_tops(tops, item.columns, first)

    model = make_model(sums(), item.rows, item.columns)
    source = fit.base_of(item) if codec.change else ()
    return quantizer(fit, item, method, codec, model, source=source)


class _MomentsStep(NamedTuple):
    """The one step of all first moments."""

    step: float
    lift: int
    eps: float


@_QUIETLY
def _moments_step(fit: Fit, pairs: list[tuple[Eligible, Eligible]]) -> _MomentsStep | None:
    """Choose the step of all first moments from a sample of the updates."""
    method = fit.methods.momentum
    if method.name != "moments" or not pairs:
        return None
    eps = eps_of(fit.checkpoint)
    sizes, roots = [], []
    share = max(1, sum(first.nbytes for first, _ in pairs) >> 22)
    for first, second in pairs:
        n = first.nbytes // WIDTHS[first.dtype]
        for low, high in places(n, max(1, n // 1024 // share)):
            m, v = fit.original(first, low, high), fit.restored(second, low, high)
            root = np.sqrt(v.astype(np.float64)) + eps
            update = np.abs(m.astype(np.float64)) / root
            used = np.isfinite(update) & (update > 0)
            sizes.append(update[used])
            roots.append(root[used])
    budget = _SAFELY * method.value / 2
    # What a step gains is, to first order, gradient times update, and the moment is near the
    # gradient: so a root is the weight with which that stays what it was.
    weights = np.concatenate(roots)
    step, lift = find_step(np.concatenate(sizes), budget, OFFSET / 100, weights)
    return _MomentsStep(step, round(100 * lift), eps) if 0 < step < _HUGE else None


@_QUIETLY
def _fit_momentum(
    fit: Fit, item: Eligible, second: Eligible | None, step: _MomentsStep | None
) -> tuple[int, Snap | None]:
    method = fit.methods.momentum
    if method.name != "moments":
        return item.span, _fit(fit, item, method, frozenset())
    if second is None or step is None:
        # What an update is, nobody knows then, so no bound of it can be kept.
        if fit.methods.preset == "exact":
            return item.span, None
        # Momentum without a second moment, as SGD has it: in steps of its own rows.
        alone = Method("deadzone", method.value / 2)
        return item.span, fit_steps(fit, item, alone, source=())
    codec = MomentsMomentum(item.dtype, step.step, step.eps, OFFSET, step.lift)
    nfiles = len(fit.checkpoint.files)
    candidate = Candidate(codecs.spec(codec), inputs=(Ref(nfiles + second.span, 0, second.nbytes),))
    return item.span, as_snap(fit, candidate, method)


def _fit_clusters(fit: Fit, item: Eligible, method: Method) -> Snap | None:
    root = int(item.role == "variance")
    counts = np.zeros(1 << 16, np.int64)
    for first, last in blocks(item.nbytes // WIDTHS[item.dtype], WIDTHS[item.dtype]):
        values = fit.original(item, first, last)
        x = np.sqrt(values) if root else values
        histogram(np.ascontiguousarray(x[np.isfinite(x)]).view(np.uint32), 16, counts)
    table = find_clusters(counts, int(method.value))
    if table is None:
        return None
    codec = Cluster(item.dtype, root)
    return quantizer(
        fit, item, method, codec, table.astype("<f4").reshape(-1).view(np.uint8), source=()
    )
