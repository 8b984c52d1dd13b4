"""What a partial snapshot saves or carries as one: an expert, or a block of a parameter.

A unit is whatever changes together: the weight's part, and the same part of its master and its
optimizer states.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckz.checkpoint import ITEMSIZE, Checkpoint, Tensor
from ckz.errors import UsageError
from ckz.experts import Expert, expert_of, is_router
from ckz.roles import match_states
from ckz.runs import whole_span
from ckz.streams import SMALL

# Bytes of a block of float32 parameters.
_BLOCK = 1 << 16
# Of one tensor; no model has as many.
_MAX_EXPERTS = 1 << 16
_STATES = ("momentum", "variance")
_DIGITS = re.compile(r"\d+")

Key = tuple[str, int]


class Part(NamedTuple):
    """Bytes of a span that belong to a unit; ``kind`` is W for weights and masters, or O."""

    span: int
    start: int
    nbytes: int
    kind: str


Units = dict[Key, list[Part]]


def _named(checkpoint: Checkpoint) -> Iterator[tuple[int, Tensor, str]]:
    """Give each tensor that fills a span, with the name of its weight."""
    weight_of = match_states(checkpoint.tensors)
    exact = {tensor.name for tensor in checkpoint.tensors if tensor.role == "other"}
    seen = set()
    for tensor in checkpoint.tensors:
        span = whole_span(checkpoint, tensor)
        if span is None or span in seen or tensor.role == "other":
            continue
        # States of routers are saved as these are.
        if weight_of.get(tensor.name) in exact:
            continue
        if tensor.role == "weight" or tensor.name in weight_of:
            seen.add(span)
            yield span, tensor, weight_of.get(tensor.name, tensor.name)


def _kind(tensor: Tensor) -> str:
    return "O" if tensor.role in _STATES else "W"


def expert_units(checkpoint: Checkpoint) -> Units:
    """Give the experts of every layer, with all that belongs to each.

    Raises
    ------
    UsageError
        If there are none.
    """
    routers = _router_sizes(checkpoint)
    found: Units = defaultdict(list)
    local: dict[str, set[tuple[str, int]]] = defaultdict(set)
    singles: list[tuple[int, Tensor, str, Expert]] = []
    for span, tensor, weight in _named(checkpoint):
        expert = expert_of(weight)
        if expert is None:
            continue
        if expert.kind in ("expert", "local"):
            singles.append((span, tensor, weight, expert))
            local[expert.layer].add((_rank(weight, expert), expert.expert))
        else:
            for key, part in _stacked(span, tensor, expert, routers):
                found[key].append(part)
    # Experts that are numbered within their rank are numbered through, rank after rank.
    numbers = {
        (layer, *place): number
        for layer, places in local.items()
        for number, place in enumerate(sorted(places, key=lambda p: (_sortable(p[0]), p[1])))
    }
    for span, tensor, weight, expert in singles:
        number = numbers[expert.layer, _rank(weight, expert), expert.expert]
        found[expert.layer, number].append(Part(span, 0, tensor.nbytes, _kind(tensor)))
    if not found:
        raise UsageError(f"{checkpoint.root}: no experts of a mixture of experts are found in it")
    return dict(sorted(found.items(), key=lambda item: (_sortable(item[0][0]), item[0][1])))


def _sortable(text: str) -> list[tuple[int, str]]:
    return [(int(n), "") if n.isdecimal() else (-1, n) for n in re.split(r"(\d+)", text)]


def _rank(name: str, expert: Expert) -> str:
    """Give the file of a directory that a locally numbered expert lies in."""
    return name.rpartition(":")[0] if expert.kind == "local" else ""


def _router_sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Give the number of experts that each layer's router chooses from."""
    found: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        if is_router(tensor.name) and len(tensor.shape) == 2:
            # Rows are experts; Llama 4's is stored the other way round.
            size = tensor.shape[1] if tensor.name.endswith("_DE") else tensor.shape[0]
            digits = _DIGITS.findall(tensor.name.rpartition(":")[2])
            found[digits[0] if digits else ""] = size
    return found


def _stacked(
    span: int, tensor: Tensor, expert: Expert, routers: Mapping[str, int]
) -> Iterator[tuple[Key, Part]]:
    """Cut a tensor of all experts of a layer, or of all layers, into equal runs."""
    shape = tensor.shape
    layers = [expert.layer]
    count = shape[0] if expert.kind == "stacked" and shape else 0
    if expert.kind == "stacked" and not expert.layer and len(shape) == 4:
        layers, count = [str(n) for n in range(shape[0])], shape[1]
    if not count:
        digits = _DIGITS.findall(expert.layer)
        count = routers.get(digits[0] if digits else "", 0)
    elements = tensor.nbytes // ITEMSIZE[tensor.dtype]
    if not 0 < count * len(layers) <= _MAX_EXPERTS or elements % (count * len(layers)):
        return
    nbytes = tensor.nbytes // (count * len(layers))
    for place in range(count * len(layers)):
        key = layers[place // count], place % count
        yield key, Part(span, place * nbytes, nbytes, _kind(tensor))


def block_units(checkpoint: Checkpoint) -> Units:
    """Give blocks of all large parameters, each with the same elements of its states."""
    groups: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for span, tensor, weight in _named(checkpoint):
        groups[weight].append((span, tensor))
    found: Units = {}
    for weight, members in groups.items():
        # States of another shape, such as factored ones, are not of the same elements.
        shape = members[0][1].shape
        members = [(span, t) for span, t in members if t.shape == shape]
        if members[0][1].nbytes < SMALL:
            continue
        elements = members[0][1].nbytes // ITEMSIZE[members[0][1].dtype]
        step = _BLOCK // 4
        for number, first in enumerate(range(0, elements, step)):
            last = min(first + step, elements)
            found[weight, number] = [
                Part(span, first * width, (last - first) * width, _kind(t))
                for span, t in members
                for width in [ITEMSIZE[t.dtype]]
            ]
    return found
