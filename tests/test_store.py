"""What is found in a directory: steps, faults, bases, pointers, pins and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from stores import HOUR, START, age, save, save_trainer

from ckz import pipeline
from ckz.marks import find_marks
from ckz.metrics import best_in_state, metrics_in_name, read_metrics
from ckz.pointers import find_pointers
from ckz.pruning import group
from ckz.store import Entry, list_entries, step_in


def listed(root: Path, **options: str) -> dict[str, Entry]:
    return {entry.name: entry for entry in list_entries(root, **options)}


@pytest.mark.parametrize(
    ("names", "latest"),
    [
        (["step_500", "step_2500"], "step_2500"),
        (["100000", "0900000"], "0900000"),
        (["000100", "handpicked"], "000100"),
        (["samples_9999", "samples_19"], "samples_9999"),
        (["epoch=9-step=900.ckpt", "epoch=10-step=1000.ckpt"], "epoch=10-step=1000.ckpt"),
        (["epoch=9.ckpt", "epoch=10.ckpt"], "epoch=10.ckpt"),
        (["global_step9", "global_step10"], "global_step10"),
        (["iter_0000100", "iter_0001000"], "iter_0001000"),
        (["iter-80000", "iter-1080000"], "iter-1080000"),
    ],
)
def test_steps_are_numbers(tmp_path: Path, names: list[str], latest: str) -> None:
    for name in names:
        save(tmp_path, name, 1)
    saved, _ = group(list_entries(tmp_path), order="step", now=START * 2, min_age=0)
    assert saved[-1].name == latest


def test_directories_must_say_that_they_are_of_a_step(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / f"run_{number}", "checkpoint-5/model.safetensors", 5)
        save(tmp_path / f"run_{number}", "checkpoint-7/model.safetensors", 7)
    assert not any(e.numbered for e in listed(tmp_path).values())
    # What holds checkpoints is none.
    assert listed(tmp_path) == {}
    assert step_in("run_7", directory=True) is None
    assert step_in("7", directory=True) == 7


def test_a_number_by_chance_is_none(tmp_path: Path) -> None:
    for name in ("step_1.pt", "step_2.pt", "vocab_32000.pt", "best.pt"):
        save(tmp_path, name, 1)
    found = listed(tmp_path)
    assert {name for name, e in found.items() if e.numbered} == {"step_1.pt", "step_2.pt"}


def test_incomplete_ones_say_why(tmp_path: Path) -> None:
    for step in (100, 200, 500):
        save_trainer(tmp_path, step)
    (save_trainer(tmp_path, 300) / "optimizer.pt").write_bytes(b"")
    only = tmp_path / "checkpoint-400"
    only.mkdir()
    (only / "trainer_state.json").write_text("{}")
    cut = save_trainer(tmp_path, 600) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (save_trainer(tmp_path, 700) / "optimizer.pt").unlink()
    (tmp_path / "tmp-checkpoint-800").mkdir()
    save(tmp_path / "tmp-checkpoint-800", "model.safetensors", 1)
    found = listed(tmp_path)
    assert {name for name, e in found.items() if not e.fault} == {
        "checkpoint-100",
        "checkpoint-200",
        "checkpoint-500",
    }
    assert found["checkpoint-300"].fault == "optimizer.pt is empty"
    assert found["checkpoint-400"].fault == "no tensors in it"
    assert "model.safetensors" in found["checkpoint-600"].fault
    assert found["checkpoint-700"].fault == "lacks optimizer.pt, which all others have"
    assert found["tmp-checkpoint-800"].fault == "unfinished by its name"


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    save(folder, "model-00001-of-00002.safetensors", 1)
    index = {
        "weight_map": {
            "w": "model-00001-of-00002.safetensors",
            "x": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in listed(tmp_path)["checkpoint-5"].fault


def test_a_marker_is_waited_for(tmp_path: Path) -> None:
    path = save_trainer(tmp_path, 5)
    assert listed(tmp_path, marker="STABLE")["checkpoint-5"].fault == "no STABLE in it"
    (path / "STABLE").touch()
    assert not listed(tmp_path, marker="STABLE")["checkpoint-5"].fault


def test_strangers_are_no_entries(tmp_path: Path) -> None:
    (tmp_path / "notes_7.txt").write_text("x")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.7").write_bytes(b"\0" * 100)
    (tmp_path / ".hidden_7.pt").write_bytes(b"x")
    (tmp_path / "empty_7").mkdir()
    assert listed(tmp_path) == {}


def test_bases_are_found_by_content(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, f"step_{n}.safetensors", n) for n in (1, 2, 3))
    pipeline.compress(first, f"{first}.ckz")
    pipeline.compress(second, f"{second}.ckz", base=f"{first}.ckz")
    pipeline.compress(third, f"{third}.ckz", base=second)
    moved = tmp_path / "moved.ckz"
    Path(f"{first}.ckz").rename(moved)
    found = listed(tmp_path)
    assert found["step_2.safetensors.ckz"].base == ("moved.ckz",)
    # A .ckz of the same content does, where the base was a source.
    assert found["step_3.safetensors.ckz"].base == ("step_2.safetensors.ckz",)
    Path(f"{second}.ckz").unlink()
    assert listed(tmp_path)["step_3.safetensors.ckz"].base == ("step_2.safetensors",)
    second.unlink()
    assert "is not here" in listed(tmp_path)["step_3.safetensors.ckz"].fault


def test_times_are_those_of_the_source(tmp_path: Path) -> None:
    path = save_trainer(tmp_path, 5)
    pipeline.compress(path, f"{path}.ckz")
    found = listed(tmp_path)
    assert found["checkpoint-5.ckz"].time == found["checkpoint-5"].time == START + 5 * HOUR
    assert found["checkpoint-5.ckz"].changed > START * 1.01


def test_halves_of_names(tmp_path: Path) -> None:
    save(tmp_path, "epoch=1-val/loss=0.30.ckpt", 1)
    save(tmp_path, "epoch=2-val/loss=0.20.ckpt", 2)
    found = listed(tmp_path)
    assert list(found) == ["epoch=1-val/loss=0.30.ckpt", "epoch=2-val/loss=0.20.ckpt"]
    assert [metrics_in_name(name) for name in found] == [{"val/loss": 0.3}, {"val/loss": 0.2}]


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]+(?:[_/][a-z]+)?", fullmatch=True).filter(
            lambda k: k not in ("epoch", "step")
        ),
        st.decimals(-1000, 1000, places=3).map(float),
        min_size=1,
        max_size=3,
    )
)
def test_metrics_of_any_name(metrics: dict[str, float]) -> None:
    text = "-".join(f"{key}={value:.3f}" for key, value in metrics.items())
    assert metrics_in_name(f"epoch=3-step=40-{text}.ckpt") == pytest.approx(metrics)
    assert metrics_in_name(f"epoch=3-step=40-{text}-v1.ckpt.ckz") == pytest.approx(metrics)


def test_pointers(tmp_path: Path) -> None:
    for name in ("epoch=3.ckpt", "epoch=4.ckpt", "global_step10/a.pt", "iter_0000020/a.pt"):
        save(tmp_path, name, 1)
    entries = ["epoch=3.ckpt", "epoch=4.ckpt", "global_step10", "iter_0000020"]
    (tmp_path / "last.ckpt").symlink_to("epoch=3.ckpt")
    (tmp_path / "absolute").symlink_to(tmp_path / "epoch=4.ckpt")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "outside").symlink_to("/")
    (tmp_path / "latest").write_text("global_step20\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "global_step10"\nother: "x"\n')
    found = find_pointers(tmp_path, entries)
    assert found.to == {
        "epoch=3.ckpt": ["last.ckpt"],
        "epoch=4.ckpt": ["absolute"],
        "global_step10": ["checkpoint"],
        "iter_0000020": ["latest_checkpointed_iteration.txt"],
    }
    assert found.warnings == ["latest -> global_step20 (missing)", "loop -> loop (missing)"]


def test_what_trainers_say(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_trainer(tmp_path, step, log={1: 0.5, 2: 0.4}, best="/old/mount/checkpoint-2")
    (tmp_path / "checkpoint-1" / ".keep").touch()
    (tmp_path / "checkpoint-3.tags").write_text("paper final")
    saved, _ = group(list_entries(tmp_path), order="auto", now=START * 2, min_age=0)
    marks = find_marks(tmp_path, saved, {"3": {"mine": 7.0}})
    assert marks.metrics["checkpoint-1"]["eval_loss"] == 0.5
    assert marks.metrics["checkpoint-3"] == {"mine": 7.0}
    assert marks.pinned == {"checkpoint-1": ["pinned"], "checkpoint-2": ["the trainer's best"]}
    assert marks.tags["checkpoint-3"] == ["paper", "final"]


def test_the_trainers_log_is_read_from_a_container_too(tmp_path: Path) -> None:
    for step in (1, 2):
        path = save_trainer(tmp_path, step, log={1: 0.5, 2: 0.4})
        pipeline.compress(
            path, f"{path}.ckz", base=f"{tmp_path}/checkpoint-1.ckz" if step > 1 else None
        )
        for file in sorted(path.iterdir()):
            file.unlink()
        path.rmdir()
    saved, _ = group(list_entries(tmp_path), order="auto", now=START * 2, min_age=0)
    assert find_marks(tmp_path, saved).metrics["checkpoint-2"] == {"eval_loss": 0.4, "epoch": 1.0}


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": 1}', ""])
def test_metrics_that_are_none(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    done = run("prune", tmp_path, "--keep-last", "1", "--metrics", tmp_path / "m.json")
    assert done.code == 2
    assert "m.json" in done.err
    (tmp_path / "m.json").write_text('{"5": {"loss": 1, "x": "y", "t": true}}')
    assert read_metrics(tmp_path / "m.json") == {"5": {"loss": 1.0}}


@pytest.mark.parametrize("state", [None, [], {"log_history": 1}, {"best_model_checkpoint": 3}])
def test_odd_states(state: object) -> None:
    assert best_in_state(state) == ""


def test_what_vanishes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckz import store

    save(tmp_path, "step_1.pt", 1)
    save(tmp_path, "step_2.pt", 2)
    look = store._look

    def vanish(root: Path, name: str, marker: str | None) -> object:
        (root / "step_2.pt").unlink(missing_ok=True)
        return look(root, name, marker)

    monkeypatch.setattr(store, "_look", vanish)
    assert list(listed(tmp_path)) == ["step_1.pt"]


def test_sizes_are_those_on_disk(tmp_path: Path) -> None:
    path = save_trainer(tmp_path, 1)
    total = sum(f.stat().st_blocks * 512 for f in path.iterdir())
    assert listed(tmp_path)["checkpoint-1"].nbytes == total
    age(path, START)
    assert listed(tmp_path)["checkpoint-1"].changed == START


def test_faults_go_through_chains(tmp_path: Path) -> None:
    before = None
    for step in range(1, 5):
        path = save(tmp_path, f"step_{step}.pt", step)
        pipeline.compress(path, f"{path}.ckz", base=before)
        path.unlink()
        before = f"{path}.ckz"
    (tmp_path / "step_2.pt.ckz").write_bytes(b"")
    faults = {name: e.fault for name, e in listed(tmp_path).items()}
    assert not faults["step_1.pt.ckz"]
    assert "step_2.pt.ckz, is not" in faults["step_3.pt.ckz"]
    assert "step_3.pt.ckz, is not complete" in faults["step_4.pt.ckz"]
