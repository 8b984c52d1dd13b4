"""State dicts in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckz
from ckz.errors import ExistsError, UsageError


def training_state(step: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator) / 16
    moved = torch.randn(300, 200, generator=torch.Generator().manual_seed(step)) / 3000
    moment = torch.randn(300, 200, generator=generator) / 1000
    return {
        "model": {"w": (weight + step * moved).bfloat16(), "table": np.arange(12).reshape(3, 4)},
        "optimizer": {
            "fp32_master": {"w": weight + step * moved},
            "state": [{"exp_avg": moment, "exp_avg_sq": moment**2, "step": step}],
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "name": "all"}],
        },
    }


def test_a_state_comes_back(tmp_path: Path) -> None:
    state = training_state()
    report = ckz.compress(state, tmp_path / "step_0.ckz")
    assert report.stored_nbytes < report.raw_nbytes
    found = ckz.load_state_dict(tmp_path / "step_0.ckz")
    assert torch.equal(found["model.w"], state["model"]["w"])
    assert torch.equal(
        found["optimizer.state.0.exp_avg"], state["optimizer"]["state"][0]["exp_avg"]
    )
    assert np.array_equal(found["model.table"].numpy(), state["model"]["table"])
    assert [path.name for path in tmp_path.iterdir()] == ["step_0.ckz"]
    ckz.decompress(tmp_path / "step_0.ckz")
    with safe_open(tmp_path / "step_0.safetensors", "pt") as file:
        assert file.metadata()["optimizer.param_groups.0.betas.1"] == "0.95"
        assert file.metadata()["optimizer.param_groups.0.name"] == "all"
        assert torch.equal(file.get_tensor("model.w"), state["model"]["w"])


def test_it_takes_what_its_file_would(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(500, 300), "e": torch.randn(100, 64).half(), "empty": torch.ones(0)}
    save_file(tensors, tmp_path / "m.safetensors")
    of_file = ckz.compress(tmp_path / "m.safetensors", tmp_path / "file.ckz")
    in_memory = ckz.compress(tensors, tmp_path / "memory.ckz")
    assert abs(of_file.stored_nbytes - in_memory.stored_nbytes) < 200
    assert in_memory.roles.keys() == of_file.roles.keys()


def test_a_state_leans_on_another(tmp_path: Path) -> None:
    ckz.compress(training_state(), tmp_path / "0.ckz")
    alone = ckz.compress(training_state(1), tmp_path / "alone.ckz")
    delta = ckz.compress(training_state(1), tmp_path / "1.ckz", base=tmp_path / "0.ckz")
    assert delta.stored_nbytes < 0.9 * alone.stored_nbytes
    assert ckz.verify(tmp_path / "1.ckz", data=True)
    found = ckz.load_state_dict(tmp_path / "1.ckz")
    assert torch.equal(found["model.w"], training_state(1)["model"]["w"])


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32)
    state = {
        "strided": base.view(4, 6).t(),
        "slice": base[3:9],
        "scalar": torch.tensor(3),
        "parameter": torch.nn.Parameter(base),
        "bool": torch.tensor([True, False]),
        "fp8": torch.ones(5).to(torch.float8_e4m3fn),
        "conjugate": torch.view_as_complex(base.view(12, 2)).conj(),
        "bfloat16": np.ones(7, ml_dtypes.bfloat16),
        "big": np.arange(4, dtype=">i4"),
        "number": np.float32(2.5),
    }
    ckz.compress(state, tmp_path / "s.ckz")
    found = ckz.load_state_dict(tmp_path / "s.ckz")
    assert found.keys() == state.keys()
    for name in ("strided", "slice", "scalar", "bool", "conjugate"):
        assert torch.equal(found[name].resolve_conj(), state[name].resolve_conj())
    assert found["big"].tolist() == [0, 1, 2, 3]
    assert found["number"].item() == 2.5
    assert found["bfloat16"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": object()}, "a: object is no tensor"),
        ({"a": {"b": np.array(["x"])}}, "a.b: safetensors has no"),
        ({"a": torch.zeros(3, dtype=torch.complex128)}, "a: safetensors has no complex128"),
        ({"a": torch.zeros(3).to_sparse()}, "a: only dense tensors"),
        ({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, "a.b: two tensors"),
        ({"__metadata__": np.ones(1)}, "__metadata__"),
    ],
)
def test_what_cannot_be_saved(state: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        ckz.compress(state, tmp_path / "s.ckz")
    assert not list(tmp_path.iterdir())


def test_refusals_of_files_hold(tmp_path: Path) -> None:
    (tmp_path / "s.ckz").write_text("mine")
    with pytest.raises(ExistsError):
        ckz.compress({"a": np.ones(3)}, tmp_path / "s.ckz")
    with pytest.raises(UsageError, match="sha256"):
        ckz.compress({"a": np.ones(3)}, tmp_path / "t.ckz", sha256=True)
    assert (tmp_path / "s.ckz").read_text() == "mine"


def test_an_empty_state(tmp_path: Path) -> None:
    ckz.compress({}, tmp_path / "s.ckz")
    assert ckz.load_state_dict(tmp_path / "s.ckz") == {}
