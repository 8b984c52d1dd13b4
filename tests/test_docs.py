"""README.md says what the command does: help, exit codes, options, JSON fields."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_command
from typer.testing import CliRunner

import ckz
from ckz.cli import COMMANDS, app_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SUBCOMMANDS = get_command(app_of()).commands  # type: ignore[attr-defined]


def load_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts/docs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_fresh() -> None:
    docs = load_docs()
    assert docs.render(README) == README
    stale = README.replace("Check every checksum", "Check some checksums")
    assert docs.render(stale) == README


def test_every_error_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", README, re.MULTILINE)
    assert [int(code) for code, _ in rows] == [0, 1, 2, 3, 4, 5, 11, 129, 130, 143]
    assert "checksum" in dict(rows)["4"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name: str) -> None:
    command = SUBCOMMANDS[name]
    assert f"$ ckz {name} --help" in README
    assert command.help
    for parameter in command.params:
        assert parameter.help, parameter.name
        assert all(option in README for option in parameter.opts if option.startswith("-"))


def examples() -> list[str]:
    """Give the invocations of ckz in README's examples, one a string."""
    blocks = re.findall(r"```(?:console|sh)\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).splitlines()
    return [
        match[0]
        for line in lines
        for match in re.finditer(r"(?<![\w.])ckz (?:\w+)(?: [^|>#;]*)?", line)
        if line.startswith(("$", "ckz", "0", "10", "srun", "ssh"))
    ]


def test_there_are_examples() -> None:
    assert len(examples()) >= 10


@pytest.mark.parametrize("example", examples())
def test_examples_parse(example: str) -> None:
    _, name, *arguments = shlex.split(example)
    # xargs adds the files to some; diff takes two, watch one.
    added = [] if name in ("diff", "watch") else ["--", "file"]
    SUBCOMMANDS[name].make_context(name, [*arguments, *added])


def test_json_fields_are_documented(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"w": np.ones((8, 8), np.float32)}, source)
    rows = dict(re.findall(r"^\| (`\w+`[`, \w]*) \| (`source`.+) \|$", README, re.MULTILINE))
    for name, arguments in {
        "compress": [str(source)],
        "inspect": [f"{source}.ckz"],
        "verify": [f"{source}.ckz"],
        "decompress": ["-f", f"{source}.ckz"],
    }.items():
        result = CliRunner().invoke(app_of(), [name, "--json", *arguments])
        assert result.exit_code == 0
        document = json.loads(result.stdout)
        (row,) = [fields for commands, fields in rows.items() if f"`{name}`" in commands]
        outer = re.sub(r"\(.*?\)", "", row)
        assert re.findall(r"`(\w+)`", outer) == list(document["results"][0])
        if name == "inspect":
            (inner,) = re.findall(r"\(list of (.*?)\)", row)
            assert re.findall(r"`(\w+)`", inner) == list(document["results"][0]["tensors"][0])


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"layers.0.weight": np.ones((8, 8), np.float32)}, "model.safetensors")
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(block, {})
    assert Path("copy.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def test_the_version_stands_once() -> None:
    assert "dynamic" in (ROOT / "pyproject.toml").read_text()
    assert ckz.__version__ not in README
