"""Operators under torch.compile: fused, called as units, recompiled when they must be and not otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import warnings

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as aot_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code

import opkit


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """No compiled code, and no cached compilation, from an earlier test."""
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def name(request):
    """A name for an operator that this test alone defines."""
    words = "".join(c if c.isalnum() else "_" for c in request.node.name)
    yield f"tcompile::{words}"
    with contextlib.suppress(opkit.errors.UnknownOperatorError):
        opkit.remove(f"tcompile::{words}")


class Recorder:
    """A backend that keeps the graphs which AOTAutograd makes, and runs them as they are."""

    def __init__(self):
        self.graphs = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, module, _):
        self.graphs.append(module)
        return make_boxed_func(module.forward)

    def targets(self):
        return [str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]

    def calls(self, op):
        return sum(op.name.replace("::", ".") in target for target in self.targets())


@opkit.custom_op("tcompile::norm")
def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Root-mean-square normalisation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def spelled(op, spelling):
    """``op`` as it is called: the object, or what torch.ops has under its name at the time of the call."""
    if spelling == "object":
        return lambda *args: op(*args)
    namespace, opname = op.name.split("::")
    return lambda *args: getattr(getattr(torch.ops, namespace), opname)(*args)


def with_kernel(name, **options):
    """``norm`` again, with a CPU kernel that counts its calls."""
    op = opkit.custom_op(name, norm.reference, mutates_args=(), **options)
    calls = []

    @op.register_kernel("cpu")
    def counted(x, weight, eps=1e-6):
        calls.append(tuple(x.shape))
        scale = 1.0 / np.sqrt(np.square(x.numpy()).mean(-1, keepdims=True) + eps)
        return torch.from_numpy((x.numpy() * scale * weight.numpy()).astype(np.float32))

    return op, calls


SPELLINGS = pytest.mark.parametrize("spelling", ["object", "torch.ops"])


# ---- fusion ---------------------------------------------------------------------------------------------------------


def among_neighbours(function):
    return lambda x, weight: torch.relu(function(x + 1, weight)) * 2


def generated_kernels(function, x, weight, train=False):
    """How many kernels Inductor generates, and the code."""
    torch._dynamo.reset()
    metrics.reset()
    compiled = torch.compile(function, fullgraph=True)

    def run():
        output = compiled(x, weight)
        return torch.autograd.grad(output.sum(), (x, weight)) if train else output

    result, code = run_and_get_code(run)
    return result, metrics.generated_kernel_count, "\n".join(code)


CONTEXTS = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@SPELLINGS
@pytest.mark.parametrize("context", CONTEXTS)
def test_fuses_as_the_plain_reference_does(spelling, context):
    x, weight = torch.randn(4, 16), torch.randn(16)
    with CONTEXTS[context]():
        expected, plain, _ = generated_kernels(among_neighbours(norm.reference), x, weight)
        result, fused, code = generated_kernels(among_neighbours(spelled(norm, spelling)), x, weight)
    assert fused == plain > 0
    assert "tcompile" not in code
    torch.testing.assert_close(result, expected)


@SPELLINGS
def test_fuses_in_training(spelling):
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    expected, plain, _ = generated_kernels(among_neighbours(norm.reference), x, weight, train=True)
    result, fused, code = generated_kernels(among_neighbours(spelled(norm, spelling)), x, weight, train=True)
    assert fused == plain > 0
    assert "tcompile" not in code
    torch.testing.assert_close(result, expected)


def test_a_given_backward_fuses_too(name):
    op = opkit.custom_op(name, lambda x: x.sin(), schema="(Tensor x) -> Tensor")
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0] * 10,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    recorder = Recorder()
    x = torch.randn(5, requires_grad=True)
    torch.compile(lambda x: op(x + 1) * 2, backend=recorder.backend, fullgraph=True)(x).sum().backward()
    torch.testing.assert_close(x.grad, 20 * (x.detach() + 1))
    assert recorder.calls(op) == 0


# ---- as a unit ------------------------------------------------------------------------------------------------------


@SPELLINGS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_operator_with_a_kernel_is_called_as_a_unit(name, spelling, backend):
    op, calls = with_kernel(name)
    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled = torch.compile(among_neighbours(spelled(op, spelling)), backend=backend, fullgraph=True)
    expected = among_neighbours(norm.reference)(x, weight)
    torch.testing.assert_close(compiled(x, weight), expected)
    assert calls == [(4, 16)]
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, weight), expected)
    assert calls == [(4, 16)] * 2


@SPELLINGS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_kernel_computes_the_training_forward(name, spelling, backend):
    op, calls = with_kernel(name)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    compiled = torch.compile(among_neighbours(spelled(op, spelling)), backend=backend, fullgraph=True)
    output = compiled(x, weight)
    assert calls == [(4, 16)]
    found = torch.autograd.grad(output.square().sum(), (x, weight))
    assert calls == [(4, 16)]
    expected = torch.autograd.grad(among_neighbours(norm.reference)(x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(found, expected)


def test_a_given_backward_is_used_with_a_kernel(name):
    op, calls = with_kernel(name)
    op.register_autograd(lambda ctx, grad: (grad * 7, None, None))
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    torch.compile(lambda x: op(x, weight), backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert calls == [(4, 16)]
    torch.testing.assert_close(x.grad, torch.full_like(x, 7))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("inline", "kernel", "units"), [(True, True, 0), (False, False, 1), (None, True, 1), (None, False, 0)]
)
def test_inline_decides(name, inline, kernel, units, train):
    if kernel:
        op, _ = with_kernel(name, inline=inline)
    else:
        op = opkit.custom_op(name, norm.reference, inline=inline)
    recorder = Recorder()
    x, weight = torch.randn(4, 16, requires_grad=train), torch.randn(16)
    output = torch.compile(lambda x: op(x, weight).cos(), backend=recorder.backend, fullgraph=True)(x)
    assert recorder.calls(op) == units
    expected = norm.reference(x, weight).cos()
    torch.testing.assert_close(output, expected)
    if train:
        torch.testing.assert_close(torch.autograd.grad(output.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_a_kernel_for_another_device_does_not_stop_fusion(name):
    op = opkit.custom_op(name, norm.reference)
    op.register_kernel("cuda", lambda x, weight, eps=1e-6: 1 / 0)
    recorder = Recorder()
    torch.compile(lambda x, w: op(x, w), backend=recorder.backend, fullgraph=True)(torch.randn(2, 3), torch.randn(3))
    assert recorder.calls(op) == 0


def test_a_refused_kernel_leaves_the_reference_to_run(name):
    op = opkit.custom_op(name, norm.reference)
    op.register_kernel(
        "cpu", lambda x, weight, eps=1e-6: norm.reference(x, weight, eps) * 100, when=lambda x: x.shape[0] > 4
    )
    compiled = torch.compile(lambda x, w: op(x, w), backend="aot_eager", fullgraph=True)
    weight = torch.randn(3)
    for rows, factor in ((2, 1), (5, 100), (3, 1), (8, 100)):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * factor)


@pytest.mark.parametrize("train", [False, True])
def test_a_kernel_is_not_traced_after_a_graph_break(name, train):
    op = opkit.custom_op(name, norm.reference)
    traced = []

    @op.register_kernel("cpu")
    def watching(x, weight, eps=1e-6):
        traced.append(torch.compiler.is_dynamo_compiling())
        return norm.reference(x, weight, eps)

    def model(x, weight):
        torch._dynamo.graph_break()
        return op(x, weight)

    x, weight = torch.randn(4, 16, requires_grad=train), torch.randn(16)
    output = torch.compile(model, backend="aot_eager")(x, weight)
    torch.testing.assert_close(output, norm.reference(x, weight))
    assert traced == [False]


def test_a_backward_within_a_compiled_step(name):
    op, calls = with_kernel(name)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)

    def step():
        op(x, weight).sum().backward()

    torch.compile(step, backend="aot_eager")()
    assert calls == [(4, 16)]
    torch.testing.assert_close(x.grad, torch.autograd.grad(norm.reference(x, weight).sum(), x)[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", [False, True])
def test_a_reference_that_captures_a_tensor(name, kernel, backend):
    table = torch.tensor([1.0, 2.0, 3.0])
    op = opkit.custom_op(name, lambda x: (x * table).sin(), schema="(Tensor x) -> Tensor")
    if kernel:
        op.register_kernel("cpu", lambda x: (x * table).sin())
    x = torch.randn(2, 3, requires_grad=True)
    output = torch.compile(lambda x: op(x) + 1, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(output, (x * table).sin() + 1)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], (x * table).cos() * table)


# ---- dynamic shapes -------------------------------------------------------------------------------------------------

# batch 1, equal sizes, and two sizes that vary on their own
SHAPES = [
    (4, 8),
    (5, 8),
    (5, 7),
    (8, 8),
    (1, 8),
    (7, 7),
    (1, 7),
    (2, 9),
    (9, 2),
    (3, 3),
    (1, 3),
    (16, 5),
    (5, 16),
    (6, 6),
]
SHAPES += [(11, 4), (4, 11), (1, 12), (13, 2), (2, 13), (20, 20)]


@SPELLINGS
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_twenty_shapes_recompile_at_most_three_times(name, kernel, train, dynamic, spelling):
    op = with_kernel(name)[0] if kernel else norm
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(among_neighbours(spelled(op, spelling)), backend=counter, fullgraph=True, dynamic=dynamic)
    assert len(set(SHAPES)) == 20
    for shape in SHAPES:
        x, weight = torch.randn(shape, requires_grad=train), torch.randn(shape[-1], requires_grad=train)
        output, expected = compiled(x, weight), among_neighbours(norm.reference)(x, weight)
        torch.testing.assert_close(output, expected)
        if train:
            found = torch.autograd.grad(output.square().sum(), (x, weight))
            torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (x, weight)))
    assert counter.frame_count <= 4


def test_shapes_of_unrelated_arguments_stay_unrelated(name):
    op = opkit.custom_op(name, lambda x, y: x[:, None] * y[None], schema="(Tensor x, Tensor y) -> Tensor")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, y: op(x, y) + 1, backend=counter, fullgraph=True)
    for n, m in SHAPES:
        x, y = torch.randn(n), torch.randn(m)
        torch.testing.assert_close(compiled(x, y), x[:, None] * y[None] + 1)
    assert counter.frame_count <= 4


def test_a_size_dependent_scalar_argument(name):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float, count: int) -> Tensor:
        return x * scale + count

    op.register_kernel("cpu", lambda x, scale, count: x * scale + count)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: op(x, x.shape[0] * 0.5, x.shape[0]), backend=counter, fullgraph=True)
    for n in (4, 5, 9, 17):
        torch.testing.assert_close(compiled(torch.ones(n)), torch.ones(n) * (n * 0.5) + n)
    assert counter.frame_count <= 4


# ---- registrations after a compile ----------------------------------------------------------------------------------


@SPELLINGS
@pytest.mark.parametrize("train", [False, True])
def test_a_kernel_registered_later_takes_effect(name, spelling, train):
    op = opkit.custom_op(name, norm.reference)
    compiled = torch.compile(spelled(op, spelling), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16, requires_grad=train), torch.randn(16)
    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight))
    calls = []

    @op.register_kernel("cpu")
    def counted(x, weight, eps=1e-6):
        calls.append(1)
        return norm.reference(x, weight, eps) * 100

    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * 100)
    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * 100)
    assert len(calls) == 2
    op.register_kernel("cpu", lambda x, weight, eps=1e-6: norm.reference(x, weight, eps) * 1000)
    torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight) * 1000)


@SPELLINGS
@pytest.mark.parametrize("kernel", [False, True])
def test_a_backward_registered_later_takes_effect(name, spelling, kernel):
    op = with_kernel(name)[0] if kernel else opkit.custom_op(name, norm.reference)
    compiled = torch.compile(spelled(op, spelling), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    compiled(x, weight).sum().backward()
    x.grad = None
    op.register_autograd(lambda ctx, grad: (grad * 5, None, None))
    compiled(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 5))


@SPELLINGS
def test_a_fake_registered_later_takes_effect(name, spelling):
    op = opkit.custom_op(name, lambda x: x.clone(), schema="(Tensor x) -> Tensor", opaque=True)
    op.register_fake(torch.empty_like)
    shapes = []
    call = spelled(op, spelling)

    def model(x):
        output = call(x)
        return output.reshape(-1), output.shape[0]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2, 3))[1] == 2
    op.register_kernel("cpu", lambda x: x.repeat(2, 1))
    op.register_fake(lambda x: shapes.append(x.shape) or x.new_empty(x.shape[0] * 2, x.shape[1]))
    result, rows = compiled(torch.ones(2, 3))
    assert shapes
    assert (result.shape, rows) == ((12,), 4)


@SPELLINGS
@pytest.mark.parametrize("kernel", [False, True])
def test_a_redefinition_takes_effect(name, spelling, kernel):
    def define(factor):
        op = opkit.custom_op(name, lambda x: x * factor, schema="(Tensor x) -> Tensor")
        if kernel:
            op.register_kernel("cpu", lambda x: x * factor)
        return op

    cell = [define(2)]
    namespace, opname = name.split("::")
    if spelling == "object":
        compiled = torch.compile(lambda x: cell[0](x), backend="aot_eager", fullgraph=True)
    else:
        compiled = torch.compile(
            lambda x: getattr(getattr(torch.ops, namespace), opname)(x), backend="aot_eager", fullgraph=True
        )
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x), x * 2)
    with pytest.warns(opkit.errors.RedefinitionWarning):
        cell[0] = define(3)
    torch.testing.assert_close(compiled(x), x * 3)


@SPELLINGS
def test_a_kernel_disabled_for_a_while(name, spelling):
    op, calls = with_kernel(name)
    compiled = torch.compile(spelled(op, spelling), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled(x, weight)
    with op.set_kernel_enabled("cpu", False):
        compiled(x, weight)
    assert len(calls) == 1
    compiled(x, weight)
    assert len(calls) == 2


def test_a_forced_kernel_reaches_compiled_calls(name):
    op, calls = with_kernel(name)
    compiled = torch.compile(lambda x, w: op(x, w), backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(4, 16), torch.randn(16)
    compiled(x, weight)
    with opkit.use_kernel(op, "reference"):
        torch.testing.assert_close(compiled(x, weight), norm.reference(x, weight))
    assert len(calls) == 1


# ---- data-dependent outputs -----------------------------------------------------------------------------------------


@SPELLINGS
@pytest.mark.parametrize("kernel", [False, True])
def test_data_dependent_sizes(name, spelling, kernel):
    op = opkit.custom_op(name, lambda x: x.nonzero().squeeze(1), schema="(Tensor x) -> Tensor")
    if kernel:
        op.register_kernel("cpu", lambda x: torch.from_numpy(np.nonzero(x.numpy())[0]))
    call = spelled(op, spelling)
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: call(x) * 2, backend=counter, fullgraph=True)
        for values in ([0.0, 1, 2, 0], [0.0, 0, 0, 0], [1.0, 1, 1, 1]):
            x = torch.tensor(values)
            torch.testing.assert_close(compiled(x), x.nonzero().squeeze(1) * 2)
    assert counter.frame_count == 1


def test_an_opaque_data_dependent_size(name):
    op = opkit.custom_op(
        name, lambda x: torch.from_numpy(np.unique(x.numpy())), schema="(Tensor x) -> Tensor", opaque=True
    )
    op.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
        x = torch.tensor([3, 1, 3, 2])
        torch.testing.assert_close(compiled(x), torch.tensor([2, 3, 4]))


# ---- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [False, True])
def test_the_global_generator(name, kernel):
    @opkit.custom_op(name)
    def op(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + torch.rand_like(x)

    assert torch.Tag.nondeterministic_seeded in op._opoverload.tags
    if kernel:
        op.register_kernel("cpu", lambda x: x + torch.rand_like(x))
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    x = torch.zeros(8)
    results = []
    for function in (lambda x: op(x) * 2, compiled, compiled):
        torch.manual_seed(3)
        results.append(function(x))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[1], results[2])
    assert not torch.equal(compiled(x), compiled(x))


@pytest.mark.parametrize("kernel", [False, True])
def test_two_random_calls_are_not_made_one(name, kernel):
    op = opkit.custom_op(
        name, lambda x: torch.rand_like(x), schema="(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded
    )
    if kernel:
        op.register_kernel("cpu", lambda x: torch.rand_like(x))
    compiled = torch.compile(lambda x: (op(x), op(x)), fullgraph=True)
    first, second = compiled(torch.zeros(8))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_generator_argument(name, kernel):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)

    assert torch.Tag.nondeterministic_seeded in op._opoverload.tags
    if kernel:
        op.register_kernel("cpu", lambda x, generator=None: x + torch.rand(x.shape, generator=generator, dtype=x.dtype))
    x = torch.zeros(6)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(op(x, torch.Generator().manual_seed(5)), expected)
    generator = torch.Generator().manual_seed(5)
    compiled = torch.compile(lambda x: op(x, generator) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected * 2)
    generator.manual_seed(5)
    torch.testing.assert_close(compiled(x), expected * 2)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_seed_argument(name, kernel):
    def draw(x: Tensor, seed: int) -> Tensor:
        index = torch.arange(x.numel(), device=x.device).reshape(x.shape) + seed
        return x + torch.frac(torch.sin(index.to(torch.float64) * 12.9898) * 43758.5453).to(x.dtype)

    op = opkit.custom_op(name, draw)
    if kernel:
        op.register_kernel("cpu", draw)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, seed: op(x, seed), backend=counter, fullgraph=True)
    x = torch.zeros(6)
    for seed in (3, 4, 5, 6):
        torch.testing.assert_close(compiled(x, seed), draw(x, seed))
    assert counter.frame_count <= 3


# ---- autocast -------------------------------------------------------------------------------------------------------

LOW = torch.bfloat16
POLICIES = {
    None: {(torch.float32, torch.float32): torch.float32, (LOW, torch.float32): LOW, (LOW, LOW): LOW},
    "low": {(torch.float32, torch.float32): LOW, (LOW, torch.float32): LOW, (LOW, LOW): LOW},
    "full": {
        (torch.float32, torch.float32): torch.float32,
        (LOW, torch.float32): torch.float32,
        (LOW, LOW): torch.float32,
    },
    "promote": {(torch.float32, torch.float32): torch.float32, (LOW, torch.float32): torch.float32, (LOW, LOW): LOW},
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_autocast_gives_the_same_dtypes_everywhere(name, policy, kernel, train):
    op = opkit.custom_op(
        name, lambda x, y: (x @ y.T.to(x.dtype)) * y.sum(), schema="(Tensor x, Tensor y) -> Tensor", autocast=policy
    )
    seen = []
    if kernel:
        op.register_kernel("cpu", lambda x, y: seen.append((x.dtype, y.dtype)) or op.reference(x, y))
    compiled = torch.compile(lambda x, y: op(x, y), backend="aot_eager", fullgraph=True)
    for dtypes, expected in POLICIES[policy].items():
        x, y = (torch.randn(3, 3, dtype=dtype, requires_grad=train) for dtype in dtypes)
        with torch.autocast("cpu", LOW):
            results = [op(x, y), spelled(op, "torch.ops")(x, y), compiled(x, y)]
        assert [r.dtype for r in results] == [expected] * 3
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)
        if train:
            grads = [torch.autograd.grad(r.sum(), (x, y)) for r in results]
            for grad in grads:
                assert [g.dtype for g in grad] == list(dtypes)
                torch.testing.assert_close(grad, grads[0], rtol=3e-2, atol=3e-2)


def test_float64_is_left_alone(name):
    op = opkit.custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor", autocast="low")
    compiled = torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", LOW):
        assert (
            op(torch.ones(2, dtype=torch.float64)).dtype
            is compiled(torch.ones(2, dtype=torch.float64)).dtype
            is torch.float64
        )


# ---- mutation -------------------------------------------------------------------------------------------------------


@SPELLINGS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernel", [False, True])
def test_in_place_operators(name, spelling, backend, kernel):
    @opkit.custom_op(name, mutates_args=("x",))
    def op(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    if kernel:

        @op.register_kernel("cpu")
        def _(x, y):
            np.add(x.numpy(), y.numpy(), out=x.numpy())

    call = spelled(op, spelling)

    def model(x, y):
        z = x * 2
        call(z, y)
        call(z[0], y[0])
        call(x, y)
        return z + x

    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    y = torch.arange(6.0).reshape(2, 3)
    result = torch.compile(model, backend=backend, fullgraph=True)(ours, y)
    z = theirs * 2 + y
    z[0] += y[0]
    theirs += y
    torch.testing.assert_close(result, z + theirs)
    torch.testing.assert_close(ours, theirs)


def test_in_place_inlined_code_has_no_call(name):
    @opkit.custom_op(name)
    def op(x: Float[Tensor, "n"]) -> None:
        x.mul_(2)

    recorder = Recorder()

    def model(x):
        y = x + 1
        op(y)
        return y

    torch.testing.assert_close(
        torch.compile(model, backend=recorder.backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 4.0)
    )
    assert recorder.calls(op) == 0


def test_in_place_and_returning(name):
    @opkit.custom_op(name, mutates_args=("state",))
    def op(state: Tensor, x: Tensor) -> Tensor:
        state.add_(x)
        return x * state

    compiled = torch.compile(lambda s, x: op(s, x) + 1, backend="inductor", fullgraph=True)
    state, x = torch.ones(3), torch.full((3,), 2.0)
    torch.testing.assert_close(compiled(state, x), torch.full((3,), 7.0))
    torch.testing.assert_close(state, torch.full((3,), 3.0))


@pytest.mark.parametrize("kernel", [False, True])
def test_in_place_in_training(name, kernel):
    @opkit.custom_op(name, mutates_args=("x",))
    def op(x: Tensor, y: Tensor) -> None:
        x.mul_(y)

    if kernel:
        op.register_kernel("cpu", lambda x, y: x.mul_(y) is None or None)

    def model(x, y):
        z = x.sin()
        op(z, y)
        return z

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    found = torch.autograd.grad(torch.compile(model, backend="aot_eager", fullgraph=True)(x, y).sum(), (x, y))
    torch.testing.assert_close(found, (x.cos() * y, x.sin()))


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="torch.Tag.out came with torch 2.13")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_variants(name, backend):
    @opkit.custom_op(name, mutates_args=("out",), tags=torch.Tag.out)
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        out.copy_(x * 2)
        return out

    def model(x):
        out = torch.empty_like(x)
        op(x + 1, out=out)
        return out + 1

    def into(x, out):
        op(x, out=out)
        return out.sum()

    torch.testing.assert_close(
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 5.0)
    )
    out = torch.zeros(3)
    torch.testing.assert_close(
        torch.compile(into, backend=backend, fullgraph=True)(torch.ones(3), out), torch.tensor(6.0)
    )
    torch.testing.assert_close(out, torch.full((3,), 2.0))


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="torch.Tag.inplace came with torch 2.13")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tagged_in_place(name, backend):
    @opkit.custom_op(name, mutates_args=("x",), tags=torch.Tag.inplace)
    def op(x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y)

    compiled = torch.compile(lambda x, y: op(x, y) * 2, backend=backend, fullgraph=True)
    x = torch.ones(3)
    torch.testing.assert_close(compiled(x, torch.ones(3)), torch.full((3,), 4.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_out_argument_declared_in_the_schema(name, backend):
    op = opkit.custom_op(
        name, lambda x, out: out.copy_(x * 3) is None or None, schema="(Tensor x, Tensor(a!) out) -> ()"
    )

    def model(x):
        out = torch.empty_like(x)
        op(x, out)
        return out + 1

    torch.testing.assert_close(
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 4.0)
    )


@pytest.mark.parametrize("kernel", [False, True])
def test_functionalize(name, kernel):
    op = with_kernel(name)[0] if kernel else norm
    x, weight = torch.randn(2, 4), torch.randn(4)

    def model(x):
        y = x.clone()
        y.add_(1)
        return op(y, weight)

    torch.testing.assert_close(torch.func.functionalize(model)(x), norm.reference(x + 1, weight))


# ---- effects, factories, opaque bodies ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_side_effects_are_kept_in_order(name, backend):
    log = []

    @opkit.custom_op(name, mutates_args=(), opaque=True)
    def record(x: Tensor, label: str) -> None:
        log.append((label, float(x.sum())))

    record.register_fake(lambda x, label: None)

    def model(x):
        y = x + 1
        record(y, "first")
        record(x, "second")
        z = y * 2
        record(z, "third")
        return z

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        compiled(torch.zeros(2))
    assert log == [("first", 2.0), ("second", 0.0), ("third", 4.0)] * 2


def test_side_effects_whose_inputs_lead_nowhere(name):
    log = []

    @opkit.custom_op(name, mutates_args=(), opaque=True)
    def record(x: Tensor) -> None:
        log.append(float(x.sum()))

    record.register_fake(lambda x: None)

    def model(x):
        record(x * 3)
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch.compile(model, fullgraph=True)(x).sum().backward()
    assert log == [6.0]
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("kernel", [False, True])
def test_factories(name, kernel):
    @opkit.custom_op(name, mutates_args=())
    def ramp(n: int, device: torch.device) -> Tensor:
        return torch.arange(n, device=device, dtype=torch.float32) * 2

    if kernel:
        ramp.register_kernel("cpu", lambda n, device: torch.from_numpy(np.arange(n, dtype=np.float32) * 2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x + ramp(x.shape[0], x.device), backend=counter, fullgraph=True)
    for n in (3, 5, 7, 9):
        torch.testing.assert_close(compiled(torch.ones(n)), torch.arange(n) * 2.0 + 1)
    assert counter.frame_count <= 3
    torch.testing.assert_close(
        torch.compile(lambda: ramp(3, torch.device("cpu")), fullgraph=True)(), torch.arange(3) * 2.0
    )


def test_a_factory_without_any_argument(name):
    @opkit.custom_op(name, mutates_args=())
    def identity() -> Tensor:
        return torch.eye(2)

    torch.testing.assert_close(
        torch.compile(lambda x: x @ identity(), backend="aot_eager", fullgraph=True)(torch.ones(2, 2)), torch.ones(2, 2)
    )


@SPELLINGS
def test_opaque_operators_are_units(name, spelling):
    calls = []

    @opkit.custom_op(name, mutates_args=())
    def numpy_sin(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return torch.from_numpy(np.sin(x.detach().numpy()))

    numpy_sin.register_fake(torch.empty_like)
    numpy_sin.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    call = spelled(numpy_sin, spelling)
    compiled = torch.compile(lambda x: call(x + 1) * 2, fullgraph=True)
    x = torch.randn(4, requires_grad=True)
    output = compiled(x)
    assert calls.count((4,)) >= 1
    before = len(calls)
    compiled(x)
    assert len(calls) == before + 1
    torch.testing.assert_close(output, torch.sin(x + 1) * 2)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], torch.cos(x + 1) * 2)


def test_an_opaque_operator_without_a_fake_names_the_line(name):
    op = opkit.custom_op(name, lambda x: torch.from_numpy(np.sin(x.numpy())), schema="(Tensor x) -> Tensor")
    with pytest.raises(Exception, match="register_fake") as caught:
        torch.compile(lambda x: op(x), backend="aot_eager", fullgraph=True)(torch.ones(2))
    assert "no fake impl" in str(caught.value)


def test_an_opaque_operator_with_a_reference(name):
    op = opkit.custom_op(
        name, lambda x: torch.from_numpy(np.sin(x.numpy())), schema="(Tensor x) -> Tensor", reference=torch_sin
    )
    recorder = Recorder()
    x = torch.randn(3, requires_grad=True)
    output = torch.compile(lambda x: op(x), backend=recorder.backend, fullgraph=True)(x)
    output.sum().backward()
    torch.testing.assert_close(output, x.sin())
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert recorder.calls(op) == 1


def torch_sin(x):
    return torch.sin(x)


# ---- transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [False, True])
def test_torch_func_inside_compile(name, kernel):
    op = with_kernel(name)[0] if kernel else norm
    x, weight = torch.randn(3, 4), torch.randn(4)
    transforms = {
        "grad": lambda f: torch.func.grad(lambda x: f(x, weight).square().sum())(x),
        "vmap": lambda f: torch.func.vmap(f, in_dims=(0, None))(x, weight),
        "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda row: f(row, weight).sum()))(x),
    }
    if not kernel:  # a kernel leaves torch, and jvp of a jvp-less call is the reference's
        transforms["jvp"] = lambda f: torch.func.jvp(lambda x: f(x, weight), (x,), (x,))
    for transform in transforms.values():
        compiled = torch.compile(lambda t=transform: t(lambda *args: op(*args)), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(), transform(norm.reference))


# ---- structured arguments -------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    DOUBLE = "double"
    NEGATE = "negate"


@dataclasses.dataclass
class Options:
    scale: float
    shift: int = 0


@pytest.mark.parametrize("kernel", [False, True])
def test_structured_arguments_and_results(name, kernel):
    @opkit.custom_op(name, mutates_args=())
    def op(
        pair: tuple[Tensor, Tensor], named: dict[str, Tensor], mode: Mode, options: Options, extra: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        total = pair[0] * named["a"] + pair[1] * named["b"] * options.scale + options.shift
        total = total * 2 if mode is Mode.DOUBLE else -total
        return total, None if extra is None else total * extra

    if kernel:
        op.register_kernel("cpu", op.reference)

    def model(a, b, extra):
        first, nothing = op((a, b), {"a": a, "b": b}, Mode.DOUBLE, Options(2.0, shift=1))
        second, something = op((b, a), {"b": a, "a": b}, Mode.NEGATE, Options(0.5), extra)
        assert nothing is None
        return first + second + something

    def expected(a, b, extra):
        first = (a * a + b * b * 2 + 1) * 2
        second = -(b * b + a * a * 0.5)
        return first + second + second * extra

    values = [torch.randn(3, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for function in (model, compiled):
        output = function(*values)
        torch.testing.assert_close(output, expected(*values))
        torch.testing.assert_close(
            torch.autograd.grad(output.sum(), values), torch.autograd.grad(expected(*values).sum(), values)
        )


def test_returned_dictionaries_and_dataclasses(name):
    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor) -> dict[str, Tensor]:
        return {"sin": x.sin(), "cos": x.cos()}

    def model(x):
        found = op(x)
        return found["sin"] + found["cos"]

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), x.sin() + x.cos())


def test_compiling_warns_of_nothing(name):
    op, _ = with_kernel(name)
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(lambda x: op(x, weight), backend="aot_eager", fullgraph=True)(x).sum().backward()
