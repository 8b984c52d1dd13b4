"""What can be checked of a source: the checksums of its own format, and that nothing changes it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import partial

from ckz.checkpoint import Checkpoint, Span, Sum
from ckz.errors import ChangedError, CorruptError
from ckz.source import open_source
from ckz.streams import CHUNK
from ckz.workers import Workers, in_order

_FAULT = (
    "CRC mismatch, the file is damaged or was written without checksums; "
    "--accept-bad-crc stores it as it is"
)


def stated_crc32(span: Span) -> int:
    """Give the CRC-32 of a span's stored bytes; -1 if the file states none of them."""
    return -1 if span.packed else span.crc32


def bad_crc(checkpoint: Checkpoint, span: int) -> CorruptError:
    """Say which tensor does not have the checksum its file states."""
    names = [t.name for t in checkpoint.tensors if any(p.span == span for p in t.pieces)]
    what = f"tensor {names[0]!r}" if names else f"storage {span}"
    return CorruptError(f"{checkpoint.path_of(checkpoint.spans[span].file)}: {what}: {_FAULT}")


def check_crcs(checkpoint: Checkpoint, workers: Workers) -> Iterator[int]:
    """Read every span or range that its file states a checksum of, and check it.

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
    check_sums(checkpoint, workers)


def check_sums(checkpoint: Checkpoint, workers: Workers) -> None:
    """Check the ranges that were cut into several spans, whose own checksums nobody knows.

    Raises
    ------
    CorruptError
        Naming the file.
    """
    jobs = (partial(_check_sum, checkpoint, expected) for expected in checkpoint.sums)
    for _ in in_order(workers, jobs):
        pass


def _check_sum(checkpoint: Checkpoint, expected: Sum) -> None:
    if _crc32(checkpoint, expected.file, expected.offset, expected.nbytes) != expected.crc32:
        raise CorruptError(
            f"{checkpoint.path_of(expected.file)}: storage at byte {expected.offset}: {_FAULT}"
        )


def _crc32(checkpoint: Checkpoint, file: int, offset: int, nbytes: int) -> int:
    found = 0
    with open_source(checkpoint.path_of(file)) as source:
        for at in range(0, nbytes, CHUNK):
            found = zlib.crc32(source.read(offset + at, min(CHUNK, nbytes - at)), found)
    return found


def _check_span(checkpoint: Checkpoint, number: int) -> int:
    span = checkpoint.spans[number]
    expected = stated_crc32(span)
    if expected >= 0 and _crc32(checkpoint, span.file, span.offset, span.nbytes) != expected:
        raise bad_crc(checkpoint, number)
    return span.nbytes


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Check that the files of a source are as they were when it was looked at.

    Raises
    ------
    ChangedError
        If the size or the time of one is another, or one holds more than its size: some files
        that a kernel makes have none.
    """
    for index, file in enumerate(checkpoint.files):
        if file.kind == "file":
            stat = checkpoint.path_of(index).stat()
            if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
                raise ChangedError(
                    f"{checkpoint.path_of(index)}: changed while it was read; try again when "
                    "nothing writes to it"
                )
            with checkpoint.path_of(index).open("rb") as opened:
                opened.seek(file.size)
                if opened.read(1):
                    raise ChangedError(
                        f"{checkpoint.path_of(index)}: holds more than its {file.size} bytes; "
                        "copy it to a file first"
                    )
