"""``opkit.aoti_compile_and_package``: packages of AOTInductor with the compiled kernels of opkit's operators inside.

In a package an operator that Inductor does not know is a name, which the process that loads the package looks up. But of an
operator with a C function, Inductor's setting ``custom_ops_to_c_shims`` has the declaration, and a package calls the function.
Here each call that a kernel in C, C++ or CUDA serves is replaced by one of a hidden operator, and the setting has the kernel
itself (``model_text``). A call that no kernel takes becomes the operator's reference. Triton kernels are left to Inductor, which
compiles them into the package.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Generator, Mapping
from typing import IO, Any

import torch
from torch import fx

from opkit.errors import PackageError
from opkit.kernels.aot_package import runtime_library
from opkit.op import registry
from opkit.op.aot import calls, model_text
from opkit.op.aot import torch_private as private
from opkit.op.aot.model_text import CarriedKernel
from opkit.op.core import Operator
from opkit.op.layout.outputs import declared_type
from opkit.op.native.function import NativeFunction

_NAMESPACE = "opkit_aoti"
_lock = threading.Lock()  # hidden operators have the names of kernels


def aoti_compile_and_package(
    exported_program: torch.export.ExportedProgram,
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    inductor_configs: dict[str, Any] | None = None,
) -> str:
    """Compile an exported program with AOTInductor to a ``.pt2`` file that contains the kernels of its opkit operators.

    It does what ``torch._inductor.aoti_compile_and_package`` does. But a process that loads the package needs neither opkit, nor
    the modules that define the operators, nor a compiler, nor Python: ``torch._inductor.aoti_load_package`` and
    ``torch::inductor::AOTIModelPackageLoader`` load it. Kernels are compiled for this machine's processor, as Inductor's code is,
    unless they name an instruction set (``isa=``).

    Args:
        exported_program: what ``torch.export.export`` returned, with sizes of any kind. It is the same afterwards.
        package_path: the file, whose name ends with ".pt2", or an open one; by default torch chooses a file.
        inductor_configs: settings of Inductor's.

    Returns:
        The path of the file.

    Raises:
        PackageError: a call of an operator needs Python: its kernel is written in Python, or its choice depends on a condition
            in Python and on sizes that may change; or no kernel takes the call, and the reference cannot be traced; or the sizes
            of its outputs cannot be derived.
        CompileError, ToolchainError: a kernel cannot be compiled.

    >>> program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))  # doctest: +SKIP
    >>> path = opkit.aoti_compile_and_package(program, package_path="model.pt2")  # doctest: +SKIP
    >>> torch._inductor.aoti_load_package(path)(x)  # in another process  # doctest: +SKIP
    """
    import torch._inductor  # slow to import

    with _lock, _with_kernels_inside(exported_program) as functions:
        configs = {**(inductor_configs or {})}
        configs[private.C_FUNCTIONS] = {**configs.get(private.C_FUNCTIONS, private.c_functions()), **functions}
        return torch._inductor.aoti_compile_and_package(
            exported_program,
            package_path=os.fspath(package_path) if isinstance(package_path, os.PathLike) else package_path,
            inductor_configs=configs,
        )


# ---- the calls of a program ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _with_kernels_inside(program: torch.export.ExportedProgram) -> Generator[dict[Any, list[str]]]:
    """Call hidden operators in the program's graphs, and yield the C++ of their functions.

    Raises:
        PackageError: a call needs Python.
    """
    graphs = [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for module in graphs for node in module.graph.nodes]
    targets = {node: node.target for node in nodes if registry.find(private.operator_name(node)) is not None}
    kernels: dict[Any, CarriedKernel] = {}
    try:
        for node in targets:
            node.target = _replacement(node, kernels)
        texts = {target: [model_text.kernel_text(kernel)] for target, kernel in kernels.items()}
        for first in [*texts.values()][:1]:
            first.insert(0, model_text.runtime_text(runtime_library()))
        yield texts
    finally:
        for node, target in targets.items():
            node.target = target


def _replacement(node: fx.Node, kernels: dict[Any, CarriedKernel]) -> Any:
    """Return what a node calls in place of an opkit operator; a kernel is added to ``kernels``, by its hidden operator.

    Raises:
        PackageError: the call needs Python.
    """
    operator = _operator(private.operator_name(node))
    try:
        kernel, refused = calls.kernel_of(node, operator)
        if kernel is None:
            return _without_kernel(node, operator, refused)
        if kernel.traceable or hasattr(kernel.function, "visible"):
            return node.target  # Inductor sees its launches
        return _with_kernel(node, calls.compiled(kernel), kernels)
    except calls.NeedsPython as reason:
        raise PackageError(
            f"opkit.aoti_compile_and_package: a call of {operator.name} cannot be part of a package that runs without Python: "
            f"{reason}. With torch._inductor.aoti_compile_and_package the package calls the operator by its name, and the "
            "process that loads it must have imported the module that defines it."
        ) from reason


def _without_kernel(node: fx.Node, operator: Operator, refused: Mapping[str, str]) -> Any:
    args, kwargs = private.example_call(node)
    if operator.inlinable(args, kwargs):
        return node.target  # Inductor sees its reference
    if operator.mutates or operator.only_effects or not operator.transparent(args, kwargs):
        reasons = "".join(f"; {name}: {reason}" for name, reason in refused.items())
        raise calls.NeedsPython(f"no kernel takes it, and its reference cannot be traced{reasons}")
    return _hidden(operator, "reference", operator.contract_hash(), is_composite=True)


def _with_kernel(node: fx.Node, function: NativeFunction, kernels: dict[Any, CarriedKernel]) -> Any:
    operator, library = function.operator, function.build()
    programs = calls.size_programs(node, operator)
    identity = f"{operator.schema_text} {hashlib.sha256(library.read_bytes()).hexdigest()}"
    hidden = _hidden(operator, function.__name__, identity)
    before = kernels[hidden].programs if hidden in kernels else ()
    kernels[hidden] = CarriedKernel(
        hidden._schema.name.partition("::")[2],
        function.device,
        function.facts,
        tuple(declared_type(argument) for argument in operator.schema.arguments),
        library,
        (*before, *(words for words in programs if words not in before)),
    )
    return hidden


# ---- hidden operators ------------------------------------------------------------------------------------------------

_defined: dict[str, tuple[torch.library.Library, Any]] = {}


def _operator(name: str) -> Operator:
    return registry.get(name)._operator  # pyright: ignore[reportPrivateUsage]


def _hidden(operator: Operator, kind: str, identity: str, is_composite: bool = False) -> Any:
    """Return the overload of a hidden operator with an operator's schema; equal ones are defined once in a process.

    Args:
        operator: the operator.
        kind: the name of the kernel, or "reference".
        identity: what tells it from others with the same names.
        is_composite: whether torch traces the operator's reference instead.
    """
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    name = re.sub(r"\W", "_", f"opkit_{operator.name}_{kind}_{digest}")
    if name not in _defined:
        library, original = torch.library.Library(_NAMESPACE, "FRAGMENT"), operator.name

        def call(*args: Any, **kwargs: Any) -> Any:
            now = _operator(original)
            return (now.reference if is_composite else now.overload)(*args, **kwargs)

        library.define(f"{name}{operator.schema_text}", tags=operator.tags)
        library.impl(name, call, "CompositeImplicitAutograd" if is_composite else "CompositeExplicitAutograd")
        if not is_composite:
            library.impl(name, torch.library.fallthrough_kernel, "Autograd")
            torch.library.register_fake(f"{_NAMESPACE}::{name}", call, lib=library)
        _defined[name] = library, private.overload(_NAMESPACE, name)
    return _defined[name][1]
