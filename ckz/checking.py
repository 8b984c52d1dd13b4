"""What can be checked of a source: the checksums that its own format keeps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

from ckz.checkpoint import Checkpoint, Span
from ckz.errors import CorruptError
from ckz.source import open_source
from ckz.streams import CHUNK
from ckz.workers import Workers, in_order


def stated_crc32(span: Span) -> int:
    """Give the CRC-32 of a span's stored bytes; -1 if the file states none of them."""
    return -1 if span.packed else span.crc32


def bad_crc(checkpoint: Checkpoint, span: int) -> CorruptError:
    """Say which tensor does not have the checksum its file states."""
    names = [t.name for t in checkpoint.tensors if any(p.span == span for p in t.pieces)]
    what = f"tensor {names[0]!r}" if names else f"storage {span}"
    return CorruptError(
        f"{checkpoint.path_of(checkpoint.spans[span].file)}: {what}: CRC mismatch, the file is "
        "damaged or was written without checksums; --accept-bad-crc stores it as it is"
    )


def check_crcs(checkpoint: Checkpoint, workers: Workers) -> Iterator[int]:
    """Read every span that its file states a checksum of, and check it.

    Yields
    ------
    Bytes of each span that is done.

    Raises
    ------
    CorruptError
        Naming the tensor.
    """
    jobs = (partial(_check_span, checkpoint, span) for span in range(len(checkpoint.spans)))
    yield from in_order(workers, jobs)


def _check_span(checkpoint: Checkpoint, number: int) -> int:
    span = checkpoint.spans[number]
    expected = stated_crc32(span)
    if expected >= 0:
        found = 0
        with open_source(checkpoint.path_of(span.file)) as source:
            for at in range(0, span.nbytes, CHUNK):
                data = source.read(span.offset + at, min(CHUNK, span.nbytes - at))
                found = zlib.crc32(data, found)
        if found != expected:
            raise bad_crc(checkpoint, number)
    return span.nbytes
