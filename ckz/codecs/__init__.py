"""The codecs, and how they are written down.

A codec is a frozen dataclass whose fields are its stored configuration. ``encode(chunk, refs, at)``
gives a payload, or None when this codec does not pay; ``decode(payload, refs, out)`` fills ``out``,
whose size comes from the container and never from the payload. Codecs keep no state and may be used
by many threads at once. Payloads are untrusted: whatever does not add up raises ``CorruptError``.

A codec is stored as text, ``name:field=value,field=value`` (fields at their default are left out);
the same words stand on the command line, in ``inspect`` and in the container. To add a codec, write
one file and one line in ``CODECS``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from ckz.codecs.adam import AdamVariance, AdamWeight
from ckz.codecs.bitmask import Bitmask
from ckz.codecs.cast import Cast
from ckz.codecs.cluster import Cluster
from ckz.codecs.deadzone import Deadzone
from ckz.codecs.lc import Lc
from ckz.codecs.moments import MomentsMomentum, MomentsVariance
from ckz.codecs.planes import Planes
from ckz.codecs.raw import Raw
from ckz.codecs.rowcol import RowCol
from ckz.codecs.same import Same
from ckz.codecs.ulp import Ulp
from ckz.codecs.xor import Xor
from ckz.codecs.zstd import Zstd
from ckz.errors import UnsupportedError

Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """What every codec offers."""

    name: ClassVar[str]

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code one chunk that lies ``at`` bytes into its stream.

        None when that does not pay, or when the codec needs references and these are not they.
        """
        ...

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Fill ``out`` from a payload and the decoded references of the chunk."""
        ...


CODECS: dict[str, Any] = {
    "raw": Raw,
    "zstd": Zstd,
    "planes": Planes,
    "same": Same,
    "rowcol": RowCol,
    "cast": Cast,
    "ulp": Ulp,
    "adam-weight": AdamWeight,
    "adam-variance": AdamVariance,
    "bitmask": Bitmask,
    "xor": Xor,
    "deadzone": Deadzone,
    "lc": Lc,
    "cluster": Cluster,
    "moments-momentum": MomentsMomentum,
    "moments-variance": MomentsVariance,
}


# How many references a chunk has, and how many bytes in all, as a multiple of its own; None: free.
REFERENCES: dict[str, tuple[int | None, int | None]] = {
    "raw": (0, 0),
    "zstd": (0, 0),
    "planes": (0, 0),
    "same": (1, 1),
    "rowcol": (2, None),
    "cast": (None, Cast.ratio),
    "ulp": (None, 1),
    "adam-weight": (3, 3),
    "adam-variance": (3, 3),
    "bitmask": (None, 1),
    "xor": (None, 1),
    "deadzone": (None, None),
    "lc": (None, None),
    "cluster": (1, None),
    "moments-momentum": (1, 1),
    "moments-variance": (None, None),
}


def spec(codec: Codec) -> str:
    """Write a codec as text, e.g. ``planes:dtype=bfloat16``."""
    changed = [
        f"{field.name}={value}"
        for field in dataclasses.fields(codec)  # type: ignore[arg-type]
        if (value := getattr(codec, field.name)) != field.default
    ]
    return codec.name + (":" + ",".join(changed) if changed else "")


def parse(text: str) -> Codec:
    """Read what ``spec`` wrote.

    Raises
    ------
    UnsupportedError
        If the codec or one of its fields is not known here.
    """
    name, _, rest = text.partition(":")
    if name not in CODECS:
        raise UnsupportedError(f"codec {name!r} is not known to this ckz; a newer one may read it")
    cls: Any = CODECS[name]
    kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(cls)}
    values = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            values[key] = kinds[key](value)
        except (KeyError, ValueError) as err:
            raise UnsupportedError(f"codec {text!r}: {item!r} is not known to this ckz") from err
    try:
        codec: Codec = cls(**values)
    except ValueError as err:
        raise UnsupportedError(f"codec {text!r}: {err}") from err
    return codec
