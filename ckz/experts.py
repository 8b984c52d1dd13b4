"""Mixture-of-experts tensors, told by their names.

Frameworks store the experts of a layer as one tensor each, stacked along a dimension, or as runs
of rows of a flat matrix. Optimizer state and averaged copies carry the weight's name behind a
prefix, so names are matched at their tails.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ROUTER = re.compile(
    r"(^|\.)(gate\.weight|gate\.wg\.weight|gates\.\d+\.wg\.weight"
    r"|router(\.layer|\.gate|\.classifier)?\.(weight|bias)|router_DE|e_score_correction_bias"
    r"|expert_bias|(ffn|mlp)\.gate\.bias|shared_expert_gate\.weight|gate\.tid2eid"
    r"|ffn_gate_inp(_shexp)?\.weight|exp_probs_b\.bias)$"
)

# How the experts of a layer are stored, tried in this order; each is searched behind a dot.
_STORED = (
    ("stacked", r"experts\.experts\.(?:linear_fc[12]\.(?:weight|bias)|weight[12])$"),
    ("local", r"local_experts\.(\d{1,9})\."),
    ("local", r"experts\.linear_fc[12]\.(?:weight|bias)(\d{1,9})$"),
    ("grouped", r"experts\.weight[12]$"),
    ("expert", r"(?:deepspeed_experts\.|experts\.expert_|experts\.)(\d{1,9})\."),
    ("stacked", r"experts\.(?:gate_up|down|gate|up)_proj(?:_bias|_blocks|_scales|\.weight)?$"),
    ("stacked", r"switch_mlp\."),
    ("stacked", r"moe\.(?:experts|routed_experts)\.w[123]$"),
    ("stacked", r"block_sparse_moe\.(?:input|output)_linear\.weight$"),
    ("stacked", r"experts\.batched_fc[12]_(?:w|bias)$"),
    ("stacked", r"experts\.w(?:13|2)_(?:weight(?:_scale(?:_2|_inv)?)?|input_scale)$"),
    ("stacked", r"experts\.linear_fc[12]\.weight$"),
    ("stacked", r"mlp\.mlp[12]_(?:weight|bias)(?:\.(?:blocks|scales))?$"),
    ("stacked", r"ffn_(?:gate|up|down|gate_up)_exps\.(?:weight|bias)$"),
    ("flat", r"ffn\.experts\.mlp\.[wv][12]$"),
    ("flat", r"experts\.moe_w_(?:(?:in|swiglu)_eD_F|out_eF_D)$"),
)
_EXPERTS = tuple((kind, re.compile(r"(?:^|\.)" + tail)) for kind, tail in _STORED)
_LAYER = re.compile(r"(?:(encoder|decoder|mtp)\.)?\b(?:layers?|blocks?|blk|h)\.(\d{1,9})\.")


class Expert(NamedTuple):
    """Where a tensor stands among the experts of its layer.

    Attributes
    ----------
    layer : e.g. ``3``, ``decoder.3``, or ``2.5`` for block 5 of layer 2; empty where the name
        does not say.
    expert : its number, or -1 if the tensor holds all experts of the layer.
    kind : ``expert`` (one expert), ``local`` (one, numbered within its rank), ``stacked`` (all,
        along one dimension, the first unless a layer dimension precedes it), ``flat`` (all, as
        equal runs of rows), ``grouped`` (Megatron's GroupedMLP: all, as equal runs of memory,
        whatever the shape says).
    """

    layer: str
    expert: int
    kind: str


def expert_of(name: str) -> Expert | None:
    """Tell which expert of a mixture-of-experts layer a tensor belongs to, if any."""
    if "exp" not in name and "moe" not in name and "mlp" not in name:
        return None
    for kind, pattern in _EXPERTS:
        if found := pattern.search(name):
            expert = int(found[1]) if pattern.groups else -1
            places = _LAYER.findall(name, 0, found.start() + 1)
            layer = ".".join(part for place in places for part in place if part)
            return Expert(layer, expert, kind)
    return None


def is_router(name: str) -> bool:
    """Whether a name is that of a router (gate) of a mixture-of-experts layer."""
    return _ROUTER.search(name) is not None
