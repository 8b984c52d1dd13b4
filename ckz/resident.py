"""Tensors in memory, compressed as the safetensors file that they would make.

Tensors may be torch's, numpy's, or any that lies on a CUDA device and says so. Of those on a device
chunk after chunk comes to the host, for its checksum; what kernels work on there is the tensor
itself, and what comes back is what they made of it.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckz.checkpoint import ITEMSIZE
from ckz.errors import UsageError
from ckz.formats.safetensors import CODES
from ckz.kernels.device import Twin, is_on_device, why_not
from ckz.streams import Extent

Bytes = npt.NDArray[np.uint8]
State = Mapping[str, Any]

_ALIGNMENT = 8


class Resident(NamedTuple):
    """A safetensors file that is not there.

    Attributes
    ----------
    header : its first bytes.
    starts : where each tensor begins in the file.
    arrays : their bytes, on the host or on a device.
    """

    header: bytes
    starts: list[int]
    arrays: list[Any]

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.header) + sum(int(array.size) for array in self.arrays)

    def read(self, extents: Sequence[Extent], out: Bytes) -> None:
        """Fill ``out`` from extents laid end to end."""
        at = 0
        for extent in extents:
            offset, stop = extent.offset, extent.offset + extent.nbytes
            while offset < stop:
                number = bisect.bisect_right(self.starts, offset) - 1
                run: Any
                if number < 0:
                    run = np.frombuffer(self.header, np.uint8)[offset:stop]
                else:
                    first = offset - self.starts[number]
                    run = self.arrays[number][first : first + stop - offset]
                if is_on_device(run):
                    run.copy_to_host(out[at : at + run.size])
                else:
                    out[at : at + run.size] = run
                at += run.size
                offset += run.size

    def beside(self, extents: Sequence[Extent], chunk: Bytes) -> Bytes:
        """Tell a chunk that was read where it lies on a device, if it does."""
        if len(extents) != 1:
            return chunk
        number = bisect.bisect_right(self.starts, extents[0].offset) - 1
        if number < 0 or not is_on_device(self.arrays[number]):
            return chunk
        first = extents[0].offset - self.starts[number]
        there = self.arrays[number][first : first + chunk.size]
        return Twin.of(chunk, there) if there.size == chunk.size else chunk


@contextmanager
def as_file(state: State, output: Path) -> Iterator[tuple[Path, Resident]]:
    """Give a file of the right name, header and size, without contents, and what reads these.

    Parameters
    ----------
    state : tensors by name, and mappings or sequences of such; names are joined by dots. Numbers
        and words among them become the file's metadata.

    Raises
    ------
    UsageError
        If something is neither, or of a dtype that safetensors does not have.
    """
    found = _lay_out(state)
    name = output.name.removesuffix(".ckz")
    name = name if name.endswith(".safetensors") else f"{name}.safetensors"
    with TemporaryDirectory(prefix=".ckz-", dir=output.parent) as folder:
        path = Path(folder) / name
        with path.open("wb") as file:
            file.write(found.header)
            file.truncate(found.nbytes)
        yield path, found


def _lay_out(state: State) -> Resident:
    header: dict[str, Any] = {}
    words: dict[str, str] = {}
    arrays: list[Any] = []
    end = 0
    for name, value in _flat(state, ""):
        if value is None or isinstance(value, bool | int | float | str):
            words[name] = value if isinstance(value, str) else json.dumps(value)
            continue
        dtype, shape, data = _bytes_of(name, value)
        if dtype not in CODES:
            raise UsageError(f"{name}: safetensors has no {dtype}")
        if name in header or name == "__metadata__":
            raise UsageError(f"{name}: two tensors would have this name, or it has another meaning")
        header[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + data.size],
        }
        arrays.append(data)
        end += data.size
    if words:
        header["__metadata__"] = words
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    starts, at = [], 8 + len(text)
    for array in arrays:
        starts.append(at)
        at += array.size
    return Resident(len(text).to_bytes(8, "little") + text, starts, arrays)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Give everything in mappings and sequences by its dotted name."""
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        yield name, value
        return
    for key, inner in items:
        yield from _flat(inner, f"{name}.{key}" if name else key)


def _bytes_of(name: str, value: Any) -> tuple[str, tuple[int, ...], Any]:
    """Give a tensor's dtype, shape, and bytes; on a device they stay there."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return array.dtype.name, np.shape(value), array.reshape(-1).view(np.uint8)
    if hasattr(value, "detach"):
        return _bytes_of_torch(name, value)
    if hasattr(value, "__cuda_array_interface__") or is_on_device(value):
        array = value if is_on_device(value) else _as_device_array(value)
        if not array.is_c_contiguous():
            raise UsageError(f"{name}: not contiguous on its device; copy it first")
        flat = array.reshape(math.prod(array.shape))
        return np.dtype(array.dtype).name, tuple(array.shape), flat.view(np.uint8)
    raise UsageError(f"{name}: {type(value).__name__} is no tensor, number or word")


def _bytes_of_torch(name: str, tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UsageError(f"{name}: only dense tensors have bytes to save")
    dtype = str(tensor.dtype).removeprefix("torch.")
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dtype not in ITEMSIZE or dtype not in CODES:
        raise UsageError(f"{name}: safetensors has no {dtype}")
    flat = whole.reshape(-1).view(torch.uint8)
    if flat.is_cuda and flat.device.index == 0 and not why_not():
        # Other streams know nothing of what torch has still to do.
        torch.cuda.current_stream(flat.device).synchronize()
        return dtype, tuple(tensor.shape), _as_device_array(flat)
    return dtype, tuple(tensor.shape), flat.cpu().numpy()


def _as_device_array(value: Any) -> Any:
    from numba import cuda

    return cuda.as_cuda_array(value)
