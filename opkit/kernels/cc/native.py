"""Declare kernels from source (``opkit.c_kernel``, ``opkit.cpp_kernel``, ``opkit.cuda_kernel``), and request their builds.

The functions return a description: the source and the declaration of its function. :meth:`opkit.CustomOp.register_kernel`
binds it to an operator, and the first call compiles it.
"""

from __future__ import annotations

import dataclasses
import inspect
import linecache
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from opkit.errors import DeclarationError, KernelError, ToolchainError
from opkit.kernels import sanitizer
from opkit.kernels.binding import Bound, Constant
from opkit.kernels.cc import declaration, source
from opkit.kernels.cc import isa as isas
from opkit.kernels.cc.boilerplate import ELEMENTWISE_EXPORT
from opkit.kernels.cc.declaration import CFunction
from opkit.kernels.cc.dtypes import DTYPES
from opkit.kernels.cc.request import Request, Unit

Dtypes = Iterable[Any] | Mapping[str, Iterable[Any]] | None
ISAS = ("native", "baseline", "avx2", "avx512", "neon")
_DEFAULT_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class Elements:
    """A library's function of numbers that a kernel applies to each element.

    Attributes:
        symbol: the name of the function.
        library: the path of the library.
        parameters: the name and the C type of each parameter.
        returns: the C type of its value.
        tensors: the parameters that are elements of tensors.
        parallel: whether several threads may call it at once.
    """

    symbol: str
    library: str
    parameters: tuple[tuple[str, str], ...]
    returns: str
    tensors: frozenset[str]
    parallel: bool


@dataclasses.dataclass(frozen=True, eq=False)
class NativeKernel:
    """A kernel in C, C++ or CUDA C++, as its author wrote it."""

    language: str  # "c", "c++" or "cuda"
    text: str
    file: str  # that holds the text, for the compiler's messages
    line: int
    function: CFunction
    variables: Mapping[str, tuple[str, ...]]  # type variables, and the element types of each
    bind: Mapping[str, Constant]
    flags: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    library_dirs: tuple[Path, ...] = ()
    libraries: tuple[str, ...] = ()
    isas: tuple[str, ...] = ("native",)
    debug: bool = False
    elements: Elements | None = None  # the function that it applies to each element, and does nothing else
    elementwise: bool = False  # it may be called on any range of elements

    @property
    def name(self) -> str:
        """The name of the C function."""
        return self.function.name

    @property
    def cuda(self) -> bool:
        """Whether it is in CUDA C++."""
        return self.language == "cuda"

    @property
    def device(self) -> str:
        """The device type that it runs on."""
        return "cuda" if self.cuda else "cpu"

    def __repr__(self) -> str:
        return f"<{self.language} kernel {self.name} ({self.file}:{self.line})>"

    def contract_parts(self) -> list[tuple[str, Any]]:
        """Return the parts that decide its results, for the operator's contract hash."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_HASHED}
        contents = [path.read_text(encoding="utf-8", errors="replace") for path in self.sources]
        return [*[(name, str(value)) for name, value in fields.items()], ("contents", tuple(contents))]


_NOT_HASHED = {"file", "line", "function", "elements"}


def c_kernel(
    source: str | Path,
    *,
    dtypes: Dtypes = None,
    name: str | None = None,
    flags: Sequence[str] = (),
    bind: Mapping[str, Constant] | None = None,
    libraries: Sequence[str] = (),
    isa: str | Sequence[str] = "native",
    debug: bool = False,
    elementwise: bool = False,
) -> NativeKernel:
    """Declare a kernel in C, to pass to ``register_kernel``.

    The function's parameters are bound by name: to the operator's arguments, to the sizes that its annotations name, to
    its output ``out`` (``out0``, ``out1``, ... where there are several), and to ``x_numel``, ``x_rank``, ``x_size_0``,
    ``x_stride_0``, ``xs_len`` of a tensor ``x`` or a list ``xs``. Pointers are to contiguous memory; a parameter
    ``const opk_tensor* x`` takes any strides. The function returns nothing, or an error code (0: success), or a message
    (``const char*``, NULL: success); ``opk_fail(format, ...)`` reports an error from anywhere in it. It needs no headers.

    Args:
        source: C source, or the path of a file. The function that is not ``static`` is the kernel.
        dtypes: the dtypes of ``T``: ``torch.float32``, ... or their names; float32 and float64 by default. Write several
            type variables as ``{"T": [...], "I": [...]}``. Each choice is compiled, and selected by the arguments.
        name: the function, if the source has several.
        flags: further options for the compiler.
        bind: other values for parameters: numbers, or other names (``{"lda": "k"}``).
        libraries: shared libraries to link with, by name ("m") or path.
        isa: the instruction set to compile for: "native" (this machine's), or some of "baseline", "avx2", "avx512",
            "neon": the widest that the machine has is used.
        debug: build with -g and the address and undefined-behaviour sanitizers, and run in a child process; their
            reports are raised. Slow: only for debugging.
        elementwise: every element of the output depends only on the elements at its index in the tensors, which have the
            output's sizes, and on numbers. Under ``torch.compile`` with opkit's backend the kernel is then called on
            ranges of elements, by several threads, in one fused loop. ``opkit.check`` checks that the claim is true.

    Raises:
        DeclarationError: the function cannot be found in the source, or its declaration cannot be read.
        KernelError: an option has a value that it cannot have.

    >>> import opkit, torch
    >>> @opkit.custom_op("doc::doubled", mutates_args=())
    ... def doubled(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    >>> kernel = opkit.c_kernel(
    ...     "void twice(const T* x, T* out, int64_t x_numel) {"
    ...     "    for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i];"
    ...     "}"
    ... )
    >>> _ = doubled.register_kernel("cpu", kernel)
    >>> doubled(torch.ones(2))
    tensor([2., 2.])
    """
    return _kernel("c", source, dtypes, name, flags, bind, libraries, isa=isa, debug=debug, elementwise=elementwise)


def cpp_kernel(
    source: str | Path,
    *,
    dtypes: Dtypes = None,
    name: str | None = None,
    flags: Sequence[str] = (),
    bind: Mapping[str, Constant] | None = None,
    sources: Sequence[str | Path] = (),
    include_dirs: Sequence[str | Path] = (),
    library_dirs: Sequence[str | Path] = (),
    libraries: Sequence[str] = (),
    isa: str | Sequence[str] = "native",
    debug: bool = False,
    elementwise: bool = False,
) -> NativeKernel:
    """Declare a kernel in C++17; see :func:`c_kernel` for how its parameters are bound.

    Args:
        source: C++ source, or the path of a file, with the kernel as an ``extern "C"`` function.
        sources: further C++ files that are compiled and linked with it.
        include_dirs: folders to search for headers.
        library_dirs: folders to search for ``libraries``, when it is built and when it is loaded.
        dtypes, name, flags, bind, libraries, isa, debug, elementwise: as for :func:`c_kernel`.

    Raises:
        DeclarationError, KernelError: as for :func:`c_kernel`.

    >>> import opkit
    >>> source = '''
    ... #include <algorithm>
    ... extern "C" void sorted(const T* x, T* out, int64_t x_numel) {
    ...     std::partial_sort_copy(x, x + x_numel, out, out + x_numel);
    ... }
    ... '''
    >>> opkit.cpp_kernel(source).language
    'c++'
    """
    return _kernel(
        "c++",
        source,
        dtypes,
        name,
        flags,
        bind,
        libraries,
        sources,
        include_dirs,
        library_dirs,
        isa,
        debug,
        elementwise,
    )


def cuda_kernel(
    source: str | Path,
    *,
    dtypes: Dtypes = None,
    name: str | None = None,
    flags: Sequence[str] = (),
    bind: Mapping[str, Constant] | None = None,
    sources: Sequence[str | Path] = (),
    include_dirs: Sequence[str | Path] = (),
    library_dirs: Sequence[str | Path] = (),
    libraries: Sequence[str] = (),
) -> NativeKernel:
    """Declare a kernel in CUDA C++, compiled by NVRTC, which comes with torch, and a C++ compiler; or by nvcc.

    The bound function runs on the host: an ``extern "C"`` function that launches ``__global__`` functions on its parameter
    ``cudaStream_t stream``, torch's current stream on the arguments' device, which is the current device during the
    call. A launch that fails is reported. ``flags`` are nvcc's, of which NVRTC gets those that it has. What only nvcc can compile
    (``libraries``, device code in headers, launches by macros) is compiled by it where it is installed.

    Args:
        source, dtypes, name, flags, bind, sources, include_dirs, library_dirs, libraries: as for :func:`cpp_kernel`.
            ``T`` may be ``torch.float16`` (``__half``) and ``torch.bfloat16`` (``__nv_bfloat16``) too.

    Raises:
        DeclarationError, KernelError: as for :func:`c_kernel`.
        ToolchainError: at the first call: there is no compiler for it.
        CompileError: at the first call: it cannot be compiled; the message has the compiler's.
    """
    return _kernel("cuda", source, dtypes, name, flags, bind, libraries, sources, include_dirs, library_dirs)


def _kernel(
    language: str,
    source: str | Path,
    dtypes: Dtypes,
    name: str | None,
    flags: Sequence[str],
    bind: Mapping[str, Constant] | None,
    libraries: Sequence[str],
    sources: Sequence[str | Path] = (),
    include_dirs: Sequence[str | Path] = (),
    library_dirs: Sequence[str | Path] = (),
    isa: str | Sequence[str] = "native",
    debug: bool = False,
    elementwise: bool = False,
) -> NativeKernel:
    """Read the declaration in a source; the public functions call it directly, so that the author's frame is two above."""
    frame = inspect.currentframe()
    text, file, line = _located(source, frame.f_back.f_back if frame and frame.f_back else None)
    try:
        function = declaration.parse(text, name)
    except DeclarationError as error:
        raise DeclarationError(f"{file}: {error}") from error
    return NativeKernel(
        language, text, file, line, function, _variables(dtypes), dict(bind or {}), tuple(flags), _paths(sources),
        _paths(include_dirs), _paths(library_dirs), tuple(libraries), _isas(isa), debug, elementwise=elementwise,
    )  # fmt: skip


def _paths(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    return tuple(Path(path).absolute() for path in paths)


def _located(source: str | Path, frame: FrameType | None) -> tuple[str, str, int]:
    """Return the text, and the file and line where it begins."""
    if isinstance(source, Path):
        return source.read_text(encoding="utf-8"), str(source), 1
    if "\n" not in source and source.endswith((".c", ".cpp", ".cc", ".cxx", ".cu")):
        raise KernelError(f"{source!r} looks like a path. A str is source itself: pass pathlib.Path({source!r}).")
    caller = frame.f_code.co_filename if frame is not None else "<source>"
    written = linecache.getlines(caller) if frame is not None else []
    wanted = [line for line in source.splitlines() if line.strip()]
    if not wanted:
        raise DeclarationError("the source of a kernel is empty")
    skipped = source.splitlines().index(wanted[0])
    # a literal's first line shares its line of the file with the quotes, so its end must match, the next one whole
    for i, text in enumerate(written):
        following = [line.rstrip("\n") for line in written[i + 1 : i + len(source.splitlines()) - skipped - 1]]
        rest = source.splitlines()[skipped + 1 : -1]
        if text.rstrip("\n").endswith(wanted[0]) and following[: len(rest)] == rest:
            return source, caller, i + 1 - skipped
    return source, caller if frame is not None else "<source>", frame.f_lineno if frame is not None else 1


def _variables(dtypes: Dtypes) -> dict[str, tuple[str, ...]]:
    variables: Mapping[str, Iterable[Any]] = (
        dtypes if isinstance(dtypes, Mapping) else {"T": _DEFAULT_DTYPES if dtypes is None else dtypes}
    )
    return {variable: _named_dtypes(variable, types) for variable, types in variables.items()}


def _named_dtypes(variable: str, types: Iterable[Any]) -> tuple[str, ...]:
    names = [str(dtype).removeprefix("torch.") for dtype in ([types] if isinstance(types, str) else types)]
    for name in names:
        if name not in DTYPES:
            raise KernelError(f"dtypes=: {variable} cannot stand for {name!r}. It can stand for {', '.join(DTYPES)}.")
    if not names:
        raise KernelError(f"dtypes=: {variable} has no dtypes. Give at least one.")
    return tuple(dict.fromkeys(names))


def _isas(isa: str | Sequence[str]) -> tuple[str, ...]:
    names = (isa,) if isinstance(isa, str) else tuple(isa)
    wrong = [name for name in names if name not in ISAS]
    if wrong or not names:
        raise KernelError(f"isa={isa!r}: choose among {', '.join(ISAS)}.")
    return names


# ---- builds ----------------------------------------------------------------------------------------------------------


def build_request(
    native: NativeKernel, bound: Bound, name: str, isa: str | None = None, flags: Sequence[str] = (), extra: str = ""
) -> Request:
    """Return the build request of ``native``: a shared library, or with ``debug=True`` an executable with sanitizers.

    Args:
        native: the author's kernel.
        bound: the kernel bound to an operator.
        name: the kernel's name among those of its operator.
        isa: the instruction set; by default the widest of the kernel's own that this machine has.
        flags: for the compiler, in addition to the author's.
        extra: C that is added to the description of the kernel.
    """
    *units, last = source.generate(
        bound, native.text, native.variables, name, native.file, native.line, native.language, native.cuda
    )
    extra += ELEMENTWISE_EXPORT if native.elementwise else ""
    units.append(dataclasses.replace(last, text=last.text + extra))
    units += [Unit(str(path), path.read_text(encoding="utf-8"), native.language) for path in native.sources]
    if native.debug:
        units.append(Unit("<opkit>", sanitizer.main_unit(), "c"))
    files = [Path(file) for file in (native.file, *native.sources) if Path(file).is_file()]
    return Request(
        label=f"{bound.facts.operator}[{name}]",
        units=tuple(units),
        flags=(*native.flags, *flags),
        include_dirs=(*native.include_dirs, *dict.fromkeys(file.absolute().parent for file in files)),
        library_dirs=native.library_dirs,
        libraries=native.libraries,
        isa=isa or chosen_isa(native.isas),
        kind="executable" if native.debug else "shared",
        debug=native.debug,
    )


def chosen_isa(listed: Sequence[str]) -> str:
    """Return the widest of some instruction sets that this machine has; "native" is always the machine's own.

    Raises:
        ToolchainError: the machine has none of them.
    """
    if "native" in listed:
        return "native"
    usable = isas.usable_isas()
    fitting = [isa for isa in listed if isa in usable]
    if not fitting:
        raise ToolchainError(f"It is for {', '.join(listed)}, and this processor has {', '.join(usable)}.")
    return max(fitting, key=usable.index)
