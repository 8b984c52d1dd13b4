"""Which snapshots are kept: restic's rules, those of training, and what is leaned on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckz.errors import UsageError
from ckz.retention import (
    UNLIMITED,
    Best,
    Policy,
    Snapshot,
    close,
    duration_text,
    keep,
    parse_best,
    parse_duration,
)

START = datetime(2024, 2, 27, 22, 30, tzinfo=UTC).timestamp()


def every(hours: float, number: int) -> list[Snapshot]:
    """Snapshots at regular times, newest first, named after their number."""
    return [Snapshot(str(n), START + n * hours * 3600, step=n) for n in range(number)][::-1]


def names(policy: Policy, snapshots: list[Snapshot], **options: bool) -> list[int]:
    return sorted(int(n) for n in keep(policy, snapshots, START + 1e9, **options))


def test_last_and_steps() -> None:
    assert names(Policy(last=3), every(1, 10)) == [7, 8, 9]
    assert names(Policy(last=UNLIMITED), every(1, 10)) == list(range(10))
    assert names(Policy(every=4), every(1, 10)) == [0, 4, 8]


def test_buckets_are_those_of_the_calendar() -> None:
    # Half past ten in the evening of 27 February of a leap year, then every six hours.
    found = keep(Policy(daily=2), every(6, 12), START + 1e9, oldest=False)
    days = {n: datetime.fromtimestamp(START + int(n) * 6 * 3600, UTC).day for n in found}
    assert days == {"11": 1, "8": 29}


def test_the_oldest_stays_where_a_rule_has_some_left() -> None:
    found = keep(Policy(yearly=5), every(1, 4), START + 1e9)
    assert found == {"3": ("yearly",), "0": ("oldest yearly",)}
    assert names(Policy(yearly=5), every(1, 4), oldest=False) == [3]


def test_within_is_of_the_newest_that_is_not_in_the_future() -> None:
    snapshots = [Snapshot("future", START + 1e9), *every(24, 10)]
    found = keep(Policy(within=(0, 0, 2, 0)), snapshots, START + 9 * 86400)
    assert list(found) == ["future", "9", "8"]


def test_the_best() -> None:
    values = [0.5, 0.2, float("nan"), 0.2, 0.9]
    snapshots = [
        Snapshot(str(n), START + n, metrics={"loss": value}) for n, value in enumerate(values)
    ][::-1]
    assert names(Policy(best=(Best("loss"),)), snapshots) == [3]
    assert names(Policy(best=(Best("loss", number=3),)), snapshots) == [0, 1, 3]
    assert names(Policy(best=(Best("loss", largest=True),)), snapshots) == [4]
    with pytest.raises(UsageError, match="there are loss"):
        keep(Policy(best=(Best("accuracy"),)), snapshots, START)


def test_tags_and_reasons() -> None:
    snapshots = [Snapshot("b", START + 1, reasons=("pinned",)), Snapshot("a", START, tags=("x",))]
    assert keep(Policy(tags=("x", "y")), snapshots, START) == {"b": ("pinned",), "a": ("tag x",)}


def test_nothing_to_keep_is_wrong_usage() -> None:
    with pytest.raises(UsageError):
        keep(Policy(), every(1, 3), START)


@given(st.lists(st.integers(-1, 7), min_size=1, max_size=8), st.integers(1, 4))
def test_what_is_leaned_on_stays(bases: list[int], last: int) -> None:
    """Any bases, cycles and strangers among them."""
    snapshots = [
        Snapshot(str(n), START + n, bases=(str(base),) if base >= 0 else ())
        for n, base in enumerate(bases)
    ][::-1]
    kept = keep(Policy(last=last), snapshots, START)
    known = {s.name: s for s in snapshots}
    for name in kept:
        assert all(base in kept or base not in known for base in known[name].bases)
    assert close(kept, snapshots).keys() == kept.keys()
    newest = {s.name for s in snapshots[:last]}
    reached = set(newest)
    for _ in bases:
        reached |= {b for n in reached for b in known[n].bases if b in known}
    assert set(kept) == reached


@pytest.mark.parametrize("text", ["1y5m7d2h", "3d", "12h", "2m"])
def test_durations(text: str) -> None:
    assert duration_text(parse_duration(text)) == text


@pytest.mark.parametrize("text", ["", "3", "d", "1d2y", "1w", "-1d", "9999999d", "1.5d"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


def test_longest_within() -> None:
    assert len(keep(Policy(within=(999999, 0, 0, 0)), every(1, 3), START)) == 3
    assert len(keep(Policy(within=(0, 0, 999999, 0)), every(1, 3), START)) == 3


def test_best_in_words() -> None:
    assert parse_best("val/loss:min") == Best("val/loss")
    assert parse_best("a:b:max:3") == Best("a:b", True, 3)
    for text in ("loss", "loss:", ":min", "loss:min:0", "loss:avg"):
        with pytest.raises(UsageError):
            parse_best(text)


RESTIC = shutil.which("restic")
RULES = ("last", "hourly", "daily", "weekly", "monthly", "yearly")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[Snapshot]]:
    """A restic repository with snapshots at odd times."""
    if RESTIC is None:
        pytest.skip("restic is not installed")
    root = tmp_path_factory.mktemp("restic")
    environment = {
        **os.environ,
        "RESTIC_REPOSITORY": str(root / "repository"),
        "RESTIC_PASSWORD": "x",
        "RESTIC_CACHE_DIR": str(root / "cache"),
        "TZ": "UTC",
    }
    (root / "data").mkdir()
    (root / "data" / "file").write_text("x")

    def run(*arguments: str) -> None:
        subprocess.run(
            [RESTIC, "-q", *arguments],
            env=environment,
            check=True,
            cwd=root / "data",
            capture_output=True,
        )

    run("init")
    snapshots = []
    moment = datetime(2023, 11, 20, 3, 4, 5, tzinfo=UTC)
    for number in range(16):
        moment += timedelta(hours=[1, 7, 30, 0.3, 200, 24, 700, 0.2][number % 8])
        text = moment.strftime("%Y-%m-%d %H:%M:%S")
        run("backup", "--time", text, "--host", "h", "--tag", str(number), "file")
        snapshots.append(Snapshot(str(number), moment.timestamp()))
    return environment, snapshots[::-1]


@pytest.mark.slow
@settings(max_examples=40)
@given(counts=st.lists(st.integers(0, 6), min_size=6, max_size=6), days=st.integers(0, 60))
def test_restic_agrees(
    repository: tuple[dict[str, str], list[Snapshot]], counts: list[int], days: int
) -> None:
    environment, snapshots = repository
    policy = Policy(*counts, within=(0, 0, days, 0))
    if policy.is_empty:
        return
    arguments = [f"--keep-{r}={n}" for r, n in zip(RULES, counts, strict=True) if n]
    arguments += [f"--keep-within={days}d"] * (days > 0)
    done = subprocess.run(
        [str(RESTIC), "forget", "--dry-run", "--json", "--group-by", "host", *arguments],
        env=environment,
        check=True,
        capture_output=True,
    )
    expected = {tag for kept in json.loads(done.stdout)[0]["keep"] for tag in kept["tags"]}
    version = subprocess.run([str(RESTIC), "version"], check=True, capture_output=True, text=True)
    minor = int(version.stdout.split()[1].split(".")[1])
    assert set(keep(policy, snapshots, START + 1e9, oldest=minor >= 16)) == expected


def test_no_clock_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("time.time", None)
    assert names(Policy(last=1, within=(0, 0, 1, 0)), every(24, 3)) == [2]
