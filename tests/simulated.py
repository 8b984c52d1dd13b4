"""Run by test_cuda.py where Numba's simulator stands in for a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from cuda_cases import CASES, copies, near, words, written

import ckz
from ckz import codecs, kernels
from ckz.kernels import device

# The simulator's threads do not know what warnings are silenced here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_form", kernels.CUDA)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 7, 33, 1500])
def test_simulator_and_body_agree(name: str, n: int) -> None:
    kernel, make = CASES[name]
    arguments = make(n, np.random.default_rng(n))
    there, here = copies(arguments), copies(arguments)
    with np.errstate(all="ignore"):
        kernel(*there)
        kernel.body(*here)
    for a, b in zip(written(kernel, there), written(kernel, here), strict=True):
        assert a.tobytes() == b.tobytes()


def pair(kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    base = words(n, rng)
    if kind == "random":
        return rng.integers(0, 1 << 16, n, dtype=np.uint16), base
    if kind == "same":
        return base.copy(), base
    if kind == "constant":
        return np.full(n, 7, np.uint16), np.zeros(n, np.uint16)
    if kind == "alternating":
        return base ^ (np.arange(n) & 1).astype(np.uint16), base
    return near(base, rng), base


def check_codec(name: str, kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code on the device and on the CPU; decode each with the other."""
    current, base = (x.view(np.uint8) for x in pair(kind, n))
    codec = codecs.parse(f"{name}:dtype=bfloat16")
    refs = [] if name == "planes" else [base]
    payloads: list[Any] = []
    for form in (kernels.CUDA, kernels.VECTORIZED):
        monkeypatch.setattr(kernels, "_form", form)
        payloads.append(codec.encode(current, refs))
    assert payloads[0] == payloads[1]
    for form in (kernels.CUDA, kernels.VECTORIZED):
        monkeypatch.setattr(kernels, "_form", form)
        if payloads[0] is not None:
            out = np.empty(current.size, np.uint8)
            codec.decode(memoryview(payloads[0]), refs, out)
            assert out.tobytes() == current.tobytes()


@pytest.mark.parametrize("kind", ["random", "same", "constant", "weights", "alternating"])
@pytest.mark.parametrize("codec", ["bitmask", "ulp", "planes"])
@pytest.mark.parametrize("n", [1, 40, 2100])
def test_payloads_of_the_simulator(
    codec: str, kind: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_codec(codec, kind, n, monkeypatch)


def save_run(directory: Path) -> list[Path]:
    """Train a small network, and save its state twice, as training scripts do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 8))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    saved = []
    for step in range(1, 9):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        (model(x) - x[:, :8]).square().mean().backward()
        optimizer.step()
        if step in (4, 8):
            weights = {name: w.bfloat16() for name, w in model.state_dict().items()}
            state = {"model": weights, "optimizer": optimizer.state_dict()}
            saved.append(directory / f"step_{step}.pt")
            torch.save({**state, "masters": model.state_dict()}, saved[-1])
    return saved


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--codec", "weight=bitmask"],
        ["--codec", "weight=ulp"],
        ["--optimizer", "cluster:16"],
        ["--weights", "lc:3", "--optimizer", "moments:0.1"],
        ["--weights", "deadzone:0.1"],
    ],
    ids=" ".join,
)
def test_commands_give_the_same_bytes(options: list[str], tmp_path: Path, run: Run) -> None:
    base, source = save_run(tmp_path)
    made = {}
    for where in ("cpu", "cuda"):
        there = tmp_path / where
        there.mkdir()
        full, delta = there / f"{base.name}.ckz", there / f"{source.name}.ckz"
        assert run("compress", base, "-o", full, "--device", where).code == 0
        more = ["-o", delta, "--base", full, "--device", where, *options]
        assert run("compress", source, *more).code == 0
        assert kernels.on_device() == (where == "cuda")
        back = there / source.name
        assert run("decompress", delta, "-o", back, "--device", where).code == 0
        made[where] = [path.read_bytes() for path in (full, delta, back)]
    assert made["cpu"] == made["cuda"]


def test_threads_have_streams_and_buffers_of_their_own(tmp_path: Path, run: Run) -> None:
    _, source = save_run(tmp_path)
    outputs = []
    for threads in ("1", "4"):
        out = tmp_path / f"{threads}.ckz"
        arguments = ["-o", out, "--device", "cuda", "--threads", threads]
        assert run("compress", source, *arguments).code == 0
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]


def test_a_state_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels work on the tensors themselves: they are not copied to the device again."""
    from numba import cuda

    rng = np.random.default_rng(0)
    base = words(3000, rng)
    first, later = {"model.w": base}, {"model.w": near(base, rng)}
    copied: list[str] = []
    staged = device._pinned
    monkeypatch.setattr(
        device, "_pinned", lambda key, *how: copied.append(key) or staged(key, *how)
    )
    sizes, copies_of_chunks = [], []
    for where in ("host", "device"):
        there = tmp_path / where
        there.mkdir()
        copied.clear()
        for name, state in (("0", first), ("1", later)):
            if where == "device":
                state = {key: cuda.to_device(value) for key, value in state.items()}
            under = {"base": there / "0.ckz"} if name == "1" else {}
            ckz.compress(state, there / f"{name}.ckz", device="cuda", **under)
        assert np.array_equal(ckz.open(there / "1.ckz")["model.w"], later["model.w"])
        sizes.append([(there / f"{name}.ckz").stat().st_size for name in "01"])
        copies_of_chunks.append(copied.count("put current") + copied.count("put chunk"))
    assert sizes[0] == sizes[1]
    # What is left are samples, which plans are made from.
    assert copies_of_chunks[1] < copies_of_chunks[0]


def test_a_device_that_fails(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may be full: one line, no output, and no fallback that nobody asked for."""

    class CudaAPIError(Exception):
        __module__ = "numba.cuda.cudadrv.driver"

    def fail(kernel: object) -> None:
        raise CudaAPIError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY\nmore")

    monkeypatch.setattr(device, "_compiled", fail)
    _, source = save_run(tmp_path)
    done = run("compress", source, "--device", "cuda")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "the GPU fails: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY;" in done.err
    assert not source.with_name(f"{source.name}.ckz").exists()


def test_the_device_is_described(run: Run) -> None:
    assert device.why_not() == ""
    assert "simulator" in run("inspect", "--device").out
