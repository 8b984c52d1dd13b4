"""Reader of GGUF: values equal the bytes that were written, and no header can break it."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import read_bytes, read_path, same, survives

from ckz.errors import CorruptError
from ckz.formats import gguf

F32, F16, Q8_0, Q4_K, BF16, I64 = 0, 1, 8, 12, 30, 27
UINT8, UINT32, FLOAT32, STRING, ARRAY = 0, 4, 6, 8, 9
TENSORS = [
    ("w", (3, 4), F32, np.arange(12, dtype="f4").tobytes()),
    ("half", (5,), F16, np.arange(5, dtype="f2").tobytes()),
    ("q", (2, 64), Q8_0, bytes(range(136))),
    ("k", (256,), Q4_K, bytes(144)),
    ("i", (3,), I64, np.arange(3, dtype="i8").tobytes()),
    ("none", (0, 4), F32, b""),
]


def string(order: str, text: bytes) -> bytes:
    return struct.pack(order + "Q", len(text)) + text


def metadata(order: str, alignment: int) -> list[bytes]:
    """Key-value pairs of every kind."""
    nested = struct.pack(order + "IQ", ARRAY, 2)
    nested += 2 * (struct.pack(order + "IQ", UINT8, 3) + b"abc")
    words = struct.pack(order + "IQ", STRING, 2) + string(order, b"a") + string(order, b"")
    return [
        string(order, b"general.alignment") + struct.pack(order + "II", UINT32, alignment),
        string(order, b"name") + struct.pack(order + "I", STRING) + string(order, b"a model"),
        string(order, b"words") + struct.pack(order + "I", ARRAY) + words,
        string(order, b"nested") + struct.pack(order + "I", ARRAY) + nested,
        string(order, b"eps") + struct.pack(order + "If", FLOAT32, 1e-5),
        *(
            string(order, f"n{kind}".encode()) + struct.pack(order + "I", kind) + bytes(size)
            for kind, size in ((1, 1), (2, 2), (3, 2), (5, 4), (7, 1), (10, 8), (11, 8), (12, 8))
        ),
    ]


def written(
    tensors: list[tuple[str, tuple[int, ...], int, bytes]],
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
    backwards: bool = False,
) -> bytes:
    """Write a GGUF file as its specification says, in either byte order of numbers and values."""
    pairs = metadata(order, alignment)
    infos, values = b"", b""
    offsets = {}
    for name, _, _, data in tensors[::-1] if backwards else tensors:
        offsets[name] = len(values)
        values += data + bytes(-len(data) % alignment)
    for name, shape, kind, _ in tensors:
        infos += string(order, name.encode()) + struct.pack(order + "I", len(shape))
        infos += struct.pack(f"{order}{len(shape)}Q", *reversed(shape))
        infos += struct.pack(order + "IQ", kind, offsets[name])
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(pairs))
    head += b"".join(pairs) + infos
    return head + bytes(-len(head) % alignment) + values


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 4096])
def test_values_are_those_written(order: str, version: int, alignment: int) -> None:
    numbers = {F32: "f4", F16: "f2", I64: "i8"}
    tensors = [
        (
            name,
            shape,
            kind,
            np.frombuffer(data, numbers[kind]).astype(order + numbers[kind]).tobytes(),
        )
        if kind in numbers
        else (name, shape, kind, data)
        for name, shape, kind, data in TENSORS
    ]
    layout, got = read_bytes(gguf.read, written(tensors, order, version, alignment))
    assert layout.format == "gguf"
    assert not layout.warnings
    assert list(got) == [name for name, *_ in TENSORS]
    for name, shape, kind, data in TENSORS:
        if kind in numbers:
            same(got[name], np.frombuffer(data, numbers[kind]).reshape(shape))
    same(got["q"], np.arange(136, dtype=np.uint8).reshape(2, 68))
    assert got["k"].shape == (144,)
    assert {span.dtype for span in layout.spans} == {"float32", "float16", "int64", "bytes"}


def test_types_have_the_sizes_of_ggml() -> None:
    library = pytest.importorskip("gguf")
    for kind, (elements, nbytes) in library.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":
            assert gguf._TYPES[kind.value][:2] == (elements, nbytes), kind.name


def test_unknown_types_and_versions_are_kept() -> None:
    layout, got = read_bytes(gguf.read, written([("x", (4,), 77, bytes(9)), TENSORS[0]]))
    assert list(got) == ["w"]
    assert "unknown type 77" in layout.warnings[0]
    layout, got = read_bytes(gguf.read, written([], version=1))
    assert layout.warnings == ("GGUF version 1 is not read; kept as it is",)


def test_tensors_need_not_lie_in_the_order_of_the_list() -> None:
    layout, got = read_bytes(gguf.read, written(TENSORS, backwards=True))
    assert list(got) == [name for name, *_ in TENSORS]
    assert layout.tensors[0].pieces[0].span == len(layout.spans) - 1
    same(got["w"], np.arange(12, dtype="f4").reshape(3, 4))
    same(got["i"], np.arange(3))


def test_every_truncation_is_reported() -> None:
    data = written(TENSORS[:2], alignment=1)
    for length in range(4, len(data)):
        with pytest.raises(CorruptError):
            read_bytes(gguf.read, data[:length])


def head(tensors: int, pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest + bytes(256)


def pair(kind: int, rest: bytes) -> bytes:
    return string("<", b"k") + struct.pack("<I", kind) + rest


HUGE = (1 << 64) - 1
NESTED = struct.pack("<IQ", ARRAY, 1) * 50
HOSTILE = [
    head(HUGE, 0),
    head(1 << 18, 0),
    head(0, HUGE),
    head(0, 1 << 16),
    head(0, 1, struct.pack("<Q", HUGE)),
    head(0, 1, struct.pack("<Q", 1 << 17)),
    head(0, 1, pair(STRING, struct.pack("<Q", HUGE))),
    head(0, 1, pair(ARRAY, struct.pack("<IQ", STRING, HUGE))),
    head(0, 1, pair(ARRAY, struct.pack("<IQ", UINT32, HUGE))),
    head(0, 1, pair(ARRAY, NESTED)),
    head(0, 1, pair(13, b"")),
    head(0, 1, string("<", b"general.alignment") + struct.pack("<II", UINT32, 0)),
    head(1, 0, string("<", b"t") + struct.pack("<I", 1 << 30)),
    head(1, 0, string("<", b"t") + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, F32, 0)),
    head(1, 0, string("<", b"t") + struct.pack("<IQIQ", 1, 2, F32, HUGE)),
    head(1, 0, string("<", b"t") + struct.pack("<IQIQ", 1, 33, Q8_0, 0)),
    head(1, 0, string("<", b"t") + struct.pack("<IIQ", 0, Q8_0, 0)),
    written([TENSORS[0], TENSORS[0]]),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_headers(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^file"):
        read_bytes(gguf.read, data)


SAMPLE = written(TENSORS, alignment=8)


@given(
    st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), max_size=4),
    st.just(0) | st.integers(0, len(SAMPLE) - 4),
)
def test_damaged_files(changes: list[tuple[int, int]], cut: int) -> None:
    out = bytearray(SAMPLE)
    for at, byte in changes:
        out[at] = byte
    survives(gguf.read, bytes(out[: len(out) - cut]))


def test_corpus(corpus: Path) -> None:
    (path,) = (corpus / "zoo/gguf").iterdir()
    layout, got = read_path(gguf.read, path)
    assert sum(span.nbytes for span in layout.spans) > 0.9 * path.stat().st_size
    assert got["h.0.out.weight"].shape == (48, 192 // 32 * 34)
    library = pytest.importorskip("gguf")
    tensors = library.GGUFReader(path).tensors
    assert set(got) == {tensor.name for tensor in tensors}
    for tensor in tensors:
        assert got[tensor.name].tobytes() == tensor.data.tobytes()
        assert math.prod(got[tensor.name].shape) == tensor.data.size
