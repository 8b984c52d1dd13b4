"""Reader of .npy and .npz: values equal numpy's, and no header can break it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import read_bytes, read_path, same, survives

from ckz.errors import CorruptError
from ckz.formats import numpy as reader
from ckz.formats import zips
from ckz.formats.layout import Layout
from ckz.source import Source

DTYPES = ["?", "i1", "u1", "f2", "c8", "c16"]
DTYPES += [order + kind for order in "<>" for kind in ("i2", "u4", "i8", "f2", "f4", "f8", "c8")]


def npy(array: np.ndarray, **options: object) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, **options)
    return out.getvalue()


def npz(source: Source) -> Layout:
    return reader.read_members(source, zips.members(source))


def array(dtype: str, shape: tuple[int, ...] = (3, 4, 5)) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 - 3).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", "CF")
def test_values_equal_numpys(dtype: str, order: str) -> None:
    expected = np.asarray(array(dtype), order=order)
    layout, got = read_bytes(reader.read, npy(expected))
    assert layout.format == "npy"
    assert not layout.warnings
    same(got["arr_0"], expected)
    assert layout.spans[0].dtype == expected.dtype.name
    assert (layout.spans[0].byteorder == ">") == (dtype[0] == ">")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 0, 2), (2, 1, 3, 1)])
@pytest.mark.parametrize("order", "CF")
def test_shapes(shape: tuple[int, ...], order: str) -> None:
    expected = np.asarray(array("<f4", shape), order=order)
    layout, got = read_bytes(reader.read, npy(expected))
    same(got["arr_0"], expected)
    assert len(layout.spans) == (expected.size > 0)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_header_versions(version: tuple[int, int]) -> None:
    _, got = read_bytes(reader.read, npy(array("f4"), version=version))
    same(got["arr_0"], array("f4"))


def test_python_2_wrote_long_integers() -> None:
    data = npy(array("f4")).replace(b"(3, 4, 5), }   ", b"(3L, 4L, 5L), }", 1)
    assert b"3L" in data
    _, got = read_bytes(reader.read, data)
    same(got["arr_0"], array("f4"))


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "a", "b", "S3", "M8[s]"])
def test_dtypes_without_a_name_are_plain_bytes(dtype: str, order: str) -> None:
    structured = {"a": [("x", "<f4"), ("y", "i1")], "b": [("m", "<f8", (2, 3))]}
    kind = getattr(ml_dtypes, dtype, None) or structured.get(dtype, dtype)
    expected = np.zeros((3, 4), kind)
    expected.view(np.uint8)[...] = np.arange(expected.nbytes, dtype=np.uint8).reshape(3, -1)
    data = npy(np.asarray(expected, order=order))
    layout, got = read_bytes(reader.read, data)
    assert "plain bytes" in layout.warnings[0] or "unknown dtype" in layout.warnings[0]
    if layout.tensors:
        same(got["arr_0"], expected.view(np.uint8).reshape(3, 4, -1))
    else:
        assert dtype.startswith("float8")  # numpy itself cannot read <f1


def test_object_arrays_are_kept_and_never_loaded() -> None:
    class Bomb:
        def __reduce__(self) -> object:
            return pytest.fail, ("unpickled",)

    data = npy(np.array([Bomb(), 1], object), allow_pickle=True)
    layout, got = read_bytes(reader.read, data)
    assert not layout.spans
    assert not got
    assert layout.warnings == ("array 'arr_0' holds Python objects; kept as it is",)


def test_every_truncation_is_reported() -> None:
    data = npy(array("f4"))
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            read_bytes(reader.read, data[:length])


def arrays() -> dict[str, np.ndarray]:
    return {
        "w": array("<f4"),
        "be": array(">f8"),
        "fortran": np.asfortranarray(array("<f2")),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 3)),
        "layers/0.bias": array("i8", (9,)),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save: object) -> None:
    out = io.BytesIO()
    save(out, **arrays())
    layout, got = read_bytes(npz, out.getvalue())
    assert layout.format == "npz"
    assert list(got) == list(arrays())
    for name, expected in arrays().items():
        same(got[name], expected)
    packed = {span.packed for span in layout.spans}
    assert packed == ({"deflate"} if save is np.savez_compressed else {""})


def test_npz_with_wide_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 64)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
    out = io.BytesIO()
    np.savez(out, **arrays())
    assert b"PK\x06\x06" in out.getvalue()
    _, got = read_bytes(npz, out.getvalue())
    for name, expected in arrays().items():
        same(got[name], expected)


def test_npz_members_that_are_no_arrays() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("w.npy", npy(array("f4")))
        file.writestr("readme.txt", "hello")
        file.writestr("x.npy", npy(array("f4")), zipfile.ZIP_BZIP2)
    layout, got = read_bytes(npz, out.getvalue())
    assert list(got) == ["w"]
    assert len(layout.warnings) == 2


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_that_is_too_short(method: int) -> None:
    data = npy(array("f4"))
    for length in (0, 5, 11, 60, len(data) - 1):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as file:
            file.writestr("w.npy", data[:length])
        with pytest.raises(CorruptError, match=r"member 'w.npy'"):
            read_bytes(npz, out.getvalue())


LITERALS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846976, 1152921504606846976)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 3}",
    "{'descr': '<f4', 'fortran_order': 0, 'shape': (3,)}",
    "{'descr': '<f4', 'fortran_order': False}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 5000 + "}",
    "-" * 60000 + "1",
    "1" + "+1" * 30000,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 65 + ")}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
    "[]",
    "{[]: 1}",
    "\0",
    "",
]


def with_header(literal: str) -> bytes:
    text = literal.encode("latin-1")
    return b"\x93NUMPY\2\0" + len(text).to_bytes(4, "little") + text + bytes(64)


@pytest.mark.parametrize("literal", LITERALS)
def test_hostile_headers(literal: str) -> None:
    with pytest.raises(CorruptError, match=r"^file: (has|needs)"):
        read_bytes(reader.read, with_header(literal))


@pytest.mark.parametrize(
    "descr",
    [
        *("'<q9'", "'x'", "7", "None", "[]", "[('a',)]", "('<f4', (1 << 40,))", "[('a', 'O')]"),
        *("'|O'", "'<f16'", "[('a', '<f4', (1073741824, 1073741824))]", "'V0'", "'<f1'"),
    ],
)
def test_unknown_dtypes_are_kept(descr: str) -> None:
    literal = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (2,)}}"
    survives(reader.read, with_header(literal))


def test_a_huge_header_is_refused() -> None:
    with pytest.raises(CorruptError, match="absurd"):
        read_bytes(reader.read, b"\x93NUMPY\2\0" + b"\xff" * 4 + bytes(64))


STORED, DEFLATED = io.BytesIO(), io.BytesIO()
np.savez(STORED, **arrays())
np.savez_compressed(DEFLATED, **arrays())
mutations = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4)


def mutate(data: bytes, changes: list[tuple[int, int]], cut: int) -> bytes:
    out = bytearray(data)
    for at, byte in changes:
        out[at % len(out)] = byte
    return bytes(out[: len(out) - cut % len(out)])


@given(mutations, st.just(0) | st.integers(0, 1 << 20))
def test_damaged_npy(changes: list[tuple[int, int]], cut: int) -> None:
    data = npy(array("f4", (2,)))
    survives(reader.read, mutate(data, changes, cut))


@given(st.sampled_from([STORED, DEFLATED]), mutations, st.just(0) | st.integers(0, 1 << 20))
def test_damaged_npz(file: io.BytesIO, changes: list[tuple[int, int]], cut: int) -> None:
    survives(npz, mutate(file.getvalue(), changes, cut))


def test_corpus(corpus: Path) -> None:
    for path in sorted((corpus / "zoo/numpy").iterdir()):
        expected = np.load(path)
        if path.suffix == ".npy":
            _, got = read_path(reader.read, path)
            same(got["arr_0"], expected)
        else:
            _, got = read_path(npz, path)
            assert list(got) == list(expected)
            for name in got:
                same(got[name], expected[name])
