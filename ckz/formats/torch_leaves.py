"""What a torch pickle holds besides tensors: numbers, texts, bytes, types, each under its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ckz.errors import CorruptError
from ckz.formats.pickles import DICT, FROZENSET, SET, Call, Global, PersistentId
from ckz.formats.torch_names import below, joined, unwrapped, view_of

_MAX_DEPTH = 200
_MAX_NAME = 1 << 16
_MAX_NAMES = 256 << 20  # characters of all names together
# After so many steps, what is shared is looked into once; later, nothing is.
_MAX_STEPS = 1 << 17
_LAST_STEP = 4 << 20
_EMPTY = "empty"
# Types that are not worth a name: to be one or the other changes nothing that is stored.
_CONTAINERS = frozenset({
    DICT, SET, FROZENSET, Global("collections", "OrderedDict"), Global("torch", "Size"),
})  # fmt: skip
_ENCODE = Global("_codecs", "encode")  # how bytes are pickled for Python 2


def named_leaves(file: str, value: Any) -> dict[str, Any]:
    """Give everything in a pickle that is no tensor, by the names that a state dict has.

    Returns
    -------
    Name -> None, bool, int, float, str, bytes, or a ``Global``: the type of an object.

    Raises
    ------
    CorruptError
        If there are absurdly many.
    """
    walk = _Walk(file)
    walk.visit(value, None, 0)
    return walk.found


class _Walk:
    def __init__(self, file: str) -> None:
        self.found: dict[str, Any] = {}
        self._file = file
        self._above: set[int] = set()
        self._seen: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._steps = 0
        self._letters = 0

    def visit(self, value: Any, name: str | None, depth: int) -> None:
        """Add what lies at or below ``value``."""
        if isinstance(value, PersistentId):
            return
        if isinstance(value, Call):
            func, args = unwrapped(value)
            if func == _ENCODE and args and type(args[0]) is str:
                self._add(name, args[0].encode("latin-1", "replace"))
                return
            if view_of(func, args) is None and not _is_plain(value.func):
                self._add(name, value.func if isinstance(value.func, Global) else "object")
            self._descend(value, below(value, func, args), name, depth)
        elif type(value) in (list, tuple):
            if not value:
                self._add(name, _EMPTY)
            self._descend(value, enumerate(value), name, depth)
        else:
            self._add(name, value)

    def _descend(
        self, value: Any, children: Iterable[tuple[Any, Any]], name: str | None, depth: int
    ) -> None:
        key = id(value)
        if key in self._above or depth > _MAX_DEPTH or (name and len(name) > _MAX_NAME):
            return
        if key in self._seen and self._steps > _MAX_STEPS:
            return
        self._seen.add(key)
        self._above.add(key)
        for part, child in children:
            self._steps += 1
            # A state that is not there has no part either.
            if (child is not None or part is not None) and self._steps < _LAST_STEP:
                self.visit(child, joined(name, part), depth + 1)
        self._above.discard(key)

    def _add(self, name: str | None, leaf: Any) -> None:
        name = "object" if name is None else name
        self._letters += len(name)
        if self._letters > _MAX_NAMES:
            raise CorruptError(f"{self._file}: its values' names take more memory than sensible")
        self._counts[name] += 1
        if self._counts[name] > 1:
            name = f"{name}#{self._counts[name]}"
        self.found[name] = leaf


def _is_plain(func: Any) -> bool:
    """Whether a call makes a container, or gives a tensor back that it was given."""
    return func in _CONTAINERS or (
        isinstance(func, Global)
        and func.module.startswith("torch")
        and (func.name.startswith("_rebuild_") or func.name == "Parameter")
    )
