"""Single tensors out of a .ckz, into a safetensors file."""

from __future__ import annotations

import fnmatch
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ckz import atomic
from ckz.archive import open as open_archive
from ckz.checkpoint import ITEMSIZE, Tensor
from ckz.errors import CkzError, UnsupportedError
from ckz.reporting import Report

# What safetensors calls each dtype; the other types it cannot hold.
_NAMES = {
    "bool": "BOOL",
    "bytes": "U8",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}


def extract(
    source: Path,
    output: Path,
    only: Sequence[str],
    *,
    base: Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
) -> Report:
    """Write the tensors whose names match into one safetensors file, one at a time.

    Parameters
    ----------
    source : a .ckz, or a checkpoint.
    base : of a .ckz that leans on one, if it does not lie beside it.
    only : glob patterns; ``*`` also matches dots.

    Raises
    ------
    CkzError
        If nothing matches.
    UnsupportedError
        If a tensor cannot be held by safetensors.
    """
    began = time.perf_counter()
    target = atomic.check_target(output, force)
    with open_archive(source, base=base) as archive:
        chosen = [
            archive.info(name)
            for name in archive
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in only)
        ]
        if not chosen:
            raise CkzError(f"{source}: no tensor matches {', '.join(map(repr, only))}")
        head = header(chosen)
        total = sum(tensor.nbytes for tensor in chosen)
        if not dry_run:
            atomic.check_space(target, len(head) + total)
            needed = f"{len(head) + total} bytes needed"
            mode = source.stat().st_mode & 0o666
            with (
                atomic.explain_full_disk(target, needed),
                atomic.new_file(target, force=force, mode=mode) as temporary,
                temporary.open("wb") as file,
            ):
                file.write(head)
                done = 0
                for tensor in chosen:
                    values = np.ascontiguousarray(archive[tensor.name])
                    file.write(values.reshape(-1).view(np.uint8).data)
                    done += tensor.nbytes
                    if progress:
                        progress(done, total, done)
        return Report(
            source=str(source),
            output=str(output),
            raw_nbytes=len(head) + total,
            stored_nbytes=source.stat().st_size,
            tensors=len(chosen),
            seconds=time.perf_counter() - began,
        )


def header(tensors: Sequence[Tensor]) -> bytes:
    """Give the head of a safetensors file whose tensors lie one behind the other.

    Raises
    ------
    UnsupportedError
        If a tensor cannot be held by safetensors.
    """
    entries = {}
    at = 0
    for tensor in tensors:
        if tensor.dtype not in _NAMES or tensor.name == "__metadata__":
            raise UnsupportedError(
                f"tensor {tensor.name!r} ({tensor.dtype}) cannot be held by a safetensors file; "
                "leave it out, or read it with ckz.open"
            )
        nbytes = math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Readers map the file: data should begin at a multiple of eight.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
