"""Codecs chosen by samples, against the best of all that may apply."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, Run

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
            files = stack.enter_context(RestoredFiles(checkpoint))
            replays = _find_replays(checkpoint, files, snapshot, leans) if snapshot else {}
            plan = make_plan(checkpoint, "default", find_casts(checkpoint), leans, replays)
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


def test_auto_finds_casts_repeats_and_the_optimizers_step(run: Run, tmp_path: Path) -> None:
    """A tied embedding saved twice, weights that are casts of masters, one step of AdamW apart."""
    torch.manual_seed(0)
    masters = [torch.randn(128, 96, requires_grad=True), torch.randn(96, 64, requires_grad=True)]
    optimizer = torch.optim.AdamW(masters, 1e-3, foreach=False)

    def save(step: int) -> Path:
        for p in masters:
            p.grad = torch.randn(p.shape) * 1e-3
        optimizer.step()
        names = ("embed.weight", "proj.weight")
        weights = {n: p.detach().bfloat16() for n, p in zip(names, masters, strict=True)}
        weights["head.weight"] = weights["embed.weight"].clone()
        state = optimizer.state_dict()
        own = {n: p.detach().clone() for n, p in zip(names, masters, strict=True)}
        path = tmp_path / f"step_{step}.pt"
        torch.save({"model": weights, "optimizer": state, "fp32_master": own}, path)
        return path

    for step in range(1, 4):
        save(step)
    base, last = save(4), save(5)
    report = json.loads(run("compress", "--auto", "--json", "-n", last, "--base", base).out)
    by_role: dict[str, set[str]] = {}
    for role, codec, _, _ in report["results"][0]["plan"]:
        by_role.setdefault(role, set()).add(codec.partition(":")[0])
    assert "adam-variance" in by_role["variance"]
    assert "adam-weight" in by_role["master"] | by_role["weight"]
    assert {"cast", "same"} <= by_role["weight"] | by_role["master"]
