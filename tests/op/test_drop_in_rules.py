"""Fakes, ``opcheck`` and effects on ``opkit.custom_op``, held against ``torch.library.custom_op``.

Bodies leave torch (numpy) wherever torch reports a missing rule, because opkit derives it from a body that stays.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

registered_by = pytest.mark.parametrize("by", ["method", "object", "name", "overload"])
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    filename, _, line = entry.fake_impl.kernel.source.rpartition(":")
    assert filename == sine._init_fn.__code__.co_filename
    assert int(line) >= sine._init_fn.__code__.co_firstlineno


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


def test_fakes_answer_for_meta_tensors(sine: Any) -> None:
    with pytest.raises(RuntimeError, match="no fake impl"):
        sine(torch.ones(3, device="meta"))
    sine.register_fake(torch.empty_like)
    sine.register_autograd(lambda ctx, grad: grad)
    for call in (sine, sine._opoverload):
        assert call(torch.ones(3, device="meta")).shape == (3,)
        x = torch.ones(3, device="meta", requires_grad=True)
        call(x).sum().backward()
        assert x.grad.shape == (3,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_traces_record_the_operator(sine: Any) -> None:
    for _ in range(40):
        sine(torch.ones(3))
    traced = torch.jit.trace(lambda x: sine(x), torch.ones(3))
    assert torch.allclose(traced(torch.zeros(3)), torch.zeros(3))


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


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="opcheck compares strides from torch 2.13 on")
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
