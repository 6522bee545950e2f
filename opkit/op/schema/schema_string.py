"""Infer the schema string of an operator with torch.library's own inference, on the flattened signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from opkit.errors import DefinitionError, DeviceArgumentError
from opkit.op import torch_private as private
from opkit.op.schema.signature import SchemaArgument, Signature

_NAME = re.compile(r"^(?P<namespace>[A-Za-z_]\w*)::(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)?)$")


def split_name(name: object) -> tuple[str, str]:
    """Return the namespace and the name of "namespace::name".

    Raises:
        DefinitionError: ``name`` has another form.
    """
    if not isinstance(name, str):
        raise DefinitionError(f"opkit.custom_op: the name must be a string, got {type(name).__name__}: {name!r}")
    if "::" not in name:
        raise DefinitionError(
            f"opkit.custom_op: the name {name!r} has no namespace. Write it as 'my_library::{name or 'my_op'}'."
        )
    match = _NAME.match(name)
    if match is None:
        raise DefinitionError(
            f"opkit.custom_op: the name {name!r} is not of the form 'namespace::name' (letters, digits and '_'), "
            "with '.overload' after it where the operator has overloads."
        )
    return match["namespace"], match["name"]


def infer(signature: Signature, mutates_args: str | Iterable[str], tags: Sequence[torch.Tag]) -> str:
    """Return the schema of a signature, such as ``(Tensor x, float eps=1e-06) -> Tensor``.

    torch.library's own inference supplies the arguments written to and the returns. It sees stand-ins for types that it does not
    know.

    Raises:
        DefinitionError: it names the parameter, the problem, and what to write.
    """
    for parameter in signature.parameters:
        if parameter.problem:
            raise DefinitionError(
                f"{signature.operator}: the parameter {parameter.name} of {signature.shown}: {parameter.problem}. A schema "
                "may be given by hand, too, with schema=."
            )
    mutates = mutates_args if isinstance(mutates_args, str) else _written(signature, mutates_args)
    options: dict[str, Any] = {"mutates_args": mutates}
    torch_infer: Any = getattr(torch.library, "infer_schema")  # noqa: B009  (its own annotations are incomplete)
    if tags and "tags" in inspect.signature(torch_infer).parameters:  # torch 2.13 and newer
        options["tags"] = tags
    _check_return(signature)
    try:
        text: str = torch_infer(_prototype(signature), **options)
    except ValueError as error:
        reason = str(error).removeprefix("infer_schema(func): ").split(" Got func with signature")[0]
        raise DefinitionError(f"{signature.operator}: {reason}") from error
    parameters, returned = text[1:].split(") -> ", 1)
    kinds = {name: kind for kind, _, name in (each.rpartition(" ") for each in parameters.split(", "))}
    keyword_only = [p for p in signature.parameters if p.keyword_only]
    positional = [a for p in signature.parameters if not p.keyword_only for a in p.arguments]
    last = max(
        (i for i, a in enumerate(positional) if a.default is None), default=-1
    )  # no argument before it may have a default
    written = [_spelled(a, kinds[a.name], i > last) for i, a in enumerate(positional)]
    written += ["*"] if keyword_only else []
    written += [_spelled(a, kinds[a.name], True) for p in keyword_only for a in p.arguments]
    return f"({', '.join(written)}) -> {returned}"


def _spelled(argument: SchemaArgument, kind: str, with_default: bool) -> str:
    default = f"={argument.default}" if with_default and argument.default is not None else ""
    return f"{kind if '!' in kind else argument.type} {argument.name}{default}"


_STAND_INS: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "Tensor?": torch.Tensor | None,
    "Tensor[]": list[torch.Tensor],
    "Tensor?[]": list[torch.Tensor | None],
}


def _prototype(signature: Signature) -> Callable[..., Any]:
    """Return a function whose parameters are the schema's arguments, with types that torch.library knows."""

    def prototype() -> None: ...

    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY if parameter.keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=_STAND_INS.get(argument.type, int),
        )
        for parameter in signature.parameters
        for argument in parameter.arguments
    ]
    returned = signature.returns.annotation if signature.returns else signature.return_annotation
    setattr(prototype, "__signature__", inspect.Signature(parameters, return_annotation=returned))  # noqa: B010
    return prototype


def _written(signature: Signature, mutates: Iterable[str]) -> list[str]:
    """Return the schema arguments of the parameters written to, which hold tensors."""
    written: list[str] = []
    for name in mutates:
        arguments = next((p.arguments for p in signature.parameters if p.name == name), ())
        tensors = [a.name for a in arguments if a.type in _STAND_INS]
        if arguments and not tensors:
            shown = inspect.formatannotation(signature.python.parameters[name].annotation)
            raise DefinitionError(
                f"{signature.operator}: mutates_args names {name}, a {shown}. An operator writes to tensors and lists of them; "
                "return what else it computes."
            )
        written += tensors or [name]
    return written


def _check_return(signature: Signature) -> None:
    def prototype() -> None: ...

    returned = signature.returns.annotation if signature.returns else signature.return_annotation
    prototype.__annotations__ = {"return": returned}
    if returned is inspect.Signature.empty:
        raise DefinitionError(
            f"{signature.operator}: {signature.shown} has no return annotation. Write what it returns, as in -> Tensor or "
            "-> tuple[Tensor, Tensor], or -> None if it returns nothing."
        )
    try:
        getattr(torch.library, "infer_schema")(prototype, mutates_args=())  # noqa: B009
    except (ValueError, TypeError):
        shown = inspect.formatannotation(signature.python.return_annotation)
        raise DefinitionError(
            f"{signature.operator}: {signature.shown} returns a {shown}, which no operator does. Return tensors, lists of them, "
            "numbers, a tuple, NamedTuple or dataclass of these, or None; what else there is, return as a tensor."
        ) from None


def check_manual(schema: str, mutates: set[str], declared: str | Iterable[str], arguments: Any) -> None:
    """Raise if a hand-written schema and ``mutates_args`` name different arguments."""
    writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    if writes != mutates:
        raise DefinitionError(
            f"Attempted to create a custom op with `mutates_args={declared}` and `schema={schema}. The schema suggests "
            f"that the op mutates {writes} which is different from what was provided to us in `mutates_args`. Please "
            "make these consistent."
        )


def device_argument(schema: Any, devices: Sequence[str | None]) -> int | None:
    """Return the position of the device argument of an operator without tensor arguments that has kernels for some device.

    Raises:
        DeviceArgumentError: it has no device argument.
    """
    if all(device is None for device in devices) or private.library_utils.has_tensor_arg(schema):
        return None
    index = private.library_utils.get_device_arg_index(schema)
    if index is None:
        raise DeviceArgumentError(
            "Functions without tensor inputs are required to have a `device: torch.device` argument, by which a kernel is chosen"
        )
    return index
