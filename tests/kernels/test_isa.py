"""The hand-tuned kernels: every instruction set that runs here, against integers and float64."""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

_core = pytest.importorskip("opkit._core", reason="opkit runs from a source tree that was not installed")

SOURCES = Path(__file__).parents[2] / "cpp_ext" / "isa"
KNOWN = ("baseline", "avx2", "avx512", "avx512_bf16", "amx", "neon")
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 65)
FLUSHING = ("avx512_bf16", "amx")  # their instructions read subnormal bf16 values as zero
UNIT = 2.0**-24


@pytest.fixture(params=_core.isas())
def isa(request):
    return request.param


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, by integers wide enough not to overflow; NaN as torch has it."""
    bits = values.view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), kept)


def packed(b: np.ndarray) -> np.ndarray:
    k, n = b.shape
    pairs = np.zeros((k + k % 2, n), np.uint16)
    pairs[:k] = b
    return np.ascontiguousarray(pairs.reshape(len(pairs) // 2, 2, n).swapaxes(1, 2))


def random_bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rounded(rng.standard_normal(shape, np.float32))


def in_rows(matrix: np.ndarray, extra: int, filler: float) -> np.ndarray:
    """The matrix with `extra` more columns of filler, so that its rows lie apart."""
    return np.pad(matrix, ((0, 0), (0, extra)), constant_values=filler)


# --- which kernels run


def test_what_runs_is_built_and_baseline_always_runs():
    assert _core.isas()[0] == "baseline"
    assert set(_core.isas()) <= set(_core.isas_built()) <= set(KNOWN)
    assert set(_core.isa_obstacles()).isdisjoint(_core.isas())
    assert all(_core.isa_obstacles().values())


def test_what_runs_is_what_the_features_allow():
    features = _core.cpu_features()
    needs = {"avx2": ("avx2", "fma"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"), "neon": ("neon",)}
    for isa in set(needs) & set(_core.isas_built()):
        assert (isa in _core.isas()) == all(features[feature] for feature in needs[isa])


def test_each_kernel_comes_from_the_widest_instruction_set_within_the_cap(isa):
    table = _core.isa_table(isa)
    assert table["gemm_block_bf16"] == isa
    order = _core.isas()
    assert all(order.index(variant) <= order.index(isa) for variant in table.values())
    assert "baseline" not in table.values() or isa == "baseline"


def test_the_environment_caps_the_choice_at_call_time(isa, monkeypatch):
    monkeypatch.delenv("OPKIT_ISA", raising=False)
    assert _core.isa_table() == _core.isa_table(_core.isas()[-1])
    monkeypatch.setenv("OPKIT_ISA", isa)
    assert _core.isa_table() == _core.isa_table(None) == _core.isa_table(isa)


def test_an_unknown_instruction_set_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"'avx3' is no instruction set .* baseline"):
        _core.isa_table("avx3")
    monkeypatch.setenv("OPKIT_ISA", "avx3")
    with pytest.raises(ValueError, match="OPKIT_ISA: 'avx3'"):
        _core.isa_table()


def test_an_instruction_set_that_cannot_run_says_why():
    for isa, why in _core.isa_obstacles().items():
        with pytest.raises(ValueError, match=re.escape(f"'{isa}' cannot run here: {why}")):
            _core.bf16_to_f32(isa, np.zeros(1, np.uint16), np.zeros(1, np.float32))


def test_every_instruction_set_that_was_built_runs_here():
    """Or is named in one line of the summary: the other tests are not run with it."""
    if obstacles := _core.isa_obstacles():
        pytest.skip("; ".join(f"{isa} cannot run here: {why}" for isa, why in obstacles.items()))


@pytest.mark.skipif(not SOURCES.exists(), reason="opkit was installed without its sources")
def test_wide_code_includes_no_standard_cpp_header():
    waiting = [path for path in SOURCES.glob("*.cpp") if path.name not in ("dispatch.cpp", "bind.cpp")]
    seen = set()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8")
        assert all(header.endswith(".h") for header in re.findall(r"#include <(.*)>", text)), path.name
        waiting += [path.parent / header for header in re.findall(r'#include "(.*)"', text)]
    assert {path.parent.name for path in seen} == {"isa", "attention"}


# --- conversions


def test_widening_is_exact_for_every_value(isa):
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(bits.size, np.float32)
    _core.bf16_to_f32(isa, bits, out)
    np.testing.assert_array_equal(out.view(np.uint32), bits.astype(np.uint32) << 16)


def float_bits() -> np.ndarray:
    """Every upper half with the lower halves that matter: ties, their neighbours, NaN payloads below the cut; and noise."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    noise = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    subnormal = np.random.default_rng(1).integers(0, 1 << 23, 100_000, dtype=np.uint32)
    return np.concatenate([(upper | lower).ravel(), noise, subnormal, subnormal | np.uint32(1 << 31)])


def test_rounding_is_the_same_bit_for_bit(isa):
    values = float_bits().view(np.float32)
    out = np.empty(values.size, np.uint16)
    _core.f32_to_bf16(isa, values, out)
    np.testing.assert_array_equal(out, rounded(values))


def test_rounding_of_known_values(isa):
    values = np.array([0x00000001, 0x80018000, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0xFFC12345], np.uint32)
    out = np.empty(values.size, np.uint16)
    _core.f32_to_bf16(isa, values.view(np.float32), out)
    assert [hex(bits) for bits in out] == ["0x0", "0x8002", "0x7f80", "0xff80", "0x7fc0", "0x7fc0"]


def test_conversions_write_n_values_and_no_more(isa):
    for n in SIZES:
        bits = random_bf16(np.random.default_rng(n), n)
        wide, narrow = np.full(n + 1, 7, np.float32), np.full(n + 1, 7, np.uint16)
        _core.bf16_to_f32(isa, bits, wide)
        np.testing.assert_array_equal(wide, np.append(widened(bits), np.float32(7)), f"n={n}")
        _core.f32_to_bf16(isa, wide[:n], narrow)
        np.testing.assert_array_equal(narrow, np.append(bits, np.uint16(7)), f"n={n}")


def test_packing(isa):
    rng = np.random.default_rng(0)
    for k, n, extra in itertools.product(SIZES, SIZES, (0, 5)):
        b = rng.integers(0, 1 << 16, (k, n), dtype=np.uint16)
        out = np.full((k + k % 2) * n + 1, 0xABCD, np.uint16)
        _core.pack_b_bf16(isa, in_rows(b, extra, 0x7FC0), out, n, k, ldb=n + extra)
        np.testing.assert_array_equal(
            out, np.append(packed(b).ravel(), np.uint16(0xABCD)), f"k={k} n={n} extra={extra}"
        )


# --- blocks of matrix products


def multiply(isa, dtype, a, b, c, extra=0):
    """c + a b by the kernel. Rows lie `extra` apart, and what lies between them is NaN that nobody may read or write."""
    (m, k), n = a.shape, b.shape[1]
    out = in_rows(c, extra, np.nan)
    strides = {"lda": k + extra, "ldc": n + extra}
    if dtype == "bf16":
        _core.gemm_block_bf16(isa, in_rows(a, extra, 0x7FC0), packed(b), out, m, n, k, **strides)
    else:
        padded = [in_rows(matrix, extra, np.nan) for matrix in (a, b)]
        _core.gemm_block_f32(isa, *padded, out, m, n, k, ldb=n + extra, **strides)
    assert np.isnan(out[:, n:]).all()
    return out[:, :n]


def operands(dtype, rng, m, n, k):
    shapes = (m, k), (k, n)
    if dtype == "bf16":
        return [random_bf16(rng, *shape) for shape in shapes]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def exact(dtype, a, b):
    return [(widened(x) if dtype == "bf16" else x).astype(np.float64) for x in (a, b)]


def check(isa, dtype, m, n, k, extra=0):
    rng = np.random.default_rng([m, n, k])
    a, b = operands(dtype, rng, m, n, k)
    c = rng.standard_normal((m, n), np.float32)
    left, right = exact(dtype, a, b)
    gamma = (k + 2) * UNIT / (1 - (k + 2) * UNIT)
    error = np.abs(multiply(isa, dtype, a, b, c, extra) - (c + left @ right))
    bound = gamma * (np.abs(c) + np.abs(left) @ np.abs(right))
    assert (error <= bound).all(), f"m={m} n={n} k={k} extra={extra}: {(error - bound).max()} above the bound"


@pytest.fixture(params=["bf16", "f32"])
def dtype(request):
    return request.param


@pytest.mark.sweep(2)
def test_products_of_every_size(isa, dtype):
    for m, n, k in itertools.product(SIZES, repeat=3):
        check(isa, dtype, m, n, k, extra=(m + n) % 3)


def test_every_height_and_width_of_a_tile(isa, dtype):
    for size in range(1, 50):
        check(isa, dtype, size, 7, 6)
        check(isa, dtype, 5, size, 6, extra=3)


def test_products_longer_than_a_panel(isa, dtype):
    for k in (255, 256, 257, 511, 512, 513, 1024, 1500):
        check(isa, dtype, 29, 47, k, extra=1)


def test_small_integers_are_exact(isa, dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((45, 77), (77, 53)))
    given = (rounded(a), rounded(b)) if dtype == "bf16" else (a, b)
    np.testing.assert_array_equal(multiply(isa, dtype, *given, np.ones((45, 53), np.float32)), 1 + a @ b)


def test_infinities_and_nan_stay_in_their_rows_and_columns(isa, dtype):
    for k in (1, 31, 33, 65):
        rng = np.random.default_rng(k)
        a, b = (rng.standard_normal(shape, np.float32) for shape in ((35, k), (k, 37)))
        a[3, 0], a[17, -1], a[34, k // 2] = np.inf, np.nan, -np.inf
        b[0, 36], b[-1, 5] = np.nan, np.inf
        c = np.zeros((35, 37), np.float32)
        c[20, 20], c[3, 2] = np.inf, -np.inf
        given = (rounded(a), rounded(b)) if dtype == "bf16" else (a, b)
        with np.errstate(invalid="ignore"):
            left, right = exact(dtype, *given)
            expected = c + left @ right
        found = multiply(isa, dtype, *given, c, extra=2)
        odd = [np.where(np.isfinite(values), 0, values) for values in (found, expected)]
        np.testing.assert_array_equal(*odd, f"k={k}")


def test_what_a_panel_held_before_does_not_reach_other_rows(isa, dtype):
    """The last k of 513 stands alone in its pair; the other place of the pair held NaN, of rows further down."""
    a, b = operands(dtype, np.random.default_rng(0), 29, 7, 513)
    a[20:, [1, 257]] = 0x7FC0 if dtype == "bf16" else np.nan
    found = multiply(isa, dtype, a, b, np.zeros((29, 7), np.float32))
    np.testing.assert_array_equal(np.isnan(found).all(axis=1), np.arange(29) >= 20)
    assert np.isfinite(found[:20]).all()


def test_subnormal_values_count_except_where_the_instruction_has_none(isa):
    a = np.full((17, 33), 0x0040, np.uint16)  # 2^-127
    b = np.full((33, 19), 0x4400, np.uint16)  # 2^9
    found = multiply(isa, "bf16", a, b, np.zeros((17, 19), np.float32))
    np.testing.assert_array_equal(found, np.float32(0 if isa in FLUSHING else 33 * 2.0**-118))


def test_subnormal_sums_given_in_c_are_kept_except_by_amx(isa):
    given = np.full((3, 5), 2.0**-130, np.float32)
    found = multiply(isa, "bf16", np.zeros((3, 2), np.uint16), np.zeros((2, 5), np.uint16), given)
    np.testing.assert_array_equal(found, np.zeros_like(given) if isa == "amx" else given)


def test_threads_multiply_at_once(isa, dtype):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda size: check(isa, dtype, 40 + size, 50, 70), range(24)))


# --- what Python may pass


def arguments(**changes):
    given = {"a": np.zeros((2, 3), np.uint16), "b": np.zeros((2, 4, 2), np.uint16), "c": np.zeros((2, 4), np.float32)}
    return {"isa": None, **given, "m": 2, "n": 4, "k": 3, **changes}


def test_buffers_of_any_kind_and_no_name():
    a, b, c = arguments()["a"], arguments()["b"], bytearray(32)
    a[:], b[:, :, 0] = 0x3F80, 0x3F80  # ones, where b's odd k are zeros
    _core.gemm_block_bf16(None, memoryview(a), b, memoryview(c).cast("f"), 2, 4, 3)
    assert list(memoryview(c).cast("f")) == [2.0] * 8


def read_only(array):
    array.flags.writeable = False
    return array


def test_wrong_buffers_are_refused():
    for changes, error, message in (
        ({"a": np.zeros(5, np.uint16)}, ValueError, "a has 5 elements; the sizes given need 6"),
        ({"b": np.zeros((1, 4, 2), np.uint16)}, ValueError, "b has 8 elements; the sizes given need 16"),
        ({"c": np.zeros(7, np.float32)}, ValueError, "c has 7 elements; the sizes given need 8"),
        ({"lda": 4}, ValueError, "a has 6 elements; the sizes given need 7"),
        ({"ldc": 3}, ValueError, "c: rows 3 apart overlap, as they have 4 elements"),
        ({"m": -1}, ValueError, "a: sizes must not be negative"),
        ({"m": 2**62, "lda": 2**62}, ValueError, "a: sizes are too large"),
        ({"n": 2**62}, ValueError, "sizes are too large"),
        (
            {"a": np.zeros((2, 3), np.float32)},
            TypeError,
            r"a must hold bf16 bits as uint16 \(format 'H'\), not format 'f'",
        ),
        ({"c": np.zeros((2, 4))}, TypeError, r"c must hold float32 \(format 'f'\), not format 'd'"),
        ({"a": np.zeros((2, 3), ">u2")}, TypeError, "not format '>H'"),
        ({"a": np.zeros((3, 2), np.uint16).T}, ValueError, "a must be contiguous"),
        ({"c": read_only(np.zeros((2, 4), np.float32))}, ValueError, "c gives no writable buffer"),
        ({"a": [1, 2, 3]}, TypeError, "incompatible function arguments"),
    ):
        refused = None
        try:
            _core.gemm_block_bf16(**arguments(**changes))
        except (TypeError, ValueError) as raised:
            refused = raised
        assert type(refused) is error, message
        assert re.search(message, str(refused)), message
