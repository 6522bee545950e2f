"""This package searches for arguments on which an operator breaks its contract, shrinks them, and reports them.

======================================  ===============================================================================
modules                                 contents
======================================  ===============================================================================
the operator and the rules
``subject``                             the operator under test: its arguments, reference and overload
``prop`` ``properties/``                the definition of a property; all properties, in groups
the search
``run``                                 the work of :func:`opkit.check`: all properties, in the time that there is
``search``                              one property: its first cases, then Hypothesis
``calls/``                              a call as data, and strategies for sizes, layouts, numbers, whole calls
the parts of properties
``compare/``                            outcomes of calls, the reference in float64, tolerances, extreme numbers
``processes/``                          calls that crash, guard pages, properties in parallel
``traced/``                             fake tensors, symbolic sizes, compiled programs, gradients
the output
``report/``                             text, HTML, JSON, progress, a script for each failure, docs/contract.md
``packages`` ``user_tests``             the operators of a package; pytest items and strategies for users' tests
======================================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opkit.contract.report.report import Progress, Report


def check(
    op: Any,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    max_examples: int = 50,
    seed: int = 0,
    properties: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    budget: float | None = None,
    device: str = "cpu",
    database: bool | Path = True,
    progress: Progress | bool | None = None,
) -> Report:
    """Search for arguments on which an operator breaks its contract.

    On Linux, on the CPU, and once the operator is known to survive, properties that need neither threads nor a compiler are
    checked in forked processes, as many as there are cores, four at most: a call that crashes there is a failure like any other.

    Args:
        op: an operator of opkit's or of ``torch.library``'s, an ``OpOverload``, or any callable.
        args: for each positional argument a :func:`opkit.testing.tensor`, a list of these, a Hypothesis strategy, or a value. By
            default what the operator's annotations, or else its schema, say.
        kwargs: the same for keyword arguments.
        reference: a function that computes what ``op`` should; an operator of opkit's has its own. Without one, only properties
            that need none are checked.
        max_examples: how many examples a cheap property is tried on; those that compile take a share.
        seed: the seed of the search. Equal seeds search alike.
        properties: only these: names such as "numbers.reference", or groups such as "numbers".
        exclude: none of these.
        budget: seconds for everything; the search ends in time, with what it has, and properties without time are skipped.
        device: the device of the tensors.
        database: store failing examples in opkit's cache directory, or in this folder, and try them first the next time.
        progress: True for a bar on the terminal (stderr), or a function that is called with the name of the property that is
            checked, and the share of the work that is done, as the check goes on. By default nothing is shown.

    Raises:
        ArgumentError: ``op`` cannot be checked, its arguments cannot be inferred, or a property is unknown.

    >>> import opkit, torch
    >>> from opkit.testing import tensor
    >>> report = opkit.check(torch.add, args=(tensor("n"), tensor("n")), reference=torch.sub, properties=["numbers.reference"])
    >>> report.failures[0].property
    'numbers.reference'
    """
    from opkit.contract import run  # Hypothesis takes a while to import

    return run.run(
        op, args, kwargs, reference, max_examples, seed, properties, exclude, budget, device, database, progress
    )
