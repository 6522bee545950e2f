"""Custom operators that a saved model calls.

Kernels in C and C++ are part of the file. Operators with other kernels must be defined where it is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.program import Extern
from opkit.compiler.run import library
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.plan import ExecutionPlan
from opkit.errors import ModelFileError, OpkitError
from opkit.op import registry
from opkit.op.torch_private import hidden_operator
from opkit.ship.archive import Archive

if TYPE_CHECKING:
    from opkit.compiler.capture.conversion import Captured

_NAMESPACE = "opkit_file"
_count = itertools.count()
_OWN = ("opkit.attn.api", "opkit.attn.paged.api", "opkit.nn.functional")
"""The modules that define opkit's own operators."""

# ---- writing ---------------------------------------------------------------------------------------------------------


def add_operators(
    plan: ExecutionPlan, captured: Captured, graph: fx.Graph, isa: str, folder: str, members: dict[str, bytes]
) -> Any:
    """Add the kernels of the operators that the plan of a graph calls to the members of a file.

    Return what describes them as JSON.
    """
    called = dict.fromkeys(step.target for step in plan.steps if isinstance(step, Extern))
    described: list[dict[str, str]] = []
    for target in called:
        function = captured.targets.get(target)
        name = private.qualified_name(function)
        if not name or private.is_torchs_own(function):
            continue
        op = registry.find(name)
        module = "" if op is None else str(getattr(op._operator.function, "__module__", ""))  # pyright: ignore[reportPrivateUsage]
        found = {"name": name, "module": module}
        nodes = [node for node in graph.nodes if node.target is function]
        path = None if op is None or plan.device != "cpu" else _library(op, nodes, isa)
        if op is not None and path is not None:
            found |= {"target": target, "schema": op._operator.schema_text}  # pyright: ignore[reportPrivateUsage]
            found["library"] = f"{folder}/operators/{len(described)}.so"
            members[found["library"]] = path.read_bytes()
        described.append(found)
    return described


def _library(op: Any, nodes: Sequence[fx.Node], isa: str) -> Path | None:
    """Return the library of the kernel that an operator's calls run, or None if they need Python or a compiler."""
    from opkit.op.aot import calls  # no model without such operators needs it

    try:
        return calls.library(nodes, op._operator, isa)
    except (calls.NeedsPython, OpkitError):
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


@dataclasses.dataclass(frozen=True)
class FileOperators:
    """The operators whose kernels a file has.

    They are torch's under names of their own: neither other files nor the operators of this process change them.

    Attributes:
        functions: the operators, by the target that a plan calls.
        registrations: what torch knows them by; they must live as long as they are called.
    """

    functions: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    registrations: list[Any] = dataclasses.field(default_factory=list[Any])

    def add(self, archive: Archive, described: Mapping[str, str]) -> None:
        """Add the operator that a plan calls; one whose kernel is not in the file must be known.

        Raises:
            ModelFileError: it is not, or the kernel cannot be loaded.
        """
        if "library" in described:
            self._add_kernel(archive, described)
        else:
            _check_known(archive, described["name"], described["module"])

    def _add_kernel(self, archive: Archive, described: Mapping[str, str]) -> None:
        from opkit import _core

        with library.as_file(archive.read(described["library"])) as path:
            try:
                kernel = _core.KernelLibrary(str(path))
            except RuntimeError as error:
                raise ModelFileError(f"opkit.load: {archive.path}: {error}") from error
        name = re.sub(r"\W", "_", f"{described['name']}_{next(_count)}")
        fragment = torch.library.Library(_NAMESPACE, "FRAGMENT")
        fragment.define(name + described["schema"])
        fragment.impl(name, torch.library.fallthrough_kernel, "Autograd")
        self.registrations.extend([fragment, kernel.register(f"{_NAMESPACE}::{name}", "CPU", False)])
        self.functions[described["target"]] = hidden_operator(f"{_NAMESPACE}::{name}")


def _check_known(archive: Archive, name: str, module: str) -> None:
    for own in _OWN if name.startswith("opkit::") else ():
        if not private.has_operator(name):
            importlib.import_module(own)
    if not private.has_operator(name):
        where = f"Import {module}, which defines it, first." if module else "Import the package that defines it first."
        raise ModelFileError(
            f"opkit.load: {archive.path} calls the operator {name}, whose kernel is not in the file. {where}"
        )


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
