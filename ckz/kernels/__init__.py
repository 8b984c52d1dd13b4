"""Loops over elements, in two forms that give the same bytes.

A kernel has a *body*, plain Python over scalars that Numba compiles, and a *vectorized* form in
numpy. Numba takes a second to import and load; so small files run vectorized, and what moves more
than ``WORTH`` bytes runs compiled: one pass instead of ten, and without the interpreter's lock, so
that threads do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

WORTH = 1 << 30

_compiled = False


def enable(nbytes: int) -> None:
    """Run compiled from here on if so many bytes make that worthwhile; results stay the same."""
    global _compiled  # a switch of speed only, so nobody has to hand it around
    _compiled = _compiled or nbytes >= WORTH


class Kernel:
    """A function in its two forms; calling it runs the one that is enabled."""

    def __init__(self, body: Callable[..., Any], vectorized: Callable[..., Any]) -> None:
        self.body = body
        self.vectorized = vectorized

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The body as Numba compiles it; cached on disk."""
        import numba

        try:
            function: Callable[..., Any] = numba.njit(self.body, nogil=True, cache=True)
        except RuntimeError:  # nowhere to write the cache: a read-only installation
            function = numba.njit(self.body, nogil=True)
        return function

    def __call__(self, *args: Any) -> Any:
        """Run the enabled form."""
        return self.compiled(*args) if _compiled else self.vectorized(*args)
