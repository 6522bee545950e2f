"""What a C kernel's author can ask of an operator: kinds, shapes, what is written, what is returned."""

import dataclasses
import enum
from collections.abc import Sequence

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

import opkit
from opkit.kernels.facts import KINDS, Argument, Output, Shape
from opkit.op.layout.outputs import facts_of


def facts(name, function, **options):
    return facts_of(opkit.custom_op(name, function, **options)._operator)


def by_name(found):
    return {argument.name: argument for argument in found.arguments}


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass
class Window:
    size: int
    scale: float


def every_kind(
    x: Tensor,
    xs: list[Tensor],
    maybe: Tensor | None,
    n: int,
    sizes: Sequence[int],
    eps: float,
    factors: list[float],
    flag: bool,
    flags: list[bool],
    name: str,
    dtype: torch.dtype,
    mode: Mode,
    window: Window,
    pair: tuple[int, float],
    some: tuple[int, ...],
    tensors: tuple[Tensor, Tensor],
    table: dict[str, Tensor],
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
    more: list[int] | None = None,
    other_dtype: torch.dtype | None = None,
) -> Tensor:
    return x * 2


def test_the_kind_of_each_argument(name):
    found = by_name(facts(name, every_kind, mutates_args=()))
    assert {a.kind for a in found.values()} <= set(KINDS)
    assert {argument: a.kind for argument, a in found.items()} == {
        "x": "tensor",
        "xs": "tensors",
        "maybe": "tensor",
        "n": "int",
        "sizes": "ints",
        "eps": "float",
        "factors": "floats",
        "flag": "bool",
        "flags": "bools",
        "name": "str",
        "dtype": "dtype",
        "mode": "str",
        "window_size": "int",
        "window_scale": "float",
        "pair_0": "int",
        "pair_1": "float",
        "some": "ints",
        "tensors": "tensors",
        "table_values": "tensors",
        "table_keys": "ignored",
        "generator": "ignored",
        "device": "ignored",
        "more": "ints",
        "other_dtype": "dtype",
    }
    optional = {argument for argument, a in found.items() if a.optional}
    assert optional == {"maybe", "generator", "device", "more", "other_dtype"}


def shaped(
    x: Float[Tensor, "*batch seq d"],
    w: Float[Tensor, "d 4"],
    index: Int[Tensor, "... n"],
    like: Float[Tensor, "#d _ d+1 *#batch"],
    bias: Float[Tensor, "d"] | None,
    items: list[Float[Tensor, "n d"]],
) -> tuple[Float[Tensor, "*batch d"], Tensor]:
    return x[..., 0, :] * 2, x * 2


def test_the_shapes_of_annotations(name):
    found = facts(name, shaped, mutates_args=())
    assert {argument: a.shape for argument, a in by_name(found).items()} == {
        "x": Shape((), "batch", ("seq", "d")),
        "w": Shape(("d", 4)),
        "index": Shape((), "", ("n",)),
        "like": Shape((None, None, None), "", ()),
        "bias": Shape(("d",)),
        "items": Shape(("n", "d")),
    }
    assert found.sizes == ("batch", "seq", "d", "n")
    assert found.outputs == (Output("out0", None, Shape((), "batch", ("d",))), Output("out1"))


def test_the_schema_is_whole(name):
    found = facts(name, lambda x, n=2: x * n, schema="(Tensor x, int n=2) -> Tensor", mutates_args=())
    assert (found.operator, found.schema) == (name, f"{name}(Tensor x, int n=2) -> Tensor")
    assert found.outputs == (Output("out"),)


def test_arguments_that_are_written(name):
    def accumulate(x: Tensor, total: Tensor, others: list[Tensor]) -> Tensor:
        total.add_(x)
        others[0].add_(x)
        return x * 2

    found = facts(name, accumulate, mutates_args=("total", "others"))
    assert found.arguments == (
        Argument("x", "tensor"),
        Argument("total", "tensor", written=True),
        Argument("others", "tensors", written=True),
    )
    assert found.outputs == (Output("out"),)


def test_an_operator_without_outputs(name):
    found = facts(name, lambda x: None, schema="(Tensor(a!) x) -> ()", mutates_args=("x",))
    assert found.outputs == ()


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="in-place schemas came with torch 2.13")
def test_an_output_that_is_an_argument(name):
    found = facts(
        name,
        lambda x, y: x.add_(y),
        schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)",
        mutates_args=("x",),
        tags=torch.Tag.inplace,
    )
    assert found.outputs == (Output("out", 0),)
    assert by_name(found)["x"].written


@pytest.mark.parametrize("returned", ["Tensor[]", "(Tensor, int)", "Tensor?"])
def test_what_a_c_kernel_cannot_return(name, returned):
    op = opkit.custom_op(name, lambda x: [x * 2], schema=f"(Tensor x) -> {returned}", mutates_args=())
    with pytest.raises(opkit.errors.KernelError, match=r"a C kernel returns tensors, but the schema returns") as caught:
        facts_of(op._operator)
    assert name in str(caught.value)
