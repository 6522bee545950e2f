"""An operator as compiled kernels see it: arguments and outputs as plain data (``Facts``), and the layouts of new outputs.

C kernels' parameters are bound to the facts. Their kinds follow the schema's declared types, in which a dtype is a ``ScalarType``
and not the integer that represents it.

:func:`layout_of` computes the dtypes, sizes and strides of the new outputs of one call, by running the author's fake
implementation or the reference on fake tensors. ``derivation`` derives a program from the same run on symbolic sizes, which
computes them for every call that fits it, without Python. ``opkit/kernels/include/opkit.h`` describes both forms.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.errors import ArgumentTypeError, KernelError, OpkitError, OutputError, RuleError
from opkit.kernels.facts import Argument, Facts, Output, Shape
from opkit.op import torch_private as private
from opkit.op.core import Operator
from opkit.op.layout import program as p
from opkit.op.layout import symbolic_run
from opkit.op.schema.patterns import PatternDim, TensorPattern
from opkit.op.schema.signature import field_names
from opkit.op.trace import reference_trace
from opkit.op.trace.reference_trace import OpaqueReason, ReferenceTrace

_KINDS = {
    "Tensor": "tensor",
    "List[Tensor]": "tensors",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "ScalarType": "dtype",
    "List[int]": "ints",
    "List[float]": "floats",
    "List[bool]": "bools",
}

_CARRIED = ("Device", "Layout", "MemoryFormat", "Generator")
"""Types that torch passes on, although a C function cannot take them as parameters."""


def facts_of(operator: Operator) -> Facts:
    """Return the operator's arguments and outputs as a C function takes them.

    The shape annotated for a list of tensors holds for each of them.

    Raises:
        KernelError: the operator returns something that a C kernel cannot make, such as a list of tensors.
    """
    shapes = {name: _shape(pattern) for name, pattern in patterns_of_arguments(operator).items()}
    arguments = [
        Argument(
            a.name,
            kind_of(a),
            optional=str(a.real_type).startswith("Optional["),
            written=a.alias_info is not None and a.alias_info.is_write,
            shape=shapes.get(a.name),
        )
        for a in operator.schema.arguments
    ]
    return Facts(operator.name, f"{operator.name}{operator.schema_text}", tuple(arguments), outputs_of(operator))


def check_passable(operator: Operator) -> None:
    """Refuse an operator whose calls cannot be passed to C.

    Raises:
        KernelError: it takes something that torch's C interface cannot pass, or returns a view.
    """
    for argument in operator.schema.arguments:
        if kind_of(argument) == "ignored" and declared_type(argument) not in _CARRIED:
            raise KernelError(
                f"{operator.name}: the argument {argument.name} of type {declared_type(argument)} cannot be passed to a "
                "native kernel. Let the operator take an int or a float, two floats for a complex number, or a list of "
                "tensors none of which is None."
            )
    if any(item.alias_info is not None and not item.alias_info.is_write for item in operator.schema.returns):
        raise KernelError(f"{operator.name}: it returns a view, which a native kernel cannot make.")


def kind_of(argument: Any) -> str:
    """Return the kind of a schema argument, one of ``opkit.kernels.facts.KINDS``."""
    return _KINDS.get(declared_type(argument), "ignored")


def declared_type(argument: Any) -> str:
    """Return the declared type of a schema argument or return, without ``Optional``."""
    text = str(argument.real_type)
    return text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text


def outputs_of(operator: Operator) -> tuple[Output, ...]:
    """Return the operator's outputs, called "out", or "out0", "out1", ...

    Raises:
        KernelError: one of them is not a tensor.
    """
    returns = operator.schema.returns
    patterns = operator.signature.return_patterns
    if len(patterns) != len(returns):
        patterns = (None,) * len(returns)
    for item in returns:
        if str(item.real_type) != "Tensor":
            raise KernelError(
                f"{operator.name}: a C kernel returns tensors, but the schema returns {item.real_type}. Let the operator "
                "return a tensor, or a tuple of a fixed number of tensors."
            )
    names = ["out"] if len(returns) == 1 else [f"out{i}" for i in range(len(returns))]
    return tuple(
        Output(name, _aliased(operator, item), None if pattern is None else _shape(pattern))
        for name, item, pattern in zip(names, returns, patterns, strict=True)
    )


def _aliased(operator: Operator, returned: Any) -> int | None:
    """Return the number of the argument that the schema returns as this output."""
    names = set() if returned.alias_info is None else set(returned.alias_info.before_set)
    for number, argument in enumerate(operator.schema.arguments):
        if argument.alias_info is not None and names & set(argument.alias_info.before_set):
            return number
    return None


def patterns_of_arguments(operator: Operator) -> dict[str, TensorPattern]:
    """Return the shape annotations of schema arguments that are tensors or lists of them, by name."""
    kinds = {argument.name: kind_of(argument) for argument in operator.schema.arguments}
    patterns: dict[str, TensorPattern] = {}
    for parameter in operator.signature.parameters:
        tensors = [name for name in field_names(parameter) if kinds.get(name) in ("tensor", "tensors")]
        if parameter.pattern is not None and len(tensors) == 1:  # if there are several, it is the pattern of the first
            patterns[tensors[0]] = parameter.pattern
    return patterns


def _shape(pattern: TensorPattern) -> Shape:
    sizes = [_size(dim) for dim in pattern.dims]
    at = pattern.many
    if at is None:
        return Shape(tuple(sizes))
    many = pattern.dims[at]
    return Shape(tuple(sizes[:at]), "" if many.broadcast else many.text, tuple(sizes[at + 1 :]))


def _size(dim: PatternDim) -> str | int | None:
    if dim.kind == "number":
        return dim.number
    return dim.text if dim.kind == "name" and not dim.broadcast else None


def product(sizes: Sequence[Any]) -> Any:
    """Return the product of sizes, symbolic ones too."""
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def sizes_of(facts: Facts, operands: Sequence[Any]) -> dict[str, Any]:
    """Return the value of each named size in a call."""
    found: dict[str, Any] = {}
    for argument, value in zip(facts.arguments, operands, strict=True):
        if argument.shape is None or value is None:
            continue
        for tensor in value if argument.kind == "tensors" else (value,):
            for name, size in _named(argument.shape, tensor.shape):
                found.setdefault(name, size)
    return found


def _named(shape: Shape, sizes: Sequence[Any]) -> list[tuple[str, Any]]:
    last = len(sizes) - len(shape.after)
    pairs = [*zip(shape.before, sizes, strict=False), *zip(shape.after, sizes[last:], strict=False)]
    listed = [(name, size) for name, size in pairs if isinstance(name, str)]
    return [*listed, (shape.variadic, product(sizes[len(shape.before) : last]))] if shape.variadic else listed


# ---- layouts of new outputs ------------------------------------------------------------------------------------------


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


def split_arguments(operator: Operator, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of a call from the value of each schema argument."""
    pairs = list(zip(operator.schema.arguments, values, strict=True))
    return [v for a, v in pairs if not a.kwarg_only], {a.name: v for a, v in pairs if a.kwarg_only}


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
    return [word for name, i in new for word in _layout_of_output(operator, f"its output {name}", outputs[i], device)]


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


def _layout_of_output(operator: Operator, name: str, output: Any, device: torch.device) -> list[int]:
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


# ---- allocation ------------------------------------------------------------------------------------------------------


def allocate_outputs(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return new tensors for the new outputs of a call through the schema; see :func:`layout_of`."""
    words = layout_of(operator, args, kwargs)
    device = next((tensor.device for _, tensor in operator.named_tensors(args, kwargs)), None)
    dtypes = {number: dtype for dtype, number in p.DTYPES.items()}
    outputs: list[torch.Tensor] = []
    at = 0
    while at < len(words):
        rank = words[at + 1]
        sizes, strides = words[at + 2 : at + 2 + rank], words[at + 2 + rank : at + 2 + 2 * rank]
        outputs.append(torch.empty_strided(sizes, strides, dtype=dtypes[words[at]], device=device))
        at += 2 + 2 * rank
    return outputs


def fills() -> bool:
    """Return whether torch fills what it allocates: deterministic algorithms are on, and the setting for fills is, too."""
    return private.deterministic() and private.fills_if_deterministic()


def unfilled(
    sizes: tuple[int, ...], strides: tuple[int, ...] | None, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate a dense tensor, with its device's usual allocator, whose memory is not filled.

    >>> unfilled((2, 3), None, dtype=torch.float32, device=torch.device("cpu")).stride()
    (3, 1)
    """
    if private.dispatch_modes() or not fills():
        if strides is None:
            return torch.empty(sizes, dtype=dtype, device=device)
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    storage = torch.UntypedStorage(math.prod(sizes) * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, sizes, *(() if strides is None else (strides,)))
