"""``ckz diff``: what changed by value, whatever the values lie in."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

import ckz
from ckz.cli import app_of
from ckz.diffing import Comparison, TensorDiff, diff
from ckz.diffing import tensors as tensors_module
from ckz.diffing.plot import changes_by_layer
from ckz.diffing.stats import Stats
from ckz.errors import CkzError

README = (Path(__file__).parents[1] / "README.md").read_text()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app_of(), ["diff", *map(str, arguments)])


def save(path: Path, **arrays: np.ndarray) -> Path:
    safetensors.numpy.save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, path)
    return path


def as_json(*arguments: object) -> dict[str, Any]:
    document = json.loads(run("--json", *arguments).stdout)
    assert list(document) == ["version", "results", "failed"]
    (result,) = document["results"]
    return result  # type: ignore[no-any-return]


def row(found: Comparison, name: str) -> TensorDiff:
    (only,) = [row for row in found.tensors if row.name == name]
    return only


def stats_of(a: np.ndarray, b: np.ndarray, tmp_path: Path) -> Stats:
    found = diff(save(tmp_path / "a.safetensors", w=a), save(tmp_path / "b.safetensors", w=b))
    stats = row(found, "w").stats
    assert stats is not None
    return stats


# Statuses and exit codes


@pytest.fixture
def six(tmp_path: Path) -> tuple[Path, Path]:
    """Two files with one tensor for each of six statuses."""
    rng = np.random.default_rng(0)
    changed = rng.normal(size=100).astype(np.float32)
    other = changed.copy()
    other[[3, 50, 99]] += 1
    half = torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16()
    a = {
        "equal": torch.arange(16.0).reshape(4, 4),
        "changed": torch.from_numpy(changed),
        "only_a": torch.ones(3),
        "old_name": torch.arange(7.0),
        "dtype": half,
        "shape": torch.ones(2, 3),
    }
    b = {
        "equal": a["equal"],
        "changed": torch.from_numpy(other),
        "new_name": a["old_name"],
        "dtype": half.float(),
        "shape": torch.ones(3, 3),
    }
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.torch.save_file(a, paths[0])
    safetensors.torch.save_file(b, paths[1])
    return paths


def test_six_statuses(six: tuple[Path, Path]) -> None:
    result = as_json(*six)
    by_name = {tensor["name"]: tensor for tensor in result["tensors"]}
    assert {name: tensor["status"] for name, tensor in by_name.items()} == {
        "equal": "equal",
        "changed": "changed",
        "only_a": "only_in_a",
        "old_name": "renamed",
        "dtype": "dtype_differs",
        "shape": "shape_differs",
    }
    assert by_name["old_name"]["name_b"] == "new_name"
    changed = by_name["changed"]
    assert (changed["changed"], changed["changed_percent"], changed["elements"]) == (3, 3.0, 100)
    assert changed["max_abs"] == pytest.approx(1)
    assert by_name["dtype"]["changed"] == 0
    assert by_name["dtype"]["same"] is False
    assert by_name["shape"]["changed"] is None
    assert result["verdict"] == "differ"
    assert run(*six).exit_code == 1


def test_what_a_person_sees(six: tuple[Path, Path]) -> None:
    lines = run(*six).stdout.splitlines()
    assert (
        "1 of other shape, 1 only in A, 1 renamed, 1 of other dtype, 1 changed, 1 equal"
        in (lines[2])
    )
    text = "\n".join(lines)
    assert re.search(r"shape +1  weight  float32 2x3 -> 3x3 +shape", text)
    assert re.search(r"only A +1  weight  float32 3 +only_a", text)
    assert re.search(r"renamed +1  weight  float32 7 +old_name -> new_name", text)
    assert re.search(r"dtype +1  weight  bfloat16 -> float32, same values +dtype", text)
    assert re.search(r"1  float32  weight  3 \(3\.00 %\) +1 ", text)
    assert not any(line.endswith("  equal") for line in lines)
    assert any(line.endswith("  equal") for line in run("--all", *six).stdout.splitlines())


def test_only_in_b_and_ignored_names(six: tuple[Path, Path]) -> None:
    a, b = six
    statuses = {t["name"]: t["status"] for t in as_json(b, a)["tensors"]}
    assert statuses["only_a"] == "only_in_b"
    assert statuses["new_name"] == "renamed"
    assert run("--only", "equal", a, b).exit_code == 0
    assert run("--only", "*a*", a, b).exit_code == 1
    ignored = [x for name in ("*name", "only*", "dtype", "shape") for x in ("--ignore", name)]
    assert run(*ignored, a, b).exit_code == 1
    assert run(*ignored, "--ignore", "changed", a, b).exit_code == 0
    only = as_json("--only", "chan*", a, b)
    assert [t["name"] for t in only["tensors"]] == ["changed"]


@pytest.mark.parametrize(
    ("a", "b", "status", "numeric"),
    [
        ([np.nan, 1], [np.nan, 1], "equal", 0),
        ([0, 0], [0, 0], "equal", 0),
        ([0.0], [-0.0], "bits_differ", 0),
        ([0x7FC00000], [0x7FC00001], "bits_differ", 0),
        ([np.nan], [1], "changed", 1),
        ([np.inf, 1], [np.inf, 2], "changed", 1),
        ([np.inf], [-np.inf], "changed", 1),
    ],
)
def test_nan_and_signed_zero(
    a: list[Any], b: list[Any], status: str, numeric: int, tmp_path: Path
) -> None:
    x, y = (
        np.array(v, np.uint32).view(np.float32) if type(v[0]) is int and v[0] > 1 else
        np.array(v, np.float32)
        for v in (a, b)
    )  # fmt: skip
    paths = save(tmp_path / "a", w=x), save(tmp_path / "b", w=y)
    tensor = as_json(*paths)["tensors"][0]
    assert tensor["status"] == status
    assert run(*paths).exit_code == int(status != "equal")
    assert run("--numeric", *paths).exit_code == numeric
    if status == "bits_differ":
        assert (tensor["bits_differ"], tensor["values_equal"], tensor["changed"]) == (1, 1, 0)
        assert (tensor["relative_l2"], tensor["max_abs"]) == (0, 0)
    if np.isnan(x[0]) and status == "changed":
        assert (tensor["nan_a"], tensor["nan_b"]) == (1, 0)


def test_special_values_do_not_hide_the_others(tmp_path: Path) -> None:
    a = np.array([np.nan, np.inf, 1, 2, -0.0, np.nan], np.float32)
    b = np.array([1, np.inf, 1, 3, 0.0, -np.inf], np.float32)
    stats = stats_of(a, b, tmp_path)
    assert (stats.bits, stats.changed, stats.same, stats.zeros) == (4, 3, 1, 1)
    assert (stats.nan_a, stats.nan_b, stats.inf_a, stats.inf_b) == (2, 0, 1, 2)
    assert stats.largest == 1
    assert stats.relative_l2 == pytest.approx(1 / math.sqrt(5))
    text = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors").stdout
    assert "(NaN 2 | 0) (Inf 1 | 2) (0.0 and -0.0 1)" in text
    assert "2 | 0" in text.splitlines()[-1]


def test_tolerances(tmp_path: Path) -> None:
    paths = (
        save(tmp_path / "a", w=np.array([1, -100, 5, np.inf], np.float32)),
        save(tmp_path / "b", w=np.array([1.5, -101, 5, np.inf], np.float32)),
    )
    assert run("--atol", 0.5, *paths).exit_code == 1
    assert run("--atol", 1, *paths).exit_code == 0
    assert run("--rtol", 0.01, *paths).exit_code == 1
    found = as_json("--atol", 0.5, "--rtol", 0.01, *paths)
    assert found["verdict"] == "same"
    assert [found["tensors"][0][k] for k in ("status", "changed", "within_tolerance")] == [
        "within_tolerance", 0, 2,
    ]  # fmt: skip
    infinite = save(tmp_path / "c", w=np.array([1, -100, 5, 6], np.float32))
    assert run("--atol", 9, "--rtol", 9, paths[0], infinite).exit_code == 1
    zeros = save(tmp_path / "d", w=np.zeros(2)), save(tmp_path / "e", w=-np.zeros(2))
    assert [run(*zeros).exit_code, run("--atol", 1e-9, *zeros).exit_code] == [1, 0]


def test_trouble_is_no_difference(tmp_path: Path, model: Path) -> None:
    def code(*arguments: object) -> int:
        result = run(*arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code

    assert code(model, tmp_path / "absent") == 2
    assert code(model, "") == 2
    assert code("-", "-") == 2
    assert code("--atol", "nan", model, model) == 2
    assert code("--plot", "x.svg", model, model) == 2
    (tmp_path / "page.pt").write_text("<!doctype html>")
    assert code(model, tmp_path / "page.pt") == 2
    ckz.compress(model, tmp_path / "m.ckz")
    data = bytearray((tmp_path / "m.ckz").read_bytes())
    data[3000] ^= 1
    (tmp_path / "m.ckz").write_bytes(data)
    assert code(model, tmp_path / "m.ckz") == 4
    result = run("--json", model, tmp_path / "absent")
    assert json.loads(result.stdout) == {"version": 1, "results": [], "failed": 1}
    assert json.loads(result.stderr)["code"] == 2


def test_a_missing_base_keeps_its_code(tmp_path: Path) -> None:
    big = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
    a = save(tmp_path / "a.safetensors", w=big)
    b = save(tmp_path / "b.safetensors", w=np.nextafter(big, 2, dtype=np.float32))
    delta = tmp_path / "b.safetensors.ckz"
    ckz.compress(b, delta, base=a)
    assert run(b, delta).exit_code == 0
    (tmp_path / "elsewhere").mkdir()
    a.rename(tmp_path / "elsewhere" / a.name)
    assert run(b, delta).exit_code == 5
    assert run("--base-dir", tmp_path / "elsewhere", b, delta).exit_code == 0


def test_quiet_prints_nothing(six: tuple[Path, Path]) -> None:
    result = run("-q", *six)
    assert (result.exit_code, result.output) == (1, "")
    result = run("-qq", six[0], "absent")
    assert (result.exit_code, result.output) == (2, "")


def test_a_closed_pipe_is_trouble(six: tuple[Path, Path]) -> None:
    command = f"{sys.executable} -m ckz diff {six[0]} {six[1]}; echo $? >&2"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(["sh", "-c", command], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == "2\n"


def test_standard_input(six: tuple[Path, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckz", "diff", "-", six[1]],
        input=six[0].read_bytes(),
        capture_output=True,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(b"A: standard input: safetensors, 1 file, 6 tensors")


# Containers: the same values in other files


def test_the_same_file_twice(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bin"
    copy.write_bytes(model.read_bytes())
    ckz.compress(model, tmp_path / "m.ckz")
    for other in (model, copy, tmp_path / "m.ckz"):
        assert as_json(model, other)["verdict"] == "identical"
    assert "identical: 8 equal" in run(model, copy).stdout


def torch_state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layers.{i}.weight": torch.randn(8, 8, generator=generator) for i in range(3)}
    return {"model": weights, "epoch": 3, "args": {"lr": 1e-3, "name": "run"}}


def rezip(source: Path, target: Path, root: str, extra: dict[str, bytes]) -> None:
    """Write a torch zip again under another root, with other records besides."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            name = info.filename.partition("/")[2]
            new.writestr(f"{root}/{name}", extra.get(name, old.read(info)))


def test_other_records_of_a_torch_zip_are_the_container(tmp_path: Path) -> None:
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(torch_state(), a)
    rezip(a, b, "model_5", {".data/serialization_id": b"1" * 40})
    result = run(a, b)
    assert result.exit_code == 0
    assert "same content, different container" in result.stdout
    torch.save(torch_state(), b, _use_new_zipfile_serialization=False)
    assert as_json(a, b)["verdict"] == "same_content"
    # Another format cannot have the other values.
    safetensors.torch.save_file(
        {f"model.{n}": t for n, t in torch_state()["model"].items()},
        tmp_path / "c",
        {"format": "pt"},
    )
    assert as_json(a, tmp_path / "c")["verdict"] == "same_content"


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    state = torch_state()
    torch.save(state, a)
    state["epoch"] = 4
    state["args"]["nan"] = float("nan")
    del state["args"]["name"]
    torch.save(state, b)
    ckz.compress(b, tmp_path / "b.ckz")
    for other in (b, tmp_path / "b.ckz"):
        objects = as_json(a, other)["objects"]
        assert objects == [
            {"name": "epoch", "a": "3", "b": "4"},
            {"name": "args.name", "a": "'run'", "b": None},
            {"name": "args.nan", "a": None, "b": "nan"},
        ]
    result = run(a, b)
    assert result.exit_code == 1
    assert "epoch: 3 -> 4" in result.stdout
    assert run("--ignore", "epoch", "--ignore", "args.*", a, b).exit_code == 0
    assert as_json(b, b)["objects"] == []


def test_a_flipped_byte_of_extra_state_is_one_change(tmp_path: Path) -> None:
    nested = io.BytesIO()
    torch.save({"scale": torch.ones(4)}, nested)

    def save_state(path: Path, blob: bytes) -> Path:
        state = {
            "a._extra_state": io.BytesIO(b""),
            "b._extra_state": io.BytesIO(blob),
            "c._extra_state": torch.empty(0, dtype=torch.uint8),
            "w": torch.ones(3),
        }
        torch.save(state, path)
        return path

    blob = bytearray(nested.getvalue())
    a = save_state(tmp_path / "a.pt", bytes(blob))
    assert run(a, save_state(tmp_path / "same.pt", bytes(blob))).exit_code == 0
    blob[len(blob) // 2] ^= 1
    b = save_state(tmp_path / "b.pt", bytes(blob))
    result = as_json(a, b)
    assert [entry["name"] for entry in result["objects"]] == ["b._extra_state.0"]
    assert {t["status"] for t in result["tensors"]} == {"equal"}
    assert run(a, b).exit_code == 1


def test_metadata_of_safetensors(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3)}, a, metadata={"format": "pt"})
    safetensors.numpy.save_file({"w": np.ones(3)}, b)
    (entry,) = as_json(a, b)["objects"]
    assert entry == {"name": "__metadata__.format", "a": "'pt'", "b": None}


def test_formats_and_layouts_of_one_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {
        f"layers.{i}.weight": torch.from_numpy(rng.normal(size=(6, 5)).astype(np.float32))
        for i in range(4)
    }
    names = list(state)
    torch.save(state, tmp_path / "m.pt")
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    np.savez(tmp_path / "m.npz", **{n: t.numpy() for n, t in state.items()})
    np.savez_compressed(tmp_path / "z.npz", **{n: t.numpy() for n, t in state.items()})
    fortran = {n: np.asfortranarray(t.numpy()) for n, t in state.items()}
    np.savez(tmp_path / "f.npz", **fortran)
    big = {n: t.numpy().astype(">f4") for n, t in state.items()}
    np.savez(tmp_path / "big.npz", **big)
    shards, torch_shards = tmp_path / "shards", tmp_path / "torch_shards"
    shards.mkdir()
    torch_shards.mkdir()
    weight_map = {}
    for shard in range(2):
        part = {n: state[n] for n in names[2 * shard : 2 * shard + 2]}
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        safetensors.torch.save_file(part, shards / file)
        torch.save(part, torch_shards / f"part{shard}.pt")
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with h5py.File(tmp_path / "m.h5", "w") as file:
        for name, tensor in state.items():
            file.create_dataset(name, data=tensor, chunks=(4, 2), compression="gzip", shuffle=True)
    ckz.compress(torch_shards, tmp_path / "t.ckz")
    every = [tmp_path / n for n in ("m.pt", "m.safetensors", "m.npz", "z.npz", "f.npz", "big.npz")]
    every += [shards, torch_shards, tmp_path / "m.h5", tmp_path / "t.ckz"]
    for other in every:
        for pair in ((every[0], other), (other, every[0])):
            found = as_json(*pair)
            assert [t["status"] for t in found["tensors"]] == ["equal"] * 4, pair
            assert found["same"], pair
    notes = as_json(tmp_path / "m.npz", tmp_path / "big.npz")["tensors"][0]["notes"]
    assert notes == ["big-endian in B"]
    assert "4 big-endian in B" in run(tmp_path / "m.npz", tmp_path / "big.npz").stdout
    assert as_json(every[0], tmp_path / "z.npz")["tensors"][0]["notes"] == ["stored compressed"]


def test_ambiguous_names_of_files_stay(tmp_path: Path) -> None:
    directory = tmp_path / "ranks"
    directory.mkdir()
    for rank in range(2):
        torch.save({"w": torch.full((3,), float(rank)), f"own{rank}": torch.ones(2)},
                   directory / f"rank{rank}.pt")  # fmt: skip
    torch.save({"w": torch.zeros(4), "own0": torch.ones(2)}, tmp_path / "m.pt")
    statuses = {t["name"]: t["status"] for t in as_json(directory, tmp_path / "m.pt")["tensors"]}
    assert statuses == {
        "rank0.pt:w": "only_in_a",
        "rank1.pt:w": "only_in_a",
        "rank0.pt:own0": "equal",
        "rank1.pt:own1": "only_in_a",
        "w": "only_in_b",
    }


def test_files_without_tensors(tmp_path: Path) -> None:
    for name in "ab":
        directory = tmp_path / name
        directory.mkdir()
        save(directory / "model.safetensors", w=np.ones(3))
        (directory / "config.json").write_text(f'{{"name": "{name}"}}')
        (directory / f"{name}.txt").write_text("x")
    result = as_json(tmp_path / "a", tmp_path / "b")
    assert result["files"] == [
        {"path": "a.txt", "status": "only_in_a"},
        {"path": "config.json", "status": "changed"},
        {"path": "b.txt", "status": "only_in_b"},
    ]
    assert "file config.json: changed" in run(tmp_path / "a", tmp_path / "b").stdout
    assert (
        run("--ignore", "*.txt", "--ignore", "*.json", tmp_path / "a", tmp_path / "b").exit_code
        == 0
    )
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(b"\0" * 3_000_000 + name.encode())
    assert run(tmp_path / "a.bin", tmp_path / "b.bin").exit_code == 1
    assert run(tmp_path / "a.bin", tmp_path / "a.bin").exit_code == 0


def test_bytes_that_cannot_be_read_by_name(tmp_path: Path) -> None:
    for name in "ab":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.create_dataset("w", data=np.arange(5.0))
            file.attrs["note"] = name
    result = run(tmp_path / "a.h5", tmp_path / "b.h5")
    assert result.exit_code == 0
    assert "same tensors; other bytes of the files differ" in result.stdout


def test_hidden_bytes_of_a_storage_are_the_container(tmp_path: Path) -> None:
    for name, last in (("a", 0.0), ("b", 1.0)):
        storage = torch.arange(5.0)
        storage[4] = last
        torch.save({"w": storage[:4]}, tmp_path / f"{name}.pt")
    assert as_json(tmp_path / "a.pt", tmp_path / "b.pt")["verdict"] == "same_content"


def test_a_source_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = save(tmp_path / "a", w=np.ones(3)), save(tmp_path / "b", w=np.ones(3))
    real = tensors_module.read_whole

    def read_and_touch(*arguments: Any) -> None:
        os.utime(b, ns=(1, 1))
        real(*arguments)

    monkeypatch.setattr(tensors_module, "read_whole", read_and_touch)
    result = run(a, b)
    assert result.exit_code == 2
    assert "changed while it was read" in result.stderr


# What is printed


def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """Checkpoints of a small model with optimizer state, one change apart."""
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    for step, path in enumerate(paths):
        generator = torch.Generator().manual_seed(0)
        weights = {f"layers.{i}.weight": torch.randn(8, 8, generator=generator) for i in range(3)}
        weights["embed.weight"] = torch.randn(4, 4, generator=generator)
        state = {
            i: {"exp_avg": torch.randn(8, 8, generator=generator) + step} for i in range(3)
        } | {3: {"exp_avg": torch.randn(4, 4, generator=generator)}}
        weights["layers.1.weight"] += 1e-3 * step
        torch.save({"model": weights, "optimizer": {"state": state}}, path)
    return paths


def test_groups_and_order(tmp_path: Path) -> None:
    lines = run("-v", *two_runs(tmp_path)).stdout.splitlines()
    start = lines.index("") + 1
    assert re.search(r"^ +3  float32  momentum .* optimizer\.state\.\*\.exp_avg$", lines[start + 1])
    assert re.search(r"^ +1  float32  weight .* model\.layers\.1\.weight$", lines[start + 2])
    assert lines[start + 3] == ""
    assert lines[start + 4].split()[:3] == ["role", "tensors", "differ"]
    assert lines[start + 5].split()[:3] == ["momentum", "4", "3"]
    assert any(line.split() == ["ULPs", "apart", "momentum", "weight"] for line in lines)
    ranked = [t["name"] for t in as_json(*two_runs(tmp_path))["tensors"]]
    assert all("exp_avg" in name for name in ranked[:3])
    assert ranked[3] == "model.layers.1.weight"


def test_long_lists_of_values_are_grouped_and_cut(tmp_path: Path) -> None:
    for name in "ab":
        state = {f"key{i}": f"{name}{i}" for i in range(50)}
        torch.save(state | {chr(c) * 3: name for c in range(97, 123)}, tmp_path / f"{name}.pt")
    lines = run(tmp_path / "a.pt", tmp_path / "b.pt").stdout.splitlines()
    assert "key*: 50 values, the first 'a0' -> 'b0'" in lines
    assert "aaa: 'a' -> 'b'" in lines
    assert lines[-1] == "... and 7 more; --all shows them"
    assert "key7: 'a7' -> 'b7'" in run("--all", tmp_path / "a.pt", tmp_path / "b.pt").stdout


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", **{"\x1b[2Jw": np.ones(2)}), save(tmp_path / "b", v=np.ones(3))
    output = run(a, b).output
    assert "\x1b" not in output
    assert "\\x1b[2Jw" in output


def test_changes_by_layer(tmp_path: Path) -> None:
    layers, changes = changes_by_layer(diff(*two_runs(tmp_path)))
    assert layers == ["model.layers.0", "model.layers.1", "model.layers.2", "model.embed"]
    assert changes["weight"][0] == 0
    assert changes["weight"][1] == pytest.approx(1e-3, rel=0.2)
    assert changes["momentum"][3] == 0
    assert all(value and value > 0.5 for value in changes["momentum"][:3])


def test_plot(tmp_path: Path) -> None:
    paths = two_runs(tmp_path)
    target = tmp_path / "out.html"
    assert run("--plot", target, *paths).exit_code == 1
    page = target.read_text()
    assert page.count("<rect") == 8
    assert "model.layers.1" in page
    assert not re.search(r"(src|href)=|url\(", page)
    assert run("--plot", target, *paths).exit_code == 2
    assert run("--plot", target, "--force", paths[0], paths[0]).exit_code == 0
    assert run("--plot", paths[0], "--force", *paths).exit_code == 2


def test_plot_to_png_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("--plot", tmp_path / "out.png", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 2
    assert "matplotlib" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_json_fields_are_documented(six: tuple[Path, Path]) -> None:
    (fields,) = re.findall(r"^\| `diff` \| (.+) \|$", README, re.MULTILINE)
    result = as_json(*six)
    outer = re.sub(r"\(.*?\)", "", fields)
    assert re.findall(r"`(\w+)`", outer) == list(result)
    (tensor,) = re.findall(r"`tensors` \(list of (.*?)\)", fields)
    assert re.findall(r"`(\w+)`", tensor) == list(result["tensors"][0])
    role = result["roles"]["weight"]
    assert list(role)[2:] == [key for key in result["tensors"][0] if key in role]
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("cut", [20, 200, -1])
def test_damaged_files_are_one_line(cut: int, model: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(model.read_bytes()[:cut])
    result = run(model, tmp_path / "cut.safetensors")
    assert result.exit_code == 4
    assert len(result.stderr.splitlines()) == 1
    with pytest.raises(CkzError):
        diff(model, tmp_path / "cut.safetensors")
