"""Optimizer steps made again: what follows from the step before is derived, not stored.

Of two checkpoints one step apart, with Adam or AdamW (Kingma and Ba 2015; Loshchilov and Hutter
2019), the later weight follows from the earlier one and the later moments. The gradient follows
from the two first moments, nearly, and from it the second moment. What the replay misses is coded
as in ``ulp``; the weight is most often bit-equal.

All arithmetic is IEEE add, subtract, multiply, divide and square root in a stated order, in the
precision stated, so that every machine gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ckz.codecs.ulp import decode_difference, encode_difference
from ckz.errors import CorruptError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_DTYPE = "float32"
# The two ways in which torch's loops divide: (step m) / denominator, or step (m / denominator).
ORDERS = ("single", "foreach")


@dataclass(frozen=True)
class AdamWeight:
    """float32 weights after one step.

    References: the weight before, the first and the second moment after the step. The fields are
    the scalars of the update, each rounded to single precision, for powers are not the same on
    every machine: ``decay`` is 1 - lr * weight decay, ``step_size`` -lr / (1 - beta1**step), and
    ``correction`` the square root of 1 - beta2**step.
    """

    name: ClassVar[str] = "adam-weight"
    decay: float = 1.0
    step_size: float = 0.0
    correction: float = 1.0
    eps: float = 1e-8
    order: str = "single"

    def __post_init__(self) -> None:
        scalars = (self.decay, self.step_size, self.correction, self.eps)
        if not all(abs(x) < 1e30 for x in scalars) or self.order not in ORDERS:
            raise ValueError("an optimizer has no such step")

    def predict(self, weight: Floats, first: Floats, second: Floats) -> Floats:
        """Make the step again."""
        decay, step_size, correction, eps = (
            np.float32(x) for x in (self.decay, self.step_size, self.correction, self.eps)
        )
        with np.errstate(all="ignore"):
            denominator = np.sqrt(second)
            np.divide(denominator, correction, out=denominator)
            np.add(denominator, eps, out=denominator)
            out: Floats = np.multiply(weight, decay)
            if self.order == "single":
                update = np.multiply(first, step_size)
                np.divide(update, denominator, out=update)
            else:
                update = np.divide(first, denominator)
                np.multiply(update, step_size, out=update)
            np.add(out, update, out=out)
        return out

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code what the replay misses."""
        inputs = _inputs(refs, chunk.size)
        return None if inputs is None else _encode(chunk, self.predict(*inputs))

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Replay, and add what it misses."""
        inputs = _inputs(refs, out.size)
        if inputs is None:
            raise CorruptError("a replayed chunk needs three references of its own size")
        _decode(payload, self.predict(*inputs), out)


def adam_step(
    *, lr: float, beta1: float, beta2: float, eps: float, decay: float, step: int, order: str
) -> AdamWeight:
    """Give the codec of one step of AdamW, or with a ``decay`` of 0 of Adam."""
    return AdamWeight(
        decay=float(np.float32(1 - lr * decay)),
        step_size=float(np.float32(-(lr / (1 - beta1**step)))),
        correction=float(np.float32((1 - beta2**step) ** 0.5)),
        eps=float(np.float32(eps)),
        order=order,
    )


@dataclass(frozen=True)
class AdamVariance:
    """float32 second moments after one step.

    References: the second moment before, the first moment before and after the step.
    """

    name: ClassVar[str] = "adam-variance"
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("an optimizer has no such numbers")

    def predict(self, second: Floats, before: Floats, after: Floats) -> Floats:
        """Solve for the gradient in double precision, and make the step again."""
        kept, new = np.float64(np.float32(self.beta1)), np.float64(np.float32(1 - self.beta1))
        with np.errstate(all="ignore"):
            solved = before.astype(np.float64)
            np.multiply(solved, kept, out=solved)
            np.subtract(after, solved, out=solved)
            np.divide(solved, new, out=solved)
            gradient = solved.astype(np.float32)
            out: Floats = np.multiply(gradient, np.float32(1 - self.beta2))
            np.multiply(out, gradient, out=out)
            np.add(out, np.multiply(second, np.float32(self.beta2)), out=out)
        return out

    def encode(self, chunk: Bytes, refs: Sequence[Bytes] = (), at: int = 0) -> bytes | None:
        """Code what the replay misses."""
        inputs = _inputs(refs, chunk.size)
        return None if inputs is None else _encode(chunk, self.predict(*inputs))

    def decode(self, payload: memoryview, refs: Sequence[Bytes], out: Bytes) -> None:
        """Replay, and add what it misses."""
        inputs = _inputs(refs, out.size)
        if inputs is None:
            raise CorruptError("a replayed chunk needs three references of its own size")
        _decode(payload, self.predict(*inputs), out)


def _inputs(refs: Sequence[Bytes], nbytes: int) -> list[Floats] | None:
    """Give three references as floats; None if they do not fit."""
    if len(refs) != 3 or nbytes % 4 or any(ref.size != nbytes for ref in refs):
        return None
    return [ref.view("<f4") for ref in refs]


def _bits(predicted: Floats) -> npt.NDArray[np.uint32]:
    """Give bits; processors differ in the NaNs they make, so all count as one."""
    bits = predicted.view(np.uint32)
    bits[np.isnan(predicted)] = 0x7FC00000
    return bits


def _encode(chunk: Bytes, predicted: Floats) -> bytes | None:
    payload = encode_difference(_DTYPE, chunk.view("<u4"), _bits(predicted))
    return payload if len(payload) < chunk.size else None


def _decode(payload: memoryview, predicted: Floats, out: Bytes) -> None:
    decode_difference(_DTYPE, payload, _bits(predicted), out.view("<u4"))
