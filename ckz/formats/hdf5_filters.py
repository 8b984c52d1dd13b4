"""HDF5 filters undone without the HDF5 library, on the bytes of one chunk.

So the values of a filtered dataset can be read wherever the chunk's bytes are kept. A chunk's
filters are written as ``hdf5:shuffle4,deflate``, in the order in which they were applied; that
keeps the distinct texts of a file few.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from ckz.errors import CorruptError, UnsupportedError

MAX_CHUNK = 256 << 20  # bytes, unpacked

_NAMES = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
_PREFIX = "hdf5:"


def name_of(code: int, values: Sequence[int]) -> str | None:
    """Name a filter by its registered number and its parameters; None if it cannot be undone."""
    name = _NAMES.get(code)
    if name == "shuffle":
        return f"shuffle{values[0]}" if len(values) == 1 and 0 < values[0] <= 64 else None
    return name


def unpack(stored: bytes, packed: str, nbytes: int) -> bytes:
    """Give the values of a chunk, row-major, edge chunks whole.

    Parameters
    ----------
    stored : the chunk as it lies in the file.
    packed : of its span.
    nbytes : how many bytes the caller needs; a chunk may hold more.

    Raises
    ------
    CorruptError
        If the bytes are not what the filters would have made, or too few.
    UnsupportedError
        If ``packed`` names a filter that is not known here.
    """
    data = bytes(stored)
    for name in reversed(packed.removeprefix(_PREFIX).split(",")):
        if name == "deflate":
            data = _inflate(data)
        elif name == "lzf":
            data = _unlzf(data)
        elif name == "fletcher32":
            data = data[:-4]  # damage is found by ckz's own checksums
        elif name.startswith("shuffle") and name[7:].isdecimal() and len(name) < 16:
            data = _unshuffle(data, int(name[7:]))
        else:
            raise UnsupportedError(f"HDF5 filter {name!r} cannot be undone here")
    if len(data) < nbytes:
        raise CorruptError(f"an HDF5 chunk holds {len(data)} of {nbytes} bytes")
    return data


def _inflate(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        out = inflater.decompress(data, MAX_CHUNK)
    except zlib.error as err:
        raise CorruptError(f"a deflated HDF5 chunk is damaged ({err})") from err
    if not inflater.eof:
        raise CorruptError("a deflated HDF5 chunk is cut short or absurdly large")
    return out


def _unshuffle(data: bytes, itemsize: int) -> bytes:
    """Put the bytes of each element together again; HDF5 leaves a remainder as it is."""
    whole = len(data) // itemsize * itemsize if itemsize else 0
    if not whole:
        return data
    planes = np.frombuffer(data, np.uint8, whole).reshape(itemsize, -1)
    return planes.T.tobytes() + data[whole:]


def _unlzf(data: bytes) -> bytes:
    """Undo LibLZF: literal runs of up to 32 bytes, and copies of 3 to 264 earlier ones."""
    out = bytearray()
    at = 0
    try:
        while at < len(data):
            control = data[at]
            at += 1
            if control < 32:
                run = data[at : at + control + 1]
                if len(run) <= control:
                    raise IndexError
                out += run
                at += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += data[at]
                at += 1
            back = ((control & 31) << 8 | data[at]) + 1
            at += 1
            length += 2
            if back > len(out) or len(out) + length > MAX_CHUNK:
                raise IndexError
            start = len(out) - back
            while length > 0:  # a copy may overlap what it writes
                run = bytes(out[start : start + length])
                out += run
                length -= len(run)
                start += len(run)
    except IndexError as err:
        raise CorruptError("an LZF-compressed HDF5 chunk is damaged") from err
    return bytes(out)
