"""What ``ckz diff`` computes: against a plain computation, over blocks of any layout."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from test_diff import as_json, row, run, save, stats_of

import ckz
from ckz.checkpoint import Checkpoint, File, Piece, Span, Tensor, contiguous_strides
from ckz.diffing import blocks as blocks_module
from ckz.diffing import diff
from ckz.diffing import packed as packed_module
from ckz.diffing import stats as stats_module
from ckz.diffing import tensors as tensors_module
from ckz.diffing.blocks import Side, elements_in, read_block, walk
from ckz.diffing.stats import Stats, Tolerance, bucket_names, compare, total
from ckz.errors import CorruptError, UnsupportedError
from ckz.kernels import differences

# Values, against a plain computation

FLOATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def position(bits: int, width: int, signed: bool) -> int:
    """Number floats in ascending order by their patterns."""
    top = 1 << (8 * width - 1)
    return -(bits - top) if signed and bits >= top else bits


def reference(p: np.ndarray, q: np.ndarray, dtype: str, tolerance: Tolerance) -> dict[str, Any]:
    """Compare one element after the other."""
    width = p.dtype.itemsize
    with np.errstate(all="ignore"):
        x, y = (each.view(FLOATS[dtype]).astype(np.float64).tolist() for each in (p, q))
    found: dict[str, Any] = dict.fromkeys(Stats._fields, 0)
    found |= {"elements": len(x), "ulps": [0] * 70, "dd": [], "aa": [], "ab": []}
    for u, v, a, b in zip(p.tolist(), q.tolist(), x, y, strict=True):
        found["bits"] += u != v
        for side, value in (("a", a), ("b", b)):
            found[f"nan_{side}"] += math.isnan(value)
            found[f"inf_{side}"] += math.isinf(value)
        equal = a == b or (math.isnan(a) and math.isnan(b))
        found["same"] += u != v and equal
        if math.isfinite(a) and math.isfinite(b):
            found["zeros"] += u != v and a == b == 0
            near = abs(b - a) <= tolerance.atol + tolerance.rtol * abs(a)
            found["within"] += any(tolerance) and u != v and not equal and near
            found["largest"] = max(found["largest"], abs(b - a))
            for name, value in (("dd", (b - a) ** 2), ("aa", a * a), ("ab", a * (b - a))):
                found[name].append(value)
            signed = dtype != "float8_e8m0fnu"
            steps = abs(position(u, width, signed) - position(v, width, signed))
            found["ulps"][steps.bit_length()] += 1
    for name in ("dd", "aa", "ab"):
        found[name] = math.fsum(found[name])
    return found


@st.composite
def patterns(draw: st.DrawFn) -> tuple[str, np.ndarray, np.ndarray]:
    """Two runs of bit patterns of one float type, of which some are equal or near."""
    dtype = draw(st.sampled_from(sorted(FLOATS)))
    width = np.dtype(FLOATS[dtype]).itemsize
    bits = np.dtype(f"u{width}")
    n = draw(st.integers(0, 40))
    top = 1 << (8 * width - 1)
    near_zero = np.array([0, top, 1, top + 1, 2**6, top + 2**6], np.uint64)
    special = [*near_zero.tolist(), *range(top - 1, top - 4, -1), *range(2 * top - 4, 2 * top)]
    if dtype in ("float32", "float64", "bfloat16"):  # infinities and NaN of several payloads
        infinity = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float64": 0x7FF << 52}[dtype]
        special += [infinity + k + sign for k in (0, 1, 2) for sign in (0, top)]
    # Squares of all others can be added up.
    sane = {"float64": (0x300 << 52, 0x4FF << 52)}.get(dtype, (0, 2 * top - 1))
    element = st.sampled_from(special) | st.integers(*sane)
    p = draw(arrays.arrays(bits, n, elements=element))
    q = draw(arrays.arrays(bits, n, elements=element))
    keep = draw(arrays.arrays(np.bool_, n))
    q[keep] = p[keep]
    return dtype, p, q


TOLERANCES = st.sampled_from([Tolerance(), Tolerance(0.5), Tolerance(0, 0.1), Tolerance(1e-3, 2)])


@given(patterns(), TOLERANCES)
def test_floats_as_one_by_one(
    drawn: tuple[str, np.ndarray, np.ndarray], tolerance: Tolerance
) -> None:
    dtype, p, q = drawn
    stats = compare(p.view(np.uint8), q.view(np.uint8), (dtype, dtype), tolerance)
    expected = reference(p, q, dtype, tolerance)
    found = stats._asdict()
    assert list(found.pop("ulps")) == expected["ulps"][: len(stats.ulps)]
    assert not any(expected.pop("ulps")[len(stats.ulps) :])
    for name in ("dd", "aa", "ab"):
        assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-12, abs=1e-300)
    assert found == expected


@given(
    st.sampled_from(INTEGERS),
    st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1)),
             max_size=30),
)  # fmt: skip
def test_integers_are_exact(dtype: str, drawn: list[tuple[int, int]]) -> None:
    pairs = np.array(drawn, object).reshape(-1, 2) if drawn else np.zeros((0, 2), object)
    wide = np.array([[v % 2**64 for v in pair] for pair in pairs], np.uint64).reshape(-1, 2)
    x, y = (np.ascontiguousarray(wide[:, i]).astype(dtype) for i in range(2))
    y[::3] = x[::3]
    stats = compare(x.view(np.uint8), y.view(np.uint8), (dtype, dtype), Tolerance())
    differences = [abs(a - b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert stats.largest == max(differences, default=0)
    assert type(stats.largest) is int
    assert stats.changed == sum(d > 0 for d in differences)
    assert stats.dd == pytest.approx(math.fsum(float(d) ** 2 for d in differences))
    assert stats.ulps == ()


NUMBERS = st.sampled_from([0, 1, -1, 3, 2**24, 2**24 + 1, 2**53, 2**53 + 1, 2**63, 2**63 - 1,
                           -(2**63), 2**64 - 1, 0.5, -1.5, math.inf, math.nan])  # fmt: skip
KINDS = (*INTEGERS, "float16", "bfloat16", "float32", "float64", "bool")


def typed(value: Any, dtype: str) -> Any:
    """Give a number as a dtype holds it, exactly: int or float."""
    if dtype == "bool":
        return int(bool(value))
    if dtype in INTEGERS:
        bits = 8 * np.dtype(dtype).itemsize
        value = int(value) % 2**bits if math.isfinite(value) else 7
        return value - 2**bits if dtype.startswith("int") and value >= 2 ** (bits - 1) else value
    with np.errstate(all="ignore"):
        return float(np.array(float(value)).astype(FLOATS[dtype]).astype(np.float64))


def as_bytes(values: list[Any], dtype: str) -> np.ndarray:
    kind = FLOATS.get(dtype, dtype)
    with np.errstate(all="ignore"):
        return np.array(values, object).astype(kind).view(np.uint8)


@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.lists(st.tuples(NUMBERS, NUMBERS)))
def test_other_dtypes_are_compared_exactly(
    one: str, other: str, drawn: list[tuple[float, float]]
) -> None:
    x, y = [typed(a, one) for a, _ in drawn], [typed(b, other) for _, b in drawn]
    stats = compare(as_bytes(x, one), as_bytes(y, other), (one, other), Tolerance())
    pairs = list(zip(x, y, strict=True))
    # Python compares int and float exactly.
    equal = [a == b or (a != a and b != b) for a, b in pairs]
    assert stats.changed == equal.count(False)
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    expected = max((abs(float(b) - float(a)) for a, b in finite), default=0)
    if one != other or one in FLOATS:
        assert float(stats.largest or 0) == pytest.approx(expected, rel=1e-15)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_are_pairs(tmp_path: Path) -> None:
    a = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([0.0, float("nan")]))
    b = a.clone()
    b[0] = 1 + 4j
    torch.save({"w": a, "h": a.to(torch.complex32)}, tmp_path / "a.pt")
    torch.save({"w": b, "h": b.to(torch.complex32)}, tmp_path / "b.pt")
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    for name in ("w", "h"):
        stats = row(found, name).stats
        assert stats is not None
        assert (stats.elements, stats.changed, stats.largest, stats.nan_a) == (4, 1, 4, 1)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex32, torch.complex128])
def test_lazy_conjugates_and_negatives(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.complex(torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64))
    x = x.to(dtype)
    lazy = {"c": x.conj(), "n": x.conj().imag}
    eager = {"c": x.conj().resolve_conj(), "n": -x.imag.clone()}
    for name, tensor in lazy.items():
        torch.save({"w": tensor}, tmp_path / "a.pt")
        torch.save({"w": eager[name]}, tmp_path / "b.pt")
        torch.save({"w": -eager[name]}, tmp_path / "c.pt")
        assert ckz.open(tmp_path / "a.pt").info("w").transform == {"c": "conj", "n": "neg"}[name]
        assert row(diff(tmp_path / "a.pt", tmp_path / "b.pt"), "w").status == "equal"
        assert row(diff(tmp_path / "a.pt", tmp_path / "c.pt"), "w").status == "changed"


def test_types_without_values_are_compared_by_bits(tmp_path: Path) -> None:
    rows = np.array([b"abc", b"xyz"])
    np.save(tmp_path / "a.npy", rows)
    np.save(tmp_path / "b.npy", np.array([b"abc", b"xyw"]))
    (tensor,) = as_json(tmp_path / "a.npy", tmp_path / "b.npy")["tensors"]
    assert (tensor["changed"], tensor["elements"], tensor["max_abs"]) == (1, 6, None)
    np.save(tmp_path / "c.npy", np.ones((2, 3), np.float32))
    (tensor,) = as_json(tmp_path / "a.npy", tmp_path / "c.npy")["tensors"]
    assert (tensor["status"], tensor["changed"]) == ("dtype_differs", None)
    assert "bytes -> float32, not comparable" in run(tmp_path / "a.npy", tmp_path / "c.npy").stdout


def test_relative_change_and_cosine(tmp_path: Path) -> None:
    a = np.array([3, 4], np.float32)
    stats = stats_of(a, np.array([4, -3], np.float32), tmp_path)
    assert stats.cosine == pytest.approx(0, abs=1e-12)
    assert stats.relative_l2 == pytest.approx(math.sqrt(2))
    assert stats_of(a, -a, tmp_path).cosine == pytest.approx(-1)
    zero = stats_of(np.zeros(2, np.float32), a, tmp_path)
    assert (zero.relative_l2, zero.cosine) == (math.inf, None)
    result = as_json(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result["tensors"][0]["relative_l2"] is None
    huge = stats_of(np.array([1e300, 1]), np.array([-1e300, 1]), tmp_path)
    assert (huge.changed, huge.largest) == (1, 2e300)
    assert huge.cosine is None


def test_names_of_buckets() -> None:
    assert bucket_names((1,)) == ["0"]
    assert bucket_names((0, 0, 0, 1)) == ["0", "1", "2-3", "4-7"]
    assert bucket_names(()) == []


def test_totals() -> None:
    parts = [
        Stats(4, bits=1, largest=2, dd=4.0, aa=9.0, ulps=(3, 1)),
        Stats(6, bits=2, largest=1.5, dd=5.0, aa=7.0, ulps=(4, 1, 1)),
        Stats(5, largest=None),
    ]
    assert total(parts) == Stats(15, bits=3, largest=2, dd=9.0, aa=16.0, ulps=(7, 2, 1))
    assert total(parts[:1], 3) == Stats(12, bits=3, largest=2, dd=12.0, aa=27.0, ulps=(9, 3))
    assert total([]) == Stats(0, largest=None)
    assert total([Stats(1, dd=math.inf), Stats(1, dd=1.0)]).dd == math.inf


# Blocks: tensors larger than what is read at once, however they lie


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks_module, tensors_module):
        monkeypatch.setattr(module, "CHUNK", 256)
    monkeypatch.setattr(blocks_module, "_SMALL", 64)
    monkeypatch.setattr(stats_module, "_RUN", 16)


def place(array: np.ndarray, draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Side, Tensor]:
    """Lay an array out in a file in some way: axes in any order, gaps, several pieces."""
    order = draw(st.permutations(range(array.ndim)))
    stored = array.transpose(order)
    gap = draw(st.integers(1, 3))
    cuts = [0, stored.shape[0]]
    if array.ndim and draw(st.booleans()) and stored.shape[0] > 1:
        cuts.insert(1, draw(st.integers(1, stored.shape[0] - 1)))
    data, pieces, spans = bytearray(b"\xee" * 7), [], []
    for low, high in itertools.pairwise(cuts):
        part = np.repeat(stored[low:high][..., None], gap, axis=-1)
        raw = part.astype(part.dtype.newbyteorder(byteorder := draw(st.sampled_from("<>"))))
        spans.append(Span(0, len(data), raw.nbytes, "int32", byteorder))
        data += raw.tobytes()
        strides = [s * gap for s in contiguous_strides(stored[low:high].shape)]
        where = dict(zip(order, zip(stored[low:high].shape, strides, strict=True), strict=True))
        shape = tuple(where[axis][0] for axis in range(array.ndim))
        start = tuple(low if axis == order[0] else 0 for axis in range(array.ndim))
        laid = tuple(where[axis][1] for axis in range(array.ndim))
        pieces.append(Piece(len(spans) - 1, 0, shape, laid, start))
    checkpoint = Checkpoint(Path("f"), "x", (File("f", len(data)),), tuple(spans))
    source = np.frombuffer(bytes(data), np.uint8)

    def read(span: int, at: int, out: np.ndarray) -> None:
        assert at + out.size <= spans[span].nbytes
        start = spans[span].offset + at
        out[:] = source[start : start + out.size]

    return Side(checkpoint, read), Tensor("w", "int32", array.shape, tuple(pieces))


@pytest.mark.usefixtures("small_blocks")
@given(st.data())
def test_blocks_of_any_layout(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    sides = [place(array, data.draw) for _ in range(2)]
    grid = walk(sides[0][1], sides[1][1], 1 << 20)
    seen: list[int] = []
    for where in grid.blocks():
        n = elements_in(where)
        assert 1 <= n <= 64
        out = [np.full(4 * n, 0xAA, np.uint8) for _ in sides]
        for (side, _), placed, bytes_ in zip(sides, (grid.a, grid.b), out, strict=True):
            read_block(side, placed, where, bytes_)
        assert np.array_equal(*out)
        seen += out[0].view(np.int32).tolist()
    assert sorted(seen) == array.reshape(-1).tolist()
    assert grid.block_count == len(list(grid.blocks()))


@pytest.mark.usefixtures("small_blocks")
def test_large_tensors_of_every_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(60, 70)).astype(np.float32))
    y = x.clone()
    y[7, 3] += 1
    y[59, 69] = float("nan")
    row_major = {"w": x, "t": x, "s": x}
    other = {"w": y, "t": y.T.contiguous().T, "s": torch.stack([y, y], -1)[..., 0]}
    torch.save(row_major, tmp_path / "a.pt")
    torch.save(other, tmp_path / "b.pt")
    ckz.compress(tmp_path / "b.pt", tmp_path / "b.ckz")
    expected = compare(
        x.numpy().reshape(-1).view(np.uint8), y.numpy().reshape(-1).view(np.uint8),
        ("float32", "float32"), Tolerance(),
    )  # fmt: skip
    for path in (tmp_path / "b.pt", tmp_path / "b.ckz"):
        for tensor in diff(tmp_path / "a.pt", path).tensors:
            stats = tensor.stats
            assert stats is not None
            assert stats[:10] == expected[:10]
            assert stats.ulps == expected.ulps
            for name in ("dd", "aa", "ab"):
                assert getattr(stats, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_expanded_tensors_are_not_materialised(tmp_path: Path) -> None:
    value, count = torch.ones(1), 1 << 40
    torch.save({"w": value.expand(count, 3)}, tmp_path / "a.pt")
    torch.save({"w": value.expand(count, 3).clone() if count < 10 else value.expand(count, 3)},
               tmp_path / "same.pt")  # fmt: skip
    torch.save({"w": (value + 1).expand(count, 3)}, tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "same.pt").same
    stats = diff(tmp_path / "a.pt", tmp_path / "b.pt").tensors[0].stats
    assert stats is not None
    assert (stats.changed, stats.elements, stats.largest) == (3 * count, 3 * count, 1)
    assert stats.relative_l2 == 1
    rows = torch.arange(3.0).expand(1 << 20, 3)
    torch.save({"w": rows}, tmp_path / "a.pt")
    torch.save({"w": rows.clone()}, tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt").same


def test_a_claim_of_more_than_can_be_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 1).expand(2, 1 << 40)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(1, 1 << 20).expand(2, 1 << 20)}, tmp_path / "b.pt")
    crossed = [Tensor("w", "float32", (1 << 30, 1 << 30), (Piece(0, 0, (1 << 30,) * 2, s, (0, 0)),))
               for s in ((0, 1), (1, 0))]  # fmt: skip
    with pytest.raises(UnsupportedError, match="claims"):
        walk(*crossed, 1 << 20)


def test_packed_spans_that_are_large_go_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "_SPOOLED", 1000)
    monkeypatch.setattr(packed_module, "_STEP", 777)
    rng = np.random.default_rng(0)
    w = rng.integers(0, 9, 5000).astype(np.float32)
    v = w.copy()
    v[4999] += 1
    np.savez_compressed(tmp_path / "a.npz", w=w)
    np.savez_compressed(tmp_path / "b.npz", w=v)
    found = diff(tmp_path / "a.npz", tmp_path / "b.npz", spool=tmp_path)
    assert found.tensors[0].stats is not None
    assert found.tensors[0].stats.changed == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz"]
    data = bytearray((tmp_path / "b.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "b.npz").write_bytes(data)
    with pytest.raises(CorruptError, match=r"b\.npz: tensor 'w': deflated"):
        diff(tmp_path / "a.npz", tmp_path / "b.npz", spool=tmp_path)


def test_threads_change_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.weight": rng.normal(size=(700, 500)).astype(np.float32) for i in range(4)}
    a = save(tmp_path / "a", **state)
    changed = {n: w * (1 + 1e-4 * rng.normal(size=w.shape)) for n, w in state.items()}
    b = save(tmp_path / "b", **{n: w.astype(np.float32) for n, w in changed.items()})
    texts = {run("--json", "-T", threads, a, b).stdout for threads in (1, 2, 5)}
    assert len(texts) == 1
    assert diff(a, b, threads=1) == diff(a, b, threads=3, memory=200_000_000)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    n = 1 << 26
    for name, value in (("a", 0), ("b", 1)):
        with (tmp_path / name).open("wb") as file:
            header = json.dumps({"w": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}})
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + n)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([value]))
    code = (
        "import sys; from ckz.cli import main; sys.argv[0] = 'ckz'\n"
        "try: main()\n"
        "finally: print(open('/proc/self/status').read(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "diff", "-q", tmp_path / "a", tmp_path / "b"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert int(peak) < 130_000  # both files have 134 MB


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [0, 1, 127, 128, 1000])
def test_kernels_agree_in_all_forms(width: int, n: int) -> None:
    rng = np.random.default_rng(n)
    dtype = np.float64 if width == 8 else np.float32
    x, y = (rng.normal(size=n).astype(dtype) for _ in range(2))
    x[::7] = y[::7]
    bits = 8 * width
    p, q = (rng.integers(0, 1 << 63, n, np.uint64) >> np.uint64(64 - bits) for _ in range(2))
    p, q = (p << np.uint64(1)).astype(f"u{width}"), q.astype(f"u{width}")
    p[::5] = q[::5]
    p[1::5] = q[1::5] + 1
    results = []
    for form in ("body", "vectorized", "compiled"):
        sums = np.zeros((differences.SUMS, differences.LANES))
        counts = np.zeros(differences.STEPS, np.int64)
        with np.errstate(over="ignore"):
            getattr(differences.add_sums, form)(x, y, sums)
            getattr(differences.count_steps, form)(p, q, (1 << (bits - 1)) - 1, counts)
        results.append((sums.tobytes(), counts.tolist()))
    assert results[0] == results[1] == results[2]
    assert sum(results[0][1]) == n
