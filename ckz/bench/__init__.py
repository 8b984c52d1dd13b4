"""How much each codec, each level and each rival saves on a checkpoint, and what that takes.

Codecs are measured chunk by chunk, from buffer to buffer, in one thread: for each role and element
type all that the registry and the planner offer. Levels and rivals are measured as whole commands.
All of them take turns (A B A B), so that a busy machine is busy for everybody.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ckz import kernels
from ckz.bench import sampling, tools
from ckz.bench.codecs import CodecBench
from ckz.bench.figures import ALL, Benchmark, Cost, Row, advise
from ckz.checkpoint import Checkpoint
from ckz.container_read import is_container
from ckz.errors import CkzError, UnsupportedError
from ckz.files import FileSet
from ckz.formats import read_checkpoint
from ckz.inspection import inspect
from ckz.plan import LEVELS
from ckz.workers import DEFAULT_MEMORY, start_workers

__all__ = ["Benchmark", "Cost", "Row", "bench"]

OnProgress = Callable[[int, int, int], None]

SAMPLE = 16_000_000
ROUNDS = 3
# Commands run on the checkpoint itself while it is at most this many samples long.
_WHOLE = 4
# A command that took longer than so many seconds is not run again.
_PATIENCE = 60.0


def bench(
    source: Path,
    scratch: Path,
    *,
    rivals: bool = False,
    full: bool = False,
    sample: int = SAMPLE,
    rounds: int = ROUNDS,
    progress: OnProgress | None = None,
) -> Benchmark:
    """Measure everything that applies to a checkpoint.

    Parameters
    ----------
    scratch : directory for temporary files: three times what one command compresses.
    rivals : also run the other compressors that are installed.
    full : measure on all of it, not on samples.
    sample : bytes to take of each role and element type.
    rounds : how often each setting is measured; the slowest ones only once.
    progress : called with (bytes done, bytes to do, 0).

    Raises
    ------
    CkzError
        If the source cannot be read, the disk is too small, or ckz itself fails.
    """
    if is_container(source):
        raise UnsupportedError(f"{source}: is compressed; decompress it and measure the result")
    checkpoint = read_checkpoint(source)
    if not checkpoint.nbytes:
        raise CkzError(f"{source}: is empty, there is nothing to measure")
    kernels.enable(checkpoint.nbytes)
    runners = tools.own_levels()
    if rivals:
        runners += tools.find_rivals(tools.rivals_directory())
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix=".ckz.", suffix=".ckz-tmp", dir=scratch)
        work = Path(stack.enter_context(directory))
        target, nbytes = source, checkpoint.nbytes
        sampled = not full and nbytes > _WHOLE * sample
        if sampled:
            target = work / "sample.safetensors"
            sampling.write_sample(checkpoint, target, sample)
            nbytes = target.stat().st_size
        _check_space(work, nbytes)
        paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
        files = stack.enter_context(FileSet(paths, os.O_RDONLY))
        workers = stack.enter_context(start_workers(1, DEFAULT_MEMORY))
        measurer = CodecBench(checkpoint, files, workers)
        groups, omitted = measurer.groups(None if full else sample)
        steps = sum(len(group.settings) * group.chosen_nbytes for group in groups)
        tell = _Steps(rounds * (steps + len(runners) * nbytes), progress)
        rows = [
            row
            for group in groups
            for row in sorted(measurer.measure(group, rounds, tell), key=lambda row: -row.saved)
        ]
        commands = _measure_commands(runners, target, nbytes, checkpoint, work, rounds, tell)
    level, advice = advise(
        dict(zip(LEVELS, commands, strict=False)),
        [row for row in commands[len(LEVELS) :] if not row.failed],
    )
    return Benchmark(
        source=str(source),
        format=checkpoint.format,
        raw_nbytes=checkpoint.nbytes,
        groups={(group.role, group.dtype): group.nbytes for group in groups},
        omitted_nbytes=omitted,
        sampled=sampled,
        rounds=rounds,
        rows=(*rows, *commands),
        level=level,
        advice=advice,
    )


def _measure_commands(
    runners: Sequence[tools.Tool],
    target: Path,
    nbytes: int,
    checkpoint: Checkpoint,
    work: Path,
    rounds: int,
    tell: Callable[[int], None],
) -> list[Row]:
    """Run ckz and its rivals in turns; a rival that fails is not run again."""
    dtype = _main_dtype(checkpoint)
    trials: dict[str, list[tools.Trial]] = {tool.name: [] for tool in runners}
    roles: dict[str, dict[str, tuple[int, int | None]]] = {}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for tool in runners:
            done = trials[tool.name]
            slow = done and done[0].compress.seconds + done[0].decompress.seconds > _PATIENCE
            if not slow and tool.name not in failed:
                own = work / "run"
                own.mkdir()
                try:
                    done.append(tools.measure(tool, target, own, dtype))
                    if tool.directories and tool.name not in roles:
                        roles[tool.name] = inspect(own / f"packed{tool.suffix}").roles
                except CkzError as err:
                    if tool.directories:  # ckz itself
                        raise CkzError(f"{target}: {tool.name}: {err}") from err
                    failed[tool.name] = str(err)
                shutil.rmtree(own)
            tell(nbytes)
    return [
        _row(tool.name, nbytes, trials[tool.name], roles.get(tool.name, {}), failed)
        for tool in runners
    ]


def _row(
    name: str,
    nbytes: int,
    trials: Sequence[tools.Trial],
    roles: dict[str, tuple[int, int | None]],
    failed: dict[str, str],
) -> Row:
    if name in failed:
        return Row("command", name, ALL, "", nbytes, failed=failed[name])
    return Row(
        kind="command",
        setting=name,
        role=ALL,
        dtype="",
        raw_nbytes=nbytes,
        stored_nbytes=trials[0].stored,
        compress=_cost([trial.compress for trial in trials]),
        decompress=_cost([trial.decompress for trial in trials]),
        roles=roles,
    )


def _cost(usages: Sequence[tools.Usage]) -> Cost:
    return Cost(
        tuple(usage.seconds for usage in usages),
        tuple(usage.cpu_seconds for usage in usages),
        max(usage.memory for usage in usages),
    )


def _main_dtype(checkpoint: Checkpoint) -> str:
    """Give the element type that most bytes are of; ``bytes`` if no reader knows the file."""
    counts: Counter[str] = Counter()
    for span in checkpoint.spans:
        counts[span.dtype] += span.nbytes
    return counts.most_common(1)[0][0] if counts else "bytes"


def _check_space(work: Path, nbytes: int) -> None:
    free = shutil.disk_usage(work).free
    if free < 2.5 * nbytes:
        raise CkzError(
            f"{work.parent}: no space left on the disk: about {2 * nbytes} bytes are needed, "
            f"{free} are free; set TMPDIR, or leave out --full"
        )


class _Steps:
    """Counts bytes coded, and tells."""

    def __init__(self, total: int, progress: OnProgress | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(min(self._done, self._total), self._total, 0)
