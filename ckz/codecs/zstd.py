"""zstd, for bytes without numeric structure; and zstd as a bare Huffman coder.

Compressors and decompressors keep buffers and are not thread-safe, so every thread has its own.
Decoding goes through a stream into a buffer of known size: a frame's own claim about its content
size is never believed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import zstandard

from ckz.errors import CorruptError

Bytes = npt.NDArray[np.uint8]

_local = threading.local()

# Every frame must decode with plain `zstd -d`, whose default limit is 2**27.
_MAX_WINDOW = 1 << 27

# The fast strategy with a 64-entry table and 7-byte matches finds next to no matches in numeric
# data, so what remains is zstd's Huffman coder, a new table every 128 KiB. On bf16 exponents that
# is smaller than any level, and faster.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    window_log=17,
    target_length=0,
    write_content_size=False,
    write_checksum=False,
    write_dict_id=False,
)


def _compressor(level: int | None) -> zstandard.ZstdCompressor:
    cache: dict[int | None, zstandard.ZstdCompressor] = _local.__dict__.setdefault("c", {})
    if level not in cache:
        cache[level] = (
            zstandard.ZstdCompressor(compression_params=_HUFFMAN)
            if level is None
            else zstandard.ZstdCompressor(level=level, write_content_size=False)
        )
    return cache[level]


def compress(data: Bytes | bytes, level: int | None = None) -> bytes:
    """Compress to one frame; level None is the Huffman coder."""
    return _compressor(level).compress(data if isinstance(data, bytes) else data.data)


def decompress_into(frame: memoryview | bytes, out: Bytes) -> None:
    """Decompress one frame that must fill ``out`` exactly.

    Raises
    ------
    CorruptError
        If the frame is damaged, or longer or shorter than ``out``.
    """
    if not hasattr(_local, "d"):
        _local.d = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        with _local.d.stream_reader(frame) as reader:
            got = 0
            while got < out.size and (n := reader.readinto(out.data[got:])):
                got += n
            if got != out.size or reader.read(1):
                raise CorruptError(f"zstd data do not have the expected {out.size} bytes")
    except zstandard.ZstdError as err:
        raise CorruptError(f"zstd data are damaged ({err})") from err


@dataclass(frozen=True)
class Zstd:
    """One zstd frame; ``level`` as zstd counts.

    With ``shuffle`` the first bytes of all elements of so many bytes come first, then the second
    ones: integers have their information in few of them. What is no whole element follows.
    """

    name: ClassVar[str] = "zstd"
    level: int = 3
    shuffle: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.level <= 22 and 1 <= self.shuffle <= 16):
            raise ValueError("zstd levels are 1 to 22, elements have 1 to 16 bytes")

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes:
        """Compress one chunk."""
        if self.shuffle == 1:
            return compress(chunk, self.level)
        body = chunk.size // self.shuffle * self.shuffle
        planes = chunk[:body].reshape(-1, self.shuffle).T
        return compress(planes.tobytes() + chunk[body:].tobytes(), self.level)

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Decompress one chunk."""
        if self.shuffle == 1:
            decompress_into(payload, out)
            return
        plain = np.empty(out.size, np.uint8)
        decompress_into(payload, plain)
        body = out.size // self.shuffle * self.shuffle
        out[:body].reshape(-1, self.shuffle)[:] = plain[:body].reshape(self.shuffle, -1).T
        out[body:] = plain[body:]
