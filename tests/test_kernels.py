"""Every kernel gives the same in its three forms: plain body, numpy, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_codecs import weights

from ckz import kernels
from ckz.codecs.planes import Planes
from ckz.kernels import Kernel, planes, quantize, sorting, symbols, ulp

SIZES = [0, 1, 7, 8, 64, 1000, 1024]


def patterns(n: int, kind: str, seed: int = 0) -> np.ndarray:
    """16-bit patterns: any, of small numbers, or of numbers in a window that has a base."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 16, n, dtype=np.uint16)
    if kind == "small":
        return x & np.uint16(0xBFFF)
    if kind == "based":
        exponent = rng.integers(101, 228, n).astype(np.uint16) * (rng.random(n) > 0.1)
        return (x & np.uint16(0x807F)) | (exponent.astype(np.uint16) << np.uint16(7))
    return x


def forms(kernel: Kernel) -> list[Callable[..., Any]]:
    return [kernel.body, kernel.vectorized, kernel.compiled]


def outputs(
    kernel: Kernel, inputs: list[Any], shapes: list[tuple[int, type]]
) -> list[list[np.ndarray]]:
    """Run each form on the same inputs, outputs last; give what each wrote."""
    found = []
    for form in forms(kernel):
        outs = [np.full(n, 0xAA, dtype) for n, dtype in shapes]
        with np.errstate(over="ignore"):  # as compiled integers do
            form(*inputs, *outs)
        found.append(outs)
    return found


def assert_equal(found: list[list[np.ndarray]]) -> list[np.ndarray]:
    for outs in found[1:]:
        for a, b in zip(found[0], outs, strict=True):
            assert np.array_equal(a, b)
    return found[0]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("kind", "base"), [("small", 0), ("based", 100), ("any", None)])
def test_splits_and_joins(n: int, kind: str, base: int | None) -> None:
    x = patterns(n, kind)
    pair = [(n, np.uint8), (n, np.uint8)]
    if base is None:
        symbol, rest = assert_equal(outputs(planes.split_wide, [x], pair))
        (back,) = assert_equal(outputs(planes.join_wide, [symbol, rest], [(n, np.uint16)]))
    else:
        symbol, rest = assert_equal(outputs(planes.split_narrow, [x, base], pair))
        assert n == 0 or int(rest.max()) < 128
        (back,) = assert_equal(outputs(planes.join_narrow, [symbol, rest, base], [(n, np.uint16)]))
    assert np.array_equal(back, x)


@pytest.mark.parametrize("n", [8, 64, 1000, 1024, 4096])
def test_packing_seven_bits(n: int) -> None:
    x = np.random.default_rng(n).integers(0, 128, n, dtype=np.uint8)
    packed = []
    for form in forms(planes.pack7):
        copy = x.copy()
        form(copy)
        packed.append(copy[: n // 8 * 7])
    assert np.array_equal(packed[0], packed[1])
    assert np.array_equal(packed[0], packed[2])
    (back,) = assert_equal(outputs(planes.unpack7, [packed[0]], [(n, np.uint8)]))
    assert np.array_equal(back, x)


@pytest.mark.parametrize("n", SIZES)
def test_float32_planes(n: int) -> None:
    x = np.random.default_rng(n).integers(0, 1 << 32, n, dtype=np.uint32)
    shapes = [(n, np.uint16), (n, np.uint8), (n, np.uint8)]
    found = assert_equal(outputs(planes.split_float32, [x], shapes))
    (back,) = assert_equal(outputs(planes.join_float32, list(found), [(n, np.uint32)]))
    assert np.array_equal(back, x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_payloads_do_not_depend_on_the_form(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = weights(5000, dtype)
    payloads = []
    for form in (kernels.VECTORIZED, kernels.COMPILED):
        monkeypatch.setattr(kernels, "_form", form)
        payloads.append(Planes(dtype).encode(chunk))
        out = np.empty(chunk.size, np.uint8)
        Planes(dtype).decode(memoryview(payloads[-1] or b""), [], out)
        assert np.array_equal(out, chunk)
    assert payloads[0] == payloads[1]


def test_only_much_data_is_worth_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_form", kernels.VECTORIZED)
    kernels.enable(10 << 20)
    assert kernels._form == kernels.VECTORIZED
    kernels.enable(kernels.WORTH)
    assert kernels._form == kernels.COMPILED


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("is_float", [True, False])
def test_zigzag_and_back(dtype: type, is_float: bool) -> None:
    rng = np.random.default_rng(0)
    top = np.iinfo(dtype).max
    base = rng.integers(0, top, 300, dtype=dtype, endpoint=True)
    current = base + rng.integers(0, 9, 300).astype(dtype)
    current[:6] = [0, top, top // 2, top // 2 + 1, 1, top - 1]
    base[:6] = [top, 0, top // 2 + 1, top // 2, top - 1, 1]
    shapes = [(300, dtype)]
    (zigzag,) = assert_equal(outputs(ulp.zigzag, [current, base, is_float], shapes))
    (back,) = assert_equal(outputs(ulp.add_zigzag, [base, zigzag, is_float], shapes))
    assert np.array_equal(back, current)


@pytest.mark.parametrize("coarse", [0, 1, 2, 4])
@pytest.mark.parametrize(("dtype", "shift", "width"), [(np.uint16, 7, 8), (np.uint64, 52, 11)])
def test_sorting_by_class(dtype: type, shift: int, width: int, coarse: int) -> None:
    base = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 500, dtype=dtype)
    found = []
    for form in forms(sorting.classes):
        classes, counts = (
            np.empty(500, np.uint8),
            np.empty((sorting.LANES, sorting.CLASSES), np.int64),
        )
        form(base, shift, width, coarse, classes, counts)
        found.append([classes, counts])
    classes, counts = assert_equal(found)
    assert counts.sum() == 500
    inside = np.cumsum(counts, axis=0) - counts
    starts = inside + np.cumsum(counts.sum(axis=0)) - counts.sum(axis=0)
    (ordered,) = assert_equal(outputs(sorting.scatter, [base, classes, starts], [(500, dtype)]))
    assert np.array_equal(ordered, base[np.argsort(classes, kind="stable")])
    (back,) = assert_equal(outputs(sorting.gather, [ordered, classes, starts], [(500, dtype)]))
    assert np.array_equal(back, base)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("zeros", [0, 3])
def test_summaries(dtype: type, zeros: int) -> None:
    rng = np.random.default_rng(zeros)
    small = rng.geometric(0.01, 9000).astype(dtype)
    signs = rng.random(9000) < 0.5
    values = small << dtype(zeros + 1)
    values = np.where(signs, values | dtype((2 << zeros) - 1), values).astype(dtype)
    values[::977] = rng.integers(0, np.iinfo(dtype).max, values[::977].size, dtype=dtype)
    starts = np.array([0, 0, 1, 7, 1100, 1100, 9000])
    found = []
    for form in forms(symbols.summaries):
        found.append(np.full((6, 2), 7, np.uint64))
        with np.errstate(over="ignore"):
            form(values, starts, found[-1])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert int(found[0][2, 1]) == int(np.sort(values[1:7])[-1]).bit_length()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("zeros", [0, 2])
def test_symbols_and_low_planes(dtype: type, zeros: int) -> None:
    """Of every k that a type can have, of classes of odd and even sizes, and of empty ones."""
    rng = np.random.default_rng(zeros)
    bits = 8 * np.dtype(dtype).itemsize
    starts = np.array([0, 0, 1, 8, 14, 1001, 3000])
    for k in range(2 * np.dtype(dtype).itemsize - 1):
        # What zeros leave out is in the numbers, as zigzagging makes it.
        short = rng.integers(0, 1 << min(63, 4 * k + 8, bits - zeros), 3000).astype(dtype)
        values = symbols.unshorten(short, zeros)
        places = np.cumsum([0, *(sum(symbols.low_sizes(n, k)) for n in np.diff(starts))])
        shapes = np.array([(zeros, k, at) for at in places[:-1]], np.int64)
        found = []
        for form in forms(symbols.split):
            shortened = values.copy()
            outs = [
                np.full(3000, 7, np.uint8),
                np.full(places[-1], 7, np.uint8),
                np.full((6, 2), 7, np.int64),
            ]
            with np.errstate(over="ignore"):
                form(shortened, starts, shapes, *outs)
            assert np.array_equal(shortened, short)
            found.append(outs)
        coded, low, counts = assert_equal(found)
        whole = coded != symbols.ESCAPE
        assert counts.sum(axis=0).tolist() == [np.count_nonzero(coded), 3000 - whole.sum()]
        backs = [[np.empty(3000, dtype)] for _ in range(3)]
        for form, (back,) in zip(forms(symbols.join), backs, strict=True):
            with np.errstate(over="ignore"):
                form(coded, low, starts, shapes, back)
        (back,) = assert_equal(backs)
        assert np.array_equal(back[whole], values[whole])


def test_changed_symbols() -> None:
    rng = np.random.default_rng(0)
    coded = rng.integers(0, 255, 500, np.uint8) * (rng.random(500) < 0.3)
    coded = coded.astype(np.uint8)
    values = coded[coded != 0]
    for squeeze, spread in zip(forms(symbols.squeeze), forms(symbols.spread), strict=True):
        found, back = np.empty(501, np.uint8), np.empty(500, np.uint8)
        squeeze(coded, found)
        assert np.array_equal(found[: values.size], values)
        spread((coded != 0).view(np.uint8), values, back)
        assert np.array_equal(back, coded)


@pytest.mark.parametrize("based", [False, True])
def test_quantized_values(based: bool) -> None:
    rng = np.random.default_rng(0)
    values, base = rng.normal(0, 1, (2, 1000)).astype(np.float32)
    units = np.abs(rng.normal(0, 0.1, 1000)).astype(np.float32)
    special = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38]
    values[:8], values[8:16] = special, base[8:16]
    units[16:20] = 0, np.inf, np.nan, 1e-45
    values[16:18] = base[16], 0
    how = [base, units, based]
    with np.errstate(all="ignore"):
        (found,) = assert_equal(
            outputs(quantize.indices, [values, *how, np.float32(0.4)], [(1000, np.int32)])
        )
        found[found == quantize.NONE] = 77
        made = outputs(quantize.values, [found, *how, np.float32(0.1)], [(1000, np.float32)])
    assert_equal([[outs[0].view(np.uint32)] for outs in made])
    near = np.isfinite(values) & (units > 1e-3) & (np.abs(found) < 1 << 20) & (found != 77)
    near &= np.isfinite(units)
    assert near.sum() > 900
    assert (np.abs(made[0][0] - values) <= 0.7001 * units + 1e-6)[near].all()


def test_units_of_the_update() -> None:
    second = np.array([0, 1e-45, 1e-12, 4, 3e38, np.inf, np.nan], np.float32)
    inputs = [second, np.float32(1e-8), np.float32(0.1)]
    found = outputs(quantize.units, inputs, [(7, np.float32)])
    assert_equal([[outs[0].view(np.uint32)] for outs in found])


@pytest.mark.parametrize("wide", [np.int32, np.int64])
@pytest.mark.parametrize("step", [1, 1 << 21, 26_500_000, (1 << 30) - 1])
def test_quantized_logarithms(wide: type, step: int) -> None:
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(-20, 8, 1000)).astype(np.float32)
    values[:7] = [0, 1e-45, 3e38, np.inf, np.nan, -1, -0.0]
    bits = values.view(np.int32)
    predicted = np.clip(bits + rng.integers(-(1 << 24), 1 << 24, 1000), 0, 0x7F000000).astype(wide)
    predicted[7:9] = 0, 0x7F000000
    empty = rng.random(1000) < 0.01
    how = [predicted, empty, step]
    offset = step // 2 + 1000
    (found,) = assert_equal(outputs(quantize.log_indices, [bits, *how, offset], [(1000, np.int32)]))
    found[found == quantize.NONE] = 5
    (made,) = assert_equal(outputs(quantize.log_values, [found, *how], [(1000, np.uint32)]))
    assert made.max() < 0x7F800000
    assert not made[(bits == 0) | empty].any()
