"""Compile a Triton function for a class of calls to machine code for one architecture; no GPU is needed.

binary = build(CompileRequest(function, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128}, target="sm_90"))
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import linecache
import re
import shlex
from collections.abc import Mapping
from typing import Any

from opkit.errors import CompileError, KernelError, OpkitError
from opkit.kernels.triton import binaries, environment, named, parsing, sources, stored, targets
from opkit.kernels.triton.binaries import Binary as Binary
from opkit.kernels.triton.binaries import Param as Param

_COMMAND = re.compile(r"^Repro command: (.*)$", re.MULTILINE)
_ONE_OF_EACH = ("sm_90", "gfx942")
_NOT_OPTIONS = ("arch", "backend_name", "warp_size")


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """One Triton function for one class of arguments. ``function`` may be :class:`~opkit.kernels.triton.named.Named`.

    ``signature`` has every parameter, in order: "*bf16", "i32", "i64", "u1", "fp32", "constexpr",
    "tensordesc<bf16[128, 64]>". ``divisible`` are those that 16 divides; ``constexprs`` the values of the constants.
    """

    function: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: frozenset[str] = frozenset()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: str = "sm_90"
    wide: bool = False
    offsets: bool = False


def build(request: CompileRequest) -> Binary:
    """Return the compiled binary, from a cache (opkit's, or Triton's) or compiled now.

    Raises:
        ArgumentError: the target is none of Triton's.
        KernelError: the function is none of Triton's; an option has a name or value that Triton does not know.
        CompileError: Triton, LLVM or ptxas refused the kernel. Its ``log`` is their whole output; its ``command`` is
            that of ptxas, if ptxas refused it.
    """
    name = _named_key(request)
    found = None if name is None else stored.find_named(name)
    return _built(request, name) if found is None else _checked(request, found)


def _built(request: CompileRequest, name: str | None) -> Binary:
    """Return the binary, found or compiled with Triton, and note its key for later processes that do not import Triton."""
    key = stored.key(identity(request))
    found = None if key is None else stored.find(key)
    built = _checked(request, _binary(request, lowered(request)) if found is None else found)
    if key is not None and found is None:
        stored.store(key, built)
    if name is not None and key is not None and environment.untouched(request.function.module):
        stored.note(name, key)
    return built


def _named_key(request: CompileRequest) -> str | None:
    """Return the key of a request of a named function, computed without Triton; None if it cannot be."""
    if not isinstance(request.function, named.Named):
        return None
    origin = request.function.origin
    if origin is None:
        return None
    parts = [origin, request.function, *_key_parts(request)]
    return stored.named_key(hashlib.sha256(repr(parts).encode()).hexdigest())


def loaded(request: CompileRequest) -> CompileRequest:
    """Return the request with Triton's function, and Triton's and Gluon's constants, in place of their names.

    Raises:
        DeclarationError: the function cannot be loaded.
        KernelError: Gluon has no such layout.
    """
    if not isinstance(request.function, named.Named):
        return request
    signature = {name: named.written_out(kind) for name, kind in request.signature.items()}
    constexprs = {name: named.resolved(value) for name, value in request.constexprs.items()}
    function = request.function.loaded()
    return dataclasses.replace(request, function=function, signature=signature, constexprs=constexprs)


def lowered(request: CompileRequest) -> Any:
    """Return Triton's ``CompiledKernel`` for a request: its ``asm`` has the text of each stage, as "ttir", "ptx", "amdgcn".

    Raises:
        ArgumentError, KernelError, CompileError: as ``build``.
    """
    request = loaded(request)
    _check(request)
    target = targets.parse(request.target)
    options = _options(request, target)
    return _compiled(request, _source(request, _backend(target)), target, options)


def identity(request: CompileRequest) -> str:
    """Return the sha256 of everything that decides the result: source with callees and globals, types, options, Triton."""
    import triton

    request = loaded(request)
    _check(request)
    parts = [triton.__version__, parsing.cache_key(request.function), *_key_parts(request)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _key_parts(request: CompileRequest) -> list[Any]:
    """Return everything in a request but its function, as text."""
    return [
        sorted(request.signature.items()),
        sorted((name, value_text(value)) for name, value in request.constexprs.items()),
        sorted(request.divisible),
        sorted((name, str(value)) for name, value in request.options.items()),
        targets.canonical(request.target),
        (request.wide, request.offsets),
    ]


def value_text(value: Any) -> str:
    """Return a constant as text that is the same in each process, and for equal values alone."""
    return parsing.cache_key(value) if hasattr(value, "cache_key") else f"{type(value).__name__} {value}"


# ---- checks of a request ---------------------------------------------------------------------------------------------


def name_of(function: Any) -> str:
    """Return how errors name a Triton function."""
    return str(getattr(function, "__name__", None) or repr(function))


def _check(request: CompileRequest) -> None:
    from triton.runtime.jit import JITFunction

    function, name = request.function, name_of(request.function)
    if not isinstance(function, JITFunction):
        raise KernelError(f"{name} is a {type(function).__name__}; expected what @triton.jit or @gluon.jit gives.")
    if list(request.signature) != function.arg_names:
        passed, expected = ", ".join(request.signature), ", ".join(function.arg_names)
        raise KernelError(f"{name}: the signature has the parameters {passed}; the function has {expected}.")
    constants = {parameter for parameter, kind in request.signature.items() if kind == "constexpr"}
    if constants != set(request.constexprs):
        odd = ", ".join(sorted(constants ^ set(request.constexprs)))
        raise KernelError(f"{name}: its constants and their values differ in {odd}.")


@functools.cache
def _backend(target: Any) -> Any:
    from triton.compiler.compiler import make_backend

    return make_backend(target)


@functools.cache
def option_names() -> frozenset[str]:
    """Return the compile options that Triton has for one backend or another, such as num_warps, maxnreg, waves_per_eu."""
    names = set[str]()
    for target in _ONE_OF_EACH:
        names |= set(vars(_backend(targets.parse(target)).parse_options({})))
    return frozenset(names.difference(_NOT_OPTIONS))


def _options(request: CompileRequest, target: Any) -> dict[str, Any]:
    """Return Triton's options, with its defaults, without those that only other backends have, such as waves_per_eu."""
    unknown = sorted(set(request.options) - option_names())
    if unknown:
        raise KernelError(f"{name_of(request.function)}: {_unknown(unknown[0], request)}")
    try:
        return vars(_backend(target).parse_options(_defaults(request.function) | dict(request.options)))
    except (AssertionError, TypeError, ValueError) as error:
        options = ", ".join(f"{name}={value!r}" for name, value in request.options.items())
        raise KernelError(
            f"{name_of(request.function)}: Triton refuses {options} for {request.target}: {error}"
        ) from None


def _unknown(option: str, request: CompileRequest) -> str:
    known = [*request.signature, *option_names()]
    near = difflib.get_close_matches(option, known, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"its parameters are {', '.join(request.signature)}."
    return f"{option} is neither one of its parameters nor an option of Triton's compiler: {hint}"


def _defaults(function: Any) -> dict[str, Any]:
    from triton import knobs

    debug = bool(function.debug or knobs.runtime.debug)
    return {"debug": debug, "instrumentation_mode": knobs.compilation.instrumentation_mode}


# ---- compilation -----------------------------------------------------------------------------------------------------


def _source(request: CompileRequest, backend: Any) -> Any:
    names = request.function.arg_names
    divisible = sorted(names.index(name) for name in request.divisible)  # their order is part of Triton's key too
    attributes = {(place,): backend.parse_attr("D") for place in divisible}
    source = sources.source(request.function, dict(request.signature), dict(request.constexprs), attributes)
    source.wide, source.offsets = request.wide, request.offsets
    return source


def _compiled(request: CompileRequest, source: Any, target: Any, options: dict[str, Any]) -> Any:
    from triton.compiler.compiler import compile as compile_source

    try:
        return compile_source(source, target=target, options=options)
    except OpkitError:
        raise
    except Exception as error:
        raise _refused(request, source.place, error) from error


def _refused(request: CompileRequest, place: sources.SourceLine | None, error: Exception) -> CompileError:
    """Return the error for the author: where, which of their lines, and Triton's reason."""
    kernel = f"Triton kernel {name_of(request.function)}"
    where = place or sources.SourceLine(*_defined(request.function))
    line = linecache.getline(*where).strip() if place else ""
    variant = ", with 64-bit indexing," if request.wide else ""
    shown = f"\n    {line}" if line else ""
    message = (
        f"{kernel} could not be compiled{variant} for {request.target}: {where.file}:{where.line}: {_reason(error)}"
    )
    compile_error = CompileError(message + shown)
    compile_error.log = "\n".join(str(cause) for cause in _chain(error))
    command = _COMMAND.search(compile_error.log)
    compile_error.command = tuple(shlex.split(command[1])) if command else ()
    return compile_error


def _defined(function: Any) -> tuple[str, int]:
    code = function.fn.__code__
    return code.co_filename, code.co_firstlineno


def _chain(error: BaseException) -> list[BaseException]:
    return [error, *(_chain(error.__cause__) if error.__cause__ is not None else [])]


def _reason(error: Exception) -> str:
    """Return the message of the innermost error, without the listing that Triton puts before it."""
    inner = _chain(error)[-1]
    message = getattr(inner, "error_message", None) or getattr(inner, "message", None) or str(inner)
    return _COMMAND.sub("", str(message)).strip() or type(inner).__name__


def _checked(request: CompileRequest, binary: Binary) -> Binary:
    """Return the binary; raise if it takes other parameters than opkit passes, as with another release of Triton."""
    expected, found = [param.size for param in binary.params], binaries.parameter_sizes(binary)
    if expected != found:
        raise KernelError(
            f"{name_of(request.function)}: compiled for {request.target}, it takes parameters of {found} bytes where "
            f"opkit passes {expected}: this release of Triton has other rules than opkit knows."
        )
    return binary


def _binary(request: CompileRequest, compiled: Any) -> Binary:
    about = compiled.metadata._asdict()
    described = about.get("tensordesc_meta") or ()
    descriptors = [name for name, kind in request.signature.items() if kind.startswith("tensordesc")]
    return Binary(
        image=compiled.kernel,
        form="cubin" if about["target"].backend == "cuda" else "hsaco",
        name=about["name"],
        threads=about["num_warps"] * about["warp_size"],
        shared=about["shared"] or 0,
        cluster=(about["num_ctas"], 1, 1),
        cooperative=bool(about.get("launch_cooperative_grid")),
        pdl=bool(about.get("launch_pdl")),
        scratch=about.get("global_scratch_size") or 0,
        scratch_align=about.get("global_scratch_align") or 1,
        profile_scratch=about.get("profile_scratch_size") or 0,
        profile_scratch_align=about.get("profile_scratch_align") or 1,
        params=binaries.params(request.signature, described, request.offsets),
        maps=binaries.maps(descriptors, described) if described else (),
        target=targets.canonical(request.target),
    )
