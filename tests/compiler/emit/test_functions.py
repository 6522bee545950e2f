"""The functions that generated C calls: compiled in loops, made vectors of, and compared with numpy and mpmath."""

import ctypes
import functools
import itertools
import platform
import re
import shutil
import subprocess

import mpmath
import numpy as np
import pytest
import torch

from opkit.compiler.emit.c import functions, prelude
from opkit.compiler.emit.c.functions.trigonometric import LIMITS

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64"),
]

FLAGS = ("-O3", "-ffp-contract=off", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Werror")
MACHINES = {
    "native": ("-march=native",),
    "avx512": ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    "avx2": ("-march=haswell",),
    "baseline": ("-march=x86-64",),
}
C = {"f32": "float", "f64": "double", "bf16": "unsigned short", "f16": "unsigned short"}
C |= {
    "i8": "signed char",
    "i16": "short",
    "i32": "int",
    "i64": "long long",
    "u8": "unsigned char",
    "u64": "unsigned long long",
}
NUMPY = {"f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16": np.uint16}
NUMPY |= {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "u8": np.uint8, "u64": np.uint64}

ELEMENTARY = ["exp", "expm1", "log", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"]
ELEMENTARY += ["asinh", "acosh", "atanh", "exp2", "log2", "log10"]
UNARY = [*ELEMENTARY, "erf", "erfc", "sqrt", "floor", "trunc", "round"]
BINARY = ("pow", "atan2", "min", "max")
FUNCTIONS = [f"{op}_{t}" for op in (*UNARY, *BINARY) for t in ("f32", "f64")]
NEAR = ["{}_near_{}".format(*name.split("_")) for name in LIMITS]
CONVERSIONS = ["bf16_to_f32", "f32_to_bf16", "f16_to_f32", "f32_to_f16"]
SCALAR = [f"{op}_{t}" for op in ("fmod", "rem", "floordiv") for t in ("f32", "f64")]
SPECIAL = np.array(
    [0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, 2.5, 1.5, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-40, -1e-40]
)


def by_torch(name):
    return lambda x: getattr(torch, name)(torch.from_numpy(x)).numpy()


ORACLE = {name: getattr(np, f"arc{name[1:]}" if name[0] == "a" else name) for name in ELEMENTARY}
ORACLE |= {name: by_torch(name) for name in ("erf", "erfc")}


def types(name):
    """What a function takes and gives."""
    first, _, last = name.rpartition("_to_") if "_to_" in name else (name.rsplit("_", 1)[1],) * 3
    return first, last


def arity(name):
    return 2 if name.rsplit("_", 1)[0] in (*BINARY, "fmod", "rem", "floordiv", "div") else 1


def loop(name):
    takes, gives = types(name)
    arguments = [f"const {C[takes]} *restrict x{i}, " for i in range(arity(name))]
    call = f"opk_{name}({', '.join(f'x{i}[i]' for i in range(arity(name)))})"
    head = f"void run_{name}({''.join(arguments)}{C[gives]} *restrict y, long n) {{"
    return f"{head}\n#pragma omp simd\nfor (long i = 0; i < n; i++) y[i] = {call};\n}}\n"


def compiled(folder, names, machine, *flags):
    (folder / "f.c").write_text(functions.text(names) + "".join(map(loop, names)))
    command = ["gcc", *FLAGS, *MACHINES[machine], *flags, "-shared", "-fPIC", "-o", "f.so", "f.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@functools.cache
def library(folder, machine):
    folder.mkdir()
    integers = [
        f"{op}_{t}"
        for op in ("div", "fmod", "rem", "floordiv", "pow")
        for t in ("i8", "i16", "i32", "i64", "u8", "u64")
    ]
    compiled(folder, [*FUNCTIONS, *NEAR, *CONVERSIONS, *SCALAR, *integers], machine)
    return ctypes.CDLL(str(folder / "f.so"))


@pytest.fixture(scope="module", params=["native", pytest.param("baseline", marks=pytest.mark.exhaustive)])
def run(request, tmp_path_factory):
    """Calls a function on arrays, compiled with and without fused multiply-add."""
    loaded = library(tmp_path_factory.getbasetemp() / f"functions_{request.param}", request.param)

    def call(name, *arrays):
        takes, gives = types(name)
        inputs = [np.ascontiguousarray(a, NUMPY[takes]) for a in arrays]
        y = np.empty(inputs[0].shape, NUMPY[gives])
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*inputs, y)]
        getattr(loaded, f"run_{name}")(*pointers, ctypes.c_long(y.size))
        return y

    return call


def ulps(y, exact, dtype):
    """How many units in the last place of the exact value it is off by; infinite where NaN or infinity is wrong."""
    digits, least = (24, -149) if dtype == np.float32 else (53, -1074)
    with np.errstate(all="ignore"):
        rounded = exact.astype(dtype)
        unit = np.ldexp(1.0, np.maximum(np.frexp(exact)[1] - digits, least))
        off = np.abs(y.astype(np.float64) - exact) / unit
    same = (y == rounded) & (np.isinf(y) | (np.signbit(y) == np.signbit(rounded)))
    off = np.where(same & np.isinf(y) | np.isnan(y) & np.isnan(rounded), 0, off)
    return np.where(np.isfinite(off) & ((y != 0) | (np.signbit(y) == np.signbit(rounded))), off, np.inf)


def spread(count, dtype, seed=0):
    """Numbers of all exponents and both signs, and as many near 1 as the rest."""
    rng = np.random.default_rng(seed)
    info = np.finfo(dtype)
    exponents = rng.integers(info.minexp - info.nmant, info.maxexp, count // 2)
    wide = np.ldexp(rng.uniform(1, 2, count // 2), exponents) * rng.choice([-1, 1], count // 2)
    near = np.ldexp(rng.uniform(1, 2, count // 2), rng.integers(-8, 8, count // 2)) * rng.choice([-1, 1], count // 2)
    return np.concatenate([SPECIAL, wide, near]).astype(dtype)


_TABLES = {"sin_f64", "cos_f64", "tan_f64"}  # they look numbers up: gcc 12 makes vectors of it, gcc 13 does not


@pytest.mark.exhaustive  # test_c_vectors.py asks it of the functions in kernels
@pytest.mark.parametrize("machine", ["avx512", "avx2"])
def test_loops_are_made_vectors(tmp_path, machine):
    names = [n for n in FUNCTIONS if n not in SCALAR] + NEAR + CONVERSIONS
    log = compiled(tmp_path, names, machine, "-fopt-info-vec")
    lines = (tmp_path / "f.c").read_text().splitlines()
    done = {int(line) for line in re.findall(r"f\.c:(\d+):\d+: optimized: loop vectorized", log)}
    where = {name: next(i for i, line in enumerate(lines, 1) if f" run_{name}(" in line) for name in names}
    assert {n for n, line in where.items() if not {line + 1, line + 2} & done} <= _TABLES


def test_f32_within_two_ulp(subtests, run):
    x = spread(200_000, np.float32)

    def within(op):
        with np.errstate(all="ignore"):
            exact = ORACLE[op](x.astype(np.float64))
        off = ulps(run(f"{op}_f32", x), exact, np.float32)
        worst = int(np.argmax(off))
        assert off[worst] <= 2, (float(x[worst]).hex(), exact[worst])

    for case in ORACLE:
        with subtests.test(str(case)):
            within(case)


# Where every seventh of all arguments is off by most, or most nearly a multiple of a quarter turn.
WORST = {
    "sin_f32": [-3.328589105228204e29, 1.5904267681366424e36],
    "cos_f32": [-2989551714828288.0, -2.919258435287599e20],
    "tan_f32": [538286841921536.0, 4.8058884401190075e22, 1110715788165120.0],
    "asin_f32": [0.5338446497917175],
    "acos_f32": [-0.6074334979057312],
    "atan_f32": [-1.0450103282928467, -1.8598872423171997],
    "sinh_f32": [-7.976643085479736, 4.601484298706055],
    "cosh_f32": [-7.973498821258545],
    "atanh_f32": [0.6799202561378479],
    "erfc_f32": [-0.11645068973302841],
    "sin_near_f32": [76654.609375, 35814.15625],
    "cos_near_f32": [1840.2159423828125, 29099.001953125],
    "tan_near_f32": [19345.142578125, 35814.15625],
}


def test_the_worst_arguments_f32(subtests, run):
    def within(name):
        bits = np.array(WORST[name], np.float32).view(np.int32)[:, None] + np.arange(-20_000, 20_000, dtype=np.int32)
        x = bits.view(np.float32).ravel()
        op = name.split("_")[0]
        with np.errstate(all="ignore"):
            assert ulps(run(name, x), ORACLE[op](x.astype(np.float64)), np.float32).max() <= 2

    for case in WORST:
        with subtests.test(str(case)):
            within(case)


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["sin", "cos", "tan"])
def test_near_zero(run, op):
    x = spread(200_000, np.float32)
    x = x[~(np.abs(x) > float.fromhex(LIMITS[f"{op}_f32"].removesuffix("f")))]
    with np.errstate(all="ignore"):
        assert ulps(run(f"{op}_near_f32", x), ORACLE[op](x.astype(np.float64)), np.float32).max() <= 2
    x = spread(3000, np.float64)
    x = x[(np.abs(x) <= float.fromhex(LIMITS[f"{op}_f64"])) & (x != 0)]
    quarters = np.arange(1, 2000) * (np.pi / 2)
    x = np.concatenate([x, quarters, quarters * 2**18])
    assert worst_f64(op, run(f"{op}_near_f64", x), x) <= 2
    np.testing.assert_array_equal(np.signbit(run(f"{op}_near_f64", np.array([0.0, -0.0]))), [False, op != "cos"])


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["pow", "atan2"])
def test_two_arguments_f32(run, op):
    x, y = spread(200_000, np.float32), spread(200_000, np.float32, seed=1)
    y[::2] = np.clip(y[::2], -30, 30)
    pairs = np.array(list(itertools.product(SPECIAL, SPECIAL)), np.float32)
    x, y = np.concatenate([x, pairs[:, 0]]), np.concatenate([y, pairs[:, 1]])
    with np.errstate(all="ignore"):
        exact = {"pow": np.power, "atan2": np.arctan2}[op](x.astype(np.float64), y.astype(np.float64))
    assert ulps(run(f"{op}_f32", x, y), exact, np.float32).max() <= 2


def test_special_arguments_f64(run):
    for op, oracle in ORACLE.items():
        with np.errstate(all="ignore"):
            assert ulps(run(f"{op}_f64", SPECIAL), oracle(SPECIAL), np.float64).max() <= 4, op
    pairs = np.array([*itertools.product(SPECIAL, SPECIAL)])
    for op, oracle in {"pow": np.power, "atan2": np.arctan2}.items():
        with np.errstate(all="ignore"):
            exact = oracle(pairs[:, 0], pairs[:, 1])
        assert ulps(run(f"{op}_f64", *pairs.T), exact, np.float64).max() <= 4, op


_MEANINGS = {"pow": mpmath.power, "exp2": lambda x: mpmath.power(2, x), "log2": lambda x: mpmath.log(x, 2)}


def exactly(op, *numbers):
    """What mpmath says, or None where it is not a real number of the type's range."""
    try:
        value = _MEANINGS.get(op, getattr(mpmath, op, None))(*map(mpmath.mpf, numbers))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return value if isinstance(value, mpmath.mpf) and 1e-306 < abs(value) < 1e307 else None


def worst_f64(op, y, *arrays):
    worst = 0.0
    with mpmath.workprec(120):
        for got, *at in zip(y, *arrays, strict=True):
            exact = exactly(op, *map(float, at))
            if exact is not None:
                worst = max(worst, float(abs(mpmath.mpf(float(got)) - exact) / 2.0 ** (mpmath.frexp(exact)[1] - 53)))
    return worst


@pytest.mark.sweep
@pytest.mark.parametrize("op", [*sorted(ORACLE), "pow", "atan2"])
def test_f64_within_two_ulp(run, op):
    rng = np.random.default_rng(3)
    scale = {"asin": 1, "acos": 1, "atanh": 1, "erfc": 27}.get(op, 6)
    x = np.concatenate([rng.uniform(-scale, scale, 900), spread(900, np.float64)])
    x = x[np.isfinite(x) & (x != 0) & ((np.abs(x) < 30) | (op not in ("erf", "erfc")))]
    if op in ("log", "log2", "log10", "acosh", "pow"):
        x = np.abs(x) + (op == "acosh")
    others = (
        [rng.uniform(-700, 700, x.size) / (1 + np.abs(np.log(np.abs(x) + 1e-308)))] if arity(f"{op}_f64") == 2 else []
    )
    assert worst_f64(op, run(f"{op}_f64", x, *others), x, *others) <= 2


def test_the_double_nearest_to_a_multiple_of_a_quarter_turn(run):
    x = np.array([6381956970095103 * 2.0**797])
    assert worst_f64("cos", run("cos_f64", x), x) <= 2


@pytest.mark.parametrize("t", ["f32", "f64"])
def test_rounding_and_remainders(run, t):
    x, y = spread(20_000, NUMPY[t]), np.random.default_rng(2).permutation(spread(20_000, NUMPY[t], seed=4))
    oracles = {"sqrt": np.sqrt, "floor": np.floor, "trunc": np.trunc, "round": np.rint}
    with np.errstate(all="ignore"):
        for op, oracle in oracles.items():
            np.testing.assert_array_equal(run(f"{op}_{t}", x), oracle(x), op)
            np.testing.assert_array_equal(np.signbit(run(f"{op}_{t}", x[:13])), np.signbit(oracle(x[:13])), op)
        for op, oracle in {"min": np.minimum, "max": np.maximum, "fmod": np.fmod, "rem": np.mod}.items():
            np.testing.assert_array_equal(run(f"{op}_{t}", x, y), oracle(x, y), op)
    a, b = np.random.default_rng(5).uniform(-9, 9, (2, 1000)).astype(NUMPY[t])
    expected = torch.div(torch.from_numpy(a), torch.from_numpy(b), rounding_mode="floor")
    np.testing.assert_array_equal(run(f"floordiv_{t}", a, b), expected.numpy())


def test_integer_division(subtests, run):
    for t in ("i8", "i16", "i32", "i64", "u8", "u64"):
        with subtests.test(str(t)):
            divides(run, t)


def divides(run, t):
    info = np.iinfo(NUMPY[t])
    values = [v for v in (info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, info.max) if v >= info.min]
    a, b = (np.array(v, NUMPY[t]) for v in zip(*itertools.product(values, values), strict=True))

    def wrapped(function):
        found = [function(int(x), int(y)) if y else 0 for x, y in zip(a, b, strict=True)]
        return np.array([(v - info.min) % (1 << info.bits) + info.min for v in found], NUMPY[t])

    def truncated(x, y):
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    np.testing.assert_array_equal(run(f"floordiv_{t}", a, b), wrapped(lambda x, y: x // y))
    np.testing.assert_array_equal(run(f"rem_{t}", a, b), wrapped(lambda x, y: x % y))
    np.testing.assert_array_equal(run(f"div_{t}", a, b), wrapped(truncated))
    np.testing.assert_array_equal(run(f"fmod_{t}", a, b), wrapped(lambda x, y: x - y * truncated(x, y)))


def test_bf16_as_torch(run):
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(run("bf16_to_f32", every).view(np.uint32), wide.view(np.uint32))
    x = np.concatenate([wide, halfway(every, 15), spread(100_000, np.float32)])
    expected = torch.from_numpy(x).bfloat16()
    ours = torch.from_numpy(run("f32_to_bf16", x).view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def halfway(every, bit):
    """Floats whose lower bits are just half of the last place that a narrow type keeps, and one more and less."""
    middle = (every.astype(np.uint32) << 16) | (1 << bit)
    return np.concatenate([middle, middle + 1, middle - 1]).view(np.float32)


def test_f16_as_numpy(run):
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = every.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(run("f16_to_f32", every), wide)
    np.testing.assert_array_equal(np.signbit(run("f16_to_f32", every)), np.signbit(wide))
    finite = np.sort(wide[np.isfinite(wide)])
    middles = (finite[1:] + finite[:-1]) / 2  # exact in f32
    near = [np.nextafter(middles, np.float32(to)) for to in (-np.inf, np.inf)]
    x = np.concatenate([wide, middles, *near, spread(100_000, np.float32), np.float32([65519.99, 65520, -65520])])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    ours = run("f32_to_f16", x).view(np.float16)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(expected))


def test_philox(tmp_path):
    """Against numbers that Random123 publishes for Philox-4x32-10, and the mean and spread of many."""
    source = prelude.text("opk_random_f32 opk_random_f64 opk_random_row") + (
        "void one(unsigned long long s, unsigned long long c, unsigned *w) { opk_philox(s, c, w, 1); }\n"
        "void many(float *x, double *y, long n) { for (long i = 0; i < n; i++) {"
        " x[i] = opk_random_f32(7, i); y[i] = opk_random_f64(7, i); } }\n"
        "void row(unsigned long long c, long n, float *x) { opk_random_row(7, c, n, x); }\n"
    )
    (tmp_path / "f.c").write_text(source)
    subprocess.run(["gcc", *FLAGS, "-shared", "-fPIC", "-o", "f.so", "f.c"], cwd=tmp_path, check=True)
    loaded = ctypes.CDLL(str(tmp_path / "f.so"))
    words, x, y = np.empty(4, np.uint32), np.empty(100_000, np.float32), np.empty(100_000)
    loaded.one(ctypes.c_uint64(0), ctypes.c_uint64(0), ctypes.c_void_p(words.ctypes.data))
    assert [*words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    loaded.many(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(x.size))
    for drawn in (x, y):
        assert 0 <= drawn.min() < 1e-3 < 0.999 < drawn.max() < 1
        assert abs(drawn.mean() - 0.5) < 0.005
        assert abs(drawn.var() - 1 / 12) < 0.002
        assert len(np.unique(drawn)) > 0.99 * drawn.size
        assert all(abs(np.corrcoef(drawn[apart:], drawn[:-apart])[0, 1]) < 0.02 for apart in (1, 16, 64))
    for begin, length in ((0, 100_000), (5, 3), (63, 2), (64, 64), (100, 1000), (7, 0)):
        row = np.full(length + 1, -1, np.float32)
        loaded.row(ctypes.c_uint64(begin), ctypes.c_long(length), ctypes.c_void_p(row.ctypes.data))
        np.testing.assert_array_equal(row[:-1], x[begin : begin + length])
        assert row[-1] == -1
