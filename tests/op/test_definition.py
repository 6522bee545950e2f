"""Definition: schemas from annotations, checks of arguments and results, and that a failure leaves nothing behind."""

import copy
import dataclasses
import enum
import functools
import inspect
import os
import pickle
import pydoc
import typing

import fresh_process
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import (
    AliasError,
    DefinitionError,
    DtypeError,
    KeywordTensorError,
    OutputError,
    ShapeError,
)


class Mode(enum.Enum):
    """Two ways to scale."""

    DOUBLE = 2
    TRIPLE = 3


@dataclasses.dataclass
class Settings:
    """Scalars of different types."""

    shift: float = 1.0
    times: int = 2


class Pair(typing.NamedTuple):
    """One result that is always there and one that may not be."""

    first: Tensor
    second: Tensor | None


@opkit.custom_op("definition::structured")
def structured(
    x: Float[Tensor, "n"],
    parts: dict[str, Tensor],
    mode: Mode = Mode.DOUBLE,
    settings: Settings = Settings(),  # noqa: B008
    sizes: tuple[int, int] = (1, 2),
    mixed: tuple[int, float] = (1, 0.5),
) -> dict[str, Tensor]:
    scaled = x * mode.value + settings.shift * settings.times
    return {"scaled": scaled, "moved": x + sizes[1] + mixed[1] + parts["p"]}


@opkit.custom_op("definition::pair", mutates_args=())
def pair(x: Tensor, both: bool) -> Pair:
    return Pair(x * 2, x * 3 if both else None)


@opkit.custom_op("definition::maybe", mutates_args=())
def maybe(x: Tensor, there: bool) -> Tensor | None:
    return x * 2 if there else None


@opkit.custom_op("definition::many", mutates_args=())
def many(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return tuple(x + i for i in range(count))


OPS = (structured, pair, maybe, many)
KERNELS = tuple(opkit.custom_op(f"{op.name}_kernel", op.reference, mutates_args=()) for op in OPS)
for _op in KERNELS:
    _op.register_kernel("cpu", _op.reference)


def structured_results(ops: tuple[opkit.CustomOp, ...], x: Tensor) -> list[Tensor]:
    structured, pair, maybe, many = ops
    first = structured(x, {"p": x}, Mode.TRIPLE, Settings(times=3), mixed=(1, 2.0))
    return [first["scaled"], first["moved"], *pair(x, True)[:2], maybe(x, True), *many(x, 2)]  # type: ignore[misc]


def expected_results(x: Tensor) -> list[Tensor]:
    return [x * 3 + 3, x + 2 + 2 + x, x * 2, x * 3, x * 2, x, x + 1]


@pytest.mark.sweep
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kernels", [False, True])
def test_structured_arguments_and_results(compiled: bool, kernels: bool) -> None:
    ops = KERNELS if kernels else OPS
    call = functools.partial(structured_results, ops)
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, requires_grad=True)
    got, want = call(x), expected_results(x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    (grad,) = torch.autograd.grad(sum((i + 1) * t.sum() for i, t in enumerate(got)), x)
    (expected,) = torch.autograd.grad(sum((i + 1) * t.sum() for i, t in enumerate(want)), x)
    torch.testing.assert_close(grad, expected)
    _, pair, maybe, _ = ops
    assert maybe(x, False) is None
    assert pair(x, False).second is None


def test_flattened_schema() -> None:
    text = structured.schema
    for part in ("Tensor[] parts_values", "str[] parts_keys", "str mode", "float settings_shift", "SymInt[] sizes"):
        assert part in text
    assert maybe.schema.endswith("-> Tensor[]")


def test_string_annotations() -> None:
    scope: dict[str, object] = {"opkit": opkit, "Float": Float, "Tensor": Tensor, "torch": torch}
    source = (
        "from __future__ import annotations\n"
        "@opkit.custom_op('definition::stringly', mutates_args=())\n"
        "def stringly(x: Float[Tensor, 'n'], k: float = 2.0) -> Float[Tensor, 'n']:\n"
        "    return x * k\n"
    )
    exec(compile(source, "<stringly>", "exec", dont_inherit=True), scope)
    op = opkit.get("definition::stringly")
    assert op.schema == "definition::stringly(Tensor x, float k=2.) -> Tensor"
    with pytest.raises(ShapeError):
        op(torch.zeros(2, 2))


def test_every_type_of_torch_library() -> None:
    @opkit.custom_op("definition::all_types", mutates_args=())
    def all_types(
        x: Tensor,
        xs: list[Tensor],
        o: Tensor | None,
        i: int,
        f: float,
        b: bool,
        s: str,
        n: torch.types.Number,
        d: torch.dtype,
        v: torch.device,
        ints: list[int],
        floats: typing.Sequence[float],
        maybe_ints: list[int] | None = None,
        default: torch.dtype = torch.float32,
    ) -> tuple[Tensor, int, float, bool]:
        return x.to(d) + sum(ints) + len(xs) + n, i, f, b

    result = all_types(
        torch.ones(2), [torch.ones(1)], None, 3, 0.5, True, "s", 2, torch.float64, torch.device("cpu"), [1, 2], [0.1]
    )
    assert result[0].tolist() == [7.0, 7.0]
    assert result[1:] == (3, 0.5, True)


@opkit.custom_op("definition::checked")
def checked(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"], n: int = 1) -> Float[Tensor, "*batch d"]:
    """Scale ``x`` by ``w``."""
    return x * w * n


@pytest.mark.parametrize("call", [checked, lambda *a: torch.ops.definition.checked(*a)], ids=["op", "torch.ops"])
def test_annotations_are_checked_before_the_body_runs(call: typing.Any) -> None:
    for _ in range(4):  # the first call plans, later ones go by the installed guard
        call(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(ShapeError, match="definition::checked: the argument w has shape"):
        call(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(DtypeError, match=r"the argument x has dtype torch.int64"):
        call(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ShapeError, match="1 or more"):
        call(torch.zeros(()), torch.zeros(3))


def test_checks_can_be_switched_off() -> None:
    script = (
        "import opkit, torch\nfrom jaxtyping import Float\nfrom torch import Tensor\n"
        "@opkit.custom_op('off::op')\ndef op(x: Float[Tensor, 'n']) -> Float[Tensor, 'n']:\n    return x * 2\n"
        "print(op(torch.ones(1, 1)).item())"
    )
    assert fresh_process.run(["-c", script], os.environ | {"OPKIT_CHECK": "0"}).stdout.strip() == "2.0"


def test_wrong_outputs_against_their_annotation() -> None:
    @opkit.custom_op("definition::too_long", mutates_args=())
    def too_long(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return torch.cat([x, x])

    with pytest.raises(ShapeError, match="the output has shape"):
        too_long(torch.zeros(2))


def test_bad_definitions() -> None:
    for arguments, keywords, message in (
        (("no_namespace",), {}, "has no namespace"),
        (("a::b::c",), {}, "not of the form"),
        (("a b::c",), {}, "not of the form"),
        ((3,), {}, "must be a string"),
        (("bad::op", 3), {}, "takes a Python function"),
        (("bad::op", len), {}, "takes a Python function"),
        (("bad::op",), {"autocast": "half"}, "is not a policy"),
    ):
        with pytest.raises(DefinitionError, match=message):
            pytest.fail(f"{arguments}, {keywords} define {opkit.custom_op(*arguments, **keywords)}")


def untyped(x, y: int) -> Tensor:  # type: ignore[no-untyped-def]
    return x


def no_return(x: Tensor):  # type: ignore[no-untyped-def]
    return x


def bad_type(x: Tensor, y: object) -> Tensor:
    return x


def variadic(*x: Tensor) -> Tensor:
    return x[0]


def keyword_tensor(x: Tensor, *, y: Tensor) -> Tensor:
    return x


def plain(x: Tensor) -> Tensor:
    return x.clone()


def test_a_failed_definition_leaves_nothing_behind() -> None:
    for function, keywords, kind in (
        (untyped, {}, DefinitionError),
        (no_return, {}, DefinitionError),
        (bad_type, {}, DefinitionError),
        (variadic, {}, DefinitionError),
        (keyword_tensor, {}, KeywordTensorError),
        (plain, {"mutates_args": ("z",)}, DefinitionError),
        (plain, {"mutates_args": (1,)}, DefinitionError),
        (plain, {"schema": "Tensor x -> Tensor"}, DefinitionError),
        (plain, {"schema": "(Tensor(a!) x) -> Tensor"}, DefinitionError),
        (plain, {"tags": ["core"]}, DefinitionError),
        (plain, {"device_types": "toaster"}, DefinitionError),
        (plain, {"inline": "yes"}, DefinitionError),
        (plain, {"reference": 3}, DefinitionError),
        (plain, {"reference": lambda y: y}, DefinitionError),
    ):
        options = {"mutates_args": (), **keywords}
        with pytest.raises(kind):
            pytest.fail(f"{function}, {options} define {opkit.custom_op('definition::failed', function, **options)}")
        assert not hasattr(torch.ops.definition, "failed"), (function, options)
        assert "definition::failed" not in [op.name for op in opkit.operators()], (function, options)
    assert opkit.custom_op("definition::failed", plain, mutates_args=())(torch.ones(1)).item() == 1
    opkit.remove("definition::failed")


def test_bad_bodies() -> None:
    @opkit.custom_op("definition::raises", mutates_args=())
    def raises(x: Tensor) -> Tensor:
        raise KeyError("the author's own")

    @opkit.custom_op("definition::two", mutates_args=())
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone()  # type: ignore[return-value]

    @opkit.custom_op("definition::nothing", mutates_args=())
    def nothing(x: Tensor) -> Tensor:
        return None  # type: ignore[return-value]

    @opkit.custom_op("definition::alias", mutates_args=())
    def alias(x: Tensor) -> Tensor:
        return x.view(-1)

    @opkit.custom_op("definition::same", mutates_args=())
    def same(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[:1]

    x = torch.ones(2)
    for _ in range(3):
        with pytest.raises(KeyError, match="own"):
            raises(x)
        with pytest.raises(OutputError, match="returned Tensor, but the schema declares Tensor, Tensor"):
            two(x)
        with pytest.raises(OutputError, match="returned nothing"):
            nothing(x)
        with pytest.raises(AliasError, match="may not alias"):
            alias(x)
        with pytest.raises(AliasError, match="may not alias"):
            same(x)


def test_an_alias_that_depends_on_strides() -> None:
    @opkit.custom_op("definition::contiguous", mutates_args=())
    def contiguous(x: Tensor) -> Tensor:
        return x.contiguous()

    x = torch.randn(3, 3)
    for _ in range(4):
        assert contiguous(x.t()).is_contiguous()
    with pytest.raises(AliasError):
        contiguous(x)


def test_the_object() -> None:
    assert copy.copy(checked) is checked
    assert copy.deepcopy({"op": checked})["op"] is checked
    assert pickle.loads(pickle.dumps(checked)) is checked
    assert list(inspect.signature(checked).parameters) == ["x", "w", "n"]
    assert checked.__name__ == "checked"
    assert checked.__doc__ == "Scale ``x`` by ``w``."
    assert "Scale ``x`` by ``w``." in pydoc.render_doc(checked)
    assert isinstance(checked, torch._library.custom_ops.CustomOpDef)


def test_description() -> None:
    description = checked.describe()
    assert description.name == "definition::checked"
    assert description.mutates == ()
    assert description.mutation_origin == "a trace of the reference"
    assert {rule.rule: rule.origin for rule in description.rules}["vmap"] == "derived"
    assert len(description.contract_hash) == 64


def test_positional_only_like_calls_and_defaults() -> None:
    x, w = torch.ones(2, 3), torch.ones(3)
    assert checked(x, w, 2)[0, 0].item() == 2
    assert checked(x=x, w=w, n=3)[0, 0].item() == 3
    with pytest.raises((TypeError, RuntimeError)):
        checked(x)  # type: ignore[call-arg]
    with pytest.raises((TypeError, RuntimeError)):
        checked(x, w, "two")  # type: ignore[arg-type]
