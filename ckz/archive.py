"""One tensor at a time out of a checkpoint or a .ckz, with random access."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckz.chain import open_snapshot
from ckz.checkpoint import ITEMSIZE, Checkpoint, Tensor
from ckz.values import tensor_values

if TYPE_CHECKING:
    import torch


Bytes = npt.NDArray[np.uint8]


class Archive(Mapping[str, npt.NDArray[np.generic]]):
    """The tensors of an open checkpoint, by name; arrays are read when asked for.

    bfloat16 and fp8 come as ``ml_dtypes``; packed 4-bit types and complex32 as their stored bits.
    """

    def __init__(self, path: Path, base: Path | None = None) -> None:
        self._stack = ExitStack()
        try:
            snapshot = self._stack.enter_context(open_snapshot(path, base=base))
            self.checkpoint: Checkpoint = snapshot.checkpoint
            self._read = snapshot.read
            self._tensors = {tensor.name: tensor for tensor in self.checkpoint.tensors}
        except BaseException:
            self._stack.close()
            raise

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        """Read one tensor: its shape, in native byte order."""
        return tensor_values(self.checkpoint, self._tensors[name], self._read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def info(self, name: str) -> Tensor:
        """Give a tensor's dtype, shape and role without reading it."""
        return self._tensors[name]

    def read_span(self, span: int) -> Bytes:
        """Read the original bytes of one span."""
        out = np.empty(self.checkpoint.spans[span].nbytes, np.uint8)
        self._read(span, 0, out)
        return out

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open(path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None) -> Archive:
    """Open a checkpoint (file or directory) or a .ckz for reading single tensors.

    Parameters
    ----------
    base : of a .ckz that leans on one, if it does not lie beside it.

    Raises
    ------
    CkzError
        If it is damaged or not supported, or its base is not there.
    """
    return Archive(Path(path), None if base is None else Path(base))


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Load all tensors as torch tensors, by name; nothing in the file is executed.

    Tensors that share memory in the checkpoint (tied weights, slices) share it in the result.
    """
    with open(path) as archive:
        storages: dict[int, torch.UntypedStorage] = {}
        return {name: _load(archive, archive.info(name), storages) for name in archive}


def _load(
    archive: Archive, tensor: Tensor, storages: dict[int, torch.UntypedStorage]
) -> torch.Tensor:
    """Make one torch tensor: a view of its storage where it lies there whole, else a copy."""
    import torch

    dtype = getattr(torch, tensor.dtype, torch.uint8)
    itemsize = ITEMSIZE[tensor.dtype]
    spans = archive.checkpoint.spans
    piece = tensor.pieces[0] if len(tensor.pieces) == 1 else None
    if (
        piece is None
        or spans[piece.span].packed
        or (spans[piece.span].byteorder == ">" and itemsize > 1)
        or piece.offset % itemsize
        or piece.shape != tensor.shape
    ):
        copy = torch.empty(tensor.shape, dtype=dtype)
        if copy.numel():
            values = np.ascontiguousarray(archive[tensor.name]).reshape(-1).view(np.uint8)
            copy.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(values))
        return copy
    if piece.span not in storages:
        data = torch.from_numpy(archive.read_span(piece.span))
        storages[piece.span] = data.untyped_storage()
    offset = piece.offset // itemsize
    view: torch.Tensor = torch.empty(0, dtype=dtype).set_(
        storages[piece.span], offset, piece.shape, piece.strides
    )
    if tensor.transform == "conj":
        return view.conj()
    return -view if tensor.transform == "neg" else view
