"""Writing a .ckz, as ``container`` specifies it."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from ckz import __version__
from ckz.checkpoint import ROLES, Checkpoint, contiguous_strides
from ckz.container import (
    BASE_SPANS,
    CARRIED,
    CHUNKS,
    FILES,
    HEAD,
    KINDS,
    LOSSES,
    MAGIC,
    NO_FILE,
    PIECES,
    REFS,
    SPANS,
    STREAMS,
    TABLES,
    TENSORS,
    TRANSFORMS,
    USER_BLOCK,
    VERSION,
    Carried,
    Loss,
    Ref,
    Rows,
    digest_outside,
    file_digest,
)
from ckz.errors import UnsupportedError
from ckz.files import write_at
from ckz.streams import CHUNK, Stream

_PAYLOAD_TARGET = 16 << 20
_INDEX_LEVEL = 9


class Writer:
    """Writes a container to an open, empty file; chunks first, then ``finish``."""

    def __init__(self, path: Path) -> None:
        import h5py

        self._path = path
        # Times are not recorded and no lock is taken: equal input gives equal bytes, on NFS too.
        # Without blocks for metadata, of which a small file would fill a part.
        self._h5 = h5py.File(
            path, "w", userblock_size=USER_BLOCK, libver="v108", locking=False, meta_block_size=0
        )
        self._payload = self._h5.create_group("payload")
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._pending: list[bytes] = []
        self._pending_nbytes = 0
        self._extents: list[tuple[int, int]] = []
        self._chunks: list[tuple[int, int, int, int, int]] = []
        self._refs: list[tuple[int, int, int, int]] = []
        self._codecs: dict[str, int] = {}
        self.stored_nbytes = 0

    def add_chunk(
        self, codec: str, payload: bytes, raw: int, checksum: int, refs: Sequence[Ref] = ()
    ) -> None:
        """Append one chunk; ``checksum`` is the xxh3-64 of the payload."""
        number = self._codecs.setdefault(codec, len(self._codecs))
        self._chunks.append((len(payload), raw, number, len(refs), checksum))
        self._refs.extend((ref.where, ref.span, ref.start, ref.nbytes) for ref in refs)
        self.stored_nbytes += len(payload)
        if payload:
            self._pending.append(payload)
            self._pending_nbytes += len(payload)
        if self._pending_nbytes >= _PAYLOAD_TARGET:
            self._flush()

    def _dataset(self, name: str, data: Sequence[bytes]) -> tuple[int, int]:
        """Allocate a dataset and write it past the HDF5 library, which would copy it."""
        import h5py

        nbytes = sum(map(len, data))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.CONTIGUOUS)
        plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        plist.set_obj_track_times(False)
        space = h5py.h5s.create_simple((nbytes,))
        dset = h5py.h5d.create(self._h5.id, name.encode(), h5py.h5t.STD_U8LE, space, dcpl=plist)
        offset = dset.get_offset() if nbytes else 0
        at = offset
        for item in data:
            write_at(self._fd, memoryview(item), at)
            at += len(item)
        return offset or 0, nbytes

    def _flush(self) -> None:
        if self._pending:
            name = f"payload/{len(self._extents):06d}"
            self._extents.append(self._dataset(name, self._pending))
            self._pending, self._pending_nbytes = [], 0

    def finish(
        self,
        checkpoint: Checkpoint,
        streams: Sequence[Stream],
        digests: Sequence[bytes],
        *,
        level: str,
        sha256: dict[str, str],
        base: dict[str, Any] | None = None,
        base_spans: Sequence[tuple[int, bytes, str]] = (),
        preset: str = "exact",
        resumable: bool = True,
        losses: Sequence[Loss] = (),
        step: int | None = None,
        partial: Mapping[str, Any] | None = None,
        carried: Sequence[Carried] = (),
    ) -> int:
        """Write the tables and the user block, and sync; return the file's length.

        Parameters
        ----------
        checkpoint : what was compressed.
        streams : in the order their chunks were added.
        digests : xxh3-128 of each file's skeleton, then of each span, then of each model.
        level : what the chunks were coded with.
        sha256 : path -> hex digest, for the files whose sha256 was asked for.
        base : name and depth of the base, if there is one.
        base_spans : length, digest and tensor of each base span that chunks lean on.
        preset, resumable, losses : what was asked for, and what is not exact.
        step, partial, carried : of a partial snapshot, and what it did not save anew.
        """
        self._flush()
        packed = sorted({"", *(span.packed for span in checkpoint.spans)})
        if len(packed) > np.iinfo(SPANS["packed"]).max:
            raise UnsupportedError("the source packs its data in more ways than can be recorded")
        dtypes: dict[str, int] = {}
        for span in checkpoint.spans:
            dtypes.setdefault(span.dtype, len(dtypes))
        for tensor in checkpoint.tensors:
            dtypes.setdefault(tensor.dtype, len(dtypes))
        if any(abs(file.mtime_ns) >= 1 << 63 for file in checkpoint.files):
            raise UnsupportedError("a file has a modification time that cannot be recorded")
        files, spans, stream_rows = _pack_spans(checkpoint, streams, digests, dtypes, packed)
        tensors, pieces, dims = _pack_tensors(checkpoint, dtypes)
        names = [os.fsencode(file.path) for file in checkpoint.files]
        names += [os.fsencode(file.target) for file in checkpoint.files]
        names += [t.name.encode("utf-8", "surrogatepass") for t in checkpoint.tensors]
        names += [name.encode("utf-8", "surrogatepass") for _, _, name in base_spans]
        methods = sorted({loss.method for loss in losses})
        tables = {
            "files": files,
            "spans": spans,
            "streams": stream_rows,
            "chunks": np.array(self._chunks, CHUNKS),
            "refs": np.array(self._refs, REFS),
            "tensors": tensors,
            "pieces": pieces,
            "base_spans": np.array([(n, digest) for n, digest, _ in base_spans], BASE_SPANS),
            "losses": np.array(
                [
                    (loss.span + len(files), methods.index(loss.method), *loss[2:])
                    for loss in losses
                ],
                LOSSES,
            ),
            "carried": np.array(
                [
                    (*item[:4], -1 if item.step is None else item.step)
                    for item in (c._replace(span=c.span + len(files)) for c in carried)
                ],
                CARRIED,
            ),
            "dims": dims,
            "name_lengths": np.array([len(name) for name in names], "<u4"),
        }
        meta = {
            "ckz": __version__,
            "format": checkpoint.format,
            "directory": checkpoint.is_directory,
            "codecs": list(self._codecs),
            "dtypes": list(dtypes),
            "packed": packed,
            "sha256": sha256,
            "warnings": checkpoint.warnings,
            "level": level,
            "chunk": CHUNK,
            "mode": checkpoint.mode,
            "mtime_ns": checkpoint.mtime_ns,
            "base": base,
            "preset": preset,
            "methods": methods,
            "resumable": resumable,
            "step": step,
            "partial": dict(partial or {}),
            "numbers": dict(checkpoint.numbers),
        }
        self._dataset("meta", [json.dumps(meta, sort_keys=True).encode()])
        self._dataset("index", [pack_index(tables, names)])
        extents = np.array(self._extents, "<u8").reshape(-1, 2)
        place, _ = self._dataset("extents", [extents.tobytes()])
        self._h5.close()
        length = os.fstat(self._fd).st_size
        digest = digest_outside(self._fd, length, self._extents)
        head = HEAD.pack(MAGIC, VERSION, len(self._extents), length, place, digest)
        os.pwrite(self._fd, _seal(head), 0)
        os.fsync(self._fd)
        return length

    def close(self) -> None:
        """Release the file, finished or not."""
        # On a full disk the HDF5 library cannot write what it still holds; the file goes anyway.
        with contextlib.suppress(OSError, RuntimeError):
            self._h5.close()
        os.close(self._fd)


def _seal(head: bytes) -> bytes:
    block = head.ljust(USER_BLOCK - 8, b"\0")
    return block + struct.pack("<Q", xxhash.xxh3_64_intdigest(block))


def pack_index(tables: dict[str, Rows], names: Sequence[bytes]) -> bytes:
    """Give the contents of ``/index``."""
    parts = [np.array([len(tables[name]) for name in TABLES], "<u8").tobytes()]
    for name in TABLES:
        rows = np.ascontiguousarray(tables[name])
        parts.append(rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize).T.tobytes())
    return zstandard.ZstdCompressor(level=_INDEX_LEVEL).compress(b"".join([*parts, *names]))


def _pack_tensors(checkpoint: Checkpoint, dtypes: dict[str, int]) -> tuple[Rows, Rows, Rows]:
    """Give the rows of tensors, pieces and dims."""
    nfiles = len(checkpoint.files)
    tensors, pieces = [], []
    dims: list[int] = []
    for tensor in checkpoint.tensors:
        tensors.append(
            (
                dtypes[tensor.dtype],
                ROLES.index(tensor.role),
                TRANSFORMS.index(tensor.transform),
                len(tensor.shape),
                len(tensor.pieces),
            )
        )
        dims.extend(tensor.shape)
        for piece in tensor.pieces:
            plain = piece.shape == tensor.shape and piece.strides == contiguous_strides(piece.shape)
            pieces.append((piece.span + nfiles, piece.offset, not plain))
            if not plain:
                dims.extend((*piece.shape, *piece.strides, *piece.start))
    return (
        np.array(tensors, TENSORS),
        np.array(pieces, PIECES),
        np.array(dims, "<i8"),
    )


def _pack_spans(
    checkpoint: Checkpoint,
    streams: Sequence[Stream],
    digests: Sequence[bytes],
    dtypes: dict[str, int],
    packed: Sequence[str],
) -> tuple[Rows, Rows, Rows]:
    """Give the rows of files, spans and streams."""
    nfiles = len(checkpoint.files)
    places = {}
    for number, stream in enumerate(streams):
        at = 0
        for part in stream.parts:
            places[part.span] = number, at
            at += part.nbytes
    by_file: list[list[bytes]] = [[digest] for digest in digests[:nfiles]]
    for span, digest in zip(checkpoint.spans, digests[nfiles:], strict=False):
        by_file[span.file].append(digest)
    files = [
        (f.size, f.mode, f.mtime_ns, KINDS.index(f.kind), file_digest(by_file[i]))
        for i, f in enumerate(checkpoint.files)
    ]
    sizes = [file.size for file in checkpoint.files]
    for span in checkpoint.spans:
        sizes[span.file] -= span.nbytes
    rows = [
        (i, 0, sizes[i], *places.get(i, (0, 0)), 0, 0, 0, digests[i]) for i in range(nfiles)
    ] + [
        (
            span.file,
            span.offset,
            span.nbytes,
            *places.get(nfiles + i, (0, 0)),
            dtypes[span.dtype],
            "<>".index(span.byteorder),
            packed.index(span.packed),
            digests[nfiles + i],
        )
        for i, span in enumerate(checkpoint.spans)
    ]
    models = [part for stream in streams for part in stream.parts if part.span >= len(rows)]
    rows += [
        (NO_FILE, 0, part.nbytes, *places[part.span], 0, 0, 0, digests[part.span])
        for part in sorted(models, key=lambda part: part.span)
    ]
    stream_rows = [(s.nbytes, s.chunks, ROLES.index(s.role)) for s in streams]
    return np.array(files, FILES), np.array(rows, SPANS), np.array(stream_rows, STREAMS)
