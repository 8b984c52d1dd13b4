"""From a fitted codec to how values are replaced, and what that costs."""

from __future__ import annotations

from functools import partial

import numpy as np

from ckz import codecs
from ckz.choosing import Choice, fitted
from ckz.codecs import quantized
from ckz.codecs.floats import WIDTHS, Bytes
from ckz.codecs.quantized import Quantizer
from ckz.container import Ref
from ckz.lossy import Method
from ckz.lossy.eligible import Eligible
from ckz.lossy.reading import Fit
from ckz.lossy.restored import Snap
from ckz.lossy.sampling import places
from ckz.plan import Candidate
from ckz.streams import Extent


def quantizer(
    fit: Fit,
    item: Eligible,
    method: Method,
    codec: Quantizer,
    model: Bytes | None,
    *,
    bound: float | None = None,
    source: tuple[Ref, ...] | None = None,
) -> Snap:
    """Make a snap of a codec that leans on a model and, if there is one, the base."""
    candidate = Candidate(
        codecs.spec(codec),  # type: ignore[arg-type]
        matrix=(item.rows, item.columns),
        source=fit.base_of(item) if source is None else source,
        model=model,
    )
    return as_snap(fit, candidate, method, bound)


def as_snap(fit: Fit, candidate: Candidate, method: Method, bound: float | None = None) -> Snap:
    return Snap(partial(_snap, fit, fitted(candidate), bound), str(method), candidate)


def _snap(fit: Fit, choice: Choice, bound: float | None, chunk: Bytes, at: int) -> None:
    refs = choice.refs(at, at + chunk.size)
    if refs is not None:
        quantized.snap(choice.codec, chunk, choice.read(refs, fit.read_ref), at, bound)  # type: ignore[arg-type]


def cost_of(fit: Fit, item: Eligible, snap: Snap) -> int:
    """Code a sample and give its bytes."""
    assert snap.candidate is not None
    choice = fitted(snap.candidate)
    width = WIDTHS[item.dtype]
    cost = 0
    for first, last in places(item.nbytes // width, 8):
        span = fit.checkpoint.spans[item.span]
        chunk = np.empty((last - first) * width, np.uint8)
        extent = Extent(span.file, span.offset + first * width, chunk.size)
        fit.files.read_original([extent], chunk)
        snap.replace(chunk, first * width)
        refs = choice.refs(first * width, last * width) or ()
        payload = choice.codec.encode(chunk, choice.read(refs, fit.read_ref), first * width)
        cost += chunk.size if payload is None else len(payload)
    return cost
