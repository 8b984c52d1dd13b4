"""The .ckz container, version 1: this docstring is its specification.

A .ckz is an HDF5 file with a 512-byte user block. All integers are little-endian.

**User block.** It is checked before the HDF5 library sees the file.

======  =====  ==============================================================================
offset  bytes  content
======  =====  ==============================================================================
0       8      magic, ``89 43 4b 5a 0d 0a 1a 0a``
8       4      format version, 1; a reader MUST refuse a version it does not know
12      4      number of payload datasets
16      8      length of the file
24      8      file offset of dataset ``/extents``
32      16     xxh3-128 of every byte after the user block that is no payload, in order
48      456    zero
504     8      xxh3-64 of the 504 bytes before it
======  =====  ==============================================================================

**Datasets**, all contiguous uint8 without filters.

- ``/payload/000000``...: the stored bytes of the chunks, one after the other. A dataset holds whole
  chunks, about 16 MiB of them.
- ``/extents``: for each payload dataset its file offset and length, two uint64.
- ``/meta``: JSON. ``ckz`` (version that wrote it), ``format`` (of the source), ``directory``
  (bool), ``codecs`` (list of codec texts), ``dtypes``, ``packed`` (lists of names that the
  tables count into), ``sha256`` (path -> hex, may be empty), ``warnings``, ``level``, ``chunk``
  (its bytes), ``base`` (null, or the base's ``name``, ``depth``: how many bases stand behind this
  file, ``chain_nbytes`` and ``full_nbytes``: stored bytes of those that lean on others, and of the
  last), ``numbers`` (path -> optimizer hyperparameter), ``preset``, ``methods`` (list of what
  was done to tensors that are not exact), ``resumable`` (bool: whether training can go on),
  ``step`` (that the checkpoint is of, or null), ``partial`` (what the next partial snapshot has to
  know; empty of a whole one),
  ``mode``, ``mtime_ns`` (of a directory).
- ``/index``: one zstd frame of the tables, end to end: for each table its number of rows, uint64;
  then each table's rows, transposed: the first byte of every row, the second...; then the names.
  (One dataset for all of them, because HDF5 takes 350 bytes for each.)

**Tables**, in this order: ``files spans streams chunks refs tensors pieces base_spans losses
carried``, see the dtypes in this module; ``dims``, int64: for each tensor its shape, and for each
of its pieces that is not the whole tensor in row-major order shape, strides, start;
``name_lengths``, uint32. Names are in UTF-8 (surrogates pass): file paths, link targets, tensor
names, names of base spans, in table order.

**Meaning.** A file is tiled by its spans (sorted by offset) and its *skeleton*, what they leave
over. The first rows of ``spans`` are the skeletons of the files, one a file, with offset 0. The
last ones may belong to no file (``file`` 2**32 - 1): they are *models*, numbers that chunks of a
tensor share, such as its row and column means. Spans lie in streams: span s is bytes ``at`` to
``at + nbytes`` of its stream, and the spans of a stream tile it. A stream is cut into chunks of
``chunk`` bytes, the last one shorter. Chunks stand in stream order; the stored bytes of all chunks,
in order, are the payload datasets laid end to end.
A chunk's references (``refs`` of the chunk row, 1024 at most; in order in ``refs``) name byte
ranges, each of at most four chunks' length, of spans of this file (``where`` 0) or of
``base_spans`` (``where`` 1). References inside the file are acyclic, at most eight deep: a 16-bit
weight leans on its master, that on its second moment, that on the first, that on the means of its
rows; and each of them may be a repeat.

``losses`` name the spans whose values are not those of the source, with the method, the largest
absolute error and the root of the summed squares of the errors over those of the values. All
digests are of what is restored. ``carried`` are the ranges of spans that a partial snapshot did not
save anew: how many snapshots ago they were saved, and at which step (-1: not known).

**Checksums.** xxh3-64 of the stored bytes of each chunk; xxh3-128 of the original bytes of each
span; of a file, xxh3-128 of its skeleton's digest and its spans' digests in order. With the user
block's two checksums, every bit of the file is covered.

Readers MUST check that all counts, ranges and sums agree before they allocate or decode, and MUST
refuse tables that unpack to more than 32 MiB + 32 times the file's length.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckz import codecs
from ckz.checkpoint import (
    CKZ_MAGIC,
    ROLES,
    Checkpoint,
    File,
    Piece,
    Span,
    Tensor,
    contiguous_strides,
)
from ckz.errors import CorruptError
from ckz.retrying import retried
from ckz.streams import CHUNK, Part, parts_of

MAGIC = CKZ_MAGIC
VERSION = 1
USER_BLOCK = 512
NO_FILE = (1 << 32) - 1
MAX_REFS = 1024
MAX_DEPTH = 8
MAX_REF = 4 * CHUNK
HEAD = struct.Struct("<8sIIQQ16s")
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"

Rows = npt.NDArray[Any]

FILES = np.dtype(
    [("size", "<u8"), ("mode", "<u4"), ("mtime_ns", "<i8"), ("kind", "u1"), ("digest", "V16")]
)
SPANS = np.dtype(
    [
        ("file", "<u4"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("stream", "<u4"),
        ("at", "<u8"),
        ("dtype", "u1"),
        ("byteorder", "u1"),  # 0 little, 1 big
        ("packed", "<u2"),
        ("digest", "V16"),
    ]
)
STREAMS = np.dtype([("nbytes", "<u8"), ("chunks", "<u4"), ("role", "u1")])
CHUNKS = np.dtype(
    [("stored", "<u4"), ("raw", "<u4"), ("codec", "<u2"), ("refs", "<u2"), ("checksum", "<u8")]
)
REFS = np.dtype([("where", "u1"), ("span", "<u4"), ("start", "<u8"), ("nbytes", "<u4")])
TENSORS = np.dtype(
    [("dtype", "u1"), ("role", "u1"), ("transform", "u1"), ("ndim", "u1"), ("pieces", "<u4")]
)
BASE_SPANS = np.dtype([("nbytes", "<u8"), ("digest", "V16")])
LOSSES = np.dtype([("span", "<u4"), ("method", "u1"), ("largest", "<f8"), ("relative", "<f8")])
CARRIED = np.dtype(
    [("span", "<u4"), ("start", "<u8"), ("nbytes", "<u8"), ("age", "<u4"), ("step", "<i8")]
)
PIECES = np.dtype([("span", "<u4"), ("offset", "<u8"), ("explicit", "u1")])

KINDS = ("file", "dir", "link")
TRANSFORMS = ("", "conj", "neg")
TABLES = {
    "files": FILES,
    "spans": SPANS,
    "streams": STREAMS,
    "chunks": CHUNKS,
    "refs": REFS,
    "tensors": TENSORS,
    "pieces": PIECES,
    "base_spans": BASE_SPANS,
    "losses": LOSSES,
    "carried": CARRIED,
    "dims": np.dtype("<i8"),
    "name_lengths": np.dtype("<u4"),
}


@dataclass(frozen=True)
class Ref:
    """A byte range that a chunk leans on: of a span of this file, or of the base."""

    span: int
    start: int
    nbytes: int
    where: int = 0


class Loss(NamedTuple):
    """A span that is not restored exactly.

    Attributes
    ----------
    span : of the checkpoint.
    method : in words.
    largest : absolute error.
    relative : root of the summed squares of the errors over those of the values.
    """

    span: int
    method: str
    largest: float
    relative: float


class Carried(NamedTuple):
    """A range of a span that is as it was in an earlier snapshot.

    Attributes
    ----------
    span : of the checkpoint.
    age : how many snapshots ago it was saved.
    step : at which it was saved, or None.
    """

    span: int
    start: int
    nbytes: int
    age: int
    step: int | None


@dataclass(frozen=True)
class Container:
    """An opened and checked .ckz.

    Attributes
    ----------
    path : where it lies.
    fd : open for reading; closed by whoever opened the container.
    meta : the JSON document.
    files, spans, streams, chunks, refs, base_spans, loss_rows, carried_rows :
        tables.
    places : file offset of each chunk's stored bytes.
    """

    path: Path
    fd: int
    nbytes: int
    meta: dict[str, Any]
    files: Rows
    spans: Rows
    streams: Rows
    chunks: Rows
    refs: Rows
    base_spans: Rows
    loss_rows: Rows
    carried_rows: Rows
    places: npt.NDArray[np.int64]
    names: tuple[str, ...]
    tensor_rows: Rows
    piece_rows: Rows
    dims: npt.NDArray[np.int64]

    @cached_property
    def codecs(self) -> list[codecs.Codec]:
        """The codecs that chunk rows count into."""
        return [codecs.parse(text) for text in self.meta["codecs"]]

    @cached_property
    def first_chunks(self) -> npt.NDArray[np.int64]:
        """Index of each stream's first chunk, and the number of chunks."""
        return np.concatenate([[0], np.cumsum(self.streams["chunks"], dtype=np.int64)])

    @cached_property
    def first_refs(self) -> npt.NDArray[np.int64]:
        """Index of each chunk's first reference, and the number of references."""
        return np.concatenate([[0], np.cumsum(self.chunks["refs"], dtype=np.int64)])

    @cached_property
    def models(self) -> int:
        """Index of the first span that is a model; the number of spans if there are none."""
        return int(np.count_nonzero(self.spans["file"] != NO_FILE))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint as its reader saw it; ``root`` is the container."""
        return _unpack_checkpoint(self)

    @property
    def losses(self) -> list[Loss]:
        """What is not restored exactly."""
        nfiles, methods = len(self.files), self.meta["methods"]
        return [
            Loss(span - nfiles, methods[method], largest, relative)
            for span, method, largest, relative in self.loss_rows.tolist()
        ]

    @property
    def carried(self) -> list[Carried]:
        """What was not saved anew."""
        nfiles = len(self.files)
        return [
            Carried(span - nfiles, start, nbytes, age, None if step < 0 else step)
            for span, start, nbytes, age, step in self.carried_rows.tolist()
        ]

    @property
    def base_names(self) -> tuple[str, ...]:
        """The tensors that the base spans hold."""
        return self.names[len(self.names) - len(self.base_spans) :]

    def refs_of(self, chunk: int) -> list[Ref]:
        """Give the references of a chunk."""
        rows = self.refs[self.first_refs[chunk] : self.first_refs[chunk + 1]]
        return [Ref(span, start, nbytes, where) for where, span, start, nbytes in rows.tolist()]

    def payload(self, chunk: int) -> memoryview:
        """Read the stored bytes of a chunk and check them.

        Raises
        ------
        CorruptError
            If they do not have the recorded checksum.
        """
        row = self.chunks[chunk]
        data = bytearray(int(row["stored"]))
        at = int(self.places[chunk])
        got = retried(partial(os.preadv, self.fd, [data], at)) if data else 0
        if got != len(data) or xxhash.xxh3_64_intdigest(data) != int(row["checksum"]):
            raise CorruptError(f"{self.path}: {self.describe(chunk)}: checksum mismatch")
        return memoryview(data)

    def describe(self, chunk: int) -> str:
        """Name the tensor and chunk for an error message."""
        stream = int(np.searchsorted(self.first_chunks, chunk, side="right")) - 1
        at = (chunk - int(self.first_chunks[stream])) * int(self.meta["chunk"])
        covering = (
            (self.spans["stream"] == stream)
            & (self.spans["at"] <= at)
            & (self.spans["at"] + self.spans["nbytes"] > at)
        )
        span = int(np.flatnonzero(covering)[0])
        inside = (at - int(self.spans["at"][span])) // int(self.meta["chunk"])
        return f"{self.describe_span(span)} chunk {inside}"

    def describe_span(self, span: int) -> str:
        """Name what a span holds: a tensor, or a part of a file."""
        checkpoint = self.checkpoint
        nfiles = len(checkpoint.files)
        if span >= self.models:
            return f"model {span - self.models}"
        if span >= nfiles:
            for tensor in checkpoint.tensors:
                if any(piece.span == span - nfiles for piece in tensor.pieces):
                    return f"tensor {tensor.name!r}"
        return f"file {checkpoint.files[int(self.spans['file'][span])].path!r}"


def file_digest(span_digests: Sequence[bytes]) -> bytes:
    """Digest of a file from its skeleton's digest and its spans' digests in order."""
    return xxhash.xxh3_128_digest(b"".join(span_digests))


def digest_outside(fd: int, length: int, extents: Sequence[tuple[int, int]]) -> bytes:
    """Digest of what follows the user block and is no payload."""
    digest = xxhash.xxh3_128()
    at = USER_BLOCK
    for start, nbytes in [*extents, (length, 0)]:
        while at < start:
            data = retried(partial(os.pread, fd, min(start - at, 1 << 20), at))
            if not data:
                raise CorruptError("the file ends early")
            digest.update(data)
            at += len(data)
        at = start + nbytes
    return digest.digest()


def _unpack_checkpoint(container: Container) -> Checkpoint:
    meta, names = container.meta, container.names
    nfiles = len(container.files)
    files = tuple(
        File(names[i], size, mode, mtime, KINDS[kind], names[nfiles + i])
        for i, (size, mode, mtime, kind, _) in enumerate(container.files.tolist())
    )
    dtypes, packed = meta["dtypes"], meta["packed"]
    rows = container.spans[nfiles : container.models]
    spans = tuple(
        Span(file, offset, nbytes, dtypes[dtype], "<>"[order], packed[pack])
        for file, offset, nbytes, _, _, dtype, order, pack, _ in rows.tolist()
    )
    dims = container.dims.tolist()
    pieces = container.piece_rows.tolist()
    at = next_piece = 0
    tensors = []
    for number, (dtype, role, transform, ndim, count) in enumerate(container.tensor_rows.tolist()):
        shape = tuple(dims[at : at + ndim])
        at += ndim
        found = []
        for span, offset, explicit in pieces[next_piece : next_piece + count]:
            box = [shape, contiguous_strides(shape), (0,) * ndim]
            if explicit:
                box = [tuple(dims[at + k * ndim : at + (k + 1) * ndim]) for k in range(3)]
                at += 3 * ndim
            found.append(Piece(span - nfiles, offset, *box))
        next_piece += count
        name = names[2 * nfiles + number]
        tensors.append(
            Tensor(name, dtypes[dtype], shape, tuple(found), ROLES[role], TRANSFORMS[transform])
        )
    if at != len(dims) or next_piece != len(pieces):
        raise CorruptError(f"{container.path}: the tensor tables do not agree")
    return Checkpoint(
        container.path,
        meta["format"],
        files,
        spans,
        tuple(tensors),
        tuple(meta["warnings"]),
        numbers=meta["numbers"],
        is_directory=meta["directory"],
        mode=meta["mode"],
        mtime_ns=meta["mtime_ns"],
    )


def streams_of(container: Container) -> list[tuple[Part, ...]]:
    """Give the parts of each stream, laid out again from the span table."""
    checkpoint = container.checkpoint
    parts = parts_of(checkpoint)
    for span, nbytes in enumerate(container.spans["nbytes"][container.models :].tolist()):
        parts.append(Part(container.models + span, (), nbytes))
    streams: list[list[tuple[int, int]]] = [[] for _ in container.streams]
    columns = zip(
        container.spans["stream"].tolist(),
        container.spans["at"].tolist(),
        container.spans["nbytes"].tolist(),
        strict=True,
    )
    for span, (stream, at, nbytes) in enumerate(columns):
        if nbytes:
            streams[stream].append((at, span))
    return [tuple(parts[span] for _, span in sorted(stream)) for stream in streams]
