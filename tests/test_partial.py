"""Partial snapshots: which parts are saved, what is carried, how old it is, and every layout."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ckz import pipeline
from ckz.container_read import open_container
from ckz.errors import UsageError
from ckz.formats import read_checkpoint
from ckz.inspection import inspect
from ckz.lossy import methods_of
from ckz.lossy.units import expert_units
from ckz.partial import (
    balanced,
    by_load,
    by_priority,
    in_turn,
    lost_tokens,
    next_k,
    parse_policy,
)
from ckz.rebasing import rebase
from ckz.steps import step_of

LAYERS, EXPERTS, WIDTH, INNER = 2, 4, 16, 24


# -- policies --------------------------------------------------------------------------------------


@given(
    k=st.integers(1, 5), n=st.integers(1, 12), layers=st.integers(1, 4), first=st.integers(0, 99)
)
def test_every_expert_has_its_turn(k: int, n: int, layers: int, first: int) -> None:
    sizes = {str(i): n for i in range(layers)}
    rounds = math.ceil(n / min(k, n)) + (n % min(k, n) > 0) * n
    seen = set()
    for number in range(first, first + rounds):
        chosen = in_turn(sizes, k, number)
        assert len(chosen) == layers * min(k, n)
        seen |= chosen
    assert len(seen) == layers * n


def test_turns_are_those_of_the_paper() -> None:
    assert in_turn({"0": 8, "1": 8}, 2, 3) == {("0", 6), ("0", 7), ("1", 0), ("1", 1)}


def test_load_and_priority() -> None:
    layers = {"a": 3, "b": 2}
    unsaved = {("a", 0): 1.0, ("a", 1): 5.0, ("a", 2): 5.0, ("b", 1): 2.0}
    assert by_load(layers, 1, unsaved) == {("a", 1), ("b", 1)}
    sizes = {("w", 0): 10, ("w", 1): 10, ("w", 2): 20}
    moved = {("w", 0): 1.0, ("w", 1): 9.0, ("w", 2): 10.0}
    assert by_priority(sizes, moved, 0.25) == {("w", 1)}
    assert by_priority(sizes, moved, 0.8) == {("w", 1), ("w", 2)}
    assert by_priority(sizes, moved, 0.01) == {("w", 1)}


def test_lost_tokens_of_even_load() -> None:
    """(N/K - 1)/2 snapshots' worth of tokens, by PEC's section 3.1."""
    n, k, snapshots, each = 8, 2, 40, 100.0
    layers = {str(i): n for i in range(3)}
    saved: dict[tuple[str, int], float] = {}
    for number in range(1, snapshots + 1):
        seen = {(layer, e): number * each for layer in layers for e in range(n)}
        saved |= {key: seen[key] for key in in_turn(layers, k, number)}
    assert lost_tokens(seen, saved) == pytest.approx((n / k - 1) / 2 / snapshots)


def test_more_experts_once_too_much_would_be_lost() -> None:
    assert next_k(1, 0.03, 0.0375, 8) == 1
    assert next_k(1, 0.04, 0.0375, 8) == 2
    assert next_k(8, 0.04, 0.0375, 8) == 8


def test_work_is_balanced() -> None:
    assert balanced([5, 4, 3, 3, 3], 2) == [8, 10] or balanced([5, 4, 3, 3, 3], 2) == [9, 9]
    assert sum(balanced(list(range(100)), 7)) == sum(range(100))
    assert max(balanced([1] * 64, 8)) == 8


@pytest.mark.parametrize(
    "text", ["experts:2", "experts:1:load", "experts:1:O", "priority:0.125:W", "soft:0.5"]
)
def test_policies_are_words(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    "text", ["", "experts", "experts:0", "experts:1.5", "experts:x", "priority:2", "priority:0",
             "priority:nan", "priority:0.1:load", "experts:1:Q", "all:1", "experts:1:load:W:O"]
)  # fmt: skip
def test_nonsense_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_00120.pt", 120),
        ("iter_0000200.pt", 200),
        ("checkpoint-500", 500),
        ("epoch=1-step=20.ckpt", 20),
        ("global_step8", 8),
        ("model.safetensors", None),
        ("model-00001-of-00003.safetensors", None),
        ("w2v2.pt", None),
        ("vit16.pt", None),
        ("llama7b.pt", None),
        ("mp_rank_00_model_states.pt", None),
        ("run 7.pt", 7),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    assert step_of(name, {}) == step


# -- snapshots -------------------------------------------------------------------------------------


def model(step: int, *, stacked: bool) -> dict[str, np.ndarray]:
    """A mixture of experts after some steps: every value moves in every one."""
    rng = np.random.default_rng(0)
    drift = np.random.default_rng(step)
    arrays: dict[str, np.ndarray] = {"embed.weight": rng.normal(0, 1, (32, WIDTH))}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp"
        arrays[f"{name}.gate.weight"] = rng.normal(0, 1, (EXPERTS, WIDTH))
        up = rng.normal(0, 1, (EXPERTS, 2 * INNER, WIDTH))
        down = rng.normal(0, 1, (EXPERTS, WIDTH, INNER))
        if stacked:
            arrays |= {f"{name}.experts.gate_up_proj": up, f"{name}.experts.down_proj": down}
        else:
            for e in range(EXPERTS):
                arrays[f"{name}.experts.{e}.up_proj.weight"] = up[e]
                arrays[f"{name}.experts.{e}.down_proj.weight"] = down[e]
    moved = {n: x + step * 1e-3 * drift.normal(0, 1, x.shape) for n, x in arrays.items()}
    return {name: x.astype(np.float32) for name, x in moved.items()}


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    save_file(arrays, path)
    return path


def expert(arrays: dict[str, np.ndarray], layer: int, e: int, *, stacked: bool) -> np.ndarray:
    name = f"model.layers.{layer}.mlp.experts"
    if stacked:
        return np.concatenate(
            [arrays[f"{name}.{part}"][e].ravel() for part in ("gate_up_proj", "down_proj")]
        )
    return np.concatenate(
        [arrays[f"{name}.{e}.{part}_proj.weight"].ravel() for part in ("up", "down")]
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_a_chain_of_partial_snapshots(tmp_path: Path, stacked: bool) -> None:
    """Fresh experts are the source's, the others the newest that was saved; ages say so."""
    states = {step: model(step, stacked=stacked) for step in range(0, 60, 10)}
    base = tmp_path / "step_0.ckz"
    pipeline.compress(save(tmp_path / "step_0.safetensors", states[0]), base)
    newest = {(i, e): 0 for i in range(LAYERS) for e in range(EXPERTS)}
    policy = parse_policy("experts:1")
    for number, step in enumerate(range(10, 60, 10), start=1):
        source = save(tmp_path / f"step_{step}.safetensors", states[step])
        packed = tmp_path / f"step_{step}.ckz"
        report = pipeline.compress(source, packed, base=base, policy=policy, anchor=99)
        for i, e in in_turn({str(i): EXPERTS for i in range(LAYERS)}, 1, number):
            newest[int(i), e] = step
        pipeline.decompress(packed, tmp_path / "out", force=True)
        restored = load_file(tmp_path / "out")
        for name in ("embed.weight", "model.layers.0.mlp.gate.weight"):
            assert np.array_equal(restored[name], states[step][name])
        for (i, e), saved in newest.items():
            got, was = (expert(a, i, e, stacked=stacked) for a in (restored, states[saved]))
            assert np.array_equal(got, was)
        found = inspect(packed)
        assert found.step == step
        ages = {(item.expert, item.step) for item in found.carried}
        assert ages == {(f"{i}.{e}", s) for (i, e), s in newest.items() if s != step}
        for item in found.carried:
            assert item.step is not None
            assert item.age == (step - item.step) // 10
        of_experts = LAYERS * EXPERTS * 3 * INNER * WIDTH * 4
        assert report.partial["fresh"] == of_experts // EXPERTS
        assert report.partial["carried"] == of_experts * (EXPERTS - 1) // EXPERTS
        base = packed
    # Written anew it says the same.
    said = inspect(packed).carried
    rebase(packed)
    assert inspect(packed).carried == said
    pipeline.decompress(packed, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()


@pytest.mark.parametrize("stacked", [False, True])
def test_only_the_lost_parts_are_recovered(run: Run, tmp_path: Path, stacked: bool) -> None:
    """What a crash took from some is read without the rest: each part as it was last saved."""
    states = [model(step, stacked=stacked) for step in (0, 10)]
    sources = [save(tmp_path / f"step_{n}0.safetensors", a) for n, a in enumerate(states)]
    first, second = (tmp_path / f"{source.name}.ckz" for source in sources)
    assert run("compress", sources[0]).code == 0
    assert run("compress", sources[1], "--base", first, "--partial", "experts:1").code == 0
    done = run("decompress", second, "--only", "*layers.1*expert*")
    assert done.code == 0
    found = load_file(tmp_path / "step_10.safetensors.only.safetensors")
    assert set(found) == {n for n in states[1] if "layers.1" in n and "expert" in n}
    fresh = dict(in_turn({str(i): EXPERTS for i in range(LAYERS)}, 1, 1))["1"]
    whole = [{**state, **found} for state in states]
    for e in range(EXPERTS):
        newest = states[e == fresh]
        got = expert(whole[1], 1, e, stacked=stacked)
        assert np.array_equal(got, expert(newest, 1, e, stacked=stacked))


def training(step: int) -> dict[str, Any]:
    weights = {n: torch.from_numpy(x) for n, x in model(step, stacked=True).items()}
    moments = {
        number: {"step": torch.tensor(float(step)), "exp_avg": w * 0.1 + step, "exp_avg_sq": w * w}
        for number, w in enumerate(weights.values())
    }
    group = {"lr": 1e-3, "eps": 1e-8, "params": list(moments)}
    return {"model": weights, "optimizer": {"state": moments, "param_groups": [group]}}


@pytest.mark.parametrize(("kinds", "parts"), [("W", 1), ("O", 2), ("WO", 3)])
def test_states_travel_with_their_expert(tmp_path: Path, kinds: str, parts: int) -> None:
    for step in (1, 2):
        torch.save(training(step), tmp_path / f"step_{step}.pt")
    pipeline.compress(tmp_path / "step_1.pt", tmp_path / "a.ckz")
    policy = parse_policy(f"experts:1:{kinds}")
    for options in ({}, {"methods": methods_of("resume")}):
        packed = tmp_path / "b.ckz"
        pipeline.compress(
            tmp_path / "step_2.pt",
            packed,
            base=tmp_path / "a.ckz",
            policy=policy,
            force=True,
            **options,  # type: ignore[arg-type]
        )
        pipeline.decompress(packed, tmp_path / "out", base=tmp_path / "a.ckz", force=True)
        got, old = torch.load(tmp_path / "out"), training(1)
        carried = sum(item.nbytes for item in inspect(packed).carried)
        one = LAYERS * 3 * INNER * WIDTH * 4
        assert carried == parts * one * (EXPERTS - 1)
        names = list(old["model"])
        number = names.index("model.layers.0.mlp.experts.down_proj")
        # Snapshot 1, layer 0: expert 1 is fresh.
        for e in (0, 2, 3):
            weight = got["model"][names[number]][e]
            assert torch.equal(weight, old["model"][names[number]][e]) == ("W" in kinds)
            for key in ("exp_avg", "exp_avg_sq"):
                was, now = (s["optimizer"]["state"][number][key][e] for s in (old, got))
                assert torch.equal(was, now) == ("O" in kinds)


def test_counts_choose_experts(run: Run, tmp_path: Path) -> None:
    for step in (0, 10):
        save(tmp_path / f"step_{step}.safetensors", model(step, stacked=False))
    assert run("compress", tmp_path / "step_0.safetensors").code == 0
    routed = np.zeros((11, LAYERS, EXPERTS), np.int32)
    routed[:, 0, 3], routed[:, 1, 2] = 5, 7
    np.save(tmp_path / "tokens.npy", routed)
    base = tmp_path / "step_0.safetensors.ckz"
    source, packed = tmp_path / "step_10.safetensors", tmp_path / "step_10.safetensors.ckz"
    counted = ["--partial", "experts:1:load", "--token-counts", tmp_path / "tokens.npy"]
    done = run("compress", "--base", base, *counted, source)
    assert done.code == 0
    assert "carried from the base" in done.err
    fresh = {f"{i}.{e}" for i in range(LAYERS) for e in range(EXPERTS)}
    fresh -= {item.expert for item in inspect(packed).carried}
    assert fresh == {"0.3", "1.2"}
    assert inspect(packed).plt == 0.0
    shown = run("inspect", packed).out
    assert "partial experts:1:load: 0.00 % of tokens" in shown
    assert "saved at step" in shown
    (found,) = json.loads(run("inspect", "--json", packed).out)["results"]
    assert {item["step"] for item in found["carried"]} == {0}
    for bad in ("nothing", tmp_path / "tokens.json"):
        (tmp_path / "tokens.json").write_text("[1, 2]")
        wrong = ["--partial", "experts:1", "--token-counts", bad]
        assert run("compress", "-f", "--base", base, *wrong, source).code == 2


def test_a_new_expert_is_not_taken_for_another(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    name = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    first = {name.format(i, e): rng.normal(0, 1, (64, 32)) for i in range(2) for e in range(4)}
    second = {n: x + 1 for n, x in first.items()} | {name.format(0, 4): rng.normal(0, 1, (64, 32))}
    for step, arrays in ((1, first), (2, second)):
        save(tmp_path / f"step_{step}", {n: x.astype(np.float32) for n, x in arrays.items()})
    pipeline.compress(tmp_path / "step_1", tmp_path / "a.ckz")
    packed = tmp_path / "b.ckz"
    policy = parse_policy("experts:1")
    pipeline.compress(tmp_path / "step_2", packed, base=tmp_path / "a.ckz", policy=policy)
    pipeline.decompress(packed, tmp_path / "out", base=tmp_path / "a.ckz")
    got = load_file(tmp_path / "out")[name.format(0, 4)]
    assert np.array_equal(got, second[name.format(0, 4)].astype(np.float32))


def test_options_without_effect_are_refused(run: Run, tmp_path: Path) -> None:
    source = save(tmp_path / "step_1", model(1, stacked=True))
    assert run("compress", source).code == 0
    for wrong in (["--plt-limit", "3"], ["--partial", "priority:0.5", "--plt-limit", "3"]):
        done = run("compress", "-f", "--base", f"{source}.ckz", *wrong, source)
        assert done.code == 2


def test_a_limit_of_lost_tokens_saves_more(tmp_path: Path) -> None:
    base = tmp_path / "0.ckz"
    pipeline.compress(save(tmp_path / "step_0", model(0, stacked=True)), base)
    ks = []
    for step in (10, 20, 30, 40):
        source = save(tmp_path / f"step_{step}", model(step, stacked=True))
        packed = tmp_path / f"{step}.ckz"
        policy = parse_policy("experts:1")
        pipeline.compress(source, packed, base=base, policy=policy, plt_limit=0.0375, anchor=99)
        with open_container(packed) as container:
            ks.append(container.meta["partial"]["k"])
        base = packed
    assert ks == [2, 4, 4, 4]


def test_priority_saves_what_moved_most(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = {"a.weight": rng.normal(0, 1, (256, 256)).astype(np.float32)}
    second = {"a.weight": first["a.weight"] + np.float32(1e-4)}
    second["a.weight"][64:128] += np.float32(1)
    base = tmp_path / "a.ckz"
    pipeline.compress(save(tmp_path / "a", first), base)
    packed = tmp_path / "b.ckz"
    policy = parse_policy("priority:0.25")
    pipeline.compress(save(tmp_path / "b", second), packed, base=base, policy=policy)
    pipeline.decompress(packed, tmp_path / "out", base=base)
    got = load_file(tmp_path / "out")["a.weight"]
    assert np.array_equal(got[64:128], second["a.weight"][64:128])
    assert np.array_equal(got[:64], first["a.weight"][:64])
    assert packed.stat().st_size < 0.4 * 256 * 256 * 4


@pytest.mark.parametrize("stacked", [False, True])
def test_soft_beats_hard_at_equal_bytes(tmp_path: Path, stacked: bool) -> None:
    """The error of all experts, where as many bytes are spent on one exactly or on all coarsely."""

    def large(step: int) -> dict[str, np.ndarray]:
        rng, drift = np.random.default_rng(0), np.random.default_rng(step)
        arrays = {"model.layers.0.mlp.gate.weight": rng.normal(0, 1, (8, 64))}
        ups = rng.normal(0, 0.02, (8, 128, 64))
        ups = ups + step * 1e-5 * drift.normal(0, 1, ups.shape) * np.arange(1, 9)[:, None, None]
        name = "model.layers.0.mlp.experts"
        if stacked:
            arrays[f"{name}.gate_up_proj"] = ups
        else:
            arrays |= {f"{name}.{e}.up_proj.weight": up for e, up in enumerate(ups)}
        return {n: x.astype(np.float32) for n, x in arrays.items()}

    states = {step: large(step) for step in (0, 10)}
    base = tmp_path / "a.ckz"
    pipeline.compress(save(tmp_path / "step_0", states[0]), base)
    source = save(tmp_path / "step_10", states[10])
    sizes, errors = {}, {}
    for policy in ("experts:2:W", "soft:2:W"):
        packed = tmp_path / f"{policy}.ckz"
        pipeline.compress(source, packed, base=base, policy=parse_policy(policy))
        sizes[policy] = packed.stat().st_size
        pipeline.decompress(packed, tmp_path / "out", base=base, force=True)
        got = load_file(tmp_path / "out")
        errors[policy] = sum(
            float(((got[n].astype(np.float64) - x) ** 2).sum()) for n, x in states[10].items()
        )
    assert sizes["soft:2:W"] < sizes["experts:2:W"]
    assert errors["soft:2:W"] < 0.3 * errors["experts:2:W"]


def test_what_cannot_be_partial(tmp_path: Path) -> None:
    source = save(tmp_path / "a", {"w.weight": np.ones((64, 64), np.float32)})
    pipeline.compress(source, tmp_path / "a.ckz")
    policy = parse_policy("experts:1")
    for base, says in (
        (None, "--base"),
        (source, "compress the base"),
        (tmp_path / "a.ckz", "no experts"),
    ):
        with pytest.raises(UsageError, match=says):
            pipeline.compress(source, tmp_path / "b.ckz", base=base, policy=policy)


# -- layouts: names and shapes of each, tiny -------------------------------------------------------

E, H, I = 4, 8, 6  # noqa: E741
Shapes = dict[str, tuple[int, ...]]


def each(pattern: str, *shapes: tuple[str, tuple[int, ...]], experts: int = E) -> Shapes:
    """Give a tensor for each expert of layers 0 and 1."""
    return {
        pattern.format(layer=layer, e=e, part=part): shape
        for layer in range(2)
        for e in range(experts)
        for part, shape in shapes
    }


def both(**stacked: tuple[int, ...]) -> Shapes:
    """Give tensors of layers 0 and 1; two underscores stand for a dot."""
    return {
        name.replace("__", ".").replace("LAYER", str(layer)): shape
        for layer in range(2)
        for name, shape in stacked.items()
    }


GATED = (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I)))
LAYOUTS: dict[str, Shapes] = {
    "mixtral": {
        **both(model__layers__LAYER__block_sparse_moe__gate__weight=(E, H)),
        **each(
            "model.layers.{layer}.block_sparse_moe.experts.{e}.{part}.weight",
            ("w1", (I, H)), ("w2", (H, I)), ("w3", (I, H)),
        ),
    },
    "transformers 5": both(
        model__layers__LAYER__mlp__gate__weight=(E, H),
        model__layers__LAYER__mlp__experts__gate_up_proj=(E, 2 * I, H),
        model__layers__LAYER__mlp__experts__down_proj=(E, H, I),
    ),
    "qwen": {
        **both(
            model__layers__LAYER__mlp__gate__weight=(E, H),
            model__layers__LAYER__mlp__shared_expert_gate__weight=(1, H),
            model__layers__LAYER__mlp__shared_expert__up_proj__weight=(I, H),
        ),
        **each("model.layers.{layer}.mlp.experts.{e}.{part}.weight", *GATED),
    },
    "deepseek native": {
        **both(layers__LAYER__ffn__gate__weight=(E, H), layers__LAYER__ffn__gate__bias=(E,)),
        **each(
            "layers.{layer}.ffn.experts.{e}.{part}.weight",
            ("w1", (I, H)), ("w2", (H, I)), ("w3", (I, H)),
        ),
    },
    "dbrx, olmo": both(
        transformer__blocks__LAYER__ffn__router__layer__weight=(E, H),
        transformer__blocks__LAYER__ffn__experts__mlp__w1=(E * I, H),
        transformer__blocks__LAYER__ffn__experts__mlp__v1=(E * I, H),
        transformer__blocks__LAYER__ffn__experts__mlp__w2=(E * I, H),
    ),
    "gpt-oss": both(
        model__layers__LAYER__mlp__router__weight=(E, H),
        model__layers__LAYER__mlp__router__bias=(E,),
        model__layers__LAYER__mlp__experts__gate_up_proj=(E, H, 2 * I),
        model__layers__LAYER__mlp__experts__gate_up_proj_bias=(E, 2 * I),
        model__layers__LAYER__mlp__experts__down_proj=(E, I, H),
        model__layers__LAYER__mlp__experts__down_proj_bias=(E, H),
    ),
    "gpt-oss original": both(
        block__LAYER__mlp__gate__weight=(E, H),
        block__LAYER__mlp__mlp1_weight=(E, 2 * I, H),
        block__LAYER__mlp__mlp1_bias=(E, 2 * I),
        block__LAYER__mlp__mlp2_weight=(E, H, I),
    ),
    "llama 4": both(
        language_model__model__layers__LAYER__feed_forward__router__weight=(E, H),
        language_model__model__layers__LAYER__feed_forward__experts__gate_up_proj=(E, H, 2 * I),
        language_model__model__layers__LAYER__feed_forward__experts__down_proj=(E, I, H),
        language_model__model__layers__LAYER__feed_forward__shared_expert__up_proj__weight=(I, H),
    ),
    "llama 4 original": both(
        layers__LAYER__feed_forward__router_DE=(H, E),
        layers__LAYER__feed_forward__experts__moe_w_in_eD_F=(E * H, I),
        layers__LAYER__feed_forward__experts__moe_w_swiglu_eD_F=(E * H, I),
        layers__LAYER__feed_forward__experts__moe_w_out_eF_D=(E * I, H),
        layers__LAYER__feed_forward__w_in_shared_FD=(I, H),
    ),
    "granite": both(
        model__layers__LAYER__block_sparse_moe__router__layer__weight=(E, H),
        model__layers__LAYER__block_sparse_moe__input_linear__weight=(E, 2 * I, H),
        model__layers__LAYER__block_sparse_moe__output_linear__weight=(E, H, I),
    ),
    "nemotron-h": {
        **both(backbone__layers__LAYER__mixer__gate__weight=(E, H)),
        **each(
            "backbone.layers.{layer}.mixer.experts.{e}.{part}.weight",
            ("up_proj", (I, H)), ("down_proj", (H, I)),
        ),
    },
    "switch": {
        **both(encoder__block__LAYER__layer__1__mlp__router__classifier__weight=(E, H)),
        **each(
            "encoder.block.{layer}.layer.1.mlp.experts.expert_{e}.{part}.weight",
            ("wi", (I, H)), ("wo", (H, I)),
        ),
    },
    "megatron sequential": {
        **both(decoder__layers__LAYER__mlp__router__weight=(E, H)),
        **each(
            "decoder.layers.{layer}.mlp.experts.local_experts.{e}.{part}.weight",
            ("linear_fc1", (2 * I, H)), ("linear_fc2", (H, I)),
        ),
    },
    "megatron grouped": both(
        decoder__layers__LAYER__mlp__router__weight=(E, H),
        decoder__layers__LAYER__mlp__experts__weight1=(H, E * 2 * I),
        decoder__layers__LAYER__mlp__experts__weight2=(E * I, H),
    ),
    "megatron TE": {
        **both(decoder__layers__LAYER__mlp__router__weight=(E, H)),
        **each(
            "decoder.layers.{layer}.mlp.experts.{part}.weight{e}",
            ("linear_fc1", (2 * I, H)), ("linear_fc2", (H, I)),
        ),
    },
    "megatron dist": both(
        decoder__layers__LAYER__mlp__router__weight=(E, H),
        decoder__layers__LAYER__mlp__experts__experts__linear_fc1__weight=(E, 2 * I, H),
        decoder__layers__LAYER__mlp__experts__experts__linear_fc2__weight=(E, H, I),
    ),
    "megatron dist, layers stacked": {
        "decoder.layers.mlp.router.weight": (2, E, H),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, E, 2 * I, H),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (2, E, H, I),
    },
    "deepspeed": {
        **both(model__layers__LAYER__deepspeed_moe__gate__wg__weight=(E, H)),
        **each(
            "model.layers.{layer}.deepspeed_moe.experts.deepspeed_experts.{e}.{part}.weight",
            ("fc1", (I, H)), ("fc2", (H, I)),
        ),
    },
    "fairseq": {
        **both(decoder__layers__LAYER__moe_layer__gate__wg__weight=(E, H)),
        **each(
            "decoder.layers.{layer}.moe_layer.experts.{e}.{part}.weight",
            ("fc1", (I, H)), ("fc2", (H, I)),
        ),
    },
    "tutel": both(
        layers__LAYER__mlp__gates__0__wg__weight=(E, H),
        layers__LAYER__mlp__experts__batched_fc1_w=(E, I, H),
        layers__LAYER__mlp__experts__batched_fc2_w=(E, I, H),
        layers__LAYER__mlp__experts__batched_fc1_bias=(E, I),
    ),
    "torchtitan": both(
        layers__LAYER__moe__router__gate__weight=(E, H),
        layers__LAYER__moe__experts__w1=(E, I, H),
        layers__LAYER__moe__experts__w2=(E, H, I),
        layers__LAYER__moe__experts__w3=(E, I, H),
        layers__LAYER__moe__shared_experts__w1__weight=(I, H),
    ),
    "mlx": both(
        model__layers__LAYER__mlp__gate__weight=(E, H),
        model__layers__LAYER__mlp__switch_mlp__gate_proj__weight=(E, I, H),
        model__layers__LAYER__mlp__switch_mlp__up_proj__weight=(E, I, H),
        model__layers__LAYER__mlp__switch_mlp__down_proj__weight=(E, H, I),
    ),
    "vllm": both(
        model__layers__LAYER__mlp__experts__w13_weight=(E, 2 * I, H),
        model__layers__LAYER__mlp__experts__w2_weight=(E, H, I),
    ),
}  # fmt: skip


def is_expert(name: str) -> bool:
    shared = "shared" in name
    return (
        not shared
        and ("expert" in name or "moe" in name or "mlp" in name)
        and not any(part in name for part in ("gate.w", "router", "gate.b", "wg.w", "gates"))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_cut_into_its_experts(tmp_path: Path, layout: str) -> None:
    shapes = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    units = expert_units(read_checkpoint(save(tmp_path / "m", arrays)))
    assert len(units) == 2 * E
    assert {number for _, number in units} == set(range(E))
    assert len({layer for layer, _ in units}) == 2
    sizes = {sum(part.nbytes for part in parts) for parts in units.values()}
    assert len(sizes) == 1
    of_experts = sum(arrays[name].nbytes for name in shapes if is_expert(name))
    assert sizes == {of_experts // (2 * E)}
    # Each part belongs to one expert.
    parts = sorted((p.span, p.start, p.nbytes) for parts in units.values() for p in parts)
    for (span, start, nbytes), (next_span, next_start, _) in itertools.pairwise(parts):
        assert span != next_span or start + nbytes <= next_start


def test_ranks_number_their_experts_through(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "iter_0000010" / f"mp_rank_00_00{rank}"
        folder.mkdir(parents=True)
        name = "decoder.layers.0.mlp.experts.local_experts.{e}.linear_fc1.weight"
        tensors = {name.format(e=e): torch.randn(64, 32) for e in range(2)}
        torch.save({"model": tensors, "iteration": 10}, folder / "model_optim_rng.pt")
    units = expert_units(read_checkpoint(tmp_path / "iter_0000010"))
    assert [number for _, number in units] == [0, 1, 2, 3]


def test_ranks_share_the_work(run: Run, tmp_path: Path) -> None:
    for step in (10, 20):
        rng = np.random.default_rng(step)
        for rank in range(2):
            folder = tmp_path / f"iter_00000{step}" / f"mp_rank_00_00{rank}"
            folder.mkdir(parents=True)
            name = "decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight"
            tensors = {
                name.format(i=i, e=e): torch.from_numpy(rng.normal(0, 1, (64, 32)))
                for i in range(2)
                for e in range(2)
            }
            torch.save({"model": tensors, "iteration": step}, folder / "model_optim_rng.pt")
    assert run("compress", tmp_path / "iter_0000010").code == 0
    based = ["--base", tmp_path / "iter_0000010.ckz", "--partial", "experts:2"]
    done = run("compress", "--json", *based, tmp_path / "iter_0000020")
    found = json.loads(done.out)["results"][0]["partial"]
    assert len(found["fresh_by_file"]) == 2
    assert sum(found["fresh_by_file"].values()) == found["fresh"] == found["carried"]
    assert found["imbalance"] == 0.0


def test_one_file_and_shards_classify_alike(tmp_path: Path) -> None:
    arrays = model(0, stacked=True)
    whole = expert_units(read_checkpoint(save(tmp_path / "m.safetensors", arrays)))
    folder = tmp_path / "sharded"
    folder.mkdir()
    halves = [dict(list(arrays.items())[:3]), dict(list(arrays.items())[3:])]
    index = {}
    for number, half in enumerate(halves, start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        save(folder / name, half)
        index |= dict.fromkeys(half, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    shards = expert_units(read_checkpoint(folder))
    assert list(whole) == list(shards)
    for key, parts in whole.items():
        assert sorted(p[1:] for p in parts) == sorted(p[1:] for p in shards[key])
