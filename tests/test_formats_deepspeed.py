"""DeepSpeed's directories: flat partitions mapped to parameters, ranks that are missing."""

from __future__ import annotations

import itertools
import math
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckz
from ckz import pipeline
from ckz.casts import find_casts
from ckz.checkpoint import Checkpoint, File, Span, Tensor, check_layout, whole
from ckz.errors import CorruptError
from ckz.formats import read_checkpoint
from ckz.formats.cuts import boxes, cut
from ckz.formats.layout import Layout
from ckz.plan import make_plan

Shapes = dict[str, tuple[int, ...]]

SHAPES: Shapes = {
    "wte.weight": (65, 48),
    "h.0.norm.weight": (48,),
    "h.0.scale": (),
    "h.0.mlp.weight": (48, 100),
    "h.0.mlp.bias": (100,),
    "conv.weight": (8, 16, 3, 5),
}
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def values(groups: Sequence[Shapes], seed: int = 0) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Make values of each parameter of each group, by what they are."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            kind: {name: torch.randn(shape, generator=generator) for name, shape in group.items()}
            for kind in KINDS
        }
        for group in groups
    ]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def optimizer(
    stage: int, fp32: list[torch.Tensor], moments: list[dict[str, torch.Tensor]], world: int
) -> dict[str, Any]:
    """Make what the file of one rank's partitions holds."""
    key = "single_partition_of_fp32_groups" if stage < 3 else "fp32_flat_groups"
    base = "base_optimizer_state" if stage < 3 else "optimizer_state_dict"
    state = {n: {"step": torch.tensor(8.0), **group} for n, group in enumerate(moments)}
    return {
        "optimizer_state_dict": {
            "zero_stage": stage,
            "partition_count": [world] * len(fp32) if stage < 3 else world,
            base: {"state": state, "param_groups": []},
            key: fp32,
        },
        "ds_version": "0.16.0",
    }


def model_states(
    groups: Sequence[Shapes], module: dict[str, torch.Tensor], world: int, models: int
) -> Any:
    return {
        "module": module,
        "param_shapes": [
            OrderedDict((name, torch.Size(shape)) for name, shape in group.items())
            for group in groups
        ],
        "dp_world_size": world,
        "mp_world_size": models,
    }


def half_precision(fp32: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cast parameters into views of one storage, as ZeRO does."""
    storage = flat(list(fp32.values())).to(torch.bfloat16)
    views, at = {}, 0
    for name, tensor in fp32.items():
        views[name] = storage[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    return views


def save_stage_1(
    root: Path,
    groups: Sequence[Shapes],
    world: int,
    *,
    model: int = 0,
    models: int = 1,
    seed: int = 0,
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Save as ZeRO 1 and 2 do; return the parameters."""
    root.mkdir(parents=True, exist_ok=True)
    made = values(groups, seed)
    partitions: list[dict[str, list[torch.Tensor]]] = [
        {kind: [] for kind in KINDS} for _ in range(world)
    ]
    for group in made:
        for kind in KINDS:
            row = flat(list(group[kind].values()))
            length = math.ceil(len(row) / (2 * world)) * 2
            padded = torch.cat([row, torch.zeros(length * world - len(row))])
            for rank in range(world):
                part = padded[rank * length : (rank + 1) * length].clone()
                if kind == "fp32" and rank == world - 1:
                    part = part[: length - (len(padded) - len(row))]
                partitions[rank][kind].append(part)
    for rank, held in enumerate(partitions):
        moments = [
            {"exp_avg": m, "exp_avg_sq": v}
            for m, v in zip(held["exp_avg"], held["exp_avg_sq"], strict=True)
        ]
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_{model:02}_optim_states.pt"
        torch.save(optimizer(1, held["fp32"], moments, world), root / name)
    module = {name: t for group in made for name, t in half_precision(group["fp32"]).items()}
    states = model_states(groups, module, world, models)
    torch.save(states, root / f"mp_rank_{model:02}_model_states.pt")
    return made


def save_stage_3(
    root: Path, groups: Sequence[Shapes], world: int, cuts: Sequence[int] = ()
) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Save as ZeRO 3 does, in sub-groups that begin at ``cuts``."""
    root.mkdir(parents=True, exist_ok=True)
    made = values(groups)
    for rank in range(world):
        rows: dict[str, list[torch.Tensor]] = {}
        for kind in KINDS:
            parts = []
            for group in made:
                for tensor in group[kind].values():
                    share = math.ceil(tensor.numel() / world)
                    padded = torch.cat(
                        [tensor.reshape(-1), torch.zeros(share * world - tensor.numel())]
                    )
                    parts.append(padded[rank * share : (rank + 1) * share])
            row = flat(parts)
            edges = [0, *(min(at, len(row)) for at in cuts), len(row)]
            rows[kind] = [row[a:b].clone() for a, b in itertools.pairwise(edges)]
        moments = [
            {"exp_avg": m, "exp_avg_sq": v}
            for m, v in zip(rows["exp_avg"], rows["exp_avg_sq"], strict=True)
        ]
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save(optimizer(3, rows["fp32"], moments, world), root / name)
        empty = {name: torch.empty(0, dtype=torch.bfloat16) for g in groups for name in g}
        states = model_states(groups, empty, world, 1)
        torch.save(states, root / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return made


def expect_parameters(
    root: Path, made: Sequence[dict[str, dict[str, torch.Tensor]]], prefix: str = ""
) -> Checkpoint:
    """Check that every parameter is there, in every kind, bit for bit."""
    roles = dict(zip(KINDS, ("master", "momentum", "variance"), strict=True))
    with ckz.open(root) as archive:
        check_layout(archive.checkpoint)
        for group in made:
            for kind in KINDS:
                for name, tensor in group[kind].items():
                    key = f"{prefix}zero.{name}.{kind}"
                    assert archive[key].tobytes() == tensor.numpy().tobytes()
                    assert archive[key].shape == tuple(tensor.shape)
                    assert archive.info(key).role == (roles[kind] if tensor.ndim else "other")
        return archive.checkpoint


def expect_originals(root: Path) -> None:
    """Check that each file's own tensors are what torch loads."""
    with ckz.open(root) as archive:
        for path in root.glob("*_optim_states.pt"):
            state = torch.load(path)["optimizer_state_dict"]
            stored = "fp32_flat_groups" in state
            key = "fp32_flat_groups" if stored else "single_partition_of_fp32_groups"
            base = "optimizer_state_dict" if stored else "base_optimizer_state"
            for number, tensor in enumerate(state[key]):
                name = f"{path.name}:optimizer_state_dict.{key}.{number}"
                assert archive[name].tobytes() == tensor.numpy().tobytes()
                assert archive.info(name).role == "master"
                for kind, moment in state[base]["state"][number].items():
                    name = f"{path.name}:optimizer_state_dict.{base}.state.{number}.{kind}"
                    assert archive[name].tobytes() == moment.numpy().tobytes()


# Parameters in partitions.


@pytest.mark.parametrize("world", [1, 2, 3, 12])
def test_stage_1_maps_partitions_to_parameters(tmp_path: Path, world: int) -> None:
    decay = {name: shape for name, shape in SHAPES.items() if len(shape) > 1}
    rest = {name: shape for name, shape in SHAPES.items() if len(shape) < 2}
    made = save_stage_1(tmp_path, [decay, rest], world)
    checkpoint = expect_parameters(tmp_path, made)
    expect_originals(tmp_path)
    assert (checkpoint.format, checkpoint.missing, checkpoint.warnings) == ("deepspeed", (), ())


@pytest.mark.parametrize("cuts", [(), (1,), (500, 501, 2000)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_stage_3_maps_partitions_to_parameters(
    tmp_path: Path, world: int, cuts: tuple[int, ...]
) -> None:
    made = save_stage_3(tmp_path, [SHAPES], world, cuts)
    checkpoint = expect_parameters(tmp_path, made)
    expect_originals(tmp_path)
    assert (checkpoint.format, checkpoint.missing, checkpoint.warnings) == ("deepspeed", (), ())


@given(
    st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=5),
    st.integers(1, 5),
    st.lists(st.integers(0, 300), max_size=3),
    st.sampled_from((1, 3)),
)
def test_any_shapes_are_mapped(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    world: int,
    cuts: list[int],
    stage: int,
) -> None:
    root = tmp_path_factory.mktemp("tag")
    group = {f"p{number}.weight": tuple(shape) for number, shape in enumerate(shapes)}
    if stage == 1:
        # As in DeepSpeed, padding must fit into the last partition.
        if -sum(map(math.prod, group.values())) % (2 * world) > 1 and world > 1:
            group["filler"] = (2 * world * world,)
        expect_parameters(root, save_stage_1(root, [group], world))
    else:
        expect_parameters(root, save_stage_3(root, [group], world, sorted(cuts)))
    shutil.rmtree(root)


def test_ranks_of_model_parallelism_are_mapped_each(tmp_path: Path) -> None:
    tag = tmp_path / "global_step5"
    first = save_stage_1(tag, [SHAPES], 2, model=0, models=2)
    second = save_stage_1(tag, [SHAPES], 2, model=1, models=2, seed=1)
    expect_parameters(tmp_path, first, "global_step5/mp_rank_00:")
    checkpoint = expect_parameters(tmp_path, second, "global_step5/mp_rank_01:")
    assert checkpoint.missing == ()
    (tag / "mp_rank_01_model_states.pt").unlink()
    assert read_checkpoint(tag).missing == ("'mp_rank_01_model_states.pt' is missing",)


def test_paddings_between_parameters_are_left_out(tmp_path: Path) -> None:
    save_stage_1(tmp_path, [{"a": (3,), "b": (2,)}], 1)
    path = tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(path)
    inner = state["optimizer_state_dict"]
    inner["single_partition_of_fp32_groups"] = [torch.arange(8.0)]
    inner["base_optimizer_state"]["state"][0] = {"exp_avg": torch.arange(8.0)}
    inner["param_alignment_paddings"] = [[1, 2]]
    torch.save(state, path)
    with ckz.open(tmp_path) as archive:
        assert archive["zero.a.fp32"].tolist() == [0, 1, 2]
        assert archive["zero.b.fp32"].tolist() == [4, 5]
        assert archive["zero.b.exp_avg"].tolist() == [4, 5]


def test_moments_of_elastic_checkpoints(tmp_path: Path) -> None:
    """They stand in a list, without padding."""
    made = save_stage_1(tmp_path, [SHAPES], 3)
    for rank in range(3):
        path = tmp_path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(path)
        inner = state["optimizer_state_dict"]
        length = len(inner["single_partition_of_fp32_groups"][0])
        moments = inner["base_optimizer_state"]["state"][0]
        inner["base_optimizer_state"] = [
            {kind: moments[kind][:length].clone() for kind in ("exp_avg", "exp_avg_sq")}
        ]
        torch.save(state, path)
    expect_parameters(tmp_path, made)


def test_weights_are_casts_of_partitions(tmp_path: Path) -> None:
    save_stage_1(tmp_path, [SHAPES], 2)
    checkpoint = read_checkpoint(tmp_path)
    spans = {
        tensor.name.rpartition("module.")[2]: tensor.pieces[0].span
        for tensor in checkpoint.tensors
        if ":module." in tensor.name and tensor.nbytes >= 4096
    }
    assert set(spans) == {"wte.weight", "h.0.mlp.weight"}
    casts = find_casts(checkpoint)
    assert set(spans.values()) == set(casts)
    # One of them lies in the partitions of both ranks.
    assert {len({checkpoint.spans[ref.span - len(checkpoint.files)].file for ref in refs})
            for refs in casts.values()} == {1, 2}  # fmt: skip


def test_weights_cost_nothing_beside_their_partitions(tmp_path: Path) -> None:
    save_stage_1(tmp_path / "tag", [{"a.weight": (300, 64), "b.weight": (64, 300)}], 3)
    report = pipeline.compress(tmp_path / "tag", tmp_path / "tag.ckz")
    raw, stored = report.roles["weight"]
    assert raw == 2 * 2 * 300 * 64
    assert stored == 0
    pipeline.decompress(tmp_path / "tag.ckz", tmp_path / "back")
    for path in (tmp_path / "tag").iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


def test_a_router_is_exact_in_partitions_too(tmp_path: Path) -> None:
    save_stage_1(tmp_path, [{"mlp.gate.weight": (4, 8), "mlp.up.weight": (4, 8)}], 2)
    roles = {tensor.name: tensor.role for tensor in read_checkpoint(tmp_path).tensors}
    assert roles["zero.mlp.gate.weight.fp32"] == "other"
    assert roles["zero.mlp.up.weight.fp32"] == "master"


def test_damage_in_a_cut_partition_is_found(tmp_path: Path) -> None:
    save_stage_1(tmp_path, [SHAPES], 2)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.sums
    damaged = checkpoint.sums[0]
    path = checkpoint.path_of(damaged.file)
    data = bytearray(path.read_bytes())
    data[damaged.offset + damaged.nbytes // 2] ^= 1
    path.write_bytes(data)
    compress = partial(pipeline.compress, output=tmp_path.with_suffix(".ckz"))
    for action in (pipeline.verify, compress):
        with pytest.raises(CorruptError, match=f"{path.name}.*CRC mismatch"):
            action(tmp_path)


def test_each_parameter_is_coded_as_a_matrix(tmp_path: Path) -> None:
    save_stage_3(tmp_path, [{"a.weight": (64, 40), "b.weight": (100, 33)}], 2)
    checkpoint = read_checkpoint(tmp_path)
    plan = make_plan(checkpoint)
    matrices = {c.matrix for several in plan.candidates for c in several if c.matrix}
    assert matrices == {(32, 40), (50, 33)}
    # Small tensors and what is left of cut rows do not become spans, as no stream is theirs.
    save_stage_3(tmp_path, [{f"p{n}": (16,) for n in range(200)}], 2)
    assert len(read_checkpoint(tmp_path).spans) == 2 * (3 + 1)


def test_a_storage_with_a_strided_view_stays_whole(tmp_path: Path) -> None:
    save_stage_1(tmp_path, [{"a.weight": (64, 64)}], 1)
    path = tmp_path / "mp_rank_00_model_states.pt"
    states = torch.load(path)
    storage = torch.randn(4, 4096)
    states["module"] = {"rows": storage[1:3], "columns": storage[:, 1:3000], "all": storage}
    torch.save(states, path)
    with ckz.open(tmp_path) as archive:
        check_layout(archive.checkpoint)
        for name, tensor in states["module"].items():
            got = archive[f"{path.name}:module.{name}"]
            assert got.tobytes() == tensor.contiguous().numpy().tobytes()
        assert len(archive.info(f"{path.name}:module.all").pieces) == 1


# What is missing.


def test_ranks_are_numbers(tmp_path: Path) -> None:
    made = save_stage_1(tmp_path, [{"w": (240,)}], 12)
    expect_parameters(tmp_path, made)
    (tmp_path / "bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt").unlink()
    checkpoint = read_checkpoint(tmp_path)
    line = "'bf16_zero_pp_rank_7_mp_rank_00_optim_states.pt' is missing"
    assert checkpoint.missing == (line,)
    assert not [tensor for tensor in checkpoint.tensors if tensor.name.startswith("zero.")]
    (tmp_path / "bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt").unlink()
    assert read_checkpoint(tmp_path).missing == (line, line.replace("7", "11"))


@pytest.mark.parametrize("save", [save_stage_1, save_stage_3])
def test_files_that_hold_nothing(tmp_path: Path, save: Any) -> None:
    save(tmp_path, [SHAPES], 3)
    paths = sorted(tmp_path.iterdir())
    whole_file = paths[1].read_bytes()
    paths[1].write_bytes(b"")
    assert read_checkpoint(tmp_path).missing == (f"{paths[1].name!r} is empty",)
    paths[1].write_bytes(whole_file[:-100])
    assert read_checkpoint(tmp_path).missing == (f"{paths[1].name!r} cannot be read",)
    paths[1].unlink()
    paths[1].symlink_to(paths[0])
    assert read_checkpoint(tmp_path).missing == ()
    paths[1].unlink()
    paths[1].symlink_to("nowhere")
    assert read_checkpoint(tmp_path).missing == (f"{paths[1].name!r} is missing",)


def test_all_partitions_or_all_model_states_are_missing(tmp_path: Path) -> None:
    save_stage_1(tmp_path / "a", [SHAPES], 2)
    for path in (tmp_path / "a").glob("*optim*"):
        path.unlink()
    save_stage_1(tmp_path / "b", [SHAPES], 2)
    (tmp_path / "b" / "mp_rank_00_model_states.pt").unlink()
    assert read_checkpoint(tmp_path).missing == (
        "all files like 'a/zero_pp_rank_0_mp_rank_00_optim_states.pt' are missing",
        "'b/mp_rank_00_model_states.pt' is missing",
    )


def test_latest_names_a_tag(tmp_path: Path) -> None:
    made = save_stage_1(tmp_path / "global_step6", [SHAPES], 2)
    save_stage_3(tmp_path / "global_step8", [SHAPES], 2)
    latest = tmp_path / "latest"
    latest.write_text("global_step8\n")
    checkpoint = expect_parameters(tmp_path, made, "global_step6:")
    assert checkpoint.missing == ()
    for tag in ("global_step9", "", "../x", "\xff" * 9000):
        latest.write_text(tag)
        (line,) = read_checkpoint(tmp_path).missing
        assert line == f"'latest' names the tag {tag[:99]!r}, which is missing"
    shutil.rmtree(tmp_path / "global_step6")
    shutil.rmtree(tmp_path / "global_step8")
    assert read_checkpoint(tmp_path).missing == ()  # any directory may have such a file
    (tmp_path / "zero_to_fp32.py").write_text("")
    assert "which is missing" in read_checkpoint(tmp_path).missing[0]


def save_experts(root: Path, experts: Sequence[int], **stated: Any) -> None:
    for layer, count in enumerate(experts):
        for expert in range(count):
            name = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            torch.save({f"experts.{expert}.w": torch.full((4,), float(expert))}, root / name)
    for rank in range(2):
        name = f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer": {"state": {}}}, root / name)
    torch.save({"module": {}, **stated}, root / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("gone", ["layer_1_expert_5", "layer_0_expert_0", "layer_1_expert_7"])
@pytest.mark.parametrize("stated", [{}, {"num_experts": [8, 8]}])
def test_the_grid_of_experts_is_complete(tmp_path: Path, gone: str, stated: Any) -> None:
    save_experts(tmp_path, [8, 8], **stated)
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.missing) == ("deepspeed", ())
    path = tmp_path / f"{gone}_mp_rank_00_model_states.pt"
    path.unlink()
    assert read_checkpoint(tmp_path).missing == (f"{path.name!r} is missing",)
    path.write_bytes(b"")
    assert read_checkpoint(tmp_path).missing == (f"{path.name!r} is empty",)


def test_layers_may_have_different_numbers_of_experts(tmp_path: Path) -> None:
    save_experts(tmp_path, [2, 4], num_experts=[2, 4])
    assert read_checkpoint(tmp_path).missing == ()
    path = tmp_path / "layer_0_expert_1_mp_rank_00_model_states.pt"
    path.unlink()
    assert read_checkpoint(tmp_path).missing == (f"{path.name!r} is missing",)
    save_experts(tmp_path, [2], num_experts=[2, 4, 1])
    for path in tmp_path.glob("layer_1_*"):
        path.unlink()
    assert len(read_checkpoint(tmp_path).missing) == 4 + 1


def test_layers_of_a_pipeline(tmp_path: Path) -> None:
    for layer in (0, 2, 3):
        for rank in range(2):
            torch.save(
                {"w": torch.ones(3)}, tmp_path / f"layer_{layer:02}-model_{rank:02}-model_states.pt"
            )
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    assert read_checkpoint(tmp_path).missing == ()
    path = tmp_path / "layer_02-model_00-model_states.pt"
    path.unlink()
    assert read_checkpoint(tmp_path).missing == (f"{path.name!r} is missing",)


def test_names_that_claim_absurd_grids(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_999999999_mp_rank_999999999_model_states.pt",
                 "layer_999999999_expert_999999999_mp_rank_999999999_model_states.pt"):  # fmt: skip
        torch.save({}, tmp_path / name)
    missing = read_checkpoint(tmp_path).missing
    assert len(missing) == 2 * 21
    assert missing[-1].startswith(f"{10**18 - 21} more files like 'zero_pp_rank_999999999_")


# Damage and malice.


def test_what_does_not_fit_is_left_flat(tmp_path: Path) -> None:
    save_stage_1(tmp_path, [SHAPES], 2)
    path = tmp_path / "mp_rank_00_model_states.pt"
    states = torch.load(path)
    states["param_shapes"][0]["wte.weight"] = torch.Size((66, 48))
    torch.save(states, path)
    checkpoint = read_checkpoint(tmp_path)
    (warning,) = checkpoint.warnings
    assert "parameters are not told apart: fp32 of group 0 has" in warning
    expect_originals(tmp_path)


JUNK = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(-3, 3), st.none(), st.lists(st.integers(-3, 3))), max_size=3),
    st.dictionaries(st.text(max_size=2), st.lists(st.integers(-3, 2**62), max_size=3), max_size=3),
    st.lists(
        st.dictionaries(st.text(max_size=2), st.lists(st.integers(0, 2**62), max_size=3)),
        max_size=3,
    ),
)


@given(JUNK, JUNK, JUNK, JUNK, JUNK, st.sampled_from((1, 3)))
def test_no_content_of_the_pickles_crashes(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: Any, count: Any, paddings: Any, experts: Any, groups: Any, stage: int,
) -> None:  # fmt: skip
    root = tmp_path_factory.mktemp("tag")
    (save_stage_1 if stage == 1 else save_stage_3)(root, [{"w": (6,), "v": (1, 5)}], 2)
    for path in root.iterdir():
        state = torch.load(path)
        if "module" in path.name or "param_shapes" in state:
            state |= {"num_experts": experts, "dp_world_size": count}
            if stage == 1 or "rank_0" in path.name:
                state["param_shapes"] = shapes
        else:
            state["optimizer_state_dict"]["param_alignment_paddings"] = paddings
            if groups is not None:
                state["optimizer_state_dict"]["partition_count"] = groups
        torch.save(state, path)
    checkpoint = read_checkpoint(root)
    check_layout(checkpoint)
    assert not any("\n" in line for line in (*checkpoint.missing, *checkpoint.warnings))
    shutil.rmtree(root)


# Cutting.


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_a_run(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    array = np.arange(count).reshape(shape)
    got = []
    for start, extents in boxes(tuple(shape), begin, end):
        got += (
            array[tuple(slice(a, a + n) for a, n in zip(start, extents, strict=True))]
            .ravel()
            .tolist()
        )
    assert got == list(range(begin, end))
    assert len(list(boxes(tuple(shape), begin, end))) <= max(1, 2 * len(shape) - 1)


@given(st.sets(st.integers(-5, 300)), st.integers(0, 3))
def test_cutting_changes_no_value(edges: set[int], offset: int) -> None:
    span = Span(0, 10, 240, "float32", crc32=7)
    tensors = (
        whole("a", "float32", (5, 3, 2), 0),
        whole("b", "float32", (15,), 0, offset=4 * offset),
    )
    layout = Layout("torch", (span,), tensors)
    done = cut(layout, {0: edges}).layout
    check_layout(Checkpoint(Path(), "torch", (File("f", 250),), done.spans, done.tensors))
    assert sum(part.nbytes for part in done.spans) == 240
    data = np.arange(60, dtype=np.float32)

    def elements(layout: Layout, tensor: Tensor) -> list[float]:
        out = np.full(tensor.shape, -1, np.float32)
        for piece in tensor.pieces:
            at = (layout.spans[piece.span].offset - 10 + piece.offset) // 4
            box = data[at : at + math.prod(piece.shape)].reshape(piece.shape)
            out[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))] = box
        return out.ravel().tolist()

    for before, after in zip(layout.tensors, done.tensors, strict=True):
        assert elements(done, after) == elements(layout, before)
    assert [part.crc32 for part in done.spans] == (
        [7] if len(done.spans) == 1 else [-1] * len(done.spans)
    )
    packed = layout._replace(spans=(span._replace(dtype="bytes"),))
    assert cut(packed, {0: edges}).layout == packed
