"""Which objects of a torch pickle are tensors, and what each is called.

Names are those that a state dict has: the keys and attributes on the way to a tensor, joined by
dots (``optimizer.state.3.exp_avg``). Tensors inside of other tensors (sparse, quantized, tensor
subclasses) are named after the part they are: ``w.indices``, ``w.scale``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ckz.errors import CorruptError
from ckz.formats.pickles import DICT, Call, Global, PersistentId

_MAX_DEPTH = 200  # of nesting; what lies deeper stays without a name
_MAX_NAME = 1 << 16
_MAX_NAMES = 256 << 20  # characters of all names together
# A pickle of a few bytes can describe 2**100 ways to one tensor. After so many steps, what is
# reached by a second way is not looked into again; later, nothing is.
_MAX_STEPS = 1 << 17
_LAST_STEP = 16 << 20
_HOLDERS = frozenset((Call, PersistentId, list, tuple))

# What a whole module's pickle has between names, and a state dict has not.
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_TYPED = ("_rebuild_from_type", "_rebuild_from_type_v2")
# Calls that give their first argument back, changed in ways that names and values do not show.
_PLAIN = (
    "Parameter",
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
)
_NESTED = ("buffer", "sizes", "strides", "storage_offsets")


class View(NamedTuple):
    """A tensor as the pickle describes it; nothing of it is checked yet.

    ``metadata`` are the lazy bits that torch keeps beside a tensor: ``{"conj": True}``.
    """

    storage: Any
    offset: Any
    shape: Any
    strides: Any
    dtype: Any = None
    metadata: Any = None


def named_views(file: str, value: Any, prefix: str = "") -> list[tuple[str, View]]:
    """Give name and view of every tensor in a pickle, once for every way that leads to it.

    Raises
    ------
    CorruptError
        If the names together take absurdly much memory.
    """
    return _Walk(file).run(value, prefix)


class _Walk:
    """Finds the tensors of a pickle and their names, once for every way that leads to them."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: list[tuple[str, View]] = []
        self._above: set[int] = set()
        self._seen: set[int] = set()
        self._steps = 0
        self._letters = 0

    def run(self, value: Any, prefix: str) -> list[tuple[str, View]]:
        """Give name and view of every tensor below ``value``, in the pickle's order."""
        if type(value) in _HOLDERS:
            self._visit(value, prefix or None, 0)
        return self._found

    def _visit(self, value: Any, name: str | None, depth: int) -> None:
        if type(value) is PersistentId:
            self._add(name, View(value, 0, (_numel(value),), (1,)))
        elif type(value) is Call:
            func, args = unwrapped(value)
            view = view_of(func, args)
            if view is not None:
                self._add(name, view)
            if view is None or not _is_plain(value):
                self._descend(value, below(value, func, args), name, depth)
        else:
            self._descend(value, enumerate(value), name, depth)

    def _descend(
        self, value: Any, below: Iterable[tuple[Any, Any]], name: str | None, depth: int
    ) -> None:
        key = id(value)
        if key in self._above or depth > _MAX_DEPTH or (name and len(name) > _MAX_NAME):
            return
        if key in self._seen and self._steps > _MAX_STEPS:
            return
        self._seen.add(key)
        self._above.add(key)
        for part, child in below:
            self._steps += 1
            if type(part) is str and len(part) > _MAX_NAME:
                continue  # to join it to many names would take for ever
            if type(child) in _HOLDERS and self._steps < _LAST_STEP:
                self._visit(child, joined(name, part), depth + 1)
        self._above.discard(key)

    def _add(self, name: str | None, view: View) -> None:
        name = "tensor" if name is None else name
        self._letters += len(name)
        if self._letters > _MAX_NAMES:
            raise CorruptError(f"{self._file}: its tensors' names take more memory than sensible")
        self._found.append((name, view))


def _numel(persistent: PersistentId) -> Any:
    value = persistent.value
    if type(value) is not tuple or len(value) < 5:
        return None
    view = value[5] if len(value) > 5 else None
    return view[2] if type(view) is tuple and len(view) == 3 else value[4]


def joined(name: str | None, part: Any) -> str | None:
    if part is None:
        return name
    text = part if type(part) is str else key_text(part)
    return text if name is None else f"{name}.{text}"


def key_text(key: Any) -> str:
    """Give a dict's key as text: ``3``, ``(0, 'a')``; what is no simple value as its type."""
    if type(key) is bytes:
        return key.decode("latin-1")
    if type(key) is tuple and all(type(part) in (int, str, bool, float) for part in key):
        return str(key) if len(key) < 100 and _short(key) else "tuple"
    if isinstance(key, Global):
        return str(key)
    if key is None or type(key) in (bool, float) or (type(key) is int and _short((key,))):
        return str(key)
    return str(key.func) if isinstance(key, Call) and isinstance(key.func, Global) else "object"


def _short(parts: tuple[Any, ...]) -> bool:
    """Whether no number is so long that Python refuses to print it."""
    return all(type(part) is not int or part.bit_length() < 1024 for part in parts)


def unwrapped(call: Call) -> tuple[Any, tuple[Any, ...]]:
    """Give function and arguments of the call that makes a tensor, below that of its type."""
    func, args = call.func, call.args
    while _torch_name(func) in _TYPED and len(args) > 2 and type(args[2]) is tuple:
        func, args = args[0], args[2]
    return func, args


def _torch_name(func: Any) -> str:
    return func.name if type(func) is Global and func.module.startswith("torch") else ""


def view_of(func: Any, args: tuple[Any, ...]) -> View | None:
    """Give the view that a call makes, if it is one of those that make one."""
    name = _torch_name(func)
    if name == "_rebuild_tensor_v2" and len(args) >= 6:
        return View(*args[:4], None, *args[6:7])  # type: ignore[call-arg]
    if name == "_rebuild_tensor_v3" and len(args) >= 7:
        return View(*args[:4], *args[6:8])
    if (name == "_rebuild_tensor" and len(args) == 4) or (
        name == "_rebuild_qtensor" and len(args) >= 5
    ):
        return View(*args[:4])
    return None


def _is_plain(call: Call) -> bool:
    """Whether a tensor has nothing below it: neither parts nor attributes."""
    return (
        call.func[1] in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
        and call.state is None
        and not call.pairs
        and not call.items
    )


def below(call: Call, func: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Give what lies in an object, with its part of the name; None where it has none."""
    name = _torch_name(func)
    if name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        pass
    elif name == "_rebuild_qtensor" and len(args) >= 5 and type(args[4]) is tuple:
        yield from zip(("scheme", "scales", "zero_points"), args[4], strict=False)
    elif name == "_rebuild_sparse_tensor" and len(args) == 2 and type(args[1]) is tuple:
        yield from zip(_sparse_parts(args[0]), args[1], strict=False)
    elif name == "_rebuild_nested_tensor":
        yield from zip(_NESTED, args, strict=False)
    elif name in _PLAIN and args:
        yield None, args[0]
        yield from _attributes(args[3]) if len(args) > 3 else ()
    else:
        yield from enumerate(args)
    if func is not call.func:  # the state that a tensor's type adds
        yield from _attributes(call.args[3]) if len(call.args) > 3 else ()
    if isinstance(call.kwargs, Call):
        yield from call.kwargs.pairs
    yield from _attributes(call.state)
    yield from enumerate(call.items)
    yield from call.pairs


def _sparse_parts(layout: Any) -> tuple[str, ...]:
    text = layout.args[0] if isinstance(layout, Call) and layout.args else layout
    if text in ("torch.sparse_csr", "torch.sparse_bsr"):
        return "crow_indices", "col_indices", "values"
    if text in ("torch.sparse_csc", "torch.sparse_bsc"):
        return "ccol_indices", "row_indices", "values"
    return "indices", "values"


def _attributes(state: Any) -> Iterator[tuple[Any, Any]]:
    """Give the attributes that an object's state sets."""
    if isinstance(state, Call) and state.func == DICT:
        for key, value in state.pairs:
            yield (None if key in _MODULE_PARTS else key), value
    elif (
        type(state) is tuple
        and len(state) == 2
        and all(part is None or (isinstance(part, Call) and part.func == DICT) for part in state)
    ):
        for part in state:  # attributes, and those of __slots__
            yield from _attributes(part)
    else:
        yield None, state
