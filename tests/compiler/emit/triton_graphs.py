"""Small graphs, scheduled for a GPU, in Triton's interpreter against eager; ``test_triton_kernels`` runs this file."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from opkit.compiler.capture import conversion
from opkit.compiler.ir.index import size
from opkit.compiler.lower.target import GPU
from tests.compiler.emit.triton_schedules import Run
from tests.compiler.graphs import gradients, graph_of, same

torch.manual_seed(0)
aten = torch.ops.aten
R, INT = torch.randn, torch.randint
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
SPECIAL = torch.tensor([0.0, -0.0, 1.5, -2.5, float("nan"), float("inf"), -float("inf"), 1e-40, 3e38])
WIDE = R(40, 50)
SMALL_TILES = dataclasses.replace(GPU, tiles=dataclasses.replace(GPU.tiles, points=64, row=64, wide=256, step=32))


def image(*shape):
    return R(*shape).contiguous(memory_format=torch.channels_last)


def rms_norm(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def in_place(x):
    x.mul_(2)
    return x + 1


def batch_norm(x):
    channels = x.shape[1]
    given = R(channels), R(channels), torch.zeros(channels), torch.ones(channels)
    return lambda x, *given: aten._native_batch_norm_legit_functional(x, *given, True, 0.1, 1e-5), x, *given


def max_pool_backward(x, *pool):
    y, positions = aten.max_pool2d_with_indices(x, *pool)
    backward = aten.max_pool2d_with_indices_backward
    return lambda g, x, i: backward(g, x, *pool, [1, 1], False, i), torch.rand_like(y), x, positions


CASES = {
    # pointwise
    "chain": (lambda x, y: torch.relu(x * y + 1).sigmoid() * x, R(33, 65), R(65)),
    "narrow": (lambda x, y: F.silu(x) * y, R(40, 8).to(BF16), R(40, 8).to(BF16)),
    "half": (lambda x: F.gelu(x), R(200).to(F16)),
    "double": (lambda x: x.exp() / (x.sin() + 2), R(50).to(F64)),
    "special values": (lambda x: (x.exp(), x.sqrt(), -x, x.abs(), 1 / x, x.floor(), x.round(), x.clamp(-1, 1)), SPECIAL),
    "minimum and maximum": (lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)), SPECIAL, SPECIAL.flip(0)),
    "comparisons": (lambda x, y: (x < y, x <= y, x == y, x != y), SPECIAL, SPECIAL.flip(0)),
    "functions": (lambda x: (x.tan(), x.atan(), x.erf(), x.erfc(), x.log1p(), x.expm1(), x.tanh()), torch.rand(40)),
    "powers": (lambda x: (x**3, x**0.5, 2**x, x**x), torch.rand(40) + 0.1),
    "remainders": (lambda x, y: (x % y, torch.fmod(x, y), x // y), R(60) * 9, R(60)),
    "integers": (lambda x, y: (x // y, x % y, x * y, x << 2, x >> 1, x & y, ~x), INT(-50, 50, (60,)), INT(1, 9, (60,))),
    "integers wrap": (lambda x: (x * x, x + 100, -x), torch.tensor([-128, 127, 100, 0], dtype=torch.int8)),
    "bytes": (lambda x: (x + 200, x >> 1, ~x), INT(0, 255, (20,)).to(torch.uint8)),
    "powers of integers": (lambda x: (x**3, x**5), INT(-9, 9, (20,))),
    "truth values": (lambda x, y: (x & y, x | y, ~x, x ^ y, x + y.int()), R(20) > 0, R(20) > 0),
    "casts": (lambda x: (x.int(), x.to(torch.int8), x.to(BF16), x.double(), x.bool(), x.long()), R(40) * 50),
    "choice": (lambda x: torch.where(x > 0, x, x * 0.1), R(50)),
    "one number": (lambda x: x * 2 + 1, torch.tensor(1.5)),
    "nothing": (lambda x: x * 2, R(0, 3)),
    "strided": (lambda x: x[::2, 1::3] * 2, R(20, 31)),
    "expanded": (lambda x: x.expand(7, 5) + 1, R(5)),
    "in place": (in_place, R(30)),
    "complex": (lambda x: x * x + 1j, torch.randn(20, dtype=torch.complex64)),
    # transposes and copies
    "transpose": (lambda x: x.t().contiguous() + 1, WIDE),
    "transpose and chain": (lambda x, y: x.t() * 2 + y, WIDE, R(50, 40)),
    "permutation": (lambda x: x.permute(2, 0, 1).contiguous(), R(9, 10, 33)),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), R(2, 20, 8, 9)),
    "channels first": (lambda x: x.contiguous() * 2, image(2, 20, 8, 9)),
    "concatenation": (lambda x, y: torch.cat([x, y], 1) * 2, R(3, 4), R(3, 5)),
    "padding": (lambda x: F.pad(x, (1, 2, 3, 0)), R(5, 6)),
    "flip and roll": (lambda x: (x.flip(0), x.roll(3, 1)), R(5, 6)),
    # reductions
    "sum": (lambda x: x.sum(1), R(33, 65)),
    "sum of columns": (lambda x: x.sum(0), R(65, 33)),
    "sum of all": (lambda x: x.sum(), R(100, 201)),
    "sum of all of a prime number": (lambda x: x.sum(), R(16411)),
    "sum of the outer and inner": (lambda x: x.mean((0, 2)), R(5, 7, 9)),
    "sum of the middle": (lambda x: x.sum(1), R(4, 300, 20)),
    "sum of halves": (lambda x: x.sum(1), R(5, 300).to(F16)),
    "stored and summed": (lambda x: ((x * 2), (x * 2).sum(0)), R(31, 70)),
    "greatest": (lambda x: (x.amax(1), x.amin(0)), R(17, 70)),
    "greatest of special values": (lambda x: (x.amax(1), x.argmax(1), x.argmin(0)), SPECIAL.reshape(3, 3)),
    "positions": (lambda x: (x.argmax(1), x.argmin()), INT(0, 5, (17, 70))),
    "position of bf16": (lambda x: x.max(1), R(5, 40).to(BF16)),
    "any and all": (lambda x: ((x > 2).any(1), (x > -2).all(0)), R(9, 40)),
    "variance": (lambda x: x.var(1), R(6, 33)),
    "products": (lambda x: (x.prod(1), x.prod()), R(6, 7)),
    "nothing is summed": (lambda x: (x.sum(1), x.prod(1)), R(3, 0)),
    "softmax": (lambda x: x.softmax(-1), R(17, 70)),
    "log-sum-exp, and the maximum": (lambda x: (x.amax(-1, True), (x - x.amax(-1, True)).exp().sum(-1), x * 2), R(3, 20_000)),
    "softmax of columns": (lambda x: x.softmax(1), R(3, 40, 33)),
    "softmax of bf16": (lambda x: x.log_softmax(-1), R(5, 300).to(BF16)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (70,), w, b), R(17, 70), R(70), R(70)),
    "gradient of a layer norm": (gradients(lambda x, w, b: F.layer_norm(x, (70,), w, b)), R(17, 70), R(70), R(70)),
    "rms norm": (rms_norm, R(17, 70).to(BF16), R(70).to(BF16)),
    "batch norm": (lambda x: (x - x.mean((0, 2, 3), True)) / x.std((0, 2, 3), keepdim=True), image(3, 5, 8, 8)),
    "batch norm in parts": batch_norm(image(4, 5, 8, 16) + 30),
    "batch norm of rows in parts": batch_norm(R(200, 3)),
    "batch norm of several images in parts": batch_norm(R(30, 3, 3, 3)),
    "cross entropy": (gradients(lambda x: F.cross_entropy(x, torch.arange(9) % 5)), R(9, 5)),
    "gradient of a max pool": max_pool_backward(image(2, 3, 7, 6), [3, 2], [2, 1], [1, 0]),
    "gradient of a max pool of integers": max_pool_backward(INT(0, 3, (2, 3, 8, 8)).float(), [3, 3], [2, 2], [1, 1]),
    # scans
    "cumsum": (lambda x: x.cumsum(1), R(5, 20)),
    "cumsum of columns": (lambda x: x.cumsum(0), R(40, 20)),
    "cumsum of integers": (lambda x: x.cumsum(1), INT(0, 9, (5, 20))),
    "cumprod": (lambda x: x.cumprod(-1), torch.rand(5, 20) + 0.5),
    # indices
    "gather": (lambda x, i: x[i], R(9, 6), torch.tensor([3, -1, 0])),
    "gather along": (lambda x, i: x.gather(1, i), R(9, 6), INT(0, 6, (9, 4))),
    "embedding": (lambda w, i: F.embedding(i, w), R(9, 6), INT(0, 9, (4, 5))),
    "index of int32": (lambda x, i: x[i], R(9, 6), torch.tensor([3, 5, 0], dtype=torch.int32)),
    "scatter add": (lambda x, i: R(5, 4).zero_().index_add(0, i, x), R(7, 4), torch.tensor([0, 1, 1, 4, 2, 2, 0])),
    "scatter add of i64": (lambda i: torch.zeros(5, dtype=torch.int64).scatter_add(0, i, i + 1), INT(0, 5, (40,))),
    "scatter of bytes": (lambda x, i: (x * 0)[:5].scatter_add(0, i, x), INT(0, 9, (40,)).to(torch.uint8), INT(0, 5, (40,))),
    "scatter": (lambda x, i: torch.zeros(3, 9).scatter(1, i, x), R(3, 4), torch.arange(12).reshape(3, 4) % 9),
    "greatest of scattered": (lambda x, i: torch.zeros(5).scatter_reduce(0, i, x, "amax"), R(40), INT(0, 5, (40,))),
    "extremes of scattered special values": (
        lambda x, i: [torch.zeros(4).scatter_reduce(0, i, x, how, include_self=False) for how in ("amax", "amin")],
        SPECIAL[torch.tensor([2, 3, 5, 7, 0, 4, 6, 8])], torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    ),
    "least of scattered doubles": (lambda x, i: x[:5].scatter_reduce(0, i, x, "amin"), R(40).to(F64), INT(0, 5, (40,))),
    "greatest of scattered narrow floats": (lambda x, i: x[:5].scatter_reduce(0, i, x, "amax"), R(40).to(BF16), INT(0, 5, (40,))),
    "index put": (lambda x, i: x.index_put((i,), torch.ones(2, 6)), R(9, 6), torch.tensor([3, 5])),
    "triangle": (lambda x: x.tril(1) + torch.arange(9), R(9, 9)),
}  # fmt: skip


def rows_of_special_values():
    """Long rows: all or some -inf, inf, inf and -inf, NaN, growing and falling ones, and the lowest finite number."""
    inf, rows = float("inf"), R(12, 300)
    rows[0] = -inf
    rows[1, ::3] = rows[2, :290] = rows[4, 5] = -inf
    rows[3, 77] = rows[4, 9] = rows[8, 5::32] = inf
    rows[5, 299] = float("nan")
    rows[6], rows[7] = torch.arange(300) * 2.0, torch.arange(300, 0, -1) * 2.0
    rows[9] = rows[10, ::2] = rows[11] = torch.finfo(torch.float32).min
    rows[10, 1::2] = rows[11, 7] = -inf
    return rows


def cross_entropy(x, label):
    return gradients(lambda x: F.cross_entropy(x, label))(x)


LONG = {
    "softmax of special values": (lambda x: x.softmax(-1), rows_of_special_values()),
    "both softmaxes": (lambda x: (x.softmax(-1), x.log_softmax(-1)), rows_of_special_values()),
    "log softmax of columns": (lambda x: x.log_softmax(0), rows_of_special_values().t().contiguous()),
    "softmax of float64": (lambda x: x.softmax(-1), rows_of_special_values().double()),
    "softmax of bf16": (lambda x: x.softmax(-1), rows_of_special_values().to(BF16)),
    "softmax of an expression": (lambda x, y: (x * y).softmax(-1), R(3, 300), R(300)),
    "cross entropy": (cross_entropy, R(9, 300), torch.tensor([3, 0, 299, -100, 7, 8, -100, 150, 31])),
    "sum of long rows": (lambda x: x.sum(1), R(5, 300)),
    "sum of long rows next to each other": (lambda x: x.sum(0), R(300, 5)),
    "sum of columns": (lambda x: x.sum(0), R(320, 70)),
    "sum of columns of a prime number": (lambda x: (x * 2).sum(0), R(331, 70)),
    "stored and summed": (lambda x: ((x * 2), (x * 2).sum(0)), R(322, 70)),
    "sum of all": (lambda x: x.sum(), R(30, 41)),
    "sum of all of a prime number": (lambda x: x.sum(), R(1009)),
    "position": (lambda x: (x.argmax(1), x.argmin(1)), R(3, 300)),
    "softmax": (lambda x: x.softmax(-1), R(3, 300)),
    "softmax of columns": (lambda x: x.softmax(1), R(2, 300, 5)),
    "softmax in place": (lambda x: x.copy_(x.softmax(-1)), R(3, 300)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (300,), w, b), R(5, 300), R(300), R(300)),
    "cumsum": (lambda x: x.cumsum(1), R(2, 300)),
    "cumsum of columns": (lambda x: x.cumsum(0), R(300, 3)),
    "cumprod of an expression": (lambda x: (x + 1).cumprod(1).double(), R(2, 300) * 0.1),
}


@pytest.mark.parametrize("name", LONG)
def test_rows_that_are_longer_than_a_tile(name):
    tiles = dataclasses.replace(SMALL_TILES.tiles, long_column=32)
    compare(*LONG[name], target=dataclasses.replace(GPU, long_row=500, min_part=64, tiles=tiles))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["chain", "sum", "sum of columns", "sum of all", "softmax", "softmax of columns", "transpose", "cumsum"]
)
@pytest.mark.parametrize("n", [37, 1201])
def test_symbolic_sizes(name, n):
    function, *_ = CASES[name]
    target = dataclasses.replace(GPU, long_row=500, tiles=dataclasses.replace(GPU.tiles, step=256))
    x = R(3, n, 5) if name == "softmax of columns" else R(n, 8) if name == "sum of columns" else R(7, n)
    compare(function, x, *([R(n)] if name == "chain" else []), symbolic=n, target=target)


def with_size(graph, n):
    """The graph with a symbolic size for a prime number."""

    def changed(at):
        return at.constant // n * size("s0") if at.constant and at.constant % n == 0 else at

    def symbolic(kind):
        shape, strides = (tuple(map(changed, each)) for each in (kind.shape, kind.strides))
        return dataclasses.replace(kind, shape=shape, strides=strides)

    nodes = [dataclasses.replace(node, result=symbolic(node.result)) for node in graph.nodes]
    return dataclasses.replace(graph, nodes=tuple(nodes), sizes={"s0": n})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (n % 3 > 0)) for n, name in enumerate(CASES)]
)
def test_graph(name):
    compare(*CASES[name])


def compare(function, *args, symbolic=None, target=GPU):
    given = [a.clone() for a in args]
    expected = function(*given)
    expected = expected if isinstance(expected, list | tuple) else [expected]
    made = [a.clone() for a in args]
    graph, constants = graph_of(function, *args)
    run = Run(with_size(graph, symbolic) if symbolic else graph, constants, made, target)
    narrow = {"rtol": 2e-2, "atol": 2e-2} if any(a.dtype == BF16 for a in args) else {"rtol": 2e-5, "atol": 2e-5}
    assert ("n_s0" in run.text) == (symbolic is not None)
    for x, y in zip([*run.results, *made], [*expected, *given], strict=True):
        same(x, y, **({} if y.dtype == F16 else narrow))


@pytest.mark.parametrize("n", [3, 33, 60])
def test_equal_numbers_have_no_variance(n):
    """As in eager, whose algorithm is Welford's: what divides by a deviation of 0 is not finite."""
    x = torch.linspace(0.1, 3, 50)[:, None].expand(50, n).contiguous()
    for function, each in ((lambda x: x.std(1), x), (lambda x: x.std(0), x.t().contiguous())):
        assert Run(*graph_of(function, each), [each]).results[0].count_nonzero() == 0


@pytest.mark.parametrize("name", ["softmax of special values", "both softmaxes", "log softmax of columns"])
def test_long_rows_of_a_softmax_are_read_twice(name):
    function, *args = LONG[name]
    run = Run(*graph_of(function, *args), args, SMALL_TILES)
    assert {kernel.text.count("in range(0, ") for kernel in run.kernels} == {2}


EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
EVERY_BF16 = EVERY_BF16[EVERY_BF16.isfinite() & ~(EVERY_BF16.abs() < 1e-37)]  # the interpreter misreads subnormal ones


def gelu_backward(x):
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


@pytest.mark.sweep
@pytest.mark.parametrize("function", [F.gelu, gelu_backward])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gelu_of_narrow_floats_is_as_accurate_as_in_float32(function, dtype):
    x = EVERY_BF16[EVERY_BF16.abs() < 60000].to(dtype).unique()
    run = Run(*graph_of(function, x), [x])
    assert "opk_one_plus_erf(" in run.text
    assert "libdevice.erf(" not in run.text

    def computed(x, normal):
        return x * normal if function is F.gelu else normal + x * (x * x * -0.5).exp() * (2 * torch.pi) ** -0.5

    wide, single = x.double(), x.float()
    exact = computed(wide, 0.5 * torch.special.erfc(-wide * 0.5**0.5))
    plain = computed(single, 0.5 * (1 + torch.erf(single * 0.5**0.5))).to(dtype)
    kind = torch.finfo(dtype)
    unit = exact.abs().clamp(min=kind.tiny).log2().floor().exp2() * kind.eps
    ours, theirs = ((y.double() - exact).abs() / unit for y in (run.results[0], plain))
    assert (ours - theirs).max() < 0.1
    assert ours[wide > -5].max() < 0.7


@pytest.mark.sweep
@pytest.mark.parametrize("function", [F.gelu, torch.ops.aten.gelu_backward])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gelu_by_tanh_of_narrow_floats_is_as_accurate_as_in_float32(function, dtype):
    x = EVERY_BF16[EVERY_BF16.abs() < 60000].to(dtype).unique()

    def computed(x):
        return function(*[torch.ones_like(x)] * (function is not F.gelu), x, approximate="tanh")

    run = Run(*graph_of(computed, x), [x])
    assert "opk_one_plus_tanh(" in run.text
    assert ("opk_one_minus_tanh_squared(" in run.text) == (function is not F.gelu)
    assert "libdevice.tanh(" not in run.text
    exact, plain, kind = computed(x.double()), computed(x.float()).to(dtype), torch.finfo(dtype)
    unit = exact.abs().clamp(min=kind.tiny).log2().floor().exp2() * kind.eps
    ours, theirs = (y.double().sub(exact).abs() / unit for y in (run.results[0], plain))
    assert (ours - theirs)[x > -5].nan_to_num(0).max() < 0.1
    same(run.results[0], exact.to(dtype))


@pytest.mark.parametrize("function", [torch.erf, torch.tanh])
def test_short_functions_of_special_values(function):
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30]).to(BF16)
    compare(lambda x: (1 + function(x.float())).to(BF16), x)
    compare(lambda x: (1 - function(x.float()) * function(x.float())).to(BF16), x)


def test_erf_of_small_narrow_floats_keeps_its_relative_accuracy():
    x = torch.tensor([1e-6, -1e-20, 1e-3]).to(BF16)
    (found,) = Run(*graph_of(torch.erf, x), [x]).results
    assert torch.equal(found, torch.erf(x.double()).to(BF16))


@pytest.mark.parametrize("label", [300, -101])
def test_an_index_of_a_row_is_checked_before_the_loop_over_columns(label):
    x, good = R(3, 300), torch.tensor([3, 0, -100])
    run = Run(*graph_of(cross_entropy, x, good), [x, good], SMALL_TILES)
    checked = [kernel.text.partition("for ") for kernel in run.kernels if "device_assert" in kernel.text]
    assert any("device_assert" in before and loop for before, loop, _ in checked)
    assert not any("device_assert" in rest or "tl.load(p1 + (a0))" in rest for _, _, rest in checked)
    with pytest.raises(Exception, match="an index is out of range"):
        Run(*graph_of(cross_entropy, x, good), [x, torch.tensor([3, label, 0])], SMALL_TILES)


@pytest.mark.parametrize("at", [9, -10])
def test_an_index_out_of_range_is_reported(at):
    with pytest.raises(Exception, match="an index is out of range"):
        Run(*graph_of(lambda x, i: x[i], R(9, 6), torch.tensor([0])), [R(9, 6), torch.tensor([at])])


def test_a_divisor_of_zero_is_reported():
    args = [torch.tensor([1, 2]), torch.tensor([1, 1])]
    with pytest.raises(Exception, match="a divisor is zero"):
        Run(*graph_of(lambda x, y: x // y, *args), [torch.tensor([1, 2]), torch.tensor([1, 0])])


def test_floats_are_passed_by_value():
    with FakeTensorMode(shape_env=ShapeEnv()):
        traced = make_fx(lambda x, s: F.leaky_relu(x, s.item() / 2).sum(1) * s.item())(
            R(40, 50), torch.empty((), dtype=F64)
        )
    x = R(40, 50)
    run = Run(conversion.capture(traced, "test").graph, {}, [x, torch.tensor(0.5, dtype=F64)])
    assert "tl.load(p1" not in run.text
    same(run.results[0], F.leaky_relu(x, 0.25).sum(1) * 0.5)
