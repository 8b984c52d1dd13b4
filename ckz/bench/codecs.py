"""Codecs, measured chunk by chunk from buffer to buffer, in one thread."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz import codecs
from ckz.bench.figures import Cost, Row
from ckz.bench.sampling import pick_chunks
from ckz.casts import find_casts
from ckz.checkpoint import Checkpoint
from ckz.choosing import Choice, prepare
from ckz.codecs.raw import Raw
from ckz.codecs.zstd import Zstd
from ckz.container import Ref
from ckz.errors import CorruptError
from ckz.files import FileSet
from ckz.plan import LEVELS, Candidate, make_plan
from ckz.streams import CHUNK, Slicer, Stream, parts_of
from ckz.workers import Workers

Bytes = npt.NDArray[np.uint8]

SKELETON = "skeleton"
# Of a codec with such a field every value is tried.
_FIELDS: dict[str, tuple[Any, ...]] = {"level": (1, 3, 19), "shuffle": (1,)}
# What took longer than so many seconds is not measured again.
_PATIENCE = 1.0
# A first call, which is not measured, has so many bytes.
_WARM = 1 << 14
# Kinds of data below this share of a checkpoint are left out.
_MIN_SHARE = 0.005


class Group(NamedTuple):
    """Streams of one role and element type, and what is measured on them.

    Attributes
    ----------
    nbytes : of all its streams.
    chosen : stream -> starts of the chunks to measure.
    chosen_nbytes : of those chunks.
    settings : texts of codecs.
    """

    role: str
    dtype: str
    nbytes: int
    chosen: dict[int, list[int]]
    chosen_nbytes: int
    settings: tuple[str, ...]


class _Prepared(NamedTuple):
    """A setting for one stream.

    Attributes
    ----------
    choices : the codec, and the one behind it for chunks where it does not pay.
    model_nbytes : what its model takes in a container.
    cost : seconds and CPU seconds of preparing it.
    """

    choices: list[Choice]
    model_nbytes: int
    cost: tuple[float, float]


@dataclasses.dataclass
class _Tally:
    """Sums over the chunks of one round."""

    stored: float = 0.0
    coded: int = 0
    compress: tuple[float, float] = (0.0, 0.0)
    decompress: tuple[float, float] = (0.0, 0.0)


class CodecBench:
    """Measures codecs on the streams of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, files: FileSet, workers: Workers) -> None:
        self._files = files
        self._workers = workers
        self._nfiles = len(checkpoint.files)
        self._nbytes = checkpoint.nbytes
        self._parts = parts_of(checkpoint)
        casts = find_casts(checkpoint)
        plans = [make_plan(checkpoint, level, casts) for level in LEVELS]
        self._streams = plans[1].streams
        # For each stream what any level would try; last what leans on nothing and is fast.
        self._candidates = [
            sorted({c: None for cs in several for c in cs}, key=_leans_on_nothing)
            for several in zip(*(plan.candidates for plan in reversed(plans)), strict=True)
        ]

    def groups(self, budget: int | None) -> tuple[list[Group], int]:
        """Sort the streams by role and element type.

        Parameters
        ----------
        budget : bytes of each group to measure; None is all.

        Returns
        -------
        The groups, and how many bytes are in kinds too rare to be one.
        """
        kinds: dict[tuple[str, str], list[int]] = {}
        for number, stream in enumerate(self._streams):
            skeleton = stream.parts[0].span < self._nfiles
            role = SKELETON if skeleton else stream.role
            kinds.setdefault((role, stream.dtype), []).append(number)
        sizes = {kind: sum(self._streams[n].nbytes for n in kinds[kind]) for kind in kinds}
        least = min(_MIN_SHARE * self._nbytes, max(sizes.values(), default=0))
        found = []
        for (role, dtype), numbers in sorted(kinds.items(), key=lambda item: -sizes[item[0]]):
            nbytes = sizes[role, dtype]
            if nbytes < least:
                continue
            chosen = pick_chunks(self._streams, numbers, nbytes if budget is None else budget)
            size = sum(
                min(CHUNK, self._streams[n].nbytes - start)
                for n, starts in chosen.items()
                for start in starts
            )
            group = Group(role, dtype, nbytes, chosen, size, self._settings(numbers))
            found.append(group)
        return found, sum(sizes.values()) - sum(group.nbytes for group in found)

    def measure(self, group: Group, rounds: int, tell: Callable[[int], None]) -> list[Row]:
        """Measure all settings of a group, chunk by chunk in turns.

        Parameters
        ----------
        tell : called with the bytes that one setting has coded.

        Raises
        ------
        CorruptError
            If a codec does not give a chunk back: a defect of ckz.
        """
        tallies: dict[str, list[_Tally]] = {setting: [] for setting in group.settings}
        out = np.empty(CHUNK, np.uint8)
        warm: set[str] = set()
        for turn in range(rounds):
            active = [s for s in group.settings if turn == 0 or _spent(tallies[s]) < _PATIENCE]
            skipped = len(group.settings) - len(active)
            first = turn % max(1, len(active))
            order = active[first:] + active[:first]
            for setting in active:
                tallies[setting].append(_Tally())
            for number, starts in group.chosen.items():
                stream = self._streams[number]
                ready = {setting: self._prepare(number, setting) for setting in active}
                for setting, prepared in ready.items():
                    share = sum(min(CHUNK, stream.nbytes - at) for at in starts) / stream.nbytes
                    tally = tallies[setting][-1]
                    tally.stored += prepared.model_nbytes * share
                    tally.compress = _add(tally.compress, prepared.cost, share)
                for start in starts:
                    chunk = self._read(number, start)
                    for setting in order:
                        if setting not in warm:  # Numba loads a kernel at its first call
                            few = chunk[:_WARM]
                            attempts = self._attempts(ready[setting], start, few.size)
                            _code(attempts, few, start, out[: few.size], _Tally())
                            warm.add(setting)
                        attempts = self._attempts(ready[setting], start, chunk.size)
                        _code(attempts, chunk, start, out[: chunk.size], tallies[setting][-1])
                        tell(chunk.size)
                    tell(chunk.size * skipped)
        return [
            _row(group, setting, tallies[setting])
            for setting in group.settings
            if tallies[setting][0].coded or self._is_planned(group, setting)
        ]

    def _settings(self, numbers: Sequence[int]) -> tuple[str, ...]:
        stream = self._streams[numbers[0]]
        planned = (c.codec for number in numbers for c in self._candidates[number])
        return tuple(dict.fromkeys([*planned, *map(codecs.spec, variants(stream))]))

    def _is_planned(self, group: Group, setting: str) -> bool:
        """Tell whether ckz might choose it; what only the registry offers may not apply at all."""
        planned = (c.codec for number in group.chosen for c in self._candidates[number])
        return setting == Raw.name or setting in planned

    def _prepare(self, number: int, setting: str) -> _Prepared:
        """Make a setting ready for a stream; where it does not apply, the plain codec stands in."""
        candidates = self._candidates[number]
        plain = candidates[-1]
        chosen = next((c for c in candidates if c.codec == setting), None)
        if chosen is None:
            applies = _leans_on_nothing(Candidate(setting)) and setting in map(
                codecs.spec, variants(self._streams[number])
            )
            chosen = Candidate(setting) if applies else plain
        stream = self._streams[number]
        began, cpu = time.perf_counter(), time.process_time()
        read = partial(self._fill, number)
        choices = [
            prepare(stream, candidate, read, self._workers, len(self._parts))
            for candidate in ([chosen] if chosen == plain else [chosen, plain])
        ]
        model = choices[0].model
        nbytes = 0 if model is None else len(Zstd(9).encode(model))
        took = time.perf_counter() - began, time.process_time() - cpu
        return _Prepared(choices, nbytes, (0.0, 0.0) if model is None else took)

    def _attempts(
        self, prepared: _Prepared, start: int, size: int
    ) -> list[tuple[codecs.Codec, list[Bytes]]]:
        """Give codecs to try on a chunk, with what each leans on, read."""
        found = []
        for choice in prepared.choices:
            refs = choice.refs(start, start + size) or ()
            if (model := choice.model) is not None:
                data = [model[ref.start : ref.start + ref.nbytes] for ref in refs]
            else:
                data = [self._read_ref(ref) for ref in refs]
            found.append((choice.codec, data))
        return found

    def _read(self, number: int, start: int) -> Bytes:
        chunk = np.empty(min(CHUNK, self._streams[number].nbytes - start), np.uint8)
        self._fill(number, start, chunk)
        return chunk

    def _fill(self, number: int, start: int, out: Bytes) -> None:
        slicer = Slicer(self._streams[number].parts)
        self._files.read(slicer.extents_in(start, start + out.size), out)

    def _read_ref(self, ref: Ref) -> Bytes:
        out = np.empty(ref.nbytes, np.uint8)
        slicer = Slicer([self._parts[ref.span]])
        self._files.read(slicer.extents_in(ref.start, ref.start + ref.nbytes), out)
        return out


def variants(stream: Stream) -> Iterator[codecs.Codec]:
    """Give every codec of the registry whose fields follow from a stream's elements."""
    known = {**_FIELDS, "dtype": (stream.dtype,), "byteorder": (stream.byteorder,)}
    for cls in codecs.CODECS.values():
        names = [f.name for f in dataclasses.fields(cls)]
        if not set(names) <= set(known):
            continue
        for values in itertools.product(*(known[name] for name in names)):
            try:
                yield cls(**dict(zip(names, values, strict=True)))
            except ValueError:  # not for this type
                continue


def _leans_on_nothing(candidate: Candidate) -> bool:
    return not (candidate.source or candidate.matrix or candidate.inputs)


def _spent(tallies: Sequence[_Tally]) -> float:
    return sum(tally.compress[0] + tally.decompress[0] for tally in tallies)


def _add(
    total: tuple[float, float], cost: tuple[float, float], share: float = 1.0
) -> tuple[float, float]:
    return total[0] + share * cost[0], total[1] + share * cost[1]


def _code(
    attempts: Sequence[tuple[codecs.Codec, list[Bytes]]],
    chunk: Bytes,
    start: int,
    out: Bytes,
    tally: _Tally,
) -> None:
    """Encode and decode one chunk by the first codec that pays, as ``compress`` does."""
    began, cpu = time.perf_counter(), time.thread_time()
    payload: bytes | None = None
    for codec, data in attempts:
        payload = codec.encode(chunk, data, start)
        if payload is not None and len(payload) <= chunk.size:
            break
    else:
        codec, data, payload = Raw(), [], chunk.tobytes()
    tally.compress = _add(tally.compress, (time.perf_counter() - began, time.thread_time() - cpu))
    began, cpu = time.perf_counter(), time.thread_time()
    codec.decode(memoryview(payload), data, out)
    tally.decompress = _add(
        tally.decompress, (time.perf_counter() - began, time.thread_time() - cpu)
    )
    if not np.array_equal(out, chunk):
        raise CorruptError(
            f"{codecs.spec(codec)} does not give a chunk back: a defect of ckz; please report it"
        )
    tally.stored += len(payload)
    tally.coded += codec is attempts[0][0]


def _row(group: Group, setting: str, tallies: Sequence[_Tally]) -> Row:
    def cost(pairs: Iterator[tuple[float, float]]) -> Cost:
        seconds, cpu = zip(*pairs, strict=True)
        return Cost(seconds, cpu)

    return Row(
        kind="codec",
        setting=setting,
        role=group.role,
        dtype=group.dtype,
        raw_nbytes=group.chosen_nbytes,
        stored_nbytes=round(tallies[0].stored),
        compress=cost(tally.compress for tally in tallies),
        decompress=cost(tally.decompress for tally in tallies),
    )
