"""What each tensor is for, told by its name, its shape and its neighbours.

Roles decide which codecs a plan may use: ``other`` is always kept exactly. So whatever is in
doubt is ``other``: steps, counters, random states, routers, normalisation statistics, quantization
scales, integers, and optimizer state of a kind that is not known here.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckz.checkpoint import ITEMSIZE, Tensor
from ckz.experts import is_router

_FLOATS = {
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
}

# fmt: off
# Path segments that tell a role wherever they stand.
_STATE = {
    **dict.fromkeys((
        "exp_avg", "exp_avg_slow", "exp_avg_fast", "exp_avg_diff", "momentum_buffer",
    ), "momentum"),
    **dict.fromkeys((
        "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_var",
        "exp_inf", "exp_avg_res_row", "exp_avg_res_col",
    ), "variance"),
    **dict.fromkeys((
        "fp32_from_fp16_params", "fp32_from_fp16", "fp32_param", "fp32_params", "fp32_master",
        "master_param", "master_params", "master_weights", "main_param", "main_params",
        "single_partition_of_fp32_groups", "fp32_flat_groups", "shard_fp32_from_float16_groups",
    ), "master"),
}
# Shorter ones, trusted only as the last segment inside an optimizer's state.
_SLOTS = {
    **dict.fromkeys((
        "m", "mu", "momentum", "momentums", "trace", "grad_avg", "state1",
    ), "momentum"),
    **dict.fromkeys((
        "v", "nu", "vhat", "velocity", "velocities", "rms", "state2", "square_avg", "acc_delta",
        "sum", "variance", "row_var", "col_var", "v_row", "v_col",
    ), "variance"),
    **dict.fromkeys(("master", "master_weight", "fp32"), "master"),
}
_SLOT_ENDS = {"_momentum": "momentum", "_m": "momentum", "_velocity": "variance", "_v": "variance"}
_OPTAX = {"mu": "momentum", "trace": "momentum", "nu": "variance"}
# Sections, buffers and quantization companions: never approximated.
_EXACT = frozenset({
    "scheduler", "lr_scheduler", "lr_schedulers", "scaler", "grad_scaler", "rng", "rng_state",
    "rng_states", "random_state", "callbacks", "loops", "hyper_parameters", "args", "metrics",
    "running_mean", "running_var", "moving_mean", "moving_variance", "inv_freq", "position_ids",
    "attn_bias", "masked_bias", "cos_cached", "sin_cached", "mask",
    "global_gate_stats_3e", "expert_activation_de", "tokens_per_expert",
    "amax", "_amax", "amax_history", "absmax", "nested_absmax", "quant_map", "qmap", "codes",
    "scales", "biases", "zeros", "qzeros", "g_idx", "input_scale", "weight_scale",
    "weight_scale_2", "weight_scale_inv", "w13_weight_scale", "w2_weight_scale",
    "weight_zero_point",
})
_COMPANIONS = frozenset({"codes", "scale", "scales", "qmap", "absmax", "quant_map"})
_AVERAGES = frozenset({
    "ema", "model_ema", "ema_model", "ema_state_dict", "shadow", "shadow_params", "average_model",
})
_MODELS = frozenset({
    "model", "models", "module", "modules", "state_dict", "model_state_dict", "model_state",
    "model_weights", "net", "network", "params", "parameters", "generator", "discriminator",
    "netg", "netd", "layers", "pytorch_model",
})
_ROUTERS = frozenset({
    "gate", "wg", "router", "router_de", "shared_expert_gate", "tid2eid", "expert_bias",
    "e_score_correction_bias", "ffn_gate_inp", "ffn_gate_inp_shexp", "exp_probs_b",
})
_PARAMETERS = frozenset({
    "weight", "weights", "bias", "kernel", "gamma", "beta", "embedding", "embeddings",
    "lora_a", "lora_b",
})
# fmt: on
_PARAMETER_ENDS = ("weight", "bias", "kernel", "embedding", "embeddings", "_proj", "_param")
_FACTORED = ("_row", "_col", "row_var", "col_var")
_MAX_WORK = 10**7
_INDEX = re.compile(r"\.\d{1,9}(?![^.])")
_OPTIMIZER = re.compile(r"(^|[._])(optim(izers?)?|opt)([._]|$)")


def assign_roles(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Give the tensors of one checkpoint with their roles set.

    Parameters
    ----------
    tensors : all of the checkpoint's tensors: some roles are told only by neighbours.

    Returns
    -------
    The same tensors in the same order.
    """
    # Layers and experts differ in their numbers only: what a kind of name says is worked out once.
    kinds: dict[tuple[str, str, tuple[int, ...]], str] = {}
    roles = []
    for name, dtype, shape, *_ in tensors:
        kind = _INDEX.sub(".0", name), dtype, shape
        if kind not in kinds:
            kinds[kind] = _role(*kind)
        roles.append(kinds[kind])
    asked = [i for i, role in enumerate(roles) if role.startswith("?")]
    if asked:
        by_name = {tensor.name: tensor for tensor in tensors}
        training = any(role in ("momentum", "variance", "master", "?slot") for role in roles)
        slots = [tensors[i] for i in asked if roles[i] == "?slot"]
        known = {**_keras_slots(slots, tensors), **_keras_statistics(by_name)}
        for i in asked:
            name = tensors[i].name
            roles[i] = known.get(name) or _role_by_neighbours(
                tensors[i], roles[i], by_name, training
            )
    return tuple(
        Tensor(name, dtype, shape, pieces, role, transform)
        for (name, dtype, shape, pieces, _, transform), role in zip(tensors, roles, strict=True)
    )


def _segments(name: str) -> list[str]:
    return name.lower().replace("/", ".").replace(":", ".").split(".")


def _is_number(segment: str) -> bool:
    return segment.isdecimal() and len(segment) < 10


def _role(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Tell a role by name, or ``?`` and what is to be asked of the neighbours."""
    if dtype not in _FLOATS or not shape:
        return "other"
    segments = _segments(name)
    leaf = segments[-2] if len(segments) > 1 and _is_number(segments[-1]) else segments[-1]
    if not _STATE.keys().isdisjoint(segments):
        role = next(_STATE[segment] for segment in segments if segment in _STATE)
        return "other" if leaf in _COMPANIONS or (role == "master" and is_router(name)) else role
    if ("opt" in name.lower() or segments[0] == "state") and _in_optimizer(segments):
        return _slot(segments, leaf)
    if "zero" in segments and leaf == "fp32":  # a parameter in DeepSpeed's flat partitions
        return "other" if is_router(name.removesuffix(".fp32")) else "master"
    if segments[-2:] == ["fp32", "pt"]:  # a DeepSpeed universal checkpoint
        return "master"
    if not _EXACT.isdisjoint(segments):
        return "other"
    if not _ROUTERS.isdisjoint(segments) and is_router(name) and _router_shape(shape):
        return "other"
    if leaf in ("param", "scale", "vars"):
        return "?" + leaf
    if leaf in _PARAMETERS or leaf.endswith(_PARAMETER_ENDS):
        return "weight"
    return "weight" if not _AVERAGES.isdisjoint(segments) else "?"


def _in_optimizer(segments: list[str]) -> bool:
    if len(segments) > 2 and segments[0] == "state" and _is_number(segments[1]):
        return True  # torch's optimizer.state_dict() saved on its own
    return _OPTIMIZER.search(".".join(segments[:-1])) is not None


def _slot(segments: list[str], leaf: str) -> str:
    if leaf == "vars" and leaf != segments[-1]:
        return "?slot"
    if leaf == "param":
        return "?param"
    optax = next((_OPTAX[segment] for segment in segments[:-1] if segment in _OPTAX), "")
    if optax or leaf in _SLOTS:
        return optax or _SLOTS[leaf]
    return next((role for end, role in _SLOT_ENDS.items() if leaf.endswith(end)), "other")


def _router_shape(shape: tuple[int, ...]) -> bool:
    """Tell a router from a dense layer called ``gate``: that one has more rows than columns."""
    return len(shape) != 2 or shape[0] <= shape[1]


def _role_by_neighbours(
    tensor: Tensor, question: str, by_name: Mapping[str, Tensor], training: bool
) -> str:
    name = tensor.name
    if question == "?slot":
        return "other"
    if question == "?param":  # Megatron's distributed optimizer keeps (param, exp_avg, exp_avg_sq)
        sibling = by_name.get(name[: -len("param")] + "exp_avg")
        if sibling is not None and sibling.shape == tensor.shape:
            return "master"
        return "other" if _in_optimizer(_segments(name)) else "weight"
    if question == "?scale":  # of a layer norm, or of an 8-bit weight beside it
        sibling = by_name.get(name[: -len("scale")] + "weight")
        quantized = sibling is not None and ITEMSIZE[sibling.dtype] == 1
        return "other" if quantized else "weight"
    # In a directory, the file's name and a colon may precede the tensor's.
    if not training or not _MODELS.isdisjoint(
        (*_segments(name)[:2], *_segments(name.rpartition(":")[2])[:2])
    ):
        return "weight"
    return "other"


def _keras_slots(slots: Sequence[Tensor], tensors: Sequence[Tensor]) -> dict[str, str]:
    """Tell Adam's ``optimizer/vars/N`` apart: momentum and velocity alternate, one pair a variable.

    Other optimizers number theirs alike; so pairs count only if each has one shape, and the model
    has variables of these shapes but not twice as many.
    """
    ordered = sorted(slots, key=lambda t: int(_segments(t.name)[-1]))
    first, second = ordered[::2], ordered[1::2]
    if [t.shape for t in first] != [t.shape for t in second]:
        return {}
    taken = {t.name for t in slots}
    model = Counter(t.shape for t in tensors if t.shape and t.name not in taken)
    pairs = Counter(t.shape for t in first)
    if not pairs <= model or pairs + pairs <= model:
        return {}
    return {
        **{t.name: "momentum" for t in first},
        **{t.name: "variance" for t in second},
    }


def _keras_statistics(by_name: Mapping[str, Tensor]) -> dict[str, str]:
    """Find moving mean and variance: the last of a batch normalisation's ``vars``."""
    found: dict[str, str] = {}
    for name in by_name:
        if name.endswith("vars/3"):
            stem = name[:-1]
            group = [by_name.get(f"{stem}{i}") for i in range(5)]
            shapes = {t.shape for t in group[:4] if t is not None}
            if None not in group[:4] and group[4] is None and len(shapes) == 1:
                found |= {f"{stem}{i}": "other" for i in (2, 3)}
    return found


# How parameter groups (with and without weight decay) commonly reorder the parameters.
_GROUPS: tuple[Callable[[Tensor], bool], ...] = (
    lambda weight: False,
    lambda weight: len(weight.shape) < 2,
    lambda weight: len(weight.shape) > 1,
    lambda weight: weight.name.endswith("bias"),
    lambda weight: not weight.name.endswith("bias"),
)


def match_optimizer(tensors: Sequence[Tensor]) -> dict[str, str]:
    """Match optimizer state and master copies to their weights.

    State named after its weight is matched by name. Numbered state (``state.3.exp_avg``,
    ``fp32_from_fp16_params.0.3``) is matched by order: a torch optimizer numbers its parameters
    in the order in which the model lists them, group by group, so the shapes in ascending order
    of the numbers are those of the weights, of which some may lack state (frozen ones). Only what
    fits in one way is matched.

    Parameters
    ----------
    tensors : of one checkpoint, with roles, in the file's order.

    Returns
    -------
    Name of a momentum, variance or master tensor -> name of its weight; where the checkpoint has
    no such weight (flat partitions), of its master copy.
    """
    weights = list(_parameters(tensors))
    masters = [tensor for tensor in tensors if tensor.role == "master"]
    by_tail = _tails(weights)
    matched: dict[str, str] = {}
    numbered: dict[str, dict[tuple[int, ...], list[Tensor]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for tensor in tensors:
        if tensor.role not in ("momentum", "variance", "master"):
            continue
        if tensor.name.endswith(_FACTORED):
            continue  # rows or columns of a second moment: not of the weight's shape
        group, key, parameter = _key(tensor.name)
        if key:
            numbered[group][key].append(tensor)
        elif weight := _by_name(parameter, tensor.shape, by_tail):
            matched[tensor.name] = weight
    if len(numbered) * len(tensors) > _MAX_WORK:  # no model has that many optimizers
        return matched
    for states in numbered.values():
        names = _align(states, weights)
        if not names and not any(t.role == "master" for ts in states.values() for t in ts):
            names = _align(states, masters)
        matched |= names
    return matched


def match_states(tensors: Sequence[Tensor]) -> dict[str, str]:
    """Match states to weights as ``match_optimizer`` does, for each file of a directory by itself.

    Every rank numbers its own parameters.
    """
    ranks: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        ranks[tensor.name.rpartition(":")[0]].append(tensor)
    return {
        state: weight
        for found in ranks.values()
        for state, weight in match_optimizer(found).items()
    }


def _parameters(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Give what an optimizer may hold: each weight or router once, no averaged copies."""
    seen = set()
    for tensor in tensors:
        if tensor.role == "weight" or (tensor.role == "other" and is_router(tensor.name)):
            if tensor.pieces and tensor.pieces in seen:
                continue  # tied
            seen.add(tensor.pieces)
            if _AVERAGES.isdisjoint(_segments(tensor.name)):
                yield tensor


def _key(name: str) -> tuple[str, tuple[int, ...], str]:
    """Split a state's name into its optimizer, its number in it, and its parameter's name.

    ``o.state.3.exp_avg`` gives (``o.state``, (3,), ``""``), ``o.fp32_from_fp16_params.0.3`` gives
    (``o.fp32_from_fp16_params``, (0, 3), ``""``), ``o.state.h.0.w.exp_avg`` and
    ``o.exp_avg.h.0.w`` give (``o``, (), ``h.0.w``).
    """
    segments = name.replace("/", ".").split(".")
    at = next((i for i, segment in enumerate(segments) if segment.lower() in _STATE), None)
    if at is None:  # a slot, the last segment
        at = len(segments) - 1
    after = segments[at + 1 :]
    if after and all(map(_is_number, after)):
        return ".".join(segments[: at + 1]), tuple(map(int, after)), ""
    if after:
        return ".".join(segments[:at]), (), ".".join(after)
    owner = segments[at - 2].lower() if at > 1 else "state"
    if at > 0 and _is_number(segments[at - 1]) and ("state" in owner or "optim" in owner):
        return ".".join(segments[: at - 1]), (int(segments[at - 1]),), ""
    start = segments.index("state") + 1 if "state" in segments[:at] else 1
    return ".".join(segments[: start - 1]), (), ".".join(segments[start:at])


def _tails(weights: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Index weights by name without its first zero to three segments; ambiguous tails give None."""
    tails: dict[str, Tensor | None] = {}
    for weight in weights:
        segments = weight.name.replace("/", ".").split(".")
        for start in range(min(4, len(segments))):
            tail = ".".join(segments[start:])
            tails[tail] = None if tail in tails else weight
    return tails


def _by_name(
    parameter: str, shape: tuple[int, ...], by_tail: Mapping[str, Tensor | None]
) -> str | None:
    segments = parameter.split(".")
    for start in range(min(4, len(segments))):
        weight = by_tail.get(".".join(segments[start:]))
        if weight is not None:
            return weight.name if weight.shape == shape else None
    return None


def _align(
    states: Mapping[tuple[int, ...], Sequence[Tensor]], weights: Sequence[Tensor]
) -> dict[str, str]:
    """Match one optimizer's numbered states to weights, by order and shape."""
    keys = sorted(states)
    shapes = [states[key][0].shape for key in keys]
    for later in _GROUPS:
        ordered = sorted(weights, key=later)
        places = _embed(shapes, [weight.shape for weight in ordered])
        if places is not None:
            break
    else:
        return {}
    matched: dict[str, str] = {}
    for key, place in zip(keys, places, strict=True):
        if place >= 0:
            weight = ordered[place]
            matched |= {t.name: weight.name for t in states[key] if t.shape == weight.shape}
    return matched


def _embed(few: Sequence[tuple[int, ...]], many: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Find ``few`` in ``many`` in order, with gaps; -1 where more than one place would do."""
    earliest = _greedy(few, many)
    if len(earliest) < len(few):
        return None
    latest = [len(many) - 1 - place for place in reversed(_greedy(few[::-1], many[::-1]))]
    return [a if a == b else -1 for a, b in zip(earliest, latest, strict=True)]


def _greedy(few: Sequence[tuple[int, ...]], many: Sequence[tuple[int, ...]]) -> list[int]:
    places: list[int] = []
    for place, shape in enumerate(many):
        if len(places) < len(few) and few[len(places)] == shape:
            places.append(place)
    return places
