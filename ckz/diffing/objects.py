"""What files hold besides tensors: values that can be read by name, and bytes.

A file is read here without its tensors, with holes in their places: so the file inside a .ckz is
read like any other, and nothing is decoded for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.chain import Snapshot
from ckz.errors import CkzError
from ckz.formats import safetensors, torch_legacy, torch_zip, zips
from ckz.formats.pickles import Global
from ckz.formats.torch_leaves import named_leaves
from ckz.source import Source
from ckz.streams import CHUNK, Part, Slicer

Bytes = npt.NDArray[np.uint8]

_HEAD = 4096
_MAX_SKELETON = 512 << 20  # what is larger holds no pickle that would be read
_MAX_TEXT = 40


class ObjectDiff(NamedTuple):
    """A value besides the tensors that differs; ``a`` or ``b`` is None where it is not there."""

    name: str
    a: str | None
    b: str | None


def compare_objects(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[ObjectDiff]:
    """Give the values that differ, in the order of ``a``, then those of ``b`` alone."""
    for name, value in a.items():
        if name not in b:
            yield ObjectDiff(name, _text(value), None)
        elif _identity(value) != _identity(b[name]):
            texts = _text(value), _text(b[name])
            yield ObjectDiff(name, *(texts if texts[0] != texts[1] else (texts[0], "other")))
    for name, value in b.items():
        if name not in a:
            yield ObjectDiff(name, None, _text(value))


def _identity(value: Any) -> tuple[type, Any]:
    # By its bits: NaN is NaN, and 0.0 is not -0.0; and 1 is not True.
    return type(value), value.hex() if isinstance(value, float) else value


def _text(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, Global):
        return str(value)
    if type(value) is int and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"{value[: _MAX_TEXT - 10]!r}... ({len(value)} characters)"
    return repr(value)


def kind_of(snapshot: Snapshot, part: Part) -> str:
    """Tell how a file keeps values besides tensors: ``pickle``, ``header``, or unknown.

    Parameters
    ----------
    part : the file's skeleton.
    """
    if not part.nbytes or part.extents[0].offset or part.nbytes > _MAX_SKELETON:
        return ""
    data = np.empty(min(_HEAD, part.extents[0].nbytes), np.uint8)
    snapshot.read_skeleton(part.span, 0, data)
    head = data.tobytes()
    if zips.sniff(head) or torch_legacy.sniff(head):
        return "pickle"
    return "header" if safetensors.sniff(head) else ""


def objects_of(snapshot: Snapshot, part: Part, spool: Path | None) -> dict[str, Any] | None:
    """Give what a file of a known kind holds besides tensors, by name; None where that fails.

    Parameters
    ----------
    part : the file's skeleton.
    spool : the directory for a temporary file; the system's if None.
    """
    entry = snapshot.checkpoint.files[part.span]
    with tempfile.TemporaryFile(dir=spool) as copy:
        copy.truncate(entry.size)
        slicer = Slicer([part])
        for at in range(0, part.nbytes, CHUNK):
            data = np.empty(min(CHUNK, part.nbytes - at), np.uint8)
            snapshot.read_skeleton(part.span, at, data)
            for _, offset, nbytes in slicer.extents_in(at, at + data.size):
                os.pwrite(copy.fileno(), data[:nbytes].data, offset)
                data = data[nbytes:]
        try:
            return _read_objects(Source(entry.path, copy.fileno(), 0, entry.size))
        except CkzError:  # damaged or too large: then its bytes are all that can be compared
            return None


def _read_objects(source: Source) -> dict[str, Any] | None:
    head = source.read(0, min(_HEAD, source.size))
    if zips.sniff(head):
        if not torch_zip.holds_torch(zips.members(source)):
            return None
        return named_leaves(source.name, torch_zip.read_object(source))
    if torch_legacy.sniff(head):
        return named_leaves(source.name, torch_legacy.read_object(source))
    return {
        f"__metadata__.{key}": value if isinstance(value, str) else None  # the format knows texts
        for key, value in safetensors.read_metadata(source).items()
    }
