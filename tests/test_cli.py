"""The command line: arguments -> exit code, stdout, stderr, files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import typer
from conftest import Run
from safetensors.numpy import load, load_file, save_file

import ckz.cli
from ckz import pipeline
from ckz.cli import names, streams, text
from ckz.cli.options import parse_size

COMMAND = [sys.executable, "-m", "ckz"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory that also takes the spooled files."""
    work, spool = tmp_path / "work", tmp_path / "spool"
    work.mkdir()
    spool.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(spool))
    monkeypatch.delenv("CKZ_THREADS", raising=False)
    return work


def write_model(path: Path, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    tensors = {
        f"layers.{layer}.{kind}": rng.normal(0, 0.02, (64, 32)).astype(np.float32)
        for layer in range(3)
        for kind in ("attention.weight", "mlp.weight")
    }
    tensors["step"] = np.array(7, np.int64)
    save_file(tensors, path)
    return path.read_bytes()


@pytest.fixture
def model(here: Path) -> Path:
    """A small model.safetensors in the working directory."""
    write_model(here / "model.safetensors")
    return Path("model.safetensors")


@pytest.fixture
def container(model: Path, run: Run) -> Path:
    """The same, compressed."""
    assert run("compress", model, "-q").code == 0
    return Path("model.safetensors.ckz")


def leftovers() -> list[Path]:
    """Temporary files in the working and the spool directory."""
    spool = Path(os.environ["TMPDIR"])
    return [*Path().rglob("*ckz-tmp*"), *Path().rglob("*.tmp"), *spool.rglob("*")]


def damage(path: Path, at: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# The main job


def test_round_trip_gives_the_name_and_the_bytes_back(model: Path, run: Run) -> None:
    before = model.read_bytes()
    result = run("compress", model)
    assert result.code == 0
    assert result.out == ""
    assert result.err.startswith("model.safetensors.ckz: 49.7 kB -> ")
    assert result.err.count("\n") == 1
    assert model.read_bytes() == before
    model.unlink()
    result = run("decompress", "model.safetensors.ckz")
    assert result.code == 0
    assert model.read_bytes() == before
    assert Path("model.safetensors.ckz").exists()
    assert not leftovers()


def test_a_renamed_container_gives_its_own_name(container: Path, run: Run) -> None:
    container.rename("best.safetensors.ckz")
    assert run("decompress", "best.safetensors.ckz").code == 0
    assert Path("best.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def test_without_suffix_the_recorded_name_is_taken(container: Path, run: Run) -> None:
    before = Path("model.safetensors").read_bytes()
    Path("model.safetensors").unlink()
    container.rename("blob")
    assert run("decompress", "blob").code == 0
    assert Path("model.safetensors").read_bytes() == before


def test_a_directory_is_one_container(here: Path, run: Run) -> None:
    Path("ckpt").mkdir()
    before = write_model(Path("ckpt/model.safetensors"))
    Path("ckpt/config.json").write_text("{}")
    assert run("compress", "ckpt/").code == 0
    shutil.move("ckpt", "old")
    assert run("decompress", "ckpt.ckz").code == 0
    assert Path("ckpt/model.safetensors").read_bytes() == before
    assert Path("ckpt/config.json").read_text() == "{}"


def test_the_current_directory_goes_beside_itself(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ckpt").mkdir()
    write_model(Path("ckpt/model.safetensors"))
    monkeypatch.chdir("ckpt")
    assert run("compress", ".").code == 0
    assert (here / "ckpt.ckz").exists()


def test_threads_do_not_change_the_result(model: Path, run: Run) -> None:
    for threads in "0", "1", "3":
        assert run("compress", model, "-T", threads, "-o", f"{threads}.ckz").code == 0
    assert len({Path(f"{threads}.ckz").read_bytes() for threads in "013"}) == 1


def test_sha256_is_printed_as_sha256sum_does(model: Path, run: Run) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    result = run("compress", "--sha256", model)
    assert result.out == f"{digest}  model.safetensors\n"
    Path("ckpt").mkdir()
    model.rename("ckpt/model.safetensors")
    result = run("compress", "--sha256", "--rm", "ckpt/")
    assert result.out == f"{digest}  ckpt/model.safetensors\n"


@pytest.mark.parametrize("name", ["a b", "-f", "ключ", "new\nline", "x" * 240])
def test_odd_file_names(here: Path, run: Run, name: str) -> None:
    Path(name).write_bytes(b"\0" * 5000)
    result = run("compress", "--", name)
    assert result.code == 0
    assert result.err.count("\n") == 1
    Path(name).unlink()
    assert run("decompress", "--", f"{name}.ckz").code == 0
    assert Path(name).read_bytes() == b"\0" * 5000


# Where the result goes


def test_an_existing_output_is_kept_unless_forced(model: Path, run: Run) -> None:
    output = Path("model.safetensors.ckz")
    output.write_text("precious")
    result = run("compress", model)
    assert result.code == 1
    assert "exists" in result.err
    assert "--force" in result.err
    assert output.read_text() == "precious"
    assert run("compress", "-f", model).code == 0
    result = run("decompress", output)
    assert result.code == 1
    assert run("decompress", "-f", output).code == 0
    assert not leftovers()


def test_several_inputs_go_into_a_directory(here: Path, run: Run) -> None:
    data = {name: write_model(Path(name), seed) for seed, name in enumerate(("a.st", "b.st"))}
    Path("out").mkdir()
    assert run("compress", *data, "-o", "out").code == 0
    assert sorted(p.name for p in Path("out").iterdir()) == ["a.st.ckz", "b.st.ckz"]
    Path("back").mkdir()
    assert run("decompress", "out/a.st.ckz", "out/b.st.ckz", "-o", "back").code == 0
    assert {p.name: p.read_bytes() for p in Path("back").iterdir()} == data


def test_the_output_must_not_be_the_input(container: Path, run: Run) -> None:
    before = container.read_bytes()
    for arguments in (
        ("compress", "-f", "-o", container, container),
        ("decompress", "-f", "-o", container, container),
    ):
        result = run(*arguments)
        assert result.code == 1
        assert "the output is the input" in result.err
    Path("link").symlink_to("model.safetensors")
    assert run("compress", "-f", "-o", "link", "model.safetensors").code == 1
    assert container.read_bytes() == before


def test_the_output_must_not_lie_inside_the_input(here: Path, run: Run) -> None:
    Path("ckpt").mkdir()
    write_model(Path("ckpt/model.safetensors"))
    result = run("compress", "ckpt", "-o", "ckpt/new.ckz")
    assert result.code == 1
    assert "inside the input" in result.err


def test_a_missing_output_directory_is_named(model: Path, run: Run) -> None:
    result = run("compress", model, "-o", "none/x.ckz")
    assert result == (1, "", "ckz: none: No such file or directory\n")


def test_no_device_is_replaced(model: Path, run: Run) -> None:
    result = run("compress", model, "-f", "-o", "/dev/null")
    assert result.code == 1
    assert "not a regular file" in result.err
    assert Path("/dev/null").is_char_device()


def test_compressing_twice_is_refused(container: Path, run: Run) -> None:
    result = run("compress", container)
    assert result.code == 1
    assert "compressed already" in result.err
    assert run("compress", "-f", container).code == 0


def test_dry_run_writes_nothing(container: Path, run: Run) -> None:
    before = sorted(Path().iterdir())
    container.rename("model2.ckz")
    assert run("compress", "-n", "--rm", "model.safetensors").code == 0
    assert run("decompress", "-n", "--rm", "model2.ckz").code == 0
    Path("model2.ckz").rename(container)
    assert sorted(Path().iterdir()) == before


# Standard input and output


def test_pipes(model: Path, here: Path) -> None:
    subprocess.run(
        f"cat model.safetensors | {COMMAND[0]} -m ckz compress - -q"
        f" | {COMMAND[0]} -m ckz decompress - -q > back",
        shell=True,
        check=True,
    )
    assert Path("back").read_bytes() == model.read_bytes()
    assert not leftovers()


def test_stdout_takes_one_file(model: Path, here: Path, run: Run) -> None:
    assert run("compress", "-c", model, model).code == 2
    Path("ckpt").mkdir()
    write_model(Path("ckpt/a.safetensors"))
    write_model(Path("ckpt/b.safetensors"))
    assert run("compress", "ckpt", "-q").code == 0
    result = run("decompress", "-c", "ckpt.ckz")
    assert (result.code, result.out) == (1, "")
    assert "holds a directory" in result.err
    assert not leftovers()


def test_piped_input_is_named_after_its_container(model: Path) -> None:
    with model.open("rb") as stdin:
        subprocess.run([*COMMAND, "compress", "-", "-qo", "b.pt.ckz"], stdin=stdin, check=True)
    with pipeline.open_container(Path("b.pt.ckz")) as container:
        assert container.checkpoint.files[0].path == "b.pt"


def test_errors_about_piped_input_name_no_temporary_file(here: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "decompress", "-"], input=b"x" * 999, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == b"ckz: standard input: not a .ckz file\n"


def test_a_closed_pipe_ends_without_a_traceback(container: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "decompress", "-qc", container],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
    assert not leftovers()


@pytest.mark.parametrize("arguments", [["decompress", "-qc"], ["inspect"], ["verify", "--json"]])
def test_a_full_device_behind_stdout_is_an_error(container: Path, arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *arguments, container], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("decompress -qc model.safetensors.ckz >&-", 1),
        ("inspect model.safetensors >&-", 1),
        ("--help >&-", 1),
        ("compress -f model.safetensors >&-", 0),
        ("compress - -o x.ckz <&-", 1),
        ("compress -f model.safetensors <&- >&- 2>&-", 0),
        ("verify none 2>&-", 1),
    ],
)
def test_closed_streams(container: Path, run: Run, script: str, code: int) -> None:
    done = subprocess.run(
        f"exec {' '.join(COMMAND)} {script}", shell=True, capture_output=True, check=False
    )
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"\n") == (0 if "2>&-" in script else 1)
    assert run("verify", "--data", container).code == 0
    assert not leftovers()


class Terminal(NamedTuple):
    code: int
    shown: str


def in_terminal(*arguments: object, stdout: bool = True, columns: int = 80) -> Terminal:
    """Run ckz with stdin and stderr, and perhaps stdout, on a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=follower,
        stdout=follower if stdout else subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                block = os.read(leader, 65536)
            except OSError:  # the terminal's other side is closed
                break
            if not block:
                break
            shown += block
    os.close(leader)
    return Terminal(process.returncode, shown.decode())


def test_no_binary_data_to_a_terminal(model: Path) -> None:
    result = in_terminal("compress", "-c", model)
    assert result.code == 1
    assert "terminal" in result.shown
    assert "CKZ" not in result.shown
    result = in_terminal("compress", "-", "-o", "x.ckz")
    assert result.code == 1
    assert "standard input" in result.shown


def test_progress_is_for_terminals(model: Path, run: Run) -> None:
    assert "\x1b[" in in_terminal("compress", "-f", model).shown
    for quiet in "--no-progress", "-q", "-qq":
        assert "\x1b[" not in in_terminal("compress", "-f", model, quiet).shown
    assert "\x1b[" not in run("compress", "-f", model).err


def test_no_color_is_honoured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = in_terminal("compress", "-f", model).shown
    assert "\x1b[38" not in shown
    assert "\x1b[35" not in shown


# --rm


def test_rm_removes_the_source_at_the_end(model: Path, here: Path, run: Run) -> None:
    before = model.read_bytes()
    assert run("compress", "--rm", model).code == 0
    assert not model.exists()
    assert run("decompress", "--rm", "model.safetensors.ckz").code == 0
    assert [p.name for p in here.iterdir()] == ["model.safetensors"]
    assert model.read_bytes() == before


def test_rm_removes_a_directory(here: Path, run: Run) -> None:
    Path("ckpt").mkdir()
    write_model(Path("ckpt/model.safetensors"))
    assert run("compress", "--rm", "ckpt").code == 0
    assert [p.name for p in here.iterdir()] == ["ckpt.ckz"]


def test_rm_verifies_before_it_removes(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    compress = pipeline.compress
    monkeypatch.setattr(
        pipeline,
        "compress",
        lambda *args, **kwargs: (asked.append(kwargs["verify"]), compress(*args, **kwargs))[1],
    )
    assert run("compress", model).code == 0
    assert run("compress", "-f", "--rm", model).code == 0
    assert asked == [False, True]


def test_rm_keeps_a_source_that_changed(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress = pipeline.compress

    def meddle(*args: object, **kwargs: object) -> pipeline.Report:
        report = compress(*args, **kwargs)  # type: ignore[arg-type]
        write_model(model, seed=1)
        return report

    monkeypatch.setattr(pipeline, "compress", meddle)
    result = run("compress", "--rm", model)
    assert result.code == 1
    assert "changed" in result.err
    assert model.exists()


def test_rm_keeps_a_source_that_failed(container: Path, run: Run) -> None:
    damage(container)
    assert run("decompress", "-f", "--rm", container).code == 4
    assert container.exists()


def test_rm_refuses_links(model: Path, run: Run) -> None:
    Path("link").symlink_to(model)
    result = run("compress", "--rm", "link")
    assert result.code == 1
    assert "symbolic link" in result.err
    assert Path("link").is_symlink()
    assert run("compress", "link").code == 0


# Failures


def test_one_bad_input_among_many(model: Path, run: Run) -> None:
    Path("other.safetensors").write_bytes(write_model(Path("other.safetensors"))[:-1])
    result = run("compress", "other.safetensors", model, "none")
    assert result.code == 3
    assert Path("model.safetensors.ckz").exists()
    assert not Path("other.safetensors.ckz").exists()
    errors = [line for line in result.err.splitlines() if line.startswith("ckz: ")]
    assert len(errors) == 2
    assert errors[0].startswith("ckz: other.safetensors: ")
    assert errors[1] == "ckz: none: No such file or directory"


def test_when_all_fail_the_gravest_code_counts(container: Path, run: Run) -> None:
    assert run("verify", "none").code == 1
    damage(container)
    assert run("verify", container).code == 4
    assert run("verify", "none", container).code == 4


@pytest.mark.parametrize("command", [("decompress", "-fq"), ("verify",), ("inspect",)])
def test_a_damaged_container_is_reported(
    container: Path, run: Run, command: tuple[str, ...]
) -> None:
    damage(container, at=600)
    before = Path("model.safetensors").read_bytes()
    result = run(*command, container)
    assert result.code == 4
    assert result.out == ""
    assert result.err.startswith("ckz: model.safetensors.ckz: ")
    assert result.err.count("\n") == 1
    assert Path("model.safetensors").read_bytes() == before
    assert not leftovers()


def test_messages_cannot_drive_the_terminal(here: Path, run: Run) -> None:
    result = run("compress", "evil\x1b[2J\nname")
    assert result == (1, "", "ckz: evil\\x1b[2J\\nname: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["compress"],
        ["unknown"],
        ["compress", "--unknown", "x"],
        ["compress", "x", "--level", "best"],
        ["compress", "x", "--memory", "much"],
        ["compress", "x", "-T", "-1"],
        ["compress", "x", "-c", "-o", "y"],
        ["compress", "x", "-c", "--rm"],
        ["compress", "x", "-c", "--json"],
        ["compress", "-", "--rm", "-o", "y"],
        ["compress", ""],
        ["compress", "x", "-o", ""],
        ["compress", ".", "--rm"],
        ["compress", "a/..", "--rm"],
        ["compress", "-", "x"],
        ["compress", "x", "y", "-o", "z"],
        ["compress", "x", "x"],
        ["compress", "a/x", "b/x", "-o", "."],
        ["compress", "-", "-o", "."],
        ["decompress", "x", "--only", "*", "--rm"],
    ],
    ids=" ".join,
)
def test_wrong_usage(here: Path, run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert result.err
    assert not list(here.iterdir())


def test_wrong_threads_in_the_environment(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKZ_THREADS", "many")
    result = run("compress", model)
    assert result.code == 2
    assert "CKZ_THREADS" in result.err


def test_a_full_disk_leaves_nothing(here: Path) -> None:
    save_file({"w": np.random.default_rng(0).integers(0, 256, 10**6, np.uint8)}, "m.safetensors")
    Path("m.safetensors.ckz").write_text("precious")
    done = subprocess.run(
        [*COMMAND, "compress", "-f", "m.safetensors"],
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
        check=False,
    )
    assert done.returncode == 1
    assert b"no space left" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert Path("m.safetensors.ckz").read_text() == "precious"
    assert not leftovers()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_spooling_leaves_nothing(
    here: Path, number: signal.Signals, code: int
) -> None:
    with subprocess.Popen(
        [*COMMAND, "compress", "-", "-o", "x.ckz"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stderr
        process.stdin.write(b"x" * 3_000_000)
        process.stdin.flush()
        wait_for(bytes_are_written)
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stderr.read() == b""
    assert not list(here.iterdir())
    assert not leftovers()


def test_a_signal_while_writing_leaves_nothing(here: Path) -> None:
    data = np.random.default_rng(0).normal(0, 0.02, 25_000_000).astype(np.float32)
    save_file({"w": data}, "m.safetensors")
    with subprocess.Popen([*COMMAND, "compress", "m.safetensors"]) as process:
        wait_for(bytes_are_written)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
    assert [p.name for p in here.iterdir()] == ["m.safetensors"]


def bytes_are_written() -> bool:
    return any(
        path.is_file() and path.stat().st_size
        for top in leftovers()
        for path in (top, *top.rglob("*"))
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# What is said


def test_quiet_and_verbose_do_not_change_the_code(container: Path, run: Run) -> None:
    for quiet, said in ("-q", True), ("-qq", False), ("-v", True), ("-vv", True):
        result = run("decompress", quiet, container)
        assert result.code == 1
        assert bool(result.err) is said
    assert run("verify", container).err.startswith("model.safetensors.ckz: ok, ")
    assert run("verify", "-q", container) == (0, "", "")


def test_verbose_says_more(model: Path, run: Run) -> None:
    plain, more, most = (run("compress", "-f", *v, model).err for v in ((), ("-v",), ("-vv",)))
    assert plain.count("\n") == 1
    assert "  7 tensors\n" in more
    assert "  weight: 49.2 kB -> " in more
    assert "CPU-s" in most
    assert "CPU-s" not in more
    assert run("inspect", "-v", "model.safetensors.ckz").out.count("codec") == 1


def test_json_results(model: Path, run: Run) -> None:
    result = run("compress", "--json", "--sha256", model, "none")
    assert result.code == 3
    document = json.loads(result.out)
    assert next(iter(document)) == "version"
    assert document["version"] == 1
    assert document["failed"] == 1
    (report,) = document["results"]
    assert report["source"] == "model.safetensors"
    assert report["output"] == "model.safetensors.ckz"
    assert report["raw_nbytes"] == model.stat().st_size
    assert report["stored_nbytes"] == Path("model.safetensors.ckz").stat().st_size
    assert report["tensors"] == 7
    assert report["sha256"] == {model.name: hashlib.sha256(model.read_bytes()).hexdigest()}
    assert set(report["roles"]["weight"]) == {"raw_nbytes", "stored_nbytes"}
    assert json.loads(result.err) == {
        "version": 1,
        "error": "FileNotFoundError",
        "code": 1,
        "message": "none: No such file or directory",
    }


@pytest.mark.parametrize("command", ["decompress", "verify", "inspect"])
def test_json_has_one_shape(container: Path, run: Run, command: str) -> None:
    Path("model.safetensors").unlink()
    result = run(command, "--json", container)
    assert (result.code, result.err) == (0, "")
    document = json.loads(result.out)
    assert set(document) == {"version", "results", "failed"}
    assert document["results"][0]["source"] == str(container)


def test_inspect_groups_names_by_their_numbers(container: Path, run: Run) -> None:
    for source in "model.safetensors", container:
        lines = run("inspect", source).out.splitlines()
        (line,) = [line for line in lines if "layers.*.mlp.weight" in line]
        assert line.split()[:6] == ["3", "float32", "64x32", "weight", "24.6", "kB"]
        assert any("scalar" in line and line.endswith("step") for line in lines)
    assert "saved" in run("inspect", container).out
    assert "saved" not in run("inspect", "model.safetensors").out


def test_inspect_all_has_a_line_for_each_tensor(container: Path, run: Run) -> None:
    lines = run("inspect", "--all", container).out.splitlines()
    assert sum("layers." in line for line in lines) == 6
    lines = run("inspect", "--all", "--only", "*.1.*", container).out.splitlines()
    assert [line.split()[-1] for line in lines if "layers." in line] == [
        "layers.1.attention.weight",
        "layers.1.mlp.weight",
    ]


def test_inspect_escapes_names(here: Path, run: Run) -> None:
    save_file({"a\x1b[31m\u202e": np.zeros(3, np.float32)}, "m.safetensors")
    out = run("inspect", "m.safetensors").out
    assert r"a\x1b[31m\u202e" in out
    assert "\x1b" not in out


def test_inspect_of_nothing(here: Path, run: Run) -> None:
    Path("empty").write_bytes(b"")
    result = run("inspect", "empty")
    assert (result.code, result.err) == (0, "")
    assert "0 B" in result.out
    assert run("compress", "empty").code == 0
    assert run("inspect", "empty.ckz").code == 0


def test_only_gives_single_tensors(container: Path, run: Run) -> None:
    assert run("decompress", "--only", "*.mlp.*", container).code == 0
    tensors = load_file("model.safetensors.only.safetensors")
    assert sorted(tensors) == [f"layers.{i}.mlp.weight" for i in range(3)]
    whole = load_file("model.safetensors")
    assert all((tensors[name] == whole[name]).all() for name in tensors)
    assert run("decompress", "--only", "nothing", container).code == 1


def test_only_to_stdout(container: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "decompress", "-qc", "--only", "step", "--only", "*.0.*", container],
        capture_output=True,
        check=True,
    )
    assert sorted(load(done.stdout)) == [
        "layers.0.attention.weight",
        "layers.0.mlp.weight",
        "step",
    ]
    assert not leftovers()


def test_version(run: Run) -> None:
    assert run("--version") == run("-V") == (0, f"ckz {ckz.__version__}\n", "")


# The parts


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("0", 0),
        ("160000000", 160_000_000),
        ("160M", 160_000_000),
        ("400MB", 400_000_000),
        ("1.5g", 1_500_000_000),
        ("64 KiB", 65536),
        ("1GiB", 1 << 30),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(written: str, nbytes: int) -> None:
    assert parse_size(written) == nbytes


@pytest.mark.parametrize("written", ["", "M", "-1", "1X", "1e9", "1iB", "1.M", "nan"])
def test_wrong_sizes(written: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(written)


def test_names_are_shortened_in_the_middle() -> None:
    assert text.shortened("layers.*.attention.weight", 25) == "layers.*.attention.weight"
    assert text.shortened("layers.*.attention.weight", 24) == "layers.*..tention.weight"
    assert len(text.shortened("x" * 99, 3)) == 16


def test_text() -> None:
    assert [text.size(n) for n in (0, 999, 1000, 999_949, 999_950, 5 * 10**18)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.0 MB",
        "5000.0 PB",
    ]
    assert text.saved(200, 150) == "25.0 %"
    assert text.saved(100, 110) == "-10.0 %"
    assert text.saved(0, 110) == "n/a"
    assert text.rate(5, 0) == "n/a"
    assert text.printable("a\udc80\x00ä") == r"a\udc80\x00ä"


def test_names() -> None:
    assert names.compressed(Path("a/b.pt")) == Path("a/b.pt.ckz")
    assert names.restored(Path("a/b.pt.ckz")) == Path("a/b.pt")
    assert names.restored(Path("a/b.pt")) is None
    assert names.restored(Path("a/.ckz")) is None
    assert names.tensors_file(Path("a/b.pt.ckz")) == Path("a/b.pt.only.safetensors")


def test_spooling_prefers_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert streams.spool_directory() == Path("/var/tmp")
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert streams.spool_directory() == Path("/somewhere")
