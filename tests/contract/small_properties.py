"""Small properties for tests of what is done with properties: each is quick, and does what its name says."""

import types

import torch

from opkit.contract import properties as table
from opkit.contract import run, search
from opkit.contract.prop import NotApplicable, Property, Remark, Violation


def sin(x):
    """A right operator."""
    return torch.sin(x)


def sizes_over(limit):
    def check(subject, case):
        outcome = subject.run(case)
        if outcome.tensors()[0].numel() > limit:
            raise Violation(f"{outcome.tensors()[0].numel()} elements\nare more than {limit}")

    return check


def holds(subject, case):
    subject.run(case)


class Clock:
    """A clock for the search that goes on only where a property says that it takes time."""

    def __init__(self, monkeypatch, *others):
        self.now = 0.0
        for module in (run, search, *others):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def takes(self, seconds, then=lambda subject, case: None):
        def check(subject, case):
            self.now += seconds
            then(subject, case)

        return check


def remarks(subject, case):
    raise Remark("<strides> differ")


def cannot(subject, case):
    raise NotApplicable("nothing returns")


def made(name, check=holds, forked=False, **how):
    return Property(
        name,
        rule=f"The rule of {name} <holds> & is kept.",
        defect=f"the defect of {name}",
        check=check,
        forked=forked,
        **how,
    )


PROPERTIES = (
    made("memory.small", sizes_over(4)),
    made("numbers.right"),
    made("numbers.remarks", remarks),
    made("fake.none", skip=lambda subject: "there is no fake"),
    made("fake.neither", skip=lambda subject: "there is no fake"),
    made("vmap.cannot", cannot),
)


def use(monkeypatch, properties=PROPERTIES):
    """These are all properties that there are, for one test."""
    monkeypatch.setattr(table, "PROPERTIES", tuple(properties))
