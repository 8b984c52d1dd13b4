"""A static reading of pickles: what one describes, as inert records. Nothing is run or imported.

A pickle is a program for a small stack machine. Here every instruction that would look up or call
something only notes that it would. Instructions that occur once a tensor are decoded in place; the
rest have their arguments read by the standard library's ``pickletools``.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ckz.errors import CorruptError, UnsupportedError
from ckz.source import Source

MAX_PICKLE = 256 << 20
_MAX_OBJECTS = 16 << 20  # a million tensors take as many
_FIRST_WINDOW = 1 << 20
_LONGEST = 9  # bytes of the longest instruction of fixed length


class Global(NamedTuple):
    """A name that the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class PersistentId(NamedTuple):
    """A reference to something outside of the pickle; torch's storages are such."""

    value: Any


class Call:
    """An object that the pickle would make by a call, and what it would then put into it.

    Attributes
    ----------
    func : usually a ``Global``; ``DICT`` and ``SET`` for plain dicts and sets.
    args : of the call.
    kwargs : a ``DICT`` record, or None.
    state : what ``__setstate__`` would get, or None.
    items : what would be appended or added.
    pairs : keys and values that would be set, in order; a key may stand there twice.
    """

    __slots__ = ("args", "func", "items", "kwargs", "pairs", "state")

    def __init__(self, func: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        # Most never get any: 100,000 tensors would make 400,000 empty lists.
        self.items: Sequence[Any] = ()
        self.pairs: Sequence[tuple[Any, Any]] = ()

    def add_items(self, items: Iterable[Any]) -> None:
        """Append to ``items``."""
        self.items = self.items or []
        self.items.extend(items)  # type: ignore[attr-defined]

    def add_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Append to ``pairs``."""
        self.pairs = self.pairs or []
        self.pairs.extend(pairs)  # type: ignore[attr-defined]

    def get(self, key: str, default: Any = None) -> Any:
        """Give the last value set for a key, as the dict would."""
        for name, value in reversed(self.pairs):
            if type(name) is str and name == key:
                return value
        return default


DICT = Global("builtins", "dict")
SET = Global("builtins", "set")
FROZENSET = Global("builtins", "frozenset")


class Pickle(NamedTuple):
    """What a pickle describes.

    Attributes
    ----------
    value : built of None, bool, int, float, str, bytes, list, tuple and the records above; it may
        contain itself, and be nested to any depth.
    globals : every name that loading it would import, in order of appearance.
    persistent_ids : in order; torch's are one a tensor.
    end : bytes up to and including its last instruction.
    """

    value: Any
    globals: tuple[Global, ...]
    persistent_ids: tuple[PersistentId, ...]
    end: int


class _EndsEarly(Exception):
    """The buffer ends before the pickle does."""


def read_pickle(source: Source, offset: int = 0) -> Pickle:
    """Read the pickle at ``offset`` of a source; what follows it is not looked at.

    Raises
    ------
    CorruptError
        If it is damaged or ends early.
    UnsupportedError
        If it is larger than 256 MiB or describes more than 16 million objects.
    """
    rest = source.size - offset
    window = _FIRST_WINDOW
    while True:
        data = source.read(offset, max(0, min(window, rest)))
        try:
            return _run(data, source.name)
        except _EndsEarly as err:
            if window >= rest:
                raise CorruptError(f"{source.name}: its pickle ends early; truncated") from err
            if window >= MAX_PICKLE:
                raise UnsupportedError(
                    f"{source.name}: pickles of more than {MAX_PICKLE >> 20} MiB are not read"
                ) from err
        window *= 8


def parse(data: bytes, name: str) -> Pickle:
    """Read the pickle that ``data`` begins with; errors are as those of ``read_pickle``."""
    try:
        return _run(data, name)
    except _EndsEarly as err:
        raise CorruptError(f"{name}: its pickle ends early; truncated") from err


def _run(data: bytes, name: str) -> Pickle:
    """Run the stack machine over a buffer."""
    stack: list[Any] = []
    push, pop = stack.append, stack.pop
    marks: list[int] = []
    memo: dict[int, Any] = {}  # never a list: the file chooses the numbers
    found: dict[Global, None] = {}
    persistent: list[PersistentId] = []
    stream = io.BytesIO(data)
    uint32 = struct.Struct("<I").unpack_from
    # A byte makes a few objects at most; and counting takes long where there are many already.
    counted = len(data) > _MAX_OBJECTS // 8
    blocks = sys.getallocatedblocks() if counted else 0
    protocol = 0
    at = 0
    try:
        while True:
            made = sys.getallocatedblocks() - blocks if counted else 0
            if made + len(memo) + len(stack) > _MAX_OBJECTS:
                raise UnsupportedError(f"{name}: its pickle describes too many objects to read")
            for _ in range(1 << 18):
                op = data[at]
                at += 1
                if op == 0x72:  # LONG_BINPUT
                    memo[uint32(data, at)[0]] = stack[-1]
                    at += 4
                elif op == 0x68:  # BINGET
                    push(memo[data[at]])
                    at += 1
                elif op == 0x4B:  # BININT1
                    push(data[at])
                    at += 1
                elif op == 0x28:  # MARK
                    marks.append(len(stack))
                elif op == 0x58:  # BINUNICODE
                    end = at + 4 + uint32(data, at)[0]
                    if end > len(data):
                        raise _EndsEarly
                    push(data[at + 4 : end].decode("utf-8", "surrogatepass"))
                    at = end
                elif op == 0x74:  # TUPLE
                    mark = marks.pop()
                    stack[mark:] = [tuple(stack[mark:])]
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x52:  # REDUCE
                    args = pop()
                    stack[-1] = Call(stack[-1], args if type(args) is tuple else (args,))
                elif op == 0x51:  # BINPERSID
                    stack[-1] = PersistentId(stack[-1])
                    persistent.append(stack[-1])
                elif op == 0x89:  # NEWFALSE
                    push(False)
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x6A:  # LONG_BINGET
                    push(memo[uint32(data, at)[0]])
                    at += 4
                elif op == 0x71:  # BINPUT
                    memo[data[at]] = stack[-1]
                    at += 1
                elif op == 0x94:  # MEMOIZE
                    memo[len(memo)] = stack[-1]
                elif op == 0x4D:  # BININT2
                    push(data[at] | data[at + 1] << 8)
                    at += 2
                elif op == 0x86:  # TUPLE2
                    stack[-2:] = [(stack[-2], stack[-1])]
                elif op == 0x4A:  # BININT
                    push(int.from_bytes(data[at : at + 4], "little", signed=True))
                    at += 4
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = at + 1 + data[at]
                    push(data[at + 1 : end].decode("utf-8", "surrogatepass"))
                    at = end
                elif op == 0x7D:  # EMPTY_DICT
                    push(Call(DICT))
                elif op == 0x5D:  # EMPTY_LIST
                    push([])
                elif op == 0x73:  # SETITEM
                    value = pop()
                    key = pop()
                    stack[-1].add_pairs([(key, value)])
                elif op == 0x75:  # SETITEMS
                    mark = marks.pop()
                    pairs = zip(stack[mark::2], stack[mark + 1 :: 2], strict=True)
                    stack[mark - 1].add_pairs(pairs)
                    del stack[mark:]
                elif op == 0x61:  # APPEND
                    value = pop()
                    _extend(stack[-1], [value])
                elif op in (0x65, 0x90):  # APPENDS, ADDITEMS
                    mark = marks.pop()
                    _extend(stack[mark - 1], stack[mark:])
                    del stack[mark:]
                elif op == 0x87:  # TUPLE3
                    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                elif op == 0x4E:  # NONE
                    push(None)
                elif op == 0x88:  # NEWTRUE
                    push(True)
                elif op == 0x47:  # BINFLOAT
                    push(struct.unpack_from(">d", data, at)[0])
                    at += 8
                elif op == 0x8A:  # LONG1
                    end = at + 1 + data[at]
                    push(int.from_bytes(data[at + 1 : end], "little", signed=True))
                    at = end
                elif op == 0x2E:  # STOP
                    return Pickle(pop(), tuple(found), tuple(persistent), at)
                elif op == 0x80:  # PROTO
                    protocol = data[at]
                    at += 1
                elif op == 0x63:  # GLOBAL
                    middle = data.find(b"\n", at)
                    end = data.find(b"\n", middle + 1)
                    if middle < 0 or end < 0:
                        raise _EndsEarly
                    module, attribute = data[at:middle].decode(), data[middle + 1 : end].decode()
                    push(_modern(module, attribute) if protocol < 3 else Global(module, attribute))
                    found[stack[-1]] = None
                    at = end + 1
                elif op == 0x93:  # STACK_GLOBAL
                    attribute = pop()
                    stack[-1] = Global(str.__str__(stack[-1]), str.__str__(attribute))
                    found[stack[-1]] = None
                else:
                    stream.seek(at)
                    _rare(op, stream, stack, marks, memo, found)
                    at = stream.tell()
    except _DAMAGE as err:
        if max(at, stream.tell()) + _LONGEST > len(data):
            raise _EndsEarly from err
        raise CorruptError(f"{name}: its pickle is damaged at byte {at}") from err


_DAMAGE = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    UnicodeError,
    ValueError,
    struct.error,
)

# fmt: off
# Instructions that only push their argument.
_LITERALS = frozenset({
    "INT", "LONG", "LONG4", "FLOAT", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
})
# fmt: on


def _rare(
    op: int,
    stream: io.BytesIO,
    stack: list[Any],
    marks: list[int],
    memo: dict[int, Any],
    found: dict[Global, None],
) -> None:
    """Do one instruction that is not worth its place in the loop of ``_run``."""
    import pickletools

    info = pickletools.code2op[chr(op)]  # type: ignore[attr-defined]
    if info.name == "STRING":  # of Python 2; its escapes stay as they are
        stack.append(stream.readline().strip()[1:-1].decode("latin-1"))
        return
    argument: Any = info.arg.reader(stream) if info.arg else None
    kind = info.name
    if kind in _LITERALS:
        stack.append(argument)
    elif kind == "FRAME":
        pass  # the frame's instructions follow
    elif kind == "PUT":
        memo[argument] = stack[-1]
    elif kind == "GET":
        stack.append(memo[argument])
    elif kind == "PERSID":
        stack.append(PersistentId(argument))
    elif kind == "EMPTY_SET":
        stack.append(Call(SET))
    elif kind in ("LIST", "DICT", "FROZENSET", "INST", "OBJ", "POP_MARK"):
        mark = marks.pop()
        values = stack[mark:]
        del stack[mark:]
        _from_mark(kind, values, argument, stack, found)
    elif kind == "NEWOBJ":
        args = stack.pop()
        stack[-1] = Call(stack[-1], tuple(args))
    elif kind == "NEWOBJ_EX":
        kwargs = stack.pop()
        args = stack.pop()
        stack[-1] = Call(stack[-1], tuple(args), kwargs)
    elif kind == "BUILD":
        state = stack.pop()
        if isinstance(stack[-1], Call):
            stack[-1].state = state
    elif kind == "DUP":
        stack.append(stack[-1])
    elif kind == "POP":
        if marks and marks[-1] == len(stack):
            marks.pop()
        else:
            stack.pop()
    elif kind in ("EXT1", "EXT2", "EXT4"):
        stack.append(Global("copyreg", f"extension {argument}"))
        found[stack[-1]] = None
    elif kind == "NEXT_BUFFER":
        stack.append(Global("pickle", "out-of-band buffer"))
    elif kind != "READONLY_BUFFER":
        raise ValueError(kind)


def _from_mark(
    kind: str, values: list[Any], argument: Any, stack: list[Any], found: dict[Global, None]
) -> None:
    """Make one object of all values above the last mark."""
    if kind == "LIST":
        stack.append(values)
    elif kind == "DICT":
        stack.append(Call(DICT))
        stack[-1].add_pairs(zip(values[::2], values[1::2], strict=True))
    elif kind == "FROZENSET":
        stack.append(Call(FROZENSET))
        stack[-1].add_items(values)
    elif kind == "INST":
        func = _modern(*argument.split(" ", 1))
        found[func] = None
        stack.append(Call(func, tuple(values)))
    elif kind == "OBJ":
        stack.append(Call(values[0], tuple(values[1:])))


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, Call):
        target.add_items(values)
    elif isinstance(target, list):
        target.extend(values)
    else:
        raise TypeError("only lists and objects are added to")


def _modern(module: str, name: str) -> Global:
    """Give today's name of what protocols 0 to 2 call as Python 2 did: ``__builtin__.set``."""
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    module, name = NAME_MAPPING.get((module, name), (module, name))
    return Global(IMPORT_MAPPING.get(module, module), name)
