"""Which codec where: a pure function of the checkpoint, the level and what was found equal.

The plan is data; ``--dry-run`` prints what comes of it. For each stream it names the codecs that
may apply; where several do, the encoder decides by their cost on samples of the stream. Decoding
never looks at a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckz import codecs
from ckz.checkpoint import ITEMSIZE, Checkpoint, contiguous_strides
from ckz.codecs.bitmask import Bitmask
from ckz.codecs.cast import Cast
from ckz.codecs.planes import Planes
from ckz.codecs.rowcol import RowCol
from ckz.codecs.ulp import Ulp
from ckz.codecs.xor import Xor
from ckz.codecs.zstd import Zstd
from ckz.container import Ref
from ckz.errors import UsageError
from ckz.matching import Lean
from ckz.replaying import Replay
from ckz.streams import Stream, build_streams

LEVELS = ("fast", "default", "max")

_ZSTD_LEVEL = {"fast": 1, "default": 3, "max": 19}

_CODER = {"fast": "", "default": "", "max": "rans"}

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

_ULP = {
    **_PLANES,
    **{f"{sign}int{bits}": f"int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": "int8",
}

# Published delta codecs, kept for comparison: they are taken when asked for.
_REFERENCES: dict[str, Callable[[str], codecs.Codec]] = {"bitmask": Bitmask, "xor": Xor}

# Means of fewer rows or columns say nothing.
_MIN_SIDE = 8
# A reference to all column means must not exceed a chunk.
MAX_COLUMNS = 1 << 18


class Candidate(NamedTuple):
    """A codec that may apply to a stream.

    Attributes
    ----------
    codec : its text.
    matrix : rows and columns of the stream's one tensor, for codecs that have a model of it.
    source : ranges that, laid end to end, the whole stream derives from.
    inputs : ranges, each as long as the stream, that it is computed from element by element.
    model : what is known of the tensor beforehand; None where a pass over it has to find that.
    carried : whether parts of the tensor are those of the base, so that no one codec is for all.
    """

    codec: str
    matrix: tuple[int, int] | None = None
    source: tuple[Ref, ...] = ()
    inputs: tuple[Ref, ...] = ()
    model: npt.NDArray[np.uint8] | None = None
    carried: bool = False


class Plan(NamedTuple):
    """What is coded together, and how it may be.

    Attributes
    ----------
    streams : in the order they are stored.
    candidates : for each stream; a chunk that none makes smaller stays raw, and one whose bytes
        came before becomes ``same``.
    """

    streams: tuple[Stream, ...]
    candidates: tuple[tuple[Candidate, ...], ...]


def make_plan(
    checkpoint: Checkpoint,
    level: str = "default",
    casts: Mapping[int, tuple[Ref, ...]] | None = None,
    leans: Mapping[int, Lean] | None = None,
    replays: Mapping[int, Replay] | None = None,
    choices: Mapping[str, str] | None = None,
    quantized: Mapping[int, Candidate] | None = None,
) -> Plan:
    """Choose the codecs for everything in a checkpoint.

    Parameters
    ----------
    casts : span -> the float32 ranges that it is the 16-bit cast of.
    leans : span -> what it continues in the base.
    replays : span -> the optimizer step that makes it.
    choices : role -> the codec to take for it where it applies, by name.
    quantized : span -> the codec of values that were made to suit it.

    Raises
    ------
    UsageError
        If the level or a chosen codec does not exist.
    """
    if level not in LEVELS:
        raise UsageError(f"level {level!r} does not exist; there are {', '.join(LEVELS)}")
    leans = leans or {}
    exact = {
        span
        for span, lean in leans.items()
        if lean.dtype == checkpoint.spans[span].dtype
        and sum(ref.nbytes for ref in lean.refs) == checkpoint.spans[span].nbytes
    }
    streams = build_streams(checkpoint, exact)
    matrices = _matrices(checkpoint) if level != "fast" else {}
    nfiles = len(checkpoint.files)
    candidates = []
    for stream in streams:
        span = stream.parts[0].span - nfiles if len(stream.parts) == 1 else -1
        found = _candidates(
            stream,
            level,
            matrices.get(span),
            (casts or {}).get(span, ()),
            _lean_of(stream, nfiles, leans, exact),
        )
        if replay := (replays or {}).get(span):
            found.insert(0, Candidate(replay.codec, inputs=replay.inputs))
        if own := (quantized or {}).get(span):
            found = [own, *(c for c in found if c.source and c.source[0].where), found[-1]]
        candidates.append(_chosen(found, stream, (choices or {}).get(stream.role)))
    return Plan(tuple(streams), tuple(candidates))


def _lean_of(
    stream: Stream, nfiles: int, leans: Mapping[int, Lean], exact: set[int]
) -> Lean | None:
    """Give what a stream continues: its one span's base, or that of all its small spans."""
    spans = [part.span - nfiles for part in stream.parts]
    if len(spans) == 1:
        return leans.get(spans[0])
    if not exact.issuperset(spans):
        return None
    return Lean(stream.dtype, tuple(ref for span in spans for ref in leans[span].refs))


def _chosen(found: list[Candidate], stream: Stream, choice: str | None) -> tuple[Candidate, ...]:
    """Keep what was chosen, if it applies, and what codes the rest."""
    if choice is None:
        return tuple(found)
    if choice not in codecs.CODECS:
        raise UsageError(f"codec {choice!r} does not exist; there are {', '.join(codecs.CODECS)}")
    kept = [c for c in found if c.codec.partition(":")[0] == choice]
    base = next((c.source for c in found if c.source and c.source[0].where), ())
    if choice in _REFERENCES and base and stream.dtype in _ULP:
        kept.append(Candidate(codecs.spec(_REFERENCES[choice](_ULP[stream.dtype])), source=base))
    return (*kept, found[-1])


def _candidates(
    stream: Stream,
    level: str,
    matrix: tuple[int, int] | None,
    source: tuple[Ref, ...],
    lean: Lean | None,
) -> list[Candidate]:
    found = []
    coder = _CODER[level]
    if source:
        found.append(Candidate(codecs.spec(Cast(stream.dtype)), source=source))
    elif lean and lean.dtype == "float32" and stream.dtype in ("bfloat16", "float16"):
        found.append(Candidate(codecs.spec(Cast(stream.dtype)), source=lean.refs))
    if lean and lean.dtype == stream.dtype and stream.dtype in _ULP:
        found.append(Candidate(codecs.spec(Ulp(_ULP[stream.dtype])), source=lean.refs))
    moments = {"momentum": 1, "variance": 0}
    if matrix and stream.role in moments and (stream.dtype, stream.byteorder) == ("float32", "<"):
        found.append(Candidate(codecs.spec(RowCol(moments[stream.role], coder)), matrix=matrix))
    if stream.dtype in _PLANES:
        found.append(Candidate(codecs.spec(Planes(_PLANES[stream.dtype], stream.byteorder, coder))))
    else:
        width = ITEMSIZE[stream.dtype]
        found.append(Candidate(codecs.spec(Zstd(_ZSTD_LEVEL[level], shuffle=width))))
    return found


def _matrices(checkpoint: Checkpoint) -> dict[int, tuple[int, int]]:
    """Give rows and columns of each span that is one row-major tensor of two sides or more.

    A flat tensor that has the span as one run of its elements does not say otherwise.
    """
    found: dict[int, tuple[int, int] | None] = {}
    for tensor in checkpoint.tensors:
        for piece in tensor.pieces:
            shape = piece.shape
            fills = checkpoint.spans[piece.span].nbytes == 4 * math.prod(shape)
            whole = fills and piece.strides == contiguous_strides(shape)
            if whole and len(shape) == 1:
                continue
            sides = sides_of(shape) if whole and len(shape) > 1 else None
            if found.setdefault(piece.span, sides) != sides:
                found[piece.span] = None
    return {
        span: sides
        for span, sides in found.items()
        if sides and sides[0] >= _MIN_SIDE and _MIN_SIDE <= sides[1] <= MAX_COLUMNS
    }


def sides_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """See a tensor as a matrix: stacked matrices one below the other, a kernel as one row."""
    if min(shape[-2:]) >= _MIN_SIDE:
        return math.prod(shape[:-1]), shape[-1]
    return shape[0], math.prod(shape[1:])
