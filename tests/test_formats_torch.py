"""torch.save files: names, places and values of all tensors; hostile pickles and zip files."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ckz.checkpoint import ITEMSIZE, Checkpoint, Tensor
from ckz.errors import CkzError, CorruptError, UnsupportedError
from ckz.formats import pickles, read_checkpoint
from ckz.formats.pickle_warnings import is_dangerous
from ckz.source import open_source

# torch warns of what is experimental or old; these tests want both.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]
NEW_DTYPES = [
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, NaNs among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return bits.view(dtype)


def odd_state(new: bool) -> dict[str, Any]:
    """Tensors of every dtype and every layout; ``new`` adds what the old format cannot hold."""
    torch.manual_seed(0)
    base = torch.randn(12, 10)
    channels = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    complex_ = torch.randn(5, 3, dtype=torch.complex64)
    state: dict[str, Any] = {
        str(dtype): random_tensor(dtype, 5, 6) for dtype in TORCH_DTYPES + NEW_DTYPES * new
    }
    state |= {
        "plain": base,
        "tied": base,
        "transposed": base.t(),
        "slice": base[2:5, 1:9:3],
        "last": base[-1, -1],
        "overlap": base.as_strided((4, 7), (3, 2), 5),
        "expanded": torch.randn(1, 3).expand(50, 3),
        "channels_last": channels,
        "zero_dim": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "empty_view": base[3:3],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "conj": complex_.conj(),
        "neg": torch._neg_view(torch.randn(5)[1:]),
        "": torch.ones(1),
        "ключ.权重": torch.ones(2),
        "nul\0and\nline": torch.ones(2),
        "x" * 300: torch.ones(2),
        "nested": [{3: torch.ones(1), (0, "a"): torch.ones(2)}, (torch.ones(3), None)],
        "bytes": b"\xff" * 100,
        "large": 2**70,
        "array": np.arange(6.0),
    }
    if new:
        state["viewed"] = state["torch.float8_e5m2"].view(torch.uint16)
    return state


def stored_bits(value: torch.Tensor) -> bytes:
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(value.reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def read_bits(checkpoint: Checkpoint, tensor: Tensor) -> bytes:
    """Values of a tensor, by its pieces, from the bytes of the file."""
    itemsize = ITEMSIZE[tensor.dtype]
    out = np.zeros(tensor.shape, f"V{itemsize}")
    for piece in tensor.pieces:
        span = checkpoint.spans[piece.span]
        data = checkpoint.path_of(span.file).read_bytes()[span.offset :][: span.nbytes]
        if span.packed:
            data = zlib.decompress(data, -15)
        data = data[piece.offset :]
        flat = np.frombuffer(data[: len(data) // itemsize * itemsize], f"V{itemsize}")
        strides = [stride * itemsize for stride in piece.strides]
        box = np.lib.stride_tricks.as_strided(flat, piece.shape, strides)
        where = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        out[where] = box
    if tensor.transform == "conj":
        return out.view(tensor.dtype).conj().tobytes()
    return (-out.view(tensor.dtype)).tobytes() if tensor.transform == "neg" else out.tobytes()


def leaves(value: Any, *path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values as a user would find them in what torch.load gives."""
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, *path, str(key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from leaves(child, *path, str(index))


def names(path: Path) -> list[str]:
    return [tensor.name for tensor in read_checkpoint(path).tensors]


@pytest.mark.parametrize("zipped", [True, False])
def test_every_tensor_is_found_with_its_values(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "odd.pt"
    torch.save(odd_state(zipped), path, _use_new_zipfile_serialization=zipped)
    checkpoint = read_checkpoint(path)
    assert checkpoint.format == "torch"
    wanted = dict(leaves(torch.load(path, weights_only=False)))
    assert [tensor.name for tensor in checkpoint.tensors] == list(wanted)
    for tensor in checkpoint.tensors:
        value = wanted[tensor.name]
        assert str(value.dtype) == f"torch.{tensor.dtype}"
        assert tensor.shape == tuple(value.shape)
        assert read_bits(checkpoint, tensor) == stored_bits(value), tensor.name
    dtypes = {tensor.name: checkpoint.spans[tensor.pieces[0].span].dtype
              for tensor in checkpoint.tensors if tensor.pieces}  # fmt: skip
    assert dtypes["plain"] == "float32"
    assert dtypes["torch.bfloat16"] == "bfloat16"
    assert not zipped or dtypes["viewed"] == "bytes"  # two dtypes see it


def test_quantized_and_sparse_tensors_have_their_parts(tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    rows = torch.quantize_per_channel(
        dense, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
    )
    state = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "whole": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint32),
        "rows": rows,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    path = tmp_path / "parts.pt"
    torch.save(state, path)
    checkpoint = read_checkpoint(path)
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors}
    assert found == {
        "coo.indices": ("int64", (2, 2)),
        "coo.values": ("float32", (2,)),
        "csr.crow_indices": ("int64", (3,)),
        "csr.col_indices": ("int64", (2,)),
        "csr.values": ("float32", (2,)),
        "csc.ccol_indices": ("int64", (3,)),
        "csc.row_indices": ("int64", (2,)),
        "csc.values": ("float32", (2,)),
        "whole": ("int32", (2, 2)),
        "rows": ("uint8", (2, 2)),
        "rows.scales": ("float64", (2,)),
        "rows.zero_points": ("int64", (2,)),
        "nested.buffer": ("float32", (5,)),
        "nested.sizes": ("int64", (2, 1)),
        "nested.strides": ("int64", (2, 1)),
        "nested.storage_offsets": ("int64", (2,)),
    }
    quantized = next(tensor for tensor in checkpoint.tensors if tensor.name == "rows")
    assert read_bits(checkpoint, quantized) == stored_bits(rows.int_repr())


def test_training_state_has_the_names_of_its_keys(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1, prior=torch.ones(2)),
        "rng": (random.getstate(), torch.get_rng_state()),
    }
    path = tmp_path / "last.ckpt"
    torch.save(state, path)
    found = names(path)
    assert set(dict(leaves(state))) | {"args.prior"} == set(found)
    assert {"model.1.num_batches_tracked", "optimizer.state.3.exp_avg_sq", "rng.1"} <= set(found)
    warnings = read_checkpoint(path).warnings
    assert warnings == ("pickle names argparse.Namespace (never executed)",)


class Block(torch.nn.Module):
    """A module of a module, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize("zipped", [True, False])
def test_whole_module_has_the_names_of_its_state_dict(tmp_path: Path, zipped: bool) -> None:
    model = torch.nn.ModuleDict({"a": Block(), "b": torch.nn.Sequential(Block())})
    path = tmp_path / "module.pth"
    torch.save(model, path, _use_new_zipfile_serialization=zipped)
    assert sorted(names(path)) == sorted(model.state_dict())
    assert "test_formats_torch.Block" in read_checkpoint(path).warnings[0]


def test_names_that_collide_are_told_apart(tmp_path: Path) -> None:
    one = torch.ones(1)
    path = tmp_path / "same.pt"
    torch.save({"a": {"b": one}, "a.b": one, "a.b#2": one, 1: one, "1": one}, path)
    assert names(path) == ["a.b", "a.b#3", "a.b#2", "1", "1#2"]


def test_roots_that_are_no_dict(tmp_path: Path) -> None:
    path = tmp_path / "root.pt"
    for value, wanted in (
        (torch.ones(2), ["tensor"]),
        ([torch.ones(2), 1], ["0"]),
        (torch.ones(2).to_sparse(), ["indices", "values"]),
        (torch.ones(2).untyped_storage(), ["tensor"]),
        (7, []),
        ({}, []),
    ):
        torch.save(value, path)
        assert names(path) == wanted


class Wrapped(torch.Tensor):
    """A tensor subclass that holds other tensors, as quantizing libraries have them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapped(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A tensor subclass that is one, with an attribute."""


def test_tensor_subclasses_are_named_after_their_parts(tmp_path: Path) -> None:
    named = torch.ones(3).as_subclass(Named)
    named.scale = torch.ones(1)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.main_grad = torch.ones(2)
    path = tmp_path / "subclass.pt"
    torch.save(
        {
            "w": Wrapped(torch.ones(4, dtype=torch.int8), torch.ones(1)),
            "n": named,
            "p": parameter,
            "blob": io.BytesIO(b"nested"),
        },
        path,
    )
    assert names(path) == ["w.codes", "w.scale", "n", "n.scale", "p", "p.main_grad"]


def test_storages_without_a_name_are_there(tmp_path: Path) -> None:
    deep: Any = torch.ones(3)
    for _ in range(300):
        deep = [deep]
    path = tmp_path / "deep.pt"
    torch.save({"w": torch.ones(2), "deep": deep}, path)
    checkpoint = read_checkpoint(path)
    assert [(t.name, t.dtype, t.shape) for t in checkpoint.tensors] == [
        ("w", "float32", (2,)),
        ("storage.1", "float32", (3,)),
    ]


def test_checksums_of_the_zip_are_those_of_the_spans(tmp_path: Path) -> None:
    path = tmp_path / "crc.pt"
    torch.save(odd_state(True), path)
    checkpoint, data = read_checkpoint(path), path.read_bytes()
    assert checkpoint.spans
    for span in checkpoint.spans:
        assert span.crc32 == zlib.crc32(data[span.offset : span.offset + span.nbytes])


def rezip(source: Path, target: Path, method: int, **records: bytes) -> None:
    """Zip a torch file again by other means, with some of its members changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for info in reversed(old.infolist()):
            base = info.filename.rpartition("/")[2]
            new.writestr(f"other/{info.filename.partition('/')[2]}",
                         records.get(base, old.read(info)))  # fmt: skip


def test_a_deflated_copy_has_packed_spans(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save(odd_state(True), plain)
    rezip(plain, packed, zipfile.ZIP_DEFLATED)
    first, second = read_checkpoint(plain), read_checkpoint(packed)
    assert {(span.packed, span.dtype) for span in second.spans} == {("deflate", "bytes")}
    assert [tensor.name for tensor in first.tensors] == [tensor.name for tensor in second.tensors]
    for one, other in zip(first.tensors, second.tensors, strict=True):
        assert read_bits(first, one) == read_bits(second, other)


def test_byte_order_is_read(tmp_path: Path) -> None:
    plain, big = tmp_path / "plain.pt", tmp_path / "big.pt"
    torch.save({"w": torch.ones(2)}, plain)
    rezip(plain, big, zipfile.ZIP_STORED, byteorder=b"big")
    assert [span.byteorder for span in read_checkpoint(plain).spans] == ["<"]
    assert [span.byteorder for span in read_checkpoint(big).spans] == [">"]
    rezip(plain, big, zipfile.ZIP_STORED, byteorder=b"middle")
    with pytest.raises(CorruptError, match="byte order b'middle'"):
        read_checkpoint(big)


def test_scripted_modules_are_read(tmp_path: Path) -> None:
    scale = torch.tensor([2.0, 3.0])

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * scale

    path = tmp_path / "script.pt"
    torch.jit.trace(Scaled(), torch.ones(1, 2)).save(path)
    checkpoint = read_checkpoint(path)
    assert checkpoint.format == "torch"
    found = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert {"inner.weight", "inner.bias", "constants.0"} <= set(found)
    assert read_bits(checkpoint, found["constants.0"]) == struct.pack("<2f", 2, 3)


# Files that torch would not write, made with its own functions.


class Key:
    """Stands for a storage; pickled as a persistent id."""

    def __init__(self, name: str, numel: int, kind: type = torch.FloatStorage) -> None:
        self.id = ("storage", kind, name, "cpu", numel)


class Rebuilt:
    """Pickled as a call of any function."""

    def __init__(self, func: Any, *args: Any) -> None:
        self.call = func, args

    def __reduce__(self) -> Any:
        return self.call


class StoragePickler(pickle.Pickler):
    """Pickles ``Key`` as torch pickles storages."""

    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, Key) else None


def view(key: Key, offset: Any, shape: Any, strides: Any) -> Rebuilt:
    hooks = collections.OrderedDict()  # type: ignore[var-annotated]
    return Rebuilt(torch._utils._rebuild_tensor_v2, key, offset, shape, strides, False, hooks)


def write_zip(path: Path, value: Any, protocol: int = 2, **storages: bytes) -> None:
    """Write a torch zip of any pickle and any storages."""
    stream = io.BytesIO()
    StoragePickler(stream, protocol).dump(value)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", stream.getvalue())
        for key, data in storages.items():
            file.writestr(f"x/data/{key}", data)


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "message"),
    [
        (0, (2, 3), (2, 1), "'w' needs 20 bytes of a storage of 16"),
        (3, (2,), (1,), "'w' needs 20 bytes"),
        (0, (2,), (2**62,), "'w' needs"),
        (0, (2,), (-1,), "'w' has no valid shape"),
        (-1, (2,), (1,), "'w' has no valid shape"),
        (0, (2, 2), (1,), "'w' has no valid shape"),
        (0, (2.0,), (1,), "'w' has no valid shape"),
        (0, "ab", (1, 1), "'w' has no valid shape"),
        (0, (2**70,), (0,), "'w' has no valid shape"),
        (0, (2**40, 2**40), (0, 0), "'w' has more elements"),
        (0, (1,) * 65, (1,) * 65, "'w' has more elements or dimensions"),
    ],
)
def test_tensors_that_leave_their_storage_are_refused(
    tmp_path: Path, offset: Any, shape: Any, strides: Any, message: str
) -> None:
    path = tmp_path / "bad.pt"
    key = Key("K", 4)
    write_zip(path, {"good": view(key, 0, (4,), (1,)), "w": view(key, offset, shape, strides)},
              K=bytes(16))  # fmt: skip
    with pytest.raises(CorruptError, match=message):
        read_checkpoint(path)
    checkpoint = read_checkpoint(path, opaque=True)
    assert (checkpoint.format, checkpoint.spans) == ("opaque", ())
    assert message in checkpoint.warnings[0]


def test_a_missing_storage_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "lacks.pt"
    write_zip(path, {"w": view(Key("K", 4), 0, (4,), (1,)), "v": view(Key("L", 4), 0, (4,), (1,))},
              L=bytes(16))  # fmt: skip
    checkpoint = read_checkpoint(path)
    assert checkpoint.missing == ("tensor 'w': its storage 'K' is missing",)
    assert names(path) == ["v"]


def test_a_storage_of_odd_length_is_bytes(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    write_zip(path, {"w": view(Key("K", 4), 0, (2,), (1,))}, K=bytes(11), other=bytes(3))
    checkpoint = read_checkpoint(path)
    assert [span.dtype for span in checkpoint.spans] == ["bytes", "bytes"]
    assert names(path) == ["w", "storage.other"]


def test_exploits_are_named_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for protocol in range(1, 6):  # protocol 0 has no persistent ids but text
        path = tmp_path / f"exploit{protocol}.pt"
        value = {"w": view(Key("K", 1), 0, (1,), (1,)), "x": Rebuilt(os.system, f"touch {marker}")}
        write_zip(path, value, protocol, K=bytes(4))
        checkpoint = read_checkpoint(path)
        assert checkpoint.warnings == (
            "dangerous global posix.system in the pickle (never executed)",
        )
        assert names(path) == ["w"]
    torch.save({"x": Rebuilt(eval, "1")}, path, _use_new_zipfile_serialization=False)
    assert "dangerous global builtins.eval" in read_checkpoint(path).warnings[0]
    assert not marker.exists()


def test_dangers_are_found_behind_attributes() -> None:
    assert is_dangerous(pickles.Global("torch", "serialization.os.system"))
    assert is_dangerous(pickles.Global("os", "system"))
    assert is_dangerous(pickles.Global("builtins", "exec"))
    assert not is_dangerous(pickles.Global("builtins", "set"))
    assert not is_dangerous(pickles.Global("torch._utils", "_rebuild_tensor_v2"))
    assert not is_dangerous(pickles.Global("mymodel.code", "Net"))


# Pickles by themselves.


def plain(value: Any) -> Any:
    """Make of inert records what the pickle was made of."""
    if isinstance(value, list | tuple) and not isinstance(value, pickles.Global):
        return type(value)(plain(child) for child in value)
    if isinstance(value, pickles.Call):
        args = [plain(child) for child in value.args]
        if value.func == pickles.DICT:
            return {plain(key): plain(child) for key, child in value.pairs}
        if value.func == pickles.FROZENSET:
            return frozenset(plain(child) for child in (args[0] if args else value.items))
        if value.func == pickles.SET:
            return set(plain(child) for child in (args[0] if args else value.items))
        if str(value.func) == "_codecs.encode":
            return args[0].encode(args[1])
        if str(value.func) in ("builtins.bytearray", "builtins.bytes"):
            return {"bytearray": bytearray, "bytes": bytes}[value.func.name](*args)
        if str(value.func) == "builtins.complex":
            return complex(*args)
        raise AssertionError(value.func)
    return value


atoms = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**2100), 2**2100)
    | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
)  # fmt: skip
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner) | st.tuples(inner, inner, inner, inner) | st.tuples(inner)
    | st.dictionaries(st.text() | st.integers(), inner) | st.sets(st.integers())
    | st.frozensets(st.text()) | st.tuples(inner, inner) | st.tuples(inner, inner, inner),
    max_leaves=30,
)  # fmt: skip


@given(values, st.integers(0, 5), st.booleans())
def test_pickles_of_every_protocol_describe_their_values(
    value: Any, protocol: int, shared: bool
) -> None:
    value = [value, value, "again"] if shared else value
    for dumps in (pickle.dumps, pickle._dumps):  # type: ignore[attr-defined]
        data = dumps(value, protocol)
        found = pickles.parse(data + b"rest", "p")
        assert found.end == len(data)
        assert plain(found.value) == value
        assert repr(plain(found.value)) == repr(value) or "{" in repr(value)


def test_long_pickles_are_read_in_windows(tmp_path: Path) -> None:
    path = tmp_path / "several"
    first = [f"{number}" * 20 for number in range(40_000)]
    second = {"blob": b"\x00" * (9 << 20), "text": "ж" * (1 << 20)}
    path.write_bytes(pickle.dumps(first, 2) + pickle.dumps(second, 4))
    with open_source(path) as source:
        one = pickles.read_pickle(source)
        two = pickles.read_pickle(source, one.end)
        assert one.value == first
        assert plain(two.value) == second
        assert one.end + two.end == source.size
        with pytest.raises(CorruptError, match="ends early"):
            pickles.read_pickle(source.part(0, source.size - 1), one.end)


def test_a_pickle_may_hold_itself() -> None:
    value: list[Any] = [1]
    value.append(value)
    found = pickles.parse(pickle.dumps(value), "p").value
    assert found[1] is found


HOSTILE = {
    "no bytes": b"",
    "no stop": b"N",
    "stop alone": b".",
    "unknown instruction": b"\xff.",
    "memo without": b"h\x05.",
    "mark without": b"t.",
    "huge string": b"X\xff\xff\xff\xffabc",
    "huge long": b"\x8b\xff\xff\xff\x7f1.",
    "negative long": b"\x8b\xff\xff\xff\xff1.",
    "huge bytes": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "decimal without end": b"I" + b"9" * 10_000 + b"\n.",
    "no utf-8": b"X\x01\x00\x00\x00\xff.",
    "pairs of three": b"}(NNNu.",
    "append to none": b"NNa.",
    "state of nothing": b"b.",
    "global of numbers": b"K\x01K\x02\x93.",
    "unknown extension": b"\x82\x01R.",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="p: its pickle"):
        pickles.parse(data, "p")


def test_bombs_take_neither_time_nor_memory(tmp_path: Path) -> None:
    for data in (
        b"]" + b"]a" * 50_000 + b".",  # wide
        b"(" * 50_000 + b"t" * 50_000 + b".",  # deep
        b"]" * 50_000 + b"a" * 49_999 + b".",  # deep lists
        b"N" + b"\x85" * 50_000 + b".",  # deep tuples
        b"\x82\x01.",  # an extension
        b"".join(b"Nr" + struct.pack("<I", 2**32 - 1 - n) for n in range(10_000)) + b".",
    ):
        assert pickles.parse(data, "p").end == len(data)
    laughs: Any = view(Key("K", 1), 0, (1,), (1,))
    for _ in range(60):
        laughs = [laughs] * 100
    path = tmp_path / "laughs.pt"
    write_zip(path, laughs, K=bytes(4))
    assert len(read_checkpoint(path).tensors) < 200_000


# Damage.


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Small files, deflated and not, new and old."""
    folder = tmp_path_factory.mktemp("samples")
    state = {"a": torch.ones(2, 2).t(), "b": [torch.ones(1, dtype=torch.uint16)], "c": {1, 2}}
    torch.save(state, folder / "new.pt")
    torch.save({"a": state["a"]}, folder / "old.pt", _use_new_zipfile_serialization=False)
    rezip(folder / "new.pt", folder / "packed.pt", zipfile.ZIP_DEFLATED)
    write_zip(folder / "plain.pt", {"w": view(Key("K", 2), 0, (2,), (1,))}, 4, K=bytes(8))
    return [path.read_bytes() for path in sorted(folder.iterdir())]


changes = st.lists(
    st.tuples(
        st.sampled_from(["set", "insert", "delete", "cut"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    for kind, where, new in edits:
        at = int(where * len(data))
        end = {"set": at + len(new), "insert": at, "delete": at + len(new), "cut": len(data)}[kind]
        data = data[:at] + (new if kind in ("set", "insert") else b"") + data[end:]
    return data


def is_one_line(path: Path) -> bool:
    """Whether a file is read, or refused in one line that names it."""
    message = ""
    try:
        read_checkpoint(path)
    except CkzError as err:
        message = str(err)
    return not message or (message.startswith(str(path)) and "\n" not in message)


@settings(max_examples=300)
@given(st.integers(0, 3), changes)
def test_damaged_files_are_read_or_refused_in_one_line(
    samples: list[bytes], tmp_path_factory: pytest.TempPathFactory, which: int, edits: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(damaged(samples[which], edits))
    assert is_one_line(path)
    assert read_checkpoint(path, opaque=True).files[0].size == path.stat().st_size


@settings(max_examples=300)
@given(changes)
def test_damaged_pickles_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, edits: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "pickle.pt"
    stream = io.BytesIO()
    key = Key("K", 4)
    state = {"w": view(key, 0, (2, 2), (1, 2)), "v": (view(key, 1, (3,), (1,)), key, [{3}])}
    StoragePickler(stream, 2).dump(state)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", damaged(stream.getvalue(), edits))
        file.writestr("x/data/K", bytes(16))
    assert is_one_line(path)


def test_every_truncation_is_told(samples: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "short.pt"
    for data in samples:
        for size in range(40, len(data), 13):
            path.write_bytes(data[:size])
            with pytest.raises(CkzError, match=r"truncated|damaged|is missing|does not fit"):
                read_checkpoint(path)


def test_zip_files_that_lie_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lies.pt"
    value = {"w": view(Key("K", 4), 0, (4,), (1,))}
    write_zip(path, value, K=bytes(16))
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        directory = file.start_dir
        entry = data.index(b"PK\1\2", directory + 1)  # of the storage
    for offset, change, message in (
        (8, b"\x01", "encrypted"),
        (10, b"\x0c", "method 12"),
        (20, b"\xff\xff\xff\x7f", "is not compressed but states"),
        (20, b"\xff\xff\xff\x7f" * 2, "ends outside"),
        (42, b"\x00", "overlap|local header"),
    ):
        at = entry + offset
        path.write_bytes(data[:at] + change + data[at + len(change) :])
        with pytest.raises((CorruptError, UnsupportedError), match=message):
            read_checkpoint(path)
    flipped = data.index(b"storage")
    path.write_bytes(data[:flipped] + b"S" + data[flipped + 1 :])
    with pytest.raises(CorruptError, match="CRC-32"):
        read_checkpoint(path)


def test_old_files_with_more_behind_are_read(tmp_path: Path) -> None:
    path = tmp_path / "twice.pt"
    with path.open("wb") as file:
        torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
        file.write(b"more")
    assert names(path) == ["w"]
    assert read_checkpoint(path).warnings == ("4 bytes follow its last storage",)


def test_old_storages_that_are_parts_of_others(tmp_path: Path) -> None:
    path = tmp_path / "parts.pt"
    stream = io.BytesIO()
    whole, part = Key("K", 8), Key("K", 8)
    whole.id += (None,)
    part.id += (("V", 2, 4),)
    state = {"w": view(whole, 0, (8,), (1,)), "v": view(part, 1, (3,), (1,))}
    StoragePickler(stream, 2).dump(state)
    head = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {})]
    values = np.arange(8, dtype="<f4")
    rest = pickle.dumps(["K"], 2) + struct.pack("<q", 8) + values.tobytes()
    path.write_bytes(b"".join(head) + stream.getvalue() + rest)
    checkpoint = read_checkpoint(path)
    bits = {tensor.name: read_bits(checkpoint, tensor) for tensor in checkpoint.tensors}
    assert bits == {"w": values.tobytes(), "v": values[3:6].tobytes()}
