"""Every codec against every kind of chunk: exact, and unmoved by damage."""

from __future__ import annotations

import contextlib
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckz import codecs
from ckz.codecs.bitmask import Bitmask
from ckz.codecs.cast import Cast, round_to
from ckz.codecs.planes import Planes
from ckz.codecs.rowcol import RowCol, make_model
from ckz.codecs.ulp import Ulp
from ckz.codecs.xor import Xor
from ckz.codecs.zstd import Zstd
from ckz.errors import CkzError, CorruptError, UnsupportedError

BITS = {"bfloat16": "u2", "float16": "u2", "float32": "u4", "float64": "u8", "fp8": "u1"}
PLANES = [Planes(dtype, order) for dtype in BITS for order in "<>"]


def round_trip(codec: codecs.Codec, chunk: np.ndarray) -> int:
    """Encode and decode; return the payload's size, or the chunk's when coding did not pay."""
    before = chunk.copy()
    payload = codec.encode(chunk)
    assert np.array_equal(chunk, before), "a codec must not change its input"
    if payload is None:
        return chunk.size
    out = np.full(chunk.size, 0xAA, np.uint8)
    codec.decode(memoryview(payload), [], out)
    assert np.array_equal(out, chunk)
    return len(payload)


def weights(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Bytes of n normal values."""
    x = np.random.default_rng(seed).normal(0, 0.02, n)
    if dtype == "bfloat16":
        return (x.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    if dtype == "fp8":
        return (x.astype("<f2").view("<u2") >> 8).astype(np.uint8)
    return x.astype({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype]).view(np.uint8)


@pytest.mark.parametrize("codec", PLANES, ids=codecs.spec)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 4096, 100_003])
def test_planes_are_exact_on_weights(codec: Planes, n: int) -> None:
    chunk = weights(n, codec.dtype)
    if codec.byteorder == ">":
        chunk = chunk.view("<" + BITS[codec.dtype]).byteswap().view(np.uint8)
    size = round_trip(codec, chunk)
    if n >= 4096:
        assert size < 0.93 * chunk.size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_planes_are_exact_on_every_16_bit_pattern(dtype: str) -> None:
    chunk = np.arange(65536, dtype="<u2").view(np.uint8)
    round_trip(Planes(dtype), chunk)
    # Exponents in a narrow window that does not begin at zero, with zeros and without.
    x = np.arange(65536, dtype="<u2")
    exponents = (x >> 7) & 0xFF
    for low in (1, 100, 128, 129, 200):
        for zeros in (False, True):
            keep = ((exponents >= low) & (exponents < low + 127)) | (zeros & (exponents == 0))
            round_trip(Planes(dtype), x[keep].view(np.uint8))


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3.4e38],
        [0.0] * 4096,
        [-0.0] * 4096,
        [1.5] * 4097,
        [2.0**k for k in range(-140, 128)],
    ],
)
def test_planes_are_exact_on_special_values(values: list[float]) -> None:
    for scale in (1, 64):
        chunk = np.array(values * scale, "<f4").view(np.uint8)
        round_trip(Planes("float32"), chunk)
        round_trip(Planes("bfloat16"), chunk)


@given(
    data=st.binary(max_size=300),
    repeat=st.integers(1, 60),
    codec=st.sampled_from([*PLANES, Zstd(), Zstd(19), Zstd(1, 2), Zstd(3, 8)]),
)
def test_any_bytes_come_back(data: bytes, repeat: int, codec: codecs.Codec) -> None:
    round_trip(codec, np.frombuffer(data * repeat, np.uint8))


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 400), flip=st.integers(0, 1 << 15))
def test_damaged_planes_raise_or_give_other_bytes(seed: int, cut: int, flip: int) -> None:
    chunk = weights(3000, "bfloat16", seed)
    payload = bytearray(Planes("bfloat16").encode(chunk) or b"")
    payload = payload[: len(payload) - cut]
    payload[flip // 8 % len(payload)] ^= 1 << flip % 8
    out = np.empty(chunk.size, np.uint8)
    try:
        Planes("bfloat16").decode(memoryview(payload), [], out)
    except CorruptError:
        return
    assert cut == 0


@given(payload=st.binary(max_size=200), n=st.integers(0, 3000), codec=st.sampled_from(PLANES))
def test_arbitrary_payloads_never_crash(payload: bytes, n: int, codec: Planes) -> None:
    out = np.empty(n, np.uint8)
    for tried in (codec, Zstd(), codecs.parse("raw"), codecs.parse("same")):
        with contextlib.suppress(CkzError):
            tried.decode(memoryview(payload), [], out)


def test_a_zstd_frame_that_claims_a_huge_size_allocates_nothing() -> None:
    # Magic, descriptor with an 8-byte content size and single segment: claims 2**60 bytes.
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + b"\x01\x00\x00"
    with pytest.raises(CorruptError):
        Zstd().decode(memoryview(frame), [], np.empty(10, np.uint8))


def test_planes_reach_the_entropy_of_normal_weights() -> None:
    bf16 = round_trip(Planes("bfloat16"), weights(1 << 19, "bfloat16")) / (1 << 20)
    fp32 = round_trip(Planes("float32"), weights(1 << 18, "float32")) / (1 << 20)
    # The order-0 bounds are 0.657 and 0.830.
    assert bf16 < 0.665
    assert fp32 < 0.834


@pytest.mark.parametrize(
    "codec", [*PLANES, Zstd(7), Zstd(shuffle=8), codecs.parse("raw"), codecs.parse("same")]
)
def test_codec_texts_read_back(codec: codecs.Codec) -> None:
    assert codecs.parse(codecs.spec(codec)) == codec


@pytest.mark.parametrize(
    "text", ["foo", "zstd:level=x", "zstd:level=99", "planes:dtype=int4", "zstd:window=3"]
)
def test_unknown_codecs_are_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedError, match=text.split(":")[0]):
        codecs.parse(text)


# -- codecs that lean on something ---------------------------------------------------------------


def moments(rows: int, columns: int, signed: int, seed: int = 0) -> np.ndarray:
    """Squared or plain gradients whose size depends on row and column."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 2, (rows, 1)) + rng.normal(0, 2, (1, columns)))
    values = rng.normal(0, 1e-3, (rows, columns)) * scale
    return np.ascontiguousarray((values if signed else values**2).astype("<f4"))


def model_of(codec: RowCol, matrix: np.ndarray, step: int) -> np.ndarray:
    chunk = matrix.reshape(-1).view(np.uint8)
    starts = range(0, chunk.size, step)
    sums = [codec.sums(chunk[at : at + step], matrix.shape[1], at) for at in starts]
    return make_model(sums, *matrix.shape)


def row_col_sizes(codec: RowCol, matrix: np.ndarray, step: int) -> tuple[int, int]:
    """Code a matrix in chunks and check that it comes back; give sizes with and without means."""
    rows, columns = matrix.shape
    model = model_of(codec, matrix, step)
    flat = matrix.reshape(-1).view(np.uint8)
    size = plain = 0
    for at in range(0, flat.size, step):
        chunk = flat[at : at + step]
        first, last = at // 4 // columns, ((at + chunk.size) // 4 - 1) // columns
        refs = [model[2 * first : 2 * last + 2], model[2 * rows :]]
        payload = codec.encode(chunk, refs, at)
        plain += len(Planes("float32").encode(chunk) or chunk)
        if payload is None:
            size += chunk.size
            continue
        out = np.full(chunk.size, 0xAA, np.uint8)
        codec.decode(memoryview(payload), refs, out)
        assert np.array_equal(out, chunk)
        size += len(payload)
    return size, plain


@pytest.mark.parametrize("signed", [0, 1])
@pytest.mark.parametrize(("rows", "columns", "step"), [(300, 200, 1 << 16), (300, 301, 4 * 20_011)])
def test_row_and_column_means_predict_moments(
    signed: int, rows: int, columns: int, step: int
) -> None:
    matrix = moments(rows, columns, signed)
    assert model_of(RowCol(signed), matrix, step).tolist() == (
        model_of(RowCol(signed), matrix, matrix.nbytes).tolist()
    )
    size, plain = row_col_sizes(RowCol(signed), matrix, step)
    assert size < 0.95 * plain


def test_rows_of_zeros_cost_nothing() -> None:
    matrix = moments(400, 256, 0)
    matrix[50:] = 0
    size, _ = row_col_sizes(RowCol(0), matrix, 1 << 16)
    assert size < 0.15 * matrix.nbytes


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 40),
    step=st.integers(1, 60),
    signed=st.integers(0, 1),
    data=st.data(),
)
def test_any_matrix_comes_back(
    rows: int, columns: int, step: int, signed: int, data: st.DataObject
) -> None:
    patterns = st.sampled_from([0, 1, 0x80000000, 0x7F800000, 0x7FC00001, 0xFFFFFFFF, 0x3C000000])
    bits = data.draw(st.lists(patterns, min_size=rows * columns, max_size=rows * columns))
    row_col_sizes(
        RowCol(signed), np.array(bits, "<u4").view("<f4").reshape(rows, columns), 4 * step
    )


@given(
    payload=st.binary(max_size=120),
    n=st.integers(0, 50),
    refs=st.lists(st.binary(max_size=40), max_size=3),
    signed=st.integers(0, 1),
)
def test_arbitrary_references_never_crash(
    payload: bytes, n: int, refs: list[bytes], signed: int
) -> None:
    data = [np.frombuffer(ref, np.uint8) for ref in refs]
    for codec in (RowCol(signed), Cast("bfloat16"), Cast("float16")):
        with contextlib.suppress(CorruptError):
            codec.decode(memoryview(payload), data, np.empty(n, np.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_casts_cost_nothing_and_exceptions_little(dtype: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 50_000, dtype=np.uint32)
    bits[:8] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0x3F808000, 0x3F818000]
    with np.errstate(all="ignore"):
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        cast = bits.view("<f4").astype(kind)
    finite = ~np.isnan(bits.view("<f4"))
    assert np.array_equal(round_to(dtype, bits)[finite], cast.view("<u2")[finite])
    chunk = round_to(dtype, bits).copy().view(np.uint8)
    refs = [bits[:1000].view(np.uint8), bits[1000:].view(np.uint8)]
    codec = Cast(dtype)
    assert codec.encode(chunk, refs) == b""
    chunk.view("<u2")[rng.integers(0, 50_000, 100)] ^= 1
    payload = codec.encode(chunk, refs)
    assert payload is not None
    assert len(payload) <= 604
    out = np.empty(chunk.size, np.uint8)
    codec.decode(memoryview(payload), refs, out)
    assert np.array_equal(out, chunk)
    assert codec.encode(np.roll(chunk, 2), refs) is None


# -- differences ---------------------------------------------------------------------------------

DELTAS = [
    cls(dtype) for cls in (Ulp, Bitmask, Xor) for dtype in ("bfloat16", "float32", "fp8", "int64")
]


def delta_size(codec: codecs.Codec, current: np.ndarray, base: np.ndarray) -> int:
    payload = codec.encode(current, [base])
    if payload is None:
        return current.size
    out = np.full(current.size, 0xAA, np.uint8)
    codec.decode(memoryview(payload), [base], out)
    assert np.array_equal(out, current)
    cut = base.size // 16 * 8
    out[:] = 0
    codec.decode(memoryview(payload), [base[:cut], base[cut:]], out)
    assert np.array_equal(out, current)
    return len(payload)


@pytest.mark.parametrize("codec", DELTAS, ids=codecs.spec)
@given(current=st.binary(max_size=200), base=st.binary(max_size=200), repeat=st.integers(1, 30))
def test_any_difference_comes_back(
    codec: codecs.Codec, current: bytes, base: bytes, repeat: int
) -> None:
    n = min(len(current), len(base)) // 8 * 8
    a, b = (np.frombuffer(x[:n] * repeat, np.uint8) for x in (current, base))
    delta_size(codec, a, b)
    delta_size(codec, a, a)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2])
def test_ulp_is_smaller_than_the_published_deltas(dtype: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.02, 100_000)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    base = x.astype(kind).view(np.uint8)
    current = (x.astype(kind).astype("f8") + rng.normal(0, scale, x.size)).astype(kind)
    current = current.view(np.uint8)
    ulp, bitmask, xor = (delta_size(cls(dtype), current, base) for cls in (Ulp, Bitmask, Xor))
    assert ulp < xor
    assert ulp < bitmask


@given(
    payload=st.binary(max_size=200),
    base=st.binary(max_size=64),
    codec=st.sampled_from(DELTAS),
)
def test_arbitrary_differences_never_crash(
    payload: bytes, base: bytes, codec: codecs.Codec
) -> None:
    data = np.frombuffer(base, np.uint8)
    with contextlib.suppress(CorruptError):
        codec.decode(memoryview(payload), [data], np.empty(data.size, np.uint8))


@given(flip=st.integers(0, 1 << 20), cut=st.integers(0, 50))
def test_damaged_differences_never_crash(flip: int, cut: int) -> None:
    base, current = weights(3000, "float32", 1), weights(3000, "float32", 2)
    current.view("<u4")[::3] = base.view("<u4")[::3] + 5
    payload = bytearray(Ulp("float32").encode(current, [base]) or b"")
    payload = payload[: len(payload) - cut]
    payload[flip // 8 % len(payload)] ^= 1 << flip % 8
    with contextlib.suppress(CorruptError):
        Ulp("float32").decode(memoryview(payload), [base], np.empty(12_000, np.uint8))


def test_integers_are_smaller_by_planes() -> None:
    chunk = (np.arange(50_000, dtype="<i8") * 977 % 1_000_003).view(np.uint8)
    assert round_trip(Zstd(shuffle=8), chunk) < 0.8 * round_trip(Zstd(), chunk)
