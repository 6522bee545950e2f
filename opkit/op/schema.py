"""The schema string of an operator, by torch.library's own inference on a flattened signature."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from opkit.errors import DefinitionError, DeviceArgumentError
from opkit.op import torch_private as private
from opkit.op.signature import Parameter, Signature, field_names

_NAME = re.compile(r"^(?P<namespace>[A-Za-z_]\w*)::(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)?)$")


def split_name(name: object) -> tuple[str, str]:
    """The namespace and the name of "namespace::name".

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


def infer(
    function: Callable[..., Any],
    signature: Signature,
    mutates_args: str | Iterable[str],
    tags: Sequence[torch.Tag],
) -> str:
    """The schema of ``function``, such as ``(Tensor x, float eps=1e-06) -> Tensor``.

    Raises:
        ValueError: as ``torch.library.infer_schema`` raises it.
    """
    options: dict[str, Any] = {"mutates_args": mutates_args}
    torch_infer: Any = getattr(torch.library, "infer_schema")  # noqa: B009  (its own annotations are incomplete)
    if tags and "tags" in inspect.signature(torch_infer).parameters:  # torch 2.13 and newer
        options["tags"] = tags
    prototype, spellings = _prototype(function, signature)
    text = torch_infer(prototype, **options)
    for found, spelling in spellings:
        text = text.replace(found, spelling)
    return text


def _prototype(function: Callable[..., Any], signature: Signature) -> tuple[Callable[..., Any], list[tuple[str, str]]]:
    plain = [p.annotation for p in signature.parameters] == [p.annotation for p in signature.python.parameters.values()]
    if plain and not signature.flattened and not any(signature.return_patterns):
        return function, []
    assert isinstance(function, types.FunctionType)
    prototype = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, None, function.__closure__
    )
    parameters: list[inspect.Parameter] = []
    spellings: list[tuple[str, str]] = []
    for parameter in signature.parameters:
        parameters.extend(_flat(parameter, signature))
        spellings.extend(_spellings(parameter))
    returned = signature.returns.annotation if signature.returns else signature.return_annotation
    setattr(prototype, "__signature__", _ordered(parameters, returned))  # noqa: B010
    return prototype, spellings


def _flat(parameter: Parameter, signature: Signature) -> list[inspect.Parameter]:
    kind = signature.python.parameters[parameter.name].kind
    if parameter.codec is None:
        return [inspect.Parameter(parameter.name, kind, default=parameter.default, annotation=parameter.annotation)]
    defaults = [inspect.Parameter.empty] * len(parameter.codec.fields)
    if not parameter.required:
        defaults = list(parameter.codec.encode(parameter.default))
    return [
        inspect.Parameter(name, kind, default=default, annotation=field.annotation)
        for name, field, default in zip(field_names(parameter), parameter.codec.fields, defaults, strict=True)
    ]


def _ordered(parameters: list[inspect.Parameter], returned: Any) -> inspect.Signature:
    # A list has no default in a schema that infer_schema would write; such arguments are always passed.
    plain = [
        p.replace(default=inspect.Parameter.empty) if isinstance(p.default, (list, tuple, dict)) else p
        for p in parameters
    ]
    last_required = max(
        (i for i, p in enumerate(plain) if p.default is p.empty and p.kind != p.KEYWORD_ONLY), default=-1
    )
    fixed = [
        p.replace(default=p.empty) if i < last_required and p.kind != p.KEYWORD_ONLY else p for i, p in enumerate(plain)
    ]
    return inspect.Signature(fixed, return_annotation=returned)


def _spellings(parameter: Parameter) -> list[tuple[str, str]]:
    if parameter.codec is None:
        return []
    written = {"str[]": "SymInt[]", "Generator?": "str?"}
    return [
        (f"{written[field.spelling]} {name}", f"{field.spelling} {name}")
        for name, field in zip(field_names(parameter), parameter.codec.fields, strict=True)
        if field.spelling
    ]


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
    """Where an operator without tensor arguments takes its device, if it has kernels of its own for some device.

    Raises:
        DeviceArgumentError: it has no such argument.
    """
    if all(device is None for device in devices) or private.library_utils.has_tensor_arg(schema):
        return None
    index = private.library_utils.get_device_arg_index(schema)
    if index is None:
        raise DeviceArgumentError(
            "Functions without tensor inputs are required to have a `device: torch.device` argument, by which a kernel is chosen"
        )
    return index
