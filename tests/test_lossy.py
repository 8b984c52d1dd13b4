"""Lossy methods: the rules that hold for all of them, bounds, chains, and what files become."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ckz import kernels, pipeline
from ckz.container_read import open_container
from ckz.errors import CorruptError, UsageError
from ckz.inspection import inspect
from ckz.lossy import Methods, methods_of
from ckz.rebasing import rebase

ROWS, COLUMNS = 60, 96

# Everything that a user can ask for.
ASKED: list[dict[str, str]] = [
    {"preset": "resume"},
    {"preset": "compact"},
    {"preset": "archive"},
    *({"weights": w} for w in ("fp16", "bf16", "int8", "lc:3", "deadzone:0.1")),
    *({"max_error": f"{b}:{e}"} for b in ("abs", "rel", "pwrel") for e in (1e-2, 1e-5, 1e-30)),
    {"max_error": "update:0.01"},
    *({"optimizer": o} for o in ("moments:0.3", "cluster", "cluster:2", "pwrel:0.1")),
]


def ask(**options: str) -> Methods:
    return methods_of(**options)


def state(seed: int, step: int = 0) -> dict[str, Any]:
    """A training state in mixed precision, with an embedding of which few rows are used."""
    rng = np.random.default_rng(seed)
    drift = np.random.default_rng(seed + 1000 + step)
    masters, weights, first, second = {}, {}, {}, {}
    for name in ("embed", "proj", "norm"):
        shape = (ROWS, COLUMNS) if name != "norm" else (COLUMNS,)
        master = rng.normal(0, 0.02, shape) + step * drift.normal(0, 1e-4, shape)
        scale = np.exp(rng.normal(0, 2, (shape[0], *(1,) * (len(shape) - 1))))
        m, v = rng.normal(0, 1e-3, shape) * scale, (rng.normal(0, 1e-3, shape) * scale) ** 2
        if name == "embed":
            m[10:40], v[10:40] = 0, 0
        masters[name] = torch.from_numpy(master.astype(np.float32))
        weights[name] = masters[name].bfloat16()
        first[name] = torch.from_numpy(m.astype(np.float32))
        second[name] = torch.from_numpy(v.astype(np.float32))
    optimizer = {
        "fp32_master": masters,
        "exp_avg": first,
        "exp_avg_sq": second,
        "step": torch.tensor(7.0 + step),
        "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}],
    }
    return {"model": weights, "optimizer": optimizer, "rng_state": torch.get_rng_state()}


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {k: t for key, v in value.items() for k, t in tensors(v, f"{path}.{key}").items()}
    return {path: value} if isinstance(value, torch.Tensor) else {}


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def pack(source: Path, methods: Methods, base: Path | None = None, **options: Any) -> Path:
    output = source.with_name(source.name + ".ckz")
    pipeline.compress(source, output, methods=methods, base=base, force=True, **options)
    return output


def unpack(packed: Path) -> Any:
    output = packed.with_suffix(".out")
    pipeline.decompress(packed, output, force=True)
    assert zipfile.ZipFile(output).testzip() is None
    return torch.load(output)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.itemsize])


def numpy_of(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def assert_rules(before: Any, after: Any) -> None:
    """What holds for every method."""
    old, new = tensors(before), tensors(after)
    assert list(old) == list(new)
    for name, x in old.items():
        y = new[name]
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        if x.ndim < 2 and "exp" not in name:
            assert torch.equal(x, y)
        a, b = numpy_of(x).reshape(-1), numpy_of(y).reshape(-1)
        if a.dtype == np.uint8:
            continue
        special = ~np.isfinite(a) | (a == 0)
        assert np.array_equal(bits(a[special]), bits(b[special])), name
        assert np.isfinite(b[~special]).all(), name


@pytest.mark.parametrize("options", ASKED, ids=lambda o: " ".join(o.values()))
@pytest.mark.parametrize("based", [False, True])
def test_every_method_keeps_the_rules(tmp_path: Path, options: dict[str, str], based: bool) -> None:
    methods = ask(**options)
    base = pack(save(tmp_path / "a.pt", state(0)), methods) if based else None
    before = state(0, 5)
    source = save(tmp_path / "b.pt", before)
    packed = pack(source, methods, base)
    after = unpack(packed)
    assert_rules(before, after)
    if methods.is_resumable:
        for name, v in before["optimizer"]["exp_avg_sq"].items():
            assert torch.equal(v > 0, after["optimizer"]["exp_avg_sq"][name] > 0)
    for name, master in after["optimizer"]["fp32_master"].items():
        # A bound that is finer than the weights' own type keeps them from following.
        if "max_error" not in options:
            assert torch.equal(master.bfloat16(), after["model"][name])
    assert torch.equal(
        before["optimizer"]["exp_avg"]["norm"], after["optimizer"]["exp_avg"]["norm"]
    ) == (methods.is_resumable)
    with open_container(packed) as container:
        losses = container.losses
        assert container.meta["resumable"] == methods.is_resumable
    changed = [n for n, x in tensors(before).items() if not torch.equal(x, tensors(after)[n])]
    assert len(losses) == len(changed)
    # The same bytes with any number of threads.
    assert packed.read_bytes() == pack(source, methods, base, threads=1).read_bytes()


def test_recorded_errors_are_those_made(tmp_path: Path) -> None:
    before = state(3)
    packed = pack(save(tmp_path / "a.pt", before), ask(preset="resume", max_error="rel:0.001"))
    after = unpack(packed)
    found = {row.name: row for row in inspect(packed).tensors if row.method}
    assert len(found) >= 4
    for name, row in found.items():
        x, y = (tensors(s)["." + name].double().numpy() for s in (before, after))
        assert row.largest_error == np.abs(x - y).max()
        relative = np.sqrt(((x - y) ** 2).sum() / (x * x).sum())
        assert row.relative_error == pytest.approx(relative, rel=1e-12)


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38, -3.4e38, 1e-30, 1.0]


def values(data: Any) -> np.ndarray:
    """Matrices of values of one size, of all sizes, or special."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    x = rng.normal(0, 1, ROWS * COLUMNS)
    kind = data.draw(st.sampled_from(["normal", "wide", "constant", "special", "bits", "ramp"]))
    if kind == "wide":
        x = x * 10.0 ** rng.integers(-40, 37, x.size)
    elif kind == "constant":
        x = np.full(x.size, data.draw(st.sampled_from(SPECIAL)))
    elif kind == "special":
        x = rng.choice(SPECIAL, x.size)
    elif kind == "ramp":
        x = np.linspace(-1e7, 1e7, x.size)
    with np.errstate(all="ignore"):
        found = x.astype(np.float32)
    if kind == "bits":
        found = rng.integers(0, 1 << 32, x.size, dtype=np.uint32).view(np.float32)
    return found.reshape(ROWS, COLUMNS)


@given(
    data=st.data(),
    kind=st.sampled_from(["abs", "rel", "pwrel"]),
    error=st.sampled_from([1e-1, 1e-3, 1e-5, 1e-9, 1e-38]),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_bounds_are_kept(
    tmp_path_factory: pytest.TempPathFactory, data: Any, kind: str, error: float, dtype: type
) -> None:
    folder = tmp_path_factory.mktemp("bound")
    with np.errstate(all="ignore"):
        x = values(data).astype(dtype)
    save_file({"w.weight": x}, folder / "m")
    packed = pack(folder / "m", ask(max_error=f"{kind}:{error}"))
    pipeline.decompress(packed, folder / "out")
    y = load_file(folder / "out")["w.weight"]
    finite = np.isfinite(x)
    assert np.array_equal(bits(x[~finite]), bits(y[~finite]))
    a, b = x[finite].astype(np.float64), y[finite].astype(np.float64)
    assert not b[a == 0].any()
    limit = error
    if kind == "rel":
        limit = error * (a.max() - a.min()) if a.size else 0.0
    assert (np.abs(a - b) <= (error * np.abs(a) if kind == "pwrel" else limit)).all()


@given(
    data=st.data(),
    method=st.sampled_from(
        ["moments:0.005", "moments:0.5", "cluster:16", "cluster:2", "pwrel:0.2"]
    ),
)
def test_any_moments_keep_the_rules(
    tmp_path_factory: pytest.TempPathFactory, data: Any, method: str
) -> None:
    folder = tmp_path_factory.mktemp("moments")
    m, v = values(data), np.abs(values(data))
    before = {
        "model": {"w": torch.zeros(ROWS, COLUMNS)},
        "optimizer": {
            "exp_avg": {"w": torch.from_numpy(m)},
            "exp_avg_sq": {"w": torch.from_numpy(v)},
        },
    }
    packed = pack(save(folder / "a.pt", before), ask(optimizer=method))
    after = unpack(packed)
    assert_rules(before, after)
    w = after["optimizer"]["exp_avg_sq"]["w"].numpy()
    assert np.array_equal(v > 0, w > 0)


def test_a_small_second_moment_does_not_vanish(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    m = rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
    v = (m * m).astype(np.float32)
    m[3], v[3] = 1e-6, 1e-12
    before = {
        "model": {"w": torch.zeros(ROWS, COLUMNS)},
        "optimizer": {
            "exp_avg": {"w": torch.from_numpy(m)},
            "exp_avg_sq": {"w": torch.from_numpy(v)},
        },
    }
    for method in ("moments:0.005", "pwrel:0.1"):
        after = unpack(pack(save(tmp_path / "a.pt", before), ask(optimizer=method)))
        m2, v2 = (after["optimizer"][k]["w"].numpy() for k in ("exp_avg", "exp_avg_sq"))
        update = m2[3] / (np.sqrt(v2[3]) + 1e-8)
        assert np.abs(update / (1e-6 / (1e-6 + 1e-8)) - 1).max() < 0.3


def test_moments_of_the_smallest_numbers(tmp_path: Path) -> None:
    tiny = np.full((ROWS, COLUMNS), 1e-45, np.float32)
    ones = np.random.default_rng(0).random((ROWS, COLUMNS)).astype(np.float32)
    for m, v in ((tiny, ones), (ones, tiny), (tiny, tiny)):
        moments = {"exp_avg": {"w": torch.from_numpy(m)}, "exp_avg_sq": {"w": torch.from_numpy(v)}}
        before = {"model": {"w": torch.zeros(ROWS, COLUMNS)}, "optimizer": moments}
        assert_rules(before, unpack(pack(save(tmp_path / "a.pt", before), ask(preset="resume"))))


def test_moments_keep_their_budget(tmp_path: Path) -> None:
    before = state(1)
    for budget in (0.005, 0.1):
        after = unpack(pack(save(tmp_path / "a.pt", before), ask(optimizer=f"moments:{budget}")))
        old, new = [], []
        for name in ("embed", "proj"):
            for s, out in ((before, old), (after, new)):
                m, v = (s["optimizer"][k][name].double() for k in ("exp_avg", "exp_avg_sq"))
                out.append((m / (v.sqrt() + 1e-8)).numpy().ravel())
        u, w = np.concatenate(old), np.concatenate(new)
        error = ((u - w) ** 2).sum() / (u * u).sum()
        assert budget / 4 < error < 1.1 * budget


@pytest.mark.parametrize("budget", [0.004, 0.05, 0.2])
def test_updates_are_as_long_as_they_were(tmp_path: Path, budget: float) -> None:
    """Nearest values would be shorter by the error's part, as if steps were smaller."""
    rng = np.random.default_rng(3)
    shape = (500, 400)
    scale = np.exp(rng.normal(0, 1, (500, 1)) + rng.normal(0, 1, (1, 400)))
    v = scale**2 * np.exp(rng.normal(0, 1.5, shape)) * 1e-8
    m = scale * rng.laplace(0, 0.3, shape) * 1e-4
    moments = {
        "exp_avg": {"w": torch.from_numpy(m.astype(np.float32))},
        "exp_avg_sq": {"w": torch.from_numpy(v.astype(np.float32))},
    }
    before = {"model": {"w": torch.zeros(shape)}, "optimizer": moments}
    after = unpack(pack(save(tmp_path / "a.pt", before), ask(optimizer=f"moments:{budget}")))
    m2, v2 = (after["optimizer"][k]["w"].double().numpy() for k in ("exp_avg", "exp_avg_sq"))
    second = 1 / (np.sqrt(v) + 1e-8)
    kept = (m * m2 / (np.sqrt(v2) + 1e-8)).sum() / (m * m * second).sum()
    assert abs(kept - 1) < 0.01 + budget / 20
    # By themselves, too, for one is forgotten sooner than the other.
    alone = (m * m / (np.sqrt(v2) + 1e-8)).sum() / (m * m * second).sum()
    assert abs(alone - 1) < 0.01 + budget / 20


@pytest.mark.parametrize("budget", [0.02, 0.08, 0.3])
def test_changes_are_as_long_as_they_were(tmp_path: Path, budget: float) -> None:
    rng = np.random.default_rng(4)
    was = rng.normal(0, 0.02, (500, 400))
    change = rng.laplace(0, 1e-4, was.shape) * np.exp(rng.normal(0, 1, (500, 1)))
    old, new = (torch.from_numpy(x.astype(np.float32)) for x in (was, was + change))
    base = pack(save(tmp_path / "a.pt", {"model": {"w": old}}), ask())
    source = save(tmp_path / "b.pt", {"model": {"w": new}})
    after = unpack(pack(source, ask(weights=f"deadzone:{budget}"), base))
    made = (after["model"]["w"] - old).double().numpy()
    exact = (new - old).double().numpy()
    # Each row counts alike, for each has a step of its own.
    rows = (exact * made).sum(axis=1) / (exact * exact).sum(axis=1)
    assert abs(rows.mean() - 1) < 0.01 + budget / 20
    assert ((exact - made) ** 2).sum() < 1.1 * budget * (exact**2).sum()


def test_nothing_allowed_is_lossless(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", state(0))
    for bound in ("abs:0", "rel:0", "pwrel:0", "update:0"):
        methods = ask(max_error=bound)
        assert not methods.is_lossy
        packed = pack(source, methods)
        pipeline.decompress(packed, tmp_path / "out", force=True)
        assert (tmp_path / "out").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"max_error": "abs:nan"},
        {"max_error": "abs:-1"},
        {"max_error": "abs:inf"},
        {"max_error": "abs"},
        {"max_error": "rel:2"},
        {"weights": "lc:1"},
        {"weights": "lc:3.5"},
        {"weights": "bf16:3"},
        {"weights": "moments:0.1"},
        {"optimizer": "cluster:1"},
        {"optimizer": "abs:0.1"},
        {"optimizer": "deadzone:0.1"},
        {"optimizer": "int8"},
        {"preset": "none"},
    ],
)
def test_nonsense_is_wrong_usage(options: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        methods_of(**options)


def test_no_flag_quantizes_the_second_moment_by_amounts() -> None:
    for options in ASKED:
        variance = ask(**options).variance
        assert variance.name in ("exact", "moments", "cluster", "pwrel", "drop")


def test_a_raw_base_is_refused(tmp_path: Path) -> None:
    base, source = (save(tmp_path / f"{k}.pt", state(0, k)) for k in (0, 1))
    with pytest.raises(UsageError, match="compress the base first"):
        pack(source, ask(preset="compact"), base)
    with pytest.raises(UsageError, match="sha256"):
        pack(source, ask(preset="resume"), sha256=True)


def test_errors_do_not_add_up_in_a_chain(tmp_path: Path) -> None:
    """Fifty links, each against the restored one before."""
    rng = np.random.default_rng(5)
    x = rng.normal(0, 0.02, (ROWS, COLUMNS))
    base, errors = None, []
    for step in range(50):
        x = x + rng.normal(0, 1e-4, x.shape)
        save_file({"w.weight": x.astype(np.float32)}, tmp_path / f"s{step}")
        packed = pack(tmp_path / f"s{step}", ask(weights="deadzone:0.1"), base, anchor=100)
        pipeline.decompress(packed, tmp_path / "out", force=True)
        y = load_file(tmp_path / "out")["w.weight"]
        errors.append(np.sqrt(((y - x) ** 2).mean()))
        base = packed
    assert errors[0] < 1e-9
    # A tenth of the power of a step that also makes up for the error before.
    assert max(errors) < 0.5e-4
    assert np.mean(errors[40:]) < 1.2 * np.mean(errors[2:12])


def test_published_methods_lean_on_a_base(tmp_path: Path) -> None:
    first, second = state(0), state(0, 3)
    base = pack(save(tmp_path / "a.pt", first), ask())
    source = save(tmp_path / "b.pt", second)
    exact = pack(source, ask(), base).stat().st_size
    for method in ("lc:3", "lc:2", "deadzone:0.1"):
        packed = pack(source, ask(weights=method), base)
        assert packed.stat().st_size < 0.85 * exact
        after = unpack(packed)
        was, now, got = (s["optimizer"]["fp32_master"]["proj"] for s in (first, second, after))
        assert (got - now).norm() < 0.95 * (now - was).norm()
    with open_container(packed) as container:
        assert container.meta["base"]["depth"] == 1


def test_routers_and_integers_stay_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "model.layers.0.mlp.gate.weight": rng.normal(0, 1, (8, 512)).astype(np.float32),
        "model.layers.0.mlp.gate.e_score_correction_bias": np.linspace(6.8, 7.1, 256, dtype="f4"),
        "model.layers.0.mlp.experts.0.w1.weight": rng.normal(0, 1, (64, 64)).astype(np.float32),
        "q.weight": rng.integers(-128, 127, (64, 64)).astype(np.int8),
        "q.weight_scale": rng.random((64, 64)).astype(np.float32),
        "steps": np.array([10000, 16777217], np.int64),
    }
    save_file(arrays, tmp_path / "m")
    packed = pack(tmp_path / "m", ask(max_error="abs:0.1"))
    pipeline.decompress(packed, tmp_path / "out")
    restored = load_file(tmp_path / "out")
    changed = {name for name, x in arrays.items() if not np.array_equal(x, restored[name])}
    assert changed == {"model.layers.0.mlp.experts.0.w1.weight"}


def test_views_that_disagree_stay_exact(tmp_path: Path) -> None:
    storage, tied = torch.randn(2, 64, 64)
    storage, tied = storage.clone(), tied.clone()
    value = {
        "model": {"a": storage, "b": torch.randn(100, 64)[36:], "x": tied, "y": tied.t()},
        "optimizer": {"exp_avg": {"a": storage}},
    }
    packed = pack(save(tmp_path / "a.pt", value), ask(max_error="abs:0.01"))
    after = unpack(packed)
    assert torch.equal(after["model"]["a"], storage)
    assert torch.equal(after["model"]["b"], value["model"]["b"])
    assert not torch.equal(after["model"]["x"], tied)
    assert torch.equal(after["model"]["x"].t(), after["model"]["y"])


def test_a_damaged_source_is_not_blessed(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", state(0))
    data = bytearray(source.read_bytes())
    member = max(zipfile.ZipFile(source).infolist(), key=lambda m: m.file_size)
    data[member.header_offset + 200 + member.file_size // 2] ^= 1
    source.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC"):
        pack(source, ask(preset="resume"))
    packed = pack(source, ask(preset="resume"), accept_bad_crc=True)
    unpack(packed)


@pytest.mark.parametrize("bound", ["abs:1e-5", "abs:1e-2", "pwrel:1e-3", "rel:1e-4"])
def test_weights_beside_masters_keep_their_bound(tmp_path: Path, bound: str) -> None:
    before = state(0)
    w = before["model"]["proj"]
    w[3, :4] = torch.tensor([torch.nan, torch.inf, 0, 5])
    after = unpack(pack(save(tmp_path / "a.pt", before), ask(max_error=bound)))
    kind, error = bound.split(":")
    old, new = (s["model"]["proj"].double().numpy() for s in (before, after))
    assert np.array_equal(bits(old[~np.isfinite(old)]), bits(new[~np.isfinite(old)]))
    assert not new[old == 0].any()
    good = np.isfinite(old)
    old, new = old[good], new[good]
    limit = float(error) * (np.abs(old) if kind == "pwrel" else 1)
    if kind == "rel":
        limit = float(error) * (old.max() - old.min())
    assert (np.abs(old - new) <= limit).all()


def test_weights_that_are_not_the_cast_stay(tmp_path: Path) -> None:
    before = state(0)
    before["model"]["proj"][5, :20] = torch.nan
    before["model"]["proj"][6] = 0
    for preset in ("archive", "resume"):
        after = unpack(pack(save(tmp_path / "a.pt", before), ask(preset=preset)))
        old, new = (s["model"]["proj"].view(torch.int16) for s in (before, after))
        assert torch.equal(old, new)


def test_small_weights_stay_casts_of_their_masters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    masters = {
        f"w{i}": torch.from_numpy(rng.normal(0, 1, (32, 40)).astype("f4")) for i in range(30)
    }
    value = {
        "model": {name: x.bfloat16() for name, x in masters.items()},
        "optimizer": {"fp32_master": masters},
    }
    after = unpack(pack(save(tmp_path / "a.pt", value), ask(preset="resume")))
    changed = 0
    for name, x in after["optimizer"]["fp32_master"].items():
        assert torch.equal(x.bfloat16(), after["model"][name])
        changed += not torch.equal(x, masters[name])
    assert changed == 30


def test_tensors_that_did_not_change(tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", state(0))
    base = pack(source, ask())
    same = tmp_path / "b.pt"
    same.write_bytes(source.read_bytes())
    for options in ({"weights": "lc:3"}, {"weights": "deadzone:0.1"}, {"preset": "compact"}):
        packed = pack(same, ask(**options), base)
        assert torch.equal(unpack(packed)["model"]["proj"], state(0)["model"]["proj"])


@pytest.mark.parametrize("shape", [(2, 3_000_000), (300_000, 1), (1, 5000), (5000, 3), (7, 11, 90)])
def test_odd_matrices(tmp_path: Path, shape: tuple[int, ...]) -> None:
    w = torch.randn(*shape)
    optimizer = {"exp_avg": {"w": w * 0.1}, "exp_avg_sq": {"w": w * w}}
    value = {"model": {"w": w}, "optimizer": optimizer}
    for preset in ("resume", "archive"):
        assert_rules(value, unpack(pack(save(tmp_path / "a.pt", value), ask(preset=preset))))


def test_moments_of_other_names_are_pairs_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {"params.w.weight": rng.normal(0, 1, (64, 96))}
    arrays["opt_state.0.mu.w.weight"] = rng.normal(0, 1e-3, (64, 96))
    scale = np.exp(rng.normal(0, 3, (64, 1)))
    arrays["opt_state.0.mu.w.weight"] *= scale
    arrays["opt_state.0.nu.w.weight"] = (scale * 1e-3) ** 2 * rng.chisquare(4, (64, 96))
    save_file({n: x.astype(np.float32) for n, x in arrays.items()}, tmp_path / "m")
    packed = pack(tmp_path / "m", ask(max_error="update:0.005"))
    pipeline.decompress(packed, tmp_path / "out")
    got = load_file(tmp_path / "out")
    u, v = (
        s["opt_state.0.mu.w.weight"] / (np.sqrt(s["opt_state.0.nu.w.weight"]) + 1e-8)
        for s in (arrays, got)
    )
    assert ((u - v) ** 2).sum() <= 0.005 * (u * u).sum()


def test_verify_says_what_is_lost(run: Run, tmp_path: Path) -> None:
    packed = pack(save(tmp_path / "a.pt", state(0)), ask(preset="archive"))
    (found,) = json.loads(run("verify", "--json", packed).out)["results"]
    assert found["resumable"] is False
    assert len(found["losses"]) == 8


def test_an_archive_of_weights_alone_lacks_nothing(tmp_path: Path) -> None:
    save_file({"w.weight": np.ones((64, 64), np.float32)}, tmp_path / "m")
    packed = pack(tmp_path / "m", ask(preset="archive"))
    assert inspect(packed).resumable


def test_archive_keeps_weights_and_says_what_it_is(tmp_path: Path) -> None:
    before = state(0)
    packed = pack(save(tmp_path / "a.pt", before), ask(preset="archive"))
    after = unpack(packed)
    for name, weight in before["model"].items():
        assert torch.equal(weight, after["model"][name])
    for key in ("exp_avg", "exp_avg_sq"):
        assert not any(x.any() for x in after["optimizer"][key].values())
    assert inspect(packed).resumable is False
    assert not pipeline.decompress(packed, tmp_path / "out", force=True).resumable


def test_rebase_keeps_what_is_said(tmp_path: Path) -> None:
    methods = ask(preset="compact")
    base = pack(save(tmp_path / "a.pt", state(0)), methods)
    packed = pack(save(tmp_path / "b.pt", state(0, 1)), methods, base)
    said = [row[6:] for row in inspect(packed).tensors]
    restored = unpack(packed)
    rebase(packed)
    found = inspect(packed)
    assert [row[6:] for row in found.tensors] == said
    assert found.preset == "compact"
    assert not found.chain
    for name, x in tensors(restored).items():
        assert torch.equal(x, tensors(unpack(packed))[name])


@pytest.mark.parametrize(
    "name",
    [
        "dcp/fsdp2/step_12",
        "deepspeed/zero1/global_step8",
        "lightning/epoch=1-step=20.ckpt",
        "keras/epoch_3.weights.h5",
        "numpy/weights.npz",
        "megatron/iter_0000030",
        "safetensors/hf_sharded_fp32",
        "torch/full_legacy.pth",
    ],
)
def test_real_layouts(corpus: Path, tmp_path: Path, name: str) -> None:
    source = corpus / "zoo" / name
    for preset in ("resume", "archive"):
        packed = tmp_path / "x.ckz"
        report = pipeline.compress(
            source, packed, methods=ask(preset=preset, weights="pwrel:0.01"), force=True
        )
        assert report.losses
        assert pipeline.verify(packed, data=True)
        out = tmp_path / preset
        pipeline.decompress(packed, out)
        for old in [source, *source.rglob("*")]:
            new = out / old.relative_to(source)
            if old.is_file():
                assert old.stat().st_size == new.stat().st_size
                if zipfile.is_zipfile(old):
                    assert zipfile.ZipFile(new).testzip() is None


# -- the commands ----------------------------------------------------------------------------------


def test_commands_say_what_is_lost(run: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", state(0))
    packed = tmp_path / "a.pt.ckz"
    done = run("compress", "--preset", "archive", source)
    assert done.code == 0
    assert "8 tensors not exact" in done.err
    assert "not resumable" in done.err
    shown = run("inspect", packed).out
    assert "method" in shown
    assert "not resumable" in shown
    assert "preset archive" in shown
    done = run("decompress", "-f", packed)
    assert done.code == 0
    assert "not exact" in done.err
    assert "not resumable" in done.err
    (found,) = json.loads(run("inspect", "--json", packed).out)["results"]
    assert found["resumable"] is False
    assert found["preset"] == "archive"
    assert {t["method"] for t in found["tensors"]} == {None, "bf16", "drop"}
    assert all(t["largest_error"] > 0 for t in found["tensors"] if t["method"])


def test_a_plain_compression_has_nothing_of_it(run: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", state(0))
    done = run("compress", "--json", source)
    (found,) = json.loads(done.out)["results"]
    assert found["losses"] == []
    assert found["resumable"] is True
    assert "method" not in run("inspect", tmp_path / "a.pt.ckz").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--weights", "lc:1"], "from 2 to 8"),
        (["--optimizer", "raw"], "there are"),
        (["--max-error", "abs:-1"], "from 0"),
        (["--preset", "resume", "--sha256"], "sha256"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, tmp_path: Path, arguments: list[str], says: str) -> None:
    source = save(tmp_path / "a.pt", state(0))
    done = run("compress", *arguments, source)
    assert done.code == 2
    assert says in done.err
    assert not (tmp_path / "a.pt.ckz").exists()


def test_dry_runs_plan_lossy_codecs(run: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "a.pt", state(0))
    done = run("compress", "--preset", "resume", "-n", source)
    assert done.code == 0
    assert "moments-variance" in done.err
    assert not (tmp_path / "a.pt.ckz").exists()


@pytest.mark.parametrize("preset", ["resume", "compact"])
def test_compiled_kernels_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    base = pack(save(tmp_path / "a.pt", state(0)), ask())
    large = {"model": {"w": torch.randn(1500, 400)}}
    large["optimizer"] = {key: {"w": large["model"]["w"] ** 2} for key in ("exp_avg", "exp_avg_sq")}
    for source, under in (
        (save(tmp_path / "b.pt", state(0, 5)), base),
        (save(tmp_path / "c.pt", large), None),
    ):
        found = []
        for form in (kernels.VECTORIZED, kernels.COMPILED):
            monkeypatch.setattr(kernels, "_form", form)
            found.append(pack(source, ask(preset=preset), under).read_bytes())
        assert found[0] == found[1]
