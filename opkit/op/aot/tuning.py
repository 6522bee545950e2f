"""``opkit tune``: run example calls of operators, so that their Triton kernels tune themselves, and list what they chose."""

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
from opkit.op.examples import calls as example_calls
from opkit.op.examples.arguments import ExampleCall
from opkit.op.operator import CustomOp

Op = CustomOp[Any, Any]


@runtime_checkable
class Tunable(Protocol):
    """The function of a kernel that has configurations to choose from."""

    examples: Sequence[Mapping[str, Any]]

    def identities(self) -> Sequence[Identity]:
        """Return the identity under which the results of each Triton kernel that it launches are recorded."""
        ...


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """What one kernel chose in one call.

    Attributes:
        call: the call.
        choice: the configuration, its time, and the times of the others.
    """

    call: ExampleCall
    choice: Choice


def device() -> str:
    """Return the device on which kernels are tuned.

    Raises:
        ArgumentError: there is no GPU, or tuning is switched off.
    """
    if not config.get().tune:
        raise ArgumentError("OPKIT_TUNE=off forbids timing. Unset it.")
    if torch.cuda.is_available():
        return "cuda"
    raise ArgumentError(
        "torch finds no GPU, and kernels are tuned by timing them on one. Run this where there is one, or take the "
        "results of another machine with the same GPU: opkit tune --import FILE."
    )


def operators(module: str, names: Collection[str] = ()) -> list[Op]:
    """Return the operators of a module that have kernels on the GPU, or those of them in ``names``.

    Raises:
        UnknownOperatorError: one of ``names`` is no operator.
        ArgumentError: the module has none, or one of ``names`` is not the module's.
    """
    named = [registry.get(name) for name in names]
    candidates = [op for op in operators_of(module) if op._operator.kernels.serves("cuda")]
    for op in named:
        if op not in candidates:
            raise ArgumentError(f"{op._operator.name} has no kernel on the GPU, or is none of {module}'s operators.")
    if not candidates:
        raise ArgumentError(f"{module} defines no operator with a kernel on the GPU. Name the module that does.")
    return named or candidates


def calls(op: Op) -> list[ExampleCall]:
    """Return the calls for which an operator is tuned: its kernels' ``examples=``, or some generated from its annotations.

    Raises:
        ArgumentError: an example cannot be read, or no call can be generated.
    """
    operator = op._operator
    examples = [example for function in _tunable(op) for example in function.examples]
    return list({str(call): call for call in example_calls.calls_of(operator, examples)}.values())


def identities() -> dict[tuple[str, str], str]:
    """Return the hash of each kernel of this process's operators, by operator and kernel."""
    listed = [each for op in registry.operators() for function in _tunable(op) for each in function.identities()]
    return {(each.operator, each.kernel): each.hash for each in listed}


def _tunable(op: Op) -> list[Tunable]:
    functions = [kernel.function for kernel in op._operator.kernels.kernels]
    return [function for function in functions if isinstance(function, Tunable)]


def tune(call: ExampleCall, device: str, force: bool, report: Report, seed: int = 0) -> list[TuningResult]:
    """Run a call, and return what each Triton kernel in it chose: from the record, or by timing its configurations now.

    Args:
        call: the operator and its arguments.
        device: where it runs.
        force: time the configurations even if a result is recorded.
        report: called with the progress.
        seed: the seed of the numbers in the tensors.

    Raises:
        UnknownOperatorError: there is no such operator.
        ArgumentError: the operator does not take such arguments, or they cannot be made.
    """
    op = registry.get(call.operator)
    positional, named = example_calls.arguments_of(op._operator, call, device, seed)
    with torch.no_grad(), observation.observed(force, report) as choices:
        op(*positional, **named)
    once: dict[Any, Choice] = {}
    for choice in choices:
        once.setdefault((choice.identity, choice.bucket), choice)
    return [TuningResult(call, choice) for choice in once.values()]
