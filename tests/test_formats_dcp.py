"""Distributed checkpoints: tensors in chunks across files, and metadata that lie."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckz
from ckz.checkpoint import Checkpoint, check_layout
from ckz.formats import read_checkpoint
from ckz.source import Source, open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, on saving and loading

Start = tuple[int, ...]


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class Writer:
    """Writes what the ranks of a distributed save write, chunk by chunk."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.metadata = Metadata({}, storage_data={})

    def put(self, file: str, name: str, start: Start | None, data: bytes, **changes: Any) -> None:
        before = self.files.get(file, b"")
        self.files[file] = before + data
        info = _StorageInfo(file, len(before), len(data), **changes)
        self.metadata.storage_data[MetadataIndex(name, start)] = info

    def tensor(
        self, name: str, value: torch.Tensor, chunks: Iterable[tuple[str, Start, Start]]
    ) -> None:
        """Save a tensor as chunks: each a file, a position and extents."""
        stated = []
        for file, start, extents in chunks:
            box = value[tuple(slice(a, a + n) for a, n in zip(start, extents, strict=True))]
            self.put(file, name, start, saved(box.clone() if box.ndim else value))
            stated.append(ChunkStorageMetadata(torch.Size(start), torch.Size(extents)))
        properties = TensorProperties(dtype=value.dtype)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, value.shape, stated
        )

    def object(self, file: str, name: str, data: bytes) -> None:
        self.put(file, name, None, data)
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()

    def write(self, root: Path, name: str = ".metadata") -> Path:
        root.mkdir(parents=True, exist_ok=True)
        for file, data in self.files.items():
            (root / file).write_bytes(data)
        with (root / name).open("wb") as out:
            pickle.dump(self.metadata, out)
        return root


MATRIX = torch.arange(60.0).reshape(10, 6)
VECTOR = torch.arange(7, dtype=torch.int64)
ONE, TWO = "__0_0.distcp", "__1_0.distcp"


def two_ranks() -> Writer:
    """A matrix in four chunks of two files, a vector in two, the rest in one."""
    writer = Writer()
    writer.object(ONE, "epoch", saved({"n": 3, "rng": torch.ones(5, dtype=torch.uint8)}))
    writer.object(ONE, "raw", b"not a zip file")
    writer.tensor(
        "model.w",
        MATRIX,
        [
            (TWO, (4, 2), (6, 4)),
            (ONE, (0, 0), (4, 2)),
            (ONE, (4, 0), (6, 2)),
            (TWO, (0, 2), (4, 4)),
        ],
    )
    writer.tensor("model.ids", VECTOR, [(ONE, (0,), (4,)), (TWO, (4,), (3,))])
    writer.tensor("optim.state.w.exp_avg", MATRIX.bfloat16(), [(TWO, (0, 0), (10, 6))])
    writer.tensor("step", torch.tensor(3.5), [(ONE, (), ())])
    writer.tensor("empty", torch.empty(0, 4), [(ONE, (0, 0), (0, 4))])
    return writer


EXPECTED = {
    "model.w": MATRIX,
    "model.ids": VECTOR,
    "optim.state.w.exp_avg": MATRIX.bfloat16(),
    "step": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "epoch.rng": torch.ones(5, dtype=torch.uint8),
}


def expect(root: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """Check that these are all tensors there are, bit for bit."""
    with ckz.open(root) as archive:
        check_layout(archive.checkpoint)
        assert set(archive) == set(tensors)
        for name, tensor in tensors.items():
            got = archive[name]
            assert archive.info(name).dtype == str(tensor.dtype).removeprefix("torch.")
            assert got.shape == tuple(tensor.shape)
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert got.tobytes() == flat.numpy().tobytes()
        return archive.checkpoint


def flattened(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    if not isinstance(value, dict | list | tuple):
        return {}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, torch.Tensor] = {}
    for key, child in pairs:
        found |= flattened(child, f"{name}.{key}" if name else str(key))
    return found


def library_values(root: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Give all tensors as torch's own converter reads them."""
    dcp_to_torch_save(root, tmp_path / "merged.pt")
    return flattened(torch.load(tmp_path / "merged.pt", weights_only=False))


# Values.


def test_chunks_become_one_tensor(tmp_path: Path) -> None:
    checkpoint = expect(two_ranks().write(tmp_path), EXPECTED)
    assert (checkpoint.format, checkpoint.missing, checkpoint.warnings) == ("dcp", (), ())
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    files = [checkpoint.spans[piece.span].file for piece in by_name["model.w"].pieces]
    assert [checkpoint.files[file].path for file in files] == [TWO, ONE, ONE, TWO]
    assert by_name["optim.state.w.exp_avg"].role == "momentum"
    assert by_name["model.w"].role == "weight"


def test_the_order_of_files_changes_nothing(tmp_path: Path) -> None:
    writer = two_ranks()
    items = list(writer.metadata.storage_data.items())
    random.Random(1).shuffle(items)
    writer.metadata.storage_data = dict(items)
    expect(writer.write(tmp_path), EXPECTED)


def test_each_span_has_the_checksum_of_its_zip_member(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(two_ranks().write(tmp_path))
    assert len(checkpoint.spans) == 1 + 4 + 2 + 1 + 1
    for span in checkpoint.spans:
        data = checkpoint.path_of(span.file).read_bytes()[span.offset : span.offset + span.nbytes]
        assert span.crc32 == zlib.crc32(data)


def test_what_torch_saves(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "view": torch.arange(100.0)[10:20],
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        "scalar": torch.tensor(7),
        "step": 5,
    }
    root = tmp_path / "step_5"
    dcp.save(state, checkpoint_id=root, no_dist=True)
    checkpoint = expect(root, flattened(state))
    assert (checkpoint.format, checkpoint.missing, checkpoint.warnings) == ("dcp", (), ())


def test_real_checkpoints_of_several_files(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    tensors = {f"layer.{n}.weight": torch.randn(5, n + 1) for n in range(9)}
    writer = dcp.FileSystemWriter(root, single_file_per_rank=False)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    assert len(list(root.glob("*.distcp"))) == 9
    expect(root, tensors)


SCRIPT = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
rank, root = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(root + "/store", 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 7)).sum().backward()
optimizer.step()
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optim": optimizer_state, "rank": {"step": 3}}
dcp.save(state, checkpoint_id=root + "/saved")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_of_torch(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    expected = library_values(tmp_path / "saved", tmp_path)
    checkpoint = expect(tmp_path / "saved", expected)
    assert checkpoint.missing == ()
    # Five rows are three and two; each rank has its own.
    pieces = {tensor.name: tensor.pieces for tensor in checkpoint.tensors}["model.0.weight"]
    assert [(piece.start, piece.shape) for piece in pieces] == [((0, 0), (3, 7)), ((3, 0), (2, 7))]


def test_the_library_reads_what_the_writer_here_writes(tmp_path: Path) -> None:
    """So that the tests of damage are tests of something real."""
    writer = two_ranks()
    del writer.metadata.state_dict_metadata["raw"]
    got = library_values(writer.write(tmp_path / "saved"), tmp_path)
    for name, tensor in EXPECTED.items():
        assert torch.equal(got[name], tensor)


# Several in one directory.


def test_checkpoints_in_folders_are_told_apart(tmp_path: Path) -> None:
    for step in (10, 12):
        two_ranks().write(tmp_path / f"step_{step}")
    expect(tmp_path, {f"step_{n}:{name}": t for n in (10, 12) for name, t in EXPECTED.items()})


def test_ranks_with_metadata_of_their_own(tmp_path: Path) -> None:
    expected = {}
    for rank in range(2):
        writer = Writer()
        value = torch.full((3,), float(rank))
        writer.tensor("w", value, [(f"__{rank}_0.distcp", (0,), (3,))])
        writer.write(tmp_path, f"__{rank}.metadata")
        expected[f"__{rank}:w"] = value
    expect(tmp_path, expected)


def test_two_metadata_files_that_speak_of_one_file(tmp_path: Path) -> None:
    writer = two_ranks()
    writer.write(tmp_path, "__0.metadata")
    writer.write(tmp_path, "__1.metadata")
    checkpoint = read_checkpoint(tmp_path)
    check_layout(checkpoint)
    assert f"__1.metadata: '{ONE}' is described by another metadata file too" in checkpoint.missing


def test_a_name_that_an_object_makes_too(tmp_path: Path) -> None:
    writer = two_ranks()
    writer.tensor("epoch.rng", torch.zeros(2), [(ONE, (0,), (2,))])
    names = [tensor.name for tensor in read_checkpoint(writer.write(tmp_path)).tensors]
    assert {"epoch.rng", "epoch.rng#2"} < set(names)
    assert len(set(names)) == len(names)


# What is missing.


def test_an_empty_an_absent_and_a_short_file(tmp_path: Path) -> None:
    path = two_ranks().write(tmp_path) / TWO
    names = "'model.w', 'model.ids', 'optim.state.w.exp_avg'"
    data = path.read_bytes()
    path.write_bytes(b"")
    assert read_checkpoint(tmp_path).missing == (
        f".metadata: '{TWO}' is empty; it should hold {names}",
    )
    path.unlink()
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.missing == (f".metadata: '{TWO}' is missing; it should hold {names}",)
    assert {tensor.name for tensor in checkpoint.tensors} == EXPECTED.keys() - {
        "optim.state.w.exp_avg"
    }
    path.write_bytes(data[:-1])
    assert read_checkpoint(tmp_path).missing == (
        f".metadata: '{TWO}' is truncated: it has {len(data) - 1} bytes of {len(data)}; it lacks: "
        "'optim.state.w.exp_avg'",
    )


def test_a_rank_with_nothing_to_save_has_an_empty_file(tmp_path: Path) -> None:
    two_ranks().write(tmp_path)
    (tmp_path / "__2_0.distcp").write_bytes(b"")
    assert expect(tmp_path, EXPECTED).missing == ()


def test_files_behind_links_are_not_missing(tmp_path: Path) -> None:
    root = two_ranks().write(tmp_path / "saved")
    (root / TWO).rename(tmp_path / "elsewhere")
    (root / TWO).symlink_to("../elsewhere")
    assert read_checkpoint(root).missing == ()
    (tmp_path / "elsewhere").unlink()
    assert f"'{TWO}' is missing" in read_checkpoint(root).missing[0]


def test_no_metadata_or_damaged_ones(tmp_path: Path) -> None:
    path = two_ranks().write(tmp_path) / ".metadata"
    data = path.read_bytes()
    for content in (b"", data[:-1], data[:40], b"text", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        (line,) = read_checkpoint(tmp_path).missing
        assert line.startswith(".metadata: ")
    path.unlink()
    assert read_checkpoint(tmp_path).missing == ("'.metadata' is missing: the save did not end",)
    for file in (ONE, TWO):
        (tmp_path / file).unlink()
    path.write_bytes(b"of something else")
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.missing) == ("directory", ())


def test_chunks_that_were_never_saved(tmp_path: Path) -> None:
    writer = two_ranks()
    del writer.metadata.storage_data[MetadataIndex("model.w", (4, 2))]
    writer.metadata.state_dict_metadata["model.ids"].chunks.pop()
    del writer.metadata.storage_data[MetadataIndex("model.ids", (4,))]
    assert read_checkpoint(writer.write(tmp_path)).missing == (
        ".metadata: tensor 'model.w': a chunk of it is in no file",
        ".metadata: tensor 'model.ids': its chunks are not all of it",
    )


def test_a_damaged_item_costs_only_itself(tmp_path: Path) -> None:
    writer = two_ranks()
    info = writer.metadata.storage_data[MetadataIndex("model.ids", (4,))]
    data = bytearray(writer.files[TWO])
    data[info.offset + info.length - 22 :][:4] = b"\0" * 4
    data[info.offset + info.length - 22] ^= 1  # the end record of its zip directory
    writer.files[TWO] = bytes(data)
    checkpoint = read_checkpoint(writer.write(tmp_path))
    check_layout(checkpoint)
    (line,) = checkpoint.missing
    assert line.startswith(f".metadata: '{TWO}' holds items that cannot be read (has no zip")
    assert line.endswith("'model.ids'")


def test_an_object_without_its_values(tmp_path: Path) -> None:
    whole, cut = io.BytesIO(saved({"n": torch.ones(3)})), io.BytesIO()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(cut, "w") as target:
        for name in source.namelist():
            if not name.endswith("data/0"):
                target.writestr(name, source.read(name))
    writer = two_ranks()
    writer.object(ONE, "lost", cut.getvalue())
    checkpoint = expect(writer.write(tmp_path), EXPECTED)
    assert checkpoint.missing == (f".metadata: '{ONE}' holds items without their values: 'lost'",)


# What is not read.


def test_items_that_an_extension_changed(tmp_path: Path) -> None:
    writer = two_ranks()
    writer.put(ONE, "packed", (0,), b"\x28\xb5\x2f\xfd....", transform_descriptors=["zstd"])
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))
    properties = TensorProperties(dtype=torch.float32)
    stated = TensorStorageMetadata(properties, torch.Size((4,)), [chunk])
    writer.metadata.state_dict_metadata["packed"] = stated
    checkpoint = expect(writer.write(tmp_path), EXPECTED)
    assert checkpoint.warnings == (
        f"{ONE}: items that an extension changed are kept as opaque bytes",
    )


def test_files_of_safetensors(tmp_path: Path) -> None:
    kind = dcp.filesystem.SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=kind)
    dcp.save({"a": torch.arange(5.0), "b": torch.ones(2, 3)}, storage_writer=writer, no_dist=True)
    checkpoint = expect(tmp_path, {"a": torch.arange(5.0), "b": torch.ones(2, 3)})
    assert "is a safetensors file" in checkpoint.warnings[0]


# Malice.


def hostile(change: Callable[[Writer], Any]) -> Callable[[Path], Checkpoint]:
    def read(root: Path) -> Checkpoint:
        writer = two_ranks()
        change(writer)
        checkpoint = read_checkpoint(writer.write(root))
        check_layout(checkpoint)
        lines = (*checkpoint.missing, *checkpoint.warnings)
        assert lines
        assert not any("\n" in line for line in lines)
        return checkpoint

    return read


def info(writer: Writer, name: str = "step", start: Start = ()) -> _StorageInfo:
    found: _StorageInfo = writer.metadata.storage_data[MetadataIndex(name, start)]
    return found


def stated(writer: Writer, name: str = "model.w") -> TensorStorageMetadata:
    found: TensorStorageMetadata = writer.metadata.state_dict_metadata[name]
    return found


def set_(target: Any, key: str, value: Any) -> None:
    setattr(target, key, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: set_(info(w), "offset", -1),
        lambda w: set_(info(w), "offset", 2**70),
        lambda w: set_(info(w), "offset", 1.5),
        lambda w: set_(info(w), "offset", 3),
        lambda w: set_(info(w), "length", -1),
        lambda w: set_(info(w), "length", 2**63),
        lambda w: set_(info(w), "length", None),
        lambda w: set_(info(w), "length", 7),
        lambda w: set_(info(w), "relative_path", "../outside"),
        lambda w: set_(info(w), "relative_path", "/etc/passwd"),
        lambda w: set_(info(w), "relative_path", "a\nb\0c"),
        lambda w: set_(info(w), "relative_path", 7),
        lambda w: set_(stated(w), "size", torch.Size((10, 5))),
        lambda w: set_(stated(w), "size", torch.Size((2**40, 2**40))),
        lambda w: set_(stated(w), "size", (10, -6)),
        lambda w: set_(stated(w), "size", None),
        lambda w: set_(stated(w), "chunks", None),
        lambda w: set_(stated(w), "chunks", [None]),
        lambda w: set_(stated(w), "properties", None),
        lambda w: set_(stated(w).properties, "dtype", torch.float64),
        lambda w: set_(stated(w).properties, "dtype", "float32"),
        lambda w: set_(stated(w).chunks[0], "offsets", (4, 3)),
        lambda w: set_(stated(w).chunks[0], "offsets", (-4, 2)),
        lambda w: set_(stated(w).chunks[0], "sizes", (2**62, 4)),
        lambda w: set_(stated(w).chunks[0], "sizes", (6, 3)),
        lambda w: set_(stated(w).chunks[0], "sizes", (6,)),
        lambda w: stated(w).chunks.extend([stated(w).chunks[0]] * 10**5 + [None]),
        lambda w: (
            w.tensor("t", torch.zeros(3, 2), [(ONE, (0, 0), (3, 2))])
            or set_(stated(w, "t"), "size", (3,))
        ),
        lambda w: w.put(ONE, "model.w", (1, 1), saved(torch.zeros(1, 1))),
        lambda w: w.put(ONE, "bad", None, saved({"w": 1})[:-9]),
        lambda w: w.metadata.storage_data.update({3: info(w), "x": None}),
        lambda w: set_(w.metadata, "storage_data", None),
        lambda w: w.put(ONE, "step", (), saved([torch.tensor(3.5), torch.tensor(1.0)])),
        lambda w: w.put(ONE, "step", (), saved({"a": 1})),
        lambda w: w.put(ONE, "step", (), b"text"),
    ],
)
def test_metadata_that_lie(tmp_path: Path, change: Callable[[Writer], Any]) -> None:
    (tmp_path / "outside").write_bytes(saved(torch.tensor(3.5)))
    hostile(change)(tmp_path / "saved")


def test_no_file_outside_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def noting(path: Path, name: str) -> AbstractContextManager[Source]:
        opened.append(path)
        return open_source(path, name)

    monkeypatch.setattr(ckz.formats.dcp, "open_source", noting)
    (tmp_path / "outside").write_bytes(saved(torch.tensor(3.5)))
    root = tmp_path / "saved"
    writer = two_ranks()
    info(writer).relative_path = "../outside"
    info(writer, "empty", (0, 0)).relative_path = str(tmp_path / "outside")
    assert len(read_checkpoint(writer.write(root)).missing) == 2
    assert sorted(opened) == [root / ".metadata", root / ONE, root / TWO]


@given(st.data())
def test_mutated_metadata_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / "mutated"
    path = two_ranks().write(root) / ".metadata"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path.write_bytes(content)
    checkpoint = read_checkpoint(root)
    check_layout(checkpoint)
    assert not any("\n" in line for line in (*checkpoint.missing, *checkpoint.warnings))


@given(st.data())
def test_mutated_files_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / "mutated"
    path = two_ranks().write(root) / ONE
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    checkpoint = read_checkpoint(root)
    check_layout(checkpoint)
    assert not any("\n" in line for line in (*checkpoint.missing, *checkpoint.warnings))


def test_values_of_a_transposed_chunk(tmp_path: Path) -> None:
    writer = Writer()
    value = torch.arange(12.0).reshape(3, 4)
    writer.put(ONE, "w", (0, 0), saved(value.t().contiguous().t()))
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 4)))
    properties = TensorProperties(dtype=torch.float32)
    writer.metadata.state_dict_metadata["w"] = TensorStorageMetadata(
        properties, value.shape, [chunk]
    )
    expect(writer.write(tmp_path), {"w": value})
