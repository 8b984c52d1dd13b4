"""Snapshots that lean on earlier ones: finding a base, checking it, reading through it.

A base is known by the digests of the spans that are needed, never by its path: whatever file holds
bytes with those digests will do, compressed or not, moved or renamed. Digests are compared before
any output opens; contents are checked as they are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckz.checkpoint import Checkpoint
from ckz.container import Carried, Container
from ckz.container_read import is_container, open_container
from ckz.errors import BaseError, CkzError, CorruptError
from ckz.files import FileSet
from ckz.formats import read_checkpoint
from ckz.restore import Decoder, ReadBase
from ckz.streams import CHUNK, Extent, Slicer, skeletons_of
from ckz.values import ReadSpan

Bytes = npt.NDArray[np.uint8]

# Every link is a few calls deep, and Python has room for a thousand.
MAX_DEPTH = 64
_HINT = "; name the base with --base"


class Before(NamedTuple):
    """What a snapshot says about itself that a partial one after it has to know.

    Attributes
    ----------
    step : that it is of, or None.
    carried : what it carries itself.
    partial : the record of its policy; empty if it is not partial.
    """

    step: int | None
    carried: Sequence[Carried]
    partial: Mapping[str, Any]


class Snapshot(NamedTuple):
    """A checkpoint that can be read span by span, compressed or not.

    Attributes
    ----------
    digests : works out the xxh3-128 of the original bytes of each span.
    read : fills an array with bytes of a span from an offset.
    depth : how many bases it leans on, one behind the other.
    chain_nbytes : stored bytes of those and of itself, without the last one, which is full.
    full_nbytes : stored bytes of that last one.
    read_skeleton : fills an array with bytes of a file's skeleton from an offset.
    before : its step, what it carries itself, and the record of its policy.
    """

    path: Path
    checkpoint: Checkpoint
    digests: Callable[[], list[bytes]]
    read: ReadSpan
    depth: int
    chain_nbytes: int
    full_nbytes: int
    read_skeleton: ReadSpan
    before: Before = Before(None, (), {})


@dataclass(frozen=True)
class Search:
    """What is known while bases of bases are looked for.

    Attributes
    ----------
    opening : the containers whose bases are being opened: none can be a base of its own.
    failed : what could not be opened. A search that tried again at every level would never end.
    stated : digests and lengths that containers say they hold.
    """

    opening: tuple[Path, ...] = ()
    failed: set[Path] = field(default_factory=set)
    stated: dict[Path, set[tuple[int, bytes]]] = field(default_factory=dict)


@contextmanager
def open_snapshot(
    path: Path,
    *,
    base: Path | None = None,
    base_dir: Path | None = None,
    search: Search | None = None,
) -> Iterator[Snapshot]:
    """Open a source or a .ckz, with its bases, for reading spans.

    Parameters
    ----------
    base, base_dir, search : as those of ``open_decoder``.

    Raises
    ------
    BaseError
        If a base that is needed is not there or is not the one recorded.
    """
    with ExitStack() as stack:
        if not is_container(path):
            checkpoint = read_checkpoint(path)
            paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
            files = stack.enter_context(FileSet(paths, os.O_RDONLY))
            read = partial(read_source, checkpoint, files)
            digests = partial(_digests, checkpoint, read)
            skeletons = _skeletons(checkpoint, files)
            yield Snapshot(path, checkpoint, digests, read, 0, 0, checkpoint.nbytes, skeletons)
            return
        container = stack.enter_context(open_container(path))
        decoder = stack.enter_context(
            open_decoder(container, base=base, base_dir=base_dir, search=search)
        )
        digests, read = partial(_stored_digests, container), partial(_read_span, decoder)
        depth, chain, full = 0, 0, container.nbytes
        if base_meta := container.meta["base"]:
            depth = base_meta["depth"]
            chain = base_meta["chain_nbytes"] + container.nbytes
            full = base_meta["full_nbytes"]
        # A container's first spans are the skeletons.
        skeletons = decoder.read_span
        meta = container.meta
        before = Before(meta["step"], container.carried, meta["partial"])
        yield Snapshot(
            path, container.checkpoint, digests, read, depth, chain, full, skeletons, before
        )


class Link(NamedTuple):
    """One container of a chain; ``stored_nbytes`` is None where it was not found."""

    name: str
    base: str
    depth: int
    stored_nbytes: int | None


def links(container: Container) -> list[Link]:
    """Follow a chain by the names that are recorded; nothing is decoded."""
    found: list[Link] = []
    while base := container.meta["base"]:
        found.append(Link(container.path.name, base["name"], base["depth"], container.nbytes))
        path = container.path.with_name(Path(base["name"]).name)
        if len(found) > MAX_DEPTH or not path.exists() or not is_container(path):
            size = path.stat().st_size if path.is_file() else None
            return [*found, Link(base["name"], "", base["depth"] - 1, size)]
        with open_container(path) as container:
            pass
    if found:
        found.append(Link(container.path.name, "", 0, container.nbytes))
    return found


def base_rows(snapshot: Snapshot, used: dict[int, int]) -> list[tuple[int, bytes, str]]:
    """Describe base spans for a container: length, digest and tensor of each, in row order."""
    names = {
        piece.span: tensor.name for tensor in snapshot.checkpoint.tensors for piece in tensor.pieces
    }
    digests = snapshot.digests()
    return [
        (snapshot.checkpoint.spans[span].nbytes, digests[span], names.get(span, ""))
        for span in used
    ]


@contextmanager
def open_decoder(
    container: Container,
    *,
    base: Path | None = None,
    base_dir: Path | None = None,
    search: Search | None = None,
) -> Iterator[Decoder]:
    """Open what a container leans on, and give a decoder for it.

    Parameters
    ----------
    base : the base, if it is known; else it is looked for, by content, in ``base_dir`` and
        beside the container.
    search : what the one that leans on this container found out.

    Raises
    ------
    BaseError
        If no file holds what is needed; it says which tensor, what was expected and found.
    """
    if not len(container.base_spans):
        yield Decoder(container)
        return
    search = search or Search()
    if len(search.opening) >= MAX_DEPTH:
        raise BaseError(f"{container.path}: leans on more than {MAX_DEPTH} bases")
    search = replace(search, opening=(*search.opening, container.path.resolve()))
    name = Path(container.meta["base"]["name"]).name
    fault = f"{container.path}: no file beside it holds its base, {name!r}"
    for path in [base] if base else _places(container, base_dir):
        if path.resolve() in (*search.opening, *search.failed):
            continue
        with ExitStack() as stack:
            try:
                # Of others than the one that is named nobody wants to know what they lack.
                named = base is not None or path.name in (name, f"{name}.ckz")
                if base is None and not _states(path, container, search, named=named):
                    continue
                try:
                    snapshot = stack.enter_context(open_snapshot(path, search=search))
                except (CkzError, OSError):
                    search.failed.add(path.resolve())
                    raise
                where = _locate(container, snapshot)
            except (CkzError, OSError) as err:
                if named:
                    # What a base of the base lacks says so itself.
                    own = isinstance(err, BaseError)
                    fault = str(err) if own else f"{container.path}: its base: {err}"
                continue
            yield Decoder(container, _reader(container, snapshot, where))
            return
    raise BaseError(f"{fault.removesuffix(_HINT)}{_HINT}")


def _places(container: Container, base_dir: Path | None) -> Iterator[Path]:
    """Give files that may be the base: by its name first, then whatever .ckz lies there."""
    name = Path(container.meta["base"]["name"]).name
    names = [name, f"{name}.ckz", name.removesuffix(".ckz")]
    directories = [d for d in (base_dir, container.path.parent) if d is not None]
    seen = {container.path.resolve()}
    for directory in directories:
        others = sorted(p for p in directory.glob("*.ckz") if p.is_file())
        for path in [*(directory / n for n in names), *others]:
            if path.resolve() not in seen and path.exists():
                seen.add(path.resolve())
                yield path


def _states(path: Path, container: Container, search: Search, *, named: bool) -> bool:
    """Tell whether a .ckz says that it holds a base, before its own bases are opened.

    Raises
    ------
    BaseError
        If it does not and is ``named``: which tensor differs.
    """
    if not is_container(path):
        return True
    key = path.resolve()
    if key not in search.stated or named:
        try:
            with open_container(path) as other:
                lengths = [span.nbytes for span in other.checkpoint.spans]
                digests = _stored_digests(other)
                search.stated[key] = {*zip(lengths, digests, strict=True)}
                if named:
                    checkpoint = other.checkpoint
                    stated = Snapshot(path, checkpoint, lambda: digests, _unread, 0, 0, 0, _unread)
                    _locate(container, stated)
        except (CkzError, OSError) as err:
            if not isinstance(err, BaseError):
                search.failed.add(key)
            raise
    return {*map(tuple, container.base_spans.tolist())} <= search.stated[key]


def _unread(span: int, start: int, out: Bytes) -> None:
    raise BaseError("only what is stated is looked at")


def _locate(container: Container, snapshot: Snapshot) -> list[int]:
    """Find each base span by its digest; they must all be there."""
    digests = snapshot.digests()
    known = {digest: span for span, digest in enumerate(digests)}
    found = []
    for row, (nbytes, digest) in enumerate(container.base_spans.tolist()):
        span = known.get(digest)
        if span is None or snapshot.checkpoint.spans[span].nbytes != nbytes:
            raise BaseError(_difference(container, snapshot, row, digests))
        found.append(span)
    return found


def _difference(container: Container, snapshot: Snapshot, row: int, digests: list[bytes]) -> str:
    name, digest = container.base_names[row], container.base_spans["digest"][row].tobytes()
    text = (
        f"{container.path}: {snapshot.path} is not its base: "
        f"tensor {name!r} should have digest {digest.hex()}"
    )
    for tensor in snapshot.checkpoint.tensors:
        if tensor.name == name and tensor.pieces:
            return f"{text}, has {digests[tensor.pieces[0].span].hex()}"
    return f"{text}, is not there"


def _reader(container: Container, snapshot: Snapshot, where: list[int]) -> ReadBase:
    def read(row: int, start: int, out: Bytes) -> None:
        try:
            snapshot.read(where[row], start, out)
        except (CorruptError, OSError) as err:
            name = container.base_names[row]
            raise BaseError(f"{container.path}: tensor {name!r} of its base: {err}") from err

    return read


def _read_span(decoder: Decoder, span: int, start: int, out: Bytes) -> None:
    decoder.read_span(span + len(decoder.container.files), start, out)


def read_source(checkpoint: Checkpoint, files: FileSet, span: int, at: int, out: Bytes) -> None:
    """Fill ``out`` with the bytes of a span from one on."""
    place = checkpoint.spans[span]
    files.read([Extent(place.file, place.offset + at, out.size)], out)


def _skeletons(checkpoint: Checkpoint, files: FileSet) -> ReadSpan:
    parts = cache(partial(skeletons_of, checkpoint))
    # A slicer works out once where each of 100,000 gaps begins.
    slicer = cache(lambda file: Slicer([parts()[file]]))

    def read(file: int, start: int, out: Bytes) -> None:
        files.read(slicer(file).extents_in(start, start + out.size), out)

    return read


def _stored_digests(container: Container) -> list[bytes]:
    rows = container.spans["digest"][len(container.files) : container.models]
    return [digest.tobytes() for digest in rows]


def _digests(checkpoint: Checkpoint, read: ReadSpan) -> list[bytes]:
    buffer = np.empty(CHUNK, np.uint8)
    found = []
    for number, span in enumerate(checkpoint.spans):
        digest = xxhash.xxh3_128()
        for at in range(0, span.nbytes, CHUNK):
            part = buffer[: min(CHUNK, span.nbytes - at)]
            read(number, at, part)
            digest.update(part.data)
        found.append(digest.digest())
    return found
