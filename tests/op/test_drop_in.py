"""Definitions by ``opkit.custom_op``, held against ``torch.library.custom_op``.

Each test runs with both decorators: what it asserts is what an author may rely on when the import is changed.
"""

import functools
from typing import Any, List, Optional  # noqa: UP035  (the spellings that existing code uses)

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.types import Number

pytestmark = pytest.mark.filterwarnings("ignore::opkit.errors.RedefinitionWarning")


def overload(name: str) -> Any:
    return torch._library.utils.lookup_op(name)


def versions(*values: Any) -> list[int]:
    return [t._version for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor)]


# ---- definition ----------------------------------------------------------------------------------------------------


def test_a_definition_without_the_decorator_syntax(custom_op: Any, name: str) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    op = custom_op(name, double, mutates_args=())
    assert isinstance(op, torch._library.custom_ops.CustomOpDef)
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))


def test_tags_alone_or_in_a_sequence(custom_op: Any, name: str) -> None:
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    for tags in (torch.Tag.pointwise, [torch.Tag.pointwise], (torch.Tag.pointwise,)):
        op = custom_op(name, copied, mutates_args=(), tags=tags)
        assert {torch.Tag.pointwise, torch.Tag.pt2_compliant_tag} <= set(op._opoverload.tags), tags


def test_a_tag_given_twice_is_held_once(custom_op: Any, name: str) -> None:
    def copied(x: Tensor) -> Tensor:
        return x.clone()

    op = custom_op(name, copied, mutates_args=(), tags=[torch.Tag.pt2_compliant_tag, torch.Tag.pointwise])
    assert op._opoverload.tags.count(torch.Tag.pt2_compliant_tag) == 1


def test_the_object_is_named_as_torch_names_it(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    assert repr(op) == f"<CustomOpDef({name})>"
    assert op._qualname == name
    assert op._opoverload is overload(name)


def test_a_schema_by_hand(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=(), schema="(Tensor x, float y) -> Tensor")
    def shifted(x, y):
        return torch.from_numpy(x.numpy(force=True) + y)

    assert torch.allclose(shifted(torch.zeros(3), 1.5), torch.full((3,), 1.5))


def test_a_schema_by_hand_that_mutates(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=["x"], schema="(Tensor(a!) x) -> ()")
    def sin_(x):
        np.sin(x.numpy(), out=x.numpy())

    x = torch.ones(3)
    expected, version = x.sin(), x._version
    sin_(x)
    assert torch.allclose(x, expected)
    assert x._version > version


def test_a_schema_by_hand_contradicting_mutates_args(custom_op: Any, name: str) -> None:
    def sin_(x):
        x.sin_()

    with pytest.raises(ValueError, match=r"the op mutates {'x'}"):
        custom_op(name, sin_, mutates_args=(), schema="(Tensor(a!) x) -> ()")


def test_keyword_only_tensors_are_refused(custom_op: Any, name: str) -> None:
    def op(x: Tensor, *, y: int, z: Tensor) -> Tensor:
        return x.clone()

    for kind in (Tensor, Optional[Tensor], List[Tensor]):  # noqa: UP006, UP045
        op.__annotations__ = {"x": Tensor, "y": int, "z": kind, "return": Tensor}
        with pytest.raises(NotImplementedError, match="kwarg-only Tensor args"):
            pytest.fail(f"{kind} is taken: {custom_op(name, op, mutates_args=())}")


def test_an_unknown_name_in_mutates_args(custom_op: Any, name: str) -> None:
    def op(x: Tensor) -> None:
        x.sin_()

    with pytest.raises(ValueError, match=r"{'y'} in mutates_args were not found"):
        custom_op(name, op, mutates_args={"y"}, device_types="cpu")


def test_a_bare_string_as_mutates_args(custom_op: Any, name: str) -> None:
    def op(x: Tensor) -> None:
        return

    with pytest.raises(ValueError, match="string"):
        custom_op(name, op, mutates_args="x")


def test_a_parameter_type_without_a_schema(custom_op: Any, name: str) -> None:
    def op(x: Tensor, y: Any) -> Tensor:
        return x.clone()

    for annotation in ({"y": dict[str, object]}, {"y": np.ndarray}, {}):
        op.__annotations__ = {"x": Tensor, "return": Tensor, **annotation}
        with pytest.raises(ValueError, match="y"):
            pytest.fail(f"{annotation} is taken: {custom_op(name, op, mutates_args=())}")


def test_variadic_parameters_are_refused(custom_op: Any, name: str) -> None:
    def op(*xs: Tensor) -> Tensor:
        return xs[0].clone()

    with pytest.raises(ValueError, match="xs"):
        custom_op(name, op, mutates_args=())


def test_defaults_reach_the_body_and_the_schema(custom_op: Any, name: str) -> None:
    seen: list[Any] = []

    @custom_op(name, mutates_args=())
    def op(
        x: Tensor,
        a: Optional[int] = None,  # noqa: UP045
        b: float = 3.14,
        c: bool = True,
        d: int = 3,
        e: str = "foo",
        f: torch.dtype = torch.float,
        g: torch.dtype = torch.int,
        h: torch.device = torch.device("cpu:0"),
        i: torch.device = "cpu",  # type: ignore[assignment]
    ) -> Tensor:
        seen.append([a, b, c, d, e, f, g, h, i])
        return x.clone()

    op(torch.zeros(2))
    expected = [None, 3.14, True, 3, "foo", torch.float32, torch.int32, torch.device("cpu:0"), "cpu"]
    assert seen[-1] == expected
    held = [argument.default_value for argument in op._opoverload._schema.arguments]
    assert held == [None, None, 3.14, True, 3, "foo", 6, 3, torch.device("cpu:0"), torch.device("cpu")]


def test_each_body_is_called_once_in_a_call(custom_op: Any, name: str) -> None:
    calls: list[str] = []

    @custom_op(name, mutates_args=())
    def plain(x: Tensor) -> Tensor:
        calls.append("plain")
        return x.clone()

    @custom_op(f"{name}.pair", mutates_args=())
    def pair(x: Tensor, y: Tensor) -> Tensor:
        calls.append("pair")
        return x.clone()

    packet = getattr(torch.ops.drop_in, name.split("::")[1])
    packet(torch.zeros(2))
    packet(torch.zeros(2), torch.zeros(2))
    plain(torch.zeros(2))
    pair(torch.zeros(2), torch.zeros(2))
    assert calls == ["plain", "pair", "plain", "pair"]


def test_a_second_definition_takes_the_place_of_the_first(custom_op: Any, name: str) -> None:
    def sine(x: Tensor) -> Tensor:
        return x.sin()

    def cosine(x: Tensor) -> Tensor:
        return x.cos()

    x = torch.ones(3)
    assert torch.equal(custom_op(name, sine, mutates_args=())(x), x.sin())
    assert torch.equal(custom_op(name, cosine, mutates_args=())(x), x.cos())
    assert torch.equal(overload(name)(x), x.cos())


def test_annotations_as_strings_on_a_closure(custom_op: Any, name: str) -> None:
    bias = 1.0

    @custom_op(name, mutates_args=())
    def op(x: "Tensor", scale: "float" = 2.0) -> "Tensor":
        return x * scale + bias

    assert op(torch.ones(1)).item() == 3.0


# ---- argument and return types -------------------------------------------------------------------------------------


def test_every_parameter_type_of_torch(custom_op: Any, name: str) -> None:
    seen: list[Any] = []

    @custom_op(name, mutates_args=())
    def op(
        x: Tensor,
        number: Number,
        dtype: torch.dtype,
        device: torch.device,
        ints: List[int],  # noqa: UP006
        floats: list[float],
        maybe: Optional[Tensor],  # noqa: UP045
        tensors: list[Tensor],
        holes: list[Tensor | None],
        word: str | None = None,
    ) -> Tensor:
        seen.append((number, dtype, device, ints, floats, maybe, len(tensors), len(holes), word))
        return x.clone()

    x = torch.ones(2)
    op(x, 2.5, torch.float16, torch.device("cpu"), [1, 2], [0.5], None, [x], [None, x], "w")
    assert seen[-1] == (2.5, torch.float16, torch.device("cpu"), [1, 2], [0.5], None, 1, 2, "w")


@pytest.mark.parametrize(("kind", "value"), [(int, 3), (float, 0.5), (bool, True), (Number, 2.5)])
def test_scalar_results(custom_op: Any, name: str, kind: Any, value: Any) -> None:
    def op(x: Tensor) -> Any:
        return value

    op.__annotations__ = {"x": Tensor, "return": kind}
    found = custom_op(name, op, mutates_args=())(torch.zeros(2))
    assert found == value
    assert type(found) is type(value)


def test_one_tuple_and_list_results(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def single(x: Tensor) -> tuple[Tensor]:
        return (x.clone(),)

    @custom_op(f"{name}_list", mutates_args=())
    def listed(x: Tensor) -> list[Tensor]:
        return [x.clone(), x + 1]

    x = torch.ones(2)
    found = single(x)
    assert isinstance(found, tuple)
    assert len(found) == 1
    assert [t.tolist() for t in listed(x)] == [[1.0, 1.0], [2.0, 2.0]]


def test_several_results_are_a_tuple_and_a_list_is_a_list(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return [x + 1, x + 2]

    @custom_op(f"{name}_list", mutates_args=())
    def listed(x: Tensor) -> list[Tensor]:
        return (x + 1, x + 2)

    for _ in range(2):
        assert type(pair(torch.ones(2))) is tuple
        assert type(listed(torch.ones(2))) is list


def test_none_among_several_results(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(x.numpy() + 1), None

    for call in (op, op._opoverload):
        first, second = call(torch.ones(2))
        assert first.tolist() == [2.0, 2.0]
        assert second is None


class Doubling:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    "function", [torch.sin, functools.partial(torch.mul, other=3), Doubling()], ids=["builtin", "partial", "object"]
)
def test_any_callable_under_a_schema_by_hand(custom_op: Any, name: str, function: Any) -> None:
    op = custom_op(name, function, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.ones(2)
    assert torch.equal(op(x), function(x))
    assert torch.equal(op(x=x), function(x))


# ---- mutation ------------------------------------------------------------------------------------------------------


def test_declared_writes_advance_version_counters(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"y", "z", "w"})
    def op(x: Tensor, y: Optional[Tensor], z: List[Tensor], w: List[Optional[Tensor]]) -> None:  # noqa: UP006, UP045
        return

    x, y, z, w = torch.ones(3), torch.ones(3), [torch.ones(3), torch.ones(3)], [torch.ones(3), None, torch.ones(3)]
    still, before = versions(x), versions(y, z, w)
    op(x, y, z, w)
    assert versions(x) == still
    assert all(new > old for new, old in zip(versions(y, z, w), before, strict=True))


def test_unknown_writes_count_for_every_tensor(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args="unknown", device_types="cpu")
    def op(x: Tensor, y: Optional[Tensor], z: List[Tensor], w: List[Optional[Tensor]]) -> None:  # noqa: UP006, UP045
        np.sin(x.numpy(), out=x.numpy())

    x, y, z, w = torch.ones(3), torch.ones(3), [torch.ones(3)], [torch.ones(3), None]
    before, expected = versions(x, y, z, w), x.sin()
    op(x, y, z, w)
    assert torch.allclose(x, expected)
    assert all(new > old for new, old in zip(versions(x, y, z, w), before, strict=True))


def test_an_optional_argument_written_to_may_be_left_out(custom_op: Any, name: str) -> None:
    @custom_op(name, mutates_args={"out"})
    def copy(x: Tensor, out: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        if out is None:
            return x.clone()
        out.copy_(x)
        return x.new_empty(0)

    x, out = torch.ones(3), torch.zeros(3)
    assert torch.equal(copy(x), x)
    version = out._version
    assert copy(x, out=out).numel() == 0
    assert torch.equal(out, x)
    assert out._version > version


def test_a_definition_that_mutates_does_not_warn(custom_op: Any, name: str, recwarn: pytest.WarningsRecorder) -> None:
    torch.set_warn_always(True)
    try:

        @custom_op(name, mutates_args=("x",))
        def op(x: Tensor) -> None:
            x.add_(1)
    finally:
        torch.set_warn_always(False)
    assert not recwarn.list


@pytest.mark.parametrize("body", [lambda x: x, lambda x: x.view(-1)], ids=["the input", "a view"])
@pytest.mark.parametrize("mutates", [(), ("x",)], ids=str)
def test_a_result_that_shares_memory_with_an_argument(custom_op: Any, name: str, body: Any, mutates: Any) -> None:
    def op(x: Tensor) -> Tensor:
        return body(x)

    defined = custom_op(name, op, mutates_args=mutates)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="may not alias"):
            defined(torch.ones(3))
