"""What reaches the disk, in which order; file systems without mmap; caches made of links."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run, state
from safetensors.numpy import save_file


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and renamed, by name, in order."""
    found: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def sync(fd: int) -> None:
        found.append(("sync", Path(f"/proc/self/fd/{fd}").readlink().name))
        fsync(fd)

    def renamed(act: Any) -> Any:
        def move(source: Any, target: Any, **how: Any) -> None:
            found.append(("rename", f"{Path(source).name} {Path(target).name}"))
            act(source, target, **how)

        return move

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", renamed(rename))
    monkeypatch.setattr(os, "replace", renamed(replace))
    return found


def assert_durable(calls: list[tuple[str, str]], name: str, folder: str) -> None:
    """A name is given after the contents are on the disk, and is then put there itself."""
    at, moved = next(
        (i, words) for i, (what, words) in enumerate(calls) if what == "rename" and name in words
    )
    assert moved.endswith(f" {name}")
    assert ("sync", moved.split()[0]) in calls[:at]
    assert ("sync", folder) in calls[at:]


def test_contents_are_synced_before_they_get_their_name(
    model: Path, run: Run, calls: list[tuple[str, str]]
) -> None:
    container = f"{model}.ckz"
    assert run("compress", model).code == 0
    assert_durable(calls, Path(container).name, model.parent.name)
    calls.clear()
    assert run("decompress", "-f", container).code == 0
    assert_durable(calls, model.name, model.parent.name)
    calls.clear()
    assert run("rebase", "--full", container).code == 0
    assert_durable(calls, Path(container).name, model.parent.name)


def test_the_source_goes_after_the_result_is_synced(
    model: Path, run: Run, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def gone(path: Any, **how: Any) -> None:
        calls.append(("unlink", Path(os.fspath(path)).name))
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", gone)
    monkeypatch.setattr(os, "remove", gone)
    assert run("compress", "--rm", model).code == 0
    assert not model.exists()
    assert_durable(calls, f"{model.name}.ckz", model.parent.name)
    named = next(i for i, call in enumerate(calls) if call[0] == "rename")
    kept = calls.index(("sync", model.parent.name), named)
    assert any(
        what in ("unlink", "rename") and model.name in words.split() for what, words in calls[kept:]
    )
    assert ("unlink", model.name) not in calls[:kept]


def test_no_command_maps_files(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no mmap, and mapped pages count as memory."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(np, "memmap", refuse)
    original, container = model.read_bytes(), f"{model}.ckz"
    for arguments in (
        ["compress", model],
        ["inspect", container],
        ["verify", "--data", container],
        ["diff", model, container],
        ["decompress", "-f", container],
        ["rebase", "--full", container],
        ["prune", model.parent, "--keep-last", "1"],
    ):
        assert run(*arguments).code == 0, arguments
    assert model.read_bytes() == original


def test_a_cache_of_links(tmp_path: Path, run: Run) -> None:
    """Snapshots that are links to blobs: read through, never replaced, and kept as links."""
    root = tmp_path / "models--x"
    blob = root / "blobs" / "abc"
    blob.parent.mkdir(parents=True)
    save_file(state(scale=20), blob)
    links = [root / "snapshots" / revision / "model.safetensors" for revision in ("r1", "r2")]
    for link in links:
        link.parent.mkdir(parents=True)
        link.symlink_to("../../blobs/abc")
    original = blob.read_bytes()
    refused = run("compress", "--rm", links[0])
    assert refused.code == 1
    assert "link" in refused.err
    assert blob.read_bytes() == original
    assert [path.name for path in blob.parent.iterdir()] == ["abc"]
    assert run("compress", links[0], "-o", tmp_path / "one.ckz").code == 0
    assert run("compress", root).code == 0
    one, whole = (tmp_path / name for name in ("one.ckz", "models--x.ckz"))
    assert whole.stat().st_size < one.stat().st_size + 1500
    assert run("decompress", whole, "-o", tmp_path / "back").code == 0
    assert (tmp_path / "back" / "blobs" / "abc").read_bytes() == original
    assert (tmp_path / "back" / "snapshots" / "r2" / "model.safetensors").is_symlink()
    assert run("decompress", one, "-o", tmp_path / "m").code == 0
    assert (tmp_path / "m").read_bytes() == original
