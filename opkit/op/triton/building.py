"""Compile Triton kernels ahead of time, for ``opkit build``: each example, config and architecture.

The launches that example calls of operators lead to are found without a GPU, on tensors that have no memory.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from opkit.errors import OpkitError, PackageError
from opkit.kernels.aot_package import TritonBinary
from opkit.kernels.cc.progress import Progress
from opkit.kernels.triton import compiling, specialisation, targets
from opkit.kernels.tuning import records
from opkit.kernels.tuning.configs import Config, prune
from opkit.op.core import Operator
from opkit.op.dispatch.selection import RegisteredKernel
from opkit.op.examples import calls as example_calls
from opkit.op.examples.arguments import ExampleCall
from opkit.op.layout import program as p
from opkit.op.layout.outputs import allocate_outputs, operands
from opkit.op.native.function import NativeFunction
from opkit.op.triton.binding import BoundKernel
from opkit.op.triton.evaluation import as_grid, evaluate
from opkit.op.triton.function import TritonFunction
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import recording
from opkit.op.triton.python import PythonLaunch, Values
from opkit.op.triton.variants import MACHINES, Memory, Variants, in_pieces

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""The architectures for kernels without ``targets=``, where the caller names none."""


@dataclasses.dataclass(frozen=True)
class Built:
    """The result of building the Triton kernels of a package.

    Attributes:
        binaries: each with its image.
        left_out: what could not be compiled and why, one line each.
    """

    binaries: tuple[tuple[TritonBinary, bytes], ...] = ()
    left_out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Item:
    """One binary to compile. Of the items of one ``group`` some must succeed; ``relaxed`` ones need not."""

    bound: BoundKernel
    label: str
    group: tuple[str, ...]
    request: compiling.CompileRequest
    relaxed: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """A key that items share if they have the same binary."""
        return self.bound.facts.operator, self.bound.name, compiling.identity(self.request)


def build(kernels: Sequence[OfOperator], architectures: Sequence[str], jobs: int | None) -> Built:
    """Compile the Triton kernels among those of operators, and those that Python functions among them launch.

    They are compiled for their examples, or for calls generated from annotations where they have none.

    Args:
        kernels: the operators, each with one of its kernels.
        architectures: by default those that a kernel names, or ``ARCHITECTURES``.
        jobs: how many compilers run at once; by default one for each core.

    Raises:
        ArgumentError: there is no such architecture.
        PackageError: a kernel cannot be compiled for any config of an example.
    """
    chosen = tuple(dict.fromkeys(map(targets.canonical, architectures)))
    notes: list[str] = []
    items = [item for launch in launches(kernels, notes) for item in _listed(launch, chosen, notes)]
    unique = {item.key: item for item in items}
    results = dict(zip(unique, _all([item.request for item in unique.values()], jobs), strict=True))
    done = [(item, results[item.key]) for item in items]
    _check([(item, result) for item, result in done if not item.relaxed])
    failed = [(item.label, result) for item, result in done if isinstance(result, OpkitError)]
    notes += [f"{label}: {str(error).splitlines()[0]}" for label, error in failed]
    succeeded = {item.key: _entry(item, result) for item, result in done if isinstance(result, compiling.Binary)}
    return Built(tuple(succeeded.values()), tuple(dict.fromkeys(notes)))


# ---- what is to be compiled ------------------------------------------------------------------------------------------


def _listed(launch: ExampleLaunch, chosen: Sequence[str], notes: list[str]) -> list[_Item]:
    own = list(map(targets.canonical, launch.values.bound.kernel.targets))
    wanted = [each for each in chosen or own or ARCHITECTURES if each in (own or chosen or ARCHITECTURES)]
    if not wanted:
        notes.append(f"{launch.label}: it is for {', '.join(own)} alone")
    try:
        return [item for target in wanted for item in _items(launch, target, bool(chosen))]
    except OpkitError as error:
        raise unmade(launch.label, error) from error


def _items(launch: ExampleLaunch, target: str, chosen_by_user: bool) -> Iterator[_Item]:
    values, group = launch.values, (launch.label, launch.example, target if chosen_by_user else "")
    for config in configs_for(values):
        request = request_for(values, config, target)
        label = f"{launch.label}, {launch.call}{'' if config is None else f', {config.label}'}, {target}"
        yield _Item(values.bound, label, group, request)
        for relaxed in specialisation.relaxed(request):
            yield _Item(values.bound, f"{label}, for more sizes and addresses", group, relaxed, relaxed=True)


# ---- compiling -------------------------------------------------------------------------------------------------------


def _all(requests: Sequence[compiling.CompileRequest], jobs: int | None) -> list[compiling.Binary | OpkitError]:
    """Compile several at once; each result, or what went wrong, in order."""
    done = 0
    progress = Progress(lambda: f"compiled {done} of {len(requests)} binaries of Triton kernels")
    pool = ThreadPoolExecutor(jobs or _cores(), thread_name_prefix="opkit-build")
    try:
        futures = [pool.submit(_attempt, request) for request in requests]
        for done, _ in enumerate(as_completed(futures), 1):  # noqa: B007 - the line of progress reads it
            progress.tick()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
        progress.finish()


def _cores() -> int:
    counted: Callable[[int], Iterable[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(list(counted(0))) if counted is not None else os.cpu_count() or 1


def _attempt(request: compiling.CompileRequest) -> compiling.Binary | OpkitError:
    try:
        return compiling.build(request)
    except OpkitError as error:
        return error


# ---- results ---------------------------------------------------------------------------------------------------------


def _check(done: Sequence[tuple[_Item, compiling.Binary | OpkitError]]) -> None:
    """Raise if nothing of a group could be compiled."""
    succeeded = {item.group for item, result in done if not isinstance(result, OpkitError)}
    first: dict[tuple[str, ...], str] = {}
    for item, result in done:
        if isinstance(result, OpkitError) and item.group not in succeeded:
            first.setdefault(item.group, f"{item.label}: {result}")
    if first:
        messages = "\n\n".join(first.values())
        raise PackageError(f"Nothing was written, as a Triton kernel cannot be compiled.\n\n{messages}")


def _entry(item: _Item, built: compiling.Binary) -> tuple[TritonBinary, bytes]:
    form, bound = specialisation.form_of(item.request), item.bound
    return TritonBinary(bound.facts.operator, bound.name, records.triton_version(), form, built.to_json()), built.image


# ---- the launches of example calls -----------------------------------------------------------------------------------


OfOperator = tuple[Operator, RegisteredKernel]


@dataclasses.dataclass(frozen=True)
class ExampleLaunch:
    """One launch of a Triton kernel.

    Attributes:
        label: the operator and its kernel, for messages.
        call: the operator's call, likewise.
        example: the call, if the author named it; "" if it was generated.
        values: the Triton kernel's values.
    """

    label: str
    call: str
    example: str
    values: Values


def launches(kernels: Sequence[OfOperator], notes: list[str]) -> Iterator[ExampleLaunch]:
    """Yield the launches of example calls of these kernels.

    ``notes`` receives the reason for each Python function that could not be run.

    Raises:
        PackageError: an example is no call of its operator, or none can be generated.
    """
    examples = {operator.name: _examples(operator) for operator, _ in kernels}
    for operator, kernel in kernels:
        label = f"{operator.name}[{kernel.name}]"
        if isinstance(kernel.function, TritonFunction):
            yield from _of_triton(operator, kernel.function, label)
        elif kernel.device in (None, "cuda") and _may_launch(kernel):
            yield from _of_python(operator, kernel, label, examples[operator.name], notes)


def unmade(label: str, error: OpkitError) -> PackageError:
    """Return the error for a kernel for which no example can be made."""
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
        calls = example_calls.calls_of(operator, function.examples)
        found = [(str(call), values_of(operator, function.bound, call)) for call in calls]
    except OpkitError as error:
        raise unmade(label, error) from error
    return [ExampleLaunch(label, call, call if function.examples else "", values) for call, values in found]


# ---- Python functions that launch kernels ----------------------------------------------------------------------------


def _of_python(
    operator: Operator, kernel: RegisteredKernel, label: str, examples: Sequence[Mapping[str, Any]], notes: list[str]
) -> Iterator[ExampleLaunch]:
    try:
        for call in example_calls.calls_of(operator, examples):
            for values in _recorded(operator, kernel, call):
                if not values.bound.kernel.hooked:
                    yield ExampleLaunch(
                        f"{label}, {values.bound.name}", str(call), str(call) if examples else "", values
                    )
    except Exception as error:  # the author's function may do anything, and tensors without memory cannot do everything
        notes.append(f"{label}: its launches are compiled when they are made: {type(error).__name__}: {error}")


def _recorded(operator: Operator, kernel: RegisteredKernel, call: ExampleCall) -> list[Values]:
    args, kwargs = example_calls.arguments_of(operator, call, "meta")
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


# ---- compile requests ------------------------------------------------------------------------------------------------


_INT32 = 2**31


def values_of(operator: Operator, bound: BoundKernel, call: ExampleCall) -> Values:
    """Return the values of a kernel when the operator is called like an example, with tensors without data."""
    args, kwargs = example_calls.arguments_of(operator, call, "meta")
    values, new = operands(operator, args, kwargs), iter(allocate_outputs(operator, args, kwargs))
    outputs = [next(new) if output.alias is None else values[output.alias] for output in bound.facts.outputs]
    return Values(bound, values, outputs)


def configs_for(values: Values) -> Sequence[Config | None]:
    """Return the configs that a call with these values may use; a None of a kernel that has none."""
    kernel = values.bound.kernel
    return prune(kernel.configs, kernel.prune, _named(values)) if kernel.configs else (None,)


def request_for(values: Values, config: Config | None, target: str) -> compiling.CompileRequest:
    """Return the compile request of a call with these values.

    Raises:
        KernelError: one of the author's functions raised.
    """
    bound = values.bound
    named = evaluate(bound.where, bound.formulas, {**_named(values), **({} if config is None else config.values)})
    seen = [_seen(values.of(source)) for source in bound.sources]
    pieces = in_pieces(as_grid(bound.where, named["grid"]))
    return Variants(bound, MACHINES["cuda"]).request(seen, named, target, pieces)


def _named(values: Values) -> dict[str, Any]:
    return {**values.named(), **values.bound.constants}


def _seen(value: Any) -> Any:
    """Return a value as the launcher shows it, of a tensor whose memory is aligned as torch allocates it."""
    if isinstance(value, torch.Tensor):
        sizes, strides = tuple(value.shape), tuple(value.stride())
        offset = int(value.storage_offset()) * value.element_size()
        span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        return Memory(offset, p.DTYPES[value.dtype], 0, sizes, strides, large=span >= _INT32)
    return value
