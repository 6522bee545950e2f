"""This module has what users' own tests use: a pytest item for each property of an operator, and Hypothesis strategies."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from opkit.contract.calls.cases import Call, Case, TensorCase
from opkit.contract.calls.specs import ArgumentSpecs, Drawing, known_names, shapes
from opkit.contract.calls.tensors import FILLS, LAYOUTS, ORDINARY, fits, layout_of

if TYPE_CHECKING:
    from opkit.contract.report.report import Report

_ARGUMENT = "opkit_property"
_CRASHES = "memory.crash"
_METHOD = "test_contract"
_SEEDS = 4


def contract(
    op: Any, *, properties: Iterable[str] | None = None, exclude: Iterable[str] = (), **options: Any
) -> Callable[..., Any]:
    """Return a test with one item for each property, such as ``test_scale[numbers.reference]``.

    Assign it to a name, or decorate a function with it, whose body then runs first in each item, with its fixtures, or
    a class, which gets a method ``test_contract``. Nothing of the operator runs until the items do.

    Args:
        op: the operator, as for :func:`opkit.check`.
        properties: only these, or these groups.
        exclude: none of these.
        options: the other arguments of :func:`opkit.check`, such as ``args`` and ``reference``; a budget is for one property.

    Raises:
        ArgumentError: a property is unknown.
        ImportError: pytest is not installed.

    >>> from opkit.testing import tensor
    >>> test_add = contract(torch.add, args=(tensor("n"), tensor("n")), reference=torch.add)  # doctest: +SKIP
    """
    import pytest

    from opkit.contract import run

    names = [prop.name for prop in run.chosen(properties, exclude)]
    parametrized = pytest.mark.parametrize(_ARGUMENT, names, ids=names)
    check_one = functools.partial(_check_one, op, options, {})

    @parametrized
    def test(opkit_property: Any) -> Any:
        if isinstance(opkit_property, type):
            return _on_class(opkit_property, parametrized, check_one)
        if callable(opkit_property):
            return parametrized(_on_function(opkit_property, check_one))
        return check_one(opkit_property)

    return test


def _on_class(decorated: type, parametrized: Callable[..., Any], check_one: Callable[[str], None]) -> type:
    def test_contract(self: Any, opkit_property: str) -> None:
        check_one(opkit_property)

    setattr(decorated, _METHOD, parametrized(test_contract))
    return decorated


def _on_function(decorated: Callable[..., Any], check_one: Callable[[str], None]) -> Callable[..., Any]:
    signature = inspect.signature(decorated)

    @functools.wraps(decorated)
    def test(*args: Any, **fixtures: Any) -> None:
        name = fixtures.pop(_ARGUMENT)
        decorated(*args, **fixtures)
        check_one(name)

    added = inspect.Parameter(_ARGUMENT, inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    return test


def _check_one(op: Any, options: dict[str, Any], crashed: dict[str, bool], name: str) -> None:
    """Check one property; fail or skip as the report says. After a crash, the properties that would crash pytest are skipped."""
    import pytest

    from opkit.contract import check

    __tracebackhide__ = True
    if crashed:
        pytest.skip(f"a call ends the process: see {_CRASHES}")
    report: Report = check(op, properties=[name], **options)
    if name == _CRASHES and report.failures:
        crashed[name] = True
    for failure in report.failures:
        script = f"\n\nThis script shows it:\n\n{failure.repro}" if failure.repro else ""
        pytest.fail(f"{report.name} breaks {failure}{script}", pytrace=False)
    for skipped in report.skipped:
        pytest.skip(skipped.reason)


# ---- strategies ----------------------------------------------------------------------------------------------------------


def make_tensor(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    fill: str = "normal",
    seed: int = 0,
    low: float | None = None,
    high: float | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return a tensor of this shape and dtype, as Hypothesis prints a failing example of :func:`tensors`.

    Raises:
        ArgumentError: a layout or a fill is unknown.

    >>> make_tensor((2, 3), layout="transposed").stride()
    (1, 2)
    """
    known_names("make_tensor(layout=...)", [layout], LAYOUTS)
    known_names("make_tensor(fill=...)", [fill], FILLS)
    return TensorCase(tuple(shape), dtype, layout, fill, seed, low, high, requires_grad).make()


def tensors(
    shape: str | Sequence[int] | SearchStrategy[Any] = "*shape",
    dtypes: torch.dtype | Iterable[torch.dtype] = torch.float32,
    *,
    layouts: Iterable[str] = ("contiguous",),
    fills: Iterable[str] = ORDINARY,
    low: float | None = None,
    high: float | None = None,
    requires_grad: bool = False,
) -> SearchStrategy[torch.Tensor]:
    """A strategy for tensors. It shrinks to the smallest sizes, the first dtype, and the first layout and fill.

    Args:
        shape: sizes, a pattern such as ``"*batch d"``, or a strategy for sizes such as :func:`shapes`.
        dtypes: the dtypes to try.
        layouts: the memory layouts to try; names of ``opkit.testing.LAYOUTS``. Those that do not fit a shape are left out.
        fills: the kinds of numbers to try; names of ``opkit.testing.FILLS``. Integers are drawn from ``low`` to ``high`` alone.
        low: the least element.
        high: the largest, which may occur too.
        requires_grad: whether those of a floating dtype require gradients.

    Raises:
        ArgumentError: a layout or a fill is unknown.

    >>> from hypothesis import find
    >>> x = find(tensors("b n", layouts=("contiguous", "transposed")), lambda x: not x.is_contiguous())
    >>> tuple(x.shape), x.stride()
    ((2, 2), (1, 2))
    """
    several = [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
    lying, filled = (
        known_names("tensors(layouts=...)", layouts, LAYOUTS),
        known_names("tensors(fills=...)", fills, FILLS),
    )

    def of(sizes: Any, dtype: torch.dtype) -> SearchStrategy[torch.Tensor]:
        floating = dtype.is_floating_point or dtype.is_complex
        return st.builds(
            make_tensor,
            shape=st.just(tuple(sizes)),
            dtype=st.just(dtype),
            layout=st.sampled_from([name for name in lying if fits(name, sizes)] or ["contiguous"]),
            fill=st.sampled_from(filled if floating else ["normal"]),
            seed=st.integers(0, _SEEDS - 1),
            low=st.just(low),
            high=st.just(high),
            requires_grad=st.just(requires_grad and floating),
        )

    return st.tuples(_shapes(shape), st.sampled_from(several)).flatmap(lambda both: of(*both))


def _shapes(shape: str | Sequence[int] | SearchStrategy[Any]) -> SearchStrategy[Any]:
    if isinstance(shape, SearchStrategy):
        return shape
    return shapes(shape) if isinstance(shape, str) else st.just(tuple(shape))


def relaid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of equal numbers in another layout; elements that share memory have the number of one of them.

    >>> relaid(torch.arange(4).view(2, 2), "transposed").stride()
    (1, 2)
    """
    found = layout_of(layout, tensor.shape)
    memory = torch.zeros(found.elements, dtype=tensor.dtype, device=tensor.device)
    view = torch.as_strided(memory, tensor.shape, found.strides, found.offset)
    index = torch.as_strided(
        torch.arange(found.elements, device=tensor.device), tensor.shape, found.strides, found.offset
    )
    plain = tensor.detach().resolve_neg().resolve_conj()
    memory[index.reshape(-1)] = (-plain if found.negated else plain).reshape(-1)
    view = torch._neg_view(view) if found.negated else view  # torch 2.13: the only way to make one of a real tensor
    return view.requires_grad_(tensor.requires_grad)


def layouts(
    given: torch.Tensor | Sequence[int], names: Iterable[str] = tuple(LAYOUTS)
) -> SearchStrategy[torch.Tensor] | SearchStrategy[str]:
    """A strategy for the layouts that a tensor or a shape can have.

    Args:
        given: a tensor, which is copied into each layout; or sizes, for which the names of layouts are drawn.
        names: the layouts to try. For a tensor, only those in which no two elements share memory are tried.

    Raises:
        ArgumentError: a layout is unknown.

    >>> from hypothesis import find
    >>> find(layouts((2, 3)), lambda name: name != "contiguous")
    'offset'
    >>> x = torch.arange(6.0).view(2, 3)
    >>> y = find(layouts(x), lambda y: not y.is_contiguous())
    >>> y.stride(), torch.equal(x, y)
    ((1, 2), True)
    """
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else tuple(given)
    fitting = [name for name in known_names("layouts(names=...)", names, LAYOUTS) if fits(name, shape)]
    if not isinstance(given, torch.Tensor):
        return st.sampled_from(fitting)
    shared = ("expanded", "expanded_last", "overlapping")
    signed = given.dtype.is_floating_point or given.dtype.is_complex
    usable = [name for name in fitting if name not in shared and (signed or name != "negated")]
    return st.builds(relaid, st.just(given), st.sampled_from(usable))


def make_call(case: Case) -> Call:
    """Return the arguments of a call, as Hypothesis prints a failing example of :func:`calls`."""
    return case.make()


def calls(
    *args: Any,
    layouts: Iterable[str] = ("contiguous",),
    fills: Iterable[str] = ORDINARY,
    **kwargs: Any,
) -> SearchStrategy[Call]:
    """A strategy for whole calls: real tensors with joint sizes and dtypes, in ``call.args`` and ``call.kwargs``.

    Args:
        args: for each positional argument a :func:`tensor`, a list of these, a Hypothesis strategy, or a value.
        layouts: the memory layouts to try.
        fills: the kinds of numbers to try.
        kwargs: the same for keyword arguments.

    Raises:
        ArgumentError: a layout or a fill is unknown.

    >>> from hypothesis import find
    >>> from opkit.contract.calls.specs import tensor
    >>> call = find(calls(tensor("b n"), tensor("n"), alpha=st.integers(0, 3)), lambda call: call.args[1].numel() > 2)
    >>> [tuple(x.shape) for x in call.args], call.kwargs
    ([(1, 3), (3,)], {'alpha': 0})
    """
    how = Drawing(
        layouts=known_names("calls(layouts=...)", layouts, LAYOUTS),
        fills=known_names("calls(fills=...)", fills, FILLS),
    )
    return st.builds(make_call, ArgumentSpecs(args, tuple(kwargs.items())).cases(how))
