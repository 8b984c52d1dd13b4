"""Running kernels on a CUDA device: what there is, copies, buffers and launches.

Every thread has a stream of its own, pinned memory that its copies go through, and buffers on the
device that it uses again and again. So the copies and kernels of one chunk overlap those of others
and their entropy coding, and a thread takes no more than its buffers: some sixteen of a chunk each.

``NUMBA_ENABLE_CUDASIM=1`` puts Numba's simulator in the place of a device: slow, for tests.

libNVVM fuses a product and a sum into one instruction that rounds once; ``times`` keeps it from
that, and a test looks for such instructions in what all kernels compile to.
"""

from __future__ import annotations

import ctypes.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz import kernels
from ckz.errors import CkzError
from ckz.kernels import Kernel, buffers, cuda

Array = npt.NDArray[Any]

_THREADS = 256
# Enough to fill any device; threads take several elements each.
_BLOCKS = 4096
# The simulator starts a thread for each.
_SIMULATED = 2, 4

_local = threading.local()
_one_at_a_time = threading.Lock()


class Device(NamedTuple):
    """What there is: its name, bytes of memory, compute capability."""

    name: str
    nbytes: int
    capability: tuple[int, int]


def is_simulated() -> bool:
    """Whether Numba's simulator stands in for a device."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


@cache
def why_not() -> str:
    """Give the reason why no CUDA device can be used; empty if one can."""
    if not find_spec("numba_cuda"):
        return "numba-cuda is not installed: pip install 'ckz[cuda]'"
    if is_simulated():
        return ""
    # Numba's module takes most of a second, which nobody without a driver should wait for.
    if not ctypes.util.find_library("cuda") and not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110
        return "no NVIDIA driver is found"
    from numba import cuda

    try:
        if cuda.is_available() and cuda.gpus:
            return ""
    except Exception as error:  # whatever a driver says
        return f"the driver does not start: {str(error).splitlines()[0]}"
    return "the driver finds no device"


def require() -> None:
    """Raise ``CkzError`` if no CUDA device can be used."""
    if reason := why_not():
        raise CkzError(f"--device cuda: {reason}; --device cpu gives the same bytes")


def describe() -> Device | None:
    """Give the device that would be used, if there is one."""
    if why_not():
        return None
    from numba import cuda

    if is_simulated():
        return Device("Numba's simulator", 0, (0, 0))
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    nbytes = int(cuda.current_context().get_memory_info()[1])
    return Device(name, nbytes, tuple(device.compute_capability))


def _each(n: Any) -> Any:
    return range(cuda.grid(1), n, cuda.gridsize(1))


def _add(array: Any, index: Any, value: Any) -> None:
    cuda.atomic.add(array, index, value)


def _raise_to(array: Any, index: Any, value: Any) -> None:
    cuda.atomic.max(array, index, value)


def _lower_to(array: Any, index: Any, value: Any) -> None:
    cuda.atomic.min(array, index, value)


def _times(a: Any, b: Any) -> Any:
    return cuda.libdevice.fmul_rn(a, b)


@cache
def _shared() -> dict[str, Any]:
    """Give what the names that threads share mean on a device."""
    from numba import cuda

    shared: dict[str, Any] = {
        "each": _each,
        "add": _add,
        "raise_to": _raise_to,
        "lower_to": _lower_to,
    }
    if not is_simulated():
        shared["times"] = _times
    # Inlined: a function of its own could only be compiled where there is a device.
    inlined = cuda.jit(device=True, inline="always")
    found = {name: inlined(kernels.bound(f, {"cuda": cuda})) for name, f in shared.items()}
    return {**found, "cuda": cuda}


def for_cuda(kernel: Kernel, *, simulated: bool | None = None) -> Any:
    """Give the function that ``cuda.jit`` compiles."""
    simulated = is_simulated() if simulated is None else simulated
    body = kernel.body if simulated or not kernel.for_gpu else kernel.for_gpu
    return kernels.bound(body, _shared())


@cache
def _compiled(kernel: Kernel) -> Any:
    from numba import cuda

    return cuda.jit(for_cuda(kernel))


def _stream() -> Any:
    if not hasattr(_local, "stream"):
        from numba import cuda

        _local.stream = cuda.stream()
        _local.pinned, _local.buffers, _local.copying = {}, {}, set()
    return _local.stream


def is_on_device(array: Any) -> bool:
    """Tell arrays of the device from those of the host."""
    return not isinstance(array, np.ndarray) and hasattr(array, "copy_to_host")


class Twin(np.ndarray[Any, Any]):
    """Bytes of the host that lie on the device, too; ``put`` need not copy them there.

    Views know of them as well; only one of all the bytes has its twin.
    """

    there: tuple[int, Any] | None

    @classmethod
    def of(cls, array: Array, there: Any) -> Twin:
        """Give an array that knows its twin; nobody may write to it."""
        made = array.view(cls)
        made.there = array.ctypes.data, there
        return made

    def __array_finalize__(self, made_from: Any) -> None:
        self.there = getattr(made_from, "there", None)


def _twin(array: Any) -> Any:
    address, there = getattr(array, "there", None) or (0, None)
    if there is None or address != array.ctypes.data or there.size != array.nbytes:
        return None
    return there.view(array.dtype)


def _room(kept: dict[str, Any], key: str, nbytes: int, make: Any) -> Any:
    if key not in kept or kept[key].size < nbytes:
        kept[key] = make(max(nbytes, 1), np.uint8)
    return kept[key]


def room(key: str, n: int, dtype: Any = np.uint8) -> Any:
    """Give this thread's buffer of a name where kernels run; see ``buffers.scratch``."""
    if not kernels.on_device():
        return buffers.scratch(key, n, dtype)
    from numba import cuda

    _stream()
    nbytes = n * np.dtype(dtype).itemsize
    with _explained():
        return _room(_local.buffers, key, nbytes, cuda.device_array)[:nbytes].view(dtype)


def _pinned(key: str, n: int, dtype: Any) -> Array:
    from numba import cuda

    nbytes = n * np.dtype(dtype).itemsize
    made: Array = _room(_local.pinned, key, nbytes, cuda.pinned_array)[:nbytes].view(dtype)
    return made


def put(key: str, array: Any) -> Any:
    """Bring an array to where kernels run; the name tells its buffer from others."""
    if not kernels.on_device() or is_on_device(array):
        return array
    if (twin := _twin(array)) is not None:
        return twin
    with _explained():
        stream = _stream()
        there = room(f"put {key}", array.size, array.dtype)
        if array.size:
            if key in _local.copying:  # or what is still being read would change
                _wait(stream)
            staged = _pinned(f"put {key}", array.size, array.dtype)
            staged[:] = array
            there.copy_to_device(staged, stream=stream)
            _local.copying.add(key)
        return there


@contextmanager
def _explained() -> Iterator[None]:
    """Make errors of the driver, such as of memory that is full, ours."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("numba", "numba_cuda", "cuda"):
            raise
        said = str(error).partition("\n")[0]
        raise CkzError(f"the GPU fails: {said}; --device cpu gives the same bytes") from error


def _wait(stream: Any) -> None:
    stream.synchronize()
    _local.copying.clear()


def get(key: str, array: Any) -> Array:
    """Bring an array back to the host; valid until the name is used again."""
    if not is_on_device(array):
        found: Array = array
        return found
    with _explained():
        stream = _stream()
        staged = _pinned(f"get {key}", array.size, array.dtype)
        if array.size:
            array.copy_to_host(staged, stream=stream)
        _wait(stream)
    return staged


def launch(kernel: Kernel, args: tuple[Any, ...]) -> None:
    """Run a kernel on the device; arrays of the host go there, and those written come back."""
    outputs = range(len(args) - kernel.outputs, len(args))
    there = []
    for number, arg in enumerate(args):
        if not isinstance(arg, np.ndarray):
            there.append(arg)
        elif number in outputs and not kernel.updates:
            there.append(room(f"argument {number}", arg.size, arg.dtype))
        else:
            there.append(put(f"argument {number}", arg))
    sizes = [arg.size for arg in there if is_on_device(arg)]
    if not max(sizes, default=0):
        return
    shape = (-(-max(sizes) // _THREADS), _THREADS)
    shape = _SIMULATED if is_simulated() else (min(shape[0], _BLOCKS), _THREADS)
    # The simulator runs one kernel at a time, in whatever thread.
    with _explained(), _one_at_a_time if is_simulated() else nullcontext():
        _compiled(kernel)[*shape, _stream()](*there)
    for number in outputs:
        if isinstance(args[number], np.ndarray) and args[number].size:
            args[number][:] = get(f"argument {number}", there[number])
