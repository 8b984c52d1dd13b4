"""Quantizing codecs: indices for what is near, exceptions for the rest, unmoved by damage."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckz import codecs
from ckz.codecs.cluster import Cluster
from ckz.codecs.deadzone import Deadzone
from ckz.codecs.indices import decode_indices, encode_indices
from ckz.codecs.lc import Lc
from ckz.codecs.moments import MomentsMomentum, MomentsVariance
from ckz.codecs.quantized import snap
from ckz.errors import CorruptError


def steps(n: int, columns: int) -> list[np.ndarray]:
    rows = -(-n // columns)
    return [np.array([columns], "<u8").view("u1"), np.full(rows, 1e-3, "<f4").view("u1")]


def quantized() -> list[tuple[codecs.Codec, list[np.ndarray], np.ndarray]]:
    """Every quantizing codec with references, and a chunk of values near those it can name."""
    n, columns = 3000, 60
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, n).astype("<f4")
    moved = base + rng.normal(0, 2e-3, n).astype("<f4")
    second = (rng.normal(0, 1e-3, n) ** 2).astype("<f4")
    means = [np.full(n // columns, 850, "<i2").view("u1"), np.zeros(columns, "<i2").view("u1")]
    change = [np.full(n // columns, 2048, "<i2").view("u1"), means[1]]
    raw = [x.view("u1") for x in (base, second)]
    clusters = np.array([[-0.1, 2e-4], [-0.01, 4e-5], [0, 4e-5], [0.01, 4e-4]], "<f4")
    return [
        (Deadzone(), [*steps(n, columns), raw[0]], moved.view("u1")),
        (Deadzone(offset=40, lift=9), steps(n, columns), moved.view("u1")),
        (Lc(), [np.array([1e-3, -1e-3, 3e-3], "<f4").view("u1"), raw[0]], moved.view("u1")),
        (Cluster(), [clusters.reshape(-1).view("u1")], moved.view("u1")),
        (MomentsMomentum(step=0.1), [raw[1]], moved.view("u1")),
        (MomentsVariance(), means, raw[1]),
        (MomentsVariance(change=1), [*change, raw[1]], (second * np.float32(0.9)).view("u1")),
    ]


@pytest.mark.parametrize("which", range(7))
def test_quantized_values_have_short_names(which: int) -> None:
    codec, refs, chunk = quantized()[which]
    near = chunk.copy()
    snap(codec, near, refs, 0)
    assert not np.array_equal(near, chunk)
    payload = codec.encode(near, refs, 0)
    assert payload is not None
    assert len(payload) < 0.5 * chunk.size
    out = np.empty(chunk.size, np.uint8)
    codec.decode(memoryview(payload), refs, out)
    assert np.array_equal(out, near)
    # What is not near is kept as it is, and few exceptions are listed.
    near[::400] = 77
    payload = codec.encode(near, refs, 0)
    if payload is not None:
        codec.decode(memoryview(payload), refs, out)
        assert np.array_equal(out, near)
    assert codecs.parse(codecs.spec(codec)) == codec


@given(data=st.data(), cut=st.integers(0, 300), flip=st.integers(0, 1 << 15))
def test_damaged_quantized_values_never_crash(data: st.DataObject, cut: int, flip: int) -> None:
    codec, refs, chunk = data.draw(st.sampled_from(quantized()))
    near = chunk.copy()
    snap(codec, near, refs, 0)
    payload = bytearray(codec.encode(near, refs, 0) or b"")
    payload = payload[: max(1, len(payload) - cut)]
    payload[flip // 8 % len(payload)] ^= 1 << flip % 8
    out = np.empty(chunk.size, np.uint8)
    with contextlib.suppress(CorruptError):
        codec.decode(memoryview(payload), refs, out)


@given(
    payload=st.binary(max_size=200),
    sizes=st.lists(st.integers(0, 40), max_size=4),
    n=st.integers(0, 200),
    which=st.integers(0, 6),
)
def test_references_of_any_size_never_crash(
    payload: bytes, sizes: list[int], n: int, which: int
) -> None:
    codec = quantized()[which][0]
    refs = [np.arange(size, dtype=np.uint8) for size in sizes]
    good = struct.pack("<QIBI", 0, 0, 3, 0) + payload
    for tried in (payload, good):
        with contextlib.suppress(CorruptError):
            codec.decode(memoryview(tried), refs, np.empty(n, np.uint8))


@given(
    values=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=50),
    scale=st.sampled_from([1, 1 << 20, 1 << 28, 1 << 30]),
    repeat=st.sampled_from([1, 3, 700]),
)
def test_indices_come_back(values: list[int], scale: int, repeat: int) -> None:
    indices = np.tile(np.array(values, np.int64) // scale, repeat).astype(np.int32)
    payload = encode_indices(indices)
    found, rest = decode_indices(memoryview(payload + b"rest"), indices.size)
    assert np.array_equal(found, indices)
    assert bytes(rest) == b"rest"


def test_small_indices_cost_less_than_a_bit() -> None:
    indices = (np.random.default_rng(0).random(1 << 16) < 0.02).astype(np.int32)
    assert 8 * len(encode_indices(indices)) / indices.size < 0.3


@pytest.mark.parametrize("columns", [0, 1, 1 << 61, 1 << 62, 1 << 63, (1 << 64) - 1])
def test_hostile_rows(columns: int) -> None:
    payload = struct.pack("<QI", 5, 0) + encode_indices(np.zeros(1024, np.int32))
    refs = [np.array([columns], "<u8").view("u1"), np.full(4, 1, "<f4").view("u1")]
    out = np.empty(4096, np.uint8)
    with contextlib.suppress(CorruptError):
        Deadzone().decode(memoryview(payload), refs, out)


def test_hostile_numbers() -> None:
    indices = np.full(1024, 1 << 30, np.int32)
    for bad in (indices, -indices, np.full(1024, -5, np.int32)):
        payload = struct.pack("<QI", 0, 0) + encode_indices(bad)
        table = np.ones(4, "<f4").view("u1")
        base = np.zeros(4096, np.uint8)
        for codec, refs in ((Lc(), [table, base]), (Cluster(), [table])):
            with contextlib.suppress(CorruptError):
                codec.decode(memoryview(payload), refs, np.empty(4096, np.uint8))
