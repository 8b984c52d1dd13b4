"""The container: fixtures, damage anywhere, and hostile but well-sealed files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.numpy
import xxhash
import zstandard
from conftest import state

from ckz import container as layout
from ckz import container_write, pipeline
from ckz.container_read import open_container
from ckz.errors import CkzError, CorruptError, UnsupportedError

FIXTURES = Path(__file__).parent / "fixtures" / "v1"


@pytest.fixture
def packed(model: Path) -> Path:
    output = model.with_name("model.ckz")
    pipeline.compress(model, output)
    return output


def test_plain_hdf5_opens_it(packed: Path) -> None:
    with h5py.File(packed) as h5:
        names = set(h5)
        meta = json.loads(h5["meta"][()].tobytes())
    assert names == {"payload", "meta", "index", "extents"}
    assert meta["format"] == "safetensors"


def test_what_was_written_is_read(model: Path, packed: Path) -> None:
    from ckz.formats import read_checkpoint

    source = read_checkpoint(model)
    with open_container(packed) as container:
        stored = container.checkpoint
    assert stored.tensors == source.tensors
    assert stored.spans == source.spans
    assert stored.files == source.files


def test_every_truncation_is_reported(packed: Path, tmp_path: Path) -> None:
    whole = packed.read_bytes()
    cut = tmp_path / "cut.ckz"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptError):
            pipeline.verify(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(CorruptError):
        pipeline.verify(cut)


def flips(nbytes: int, seed: int) -> Iterator[tuple[int, int]]:
    """Every bit of the first and last KiB, and a few thousand in between."""
    ends = [*range(min(1024, nbytes)), *range(max(0, nbytes - 1024), nbytes)]
    yield from ((byte, 1 << bit) for byte in ends for bit in range(8))
    rng = np.random.default_rng(seed)
    for byte, bit in zip(rng.integers(0, nbytes, 3000), rng.integers(0, 8, 3000), strict=True):
        yield int(byte), 1 << int(bit)


def test_every_flipped_bit_is_reported(packed: Path, tmp_path: Path) -> None:
    whole = packed.read_bytes()
    damaged = tmp_path / "damaged.ckz"
    damaged.write_bytes(whole)
    fd = os.open(damaged, os.O_RDWR)
    for byte, mask in flips(len(whole), seed=1):
        os.pwrite(fd, bytes([whole[byte] ^ mask]), byte)
        with pytest.raises(CorruptError):
            pipeline.verify(damaged, threads=1)
        os.pwrite(fd, whole[byte : byte + 1], byte)
    os.close(fd)
    pipeline.verify(damaged)


def test_damaged_payload_names_the_tensor_and_leaves_no_output(
    packed: Path, tmp_path: Path
) -> None:
    with open_container(packed) as container:
        place = int(container.places[0])
    data = bytearray(packed.read_bytes())
    data[place + 50] ^= 4
    packed.write_bytes(data)
    with pytest.raises(CorruptError, match=r"tensor '.*' chunk 0: checksum mismatch"):
        pipeline.decompress(packed, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.ckz", "model.safetensors"]


def test_a_zeroed_body_is_reported(packed: Path) -> None:
    with open_container(packed) as container:
        place, stored = int(container.places[0]), int(container.chunks["stored"].sum())
    data = bytearray(packed.read_bytes())
    data[place : place + stored] = bytes(stored)
    packed.write_bytes(data)
    with pytest.raises(CorruptError, match="tensor"):
        pipeline.verify(packed)


# -- files that are sealed correctly and lie ------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, object]], None]) -> None:
    """Change the tables of a .ckz and seal it again, as an attacker can."""
    with open_container(path) as container:
        tables = {
            "files": container.files,
            "spans": container.spans,
            "streams": container.streams,
            "chunks": container.chunks,
            "refs": container.refs,
            "tensors": container.tensor_rows,
            "pieces": container.piece_rows,
            "base_spans": container.base_spans,
            "losses": container.loss_rows,
            "carried": container.carried_rows,
            "dims": container.dims,
        }
        tables = {name: rows.copy() for name, rows in tables.items()}
        meta = dict(container.meta)
        names = list(container.names)
        payload = [bytes(container.payload(i)) for i in range(len(container.chunks))]
    tables["names"] = names  # type: ignore[assignment]
    change(tables, meta)
    names = [os.fsencode(name) for name in tables.pop("names")]
    tables["name_lengths"] = np.array([len(name) for name in names], "<u4")
    writer = container_write.Writer(path)
    writer._pending = [p for p in payload if p]
    writer._flush()
    writer._dataset("meta", [json.dumps(meta).encode()])
    writer._dataset("index", [container_write.pack_index(tables, names)])
    extents = np.array(writer._extents, "<u8").reshape(-1, 2)
    place, _ = writer._dataset("extents", [extents.tobytes()])
    writer._h5.close()
    length = path.stat().st_size
    digest = layout.digest_outside(writer._fd, length, writer._extents)
    head = layout.HEAD.pack(
        layout.MAGIC, layout.VERSION, len(writer._extents), length, place, digest
    )
    os.pwrite(writer._fd, container_write._seal(head), 0)
    os.close(writer._fd)


LIES: dict[str, Callable[[dict[str, np.ndarray], dict[str, object]], None]] = {
    "chunk raw": lambda t, m: t["chunks"]["raw"].__setitem__(0, 1),
    "chunk stored": lambda t, m: t["chunks"]["stored"].__setitem__(0, 1 << 30),
    "chunk codec": lambda t, m: t["chunks"]["codec"].__setitem__(0, 99),
    "chunk refs": lambda t, m: t["chunks"]["refs"].__setitem__(0, 3),
    "stream size": lambda t, m: t["streams"]["nbytes"].__setitem__(0, 1 << 60),
    "stream chunks": lambda t, m: t["streams"]["chunks"].__setitem__(0, 5),
    "stream role": lambda t, m: t["streams"]["role"].__setitem__(0, 77),
    "span size": lambda t, m: t["spans"]["nbytes"].__setitem__(2, 1 << 61),
    "span offset": lambda t, m: t["spans"]["offset"].__setitem__(2, 1 << 61),
    "span at": lambda t, m: t["spans"]["at"].__setitem__(2, 12345),
    "span stream": lambda t, m: t["spans"]["stream"].__setitem__(2, 999),
    "span file": lambda t, m: t["spans"]["file"].__setitem__(2, 7),
    "span dtype": lambda t, m: t["spans"]["dtype"].__setitem__(2, 200),
    "span packed": lambda t, m: t["spans"]["packed"].__setitem__(2, 9),
    "file size": lambda t, m: t["files"]["size"].__setitem__(0, 1 << 62),
    "file kind": lambda t, m: t["files"]["kind"].__setitem__(0, 9),
    "tensor dtype": lambda t, m: t["tensors"]["dtype"].__setitem__(0, 99),
    "tensor role": lambda t, m: t["tensors"]["role"].__setitem__(0, 99),
    "tensor ndim": lambda t, m: t["tensors"]["ndim"].__setitem__(0, 40),
    "tensor pieces": lambda t, m: t["tensors"]["pieces"].__setitem__(0, 1 << 20),
    "piece span": lambda t, m: t["pieces"]["span"].__setitem__(0, 0),
    "piece offset": lambda t, m: t["pieces"]["offset"].__setitem__(0, 1 << 50),
    "negative dims": lambda t, m: t["dims"].__setitem__(0, -5),
    "huge dims": lambda t, m: t["dims"].__setitem__(slice(None), 1 << 40),
    "name escapes": lambda t, m: t["names"].__setitem__(0, "../evil"),
    "name absolute": lambda t, m: t["names"].__setitem__(0, "/etc/passwd"),
    "name empty": lambda t, m: t["names"].__setitem__(0, ""),
    "name NUL": lambda t, m: t["names"].__setitem__(0, "a\0b"),
    "no codecs": lambda t, m: m.__setitem__("codecs", []),
    "no dtypes": lambda t, m: m.__setitem__("dtypes", []),
    "codecs no list": lambda t, m: m.__setitem__("codecs", {"raw": 1}),
    "meta lacks": lambda t, m: m.pop("format"),
    "other chunk": lambda t, m: m.__setitem__("chunk", 5),
    "ref to nowhere": lambda t, m: t["refs"]["span"].__setitem__(slice(None), 500),
    "ref too long": lambda t, m: t["refs"]["start"].__setitem__(slice(None), 1 << 40),
    "ref to a base": lambda t, m: t["refs"]["where"].__setitem__(slice(None), 1),
    "ref to itself": lambda t, m: t["refs"]["span"].__setitem__(
        slice(None), 1 + int(np.flatnonzero(t["spans"]["nbytes"][1:] == 64 * 48 * 4)[1])
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_sealed_lies_are_refused(packed: Path, tmp_path: Path, lie: str) -> None:
    rewrite(packed, LIES[lie])
    with pytest.raises(CkzError):
        pipeline.verify(packed, data=True)
    with pytest.raises(CkzError):
        pipeline.decompress(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rewriting_nothing_keeps_it_good(packed: Path, model: Path, tmp_path: Path) -> None:
    rewrite(packed, lambda t, m: None)
    pipeline.decompress(packed, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == model.read_bytes()


def reseal(data: bytearray) -> bytes:
    data[504:512] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:504])))
    return bytes(data)


def test_a_newer_version_is_refused_by_name(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    packed.write_bytes(reseal(data))
    with pytest.raises(UnsupportedError, match="version 2"):
        pipeline.verify(packed)


def test_an_unknown_codec_is_refused_by_name(packed: Path) -> None:
    rewrite(packed, lambda t, m: m.__setitem__("codecs", ["foo:x=1"] * len(m["codecs"])))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="foo"):
        pipeline.verify(packed)


def test_an_index_that_unpacks_to_gigabytes_is_refused(packed: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 27))

    def change(tables: dict[str, np.ndarray], meta: dict[str, object]) -> None:
        tables["dims"] = np.zeros(1 << 24, "<i8")

    assert len(bomb) < 20_000
    rewrite(packed, change)
    with pytest.raises(CorruptError, match="unpack"):
        pipeline.verify(packed)


def test_names_of_every_kind_come_back(tmp_path: Path) -> None:
    names = ["a/b", "..", "a\0b", "", "ключ", "权重", "a b", "x" * 300, "/abs", "a//b", "nl\n"]
    path = tmp_path / "names.safetensors"
    safetensors.numpy.save_file({n: np.full(3, i, "f4") for i, n in enumerate(names)}, path)
    pipeline.compress(path, tmp_path / "names.ckz")
    with open_container(tmp_path / "names.ckz") as container:
        assert sorted(t.name for t in container.checkpoint.tensors) == sorted(names)


# -- fixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("good-*.ckz")), ids=lambda p: p.name)
def test_good_fixtures_restore(path: Path, tmp_path: Path) -> None:
    pipeline.verify(path, data=True)
    pipeline.decompress(path, tmp_path / "out")
    expected = (FIXTURES / "SHA256SUMS").read_text()
    import hashlib

    for file in sorted(p for p in [tmp_path / "out", *(tmp_path / "out").rglob("*")]):
        if file.is_file():
            assert hashlib.sha256(file.read_bytes()).hexdigest() in expected


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("bad-*.ckz")), ids=lambda p: p.name)
def test_bad_fixtures_are_corrupt(path: Path) -> None:
    with pytest.raises(CorruptError):
        pipeline.verify(path, data=True)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("unsupported-*.ckz")), ids=lambda p: p.name)
def test_unsupported_fixtures_are_refused(path: Path) -> None:
    with pytest.raises(UnsupportedError):
        pipeline.verify(path, data=True)


def test_fixtures_are_all_there() -> None:
    readme = (FIXTURES / "README.md").read_text()
    files = {p.name for p in FIXTURES.glob("*.ckz")}
    assert {line.split("`")[1] for line in readme.splitlines() if line.startswith("- `")} == files
    assert len(files) >= 8


def test_state_has_a_repeat(packed: Path) -> None:
    assert state()["embed.weight"].nbytes > 4096
    with open_container(packed) as container:
        assert len(container.refs) == 1
