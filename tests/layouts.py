"""The values of a layout, read through its pieces; shared by the tests of the readers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ckz.checkpoint import Checkpoint, File, check_layout
from ckz.errors import CkzError
from ckz.formats.layout import Layout
from ckz.source import Source
from ckz.values import Bytes, tensor_values

Read = Callable[[Source], Layout]


def read_bytes(read: Read, data: bytes) -> tuple[Layout, dict[str, np.ndarray]]:
    """Read a file of the given bytes: its layout, checked, and the values of its tensors."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        # The file goes on behind the source, so that a read out of bounds would succeed.
        file.write(b"\xa5" * 4096)
        file.flush()
        source = Source("file", file.fileno(), 0, len(data))
        layout = read(source)
        return layout, values(source, layout)


def read_path(read: Read, path: Path) -> tuple[Layout, dict[str, np.ndarray]]:
    fd = os.open(path, os.O_RDONLY)
    try:
        source = Source(str(path), fd, 0, path.stat().st_size)
        layout = read(source)
        return layout, values(source, layout)
    finally:
        os.close(fd)


def values(source: Source, layout: Layout) -> dict[str, np.ndarray]:
    file = File("file", source.size)
    checkpoint = Checkpoint(Path("file"), layout.format, (file,), layout.spans, layout.tensors)
    check_layout(checkpoint)

    def read_span(span: int, offset: int, out: Bytes) -> None:
        assert offset + out.size <= layout.spans[span].nbytes
        source.read_into(layout.spans[span].offset + offset, memoryview(out))

    return {tensor.name: tensor_values(checkpoint, tensor, read_span) for tensor in layout.tensors}


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare bit for bit, in native byte order."""
    native = np.asarray(expected).astype(np.asarray(expected).dtype.newbyteorder("="))
    assert (got.dtype, got.shape) == (native.dtype, native.shape)
    assert got.tobytes() == native.tobytes()


def survives(read: Read, data: bytes) -> None:
    """Whatever the bytes are, the reader answers or says what is wrong in one line."""
    message = ""
    try:
        read_bytes(read, data)
    except CkzError as err:
        message = str(err)
    assert "\n" not in message
