"""Which codec where: a pure function of the checkpoint and the level.

The plan is data. It is printed by ``--dry-run``, it decides nothing while bytes flow, and decoding
never looks at it.
"""

from __future__ import annotations

from typing import NamedTuple

from ckz import codecs
from ckz.checkpoint import Checkpoint
from ckz.codecs.planes import Planes
from ckz.codecs.zstd import Zstd
from ckz.errors import UsageError
from ckz.streams import Stream, build_streams

LEVELS = ("fast", "default", "max")

_ZSTD_LEVEL = {"fast": 1, "default": 3, "max": 19}

_PLANES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float8_e8m0fnu": "fp8",
}


class Plan(NamedTuple):
    """What is coded together, and how.

    Attributes
    ----------
    streams : in the order they are stored.
    codecs : for each stream the text of its codec; a chunk it does not make smaller stays raw, and
        one whose bytes came before becomes ``same``.
    """

    streams: tuple[Stream, ...]
    codecs: tuple[str, ...]


def make_plan(checkpoint: Checkpoint, level: str = "default") -> Plan:
    """Choose a codec for everything in a checkpoint.

    Raises
    ------
    UsageError
        If the level does not exist.
    """
    if level not in LEVELS:
        raise UsageError(f"level {level!r} does not exist; there are {', '.join(LEVELS)}")
    streams = build_streams(checkpoint)
    return Plan(tuple(streams), tuple(_codec(stream, level) for stream in streams))


def _codec(stream: Stream, level: str) -> str:
    if stream.dtype in _PLANES:
        return codecs.spec(Planes(_PLANES[stream.dtype], stream.byteorder))
    return codecs.spec(Zstd(_ZSTD_LEVEL[level]))
