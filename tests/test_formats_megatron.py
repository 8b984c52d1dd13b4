"""Megatron's directories: names by rank, grids of ranks, the iteration to go on with."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckz
from ckz.casts import find_casts
from ckz.checkpoint import check_layout
from ckz.formats import read_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"


def state(seed: int, **sizes: int) -> dict[str, Any]:
    """Make what a rank saves: bf16 weights in one buffer, masters and moments."""
    generator = torch.Generator().manual_seed(seed)
    masters = [torch.randn(64, 48, generator=generator), torch.randn(48, generator=generator)]
    buffer = torch.cat([master.reshape(-1) for master in masters]).to(torch.bfloat16)
    weights = {"dense.weight": buffer[:3072].view(64, 48), "dense.bias": buffer[3072:]}
    moments = {
        number: {"exp_avg": torch.randn_like(master), "exp_avg_sq": torch.rand_like(master)}
        for number, master in enumerate(masters)
    }
    return {
        "args": argparse.Namespace(
            **{f"{kind}_model_parallel_size": n for kind, n in sizes.items()}
        ),
        "iteration": 20,
        "model": {"language_model": {"encoder": weights, "odd_name": torch.ones(4)}},
        "optimizer": {
            "optimizer": {"state": moments, "param_groups": []},
            "fp32_from_fp16_params": [masters],
        },
    }


def save(root: Path, *ranks: str, name: str = "model_optim_rng.pt", **sizes: int) -> Path:
    for seed, rank in enumerate(ranks):
        folder = root / f"mp_rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state(seed, **sizes), folder / name)
    return root


def expect_all(root: Path) -> None:
    """Check names, values and roles of all tensors against what torch loads."""
    with ckz.open(root) as archive:
        check_layout(archive.checkpoint)
        expected = 0
        for path in root.rglob("*.pt"):
            prefix = path.parent.relative_to(root).as_posix()
            loaded = torch.load(path, weights_only=False)
            model = loaded["model"]["language_model"]
            tensors = {
                **{
                    f"model.language_model.encoder.{k}": (v, "weight")
                    for k, v in model["encoder"].items()
                },
                "model.language_model.odd_name": (model["odd_name"], "weight"),
            }
            for number, master in enumerate(loaded["optimizer"]["fp32_from_fp16_params"][0]):
                tensors[f"optimizer.fp32_from_fp16_params.0.{number}"] = master, "master"
            for number, moments in loaded["optimizer"]["optimizer"]["state"].items():
                stem = f"optimizer.optimizer.state.{number}"
                tensors[f"{stem}.exp_avg"] = moments["exp_avg"], "momentum"
                tensors[f"{stem}.exp_avg_sq"] = moments["exp_avg_sq"], "variance"
            for name, (tensor, role) in tensors.items():
                got = archive[f"{prefix}:{name}"]
                assert got.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
                assert archive.info(f"{prefix}:{name}").role == role
            expected += len(tensors)
        assert len(archive) == expected


def test_tensors_are_named_by_rank(tmp_path: Path) -> None:
    save(tmp_path / "iter_0000020", "00", "01", tensor=2)
    save(tmp_path / "iter_0000030", "00", "01", tensor=2)
    (tmp_path / TRACKER).write_text("30")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.missing) == ("megatron", ())
    expect_all(tmp_path)
    expect_all(tmp_path / "iter_0000020")


def test_weights_in_one_buffer_are_casts_of_masters(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save(tmp_path, "00", "01"))
    spans = {t.pieces[0].span for t in checkpoint.tensors if t.name.endswith("dense.weight")}
    assert len(spans) == 2
    assert set(find_casts(checkpoint)) == spans


def test_one_rank_needs_no_names(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save(tmp_path, "00"))
    assert checkpoint.format == "megatron"
    assert "model.language_model.odd_name" in {tensor.name for tensor in checkpoint.tensors}


def test_a_distributed_optimizer_has_a_file_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, "00", "01")
    for rank in ("00", "01"):
        buffers = {key: torch.rand(5000) for key in ("param", "exp_avg", "exp_avg_sq")}
        torch.save({0: {"float": buffers}}, tmp_path / f"mp_rank_{rank}" / "distrib_optim.pt")
    checkpoint = read_checkpoint(tmp_path)
    roles = {tensor.name: tensor.role for tensor in checkpoint.tensors}
    assert roles["mp_rank_01:0.float.param"] == "master"
    assert roles["mp_rank_01:0.float.exp_avg"] == "momentum"
    assert checkpoint.missing == ()
    (tmp_path / "mp_rank_00" / "distrib_optim.pt").unlink()
    assert read_checkpoint(tmp_path).missing == ("'mp_rank_00/distrib_optim.pt' is missing",)


def test_two_files_of_a_rank_with_the_same_names(tmp_path: Path) -> None:
    save(tmp_path, "00")
    save(tmp_path, "00", name="distrib_optim.pt")
    checkpoint = read_checkpoint(tmp_path)
    names = {tensor.name for tensor in checkpoint.tensors}
    assert len(names) == len(checkpoint.tensors) == 2 * 9
    assert "mp_rank_00/model_optim_rng.pt:model.language_model.odd_name" in names


@pytest.mark.parametrize(
    ("ranks", "sizes", "missing"),
    [
        (["00", "01"], {}, []),
        (["00", "02"], {}, ["01"]),
        (["00"], {"tensor": 2}, ["01"]),
        (["00_000", "00_001", "01_000"], {}, ["01_001"]),
        (["00_000", "00_001"], {"tensor": 1, "pipeline": 3}, ["00_002"]),
        (["00_000", "00_001"], {"tensor": 1, "expert": 3}, ["00_002"]),
        (["00_000", "01_000"], {"tensor": 2, "pipeline": 1, "expert": 1}, []),
        (["00_000_000", "01_000_001"], {}, ["00_000_001", "01_000_000"]),
        (["00_000_000"], {"tensor": 1, "pipeline": 2, "expert": 2},
         ["00_000_001", "00_001_000", "00_001_001"]),
    ],
)  # fmt: skip
def test_the_grid_of_ranks_is_complete(
    tmp_path: Path, ranks: list[str], sizes: dict[str, int], missing: list[str]
) -> None:
    save(tmp_path / "iter_0000020", *ranks, **sizes)
    assert read_checkpoint(tmp_path).missing == tuple(
        f"'iter_0000020/mp_rank_{rank}/model_optim_rng.pt' is missing" for rank in missing
    )


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    save(tmp_path, "00", "01")
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    data = path.read_bytes()
    path.write_bytes(b"")
    assert read_checkpoint(tmp_path).missing == ("'mp_rank_00/model_optim_rng.pt' is empty",)
    path.write_bytes(data[:-1])
    assert read_checkpoint(tmp_path).missing == ("'mp_rank_00/model_optim_rng.pt' cannot be read",)


def test_the_tracker_names_an_iteration(tmp_path: Path) -> None:
    save(tmp_path / "iter_0000020", "00")
    save(tmp_path / "release", "00")
    for text in ("20", "20\n", "release"):
        (tmp_path / TRACKER).write_text(text)
        assert read_checkpoint(tmp_path).missing == ()
    for text in ("30", "", "iter_20", "..", "9" * 5000):
        (tmp_path / TRACKER).write_text(text)
        (line,) = read_checkpoint(tmp_path).missing
        assert line == f"'{TRACKER}' names the iteration {text[:99]!r}, which is missing"
    (tmp_path / TRACKER).write_text("20")
    shutil.rmtree(tmp_path / "iter_0000020")
    (tmp_path / "iter_0000020").mkdir()
    assert "'20', which is missing" in read_checkpoint(tmp_path).missing[0]


@pytest.mark.parametrize("size", [-1, 0, "2", None, 10**30])
def test_no_size_that_a_file_states_crashes(tmp_path: Path, size: Any) -> None:
    save(tmp_path, "00", tensor=size)
    missing = read_checkpoint(tmp_path).missing
    assert len(missing) == (21 if size == 10**30 else 0)
    torch.save([1], tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    assert read_checkpoint(tmp_path).missing == ()
