"""Which moments belong together, and what the optimizer adds to their root."""

from __future__ import annotations

from collections.abc import Mapping

from ckz.checkpoint import Checkpoint, Piece, Tensor
from ckz.lossy.eligible import Eligible
from ckz.replaying import stem
from ckz.roles import match_states

_DEFAULT_EPS = 1e-8


def find_pairs(checkpoint: Checkpoint, eligible: Mapping[int, Eligible]) -> dict[int, Eligible]:
    """Give the second moment of each first one: of the same parameter, place by place."""
    weight_of = match_states(checkpoint.tensors)
    spans: dict[tuple[object, ...], int] = {}

    def key(tensor: Tensor, piece: Piece) -> tuple[object, ...]:
        name = weight_of.get(tensor.name) or stem(tensor.name)
        return name, tensor.shape, piece.start, piece.shape, piece.strides

    for tensor in checkpoint.tensors:
        if tensor.role == "variance":
            for piece in tensor.pieces:
                spans[key(tensor, piece)] = piece.span
    found = {}
    for tensor in checkpoint.tensors:
        if tensor.role == "momentum":
            for piece in tensor.pieces:
                other = spans.get(key(tensor, piece), -1)
                first, second = eligible.get(piece.span), eligible.get(other)
                if first and second and first[3:5] == second[3:5]:  # dtype and bytes
                    found[piece.span] = second
    return found


def eps_of(checkpoint: Checkpoint) -> float:
    """Give the optimizer's epsilon, as the checkpoint has it or as is usual."""
    numbers = [v for path, v in checkpoint.numbers.items() if path.endswith((".eps", "_eps"))]
    return min((v for v in numbers if 0 < v < 1), default=_DEFAULT_EPS)
