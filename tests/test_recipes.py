"""The README's recipes for rotation, run as they stand but for where things lie."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from stores import HOUR, START, names, save_trainer

from ckz import pipeline

README = (Path(__file__).parents[1] / "README.md").read_text()
RECIPES = README.partition("\n## Recipes\n")[2].partition("\n## ")[0]


# A crontab's times, and what else stands before a command.
BEFORE = re.compile(r"^(?:[\d*]+ ){4}[\d*]+ +|^srun --\S+ |^\s*- (?:run: )?|^ExecStart=")


def commands() -> list[str]:
    """Give the shell commands that rotate, out of crontabs, units, pipelines and jobs."""
    found = []
    for line in RECIPES.splitlines():
        if " prune " not in line and " watch " not in line:
            continue
        command = BEFORE.sub("", line)
        if quoted := re.search(r'"(/opt/[^"]+)"', command):
            command = quoted[1]
        if command.startswith(("ckz ", "/opt/", "nice ")):
            found.append(command.replace("%i", "exp1"))
    return found


def test_there_are_recipes() -> None:
    assert len(commands()) == 8


def run(command: str, root: Path) -> None:
    """Run a command with /ckpt and out where the test has them."""
    own = f"{shlex.quote(sys.executable)} -m ckz"
    text = re.sub(r"(?:/opt/ckz/bin/)?\bckz (?=prune|watch)", f"{own} ", command)
    text = text.replace("/ckpt/exp1", shlex.quote(str(root))).replace(" out ", f" {root} ")
    if "--quiet-for" not in text:
        text = text.replace("--once", "--once --quiet-for 0.5")
    done = subprocess.run(
        ["bash", "-c", text], cwd=root.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if " -q" in command:
        assert done.stderr == ""


@pytest.mark.parametrize("command", commands())
def test_a_recipe(tmp_path: Path, command: str) -> None:
    if "watch" in command and "--once" not in command:
        pytest.skip("it does not end")
    root = tmp_path / "exp1"
    for step in range(1, 7):
        save_trainer(root, step, START + step * HOUR, log={s: abs(s - 2.0) for s in range(1, 7)})
    run(command, root)
    assert any(name.startswith("checkpoint-6") for name in names(root))
    restores_all(root, tmp_path)


def restores_all(root: Path, scratch: Path) -> None:
    (scratch / "back").mkdir(exist_ok=True)
    for path in root.glob("*.ckz"):
        pipeline.decompress(path, scratch / "back" / path.stem)


@pytest.mark.formats
def test_recipes_on_what_a_trainer_leaves(tmp_path: Path) -> None:
    """A Trainer of transformers really trains, and saves every two steps."""
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=50, intermediate_size=32, **sizes)
    model = transformers.BertForMaskedLM(config)
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(32)]
    root = tmp_path / "exp1"
    arguments = transformers.TrainingArguments(
        output_dir=str(root),
        max_steps=12,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data).train()
    assert len(list(root.glob("checkpoint-*"))) == 6
    for path in [root, *root.rglob("*")]:
        info = path.stat()
        os.utime(path, (info.st_atime - HOUR, info.st_mtime - HOUR))
    weights = (root / "checkpoint-12" / "model.safetensors").read_bytes()
    for command in commands():
        if "watch" not in command or "--once" in command:
            run(command, root)
    assert (root / "checkpoint-12").is_dir() or (root / "checkpoint-12.ckz").exists()
    restores_all(root, tmp_path)
    back = root if (root / "checkpoint-12").is_dir() else tmp_path / "back"
    assert (back / "checkpoint-12" / "model.safetensors").read_bytes() == weights
