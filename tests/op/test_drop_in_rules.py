"""Rules registered on ``opkit.custom_op``, held against ``torch.library.custom_op`` test by test.

Bodies leave torch (numpy) wherever torch reports a missing rule, because opkit derives it from a body that stays.
"""

import itertools
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor, TwoTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import opkit

_count = itertools.count()
registered_by = pytest.mark.parametrize("by", ["method", "object", "name", "overload"])


@pytest.fixture(params=[torch.library.custom_op, opkit.custom_op], ids=["torch", "opkit"])
def custom_op(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


@pytest.fixture
def name() -> str:
    return f"drop_in_rules::op{next(_count)}"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    yield
    torch._dynamo.reset()


@pytest.fixture
def shifted(custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args=())
    def shifted(x: Tensor, y: float) -> Tensor:
        return torch.from_numpy(x.cpu().numpy() + y).to(x.device)

    return shifted


@pytest.fixture
def sine(custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args=())
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().cpu().numpy()))

    return sine


@pytest.fixture
def product(custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args=())
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    return product


def spelled(op: Any, by: str) -> Any:
    return {"object": op, "name": op._qualname, "overload": op._opoverload}[by]


# ---- fake ----------------------------------------------------------------------------------------------------------


def test_a_missing_fake_is_an_error_that_names_the_method(shifted: Any) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError) as caught:
        shifted(torch.randn(3), 3.14)
    assert str(caught.value) == (
        f"There was no fake impl registered for <CustomOpDef({shifted._qualname})>. This is necessary for "
        "torch.compile/export/fx tracing to work. Please use `shifted.register_fake` to add an fake impl."
    )


def test_a_missing_fake_is_an_error_when_compiling(shifted: Any) -> None:
    @torch.compile(backend="eager")
    def program(x: Tensor) -> Tensor:
        return shifted(x, 3.14)

    with pytest.raises(RuntimeError, match="no fake impl"):
        program(torch.randn(3))


@registered_by
def test_fakes(shifted: Any, by: str) -> None:
    calls: list[str] = []

    def fake(x, y):
        calls.append("fake")
        return torch.empty_like(x)

    if by == "method":
        assert shifted.register_fake(fake) is fake
    else:
        torch.library.register_fake(spelled(shifted, by))(fake)
    with FakeTensorMode():
        assert shifted(torch.randn(3), 3.14).shape == (3,)
    assert calls == ["fake"]


def test_torch_finds_the_fake_and_its_source(sine: Any) -> None:
    has_fake_kernel = torch._library.utils.has_fake_kernel
    with FakeTensorMode(), pytest.raises(RuntimeError):
        sine(torch.randn(3))
    assert not has_fake_kernel(sine._opoverload)
    sine.register_fake(torch.empty_like)
    assert has_fake_kernel(sine._opoverload)
    entry = torch._library.simple_registry.singleton.find(sine._qualname)
    assert __file__ in entry.fake_impl.kernel.source


def test_fake_profiles_stand_in_and_step_back(product: Any) -> None:
    from torch._library.fake_profile import OpProfile, TensorMetadata, unsafe_generate_fake_kernels

    product.register_fake(lambda x, y: torch.empty_like(x, dtype=torch.bfloat16))
    matrix = TensorMetadata(rank=2, dtype=torch.float32, device=torch.device("cpu"), layout=torch.strided)
    profiles = {product._qualname.replace("::", ".") + ".default": {OpProfile((matrix, matrix), matrix)}}
    mode = FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv(allow_dynamic_output_shape_ops=True))
    x = mode.from_tensor(torch.ones(3, 3))
    dtypes: list[torch.dtype] = []
    with mode:
        dtypes.append(product(x, x).dtype)
    with unsafe_generate_fake_kernels(profiles), mode:
        dtypes.append(product(x, x).dtype)
    with mode:
        dtypes.append(product(x, x).dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_given_fake_is_used_though_one_could_be_derived(product: Any) -> None:
    calls: list[str] = []

    @product.register_fake
    def fake(x, y):
        calls.append("fake")
        return x.new_empty(x.shape)

    with FakeTensorMode():
        x = torch.randn(3)
        assert product(x, x) is not x
    assert calls == ["fake"]


def test_a_fake_with_a_size_that_only_the_data_tell(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def nonzero(x: Tensor) -> Tensor:
        return torch.from_numpy(np.stack(np.nonzero(x.cpu().numpy()), axis=1))

    @nonzero.register_fake
    def fake(x):
        size = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty([size, x.dim()], dtype=torch.int64)

    x = torch.tensor([0.0, 1.0, 2.0])
    torch.library.opcheck(nonzero, (x,))
    graph = torch.fx.experimental.proxy_tensor.make_fx(nonzero, tracing_mode="symbolic")(x)
    assert torch.equal(graph(x), nonzero(x))


def test_compiled_with_fakes(custom_op: Any, name: str) -> None:
    calls: list[str] = []

    @custom_op(name, mutates_args=())
    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        calls.append("body")
        return torch.from_numpy(np.add(x.numpy() @ weight.numpy().T, bias.numpy()))

    @linear.register_fake
    def fake(x, weight, bias):
        calls.append("fake")
        assert x.shape[1] == weight.shape[1]
        return x.new_empty(x.size(0), weight.size(0))

    x, weight, bias = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2)
    out = torch.compile(linear, backend="eager", fullgraph=True)(x, weight, bias)
    assert torch.allclose(out, torch.nn.functional.linear(x, weight, bias))
    assert set(calls) == {"body", "fake"}


# ---- autograd ------------------------------------------------------------------------------------------------------


@registered_by
def test_backwards(sine: Any, by: str) -> None:
    calls: list[str] = []

    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        calls.append("backward")
        (x,) = ctx.saved_tensors
        return grad * x.cos()

    if by == "method":
        sine.register_autograd(backward, setup_context=setup_context)
    else:
        torch.library.register_autograd(spelled(sine, by), backward, setup_context=setup_context)
    x = torch.randn(3, requires_grad=True)
    y = sine(x)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert calls == ["backward"]
    assert torch.equal(grad, x.cos())


def test_a_missing_backward_is_an_error_when_asked_for(sine: Any) -> None:
    y = sine(torch.randn(3, requires_grad=True))
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula"):
        y.sum().backward()


def test_setup_context_runs_only_where_a_gradient_is_needed(shifted: Any) -> None:
    calls: list[str] = []

    def backward(ctx, grad):
        raise AssertionError("no gradient is asked for")

    shifted.register_autograd(backward, setup_context=lambda ctx, inputs, output: calls.append("setup"))
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        shifted(x, 2.0)
    shifted(x.detach(), 2.0)
    assert calls == []
    shifted.register_kernel("cpu")(lambda x, y: torch.from_numpy(x.detach().numpy() + y))
    shifted(x, 2.0)
    assert calls == ["setup"]


def test_a_backward_replaces_an_earlier_one(sine: Any) -> None:
    sine.register_autograd(lambda ctx, grad: grad * 2)
    sine.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.randn(3, requires_grad=True)
    sine(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_a_backward_that_returns_too_few_gradients(sine: Any) -> None:
    sine.register_autograd(lambda ctx, grad: ())
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected .*got "):
        sine(torch.randn(3, requires_grad=True)).sum().backward()


def defaulted(custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Optional[Tensor] = None, scale: float = 2.0, enabled: bool = False) -> Tensor:  # noqa: UP045
        return x.sin()

    return op


def test_setup_context_is_given_the_defaults(custom_op: Any, name: str) -> None:
    op = defaulted(custom_op, name)
    seen: list[Any] = []

    def setup_context(ctx, inputs, output):
        seen.append(inputs[1:])
        ctx.save_for_backward(inputs[0])

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return grad * ctx.saved_tensors[0].cos()

    op.register_autograd(backward, setup_context=setup_context)
    x = torch.randn(3, requires_grad=True)
    op(x).sum().backward()
    assert seen == [(None, 2.0, False), (True,)]
    assert torch.equal(x.grad, x.cos())


def test_keyword_only_arguments_in_setup_context(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(w: Tensor, x: int = 2, *, y: int = 3, z: float) -> Tensor:
        return w * x * y * z

    seen: list[Any] = []

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        seen.append((inputs[1:], keyword_only_inputs))
        ctx.factor = inputs[1] * keyword_only_inputs["y"] * keyword_only_inputs["z"]

    op.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=setup_context)
    for call in (op, op._opoverload):
        w = torch.ones(3, requires_grad=True)
        call(w, z=1.5).sum().backward()
        assert torch.equal(w.grad, torch.full((3,), 9.0))
    assert seen == [((2,), {"y": 3, "z": 1.5})] * 2


@pytest.mark.parametrize("scale", [2.0, 3.0])
def test_a_list_of_tensors_with_a_default_beside_it(custom_op: Any, name: str, scale: float) -> None:
    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor], scale: float = 2.0) -> Tensor:
        return (xs[0].sin() + xs[1].sin()) * scale

    def setup_context(ctx, inputs, output):
        xs, ctx.scale = inputs
        ctx.save_for_backward(*xs)

    def backward(ctx, grad):
        assert ctx.needs_input_grad[0] == [True, True]
        grads = [grad * x.cos() * ctx.scale for x in ctx.saved_tensors]
        return (grads, *[None] * (len(ctx.needs_input_grad) - 1))

    op.register_autograd(backward, setup_context=setup_context)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    op([x, y], scale).sum().backward()
    assert torch.allclose(x.grad, x.cos() * scale)
    assert torch.allclose(y.grad, y.cos() * scale)


def test_a_list_of_results(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float = 2.0) -> list[Tensor]:
        return [x.sin() * scale, x.cos() * scale]

    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        assert isinstance(output, list)
        ctx.save_for_backward(x)

    def backward(ctx, grads):
        (x,) = ctx.saved_tensors
        grad = (grads[0] * x.cos() - grads[1] * x.sin()) * ctx.scale
        return (grad, *[None] * (len(ctx.needs_input_grad) - 1))

    op.register_autograd(backward, setup_context=setup_context)
    for args in ((), (3.0,)):
        x = torch.randn(3, requires_grad=True)
        first, second = op(x, *args)
        (first + second).sum().backward()
        assert torch.allclose(x.grad, (x.cos() - x.sin()) * (args[0] if args else 2.0))


def test_results_that_carry_no_gradient(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = np.sort(x.detach().numpy()), np.argsort(x.detach().numpy())
        return torch.from_numpy(values), torch.from_numpy(order)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(0, order, grad)

    op.register_autograd(backward, setup_context=setup_context)
    x = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    values, order = op(x)
    assert values.requires_grad
    assert not order.requires_grad
    (values * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 1.0, 2.0]))


def test_a_backward_for_an_operator_that_writes(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor) -> Tensor:
        x.sin_()
        return x.clone()

    for register in (op.register_autograd, lambda f: torch.library.register_autograd(name, f)):
        with pytest.raises(RuntimeError, match="non-functional"):
            register(lambda ctx, grad: grad)


def test_second_derivatives_by_a_differentiable_backward(sine: Any) -> None:
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    sine.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=setup_context)
    x = torch.randn(3, requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(sine, x)


# ---- views ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "value"), [("SymInt", 2), ("SymInt[]", (2,))])
def test_views_by_symbolic_sizes_are_refused(custom_op: Any, name: str, kind: str, value: Any) -> None:
    @custom_op(name, mutates_args=(), schema=f"(Tensor(a) t, {kind} index) -> Tensor(a)")
    def op(t, index):
        return t.view_as(t)

    op.register_autograd(lambda *_: None, setup_context=lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="Custom ops that are views do not support SymInt."):
        op._opoverload(torch.rand(2), value)


def test_a_view(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    def op(x):
        return x.view(-1)

    op.register_autograd(lambda ctx, grad: grad.view(ctx.shape), setup_context=_keep_shape)
    x = torch.randn(2, 3, requires_grad=True)
    base = x * 1
    view = op(base)
    assert view._is_view()
    assert view._base is base
    view.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))
    assert op(torch.zeros(2, 3))._is_view()


def _keep_shape(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[0].shape
    ctx._is_pure_view = True


def test_views_of_a_subclass(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), schema="(Tensor(a) pair, int index) -> Tensor(a)")
    def part(pair, index):
        raise RuntimeError("the subclass answers")

    class Pair(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs):
            if func is part._opoverload:
                found = args[0].b if args[1] else args[0].a
                return found.view_as(found)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def backward(ctx, grad):
        grad = grad.clone()
        parts = (torch.zeros_like(grad), grad) if ctx.index else (grad, torch.zeros_like(grad))
        return Pair(*parts), None

    def setup_context(ctx, inputs, output):
        ctx._is_pure_view = True
        ctx.index = inputs[1]

    part.register_autograd(backward, setup_context=setup_context)
    for call in (part, part._opoverload):
        pair = Pair(torch.rand(3), torch.rand(3), requires_grad=True)
        view = call(pair, 0)
        view.sum().backward()
        assert torch.equal(view, pair.a)
        assert view._is_view()
        assert view._base is pair
        assert torch.equal(pair.grad.a, torch.ones(3))
        leaf = Pair(torch.rand(3), torch.rand(3), requires_grad=True)
        inner = leaf.clone()
        view = call(inner, 0)
        view *= 2
        assert torch.equal(inner.a, view)
        inner.sum().backward()
        assert torch.equal(leaf.grad.a, torch.full((3,), 2.0))
        assert torch.equal(leaf.grad.b, torch.ones(3))


# ---- vmap ----------------------------------------------------------------------------------------------------------


def vmap_rule(combine: Any, calls: list[str]) -> Any:
    def rule(info, in_dims, x, y):
        calls.append("rule")
        x = x.unsqueeze(-1) if in_dims[0] is None else x.movedim(in_dims[0], -1)
        y = y.unsqueeze(-1) if in_dims[1] is None else y.movedim(in_dims[1], -1)
        return combine(x, y).movedim(-1, 0), 0

    return rule


@registered_by
def test_vmap_rules(product: Any, by: str) -> None:
    calls: list[str] = []
    rule = vmap_rule(torch.mul, calls)
    if by == "method":
        product.register_vmap(rule)
    else:
        torch.library.register_vmap(spelled(product, by), rule)
    x, y = torch.randn(2, 2), torch.randn(2, 2)
    assert torch.equal(torch.vmap(product)(x, y), x * y)
    assert torch.equal(torch.vmap(product, out_dims=1)(x, y), (x * y).T)
    assert torch.equal(torch.vmap(product, in_dims=1)(x, y), (x * y).T)
    assert calls == ["rule"] * 3


@pytest.mark.parametrize("by", ["method", "name"])
def test_vmap_rules_nest_and_are_replaced(product: Any, by: str) -> None:
    calls: list[str] = []
    register = product.register_vmap if by == "method" else torch.library.register_vmap(product._qualname)
    register(vmap_rule(torch.mul, calls))
    x, y = torch.randn(3), torch.randn(2)
    outer = torch.vmap(torch.vmap(product, in_dims=(0, None)), in_dims=(None, 0))
    assert torch.allclose(outer(x, y), y.unsqueeze(-1) * x)
    assert calls
    register(vmap_rule(torch.add, calls))
    x = torch.randn(2, 2)
    assert torch.equal(torch.vmap(product)(x, x), x + x)


def test_vmap_rules_with_keyword_only_arguments_and_defaults(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(w: Tensor, x: int = 2, *, y: int = 3, z: int) -> Tensor:
        return w * x * y * z

    calls: list[str] = []

    @op.register_vmap
    def rule(info, in_dims, w, x=2, *, y=3, z):
        calls.append("rule")
        return w * x * y * z, 0

    assert torch.equal(torch.vmap(op)(torch.ones(3), z=7), torch.full((3,), 42.0))
    assert calls == ["rule"]


def test_vmap_over_a_body_outside_torch(sine: Any) -> None:
    x = torch.randn(4, 3)
    if isinstance(sine, opkit.op.operator.CustomOp):
        assert torch.allclose(torch.vmap(sine)(x), x.sin())


# ---- autocast ------------------------------------------------------------------------------------------------------


@registered_by
def test_autocast_rules(sine: Any, by: str) -> None:
    seen: list[torch.dtype] = []
    sine.register_kernel("cpu")(lambda x: (seen.append(x.dtype), x + 0)[1])
    for _ in range(2):  # a second registration is no error
        if by == "method":
            sine.register_autocast("cpu", torch.bfloat16)
        else:
            torch.library.register_autocast(spelled(sine, by), "cpu", torch.bfloat16)
    x = torch.randn(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sine(x).dtype is torch.bfloat16
        assert sine._opoverload(x).dtype is torch.bfloat16
        assert sine(x.double()).dtype is torch.float64
    assert sine(x).dtype is torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float64, torch.float32]


def test_autocast_of_a_list(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        return torch.sin(xs[0] + xs[1])

    op.register_autocast("cpu", torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert op([torch.randn(3), torch.randn(3)]).dtype is torch.float16


def test_autocast_on_a_device_that_has_none(sine: Any) -> None:
    with pytest.raises(ValueError, match="does not support autocast"):
        sine.register_autocast("meta", torch.float16)
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        sine.register_autocast(torch.device("cpu"), torch.float16)


# ---- modes and subclasses ------------------------------------------------------------------------------------------


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@registered_by
@pytest.mark.parametrize("decorated", [True, False])
def test_rules_for_a_mode(shifted: Any, by: str, decorated: bool) -> None:
    calls: list[str] = []

    def rule(mode, func, types, args, kwargs):
        calls.append("rule")
        return func(*args, **kwargs)

    where = () if by == "method" else (spelled(shifted, by),)
    register = shifted.register_torch_dispatch if by == "method" else torch.library.register_torch_dispatch
    if decorated:
        assert register(*where, Passing)(rule) is rule
    else:
        register(*where, Passing, rule)
    with Passing():
        assert torch.equal(shifted(torch.ones(3), 2.0), torch.full((3,), 3.0))
    shifted(torch.ones(3), 2.0)
    assert calls == ["rule"]


def test_rules_through_a_library(product: Any) -> None:
    namespace, opname = product._qualname.split("::")
    calls: list[Any] = []

    def rule(cls, func, types, args, kwargs):
        calls.append(cls)
        return torch.zeros(3)

    x = torch.randn(3)
    pair = TwoTensor(x, x.clone())
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library._register_torch_dispatch_rule(opname, TwoTensor, rule)
        library._register_torch_dispatch_rule(opname, TwoTensorMode, rule)
        product(pair, pair)
        with TwoTensorMode():
            product(x, x)
    assert calls[0] is TwoTensor
    assert len(calls) == 2


def test_a_subclass_sees_the_operator(product: Any) -> None:
    seen: list[Any] = []

    class Logging(TwoTensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs):
            seen.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    pair = Logging(torch.randn(3), torch.randn(3))
    found = product(pair, pair)
    assert seen == [product._opoverload]
    assert torch.equal(found.a, pair.a * pair.a)


def test_a_mode_sees_the_operator(product: Any) -> None:
    seen: list[Any] = []

    class Logging(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    with Logging():
        product(x, x)
    assert seen[0] is product._opoverload


# ---- effects -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.library, "_register_effectful_op"), reason="register_effect came with torch 2.13")
@pytest.mark.parametrize("by", ["method", "name", "overload"])
def test_effects(custom_op: Any, name: str, by: str) -> None:
    from torch._library.effects import EffectType

    seen: list[float] = []

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        seen.append(x.sum().item())
        return x.clone()

    op.register_fake(torch.empty_like)
    if by == "method":
        op.register_effect(EffectType.ORDERED)
    else:
        torch.library._register_effectful_op(spelled(op, by), EffectType.ORDERED)

    def program(x: Tensor) -> Tensor:
        op(x)
        op(x + 1)
        return x * 2

    torch.compile(program, backend="aot_eager", fullgraph=True)(torch.zeros(2))
    assert seen == [0.0, 2.0]


# ---- opcheck -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["object", "overload"])
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_opcheck(product: Any, by: str, kernel: bool) -> None:
    if kernel:
        product.register_kernel("cpu")(lambda x, y: torch.from_numpy(x.detach().numpy() * y.detach().numpy()))
    product.register_fake(lambda x, y: torch.empty_like(x))
    product.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    op = product._opoverload if by == "overload" else product
    for needs in (False, True):
        x, y = torch.randn(3, requires_grad=needs), torch.randn(3, requires_grad=needs)
        assert set(torch.library.opcheck(op, (x, y)).values()) == {"SUCCESS"}


def test_opcheck_finds_a_fake_of_other_strides(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone().permute(2, 0, 1)

    op.register_fake(lambda x: x.new_empty(x.shape[2], x.shape[0], x.shape[1]))
    with pytest.raises(Exception, match="Stride mismatch"):
        torch.library.opcheck(op, (torch.randn(4, 4, 3),))


def test_opcheck_of_writes(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    assert set(torch.library.opcheck(op, (torch.randn(3), torch.randn(3))).values()) == {"SUCCESS"}
