"""The whole flow: read, code in threads, write in order, with bounded memory.

compress: one thread reads chunks in stream order, hashes them and looks for repeats; a pool codes
them; the results are written in the same order, so the bytes do not depend on the thread count.
decompress: the pool reads and decodes chunks; one thread hashes and writes them in order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from ckz import atomic, kernels
from ckz.casts import find_casts
from ckz.chain import MAX_DEPTH, Snapshot, base_rows, open_decoder, open_snapshot, read_source
from ckz.checking import check_crcs, check_sums, check_unchanged
from ckz.checkpoint import Checkpoint
from ckz.container import Container, Loss, Ref
from ckz.container_read import is_container, open_container
from ckz.container_write import Writer
from ckz.encoding import Encoder
from ckz.errors import IncompleteError, UsageError
from ckz.files import FileSet
from ckz.formats import read_checkpoint
from ckz.lossy import EXACTLY, Methods
from ckz.lossy.restored import RestoredFiles
from ckz.matching import Lean, match_base
from ckz.outputs import (
    check_sha256,
    create_files,
    mode_for,
    new_output,
    recorded_name,
    set_attributes,
    sha256_of,
)
from ckz.partial import Ask, Partial, Policy
from ckz.plan import Plan, make_plan
from ckz.replaying import Replay, find_replays
from ckz.reporting import (
    OnProgress,
    Progress,
    Report,
    name_losses,
    partial_report,
    report_on,
    summarize,
)
from ckz.restore import Decoder, decode_all
from ckz.steps import step_of
from ckz.workers import DEFAULT_MEMORY, Workers, in_order, start_workers

AnyPath = str | os.PathLike[str]
# What a container takes besides chunks, about: at all, and for a tensor.
_INDEX, _INDEX_ROW = 3000, 55
# What takes an element as long as so many when it is stored exactly and alone.
_LOSSY_WORK, _DELTA_WORK = 12, 8


def compress(
    source: AnyPath | Mapping[str, Any],
    output: AnyPath,
    *,
    base: AnyPath | None = None,
    anchor: int | None = None,
    codecs: Mapping[str, str] | None = None,
    methods: Methods = EXACTLY,
    policy: Policy | None = None,
    tokens: Sequence[Sequence[float]] | None = None,
    plt_limit: float | None = None,
    level: str = "default",
    device: str = "auto",
    threads: int = 0,
    memory: int = DEFAULT_MEMORY,
    force: bool = False,
    opaque: bool = False,
    allow_incomplete: bool = False,
    accept_bad_crc: bool = False,
    sha256: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    like: Container | None = None,
    progress: OnProgress | None = None,
) -> Report:
    """Compress a checkpoint, a file, a directory, or tensors in memory, into one .ckz.

    Parameters
    ----------
    source : a path; or a state dict, nested as you like, whose tensors may lie on a GPU: it is
        compressed as the safetensors file that it would make.
    base : an earlier checkpoint, compressed or not, that the result leans on.
    anchor : make the result full when so many snapshots lean on each other already; None
        decides by the bytes that restoring it would have to read.
    codecs : role -> name of the codec to prefer for it.
    methods : what may be lost; a base must be compressed then, so that errors do not add up.
    policy : what is saved anew, if not everything; the rest stays as it is in the base.
    tokens : that each expert of each layer has seen, in the model's order; for the policy.
    plt_limit : proportion of lost tokens beyond which twice as many experts are saved.
    level : ``fast``, ``default`` or ``max``.
    device : ``auto``, ``cpu`` or ``cuda``: where kernels run; the output does not depend on it.
    threads : 0 takes every core; the output does not depend on it.
    memory : bytes that all buffers together may take.
    force : replace an existing output.
    opaque : store a source that is damaged or no checkpoint as plain bytes.
    allow_incomplete : store a checkpoint that lacks shards it names.
    accept_bad_crc : store a zip whose checksums do not fit its data.
    sha256 : also record the sha256 of every file; it is checked on decompression.
    verify : decode the result and compare it before it gets its name.
    dry_run : plan, and write nothing.
    like : the .ckz that the source was restored from; what it says to be lost holds on.
    progress : called with (raw bytes done, raw bytes in all, bytes stored).

    Raises
    ------
    CkzError
        In its kinds; nothing is left behind and the source is untouched.
    """
    began = time.perf_counter()
    target = atomic.check_target(Path(output), force)
    if (tokens is not None or plt_limit is not None) and (not policy or policy.name == "priority"):
        raise UsageError("token counts and their limit are for partial snapshots of experts")
    if policy and not base:
        raise UsageError("a partial snapshot needs a base that has the rest; give --base")
    if (methods.is_lossy or policy) and base and not is_container(Path(base)):
        raise UsageError(
            f"{base}: a lossy or partial snapshot leans on a .ckz, whose restored values are what "
            "training would go on from; compress the base first"
        )
    if (methods.is_lossy or policy) and sha256:
        raise UsageError("what is not restored exactly has no sha256 of its source")
    with ExitStack() as stack:
        resident = None
        if isinstance(source, Mapping):
            from ckz.resident import as_file

            if sha256:
                raise UsageError("a state in memory has no file to take the sha256 of")
            source, resident = stack.enter_context(as_file(source, target))
        source = Path(source)
        checkpoint = _read_complete(source, opaque=opaque, allow_incomplete=allow_incomplete)
        state = Progress(checkpoint.nbytes, progress)
        snapshot = stack.enter_context(open_snapshot(Path(base))) if base else None
        if snapshot and _anchors(snapshot, anchor):
            snapshot = None
        work = _LOSSY_WORK if methods.is_lossy else _DELTA_WORK if snapshot else 1
        kernels.enable(checkpoint.nbytes * work, device)
        workers = stack.enter_context(start_workers(threads, memory))
        files = stack.enter_context(RestoredFiles(checkpoint, resident))
        leans = match_base(checkpoint, snapshot.checkpoint) if snapshot else {}
        casts = find_casts(checkpoint)
        step = step_of(source.name, checkpoint.numbers)
        losses: tuple[Loss, ...] = ()
        part = Partial()
        mean_error = None
        replays: dict[int, Replay] = {}

        def planned() -> Plan:
            return make_plan(checkpoint, level, casts, leans, replays, codecs, files.candidates)

        def predict() -> dict[int | None, float]:
            encoder = Encoder(checkpoint, planned(), files, snapshot, accept_bad_crc=accept_bad_crc)
            found: dict[int | None, float] = {None: float(_overhead(checkpoint))}
            for one in encoder.predict(workers):
                found[one.span] = found.get(one.span, 0.0) + one.stored
            return found

        if methods.is_lossy or (policy and snapshot):
            from ckz.lossy.fitting import approximate

            ask = None
            if policy and snapshot:
                ask = Ask(policy, snapshot.before, step, tokens, plt_limit)
            restored, losses, part, mean_error = approximate(
                checkpoint,
                methods,
                files,
                snapshot,
                leans,
                casts,
                workers,
                partial=ask,
                predict=predict,
                tell=lambda done, total: progress(done, total, 0) if progress else None,
                accept_bad_crc=accept_bad_crc,
            )
        else:
            restored = checkpoint
            replays = _find_replays(checkpoint, files, snapshot, leans) if snapshot else {}
        # Of weights alone nothing is dropped.
        preset, resumable = methods.preset, not any(loss.method == "drop" for loss in losses)
        if like is not None:
            losses = (*like.losses,)
            part = Partial(like.meta["partial"], (*like.carried,))
            step = like.meta["step"]
            preset, resumable = like.meta["preset"], like.meta["resumable"]
        report = replace(
            report_on(source, output, checkpoint, 0, began),
            losses=name_losses(checkpoint, losses),
            resumable=resumable,
            partial=partial_report(part),
            mean_error=mean_error,
        )
        encoder = Encoder(restored, planned(), files, snapshot, accept_bad_crc=accept_bad_crc)
        if dry_run:
            rows = summarize(encoder.predict(workers))
            stored = _overhead(checkpoint) + sum(row[3] for row in rows)
            return replace(report, plan=rows, stored_nbytes=stored)
        stack.enter_context(atomic.explain_full_disk(target, state))
        mode = mode_for(source, target)
        temporary = stack.enter_context(atomic.new_file(target, force=force, mode=mode))
        ended = Event()
        stack.callback(ended.set)  # or the pool would wait until a large file is hashed
        hashes = workers.pool.submit(sha256_of, checkpoint, ended) if sha256 else None
        writer = Writer(temporary)
        try:
            for coded in encoder.run(workers):
                writer.add_chunk(coded.codec, coded.payload, coded.raw, coded.checksum, coded.refs)
                state.add(coded.role, coded.raw * coded.original, len(coded.payload))
            sums = hashes.result() if hashes else {}
            if not accept_bad_crc:
                check_sums(checkpoint, workers)
            check_unchanged(checkpoint)
            stored = writer.finish(
                checkpoint,
                encoder.streams,
                encoder.digests,
                level=level,
                sha256=sums,
                base=_base_meta(snapshot, encoder.base_spans),
                base_spans=base_rows(snapshot, encoder.base_spans) if snapshot else (),
                preset=preset,
                resumable=resumable,
                losses=losses,
                step=step,
                partial=part.record,
                carried=part.carried,
            )
        finally:
            writer.close()
        # Whatever a reader would refuse must not get a name.
        with open_container(temporary) as container:
            if verify:
                _decode_and_drop(container, base if snapshot else None, workers)
        if verify:
            check_unchanged(checkpoint)
    return replace(
        report,
        stored_nbytes=stored,
        seconds=time.perf_counter() - began,
        sha256=sums,
        roles=state.roles,
    )


def _decoding_work(container: Container) -> int:
    return container.checkpoint.nbytes * (_DELTA_WORK if container.meta["base"] else 1)


def _overhead(checkpoint: Checkpoint) -> int:
    return _INDEX + _INDEX_ROW * len(checkpoint.tensors)


def _find_replays(
    checkpoint: Checkpoint, files: FileSet, snapshot: Snapshot, leans: dict[int, Lean]
) -> dict[int, Replay]:
    def read_ref(ref: Ref) -> npt.NDArray[np.uint8]:
        out = np.empty(ref.nbytes, np.uint8)
        if ref.where:
            snapshot.read(ref.span, ref.start, out)
        else:
            read_source(checkpoint, files, ref.span - len(checkpoint.files), ref.start, out)
        return out

    numbers = snapshot.checkpoint.numbers, checkpoint.numbers
    return find_replays(checkpoint, leans, numbers, read_ref)


def _decode_and_drop(container: Container, base: AnyPath | None, workers: Workers) -> None:
    with _decoder(container, base, None) as decoder:
        for _ in decode_all(decoder, workers):
            pass


def _base_meta(snapshot: Snapshot | None, used: dict[int, int]) -> dict[str, object] | None:
    if snapshot is None or not used:
        return None
    return {
        "name": snapshot.path.name,
        "depth": snapshot.depth + 1,
        "chain_nbytes": snapshot.chain_nbytes,
        "full_nbytes": snapshot.full_nbytes,
    }


def _anchors(snapshot: Snapshot, anchor: int | None) -> bool:
    """Tell whether a chain has become long enough for a full snapshot.

    Without a number, when the deltas together take four times what a full one does, so that
    restoring never reads more than five times what it would have to. (Check-N-Run, NSDI 2022,
    writes a full one once they take as much as one; its deltas are smaller.)
    """
    if snapshot.depth >= MAX_DEPTH:
        return True
    if anchor is not None:
        return snapshot.depth >= anchor
    return snapshot.depth > 0 and snapshot.chain_nbytes >= 4 * snapshot.full_nbytes


def decompress(
    source: AnyPath,
    output: AnyPath | None = None,
    *,
    base: AnyPath | None = None,
    base_dir: AnyPath | None = None,
    device: str = "auto",
    threads: int = 0,
    memory: int = DEFAULT_MEMORY,
    force: bool = False,
    dry_run: bool = False,
    progress: OnProgress | None = None,
) -> Report:
    """Give back the file or directory inside a .ckz.

    Parameters
    ----------
    output : None takes the recorded name, beside the container.
    base : what the container leans on; else it is looked for in ``base_dir`` and beside it.

    Raises
    ------
    CorruptError
        If anything does not have its recorded checksum; no output is left then.
    BaseError
        If the base is not there, or is not the one recorded.
    """
    began = time.perf_counter()
    source = Path(source)
    with ExitStack() as stack:
        container = stack.enter_context(open_container(source))
        checkpoint = container.checkpoint
        decoder = stack.enter_context(_decoder(container, base, base_dir))
        output = Path(output) if output else source.with_name(recorded_name(container))
        target = atomic.check_target(output, force)
        if not dry_run:
            atomic.check_space(target, checkpoint.nbytes)
            stack.enter_context(
                atomic.explain_full_disk(target, f"{checkpoint.nbytes} bytes needed")
            )
            temporary = stack.enter_context(new_output(checkpoint, target, force))
            kernels.enable(_decoding_work(container), device)
            workers = stack.enter_context(start_workers(threads, memory))
            paths = create_files(checkpoint, temporary)
            state = Progress(checkpoint.nbytes, progress)
            with FileSet(paths, os.O_WRONLY | os.O_NOFOLLOW) as files:
                for raw, stored in decode_all(decoder, workers, files):
                    state.add("", raw, stored)
            check_sha256(container, paths)
            if checkpoint.is_directory:
                atomic.sync_tree(temporary)
            set_attributes(checkpoint, paths, temporary)
        sums = container.meta["sha256"]
        return replace(
            report_on(source, output, checkpoint, container.nbytes, began, sums),
            losses=name_losses(checkpoint, container.losses),
            resumable=container.meta["resumable"],
        )


def verify(
    path: AnyPath,
    *,
    data: bool = False,
    base: AnyPath | None = None,
    base_dir: AnyPath | None = None,
    device: str = "auto",
    threads: int = 0,
    memory: int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Report:
    """Check every checksum of a .ckz, or what can be checked of a source.

    Parameters
    ----------
    data : decode everything in a .ckz, which needs its base. Of a source the structure, its
        completeness, and the checksums that its format has are checked, with or without.

    Raises
    ------
    CorruptError
        Naming the first tensor and chunk that does not hold.
    IncompleteError
        If a source lacks what it names.
    """
    began = time.perf_counter()
    path = Path(path)
    if not is_container(path):
        return _verify_source(path, threads, memory, progress, began)
    with open_container(path) as container, start_workers(threads, memory) as workers:
        if data:
            kernels.enable(_decoding_work(container), device)
            state = Progress(container.checkpoint.nbytes, progress)
            with _decoder(container, base, base_dir) as decoder:
                for raw, stored in decode_all(decoder, workers):
                    state.add("", raw, stored)
        else:
            state = Progress(int(container.chunks["stored"].sum(dtype=np.int64)), progress)
            jobs = (partial(container.payload, chunk) for chunk in range(len(container.chunks)))
            for payload in in_order(workers, jobs):
                state.add("", len(payload), len(payload))
        return replace(
            report_on(path, "", container.checkpoint, container.nbytes, began),
            losses=name_losses(container.checkpoint, container.losses),
            resumable=container.meta["resumable"],
        )


def _decoder(
    container: Container, base: AnyPath | None, base_dir: AnyPath | None
) -> AbstractContextManager[Decoder]:
    return open_decoder(
        container,
        base=Path(base) if base else None,
        base_dir=Path(base_dir) if base_dir else None,
    )


def _verify_source(
    path: Path, threads: int, memory: int, progress: OnProgress | None, began: float
) -> Report:
    checkpoint = _read_complete(path)
    state = Progress(checkpoint.nbytes, progress)
    with start_workers(threads, memory) as workers:
        for nbytes in check_crcs(checkpoint, workers):
            state.add("", nbytes, 0)
    if checkpoint.is_directory:
        for index, file in enumerate(checkpoint.files):
            inside = checkpoint.path_of(index)
            if file.kind == "file" and is_container(inside):
                verify(inside, threads=threads, memory=memory)
    check_unchanged(checkpoint)
    return report_on(path, "", checkpoint, checkpoint.nbytes, began)


def _read_complete(
    source: Path, *, opaque: bool = False, allow_incomplete: bool = False
) -> Checkpoint:
    checkpoint = read_checkpoint(source, opaque=opaque)
    if checkpoint.missing and not allow_incomplete:
        raise IncompleteError(
            f"{source}: {'; '.join(checkpoint.missing[:3])}"
            f"{' ...' if len(checkpoint.missing) > 3 else ''}; "
            "--allow-incomplete stores it all the same"
        )
    return checkpoint
