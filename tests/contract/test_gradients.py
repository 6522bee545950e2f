"""gradients: planted defects of first order that each property must catch, right operators that it must pass."""

import pytest
import torch
import torch.nn.functional as F

import opkit
from opkit.testing import tensor

WIDE = (torch.float64, torch.float32)


def autograd_op(forward, backward, save=None):
    """A plain callable around an ``autograd.Function``; ``save(ctx, *inputs, output)`` saves the inputs by default."""

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            save(ctx, inputs, output) if save else ctx.save_for_backward(*inputs)
            return output

    Op.backward = staticmethod(backward)
    return lambda *inputs: Op.apply(*inputs)


def mul_op(backward, save=None):
    return autograd_op(lambda x, y: x * y, backward, save)


TWO = (tensor("n", WIDE), tensor("n", WIDE))


def right_mul(ctx, g):
    x, y = ctx.saved_tensors
    return g * y, g * x


def swapped(ctx, g):
    x, y = ctx.saved_tensors
    return g * x, g * y


def negative(ctx, g):
    x, y = ctx.saved_tensors
    return g * y, -g * x


@pytest.mark.parametrize("backward", [swapped, negative])
def test_wrong_gradients_are_found_at_one_element(fails, backward):
    failure = fails("gradients.reference", mul_op(backward), args=TWO, reference=torch.mul)
    assert failure.args[0].shape == (1,)


def test_a_bias_gradient_that_is_right_for_one_row_only(fails):
    op = autograd_op(lambda x, b: x + b, lambda ctx, g: (g, g[0]))
    failure = fails("gradients.reference", op, args=(tensor("m n"), tensor("n")), reference=torch.add)
    assert failure.args[0].shape in {(2, 1), (0, 1)}


def test_a_wrong_gradient_in_float32_alone(fails):
    op = autograd_op(lambda x: x.sin(), lambda ctx, g: g * (ctx.saved_tensors[0].cos() + 1e-3))
    fails("gradients.reference", op, args=(tensor("n"),), reference=torch.sin)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "op",
    [
        lambda x, y: x.detach() * y,
        lambda x, y: torch.from_numpy(x.detach().numpy() * y.detach().numpy()),
        mul_op(lambda ctx, g: (g * ctx.saved_tensors[1], None)),
        mul_op(lambda ctx, g: (torch.zeros_like(g), g * ctx.saved_tensors[0])),
        lambda x, y: x * y.data,
    ],
)
def test_a_lost_gradient(fails, op):
    failure = fails("gradients.lost", op, args=TWO, reference=torch.mul)
    assert failure.args[0].shape == (1,)
    assert "lost" in failure.message


def only_needed(ctx, g):
    x, y = ctx.saved_tensors
    found = tuple(grad for grad, wanted in zip((g * y, g * x), ctx.needs_input_grad, strict=True) if wanted)
    return found if len(found) > 1 else (*found, None)  # in the first place, whosever it is


def assumes_both(ctx, g):
    x, y = ctx.saved_tensors
    return (g * y, g * x) if all(ctx.needs_input_grad) else (g * x, g * y)


@pytest.mark.parametrize("backward", [only_needed, assumes_both])
def test_gradients_that_depend_on_which_are_needed(fails, backward):
    failure = fails("gradients.subsets", mul_op(backward), args=TWO)
    assert failure.args[0].shape == (1,)


@pytest.mark.parametrize(
    "read",
    [
        lambda g: g.view(-1).view(g.shape),
        lambda g: torch.as_strided(g, g.shape, (g.shape[1], 1)) if g.stride() != (0, 0) else g,
        lambda g: g[:1].expand(g.shape) if 0 in g.stride() and g.numel() > 1 else g,
    ],
)
def test_incoming_gradients_taken_to_be_contiguous(fails, read):
    op = autograd_op(lambda x: x * 2, lambda ctx, g: read(g) * 2)
    failure = fails("gradients.incoming", op, args=(tensor("m n", WIDE),))
    assert max(failure.args[0].shape) <= 2


def test_a_saved_input_read_as_if_it_were_contiguous(fails):
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).cos()

    failure = fails("gradients.reference", autograd_op(torch.sin, backward), args=(tensor("m n"),), reference=torch.sin)
    assert failure.args[0].numel() <= 4
    assert not failure.args[0].is_contiguous()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("take", [torch.ones_like, torch.square, torch.sign])
def test_a_backward_that_is_not_linear(fails, take):
    op = autograd_op(lambda x: x.sin(), lambda ctx, g: take(g) * ctx.saved_tensors[0].cos())
    failure = fails("gradients.linear", op, args=(tensor("n"),))
    assert failure.args[0].numel() <= 2


def both(x):
    return x.sin(), x.cos()


def only_with_the_first(ctx, g, h):
    (x,) = ctx.saved_tensors
    return g * x.cos() - h * x.sin() * bool(g.any())


def test_a_result_whose_gradient_counts_only_with_another(fails):
    failure = fails("gradients.linear", autograd_op(both, only_with_the_first), args=(tensor("n"),))
    assert failure.args[0].shape == (1,)
    assert "each result contributes" in failure.message


def save_raw(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def none_forgotten(ctx, g, h):
    (x,) = ctx.saved_tensors
    return g * x.cos() - h * x.sin()


def none_ends_it(ctx, g, h):
    (x,) = ctx.saved_tensors
    return None if g is None or h is None else g * x.cos() - h * x.sin()


@pytest.mark.parametrize("backward", [none_forgotten, none_ends_it])
def test_an_undefined_gradient(fails, backward):
    failure = fails("gradients.undefined", autograd_op(both, backward, save_raw), args=(tensor("n"),))
    assert failure.args[0].shape == (1,)


BUFFER = torch.empty(4096, dtype=torch.float64)


def shared_buffer(ctx, g):
    out = BUFFER[: g.numel()].view(g.shape)
    return torch.mul(g, 2, out=out)


@pytest.mark.parametrize(
    "backward",
    [
        lambda ctx, g: g.mul_(2),
        lambda ctx, g: ctx.saved_tensors[0].detach().mul_(0).add_(2) * g,
        shared_buffer,
    ],
)
def test_a_backward_that_writes(fails, backward):
    op = autograd_op(lambda x: x * 2, backward)
    failure = fails("gradients.pure", op, args=(tensor("n", torch.float64),))
    assert failure.args[0].shape == (1,)


def attribute(ctx, inputs, output):
    ctx.saved = inputs


def numpy_memory(ctx, inputs, output):
    ctx.saved = [torch.from_numpy(t.detach().numpy()) for t in inputs]


def stale(ctx, g):
    x, y = ctx.saved
    return g * y, g * x


@pytest.mark.parametrize("save", [attribute, numpy_memory])
def test_a_tensor_that_is_not_saved_properly(fails, save):
    failure = fails("gradients.saved", mul_op(stale, save), args=TWO)
    assert failure.args[0].shape == (1,)
    assert "save_for_backward" in failure.message


def keep_sums(ctx, inputs, output):
    ctx.saved, ctx.sums = inputs, [float(t.detach().sum()) for t in inputs]


def surprised(ctx, g):
    if [float(t.detach().sum()) for t in ctx.saved] != ctx.sums:
        raise LookupError("these sums are unknown")
    return stale(ctx, g)


def test_a_backward_that_stumbles_over_a_tensor_that_is_not_saved_properly(fails):
    message = fails("gradients.saved", mul_op(surprised, keep_sums), args=TWO).message
    assert "tensor argument 0 was modified in place" in message
    assert "the backward raises LookupError: these sums are unknown. Save tensors with ctx.save_for_backward" in message


def in_training_only(x):
    return x * 2 if x.requires_grad and torch.is_grad_enabled() else x * 2.5


def graph_kept(x):
    with torch.enable_grad():
        return x * 2


def switched(x):
    torch.set_grad_enabled(False)
    return torch.mul(x, 2)


@pytest.mark.parametrize("op", [in_training_only, graph_kept, switched])
def test_what_changes_without_gradients(fails, op):
    failure = fails("gradients.no_grad", op, args=(tensor("n"),))
    assert failure.args[0].shape == (1,)


RIGHT = {
    "mul": (torch.mul, (tensor("#b n", WIDE), tensor("n", WIDE))),
    "function": (mul_op(right_mul), TWO),
    "index": (lambda x, i: x.index_select(0, i), (tensor("n d"), tensor("k", torch.int64, low=0, high="n-1"))),
    "unbind": (lambda x: x.unbind(0), (tensor("3 n"),)),
    "complex": (lambda x: x.abs() * x, (tensor("n", torch.complex64),)),
    "identity": (lambda x: x, (tensor("n"),)),
    "layer_norm": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), (tensor("*b n", WIDE), tensor("n", WIDE))),
    "max": (lambda x: x.max(-1), (tensor("m n"),)),
    "sqrt": (torch.sqrt, (tensor("n", low=0),)),
}
FIRST = ("lost", "reference", "subsets", "incoming", "linear", "pure", "saved", "no_grad")


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", RIGHT)
def test_right_operators_hold(name):
    op, args = RIGHT[name]
    names = [f"gradients.{rule}" for rule in FIRST]
    report = opkit.check(op, args=args, reference=op, properties=names, database=False, max_examples=15)
    assert report.ok, str(report)
    assert not report.skipped, str(report)


def test_an_undefined_gradient_that_is_handled(holds):
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return (0 if g is None else g * x.cos()) - (0 if h is None else h * x.sin())

    holds("gradients.undefined", autograd_op(both, backward, save_raw), args=(tensor("n"),))


def test_ties_and_bounds_are_no_failures(holds):
    """Where there is a choice of subgradients, a right operator may take another than the reference."""
    op = autograd_op(lambda x: x.clamp(min=0), lambda ctx, g: g * (ctx.saved_tensors[0] > 0))
    holds("gradients.reference", op, args=(tensor("n", low=0),), reference=lambda x: x.clamp(min=0))


def test_an_operator_without_gradients_is_not_asked(asked):
    @torch.library.custom_op("gradients_test::forward_only", mutates_args=())
    def forward_only(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    report = asked("gradients", forward_only, args=(tensor("n"),), reference=torch.sin)
    assert report.ok, str(report)
    assert not [each for each in report.passed if each.property not in {"gradients.no_grad"}], str(report)


def test_an_argument_without_promise_is_not_asked(holds):
    op = autograd_op(lambda x, y: x * y, lambda ctx, g: (g * ctx.saved_tensors[1], None))
    args = (tensor("n"), tensor("n", differentiable=False))
    holds("gradients.lost", op, args=args, reference=torch.mul)


def test_noise_is_not_compared(asked):
    generator = torch.Generator()
    report = asked("gradients", lambda x: x * torch.rand(x.shape, generator=generator), args=(tensor("n"),))
    assert report.ok, str(report)


def softmax_backward(probabilities):
    def backward(ctx, grad):
        p = probabilities(*ctx.saved_tensors)
        return p * (grad - (grad * p).sum(-1, keepdim=True))

    return autograd_op(lambda x: x.softmax(-1), backward)


def test_probabilities_from_a_log_sum_exp_of_huge_equal_logits(fails, holds):
    how = {"args": (tensor("b n", WIDE[::-1]),), "reference": lambda x: x.softmax(-1)}
    wrong = softmax_backward(lambda x: (x - x.logsumexp(-1, keepdim=True)).exp())
    assert "level" in fails("gradients.ties", wrong, **how).message
    holds("gradients.reference", wrong, **how)
    for right in (softmax_backward(lambda x: x.softmax(-1)), how["reference"]):
        holds("gradients.ties", right, **how)


def test_tensors_kept_outside_of_the_context(fails, holds):
    kept = []

    def save(ctx, inputs, output):
        kept[:] = inputs

    wrong = mul_op(lambda ctx, grad: (grad * kept[1], grad * kept[0]), save)
    assert "another call came between" in fails("gradients.saved", wrong, args=(tensor("n", WIDE),) * 2).message
    holds("gradients.pure", wrong, args=(tensor("n", WIDE),) * 2)
