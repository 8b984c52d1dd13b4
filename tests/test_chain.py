"""Snapshots that lean on each other: small, exact, and never on the wrong base."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

import ckz
from ckz import pipeline
from ckz.container_read import open_container
from ckz.errors import BaseError
from ckz.rebasing import rebase

Arrays = dict[str, np.ndarray]


def first(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(0, 0.02, (300, 64)).astype(ml_dtypes.bfloat16),
        "frozen": rng.normal(0, 0.02, (200, 100)).astype(np.float32),
        "layer.weight": rng.normal(0, 0.02, (100, 200)).astype(np.float32),
        "half": rng.normal(0, 0.02, (100, 60)).astype(np.float16),
        "double": rng.normal(0, 0.02, (60, 60)).astype(np.float64),
        "steps": np.arange(4000, dtype=np.int64),
        "norm": np.ones(64, np.float32),
    }


def later(arrays: Arrays, seed: int = 1, scale: float = 1e-4) -> Arrays:
    """A training step further: all floats but the frozen ones move by about the same."""
    rng = np.random.default_rng(seed)
    moved = {}
    for name, x in arrays.items():
        if name == "frozen":
            moved[name] = x
        elif x.dtype == np.int64:
            moved[name] = x + 1
        else:
            moved[name] = (x.astype("f8") + rng.normal(0, scale, x.shape)).astype(x.dtype)
    return moved


def save(path: Path, arrays: Arrays) -> Path:
    safetensors.numpy.save_file(arrays, path)
    return path


def compress(source: Path, base: Path | None = None, **options: object) -> int:
    output = source.with_name(source.name + ".ckz")
    return pipeline.compress(source, output, base=base, force=True, **options).stored_nbytes  # type: ignore[arg-type]


def restores(source: Path, **options: object) -> bool:
    back = source.with_name("back")
    pipeline.decompress(source.with_name(source.name + ".ckz"), back, force=True, **options)  # type: ignore[arg-type]
    return back.read_bytes() == source.read_bytes()


def test_a_later_save_is_smaller_and_comes_back(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", first())
    b = save(tmp_path / "b.safetensors", later(first()))
    alone = compress(b)
    delta = compress(b, a, verify=True)
    assert delta < 0.75 * alone
    assert restores(b)
    compress(a)
    assert compress(b, tmp_path / "a.safetensors.ckz") == delta
    a.unlink()
    assert restores(b)


@pytest.mark.parametrize("codec", ["bitmask", "xor", "ulp"])
def test_each_delta_codec_can_be_asked_for(tmp_path: Path, codec: str) -> None:
    a = save(tmp_path / "a.safetensors", first())
    b = save(tmp_path / "b.safetensors", later(first(), scale=1e-6))
    compress(b, a, codecs={"weight": codec})
    assert restores(b)
    with open_container(tmp_path / "b.safetensors.ckz") as container:
        used = {text.partition(":")[0] for text in container.meta["codecs"]}
    assert codec in used


def test_unchanged_tensors_cost_their_rows(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", first())
    arrays = first()
    arrays["half"] = arrays["half"] * np.float16(0.5)
    b = save(tmp_path / "b.safetensors", arrays)
    assert compress(b, a) < arrays["half"].nbytes + 12_000
    same = save(tmp_path / "c.safetensors", first())
    assert compress(same, a) < 10_500
    assert restores(b)
    assert restores(same)


def test_grown_renamed_and_cast_tensors_find_their_base(tmp_path: Path) -> None:
    arrays = first()
    a = save(tmp_path / "a.safetensors", arrays)
    grown = dict(arrays)
    extra = np.random.default_rng(5).normal(0, 0.02, (10, 64)).astype(ml_dtypes.bfloat16)
    grown["embed"] = np.concatenate([arrays["embed"], extra])
    del grown["layer.weight"]
    grown["renamed"] = arrays["layer.weight"]
    grown["frozen"] = arrays["frozen"].astype(ml_dtypes.bfloat16)
    b = save(tmp_path / "b.safetensors", grown)
    # A grown tensor of one chunk is stored whole; the others cost nothing.
    assert compress(b, a) < grown["embed"].nbytes + 12_000
    assert restores(b)


def test_a_grown_tensor_of_many_chunks_costs_its_new_rows(tmp_path: Path) -> None:
    old = np.random.default_rng(0).normal(0, 0.02, (6000, 256)).astype(np.float32)
    new = np.concatenate([old, old[:10] * 2])
    a = save(tmp_path / "a.safetensors", {"embed": old})
    b = save(tmp_path / "b.safetensors", {"embed": new})
    assert compress(b, a) < 1.1 * (1 << 20)
    assert restores(b)


def test_formats_may_differ(tmp_path: Path) -> None:
    arrays = {k: v for k, v in first().items() if v.dtype == np.float32}
    root = tmp_path / "hf"
    root.mkdir()
    save(root / "model-1.safetensors", {"frozen": arrays["frozen"], "norm": arrays["norm"]})
    save(root / "model-2.safetensors", {"layer.weight": arrays["layer.weight"]})
    b = tmp_path / "b.pt"
    torch.save({k: torch.from_numpy(v) for k, v in arrays.items()}, b)
    assert compress(b, root) < 12_000
    assert restores(b, base=root)


def test_a_delta_is_never_much_larger_than_alone(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", first(0))
    b = save(tmp_path / "b.safetensors", first(99))
    assert compress(b, a) <= compress(b) + 500


def test_twenty_links_restore(tmp_path: Path) -> None:
    arrays = first()
    path = save(tmp_path / "s00.safetensors", arrays)
    compress(path)
    for step in range(1, 21):
        arrays = later(arrays, step)
        base = path.with_name(path.name + ".ckz")
        path = save(tmp_path / f"s{step:02}.safetensors", arrays)
        compress(path, base, anchor=100)
    with open_container(path.with_name(path.name + ".ckz")) as container:
        assert container.meta["base"]["depth"] == 20
    kept = path.read_bytes()
    for source in tmp_path.glob("*.safetensors"):
        source.unlink()
    moved = tmp_path / "moved"
    moved.mkdir()
    for packed in tmp_path.glob("*.ckz"):
        packed.rename(moved / packed.name)
    pipeline.decompress(moved / "s20.safetensors.ckz", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == kept
    with ckz.open(moved / "s20.safetensors.ckz") as archive:
        assert archive["layer.weight"].tobytes() == arrays["layer.weight"].tobytes()


def test_anchors_end_chains(tmp_path: Path) -> None:
    arrays = first()
    path = save(tmp_path / "0.safetensors", arrays)
    compress(path)
    depths = []
    for step in range(1, 8):
        arrays = later(arrays, step)
        base = path.with_name(path.name + ".ckz")
        path = save(tmp_path / f"{step}.safetensors", arrays)
        compress(path, base, anchor=3)
        with open_container(path.with_name(path.name + ".ckz")) as container:
            depths.append(container.meta["base"]["depth"] if container.meta["base"] else 0)
    assert depths == [1, 2, 3, 0, 1, 2, 3]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    a = save(tmp_path / "a.safetensors", first())
    b = save(tmp_path / "b.safetensors", later(first()))
    compress(b, a)
    return a, b


def test_bases_that_lean_on_each_other_are_passed_over(tmp_path: Path) -> None:
    """What a container needs lies in two others, one of which needs that container itself."""
    one = save(tmp_path / "1.safetensors", first())
    two = save(tmp_path / "2.safetensors", later(first()))
    full, delta = (path.with_name(f"{path.name}.ckz") for path in (one, two))
    pipeline.compress(one, full)
    pipeline.compress(two, delta, base=full)
    moved = full.rename(tmp_path / "z-moved.ckz")
    pipeline.compress(one, full, base=delta)
    one.rename(tmp_path / "away")
    for path in (full, delta, moved):
        pipeline.verify(path, data=True)
    pipeline.decompress(delta, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == two.read_bytes()
    moved.unlink()
    two.unlink()
    for path in (full, delta):
        with pytest.raises(BaseError, match="no file beside it holds its base"):
            pipeline.verify(path, data=True)


def test_a_missing_base_is_named(pair: tuple[Path, Path]) -> None:
    a, b = pair
    a.rename(a.with_name("hidden"))
    with pytest.raises(BaseError, match=r"a\.safetensors"):
        restores(b)
    assert not b.with_name("back").exists()
    assert restores(b, base=a.with_name("hidden"))
    pipeline.verify(b.with_name(b.name + ".ckz"))


def test_every_flipped_bit_of_a_base_is_refused(pair: tuple[Path, Path]) -> None:
    a, b = pair
    data = a.read_bytes()
    start = int.from_bytes(data[:8], "little") + 8
    rng = np.random.default_rng(0)
    for at in rng.integers(start, len(data), 12).tolist():
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        a.write_bytes(changed)
        small = data[at - 40 : at + 40].count(b"\x80?") > 5  # norms are ones: not leaned on
        if small:
            assert restores(b)
        else:
            with pytest.raises(BaseError, match=r"tensor '\w"):
                restores(b)
    a.write_bytes(data)
    os.utime(a, ns=(1, 1))
    assert restores(b)


def test_a_damaged_base_container_is_refused(pair: tuple[Path, Path]) -> None:
    a, b = pair
    compress(a)
    packed = a.with_name(a.name + ".ckz")
    compress(b, packed)
    a.unlink()
    with open_container(packed) as container:
        place = int(container.places[0])
    data = bytearray(packed.read_bytes())
    data[place + 100] ^= 16
    packed.write_bytes(data)
    with pytest.raises(BaseError, match="tensor"):
        restores(b)
    data[40] ^= 1
    packed.write_bytes(data)
    with pytest.raises(BaseError):
        restores(b)


def test_a_wrong_base_says_what_was_expected_and_found(pair: tuple[Path, Path]) -> None:
    a, b = pair
    save(a, first(7))
    with pytest.raises(BaseError, match=r"tensor '.*' should have digest \w{32}, has \w{32}"):
        restores(b)
    with pytest.raises(BaseError, match="is not there"):
        restores(b, base=save(a.with_name("other.safetensors"), {"x": np.zeros(5)}))


def test_exit_codes(pair: tuple[Path, Path]) -> None:
    a, b = pair
    a.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "ckz", "decompress", "-f", f"{b}.ckz"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1


def test_rebase_keeps_the_contents(pair: tuple[Path, Path]) -> None:
    a, b = pair
    packed = b.with_name(b.name + ".ckz")
    c = save(b.with_name("c.safetensors"), later(later(first()), 2))
    compress(c, packed)
    rebase(packed)
    with open_container(packed) as container:
        assert container.meta["base"] is None
        assert container.checkpoint.files[0].path == "b.safetensors"
    a.unlink()
    assert restores(b)
    assert restores(c)
    save(a, first())
    rebase(packed, base=a)
    with open_container(packed) as container:
        assert container.meta["base"]["name"] == "a.safetensors"
    assert restores(b)
    assert [p.name for p in b.parent.iterdir() if p.name.startswith(".")] == []


def test_inspect_shows_the_chain(pair: tuple[Path, Path]) -> None:
    from ckz.inspection import inspect

    _, b = pair
    chain = inspect(b.with_name(b.name + ".ckz")).chain
    assert [(link.name, link.depth) for link in chain] == [
        ("b.safetensors.ckz", 1),
        ("a.safetensors", 0),
    ]


# -- one optimizer step apart ---------------------------------------------------------------------


def train(
    tmp_path: Path, optimizer: str, mixed: bool, schedule: bool, **options: object
) -> list[Path]:
    """Train a tiny model and save it after each of the last two steps, as people do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64, bias=False)
    )
    adam = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, **options)
    decay = torch.optim.lr_scheduler.StepLR(adam, 1, 0.99)
    paths = []
    for step in range(6):
        model(torch.randn(32, 64)).square().mean().backward()
        adam.step()
        if schedule:
            decay.step()
        adam.zero_grad()
        if step >= 4:
            weights = {k: v.bfloat16() if mixed else v for k, v in model.state_dict().items()}
            state = {"model": weights, "optimizer": adam.state_dict(), "step": step}
            if mixed:
                state["master_params"] = model.state_dict()
            paths.append(tmp_path / f"step_{step}.pt")
            torch.save(state, paths[-1])
    return paths


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("AdamW", {"foreach": False}),
        ("AdamW", {"foreach": True, "weight_decay": 0.1}),
        ("AdamW", {"fused": True, "betas": (0.9, 0.95)}),
        ("Adam", {}),
        ("Adam", {"weight_decay": 0.01}),
    ],
)
def test_one_step_costs_the_first_moment_only(
    tmp_path: Path, optimizer: str, options: dict[str, object], schedule: bool
) -> None:
    before, after = train(tmp_path, optimizer, mixed=False, schedule=schedule, **options)
    report = pipeline.compress(after, tmp_path / f"{after.name}.ckz", base=before)
    share = {role: stored / raw for role, (raw, stored) in report.roles.items()}
    assert share["weight"] < 0.1
    assert share["variance"] < 0.12
    assert restores(after)


def test_one_step_of_a_mixed_precision_state(tmp_path: Path) -> None:
    before, after = train(tmp_path, "AdamW", mixed=True, schedule=False)
    compress(before)
    packed = before.with_name(before.name + ".ckz")
    alone = compress(after)
    assert compress(after, packed) < 0.5 * alone
    assert restores(after)


def test_steps_in_a_chain(tmp_path: Path) -> None:
    """Weights lean on weights, moments on moments, link after link."""
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 100)
    adam = torch.optim.AdamW(model.parameters())
    base = None
    for step in range(8):
        model(torch.randn(16, 200)).square().mean().backward()
        adam.step()
        path = tmp_path / f"{step}.pt"
        torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, path)
        compress(path, base, anchor=100)
        base = path.with_name(path.name + ".ckz")
    for other in tmp_path.glob("[0-6].pt"):
        other.unlink()
    assert restores(path)


def test_a_step_of_another_optimizer_falls_back(tmp_path: Path) -> None:
    before, after = train(tmp_path, "NAdam", mixed=False, schedule=False)
    assert compress(after, before) <= compress(after) + 500
    compress(after, before)
    assert restores(after)


def test_ranks_of_a_directory_keep_to_themselves(tmp_path: Path) -> None:
    """Every rank has the same names; each is compared with itself."""
    roots = [tmp_path / name for name in ("iter_0000010", "iter_0000020")]
    arrays = [first(seed) for seed in (1, 2)]
    for root in roots:
        for rank in (0, 1):
            (root / f"rank_{rank}").mkdir(parents=True)
            save(root / f"rank_{rank}" / "model.safetensors", arrays[rank])
            arrays[rank] = later(arrays[rank], rank)
    packed = tmp_path / "x.ckz"
    alone = pipeline.compress(roots[1], packed).stored_nbytes
    delta = pipeline.compress(roots[1], packed, base=roots[0], force=True, verify=True)
    assert delta.stored_nbytes < 0.75 * alone


def test_parts_of_a_tensor_find_the_save_before(tmp_path: Path) -> None:
    """Spans whose tensors lie in pieces are compared by place."""
    from ckz.formats import read_checkpoint
    from ckz.matching import match_base

    paths = [save(tmp_path / f"{n}.safetensors", {"w": first(n)["frozen"]}) for n in (1, 2)]
    old, new = (read_checkpoint(path) for path in paths)
    whole = new.tensors[0].pieces[0]
    rows = whole.shape[0] // 2
    halves = [
        whole._replace(shape=(rows, *whole.shape[1:]), offset=k * rows * 400, start=(k * rows, 0))
        for k in (0, 1)
    ]
    cut = dataclasses.replace(new, tensors=(new.tensors[0]._replace(pieces=tuple(halves)),))
    leans = match_base(cut, old)
    assert leans[0].refs[0].nbytes == new.spans[0].nbytes


def test_a_step_of_a_directory_whose_optimizer_numbers_otherwise(tmp_path: Path) -> None:
    """A safetensors file lists parameters by name, the optimizer beside it by number."""
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(64, 64, bias=False) for name in ("b", "c", "a")}
    model = torch.nn.ModuleDict(layers)
    adam = torch.optim.AdamW(model.parameters())
    roots = []
    for step in range(4):
        x = torch.randn(16, 64)
        for layer in layers.values():
            x = layer(x).tanh()
        x.square().mean().backward()
        adam.step()
        adam.zero_grad()
        root = tmp_path / f"checkpoint-{step}"
        root.mkdir()
        weights = {k: v.numpy().copy() for k, v in sorted(model.state_dict().items())}
        safetensors.numpy.save_file(weights, root / "model.safetensors")
        torch.save(adam.state_dict(), root / "optimizer.pt")
        roots.append(root)
    report = pipeline.compress(roots[3], tmp_path / "x.ckz", base=roots[2], verify=True)
    share = {role: stored / raw for role, (raw, stored) in report.roles.items()}
    assert share["weight"] < 0.1
    assert share["variance"] < 0.2


def test_a_missing_root_is_found_out_fast(tmp_path: Path) -> None:
    """A search that tried every file at every level would take 2**20 steps."""
    arrays = {"w": first()["layer.weight"]}
    path = save(tmp_path / "s00.safetensors", arrays)
    for step in range(1, 21):
        arrays = {"w": later(arrays, step)["w"]}
        base = path if step == 1 else path.with_name(path.name + ".ckz")
        path = save(tmp_path / f"s{step:02}.safetensors", arrays)
        compress(path, base, anchor=100)
    for source in tmp_path.glob("*.safetensors"):
        source.unlink()
    began = time.monotonic()
    with pytest.raises(BaseError, match=r"s00\.safetensors"):
        pipeline.decompress(tmp_path / "s20.safetensors.ckz", tmp_path / "back")
    assert time.monotonic() - began < 20  # a bound for a hang, not a speed


def test_chains_end_before_they_are_too_deep_to_restore(tmp_path: Path) -> None:
    arrays = {"w": first()["half"]}
    path = save(tmp_path / "s.safetensors", arrays)
    compress(path)
    packed = path.with_name(path.name + ".ckz")
    depths = []
    for step in range(1, 68):
        arrays = {"w": later(arrays, step)["w"]}
        save(path, arrays)
        base = packed.rename(tmp_path / f"base_{step}.ckz")
        compress(path, base, anchor=1000)
        with open_container(packed) as container:
            depths.append(container.meta["base"]["depth"] if container.meta["base"] else 0)
        if depths[-1] == 64:
            assert restores(path)
    assert max(depths) == 64
    assert 0 in depths
