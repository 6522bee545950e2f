"""This module makes a pytest item for each property of an operator, as a parametrised test: pytest needs no plugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opkit.contract.report.report import Report

_ARGUMENT = "opkit_property"
_CRASHES = "memory.crash"
_METHOD = "test_contract"


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

    from opkit.contract.checking import check

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
