"""Directories of the Hugging Face Trainer: what is there, what lacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from ckz.checkpoint import Checkpoint, check_layout
from ckz.formats import read_checkpoint


def save(root: Path) -> Path:
    """Save what the Trainer does: a tiny model, AdamW's state, scheduler, random state."""
    root.mkdir(parents=True, exist_ok=True)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    safetensors.numpy.save_file(arrays, root / "model.safetensors")
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    torch.save(
        {k: v for k, v in scheduler.state_dict().items() if "lambdas" not in k},
        root / "scheduler.pt",
    )
    torch.save({"cpu": torch.get_rng_state()}, root / "rng_state.pth")
    torch.save({"output_dir": "x"}, root / "training_args.bin")
    (root / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    (root / "config.json").write_text("{}")
    return root


def roles(checkpoint: Checkpoint) -> dict[str, str]:
    check_layout(checkpoint)
    return {tensor.name: tensor.role for tensor in checkpoint.tensors}


def test_a_complete_one(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save(tmp_path))
    assert (checkpoint.format, checkpoint.missing, checkpoint.warnings) == ("hf-trainer", (), ())
    assert roles(checkpoint) == {
        "model.safetensors:weight": "weight",
        "model.safetensors:bias": "weight",
        "optimizer.pt:state.0.step": "other",
        "optimizer.pt:state.0.exp_avg": "momentum",
        "optimizer.pt:state.0.exp_avg_sq": "variance",
        "optimizer.pt:state.1.step": "other",
        "optimizer.pt:state.1.exp_avg": "momentum",
        "optimizer.pt:state.1.exp_avg_sq": "variance",
        "rng_state.pth:cpu": "other",
    }


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "model.safetensors"],
)
def test_files_that_hold_nothing(tmp_path: Path, name: str) -> None:
    path = save(tmp_path) / name
    data = path.read_bytes()
    path.write_bytes(b"")
    assert read_checkpoint(tmp_path).missing == (f"{name!r} is empty",)
    path.write_bytes(data[:-1])
    assert read_checkpoint(tmp_path).missing == (f"{name!r} cannot be read",)


def test_the_state_itself_is_empty(tmp_path: Path) -> None:
    (save(tmp_path) / "trainer_state.json").write_bytes(b"")
    assert read_checkpoint(tmp_path).missing == ("'trainer_state.json' is empty",)


def test_a_model_in_shards(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, shard in shards.items():
        safetensors.numpy.save_file({name: np.ones(4, "f4")}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.missing) == ("hf-trainer", ())
    assert {"a", "b"} < roles(checkpoint).keys()
    for shard in shards.values():
        (tmp_path / shard).unlink()
    assert read_checkpoint(tmp_path).missing == tuple(
        f"{index.name}: shard {shard!r} is missing" for shard in shards.values()
    )


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-500")
    (tmp_path / "checkpoint-400").mkdir()
    (tmp_path / "checkpoint-400" / "trainer_state.json").write_text("{}")
    (tmp_path / "trainer_state.json").write_text("{}")  # that of the run, beside its checkpoints
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.format == "hf-trainer"
    assert checkpoint.missing == ("'checkpoint-400/trainer_state.json' has no model beside it",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_models_of_other_kinds(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"layer.odd_name": torch.ones(3)}, tmp_path / name)
    assert read_checkpoint(tmp_path).missing == ()


def test_empty_files_elsewhere_are_just_files(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").write_bytes(b"")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.missing) == ("directory", ())
