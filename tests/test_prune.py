"""Rotation: what goes, what stays, what becomes of the rest, and that crashes lose nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from safetensors.numpy import load_file
from stores import HOUR, START, Crash, age, contents, crash_at, names, save, save_trainer

from ckz import pipeline, rotating
from ckz.locking import NAME
from ckz.pruning import Ageing, parse_ageing
from ckz.retention import Policy


def prune(run: Run, root: Path, *arguments: object, code: int = 0) -> dict[str, Any]:
    """Run it, with whatever is old enough, and give what it says."""
    done = run("prune", root, "--json", "--min-age", "0", *arguments)
    assert done.code == code, done.err
    found: dict[str, Any] = json.loads(done.out)["results"][0]
    return found


def left(root: Path) -> list[str]:
    return [name for name in names(root) if not name.startswith(".")]


def test_the_trainers_best_stays(run: Run, tmp_path: Path) -> None:
    for step in range(100, 700, 100):
        save_trainer(tmp_path, step, best="/old/mount/checkpoint-200")
    found = prune(run, tmp_path, "--keep-last", "3")
    assert left(tmp_path) == [f"checkpoint-{n}" for n in (200, 400, 500, 600)]
    assert {c["name"]: c["action"] for c in found["checkpoints"]} == {
        **{f"checkpoint-{n}": "keep" for n in (200, 400, 500, 600)},
        **{f"checkpoint-{n}": "remove" for n in (100, 300)},
    }
    assert found["freed_nbytes"] == sum(c["freed_nbytes"] for c in found["checkpoints"]) > 0


def test_the_best_by_a_metric(run: Run, tmp_path: Path) -> None:
    for step in range(1, 6):
        save_trainer(tmp_path, step, log={s: abs(s - 2.2) for s in range(1, 6)})
    prune(run, tmp_path, "--keep-best", "eval_loss:min:2")
    assert left(tmp_path) == [f"checkpoint-{n}" for n in (2, 3, 5)]
    done = run("prune", tmp_path, "--keep-best", "accuracy:max")
    assert done.code == 2
    assert "eval_loss" in done.err


def test_a_dry_run_does_nothing(run: Run, tmp_path: Path) -> None:
    for step in range(1, 4):
        save_trainer(tmp_path, step)
    before = contents(tmp_path)
    found = prune(run, tmp_path, "--keep-last", "1", "--optimizer-last", "1", "-n")
    assert contents(tmp_path) == before
    assert [c["action"] for c in found["checkpoints"]] == ["keep", "remove", "remove"]
    text = run("prune", tmp_path, "--keep-last", "1", "--min-age", "0", "-n").out
    assert "would remove 2" in text


@pytest.mark.parametrize("last", ["0", "-1", "x", "1.5"])
def test_nothing_to_keep_is_wrong_usage(run: Run, tmp_path: Path, last: str) -> None:
    for step in range(1, 6):
        save(tmp_path, f"step_{step}.pt", step)
    assert run("prune", tmp_path, "--keep-last", last, "--min-age", "0").code == 2
    assert len(left(tmp_path)) == 5


@pytest.mark.parametrize(("last", "stay"), [("1", 1), ("99", 5), ("unlimited", 5)])
def test_limits(run: Run, tmp_path: Path, last: str, stay: int) -> None:
    for step in range(1, 6):
        save(tmp_path, f"step_{step}.pt", step)
    prune(run, tmp_path, "--keep-last", last)
    assert len(left(tmp_path)) == stay
    assert "step_5.pt" in left(tmp_path)


def test_equal_times_are_no_contradiction(run: Run, tmp_path: Path) -> None:
    for step in range(9000, 10001, 100):
        save(tmp_path, f"checkpoint-{step}.pt", step, START)
    prune(run, tmp_path, "--keep-last", "10")
    assert len(left(tmp_path)) == 10
    assert "checkpoint-9000.pt" not in left(tmp_path)


def test_a_reused_directory_is_refused(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "checkpoint-1000.pt", 1000, START)
    for step in (10, 20):
        save(tmp_path, f"checkpoint-{step}.pt", step, START + 86400 + step)
    done = run("prune", tmp_path, "--keep-last", "1", "--min-age", "0")
    assert done.code == 1
    assert "checkpoint-1000.pt" in done.err
    assert len(left(tmp_path)) == 3
    prune(run, tmp_path, "--keep-last", "1", "--order", "mtime")
    assert left(tmp_path) == ["checkpoint-20.pt"]


def test_step_order_where_it_is_said(run: Run, tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path, f"step_{step}.pt", step, START - step * HOUR)
    prune(run, tmp_path, "--keep-last", "1", "--order", "step")
    assert left(tmp_path) == ["step_3.pt"]


def test_incomplete_ones_neither_count_nor_go(run: Run, tmp_path: Path) -> None:
    save_trainer(tmp_path, 100)
    save_trainer(tmp_path, 200)
    (save_trainer(tmp_path, 300) / "optimizer.pt").write_bytes(b"")
    (tmp_path / "checkpoint-400").mkdir()
    (tmp_path / "checkpoint-400" / "trainer_state.json").write_text("{}")
    found = prune(run, tmp_path, "--keep-last", "1")
    assert left(tmp_path) == ["checkpoint-200", "checkpoint-300", "checkpoint-400"]
    actions = {c["name"]: (c["action"], c["reasons"]) for c in found["checkpoints"]}
    assert actions["checkpoint-300"] == ("leave", ["optimizer.pt is empty"])
    assert actions["checkpoint-400"][0] == "leave"
    assert actions["checkpoint-200"] == ("keep", ["newest", "last"])


def test_what_is_being_written_is_left_alone(run: Run, tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path, f"step_{step}.pt", step)
    os.utime(tmp_path / "step_3.pt")
    done = run("prune", tmp_path, "--keep-last", "1")
    assert done.code == 0
    assert left(tmp_path) == ["step_2.pt", "step_3.pt"]


def test_pointers_and_pins_stay(run: Run, tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, f"epoch={step}.ckpt", step)
    (tmp_path / "last.ckpt").symlink_to("epoch=3.ckpt")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latest").write_text("global_step20")
    (tmp_path / "epoch=2.ckpt.keep").touch()
    (tmp_path / "epoch=1.ckpt.tags").write_text("paper")
    done = run("prune", tmp_path, "--keep-last", "1", "--keep-tag", "paper", "--min-age", "0")
    assert done.code == 0
    assert "latest -> global_step20 (missing)" in done.err
    assert [n for n in left(tmp_path) if n.endswith("ckpt")] == [
        "epoch=1.ckpt",
        "epoch=2.ckpt",
        "epoch=3.ckpt",
        "epoch=6.ckpt",
        "last.ckpt",
    ]


def test_strangers_and_unnumbered_ones_stay(run: Run, tmp_path: Path) -> None:
    for step in range(1, 4):
        save_trainer(tmp_path, step)
    save(tmp_path, "model.safetensors", 9)
    save(tmp_path, "best.pt", 9)
    (tmp_path / "notes_1.txt").write_text("x")
    (tmp_path / "runs").mkdir()
    prune(run, tmp_path, "--keep-last", "1")
    assert left(tmp_path) == ["best.pt", "checkpoint-3", "model.safetensors", "notes_1.txt", "runs"]


def test_halves_of_names_go_together(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "epoch=1-val/loss=0.30.ckpt", 1)
    save(tmp_path, "epoch=2-val/loss=0.20.ckpt", 2)
    save(tmp_path, "epoch=3-val/loss=0.25.ckpt", 3)
    prune(run, tmp_path, "--keep-best", "val/loss:min")
    assert left(tmp_path) == ["epoch=2-val", "epoch=3-val"]


def chain(root: Path, steps: range, *, keep_sources: bool = False) -> None:
    """Save steps as .ckz files that each lean on the one before."""
    before = None
    for step in steps:
        path = save(root, f"step_{step}.pt", step)
        pipeline.compress(path, f"{path}.ckz", base=before, anchor=1000)
        before = f"{path}.ckz"
        if not keep_sources:
            path.unlink()


def test_bases_stay(run: Run, tmp_path: Path) -> None:
    chain(tmp_path, range(1, 5))
    found = prune(run, tmp_path, "--keep-last", "1")
    assert len(left(tmp_path)) == 4
    why = {c["name"]: c["reasons"] for c in found["checkpoints"]}
    assert why["step_3.pt"] == ["base of step_4.pt"]


def test_a_source_that_is_a_base_stays(run: Run, tmp_path: Path) -> None:
    first, second = (save(tmp_path, f"step_{n}.pt", n) for n in (1, 2))
    pipeline.compress(second, f"{second}.ckz", base=first)
    second.unlink()
    save(tmp_path, "step_0.pt", 0)
    prune(run, tmp_path, "--keep-last", "1")
    assert left(tmp_path) == ["step_1.pt", "step_2.pt.ckz"]


def test_deltas_become_full_where_that_frees_more(run: Run, tmp_path: Path) -> None:
    chain(tmp_path, range(1, 5))
    expected = load_file(save(tmp_path / "x", "step_4.pt", 4))
    prune(run, tmp_path, "--keep-last", "1", "--rebase")
    assert left(tmp_path) == ["step_4.pt.ckz", "x"]
    pipeline.decompress(tmp_path / "step_4.pt.ckz", tmp_path / "back")
    assert (load_file(tmp_path / "back")["w"] == expected["w"]).all()


def test_a_checkpoint_and_its_container_are_one(run: Run, tmp_path: Path) -> None:
    chain(tmp_path, range(1, 4), keep_sources=True)
    shutil.copy(tmp_path / "step_3.pt", tmp_path / "x")
    prune(run, tmp_path, "--keep-last", "2")
    # The newest leans on the others.
    assert len([n for n in left(tmp_path) if n.endswith(".ckz")]) == 3
    for path in tmp_path.glob("*.ckz"):
        path.unlink()
    prune(run, tmp_path, "--keep-last", "2")
    assert left(tmp_path) == ["step_2.pt", "step_3.pt", "x"]


def test_thinning_strips_states_and_keeps_weights(run: Run, tmp_path: Path) -> None:
    weights = {}
    for step in range(10, 60, 10):
        path = save_trainer(tmp_path, step)
        weights[step] = (path / "model.safetensors").read_bytes()
    before = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
    found = prune(run, tmp_path, "--keep-last", "99", "--optimizer-last", "2")
    assert left(tmp_path) == [
        *(f"checkpoint-{n}.ckz" for n in (10, 20, 30)),
        "checkpoint-40",
        "checkpoint-50",
    ]
    after = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*") if f.is_file())
    assert found["freed_nbytes"] == before - after
    # Two moments of three matrices are gone.
    assert found["freed_nbytes"] >= 3 * 2 * 64 * 64 * 4
    for step in (10, 20, 30):
        packed = tmp_path / f"checkpoint-{step}.ckz"
        assert "not resumable" in run("inspect", packed).out
        back = tmp_path.parent / f"back-{step}"
        assert not pipeline.decompress(packed, back).resumable
        assert (back / "model.safetensors").read_bytes() == weights[step]
        states = torch.load(back / "optimizer.pt")["state"][0]
        assert not states["exp_avg"].any()
        assert states["step"] == step
    again = prune(run, tmp_path, "--keep-last", "99", "--optimizer-last", "2")
    assert again["freed_nbytes"] == 0


def test_ageing(run: Run, tmp_path: Path) -> None:
    now = time.time()
    for step, days in enumerate((30, 8, 3, 0.1), start=1):
        save_trainer(tmp_path, step, now - days * 86400)
    rules = ["--recompress", "older:1d=resume", "--recompress", "older:7d=archive"]
    found = prune(run, tmp_path, *rules)
    presets = {c["name"]: c["preset"] for c in found["checkpoints"]}
    assert presets == {
        "checkpoint-1": "archive",
        "checkpoint-2": "archive",
        "checkpoint-3": "resume",
        "checkpoint-4": None,
    }
    assert left(tmp_path) == [
        *(f"checkpoint-{n}.ckz" for n in (1, 2, 3)),
        "checkpoint-4",
    ]
    # What is as small as it is to be stays as it is.
    before = contents(tmp_path)
    prune(run, tmp_path, *rules)
    assert contents(tmp_path) == before


def test_bases_are_not_thinned(run: Run, tmp_path: Path) -> None:
    paths = [save_trainer(tmp_path, step) for step in (1, 2)]
    pipeline.compress(paths[0], f"{paths[0]}.ckz")
    pipeline.compress(paths[1], f"{paths[1]}.ckz", base=f"{paths[0]}.ckz")
    for path in paths:
        shutil.rmtree(path)
    before = contents(tmp_path)
    found = prune(run, tmp_path, "--keep-last", "9", "--optimizer-last", "1")
    assert contents(tmp_path) == before
    assert "not archive: others lean on it" in found["checkpoints"][1]["reasons"]


def test_words_for_ageing() -> None:
    assert parse_ageing("older:1d12h=resume") == Ageing(129600.0, "resume")
    assert Policy().is_empty


@pytest.mark.parametrize("text", ["1d=resume", "older:1d", "older:x=resume", "older:1d=tiny"])
def test_no_words_for_ageing(run: Run, tmp_path: Path, text: str) -> None:
    assert run("prune", tmp_path, "--recompress", text).code == 2


def test_trash_is_finished_later(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where files that are open become others which cannot be removed yet."""
    for step in range(1, 5):
        save_trainer(tmp_path, step)
    rmtree, fails = shutil.rmtree, [True]

    def stubborn(path: Path) -> None:
        if fails.pop() if fails else False:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        rmtree(path)

    monkeypatch.setattr(rotating.shutil, "rmtree", stubborn)
    found = prune(run, tmp_path, "--keep-last", "1", code=3)
    assert [bool(c["fault"]) for c in found["checkpoints"]] == [False, True, False, False]
    assert left(tmp_path) == ["checkpoint-4"]
    assert len(names(tmp_path)) == 2
    prune(run, tmp_path, "--keep-last", "1")
    assert names(tmp_path) == ["checkpoint-4"]


def test_what_changed_meanwhile_stays(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 4):
        save(tmp_path, f"step_{step}.pt", step)
    plan = rotating.carry_out

    def late(root: Path, actions: Any, **options: Any) -> Any:
        os.utime(root / "step_1.pt")
        (root / "step_2.pt").unlink()
        return plan(root, actions, **options)

    monkeypatch.setattr(rotating, "carry_out", late)
    found = prune(run, tmp_path, "--keep-last", "1", code=3)
    assert left(tmp_path) == ["step_1.pt", "step_3.pt"]
    assert "changed in the meantime" in found["checkpoints"][2]["fault"]


def test_a_failed_thinning_loses_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_trainer(tmp_path, step)
    before = contents(tmp_path)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pipeline, "_decode_and_drop", fail)
    prune(run, tmp_path, "--keep-last", "9", "--optimizer-last", "1", code=3)
    assert contents(tmp_path) == before


def test_of_a_lock_that_is_held(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "step_1.pt", 1)
    held = {"host": os.uname().nodename, "pid": os.getppid()}
    began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    (tmp_path / NAME).write_text(json.dumps(held | {"began": began}))
    done = run("prune", tmp_path, "--keep-last", "1", "--wait", "0")
    assert done.code == 11
    assert f"process {os.getppid()}" in done.err
    # A dry run needs none.
    assert run("prune", tmp_path, "--keep-last", "1", "-n").code == 0


def test_several_at_once(tmp_path: Path) -> None:
    for step in range(1, 13):
        save_trainer(tmp_path, step)
    command = [
        sys.executable,
        "-m",
        "ckz",
        "prune",
        str(tmp_path),
        "--keep-last",
        "2",
        "--min-age",
        "0",
    ]
    running = [subprocess.Popen([*command, "-q"], stderr=subprocess.PIPE) for _ in range(4)]
    for process in running:
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert names(tmp_path) == ["checkpoint-11", "checkpoint-12"]


def test_no_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "none"):
        assert run("prune", path, "--keep-last", "1").code == 1
    assert run("prune", tmp_path, "--keep-last", "1").code == 0


@pytest.mark.parametrize("what", ["remove", "thin", "rebase"])
def test_crashes_lose_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Stop at every step in turn: what is kept restores as it was, and the next run ends it."""
    arguments = {
        "remove": ["--keep-last", "2"],
        "thin": ["--keep-last", "9", "--optimizer-last", "1"],
        "rebase": ["--keep-last", "1", "--rebase"],
    }[what]
    for number in range(1, 60):
        root = tmp_path / str(number)
        root.mkdir()
        if what == "rebase":
            chain(root, range(1, 4))
        else:
            for step in range(1, 4):
                save_trainer(root, step)
        with monkeypatch.context() as patch:
            crashed = crash_at(number, patch)
            with contextlib.suppress(Crash):
                patch.setattr(sys, "argv", ["ckz"])
                _prune_in_process(root, arguments)
            stopped = crashed()
        (root / NAME).unlink(missing_ok=True)  # the process that held it is gone
        _check_restores(root, what)
        prune(run, root, *arguments)
        _check_restores(root, what)
        hidden = [n for n in names(root) if n.startswith(".ckz-trash")]
        assert not hidden
        if not stopped:
            return
    pytest.fail("never came to an end")


def _prune_in_process(root: Path, arguments: list[str]) -> None:
    from ckz.locking import locked
    from ckz.pruning import group, make_plan
    from ckz.store import list_entries

    last = int(arguments[1])
    with locked(root):
        rotating.empty_trash(root)
        saved, others = group(list_entries(root), order="auto", now=time.time(), min_age=0)
        plan = make_plan(
            saved,
            others,
            Policy(last=last),
            time.time(),
            metrics={},
            tags={},
            pinned={},
            optimizer_last=1 if "--optimizer-last" in arguments else None,
            rebase="--rebase" in arguments,
        )
        rotating.carry_out(root, plan)


def _check_restores(root: Path, what: str) -> None:
    """The newest is whole; of all others that are there the weights are."""
    expected = {step: save(root / "x", f"{step}", step).read_bytes() for step in range(1, 4)}
    shutil.rmtree(root / "x")
    there = set()
    for path in sorted(root.iterdir()):
        if path.name.startswith("."):
            continue
        step = int("".join(c for c in path.name if c.isdigit()))
        back = root.parent / "back"
        if path.suffix == ".ckz":
            pipeline.decompress(path, back, force=True)
        else:
            back = path
        file = back / "model.safetensors" if back.is_dir() else back
        assert file.read_bytes() == expected[step]
        there.add(step)
        if back != path:
            shutil.rmtree(back) if back.is_dir() else back.unlink()
    assert 3 in there
    if what != "rebase":
        assert 2 in there


def test_what_has_no_number_keeps_its_base(run: Run, tmp_path: Path) -> None:
    chain(tmp_path, range(1, 4))
    (tmp_path / "step_2.pt.ckz").rename(tmp_path / "mine.ckz")
    (tmp_path / "step_3.pt.ckz").unlink()
    for step in (5, 6):
        save(tmp_path, f"step_{step}.pt", step)
    found = prune(run, tmp_path, "--keep-last", "1", "--rebase")
    assert left(tmp_path) == ["mine.ckz", "step_1.pt.ckz", "step_6.pt"]
    why = {c["name"]: c["reasons"] for c in found["checkpoints"]}
    assert why["step_1.pt"] == ["base of mine.ckz"]


def test_what_a_killed_process_left_goes_in_time(run: Run, tmp_path: Path) -> None:
    save(tmp_path, "step_1.pt", 1)
    save(tmp_path, ".step_1.pt.ckz.0a1b2c3d.ckz-tmp", 1, START)
    save(tmp_path, ".x.ckz.11111111.ckz-tmp", 1, time.time())
    save(tmp_path, ".ckz.abc.ckz-tmp/step_1.pt", 1)
    age(tmp_path / ".ckz.abc.ckz-tmp", START)
    prune(run, tmp_path, "--keep-last", "1")
    assert names(tmp_path) == [".x.ckz.11111111.ckz-tmp", "step_1.pt"]
