"""Plan a build: its request, the compilers and their command lines, and the key of the result.

The key is a hash of everything that decides the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opkit import config
from opkit.errors import ArgumentError, ToolchainError
from opkit.kernels.cc import nvrtc_plan, toolchain
from opkit.kernels.cc.cuda_split import CannotSplit
from opkit.kernels.cc.headers import headers
from opkit.kernels.cc.isa import cpu_features, effective, isa_flags
from opkit.kernels.cc.request import BuildPlan, Request, Unit
from opkit.kernels.cc.toolchain import Compiler

FILES = {"shared": "kernel.so", "executable": "kernel", "cubin": "kernel.cubin"}
_SUFFIXES = {"c": ".c", "c++": ".cpp", "cuda": ".cu"}
_RANK = ("c", "c++", "cuda")

# GNU dialects: in the strict ones gcc does not contract a * b + c into one instruction.
_DIALECTS = {"c": "-std=gnu11", "c++": "-std=gnu++17"}
_C_MISTAKES = (
    "-Werror=implicit-function-declaration",  # these are errors by default from gcc 14 and clang 16 on;
    "-Werror=incompatible-pointer-types",  # before that, only the loader finds a misspelt function
    "-Werror=int-conversion",
)
_FAST = ("-O3", "-fno-math-errno")
_DEBUG = (
    "-g",
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
_SHARED = ("-fPIC", "-fvisibility=hidden")
_FAST_MATH = ("-ffast-math", "-Ofast", "-funsafe-math-optimizations")
_QUIET = {"gcc": ("-fno-diagnostics-show-caret", "-ftabstop=1"), "clang": ("-fno-caret-diagnostics",)}
_NVCC = ("-O3", "-std=c++17")
_NVCC_SHARED = ("-Xcompiler", "-fPIC,-fexceptions,-fvisibility=hidden")
_SHELL = re.compile(r"""[$`"'\\;&|<>()*?!\n\r]""")
_OPENMP = re.compile(r'^[ \t]*#[ \t]*pragma[ \t]+omp\b|_Pragma\s*\(\s*"\s*omp\b', re.MULTILINE)


def source_name(number: int, unit: Unit) -> str:
    """Return the name of a unit's file; the unit's own name may hold any characters, so it is not part of it."""
    return f"unit{number}{_SUFFIXES[unit.language]}"


def plan(request: Request) -> BuildPlan:
    """Choose the compilers and write the commands.

    Raises:
        ToolchainError: a compiler that is needed was not found.
        ArgumentError: the request cannot be built.
    """
    _check(request)
    languages = [unit.language for unit in request.units]
    main = max(languages, key=_RANK.index)
    if main == "cuda":
        return _cuda_plan(request)
    compilers = {language: toolchain.find(language) for language in dict.fromkeys([main, *languages])}
    return _plan(request, languages, compilers[main], compilers)


def _plan(request: Request, languages: Sequence[str], main: Compiler, compilers: Mapping[str, Compiler]) -> BuildPlan:
    sources = tuple((source_name(number, unit), unit.name, unit.text) for number, unit in enumerate(request.units))
    if request.kind == "cubin" or (len(request.units) == 1 and not _links_separately(request, main)):
        return BuildPlan((main,), (_compile_and_link(request, main),), None, FILES[request.kind], sources)
    units = [_compile(request, number, compilers[language]) for number, language in enumerate(languages)]
    return BuildPlan(tuple(compilers.values()), tuple(units), _link(request, main), FILES[request.kind], sources)


def _cuda_plan(request: Request) -> BuildPlan:
    compiler = toolchain.find("cuda")
    if compiler.family == "nvrtc":
        try:
            return _nvrtc_plan(request, compiler)
        except CannotSplit as error:
            compiler = _nvcc_for(request, error)
    _check_nvcc(request)
    # its flags are nvcc's, so nvcc compiles the units in C and C++ too
    return _plan(request, ["cuda"] * len(request.units), compiler, {"cuda": compiler})


def _nvrtc_plan(request: Request, compiler: Compiler) -> BuildPlan:
    """Return the plan of device code alone; or of the host's part, after commands for the device's.

    Raises:
        CannotSplit: only nvcc can compile the source.
    """
    if request.kind == "cubin":
        unit = request.units[0]
        command = nvrtc_plan.cubin(request, compiler, source_name(0, unit), FILES["cubin"])
        return BuildPlan((compiler,), (command,), None, FILES["cubin"], ((source_name(0, unit), unit.name, unit.text),))
    parts = nvrtc_plan.parts(request, compiler)
    host = plan(parts.host)
    compilers, sources = (compiler, *host.compilers), (*host.sources, *parts.sources)
    return dataclasses.replace(host, compilers=compilers, sources=sources, device=parts.commands)


def architectures(request: Request) -> tuple[str, ...]:
    """Return the architectures that a request's device code is compiled for, as in "sm_90"; empty where only nvcc knows them.

    Raises:
        ToolchainError: a compiler that is needed was not found.
    """
    device = [argument for command in plan(request).device for argument in command]
    named = [argument[len("-arch=") :] for argument in device if argument.startswith("-arch=")]
    return tuple(dict.fromkeys(named or nvrtc_plan.architectures_in(request.flags)))


def _nvcc_for(request: Request, reason: CannotSplit) -> Compiler:
    """Return nvcc for a source that NVRTC cannot compile, unless the settings name NVRTC."""
    try:
        if config.get().cuda_compiler is None:
            return toolchain.find_nvcc()
    except ToolchainError:
        pass
    raise ToolchainError(
        f"{request.label}: NVRTC, which compiles device code alone, cannot compile this source: {reason}. nvcc can: install it, "
        "and leave OPKIT_CUDA_COMPILER unset or set it to nvcc."
    )


def _check(request: Request) -> None:
    cubin = [unit.language for unit in request.units] == ["cuda"]
    if not request.units or request.kind not in FILES or (request.kind == "cubin" and not cubin):
        raise ArgumentError(f"{request.label}: there is nothing to build, or kind={request.kind!r} is not known.")
    for unit in request.units:
        if unit.language not in _SUFFIXES:
            raise ArgumentError(
                f"{request.label}: {unit.name!r} is in {unit.language!r}; opkit builds c, c++ and cuda."
            )
    texts = (*_arguments(request), *(unit.name + unit.text for unit in request.units))
    wrong = next((text for text in texts if "\0" in text), None)
    if wrong is not None:
        raise ArgumentError(
            f"{request.label}: {wrong[:80]!r} holds a NUL character, which cannot be passed to a compiler."
        )


def _arguments(request: Request) -> list[str]:
    """Return every text that a request adds to command lines."""
    return [*request.flags, *request.libraries, *_folders(request)]


def _folders(request: Request) -> list[str]:
    return [os.fspath(folder) for folder in (*request.include_dirs, *request.library_dirs)]


def _check_nvcc(request: Request) -> None:
    """Refuse characters that a shell expands: nvcc starts other compilers through one, and would run "$(...)"."""
    for text in (*_arguments(request), config.get().cxx or ""):
        if _SHELL.search(text):
            raise ArgumentError(
                f"{request.label}: nvcc would pass {text!r} to a shell. Leave out quotes, backslashes, line breaks and "
                "any of $ ` ; & | < > ( ) * ? !"
            )
    for folder in _folders(request):
        if "," in folder:
            raise ArgumentError(
                f"{request.label}: nvcc would take {folder!r} for several folders. Use one without commas."
            )


def _links_separately(request: Request, compiler: Compiler) -> bool:
    """Return whether a flag must not reach the linker.

    OpenMP's would load a second OpenMP into torch; flags of fast arithmetic make gcc before 13 link code that turns
    subnormal numbers off in the whole process.
    """
    loose = any(flag in _FAST_MATH for flag in request.flags)
    return request.kind == "shared" and (loose or bool(_openmp(request, request.units[0], compiler)))


def _openmp(request: Request, unit: Unit, compiler: Compiler) -> tuple[str, ...]:
    if "ragma" not in unit.text or not _OPENMP.search(unit.text):
        return ()
    if compiler.family == "nvcc":
        return ("-Xcompiler", "-fopenmp")
    if compiler.family == "gcc":
        return ("-fopenmp",)
    # clang calls LLVM's OpenMP, and torch for Linux ships GNU's: only "omp simd" has an effect there.
    return ("-Xclang", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp-simd",)


def _compile_and_link(request: Request, compiler: Compiler) -> tuple[str, ...]:
    flags = (*_flags(request, request.units[0], compiler), *_openmp(request, request.units[0], compiler))
    source = source_name(0, request.units[0])
    return (
        *compiler.command,
        *flags,
        *_shared(request),
        source,
        "-o",
        FILES[request.kind],
        *_libraries(request, compiler),
    )


def _compile(request: Request, number: int, compiler: Compiler) -> tuple[str, ...]:
    unit = request.units[number]
    flags = (*_flags(request, unit, compiler), *_openmp(request, unit, compiler))
    return (*compiler.command, *flags, "-c", source_name(number, unit), "-o", f"unit{number}.o")


def _link(request: Request, compiler: Compiler) -> tuple[str, ...]:
    objects = [f"unit{number}.o" for number in range(len(request.units))]
    openmp = {flag for unit in request.units for flag in _openmp(request, unit, compiler)}
    flags = [*(_DEBUG if request.debug and compiler.family != "nvcc" else ()), *_shared(request)]
    if request.kind == "executable":
        flags += sorted(openmp, reverse=True)
    if compiler.family == "nvcc":
        flags += request.flags
    return (*compiler.command, *flags, *objects, "-o", FILES[request.kind], *_libraries(request, compiler))


def _shared(request: Request) -> tuple[str, ...]:
    return {"shared": ("-shared",), "executable": (), "cubin": ("-cubin",)}[request.kind]


def _flags(request: Request, unit: Unit, compiler: Compiler) -> tuple[str, ...]:
    """Return the flags of a unit: opkit's, then the request's, which override them."""
    includes = tuple(f"-I{os.path.abspath(folder)}" for folder in request.include_dirs)
    return (*(_nvcc if compiler.family == "nvcc" else _host)(request, unit, compiler), *includes, *request.flags)


def _host(request: Request, unit: Unit, compiler: Compiler) -> tuple[str, ...]:
    flags = (_DIALECTS[unit.language], *(_DEBUG if request.debug else _FAST), "-fexceptions")
    flags += _SHARED if request.kind == "shared" else ()
    flags += _C_MISTAKES if unit.language == "c" else ()
    return (*flags, *_QUIET[compiler.family], *isa_flags(request.isa, compiler.family))


def _nvcc(request: Request, unit: Unit, compiler: Compiler) -> tuple[str, ...]:
    host = config.get().cxx
    host_flags = {"shared": _NVCC_SHARED, "executable": ("-Xcompiler", "-fexceptions"), "cubin": ()}
    flags = (*_NVCC, *host_flags[request.kind])
    flags += ("-g", "-lineinfo") if request.debug else ()
    return flags if host is None else (*flags, "-ccbin", toolchain.find("c++").path)


def _libraries(request: Request, compiler: Compiler) -> tuple[str, ...]:
    flags: list[str] = []
    for folder in [os.path.abspath(each) for each in request.library_dirs]:
        flags += [f"-L{folder}", *_rpath(folder, compiler)]
    named = [_library(each) for each in request.libraries]
    return (*flags, *named, *(() if compiler.family == "nvcc" else ("-lm",)))


def _rpath(folder: str, compiler: Compiler) -> tuple[str, ...]:
    """Return the flags that add a folder to the loader's search; nvcc needs one argument, quoted because of blanks."""
    return (
        ("-Xlinker", f'"-rpath={folder}"') if compiler.family == "nvcc" else ("-Xlinker", "-rpath", "-Xlinker", folder)
    )


def _library(name: str) -> str:
    """Return the linker's argument for a library: a path as it is, a file name after "-l:", else a name after "-l".

    >>> _library("openblas"), _library("libopenblas.so.0"), _library("/usr/lib/libz.so.1")
    ('-lopenblas', '-l:libopenblas.so.0', '/usr/lib/libz.so.1')
    """
    if os.sep in name:
        return os.path.abspath(name)
    return f"-l:{name}" if re.search(r"\.(so|a|dylib)(\.[\d.]+)?$", name) else f"-l{name}"


def is_native(plan: BuildPlan, request: Request) -> bool:
    """Return whether the result depends on the features of this processor."""
    return effective(request.isa) == "native" and any(compiler.language != "cuda" for compiler in plan.compilers)


def families(compilers: Sequence[Compiler]) -> str:
    """Return the families of compilers for messages: "gcc", or "gcc and nvcc"."""
    return " and ".join(dict.fromkeys(compiler.family for compiler in compilers))


# ---- the key ---------------------------------------------------------------------------------------------------------


_KEY_FORMAT = 1  # of this key: change it when the meaning of its parts changes
_HEADER = Path(__file__).parents[1] / "include" / "opkit.h"

# The environment variables that compilers read.
_VARIABLES = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "SDKROOT",
    "MACOSX_DEPLOYMENT_TARGET",
)


@functools.cache
def abi_version() -> int:
    """Return ``OPK_ABI_VERSION`` of this opkit's header."""
    found = re.search(r"^#define OPK_ABI_VERSION (\d+)$", _HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{_HEADER} does not define OPK_ABI_VERSION"
    return int(found[1])


def key(request: Request, plan: BuildPlan) -> str:
    """Return the sha256, in hexadecimal, of everything that decides the result; the label is not part of it."""
    parts = (
        _KEY_FORMAT,
        abi_version(),
        [(unit.name, unit.text, unit.language) for unit in request.units],
        plan.units,
        plan.link,
        *([plan.device] if plan.device else []),
        [(compiler.path, compiler.family, compiler.identity) for compiler in _compilers(plan)],
        cpu_features() if is_native(plan, request) else (),
        list(headers(request)),
        list(_linked_files(request)),
        [(name, os.environ[name]) for name in _VARIABLES if name in os.environ],
    )
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()


def _compilers(plan: BuildPlan) -> Iterator[Compiler]:
    """Yield the compilers of the plan, and the one that nvcc calls."""
    yield from plan.compilers
    if plan.compiler.family == "nvcc":
        with contextlib.suppress(ToolchainError):
            yield toolchain.find("c++")


# ---- libraries -------------------------------------------------------------------------------------------------------


def _linked_files(request: Request) -> Iterator[tuple[str, int, int]]:
    """Yield the linked files whose location the request gives, with size and time of change."""
    paths = [text for text in (*request.libraries, *request.flags) if os.path.isabs(text)]
    for folder in [os.path.abspath(each) for each in request.library_dirs]:
        names = [form.format(name) for name in request.libraries for form in ("lib{}.so", "lib{}.a", "{}")]
        paths += [os.path.join(folder, name) for name in names]
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        yield path, status.st_size, status.st_mtime_ns
