"""``torch.Tag.inplace`` and ``torch.Tag.out`` on ``opkit.custom_op``, held against ``torch.library.custom_op``."""

import functools
from typing import Any, List, Optional  # noqa: UP035  (the spellings that existing code uses)

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="torch.Tag.inplace and out came with torch 2.13"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


@pytest.fixture(params=[None, "(Tensor(a!) x, Tensor y) -> Tensor(a!)"], ids=["inferred", "by hand"])
def add_(request: pytest.FixtureRequest, custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args={"x"}, tags=torch.Tag.inplace, schema=request.param)
    def op(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x

    return op


@pytest.fixture(params=[None, "(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)"], ids=["inferred", "by hand"])
def add_out(request: pytest.FixtureRequest, custom_op: Any, name: str) -> Any:
    @custom_op(name, mutates_args={"out"}, tags=torch.Tag.out, schema=request.param)
    def op(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        out.copy_(x + y)
        return out

    return op


def assert_aliased(argument: Any, result: Any) -> None:
    assert argument.alias_info.is_write
    assert result.alias_info.is_write
    assert argument.alias_info.before_set == result.alias_info.before_set


# ---- in place ------------------------------------------------------------------------------------------------------


def test_inplace_returns_its_argument(add_: Any) -> None:
    schema = add_._opoverload._schema
    assert torch.Tag.inplace in add_._opoverload.tags
    assert_aliased(schema.arguments[0], schema.returns[0])
    x, y = torch.ones(3), torch.ones(3)
    version = x._version
    assert add_(x, y) is x
    assert torch.equal(x, torch.full((3,), 2.0))
    assert x._version > version


def test_inplace_on_fake_tensors(add_: Any) -> None:
    with FakeTensorMode():
        x, y = torch.ones(3), torch.ones(3)
        assert add_(x, y) is x


def test_inplace_returning_another_tensor(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"x"}, tags=torch.Tag.inplace)
    def op(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return y

    for _ in range(2):
        with pytest.raises(RuntimeError, match="must return its first argument"):
            op(torch.ones(3), torch.ones(3))


def test_inplace_with_a_generator_of_names(custom_op: Any, name: str) -> None:
    def op(x: Tensor) -> Tensor:
        return x

    defined = custom_op(name, op, mutates_args=(n for n in ["x"]), tags=torch.Tag.inplace)
    schema = defined._opoverload._schema
    assert_aliased(schema.arguments[0], schema.returns[0])
    x = torch.ones(3)
    assert defined(x) is x


COMPILED = [pytest.param("eager", False, marks=pytest.mark.exhaustive), ("eager", True), ("aot_eager", True)]


@pytest.mark.parametrize(("backend", "fullgraph"), COMPILED)
def test_inplace_compiled(add_: Any, backend: str, fullgraph: bool) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return add_(x, y)

    x, y = torch.ones(3), torch.ones(3)
    result = torch.compile(program, backend=backend, fullgraph=fullgraph)(x, y)
    assert torch.equal(result, x)
    assert torch.equal(x, torch.full((3,), 2.0))
    if backend == "eager":
        assert result is x


def refuse(custom_op: Any, name: str, function: Any, match: str, mutates: Any, tags: Any, schema: Any = None) -> None:
    with pytest.raises(ValueError, match=match):
        custom_op(name, function, mutates_args=mutates, tags=tags, schema=schema)


def test_inplace_definitions_that_are_refused(custom_op: Any, name: str) -> None:
    def named_only(*, x: Tensor) -> Tensor:
        return x

    def number_first(x: int, y: Tensor) -> Tensor:
        return y

    def other(x: Tensor, y: Tensor) -> Tensor:
        return y

    def nothing(x: Tensor) -> None:
        pass

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    tag = torch.Tag.inplace
    refuse(custom_op, f"{name}a", named_only, "torch.Tag.inplace", {"x"}, tag)
    refuse(custom_op, f"{name}b", number_first, "first positional argument", {"y"}, tag)
    refuse(custom_op, f"{name}c", other, "mutates_args", {"y"}, tag)
    refuse(custom_op, f"{name}d", nothing, "return annotation", {"x"}, tag)
    refuse(custom_op, f"{name}e", two, "return annotation", {"x"}, tag)
    refuse(custom_op, f"{name}f", nothing, "return must alias", {"x"}, tag, "(Tensor(a!) x) -> Tensor")


def test_inplace_and_out_exclude_each_other(custom_op: Any, name: str) -> None:
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        return out

    with pytest.raises(AssertionError, match="mutually exclusive"):
        custom_op(name, op, mutates_args={"x", "out"}, tags=[torch.Tag.inplace, torch.Tag.out])


def test_inplace_with_a_fake_of_its_own(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"x"}, tags=torch.Tag.inplace)
    def op(x: Tensor) -> Tensor:
        return x

    with pytest.warns(UserWarning, match="torch.Tag.inplace"):
        op.register_fake(lambda x: x.clone())
    with FakeTensorMode():
        x = torch.ones(3)
        assert op(x) is not x


# ---- out -----------------------------------------------------------------------------------------------------------


def test_out_returns_its_argument(add_out: Any) -> None:
    schema = add_out._opoverload._schema
    assert torch.Tag.out in add_out._opoverload.tags
    assert schema.arguments[2].kwarg_only
    assert_aliased(schema.arguments[2], schema.returns[0])
    x, out = torch.ones(3), torch.zeros(3)
    assert add_out(x, x, out=out) is out
    assert torch.equal(out, torch.full((3,), 2.0))


def test_out_on_fake_tensors(add_out: Any) -> None:
    with FakeTensorMode():
        x, out = torch.ones(3), torch.empty(3)
        assert add_out(x, x, out=out) is out


@pytest.mark.parametrize(("backend", "fullgraph"), COMPILED)
def test_out_compiled(add_out: Any, backend: str, fullgraph: bool) -> None:
    def program(x: Tensor, out: Tensor) -> Tensor:
        return add_out(x, x, out=out)

    x, out = torch.ones(3), torch.zeros(3)
    result = torch.compile(program, backend=backend, fullgraph=fullgraph)(x, out)
    assert torch.equal(out, torch.full((3,), 2.0))
    assert torch.equal(result, out)
    if backend == "eager":
        assert result is out


def test_several_out_arguments(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"total", "product"}, tags=torch.Tag.out)
    def op(x: Tensor, y: Tensor, *, total: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
        total.copy_(x + y)
        product.copy_(x * y)
        return total, product

    schema = op._opoverload._schema
    for argument, result in zip(schema.arguments[2:], schema.returns, strict=True):
        assert argument.kwarg_only
        assert_aliased(argument, result)
    x, y, total, product = torch.full((3,), 3.0), torch.full((3,), 4.0), torch.zeros(3), torch.zeros(3)
    found = op(x, y, total=total, product=product)
    assert found[0] is total
    assert found[1] is product
    assert (total[0].item(), product[0].item()) == (7.0, 12.0)
    with FakeTensorMode():
        fakes = [torch.ones(3) for _ in range(4)]
        found = op(fakes[0], fakes[1], total=fakes[2], product=fakes[3])
        assert found[0] is fakes[2]
        assert found[1] is fakes[3]


def test_out_returning_another_tensor(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"out"}, tags=torch.Tag.out)
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        return x

    for _ in range(2):
        with pytest.raises(RuntimeError, match="mutable keyword-only arguments"):
            op(torch.ones(3), out=torch.empty(3))


def test_out_does_not_differentiate(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"out"}, tags=torch.Tag.out)
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        out.copy_(x.sin())
        return out

    message = r"functions with out=\.\.\. arguments don't support automatic differentiation"
    with pytest.raises(RuntimeError, match=message):
        op(torch.ones(3, requires_grad=True), out=torch.empty(3))
    with pytest.raises(RuntimeError, match=message):
        op(torch.ones(3), out=torch.empty(3, requires_grad=True))
    x, out = torch.ones(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        assert op(x, out=out) is out
    assert out.requires_grad
    assert out.grad_fn is None
    assert torch.equal(out, x.sin())


def test_out_takes_no_backward(add_out: Any) -> None:
    spelled = (add_out, add_out._qualname, add_out._opoverload)
    through_torch = [functools.partial(torch.library.register_autograd, op) for op in spelled]
    for register in (add_out.register_autograd, *through_torch):
        with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
            register(lambda ctx, grad: grad)


def test_out_with_a_fake_of_its_own(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"out"}, tags=torch.Tag.out)
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        out.copy_(x)
        return out

    with pytest.warns(UserWarning, match="torch.Tag.out"):
        op.register_fake(lambda x, *, out: out.clone())
    with FakeTensorMode():
        out = torch.empty(3)
        assert op(torch.ones(3), out=out) is not out


def test_out_definitions_that_are_refused(custom_op: Any, name: str) -> None:
    def positional(x: Tensor, out: Tensor) -> Tensor:
        return out

    def plain(x: Tensor, *, out: Tensor) -> Tensor:
        return out

    def optional(x: Tensor, *, out: Optional[Tensor]) -> Tensor:  # noqa: UP045
        return x if out is None else out

    def listed(x: Tensor, *, out: List[Tensor]) -> Tensor:  # noqa: UP006
        return out[0]

    def two(x: Tensor, *, a: Tensor, b: Tensor) -> Tensor:
        return a

    def single(x: Tensor, *, out: Tensor) -> tuple[Tensor]:
        return (out,)

    tag = torch.Tag.out
    refuse(custom_op, f"{name}a", positional, "keyword-only", {"out"}, tag)
    refuse(custom_op, f"{name}b", plain, "at least one", (), tag)
    refuse(custom_op, f"{name}c", optional, "only supports", {"out"}, tag)
    refuse(custom_op, f"{name}d", listed, "only supports", {"out"}, tag)
    refuse(custom_op, f"{name}e", two, "return annotation", {"a", "b"}, tag)
    refuse(custom_op, f"{name}f", single, "return annotation", {"out"}, tag)
    refuse(custom_op, f"{name}g", positional, "keyword-only", {"out"}, tag, "(Tensor x, Tensor(a!) out) -> Tensor(a!)")
    schema = "(Tensor x, *, int(a!) out) -> int(a!)"
    refuse(custom_op, f"{name}h", plain, "only supports Tensor", {"out"}, tag, schema)
