"""Compute the dtypes, sizes and strides of an operator's new outputs, for kernels that write to allocated outputs.

:func:`layout_of` computes them for one call, by running the author's fake implementation or the reference on fake
tensors. ``derivation`` derives a program from the same run on symbolic sizes, which computes them for every call that fits it,
without Python. ``opkit/kernels/include/opkit.h`` describes both forms.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkit.errors import ArgumentTypeError, OpkitError, OutputError, RuleError
from opkit.kernels.facts import Facts
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.layout import program as p
from opkit.op.layout import symbolic_run
from opkit.op.schema_facts import declared_type, facts_of
from opkit.op.trace import reference_trace
from opkit.op.trace.reference_trace import OpaqueReason, ReferenceTrace


def operands(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the value of each schema argument of a call, defaults filled in."""
    values: list[Any] = []
    for number, argument in enumerate(operator.schema.arguments):
        if argument.name in kwargs:
            values.append(kwargs[argument.name])
        elif number < len(args) and not argument.kwarg_only:
            values.append(args[number])
        else:
            values.append(_default(operator, argument))
    return values


def _default(operator: Operator, argument: Any) -> Any:
    if not argument.has_default_value():
        raise ArgumentTypeError(f"{operator.name}: the argument {argument.name} is missing and has no default.")
    value = argument.default_value
    if declared_type(argument) == "ScalarType" and isinstance(value, int):
        return next((dtype for dtype, number in p.DTYPES.items() if number == value), value)
    return value


def layout_of(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the dtype, rank, sizes and strides of each new output of a call through the schema.

    Raises:
        RuleError: the sizes are not known: the body leaves torch and no fake implementation is registered, or they
            depend on data.
        OutputError: a C kernel cannot write to an output.
        KernelError: the operator returns a list of tensors.
    """
    new = new_outputs(facts_of(operator))
    if not new:
        return []
    trace = symbolic_run.isolated(lambda: _trace(operator, args, kwargs))
    if trace.opaque is not None:
        raise _unknown(operator, args, kwargs, trace.opaque)
    device = output_device(operator, args, kwargs)
    outputs = list_outputs(operator, trace.outputs)
    return [word for name, i in new for word in _layout(operator, f"its output {name}", outputs[i], device)]


def new_outputs(facts: Facts) -> list[tuple[str, int]]:
    return [(output.name, i) for i, output in enumerate(facts.outputs) if output.alias is None]


def _trace(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> ReferenceTrace:
    with torch.inference_mode(False), private.without_fake_tensor_logs():
        if operator.registered.fake is None:
            return operator.traced(args, kwargs)
        return reference_trace.trace(shape_function(operator), args, kwargs)


def shape_function(operator: Operator) -> Callable[..., Any]:
    """Return the function that returns the outputs when it runs on fake tensors: fake implementation or reference."""
    if operator.registered.fake is None:
        return operator.reference
    return private.in_fake_context(operator.flat(operator.registered.fake), operator.overload)


def _unknown(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], opaque: OpaqueReason) -> OpkitError:
    function = getattr(operator.function, "__name__", "op")
    if operator.registered.fake is not None:
        return RuleError(
            f"{operator.name}: the output sizes of this call are not known, because the fake implementation failed: "
            f"{opaque}. Correct what is registered with `{function}.register_fake`."
        )
    error = RuleError(
        f"{operator.name}: the output sizes of this call are not known, and a C kernel needs allocated outputs: {opaque}. "
        f"Register a fake implementation with `{function}.register_fake`."
    )
    operator.known_trace(args, kwargs)  # the note reads it
    error.add_note(operator.opaque_note("output sizes", "register_fake"))
    return error


def output_device(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    first = next((tensor for _, tensor in operator.named_tensors(args, kwargs)), None)
    return torch.device(operator.device(args, kwargs)) if first is None else first.device


def list_outputs(operator: Operator, returned: Any) -> list[Any]:
    count = len(operator.schema.returns)
    outputs = [returned] if count == 1 else list(returned) if isinstance(returned, (tuple, list)) else [returned]
    if len(outputs) != count:
        raise OutputError(f"{operator.name}: {len(outputs)} outputs where the schema has {count}.")
    return outputs


def checked_output(operator: Operator, name: str, output: Any, device: torch.device) -> torch.Tensor:
    """Return ``output`` if it is a strided tensor on the call's device, of a dtype that C kernels know."""
    if not isinstance(output, torch.Tensor):
        raise OutputError(f"{operator.name}: {name} is {type(output).__name__}, but a C kernel writes to tensors.")
    if output.layout is not torch.strided:
        raise OutputError(
            f"{operator.name}: {name} has the layout {output.layout}, but a C kernel writes to dense tensors. Return its "
            "parts as tensors, and put them together outside of the operator."
        )
    if output.dtype not in p.DTYPES:
        raise OutputError(
            f"{operator.name}: {name} has dtype {output.dtype}, for which C kernels have no element type. Return "
            f"another dtype, and convert outside of the operator."
        )
    indices: set[int | None] = {output.device.index, device.index}
    if output.device.type != device.type or not (None in indices or len(indices) == 1):
        raise OutputError(
            f"{operator.name}: {name} is on {output.device}, but the call is on {device}, where a C kernel makes its "
            f"outputs. Return it on the device of the arguments."
        )
    return output


def _layout(operator: Operator, name: str, output: Any, device: torch.device) -> list[int]:
    tensor = checked_output(operator, name, output, device)
    sizes, strides = ([_known(operator, name, n) for n in ns] for ns in (tensor.shape, tensor.stride()))
    if _overlaps(sizes, strides):
        raise OutputError(
            f"{operator.name}: {name} has shape {tuple(sizes)} and strides {tuple(strides)}, so that elements share "
            "memory, but a C kernel writes to each. Return it .contiguous() from the reference."
        )
    return [p.DTYPES[tensor.dtype], len(sizes), *sizes, *strides]


def _known(operator: Operator, name: str, size: Any) -> int:
    if isinstance(size, torch.SymInt):
        known = size.node.maybe_as_int()
        if known is None:
            raise RuleError(
                f"{operator.name}: the sizes of {name} depend on the data of the arguments, and a C kernel needs its "
                "outputs allocated before it runs. Return a tensor of the greatest possible size and, as a second output, how "
                "much of it counts."
            )
        return known
    return int(size)


def _overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements may share memory; only the strides of permuted dense tensors prove that they do not."""
    extent = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < extent:
            return 0 not in sizes
        extent += (size - 1) * stride
    return False
