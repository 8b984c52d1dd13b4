"""What may import what: the command starts light, torch stays out, arrows go one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckz

ROOT = Path(ckz.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
HEAVY = {"numpy", "numba", "h5py", "torch", "ml_dtypes", "zstandard", "xxhash"}
UNSAFE = {"pickle", "_pickle", "dill", "joblib", "shelve", "marshal"}

# The lower layers, and all that each may lean on.
LAYERS = {
    "errors": set(),
    "retrying": set(),
    "source": {"errors", "retrying"},
    "checkpoint": {"errors"},
    "kernels": {"errors"},
    "codecs": {"errors", "checkpoint", "kernels"},
    "streams": {"errors", "checkpoint"},
    "roles": {"errors", "checkpoint", "experts"},
    "formats": {"errors", "checkpoint", "source", "roles", "experts"},
}


def modules_after(*arguments: str) -> set[str]:
    """Run the command in a process of its own; give the top-level modules it loaded."""
    code = (
        "import sys, json\n"
        "from ckz.cli import main\n"
        "sys.argv[0] = 'ckz'\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["compress", "--help"], ["inspect", "-h"]],
    ids=" ".join,
)
def test_help_starts_light(arguments: list[str]) -> None:
    assert not modules_after(*arguments) & (HEAVY | {"rich"})


def test_no_command_loads_torch(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    save_file({"w": np.ones((8, 8), np.float32)}, source)
    container, back = f"{source}.ckz", str(tmp_path / "back")
    for arguments in (
        ["compress", str(source)],
        ["inspect", container],
        ["verify", "--data", container],
        ["diff", str(source), container],
        ["decompress", container, "-o", back],
    ):
        assert not modules_after(*arguments) & {"torch", "rich"}


def imports(tree: ast.AST) -> Iterator[str]:
    """Give what a module imports, dotted; ``from ckz import x`` as ``ckz.x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "ckz":
                yield from (f"ckz.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def part(dotted: str) -> str:
    """Give the part of ckz that a dotted name belongs to: ``ckz.formats.zips`` is ``formats``."""
    return dotted.split(".")[1]


def parts_used(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = [
        name for name in imports(tree) if name.startswith("ckz.") and name != "ckz.__version__"
    ]
    return {part(name) for name in names}


def own_part(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def test_arrows_go_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        own = own_part(path)
        if own not in ("__init__", "__main__"):  # they only give others' names
            graph.setdefault(own, set()).update(parts_used(path) - {own})
    TopologicalSorter(graph).prepare()
    assert not [own for own, used in graph.items() if "cli" in used]
    for own, allowed in LAYERS.items():
        assert graph[own] <= allowed, own


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_module_keeps_the_rules(path: Path) -> None:
    tree = ast.parse(path.read_text())
    used = {name.split(".")[0] for name in imports(tree)}
    assert not used & UNSAFE
    top = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
    at_top = {
        name.split(".")[0]
        for node in top.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imports(node)
    }
    assert "torch" not in at_top
    if own_part(path) == "cli":
        assert not at_top & HEAVY
        return
    assert not used & {"typer", "rich"}
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "exit", "quit", "eval", "exec", "input"}
    if own_part(path) != "__main__":
        attributes = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("sys", "os")
        }
        assert not attributes & {"exit", "_exit", "stdout", "stderr", "system"}
