"""Reader of HDF5 and .keras: values equal h5py's, whatever the storage; damage is one error."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import read_bytes, read_path, same, survives

from ckz.errors import CorruptError, UnsupportedError
from ckz.formats import hdf5, hdf5_filters, keras, zips
from ckz.formats.layout import Layout
from ckz.source import Source

DTYPES = [
    "?",
    "i1",
    "u1",
    *(o + k for o in "<>" for k in ("u2", "i8", "f2", "f4", "f8", "c8", "c16")),
]
FILTERS = [
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"compression": "lzf"},
    {"compression": "lzf", "shuffle": True},
    {"shuffle": True},
    {"fletcher32": True},
]


def written(fill: object, **options: object) -> bytes:
    """Give the bytes of an HDF5 file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file.h5"
        with h5py.File(path, "w", **options) as file:
            fill(file)
        return path.read_bytes()


def array(dtype: str = "<f4", shape: tuple[int, ...] = (7, 11)) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 9 - 4).astype(dtype)


def smooth(shape: tuple[int, ...] = (40, 50)) -> np.ndarray:
    return np.linspace(0, 1, np.prod(shape, dtype=int)).reshape(shape).astype("f4")


def opened(data: bytes) -> dict[str, np.ndarray]:
    """Read every dataset by h5py."""
    found = {}
    with h5py.File(io.BytesIO(data)) as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [None, (4, 4), (7, 11), (1, 3)])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_values_equal_h5pys(dtype: str, chunks: tuple[int, int] | None, libver: str) -> None:
    data = written(
        lambda file: file.create_dataset("a/b", data=array(dtype), chunks=chunks), libver=libver
    )
    layout, got = read_bytes(hdf5.read, data)
    assert layout.format == "hdf5"
    assert not layout.warnings
    assert list(got) == ["a/b"]
    same(got["a/b"], array(dtype))
    assert {span.dtype for span in layout.spans} == {np.dtype(dtype).name}
    across = 1 if chunks is None else -(-7 // chunks[0]) * -(-11 // chunks[1])
    assert len(layout.spans) == across


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("chunks", [(7, 9), (40, 50)])
@pytest.mark.parametrize("userblock", [0, 512])
def test_filtered_chunks_are_kept_and_read(
    filters: dict[str, object], chunks: tuple[int, int], userblock: int
) -> None:
    def fill(file: h5py.File) -> None:
        file.create_dataset("x", data=smooth(), chunks=chunks, **filters)
        file.create_dataset("noise", data=np.random.default_rng(0).bytes(999), dtype="V999")
        file.create_dataset("ints", data=array(">i8"), chunks=(4, 4), **filters)

    data = written(fill, userblock_size=userblock)
    layout, got = read_bytes(hdf5.read, data)
    assert not layout.warnings
    same(got["x"], smooth())
    same(got["ints"], array(">i8"))
    packed = [span for span in layout.spans if span.packed]
    assert all(span.packed.startswith("hdf5:") and span.dtype == "bytes" for span in packed)
    assert len(packed) > 0


def test_chunks_that_would_not_shrink_skip_the_filter() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    noise[:16] = 0
    data = written(
        lambda file: file.create_dataset("x", data=noise, chunks=(16, 64), compression="lzf")
    )
    layout, got = read_bytes(hdf5.read, data)
    assert [span.packed for span in layout.spans] == ["hdf5:lzf", "", "", ""]
    same(got["x"], noise)


@pytest.mark.parametrize("chunks", [None, (4, 4)])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_what_was_never_written_is_zero(
    chunks: tuple[int, int] | None, compression: str | None
) -> None:
    if compression and not chunks:
        pytest.skip("contiguous datasets have no filters")

    def fill(file: h5py.File) -> None:
        sparse = file.create_dataset("x", (7, 11), "f4", chunks=chunks, compression=compression)
        if chunks:
            sparse[5, 3] = 2.5
        file.create_dataset("ones", (7, 11), "f4", chunks=chunks, fillvalue=1.0)

    data = written(fill)
    layout, got = read_bytes(hdf5.read, data)
    same(got["x"], opened(data)["x"])
    assert list(got) == ["x"]
    assert layout.warnings == ("dataset 'ones' is kept as stored: most of it is a fill value",)


def test_shapes_and_resized_datasets() -> None:
    def fill(file: h5py.File) -> None:
        file["scalar"] = np.float64(3.5)
        file["empty"] = np.zeros((0, 3), "f4")
        file["null"] = h5py.Empty("f4")
        grown = file.create_dataset("grown", data=array(), chunks=(4, 4), maxshape=(None, None))
        grown.resize((9, 5))

    data = written(fill)
    _, got = read_bytes(hdf5.read, data)
    assert sorted(got) == ["empty", "grown", "scalar"]
    for name in got:
        same(got[name], opened(data)[name])


def test_bfloat16_is_known_by_keras_attribute() -> None:
    values = array("f4").astype(ml_dtypes.bfloat16)

    def fill(file: h5py.File) -> None:
        file.create_dataset("plain", data=values)
        file.create_dataset("marked", data=values).attrs["dtype"] = "bfloat16"
        file.create_dataset("odd", data=values).attrs["dtype"] = np.arange(3)

    _, got = read_bytes(hdf5.read, written(fill))
    same(got["marked"], values)
    same(got["plain"], values.view(np.uint8).reshape(7, 11, 2))
    same(got["odd"], values.view(np.uint8).reshape(7, 11, 2))


def test_what_holds_no_numbers_stays_in_the_skeleton() -> None:
    def fill(file: h5py.File) -> None:
        file["text"] = "hello"
        file["names"] = np.array([b"a", b"bc"])
        file.create_dataset("ragged", (2,), h5py.vlen_dtype("f4"))[0] = [1, 2]
        file["record"] = np.zeros(3, [("x", "f4"), ("y", "i8")])
        file["reference"] = file["text"].ref
        file["enum"] = np.zeros(3, h5py.enum_dtype({"RED": 0, "BLUE": 1}, "i1"))

    layout, got = read_bytes(hdf5.read, written(fill))
    assert not got
    assert not layout.spans


def test_links_are_not_followed(tmp_path: Path) -> None:
    def fill(file: h5py.File) -> None:
        file["g/w"] = array()
        file["g/again"] = file["g/w"]
        file["g/up"] = file["/"]  # a cycle
        file["soft"] = h5py.SoftLink("/g/w")
        file["loop"] = h5py.SoftLink("/loop")
        file["out"] = h5py.ExternalLink("/etc/passwd", "/x")
        file.create_dataset("raw", (4,), "f4", external=[(str(tmp_path / "raw"), 0, 16)])
        virtual = h5py.VirtualLayout((7, 11), "f4")
        virtual[...] = h5py.VirtualSource(file["g/w"])
        file.create_virtual_dataset("virtual", virtual)

    layout, got = read_bytes(hdf5.read, written(fill))
    assert len(got) == 1
    same(next(iter(got.values())), array())
    assert len(layout.warnings) == 2
    assert all("not followed" in warning for warning in layout.warnings)


def test_compact_datasets_are_named_in_a_warning() -> None:
    def fill(file: h5py.File) -> None:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((5,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, creation)

    layout, got = read_bytes(hdf5.read, written(fill))
    assert not got
    assert layout.warnings == ("dataset 'x' lies in its object header; its values stay there",)


def test_a_filter_that_is_not_known_is_named() -> None:
    def fill(file: h5py.File) -> None:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_chunk((4,))
        creation.set_filter(32001, h5py.h5z.FLAG_OPTIONAL, (2, 2, 4))
        space = h5py.h5s.create_simple((8,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, creation)
        dataset.write_direct_chunk((0,), b"abcdef")

    layout, got = read_bytes(hdf5.read, written(fill))
    assert not got
    (warning,) = layout.warnings
    assert "filter 32001" in warning


def test_a_number_of_unusual_layout_is_plain_bytes() -> None:
    def fill(file: h5py.File) -> None:
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(31, 21, 10, 0, 21)
        kind.set_ebias(511)
        h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((5,))).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.arange(5, dtype="f4"), kind
        )

    layout, got = read_bytes(hdf5.read, written(fill))
    assert layout.spans[0].dtype == "bytes"
    same(got["x"], np.arange(5, dtype="f4").view(np.uint8).reshape(5, 4))


def test_truncation_tells_both_sizes() -> None:
    data = written(lambda file: file.create_dataset("x", data=smooth()))
    with pytest.raises(
        CorruptError, match=f"^file: is truncated: expected {len(data)} .* have 500$"
    ):
        read_bytes(hdf5.read, data[:500])
    for length in range(0, len(data), 97):
        with pytest.raises(CorruptError):
            read_bytes(hdf5.read, data[:length])


def sample(file: h5py.File) -> None:
    file.create_dataset("a/b", data=array())
    file.create_dataset("a/c", data=array(), chunks=(4, 4), compression="gzip", shuffle=True)
    file.create_dataset("d", data=array(">f4"), chunks=(4, 4))
    file.create_dataset("e", data=array(), chunks=(4, 4), compression="lzf")
    file["text"] = "hello"
    file.attrs["x"] = [1, 2]


SAMPLES = [written(sample, libver=libver) for libver in ("earliest", "latest")]
changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)


def mutate(data: bytes, changed: list[tuple[int, int]]) -> bytes:
    out = bytearray(data)
    for at, byte in changed:
        out[at % len(out)] = byte
    return bytes(out)


@given(st.sampled_from(SAMPLES), changes)
def test_damaged_files(data: bytes, changed: list[tuple[int, int]]) -> None:
    survives(hdf5.read, mutate(data, changed))


@given(
    st.binary(max_size=60),
    st.lists(st.sampled_from(["deflate", "lzf", "shuffle4", "fletcher32"]), min_size=1, max_size=3),
)
def test_damaged_chunks(stored: bytes, filters: list[str]) -> None:
    try:
        out = hdf5_filters.unpack(stored, "hdf5:" + ",".join(filters), 8)
    except CorruptError:
        return
    assert len(out) >= 8


@pytest.mark.parametrize("packed", ["hdf5:blosc", "hdf5:shuffle", "hdf5:", "gzip"])
def test_unknown_packing_is_unsupported(packed: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be undone"):
        hdf5_filters.unpack(b"abc", packed, 1)


def keras_layout(source: Source) -> Layout:
    return keras.read_members(source, zips.members(source))


def keras_file(method: int, *names: str, damage: bool = False) -> bytes:
    weights = written(sample)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        file.writestr("config.json", "{}")
        for name in names:
            file.writestr(name, weights[:-1] if damage else weights)
    return out.getvalue()


KERAS = {m: keras_file(m, "model.weights.h5") for m in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)}


def test_keras_with_a_stored_member() -> None:
    data = keras_file(zipfile.ZIP_STORED, "model.weights.h5")
    layout, got = read_bytes(keras_layout, data)
    assert layout.format == "keras"
    expected = opened(written(sample))
    assert set(got) == set(expected) - {"text"}
    for name in got:
        same(got[name], expected[name])


def test_keras_with_a_deflated_member() -> None:
    layout, got = read_bytes(keras_layout, keras_file(zipfile.ZIP_DEFLATED, "model.weights.h5"))
    assert [span.packed for span in layout.spans] == ["deflate"]
    same(got["a/b"], array())
    assert set(got) == {"a/b"}
    # Datasets that HDF5 compressed too, and one of the other byte order.
    assert len(layout.warnings) == 3


def test_keras_in_shards() -> None:
    names = [f"model_0000{i}.weights.h5" for i in range(2)]
    _, got = read_bytes(keras_layout, keras_file(zipfile.ZIP_STORED, *names))
    for i in range(2):
        same(got[f"model_0000{i}/a/b"], array())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_keras_with_a_truncated_member(method: int) -> None:
    with pytest.raises(CorruptError, match=r"member 'model.weights.h5'.*truncated"):
        read_bytes(keras_layout, keras_file(method, "model.weights.h5", damage=True))


@given(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), changes)
def test_damaged_keras(method: int, changed: list[tuple[int, int]]) -> None:
    survives(keras_layout, mutate(KERAS[method], changed))


def test_keras_is_told_by_its_weights() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(KERAS[zipfile.ZIP_STORED])
        file.flush()
        source = Source("file", file.fileno(), 0, len(KERAS[zipfile.ZIP_STORED]))
        assert keras.holds_keras(zips.members(source))
    assert not keras.holds_keras(())


def test_corpus(corpus: Path) -> None:
    for path in sorted((corpus / "zoo/keras").iterdir()):
        if path.suffix == ".h5":
            expected = opened(path.read_bytes())
            _, got = read_path(hdf5.read, path)
        else:
            with zipfile.ZipFile(path) as file:
                expected = opened(file.read("model.weights.h5"))
            _, got = read_path(keras_layout, path)
        assert set(got) == set(expected)
        for name in got:
            same(got[name], expected[name])
