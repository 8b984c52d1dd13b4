"""Roles, experts, routers, and the pairing of optimizer state with weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckz.checkpoint import ITEMSIZE, ROLES, Piece, Tensor, contiguous_strides
from ckz.experts import expert_of, is_router
from ckz.roles import assign_roles, match_optimizer


def tensor(name: str, shape: tuple[int, ...] = (4, 8), dtype: str = "float32") -> Tensor:
    return Tensor(name, dtype, shape, ())


def role(
    name: str, *others: Tensor, shape: tuple[int, ...] = (4, 8), dtype: str = "float32"
) -> str:
    return assign_roles([tensor(name, shape, dtype), *others])[0].role


# From a file with an optimizer, so that what is not known stays exact.
TRAINING = tensor("optimizer.state.0.exp_avg")

NAMES = [
    ("model.layers.0.mlp.up_proj.weight", "weight"),
    ("conv1.bias", "weight"),
    ("params/Dense_0/kernel", "weight"),
    ("encoder.ln.gamma", "weight"),
    ("base.q.lora_A.default.weight", "weight"),
    ("attn.in_proj_weight", "weight"),
    ("model.pos_embed", "weight"),
    ("ema.shadow_params.3", "weight"),
    ("model_ema.layers.0.w", "weight"),
    ("_fsdp_wrapped_module._flat_param", "weight"),
    ("layers/dense/vars/0", "weight"),
    ("optimizer.state.3.exp_avg", "momentum"),
    ("optimizer_states.0.state.12.exp_avg_sq", "variance"),
    ("state.7.momentum_buffer", "momentum"),
    ("state.7.square_avg", "variance"),
    ("optimizer.state.3.max_exp_avg_sq", "variance"),
    ("optim.state.h.0.ln1.weight.exp_avg", "momentum"),
    ("optimizer.exp_avg_sq.layers.2.qkv.weight", "variance"),
    ("optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight", "momentum"),
    ("optimizer.state.fp32_param.decoder.layers.0.mlp.linear_fc1.weight", "master"),
    ("optimizer.fp32_from_fp16_params.0.25", "master"),
    ("optimizer.fp32_master.layers.2.qkv.weight", "master"),
    ("optimizer_state_dict.single_partition_of_fp32_groups.0", "master"),
    ("optimizer_state_dict.fp32_flat_groups.0", "master"),
    ("optimizer_state_dict.base_optimizer_state.0.exp_avg", "momentum"),
    ("zero/model.h.0.weight/fp32.pt", "master"),
    ("zero/model.h.0.weight/exp_avg_sq.pt", "variance"),
    ("optimizer_weights/adam/sequential_conv1d_kernel_momentum", "momentum"),
    ("optimizer_weights/adam/sequential_conv1d_kernel_velocity", "variance"),
    ("optimizer_weights/Adam/dense/kernel/m:0", "momentum"),
    ("optimizer_weights/Adam/dense/kernel/v:0", "variance"),
    ("opt_state/0/mu/params/attn/v", "momentum"),
    ("opt_state/0/nu/params/Dense_0/kernel", "variance"),
    ("optimizer.state.3.row_var", "variance"),
    ("optimizer.state.3.exp_avg.scale", "other"),
    ("optimizer.state.3.exp_avg.qmap", "other"),
    ("optimizer.state.3.preconditioner", "other"),
    ("optimizer.param_groups.0.lr", "other"),
    ("model.bn.running_mean", "other"),
    ("model.bn.running_var", "other"),
    ("model.rotary.inv_freq", "other"),
    ("lr_scheduler.base_lrs", "other"),
    ("callbacks.best", "other"),
    ("something", "other"),
    ("model.layers.0.mlp.gate.weight", "other"),
    ("optimizer.state.fp32_param.decoder.layers.0.mlp.router.weight", "other"),
    ("model.layers.0.mlp.gate.e_score_correction_bias", "other"),
    ("model.layers.0.mlp.experts.3.up_proj.weight_scale_inv", "other"),
]


@pytest.mark.parametrize(("name", "expected"), NAMES)
def test_role_by_name(name: str, expected: str) -> None:
    assert role(name, TRAINING) == expected


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_only_floats_of_one_or_more_dimensions_have_a_role(dtype: str) -> None:
    floats = dtype.startswith(("float", "bfloat")) and dtype not in (
        "float4_e2m1fn_x2",
        "float8_e8m0fnu",
    )
    assert role("fc.weight", dtype=dtype) == ("weight" if floats else "other")
    assert role("fc.weight", dtype=dtype, shape=()) == "other"


def test_unknown_floats_are_weights_unless_an_optimizer_lies_beside() -> None:
    assert role("cls_token") == "weight"
    assert role("cls_token", TRAINING) == "other"
    assert role("model.cls_token", TRAINING) == "weight"


def test_a_dense_layer_called_gate_is_no_router() -> None:
    assert role("layers.0.mlp.gate.weight", shape=(8, 64)) == "other"
    assert role("layers.0.mlp.gate.weight", shape=(64, 8)) == "weight"


def test_param_is_a_master_beside_its_moments() -> None:
    assert role("0.x.param", tensor("0.x.exp_avg")) == "master"
    assert role("0.x.param", tensor("0.x.exp_avg", (3,))) == "weight"
    assert role("0.x.param") == "weight"


def test_scale_is_exact_beside_an_8_bit_weight() -> None:
    assert role("w1.scale", tensor("w1.weight", dtype="float8_e4m3fn")) == "other"
    assert role("norm.scale") == "weight"
    assert role("norm.scale", tensor("norm.weight")) == "weight"


def keras(shapes: list[tuple[int, ...]], slots: list[tuple[int, ...]]) -> dict[str, str]:
    model = [tensor(f"layers/dense_{i}/vars/0", shape) for i, shape in enumerate(shapes)]
    state = [tensor(f"optimizer/vars/{i + 2}", shape) for i, shape in enumerate(slots)]
    return {t.name: t.role for t in assign_roles([*model, *state])}


def test_keras_slots_alternate() -> None:
    shapes = [(3, k) for k in range(2, 8)]
    roles = keras(shapes, [shape for shape in shapes for _ in range(2)])
    # In the order of the numbers, not of the names: 10 comes after 9.
    assert [roles[f"optimizer/vars/{i}"] for i in range(2, 14)] == ["momentum", "variance"] * 6


def test_keras_slots_that_are_no_pairs_stay_exact() -> None:
    shapes = [(3, 2), (3, 4)]
    assert keras(shapes, shapes)["optimizer/vars/2"] == "other"  # one slot a variable
    # One slot each of two equal layers, or two of one: cannot be told.
    assert keras([(3, 2), (3, 2)], [(3, 2), (3, 2)])["optimizer/vars/2"] == "other"


def test_keras_batch_normalisation_statistics_are_exact() -> None:
    names = [f"layers/bn/vars/{i}" for i in range(4)]
    roles = [t.role for t in assign_roles([tensor(name, (6,)) for name in names])]
    assert roles == ["weight", "weight", "other", "other"]


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(
                    [
                        *("optimizer", "state", "0", "9" * 5000, "exp_avg", "vars", "param"),
                        *("scale", "fp32", "pt", "weight", "experts", "mu", "x", "", "\ud800"),
                        *("vars:0", "²"),
                    ]
                ),
                max_size=6,
            ),
            st.sampled_from(["float32", "int64", "bytes"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=8,
    )
)
def test_any_names_get_some_role(drawn: list[tuple[list[str], str, list[int]]]) -> None:
    tensors = [
        tensor(sep.join(path), tuple(shape), dtype)
        for path, dtype, shape in drawn
        for sep in ("/", ".")
    ]
    given_roles = assign_roles(tensors)
    assert [t._replace(role="other") for t in given_roles] == tensors
    assert {t.role for t in given_roles} <= set(ROLES)
    names = {t.name for t in tensors}
    for state, weight in match_optimizer(given_roles).items():
        assert state in names
        assert weight in names


# Every row of the table of naming schemes: name -> (layer, expert, how experts are stored).
EXPERTS = [
    ("layers.3.block_sparse_moe.experts.7.w1.weight", ("3", 7, "expert")),
    ("language_model.model.layers.3.block_sparse_moe.experts.7.w3.weight", ("3", 7, "expert")),
    ("model.layers.3.mlp.experts.gate_up_proj", ("3", -1, "stacked")),
    ("model.layers.3.mlp.experts.down_proj", ("3", -1, "stacked")),
    ("layers.3.feed_forward.experts.7.w2.weight", ("3", 7, "expert")),
    ("layers.3.feed_forward.experts.7.up_proj.weight", ("3", 7, "expert")),
    ("model.layers.3.mlp.experts.12.gate_proj.weight", ("3", 12, "expert")),
    ("model.layers.3.mlp.experts.12.up_proj.weight_scale_inv", ("3", 12, "expert")),
    ("mtp.layers.0.mlp.experts.12.up_proj.weight", ("mtp.0", 12, "expert")),
    ("layers.3.ffn.experts.12.w1.weight", ("3", 12, "expert")),
    ("layers.3.ffn.experts.12.w1.scale", ("3", 12, "expert")),
    ("transformer.blocks.3.ffn.experts.mlp.w1", ("3", -1, "flat")),
    ("transformer.blocks.3.ffn.experts.mlp.v1", ("3", -1, "flat")),
    ("model.layers.3.mlp.experts.gate_up_proj_bias", ("3", -1, "stacked")),
    ("model.layers.3.mlp.experts.down_proj_blocks", ("3", -1, "stacked")),
    ("model.layers.3.mlp.experts.gate_up_proj_scales", ("3", -1, "stacked")),
    ("block.3.mlp.mlp1_weight.blocks", ("3", -1, "stacked")),
    ("block.3.mlp.mlp2_bias", ("3", -1, "stacked")),
    ("layers.3.feed_forward.experts.moe_w_in_eD_F", ("3", -1, "flat")),
    ("layers.3.feed_forward.experts.moe_w_out_eF_D", ("3", -1, "flat")),
    ("model.layers.3.block_sparse_moe.input_linear.weight", ("3", -1, "stacked")),
    ("backbone.layers.3.mixer.experts.7.up_proj.weight", ("3", 7, "expert")),
    ("encoder.block.3.layer.1.mlp.experts.expert_7.wi.weight", ("encoder.3.1", 7, "expert")),
    ("decoder.layers.3.ffn.experts.expert_7.fc1.bias", ("decoder.3", 7, "expert")),
    ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight", ("decoder.3", 7, "local")),
    ("decoder.layers.3.mlp.experts.weight1", ("decoder.3", -1, "grouped")),
    ("decoder.layers.3.mlp.experts.linear_fc2.weight7", ("decoder.3", 7, "local")),
    ("decoder.layers.3.mlp.experts.linear_fc2.weight", ("decoder.3", -1, "stacked")),
    ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", ("decoder.3", -1, "stacked")),
    ("decoder.layers.mlp.experts.experts.weight1", ("", -1, "stacked")),
    ("model.layers.3.mlp.deepspeed_moe.experts.deepspeed_experts.7.w.bias", ("3", 7, "expert")),
    ("decoder.layers.3.moe_layer.experts.7.fc1.weight", ("decoder.3", 7, "expert")),
    ("layers.2.blocks.3.mlp.experts.batched_fc1_w", ("2.3", -1, "stacked")),
    ("layers.3.moe.experts.w2", ("3", -1, "stacked")),
    ("layers.3.moe.routed_experts.w2", ("3", -1, "stacked")),
    ("model.layers.3.mlp.switch_mlp.up_proj.weight", ("3", -1, "stacked")),
    ("layers.3.mlp.experts.w13_weight", ("3", -1, "stacked")),
    ("layers.3.mlp.experts.w2_weight_scale_2", ("3", -1, "stacked")),
    ("blk.3.ffn_up_exps.weight", ("3", -1, "stacked")),
    ("optimizer.state.exp_avg.model.layers.3.mlp.experts.7.w.weight", ("3", 7, "expert")),
]
NO_EXPERTS = [
    "model.layers.3.mlp.gate_proj.weight",
    "model.layers.3.mlp.shared_expert.up_proj.weight",
    "model.layers.3.mlp.shared_experts.up_proj.weight",
    "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
    "model.layers.3.shared_mlp.input_linear.weight",
    "decoder.layers.3.mlp.linear_fc1.weight",
    "layers.3.feed_forward.w_in_shared_FD",
    "model.layers.3.mlp.gate.weight",
    "blk.3.ffn_up_shexp.weight",
    "experts." + "9" * 5000 + ".w",
]
ROUTERS = [
    "layers.3.block_sparse_moe.gate.weight",
    "layers.3.mlp.gate.weight",
    "layers.3.mlp.gate.e_score_correction_bias",
    "layers.3.ffn.gate.bias",
    "layers.3.ffn.gate.tid2eid",
    "transformer.blocks.3.ffn.router.layer.weight",
    "model.layers.3.mlp.router.bias",
    "block.3.mlp.gate.bias",
    "layers.3.feed_forward.router_DE",
    "layers.3.block_sparse_moe.router.layer.weight",
    "layers.3.mixer.gate.weight",
    "encoder.block.1.layer.1.mlp.router.classifier.weight",
    "decoder.layers.3.mlp.router.expert_bias",
    "m.deepspeed_moe.gate.wg.weight",
    "m.gates.0.wg.weight",
    "layers.3.moe.router.gate.weight",
    "layers.3.moe.expert_bias",
    "layers.3.moe.shared_expert_gate.weight",
    "blk.3.ffn_gate_inp.weight",
]


@pytest.mark.parametrize(("name", "expected"), EXPERTS)
def test_expert_by_name(name: str, expected: tuple[str, int, str]) -> None:
    assert expert_of(name) == expected


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_no_expert(name: str) -> None:
    assert expert_of(name) is None


@pytest.mark.parametrize("name", ROUTERS)
def test_router_is_exact(name: str) -> None:
    assert is_router(name)
    assert expert_of(name) is None
    assert role(name) == "other"


@pytest.mark.parametrize(
    "name",
    ["mlp.gate_proj.weight", "mlp.router._extra_state", "gateway.weight", "gate.norm.weight"],
)
def test_no_router(name: str) -> None:
    assert not is_router(name)


def flatten(tree: object, path: str = "") -> list[Tensor]:
    """Name the tensors of nested containers as a reader would."""
    if isinstance(tree, torch.Tensor):
        shape = tuple(tree.shape)
        # One piece a storage: enough to tell tied tensors.
        piece = Piece(tree.data_ptr(), 0, shape, contiguous_strides(shape), (0,) * len(shape))
        return [Tensor(path, str(tree.dtype)[6:], shape, (piece,))]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = []
    for key, value in items:
        if isinstance(value, torch.Tensor | dict | list):
            found += flatten(value, f"{path}.{key}" if path else str(key))
    return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 6))
            for _ in range(3)
        )
        self.norm = torch.nn.BatchNorm1d(6)
        self.gate = torch.nn.Linear(6, 4)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(self.norm(x)).sum() + self.gate(x).sum()) ** 2


def trained(groups: object, frozen: tuple[str, ...] = ()) -> tuple[list[Tensor], dict[str, str]]:
    """Give a checkpoint after one step, and the truth: state -> weight."""
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(frozen) if frozen else True
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    split = groups(parameters)
    optimizer = torch.optim.AdamW([{"params": [p for _, p in group]} for group in split])
    model(torch.arange(8)).backward()
    optimizer.step()
    order = [name for group in split for name, _ in group]
    truth = {
        f"optimizer.state.{i}.{slot}": f"model.{name}"
        for i, name in enumerate(order)
        for slot in ("exp_avg", "exp_avg_sq")
    }
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return list(assign_roles(flatten(tree))), truth


def test_state_is_matched_by_order() -> None:
    tensors, truth = trained(lambda ps: [ps])
    assert match_optimizer(tensors) == truth


def test_state_is_matched_through_groups_by_dimensions() -> None:
    tensors, truth = trained(
        lambda ps: [[p for p in ps if p[1].ndim > 1], [p for p in ps if p[1].ndim < 2]]
    )
    assert match_optimizer(tensors) == truth


def test_state_is_matched_through_groups_by_bias() -> None:
    tensors, truth = trained(
        lambda ps: [
            [p for p in ps if not p[0].endswith("bias")],
            [p for p in ps if p[0].endswith("bias")],
        ]
    )
    assert match_optimizer(tensors) == truth


def test_frozen_weights_are_passed_over() -> None:
    tensors, truth = trained(lambda ps: [ps], frozen=("embed",))
    assert match_optimizer(tensors) == truth


def test_what_fits_in_two_ways_is_not_matched() -> None:
    tensors, truth = trained(lambda ps: [ps], frozen=("blocks.1",))
    matched = match_optimizer(tensors)
    assert matched.items() <= truth.items()
    assert "model.gate.weight" in matched.values()
    assert not any(weight.startswith("model.blocks") for weight in matched.values())


def test_named_state_and_masters_are_matched_by_name() -> None:
    names = ["h.0.w.weight", "h.1.w.weight"]
    tensors = assign_roles(
        [
            *(tensor(f"model.{name}", dtype="bfloat16") for name in names),
            *(tensor(f"optim.state.{name}.exp_avg") for name in names),
            *(tensor(f"optimizer.exp_avg_sq.{name}") for name in names),
            *(tensor(f"optimizer.fp32_master.{name}") for name in names),
            tensor("optimizer.exp_avg.h.2.w.weight"),
            tensor("optimizer.exp_avg.module.h.1.w.weight", (3,)),
        ]
    )
    expected = {
        f"{prefix}{name}{suffix}": f"model.{name}"
        for name in names
        for prefix, suffix in (
            ("optim.state.", ".exp_avg"),
            ("optimizer.exp_avg_sq.", ""),
            ("optimizer.fp32_master.", ""),
        )
    }
    assert match_optimizer(tensors) == expected


def test_numbered_masters_and_flat_partitions() -> None:
    weights = [
        tensor("model.a.weight", (3, 4), "bfloat16"),
        tensor("model.b.weight", (5,), "bfloat16"),
    ]
    masters = [tensor(f"o.fp32_from_fp16_params.0.{i}", w.shape) for i, w in enumerate(weights)]
    assert match_optimizer(assign_roles([*weights, *masters])) == {
        "o.fp32_from_fp16_params.0.0": "model.a.weight",
        "o.fp32_from_fp16_params.0.1": "model.b.weight",
    }
    flat = [tensor("o.fp32_flat_groups.0", (17,)), tensor("o.state.0.exp_avg", (17,))]
    assert match_optimizer(assign_roles(flat)) == {"o.state.0.exp_avg": "o.fp32_flat_groups.0"}


def test_factored_moments_are_not_taken_for_vectors() -> None:
    tensors = [
        tensor("model.a.weight", (4, 8)),
        tensor("model.b.bias", (4,)),
        tensor("o.state.0.exp_avg", (4, 8)),
        tensor("o.state.0.exp_avg_sq_row", (4,)),
        tensor("o.state.1.exp_avg_sq_row", (4,)),
    ]
    assert match_optimizer(assign_roles(tensors)) == {"o.state.0.exp_avg": "model.a.weight"}
