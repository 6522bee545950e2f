"""opkit.scan next to the loop that it stands for: results, gradients, and errors, in eager mode and compiled."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_structure

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, OutputError, ShapeError
from opkit.layers.torch_private import SCAN_HAS_GRADIENTS
from opkit.masks import Causal

F64 = torch.float64
WAYS = ["eager", "opkit", *(pytest.param(way, marks=pytest.mark.exhaustive) for way in ("aot_eager", "inductor"))]
ROWS, BATCH, WIDTH = 3, 2, 8


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def scaled():
    """An operator with a C kernel."""

    @opkit.custom_op("test_scan::scaled")
    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor.tanh()

    source = """
    void scaled(const T* x, const T* factor, T* out, int64_t x_numel) {
        for (int64_t i = 0; i < x_numel; i++) out[i] = x[i] * tanh((double)factor[i]);
    }
    """
    scaled.register_kernel("cpu", opkit.c_kernel(source))
    yield scaled
    opkit.remove("test_scan::scaled")


def run(function, way, **options):
    if way == "eager":
        return function
    strict = {"strict": True} if way == "opkit" else None
    return torch.compile(function, backend=way, fullgraph=True, options=strict, **options)


def loop(fn, init, xs, *, reverse=False):
    """The loop of the docstring, for one tensor ``xs``."""
    carry, ys = init, []
    for x in xs.flip(0) if reverse else xs:
        carry, y = fn(carry, x)
        ys.append(y)
    stacked = [torch.stack(each[::-1] if reverse else each) for each in zip(*(tree_leaves(y) for y in ys), strict=True)]
    return tree_leaves(carry) + stacked


def with_gradients(function, *tensors):
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    leaves = [leaf for leaf in tree_leaves(function(*inputs)) if leaf is not None]
    differentiable = [leaf for leaf in leaves if leaf.requires_grad]
    return leaves + list(torch.autograd.grad(sum(leaf.square().sum() for leaf in differentiable), inputs))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_scan_is_the_loop(way, reverse, scaled):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)

        def forward(self, h, x):
            h = torch.tanh(self.linear(scaled(h, x)))
            return h, (h.exp(), h)

    cell, x, h = Cell(), torch.randn(ROWS, BATCH, WIDTH, dtype=F64), torch.randn(BATCH, WIDTH, dtype=F64)
    found = with_gradients(run(lambda h, x: opkit.scan(cell, h, x, reverse=reverse), way), h, x)
    assert_same(found, with_gradients(lambda h, x: loop(cell, h, x, reverse=reverse), h, x))


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_attention_in_the_body(way):
    def step(h, x):
        h = opkit.attention(h, x, x, mask=Causal())
        return h, h.tanh()

    tensors = torch.randn(1, 2, 5, 8, dtype=F64), torch.randn(ROWS, 1, 2, 5, 8, dtype=F64)
    expected = with_gradients(lambda h, x: loop(step, h, x), *tensors)
    assert_same(with_gradients(run(lambda h, x: opkit.scan(step, h, x), way), *tensors), expected)


@pytest.mark.parametrize("way", WAYS)
def test_leaves_of_all_kinds(way):
    big = 2**62 + 1  # no float64

    def fn(carry, x):
        h = carry["h"][0] + x["a"] * x["b"][0]
        y = {"same": h, "view": h.T, "w": w, "none": None, "empty": (), "number": 3, "above": h > 0, "n": carry["n"]}
        return {"n": carry["n"] - 1, "h": (h, None)}, y

    def scanned(h, a, b):
        return opkit.scan(fn, {"h": (h.T, None), "n": big}, {"a": a, "b": [b, None]}, ROWS)

    def row_by_row(h, a, b):
        made = [h.T]
        for x, z in zip(a, b, strict=True):
            made.append(made[-1] + x * z)
        hs = torch.stack(made[1:])
        return made[-1], n[-1] - 1, hs, hs.mT, w.expand(ROWS, 2), torch.full((ROWS,), 3), hs > 0, n

    w, n = torch.randn(2, dtype=F64), torch.tensor([big - step for step in range(ROWS)])
    tensors = [torch.randn(shape, dtype=F64) for shape in ((4, 4), (ROWS, 4, 4), (ROWS, 4))]
    compiled = run(scanned, way)
    carry, ys = compiled(*(tensor.clone().requires_grad_() for tensor in tensors))
    assert tree_structure(carry) == tree_structure({"h": (h := carry["h"][0], None), "n": h})
    assert ys["none"] is None
    assert ys["empty"] == ()
    assert_same(with_gradients(compiled, *tensors), with_gradients(row_by_row, *tensors))


@pytest.mark.parametrize("way", WAYS)
def test_without_xs_or_carry(way):
    def power(w):
        return opkit.scan(lambda h, _: (h @ w, None), torch.eye(3, dtype=F64), length=4)

    w, x = torch.randn(3, 3, dtype=F64), torch.randn(ROWS, 3, dtype=F64)
    assert_same(with_gradients(run(power, way), w), with_gradients(lambda w: w @ w @ w @ w, w))
    torch._dynamo.reset()
    found = run(lambda x: opkit.scan(lambda _, x: ((), x.exp()), (), x), way)(x)
    torch.testing.assert_close(found, ((), x.exp()))


@pytest.mark.parametrize("way", WAYS)
def test_length_0(way):
    norm = nn.BatchNorm1d(4)

    def fn(h, x):
        h = norm(h + x) if way == "eager" else h + x
        return F.dropout(h, 0.5), {"y": h.sum(-1), "n": None}

    h, x, state = torch.randn(2, 4), torch.randn(0, 4), torch.get_rng_state()
    carry, ys = run(lambda h, x: opkit.scan(fn, h, x), way)(h, x)
    assert carry is h or torch.equal(carry, h)
    assert ys["y"].shape == (0, 2)
    assert ys["n"] is None
    assert torch.equal(torch.get_rng_state(), state)
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("way", WAYS[1:])
def test_dropout_draws_a_mask_a_step_and_the_backward_uses_it(way):
    w = torch.ones(64, dtype=F64, requires_grad=True)
    _, ys = run(lambda x: opkit.scan(lambda c, x: (c, F.dropout(x * w, 0.5)), (), x), way)(torch.ones(4, 64, dtype=F64))
    assert len({tuple(mask) for mask in (ys != 0).tolist()}) == 4
    torch.testing.assert_close(torch.autograd.grad(ys.sum(), w)[0], ys.detach().sum(0))


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["recompute_cheap", opkit.keep("square"), opkit.offload("recompute_all")], ids=str)
def test_policies(way, policy):
    def step(h, x):
        h = opkit.checkpoint_name(h @ h.mT, "square").tanh() @ x
        return h, h.sin()

    def scanned(h, x):
        return opkit.scan(step, h, x, policy=policy)

    tensors = torch.randn(BATCH, BATCH, dtype=F64), torch.randn(ROWS, BATCH, BATCH, dtype=F64)
    expected = with_gradients(lambda h, x: loop(step, h, x), *tensors)
    ends_graphs = way != "eager" and str(policy).startswith("offload")
    function = torch.compile(scanned, backend=way) if ends_graphs else run(scanned, way)
    assert_same(with_gradients(function, *tensors), expected)


def test_the_body_is_compiled_once():
    w = torch.randn(WIDTH, requires_grad=True)

    def fn(h, x):
        return torch.tanh(h * w + x), h.sum()

    graphs = []
    for rows in (3, 30):
        torch._dynamo.reset()
        with torch.set_grad_enabled(SCAN_HAS_GRADIENTS):
            explanation = opkit.explain(lambda x: opkit.scan(fn, torch.zeros(WIDTH), x), torch.randn(rows, WIDTH))
        graphs.append([(graph.name.split()[0], graph.nodes) for graph in explanation.graphs])
    assert graphs[0] == graphs[1]
    assert sum(name == "body" for name, _ in graphs[0]) == 1


@pytest.mark.exhaustive
def test_symbolic_sizes():
    compiled = run(lambda h, x: opkit.scan(lambda h, x: ((h * x).cos(), h.sum(-1)), h, x), "opkit", dynamic=True)
    for rows, width in ((3, 5), (6, 4)):
        tensors = torch.randn(width, dtype=F64), torch.randn(rows, width, dtype=F64)
        expected = with_gradients(lambda h, x: loop(lambda h, x: ((h * x).cos(), h.sum(-1)), h, x), *tensors)
        assert_same(with_gradients(compiled, *tensors), expected)


def test_derivatives_of_eager_loops():
    def scanned(h, x):
        return opkit.scan(lambda h, x: (torch.tanh(h * x), h.sin()), h, x)

    h, x = (torch.randn(shape, dtype=F64, requires_grad=True) for shape in ((2,), (ROWS, 2)))
    torch.autograd.gradcheck(scanned, (h, x), check_forward_ad=True)
    torch.autograd.gradgradcheck(scanned, (h, x))
    batched = torch.vmap(scanned, in_dims=(None, 1))(h, x)
    torch.testing.assert_close(batched[1][1], scanned(h, x[:, 1:2])[1])


@pytest.mark.parametrize("way", ["aot_eager", pytest.param("opkit", marks=pytest.mark.exhaustive)])
def test_transforms_within_compiled_functions(way):
    def gradient(h, x):
        return torch.func.grad(lambda h: opkit.scan(lambda h, x: (h * x, h), h, x)[0].sum())(h)

    h, x = torch.randn(4), torch.randn(ROWS, 4)
    torch.testing.assert_close(run(gradient, way)(h, x), x.prod(0))
    torch._dynamo.reset()
    rows = run(lambda h, x: torch.vmap(lambda x: opkit.scan(lambda h, x: (h * x, h), h[0], x)[0], 1)(x), way)(h, x)
    torch.testing.assert_close(rows, h[0] * x.prod(0))


def test_running_statistics():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, h, x):
            return self.norm(h + x), None

    cell, peer, h, x = Cell(), Cell(), torch.randn(3, 4), torch.randn(ROWS, 3, 4)
    torch.testing.assert_close(run(lambda h, x: opkit.scan(cell, h, x), "aot_eager")(h, x), opkit.scan(peer, h, x))
    torch.testing.assert_close(cell.state_dict(), peer.state_dict())
    if not SCAN_HAS_GRADIENTS:
        return  # the loop is unrolled
    torch._dynamo.reset()
    with pytest.raises(Exception, match="input mutation"):  # which the closure hides; not a wrong result
        run(lambda h, x: opkit.scan(lambda h, x: cell(h, x), h, x), "aot_eager")(h, x)


def zeros(*sizes):
    return torch.zeros(sizes)


ERRORS = {
    "shape": ((lambda c, x: ({"h": [zeros(2, 4)]}, None), {"h": [zeros(2, 3)]}, zeros(2)), OutputError,
              r"carry\['h'\]\[0\] was float32\[2, 3\], became float32\[2, 4\].*convert init, or what fn returns"),
    "dtype": ((lambda c, x: ((c[0], c[1].double()), None), (zeros(2), zeros(2)), zeros(2)), OutputError,
              r"carry\[1\] was float32\[2\], became float64\[2\]"),
    "device": ((lambda c, x: (c.to("meta"), None), zeros(2), zeros(2)), OutputError, r"became float32\[2\] on meta"),
    "structure": ((lambda c, x: ({"a": 1.0}, None), {"b": zeros()}, zeros(2)), OutputError, "changed the structure of carry"),
    "leaf": ((lambda c, x: ((c, c), None), zeros(2), zeros(2)), OutputError, r"carry was float32\[2\], became a tuple"),
    "pair": ((lambda c, x: c, zeros(2), zeros(2)), OutputError, r"fn must return a pair .* got float32\[2\]"),
    "rows": ((lambda c, x: (c, x), zeros(2), {"a": zeros(3), "b": [zeros(4, 2)]}), ShapeError,
             r"xs\['b'\]\[0\] is float32\[4, 2\], with 4 rows, but xs\['a'\] has 3"),
    "no rows": ((lambda c, x: (c, x), zeros(2), (zeros(3), zeros())), ShapeError, r"xs\[1\] has no dimension"),
    "no length": ((lambda c, x: (c, x), zeros(2)), ArgumentError, "Pass length"),
    "length": ((lambda c, x: (c, x), zeros(2), zeros(3), 4), ArgumentError, "with 3 rows, but length is 4"),
    "negative": ((lambda c, x: (c, x), zeros(2), None, -1), ArgumentError, "length must be 0 or more, got -1"),
    "length's type": ((lambda c, x: (c, x), zeros(2), None, 2.5), ArgumentTypeError, "length must be an int, got float: 2.5"),
    "xs' type": ((lambda c, x: (c, x), zeros(2), [2.0]), ArgumentTypeError, r"xs\[0\] must be a tensor, got float"),
    "init's type": ((lambda c, x: (c, x), ["a"], zeros(2)), ArgumentTypeError, r"init\[0\] must be .* got str: 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    arguments, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        opkit.scan(*arguments)


def test_y_that_differs_between_calls():
    sizes = iter((2, 2, 3))
    with pytest.raises(OutputError, match=r"y\[0\] was float32\[2\], became float32\[3\].*can be stacked"):
        opkit.scan(lambda c, x: (c, [zeros(next(sizes))]), 0, length=3)


@pytest.mark.parametrize("name", ["shape", "pair", "rows"])
def test_errors_of_compiled_functions(name):
    """Of what is wrong before the loop the error itself arrives; within the loop torch reports it as the reason."""
    arguments, _, message = ERRORS[name]
    with pytest.raises(Exception, match=message):
        torch.compile(lambda: opkit.scan(*arguments), backend="eager")()
