"""What a user should know of the names that a pickle would import, were it loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ckz.formats.pickles import Global

# fmt: off
# Top-level modules through which a pickle runs programs, and builtins that run what they are given.
_DANGEROUS_MODULES = frozenset({
    "asyncio", "bdb", "cProfile", "code", "codeop", "commands", "ctypes", "importlib", "marshal",
    "multiprocessing", "nt", "os", "pdb", "pickle", "pip", "posix", "profile", "pty", "runpy",
    "shutil", "socket", "subprocess", "sys", "timeit", "trace",
    "urllib", "webbrowser",
})
_DANGEROUS_BUILTINS = frozenset({
    "__import__", "apply", "breakpoint", "compile", "delattr", "eval", "exec", "execfile",
    "globals", "input", "locals", "open", "setattr", "vars",
})
# fmt: on
_MAX_LISTED = 20
_MAX_TEXT = 200  # characters of a name


def is_dangerous(name: Global) -> bool:
    """Whether a name is there to run something: no checkpoint needs it."""
    parts = str(name).split(".")
    if parts[0] == "builtins":
        return len(parts) > 1 and parts[1] in _DANGEROUS_BUILTINS
    # Protocol 4 reaches modules through attributes: "torch", "serialization.os.system".
    inner = name.name.split(".")[:-1]
    return parts[0] in _DANGEROUS_MODULES or not _DANGEROUS_MODULES.isdisjoint(inner)


def warnings_of(names: Iterable[Global], is_expected: Callable[[Global], bool]) -> Iterator[str]:
    """Give one line for each dangerous name, and one for all others that are not expected."""
    odd = []
    dangerous = 0
    for name in names:
        # In one line, whatever the file calls it.
        text = str(name)[:_MAX_TEXT].encode("unicode_escape").decode()
        if is_dangerous(name):
            dangerous += 1
            if dangerous > _MAX_LISTED:
                continue
            yield f"dangerous global {text} in the pickle (never executed)"
        elif not is_expected(name):
            odd.append(text)
    if odd:
        more = f" and {len(odd) - _MAX_LISTED} more" if len(odd) > _MAX_LISTED else ""
        yield f"pickle names {', '.join(odd[:_MAX_LISTED])}{more} (never executed)"
