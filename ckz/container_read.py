"""Opening a .ckz: every table is checked against the file before anything is decoded.

A .ckz may come from anyone. The checks run in a fixed order: user block, payload extents, digest of
everything outside the payload, HDF5 structure, table sizes, then each table against the others.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ckz import codecs
from ckz.checkpoint import ITEMSIZE, ROLES, check_pieces
from ckz.codecs.zstd import decompress_into
from ckz.container import (
    HDF5_MAGIC,
    HEAD,
    KINDS,
    MAGIC,
    MAX_DEPTH,
    MAX_REF,
    MAX_REFS,
    NO_FILE,
    TABLES,
    TRANSFORMS,
    USER_BLOCK,
    VERSION,
    Container,
    Rows,
    digest_outside,
)
from ckz.errors import CorruptError, UnsupportedError
from ckz.retrying import retried
from ckz.streams import CHUNK

# Longer ones no file system takes.
_MAX_PATH = 4096
_MAX_NAME = 255
# Chunks that decoding one may take; a real one takes less than ten.
_MAX_COST = 1000


def is_container(path: Path) -> bool:
    """Tell whether a file starts as a .ckz does, or is named like one."""
    if not path.is_file():
        return False
    if path.suffix == ".ckz":
        return True
    with path.open("rb") as file:
        block = file.read(USER_BLOCK + 8)
    # One with a damaged magic number, by the length that it states.
    if block[USER_BLOCK:] == HDF5_MAGIC and block[8:12] == VERSION.to_bytes(4, "little"):
        return block[16:24] == path.stat().st_size.to_bytes(8, "little")
    return block.startswith(MAGIC)


@contextmanager
def open_container(path: Path) -> Iterator[Container]:
    """Open and check a .ckz; it is closed on leaving the context.

    Raises
    ------
    UnsupportedError
        If it is no .ckz, or of a version, codec or dtype this ckz does not know.
    CorruptError
        If anything in it does not hold.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _read(path, fd)
    finally:
        os.close(fd)


def _read(path: Path, fd: int) -> Container:
    length = os.fstat(fd).st_size
    extents_at, digest, count = _read_user_block(path, fd, length)
    extents = _read_extents(path, fd, length, extents_at, count)
    if digest_outside(fd, length, extents.tolist()) != digest:
        raise CorruptError(f"{path}: damaged outside the tensor data (checksum mismatch)")
    blobs = _read_datasets(path, fd, length)
    try:
        tables, meta, names = _unpack_index(path, blobs, length)
        places = _check_chunks(path, meta, tables, extents)
        _check_spans(path, meta, tables)
        _check_refs(path, meta, tables)
        _check_losses(path, meta, tables)
        if len(tables["base_spans"]) and meta["base"] is None:
            raise CorruptError(f"{path}: leans on a base that is not described")
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as err:
        raise CorruptError(f"{path}: the index does not make sense ({err})") from err
    container = Container(
        path=path,
        fd=fd,
        nbytes=length,
        meta=meta,
        files=tables["files"],
        spans=tables["spans"],
        streams=tables["streams"],
        chunks=tables["chunks"],
        refs=tables["refs"],
        base_spans=tables["base_spans"],
        loss_rows=tables["losses"],
        carried_rows=tables["carried"],
        places=places,
        names=names,
        tensor_rows=tables["tensors"],
        piece_rows=tables["pieces"],
        dims=tables["dims"],
    )
    _check_names(path, container)
    return container


def _read_user_block(path: Path, fd: int, length: int) -> tuple[int, bytes, int]:
    block = retried(partial(os.pread, fd, USER_BLOCK + 8, 0))
    looks_like = block.startswith(MAGIC) or block[USER_BLOCK:] == HDF5_MAGIC
    if len(block) < USER_BLOCK and (block[:8] == MAGIC[: len(block)] or path.suffix == ".ckz"):
        raise CorruptError(f"{path}: truncated: {length} bytes are too few for a .ckz file")
    if not looks_like and path.suffix != ".ckz":
        raise UnsupportedError(f"{path}: not a .ckz file")
    head, (checksum,) = block[: USER_BLOCK - 8], struct.unpack_from("<Q", block, USER_BLOCK - 8)
    if xxhash.xxh3_64_intdigest(head) != checksum:
        raise CorruptError(f"{path}: the header is damaged (checksum mismatch)")
    magic, version, count, stated, extents_at, digest = HEAD.unpack_from(head)
    if magic != MAGIC:
        raise UnsupportedError(f"{path}: not a .ckz file")
    if version != VERSION:
        raise UnsupportedError(
            f"{path}: container version {version}; this ckz knows {VERSION}, a newer one is needed"
        )
    if stated != length:
        raise CorruptError(f"{path}: {length} bytes long, expected {stated}; truncated or extended")
    if any(head[HEAD.size :]):
        raise CorruptError(f"{path}: the header has data where version {VERSION} has none")
    return extents_at, digest, count


def _read_extents(path: Path, fd: int, length: int, at: int, count: int) -> npt.NDArray[np.uint64]:
    nbytes = 16 * count
    if (at < USER_BLOCK and count) or at + nbytes > length:
        raise CorruptError(f"{path}: the table of payloads lies outside the file")
    extents = np.frombuffer(retried(partial(os.pread, fd, nbytes, at)), "<u8").reshape(-1, 2)
    previous = USER_BLOCK
    for start, size in extents.tolist():
        if start < previous or start + size > length or (start < at + nbytes and start + size > at):
            raise CorruptError(f"{path}: payloads overlap or lie outside the file")
        previous = start + size
    return extents


def _read_datasets(path: Path, fd: int, length: int) -> dict[str, bytes]:
    """Read the index datasets, each bounded by the file's length."""
    import h5py

    blobs = {}
    try:
        with h5py.File(path, "r", locking=False) as h5:
            for name in ("index", "meta"):
                if not isinstance(h5.get(name, getlink=True), h5py.HardLink):
                    raise CorruptError(f"{path}: dataset {name!r} lies in another place")
                dset = h5[name]
                if not isinstance(dset, h5py.Dataset) or dset.dtype != np.uint8 or dset.ndim != 1:
                    raise CorruptError(f"{path}: dataset {name!r} is not a run of bytes")
                offset, nbytes = dset.id.get_offset(), dset.shape[0]
                if nbytes and (offset is None or offset + nbytes > length):
                    raise CorruptError(f"{path}: dataset {name!r} lies outside the file")
                blobs[name] = retried(partial(os.pread, fd, nbytes, offset)) if nbytes else b""
                if len(blobs[name]) != nbytes:
                    raise CorruptError(f"{path}: dataset {name!r} is cut short")
    except (OSError, KeyError, RuntimeError, ValueError) as err:
        raise CorruptError(f"{path}: not readable as HDF5 ({err})") from err
    return blobs


def _unpack_index(
    path: Path, blobs: dict[str, bytes], length: int
) -> tuple[dict[str, Rows], dict[str, Any], tuple[str, ...]]:
    try:
        nbytes = zstandard.get_frame_parameters(blobs["index"]).content_size
    except zstandard.ZstdError as err:
        raise CorruptError(f"{path}: the index is no zstd frame") from err
    if nbytes > (32 << 20) + 32 * length:
        raise CorruptError(f"{path}: the index claims to unpack to {nbytes} bytes")
    index = np.empty(nbytes, np.uint8)
    decompress_into(blobs["index"], index)
    at = 8 * len(TABLES)
    tables = {}
    for (name, dtype), rows in zip(TABLES.items(), index[:at].view("<u8").tolist(), strict=True):
        end = at + rows * dtype.itemsize
        if end > nbytes:
            raise CorruptError(f"{path}: table {name!r} is cut short")
        columns = index[at:end].reshape(dtype.itemsize, rows)
        tables[name] = np.ascontiguousarray(columns.T).reshape(-1).view(dtype)
        at = end
    joined = index[at:]
    lengths = tables["name_lengths"]
    nfiles = len(tables["files"])
    count = 2 * nfiles + len(tables["tensors"]) + len(tables["base_spans"])
    if len(lengths) != count or lengths.sum() != joined.size:
        raise CorruptError(f"{path}: the names do not fit the tables")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    blob = joined.tobytes()
    raw = [blob[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    names = [os.fsdecode(name) for name in raw[: 2 * nfiles]]
    names += [name.decode("utf-8", "surrogatepass") for name in raw[2 * nfiles :]]
    return tables, _check_meta(path, json.loads(blobs["meta"])), tuple(names)


def _check_meta(path: Path, meta: Any) -> dict[str, Any]:
    kinds = {
        "ckz": str,
        "format": str,
        "directory": bool,
        "codecs": list,
        "dtypes": list,
        "packed": list,
        "sha256": dict,
        "warnings": list,
        "level": str,
        "chunk": int,
        "mode": int,
        "mtime_ns": int,
        "numbers": dict,
        "preset": str,
        "methods": list,
        "resumable": bool,
        "partial": dict,
    }
    for key, kind in kinds.items():
        if type(meta[key]) is not kind:
            raise CorruptError(f"{path}: {key!r} in the description has the wrong type")
    lists = [*meta["codecs"], *meta["dtypes"], *meta["packed"], *meta["warnings"], *meta["methods"]]
    if not all(isinstance(item, str) for item in lists):
        raise CorruptError(f"{path}: a list in the description holds something else than text")
    if not all(type(number) in (int, float) for number in meta["numbers"].values()):
        raise CorruptError(f"{path}: a hyperparameter in the description is no number")
    for text in meta["codecs"]:
        try:
            codecs.parse(text)
        except UnsupportedError as err:
            raise UnsupportedError(f"{path}: {err}") from err
    step = meta["step"]
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 60):
        raise CorruptError(f"{path}: the description has an impossible step")
    _check_partial(path, meta["partial"])
    base = meta["base"]
    numbers = ("depth", "chain_nbytes", "full_nbytes")
    if base is not None and (
        type(base["name"]) is not str
        or not all(type(base[key]) is int for key in numbers)
        or not base["name"].isprintable()
        or base["name"] in ("", ".", "..")
        or "/" in base["name"]
    ):
        raise CorruptError(f"{path}: the description of the base makes no sense")
    for dtype in meta["dtypes"]:
        if dtype not in ITEMSIZE:
            raise UnsupportedError(f"{path}: dtype {dtype!r} is not known to this ckz")
    if not 0 <= meta["mode"] <= 0o7777 or abs(meta["mtime_ns"]) >= 1 << 63:
        raise CorruptError(f"{path}: the directory has an impossible mode or time")
    if meta["chunk"] != CHUNK:
        raise UnsupportedError(f"{path}: chunks of {meta['chunk']} bytes, this ckz knows {CHUNK}")
    checked: dict[str, Any] = meta
    return checked


def _check_partial(path: Path, partial: dict[str, Any]) -> None:
    """Check the record of a partial snapshot, which the next one reads."""
    for number in (partial.get("number", 0), partial.get("k", 1)):
        if type(number) is not int or not 0 <= number < 1 << 30:
            raise CorruptError(f"{path}: the record of a partial snapshot makes no sense")
    saved, kinds = partial.get("saved", []), (str, int, float)
    plt = partial.get("plt", 0.0)
    if (
        type(plt) is not float
        or not 0 <= plt <= 1
        or type(partial.get("policy", "")) is not str
        or bool(partial) != ("policy" in partial)
        or type(saved) is not list
        or any(type(row) is not list or tuple(map(type, row)) != kinds for row in saved)
        or not all(0 <= row[2] < 1e300 for row in saved)
    ):
        raise CorruptError(f"{path}: the record of a partial snapshot makes no sense")


def _check_chunks(
    path: Path, meta: dict[str, Any], tables: dict[str, Rows], extents: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Check sizes against streams and payload; give each chunk's place in the file."""
    chunks, streams = tables["chunks"], tables["streams"]
    stream_nbytes = streams["nbytes"].astype(np.int64)
    counts = streams["chunks"].astype(np.int64)
    if np.any(stream_nbytes <= 0) or np.any(counts != -(-stream_nbytes // CHUNK)):
        raise CorruptError(f"{path}: a stream does not have the chunks its size needs")
    if counts.sum() != len(chunks):
        raise CorruptError(f"{path}: {len(chunks)} chunks, the streams need {counts.sum()}")
    raw = np.full(len(chunks), CHUNK, np.int64)
    raw[np.cumsum(counts) - 1] = stream_nbytes - (counts - 1) * CHUNK
    if np.any(chunks["raw"] != raw) or np.any(chunks["stored"] > chunks["raw"]):
        raise CorruptError(f"{path}: a chunk has an impossible size")
    if np.any(chunks["codec"] >= len(meta["codecs"])) or np.any(streams["role"] >= len(ROLES)):
        raise CorruptError(f"{path}: a chunk or stream names a codec or role that is not there")
    ends = np.cumsum(chunks["stored"], dtype=np.int64)
    limits = np.cumsum(extents[:, 1], dtype=np.int64)
    stored = int(ends[-1]) if len(ends) else 0
    # Of each limit the first end that is not before it; numpy's isin would import masked arrays.
    ends_at = np.append(ends, -1)[np.searchsorted(ends, limits)]
    if stored != (int(limits[-1]) if len(limits) else 0) or np.any(ends_at != limits):
        raise CorruptError(f"{path}: the chunks do not fill the payload")
    starts: npt.NDArray[np.int64] = ends - chunks["stored"].astype(np.int64)
    if not len(extents):
        return starts
    # A chunk lies in the payload dataset whose end is the first one past the chunk's start.
    home = np.minimum(np.searchsorted(limits, starts, side="right"), len(limits) - 1)
    inside = starts - (limits - extents[:, 1].astype(np.int64))[home]
    places: npt.NDArray[np.int64] = extents[home, 0].astype(np.int64) + inside
    return places


def _check_spans(path: Path, meta: dict[str, Any], tables: dict[str, Rows]) -> None:
    """Check that spans tile their streams, and with the skeletons their files."""
    files, spans, streams = tables["files"], tables["spans"], tables["streams"]
    nfiles = len(files)
    is_model = spans["file"] == NO_FILE
    nmodels = int(np.count_nonzero(is_model))
    if not np.all(is_model[len(spans) - nmodels :]) or np.any(spans["offset"][is_model]):
        raise CorruptError(f"{path}: a model stands between the spans of files")
    if len(spans) < nfiles or np.any(files["kind"] >= len(KINDS)):
        raise CorruptError(f"{path}: the span table lacks the skeletons of the files")
    limit = 1 << 62
    if np.any(files["size"] > limit) or any(
        np.any(spans[key] > limit) for key in ("offset", "nbytes", "at")
    ):
        raise CorruptError(f"{path}: absurd sizes")
    if not (
        np.all((spans["file"] < nfiles) | is_model)
        and np.all(spans["dtype"] < len(meta["dtypes"]) if len(spans) > nfiles else True)
        and np.all(spans["byteorder"] < 2)
        and np.all(spans["packed"] < len(meta["packed"]))
        and np.array_equal(spans["file"][:nfiles], np.arange(nfiles))
        and not np.any(spans["offset"][:nfiles])
    ):
        raise CorruptError(f"{path}: a span names a file or dtype that is not there")
    nbytes, file = spans["nbytes"].astype(np.int64), spans["file"]
    totals = np.zeros(nfiles, np.int64)
    np.add.at(totals, file[~is_model], nbytes[~is_model])
    if np.any(totals != files["size"].astype(np.int64)):
        raise CorruptError(f"{path}: the spans of a file do not make up its size")
    inside = spans[nfiles : len(spans) - nmodels]
    starts, ends = inside["offset"], inside["offset"] + inside["nbytes"]
    follows = (inside["file"][1:] > inside["file"][:-1]) | (
        (inside["file"][1:] == inside["file"][:-1]) & (starts[1:] >= ends[:-1])
    )
    if not np.all(follows) or np.any(ends > files["size"][inside["file"]]):
        raise CorruptError(f"{path}: spans overlap or leave their file")
    used = np.flatnonzero(nbytes > 0)
    if np.any(spans["stream"][used] >= len(streams)):
        raise CorruptError(f"{path}: a span names a stream that is not there")
    order = used[np.lexsort((spans["at"][used], spans["stream"][used]))]
    stream, at = spans["stream"][order], spans["at"][order].astype(np.int64)
    ends = at + nbytes[order]
    first = np.concatenate([[True], stream[1:] != stream[:-1]]) if len(order) else np.zeros(0, bool)
    expected = np.where(first, 0, np.concatenate([[0], ends[:-1]])) if len(order) else at
    last = np.roll(first, -1)
    stream_nbytes = streams["nbytes"].astype(np.int64)
    if (
        np.any(at != expected)
        or first.sum() != len(streams)
        or np.any(ends[last] != stream_nbytes[stream[last]])
    ):
        raise CorruptError(f"{path}: the spans do not fill their streams")


def _check_losses(path: Path, meta: dict[str, Any], tables: dict[str, Rows]) -> None:
    """Check that losses are of spans of files, and errors are errors."""
    losses, nfiles = tables["losses"], len(tables["files"])
    models = int(np.count_nonzero(tables["spans"]["file"] != NO_FILE))
    errors = np.stack([losses["largest"], losses["relative"]])
    carried, spans = tables["carried"], tables["spans"]
    inside = (carried["span"] >= nfiles) & (carried["span"] < models)
    limits = spans["nbytes"][np.where(inside, carried["span"], 0)].astype(np.float64)
    ends = carried["start"].astype(np.float64) + carried["nbytes"].astype(np.float64)
    follows = (carried["span"][1:] > carried["span"][:-1]) | (
        (carried["span"][1:] == carried["span"][:-1])
        & (carried["start"][1:].astype(np.float64) >= ends[:-1])
    )
    young = carried["age"] < 1 << 31
    if not (np.all(inside & (ends <= limits) & young) and np.all(follows)):
        raise CorruptError(f"{path}: what is said of carried tensors makes no sense")
    if (
        np.any((losses["span"] < nfiles) | (losses["span"] >= models))
        or np.any(losses["method"] >= len(meta["methods"]))
        or not np.all((errors >= 0) & np.isfinite(errors))
    ):
        raise CorruptError(f"{path}: what is said of inexact tensors makes no sense")


def _check_refs(path: Path, meta: dict[str, Any], tables: dict[str, Rows]) -> None:
    """Check that references stay inside spans and form no cycle, a few deep."""
    chunks, spans, refs = tables["chunks"], tables["spans"], tables["refs"]
    counts = chunks["refs"].astype(np.int64)
    if np.any(counts > MAX_REFS) or counts.sum() != len(refs) or np.any(refs["where"] > 1):
        raise CorruptError(f"{path}: the reference table does not fit the chunks")
    owner = np.repeat(np.arange(len(chunks)), counts)
    sums = np.bincount(owner, refs["nbytes"], minlength=len(chunks))
    for number, text in enumerate(meta["codecs"]):
        of_codec = chunks["codec"] == number
        count, ratio = codecs.REFERENCES[text.partition(":")[0]]
        if count is not None and np.any(counts[of_codec] != count):
            raise CorruptError(f"{path}: a chunk does not have the references of its codec")
        if ratio is not None and np.any(sums[of_codec] != ratio * chunks["raw"][of_codec]):
            raise CorruptError(f"{path}: a chunk's references do not have the size it needs")
    if np.any(sums > MAX_REF):
        raise CorruptError(f"{path}: a chunk has too large references")
    outside = refs["where"] == 1
    for rows, there in ((refs[~outside], spans), (refs[outside], tables["base_spans"])):
        if np.any(rows["span"] >= len(there)):
            raise CorruptError(f"{path}: a reference names a span that is not there")
        # As Python integers: hostile ones wrap.
        ends = rows["start"].astype(object) + rows["nbytes"].astype(object)
        limits = there["nbytes"][rows["span"]].astype(object)
        if np.any(ends > limits) or np.any(rows["nbytes"] > MAX_REF):
            raise CorruptError(f"{path}: a reference leaves its span")
    refs, owner = refs[~outside], owner[~outside]
    target, nbytes = spans[refs["span"]], refs["nbytes"].astype(np.int64)
    first_chunk = np.concatenate([[0], np.cumsum(tables["streams"]["chunks"], dtype=np.int64)])
    begin = target["at"].astype(np.int64) + refs["start"].astype(np.int64)
    low = first_chunk[target["stream"]] + begin // CHUNK
    high = first_chunk[target["stream"]] + (begin + np.maximum(nbytes, 1) - 1) // CHUNK
    depth = np.zeros(len(chunks), np.int64)
    depth[owner] = MAX_DEPTH + 1
    for level in range(1, MAX_DEPTH + 1):
        # A range of at most MAX_REF bytes covers few chunks.
        reached = np.all([depth[np.minimum(low + k, high)] < level for k in range(6)], axis=0)
        ready = np.ones(len(chunks), bool)
        np.logical_and.at(ready, owner, reached)
        depth[ready & (depth > MAX_DEPTH)] = level
    if np.any(depth > MAX_DEPTH):
        raise CorruptError(f"{path}: references run in a circle or too deep")
    # What decoding a chunk costs, in chunks: references must not multiply it.
    cost = np.ones(len(chunks))
    for level in range(1, MAX_DEPTH + 1):
        there = depth[owner] == level
        for k in range(6):
            inside = there & (low + k <= high)
            np.add.at(cost, owner[inside], cost[low[inside] + k])
    if np.any(cost > _MAX_COST) or cost.sum() > _MAX_COST + 64 * len(chunks):
        raise CorruptError(f"{path}: references multiply the work of decoding")


def _check_names(path: Path, container: Container) -> None:
    """Check that no file leaves the output directory and that tensors stay in their spans."""
    nfiles = len(container.files)
    paths = container.names[:nfiles]
    kinds = [KINDS[kind] for kind in container.files["kind"].tolist()]
    if not container.meta["directory"] and (nfiles != 1 or kinds != ["file"] or "/" in paths[0]):
        raise CorruptError(f"{path}: a single file was expected inside")
    for name, target, kind, size, mode in zip(
        paths,
        container.names[nfiles : 2 * nfiles],
        kinds,
        container.files["size"].tolist(),
        container.files["mode"].tolist(),
        strict=True,
    ):
        # Only files have contents: writing those of a link would write to what it points to.
        if (size and kind != "file") or (kind == "link") != bool(target) or mode > 0o7777:
            raise CorruptError(f"{path}: {kind} {name[:200]!r} has contents, target or mode amiss")
        if "\0" in target or len(os.fsencode(target)) > _MAX_PATH:
            raise CorruptError(f"{path}: link {name[:200]!r} has an impossible target")
        parts = name.split("/")
        long = len(os.fsencode(name)) > _MAX_PATH or any(
            len(os.fsencode(part)) > _MAX_NAME for part in parts
        )
        if long or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise CorruptError(f"{path}: file name {name[:200]!r} is impossible")
    holders = {name for name, kind in zip(paths, kinds, strict=True) if kind != "dir"}
    if len(set(paths)) != nfiles:
        raise CorruptError(f"{path}: the same file name stands twice inside")
    for name in paths:
        parts = name.split("/")
        if any("/".join(parts[:k]) in holders for k in range(1, len(parts))):
            raise CorruptError(f"{path}: file {name!r} would lie inside another file or a link")
    rows, pieces, nspans = container.tensor_rows, container.piece_rows, container.models
    if (
        np.any(rows["dtype"] >= len(container.meta["dtypes"]))
        or np.any(rows["role"] >= len(ROLES))
        or np.any(rows["transform"] >= len(TRANSFORMS))
        or np.any(pieces["span"] >= nspans)
        or np.any(pieces["span"] < nfiles)
        or np.any(pieces["offset"] > 1 << 62)
        or rows["pieces"].sum(dtype=np.int64) != len(pieces)
    ):
        raise CorruptError(f"{path}: a tensor names something that is not there")
    check_pieces(container.checkpoint)
