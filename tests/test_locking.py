"""The lock of a directory, and what is tried again."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from stores import save

from ckz import locking, pipeline, retrying
from ckz.errors import LockedError
from ckz.files import FileSet
from ckz.locking import NAME, locked
from ckz.retrying import PAUSES, retried
from ckz.streams import Extent


def test_one_at_a_time(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(5):
            with locked(tmp_path, wait=60):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_held_lock_names_its_holder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(LockedError, match=f"process {os.getpid()} on"),
        locked(tmp_path, wait=0.2),
    ):
        pass


def test_it_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = "import sys, time\nfrom pathlib import Path\nfrom ckz.locking import locked\n"
    code += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError), locked(tmp_path):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    assert (tmp_path / NAME).exists()
    with locked(tmp_path):
        pass


def test_a_number_that_is_anothers_by_now(tmp_path: Path) -> None:
    held = {"host": socket.gethostname(), "pid": os.getpid(), "began": "1"}
    (tmp_path / NAME).write_text(json.dumps(held))
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    "text",
    ["", "{}", "nonsense", '{"host": "elsewhere", "pid": 1, "began": "1"}', "\0" * 10000, "[1]"],
)
def test_what_nobody_can_tell_stands(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(LockedError, match=NAME), locked(tmp_path):
        pass
    assert (tmp_path / NAME).read_text() == text


def test_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with locked(tmp_path):
        with pytest.raises(LockedError), locked(tmp_path):
            pass
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EAGAIN])
def test_transient_failures(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(retrying, "PAUSES", (0.0,) * len(PAUSES))
    calls = []

    def act() -> str:
        calls.append(1)
        if len(calls) <= fails:
            raise OSError(code, os.strerror(code))
        return "done"

    fails = len(PAUSES)
    assert retried(act) == "done"
    calls.clear()
    fails = 10**6
    with pytest.raises(OSError, match=os.strerror(code)):
        retried(act)
    assert len(calls) == len(PAUSES) + 1


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENOSPC])
def test_what_stays_so_is_not_tried_again(code: int) -> None:
    calls = []

    def act() -> None:
        calls.append(1)
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=os.strerror(code)):
        retried(act)
    assert len(calls) == 1


@pytest.mark.parametrize("call", ["preadv", "pwrite", "pread"])
def test_compression_survives_a_hiccup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Every third call fails once."""
    monkeypatch.setattr(retrying, "PAUSES", (0.0,))
    real, count = getattr(os, call), [0]

    def flaky(*arguments: object) -> object:
        count[0] += 1
        if count[0] % 3 == 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    source = save(tmp_path, "a.safetensors", 1)
    monkeypatch.setattr(os, call, flaky)
    pipeline.compress(source, tmp_path / "a.ckz", verify=True)
    pipeline.decompress(tmp_path / "a.ckz", tmp_path / "back")
    with FileSet([source], os.O_RDONLY) as files:
        for _ in range(4):
            files.read([Extent(0, 0, 8)], np.empty(8, np.uint8))
    assert count[0] >= 3
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


# Files that an end leaves to the garbage collector warn.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stale", [False, True])
def test_an_end_between_any_two_lines_leaves_nothing(tmp_path: Path, stale: bool) -> None:
    """A signal's exception comes once, and may come before every line that holds a lock."""
    left = [-1]

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in (locking.__file__, contextlib.__file__):
            return None
        if event == "line" and left[0] >= 0:
            left[0] -= 1
            if left[0] < 0:
                raise SystemExit(143)
        return trace

    def ended(lines: int) -> bool:
        if stale:
            holder = {"host": socket.gethostname(), "pid": 2**22 + 1, "began": "1"}
            (tmp_path / NAME).write_text(json.dumps(holder))
        left[0] = lines
        sys.settrace(trace)
        try:
            with locked(tmp_path):
                pass
        except SystemExit:
            return True
        finally:
            sys.settrace(None)
        return False

    lines = 0
    while ended(lines):
        lines += 1
        if stale:  # Its end may have come before this one was looked at.
            (tmp_path / NAME).unlink(missing_ok=True)
        assert list(tmp_path.iterdir()) == []
    assert lines > 20


def test_a_signal_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    """A process that takes the lock and gives it back all the time is told to end."""
    code = "import sys, time\nfrom pathlib import Path\nfrom ckz.cli import stopping\n"
    code += "from ckz.locking import locked\nstopping.catch()\nprint('go', flush=True)\n"
    # Not for ever, should nobody be left to end it.
    code += "while time.process_time() < 30:\n    with locked(Path(sys.argv[1])):\n        pass\n"
    for number in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(0.002 * number)
        process.terminate()
        assert process.wait() == 143
        process.stdout.close()
        assert list(tmp_path.iterdir()) == []
