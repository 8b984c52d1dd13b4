"""From a checkpoint's bytes to coded chunks, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckz import codecs
from ckz.chain import Snapshot
from ckz.checking import bad_crc, stated_crc32
from ckz.checkpoint import Checkpoint
from ckz.choosing import Choice, ReadRef, choose, estimate, samples
from ckz.codecs.raw import Raw
from ckz.codecs.same import Same
from ckz.codecs.zstd import Zstd
from ckz.container import Ref
from ckz.files import FileSet
from ckz.hashing import SpanHasher
from ckz.plan import Plan
from ckz.streams import CHUNK, Part, Slicer, Stream, parts_of
from ckz.workers import Workers, chunk_buffers, in_order

Bytes = npt.NDArray[np.uint8]

# Below this a repeat costs more to describe than to store.
_MIN_REPEAT = 1024
# Hashing all bytes of a chunk once more takes a twentieth of what coding it does.
_SPARSE = 61


class Coded(NamedTuple):
    """One coded chunk.

    Attributes
    ----------
    codec : its text; what was tried and did not pay is ``raw``.
    raw : bytes it decodes to.
    checksum : xxh3-64 of the payload.
    role : of the tensors in it, or ``skeleton``; what a model costs counts for its tensor.
    original : False for a model, which stands for no bytes of the source.
    """

    codec: str
    payload: bytes
    raw: int
    checksum: int
    refs: tuple[Ref, ...]
    role: str
    original: bool = True


class Predicted(NamedTuple):
    """What one stream would be coded with, and about how many bytes that makes.

    Attributes
    ----------
    span : that the stream is of, if it is of one.
    """

    role: str
    codec: str
    nbytes: int
    stored: float
    span: int | None = None


# A codec to try on a chunk, and what it leans on there.
_Try = tuple[Choice, tuple[Ref, ...]]


class Encoder:
    """Codes all streams of a plan; what the container must know is gathered on the way.

    Attributes
    ----------
    digests : xxh3-128 of each file's skeleton, then of each span, then of each model.
    streams : as coded: those of the plan, a model's before the one that needs it.
    base_spans : span of the base -> row, for those that chunks lean on.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        files: FileSet,
        base: Snapshot | None = None,
        *,
        accept_bad_crc: bool = False,
    ) -> None:
        self._files = files
        self._checkpoint = checkpoint
        self._plan = plan
        self._base = base
        self._accept_bad_crc = accept_bad_crc
        self._parts = parts_of(checkpoint)
        self.digests = [xxhash.xxh3_128_digest(b"")] * len(self._parts)
        self.streams: list[Stream] = []
        self.base_spans: dict[int, int] = {}

    def run(self, workers: Workers) -> Iterator[Coded]:
        """Read, hash and code everything; chunks come in order.

        Raises
        ------
        CorruptError
            If a zip's checksum does not fit its data, unless ``accept_bad_crc``.
        ChangedError
            If a file becomes shorter.
        """
        for coded in in_order(workers, self._jobs(self._files, workers)):
            yield coded._replace(refs=tuple(self._as_stored(ref) for ref in coded.refs))

    def predict(self, workers: Workers) -> Iterator[Predicted]:
        """Choose codecs as ``run`` does, and estimate from samples what comes of them."""
        seen: set[bytes] = set()
        for stream, candidates in zip(self._plan.streams, self._plan.candidates, strict=True):
            read = partial(_read_stream, self._files, Slicer(stream.parts))
            read_ref = partial(self._read_ref, self._files)
            choice = choose(stream, candidates, read, read_ref, workers, len(self._parts))[0]
            digest = xxhash.xxh3_128()
            for _, chunk in samples(stream, read):
                digest.update(chunk.data)
            # What samples show to be there already is stored once.
            again = (known := digest.digest()) in seen and stream.nbytes >= _MIN_REPEAT
            seen.add(known)
            text = Same.name if again else choice.text
            cost = 0.0 if again else estimate(stream, choice, read, read_ref)
            stored = min(cost, stream.nbytes)
            span = stream.parts[0].span - len(self._checkpoint.files)
            alone = len(stream.parts) == 1 and span >= 0
            role = self._role(stream)
            yield Predicted(role, text, stream.nbytes, stored, span if alone else None)

    def _role(self, stream: Stream) -> str:
        skeleton = stream.parts[0].span < len(self._checkpoint.files)
        return "skeleton" if skeleton else stream.role

    def _as_stored(self, ref: Ref) -> Ref:
        """Number the spans of the base that are used, in the order in which they are."""
        if ref.where == 0:
            return ref
        return replace(ref, span=self.base_spans.setdefault(ref.span, len(self.base_spans)))

    def _jobs(self, files: FileSet, workers: Workers) -> Iterator[Callable[[], Coded]]:
        """Read chunk after chunk, hash it, and give the job that codes it."""
        buffers = chunk_buffers(workers)
        hasher = SpanHasher(self.digests)
        repeats = _Repeats(files, self._plan)
        for stream, candidates in zip(self._plan.streams, self._plan.candidates, strict=True):
            slicer = Slicer(stream.parts)
            choices = choose(
                stream,
                candidates,
                partial(_read_stream, files, slicer),
                partial(self._read_ref, files),
                workers,
                len(self.digests),
            )
            role = self._role(stream)
            if (model := choices[0].model) is not None:
                yield from self._model_jobs(model, role)
            self.streams.append(stream)
            for start, buffer in self._chunks(stream, slicer, buffers, workers):
                stop = min(start + CHUNK, stream.nbytes)
                chunk = files.beside(slicer.extents_in(start, stop), buffer[: stop - start])
                covered = list(slicer.parts_in(start, stop))
                self._hash(hasher, covered, chunk)
                if len(covered) == 1 and chunk.size >= _MIN_REPEAT:
                    place = Ref(covered[0][0].span, covered[0][1], chunk.size)
                    if earlier := repeats.find(chunk, slicer, start, place):
                        buffers.put(buffer)
                        yield partial(_same, chunk.size, earlier, role)
                        continue
                tries = [(choice, choice.refs(start, stop) or ()) for choice in choices]
                read_ref = partial(self._read_ref, files)
                yield partial(_encode_chunk, tries, read_ref, start, buffer, chunk, role, buffers)

    def _chunks(
        self, stream: Stream, slicer: Slicer, buffers: SimpleQueue[Bytes], workers: Workers
    ) -> Iterator[tuple[int, Bytes]]:
        """Read the chunks of a stream; ahead and in threads where reading is work."""
        starts = range(0, stream.nbytes, CHUNK)
        jobs = (
            partial(_read_chunk, self._files, slicer, start, stream.nbytes, buffers.get())
            for start in starts
        )
        if self._files.replaces(stream.parts[0].span - len(self._checkpoint.files)):
            # Half of the buffers are left to those that code.
            yield from in_order(workers._replace(window=max(2, workers.window // 2)), jobs)
        else:
            yield from (job() for job in jobs)

    def _model_jobs(self, model: Bytes, role: str) -> Iterator[Callable[[], Coded]]:
        part = Part(len(self.digests), (), model.size)
        self.digests.append(xxhash.xxh3_128_digest(model.data))
        self.streams.append(Stream((part,), model.size, "bytes", "<", role))
        codec = Zstd(9)
        tries = [(Choice(codecs.spec(codec), codec, _nothing), ())]
        for start in range(0, model.size, CHUNK):
            chunk = model[start : start + CHUNK]
            yield partial(_encode_chunk, tries, _nowhere, start, chunk, chunk, role, SimpleQueue())

    def _hash(self, hasher: SpanHasher, covered: list[tuple[Part, int, int]], chunk: Bytes) -> None:
        nfiles = len(self._checkpoint.files)
        at = 0
        for part, first, last in covered:
            data = chunk[at : at + last - first]
            at += data.size
            span = part.span - nfiles
            crc32 = stated_crc32(self._checkpoint.spans[span]) if span >= 0 else -1
            holds = hasher.update(part.span, part.nbytes, last, data, crc32)
            if not holds and not self._accept_bad_crc:
                raise bad_crc(self._checkpoint, span)

    def _read_ref(self, files: FileSet, ref: Ref) -> Bytes:
        out = np.empty(ref.nbytes, np.uint8)
        if ref.where and self._base is not None:
            self._base.read(ref.span, ref.start, out)
            return out
        slicer = Slicer([self._parts[ref.span]])
        files.read(slicer.extents_in(ref.start, ref.start + ref.nbytes), out)
        return out


def _nothing(start: int, stop: int) -> tuple[Ref, ...]:
    return ()


def _nowhere(ref: Ref) -> Bytes:
    raise AssertionError("a model leans on nothing")


def _read_chunk(
    files: FileSet, slicer: Slicer, start: int, nbytes: int, buffer: Bytes
) -> tuple[int, Bytes]:
    stop = min(start + CHUNK, nbytes)
    files.read(slicer.extents_in(start, stop), buffer[: stop - start])
    return start, buffer


def _read_stream(files: FileSet, slicer: Slicer, start: int, out: Bytes) -> None:
    files.read(slicer.extents_in(start, start + out.size), out)


def _same(raw: int, ref: Ref, role: str) -> Coded:
    return Coded(Same.name, b"", raw, xxhash.xxh3_64_intdigest(b""), (ref,), role)


def _encode_chunk(
    tries: Sequence[_Try],
    read_ref: ReadRef,
    start: int,
    buffer: Bytes,
    chunk: Bytes,
    role: str,
    buffers: SimpleQueue[Bytes],
) -> Coded:
    """Code one chunk by the first codec that pays, or keep it raw, and give its buffer back."""
    coded = Coded(Raw.name, b"", chunk.size, 0, (), role, buffer is not chunk)
    for choice, refs in tries:
        data = choice.read(refs, read_ref)
        if len(data) == 1 and np.array_equal(data[0], chunk):
            coded = coded._replace(codec=Same.name, refs=refs)
            break
        payload = choice.codec.encode(chunk, data, start)
        if payload is not None and len(payload) < chunk.size:
            coded = coded._replace(codec=choice.text, payload=payload, refs=refs)
            break
    else:
        coded = coded._replace(payload=chunk.tobytes())
    buffers.put(buffer)
    return coded._replace(checksum=xxhash.xxh3_64_intdigest(coded.payload))


class _Repeats:
    """Finds chunks whose bytes came before, in spans that do not lean on theirs."""

    def __init__(self, files: FileSet, plan: Plan) -> None:
        self._files = files
        # By every 61st byte, which few chunks share that differ; these by all of theirs.
        self._seen: dict[bytes, tuple[Slicer, int, Ref]] = {}
        self._alike: dict[bytes, tuple[Slicer, int, Ref]] = {}
        self._spare = np.empty(CHUNK, np.uint8)
        # Span -> the spans of this checkpoint that it may lean on.
        self._leans: dict[int, set[int]] = {}
        for stream, candidates in zip(plan.streams, plan.candidates, strict=True):
            refs = (ref for c in candidates for ref in (*c.source, *c.inputs) if not ref.where)
            if spans := {ref.span for ref in refs}:
                self._leans.update((part.span, set(spans)) for part in stream.parts)

    def find(self, chunk: Bytes, slicer: Slicer, start: int, place: Ref) -> Ref | None:
        """Give where a chunk stood before, or note where it stands now."""
        here = slicer, start, place
        first = self._seen.setdefault(xxhash.xxh3_128_digest(chunk[::_SPARSE].tobytes()), here)
        if first is here:
            return None
        if not self._holds(first, chunk):
            first = self._alike.setdefault(xxhash.xxh3_128_digest(chunk.data), here)
            if first is here or not self._holds(first, chunk):
                return None
        if first[2].span != place.span:
            if self._reaches(first[2].span, place.span):
                return None
            self._leans.setdefault(place.span, set()).add(first[2].span)
        return first[2]

    def _holds(self, place: tuple[Slicer, int, Ref], chunk: Bytes) -> bool:
        """Compare bytes: xxh3 is no proof against someone who wants a collision."""
        slicer, start, ref = place
        if ref.nbytes != chunk.size:
            return False
        spare = self._spare[: chunk.size]
        self._files.read(slicer.extents_in(start, start + chunk.size), spare)
        return np.array_equal(spare, chunk)

    def _reaches(self, start: int, goal: int) -> bool:
        """Tell whether a span leans on another, however many lie between them."""
        seen, waiting = {start}, [start]
        while waiting:
            for span in self._leans.get(waiting.pop(), ()):
                if span == goal:
                    return True
                if span not in seen:
                    seen.add(span)
                    waiting.append(span)
        return False
