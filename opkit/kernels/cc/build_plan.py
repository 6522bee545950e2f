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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from opkit import config
from opkit.errors import ArgumentError, ToolchainError
from opkit.kernels.cc import toolchain
from opkit.kernels.cc.isa import cpu_features, effective, isa_flags
from opkit.kernels.cc.toolchain import Compiler


@dataclasses.dataclass(frozen=True)
class Unit:
    """One translation unit. ``language`` is "c", "c++" or "cuda"; ``name`` is its file name in compiler messages."""

    name: str
    text: str
    language: str


@dataclasses.dataclass(frozen=True)
class Request:
    """A library or program to build.

    Attributes:
        label: its name in messages: "demo::rms_norm". It does not change the result.
        units: the translation units.
        flags: arguments of the compiler. Paths in them must be absolute.
        include_dirs: folders to search for headers; a changed header that is included causes a rebuild.
        library_dirs: folders to search for libraries, now and when the result is loaded.
        libraries: names ("openblas"), file names ("libopenblas.so.0") or paths.
        isa: "native", or a named instruction set.
        kind: "shared" (a library) or "executable".
        debug: add debugging information, and the address and undefined-behaviour sanitizers.
    """

    label: str
    units: tuple[Unit, ...]
    flags: tuple[str, ...] = ()
    include_dirs: tuple[str | os.PathLike[str], ...] = ()
    library_dirs: tuple[str | os.PathLike[str], ...] = ()
    libraries: tuple[str, ...] = ()
    isa: str = "native"
    kind: Literal["shared", "executable"] = "shared"
    debug: bool = False


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """The commands of a build, which run in the folder of the units' files: ``units`` in parallel, then ``link``.

    A single unit is compiled and linked by one command.
    """

    compilers: tuple[Compiler, ...]
    units: tuple[tuple[str, ...], ...]
    link: tuple[str, ...] | None
    file: str

    @property
    def compiler(self) -> Compiler:
        """The compiler that links."""
        return self.compilers[0]


FILES = {"shared": "kernel.so", "executable": "kernel"}
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
    if main == "cuda":  # its flags are nvcc's, so nvcc compiles the units in C and C++ too
        languages = ["cuda"] * len(languages)
        _check_nvcc(request)
    compilers = {language: toolchain.find(language) for language in dict.fromkeys([main, *languages])}
    if len(request.units) == 1 and not _links_separately(request, compilers[main]):
        return BuildPlan((compilers[main],), (_compile_and_link(request, compilers[main]),), None, FILES[request.kind])
    units = [_compile(request, number, compilers[language]) for number, language in enumerate(languages)]
    return BuildPlan(tuple(compilers.values()), tuple(units), _link(request, compilers[main]), FILES[request.kind])


def _check(request: Request) -> None:
    if not request.units or request.kind not in FILES:
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
    return ("-shared",) if request.kind == "shared" else ()


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
    flags = (*_NVCC, *(_NVCC_SHARED if request.kind == "shared" else ("-Xcompiler", "-fexceptions")))
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
    return effective(request.isa) == "native" and any(compiler.family != "nvcc" for compiler in plan.compilers)


def families(compilers: Sequence[Compiler]) -> str:
    """Return the families of compilers for messages: "gcc", or "gcc and nvcc"."""
    return " and ".join(dict.fromkeys(compiler.family for compiler in compilers))


# ---- the key ---------------------------------------------------------------------------------------------------------


_KEY_FORMAT = 1  # of this key: change it when the meaning of its parts changes
_HEADER = Path(__file__).parents[1] / "include" / "opkit.h"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include(?:_next)?[ \t]*(?:["<]([^">\n]+)[">]|([A-Za-z_]\w*))', re.MULTILINE)
_HEADER_SUFFIXES = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".def", ".ipp", ".tpp", "")

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


# ---- headers ---------------------------------------------------------------------------------------------------------


def headers(request: Request) -> Iterator[tuple[str, str]]:
    """Yield each header that the units include, directly or not, with a hash of its content.

    Only those in the request's folders: the compiler's identity stands for the system's. A header that is included under a
    condition counts, whatever the condition. Where a macro names the file, all headers of the folders count.
    """
    folders = [os.path.abspath(folder) for folder in request.include_dirs]
    folders += [flag[2:] for flag in request.flags if flag.startswith("-I") and len(flag) > 2]
    if not folders:
        return
    seen: dict[str, str] = {}
    for unit in request.units:
        _follow(unit.text, folders, seen)
    yield from sorted(seen.items())


def _follow(text: str, folders: list[str], seen: dict[str, str], own: str | None = None) -> None:
    for name, macro in _INCLUDE.findall(text):
        near = [own, *folders] if own is not None else folders
        paths = _all_headers(folders) if macro else (os.path.join(folder, name) for folder in near)
        for path in paths:
            if path not in seen and os.path.isfile(path):
                content = Path(path).read_bytes()
                seen[path] = hashlib.sha256(content).hexdigest()
                _follow(content.decode("utf-8", "replace"), folders, seen, os.path.dirname(path))


def _all_headers(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        for place, _, names in os.walk(folder):
            yield from (os.path.join(place, name) for name in names if os.path.splitext(name)[1] in _HEADER_SUFFIXES)


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
