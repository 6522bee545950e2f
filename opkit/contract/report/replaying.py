"""This module has the functions that a report's scripts call: ``load`` a module from its file, ``replay`` one case."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opkit.contract import properties as table
from opkit.contract.calls.cases import Case
from opkit.contract.prop import NotApplicable, Property, Remark, Violation
from opkit.contract.subject import CallRefused, Subject, subject_of
from opkit.errors import ArgumentError

_REPEATS = {"behaviour": 20}  # a dependence on earlier calls or on other threads does not show at once


def load(name: str, path: str | Path) -> types.ModuleType:
    """Import the module in a file; code under ``if __name__ == "__main__"`` does not run.

    The module is imported by its name where that leads to this file, and otherwise from the file, whose folder is then
    searched for other modules as it is when a script runs.

    Args:
        name: the module's name in the process that wrote the script.
        path: its file.

    Raises:
        ImportError: there is no such file, nor a module of this name.
    """
    file = Path(path)
    try:
        module = importlib.import_module(name) if name != "__main__" else None
    except ImportError:
        module = None
    if module is not None and (not file.is_file() or Path(module.__file__ or "").resolve() == file.resolve()):
        return module
    if not file.is_file():
        raise ImportError(f"there is no module {name!r}, and no file {file}: change the path in load(...)")
    return _from_file(name, file)


def _from_file(name: str, file: Path) -> types.ModuleType:
    root, dotted = file.parent, [file.stem]
    while (root / "__init__.py").is_file():
        dotted.insert(0, root.name)
        root = root.parent
    sys.path.insert(0, str(root))
    if len(dotted) > 1:  # a package's modules import each other
        return importlib.import_module(".".join(part for part in dotted if part != "__init__"))
    known = f"_loaded_{file.stem}" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(known, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    spec.loader.exec_module(module)
    return module


def replay(
    op: Any,
    property: str,
    case: Case,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    device: str = "cpu",
) -> int:
    """Check one property on one case, as the scripts in ``report.failures`` do, and print the result.

    Args:
        op: the operator.
        property: its dotted name.
        case: the call.
        args: what positional arguments are drawn from, for properties that draw more than the case; by default the case's own.
        kwargs: the same by name.
        reference: a function that computes what the operator should.
        device: the device of the tensors.

    Returns:
        0 if the property holds, 1 if it fails, 2 if it cannot be checked.

    Raises:
        ArgumentError: there is no such property.

    >>> import torch
    >>> from opkit.contract.calls.cases import TensorCase
    >>> replay(torch.abs, "behaviour.deterministic", Case((TensorCase((2,)),)))
    behaviour.deterministic: the property holds for ... on (float32[2])
    0
    """
    chosen = next((each for each in table.PROPERTIES if each.name == property), None)
    if chosen is None:
        raise ArgumentError(f"replay: there is no property {property!r}.")
    positional = case.args if args is None else args
    subject = subject_of(op, positional, dict(case.kwargs) if kwargs is None else kwargs, reference, device)
    code, text = _answer(chosen, subject, case)
    print(text)
    return code


def _answer(prop: Property, subject: Subject, case: Case) -> tuple[int, str]:
    reason = prop.skip(subject)
    if reason:
        return 2, f"{prop.name} cannot be checked for {subject.name}: {reason}"
    try:
        _check(prop, subject, case)
    except Violation as violation:
        return 1, f"{prop.name}: {violation}\n  {subject.name} on {case}\n  {prop.rule}"
    except (CallRefused, NotApplicable) as error:
        return 2, f"{prop.name} cannot be checked for {subject.name} on {case}: {error}"
    return 0, f"{prop.name}: the property holds for {subject.name} on {case}"


def _check(prop: Property, subject: Subject, case: Case) -> None:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(_REPEATS.get(prop.group, 1)):
            try:
                prop.check(subject, case)
            except Remark:
                continue
