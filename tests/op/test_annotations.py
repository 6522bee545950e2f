"""Every Python type that an author could write for a parameter: held in the schema, or refused by name, type and advice."""

import collections
import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, Union

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, DefinitionError, OpkitError

INF, NAN = math.inf, math.nan


class Mode(enum.Enum):
    DOUBLE = "double"
    TRIPLE = "triple"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Parts(enum.Flag):
    FIRST = 1
    LAST = 2


class Window(NamedTuple):
    left: int
    right: Optional[int] = None  # noqa: UP045


@dataclasses.dataclass(frozen=True)
class Scale:
    factor: float = 1.0
    mode: Mode = Mode.DOUBLE


@dataclasses.dataclass
class Options:
    weight: Tensor
    window: Window
    scales: tuple[float, ...] = ()
    scale: Scale = Scale()
    bias: Tensor | None = None


Rate = NewType("Rate", float)
T = torch.ones(2)
TYPES: list[tuple[Any, Any, str]] = [
    (Tensor, T, "Tensor a"),
    (Optional[Tensor], None, "Tensor? a"),  # noqa: UP045
    (Float[Tensor, "n"], T, "Tensor a"),
    (Annotated[Tensor, "first"], T, "Tensor a"),
    ("Tensor", T, "Tensor a"),
    ("list['Tensor']", [T], "Tensor[] a"),
    (typing.List[Tensor], [T, T], "Tensor[] a"),  # noqa: UP006
    (Sequence[Tensor | None], [T, None], "Tensor?[] a"),
    (list[Tensor] | None, [T], "Tensor[]? a"),
    (tuple[Tensor, Tensor], (T, T), "Tensor[] a"),
    (tuple[Tensor, ...] | None, None, "Tensor[]? a"),
    (int, 3, "SymInt a"),
    (Union[int, None], None, "SymInt? a"),  # noqa: UP007
    (float, NAN, "float a"),
    (Rate, -INF, "float a"),
    (bool, True, "bool a"),
    (str, 'quoted " \\ \n é', "str a"),
    (complex, 1 - 2j, "complex a"),
    (complex | None, None, "complex? a"),
    (int | float, 2.5, "Scalar a"),
    (Union[int, float, None], 2, "Scalar? a"),  # noqa: UP007
    (numbers.Number, 1j, "Scalar a"),
    (torch.types.Number, True, "Scalar a"),
    (list[int | float], [1, 2.5], "Scalar[] a"),
    (torch.dtype, torch.bfloat16, "ScalarType a"),
    (list[torch.dtype], [torch.int8], "ScalarType[] a"),
    (torch.device, torch.device("cpu"), "Device a"),
    (torch.layout, torch.sparse_coo, "Layout a"),
    (torch.memory_format, torch.channels_last, "MemoryFormat a"),
    (torch.memory_format | None, None, "MemoryFormat? a"),
    (torch.Generator | None, None, "Generator? a"),
    (torch.Size, torch.Size([2, 3]), "SymInt[] a"),
    (Sequence[int], [1, 2], "SymInt[] a"),
    (list[int] | None, None, "SymInt[]? a"),
    (typing.List[str], ["a", "b"], "str[] a"),  # noqa: UP006
    (Sequence[str], ["a"], "str[] a"),
    (tuple[str, ...], ("a", "b"), "str[] a"),
    (Mode, Mode.TRIPLE, "str a"),
    (Mode | None, None, "str? a"),
    (list[Mode], [Mode.DOUBLE], "str[] a"),
    (Level, Level.HIGH, "str a"),
    (Parts, Parts.FIRST | Parts.LAST, "SymInt a"),
    (Literal["sum", "mean"], "mean", "str a"),
    (Literal["sum", "mean"] | None, None, "str? a"),
    (Literal[1, 2], 2, "SymInt a"),
    (Literal["auto", False, 3], False, "str a"),
    (Window, Window(1), "SymInt a_left, SymInt? a_right"),
    (Window | None, None, "bool a_given, SymInt? a_left, SymInt? a_right"),
    (Scale, Scale(2.0, Mode.TRIPLE), "float a_factor, str a_mode"),
    (Options, Options(T, Window(1, 2), (1.0, 2.0)), "Tensor a_weight, SymInt a_window_left, SymInt? a_window_right, "),
    (tuple[int, float] | None, (1, 2.5), "bool a_given, SymInt? a_0, float? a_1"),
    (tuple[Tensor, Mode], (T, Mode.DOUBLE), "Tensor a_0, str a_1"),
    (dict[str, Tensor], {"b": T, "a": T}, "Tensor[] a_values, str[] a_keys"),
    (typing.Dict[str, float], {"b": 0.5}, "float[] a_values, str[] a_keys"),  # noqa: UP006
    (Mapping[int, str] | None, {3: "c"}, "bool a_given, str[]? a_values, SymInt[]? a_keys"),
]  # fmt: skip


def same(got: Any, want: Any) -> bool:
    if isinstance(want, Tensor):
        return isinstance(got, Tensor) and got.shape == want.shape
    if dataclasses.is_dataclass(want):
        return type(got) is type(want) and all(
            same(getattr(got, f.name), getattr(want, f.name)) for f in dataclasses.fields(want)
        )
    if isinstance(want, (list, tuple)):
        return type(got) is type(want) and len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, dict):
        return [*got] == [*want] and all(map(same, got.values(), want.values()))
    return type(got) is type(want) and (got == want or (got != got and want != want))


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for item in items for t in tensors(item)]


def operator(name: str, annotation: Any, value: Any, **default: Any) -> Any:
    """An operator that gives twice its argument and the tensors in the other one, which must be ``value``."""

    def op(x: Tensor, a: Any) -> Tensor:
        assert same(a, value), (a, value)
        return functools.reduce(torch.add, tensors(a), x * 2)

    op.__annotations__["a"] = annotation
    op.__defaults__ = tuple(default.values()) or None
    return opkit.custom_op(f"annotations::{name}", op, mutates_args=())


OPERATORS = [(operator(f"type{i}", annotation, value), value) for i, (annotation, value, _) in enumerate(TYPES)]


class Model(torch.nn.Module):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for op, value in OPERATORS[:: self.step]:
            x = op(x, value)
        return x


def test_every_type_is_held_by_the_schema_and_reaches_the_reference_and_kernels() -> None:
    x = torch.ones(2, requires_grad=True)
    for number, ((op, value), (_, _, schema)) in enumerate(zip(OPERATORS, TYPES, strict=True)):
        assert f"Tensor x, {schema}" in op.schema, op.schema
        flat, named = op._operator.signature.encode((x, value), {})
        call = getattr(torch.ops.annotations, op.name.split("::")[1])
        with torch.set_grad_enabled(number % 8 == 0):
            outputs = [op(x, value), call(*flat, **named)]
            if number % 4 == 0:
                op.register_kernel("cpu", op.reference, name="again")
                outputs += [op(x, value), call(*flat, **named)]
        for output in outputs:
            torch.testing.assert_close(output, x * 2 + len(tensors(value)))
            if output.requires_grad:
                torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], torch.full_like(x, 2.0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [28, 1])
def test_types_in_compiled_and_exported_programs(step: int) -> None:
    x, model = torch.ones(2, requires_grad=True), Model(step)
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x), torch.autograd.grad(model(x).sum(), x))
    torch.testing.assert_close(torch.export.export(model, (x.detach(),)).module()(x.detach()), model(x).detach())


DEFAULTS: list[tuple[Any, Any, str]] = [
    (int, 2**63 - 1, "SymInt a=9223372036854775807"),
    (float, 1, "float a=1."),
    (float, None, "float? a=None"),
    (float, -0.0, "float a="),
    (float, 1e308, "float a="),
    (float, INF, "float? a=None"),
    (float, -INF, "float? a=None"),
    (float, NAN, "float? a=None"),
    (float, 5e-324, "float? a=None"),
    (float | None, 0.5, "float? a=0.5"),
    (complex, 1j, "complex a="),
    (int | float, 2, "Scalar a=2"),
    (bool, False, "bool a=False"),
    (str, "plain", 'str a="plain"'),
    (str, 'a"b\\c\nd\té\0', "str a="),
    (torch.dtype, torch.float8_e4m3fn, "ScalarType a="),
    (torch.device, torch.device("cpu"), "Device a="),
    (torch.layout, torch.strided, "Layout a="),
    (torch.memory_format, torch.preserve_format, "MemoryFormat? a=None"),
    (tuple[int, ...], (1, 2), "SymInt[] a=[1, 2]"),
    (list[float], [0.5, INF], "float[]? a=None"),
    (list[int], [3], "SymInt[] a=[3]"),
    (list[str], ["x"], "str[]? a=None"),
    (dict[str, float], {"k": 0.5}, "float[] a_values=[0.5], str[]? a_keys=None"),
    (dict[str, Tensor], {}, "Tensor[]? a_values=None, str[]? a_keys=None"),
    (Mode, Mode.TRIPLE, 'str a="TRIPLE"'),
    (Literal["sum", "mean"], "sum", 'str a="sum"'),
    (Window, Window(1), "SymInt a_left=1, SymInt? a_right=None"),
    (Scale, Scale(INF), 'float? a_factor=None, str a_mode="DOUBLE"'),
    (tuple[int, float] | None, None, "bool a_given=False, SymInt? a_0=None, float? a_1=None"),
]


def test_defaults_hold_in_each_way_of_calling() -> None:
    x, ops = torch.ones(2, requires_grad=True), []
    for i, (annotation, default, schema) in enumerate(DEFAULTS):
        op = operator(f"default{i}", annotation, default, a=default)
        assert f"Tensor x, {schema}" in op.schema, op.schema
        ops += [op, getattr(torch.ops.annotations, f"default{i}")]

    def model(x: Tensor) -> Tensor:
        for op in ops:
            x = op(x)
        return x

    with torch.no_grad():
        for op in ops:
            assert op(x).tolist() == [2.0, 2.0]
    ops = [ops[13], ops[-3], *[lambda x, op=op, value=value: op(x, value) for op, value in OPERATORS[38::9]]]
    output = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], torch.full_like(x, 2.0 ** len(ops)))


def test_a_default_that_no_schema_spells_reaches_kernels_and_given_backwards() -> None:
    seen: list[Any] = []

    @opkit.custom_op("annotations::clip", mutates_args=())
    def clip(x: Tensor, high: float = INF, *, names: list[str] = ["n"]) -> Tensor:  # noqa: B006
        return x.clamp(max=high)

    @clip.register_kernel("cpu", when=lambda high, names: high > 1 and names == ["n"])
    def _(x: Tensor, high: float, *, names: list[str]) -> Tensor:
        seen.append((high, names))
        return x.clone()

    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        seen.append((inputs[1], keyword_only_inputs["names"]))

    clip.register_autograd(lambda ctx, grad: (grad, None), setup_context=setup)
    x = torch.ones(2, requires_grad=True)
    for call in (clip, torch.ops.annotations.clip, torch.ops.annotations.clip.default):
        call(x).sum().backward()
    assert seen == [(INF, ["n"])] * 6
    with pytest.raises(ArgumentTypeError, match="annotations::clip: the argument high: expected a float, got None"):
        clip(x, None)  # type: ignore[arg-type]


def test_positional_only_parameters() -> None:
    @opkit.custom_op("annotations::positional", mutates_args=())
    def positional(x: Tensor, k: float = 2.0, /, *, shift: float = 0.0) -> Tensor:
        return x * k + shift

    x = torch.ones(2)
    for call in (
        positional,
        torch.ops.annotations.positional,
        torch.compile(positional, backend="eager", fullgraph=True),
    ):
        assert call(x, 3.0, shift=1.0).tolist() == [4.0, 4.0]
    assert positional(x).tolist() == [2.0, 2.0]


# ---- refusals --------------------------------------------------------------------------------------------------------


class Plain:
    def method(self, x: Tensor) -> Tensor:
        return x


Untyped = collections.namedtuple("Untyped", "a b")
BAD_TYPES: list[tuple[Any, str]] = [
    ("Missing", r"NameError: name 'Missing' is not defined.*have them there"),
    (object, "an? object; write the type"),
    (Any, "Any; write the type"),
    (dict, r"an? dict; write dict\[str, Tensor\]"),
    (dict[str, object], "write the type"),
    (list, r"list; write the type of its items, as in list\[Tensor\]"),
    (tuple, r"tuple; write the type of its items"),
    (set[int], r"set\[int\]; pass a list"),
    (bytes, "bytes; pass a str, or a tensor"),
    (slice, "slice; pass its start, stop and step"),
    (Callable[[Tensor], Tensor], "takes no functions"),
    (typing.TypeVar("V"), "type variable"),
    (Tensor | float, "one type; take each in an argument of its own"),
    (list[int] | int, "one type"),
    (torch.nn.Parameter, "Parameter; write Tensor"),
    (torch.nn.Module, "takes no modules"),
    (np.ndarray, "ndarray; write Tensor and pass torch.from_numpy"),
    (np.float32, "float32; write int, float or bool"),
    (Plain, "Plain; pass what the operator reads of it"),
    (Untyped, "Untyped; give its fields types"),
    (list[list[int]], "pass one list of all items, and a list of the lengths"),
    (list[Plain], "Plain.*; pass what the operator reads"),
    (types.SimpleNamespace, "in arguments of their own, or in a dataclass"),
]


@pytest.mark.parametrize(("annotation", "advice"), BAD_TYPES)
def test_a_type_that_no_operator_takes(annotation: Any, advice: str) -> None:
    with pytest.raises(
        DefinitionError, match=rf"(?s)^annotations::bad: the parameter a of bad\(.*\): .*{advice}"
    ) as raised:
        operator("bad", annotation, None)
    assert "infer_schema" not in str(raised.value)


def no_annotation(x, y: int) -> Tensor:  # type: ignore[no-untyped-def]
    return x


def no_return(x: Tensor):  # type: ignore[no-untyped-def]
    return x


def returns_text(x: Tensor) -> str:
    return ""


async def later(x: Tensor) -> Tensor:
    return x


def variadic(*xs: Tensor) -> Tensor:
    return xs[0]


def keywords(x: Tensor, **more: Tensor) -> Tensor:
    return x


def wrong_default(x: Tensor, k: int = 2.5) -> Tensor:  # type: ignore[assignment]
    return x


def wrong_choice(x: Tensor, k: Literal["a", "b"] = "c") -> Tensor:  # type: ignore[assignment]
    return x


def tensor_default(x: Tensor, w: Tensor = T) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_annotation, "parameter x of .*: it has no annotation; write its type, as in x: Tensor"),
        (no_return, "has no return annotation. Write what it returns"),
        (returns_text, "returns a str, which no operator does. Return tensors"),
        (variadic, r"fixed number of arguments; take a list, as in xs: list\[Tensor\]"),
        (keywords, r"take a dictionary, as in more: dict\[str, Tensor\]"),
        (wrong_default, "its default 2.5 is not a int"),
        (wrong_choice, "its default 'c' is not a .*Literal"),
        (tensor_default, "no tensor as a default; make the default None"),
        (
            Plain.method,
            "parameter self of .*: an operator is not a method; define it of a function outside of the class",
        ),
        (Plain().method, "got the method Plain.method: define the operator of a function outside"),
        (later, "later is async, or yields. An operator returns its results when called"),
        (staticmethod(no_return), "write the decorator below @staticmethod"),
        (functools.partial(no_return), "functools.partial: write a function"),
    ],
)
def test_a_function_that_is_no_operator(function: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=rf"(?s)^annotations::bad: .*{message}") as raised:
        opkit.custom_op("annotations::bad", function, mutates_args=())
    assert "infer_schema" not in str(raised.value)


def test_what_is_written_to_must_be_a_tensor() -> None:
    def op(x: Tensor, mode: Mode) -> Tensor:
        return x.clone()

    with pytest.raises(
        DefinitionError, match=r"annotations::bad: mutates_args names mode, a .*Mode. An operator writes to tensors"
    ):
        opkit.custom_op("annotations::bad", op, mutates_args=("mode",))


def test_a_call_that_does_not_fit_names_operator_and_parameter() -> None:
    @opkit.custom_op("annotations::call", mutates_args=())
    def call(x: Tensor, y: Tensor, k: float = 2.0) -> Tensor:
        return x * y * k

    @opkit.custom_op("annotations::held", mutates_args=())
    def held(x: Tensor, window: Window, mode: Mode = Mode.DOUBLE, reduce: Literal["sum", "mean"] = "sum") -> Tensor:
        return x * window.left

    wrong: list[tuple[Callable[[], Any], type[OpkitError], str]] = [
        (lambda: call(T), ArgumentTypeError, r"annotations::call: missing a required argument: 'y'. Call it as call"),
        (lambda: call(T, T, z=1), ArgumentTypeError, "annotations::call: got an unexpected keyword argument 'z'"),
        (lambda: call(T, T, 1.0, 2.0), ArgumentTypeError, "annotations::call: too many positional arguments"),
        (lambda: held(T), ArgumentTypeError, "annotations::held: missing a required argument: 'window'"),
        (lambda: held(T, 3), ArgumentTypeError, "annotations::held: the argument window: expected a Window of 2 items, got 3"),
        (lambda: held(T, Window(1), "DOUBLE"), ArgumentTypeError, "the argument mode: expected a member of Mode, got 'DOUBLE'"),
        (lambda: held(T, Window(1), reduce="max"), ArgumentError, "held: the argument reduce must be 'sum' or 'mean', got 'max'"),
    ]  # fmt: skip
    for made, kind, message in wrong:
        with pytest.raises(kind, match=message):
            made()
    for _ in range(4):  # the guard of a later call looks at the value as well
        held(T, Window(1), reduce="mean")
    with pytest.raises(ArgumentError, match="must be 'sum' or 'mean'"):
        torch.ops.annotations.held(T, 1, None, reduce="max")
