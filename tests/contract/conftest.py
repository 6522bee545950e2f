"""What tests of the contract share: one property is asked of one operator, and answers yes, no, or why not."""

import functools

import pytest
import small_properties as small

import opkit


@pytest.fixture
def asked():
    """``asked("group.rule", op, **how)``: the report of a check for this property alone, which keeps nothing on disk."""

    def ask(name, op, **how):
        return opkit.check(op, properties=[name], database=False, **how)

    return ask


@pytest.fixture
def fails(asked):
    """``fails("group.rule", op, **how)``: the failure, which there must be."""

    def ask(name, op, **how):
        report = asked(name, op, **how)
        assert [failure.property for failure in report.failures] == [name], str(report)
        return report.failures[0]

    return ask


@pytest.fixture
def holds(asked):
    """``holds("group.rule", op, **how)``: the property must be asked, and must hold."""

    def ask(name, op, **how):
        report = asked(name, op, **how)
        assert [passed.property for passed in report.passed] == [name], str(report)
        return report.passed[0]

    return ask


@pytest.fixture
def only(monkeypatch):
    """``only(properties)``: these are all properties that there are, for one test; the small ones until it is called."""

    small.use(monkeypatch)
    return functools.partial(small.use, monkeypatch)
