"""Codecs chosen by samples, against the best of all that may apply."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED

from ckz.casts import find_casts
from ckz.chain import open_snapshot
from ckz.choosing import Choice, ReadRef, ReadStream, choose, prepare
from ckz.encoding import Encoder, _read_stream
from ckz.formats import read_checkpoint
from ckz.lossy.restored import RestoredFiles
from ckz.matching import match_base
from ckz.pipeline import _find_replays
from ckz.plan import make_plan
from ckz.streams import CHUNK, Slicer
from ckz.workers import DEFAULT_MEMORY, start_workers

SERIES = {
    "series/gpt_bf16/iter_0000201.pt": "series/gpt_bf16/iter_0000200.pt",
    "series/gpt_bf16/iter_0000220.pt": "series/gpt_bf16/iter_0000200.pt",
    "series/mixtral_moe/step_00120.pt": "series/mixtral_moe/step_00101.pt",
    "series/resnet_sgd/it_00066.pt": "series/resnet_sgd/it_00044.pt",
}


def sources() -> list[str]:
    if not SHARED.is_dir():
        return []
    single = [p for p in SHARED.rglob("*") if p.is_file() and p.stat().st_size > 100_000]
    return sorted(str(p.relative_to(SHARED)) for p in single)


def cost(choices: list[Choice], nbytes: int, read: ReadStream, read_ref: ReadRef) -> int:
    """Code a whole stream, each chunk by the first codec that pays."""
    total = 0 if choices[0].model is None else choices[0].model.size
    for start in range(0, nbytes, CHUNK):
        chunk = np.empty(min(CHUNK, nbytes - start), np.uint8)
        read(start, chunk)
        best = chunk.size
        for choice in choices:
            refs = choice.refs(start, start + chunk.size) or ()
            payload = choice.codec.encode(chunk, choice.read(refs, read_ref), start)
            if payload is not None:
                best = len(payload)
                break
        total += best
    return total


@pytest.mark.slow
@pytest.mark.parametrize("based", [False, True])
def test_choices_are_nearly_the_best(corpus: Path, based: bool) -> None:
    for name in SERIES if based else sources():
        source = corpus / name
        with ExitStack() as stack:
            checkpoint = read_checkpoint(source)
            snapshot = stack.enter_context(open_snapshot(corpus / SERIES[name])) if based else None
            leans = match_base(checkpoint, snapshot.checkpoint) if snapshot else {}
            replays = _find_replays(checkpoint, snapshot, leans) if snapshot else {}
            plan = make_plan(checkpoint, "default", find_casts(checkpoint), leans, replays)
            files = stack.enter_context(RestoredFiles(checkpoint))
            workers = stack.enter_context(start_workers(2, DEFAULT_MEMORY))
            encoder = Encoder(checkpoint, plan, files, snapshot)
            read_ref = partial(encoder._read_ref, files)

            chosen = best = 0
            for stream, candidates in zip(plan.streams, plan.candidates, strict=True):
                read = partial(_read_stream, files, Slicer(stream.parts))
                found = choose(stream, candidates, read, read_ref, workers, -1)
                each = [prepare(stream, c, read, workers, -1) for c in candidates]
                chosen += cost(found, stream.nbytes, read, read_ref)
                best += min(cost([c, each[-1]], stream.nbytes, read, read_ref) for c in each)
            assert chosen <= 1.01 * best, name
