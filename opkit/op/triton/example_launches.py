"""The launches that example calls of operators lead to, found without a GPU: on tensors that have no memory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from opkit.errors import OpkitError, PackageError
from opkit.op.core import Operator
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.examples import typical as typical_calls
from opkit.op.examples.arguments import ExampleCall
from opkit.op.native.function import NativeFunction
from opkit.op.triton.arguments import Values
from opkit.op.triton.examples import calls_of, values_of
from opkit.op.triton.function import TritonFunction
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import recording
from opkit.op.triton.python import PythonLaunch

OfOperator = tuple[Operator, RegisteredKernel]


@dataclasses.dataclass(frozen=True)
class ExampleLaunch:
    """One launch of a Triton kernel.

    Attributes:
        label: the operator and its kernel, for messages.
        call: the operator's call, likewise.
        example: the call, if the author gave it; "" if it was made up.
        values: the Triton kernel's values.
    """

    label: str
    call: str
    example: str
    values: Values


def launches(kernels: Sequence[OfOperator], notes: list[str]) -> Iterator[ExampleLaunch]:
    """Yield the launches of example calls of these kernels.

    Of those that are Python functions, a note says why one could not be run.

    Raises:
        PackageError: an example is no call of its operator, or none can be made up.
    """
    examples = {operator.name: _examples(operator) for operator, _ in kernels}
    for operator, kernel in kernels:
        label = f"{operator.name}[{kernel.name}]"
        if isinstance(kernel.function, TritonFunction):
            yield from _of_triton(operator, kernel.function, label)
        elif kernel.device in (None, "cuda") and _may_launch(kernel):
            yield from _of_python(operator, kernel, label, examples[operator.name], notes)


def unmade(label: str, error: OpkitError) -> PackageError:
    """Return the error of a kernel of which no example can be made."""
    return PackageError(
        f"Nothing was written, as no example of {label} could be made. Give calls in its examples=, or correct them."
        f"\n\n{error}"
    )


def _examples(operator: Operator) -> list[Mapping[str, Any]]:
    """Return what all Triton kernels of an operator name."""
    functions = [kernel.function for kernel in operator.kernels.kernels]
    return [each for f in functions if isinstance(f, TritonFunction) for each in f.examples]


def _of_triton(operator: Operator, function: TritonFunction, label: str) -> list[ExampleLaunch]:
    try:
        calls = calls_of(operator, function.examples)
        found = [(str(call), values_of(operator, function.bound, call)) for call in calls]
    except OpkitError as error:
        raise unmade(label, error) from error
    return [ExampleLaunch(label, call, call if function.examples else "", values) for call, values in found]


# ---- Python functions that launch kernels ----------------------------------------------------------------------------


def _of_python(
    operator: Operator, kernel: RegisteredKernel, label: str, examples: Sequence[Mapping[str, Any]], notes: list[str]
) -> Iterator[ExampleLaunch]:
    try:
        for call in calls_of(operator, examples):
            for values in _recorded(operator, kernel, call):
                if not values.bound.kernel.hooked:
                    yield ExampleLaunch(
                        f"{label}, {values.bound.name}", str(call), str(call) if examples else "", values
                    )
    except Exception as error:  # the author's function may do anything that tensors without memory do not bear
        notes.append(f"{label}: its launches are compiled when they are made: {type(error).__name__}: {error}")


def _recorded(operator: Operator, kernel: RegisteredKernel, call: ExampleCall) -> list[Values]:
    args, kwargs = typical_calls.arguments_of(operator, call, "meta")
    with recording() as found, torch.no_grad():
        _written_by_author(kernel)(*args, **kwargs)
    return found


def _written_by_author(kernel: RegisteredKernel) -> Any:
    return getattr(kernel.function, "__wrapped__", kernel.function)


def _may_launch(kernel: RegisteredKernel) -> bool:
    """Return whether it is a Python function in a module that has Triton kernels; no other one is run to see what it does."""
    if isinstance(kernel.function, (NativeFunction, PythonLaunch)):
        return False
    scope: Mapping[str, Any] = getattr(_written_by_author(kernel), "__globals__", {})
    return any(isinstance(value, TritonKernel) for value in scope.values())
