"""Decoding chunks of a container, with whatever they lean on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from ckz.container import Container, file_digest, streams_of
from ckz.errors import CorruptError
from ckz.files import FileSet
from ckz.hashing import SpanHasher
from ckz.streams import CHUNK, Slicer
from ckz.workers import Workers, chunk_buffers, in_order

Bytes = npt.NDArray[np.uint8]


def decode_chunk(container: Container, chunk: int, out: Bytes) -> None:
    """Decode one chunk into ``out``, which has its raw size.

    Raises
    ------
    CorruptError
        Naming the file, tensor and chunk.
    """
    payload = container.payload(chunk)
    refs = []
    for ref in container.refs_of(chunk):
        data = np.empty(ref.nbytes, np.uint8)
        read_span(container, ref.span, ref.start, data)
        refs.append(data)
    codec = container.codecs[int(container.chunks["codec"][chunk])]
    try:
        codec.decode(payload, refs, out)
    except CorruptError as err:
        raise CorruptError(f"{container.path}: {container.describe(chunk)}: {err}") from err


def read_span(container: Container, span: int, start: int, out: Bytes) -> None:
    """Read ``out.size`` original bytes of a span from byte ``start``."""
    row = container.spans[span]
    first = int(container.first_chunks[int(row["stream"])]) if out.size else 0
    at, end = int(row["at"]) + start, int(row["at"]) + start + out.size
    done = 0
    while at < end:
        chunk = first + at // CHUNK
        begin = at % CHUNK
        size = int(container.chunks["raw"][chunk])
        take = min(size - begin, end - at)
        if take == size:
            decode_chunk(container, chunk, out[done : done + take])
        else:
            whole = np.empty(size, np.uint8)
            decode_chunk(container, chunk, whole)
            out[done : done + take] = whole[begin : begin + take]
        done += take
        at += take


def decode_all(
    container: Container, workers: Workers, files: FileSet | None = None
) -> Iterator[tuple[int, int]]:
    """Decode everything, check every digest, and write it where ``files`` are given.

    Yields
    ------
    raw, stored : bytes of each chunk done.

    Raises
    ------
    CorruptError
        Naming the first chunk, tensor or file that does not hold.
    """
    buffers = chunk_buffers(workers)
    digests = [xxhash.xxh3_128_digest(b"")] * len(container.spans)
    hasher = SpanHasher(digests)
    raws = container.chunks["raw"].tolist()
    jobs = (
        partial(_decode_into, container, chunk, buffers.get(), raw)
        for chunk, raw in enumerate(raws)
    )
    results = enumerate(in_order(workers, jobs))
    for parts in streams_of(container):
        slicer = Slicer(parts)
        for start in range(0, sum(part.nbytes for part in parts), CHUNK):
            chunk, buffer = next(results)
            data = buffer[: raws[chunk]]
            at = 0
            for part, first, last in slicer.parts_in(start, start + data.size):
                hasher.update(part.span, part.nbytes, last, data[at : at + last - first])
                at += last - first
                if last == part.nbytes:
                    _check_span(container, part.span, digests[part.span])
            if files is not None:
                files.write(slicer.extents_in(start, start + data.size), data)
            buffers.put(buffer)
            yield data.size, int(container.chunks["stored"][chunk])
    _check_files(container, digests)


def _decode_into(container: Container, chunk: int, buffer: Bytes, raw: int) -> Bytes:
    decode_chunk(container, chunk, buffer[:raw])
    return buffer


def _check_span(container: Container, span: int, digest: bytes) -> None:
    if digest != container.spans["digest"][span].tobytes():
        raise CorruptError(
            f"{container.path}: {container.describe_span(span)}: the restored bytes do not have "
            "the recorded digest"
        )


def _check_files(container: Container, digests: list[bytes]) -> None:
    by_file: list[list[bytes]] = [[] for _ in container.files]
    for span, file in enumerate(container.spans["file"][: container.models].tolist()):
        by_file[file].append(digests[span])
    for index, found in enumerate(by_file):
        if file_digest(found) != container.files["digest"][index].tobytes():
            name = container.checkpoint.files[index].path
            raise CorruptError(f"{container.path}: file {name!r}: digest mismatch")
