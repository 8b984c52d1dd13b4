"""``ckz bench``: samples, figures, rivals, and what it says in the end."""

from __future__ import annotations

import csv
import json
import os
import re
import stat
import time
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckz
import ckz.bench as bench_module
import ckz.cli
from ckz import charts, codecs, pipeline
from ckz.bench import bench, plot, tools
from ckz.bench.codecs import CodecBench, Group
from ckz.bench.figures import Benchmark, Cost, Row, advise
from ckz.bench.sampling import pick_chunks, write_sample
from ckz.cli import app_of
from ckz.codecs.planes import Planes
from ckz.codecs.zstd import Zstd
from ckz.errors import CkzError, CorruptError, UnsupportedError
from ckz.files import FileSet
from ckz.formats import read_checkpoint
from ckz.streams import CHUNK, Extent, Part, Stream
from ckz.workers import DEFAULT_MEMORY, start_workers

ROWS, COLUMNS = 384, 512
MB = 1_000_000


def write_training(path: Path) -> None:
    """A mixed-precision state: bf16 weight, fp32 master, moments that rows and columns predict."""
    rng = np.random.default_rng(0)
    master = torch.from_numpy(rng.normal(0, 0.02, (ROWS, COLUMNS)).astype(np.float32))
    scale = np.exp(rng.normal(0, 4, (ROWS, 1)) + rng.normal(0, 4, (1, COLUMNS))).astype(np.float32)
    second = torch.from_numpy(rng.normal(0, 1, (ROWS, COLUMNS)).astype(np.float32) * scale) ** 2
    slots = {"step": torch.tensor(7.0), "exp_avg_sq": second}
    torch.save(
        {
            "model": {"w": master.bfloat16()},
            "master_params": {"w": master},
            "optimizer": {"state": {0: slots}, "param_groups": []},
        },
        path,
    )


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "state.pt"
    write_training(path)
    return path


def write_rival(directory: Path, home: str, script: str) -> None:
    program = directory / home / "bin" / home
    program.parent.mkdir(parents=True)
    program.write_text(script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def rivals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zstd that copies, an lmz that fails and a z4ai that gives other bytes back."""
    directory = tmp_path_factory.mktemp("rivals")
    write_rival(
        directory,
        "zstd",
        '#!/bin/sh\nif [ "$1" = -qfd ]; then cp "$2" "$4"; else cp "$4" "$6"; fi\n',
    )
    write_rival(directory, "lmz", "#!/bin/sh\necho one >&2; echo no such luck >&2; exit 3\n")
    write_rival(
        directory,
        "z4ai",
        '#!/bin/sh\nif [ "$1" = compress ]; then cp "$5" "$7"; else echo hm > "$5"; fi\n',
    )
    return directory


@pytest.fixture(scope="module")
def found(training: Path, rivals: Path, tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    """One run of everything, which several tests look at."""
    scratch = tmp_path_factory.mktemp("scratch")
    told: list[tuple[int, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKZ_PEERS", str(rivals))
        patch.setenv("PATH", "/bin:/usr/bin")
        result = bench(
            training,
            scratch,
            rivals=True,
            full=True,
            rounds=1,
            progress=lambda *step: told.append(step),
        )
    assert not list(scratch.iterdir())
    assert told[-1][0] == told[-1][1]
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)
    return result


def settings(found: Benchmark, role: str) -> dict[str, Row]:
    return {row.setting: row for row in found.rows if row.role == role}


def test_every_codec_that_applies_has_a_row(found: Benchmark) -> None:
    zstd = {"zstd", "zstd:level=1", "zstd:level=19"}
    assert set(settings(found, "weight")) == {
        "cast:dtype=bfloat16",
        "planes:dtype=bfloat16",
        "planes:dtype=bfloat16,coder=rans",
        "raw",
        *zstd,
    }
    planes = {"planes:dtype=float32", "planes:dtype=float32,coder=rans"}
    assert set(settings(found, "master")) == {*planes, "raw", *zstd}
    variance = {"rowcol", "rowcol:coder=rans", *planes, "raw", *zstd}
    assert set(settings(found, "variance")) == variance
    assert found.groups["master", "float32"] == 4 * ROWS * COLUMNS


def test_codecs_save_what_they_save(found: Benchmark, training: Path) -> None:
    weight, variance = settings(found, "weight"), settings(found, "variance")
    assert weight["cast:dtype=bfloat16"].saved > 0.999
    assert 0.25 < weight["planes:dtype=bfloat16"].saved < 0.45
    assert weight["raw"].saved == 0
    assert variance["rowcol"].saved > variance["planes:dtype=float32"].saved + 0.02
    checkpoint = read_checkpoint(training)
    (span,) = (s for s in checkpoint.spans if s.dtype == "bfloat16")
    data = np.fromfile(training, np.uint8, span.nbytes, offset=span.offset)
    for setting, codec in ("zstd", Zstd(3)), ("planes:dtype=bfloat16", Planes("bfloat16")):
        assert weight[setting].stored_nbytes == len(codec.encode(data) or b"")
        assert weight[setting].raw_nbytes == data.size


def test_models_are_paid_for(found: Benchmark) -> None:
    level = next(row for row in found.rows if row.setting == "ckz default")
    raw, stored = level.roles["variance"]
    row = settings(found, "variance")["rowcol"]
    assert row.raw_nbytes == raw == 4 * ROWS * COLUMNS
    assert row.stored_nbytes == pytest.approx(stored, rel=0.002)


def test_figures_are_complete(found: Benchmark) -> None:
    for row in found.rows:
        if row.failed:
            continue
        for cost in (row.compress, row.decompress):
            assert len(cost.seconds) == len(cost.cpu_seconds) == 1
            assert min(cost.seconds) > 0
            assert (cost.memory is None) == (row.kind == "codec")
            assert cost.spread == 0
    levels = [row for row in found.rows if row.roles]
    assert [row.setting for row in levels] == ["ckz fast", "ckz default", "ckz max"]
    for row in levels:
        assert sum(raw for raw, _ in row.roles.values()) == row.raw_nbytes == found.raw_nbytes
        assert 30 * MB < (row.compress.memory or 0) < 400 * MB
        assert 0 < row.saved < 1
    assert not found.sampled
    assert found.advice.startswith(f"use --level {found.level}: it saves ")


def test_rivals_are_run_and_compared(found: Benchmark) -> None:
    rows = {row.setting: row for row in found.rows if row.kind == "command" and not row.roles}
    assert rows["zstd -3"].stored_nbytes == found.raw_nbytes
    assert (rows["zstd -3"].compress.memory or 0) < 30 * MB
    assert rows["lmz"].failed == rows["lmz -j1"].failed == "no such luck"
    assert rows["z4ai"].failed == "did not give the same bytes back"
    assert set(rows) == {"zstd -3", "lmz", "lmz -j1", "z4ai"}


def test_commands_take_turns(training: Path, rivals: Path, tmp_path: Path) -> None:
    zstd, lmz, *_ = tools.find_rivals(rivals)
    order: list[str] = []
    tools_run = tools.measure

    def measure(tool: tools.Tool, *arguments: object) -> tools.Trial:
        order.append(tool.name)
        return tools_run(tool, *arguments)

    runners = [zstd, lmz, zstd._replace(name="again")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "measure", measure)
        rows = bench_module._measure_commands(
            runners, training, 5, read_checkpoint(training), tmp_path, 3, lambda nbytes: None
        )
        assert order == ["zstd -3", "lmz", "again"] + 2 * ["zstd -3", "again"]
        assert [len(row.compress.seconds) for row in rows] == [3, 0, 3]
        patch.setattr(bench_module, "_PATIENCE", 0.0)
        (row,) = bench_module._measure_commands(
            [zstd], training, 5, read_checkpoint(training), tmp_path, 3, lambda nbytes: None
        )
        assert len(row.compress.seconds) == 1


def test_only_what_is_installed_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.find_rivals(tmp_path / "absent") == []
    write_rival(tmp_path, "bin", "#!/bin/sh\n")
    (tmp_path / "bin/bin/bin").rename(tmp_path / "lmz")
    assert [tool.name for tool in tools.find_rivals(tmp_path)] == ["lmz", "lmz -j1"]
    assert tools.find_rivals(tmp_path)[0].compress[0] == str(tmp_path / "lmz")


def test_memory_is_the_command_s_own() -> None:
    ballast = np.ones(200 * MB, np.uint8)
    usage = tools.run(["/bin/sh", "-c", "exit 0"])
    assert usage.memory < 30 * MB < ballast.size
    large = tools.run(["python3", "-c", f"b'x' * {100 * MB}"])
    assert 100 * MB < large.memory < 200 * MB


def test_cpu_of_children_counts() -> None:
    usage = tools.run(["/bin/sh", "-c", "python3 -c 'sum(range(10**7))'; true"])
    assert usage.cpu_seconds > 0.05


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_LIMIT", 1.0)
    mark = tmp_path / "pid"
    with pytest.raises(CkzError, match="took more than 1 s"):
        tools.run(["/bin/sh", "-c", f"echo $$ > {mark}; sleep 60; true"])
    pid = int(mark.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the command still runs")


def test_commands_that_cannot_start_or_say_nothing() -> None:
    with pytest.raises(CkzError, match="No such file"):
        tools.run(["/nowhere/at/all"])
    with pytest.raises(CkzError, match="ended with code 5"):
        tools.run(["/bin/sh", "-c", "exit 5"])
    with pytest.raises(CkzError, match="ended with code -9"):
        tools.run(["/bin/sh", "-c", "kill -9 $$"])


def test_a_directory_goes_to_rivals_file_by_file(tmp_path: Path, rivals: Path) -> None:
    source, work = tmp_path / "source", tmp_path / "work"
    (source / "sub").mkdir(parents=True)
    work.mkdir()
    (source / "a").write_bytes(bytes(1000))
    (source / "sub/b").write_bytes(bytes(234))
    zstd = tools.find_rivals(rivals)[0]
    assert tools.measure(zstd, source, work, "float32").stored == 1234
    own = tools.own_levels()[0]
    assert tools.measure(own, source, work, "float32").stored > 0
    restored = next(work.glob("restored*"))
    assert tools._equal(source, restored)
    for damage in (
        lambda: (restored / "sub/b").write_bytes(bytes(233) + b"x"),
        lambda: (restored / "sub/b").unlink(),
    ):
        damage()
        assert not tools._equal(source, restored)


# What a codec bench measures, without commands.


def measure(path: Path, budget: int | None = None, rounds: int = 1) -> dict[Group, list[Row]]:
    checkpoint = read_checkpoint(path)
    paths = [checkpoint.path_of(i) for i in range(len(checkpoint.files))]
    with FileSet(paths, os.O_RDONLY) as files, start_workers(1, DEFAULT_MEMORY) as workers:
        measurer = CodecBench(checkpoint, files, workers)
        groups, _ = measurer.groups(budget)
        return {
            (group.role, group.dtype): measurer.measure(group, rounds, lambda nbytes: None)
            for group in groups
        }


@dataclass(frozen=True)
class Nibbles:
    """A codec for the test: bytes below 16, two in one."""

    name: ClassVar[str] = "nibbles"
    dtype: str = ""

    def encode(self, chunk: np.ndarray, refs: object = (), at: int = 0) -> bytes | None:
        if chunk.max() > 15 or chunk.size % 2:
            return None
        return (chunk[::2] << 4 | chunk[1::2]).tobytes()

    def decode(self, payload: memoryview, refs: object, out: np.ndarray) -> None:
        packed = np.frombuffer(payload, np.uint8)
        out[::2], out[1::2] = packed >> 4, packed & 15


@pytest.fixture
def bytes_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.npy"
    np.save(path, np.random.default_rng(0).integers(0, 16, CHUNK + 5000, np.uint8))
    return path


def test_a_codec_joins_by_being_registered(
    bytes_file: Path, training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(codecs.CODECS, "nibbles", Nibbles)
    rows = {row.setting: row for row in measure(bytes_file)["other", "uint8"]}
    assert rows["nibbles:dtype=uint8"].saved == 0.5
    # Where it never pays it does not apply.
    names = {row.setting for rows in measure(training).values() for row in rows}
    assert not any(name.startswith("nibbles") for name in names)


def test_a_codec_that_lies_is_found_out(bytes_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: Zstd, payload: object, refs: object, out: np.ndarray) -> None:
        out[:] = 1

    monkeypatch.setattr(Zstd, "decode", decode)
    with pytest.raises(CorruptError, match=r"zstd.* does not give a chunk back"):
        measure(bytes_file)


def test_a_slow_codec_is_measured_once(bytes_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckz.bench.codecs._PATIENCE", 0.0)
    rows = measure(bytes_file, rounds=3)["other", "uint8"]
    assert {len(row.compress.seconds) for row in rows} == {1}
    monkeypatch.setattr("ckz.bench.codecs._PATIENCE", 1e9)
    rows = measure(bytes_file, rounds=2)["other", "uint8"]
    assert {len(row.decompress.cpu_seconds) for row in rows} == {2}


def test_rare_kinds_are_left_out(training: Path) -> None:
    checkpoint = read_checkpoint(training)
    with FileSet([training], os.O_RDONLY) as files, start_workers(1, DEFAULT_MEMORY) as workers:
        groups, omitted = CodecBench(checkpoint, files, workers).groups(None)
    assert {group.role for group in groups} == {"weight", "master", "variance"}
    assert omitted == checkpoint.nbytes - sum(group.nbytes for group in groups) > 0


# Samples.


def streams_of(sizes: list[int]) -> list[Stream]:
    return [
        Stream((Part(i, (Extent(0, 0, size),), size),), size, "float32", "<", "weight")
        for i, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(1, 5 * CHUNK), min_size=1, max_size=40), st.integers(1, 40 * MB))
def test_chunks_are_picked_on_the_grid(sizes: list[int], budget: int) -> None:
    streams = streams_of(sizes)
    picked = pick_chunks(streams, range(len(sizes)), budget)
    assert picked
    for number, starts in picked.items():
        assert starts == sorted(set(starts))
        assert all(start % CHUNK == 0 and start < sizes[number] for start in starts)
    taken = sum(min(CHUNK, sizes[n] - start) for n, starts in picked.items() for start in starts)
    if sum(sizes) <= budget:
        assert taken == sum(sizes)
    else:
        assert taken <= 2 * max(budget, CHUNK)


def test_chunks_come_from_everywhere() -> None:
    picked = pick_chunks(streams_of([100 * CHUNK]), [0], 10 * CHUNK)
    places = [start // CHUNK for start in picked[0]]
    assert places == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]


def test_a_sample_keeps_names_roles_and_casts(training: Path, tmp_path: Path) -> None:
    target = tmp_path / "sample.safetensors"
    checkpoint = read_checkpoint(training)
    write_sample(checkpoint, target, 400_000)
    sample = read_checkpoint(target)
    assert target.stat().st_size < 3 * 400_000 + 1000
    whole = {tensor.name: tensor for tensor in checkpoint.tensors}
    parts = {tensor.name: tensor for tensor in sample.tensors}
    assert set(parts) <= set(whole)
    wanted = {name for name, tensor in whole.items() if tensor.role != "other"}
    assert len(wanted) == 3
    assert wanted <= set(parts)
    for name in wanted:
        assert (parts[name].role, parts[name].dtype) == (whole[name].role, whole[name].dtype)
        assert parts[name].shape[1:] == (COLUMNS,)
        assert 100 < parts[name].shape[0] <= ROWS
    with ckz.open(target) as part, ckz.open(training) as source:
        (half,) = (name for name in wanted if whole[name].dtype == "bfloat16")
        (master,) = (name for name in wanted if whole[name].role == "master")
        rows = {row.tobytes() for row in source[master]}
        assert all(row.tobytes() in rows for row in part[master])
        np.testing.assert_array_equal(part[master].astype(part[half].dtype), part[half])
        taken = {row.tobytes() for row in part[master]}
        places = [i for i, row in enumerate(source[master]) if row.tobytes() in taken]
        assert len(places) == len(part[master])
        assert places[0] < 0.1 * ROWS
        assert places[-1] > 0.9 * ROWS


@pytest.mark.parametrize(
    "shape", [(), (7,), (100_001,), (3, 100_000), (1, 400_000), (5, 1), (40, 33, 17)]
)
def test_any_shape_is_cut(shape: tuple[int, ...], tmp_path: Path) -> None:
    source, target = tmp_path / "source.npy", tmp_path / "sample"
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    np.save(source, values)
    write_sample(read_checkpoint(source), target, 20_000)
    with ckz.open(target) as part:
        (taken,) = part.values()
    assert taken.nbytes <= max(20_000, min(values.nbytes, 4))
    assert taken.size == np.unique(taken).size
    if values.nbytes <= 20_000:
        np.testing.assert_array_equal(taken, values.reshape(taken.shape))
    else:
        assert taken.nbytes > 8000
        assert taken.max() > 0.9 * values.size


def test_without_tensors_bytes_are_sampled(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "sample"
    source.write_bytes(b"".join(b"%09d\n" % i for i in range(100_000)))
    write_sample(read_checkpoint(source), target, 80_000)
    lines = target.read_bytes()
    assert len(lines) == 80_000
    assert lines[-10:] > b"000090000\n"
    assert lines[:10] < b"000010000\n"


def test_large_sources_are_sampled(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CodecBench, "groups", lambda self, budget: ([], 0))
    found = bench(training, tmp_path, sample=200_000, rounds=1)
    assert found.sampled
    assert found.raw_nbytes == training.stat().st_size
    (measured,) = {row.raw_nbytes for row in found.rows}
    assert 400_000 < measured < 700_000


# What is refused.


def test_what_cannot_be_measured(training: Path, tmp_path: Path) -> None:
    packed, empty = tmp_path / "x.ckz", tmp_path / "empty"
    pipeline.compress(training, packed)
    empty.touch()
    with pytest.raises(UnsupportedError, match="is compressed"):
        bench(packed, tmp_path)
    with pytest.raises(CkzError, match="is empty"):
        bench(empty, tmp_path)
    with pytest.raises(FileNotFoundError):
        bench(tmp_path / "nothing", tmp_path)


def test_a_full_disk_is_seen_first(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(bench_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CkzError, match="no space left"):
        bench(training, tmp_path)
    assert not list(tmp_path.iterdir())


def test_when_ckz_fails_the_run_fails(
    training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [replace_words(tool) for tool in tools.own_levels()]
    monkeypatch.setattr(tools, "own_levels", lambda: broken)
    monkeypatch.setattr(CodecBench, "groups", lambda self, budget: ([], 0))
    with pytest.raises(CkzError, match=r"ckz fast: .*nowhere"):
        bench(training, tmp_path)


def replace_words(tool: tools.Tool) -> tools.Tool:
    return tool._replace(compress=("/nowhere", *tool.compress[1:]))


# The advice.


def command(setting: str, saved: float, cpu: float) -> Row:
    cost = Cost((cpu,), (cpu,), 1)
    return Row("command", setting, "all", "", 10_000, round(10_000 * (1 - saved)), cost, cost)


@pytest.mark.parametrize(
    ("fast", "default", "most", "level"),
    [
        ((0.30, 1.0), (0.33, 1.5), (0.331, 9.0), "default"),
        ((0.30, 1.0), (0.33, 1.5), (0.34, 9.0), "max"),
        ((0.329, 1.0), (0.33, 1.6), (0.331, 9.0), "fast"),
        ((0.329, 1.0), (0.33, 1.4), (0.331, 9.0), "default"),
        ((0.001, 1.0), (0.002, 1.4), (0.003, 9.0), "fast"),
    ],
)
def test_the_level_follows_from_the_figures(
    fast: tuple[float, float],
    default: tuple[float, float],
    most: tuple[float, float],
    level: str,
) -> None:
    rows = {
        name: command(f"ckz {name}", *figures)
        for name, figures in {"fast": fast, "default": default, "max": most}.items()
    }
    chosen, text = advise(rows, [])
    assert chosen == level
    assert f"--level {level}" in text


def test_a_rival_that_saves_more_is_named() -> None:
    rows = {name: command(f"ckz {name}", 0.30, 2.0) for name in ("fast", "default", "max")}
    worse, better = command("lmz", 0.29, 1.0), command("glyd", 0.32, 8.0)
    assert "lmz" not in advise(rows, [worse])[1]
    assert "glyd saves 2.0 points more in 4.0x the CPU time" in advise(rows, [worse, better])[1]


# The command line.


def test_the_command_shows_and_writes_everything(
    training: Path, tmp_path: Path, found: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(bench_module, "bench", lambda path, scratch, **kw: found)
    table, page = tmp_path / "figures.csv", tmp_path / "picture.html"
    arguments = ["bench", str(training), "--csv", str(table), "--plot", str(page)]
    result = CliRunner().invoke(app_of(), arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-1] == found.advice
    assert all(len(line) <= 80 for line in lines[1:-1]), max(lines[1:-1], key=len)
    assert "lmz: failed: no such luck" in lines
    assert any(re.match(r"cast:dtype=bfloat16 +100\.0 %", line) for line in lines)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == len(found.rows)
    assert rows[0]["setting"] == found.rows[0].setting
    assert float(rows[0]["saved"]) == pytest.approx(found.rows[0].saved, abs=1e-6)
    assert float(rows[0]["compress_mb_per_s"]) > 0
    assert [row["failed"] for row in rows if row["setting"] == "lmz"] == ["no such luck"]
    check_page(page.read_text(), found)
    again = CliRunner().invoke(app_of(), arguments)
    assert again.exit_code == 1
    assert "exists" in again.stderr
    assert CliRunner().invoke(app_of(), [*arguments, "--force"]).exit_code == 0


def test_json_has_the_documented_fields(
    training: Path, found: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "bench", lambda path, scratch, **kw: found)
    result = CliRunner().invoke(app_of(), ["bench", "--json", str(training)])
    (only,) = json.loads(result.stdout)["results"]
    assert only["source"] == str(training)
    assert len(only["rows"]) == len(found.rows)
    assert only["level"] == found.level
    assert only["rows"][0]["compress"]["seconds"] == list(found.rows[0].compress.seconds)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (row,) = re.findall(r"^\| `bench` \| (.+) \|$", readme, re.MULTILINE)
    outer = re.sub(r"\(.*?\)", "", row)
    assert re.findall(r"`(\w+)`", outer) == list(only)
    assert all(f"`{key}`" in row for key in only["rows"][0])


def check_page(text: str, found: Benchmark) -> None:
    """A page that loads nothing, shows every row that did not fail, and is well-formed."""
    tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            assert not {name for name, _ in attrs} & {"src", "href"}

    Reader().feed(text)
    assert "script" not in tags
    assert "http" not in text
    assert tags.count("circle") == sum(not row.failed for row in found.rows)
    roles = next(row.roles for row in found.rows if row.roles)
    assert tags.count("rect") == 3 * sum(raw > 0 for raw, _ in roles.values())


def test_names_are_escaped_in_the_page(found: Benchmark) -> None:
    page = plot.to_html(replace(found, source='<script>alert("x")</script>'))
    assert "<script" not in page


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--plot", "x.svg"], 2, ".html or .png"),
        (["--sample", "0"], 2, "at least one byte"),
        (["--rounds", "0"], 2, "--rounds"),
        (["--csv", "state.pt"], 1, "is the input"),
        (["--csv", "nowhere/x.csv"], 1, "No such file"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    code: int,
    says: str,
    training: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(training.parent)
    monkeypatch.setattr("sys.argv", ["ckz", "bench", "state.pt", *arguments])
    with pytest.raises(SystemExit) as ended:
        ckz.cli.main()
    assert ended.value.code == code
    assert says in capfd.readouterr().err


def test_png_needs_matplotlib(
    found: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if charts.importlib.util.find_spec("matplotlib"):
        plot.write_png(found, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CkzError, match="matplotlib"):
        charts.check_target(tmp_path / "x.png")
