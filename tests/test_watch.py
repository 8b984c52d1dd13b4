"""Compressing behind a running job: what is taken, when, against what, and after any crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Run
from safetensors.numpy import save_file
from stores import HOUR, START, age, names, save, save_trainer, weights

from ckz import notifying, pipeline, watching
from ckz.container_read import open_container
from ckz.errors import CkzError
from ckz.locking import locked
from ckz.metrics import read_json
from ckz.watching import STATE, Seen, Settings, one_pass, read_state

CALM = Settings(quiet=0)


def watched(root: Path, settings: Settings = CALM) -> list[tuple[str, str]]:
    return [event[:2] for event in one_pass(root, {}, settings)]


def base_of(path: Path) -> str | None:
    with open_container(path) as container:
        return container.meta["base"] and container.meta["base"]["name"]


def test_each_leans_on_the_one_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"step_{step}.pt", step)
    assert watched(tmp_path) == [("compressed", f"step_{n}.pt") for n in (1, 2, 3)]
    assert [base_of(tmp_path / f"step_{n}.pt.ckz") for n in (1, 2, 3)] == [
        None,
        "step_1.pt.ckz",
        "step_2.pt.ckz",
    ]
    assert watched(tmp_path) == []
    assert read_state(tmp_path).last == "step_3.pt.ckz"
    save(tmp_path, "step_4.pt", 4)
    assert watched(tmp_path) == [("compressed", "step_4.pt")]
    assert base_of(tmp_path / "step_4.pt.ckz") == "step_3.pt.ckz"


def test_an_older_one_does_not_lean_on_a_newer(tmp_path: Path) -> None:
    """Its .ckz was moved away, so it is written again, but the newer one leans on the moved one."""
    for step in (1, 2):
        save(tmp_path, f"step_{step}.pt", step)
    watched(tmp_path)
    (tmp_path / "step_1.pt.ckz").rename(tmp_path / "moved.ckz")
    assert watched(tmp_path) == [("compressed", "step_1.pt")]
    assert base_of(tmp_path / "step_1.pt.ckz") is None
    for path in tmp_path.glob("*.ckz"):
        pipeline.verify(path, data=True)


def test_the_first_one_alone_is_taken(tmp_path: Path) -> None:
    save_trainer(tmp_path, 5)
    save(tmp_path, "best.pt", 5)
    assert watched(tmp_path) == [("compressed", "checkpoint-5")]


def test_a_base_that_is_not_what_was_written_is_not_leaned_on(tmp_path: Path) -> None:
    save(tmp_path, "step_1.pt", 1)
    watched(tmp_path)
    other = save(tmp_path, "other", 9, START + HOUR)  # as old as the first
    pipeline.compress(other, tmp_path / "step_1.pt.ckz", force=True)
    save(tmp_path, "step_2.pt", 2)
    watched(tmp_path)
    assert base_of(tmp_path / "step_2.pt.ckz") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"last": 3}', '{"failed": {"a": 1}}'])
def test_a_damaged_state_is_not_believed(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text)
    save(tmp_path, "step_1.pt", 1)
    assert watched(tmp_path) == [("compressed", "step_1.pt")]


def test_what_is_incomplete_or_not_quiet_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step_5"
    settings = Settings(quiet=30, marker="STABLE")
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: START + clock[0])
    seen: dict[str, Seen] = {}

    def look(passed: float) -> list[str]:
        clock[0] += passed
        return [event.name for event in one_pass(tmp_path, seen, settings)]

    save(folder, "model-00001-of-00002.safetensors", 1, START + clock[0])
    assert look(0) == []
    assert look(100) == []  # no marker
    second = {"v": weights(2)["w"]}
    save_file(second, folder / "model-00002-of-00002.safetensors")
    (folder / "STABLE").touch()
    age(folder, START + clock[0])
    assert look(1) == []
    assert look(20) == []  # not quiet for long
    # A server whose clock is behind: by its times it is quiet, but it just changed.
    save_file(second, folder / "model-00002-of-00002.safetensors", {"x": "y"})
    age(folder, START - 10**6)
    assert look(20) == []
    assert look(20) == []
    assert look(20) == ["step_5"]
    assert look(20) == []


def test_what_is_saved_again_is_taken_again(tmp_path: Path) -> None:
    """And what leaned on the earlier one still restores."""
    for step in (1, 2, 3):
        save(tmp_path, f"step_{step}.pt", step)
    watched(tmp_path)
    expected = {}
    for step, content in ((1, 7), (3, 8)):
        save(tmp_path, f"step_{step}.pt", content, START + 1)
    for step in (1, 2, 3):
        expected[step] = (tmp_path / f"step_{step}.pt").read_bytes()
    assert watched(tmp_path) == [("compressed", "step_1.pt"), ("compressed", "step_3.pt")]
    for step in (1, 2, 3):
        pipeline.decompress(tmp_path / f"step_{step}.pt.ckz", tmp_path / "back", force=True)
        assert (tmp_path / "back").read_bytes() == expected[step]


def test_sources_go_but_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, f"step_{step}.pt", step)
    (tmp_path / "latest").write_text("step_2.pt")
    settings = Settings(quiet=0, remove=True)
    assert watched(tmp_path, settings)[4:] == [("removed", "step_1.pt"), ("removed", "step_3.pt")]
    for step in (1, 2, 3, 4):
        back = tmp_path / "back"
        pipeline.decompress(tmp_path / f"step_{step}.pt.ckz", back, force=True)
        expected = save(tmp_path / "x", "y", step).read_bytes()
        assert back.read_bytes() == expected


def test_failures_are_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "step_1.pt", 1)
    save(tmp_path, "step_2.pt", 2)
    compress = pipeline.compress

    def fail(source: Path, *arguments: object, **options: object) -> object:
        if source.name == "step_1.pt" and broken:
            raise CkzError("no luck")
        return compress(source, *arguments, **options)  # type: ignore[arg-type]

    broken = True
    monkeypatch.setattr(pipeline, "compress", fail)
    now = [START * 2.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    assert watched(tmp_path) == [("failed", "step_1.pt"), ("compressed", "step_2.pt")]
    pauses = []
    for tries in (1, 2, 3):
        assert read_state(tmp_path).failed["step_1.pt"][0] == tries
        assert watched(tmp_path) == []
        pauses.append(read_state(tmp_path).failed["step_1.pt"][1] - now[0])
        now[0] += pauses[-1] + 1
        broken = tries < 3
        watched(tmp_path)
    assert pauses == [30.0, 60.0, 120.0]
    assert read_state(tmp_path).failed == {}
    assert (tmp_path / "step_1.pt.ckz").exists()


def test_what_changes_while_it_is_compressed_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path, "step_1.pt", 1)
    compress = watching._compress

    def late(root: Path, *arguments: object) -> object:
        report = compress(root, *arguments)  # type: ignore[arg-type]
        os.utime(source)
        return report

    monkeypatch.setattr(watching, "_compress", late)
    assert watched(tmp_path) == [("failed", "step_1.pt")]
    assert names(tmp_path) == [STATE, "step_1.pt"]


def test_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "step_aside", lambda: None)
    for step in (1, 2):
        save_trainer(tmp_path, step)
    done = run("watch", tmp_path, "--once", "--quiet-for", "0", "-n")
    assert done.out.splitlines() == [f"checkpoint-{n}: would be compressed" for n in (1, 2)]
    done = run("watch", tmp_path, "--once", "--quiet-for", "0", "--json", "--rm")
    assert done.code == 0
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["type"], line["name"]) for line in lines] == [
        ("compressed", "checkpoint-1"),
        ("compressed", "checkpoint-2"),
        ("removed", "checkpoint-1"),
    ]
    assert lines[0]["report"]["stored_nbytes"] > 0
    assert [n for n in names(tmp_path) if not n.startswith(".")] == [
        "checkpoint-1.ckz",
        "checkpoint-2",
        "checkpoint-2.ckz",
    ]


def test_wrong_usage(run: Run, tmp_path: Path) -> None:
    assert run("watch", tmp_path / "none", "--once").code == 1
    assert run("watch", tmp_path, "--rm", "--preset", "archive").code == 2
    assert run("watch", tmp_path, "--anchor", "x").code == 2


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckz", "watch", str(root), "--json", "--interval", "0.2"]
    return subprocess.Popen(
        [*command, "--quiet-for", "0.3", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300  # at the lowest priority, beside whatever else runs
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def test_it_runs_until_it_is_told_to_end(tmp_path: Path) -> None:
    process = start(tmp_path)
    for step in (1, 2):
        save(tmp_path, f"step_{step}.pt", step, time.time())
        wait_for(tmp_path / f"step_{step}.pt.ckz", process)
    while read_state(tmp_path).last != "step_2.pt.ckz":
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["step_1.pt", "step_2.pt"]
    assert err == ""
    assert not [n for n in names(tmp_path) if "tmp" in n or "lock" in n]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    """Kill -9 again and again while a job saves; in the end all is there and restores."""
    for step in range(1, 31):
        save(tmp_path, f"step_{step}.pt", step, START + step)
        process = start(tmp_path, "--rm")
        time.sleep(0.5 + step % 10 / 10)
        process.kill()
        process.communicate()
    process = start(tmp_path, "--rm")
    wait_for(tmp_path / "step_30.pt.ckz", process)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    for step in range(1, 31):
        back = tmp_path / "x" / "back"
        back.parent.mkdir(exist_ok=True)
        pipeline.decompress(tmp_path / f"step_{step}.pt.ckz", back, force=True)
        assert back.read_bytes() == save(tmp_path / "x", "y", step).read_bytes()


def test_it_waits_where_another_works(tmp_path: Path) -> None:
    save(tmp_path, "step_1.pt", 1)
    with locked(tmp_path):
        process = start(tmp_path)
        time.sleep(2)
        assert not (tmp_path / "step_1.pt.ckz").exists()
        assert process.poll() is None
    wait_for(tmp_path / "step_1.pt.ckz", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def test_it_is_told_of_new_files(tmp_path: Path) -> None:
    with notifying.open_waiter(tmp_path) as fd:
        if fd < 0:
            pytest.skip("no notification on this file system")
        (tmp_path / "a").touch()
        began = time.monotonic()
        notifying.wait(fd, 20)
        assert time.monotonic() - began < 5
        began = time.monotonic()
        notifying.wait(fd, 0.3)
        assert time.monotonic() - began >= 0.25


def test_without_notification_time_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifying, "_is_remote", lambda *arguments: True)
    with notifying.open_waiter(tmp_path) as fd:
        assert fd == -1
        notifying.wait(fd, 0.01)


def test_state_is_a_file_that_is_whole(tmp_path: Path) -> None:
    save(tmp_path, "step_1.pt", 1)
    assert watched(tmp_path) == [("compressed", "step_1.pt")]
    assert read_json(tmp_path / STATE)["last"] == "step_1.pt.ckz"
