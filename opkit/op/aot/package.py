"""``opkit build``: the native and Triton kernels of a module's operators, compiled ahead of time into its package."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opkit.errors import ArgumentError, OpkitError, PackageError, ToolchainError
from opkit.kernels import aot_loading, aot_package
from opkit.kernels.aot_package import CUDA, Library, TritonBinary
from opkit.kernels.cc import build_plan, compilation, device_code
from opkit.kernels.cc import isa as isas
from opkit.kernels.cc.native import build_request
from opkit.kernels.cc.progress import Progress
from opkit.kernels.cc.request import Request
from opkit.kernels.triton import targets
from opkit.kernels.tuning import records
from opkit.op import registry
from opkit.op import torch_private as private
from opkit.op.examples.calls import split_arguments, variations_of
from opkit.op.layout import program as layout_program
from opkit.op.layout.derivation import derive
from opkit.op.native.function import NativeFunction
from opkit.op.operator import CustomOp
from opkit.op.triton import building
from opkit.op.triton.function import TritonFunction

DEFAULT_ISAS = {"x86_64": ("baseline", "avx2", "avx512"), "aarch64": ("neon",)}
"""The instruction sets for kernels that do not name theirs, on each kind of machine."""

_ARCHITECTURE = re.compile(r"-(-generate-code|gencode|arch|-gpu-architecture)\b")
_CUDA_ARCHITECTURES = ("-arch=all-major",)
_PER_LINE = 12
_MAX_CALLS, _MAX_ATTEMPTS, _MAX_FAILED_ATTEMPTS = 1024, 128, 12


Words = tuple[int, ...]
_NOTHING: tuple[list[Words], str] = ([], "")


@dataclasses.dataclass(frozen=True)
class BuildReport:
    """What ``opkit build`` built.

    Attributes:
        folder: the package's folder.
        libraries: the libraries in it.
        programs: the number of each kernel's layout programs, by operator and kernel.
        left_out: kernels that cannot be built here, and why.
        python_only: kernels that cannot be used without Python, and why.
        binaries: the Triton kernels in it.
        tuned: the number of tuning results in it.
    """

    folder: Path
    libraries: tuple[Library, ...]
    programs: dict[tuple[str, str], int]
    left_out: tuple[str, ...]
    python_only: tuple[str, ...]
    binaries: tuple[TritonBinary, ...] = ()
    tuned: int = 0


@dataclasses.dataclass(frozen=True)
class _LibraryBuild:
    """One library to build."""

    function: NativeFunction
    isa: str
    flags: tuple[str, ...]

    def request(self, programs: Sequence[Words]) -> Request:
        isa = "baseline" if self.isa == CUDA else self.isa
        function = self.function
        return build_request(function.native, function.bound, function.__name__, isa, self.flags, _extra(programs))


def _named(function: NativeFunction) -> tuple[str, str]:
    return function.operator.name, function.__name__


def _label(function: NativeFunction) -> str:
    return f"{function.operator.name}[{function.__name__}]"


def build(
    module: str,
    chosen: Sequence[str] = (),
    output: Path | None = None,
    jobs: int | None = None,
    with_programs: bool = False,
    architectures: Sequence[str] = (),
    with_tuning: bool = True,
) -> BuildReport:
    """Compile the kernels of a module that was imported, and of the modules below its package.

    Args:
        module: the module's name. Its operators are built, and those of its package's modules that were imported.
        chosen: the instruction sets for native kernels that do not name theirs.
        output: the folder to write to; by default ``_opkit`` in the package's.
        jobs: how many compilers run at once.
        with_programs: put layout programs into the libraries, for use without Python.
        architectures: the GPUs that CUDA and Triton kernels are compiled for, such as "sm_90" and "gfx942", where their author
            names none.
        with_tuning: add the cache's tuning results for the Triton kernels.

    Raises:
        PackageError: there is nothing to build, a kernel is a debug build or cannot be compiled, or the folder cannot be
            written to. What the folder held is left as it was.
        ArgumentError: this kind of machine has no such instruction set, or there is no such architecture.
    """
    for name in architectures:
        targets.canonical(name)
    functions = native_functions(module)
    _check(functions)
    folder = output or folder_of(module)
    items = [item for function in functions for item in _items(function, chosen, architectures)]
    programs = _programs(functions) if with_programs else {}
    libraries, notes = _libraries(items, programs, aot_loading.root(module) or folder.parent, jobs)
    compiled = building.build(_kernels(module), architectures, jobs)
    if not functions and compiled == building.Built():
        raise _nothing(module)
    tuned = _tuning(folder, triton_functions(module)) if with_tuning else 0
    manifest = aot_package.write(folder, libraries, compiled.binaries)
    counts = {_named(function): len(listed) for function, (listed, _) in programs.items()}
    reasons = tuple(reason for _, reason in programs.values() if reason)
    unbuilt = [_label(f) for f in functions if f not in {item.function for item in items}]
    notes = (*notes, *(f"{label}: --arch names no GPU of NVIDIA's" for label in unbuilt))
    left_out = (*notes, *compiled.left_out)
    return BuildReport(folder, manifest.libraries, counts, left_out, reasons, manifest.binaries, tuned)


def _libraries(
    items: Sequence[_LibraryBuild],
    programs: dict[NativeFunction, tuple[list[Words], str]],
    root: Path,
    jobs: int | None,
) -> tuple[list[tuple[Library, Path]], tuple[str, ...]]:
    """Return the libraries with their present files, and notes on those that are left out."""
    requests = [item.request(programs.get(item.function, _NOTHING)[0]) for item in items]
    built = list(zip(items, compilation.build_all(requests, jobs), strict=True))
    notes = _failures(built)
    return [(_library(item, root), path) for item, path in built if isinstance(path, Path)], notes


def _tuning(folder: Path, kernels: Sequence[TritonFunction]) -> int:
    try:
        return records.ship(folder, [identity for function in kernels for identity in function.identities()])
    except OSError as error:
        raise PackageError(f"The package's folder {folder} cannot be written: {error}") from error


def operators_of(module: str) -> list[CustomOp[Any, Any]]:
    """Return the operators that a module, or one below its package, defines."""
    above = _package(module)
    operators: list[CustomOp[Any, Any]] = []
    for op in registry.operators():
        where = str(getattr(op._operator.function, "__module__", ""))  # pyright: ignore[reportPrivateUsage]
        if where in (module, above) or where.startswith(f"{above}."):
            operators.append(op)
    return operators


def native_functions(module: str) -> list[NativeFunction]:
    """Return the native kernels of a module's operators."""
    return [function for function in _functions(module) if isinstance(function, NativeFunction)]


def triton_functions(module: str) -> list[TritonFunction]:
    """Return the Triton kernels of a module's operators that are launched without Python."""
    return [function for function in _functions(module) if isinstance(function, TritonFunction)]


def _functions(module: str) -> list[Any]:
    return [kernel.function for _, kernel in _kernels(module)]


def _kernels(module: str) -> list[building.OfOperator]:
    operators = [op._operator for op in operators_of(module)]  # pyright: ignore[reportPrivateUsage]
    return [(operator, kernel) for operator in operators for kernel in operator.kernels.kernels]


def _package(module: str) -> str:
    """Return the package whose folder a module's libraries go to: the module itself if it is a package, else its package."""
    if hasattr(sys.modules.get(module), "__path__"):
        return module
    return module.rpartition(".")[0] or module


def folder_of(module: str) -> Path:
    """Return the folder that a module's kernels go to by default.

    Raises:
        PackageError: the module is no file.
    """
    listed = (
        *aot_loading.places(_package(module), aot_package.FOLDER),
        *aot_loading.places(module, aot_package.FOLDER),
    )
    if not listed:
        raise PackageError(f"{module} is no file, so it has no folder. Name one with --output.")
    return listed[0]


def _nothing(module: str) -> PackageError:
    return PackageError(
        f"{module} defines no operator with a kernel in C, C++, CUDA or Triton. Name the module that defines them, or the "
        "package that imports it. (Triton kernels that have a pre_hook are compiled at their first launch.)"
    )


def _check(functions: Sequence[NativeFunction]) -> None:
    debug = next((function for function in functions if function.native.debug), None)
    if debug is not None:
        raise PackageError(
            f"{debug.operator.name}: the kernel {debug.__name__!r} ({debug.native.file}:{debug.native.line}) is a debug "
            "build, which runs in a process of its own and is no part of a package. Remove debug=True."
        )


# ---- libraries to build ----------------------------------------------------------------------------------------------


def _items(function: NativeFunction, chosen: Sequence[str], architectures: Sequence[str]) -> list[_LibraryBuild]:
    flags: tuple[str, ...] = ()
    if function.native.cuda and not any(_ARCHITECTURE.match(flag) for flag in function.native.flags):
        flags = device_code.flags(architectures) if architectures else _CUDA_ARCHITECTURES
        if not flags:
            return []
    return [_LibraryBuild(function, isa, flags) for isa in _isas(function, chosen)]


def _isas(function: NativeFunction, chosen: Sequence[str]) -> list[str]:
    """Return the instruction sets of a kernel's libraries: its own, if this kind of machine has them, or the chosen."""
    if function.native.cuda:
        return [CUDA]
    known = isas.WIDENING.get(isas.machine(), ("baseline",))
    wrong = next((isa for isa in chosen if isa not in known), None)
    if wrong is not None:
        raise ArgumentError(f"--isa {wrong}: kernels on {isas.machine()} are built for {', '.join(known)}.")
    usual = tuple(chosen) or DEFAULT_ISAS.get(isas.machine(), ("baseline",))
    own = [isa for isa in function.native.isas if isa in known]
    if "native" in function.native.isas:
        own += usual
    return sorted(dict.fromkeys(own), key=known.index) or ["baseline"]


def _programs(functions: Sequence[NativeFunction]) -> dict[NativeFunction, tuple[list[Words], str]]:
    """Return the layout programs of each kernel, or why it has none."""
    programs: dict[NativeFunction, tuple[list[Words], str]] = {}
    progress = Progress(lambda: f"derived the output sizes of {len(programs)} of {len(functions)} kernels")
    for function in functions:
        listed, reason = layout_programs(function)
        programs[function] = [program.words for program in listed], reason
        progress.tick()
    progress.finish()
    return programs


def layout_programs(function: NativeFunction) -> tuple[list[layout_program.LayoutProgram], str]:
    """Return the layout programs of a native kernel for the calls that its annotations allow; if there is none, why.

    A program holds for all sizes of 2 and more of tensors of some ranks and dtypes; for sizes of 1, which broadcast,
    there are others.
    """
    programs: dict[tuple[int, ...], layout_program.LayoutProgram] = {}
    facts = function.bound.facts
    if all(output.alias is not None for output in facts.outputs):
        return [], ""  # no output is new, so no sizes are needed
    kinds = [argument.kind for argument in facts.arguments]
    tried, reason = 0, f"{facts.operator}: no calls can be generated from its annotations"
    with private.without_fake_tensor_logs():
        for values in itertools.islice(variations_of(function), _MAX_CALLS):
            if any(layout_program.run(words, kinds, values) is not None for words in programs):
                continue
            program = derive(function.operator, *split_arguments(function.operator, values))
            if isinstance(program, layout_program.LayoutProgram):
                programs[program.words] = program
            else:
                reason = program.reason
            tried += 1
            if tried == _MAX_ATTEMPTS or (tried == _MAX_FAILED_ATTEMPTS and not programs):
                break
    return list(programs.values()), "" if programs else reason


def with_programs(function: NativeFunction, isa: str, programs: Sequence[Words]) -> Request:
    """Return the request for a kernel's library for an instruction set, with some layout programs in it."""
    return _LibraryBuild(function, isa, ()).request(programs)


def _extra(listed: Sequence[Sequence[int]]) -> str:
    """Return the C array of a library's layout programs.

    >>> print(_extra([[2, 7]]))
    <BLANKLINE>
    OPK_EXPORT const int64_t opk_programs[];
    const int64_t opk_programs[] = {
        2, 7,
        0
    };
    <BLANKLINE>
    """
    lines: list[str] = []
    for words in listed:
        for start in range(0, len(words), _PER_LINE):
            lines.append(f"    {', '.join(map(_literal, words[start : start + _PER_LINE]))},")
    if not lines:
        return ""
    body = "\n".join([*lines, "    0"])
    return f"\nOPK_EXPORT const int64_t opk_programs[];\nconst int64_t opk_programs[] = {{\n{body}\n}};\n"


def _literal(word: int) -> str:
    return str(word) if word > -(2**63) else "-9223372036854775807 - 1"


# ---- what was built --------------------------------------------------------------------------------------------------


def _failures(built: Sequence[tuple[_LibraryBuild, Path | OpkitError]]) -> tuple[str, ...]:
    """Return notes on the kernels that are left out because there is no compiler for the GPU.

    Raises:
        PackageError: others cannot be built; its text has the message of each once.
    """
    first = {item.function: error for item, error in reversed(built) if isinstance(error, OpkitError)}
    left_out = {f: e for f, e in first.items() if f.native.cuda and isinstance(e, ToolchainError)}
    failed = [error for function, error in reversed(first.items()) if function not in left_out]
    if failed:
        messages = "\n\n".join(dict.fromkeys(map(str, failed)))
        raise PackageError(
            f"Nothing was written, as {len(failed)} {'kernels' if len(failed) > 1 else 'kernel'} cannot be built.\n\n{messages}"
        ) from failed[0]
    return tuple(f"{_label(function)}: {error}" for function, error in left_out.items())


def _library(item: _LibraryBuild, root: Path) -> Library:
    native, bound = item.function.native, item.function.bound
    source, files = aot_loading.identity(native, bound, root), aot_loading.source_files(native, item.request(()), root)
    architectures = build_plan.architectures(item.request(())) if native.cuda else ()
    return Library(*_named(item.function), item.isa, "", "", 0, source, files, architectures)
