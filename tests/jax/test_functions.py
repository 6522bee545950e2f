"""``opkit.to_jax``: arguments, transforms, gradients, dtypes, and what it refuses."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_comparison import close, same, to_array, to_arrays
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit import errors

_names = itertools.count()


def define(function, **options):
    return opkit.custom_op(f"jaxf::{function.__name__}_{next(_names)}", mutates_args=(), **options)(function)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed():
    def mixed(
        x: Float[Tensor, "*batch d"], bias: Float[Tensor, "d"] | None, xs: list[Tensor], scale: float = 2.0, *,
        power: int = 1, mode: str = "sum", dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = x**power * scale
        out = out if bias is None else out + bias
        for y in xs:
            out = out + y
        return out.to(dtype), out.sum() if mode == "sum" else out.mean()

    return define(mixed)


@pytest.mark.parametrize("jit", [False, True])
def test_arguments_of_every_kind(mixed, jit):
    x, bias, y = torch.randn(2, 3), torch.randn(3), torch.randn(1, 3)
    same(mixed, x, None, [], jit=jit)
    same(mixed, x, bias, [y, y], 3.0, jit=jit, power=2, mode="mean", dtype=torch.bfloat16, rtol=1e-2, atol=1e-2)


def test_shapes_may_change_and_each_is_traced_once():
    calls = []

    def counted(x: Tensor, factor: float) -> Tensor:
        calls.append(x.shape)
        return x * factor

    f = opkit.to_jax(counted)
    for size in (2, 3, 2, 3, 0):
        np.testing.assert_array_equal(f(jnp.ones(size), 2.0), 2 * np.ones(size))
    once = len(calls)
    f(jnp.ones(2), 2.0)
    assert len(calls) == once
    np.testing.assert_array_equal(jax.jit(f, static_argnums=1)(jnp.ones(3), 4.0), 4 * np.ones(3))
    assert len(calls) > once
    assert jnp.copysign(1, opkit.to_jax(lambda x, s: x * s)(jnp.ones(1), -0.0))[0] == -1


def test_traces_are_those_of_what_the_reference_reads():
    factor = [2.0]

    def scaled(x: Tensor) -> Tensor:
        return x * factor[0]

    op = define(scaled)
    f = opkit.to_jax(op)
    np.testing.assert_array_equal(f(jnp.ones(1)), [2.0])
    factor[0] = 3.0
    np.testing.assert_array_equal(f(jnp.ones(1)), [3.0])


def test_wrong_arguments_are_named(mixed):
    f, x = opkit.to_jax(mixed), jnp.ones((2, 3))
    with pytest.raises(errors.ShapeError, match=r"jaxf::mixed_\d+: the argument bias"):
        f(x, jnp.ones(4), [])
    with pytest.raises(errors.ArgumentTypeError, match=r"the argument x must be an array of JAX or numpy, got Tensor"):
        f(torch.ones(2, 3), None, [])
    with pytest.raises(
        errors.ArgumentTypeError, match=r'argument scale must be a Python value.*static_argnames="scale"'
    ):
        jax.jit(lambda x, scale: f(x, None, [], scale))(x, 2.0)
    with pytest.raises(errors.ArgumentTypeError, match="missing a required argument: 'xs'"):
        f(x, None)
    with pytest.raises(errors.ArgumentTypeError, match="expected an operator or a function, got 3"):
        opkit.to_jax(3)
    np.testing.assert_array_equal(f(x, None, [], np.float32(3.0))[0], 3 * x)


def test_modes_of_the_caller_do_not_matter():
    product = opkit.to_jax(lambda x: x @ x)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        gradient = jax.grad(lambda x: product(x).sum())(jnp.eye(2))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 2 * np.ones((2, 2)))


def test_functions_that_call_operators():
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = define(doubled)
    op.register_autograd(lambda ctx, grad: grad * 10)  # so that its gradient says whether the operator's rule is used
    table = torch.tensor([1.0, 2.0, 3.0])

    def function(x, options):
        return {"y": op(x).sin() * table, "n": 3, "rest": [options["scale"] * x, None]}

    result = opkit.to_jax(function)(jnp.ones(3), {"scale": 2})
    close(result, function(torch.ones(3), {"scale": 2}))
    same(lambda x: function(x, {"scale": 2})["y"], torch.randn(3))


def test_scalars_and_operators_within_operators():
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 3 * grad

    def power(x: Tensor) -> Tensor:
        return x.exp()

    inner = define(power)

    def outer(x: Tensor) -> Tensor:
        return Tripled.apply(x) + inner(x)

    gradient = jax.grad(opkit.to_jax(define(outer)))
    np.testing.assert_allclose(gradient(0.5), 3 + np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(gradient)(0.5), np.exp(0.5), rtol=1e-6)
    inner.register_autograd(lambda ctx, grad: 5 * grad)  # which the outer one's next trace sees
    np.testing.assert_allclose(jax.grad(opkit.to_jax(define(outer)))(0.5), 3 + 5)


# ---- gradients and transforms ------------------------------------------------------------------------------------------


def test_gradients_of_a_reference_of_every_order_and_mode():
    def gated(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * y.exp()

    f, x, y = opkit.to_jax(define(gated)), jnp.asarray([0.5, -1.0]), jnp.asarray([0.1, 0.2])
    plain = jax.jit(lambda x, y: jax.nn.silu(x) * jnp.exp(y))
    for transform in (jax.jacfwd, jax.jacrev, jax.hessian):
        np.testing.assert_allclose(transform(f)(x, y), transform(plain)(x, y), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(f, (0, None))(x[:, None], y), plain(x[:, None], y), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(lambda x: f(x, y).sum()))(x[:, None]).shape, (2, 1))


def test_registered_backward_is_used_and_differentiated_again():
    def cube(x: Tensor, scale: float = 1.0) -> Tensor:
        return x**3 * scale

    def save(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)
        ctx.scale = inputs[1]

    def backward(ctx, grad):
        x, output = ctx.saved_tensors
        return grad * (3 * output / x + 100), None  # 100 more than the derivative

    op = define(cube)
    op.register_autograd(backward, setup_context=save)
    f = opkit.to_jax(op)
    x = jnp.asarray([1.0, 2.0])
    for transform in (lambda g: g, jax.jit, jax.vmap):
        gradient = transform(jax.grad(lambda x: f(x, 2.0).sum()))(x)
        np.testing.assert_allclose(gradient, 6 * x**2 + 100)
    again = jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(x)
    tracked = torch.tensor([1.0, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad(op(tracked).sum(), tracked, create_graph=True)
    np.testing.assert_allclose(again, torch.autograd.grad(first.sum(), tracked)[0], rtol=1e-5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (x,), (x,))


def test_registered_backward_knows_which_arguments_need_a_gradient():
    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    def backward(ctx, grad):
        assert not ctx.needs_input_grad[1]
        return grad * ctx.saved_tensors[0], None

    op = define(scaled)
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]))
    gradient = jax.jit(jax.grad(lambda x, by: opkit.to_jax(op)(x, by).sum()))(jnp.ones(2), 3 * jnp.ones(2))
    np.testing.assert_array_equal(gradient, [3.0, 3.0])


def test_results_without_gradients():
    def found(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.max(-1)

    op = define(found)
    same(op, torch.randn(2, 3))
    op.register_autograd(_scattered, setup_context=_save_place)
    same(op, torch.randn(2, 3))


def _save_place(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.shape = inputs[0].shape
    ctx.mark_non_differentiable(output[1])


def _scattered(ctx, grad, _):
    return grad.new_zeros(ctx.shape).scatter(-1, ctx.saved_tensors[0].unsqueeze(-1), grad.unsqueeze(-1))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def _cut(x):
    with torch.no_grad():
        factor = x.sin()
    return x * x.detach() + factor + x.data.exp() * x


@pytest.mark.parametrize(
    "function", [_cut, _Rounded.apply, lambda x: _Rounded.apply(x) * x], ids=["cut", "own", "mixed"]
)
def test_gradients_that_a_reference_cuts_off_or_makes_up(function):
    same(lambda x: function(x), torch.tensor([0.4, 1.7]))


def test_second_derivatives_of_what_is_cut_off():
    f = opkit.to_jax(_cut)
    found = jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum())(jnp.asarray([0.5, 0.7]))
    np.testing.assert_array_equal(found, [0.0, 0.0])  # as torch has it: x.detach() and the rest are constants


# ---- dtypes ------------------------------------------------------------------------------------------------------------


def test_with_and_without_64_bits():
    def wide(x: Float[Tensor, "n"], index: Int64[Tensor, "k"]) -> tuple[Tensor, Tensor]:
        return x.double()[index] / 3, index * 2

    op = define(wide)
    x, index = np.arange(4.0), np.array([3, 0])
    values, doubled = opkit.to_jax(op)(x, index)
    assert (values.dtype, doubled.dtype) == (jnp.float32, jnp.int32)
    with jax.enable_x64(True):
        values, doubled = opkit.to_jax(op)(x, index)
        assert (values.dtype, doubled.dtype) == (jnp.float64, jnp.int64)
        close((values, doubled), op(torch.tensor(x), torch.tensor(index)), rtol=1e-15)


def test_integers_that_need_64_bits():
    def hashed(x: Tensor) -> Tensor:
        return ((x * 0x1E3779B97F4A7C15) >> 7) & 0xFFFFFFFF

    f, x = opkit.to_jax(hashed), torch.tensor([1, 2**20 + 7])
    with pytest.raises(errors.ArgumentError, match=r"needs 64 bits.*jax_enable_x64"):
        f(to_array(x))
    with jax.enable_x64(True):
        close(f(to_array(x)), hashed(x))
    above = opkit.to_jax(lambda x: (x >= -(2**62), x < 2**40, x == 2**33))(to_array(x))
    close(above, [torch.tensor([True, True]), torch.tensor([True, True]), torch.tensor([False, False])])


# ---- what is refused ---------------------------------------------------------------------------------------------------


def _noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def _kept(x: Tensor) -> Tensor:
    return x[x > 0]


def _branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


def _transformed(x: Tensor) -> Tensor:
    return torch.fft.rfft(x).real


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_noise, "draws random numbers"), (_kept, "depends on"), (_branching, "depends on"), (_in_numpy, "leaves torch"),
        (_transformed, r"no function of JAX for aten._fft_r2c.default.*opkit/jax"),
    ],
)  # fmt: skip
def test_refusals_name_the_operator_and_the_reason(function, reason):
    op = define(function, **({"opaque": True} if function is _in_numpy else {}))
    with pytest.raises(errors.RuleError, match=rf"^{op.name} cannot be a function of JAX: .*{reason}"):
        opkit.to_jax(op)(jnp.ones(3))


def test_operators_that_write_to_their_arguments_are_refused():
    @opkit.custom_op(f"jaxf::increment_{next(_names)}", mutates_args=("x",))
    def increment(x: Tensor) -> None:
        x.add_(1)

    with pytest.raises(errors.MutationError, match=r"jaxf::increment_\d+ cannot be a function of JAX: it writes to x"):
        opkit.to_jax(increment)
    with pytest.raises(errors.MutationError, match=r"writes to an argument \(aten"):
        opkit.to_jax(lambda x: x.add_(1))(jnp.ones(2))


# ---- programs ----------------------------------------------------------------------------------------------------------


def test_exported_program(mixed):
    f = jax.jit(lambda x, bias: opkit.to_jax(mixed)(x, bias, [], power=2))
    x, bias = to_arrays((torch.randn(2, 3), torch.randn(3)))
    exported = jax.export.export(f)(x, bias)
    assert "stablehlo.multiply" in exported.mlir_module()
    for found, expected in zip(exported.call(x, bias), f(x, bias), strict=True):
        np.testing.assert_array_equal(found, expected)
