"""``opkit.from_library``: make an operator from a function of an installed shared library."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import keyword
import os
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch

from opkit.errors import DeclarationError, DtypeError, KernelError, OpkitError
from opkit.kernels.binding import Constant
from opkit.kernels.cc.declaration import CParameter
from opkit.kernels.cc.dtypes import C_TYPES
from opkit.kernels.cc.native import NativeKernel
from opkit.kernels.libraries import elementwise, foreign, shared_library
from opkit.kernels.libraries.elementwise import Elementwise
from opkit.kernels.libraries.foreign import Foreign
from opkit.kernels.libraries.shared_library import SharedLibrary
from opkit.op import registry
from opkit.op.definition import custom_op
from opkit.op.operator import CustomOp
from opkit.op.schema import schema_string, signature

_OPTIONS = ("mutates_args", "tags", "inline", "autocast")


def from_library(
    name: str,
    library: str | os.PathLike[str],
    declaration: str,
    *,
    reference: Callable[..., Any] | None = None,
    bind: Mapping[str, Constant] | None = None,
    preamble: str = "",
    returns: str = "code",
    dtypes: Iterable[torch.dtype] | None = None,
    variants: Sequence[str] = (),
    parallel: bool = True,
    flags: Sequence[str] = (),
    **options: Any,
) -> CustomOp[..., Any]:
    """Make an operator from a C function that a shared library exports.

    A function of numbers (``double hypot(double x, double y)``) is applied to every element: its floating parameters
    become tensors, which broadcast and have the declared dtype, and its integers stay numbers. Without ``reference`` the
    operator's signature is the declaration's; it can be vmapped and compiled, and has no gradient.

    Any other function needs a ``reference``. The operator has its signature, and what is derived from it; the C
    function's parameters are bound by name as those of :func:`opkit.c_kernel` are.

    Args:
        name: "namespace::name" of the operator.
        library: a name ("m"), a file name ("libopenblas.so.0") or a path. It is linked with, and loaded at the first call.
        declaration: the function's C declaration, with every parameter named.
        reference: a torch function with annotations that computes the same.
        bind: the values of parameters that are not bound by their own name: numbers, names, expressions of sizes and
            integer arguments (``{"order": 101, "c": "out", "lda": "max(1, k)"}``), a letter for a ``char``, None for NULL.
        preamble: C code before the declaration, such as ``#include <cblas.h>``.
        returns: "code": an integer returned is an error's code, 0 for none; "ignore": it means nothing. What a function
            of numbers returns is its value.
        dtypes: with ``reference``, the kernel takes only calls whose floating tensors have these dtypes.
        variants: declarations of the same function for other element types ("float hypotf(float x, float y)").
        parallel: call a function of numbers on several threads where the tensors are large.
        flags: further options for the compiler.
        options: ``mutates_args``, ``tags``, ``inline`` and ``autocast`` of :func:`opkit.custom_op`.

    Raises:
        KernelError: the library is not installed, or has no such function.
        DeclarationError: a declaration, ``bind`` or ``returns`` is at fault.
        DefinitionError: the name or the reference is. Whatever is raised, no operator is left behind.

    >>> import opkit, torch
    >>> hypot = opkit.from_library("doc::hypot", "m", "double hypot(double x, double y)")
    >>> hypot(torch.tensor([3.0, 5.0], dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64))
    tensor([5.0000, 6.4031], dtype=torch.float64)
    """
    schema_string.split_name(name)
    with _named(name):
        _check_options(options)
        _check_forms(bind, preamble, variants, flags)
        settings = _LibraryOptions(
            shared_library.find(library), dict(bind or {}), preamble, returns, parallel, tuple(flags)
        )
        declared = [_declared(settings, text) for text in (declaration, *variants)]
        symbols = [read.symbol for read in declared]
        twice = next((symbol for symbol in symbols if symbols.count(symbol) > 1), None)
        if twice is not None:
            raise DeclarationError(f"variants=: {twice} is declared twice. Each variant is a function of its own.")
        if reference is None:
            _check_without_reference(declared[0], returns, dtypes)
            caller = sys._getframe(1).f_globals.get("__name__", "__main__")  # pyright: ignore[reportPrivateUsage]
            return _without_reference(name, declared, settings, caller, options)
        kernels = _kernels(declared, settings, reference)
    op = custom_op(name, reference, **options)
    return _completed(op, declared, kernels, None if dtypes is None else tuple(dtypes))


@dataclasses.dataclass(frozen=True)
class _LibraryOptions:
    """The options of ``from_library`` that hold for every variant."""

    library: SharedLibrary
    bind: dict[str, Constant]
    preamble: str
    returns: str
    parallel: bool
    flags: tuple[str, ...]


@contextlib.contextmanager
def _named(name: str) -> Generator[None]:
    """Add the operator's name to errors raised within."""
    try:
        yield
    except OpkitError as error:
        if str(error).startswith(name):
            raise
        raise type(error)(f"{name}: {error}") from error


def _check_options(options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in _OPTIONS:
            near = difflib.get_close_matches(option, [*_OPTIONS, *inspect.getfullargspec(from_library).kwonlyargs], 1)
            hint = f" Did you mean {near[0]}=?" if near else ""
            raise DeclarationError(
                f"from_library has no option {option}=. Options of the operator are {', '.join(_OPTIONS)}.{hint}"
            )


def _check_forms(bind: object, preamble: object, variants: object, flags: object) -> None:
    """Raise if an option has the wrong type."""
    if bind is not None and not isinstance(bind, Mapping):
        raise DeclarationError(f'bind={bind!r}: give a dictionary, such as {{"n": "rows"}}.')
    if not isinstance(preamble, str):
        raise DeclarationError(f"preamble={preamble!r}: give C text.")
    if isinstance(flags, str):
        raise DeclarationError(f"flags={flags!r}: give a list of options.")
    if isinstance(variants, str):
        raise DeclarationError(f"variants={variants!r}: give a list of declarations.")


def _declared(settings: _LibraryOptions, text: str) -> Foreign:
    read = foreign.parse(text, settings.preamble)
    shared_library.check_function(settings.library, read.symbol)
    return read


def _completed(
    op: CustomOp[..., Any],
    declared: Sequence[Foreign],
    kernels: Sequence[Any],
    dtypes: Iterable[torch.dtype] | None = None,
) -> CustomOp[..., Any]:
    """Register the operator's kernels; remove the operator again if one does not fit it."""
    try:
        for read, kernel in reversed(list(zip(declared, kernels, strict=True))):
            op.register_kernel("cpu", kernel, name=read.symbol, dtypes=dtypes)
    except BaseException:
        registry.remove(op.name)
        raise
    return op


# ---- with a reference ------------------------------------------------------------------------------------------------


def _kernels(
    declared: Sequence[Foreign], settings: _LibraryOptions, reference: Callable[..., Any]
) -> list[NativeKernel]:
    if not isinstance(reference, types.FunctionType):
        raise DeclarationError(f"reference={reference!r}: give a Python function with annotations.")
    parameters = {parameter.name: parameter.kind for parameter in signature.read(reference).parameters}
    return [_kernel(read, settings, parameters) for read in declared]


def _kernel(read: Foreign, settings: _LibraryOptions, parameters: Mapping[str, str]) -> NativeKernel:
    """Return the kernel of one variant; a function of numbers is applied to the elements of the reference's tensors."""
    tensors = [name for name, kind in parameters.items() if kind == "tensor"]
    if not read.of_numbers:
        return foreign.kernel(
            read, settings.library, settings.bind, parameters, settings.returns, settings.preamble, settings.flags
        )  # fmt: skip
    _check_value(read, settings.returns)
    return _elementwise_kernel(elementwise.read(read, settings.bind, tensors), settings)


def _elementwise_kernel(function: Elementwise, settings: _LibraryOptions) -> NativeKernel:
    return elementwise.kernel(
        function, settings.library, settings.bind, settings.preamble, settings.flags, settings.parallel
    )


def _check_value(read: Foreign, returns: str) -> None:
    if returns != "code":
        raise DeclarationError(
            f"returns={returns!r}: {read.symbol} is a function of numbers, and what it returns is its value. Leave it out."
        )


# ---- without one: functions of numbers -------------------------------------------------------------------------------


def _check_without_reference(read: Foreign, returns: str, dtypes: Iterable[torch.dtype] | None) -> None:
    if not read.of_numbers:
        raise read.error(
            "only a function that takes and returns numbers makes an operator by itself. Give reference=, a torch function "
            "with annotations that computes the same."
        )
    _check_value(read, returns)
    if dtypes is not None:
        raise DeclarationError(
            "dtypes= is for use with reference=. Without one the declarations say which dtypes there are."
        )


def _without_reference(
    name: str, declared: Sequence[Foreign], settings: _LibraryOptions, module: str, options: Mapping[str, Any]
) -> CustomOp[..., Any]:
    functions = [elementwise.read(read, settings.bind) for read in declared]
    python = _signature(functions[0], settings.bind)
    for function in functions[1:]:
        _check_variant(function, functions[0], settings.bind)
    kernels = [_elementwise_kernel(function, settings) for function in functions]
    choice = _Choice(name, tuple(_Dtypes(f.foreign.symbol, f.dtypes, f.result) for f in functions), python)
    body, chosen = _body(choice, module, declared[0]), {"mutates_args": (), **options}
    op: CustomOp[..., Any] = custom_op(name, body, opaque=True, **chosen)  # pyright: ignore
    _completed(op, declared, kernels)
    op.register_fake(_fake(choice))
    op.register_vmap(_vmap(op, choice))
    return op


def _signature(function: Elementwise, bind: Mapping[str, Constant]) -> inspect.Signature:
    taken = [p for p in function.foreign.function.parameters if not _is_bound(function.foreign, p, bind)]
    parameters = [_python_parameter(function, parameter) for parameter in taken]
    return inspect.Signature(parameters, return_annotation=torch.Tensor)


def _is_bound(read: Foreign, parameter: CParameter, bind: Mapping[str, Constant]) -> bool:
    """Return whether ``bind`` binds a parameter to a number; without a reference there are no names to bind it to."""
    value = bind.get(parameter.name)
    if isinstance(value, str) or (value is None and parameter.name in bind):
        raise read.parameter_error(
            parameter, f"bind gives it {value!r}, but without reference= it can give only numbers."
        )
    return value is not None


def _python_parameter(function: Elementwise, parameter: CParameter) -> inspect.Parameter:
    name = parameter.name
    if keyword.iskeyword(name) or name == elementwise.OUTPUT:
        raise function.foreign.parameter_error(
            parameter, f"the operator's argument cannot be called {name}. Rename it: C does not mind."
        )
    kind = C_TYPES[foreign.numeric(parameter.type)].kind
    annotation = torch.Tensor if parameter in function.tensors else bool if kind == "bool" else int
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _check_variant(function: Elementwise, first: Elementwise, bind: Mapping[str, Constant]) -> None:
    if _signature(function, bind) != _signature(first, bind):
        raise function.foreign.error(
            f"a variant has the parameters of the first declaration, {_signature(first, bind)}, in their order and by name."
        )


@dataclasses.dataclass(frozen=True)
class _Dtypes:
    """The element types of one variant."""

    symbol: str
    tensors: Mapping[str, str]
    result: str

    def __str__(self) -> str:
        return f"{self.symbol} takes {', '.join(f'{name}: {dtype}' for name, dtype in self.tensors.items())}"


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The choice of the variant for a call, by its dtypes."""

    name: str
    variants: tuple[_Dtypes, ...]
    signature: inspect.Signature

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a call by name."""
        arguments = self.signature.bind(*args, **kwargs).arguments
        return {name: arguments[name] for name in self.variants[0].tensors}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> _Dtypes:
        """Return the variant.

        Raises:
            DtypeError: none takes these dtypes.
        """
        have = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        chosen = next((variant for variant in self.variants if dict(variant.tensors) == have), None)
        if chosen is None:
            listed = ", ".join(f"{name}: {dtype}" for name, dtype in have.items())
            raise DtypeError(
                f"{self.name}: no variant of the function takes {listed}; {'; '.join(map(str, self.variants))}. Convert the "
                "arguments, or declare the function for that type in variants=."
            )
        return chosen


def _body(choice: _Choice, module: str, read: Foreign) -> types.FunctionType:
    """Return the operator's function, which runs if no kernel takes a call and raises the reason."""

    def body(*args: Any, **kwargs: Any) -> Any:
        tensors = choice.tensors(args, kwargs)
        variant = choice.of(tensors)
        shown = ", ".join(f"{name} on {tensor.device}, {tensor.layout}" for name, tensor in tensors.items())
        raise KernelError(
            f"{choice.name}: {variant.symbol} runs on dense tensors on the CPU; got {shown}. Move them there first."
        )

    body.__name__ = body.__qualname__ = choice.name.split("::")[1].replace(".", "_")
    body.__module__ = module
    body.__doc__ = f"`{' '.join(read.text.split())}`, applied to every element."
    setattr(body, "__signature__", choice.signature)  # noqa: B010
    body.__annotations__ = {p.name: p.annotation for p in choice.signature.parameters.values()} | {
        "return": torch.Tensor
    }
    return body


def _fake(choice: _Choice) -> Callable[..., torch.Tensor]:
    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = choice.tensors(args, kwargs)
        dtype: torch.dtype = getattr(torch, choice.of(tensors).result)
        first = next(iter(tensors.values()))
        sizes = torch.broadcast_shapes(*[tensor.shape for tensor in tensors.values()])
        return first.new_empty(sizes, dtype=dtype)

    return fake


def _vmap(op: CustomOp[..., Any], choice: _Choice) -> Callable[..., tuple[torch.Tensor, int]]:
    """Return the vmap rule: a mapped dimension becomes the first one, which the tensors broadcast along."""

    def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[torch.Tensor, int]:
        dims = dict(zip(choice.signature.parameters, in_dims, strict=False))
        tensors = choice.tensors(args, {})
        rank = max(tensor.ndim - (dims[name] is not None) for name, tensor in tensors.items())
        moved = {name: _leading(tensor, dims[name], rank) for name, tensor in tensors.items()}
        named = zip(choice.signature.parameters, args, strict=True)
        return op(*[moved.get(name, value) for name, value in named]), 0

    return vmap


def _leading(tensor: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    """Return ``tensor`` with the mapped dimension first, before ``rank`` others."""
    if dim is None:
        return tensor
    tensor = tensor.movedim(dim, 0)
    return tensor.reshape(tensor.shape[0], *[1] * (rank + 1 - tensor.ndim), *tensor.shape[1:])
