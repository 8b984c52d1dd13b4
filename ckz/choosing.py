"""Which of a stream's candidate codecs is best on its own bytes, and what it leans on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckz import codecs
from ckz.codecs.cast import Cast
from ckz.codecs.floats import WIDTHS
from ckz.codecs.rowcol import RowCol, Sums, make_model
from ckz.container import MAX_REFS, Ref
from ckz.plan import Candidate
from ckz.streams import CHUNK, Stream
from ckz.workers import Workers, in_order

Bytes = npt.NDArray[np.uint8]
# Fill an array from a byte of the stream on.
ReadStream = Callable[[int, Bytes], None]
ReadRef = Callable[[Ref], Bytes]

# Candidates are compared on a few pieces of this size, all over the stream; on one if it is not
# long, for a base that is compressed itself has to be decoded for it.
_SAMPLE = CHUNK // 16
_SAMPLES = 3
_LONG = 16 * CHUNK
# What derives nearly everything from something else is not compared with codecs that store it.
_GOOD_ENOUGH = 0.15


class Choice(NamedTuple):
    """A codec for a stream.

    Attributes
    ----------
    refs : gives what the bytes from start to stop lean on; None where that would be too much.
    model : what all chunks of the stream lean on, or nothing.
    model_span : the number it has in references.
    """

    text: str
    codec: codecs.Codec
    refs: Callable[[int, int], tuple[Ref, ...] | None]
    model: Bytes | None = None
    model_span: int = -1

    def read(self, refs: Sequence[Ref], read_ref: ReadRef) -> list[Bytes]:
        """Give what references name: parts of the model, or what is read."""
        return [
            self.model[ref.start : ref.start + ref.nbytes]
            if self.model is not None and (ref.where, ref.span) == (0, self.model_span)
            else read_ref(ref)
            for ref in refs
        ]


def choose(
    stream: Stream,
    candidates: Sequence[Candidate],
    read: ReadStream,
    read_ref: ReadRef,
    workers: Workers,
    model_span: int,
) -> list[Choice]:
    """Give the codec that is smallest on samples; behind it, one that leans on nothing.

    Parameters
    ----------
    model_span : number that a model gets if the stream needs one.
    """
    # The last candidate leans on nothing.
    plain = prepare(stream, candidates[-1], read, workers, model_span)
    if len(candidates) == 1:
        return [plain]
    if candidates[0].carried:
        others = candidates[:-1]
        return [*(prepare(stream, c, read, workers, model_span) for c in others), plain]
    best, least = plain, float("inf")
    for candidate in candidates:
        last = candidate is candidates[-1]
        choice = plain if last else prepare(stream, candidate, read, workers, model_span)
        cost = estimate(stream, choice, read, read_ref, _SAMPLES if stream.nbytes > _LONG else 1)
        if cost < least:
            best, least = choice, cost
        if least < _GOOD_ENOUGH * stream.nbytes:
            break
    return [best] if best is plain else [best, plain]


def prepare(
    stream: Stream, candidate: Candidate, read: ReadStream, workers: Workers, model_span: int
) -> Choice:
    """Make a candidate ready to code its stream: its model takes a pass over all of it."""
    codec = codecs.parse(candidate.codec)
    if candidate.model is not None or candidate.inputs:
        return fitted(candidate, model_span)
    if candidate.source:
        ratio = codec.ratio if isinstance(codec, Cast) else 1
        return Choice(candidate.codec, codec, partial(_source_refs, candidate.source, ratio))
    if candidate.matrix and isinstance(codec, RowCol):
        rows, columns = candidate.matrix
        sums = in_order(
            workers,
            (
                partial(_sums, codec, stream, read, columns, start)
                for start in range(0, stream.nbytes, CHUNK)
            ),
        )
        model = make_model(sums, rows, columns)
        refs = partial(_model_refs, model_span, rows, columns, 4)
        return Choice(candidate.codec, codec, refs, model, model_span)
    return Choice(candidate.codec, codec, _nothing)


def _sums(codec: RowCol, stream: Stream, read: ReadStream, columns: int, start: int) -> Sums:
    chunk = np.empty(min(CHUNK, stream.nbytes - start), np.uint8)
    read(start, chunk)
    return codec.sums(chunk, columns, start)


def _nothing(start: int, stop: int) -> tuple[Ref, ...]:
    return ()


def fitted(candidate: Candidate, model_span: int = -1) -> Choice:
    """Make a candidate ready whose model, if it has one, is known."""
    codec = codecs.parse(candidate.codec)
    refs = partial(_fitted_refs, candidate, codec, model_span)
    return Choice(candidate.codec, codec, refs, candidate.model, model_span)


def _fitted_refs(
    candidate: Candidate, codec: codecs.Codec, model_span: int, start: int, stop: int
) -> tuple[Ref, ...] | None:
    """Give what a chunk of quantized values leans on: its part of the model, and the base."""
    if candidate.inputs:
        return _input_refs(candidate.inputs, start, stop)
    source = _source_refs(candidate.source, 1, start, stop)
    if candidate.model is None or candidate.matrix is None or source is None:
        return source
    kind, width = codec.model, WIDTHS[codec.dtype]  # type: ignore[attr-defined]
    if kind == "rowcol":
        return *_model_refs(model_span, *candidate.matrix, width, start, stop), *source
    if kind == "whole":
        return Ref(model_span, 0, candidate.model.size), *source
    columns = int(candidate.model[:8].view("<u8")[0])
    first, last = start // width // columns, (stop // width - 1) // columns
    steps = Ref(model_span, 8 + 4 * first, 4 * (last - first + 1))
    return Ref(model_span, 0, 8), steps, *source


def _model_refs(
    span: int, rows: int, columns: int, width: int, start: int, stop: int
) -> tuple[Ref, ...]:
    """Give the means of the rows that elements of these bytes lie in, and of all columns."""
    first, last = start // width // columns, (stop // width - 1) // columns
    return Ref(span, 2 * first, 2 * (last - first + 1)), Ref(span, 2 * rows, 2 * columns)


def _input_refs(inputs: Sequence[Ref], start: int, stop: int) -> tuple[Ref, ...]:
    """Give the same bytes of ranges that are as long as the stream."""
    return tuple(Ref(ref.span, ref.start + start, stop - start, ref.where) for ref in inputs)


def _source_refs(
    source: Sequence[Ref], ratio: int, start: int, stop: int
) -> tuple[Ref, ...] | None:
    """Give the parts of ranges, ``ratio`` times as long, that these bytes derive from."""
    found = tuple(cut(source, start * ratio, stop * ratio))
    return found if len(found) <= MAX_REFS else None


def cut(refs: Iterable[Ref], start: int, stop: int) -> Iterator[Ref]:
    """Give the parts of ranges laid end to end that bytes from start to stop lie in."""
    at = 0
    for ref in refs:
        low, high = max(start - at, 0), min(stop - at, ref.nbytes)
        if low < high:
            yield Ref(ref.span, ref.start + low, high - low, ref.where)
        at += ref.nbytes


def estimate(
    stream: Stream, choice: Choice, read: ReadStream, read_ref: ReadRef, pieces: int = _SAMPLES
) -> float:
    """Estimate the stream's size under a choice."""
    sampled = stored = 0
    for start, chunk in samples(stream, read, pieces):
        refs = choice.refs(start, start + chunk.size)
        if refs is None:
            return float("inf")
        data = choice.read(refs, read_ref)
        sampled += chunk.size
        if len(data) == 1 and np.array_equal(data[0], chunk):
            continue
        payload = choice.codec.encode(chunk, data, start)
        stored += chunk.size if payload is None else len(payload)
    model = 0 if choice.model is None else choice.model.size
    return stored / sampled * stream.nbytes + model


def samples(
    stream: Stream, read: ReadStream, pieces: int = _SAMPLES
) -> Iterator[tuple[int, Bytes]]:
    """Read pieces from all over a stream."""
    size = min(_SAMPLE, stream.nbytes)
    last = stream.nbytes - size
    places = {last * (2 * k + 1) // (2 * pieces) // 16 * 16 for k in range(pieces)}
    for start in sorted(places):
        chunk = np.empty(size, np.uint8)
        read(start, chunk)
        yield start, chunk
