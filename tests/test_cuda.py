"""Kernels on a GPU: they compile without one, run in Numba's simulator, and give the same bytes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run
from cuda_cases import CASES, copies, written

import ckz.kernels
from ckz import kernels
from ckz.kernels import Kernel, device

CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
TESTS = Path(__file__).parent

needs_numba_cuda = pytest.mark.skipif(
    not find_spec("numba_cuda"), reason="numba-cuda is not installed: pip install 'ckz[cuda]'"
)


def every_kernel() -> Iterator[Kernel]:
    """All that say what they write, wherever they stand."""
    for name in sorted(path.stem for path in Path(ckz.kernels.__file__).parent.glob("*.py")):
        module = __import__(f"ckz.kernels.{name}", fromlist=["x"]) if name[0] != "_" else None
        for value in vars(module).values() if module else ():
            if isinstance(value, Kernel) and value.outputs:
                yield value


def test_every_kernel_is_among_the_cases() -> None:
    assert {id(kernel) for kernel in every_kernel()} == {id(kernel) for kernel, _ in CASES.values()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 7, 8, 1000, 5000])
def test_forms_for_the_cpu_agree(name: str, n: int) -> None:
    kernel, make = CASES[name]
    arguments = make(n, np.random.default_rng(n))
    found = []
    for form in (kernel.body, kernel.vectorized, kernel.compiled):
        mine = copies(arguments)
        with np.errstate(all="ignore"):
            form(*mine)
        found.append(written(kernel, mine))
    for outputs in found[1:]:
        for a, b in zip(found[0], outputs, strict=True):
            assert a.tobytes() == b.tobytes()


@needs_numba_cuda
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_to_ptx(name: str, capability: tuple[int, int]) -> None:
    from numba import cuda, typeof

    kernel, make = CASES[name]
    arguments = make(64, np.random.default_rng(0))
    signature = tuple(typeof(a) for a in arguments)
    function = device.for_cuda(kernel, simulated=False)
    ptx, _ = cuda.compile_ptx(function, signature, cc=capability)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    # A product and a sum rounded once give other last bits than on a CPU.
    assert not re.search(r"\b(fma|mad)\S*\.f(32|64)", ptx)
    assert not re.search(r"\b(div|sqrt)\.(approx|full)", ptx)


@needs_numba_cuda
def test_ballots_are_where_they_pay() -> None:
    from numba import cuda, typeof

    for name in ("bitmask.mark", "bitmask.take", "bitmask.fill", "sorting.rank", "sorting.sort"):
        kernel, make = CASES[name]
        signature = tuple(typeof(a) for a in make(64, np.random.default_rng(0)))
        ptx, _ = cuda.compile_ptx(device.for_cuda(kernel, simulated=False), signature, cc=(9, 0))
        assert "vote.sync.ballot" in ptx
        assert "popc" in ptx


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
    )


@needs_numba_cuda
@pytest.mark.parametrize(
    "which", ["agree and not 1500", pytest.param("not agree or 1500", marks=pytest.mark.slow)]
)
def test_in_the_simulator(which: str) -> None:
    """What stands in simulated.py, in a process where the simulator is a device."""
    tests = str(TESTS / "simulated.py")
    done = simulate("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", which)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_not", lambda: "there is none")
    monkeypatch.setattr(kernels, "_form", kernels.VECTORIZED)


@pytest.mark.usefixtures("no_device")
def test_without_a_device(tmp_path: Path, run: Run) -> None:
    source = tmp_path / "w.bin"
    source.write_bytes(bytes(5000))
    container = f"{source}.ckz"
    failed = run("compress", source, "--device", "cuda")
    assert failed.code == 1
    assert not Path(container).exists()
    assert run("compress", source, "--device", "auto").code == 0
    again = [
        run(*command, "--device", "cuda")
        for command in (
            ["decompress", "-f", container],
            ["verify", "--data", container],
        )
    ]
    for done in (failed, *again):
        assert done.code == 1
        assert "--device cuda: there is none" in done.err
        assert len(done.err.splitlines()) == 1
    assert run("compress", source, "--device", "gpu", "-f").code == 2


@pytest.mark.usefixtures("no_device")
def test_inspect_says_what_there_is(run: Run) -> None:
    assert run("inspect", "--device").out == "device: none, there is none\n"
    found = json.loads(run("inspect", "--device", "--json").out)
    assert found["device"]["reason"] == "there is none"
    assert run("inspect").code == 2


@pytest.mark.usefixtures("no_device")
def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.enable(kernels.WORTH, "auto")
    assert kernels._form == kernels.COMPILED
    monkeypatch.setattr(device, "why_not", str)
    kernels.enable(kernels.WORTH - 1, "auto")
    assert not kernels.on_device()
    kernels.enable(kernels.WORTH, "auto")
    assert kernels.on_device()
    kernels.enable(1, "cpu")
    assert kernels._form == kernels.VECTORIZED


# -- where there is a device -----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 31, 32, 1000, 10**5, 10**7, 10**8])
def test_device_and_cpu_agree(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, make = CASES[name]
    arguments = make(n, np.random.default_rng(n))
    there, here = copies(arguments), copies(arguments)
    monkeypatch.setattr(kernels, "_form", kernels.CUDA)
    kernel(*there)
    kernel.compiled(*here)
    for a, b in zip(written(kernel, there), written(kernel, here), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "same", "constant", "weights", "alternating"])
@pytest.mark.parametrize("codec", ["bitmask", "ulp", "planes"])
@pytest.mark.parametrize("n", [1000, 10**5, 1 << 19])
def test_payloads_of_the_device(
    codec: str, kind: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from simulated import check_codec

    check_codec(codec, kind, n, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    arguments = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
    arguments += ["-m", "pytest", "-q", "-m", "gpu", "-k", "device_and_cpu and 1000", __file__]
    done: Any = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
