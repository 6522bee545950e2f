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

from opkit.compiler.ir.dtypes import DTYPES
from opkit.compiler.ir.expr import Callee
from opkit.compiler.ir.program import Buffer, Extern
from opkit.compiler.run import library
from opkit.compiler.run import torch_private as private
from opkit.compiler.run.driver import dtype
from opkit.compiler.run.plan import ExecutionPlan
from opkit.errors import ModelFileError, OpkitError
from opkit.op import registry
from opkit.op.aot import call_code
from opkit.op.native.compiled import schema_with_layout
from opkit.op.torch_private import hidden_operator
from opkit.ship.archive import Archive

if TYPE_CHECKING:
    from opkit.compiler.capture.conversion import Captured
    from opkit.op.core import Operator

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
    called: dict[str, list[Extern]] = {}
    for step in plan.steps:
        if isinstance(step, Extern):
            called.setdefault(step.target, []).append(step)
    described: list[dict[str, str]] = []
    for target, steps in called.items():
        function = captured.targets.get(target)
        name = private.qualified_name(function)
        if not name or private.is_torchs_own(function):
            continue
        op = registry.find(name)
        module = "" if op is None else str(getattr(op._operator.function, "__module__", ""))  # pyright: ignore[reportPrivateUsage]
        found = {"name": name, "module": module}
        nodes = [node for node in graph.nodes if node.target is function]
        sized = not all(map(_has_layouts, steps))
        path = None if op is None or plan.device != "cpu" else _library(op._operator, nodes, isa, sized)  # pyright: ignore[reportPrivateUsage]
        if op is not None and path is not None:
            found |= {"target": target, "schema": schema_with_layout(op._operator)}  # pyright: ignore[reportPrivateUsage]
            found["library"] = f"{folder}/operators/{len(described)}.so"
            members[found["library"]] = path.read_bytes()
        described.append(found)
    return described


def _has_layouts(step: Extern) -> bool:
    """Return whether a plan has the layouts of all outputs of a call; it has none of one that nobody uses."""
    return all(isinstance(output, str) for output in step.outputs)


def _library(operator: Operator, nodes: Sequence[fx.Node], isa: str, sized: bool) -> Path | None:
    """Return the library of the kernel that an operator's calls run, or None if they need Python or a compiler."""
    from opkit.op.aot import calls  # no model without such operators needs it

    try:
        return calls.library(nodes, operator, isa, sized)
    except (calls.NeedsPython, OpkitError):
        return None


def code_of_calls(graph: fx.Graph) -> list[str]:
    """Return the translation units that the runtime needs for calls of opkit's own operators in a graph."""
    calls: dict[str, list[call_code.Call]] = {}
    for node in graph.nodes:
        calls.setdefault(private.qualified_name(node.target), []).append((node.args, node.kwargs))
    return [text for name, of in calls.items() if name in call_code.WRITERS for text in call_code.WRITERS[name](of)]


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
        self.registrations.extend([fragment, kernel.register(f"{_NAMESPACE}::{name}", "CPU", True)])
        self.functions[described["target"]] = hidden_operator(f"{_NAMESPACE}::{name}")

    def with_layouts(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan that passes the layouts of outputs to the kernels, as the runtime without torch does."""
        steps = (
            dataclasses.replace(step, kwargs={**step.kwargs, "opk_layout": _layout_of(step, plan.buffers)})
            if isinstance(step, Extern) and step.target in self.functions and _has_layouts(step)
            else step
            for step in plan.steps
        )
        return dataclasses.replace(plan, steps=tuple(steps))


def _layout_of(step: Extern, buffers: Mapping[str, Buffer]) -> list[Any]:
    """Return the dtype, the rank, the sizes and the strides of each output of a call."""
    outputs = [buffers[output] for output in step.outputs if isinstance(output, str)]
    words = ((dtype(DTYPES[each.dtype].torch), len(each.shape), *each.shape, *each.strides) for each in outputs)
    return [word for each in words for word in each]


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
