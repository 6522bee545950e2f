"""The class of a call of a Triton kernel: what its compiler knows of the arguments, as Triton's own launcher decides it.

Triton compiles a kernel for each class of arguments: an int that is 1 becomes a constant, one that 16 divides says
so, an int of more than 32 bits gets a wider type. What was compiled with fewer of such facts also serves calls with
more of them, never the other way round. A :class:`CallClass` has them as plain text that a package can hold.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from opkit.errors import KernelError
from opkit.kernels.triton import named, parsing, targets
from opkit.kernels.triton.compiling import CompileRequest, loaded, value_text

_INT32 = range(-(2**31), 2**31)
_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)
_DIVISOR = 16

# By torch's ScalarType; the first fifteen have the numbers of opkit.kernels.cc.dtypes.
_ELEMENTS = {
    0: "u8",
    1: "i8",
    2: "i16",
    3: "i32",
    4: "i64",
    5: "fp16",
    6: "fp32",
    7: "fp64",
    11: "u1",
    15: "bf16",
    23: "fp8e5",
    24: "fp8e4nv",
    25: "fp8e5b16",
    26: "fp8e4b8",
    27: "u16",
    28: "u32",
    29: "u64",
}


def element_type(scalar_type: int) -> str:
    """Return Triton's name of an element type, by its number in torch's ``ScalarType``.

    Raises:
        KernelError: Triton has no such type.
    """
    if scalar_type not in _ELEMENTS:
        raise KernelError(f"Triton has no pointers to torch's element type {scalar_type}; view it as one that it has.")
    return _ELEMENTS[scalar_type]


def pointer_type(scalar_type: int, const: bool = False) -> str:
    """Return the type of a pointer to elements of a dtype, by its number in torch's ``ScalarType``.

    Raises:
        KernelError: Triton has no such type.

    >>> pointer_type(15), pointer_type(11), pointer_type(6, const=True)
    ('*bf16', '*u1', '*kfp32')
    """
    return ("*k" if const else "*") + element_type(scalar_type)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a Triton function. ``annotation`` is the type that the author gave it, or ""."""

    name: str
    annotation: str = ""
    constexpr: bool = False
    const: bool = False
    specialize: bool = True
    align: bool = True


@dataclasses.dataclass(frozen=True)
class Pointer:
    """What the compiler knows of a tensor: its dtype's number, and whether 16 divides its address."""

    scalar_type: int
    aligned: bool = True


@dataclasses.dataclass(frozen=True)
class Typed:
    """An argument whose type was worked out already: a tensor descriptor."""

    type: str


@dataclasses.dataclass(frozen=True)
class Specialised:
    """The class of a call: the parts of :class:`~opkit.kernels.triton.compiling.CompileRequest` that depend on arguments."""

    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: frozenset[str]


def parameters(function: Any) -> tuple[Parameter, ...]:
    """Return the parameters of a Triton function, in order; of a named one as its file says, if that says all."""
    header = function.header if isinstance(function, named.Named) else None
    if header is not None:
        return tuple(
            Parameter(each.name, "", each.constexpr, False, each.specialised, each.aligned)
            for each in header.parameters
        )
    return tuple(
        Parameter(
            param.name,
            param.annotation_type,
            param.is_constexpr,
            param.is_const,
            not param.do_not_specialize,
            not param.do_not_specialize_on_alignment,
        )
        for param in named.loaded(function).params
    )


def specialise(listed: tuple[Parameter, ...], values: Mapping[str, Any]) -> Specialised:
    """Return the class of a call that gives these values: a :class:`Pointer` for a tensor, else the value itself.

    The method is that of Triton's ``native_specialize_impl`` and of the binder that ``JITFunction`` generates.

    Raises:
        KernelError: a parameter has no value, or one of a class that Triton has no type for.

    >>> row = Parameter("x"), Parameter("n"), Parameter("scale"), Parameter("BLOCK", constexpr=True)
    >>> call = specialise(row, {"x": Pointer(15), "n": 4096, "scale": 0.5, "BLOCK": 1024})
    >>> call.signature
    {'x': '*bf16', 'n': 'i32', 'scale': 'fp32', 'BLOCK': 'constexpr'}
    >>> call.constexprs, sorted(call.divisible)
    ({'BLOCK': 1024}, ['n', 'x'])
    """
    types: dict[str, str] = {}
    divisible = set[str]()
    for parameter in listed:
        if parameter.name not in values:
            raise KernelError(f"the Triton parameter {parameter.name} has no value.")
        value = values[parameter.name]
        types[parameter.name] = _type(parameter, value)
        if types[parameter.name] != "constexpr" and _divides(parameter, value):
            divisible.add(parameter.name)
    constexprs = {name: values[name] for name, kind in types.items() if kind == "constexpr"}
    return Specialised(types, constexprs, frozenset(divisible))


def _type(parameter: Parameter, value: Any) -> str:
    if parameter.constexpr:
        return "constexpr"
    if parameter.annotation:
        return parameter.annotation
    if value is None or (parameter.specialize and type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, Pointer):
        return pointer_type(value.scalar_type, parameter.const)
    return _scalar_type(parameter, value)


def _scalar_type(parameter: Parameter, value: Any) -> str:
    if isinstance(value, Typed):
        return value.type
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int) and (value in _INT64 or value in _UINT64):
        return "i32" if value in _INT32 else "i64" if value in _INT64 else "u64"
    raise KernelError(
        f"the Triton parameter {parameter.name} has the value {value!r}, a {type(value).__name__}: Triton takes tensors, "
        "ints of 64 bits, floats and bools, and anything in a parameter annotated with tl.constexpr."
    )


def _divides(parameter: Parameter, value: Any) -> bool:
    """Return whether the compiler may assume that 16 divides the value or address; never of an annotated float or bool."""
    if not (parameter.specialize and parameter.align) or parameter.annotation[:2] in ("u1", "fp", "bf"):
        return False
    if isinstance(value, Pointer):
        return value.aligned
    return type(value) is int and value % _DIVISOR == 0


# ---- forms -----------------------------------------------------------------------------------------------------------


_CONSTANT = "constexpr"
_ONE = "int 1"


@dataclasses.dataclass(frozen=True)
class CallClass:
    """The class of calls that one binary serves.

    Attributes:
        source: the identity of the Triton function, with what it calls; the same with each release of Triton.
        target: the architecture.
        signature: each parameter's type; "constexpr" for constants, and for ints that are 1.
        constexprs: the constants, as text.
        divisible: the parameters that 16 divides.
        options: the compiler's options that the author or a config set, as text.
        wide: program ids have 64 bits.
        offsets: the grid may be launched in pieces.
    """

    source: str
    target: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, str]
    divisible: tuple[str, ...]
    options: Mapping[str, str]
    wide: bool = False
    offsets: bool = False

    def __str__(self) -> str:
        """Return the values that decide it, as a person reads them."""
        constants = {name: text.partition(" ")[2] for name, text in self.constexprs.items()}
        types = [f"{name}: {kind}" for name, kind in self.signature.items() if kind != _CONSTANT]
        values = [f"{name}={value}" for name, value in {**constants, **self.options}.items()]
        large = ["64-bit indexing"] if self.wide else []
        return ", ".join([*types, *values, *large, *(["a grid in pieces"] if self.offsets else [])])


def form_of(request: CompileRequest) -> CallClass:
    """Return a request as a form. Neither a compiler nor a GPU is needed."""
    request = loaded(request)
    return CallClass(
        source=source_of(request.function),
        target=targets.canonical(request.target),
        signature=dict(request.signature),
        constexprs={name: value_text(value) for name, value in request.constexprs.items()},
        divisible=tuple(sorted(request.divisible)),
        options={name: str(value) for name, value in sorted(request.options.items())},
        wide=request.wide,
        offsets=request.offsets,
    )


def source_of(function: Any) -> str:
    """Return the identity of a Triton function: its text, where it stands in its file, what it calls, and its constants."""
    return hashlib.sha256(f"{parsing.cache_key(function)} {bool(function.debug)}".encode()).hexdigest()


def serves(built: CallClass, wanted: CallClass) -> bool:
    """Return whether what was compiled for one form computes what is wanted in another.

    >>> general = CallClass("a", "sm_90", {"x": "*fp32", "n": "i32"}, {}, (), {})
    >>> call = CallClass("a", "sm_90", {"x": "*fp32", "n": "constexpr"}, {"n": "int 1"}, ("x",), {})
    >>> serves(general, call), serves(call, general)
    (True, False)
    """
    return (
        built.source == wanted.source
        and targets.runs(built.target, wanted.target)
        and (built.wide, built.offsets) == (wanted.wide, wanted.offsets)
        and built.options == wanted.options
        and list(built.signature) == list(wanted.signature)
        and set(built.divisible) <= set(wanted.divisible)
        and all(_takes(built, wanted, name) for name in built.signature)
    )


def _takes(built: CallClass, wanted: CallClass, name: str) -> bool:
    has, wanted_type = built.signature[name], wanted.signature[name]
    if has == wanted_type:
        return has != _CONSTANT or built.constexprs[name] == wanted.constexprs[name]
    return wanted_type == _CONSTANT and has in ("i32", "i64") and wanted.constexprs[name] == _ONE


def specificity(built: CallClass, wanted: CallClass) -> tuple[bool, int, int]:
    """Return a key to order the forms that serve one call: the more facts a binary was compiled with, the faster it is."""
    constants = sum(kind == _CONSTANT for kind in built.signature.values())
    return built.target == wanted.target, constants, len(built.divisible)


def relaxed(request: CompileRequest) -> list[CompileRequest]:
    """Return requests that serve more calls than this one, the most general last.

    The first assumes only aligned addresses and ints that are 1, as sizes that 16 does not divide leave it. The last
    assumes nothing, and so serves each call with these types, constants and options. Those that would be the same as
    this one are left out.
    """
    addresses = frozenset(name for name in request.divisible if request.signature[name].startswith("*"))
    listed: list[CompileRequest] = []
    for form in (dataclasses.replace(request, divisible=addresses), _general(request)):
        if form_of(form) not in map(form_of, [request, *listed]):
            listed.append(form)
    return listed


def _general(request: CompileRequest) -> CompileRequest:
    listed = parameters(request.function)
    values = {
        p.name: request.constexprs.get(p.name) for p in listed if not p.constexpr and p.name in request.constexprs
    }
    ones = {name for name, value in values.items() if value_text(value) == _ONE}
    integer = "i64" if request.wide else "i32"
    return dataclasses.replace(
        request,
        signature={name: integer if name in ones else kind for name, kind in request.signature.items()},
        constexprs={name: value for name, value in request.constexprs.items() if name not in ones},
        divisible=frozenset[str](),
    )
