"""Convert an operator's schema and annotations into plain data (``Facts``), to which C kernels' parameters are bound.

The kinds follow the schema's declared types, in which a dtype is a ``ScalarType`` and not the integer that represents it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from opkit.errors import KernelError
from opkit.kernels.facts import Argument, Facts, Output, Shape
from opkit.op.core import Operator
from opkit.op.schema.patterns import PatternDim, TensorPattern
from opkit.op.schema.signature import field_names

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
