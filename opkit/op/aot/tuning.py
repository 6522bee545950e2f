"""``opkit tune``: example calls of operators, run so that their Triton kernels tune themselves, and what they chose."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from opkit import config
from opkit.errors import ArgumentError
from opkit.kernels.tuning import observation
from opkit.kernels.tuning.observation import Choice, Report
from opkit.kernels.tuning.record_format import Identity
from opkit.op import registry
from opkit.op.aot.package import operators_of
from opkit.op.examples import typical as typical_calls
from opkit.op.examples.arguments import CallSpec
from opkit.op.operator import CustomOp

Op = CustomOp[Any, Any]


@runtime_checkable
class Tunable(Protocol):
    """The function of a kernel that has configurations to choose from."""

    examples: Sequence[Mapping[str, Any]]

    def identities(self) -> Sequence[Identity]:
        """Each Triton kernel that it launches, as its results are recorded."""
        ...


@dataclasses.dataclass(frozen=True)
class Result:
    """What one kernel chose in one call.

    Attributes:
        call: the call.
        choice: the configuration, what it took, and what the others took.
    """

    call: CallSpec
    choice: Choice


def device() -> str:
    """Where kernels are tuned.

    Raises:
        ArgumentError: there is no GPU, or tuning is switched off.
    """
    if not config.get().tune:
        raise ArgumentError("OPKIT_TUNE=off says that nothing is to be timed. Unset it.")
    if torch.cuda.is_available():
        return "cuda"
    raise ArgumentError(
        "torch finds no GPU, and kernels are tuned by timing them on one. Run this where there is one, or take the "
        "results of another machine with the same GPU: opkit tune --import FILE."
    )


def operators(module: str, names: Collection[str] = ()) -> list[Op]:
    """The operators of a module that have kernels on the GPU, or those of them that are named.

    Raises:
        UnknownOperatorError: one of ``names`` is no operator.
        ArgumentError: the module has none, or one of ``names`` is not the module's.
    """
    named = [registry.get(name) for name in names]
    found = [op for op in operators_of(module) if op._operator.kernels.serves("cuda")]
    for op in named:
        if op not in found:
            raise ArgumentError(f"{op._operator.name} has no kernel on the GPU, or is none of {module}'s operators.")
    if not found:
        raise ArgumentError(f"{module} defines no operator with a kernel on the GPU. Name the module that does.")
    return named or found


def calls(op: Op) -> list[CallSpec]:
    """The calls for which an operator is tuned: its kernels' ``examples=``, or some made up from its annotations.

    Raises:
        ArgumentError: an example cannot be read, or nothing can be made up.
    """
    operator = op._operator
    examples = [example for function in _tunable(op) for example in function.examples]
    if not examples:
        return typical_calls.made_up(operator)
    return list({str(call): call for call in typical_calls.given(operator, examples)}.values())


def identities() -> dict[tuple[str, str], str]:
    """The hash of each kernel of the operators of this process, by operator and kernel."""
    listed = [each for op in registry.operators() for function in _tunable(op) for each in function.identities()]
    return {(each.operator, each.kernel): each.hash for each in listed}


def _tunable(op: Op) -> list[Tunable]:
    functions = [kernel.function for kernel in op._operator.kernels.kernels]
    return [function for function in functions if isinstance(function, Tunable)]


def tune(call: CallSpec, device: str, force: bool, report: Report, seed: int = 0) -> list[Result]:
    """Run a call, and list what each Triton kernel in it chose: by the record, or by timing its configurations now.

    Args:
        call: the operator and its arguments.
        device: where it runs.
        force: time them whatever is recorded.
        report: told how far it is.
        seed: of the numbers in the tensors.

    Raises:
        UnknownOperatorError: there is no such operator.
        ArgumentError: the operator does not take such arguments, or they cannot be made.
    """
    op = registry.get(call.operator)
    positional, named = typical_calls.arguments_of(op._operator, call, device, seed)
    with torch.no_grad(), observation.observed(force, report) as choices:
        op(*positional, **named)
    once: dict[Any, Choice] = {}
    for choice in choices:
        once.setdefault((choice.identity, choice.bucket), choice)
    return [Result(call, choice) for choice in once.values()]
