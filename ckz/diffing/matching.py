"""Which tensor of one checkpoint is compared with which of the other: by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ckz.checkpoint import Checkpoint, Tensor

# What tensors of one content have in common: dtype, shape and digest.
_Content = tuple[str, tuple[int, ...], bytes]


class Pair(NamedTuple):
    """Two tensors to compare; one is None where the other has no counterpart.

    ``renamed`` : paired by their contents, for their names differ.
    """

    a: Tensor | None
    b: Tensor | None
    renamed: bool = False

    @property
    def names(self) -> list[str]:
        """What the two are called."""
        return [tensor.name for tensor in (self.a, self.b) if tensor]


def match(a: Checkpoint, b: Checkpoint) -> list[Pair]:
    """Pair tensors by name; where files' names precede them, without these if that is unambiguous.

    Returns
    -------
    In the order of ``a``, then what only ``b`` has.
    """
    theirs = {tensor.name: tensor for tensor in b.tensors}
    pairs = {tensor.name: theirs.pop(tensor.name, None) for tensor in a.tensors}
    alone = [tensor for tensor in a.tensors if pairs[tensor.name] is None]
    plain = _by_plain_name(b, list(theirs.values()))
    for name, tensor in _by_plain_name(a, alone).items():
        if name in plain:
            pairs[tensor.name] = theirs.pop(plain[name].name)
    found = [Pair(tensor, pairs[tensor.name]) for tensor in a.tensors]
    return found + [Pair(None, tensor) for tensor in theirs.values()]


def _by_plain_name(checkpoint: Checkpoint, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Index tensors by what they are called inside their files, where one only is called so."""
    paths = {file.path for file in checkpoint.files}
    names = [_plain(tensor.name, paths) for tensor in tensors]
    counts = Counter(names)
    found = zip(names, tensors, strict=True)
    return {name: tensor for name, tensor in found if counts[name] == 1}


def _plain(name: str, paths: set[str]) -> str:
    at = name.find(":")
    while at >= 0:
        if name[:at] in paths:
            return name[at + 1 :]
        at = name.find(":", at + 1)
    return name


def match_renamed(
    pairs: list[Pair], digest: Callable[[int, list[Tensor]], Iterator[bytes]]
) -> list[Pair]:
    """Pair tensors that have no counterpart by name with such of the same content.

    Parameters
    ----------
    digest : gives what identifies the content of tensors, of ``a`` (0) or of ``b`` (1).
    """
    alone = ([p.a for p in pairs if p.a and not p.b], [p.b for p in pairs if p.b and not p.a])
    kinds = [{(t.dtype, t.shape) for t in side} for side in alone]
    common = kinds[0] & kinds[1]
    found: list[dict[_Content, list[Tensor]]] = [{}, {}]
    for number, side in enumerate(alone):
        asked = [t for t in side if (t.dtype, t.shape) in common and t.nbytes]
        for tensor, content in zip(asked, digest(number, asked), strict=True):
            found[number].setdefault((tensor.dtype, tensor.shape, content), []).append(tensor)
    renamed: dict[str, Tensor] = {}
    for key, tensors in found[0].items():
        others = found[1].get(key, [])
        if len(tensors) == len(others):  # then their order tells which is which
            renamed |= zip((tensor.name for tensor in tensors), others, strict=True)
    taken = {tensor.name for tensor in renamed.values()}
    return [
        Pair(pair.a, renamed[pair.a.name], True) if pair.a and pair.a.name in renamed else pair
        for pair in pairs
        if pair.a or (pair.b and pair.b.name not in taken)
    ]
