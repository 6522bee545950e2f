"""This module finds where a function or an operator is defined, as code that defines it again in another process."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._library import simple_registry  # read in torch 2.13

from opkit.contract.report.extraction import Extraction
from opkit.op import torch_private as private

_ALWAYS = ("torch", "torch.nn.functional", "torch.special", "torch.linalg", "torch.fft", "builtins", "math", "operator")
_BUILT_IN = ("aten", "prims", "prim", "quantized")
_TORCH = str(Path(torch.__file__).parent)
_OPKIT = str(Path(__file__).parents[2])


@dataclasses.dataclass(frozen=True)
class Origin:
    """Statements that define an object, and the expression for the object.

    Attributes:
        lines: the statements; they may use ``torch`` and ``load`` of ``opkit.testing``.
        expression: the object.
        missing: what could not be found, for the reader to fill in; "" where nothing is missing.
    """

    lines: tuple[str, ...]
    expression: str
    missing: str = ""


def origin(target: Any, name: str, extraction: Extraction) -> Origin:
    """Return the code that defines ``target`` again.

    Args:
        target: an operator or a callable.
        name: the variable for it, if it has no name of its own.
        extraction: collects the source text that has to be copied, for all objects of one script.
    """
    found = _attribute(target) or _overload(target, extraction) or _copied(target, extraction)
    return found or Origin((), name, f"{name} = ...  # {target!r}: its source was not found; import or define it here")


def function_of(target: Any) -> Any:
    """Return the Python function behind an operator, a partial or a wrapper, or None."""
    function = getattr(target, "_init_fn", None) or target
    if isinstance(function, types.MethodType):
        return None
    return function if isinstance(function, types.FunctionType) else None


def _attribute(target: Any) -> Origin | None:
    """Find the target as an attribute of a module, which is imported by name or loaded by path."""
    for module in _modules(target):
        path = _path_in(module, target)
        if path is not None:
            variable = module.__name__ if _installed(module) else _identifier(module.__name__)
            return Origin(tuple(_import(module)), f"{variable}.{path}")
    return None


def _modules(target: Any) -> Iterator[types.ModuleType]:
    function = function_of(target)
    for owner in (target, function):
        name = getattr(owner, "__module__", None)
        if isinstance(name, str) and name in sys.modules:
            yield sys.modules[name]
    if isinstance(target, torch._ops.OpOverload):
        return
    yield from (sys.modules[name] for name in _ALWAYS if name in sys.modules)


def _path_in(module: types.ModuleType, target: Any) -> str | None:
    """Return the dotted name of the object in a module."""
    qualified = getattr(target, "__qualname__", "")
    for path in (qualified, getattr(target, "__name__", "")):
        if isinstance(path, str) and path and "<" not in path and _follow(module, path) is target:
            return path
    return next((name for name, value in list(vars(module).items()) if value is target and name.isidentifier()), None)


def _follow(module: types.ModuleType, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _identifier(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name).strip("_")


def _import(module: types.ModuleType) -> list[str]:
    if _installed(module):
        return [f"import {module.__name__}"]
    return [load_statement(module)]


def load_statement(module: types.ModuleType) -> str:
    """Return a statement that loads a module from its file, under its present name if that leads to the same file."""
    return f"{_identifier(module.__name__)} = load({module.__name__!r}, {str(Path(module.__file__ or '').resolve())!r})"


def _installed(module: types.ModuleType) -> bool:
    """Whether every process finds the module by its name."""
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    if module.__name__.split(".")[0] in ("torch", "opkit"):
        return True
    inside = any(part in ("site-packages", "dist-packages") for part in Path(file).parts)
    return inside or module.__name__.split(".")[0] in sys.stdlib_module_names


def _overload(target: Any, extraction: Extraction) -> Origin | None:
    """Return an expression of ``torch.ops`` and the code that registers the operator."""
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    name = target.name() if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
    namespace, rest = name.split("::")
    default = ".default" if "." not in rest and isinstance(target, torch._ops.OpOverload) else ""
    expression = f"torch.ops.{namespace}.{rest}{default}"
    if namespace in _BUILT_IN:
        return Origin((), expression)
    definition = private.custom_ops.OPDEFS.get(name.split(".")[0])
    if definition is not None:
        found = _attribute(definition) or _copied(definition, extraction)
        return None if found is None else dataclasses.replace(found, expression=expression)
    for file, line in registrations(name):
        module = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file), None)
        if module is not None and not extraction.local(file, line):
            return Origin(tuple(_import(module)), expression)
        if extraction.around(file, line, rest.split(".")[0]):
            return Origin((), expression)
    return Origin((), expression, f"# run here what defines {name}")


def registrations(name: str) -> list[tuple[str, int]]:
    """Return the files and lines of an operator's registrations outside torch and opkit, as the dispatcher recorded them."""
    text = torch._C._dispatch_dump(name)  # torch 2.13: "CPU: registered at FILE:LINE :: ..."
    kernel = simple_registry.singleton.find(name).fake_impl.kernel
    text += f" registered at {kernel.source}" if kernel is not None else ""
    found = [(file, int(line)) for file, line in re.findall(r"registered at (\S+?\.py):(\d+)", text)]
    return [(file, line) for file, line in dict.fromkeys(found) if not file.startswith((_TORCH, _OPKIT))]


def _copied(target: Any, extraction: Extraction) -> Origin | None:
    """Copy the source text of a function, and what it uses."""
    function = function_of(target) or inspect.unwrap(target) if callable(target) else None
    if not isinstance(function, types.FunctionType):
        return None
    expression = extraction.function(function, target)
    return None if expression is None else Origin((), expression)
