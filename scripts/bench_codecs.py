"""ckz's codecs against ZipNN's core, from buffer to buffer, with one thread and with two.

All take turns; medians of several rounds; every decoded buffer is compared. ZipNN gets all of the
data in one call, and a copy of them, for it changes its input; its core is called directly, which
saves it the copy that its Python class makes. ckz gets chunks of 1 MiB. Both return what they
compressed as new bytes objects, and that is timed; ckz decodes into a buffer of the caller's, ZipNN
into a new one. ``make peers`` installs ZipNN, ``make data`` fetches the weights.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import numpy as np
import report
from report import Bar

from ckz import kernels
from ckz.bench.tools import rivals_directory
from ckz.codecs.planes import Planes
from ckz.codecs.rowcol import RowCol, make_model
from ckz.codecs.zstd import Zstd
from ckz.formats import read_checkpoint
from ckz.streams import CHUNK

ROUNDS, QUICK_ROUNDS = 9, 2
QUICK_BYTES = 4 * CHUNK
THREADS = (1, 2)

# For each dtype: how many byte planes ZipNN makes, whether it moves the sign, and its plane order.
_ZIPNN = {"bfloat16": (2, 1, 10), "float16": (2, 0, 10), "float32": (4, 1, 220)}
_ZIPNN_CHUNK = 256 * 1024


class Matrix(NamedTuple):
    """One tensor's bytes, and its columns if it is a matrix."""

    data: np.ndarray
    columns: int = 0


class Coded(NamedTuple):
    """A chunk, coded; ``part`` is False for a model, which is no part of the data."""

    codec: Any
    payload: bytes | None
    refs: list[np.ndarray]
    chunk: np.ndarray
    part: bool

    @property
    def size(self) -> int:
        return self.chunk.size if self.payload is None else len(self.payload)


class Contender(NamedTuple):
    """A codec with a setting.

    Attributes
    ----------
    encode : takes the tensors and a pool of threads; gives the compressed data.
    decode : takes those, a buffer to fill and the pool; gives the buffer or another one.
    size : bytes of the compressed data.
    """

    name: str
    encode: Callable[[Sequence[Matrix], ThreadPoolExecutor], Any]
    decode: Callable[[Any, np.ndarray, ThreadPoolExecutor], Any]
    size: Callable[[Any], int]


class Result(NamedTuple):
    """Medians, in MB/s; a speed for each number of threads."""

    work: str
    name: str
    raw: int
    stored: int
    compress: dict[int, float]
    decompress: dict[int, float]
    spread: float

    @property
    def saved(self) -> float:
        return 100 * (1 - self.stored / self.raw)


# ckz: chunks with what they lean on


def _encode_chunks(
    codec_of: Callable[[Matrix], Any],
    compiled: bool,
    tensors: Sequence[Matrix],
    pool: ThreadPoolExecutor,
) -> list[Coded]:
    """Code tensor by tensor; a model is made of a matrix first, and its bytes are added."""
    kernels._form = kernels.COMPILED if compiled else kernels.VECTORIZED  # `enable` never slows
    waiting = []
    for tensor in tensors:
        codec = codec_of(tensor)
        refs = partial(_means, None, 0, 0)
        if isinstance(codec, RowCol):
            parts = [
                pool.submit(codec.sums, tensor.data[at : at + CHUNK], tensor.columns, at)
                for at in range(0, tensor.data.size, CHUNK)
            ]
            rows = tensor.data.size // 4 // tensor.columns
            model = make_model([part.result() for part in parts], rows, tensor.columns)
            waiting.append((Zstd(9), model, [], False, pool.submit(Zstd(9).encode, model)))
            refs = partial(_means, model, rows, tensor.columns)
        for at in range(0, tensor.data.size, CHUNK):
            chunk = tensor.data[at : at + CHUNK]
            data = refs(at, at + chunk.size)
            waiting.append((codec, chunk, data, True, pool.submit(codec.encode, chunk, data, at)))
    return [
        Coded(codec, job.result(), refs, chunk, part) for codec, chunk, refs, part, job in waiting
    ]


def _means(
    model: np.ndarray | None, rows: int, columns: int, start: int, stop: int
) -> list[np.ndarray]:
    """Give what a chunk of a matrix leans on; nothing without a model."""
    if model is None:
        return []
    first, last = start // 4 // columns, (stop // 4 - 1) // columns
    return [model[2 * first : 2 * (last + 1)], model[2 * rows :]]


def _decode_chunks(
    compiled: bool, coded: Sequence[Coded], out: np.ndarray, pool: ThreadPoolExecutor
) -> np.ndarray:
    kernels._form = kernels.COMPILED if compiled else kernels.VECTORIZED
    at = 0
    jobs = []
    for codec, payload, refs, chunk, part in coded:
        where = np.empty_like(chunk)
        if part:
            where = out[at : at + chunk.size]
            at += chunk.size
        if payload is None:
            where[:] = chunk
        else:
            jobs.append(pool.submit(codec.decode, memoryview(payload), refs, where))
    for job in jobs:
        job.result()
    return out


def _chunks_size(coded: Sequence[Coded]) -> int:
    return sum(chunk.size for chunk in coded)


def ckz(name: str, codec_of: Callable[[Matrix], Any], *, compiled: bool) -> Contender:
    """A codec of ckz, chosen for each tensor."""
    return Contender(
        name,
        partial(_encode_chunks, codec_of, compiled),
        partial(_decode_chunks, compiled),
        _chunks_size,
    )


# ZipNN's core


def zipnn(dtype: str) -> Contender | None:
    """ZipNN's core, if it is installed."""
    packages = next(rivals_directory().glob("zipnn/lib/python3*/site-packages"), None)
    if packages is None:
        return None
    sys.path.append(str(packages))
    core = importlib.import_module("zipnn_core")
    planes, bits, order = _ZIPNN[dtype]

    def encode(copy: bytearray, pool: ThreadPoolExecutor) -> tuple[bytes, int]:
        settings = (planes, bits, order, 0, _ZIPNN_CHUNK, 0.95, 10, pool._max_workers)
        return core.zipnn_core(bytearray(32), copy, *settings), len(copy)

    def decode(coded: tuple[bytes, int], out: np.ndarray, pool: ThreadPoolExecutor) -> Any:
        data, size = coded
        settings = (planes, bits, order, _ZIPNN_CHUNK, size, pool._max_workers)
        return core.combine_dtype(memoryview(data)[32:], *settings)

    return Contender("ZipNN core", encode, decode, lambda coded: len(coded[0]))


# the work


def tensors_of(path: Path, dtype: str, role: str = "") -> list[Matrix]:
    """Read the tensors of a dtype and role."""
    checkpoint = read_checkpoint(path)
    found = []
    for tensor in checkpoint.tensors:
        if tensor.dtype == dtype and role in ("", tensor.role):
            (piece,) = tensor.pieces
            span = checkpoint.spans[piece.span]
            data = np.fromfile(path, np.uint8, span.nbytes, offset=span.offset)
            columns = tensor.shape[-1] if len(tensor.shape) > 1 and min(tensor.shape) >= 8 else 0
            found.append(Matrix(data, columns))
    return found


def joined(tensors: Sequence[Matrix]) -> np.ndarray:
    """Lay tensors end to end."""
    return np.concatenate([tensor.data for tensor in tensors])


def measure(
    work: str, tensors: Sequence[Matrix], contenders: Sequence[Contender], rounds: int
) -> list[Result]:
    """Run all in turns and compare what comes back."""
    whole = joined(tensors)
    expected = whole.tobytes()
    out = np.empty_like(whole)
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    sizes = {}
    pools = {threads: ThreadPoolExecutor(threads) for threads in THREADS}
    for turn in range(rounds + 1):  # the first one loads kernels and fills buffers
        for contender, threads in product(contenders, THREADS):
            own = contender.name == "ZipNN core"
            source: Any = bytearray(expected) if own else tensors
            began = time.perf_counter()
            coded = contender.encode(source, pools[threads])
            middle = time.perf_counter()
            back = contender.decode(coded, out, pools[threads])
            ended = time.perf_counter()
            if back.data != expected if isinstance(back, np.ndarray) else back != expected:
                raise SystemExit(f"{contender.name} does not give {work} back")
            sizes[contender.name] = contender.size(coded)
            if turn:
                times.setdefault((contender.name, threads), []).append(
                    (middle - began, ended - middle)
                )
            out[:] = 0
            del coded, back, source
    for pool in pools.values():
        pool.shutdown()

    def speeds(name: str, way: int) -> dict[int, float]:
        return {
            threads: whole.size
            / 1e6
            / statistics.median(pair[way] for pair in times[name, threads])
            for threads in THREADS
        }

    def spread(name: str) -> float:
        """Half of the range over the median; the worst case."""
        columns = [column for n in THREADS for column in zip(*times[name, n], strict=True)]
        return max((max(c) - min(c)) / 2 / statistics.median(c) for c in columns)

    return [
        Result(
            work,
            c.name,
            whole.size,
            sizes[c.name],
            speeds(c.name, 0),
            speeds(c.name, 1),
            spread(c.name),
        )
        for c in contenders
    ]


def planes_contenders(dtype: str) -> list[Contender]:
    """Planes in both forms, and with the coder of level max; zstd and ZipNN."""
    rival = zipnn(dtype)
    return [
        ckz("ckz planes, compiled", lambda tensor: Planes(dtype), compiled=True),
        ckz("ckz planes, numpy", lambda tensor: Planes(dtype), compiled=False),
        ckz("ckz planes, max", lambda tensor: Planes(dtype, coder="rans"), compiled=True),
        ckz("zstd -3 of chunks", lambda tensor: Zstd(3), compiled=False),
        *([rival] if rival else []),
    ]


def moments_contenders(signed: int) -> list[Contender]:
    """The row and column model, planes for what is no matrix, and ZipNN."""

    def codec_of(tensor: Matrix, coder: str = "") -> Any:
        return RowCol(signed, coder) if tensor.columns else Planes("float32", coder=coder)

    return [
        ckz("ckz rowcol, compiled", codec_of, compiled=True),
        ckz("ckz rowcol, numpy", codec_of, compiled=False),
        ckz("ckz rowcol, max", partial(codec_of, coder="rans"), compiled=True),
        *planes_contenders("float32"),
    ]


# dtype -> bars: saved %, times ZipNN's compress and decompress speed
_BARS = {"bfloat16": (33.75, 1.5, 1.1), "float16": (None, 1.4, 1.0), "float32": (None, 2.5, 1.0)}


def speed_bars(dtype: str, results: Sequence[Result]) -> list[Bar]:
    """Compare planes with ZipNN's core."""
    least, compress, decompress = _BARS[dtype]
    own = results[0]
    rival = next((r for r in results if r.name == "ZipNN core"), None)
    bars = []
    if least:
        bars.append(
            Bar(f"MiniLM {dtype}", f"saves >= {least} %", f"{own.saved:.2f} %", own.saved >= least)
        )
    for way, factor in ("compress", compress), ("decompress", decompress):
        for threads in THREADS:
            ratio = getattr(own, way)[threads] / getattr(rival, way)[threads] if rival else None
            bars.append(
                Bar(
                    f"MiniLM {dtype}, {way}, {threads} thread{'s' * (threads > 1)}",
                    f">= {factor}x ZipNN core",
                    f"{ratio:.2f}x" if ratio else "",
                    ratio >= factor if ratio else None,
                )
            )
    return bars


def ratio_bar(role: str, factor: float, results: Sequence[Result]) -> Bar:
    """Compare the ratio on a moment with ZipNN's."""
    rival = next((r for r in results if r.name == "ZipNN core"), None)
    smallest = min(r.stored for r in results if r is not rival)  # as the encoder chooses
    gain = rival.stored / smallest if rival else None
    return Bar(
        f"Adam {role}, ratio",
        f">= {factor}x ZipNN's",
        f"{gain:.3f}x" if gain else "",
        gain >= factor if gain else None,
    )


def main() -> None:
    """Measure, print and write the tables."""
    quick = "--quick" in sys.argv[1:]
    rounds = QUICK_ROUNDS if quick else ROUNDS
    results: list[Result] = []
    bars: list[Bar] = []
    for dtype in _BARS:
        tensors = tensors_of(checkpoints.minilm(dtype), dtype)
        weights = [Matrix(joined(tensors)[: QUICK_BYTES if quick else None])]
        found = measure(f"MiniLM {dtype}", weights, planes_contenders(dtype), rounds)
        bars += speed_bars(dtype, found)
        results += found
    state = checkpoints.trained(mixed=False, quick=quick)
    for role, signed, factor in ("momentum", 1, 1.03), ("variance", 0, 1.10):
        tensors = tensors_of(state, "float32", role)
        found = measure(f"Adam {role}", tensors, moments_contenders(signed), rounds)
        bars.append(ratio_bar(role, factor, found))
        results += found
    head = ["work", "codec", "MB", "saved"]
    ways = [(way, threads) for way in ("compress", "decompress") for threads in THREADS]
    head += [f"{way}, {threads}T" for way, threads in ways] + ["spread"]
    rows = [
        [r.work, r.name, f"{r.raw / 1e6:.1f}", f"{r.saved:.2f} %"]
        + [f"{getattr(r, way)[threads]:.0f} MB/s" for way, threads in ways]
        + [f"{100 * r.spread:.0f} %"]
        for r in results
    ]
    plain = [["work", "codec", "raw_nbytes", "stored_nbytes"]]
    plain[0] += [f"{way}_{threads}_mb_per_s" for way, threads in ways]
    plain += [
        [r.work, r.name, r.raw, r.stored, *(round(getattr(r, way)[t], 1) for way, t in ways)]
        for r in results
    ]
    text = (
        "# Codecs, buffer to buffer\n\n"
        f"`python scripts/bench_codecs.py{' --quick' if quick else ''}` on {report.machine()}. "
        f"Medians of {rounds} interleaved rounds.\n\n"
        f"{(__doc__ or '').partition(chr(10))[2].strip()}\n\n"
        f"{report.bars_table(bars)}\n{report.markdown(head, rows, left=2)}"
    )
    path = report.write("codecs", text, plain, quick=quick)
    print(f"{text}\nwritten to {path}")


if __name__ == "__main__":
    main()
