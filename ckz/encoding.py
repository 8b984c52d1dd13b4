"""From a checkpoint's bytes to coded chunks, in stream order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckz import codecs
from ckz.checkpoint import Checkpoint, Span
from ckz.codecs.raw import Raw
from ckz.codecs.same import Same
from ckz.container import Ref
from ckz.errors import CorruptError
from ckz.files import FileSet
from ckz.hashing import SpanHasher
from ckz.plan import Plan
from ckz.streams import CHUNK, Slicer
from ckz.workers import Workers, chunk_buffers, in_order

Bytes = npt.NDArray[np.uint8]

# Below this a repeat costs more to describe than to store.
_MIN_REPEAT = 1024


class Coded(NamedTuple):
    """One coded chunk.

    Attributes
    ----------
    codec : its text; what was tried and did not pay is ``raw``.
    raw : bytes it decodes to.
    checksum : xxh3-64 of the payload.
    role : of the tensors in it, or ``skeleton``.
    """

    codec: str
    payload: bytes
    raw: int
    checksum: int
    refs: tuple[Ref, ...]
    role: str


def encode(
    checkpoint: Checkpoint,
    plan: Plan,
    workers: Workers,
    digests: list[bytes],
    *,
    accept_bad_crc: bool,
) -> Iterator[Coded]:
    """Read, hash and code all streams of a plan; chunks come in order.

    Parameters
    ----------
    digests : filled with the xxh3-128 of each file's skeleton, then of each span.
    accept_bad_crc : go on where a zip's checksum does not fit its data.

    Raises
    ------
    CorruptError
        On such a checksum.
    ChangedError
        If a file becomes shorter.
    """
    paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
    nparts = len(checkpoint.files) + len(checkpoint.spans)
    digests[:] = [xxhash.xxh3_128_digest(b"")] * nparts
    with FileSet(paths, os.O_RDONLY) as files:
        buffers = chunk_buffers(workers)
        jobs = _jobs(checkpoint, plan, files, buffers, digests, accept_bad_crc)
        yield from in_order(workers, jobs)


def _jobs(
    checkpoint: Checkpoint,
    plan: Plan,
    files: FileSet,
    buffers: SimpleQueue[Bytes],
    digests: list[bytes],
    accept_bad_crc: bool,
) -> Iterator[Callable[[], Coded]]:
    """Read chunk after chunk, hash it, and give the job that codes it."""
    nfiles = len(checkpoint.files)
    hasher = SpanHasher(digests)
    repeats = _Repeats(files)
    for stream, text in zip(plan.streams, plan.codecs, strict=True):
        slicer = Slicer(stream.parts)
        codec = codecs.parse(text)
        role = "skeleton" if stream.parts[0].span < nfiles else stream.role
        for start in range(0, stream.nbytes, CHUNK):
            stop = min(start + CHUNK, stream.nbytes)
            buffer = buffers.get()
            chunk = buffer[: stop - start]
            files.read(slicer.extents_in(start, stop), chunk)
            covered = list(slicer.parts_in(start, stop))
            at = 0
            for part, first, last in covered:
                span = part.span - nfiles
                crc32 = -1 if span < 0 else _stated_crc32(checkpoint.spans[span])
                data = chunk[at : at + last - first]
                at += data.size
                holds = hasher.update(part.span, part.nbytes, last, data, crc32)
                if not holds and not accept_bad_crc:
                    raise _bad_crc(checkpoint, span)
            earlier = None
            if len(covered) == 1 and chunk.size >= _MIN_REPEAT:
                place = Ref(covered[0][0].span, covered[0][1], chunk.size)
                earlier = repeats.find(chunk, slicer, start, place)
            if earlier:
                buffers.put(buffer)
                yield partial(_same, chunk.size, earlier, role)
            else:
                yield partial(_encode_chunk, text, codec, buffer, chunk, role, buffers)


def _same(raw: int, ref: Ref, role: str) -> Coded:
    return Coded(Same.name, b"", raw, xxhash.xxh3_64_intdigest(b""), (ref,), role)


def _encode_chunk(
    text: str,
    codec: codecs.Codec,
    buffer: Bytes,
    chunk: Bytes,
    role: str,
    buffers: SimpleQueue[Bytes],
) -> Coded:
    """Code one chunk, or keep it raw, and give its buffer back."""
    payload = codec.encode(chunk)
    if payload is None or len(payload) >= chunk.size:
        text, payload = Raw.name, Raw().encode(chunk)
    raw = chunk.size
    buffers.put(buffer)
    return Coded(text, payload, raw, xxhash.xxh3_64_intdigest(payload), (), role)


class _Repeats:
    """Finds chunks whose bytes came before."""

    def __init__(self, files: FileSet) -> None:
        self._files = files
        self._seen: dict[bytes, tuple[Slicer, int, Ref]] = {}
        self._spare = np.empty(CHUNK, np.uint8)

    def find(self, chunk: Bytes, slicer: Slicer, start: int, place: Ref) -> Ref | None:
        """Give where a chunk stood before, or note where it stands now."""
        first = self._seen.setdefault(xxhash.xxh3_128_digest(chunk.data), (slicer, start, place))
        if first[2] is place or first[2].nbytes != chunk.size:
            return None
        # Bytes are compared: xxh3 is no proof against someone who wants a collision.
        spare = self._spare[: chunk.size]
        self._files.read(first[0].extents_in(first[1], first[1] + chunk.size), spare)
        return first[2] if np.array_equal(spare, chunk) else None


def _stated_crc32(span: Span) -> int:
    """What the file says about the stored bytes; of what it packed itself it tells the plain CRC."""
    return -1 if span.packed else span.crc32


def _bad_crc(checkpoint: Checkpoint, span: int) -> CorruptError:
    names = [t.name for t in checkpoint.tensors if any(p.span == span for p in t.pieces)]
    what = f"tensor {names[0]!r}" if names else f"storage {span}"
    return CorruptError(
        f"{checkpoint.path_of(checkpoint.spans[span].file)}: {what}: CRC mismatch, the file is "
        "damaged or was written without checksums; --accept-bad-crc stores it as it is"
    )
