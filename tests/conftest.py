"""Tiny checkpoints from seeds, and hypothesis profiles."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ckz.cli
from ckz.cli import outcome, stopping

hypothesis.settings.register_profile("default", max_examples=60, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=400, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# What a shell starts in the background ignores ^C, and so would all that is started here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def corpus() -> Path:
    """Real checkpoints of every format, where they are at hand."""
    if not SHARED.is_dir():
        pytest.skip("the corpus is not here")
    return SHARED


def state(seed: int = 0, scale: int = 1) -> dict[str, np.ndarray]:
    """Arrays of a small model: weights of several dtypes, a tied tensor, scalars, empties."""
    rng = np.random.default_rng(seed)
    embedding = rng.normal(0, 0.02, (64 * scale, 48)).astype(np.float32)
    return {
        "embed.weight": embedding,
        "head.weight": embedding.copy(),
        "layers.0.weight": rng.normal(0, 0.02, (48, 96 * scale)).astype(ml_dtypes.bfloat16),
        "layers.0.bias": rng.normal(0, 1, 48).astype(np.float16),
        "layers.0.scale": np.array(3.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "steps": np.array([7], np.int64),
        "mask": rng.random(100) > 0.5,
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small safetensors file."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(state(), path, metadata={"format": "pt"})
    return path


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run ckz in this process; the signal handlers and the logger are put back afterwards."""
    handlers = {number: signal.getsignal(number) for number in stopping.STOPS}

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["ckz", *map(str, arguments)])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # main sets its own
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            ckz.cli.main()
        out, err = capfd.readouterr()
        return Result(ended.value.code or 0, out, err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    outcome.log.handlers.clear()
