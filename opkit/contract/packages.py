"""This module finds the operators of a module or a whole package, and reads how their author wants them checked."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opkit.contract import check
from opkit.errors import ArgumentError
from opkit.op import registry
from opkit.op import torch_private as private
from opkit.op.operator import CustomOp

DECLARATION = "OPKIT_CHECKS"
"""The name of the dict in which a module says how its operators are checked."""

_OPTIONS = frozenset(inspect.signature(check).parameters) - {"op", "progress"}
_OPERATORS = (CustomOp, private.CustomOpDef, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_SOURCE = re.compile(r"^debug: registered at (.*):\d+$", re.MULTILINE)
_MAX_ERROR = 200  # characters of what a module raised
_TORCH = str(Path(torch.__file__).parent)
_BY_NAME = str(Path(_TORCH, "library.py"))  # the file of everything that torch.library.define registered


@dataclasses.dataclass(frozen=True)
class CheckTarget:
    """An operator to check, and the arguments of :func:`opkit.check` that its module declares for it."""

    name: str
    op: Any
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Listing:
    """The operators of a module to check, and those that are left out, with the reasons."""

    targets: tuple[CheckTarget, ...]
    left_out: Mapping[str, str]

    def named(self, module: str, names: Iterable[str]) -> Listing:
        """Return these operators alone, by their names, unqualified names or attributes of the module.

        Raises:
            ArgumentError: there is no operator of a name.
        """
        return Listing(tuple(self._named(module, name) for name in dict.fromkeys(names)), {})

    def _named(self, module: str, name: str) -> CheckTarget:
        options = {target.name: target.options for target in self.targets}
        of_name = [t for t in self.targets if name in (t.name, t.name.split("::")[-1], t.name.removesuffix(".default"))]
        if len(of_name) == 1:
            return of_name[0]
        found = getattr(sys.modules[module], name, None)
        if isinstance(found, _OPERATORS) or callable(found):
            return CheckTarget(_name_of(found, name), found, options.get(_name_of(found, name), {}))
        if name in self.left_out:
            raise ArgumentError(f"{name} is left out: {self.left_out[name]}")
        known = ", ".join(target.name for target in self.targets) or "none"
        problem = "has several operators" if of_name else "has no operator"
        raise ArgumentError(f"{module} {problem} {name!r}. Its operators: {known}.")


def registered() -> frozenset[str]:
    """Return the names of all operators that are registered with the dispatcher now."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def import_submodules(module: str) -> dict[str, str]:
    """Import the modules below a package, except ``__main__``. Return the reason for each one that cannot be imported."""
    failed: dict[str, str] = {}
    path = getattr(sys.modules[module], "__path__", None)
    for found in pkgutil.walk_packages(path, f"{module}.", lambda name: failed.setdefault(name, "")) if path else ():
        if found.name.rpartition(".")[2] != "__main__" and found.name not in failed:
            try:
                importlib.import_module(found.name)
            except (Exception, SystemExit) as error:  # the other modules are checked all the same
                text = textwrap.shorten(str(error), _MAX_ERROR, placeholder=" ...")
                failed[found.name] = f"it cannot be imported: {type(error).__name__}: {text}"
    return {name: reason or "it cannot be imported" for name, reason in failed.items()}


def listing(module: str, before: frozenset[str]) -> Listing:
    """Return the operators of an imported module, and of the modules below it.

    Args:
        module: its name.
        before: the operators that were registered before it was imported.

    Raises:
        ArgumentError: an ``OPKIT_CHECKS`` names an unknown operator, or an argument that opkit.check does not take.
    """
    found: dict[str, Any] = {}
    for name, op in [*_of_opkit(module), *_of_custom_op(module), *_of_dispatcher(module, before)]:
        found.setdefault(name, op)
    options: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for source in _modules(module):
        for key, value in _declared(source):
            name, op = _resolved(source, key, found)
            if isinstance(value, str):
                left_out[name] = value
                found.pop(name, None)
            else:
                found.setdefault(name, op)
                options[name] = value
    return Listing(tuple(CheckTarget(name, op, options.get(name, {})) for name, op in found.items()), left_out)


# ---- registered operators --------------------------------------------------------------------------------------------


def _of_opkit(module: str) -> Iterator[tuple[str, Any]]:
    for op in registry.operators():
        if _inside(str(getattr(op._operator.function, "__module__", "")), module):
            yield op.name, op


def _of_custom_op(module: str) -> Iterator[tuple[str, Any]]:
    for name, op in sorted(private.custom_ops.OPDEFS.items()):
        if _inside(str(getattr(op._init_fn, "__module__", "")), module):
            yield name, op


def _of_dispatcher(module: str, before: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield operators that the module's files define, or that were defined while it was imported, but not in Python."""
    files = {str(Path(file)) for file in (getattr(each, "__file__", None) for each in _modules(module)) if file}
    ours = {op.name for op in registry.operators()} | set(private.custom_ops.OPDEFS)
    for full in sorted(registered()):
        if full not in ours and not full.startswith(("aten::", "prim::", "prims::")):
            file = _registered_at(full)
            elsewhere = full in before or (file != _BY_NAME and file.endswith(".py")) or "/pytorch/" in file
            if file in files or not elsewhere:
                yield full, _overload(full)


def _registered_at(full: str) -> str:
    """Return the file that defined an operator; torch 2.11 to 2.13 have it in this dump alone."""
    match = _SOURCE.search(torch._C._dispatch_dump(full))
    return match[1] if match else _TORCH + ".py"  # without a schema there is nothing to check


def _overload(full: str) -> Any:
    namespace, _, rest = full.partition("::")
    name, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _inside(where: str, module: str) -> bool:
    return where == module or where.startswith(f"{module}.")


def _modules(module: str) -> list[ModuleType]:
    return [each for name, each in sorted(sys.modules.items()) if _inside(name, module) and each is not None]


# ---- OPKIT_CHECKS ----------------------------------------------------------------------------------------------------


def _declared(source: ModuleType) -> Iterator[tuple[str, Any]]:
    declared = getattr(source, DECLARATION, {})
    where = f"{source.__name__}.{DECLARATION}"
    if not isinstance(declared, Mapping):
        raise ArgumentError(f"{where} is a dict from operators' names to arguments of opkit.check, not {declared!r}.")
    for key, value in declared.items():
        if not isinstance(value, (str, Mapping)):
            raise ArgumentError(
                f"{where}[{key!r}] is a dict of arguments of opkit.check, or a text that says why it is not checked."
            )
        unknown = [] if isinstance(value, str) else sorted(set(value) - _OPTIONS)
        if unknown:
            raise ArgumentError(
                f"{where}[{key!r}]: opkit.check does not take {unknown[0]!r}. It takes {', '.join(sorted(_OPTIONS))}."
            )
        yield key, value


def _resolved(source: ModuleType, key: str, found: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the operator for a declaration's key: an operator's name, or an attribute of the module."""
    if key in found:
        return key, found[key]
    attribute = getattr(source, key, None)
    if attribute is not None:
        return _name_of(attribute, key), attribute
    if "::" in key and hasattr(getattr(torch.ops, key.split("::")[0]), key.split("::")[1].split(".")[0]):
        return key, _overload(key)
    raise ArgumentError(
        f"{source.__name__}.{DECLARATION} names {key!r}, which is no operator and no attribute of the module."
    )


def _name_of(op: Any, attribute: str) -> str:
    if isinstance(op, CustomOp):
        return op.name
    if isinstance(op, private.CustomOpDef):
        return op._qualname
    if isinstance(op, torch._ops.OpOverload):
        return str(op.name())
    return op._qualified_op_name if isinstance(op, torch._ops.OpOverloadPacket) else attribute
