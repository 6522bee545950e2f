"""Kernels in C compute what the interpreter computes: ops, types, loops, memory."""

import itertools

import numpy as np
import pytest

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import bound, cast, const, load, make, op, position, random, var, where
from opkit.compiler.ir.index import Axis, axis, index, size, value
from opkit.compiler.ir.kernel import (
    Accumulator,
    Kernel,
    KernelArgument,
    KernelLaunch,
    Let,
    Loop,
    Scratch,
    Store,
    Update,
)
from opkit.compiler.ir.ops import OPS
from tests.compiler.interpreter_kernel import STORED

RANDOM = np.random.default_rng(0)
START = RANDOM.bit_generator.state
INTS = ("u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64")
NARROW = ("f16", "bf16")
FLOATS = (*NARROW, "f32", "f64")
SCALARS = [row for row in OPS.values() if row.kind == "scalar" and row.numpy is not None]
KINDS = {"b": ("b1",), "i": INTS, "f": FLOATS}
EXACT = {"add", "sub", "mul", "div", "neg", "abs", "min", "max", "lt", "le", "eq", "ne", "sqrt", "fmod"}
EXACT |= {"floor", "trunc", "round"}


@pytest.fixture(autouse=True)
def _random():
    """The same numbers whatever ran before."""
    RANDOM.bit_generator.state = START


def numbers(dtype, count):
    """Flat values: random ones, then special ones."""
    if dtype == "b1":
        return RANDOM.integers(0, 2, count).astype(bool)
    if DTYPES[dtype].kind == "int":
        limits = np.iinfo(STORED[dtype])
        special = [0, 1, 2, 3, limits.max, limits.min, 7, limits.max - 1]
        near = RANDOM.integers(max(limits.min, -9), 9, count).tolist()
        wild = RANDOM.integers(limits.min, limits.max, count, dtype=STORED[dtype], endpoint=True).tolist()
        return np.array((special + near + wild)[:count], STORED[dtype])[RANDOM.permutation(count)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.5, -2.5, 1e30, -1e30, 1e-30]
    with np.errstate(over="ignore"):
        whole = np.array((special + (RANDOM.standard_normal(count) * 3).tolist())[:count])[RANDOM.permutation(count)]
        return narrowed(whole, dtype)


def narrowed(array, dtype):
    if dtype == "bf16":
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(STORED[dtype])


def arguments(**types):
    """``x="f32", y="f32 out"``."""
    return tuple(KernelArgument(name, text.split()[0], text.endswith(" out")) for name, text in types.items())


def pointwise(result, body, length=100, **types):
    loop = Loop(Axis(0, index(length)), (Store("y", axis(0, length), body),), "vector")
    return Kernel("pointwise", arguments(**types, y=f"{result} out"), (), (loop,))


def op_on_each_type(name, types, ulps):
    row, at = OPS[name], axis(0, 100)
    arrays, given, stores = {}, {}, []
    for dtype in types:
        names = [f"{which}_{dtype}" for which in ("a", "b")[: row.arity]]
        body = op(name, *(load(which, dtype, at) for which in names))
        stores.append(Store(f"y_{dtype}", at, body))
        given |= dict.fromkeys(names, dtype) | {f"y_{dtype}": f"{body.dtype} out"}
        arrays |= {which: numbers(dtype, 100) for which in names} | {f"y_{dtype}": np.zeros(100, STORED[body.dtype])}
    kernel = Kernel(name, arguments(**given), (), (Loop(Axis(0, index(100)), tuple(stores), "vector"),))
    return kernel, arrays, 0 if name in EXACT else ulps


@pytest.mark.parametrize("takes", sorted({row.takes for row in SCALARS}))
def test_each_op_on_each_type(all_same, takes):
    wide = [dtype for kind in takes for dtype in KINDS[kind] if dtype not in NARROW]
    all_same([op_on_each_type(row.name, wide, 8) for row in SCALARS if row.takes == takes])


@pytest.mark.exhaustive  # they are computed as f32 is, between casts
def test_each_op_on_narrow_types(all_same):
    all_same([op_on_each_type(row.name, NARROW, 1) for row in SCALARS if "f" in row.takes])


def casts(source):
    targets = ["b1", *INTS, *FLOATS]
    at = axis(0, 60)
    stores = [Store(f"y{t}", at, cast(load("x", source, at), t)) for t in targets]
    given = {"x": source} | {f"y{t}": f"{t} out" for t in targets}
    kernel = Kernel(f"casts_of_{source}", arguments(**given), (), (Loop(Axis(0, index(60)), tuple(stores), "vector"),))
    x = numbers(source, 60)
    if source in ("f32", "f64"):  # what no integer type holds is left open by C for the widest alone
        x = np.clip(x, -(2.0**62), 2.0**62)
    return kernel, {"x": x} | {f"y{t}": np.zeros(60, STORED[t]) for t in targets}, 0


def test_casts(all_same):
    all_same([casts(source) for source in ("b1", *INTS, *FLOATS)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_constants(same, dtype):
    """As numpy converts them, the sign of zero too."""
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 0.1, 1e-45, 3.4e38]
    stores = [Store("y", index(i), const(number, dtype)) for i, number in enumerate(values)]
    converted = [cast(load("x", "f64", i), dtype) for i in range(8)]
    stores += [Store("y", index(8 + i), each) for i, each in enumerate(converted)]
    kernel = Kernel("constants", arguments(x="f64", y=f"{dtype} out"), (), tuple(stores))
    y = same(kernel, {"x": np.array(values), "y": np.ones(16, STORED[dtype])})["y"]
    number = y if dtype != "bf16" else (y.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(number[:8], number[8:])
    assert np.signbit(number[:2]).tolist() == [False, True]


def test_constants_at_the_limits(same):
    limits = [(t, int(n)) for t in INTS for n in (np.iinfo(STORED[t]).min, np.iinfo(STORED[t]).max)]
    stores = [Store(f"y{t}", index(i % 2), const(n, t)) for i, (t, n) in enumerate(limits)]
    kernel = Kernel("limits", arguments(**{f"y{t}": f"{t} out" for t in INTS}), (), tuple(stores))
    same(kernel, {f"y{t}": np.ones(2, STORED[t]) for t in INTS})


def bitcast(source, target):
    body = make("bitcast", target, (load("x", source, axis(0, 30)),))
    return pointwise(target, body, 30, x=source), {"x": numbers(source, 30), "y": np.zeros(30, STORED[target])}, 0


def test_bitcasts(all_same):
    all_same([bitcast(*types) for types in (("f32", "i32"), ("i64", "f64"), ("bf16", "i16"), ("u8", "i8"))])


def test_a_choice_and_a_shared_subexpression(same):
    x = load("x", "f32", axis(0, 100))
    twice = op("exp", x)
    body = where(op("lt", x, const(0.0, "f32")), op("mul", twice, twice), op("add", twice, x))
    same(pointwise("f32", body, x="f32"), {"x": numbers("f32", 100), "y": np.zeros(100, np.float32)}, ulps=4)


def test_a_masked_load_reads_nothing_where_the_mask_is_false(same):
    at = axis(0, 100)
    inside = op("lt", position(at), const(7, "i64"))
    loaded = load("x", "f32", at, mask=inside)
    body = op("add", loaded, loaded)
    same(pointwise("f32", body, x="f32"), {"x": np.arange(7, dtype=np.float32), "y": np.ones(100, np.float32)})


def test_masks_of_outer_axes(same):
    """Rows before and after: where both exist, the loop over columns has no masks."""
    row, column = axis(0, 5), axis(1, 8)
    at, first, last = row * 8 + column, const(1, "i64"), const(4, "i64")
    before = load("x", "f32", at - 8, mask=op("le", first, position(row)))
    after = load("x", "f32", at + 8, mask=op("lt", position(row), last))
    loops = Loop(Axis(1, index(8)), (Store("y", at, op("add", before, after)),), "vector")
    kernel = Kernel("rows", arguments(x="f32", y="f32 out"), (), (Loop(Axis(0, index(5)), (loops,), "parallel"),))
    same(kernel, {"x": numbers("f32", 40), "y": np.ones(40, np.float32)})


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_random_numbers(same, dtype):
    at = axis(0, 50)
    body = random(load("seed", "i64", 0), at * 3 + 2**33, dtype)
    found = same(pointwise(dtype, body, 50, seed="i64"), {"seed": np.array([-12345]), "y": np.zeros(50, STORED[dtype])})
    assert len(np.unique(found["y"])) == 50


@pytest.mark.parametrize("n", [1, 513, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (64, 1200))])
def test_random_numbers_that_are_drawn_ahead(same, n):
    """Of counts that follow one another, from a place that no stretch begins at."""
    seed = load("seed", "i64", 0)
    body = op("add", random(seed, axis(0, n) + 37, "f32"), random(seed, axis(0, n) * 2, "f32"))
    same(pointwise("f32", body, n, seed="i64"), {"seed": np.array([3]), "y": np.zeros(n, np.float32)})


def test_random_numbers_of_a_row_that_is_summed(same):
    rows, n = axis(0, 5), axis(1, 700)
    drawn = random(load("seed", "i64", 0), rows * 700 + n, "f32")
    update = Update("s", "sum", op("mul", drawn, load("x", "f32", rows * 700 + n)))
    body = (
        Accumulator("s", "f32", "sum"),
        Loop(Axis(1, index(700)), (update,), "vector"),
        Store("y", rows, var("s", "f32")),
    )
    kernel = Kernel(
        "sums", arguments(seed="i64", x="f32", y="f32 out"), (), (Loop(Axis(0, index(5)), body, "parallel"),)
    )
    x = RANDOM.standard_normal(3500).astype(np.float32)
    same(kernel, {"seed": np.array([9]), "x": x, "y": np.zeros(5, np.float32)}, ulps=64)


# ---- reductions ------------------------------------------------------------------------------------------------------


def reduced(how, n, *cases):
    """y[a0] = the reduction of x[a0, :], for each reduction and type."""
    rows, stores, given = axis(0, 3), [], {}
    for number, (reduction, dtype) in enumerate(cases):
        at, positioned, name = rows * n + axis(1, n), reduction in ("argmax", "argmin"), f"r{number}"
        read = var(f"{name}_at", "i64") if positioned else var(name, dtype)
        update = Update(name, reduction, load(f"x{number}", dtype, at), axis(1, n) if positioned else None)
        stores += [Accumulator(name, dtype, reduction), Loop(Axis(1, index(n)), (update,), how)]
        stores.append(Store(f"y{number}", rows, read))
        given |= {f"x{number}": dtype, f"y{number}": f"{read.dtype} out"}
    return Kernel("reduced", arguments(**given), (), (Loop(Axis(0, index(3)), tuple(stores), "parallel"),))


REDUCED = dict.fromkeys(("sum", "prod"), ("i8", "i32", "u64", "f32", "f64", "bf16"))
REDUCED |= dict.fromkeys(("max", "min"), ("i8", "i32", "u64", "f32", "f64", "bf16", "b1"))
REDUCED |= {
    "any": ("b1",),
    "all": ("b1",),
    "argmax": ("i16", "f32", "bf16", "b1"),
    "argmin": ("u8", "f64", "f16", "b1"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["plain", "vector"])
@pytest.mark.parametrize("reduction", REDUCED)
def test_reductions(same, reduction, how):
    arrays, adds = {}, reduction in ("sum", "prod")
    for number, dtype in enumerate(REDUCED[reduction]):
        near = narrowed(1 + RANDOM.random(111) / 8, dtype) if adds and dtype in FLOATS else numbers(dtype, 111)
        result = np.zeros(3, np.int64 if "arg" in reduction else STORED[dtype])
        arrays |= {f"x{number}": near, f"y{number}": result}
    cases = [(reduction, dtype) for dtype in REDUCED[reduction]]
    same(reduced(how, 37, *cases), arrays, ulps=16 if adds else 0)


def test_extremes(all_same):
    names, cases = ("max", "min", "argmax", "argmin"), []
    for row in ([np.nan], [-np.inf] * 40, [np.inf] * 40, [1, np.nan] * 20, [2, 3, 3, 1, 1] * 8):
        x = np.array([row, row[::-1], np.roll(row, 3)], np.float32).ravel()
        results = {f"y{i}": np.zeros(3, np.int64 if "arg" in name else np.float32) for i, name in enumerate(names)}
        kernel = reduced("vector", len(row), *((name, "f32") for name in names))
        cases.append((kernel, results | {f"x{i}": x for i in range(4)}, 0))
    all_same(cases)


def test_a_running_greatest_value_is_read_while_it_changes(same):
    """A scan: the accumulator is used in the loop that updates it, also where NaN has come."""
    at = axis(0, 20)
    doubled = op("add", var("m", "f32"), var("m", "f32"))
    body = (Update("m", "max", load("x", "f32", at)), Store("y", at, doubled))
    before = Store("z", index(0), doubled)
    nest = (Accumulator("m", "f32", "max"), before, Loop(Axis(0, index(20)), body), Store("z", index(1), doubled))
    kernel = Kernel("scan", arguments(x="f32", y="f32 out", z="f32 out"), (), nest)
    x = RANDOM.standard_normal(20).astype(np.float32)
    x[13] = np.nan
    same(kernel, {"x": x, "y": np.zeros(20, np.float32), "z": np.zeros(2, np.float32)})


def softmax(n, dtype="f32"):
    rows, a, b = size("n"), axis(0, size("n")), axis(1, n)
    x = cast(load("x", dtype, a * n + b), "f32")
    powered = op("exp", op("sub", x, var("m", "f32")))
    along = Axis(1, index(n))
    body = (
        Scratch("kept", "f32", index(n)),
        Accumulator("greatest", "f32", "max"),
        Loop(along, (Update("greatest", "max", x),), "vector"),
        Let("m", var("greatest", "f32")),
        Accumulator("total", "f32", "sum"),
        Loop(along, (Let("e", powered), Store("kept", b, powered), Update("total", "sum", powered)), "vector"),
        Let("scale", op("div", const(1.0, "f32"), var("total", "f32"))),
        Loop(
            along,
            (Store("y", a * n + b, cast(op("mul", load("kept", "f32", b), var("scale", "f32")), dtype)),),
            "vector",
        ),
    )
    loop = Loop(Axis(0, rows), body, "parallel")
    return Kernel("softmax", arguments(x=dtype, y=f"{dtype} out"), ("n",), (loop,))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("n", [1, 30, 128])
def test_softmax(same, dtype, n):
    x = narrowed(RANDOM.standard_normal(5 * n), dtype)
    same(softmax(n, dtype), {"x": x, "y": np.zeros(5 * n, STORED[dtype])}, {"n": 5}, ulps=1 if dtype != "f32" else 16)


def test_no_rows(same):
    same(softmax(8), {"x": np.zeros(0, np.float32), "y": np.zeros(0, np.float32)}, {"n": 0})


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_in_place(same):
    """What was read is read again after a store."""
    at = axis(0, 40)
    x = load("x", "f32", at)
    body = (Store("x", at, op("add", x, x)), Store("y", at, op("add", x, x)))
    kernel = Kernel("twice", arguments(x="f32 out", y="f32 out"), (), (Loop(Axis(0, index(40)), body, "vector"),))
    same(kernel, {"x": numbers("f32", 40), "y": np.zeros(40, np.float32)})


def test_what_a_loop_changes_is_read_again_in_its_next_round(same):
    first = load("x", "f32", 0)
    inner = Loop(Axis(0, index(5)), (Store("x", index(0), op("add", op("mul", first, first), const(0.1, "f32"))),))
    nest = (Store("y", index(0), op("mul", first, first)), inner, Store("y", index(1), op("mul", first, first)))
    kernel = Kernel("again", arguments(x="f32 out", y="f32 out"), (), nest)
    same(kernel, {"x": np.ones(1, np.float32) / 2, "y": np.zeros(2, np.float32)}, ulps=4)


@pytest.mark.sweep
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64", "i8", "i64"])
def test_stores_that_update(same, dtype, atomic):
    at, updates = value(load("at", "i64", axis(0, 30))), ["add", "mul", "min", "max"]
    stores = tuple(Store(f"y_{each}", at, load("x", dtype, axis(0, 30)), each, atomic) for each in updates)
    given = {"at": "i64", "x": dtype} | {f"y_{each}": f"{dtype} out" for each in updates}
    kernel = Kernel("scatter", arguments(**given), (), (Loop(Axis(0, index(30)), stores),))
    x = numbers(dtype, 30) if DTYPES[dtype].kind == "int" else narrowed(RANDOM.random(30), dtype)
    same(kernel, {"at": RANDOM.integers(0, 4, 30), "x": x} | {f"y_{each}": x[:4].copy() for each in updates})


@pytest.mark.parametrize("update", ["or", "and"])
def test_stores_that_update_truth(same, update):
    loop = Loop(Axis(0, index(30)), (Store("y", axis(0, 30) % 4, load("x", "b1", axis(0, 30)), update),))
    kernel = Kernel("scatter", arguments(x="b1", y="b1 out"), (), (loop,))
    same(kernel, {"x": numbers("b1", 30), "y": numbers("b1", 4)})


@pytest.mark.parametrize("length", [index(50), index(100_000), size("n") * 10])
def test_scratch(same, length):
    at = axis(1, 50)
    body = (
        Scratch("kept", "f32", length),
        Loop(Axis(1, index(50)), (Store("kept", at, load("x", "f32", axis(0, 3) * 50 + at)),), "vector"),
        Loop(Axis(1, index(50)), (Store("y", axis(0, 3) * 50 + at, load("kept", "f32", at * -1 + 49)),), "vector"),
    )
    kernel = Kernel(
        "turned", arguments(x="f32", y="f32 out"), ("n",), (Loop(Axis(0, index(3)), body, "parallel"),), grain=2
    )
    same(kernel, {"x": numbers("f32", 150), "y": np.zeros(150, np.float32)}, {"n": 5})


# ---- loops and indices -----------------------------------------------------------------------------------------------


def test_a_loop_that_stops(same):
    """Blocks of 16 of a length that is not a multiple."""
    n, block, i = size("n"), axis(0, (size("n") + 15) // 16), axis(1, 16)
    at = block * 16 + i
    inner = Loop(Axis(1, index(16)), (Store("y", at, load("x", "f32", at)),), stop=(at, n))
    kernel = Kernel(
        "blocks", arguments(x="f32", y="f32 out"), ("n",), (Loop(Axis(0, (n + 15) // 16), (inner,), "parallel"),)
    )
    for length in (0, 1, 16, 37):
        same(kernel, {"x": numbers("f32", length), "y": np.zeros(length, np.float32)}, {"n": length})


def test_quotients_and_remainders(same):
    """A reshaped and transposed view, with sizes that are known and not."""
    n, at = size("n"), axis(0, 6 * size("n"))
    places = [(at // 4) % 3, at % n, at // n, (at * -1 + 3) % 5, (at * -1 + 3) // 5]
    total = position(places[0])
    for place in places[1:]:
        total = op("add", op("mul", total, const(7, "i64")), position(place))
    kernel = Kernel("view", arguments(y="i64 out"), ("n",), (Loop(Axis(0, 6 * n), (Store("y", at, total),), "vector"),))
    same(kernel, {"y": np.zeros(42, np.int64)}, {"n": 7})


def test_several_parallel_axes_are_shared_among_threads(subtests, same, team):
    """Also where OpenMP gives fewer threads than it was asked for."""
    n = size("n")
    a, b, c = axis(0, 3), axis(1, n), axis(2, 5)
    nest = Loop(
        Axis(2, index(5)), (Store("y", a * n * 5 + b * 5 + c, load("x", "f32", b * 15 + a * 5 + c)),), "parallel"
    )
    for number, extent in ((1, n), (0, index(3))):
        nest = Loop(Axis(number, extent), (nest,), "parallel")
    kernel = Kernel("turned", arguments(x="f32", y="f32 out"), ("n",), (nest,), grain=4)

    def shared(case):
        threads, present, length = case
        workers = team(threads, present)
        arrays = {"x": numbers("f32", 15 * length), "y": np.zeros(15 * length, np.float32)}
        same(kernel, arrays, {"n": length}, runtime=workers.runtime)
        wanted = min(threads, 15 * length // 4)
        assert workers.parts == ([wanted] if wanted > 1 else [])

    for case in [*itertools.product((1, 2, 3, 7), (1, 2, 7), (0, 1, 4))]:
        with subtests.test(str(case)):
            shared(case)


def embedding(extent=10, how="plain"):
    at = value(bound(load("at", "i64", axis(0, size("n"))), extent))
    element = Store("y", axis(0, size("n")) * 6 + axis(1, 6), load("w", "f32", at * 6 + axis(1, 6)))
    row = Loop(Axis(1, index(6)), (element,), how)
    return Kernel(
        "embedding", arguments(at="i64", w="f32", y="f32 out"), ("n",), (Loop(Axis(0, size("n")), (row,), "parallel"),)
    )


@pytest.mark.parametrize("how", ["plain", "vector"])
def test_positions_that_are_read(same, how):
    at = np.array([0, 9, -1, -10, 3])
    same(embedding(how=how), {"at": at, "w": numbers("f32", 60), "y": np.zeros(30, np.float32)}, {"n": 5})


def test_a_position_that_changes_within_a_loop(same):
    at = value(bound(load("at", "i64", index(0)), 10))
    body = (
        Store("at", index(0), load("next", "i64", axis(0, 6))),
        Store("y", axis(0, 6), load("w", "f32", at)),
    )
    kernel = Kernel(
        "walk", arguments(next="i64", at="i64 out", w="f32", y="f32 out"), (), (Loop(Axis(0, index(6)), body),)
    )
    arrays = {"next": np.array([3, 1, -1, 0, 9, 2]), "at": np.zeros(1, np.int64), "w": numbers("f32", 10)}
    same(kernel, arrays | {"y": np.zeros(6, np.float32)}, {})


@pytest.mark.parametrize("how", ["plain", "vector"])
def test_a_position_out_of_range(run, how):
    for wrong in (10, -11, 2**62):
        arrays = {"at": np.array([1, wrong, 0]), "w": np.ones(60, np.float32), "y": np.zeros(18, np.float32)}
        assert run(embedding(how=how), arrays, {"n": 3}) == (1, [1, wrong, 10])
        assert arrays["y"].tolist() == [1] * 6 + [0] * 12, wrong


def test_no_memory(run):
    body = (Scratch("kept", "f32", size("n")), Store("kept", index(0), const(1.0, "f32")))
    kernel = Kernel("large", arguments(y="f32 out"), ("n",), body)
    assert run(kernel, {"y": np.zeros(1, np.float32)}, {"n": 2**60})[0] == 2


def test_segments_share_kernels(segments):
    """Kernels of one name that differ are told apart; one that is given a buffer twice may have it in both places."""
    library, call = segments
    x = load("x", "f32", axis(0, 4))
    added = pointwise("f32", op("add", x, const(1.0, "f32")), 4, x="f32")
    doubled = pointwise("f32", op("add", x, x), 4, x="f32")
    first = [KernelLaunch(added, ("a", "b")), KernelLaunch(doubled, ("b", "b"))]
    made = library([first, [KernelLaunch(added, ("b", "a"))], []], ["a", "b"])
    a, b = np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert call(made.opkit_segment_0, [a, b]) == (0, [0, 0, 0])
    assert b.tolist() == [2] * 4
    assert call(made.opkit_segment_1, [a, b])[0] == call(made.opkit_segment_2, [a, b])[0] == 0
    assert a.tolist() == [3] * 4
