"""The range coder: exact, near the entropy, and unmoved by damage."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_codecs import round_trip, weights

from ckz import pipeline
from ckz.codecs import rans
from ckz.codecs.planes import Planes
from ckz.container_read import open_container
from ckz.errors import CorruptError
from ckz.kernels import rans as kernels

TOTAL = 1 << kernels.BITS


def drawn(seed: int, n: int, kinds: int, slope: float) -> np.ndarray:
    """Bytes of so many kinds, each rarer than the one before."""
    chances = np.exp(-slope * np.arange(kinds))
    rng = np.random.default_rng(seed)
    return rng.permutation(256)[rng.choice(kinds, n, p=chances / chances.sum())].astype(np.uint8)


def back(payload: bytes, n: int) -> np.ndarray:
    out = np.full(n, 0xAA, np.uint8)
    rans.decompress_to(memoryview(payload), out)
    return out


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(0, 20_000),
    kinds=st.integers(1, 256),
    slope=st.floats(0, 4),
)
def test_bytes_come_back(seed: int, n: int, kinds: int, slope: float) -> None:
    data = drawn(seed, n, kinds, slope)
    assert np.array_equal(back(rans.compress(data), n), data)


def test_it_comes_within_a_thousandth_of_the_entropy() -> None:
    data = drawn(0, 1 << 19, 200, 0.15)
    counts = np.bincount(data)
    counts = counts[counts > 0]
    entropy = -(counts * np.log2(counts / data.size)).sum() / 8
    assert entropy < len(rans.compress(data)) < 1.001 * entropy + 300


@given(counts=st.lists(st.integers(0, 1 << 20), min_size=256, max_size=256))
def test_what_occurs_has_a_frequency(counts: list[int]) -> None:
    scaled = rans.scale(np.array(counts, np.int64))
    assert scaled.sum() == TOTAL
    assert scaled.min() >= 0
    if any(counts):
        assert ((scaled > 0) == (np.array(counts) > 0)).all()


def test_bodies_do_as_what_is_compiled() -> None:
    data = drawn(1, 3001, 40, 0.1)
    counts = np.bincount(data, minlength=256)
    table = rans._table(rans.scale(counts))
    found = []
    for form in ("body", "compiled"):
        counted = np.zeros(256, np.int64)
        getattr(kernels.count, form)(data, counted)
        assert np.array_equal(counted, counts)
        words, states = np.zeros(data.size + 1, np.uint16), np.full(8, kernels.LOW, np.uint64)
        at = np.zeros(1, np.int64)
        getattr(kernels.encode, form)(data, table, states, words, at)
        found.append((words[at[0] :].tobytes(), states.tobytes()))
        lookup = np.repeat(np.arange(256, dtype=np.uint8), table[0].astype(np.int64))
        out = np.empty_like(data)
        rest = np.append(words[at[0] :], np.zeros(at[0], np.uint16))
        getattr(kernels.decode, form)(rest, table, lookup, states, out)
        assert np.array_equal(out, data)
        assert (states == kernels.LOW).all()
    assert found[0] == found[1]


@given(seed=st.integers(0, 100), flip=st.integers(0, 1 << 30), cut=st.integers(0, 3), n=st.data())
def test_damage_is_found_or_gives_other_bytes(
    seed: int, flip: int, cut: int, n: st.DataObject
) -> None:
    data = drawn(seed, 5000, 30, 0.2)
    payload = bytearray(rans.compress(data))
    payload = payload[: len(payload) - cut]
    payload[flip // 8 % len(payload)] ^= 1 << flip % 8
    size = n.draw(st.sampled_from([5000, 4999, 1, 20_000]))
    with contextlib.suppress(CorruptError):
        assert back(bytes(payload), size).size == size


@given(payload=st.binary(max_size=300), n=st.integers(0, 3000))
def test_arbitrary_payloads_never_crash(payload: bytes, n: int) -> None:
    with pytest.raises(CorruptError):
        back(payload, n)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "fp8"])
def test_planes_are_smaller_by_it(dtype: str) -> None:
    chunk = weights(100_000, dtype)
    assert round_trip(Planes(dtype, coder="rans"), chunk) < round_trip(Planes(dtype), chunk)


def test_an_unknown_coder_is_refused() -> None:
    with pytest.raises(ValueError, match="coders are"):
        Planes("bfloat16", coder="magic")


def test_only_the_level_max_takes_it(tmp_path: Path) -> None:
    source = tmp_path / "w.npy"
    np.save(source, weights(200_000, "float32").view("<f4"))
    sizes = {}
    for level in ("default", "max"):
        target = tmp_path / f"{level}.ckz"
        pipeline.compress(source, target, level=level)
        sizes[level] = target.stat().st_size
        with open_container(target) as opened:
            assert ("coder=rans" in " ".join(opened.meta["codecs"])) == (level == "max")
        pipeline.decompress(target, tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == source.read_bytes()
        (tmp_path / "back").unlink()
    assert sizes["max"] < sizes["default"]
