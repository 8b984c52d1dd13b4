"""safetensors: every dtype, every rule of its header, and damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings

from ckz.checkpoint import contiguous_strides
from ckz.errors import CkzError, CorruptError
from ckz.formats import read_checkpoint
from ckz.formats.safetensors import _DTYPES


def write(path: Path, header: Any, data: bytes = b"", pad: bytes = b"") -> Path:
    """Write a file with any header, given as text or as what JSON makes text of."""
    text = header if isinstance(header, str) else json.dumps(header)
    raw = text.encode() + pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_values_are_where_the_library_put_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "f32": rng.normal(size=(3, 5)).astype("f4"),
        "bf16": rng.normal(size=(2, 3, 4)).astype(ml_dtypes.bfloat16),
        "fp8": rng.normal(size=7).astype(ml_dtypes.float8_e4m3fn),
        "bool": rng.random(9) > 0.5,
        "u64": np.array(2**64 - 1, "u8"),
        "empty": np.zeros((3, 0, 2), "f8"),
        "also empty": np.zeros(0, "f4"),
        "ключ\n": np.ones(1, "i2"),
        "": np.ones(2, "f2"),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    checkpoint, data = read_checkpoint(path), path.read_bytes()
    assert checkpoint.format == "safetensors"
    assert {tensor.name for tensor in checkpoint.tensors} == set(arrays)
    for tensor in checkpoint.tensors:
        array = arrays[tensor.name]
        assert (tensor.dtype, tensor.shape) == (str(array.dtype), array.shape)
        assert len(tensor.pieces) == bool(array.size)
        for piece in tensor.pieces:
            span = checkpoint.spans[piece.span]
            assert (span.dtype, piece.offset) == (tensor.dtype, 0)
            assert piece.strides == contiguous_strides(array.shape)
            assert data[span.offset : span.offset + span.nbytes] == array.tobytes()
    assert sum(span.nbytes for span in checkpoint.spans) == sum(a.nbytes for a in arrays.values())


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    known = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    path = tmp_path / "one.safetensors"
    seen = set()
    for dtype in set(known):
        zeros = torch.zeros(2, 4, dtype=torch.uint8)
        try:
            safetensors.torch.save_file({"w": zeros.view(dtype)}, path)
        except (KeyError, RuntimeError, ValueError, safetensors.SafetensorError):
            continue
        checkpoint = read_checkpoint(path)
        (tensor,) = checkpoint.tensors
        assert f"torch.{tensor.dtype}" == str(dtype)
        assert tensor.nbytes == 8
        assert not checkpoint.warnings
        seen.add(tensor.dtype)
    assert {"bfloat16", "float8_e5m2", "float8_e8m0fnu", "uint16", "float4_e2m1fn_x2"} <= seen


@pytest.mark.parametrize("dtype", _DTYPES)
def test_sizes_follow_the_bits_of_a_dtype(tmp_path: Path, dtype: str) -> None:
    bits = _DTYPES[dtype][1]
    path = write(tmp_path / "x", {"w": entry(dtype, [2, 8], 0, 2 * bits)}, bytes(2 * bits))
    assert read_checkpoint(path).tensors[0].nbytes == 2 * bits
    write(path, {"w": entry(dtype, [2, 8], 0, 2 * bits + 1)}, bytes(2 * bits + 1))
    with pytest.raises(CorruptError, match=rf"'w' of dtype {dtype} and shape \[2, 8\] needs"):
        read_checkpoint(path)


def test_four_bit_values_are_packed(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"w": entry("F4", [2, 8], 0, 8)}, bytes(8))
    (tensor,) = read_checkpoint(path).tensors
    assert (tensor.dtype, tensor.shape) == ("float4_e2m1fn_x2", (2, 4))
    for shape, nbytes in (([2, 7], 7), ([4, 1], 2)):
        write(path, {"w": entry("F4", shape, 0, nbytes)}, bytes(nbytes))
        with pytest.raises(CorruptError, match="two values a byte"):
            read_checkpoint(path)


def test_unknown_dtypes_are_bytes(tmp_path: Path) -> None:
    header = {"w": entry("F7_X", [3, 3], 0, 5), "v": entry("F6_E2M3", [4], 5, 8)}
    checkpoint = read_checkpoint(write(tmp_path / "x", header, bytes(8)))
    assert [(t.dtype, t.shape) for t in checkpoint.tensors] == [("bytes", (5,)), ("bytes", (3,))]
    assert checkpoint.warnings == ("tensor 'w' has the unknown dtype 'F7_X'; kept as bytes",)


def test_header_may_be_padded_unsorted_and_unaligned(tmp_path: Path) -> None:
    header = {
        "b": entry("U8", [3], 2, 5),
        "e": entry("F32", [0], 2, 2),
        "__metadata__": {"n": 0, "deep": [{"dtype": 1}], "n2": None},
        "a": entry("I16", [], 0, 2),
    }
    checkpoint = read_checkpoint(write(tmp_path / "x", header, b"\1\2\3\4\5", b"   "))
    assert [tensor.name for tensor in checkpoint.tensors] == ["b", "e", "a"]
    assert [(span.nbytes, span.dtype) for span in checkpoint.spans] == [(2, "int16"), (3, "uint8")]
    assert checkpoint.tensors[0].pieces[0].span == 1


def test_offsets_beyond_four_gigabytes(tmp_path: Path) -> None:
    size = (1 << 32) + 5
    header = {"w": entry("U8", [size], 0, size), "v": entry("U8", [1], size, size + 1)}
    path = write(tmp_path / "x", header)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size + 1)  # a hole
    first, second = read_checkpoint(path).spans
    assert (first.nbytes, second.offset) == (size, first.offset + size)


@pytest.mark.parametrize("header", ["{}", '{"__metadata__":{"key":"value"}}', '{"__metadata__":0}'])
def test_header_without_tensors(tmp_path: Path, header: str) -> None:
    checkpoint = read_checkpoint(write(tmp_path / "x", header))
    assert (checkpoint.format, checkpoint.tensors) == ("safetensors", ())


def test_repeated_names_in_metadata_are_nobody_s_business(tmp_path: Path) -> None:
    header = f'{{"__metadata__":{{"k":"1","k":"2"}},{W}}}'
    assert len(read_checkpoint(write(tmp_path / "x", header, bytes(4))).tensors) == 1


W = '"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
BROKEN = {
    "repeated tensor": (f"{{{W},{W}}}", "duplicate tensor 'w'"),
    "repeated field": (f'{{{W[:-1]},"dtype":"U8"}}}}', "'w' lacks"),
    "no JSON": ("{nothing}", "no UTF-8 JSON"),
    "deep JSON": ('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", "no UTF-8 JSON"),
    "long number": ('{"w":' + "1" * 10_000 + "}", "no UTF-8 JSON"),
    "two objects": ("{}{}", "no UTF-8 JSON"),
    "no fields": ('{"w":{}}', "'w' lacks"),
    "a list": ('{"w":[]}', "'w' lacks"),
    "shape of text": (json.dumps({"w": entry("U8", "4", 0, 4)}), "'4' as size"),
    "shape of floats": (json.dumps({"w": entry("U8", [4.0], 0, 4)}), "4.0 as size"),
    "shape of truth": (json.dumps({"w": entry("U8", [True, 4], 0, 4)}), "True as size"),
    "negative shape": (json.dumps({"w": entry("U8", [-4], 0, 4)}), "-4 as size"),
    "huge shape": (json.dumps({"w": entry("U8", [2**40] * 3, 0, 4)}), "needs"),
    "too many dimensions": (json.dumps({"w": entry("U8", [1] * 65, 0, 4)}), "65 dimensions"),
    "three offsets": (json.dumps({"w": entry("U8", [4], 0, 4, 8)}), "'w' lacks"),
    "offsets reversed": (json.dumps({"w": entry("U8", [4], 4, 0)}), "no valid dtype and"),
    "dtype of nothing": (json.dumps({"w": entry(None, [4], 0, 4)}), "no valid dtype"),
    "gap": (json.dumps({"w": entry("U8", [3], 1, 4)}), "a gap of 1 bytes before tensor 'w'"),
    "overlap": (
        json.dumps({"w": entry("U8", [3], 0, 3), "v": entry("U8", [2], 2, 4)}),
        "tensors 'w' and 'v' overlap",
    ),
    "same place": (
        json.dumps({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}),
        "tensors 'a' and 'b' overlap",
    ),
    "bytes too many": (json.dumps({"w": entry("U8", [3], 0, 3)}), "1 too many"),
    "bytes too few": (json.dumps({"w": entry("U8", [9], 0, 9)}), "5 are missing"),
}


@pytest.mark.parametrize(("header", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_headers_are_refused(tmp_path: Path, header: str, message: str) -> None:
    path = write(tmp_path / "x", header, bytes(4))
    with pytest.raises(CorruptError, match=f"{path}: .*{message}".replace("[", r"\[")):
        read_checkpoint(path)
    kept = read_checkpoint(path, opaque=True)
    assert (kept.format, kept.spans, len(kept.warnings)) == ("opaque", (), 1)


def test_header_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", 8) + b'{"\xff": 1}')
    with pytest.raises(CorruptError, match="no UTF-8 JSON"):
        read_checkpoint(path)


def test_truncation_tells_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    safetensors.numpy.save_file({name: np.ones((4, 8), "f4") for name in "abc"}, path)
    data = path.read_bytes()
    starts = len(data) - 3 * 128
    for size, message in (
        (4, "no safetensors file, or a damaged one"),
        (8, "no safetensors file, or a damaged one"),
        (starts - 10, f"expected {starts} bytes at least, have {starts - 10}, 10 are missing"),
        (starts + 200, f"expected {len(data)} bytes, have {starts + 200}, 184 are missing; "
                       "tensor 'b' is the first affected"),
        (len(data) - 1, f"expected {len(data)} bytes, have {len(data) - 1}, 1 are missing; "
                        "tensor 'c' is the first affected"),
    ):  # fmt: skip
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError, match=message):
            read_checkpoint(path)


def test_header_length_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    for length in (2**63, 2**40, 100_000_001):
        path.write_bytes(struct.pack("<Q", length) + b'{"w":1}')
        with pytest.raises(CorruptError):
            read_checkpoint(path)


EDITS = st.lists(
    st.tuples(st.integers(0, 300), st.binary(max_size=6), st.integers(0, 6)), max_size=4
)


@settings(max_examples=300)
@given(EDITS)
def test_damaged_files_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, bytes, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    data = safetensors.numpy.save(
        {"a": np.ones((2, 3), "f4"), "b.c": np.ones(3, "u1"), "d": np.ones((), "f2")}
    )
    for at, new, cut in edits:
        data = data[:at] + new + data[at + cut :]
    path.write_bytes(data)
    message = ""
    try:
        read_checkpoint(path)
    except CkzError as err:
        message = str(err)
    assert not message or (message.startswith(f"{path}: ") and "\n" not in message)
