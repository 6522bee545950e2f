"""This module finds whether an operator's results depend on random numbers, and from which generator they come."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import hypothesis
import torch
from hypothesis import errors as hypothesis_errors

from opkit.contract.calls.cases import Case, TensorCase
from opkit.contract.compare.rounding import difference, observe, seed_torch
from opkit.contract.prop import CallRefused, NotApplicable, Violation
from opkit.contract.subject import Subject

_SEEDS = (1, 2, 3, 4, 5)
_EXAMPLES = 16


def is_random(subject: Subject, case: Case) -> bool:
    """Return whether the results of this case follow torch's seed: equal for equal seeds, different for others.

    The subject caches the answer by flags and scalars, so that a second query costs nothing.

    Raises:
        CallRefused: the operator raised.
    """
    known: dict[str, bool] = _cache(subject).setdefault("flags", {})
    flags = _flags(case)
    if flags not in known:
        random, certain = _follows_seed(subject, case)
        if not certain:
            return random
        known[flags] = random
    return known[flags]


def ever_random(subject: Subject) -> bool:
    """Return whether the results of any of a few examples depend on torch's seed."""
    cache = _cache(subject)
    if "ever" not in cache:
        cache["ever"] = _search(subject)
    return cache["ever"]


def _cache(subject: Subject) -> dict[str, Any]:
    return subject.__dict__.setdefault("_randomness", {})  # a frozen dataclass caches as functools.cached_property does


def _flags(case: Case) -> str:
    """Return the case without its tensors' sizes and numbers: the part that decides whether an operator draws."""
    values = [value for value in (*case.args, *case.kwargs) if not isinstance(value, (TensorCase, list))]
    return repr((values, any(0 in tensor.shape for tensor in case.tensors())))


def _follows_seed(subject: Subject, case: Case) -> tuple[bool, bool]:
    """Return whether the case is random, and whether the answer holds for other cases with the same flags."""
    first = observe(subject, case, seed=0).detached()
    drawn = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(0).get_state())
    second = observe(subject, case, seed=1).detached()
    if not difference(first, second):
        if not drawn:
            return False, True
        return any(difference(first, observe(subject, case, seed=seed)) for seed in _SEEDS), False
    return not difference(observe(subject, case, seed=0), first), True


def _search(subject: Subject) -> bool:
    found = False

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=_EXAMPLES, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck.__members__.values()], verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(subject.spec.cases())
    def look(case: Case) -> None:
        nonlocal found
        try:
            found = found or is_random(subject, case)
        except CallRefused:
            hypothesis.reject()

    try:
        look()
    except hypothesis_errors.Unsatisfiable:
        return False
    return found


def check_random(subject: Subject, case: Case) -> None:
    """Check that random results come from torch's generator, and advance it.

    Raises:
        Violation: they do not.
        NotApplicable: there are none.
    """
    if not ever_random(subject):
        raise NotApplicable("its results do not depend on torch's random numbers")
    if not is_random(subject, case):
        return
    first = observe(subject, case, seed=0).detached()
    again = observe(subject, case, seed=0)
    if found := difference(again, first):
        raise Violation(f"torch.manual_seed(0) before each of two calls does not make them equal: {found}. {_DRAW}")
    if not any(difference(observe(subject, case, seed=seed), first) for seed in _SEEDS):
        return  # too few elements to tell
    seed_torch(subject, 0)
    following = subject.call(case.make(subject.device)).detached()
    if not any(difference(subject.call(case.make(subject.device)), following) for _ in _SEEDS):
        raise Violation(
            f"calls one after another return the same random numbers: they do not advance the generator. {_DRAW}"
        )


_DRAW = "Draw from torch's own generator: torch.rand, Tensor.bernoulli_, or a seed from torch.randint."
