"""Reading and writing by extents."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckz import files


def test_long_files_go_to_the_disk_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(files, "_writeback", lambda: lambda *arguments: called.append(arguments))
    monkeypatch.setattr(files, "_WRITEBACK", 1000)
    with (tmp_path / "a").open("wb") as file:
        for at in range(0, 5000, 500):
            files.write_at(file.fileno(), memoryview(bytes([at // 500]) * 500), at)
        assert len(called) == 5
        assert called[0][0] == file.fileno()
    assert (tmp_path / "a").read_bytes() == b"".join(bytes([k]) * 500 for k in range(10))


def test_starting_it_raises_nothing() -> None:
    start = files._writeback()
    assert start is None or start(-1, 0, 0, files._SYNC_FILE_RANGE_WRITE) == -1
