"""The hand-tuned kernels: every instruction set that runs here, against integers and float64."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

_core = pytest.importorskip("opkit._core", reason="opkit runs from a source tree that was not installed")

SOURCES = Path(__file__).parents[2] / "cpp_ext" / "isa"
KNOWN = ("baseline", "avx2", "avx512", "avx512_bf16", "amx", "neon")
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 64, 65)


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
    assert isa in table.values()
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
            _core.f32_to_bf16(isa, np.zeros(1, np.float32), np.zeros(1, np.uint16))


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
    assert {path.parent.name for path in seen} == {"isa", "attention", "product"}


# --- conversions


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


def test_rounding_writes_n_values_and_no_more(isa):
    for n in SIZES:
        bits = random_bf16(np.random.default_rng(n), n)
        narrow = np.full(n + 1, 7, np.uint16)
        _core.f32_to_bf16(isa, widened(bits), narrow)
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


# --- what Python may pass


def arguments(**changes):
    given = {"b": np.zeros((3, 4), np.uint16), "packed": np.zeros((2, 4, 2), np.uint16)}
    return {"isa": None, **given, "n": 4, "k": 3, **changes}


def test_buffers_of_any_kind_and_no_name():
    packed = bytearray(32)
    _core.pack_b_bf16(None, memoryview(np.ones((3, 4), np.uint16)), memoryview(packed).cast("H"), 4, 3)
    assert list(memoryview(packed).cast("H")) == [1] * 8 + [1, 0] * 4


def read_only(array):
    array.flags.writeable = False
    return array


def test_wrong_buffers_are_refused():
    for changes, error, message in (
        ({"b": np.zeros(11, np.uint16)}, ValueError, "b has 11 elements; the sizes need 12"),
        ({"packed": np.zeros((1, 4, 2), np.uint16)}, ValueError, "packed has 8 elements; the sizes need 16"),
        ({"ldb": 5}, ValueError, "b has 12 elements; the sizes need 14"),
        ({"ldb": 3}, ValueError, "b: rows 3 apart overlap, as they have 4 elements"),
        ({"k": -1}, ValueError, "b: sizes must not be negative"),
        ({"n": 2**62}, ValueError, "sizes are too large"),
        (
            {"b": np.zeros((3, 4), np.float32)},
            TypeError,
            r"b must hold bf16 bits as uint16 \(format 'H'\), not format 'f'",
        ),
        ({"b": np.zeros((3, 4), ">u2")}, TypeError, "not format '>H'"),
        ({"b": np.zeros((4, 3), np.uint16).T}, ValueError, "b must be contiguous"),
        ({"packed": read_only(np.zeros((2, 4, 2), np.uint16))}, ValueError, "packed gives no writable buffer"),
        ({"b": [1, 2, 3]}, TypeError, "incompatible function arguments"),
    ):
        refused = None
        try:
            _core.pack_b_bf16(**arguments(**changes))
        except (TypeError, ValueError) as raised:
            refused = raised
        assert type(refused) is error, message
        assert re.search(message, str(refused)), message
