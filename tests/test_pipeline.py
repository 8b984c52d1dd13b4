"""Whole files through the pipeline: same bytes back, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from conftest import state

import ckz
from ckz import atomic, pipeline
from ckz.container_read import open_container
from ckz.errors import ChangedError, CkzError, CorruptError, ExistsError, IncompleteError


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def round_trip(source: Path, **options: object) -> Path:
    """Compress and decompress beside the source; return the container."""
    packed = source.with_name(source.name + ".ckz")
    back = source.with_name(source.name + ".back")
    pipeline.compress(source, packed, force=True, **options)  # type: ignore[arg-type]
    pipeline.decompress(packed, back, force=True)
    assert sha(back) == sha(source)
    return packed


@pytest.mark.parametrize("level", ["fast", "default", "max"])
def test_a_model_comes_back(model: Path, level: str) -> None:
    packed = round_trip(model, level=level, verify=True, sha256=True)
    assert packed.stat().st_mode == model.stat().st_mode, "no more open than its source"


@pytest.mark.parametrize("data", [b"", b"x", b"ab" * 700_000, os.urandom(3_000_001)])
def test_any_file_comes_back(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    packed = round_trip(path)
    # Bounded expansion: 64 bytes a chunk, and the container's fixed cost.
    assert packed.stat().st_size < len(data) + 64 * (len(data) >> 20) + 10_000


def test_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(state(scale=300), path)
    packed = tmp_path / "packed.ckz"
    digests = set()
    for threads in (1, 2, 5, 16):
        pipeline.compress(path, packed, threads=threads, memory=400_000_000, force=True)
        digests.add(sha(packed))
    assert len(digests) == 1


def test_a_tied_weight_saved_twice_is_stored_once(tmp_path: Path) -> None:
    embedding = np.random.default_rng(0).normal(0, 0.02, (1000, 300)).astype(np.float32)
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    safetensors.numpy.save_file({"embed": embedding}, once)
    safetensors.numpy.save_file({"embed": embedding, "head": embedding}, twice)
    sizes = [round_trip(path).stat().st_size for path in (once, twice)]
    assert sizes[1] - sizes[0] < 1000
    other = embedding.copy()
    other.view(np.uint32)[5, 5] ^= 1
    safetensors.numpy.save_file({"embed": embedding, "head": other}, twice)
    # One chunk differs by one bit and is stored; the other is not.
    assert sizes[0] * 1.5 < round_trip(twice).stat().st_size


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="Linux makes such files")
def test_a_file_without_a_size_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ChangedError, match="/proc/version: holds more than its 0 bytes"):
        pipeline.compress(Path("/proc/version"), tmp_path / "a.ckz")
    assert not list(tmp_path.iterdir())


def test_repeats_are_found_among_tensors_that_differ_in_a_byte(tmp_path: Path) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (3, 100_000), dtype=np.uint8)
    noise[1:] = noise[0]
    noise[1:, 62] ^= 1
    sizes = []
    for kinds in ([0, 1], [0, 1, 0, 1, 2, 2]):
        path = tmp_path / f"{len(kinds)}.safetensors"
        safetensors.numpy.save_file({f"t{k}": noise[kind] for k, kind in enumerate(kinds)}, path)
        sizes.append(round_trip(path).stat().st_size)
    assert sizes[0] > 200_000
    assert sizes[1] - sizes[0] < 1000


def test_open_gives_every_tensor(model: Path) -> None:
    packed = round_trip(model)
    with ckz.open(model) as source, ckz.open(packed) as stored:
        assert list(source) == list(stored)
        for name, expected in state().items():
            for archive in (source, stored):
                assert archive[name].dtype == expected.dtype
                assert archive[name].shape == expected.shape
                assert archive[name].tobytes() == expected.tobytes()


def test_random_access_reads_only_its_chunks(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(state(scale=100), path)
    packed = round_trip(path)
    with open_container(packed) as container:
        names = [t.name for t in container.checkpoint.tensors]
        victim = names.index("layers.0.weight")
        span = container.checkpoint.tensors[victim].pieces[0].span + 1
        first = int(container.first_chunks[int(container.spans["stream"][span])])
        place = int(container.places[first])
    data = bytearray(packed.read_bytes())
    data[place] ^= 1
    packed.write_bytes(data)
    with ckz.open(packed) as archive:
        assert np.array_equal(archive["embed.weight"], state(scale=100)["embed.weight"])
        with pytest.raises(CorruptError, match=r"layers\.0\.weight"):
            archive["layers.0.weight"]


def test_a_directory_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "sub" / "empty").mkdir(parents=True)
    safetensors.numpy.save_file(state(1), root / "sub" / "a.safetensors")
    safetensors.numpy.save_file(state(1), root / "b.safetensors")
    (root / "config.json").write_text('{"a": 1}')
    (root / "zero").touch()
    (root / "script.sh").write_text("echo")
    (root / "script.sh").chmod(0o755)
    (root / "latest").symlink_to("sub/a.safetensors")
    (root / "dangling").symlink_to("../../nowhere")
    os.utime(root / "config.json", ns=(1, 1_234_567_890_123_456_789))
    packed = tmp_path / "run.ckz"
    pipeline.compress(root, packed)
    back = tmp_path / "back"
    pipeline.decompress(packed, back)
    found = sorted(p.relative_to(back) for p in back.rglob("*"))
    assert found == sorted(p.relative_to(root) for p in root.rglob("*"))
    for name in found:
        a, b = root / name, back / name
        assert a.lstat().st_mode == b.lstat().st_mode
        assert a.lstat().st_mtime_ns == b.lstat().st_mtime_ns
        if a.is_symlink():
            assert a.readlink() == b.readlink()
        elif a.is_file():
            assert a.read_bytes() == b.read_bytes()
    with pytest.raises(ExistsError):
        pipeline.decompress(packed, back)
    (back / "config.json").unlink()
    pipeline.decompress(packed, back, force=True)
    assert (back / "config.json").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_equal_files_of_a_directory_are_stored_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for root, copies in ((one, 1), (two, 3)):
        root.mkdir()
        for i in range(copies):
            safetensors.numpy.save_file(state(1, scale=50), root / f"{i}.safetensors")
        pipeline.compress(root, root.with_suffix(".ckz"))
    sizes = [path.with_suffix(".ckz").stat().st_size for path in (one, two)]
    assert sizes[1] < sizes[0] * 1.1


def test_existing_outputs_are_kept_without_force(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.ckz"
    target.write_text("mine")
    target.chmod(0o640)
    with pytest.raises(ExistsError):
        pipeline.compress(model, target)
    assert target.read_text() == "mine"
    pipeline.compress(model, target, force=True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    pipeline.verify(target, data=True)


def test_a_link_as_target_replaces_what_it_points_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "real.ckz").write_text("old")
    (tmp_path / "link.ckz").symlink_to("real.ckz")
    pipeline.compress(model, tmp_path / "link.ckz", force=True)
    assert (tmp_path / "link.ckz").is_symlink()
    pipeline.verify(tmp_path / "real.ckz")


def test_a_source_that_changes_is_refused(model: Path, tmp_path: Path) -> None:
    def touch(*_: int) -> None:
        os.utime(model, ns=(5, 5))

    with pytest.raises(ChangedError):
        pipeline.compress(model, tmp_path / "x.ckz", progress=touch)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_missing_shards_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "hf"
    root.mkdir()
    safetensors.numpy.save_file({"a": np.zeros(3, "f4")}, root / "m-1.safetensors")
    (root / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'
    )
    with pytest.raises(IncompleteError, match=r"m-2\.safetensors"):
        pipeline.compress(root, tmp_path / "x.ckz")
    pipeline.compress(root, tmp_path / "x.ckz", allow_incomplete=True)
    pipeline.decompress(tmp_path / "x.ckz", tmp_path / "back")


def run(code: str, *args: object, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def set_limit() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        preexec_fn=set_limit,
        check=False,
    )


COMPRESS = """
import sys
from pathlib import Path
from ckz import atomic, pipeline
from ckz.errors import CkzError
try:
    pipeline.compress(Path(sys.argv[1]), Path(sys.argv[2]), force=True)
except CkzError as err:
    sys.exit(f"{err}")
"""


@pytest.mark.parametrize("limit", [1, 600, 3000, 9000, 2_000_000, 18_000_000])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, limit: int) -> None:
    source = tmp_path / "random"
    source.write_bytes(os.urandom(20_000_000))
    target = tmp_path / "out.ckz"
    target.write_text("old")
    done = run(COMPRESS, source, target, limit=limit)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "no space left" in done.stderr
    assert "bytes needed" in done.stderr
    assert "bytes are free" in done.stderr
    assert target.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.ckz", "random"]


def test_decompress_knows_what_it_needs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = round_trip(model)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: type("U", (), {"free": 5}))
    with pytest.raises(CkzError, match=f"{model.stat().st_size} bytes needed, 5 bytes are free"):
        pipeline.decompress(packed, model.with_name("other"))


@pytest.mark.slow
def test_kills_leave_the_old_file_or_a_good_new_one(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(state(scale=800), source)
    target = tmp_path / "out.ckz"
    pipeline.compress(source, target, level="fast")
    old = sha(target)
    began = time.perf_counter()
    assert run(COMPRESS, source, tmp_path / "new.ckz").returncode == 0
    whole = time.perf_counter() - began
    new = sha(tmp_path / "new.ckz")
    rng = random.Random(7)
    for _ in range(50):
        process = subprocess.Popen([sys.executable, "-c", COMPRESS, str(source), str(target)])
        time.sleep(rng.uniform(0.1, 1.1) * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = sha(target)
        assert found in (old, new)
        pipeline.verify(target, data=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    source = tmp_path / "big.safetensors"
    block = np.random.default_rng(0).normal(0, 0.02, 16 << 20).astype(ml_dtypes.bfloat16)
    entries = {
        f"t{i}": {
            "dtype": "BF16",
            "shape": [block.size],
            "data_offsets": [i * block.nbytes, (i + 1) * block.nbytes],
        }
        for i in range(128)
    }
    header = json.dumps(entries).encode()
    with source.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for i in range(128):
            block.view(np.uint16)[i] ^= 1
            file.write(np.roll(block, 7919 * i).view(np.uint16).data)
    assert source.stat().st_size > 4 << 30
    # Not ru_maxrss: that counts what the process was before it became this program, too.
    measure = (
        "import re, sys\nfrom pathlib import Path\nfrom ckz import pipeline\n"
        "a, b = map(Path, sys.argv[2:])\n"
        "getattr(pipeline, sys.argv[1])(a, b)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])"
    )
    packed, back = tmp_path / "big.ckz", tmp_path / "back"
    for command, a, b in (("compress", source, packed), ("decompress", packed, back)):
        done = run(measure, command, a, b)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 400_000, f"{command}: {done.stdout} KiB"
    assert subprocess.run(["cmp", str(source), str(back)], check=False).returncode == 0
    for path in (source, packed, back):
        path.unlink()


def test_seventy_thousand_tiny_tensors_cost_little(tmp_path: Path) -> None:
    n = 7_000
    names = [
        f"model.layers.{i // 384}.mlp.experts.{i % 384}.".ljust(90, "p") + f"{i:010d}"
        for i in range(n)
    ]
    rng = np.random.default_rng(0)
    source = tmp_path / "tiny.safetensors"
    safetensors.numpy.save_file({k: rng.normal(0, 1, 16).astype("f4") for k in names}, source)
    packed = round_trip(source)
    assert (packed.stat().st_size - 64 * n) / n < 60


# -- what a training state has in common with itself ----------------------------------------------


def training_state(rows: int = 300, columns: int = 200) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(0, 2, (rows, 1)) + rng.normal(0, 2, (1, columns)))
    gradient = torch.from_numpy((rng.normal(0, 1e-3, (rows, columns)) * scale).astype("f4"))
    master = torch.from_numpy(rng.normal(0, 0.02, (rows, columns)).astype("f4"))
    other = torch.from_numpy(rng.normal(0, 0.02, (rows, columns)).astype("f4"))
    return {
        "model.a": master.bfloat16(),
        "model.b": other.bfloat16(),
        "master.b": other,
        "master.a": master,
        "state.0.exp_avg": gradient,
        "state.0.exp_avg_sq": gradient.square(),
    }


def roles_of(path: Path, **options: object) -> dict[str, tuple[int, int]]:
    report = pipeline.compress(path, path.with_name("out.ckz"), force=True, **options)  # type: ignore[arg-type]
    pipeline.decompress(path.with_name("out.ckz"), path.with_name("back"), force=True)
    assert sha(path.with_name("back")) == sha(path)
    return report.roles


def test_weights_beside_their_masters_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = training_state()
    torch.save(state, path)
    raw, stored = roles_of(path)["weight"]
    masters = sum(t.nbytes for name, t in state.items() if name.startswith("master"))
    assert raw >= 2 * masters // 4
    # Nothing but the masters themselves, where those count as weights.
    assert stored <= 0.84 * masters
    half = {k: v.half() if v.dtype == torch.bfloat16 else v for k, v in state.items()}
    half["model.a"], half["model.b"] = state["master.a"].half(), state["master.b"].half()
    torch.save(half, path)
    assert roles_of(path)["weight"][1] <= 0.84 * masters


def test_weights_that_only_resemble_their_masters_come_back(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = training_state()
    bits = state["model.a"].view(torch.int16)
    bits.view(-1)[torch.arange(5, 60_000, 1_000)] ^= 1
    torch.save(state, path)
    few = roles_of(path)["weight"][1]
    bits.view(-1)[torch.arange(1, 60_000, 2)] ^= 3
    torch.save(state, path)
    assert few < roles_of(path)["weight"][1]


def test_moments_of_a_matrix_use_its_rows_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(training_state(), path)
    with_means = roles_of(path)
    without = roles_of(path, level="fast")
    assert with_means["variance"][1] < 0.95 * without["variance"][1]
    assert with_means["momentum"][1] < 0.97 * without["momentum"][1]
    pipeline.compress(path, tmp_path / "again.ckz", threads=1)
    pipeline.compress(path, tmp_path / "out.ckz", threads=3, force=True)
    assert sha(tmp_path / "again.ckz") == sha(tmp_path / "out.ckz")


def test_a_cast_crosses_the_files_of_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    state = training_state()
    torch.save({k: v for k, v in state.items() if k.startswith("model")}, root / "model.pt")
    torch.save({k: v for k, v in state.items() if k.startswith("master")}, root / "optim.pt")
    masters = sum(t.nbytes for name, t in state.items() if name.startswith("master"))
    report = pipeline.compress(root, tmp_path / "run.ckz")
    assert sum(stored for _, stored in report.roles.values()) <= 0.84 * masters + 5000
    pipeline.decompress(tmp_path / "run.ckz", tmp_path / "back")
    assert (tmp_path / "back" / "model.pt").read_bytes() == (root / "model.pt").read_bytes()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    path = tmp_path / "tied.pt"
    weight = torch.randn(50, 40)
    torch.save({"embed": weight, "head": weight, "rows": weight[:7], "turned": weight.t()}, path)
    pipeline.compress(path, tmp_path / "tied.ckz")
    found = ckz.load_state_dict(tmp_path / "tied.ckz")
    assert found["embed"].data_ptr() == found["head"].data_ptr() == found["rows"].data_ptr()
    assert found["turned"].stride() == (1, 40)
    assert torch.equal(found["turned"], weight.t())


# -- sources that are damaged or incomplete -------------------------------------------------------


def test_a_flipped_bit_in_a_torch_zip_names_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"first": torch.ones(3000), "second": torch.arange(3000.0)}, path)
    pipeline.verify(path)
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(3000, dtype="f4")[1000:1010].tobytes())] ^= 8
    path.write_bytes(data)
    for action in (
        lambda: pipeline.compress(path, tmp_path / "x.ckz"),
        lambda: pipeline.verify(path),
    ):
        with pytest.raises(CorruptError, match=r"'second': CRC mismatch"):
            action()
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    pipeline.compress(path, tmp_path / "x.ckz", accept_bad_crc=True)
    pipeline.decompress(tmp_path / "x.ckz", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == bytes(data)


def test_verify_reports_absent_shards_of_a_source(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(3, "f4")}, tmp_path / "m-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "m-1.safetensors"}}')
    assert pipeline.verify(tmp_path).tensors == 1
    index.write_text('{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}')
    with pytest.raises(IncompleteError, match=r"m-2\.safetensors"):
        pipeline.verify(tmp_path)


@pytest.mark.parametrize("based", [False, True])
def test_a_dry_run_predicts_the_size(tmp_path: Path, based: bool) -> None:
    rng = np.random.default_rng(0)
    first = {f"layers.{i}.weight": rng.normal(0, 0.02, (500, 400)) for i in range(6)}
    first["tied.weight"] = first["layers.0.weight"]
    second = {name: x + rng.normal(0, 1e-4, x.shape) for name, x in first.items()}
    second["tied.weight"] = second["layers.0.weight"]
    for name, arrays in (("a", first), ("b", second)):
        halves = {n: x.astype(ml_dtypes.bfloat16) for n, x in arrays.items()}
        safetensors.numpy.save_file(halves, tmp_path / name)
    base = tmp_path / "a" if based else None
    source, packed = tmp_path / "b", tmp_path / "b.ckz"
    planned = pipeline.compress(source, packed, base=base, dry_run=True)
    assert not packed.exists()
    done = pipeline.compress(source, packed, base=base)
    assert abs(planned.stored_nbytes - done.stored_nbytes) < 0.05 * done.stored_nbytes
    assert sum(row[2] for row in planned.plan) == source.stat().st_size
    assert any(row[1] == "same" for row in planned.plan)


def test_predictions_hold_on_real_checkpoints(corpus: Path, tmp_path: Path) -> None:
    pairs = [("series/gpt_bf16/iter_0000220.pt", ""), ("zoo/lightning/epoch=1-step=20.ckpt", "")]
    pairs += [("series/gpt_bf16/iter_0000220.pt", "series/gpt_bf16/iter_0000200.pt")]
    pairs += [("series/mixtral_moe/step_00120.pt", "series/mixtral_moe/step_00100.pt")]
    pairs += [("zoo/deepspeed/zero1/global_step8", ""), ("zoo/dcp/fsdp2/step_12", "")]
    for name, under in pairs:
        base = corpus / under if under else None
        packed = tmp_path / "x.ckz"
        planned = pipeline.compress(corpus / name, packed, base=base, dry_run=True, force=True)
        done = pipeline.compress(corpus / name, packed, base=base, force=True)
        assert abs(planned.stored_nbytes - done.stored_nbytes) < 0.05 * done.stored_nbytes, name
