"""Graphs of AOTAutograd that need care: recomputed random numbers, ordered effects, tensor subclasses, strides of results."""

import functools

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from opkit.bench.compilation import Fallbacks
from opkit.compiler.backend import opkit_backend
from opkit.compiler.capture import decompositions

pytestmark = pytest.mark.usefixtures("fresh")
ROWS = 16


def noise(x):
    """Operators whose numbers are those of eager mode, some of them written into memory."""
    like = torch.rand_like(x) + torch.randn(ROWS) + torch.bernoulli(torch.full((ROWS,), 0.5)) + torch.randperm(ROWS)
    like = (
        like
        + torch.randint(0, 9, (ROWS,))
        + torch.multinomial(torch.ones(ROWS), ROWS)
        + torch.poisson(torch.ones(ROWS))
    )
    like = (
        like
        + torch.normal(torch.zeros(ROWS), 1.0)
        + torch.empty(ROWS).exponential_()
        + torch._sample_dirichlet(like.detach().abs())
    )
    return (x * x).sin() * like * torch.empty(ROWS).geometric_(0.5)


def step(function):
    """The results, and the gradients of each of them; the backward leaves torch's generator as it was."""
    x = torch.linspace(1, 2, ROWS, requires_grad=True)
    torch.manual_seed(5)
    y, dropped = function(x)
    state = torch.get_rng_state()
    gradients = [torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in (y, dropped)]
    assert torch.equal(torch.get_rng_state(), state)
    return y.detach(), gradients[0], dropped.detach(), gradients[1]


def function(x):
    return noise(x), torch.nn.functional.dropout(x.sin(), 0.5) * 2


def selective(ctx, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.sin.default else CheckpointPolicy.MUST_RECOMPUTE


contexts = functools.partial(create_selective_checkpoint_contexts, selective)
WAYS = {
    "checkpoint": (lambda x: checkpoint(function, x, use_reentrant=False), 1.0),
    "selective": (lambda x: checkpoint(function, x, use_reentrant=False, context_fn=contexts), 1.0),
    "budget": (function, 0.0),
}


@pytest.mark.parametrize("way", ["checkpoint", pytest.param("selective", marks=pytest.mark.exhaustive), "budget"])
def test_one_draw_for_forward_and_backward(way):
    called, budget = WAYS[way]
    compiled = torch.compile(called, backend="opkit", fullgraph=True, options={"strict": True})
    with torch._functorch.config.patch(activation_memory_budget=budget):
        y, gradient, dropped, mask = step(compiled)
    torch.testing.assert_close((y, gradient), step(function)[:2])
    assert 0 < (dropped != 0).sum() < ROWS
    assert torch.equal(dropped != 0, mask != 0)


@torch._inductor.config.patch(fallback_random=True)  # else torch removes them before any backend sees them
def test_draws_that_nobody_uses_are_made():
    def with_unused(x):
        torch.rrelu(x, training=True), torch.binomial(torch.full_like(x, 9.0), x), torch.empty_like(x).cauchy_()
        return torch.empty_like(x).log_normal_()

    x = torch.rand(ROWS)
    torch.manual_seed(5)
    expected = with_unused(x)
    torch.manual_seed(5)
    assert torch.equal(torch.compile(with_unused, backend="opkit", options={"strict": True})(x), expected)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, backend=opkit_backend, options={"strict": True})


def positive(n):
    x = torch.randn(n, n, dtype=torch.float64)
    return x @ x.mT + n * torch.eye(n, dtype=torch.float64)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.cholesky,
        lambda a: torch.linalg.inv(a).sin() + a,
        lambda a: torch.linalg.lu_factor(a)[0],
        lambda a: torch.linalg.solve(a, a + 1),
    ],
    ids=["cholesky", "inv", "lu_factor", "solve"],
)
def test_gradients(function):
    a = positive(5).requires_grad_()
    found, expected = compiled(function)(a), function(a)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (mine,), (theirs,) = (torch.autograd.grad((y * weight).sum(), a) for y in (found, expected))
    torch.testing.assert_close(mine, theirs)


def raises(function):
    """Whether a function that AOTAutograd traces still checks a matrix: torch 2.11 takes the check for dead code."""
    try:
        torch.compile(function, backend="aot_eager")(torch.zeros(3, 3))
    except torch.linalg.LinAlgError:
        return True
    finally:
        torch._dynamo.reset()
    return False


def test_a_singular_matrix_is_refused():
    if not raises(lambda a: torch.linalg.inv(a) + 1):
        pytest.skip("torch drops the check before any backend sees the graph")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(lambda a: torch.linalg.inv(a) + 1)(torch.zeros(3, 3))


STRICT = {"strict": True}


def test_nested_tensors(seen):
    """The size of their rows is no number, and is handed on; the backward may run twice."""
    rows = [torch.rand(3, 4), torch.rand(5, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    weight = torch.rand(4, 4, requires_grad=True)

    def function(x, w):
        return torch.nn.functional.linear(x, w).sin() * 2

    found = []
    for each in (torch.compile(function, backend="opkit", fullgraph=True, options=STRICT), function):
        y = each(nested, weight)
        gradients = [torch.autograd.grad(y.values().sum(), (nested, weight), retain_graph=True) for _ in range(2)]
        found.append((y.values(), [(of.values(), w) for of, w in gradients]))
    torch.testing.assert_close(*found)
    assert [graph.reason for graph in seen] == ["", ""]


def test_device_meshes_and_collectives():
    """A tensor-parallel model's graphs are given device meshes, and hand them on."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.rand(2, 4, requires_grad=True)
        found = [trained(each, model, x) for each in (model, torch.compile(model, backend="opkit", options=STRICT))]
        torch.testing.assert_close(found[1], found[0])
    finally:
        dist.destroy_process_group()


def trained(function, model, x):
    gradients = torch.autograd.grad(function(x).square().sum(), [x, *model.parameters()])
    return [each.to_local() if hasattr(each, "to_local") else each for each in gradients]


def elements_of_memory(x, m):
    """What lies so many places apart in the memory of results: channels last, transposed, sliced, and of copies."""
    rolled, doubled = torch.roll(x, -1, 0), x * 2
    found = [
        torch.as_strided(y, (5, 10), (4, 1)) for y in (rolled, torch.roll(x, (1, 2), (0, 1)), doubled, x.softmax(1))
    ]
    found += [
        torch.as_strided(doubled.permute(0, 2, 3, 1), (10,), (3,), 1),
        torch.as_strided_scatter(doubled, m, (4, 6), (6, 1), 2),
    ]
    found.append(torch.as_strided((m * 2).split(2)[1], (2, 6), (6, 1), 3))
    return *found, torch.as_strided((m * 2).t(), (3, 4), (2, 3), 1), torch.as_strided((m * 2)[1:, ::2], (3, 2), (2, 3))


def parts_and_repeats(z, m):
    """Results that are parts of complex numbers, every other element, or one element many times."""
    repeated = torch.zeros(1).expand(5), torch.arange(3)[:, None].expand(3, 4), (m * 2)[:, :1].expand(4, 6)
    return *repeated, (z * z.conj()).real, (z * 2).imag, torch.view_as_real((z * 2).t())[..., 1], (m * 3)[:, ::2]


def views_of_results(x):
    """Results that are parts of constants and of moved elements, and several that share memory."""
    flipped, zeros, rolled, ones = x.flip(0), torch.zeros(4, 6), x.roll(1, 0), (x * 2).fill_(1)
    parts = flipped[:, 1:3], zeros[:, ::2], torch.eye(4)[:, 1], torch.zeros(3, dtype=torch.complex64).imag
    return *parts, (x.t() * 2).zero_(), rolled.t(), rolled, ones, ones.split(2, 1)[1], ones.view(-1)


def binaries_of_different_layouts(x, y):
    """Results of operators whose fakes lay them out otherwise than kernels do."""
    two = torch.logaddexp, torch.copysign, torch.xlogy, torch.logical_or, torch.floor_divide
    found = [each(*of) for each in two for of in ((x, y), (y, x), (x, x[0]), (x.double().sum(), x), (x[:, :1], x))]
    return *found, torch.complex(x[0].expand(2, 3), x), torch.polar(x[0].expand(2, 3), x)


X = torch.arange(100.0).reshape(2, 5, 2, 5).to(memory_format=torch.channels_last)
M, Z = torch.randn(4, 6), torch.randn(6, 5, dtype=torch.complex64)
LAYOUTS = {
    elements_of_memory: (X, M),
    parts_and_repeats: (Z, M),
    views_of_results: (M,),
    binaries_of_different_layouts: (torch.rand(3, 2).t() + 0.1, torch.rand(2, 3) + 0.1),
}


@pytest.mark.parametrize(("function", "inputs"), LAYOUTS.items())
def test_strides_and_elements_are_those_of_eager(function, inputs):
    compiled = torch.compile(function, backend="opkit", options={"strict": True})
    results = compiled(*inputs), function(*inputs)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, check_stride=True)
        assert found.storage_offset() == expected.storage_offset()
    memory = [[y.untyped_storage().data_ptr() for y in each] for each in results]
    first, second = ([addresses.index(each) for each in addresses] for addresses in memory)
    assert first == second, "results share memory otherwise"


def test_a_view_of_an_input_that_was_written_to_with_symbolic_sizes():
    """torch makes the result of the input, by the strides of what the graph returns."""

    def written(x):
        x.add_(1)
        return x.as_strided((x.numel(),), (1,))[1::2]

    x, y = (torch.arange(25.0).reshape(5, 5).t().clone() for _ in range(2))
    found, expected = torch.compile(written, backend="opkit", options=STRICT, dynamic=True)(x), written(y)
    torch.testing.assert_close(found, expected, check_stride=True)
    assert found.storage_offset() == 1
    assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_layouts_of_symbolic_sizes_that_a_fake_has_wrong():
    x = torch.randn(1, 5, 5).expand(8, 5, 5).requires_grad_()
    call = torch.compile(torch.logaddexp, backend="opkit", options=STRICT, dynamic=True)
    found, expected = call(x, x), torch.logaddexp(x, x)
    torch.testing.assert_close(found, expected, check_stride=True)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.t().copy_(x.t()),
        lambda x: x[1:].mul_(2),
        lambda x: x.select(1, 3).mul_(2),
        lambda x: x.diagonal().mul_(2),
    ],
)
def test_as_strided_reads_what_lies_between_the_elements_of_a_copy(write):
    def function(x):
        write(x)
        return x.as_strided((x.numel(),), (1,)) * 2

    x, y = (torch.arange(88.0).view(11, 8)[1::2] for _ in range(2))
    assert torch.equal(torch.compile(function, backend=opkit_backend)(x), function(y))


def test_as_strided_reads_the_gaps_of_a_copy_of_a_copy():
    def function(x):
        x[1:].mul_(2)
        x.select(1, 3).add_(1)
        return x.t().as_strided((x.numel(),), (1,)) * 2

    x, y = (torch.arange(88.0).view(11, 8)[1::2] for _ in range(2))
    assert torch.equal(torch.compile(function, backend=opkit_backend)(x), function(y))


def test_copies_with_gaps_are_compiled_where_as_strided_reads_other_memory():
    def function(x, y):
        x[1:].mul_(2)
        x.select(1, 3).add_(1)
        return x * 2, (y + 1).as_strided((3, 4), (2, 1))

    def inputs():
        return torch.arange(88.0).view(11, 8)[1::2], torch.arange(8.0)

    (x, y), fallbacks = inputs(), Fallbacks()
    with fallbacks.recorded():
        found = torch.compile(function, backend=opkit_backend)(x, y)
    assert not fallbacks
    other, y = inputs()
    torch.testing.assert_close((*found, x), (*function(other, y), other), rtol=0, atol=0)


@pytest.mark.parametrize(("reduction", "weighted"), [("none", True), ("mean", True), ("sum", False)])
def test_cross_entropy_in_steps(monkeypatch, reduction, weighted):
    """The decompositions for GPUs, on the CPU."""
    monkeypatch.setattr(decompositions, "_is_on_gpu", lambda x: x.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    x = (5 * torch.randn(30, 7, generator=generator)).requires_grad_()
    target = torch.randint(0, 7, (30,), generator=generator).masked_fill_(torch.arange(30) % 5 == 0, 3)
    weight = torch.rand(7, generator=generator) if weighted else None

    def function(x):
        return F.cross_entropy(x, target, weight, ignore_index=3, reduction=reduction)

    found, expected = torch.compile(function, backend=opkit_backend)(x), function(x)
    torch.testing.assert_close(found, expected)
    (gradient,), (exact,) = (torch.autograd.grad(each.square().sum(), x) for each in (found, expected))
    torch.testing.assert_close(gradient, exact)


def test_log_softmax_in_steps_of_nothing_and_of_everything(monkeypatch):
    monkeypatch.setattr(decompositions, "_is_on_gpu", lambda x: x.is_floating_point())
    for shape, dim in (((3, 0), 1), ((0, 3), 1), ((), 0), ((4, 5), 0)):
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        found = torch.compile(torch.log_softmax, backend=opkit_backend)(x, dim)
        torch.testing.assert_close(found, torch.log_softmax(x, dim))
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, torch.log_softmax(x, dim))))


def test_log_softmax_in_steps_is_row_major(monkeypatch):
    monkeypatch.setattr(decompositions, "_is_on_gpu", lambda x: x.is_floating_point())
    x = torch.randn(4, 3, 2).permute(2, 1, 0)
    found, expected = torch.compile(torch.log_softmax, backend=opkit_backend)(x, -1), torch.log_softmax(x, -1)
    torch.testing.assert_close(found, expected, check_stride=True)


def test_a_backward_computes_with_what_inputs_were_before_the_forward_wrote_to_them():
    def function(x, count):
        found = x.sin() * (count.unsqueeze(0) + 1)
        count.add_(1)
        return found

    counts = [torch.ones(()), torch.ones(())]
    for _ in range(2):
        x = torch.randn(3, requires_grad=True)
        functions = function, torch.compile(function, backend="opkit", options={"strict": True})
        expected, found = (torch.autograd.grad(f(x, n).sum(), x)[0] for f, n in zip(functions, counts, strict=True))
        torch.testing.assert_close(found, expected)
