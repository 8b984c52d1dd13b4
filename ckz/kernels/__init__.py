"""Loops over elements, in forms that give the same bytes.

A kernel has a *body*, plain Python over scalars that Numba compiles for a CPU and for CUDA, and a
*vectorized* form in numpy. Numba takes a second to import and load; so small files run vectorized,
and what moves more than ``WORTH`` bytes runs compiled: one pass instead of ten, and without the
interpreter's lock, so that threads do not wait for each other. Where there is a GPU, large ones run
there.

A body loops ``for i in each(n)``: over all elements on a CPU, over its share in a thread of a GPU.
What threads do to one place together goes through ``add``, ``raise_to`` and ``lower_to``, which are
atomic there; sums are of integers, so their order does not matter. Only integer arithmetic and
float add, sub, div and sqrt may stand in a body, and ``times`` for products that are added to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

WORTH = 1 << 30

VECTORIZED, COMPILED, CUDA = range(3)
_form = VECTORIZED

each = range
# Numba's module, bound where a body is compiled for CUDA.
cuda: Any = None


def add(array: Any, index: Any, value: Any) -> None:
    """Add to a place that several threads may add to."""
    array[index] += value


def raise_to(array: Any, index: Any, value: Any) -> None:
    """Make a place at least as large."""
    array[index] = max(array[index], value)


def lower_to(array: Any, index: Any, value: Any) -> None:
    """Make a place at most as large."""
    array[index] = min(array[index], value)


def times(a: Any, b: Any) -> Any:
    """Multiply two float32; a GPU, too, rounds the product before anything is added to it."""
    return a * b


SHARED = (add, raise_to, lower_to, times)


def enable(nbytes: int, device: str = "cpu") -> None:
    """Choose how to run from here on; results stay the same.

    Parameters
    ----------
    nbytes : about how many are to be moved; compiling must be worthwhile.
    device : ``cpu``, ``cuda``, or ``auto``: CUDA if there is one and it is worthwhile.

    Raises
    ------
    CkzError
        If there is no CUDA device and ``cuda`` asks for it.
    """
    global _form  # a switch of speed only, so nobody has to hand it around
    if device == "cuda" or (device == "auto" and nbytes >= WORTH):
        from ckz.kernels.device import require, why_not

        if device == "cuda":
            require()
        if not why_not():
            _form = CUDA
            return
        logging.getLogger("ckz").info("  on the CPU: %s", why_not())
    if _form == CUDA or (_form == VECTORIZED and nbytes >= WORTH):
        _form = COMPILED if nbytes >= WORTH else VECTORIZED


def on_device() -> bool:
    """Whether kernels run on a GPU now."""
    return _form == CUDA


def bound(function: Callable[..., Any], names: dict[str, Any]) -> Callable[..., Any]:
    """Give a function in which some of its module's names mean something else."""
    assert isinstance(function, FunctionType)
    used = {key: value for key, value in names.items() if key in function.__code__.co_names}
    if not used:
        return function
    made = FunctionType(
        function.__code__,
        {**function.__globals__, **used},
        function.__name__,
        function.__defaults__,
    )
    made.__qualname__ = function.__qualname__
    return made


class Kernel:
    """A function in its forms; calling it runs the one that is enabled.

    Attributes
    ----------
    body, vectorized : the forms; what cannot be vectorized is always compiled.
    outputs : how many of the last arguments are written; on a GPU, arrays of the host are copied
        there and these back. 0: there is no form for it.
    updates : whether these are read, too.
    for_gpu : a body only for CUDA devices, where the plain one is slow; the simulator runs that.
    in_numpy : whether numpy is as fast on a CPU as compiled code.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        vectorized: Callable[..., Any] | None,
        *,
        outputs: int = 0,
        updates: bool = False,
        for_gpu: Callable[..., Any] | None = None,
        in_numpy: bool = False,
    ) -> None:
        self.body = body
        self.vectorized = vectorized
        self.outputs = outputs
        self.updates = updates
        self.for_gpu = for_gpu
        self.in_numpy = in_numpy

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        """The body as Numba compiles it for the CPU; cached on disk."""
        import numba

        used = [f for f in SHARED if f.__name__ in self.body.__code__.co_names]
        body = bound(self.body, {f.__name__: numba.njit(f) for f in used})
        try:
            function: Callable[..., Any] = numba.njit(body, nogil=True, cache=True)
        except RuntimeError:  # nowhere to write the cache: a read-only installation
            function = numba.njit(body, nogil=True)
        return function

    def __call__(self, *args: Any) -> Any:
        """Run the enabled form."""
        if _form == CUDA and self.outputs:
            from ckz.kernels.device import launch

            return launch(self, args)
        if self.vectorized and (_form == VECTORIZED or self.in_numpy):
            return self.vectorized(*args)
        return self.compiled(*args)
