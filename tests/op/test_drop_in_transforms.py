"""vmap, autocast, dispatch modes and tensor subclasses on ``opkit.custom_op``, held against ``torch.library.custom_op``.

Bodies leave torch (numpy) wherever torch reports a missing rule, because opkit derives it from a body that stays.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor, TwoTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

registered_by = pytest.mark.parametrize("by", ["method", "object", "name", "overload"])
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def spelled(op: Any, by: str) -> Any:
    return {"object": op, "name": op._qualname, "overload": op._opoverload}[by]


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


class PassingToo(Passing):
    pass


@registered_by
def test_rules_for_a_mode(shifted: Any, by: str) -> None:
    calls: list[str] = []

    def rule(mode, func, types, args, kwargs):
        calls.append("rule")
        return func(*args, **kwargs)

    where = () if by == "method" else (spelled(shifted, by),)
    register = shifted.register_torch_dispatch if by == "method" else torch.library.register_torch_dispatch
    assert register(*where, Passing)(rule) is rule
    register(*where, PassingToo, rule)
    for mode in (Passing, PassingToo):
        with mode():
            assert torch.equal(shifted(torch.ones(3), 2.0), torch.full((3,), 3.0))
    shifted(torch.ones(3), 2.0)
    assert calls == ["rule"] * 2


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
