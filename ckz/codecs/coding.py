"""What codecs of numbers share: byte planes, each coded only where that pays."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckz.codecs.zstd import compress, decompress_into
from ckz.errors import CorruptError
from ckz.kernels.buffers import scratch

Bytes = npt.NDArray[np.uint8]

# 4096 samples show a gain of 0.03 bit at ten standard deviations.
_SAMPLES = 4096
_PAYS = 0.03


def _compressible(plane: Bytes) -> bool:
    """Tell from a sample whether Huffman coding could save anything."""
    step = max(1, plane.size // _SAMPLES)
    sample = plane[: step * _SAMPLES : step]
    counts = np.bincount(sample, minlength=256)
    n = sample.size
    # Second-order expansion of the entropy around the uniform one: exact where it matters.
    excess = (float((counts * counts).sum()) - n) * 256 / max(1, n * (n - 1)) - 1
    return bool(excess / (2 * np.log(2)) > _PAYS)


def encode_planes(planes: Sequence[Bytes], *, always: bool = False) -> list[bytes | memoryview]:
    """Code planes one by one: first their stored lengths, then each coded, or as it is.

    Parameters
    ----------
    always : try them all; of planes that are known to be compressible no sample need be looked at.
    """
    stored: list[bytes | memoryview] = []
    for plane in planes:
        coded = compress(plane) if always or _compressible(plane) else plane.data
        stored.append(coded if len(coded) < plane.size else plane.data)
    return [struct.pack(f"<{len(stored)}I", *map(len, stored)), *stored]


def decode_planes(payload: memoryview, sizes: Sequence[int]) -> tuple[list[Bytes], memoryview]:
    """Undo ``encode_planes`` into scratch buffers; also give what follows in the payload.

    Raises
    ------
    CorruptError
        If the lengths do not fit the sizes or the payload.
    """
    head = 4 * len(sizes)
    if len(payload) < head:
        raise CorruptError("planes lack their lengths")
    lengths = struct.unpack_from(f"<{len(sizes)}I", payload)
    if head + sum(lengths) > len(payload):
        raise CorruptError("planes are longer than their chunk")
    planes = []
    for k, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        plane = scratch(f"plane{k}", size)
        if length > size:
            raise CorruptError("a plane is longer than the chunk allows")
        if length == size:
            plane[:] = np.frombuffer(payload, np.uint8, size, head)
        else:
            decompress_into(payload[head : head + length], plane)
        planes.append(plane)
        head += length
    return planes, payload[head:]
