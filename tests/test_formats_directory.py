"""Files chosen by content, and directories: every entry, names, shards that are missing."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from ckz.checkpoint import Checkpoint, check_layout
from ckz.errors import CorruptError, UnsupportedError
from ckz.formats import read_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>404</body></html>"


def arrays(*names: str) -> dict[str, np.ndarray]:
    return {name: np.full(4, position, "f4") for position, name in enumerate(names)}


def names(checkpoint: Checkpoint) -> list[str]:
    return [tensor.name for tensor in checkpoint.tensors]


def value(checkpoint: Checkpoint, name: str) -> float:
    """The one value of a tensor made by ``arrays``."""
    tensor = next(tensor for tensor in checkpoint.tensors if tensor.name == name)
    span = checkpoint.spans[tensor.pieces[0].span]
    data = checkpoint.path_of(span.file).read_bytes()
    return float(np.frombuffer(data[span.offset : span.offset + 4], "<f4")[0])


# One file.


def test_a_file_is_read_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"w": torch.ones(2)}, path)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.format, names(checkpoint)) == ("torch", ["w"])
    assert checkpoint.warnings == ("is named .safetensors, but is torch in fact",)
    safetensors.numpy.save_file(arrays("w"), tmp_path / "pytorch_model.bin")
    checkpoint = read_checkpoint(tmp_path / "pytorch_model.bin")
    assert (checkpoint.format, checkpoint.warnings) == ("safetensors", ())


@pytest.mark.parametrize("data", [b"", b"\0", b"text", gzip.compress(b"x"), os.urandom(9000)])
def test_what_no_reader_knows_is_opaque(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(data)
    path.chmod(0o640)
    os.utime(path, ns=(5, 7))
    checkpoint = read_checkpoint(path)
    (file,) = checkpoint.files
    assert (checkpoint.format, checkpoint.spans, checkpoint.tensors) == ("opaque", (), ())
    assert (file.path, file.size, file.mode, file.mtime_ns) == ("weights.bin", len(data), 0o640, 7)
    assert not checkpoint.warnings
    assert not checkpoint.is_directory


def test_a_broken_promise_of_the_suffix_is_told(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"text")
    assert read_checkpoint(path).warnings == ("is named .pt, but is of no format that ckz knows",)
    path.write_bytes(b"")
    assert not read_checkpoint(path).warnings


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (POINTER, "git-LFS pointer.*git lfs pull"),
        (PAGE, "HTML page"),
        (b"PK\3\4" + bytes(90), "zip"),
    ],
)
def test_what_is_no_checkpoint_is_refused_unless_asked_for(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises((UnsupportedError, CorruptError), match=f"{path}: .*{message}.*--opaque"):
        read_checkpoint(path)
    checkpoint = read_checkpoint(path, opaque=True)
    assert checkpoint.format == "opaque"
    assert len(checkpoint.warnings) == 1


def test_absent_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_checkpoint(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(UnsupportedError, match="neither a file nor a directory"):
            read_checkpoint(path, opaque=True)


def test_a_named_link_is_followed(tmp_path: Path) -> None:
    safetensors.numpy.save_file(arrays("w"), tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    checkpoint = read_checkpoint(tmp_path / "model.safetensors")
    assert names(checkpoint) == ["w"]
    assert checkpoint.files[0].kind == "file"


# A directory.


def test_every_entry_is_there_in_a_fixed_order(tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "b" / "empty").mkdir(parents=True)
    (root / "a").mkdir(mode=0o700)
    (root / "a" / "x.txt").write_text("x")
    (root / "a.txt").write_text("")
    (root / "b" / "last").symlink_to("../a/x.txt")
    (root / "b" / "loop").symlink_to("loop")
    (root / "b" / "dangling").symlink_to("/absent/\udce9")
    (root / "folder").symlink_to("a")
    (root / "\udcff").write_text("no utf-8")
    os.mkfifo(root / "pipe")
    os.utime(root / "b" / "empty", ns=(1, 3))
    checkpoint = read_checkpoint(root)
    assert [(file.path, file.kind, file.target) for file in checkpoint.files] == [
        ("a", "dir", ""),
        ("a.txt", "file", ""),
        ("a/x.txt", "file", ""),
        ("b", "dir", ""),
        ("b/dangling", "link", "/absent/\udce9"),
        ("b/empty", "dir", ""),
        ("b/last", "link", "../a/x.txt"),
        ("b/loop", "link", "loop"),
        ("folder", "link", "a"),
        ("\udcff", "file", ""),
    ]
    by_path = {file.path: file for file in checkpoint.files}
    assert by_path["a"].mode == 0o700
    assert by_path["b/empty"].mtime_ns == 3
    assert by_path["a/x.txt"].size == 1
    assert stat.S_IMODE((root / "a.txt").stat().st_mode) == by_path["a.txt"].mode
    assert checkpoint.warnings == ("pipe: is a device, socket or pipe; it is not kept",)
    assert (checkpoint.format, checkpoint.is_directory) == ("directory", True)


def test_an_empty_directory_is_a_checkpoint(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path).files == ()


def test_tensors_are_told_apart_by_their_files(tmp_path: Path) -> None:
    safetensors.numpy.save_file(arrays("v", "w"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert names(read_checkpoint(tmp_path)) == ["v", "w"]
    (tmp_path / "sub").mkdir()
    torch.save({"state": {0: torch.full((4,), 9.0)}}, tmp_path / "sub" / "optimizer.pt")
    checkpoint = read_checkpoint(tmp_path)
    check_layout(checkpoint)
    assert names(checkpoint) == [
        "model.safetensors:v",
        "model.safetensors:w",
        "sub/optimizer.pt:state.0",
    ]
    assert value(checkpoint, "model.safetensors:w") == 1
    assert value(checkpoint, "sub/optimizer.pt:state.0") == 9


def test_damaged_files_of_a_directory_are_kept_with_a_warning(tmp_path: Path) -> None:
    safetensors.numpy.save_file(arrays("w"), tmp_path / "good.safetensors")
    data = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-1])
    (tmp_path / "pointer.bin").write_bytes(POINTER)
    (tmp_path / "README.html").write_bytes(PAGE)
    checkpoint = read_checkpoint(tmp_path)
    assert names(checkpoint) == ["w"]
    assert len(checkpoint.files) == 4
    pointer, short = checkpoint.warnings
    assert pointer.startswith("pointer.bin: is a git-LFS pointer")
    assert short.startswith(f"short.safetensors: truncated: expected {len(data)} bytes")


# Sharded models.


def shard(root: Path, index: dict[str, str] | None, **files: dict[str, np.ndarray]) -> Path:
    """Write ``model-A-of-B.safetensors`` for ``A_B=...``, and an index."""
    root.mkdir(exist_ok=True)
    for name, content in files.items():
        file = f"model-{name.strip('_').replace('_', '-of-')}.safetensors"
        safetensors.numpy.save_file(content, root / file)
    if index is not None:
        weight_map = {name: f"model-{file}.safetensors" for name, file in index.items()}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return root


ONE, TWO = "00001-of-00002", "00002-of-00002"


def test_a_sharded_model_has_its_own_names(tmp_path: Path) -> None:
    root = shard(tmp_path, {"a": ONE, "b": ONE, "c": TWO},
                 _00001_00002=arrays("a", "b"), _00002_00002=arrays("c"))  # fmt: skip
    checkpoint = read_checkpoint(root)
    assert (checkpoint.format, checkpoint.missing) == ("hf-sharded", ())
    assert names(checkpoint) == ["a", "b", "c"]
    torch.save({"step": torch.ones(1)}, root / "optimizer.pt")
    assert names(read_checkpoint(root)) == ["a", "b", "c", "optimizer.pt:step"]


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    root = shard(tmp_path, {"a": ONE, "b": TWO, "c": TWO},
                 _00001_00002=arrays("a"), _00002_00002=arrays("b"))  # fmt: skip
    index = "model.safetensors.index.json"
    second = root / f"model-{TWO}.safetensors"
    assert read_checkpoint(root).missing == (
        f"{index}: tensor 'c' is not in shard {second.name!r}",
    )
    second.write_bytes(second.read_bytes()[:-1])
    assert read_checkpoint(root).missing == (f"{index}: shard {second.name!r} cannot be read",)
    second.unlink()
    checkpoint = read_checkpoint(root)
    assert checkpoint.missing == (f"{index}: shard {second.name!r} is missing",)
    assert names(checkpoint) == ["a"]


def test_shards_behind_links_are_not_missing(tmp_path: Path) -> None:
    root = shard(tmp_path / "snapshot", {"a": ONE, "b": TWO},
                 _00001_00002=arrays("a"), _00002_00002=arrays("b"))  # fmt: skip
    second = root / f"model-{TWO}.safetensors"
    second.rename(tmp_path / "blob")
    second.symlink_to("../blob")
    assert read_checkpoint(root).missing == ()
    (tmp_path / "blob").unlink()
    assert "is missing" in read_checkpoint(root).missing[0]


def test_an_index_of_another_upload_names_what_it_lacks(tmp_path: Path) -> None:
    root = shard(tmp_path, {"a": "00001-of-00003", "b": "../../outside"},
                 _00001_00002=arrays("a"), _00002_00002=arrays("b"))  # fmt: skip
    checkpoint = read_checkpoint(root)
    assert checkpoint.missing == (
        "model.safetensors.index.json: shard 'model-00001-of-00003.safetensors' is missing",
        "model.safetensors.index.json: shard 'model-../../outside.safetensors' is missing",
    )
    assert names(checkpoint) == ["a", "b"]


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    files = {"_00001_00002": arrays("a", "w"), "_00002_00002": arrays("w")}
    root = shard(tmp_path, {"a": ONE, "w": TWO}, **files)
    checkpoint = read_checkpoint(root)
    assert checkpoint.missing == ()
    assert names(checkpoint) == ["a", f"model-{ONE}.safetensors:w", "w"]
    assert value(checkpoint, "w") == 0
    (root / "model.safetensors.index.json").unlink()
    checkpoint = read_checkpoint(root)
    assert checkpoint.missing == (
        f"duplicate tensor 'w' in model-{ONE}.safetensors and model-{TWO}.safetensors",
    )
    assert len(set(names(checkpoint))) == 3


def test_numbered_shards_without_an_index(tmp_path: Path) -> None:
    root = shard(tmp_path, None, _00001_00003=arrays("a"), _00003_00003=arrays("b"))
    checkpoint = read_checkpoint(root)
    assert (checkpoint.format, names(checkpoint)) == ("hf-sharded", ["a", "b"])
    assert checkpoint.missing == ("shard 'model-00002-of-00003.safetensors' is missing",)


def test_one_model_in_two_formats(tmp_path: Path) -> None:
    root = shard(tmp_path, {"a": ONE, "b": TWO},
                 _00001_00002=arrays("a"), _00002_00002=arrays("b"))  # fmt: skip
    for number, name in enumerate("ab", start=1):
        torch.save({name: torch.ones(1)}, root / f"pytorch_model-{number}-of-2.bin")
    weight_map = {"a": "pytorch_model-1-of-2.bin", "b": "pytorch_model-2-of-2.bin"}
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_checkpoint(root)
    assert checkpoint.missing == ()
    assert names(checkpoint) == [
        "a", "b", "pytorch_model-1-of-2.bin:a", "pytorch_model-2-of-2.bin:b"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "index", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_just_a_file(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    safetensors.numpy.save_file(arrays("w"), tmp_path / "model.safetensors")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.missing, names(checkpoint)) == ((), ["w"])
