"""One budget for a whole checkpoint: what is chosen, and that it is kept."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from ckz import pipeline
from ckz.errors import BoundError
from ckz.lossy import Method, methods_of
from ckz.lossy.budgeting import Point, solve

SIDE = 256
MOMENTS = ("exp_avg", "exp_avg_sq")


@st.composite
def curves(draw: st.DrawFn) -> dict[int, list[Point]]:
    """Points of some tensors: the fewer bytes, the larger the error."""
    found = {}
    for key in range(draw(st.integers(1, 4))):
        steps = draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=4))
        points = [Point(Method("exact"), 200.0, 0.0)]
        for down, up in steps:
            last = points[-1]
            nbytes, error = last.nbytes * (1 - down / 60), last.error + up
            points.append(Point(Method("deadzone", len(points)), nbytes, error))
        found[key] = points
    return found


@given(curves(), st.floats(0, 1.2), st.booleans())
def test_budgets_are_kept_and_spent(
    points: dict[int, list[Point]], part: float, by_bytes: bool
) -> None:
    chosen_all = [
        dict(zip(points, each, strict=True)) for each in itertools.product(*points.values())
    ]
    most = sum(max(p.nbytes if by_bytes else p.error for p in each) for each in points.values())
    limit = part * most

    def sums(chosen: dict[int, Point]) -> tuple[float, float]:
        pair = sum(p.nbytes for p in chosen.values()), sum(p.error for p in chosen.values())
        return pair if by_bytes else pair[::-1]

    fits = [sums(c)[::-1] for c in chosen_all if sums(c)[0] <= limit]
    found = solve(points, **{"nbytes" if by_bytes else "error": limit})
    assert (found is None) == (not fits)
    if found is not None:
        used, lost = sums(found)
        assert used <= limit
        # No single step that still fits would be better.
        for key, each in points.items():
            for point in each:
                other = sums(found | {key: point})
                assert other[0] > limit or other[1] >= lost - 1e-9


def state(seed: int, step: int) -> dict[str, Any]:
    """Two matrices, their masters and moments; one moves far more than the other."""
    rng, drift = np.random.default_rng(seed), np.random.default_rng(100 + step)
    masters, moments = {}, {"exp_avg": {}, "exp_avg_sq": {}}
    for name, size in (("calm", 1e-5), ("lively", 1e-3)):
        start = rng.normal(0, 0.02, (SIDE, SIDE))
        moved = start + (step > 0) * drift.normal(0, size, start.shape)
        masters[name] = torch.from_numpy(moved.astype(np.float32))
        scale = np.exp(rng.normal(0, 1, (SIDE, 1)))
        m, v = rng.normal(0, 1e-3, start.shape), rng.gamma(2, 1e-6, start.shape)
        moments["exp_avg"][name] = torch.from_numpy((scale * m).astype(np.float32))
        moments["exp_avg_sq"][name] = torch.from_numpy((scale**2 * v).astype(np.float32))
    weights = {name: w.bfloat16() for name, w in masters.items()}
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8}
    return {
        "model": weights,
        "optimizer": {"fp32_master": masters, **moments, "param_groups": [group]},
    }


def save(path: Path, step: int) -> Path:
    torch.save(state(0, step), path)
    return path


@pytest.mark.parametrize("based", [False, True])
@pytest.mark.parametrize("ratio", [2, 4, 8])
def test_a_target_is_reached_and_predicted(tmp_path: Path, based: bool, ratio: float) -> None:
    source, base = save(tmp_path / "b.pt", 1), None
    if based:
        base = tmp_path / "a.pt.ckz"
        pipeline.compress(save(tmp_path / "a.pt", 0), base)
    options = {"methods": methods_of(target_ratio=ratio), "base": base}
    planned = pipeline.compress(source, tmp_path / "x.ckz", **options, dry_run=True)
    done = pipeline.compress(source, tmp_path / "x.ckz", **options)
    # A container's own tables count on something so small.
    assert done.raw_nbytes / done.stored_nbytes >= 0.95 * ratio
    assert planned.stored_nbytes == pytest.approx(done.stored_nbytes, rel=0.05)
    assert planned.mean_error == done.mean_error


def test_more_bytes_lose_less(tmp_path: Path) -> None:
    source, base = save(tmp_path / "b.pt", 1), tmp_path / "a.pt.ckz"
    pipeline.compress(save(tmp_path / "a.pt", 0), base)
    errors = []
    for ratio in (2, 4, 8, 12):
        methods = methods_of(target_ratio=ratio)
        done = pipeline.compress(source, tmp_path / "x.ckz", methods=methods, base=base, force=True)
        errors.append(done.mean_error)
    assert errors == sorted(errors)
    assert errors[0] < errors[-1] / 10


@pytest.mark.parametrize("bound", [1e-3, 1e-2, 0.1])
def test_a_mean_error_is_kept(tmp_path: Path, bound: float) -> None:
    source, base = save(tmp_path / "b.pt", 1), tmp_path / "a.pt.ckz"
    pipeline.compress(save(tmp_path / "a.pt", 0), base)
    packed = tmp_path / "b.pt.ckz"
    methods = methods_of(max_error=f"mean:{bound}")
    done = pipeline.compress(source, packed, methods=methods, base=base)
    pipeline.decompress(packed, tmp_path / "restored.pt")
    before, was = state(0, 0)["optimizer"], state(0, 1)["optimizer"]
    now = torch.load(tmp_path / "restored.pt")["optimizer"]

    def normalized(far: Any, size: Any) -> float:
        return float((far.double() ** 2).sum() / (size.double() ** 2).sum())

    old, new, restored = (s["fp32_master"] for s in (before, was, now))
    names = list(new)
    changes = [normalized(restored[n] - new[n], new[n] - old[n]) for n in names]

    def updates(optimizer: Any) -> torch.Tensor:
        m, v = (torch.stack([optimizer[key][n] for n in names]).double() for key in MOMENTS)
        return m / (v.sqrt() + 1e-8)

    error = sum(changes) / 2 + normalized(updates(now) - updates(was), updates(was)) / 8
    assert error <= bound
    assert error == pytest.approx(done.mean_error, rel=1e-6)
    assert done.stored_nbytes < 0.45 * done.raw_nbytes


def test_budgets_give_the_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    source = save(tmp_path / "b.pt", 1)
    found = set()
    for threads in (1, 3):
        methods = methods_of(target_ratio=5)
        pipeline.compress(source, tmp_path / "x.ckz", methods=methods, threads=threads, force=True)
        found.add((tmp_path / "x.ckz").read_bytes())
    assert len(found) == 1


def test_what_cannot_be_is_said(run: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "b.pt", 1)
    done = run("compress", "--target-ratio", "1000", source)
    assert done.code == BoundError.exit_code
    assert "cannot be made 1000 times smaller, only about" in done.err
    assert not (tmp_path / "b.pt.ckz").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target-ratio", "1"],
        ["--target-ratio", "nan"],
        ["--target-ratio", "-3"],
        ["--target-ratio", "4", "--preset", "resume"],
        ["--target-ratio", "4", "--weights", "lc:3"],
        ["--target-ratio", "4", "--max-error", "abs:1"],
        ["--target-ratio", "4", "--auto", "--codec", "weight=planes"],
        ["--max-error", "mean:-1"],
        ["--max-error", "mean:nan"],
        ["--max-error", "mean:0.1", "--optimizer", "cluster"],
        ["--auto", "--preset", "compact"],
    ],
)
def test_nonsense_is_wrong_usage(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    done = run("compress", *arguments, save(tmp_path / "b.pt", 1))
    assert done.code == 2
    assert not (tmp_path / "b.pt.ckz").exists()


def test_no_mean_error_is_lossless(run: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "b.pt", 1)
    assert run("compress", "--max-error", "mean:0", source).code == 0
    assert run("compress", "-f", "--json", "--auto", source).code == 0
    restored = tmp_path / "restored.pt"
    assert run("decompress", tmp_path / "b.pt.ckz", "-o", restored).code == 0
    assert restored.read_bytes() == source.read_bytes()
