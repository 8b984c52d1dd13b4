"""A job that saves, and rotation beside it that crashes: what must stay always restores."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stores import START, Crash, crash_at, save

from ckz import pipeline, rotating
from ckz.errors import CkzError
from ckz.locking import NAME, locked
from ckz.marks import find_marks
from ckz.pruning import Ageing, group, make_plan
from ckz.retention import Best, Policy
from ckz.store import list_entries
from ckz.watching import Settings, one_pass

POLICIES = st.builds(
    Policy,
    last=st.integers(0, 3),
    daily=st.integers(0, 2),
    every=st.sampled_from([0, 3]),
    best=st.sampled_from([(), (Best("loss"),)]),
    tags=st.just(("paper",)),
)


class Rotation(RuleBasedStateMachine):
    """A directory; what was saved in it, and what may not be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.saved: dict[int, bytes] = {}
        self.pinned: set[int] = set()
        self.step = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(gap=st.integers(1, 3))
    def save(self, gap: int) -> None:
        """Save the next one; its metric is in a file of the user's."""
        self.step += gap
        name = f"step_{self.step}.pt"
        self.saved[self.step] = save(self.root, name, self.step, self.time(self.step)).read_bytes()

    @rule()
    def save_half(self) -> None:
        """A save that was killed: it never becomes the newest."""
        path = self.root / f"step_{self.step + 100}.pt"
        data = save(self.root / "x", "y", 1).read_bytes()
        shutil.rmtree(self.root / "x")
        path.write_bytes(data[: len(data) // 2])

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        there = [s for s in self.saved if self.restores(s)]
        if there:
            step = data.draw(st.sampled_from(there))
            (self.root / f"step_{step}.pt.keep").touch()
            self.pinned.add(step)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        there = sorted(self.root.glob("step_*"))
        if there:
            data.draw(st.sampled_from(there)).touch()

    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        """Move a .ckz away under another name; what leans on it finds it all the same."""
        there = [p for p in sorted(self.root.glob("step_*.ckz")) if p.with_suffix("").exists()]
        if there:
            path = data.draw(st.sampled_from(there))
            path.rename(self.root / f"moved-by-hand-{path.stem}.ckz")

    @rule(crash=st.integers(1, 40), remove=st.booleans())
    def watch(self, crash: int, remove: bool) -> None:
        with self.crashing(crash), locked(self.root):
            for _ in one_pass(self.root, {}, Settings(quiet=0, remove=remove, anchor=4)):
                pass

    @rule(
        policy=POLICIES,
        crash=st.integers(1, 40),
        thin=st.sampled_from([None, 1, 2]),
        old=st.sampled_from([(), (Ageing(0.0, "exact"),), (Ageing(3e5, "resume"),)]),
        rebase=st.booleans(),
    )
    def prune(
        self,
        policy: Policy,
        crash: int,
        thin: int | None,
        old: tuple[Ageing, ...],
        rebase: bool,
    ) -> None:
        best = self.best() if policy.best else None
        with self.crashing(crash), locked(self.root), contextlib.suppress(CkzError):
            rotating.empty_trash(self.root)
            now = START + 100 * 86400.0
            saved, others = group(list_entries(self.root), order="step", now=now, min_age=0)
            own = {str(s): {"loss": self.loss(s)} for s in self.saved}
            marks = find_marks(self.root, saved, own)
            plan = make_plan(
                saved,
                others,
                policy,
                now,
                metrics=marks.metrics,
                tags=marks.tags,
                pinned=marks.pinned,
                optimizer_last=thin,
                ageings=old,
                rebase=rebase,
            )
            failed = [d for d in rotating.carry_out(self.root, plan) if d.fault]
            assert not failed
        assert best is None or self.restores(best)

    @contextlib.contextmanager
    def crashing(self, number: int):  # type: ignore[no-untyped-def]
        """Stop everything at a step, or not at all; a lock of the dead is stale."""
        with pytest.MonkeyPatch.context() as patch:
            crash_at(number, patch)
            with contextlib.suppress(Crash):
                yield
        (self.root / NAME).unlink(missing_ok=True)

    @staticmethod
    def time(step: int) -> float:
        return START + step * 20000.0

    @staticmethod
    def loss(step: int) -> float:
        return step * 7 % 11

    def best(self) -> int | None:
        there = [s for s in self.saved if self.restores(s)]
        return min(there, key=lambda s: (self.loss(s), -s), default=None)

    def restores(self, step: int) -> bool:
        """Tell whether a step is there, as it is or in a .ckz, under its name."""
        path = self.root / f"step_{step}.pt"
        if path.exists():
            return path.read_bytes() == self.saved[step]
        packed = path.with_name(f"{path.name}.ckz")
        if not packed.exists():
            return False
        with tempfile.TemporaryDirectory() as scratch:
            pipeline.decompress(packed, Path(scratch) / "x")
            return (Path(scratch) / "x").read_bytes() == self.saved[step]

    @invariant()
    def nothing_is_lost(self) -> None:
        """The newest and the pinned are there, and every .ckz restores, so its base is there."""
        assert not self.step or self.restores(self.step)
        for step in self.pinned:
            assert self.restores(step)
        for path in sorted(self.root.glob("*.ckz")):
            pipeline.verify(path, data=True)


Rotation.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRotation = Rotation.TestCase


class LongRotation(Rotation):
    """The same for thousands of steps."""


LongRotation.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLongRotation = pytest.mark.slow(LongRotation.TestCase)
