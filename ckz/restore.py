"""Decoding: single chunks and spans, and everything at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock

import numpy as np
import numpy.typing as npt
import xxhash

from ckz.container import Container, file_digest, streams_of
from ckz.errors import BaseError, CorruptError
from ckz.files import FileSet
from ckz.hashing import SpanHasher
from ckz.streams import CHUNK, Slicer
from ckz.workers import Workers, chunk_buffers, in_order

Bytes = npt.NDArray[np.uint8]


# Fills an array with bytes of a base span, by its row in the container's table, from an offset.
ReadBase = Callable[[int, int, Bytes], None]

# Decoded chunks that are kept: what the chunks in flight lean on, and their neighbours.
_KEPT = 6


class Decoder:
    """Decodes chunks of one container, with whatever they lean on.

    Parameters
    ----------
    read_base : reads what the container's base holds; None where it has none.
    """

    def __init__(self, container: Container, read_base: ReadBase | None = None) -> None:
        self.container = container
        self._read_base = read_base
        self._kept: OrderedDict[int, Bytes] = OrderedDict()
        self._lock = Lock()

    def decode(self, chunk: int, out: Bytes) -> None:
        """Decode one chunk into ``out``, which has its raw size.

        Raises
        ------
        CorruptError
            Naming the file, tensor and chunk.
        BaseError
            If the base does not hold what the chunk leans on.
        """
        container = self.container
        payload = container.payload(chunk)
        refs = []
        for ref in container.refs_of(chunk):
            data = np.empty(ref.nbytes, np.uint8)
            if ref.where == 0:
                self.read_span(ref.span, ref.start, data)
            elif self._read_base is None:
                raise BaseError(f"{container.path}: its base is not open")
            else:
                self._read_base(ref.span, ref.start, data)
            refs.append(data)
        codec = container.codecs[int(container.chunks["codec"][chunk])]
        try:
            codec.decode(payload, refs, out)
        except CorruptError as err:
            raise CorruptError(f"{container.path}: {container.describe(chunk)}: {err}") from err

    def read_span(self, span: int, start: int, out: Bytes) -> None:
        """Read ``out.size`` original bytes of a span from byte ``start``."""
        row = self.container.spans[span]
        first = int(self.container.first_chunks[int(row["stream"])]) if out.size else 0
        at, end = int(row["at"]) + start, int(row["at"]) + start + out.size
        done = 0
        while at < end:
            chunk = self._kept_chunk(first + at // CHUNK)
            begin = at % CHUNK
            take = min(chunk.size - begin, end - at)
            out[done : done + take] = chunk[begin : begin + take]
            done += take
            at += take

    def _kept_chunk(self, chunk: int) -> Bytes:
        with self._lock:
            if chunk in self._kept:
                self._kept.move_to_end(chunk)
                return self._kept[chunk]
        data = np.empty(int(self.container.chunks["raw"][chunk]), np.uint8)
        self.decode(chunk, data)
        with self._lock:
            self._kept[chunk] = data
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return data


def decode_all(
    decoder: Decoder, workers: Workers, files: FileSet | None = None
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
    container = decoder.container
    buffers = chunk_buffers(workers)
    digests = [xxhash.xxh3_128_digest(b"")] * len(container.spans)
    hasher = SpanHasher(digests)
    raws = container.chunks["raw"].tolist()
    jobs = (
        partial(_decode_into, decoder, chunk, buffers.get(), raw) for chunk, raw in enumerate(raws)
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


def _decode_into(decoder: Decoder, chunk: int, buffer: Bytes, raw: int) -> Bytes:
    decoder.decode(chunk, buffer[:raw])
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
