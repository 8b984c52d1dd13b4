"""Containers and sources that mean harm: each was an attack that once worked."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
import torch
from test_chain import first, later, save
from test_container import rewrite

import ckz
from ckz import container as layout
from ckz import container_write, kernels, pipeline
from ckz.container_read import open_container
from ckz.errors import CkzError, CorruptError
from ckz.formats import read_checkpoint

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_bytes(os.urandom(5000))
    (root / "link").symlink_to("a")
    pipeline.compress(root, tmp_path / "run.ckz")
    return tmp_path / "run.ckz"


def entry(container: dict[str, Any], name: str) -> int:
    return list(container["names"]).index(name)


def test_contents_of_a_link_are_not_written_to_what_it_points_to(packed: Path) -> None:
    victim = packed.with_name("victim")
    victim.write_text("mine")

    def change(tables: dict[str, Any], meta: dict[str, Any]) -> None:
        number = entry(tables, "a")
        tables["files"]["kind"][number] = layout.KINDS.index("link")
        tables["names"][len(tables["files"]) + number] = str(victim)

    rewrite(packed, change)
    with pytest.raises(CorruptError):
        pipeline.decompress(packed, packed.with_name("out"))
    assert victim.read_text() == "mine"
    assert not packed.with_name("out").exists()


def lie_about(table: str, field: str, name: str, value: int) -> Change:
    return lambda t, m: t[table][field].__setitem__(entry(t, name), value)


@pytest.mark.parametrize(
    "change",
    [
        lie_about("files", "kind", "a", layout.KINDS.index("dir")),
        lie_about("files", "mode", "a", (1 << 32) - 1),
        lambda t, m: t["names"].__setitem__(entry(t, "a"), "a/" * 500_000 + "a"),
        lambda t, m: t["names"].__setitem__(entry(t, "a"), "x" * 300),
        lambda t, m: t["names"].__setitem__(len(t["files"]) + entry(t, "link"), "a\0b"),
        lambda t, m: t["names"].__setitem__(len(t["files"]) + entry(t, "link"), ""),
        lambda t, m: m.__setitem__("mode", 1 << 20),
        lambda t, m: m.__setitem__("mtime_ns", 1 << 90),
        lambda t, m: m.__setitem__("numbers", {"lr": "high"}),
    ],
)
def test_impossible_entries_are_refused(packed: Path, change: Change) -> None:
    rewrite(packed, change)
    began = time.monotonic()
    with pytest.raises(CorruptError):
        pipeline.decompress(packed, packed.with_name("out"))
    assert time.monotonic() - began < 10  # a bound for a hang, not a speed


def test_a_digest_of_a_link_is_not_asked_of_what_it_points_to(packed: Path) -> None:
    def change(tables: dict[str, Any], meta: dict[str, Any]) -> None:
        tables["names"][len(tables["files"]) + entry(tables, "link")] = "/dev/zero"
        meta["sha256"] = {"link": "00"}

    rewrite(packed, change)
    pipeline.decompress(packed, packed.with_name("out"))
    assert os.fspath((packed.with_name("out") / "link").readlink()) == "/dev/zero"


def test_references_do_not_multiply_work(tmp_path: Path) -> None:
    source = tmp_path / "blocks"
    source.write_bytes(b"".join(bytes([i]) * (1 << 20) for i in range(40)))
    pipeline.compress(source, tmp_path / "x.ckz")

    def change(tables: dict[str, Any], meta: dict[str, Any]) -> None:
        refs = []
        for chunk in range(12, 40):
            first_chunk = 0 if chunk < 24 else 12
            tables["chunks"]["refs"][chunk] = 6
            refs += [(0, 0, (first_chunk + j << 20) + 5, 4 << 20) for j in range(6)]
        tables["refs"] = np.array(refs, layout.REFS)

    rewrite(tmp_path / "x.ckz", change)
    with pytest.raises(CorruptError, match="references"):
        pipeline.verify(tmp_path / "x.ckz", data=True)


def test_links_out_of_the_index_are_not_followed(packed: Path) -> None:
    fifo = packed.with_name("fifo")
    os.mkfifo(fifo)
    with h5py.File(packed, "r+", locking=False) as h5:
        del h5["index"]
        h5["index"] = h5py.ExternalLink(str(fifo), "index")
    with h5py.File(packed, "r", locking=False) as h5:
        extents = [
            (h5["payload"][k].id.get_offset(), h5["payload"][k].shape[0]) for k in h5["payload"]
        ]
        at = h5["extents"].id.get_offset()
    fd = os.open(packed, os.O_RDWR)
    length = os.fstat(fd).st_size
    digest = layout.digest_outside(fd, length, extents)
    head = layout.HEAD.pack(layout.MAGIC, layout.VERSION, len(extents), length, at, digest)
    os.pwrite(fd, container_write._seal(head), 0)
    os.close(fd)
    with pytest.raises(CorruptError, match="another place"):
        pipeline.verify(packed)


@pytest.mark.parametrize("name", ["", "..", "/", "a/b", "a\0b", "\ud800"])
def test_a_base_is_no_path(tmp_path: Path, name: str) -> None:
    a = save(tmp_path / "a.safetensors", first())
    b = save(tmp_path / "b.safetensors", later(first()))
    output = tmp_path / "b.ckz"
    pipeline.compress(b, output, base=a)
    rewrite(output, lambda t, m: m["base"].__setitem__("name", name))
    for action in (pipeline.verify, ckz.open):
        with pytest.raises(CkzError):
            action(output)


def test_lies_about_base_spans_are_refused(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", first())
    b = save(tmp_path / "b.safetensors", later(first()))
    output = tmp_path / "b.ckz"
    for field, value in (("nbytes", 1), ("digest", b"\0" * 16)):
        pipeline.compress(b, output, base=a, force=True)
        rewrite(output, lambda t, m, f=field, v=value: t["base_spans"][f].__setitem__(0, v))  # type: ignore[misc]
        with pytest.raises(CkzError):
            pipeline.decompress(output, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_what_leans_on_much_can_be_opened(tmp_path: Path) -> None:
    """A repeated cast of a replayed weight is as deep as references go."""
    torch.manual_seed(0)
    rows, columns = 512, 1024
    weight = torch.nn.Parameter(torch.randn(rows, columns) * 0.02)
    adam = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.01, foreach=False)
    paths = []
    for step in range(7):
        scale = torch.exp(torch.randn(rows, 1) * 2) * torch.exp(torch.randn(1, columns) * 2)
        weight.grad = torch.randn(rows, columns) * scale * (1 if step == 6 else 1e-3)
        adam.step()
        half = weight.detach().bfloat16()
        state = {"model": {"w": weight.detach()}, "optimizer": adam.state_dict()}
        paths.append(tmp_path / f"{step}.pt")
        torch.save(state | {"half": {"w": half, "tied": half.clone()}}, paths[-1])
    output = tmp_path / "x.ckz"
    pipeline.compress(paths[6], output, base=paths[5], verify=True)
    with open_container(output) as container:
        used = {text.partition(":")[0] for text in container.meta["codecs"]}
    assert {"cast", "same", "adam-weight"} <= used


def test_a_read_only_installation_compiles_without_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numba

    compiled = []

    def njit(body: Any, *, nogil: bool, cache: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        compiled.append(body)
        return body

    monkeypatch.setattr(numba, "njit", njit)
    kernel = kernels.Kernel(lambda x: x + 1, lambda x: x + 1)
    assert kernel.compiled(1) == 2
    assert len(compiled) == 1


def test_a_long_key_used_often_takes_no_time(tmp_path: Path) -> None:
    key = "k" * (1 << 20)
    path = tmp_path / "keys.pt"
    torch.save([{key: torch.ones(1), "short": torch.ones(2)} for _ in range(3000)], path)
    began = time.monotonic()
    checkpoint = read_checkpoint(path)
    assert time.monotonic() - began < 20  # a bound for a hang, not a speed
    assert any(tensor.name == "0.short" for tensor in checkpoint.tensors)


def test_absurd_shapes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808, 0), }"
    header = header.ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(CkzError):
        pipeline.compress(path, tmp_path / "x.ckz")


def test_times_beyond_records_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", first())
    os.utime(path, (1.4e10, 1.4e10))
    if path.stat().st_mtime_ns < 1 << 63:
        return  # the file system clamps it
    with pytest.raises(CkzError, match="time"):
        pipeline.compress(path, tmp_path / "x.ckz")


def test_a_directory_keeps_its_own_mode_and_time(tmp_path: Path) -> None:
    root = tmp_path / "private"
    root.mkdir()
    (root / "a").write_text("x")
    (root / "secret").mkdir()
    (root / "secret" / "b").write_text("y")
    (root / "a").chmod(0o4755)
    (root / "secret").chmod(0o2750)
    root.chmod(0o700)
    os.utime(root, ns=(1, 1_000_000_000))
    pipeline.compress(root, tmp_path / "x.ckz")
    pipeline.decompress(tmp_path / "x.ckz", tmp_path / "back")
    found = (tmp_path / "back").stat()
    assert stat.S_IMODE(found.st_mode) == 0o700
    assert found.st_mtime_ns == 1_000_000_000
    # What lets a file run as its owner does not come out of a container.
    assert stat.S_IMODE((tmp_path / "back" / "a").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "back" / "secret").stat().st_mode) == 0o2750


def test_damaged_containers_inside_a_directory_are_found(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    source = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(first(), source)
    pipeline.compress(source, root / "m.ckz")
    pipeline.verify(root)
    with open_container(root / "m.ckz") as container:
        place = int(container.places[0])
    data = bytearray((root / "m.ckz").read_bytes())
    data[place + 9] ^= 1
    (root / "m.ckz").write_bytes(data)
    with pytest.raises(CorruptError):
        pipeline.verify(root)


def test_a_flipped_magic_number_is_no_other_format(tmp_path: Path) -> None:
    source = save(tmp_path / "m.safetensors", first())
    packed = tmp_path / "unnamed"
    pipeline.compress(source, packed)
    data = bytearray(packed.read_bytes())
    data[2] ^= 1
    packed.write_bytes(data)
    with pytest.raises(CorruptError):
        pipeline.verify(packed)


def test_tensors_that_lie_nowhere_are_not_written_out(tmp_path: Path) -> None:
    source = save(
        tmp_path / "m.safetensors", {"empty": np.zeros((0, 3), "f4"), "w": np.ones(3, "f4")}
    )
    packed = tmp_path / "m.ckz"
    pipeline.compress(source, packed)

    def change(tables: dict[str, Any], meta: dict[str, Any]) -> None:
        dims = tables["dims"]
        dims[np.flatnonzero(dims == 0)[0]] = 1 << 30

    rewrite(packed, change)
    with ckz.open(packed) as archive, pytest.raises(CkzError, match="nowhere"):
        archive["empty"]
