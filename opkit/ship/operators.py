"""Custom operators that a saved model calls.

Kernels in C and C++ are part of the file. Operators with other kernels must be defined where it is loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.program import Extern
from opkit.compiler.run import library
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.plan import ExecutionPlan
from opkit.errors import ModelFileError, PackageError
from opkit.kernels.aot_package import runtime_library
from opkit.op import registry
from opkit.ship.archive import Archive

_ERROR_BYTES = 1024
_OWN = ("opkit.attn.api", "opkit.attn.paged.api", "opkit.nn.functional")
"""The modules that define opkit's own operators."""

# ---- writing ---------------------------------------------------------------------------------------------------------


def add_operators(
    plan: ExecutionPlan, targets: Mapping[str, Any], isa: str, folder: str, members: dict[str, bytes]
) -> Any:
    """Add the kernels of the operators that a plan calls to the members of a file, and return what describes them as JSON."""
    called = dict.fromkeys(step.target for step in plan.steps if isinstance(step, Extern))
    described: list[dict[str, str]] = []
    for target in called:
        function = targets.get(target)
        name = private.qualified_name(function)
        if not name or private.is_torchs_own(function):
            continue
        op = registry.find(name)
        module = "" if op is None else str(getattr(op._operator.function, "__module__", ""))  # pyright: ignore[reportPrivateUsage]
        found = {"name": name, "module": module}
        path = None if op is None or plan.device != "cpu" else _library(op, isa)
        if path is not None:
            found["library"] = f"{folder}/operators/{len(described)}.so"
            members[found["library"]] = path.read_bytes()
        described.append(found)
    return described


def _library(op: Any, isa: str) -> Path | None:
    """Return the library of an operator's kernel, or None if it cannot run without Python."""
    from opkit.op.aot import package  # no model without such operators needs it

    try:
        return package.operator_library(op, isa)
    except PackageError:
        return None


def add_functions(plan: ExecutionPlan, folder: str, members: dict[str, bytes]) -> ExecutionPlan:
    """Add the libraries that opkit built of elementwise kernels to the members, and return the plan with their names in it."""
    functions: list[Callee] = []
    for number, callee in enumerate(plan.functions):
        member = f"{folder}/functions/{number}.so"
        if callee.run_parameters:
            members[member] = Path(library.callee_path(callee.library)).read_bytes()
            functions.append(dataclasses.replace(callee, library=member))
        else:
            functions.append(callee)
    return dataclasses.replace(plan, functions=tuple(functions))


# ---- reading ---------------------------------------------------------------------------------------------------------


def define(archive: Archive, described: Mapping[str, str]) -> None:
    """Define an operator that the file has the kernel of, unless this process knows it.

    Raises:
        ModelFileError: it is not known, and the file does not have its kernel.
    """
    name, module = described["name"], described["module"]
    for own in _OWN if name.startswith("opkit::") else ():
        if not private.has_operator(name):
            importlib.import_module(own)
    if private.has_operator(name):
        return
    if "library" not in described:
        where = f"Import {module}, which defines it, first." if module else "Import the package that defines it first."
        raise ModelFileError(
            f"opkit.load: {archive.path} calls the operator {name}, whose kernel is not in the file. {where}"
        )
    with library.as_file(archive.read(described["library"])) as path:
        _register(archive, path)


def _register(archive: Archive, path: str) -> None:
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    if ctypes.CDLL(str(runtime_library())).opkit_register(path.encode(), error, ctypes.c_size_t(_ERROR_BYTES)):
        raise ModelFileError(f"opkit.load: {archive.path}: {error.value.decode(errors='replace')}")


def with_functions(archive: Archive, plan: ExecutionPlan) -> ExecutionPlan:
    """Load the libraries of elementwise kernels, and return the plan with the files that they were loaded from."""
    functions: list[Callee] = []
    for callee in plan.functions:
        if callee.run_parameters:
            with library.as_file(archive.read(callee.library)) as path:
                library.load_callee(path)
            functions.append(dataclasses.replace(callee, library=path))
        else:
            functions.append(callee)
    return dataclasses.replace(plan, functions=tuple(functions))
