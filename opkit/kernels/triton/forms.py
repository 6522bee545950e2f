"""Describe what a Triton kernel is compiled for as plain text that a package can hold, and find which calls that serves.

Triton compiles in facts of a call: that an int is 1, that 16 divides an int or an address. What was compiled
with fewer of them serves every call of which more is known; never the other way round.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from opkit.kernels.triton import parsing, signatures, targets
from opkit.kernels.triton.compiling import CompileRequest, loaded, value_text

_CONSTANT = "constexpr"
_ONE = "int 1"


@dataclasses.dataclass(frozen=True)
class Form:
    """What one binary is for.

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


def form_of(request: CompileRequest) -> Form:
    """Return a request as a form. Neither a compiler nor a GPU is needed."""
    request = loaded(request)
    return Form(
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


def serves(built: Form, wanted: Form) -> bool:
    """Return whether what was compiled for one form computes what is wanted in another.

    >>> general = Form("a", "sm_90", {"x": "*fp32", "n": "i32"}, {}, (), {})
    >>> call = Form("a", "sm_90", {"x": "*fp32", "n": "constexpr"}, {"n": "int 1"}, ("x",), {})
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


def _takes(built: Form, wanted: Form, name: str) -> bool:
    has, wanted_type = built.signature[name], wanted.signature[name]
    if has == wanted_type:
        return has != _CONSTANT or built.constexprs[name] == wanted.constexprs[name]
    return wanted_type == _CONSTANT and has in ("i32", "i64") and wanted.constexprs[name] == _ONE


def specificity(built: Form, wanted: Form) -> tuple[bool, int, int]:
    """Return a key to order the forms that serve one call: the more facts a binary was compiled with, the faster it is."""
    constants = sum(kind == _CONSTANT for kind in built.signature.values())
    return built.target == wanted.target, constants, len(built.divisible)


def relaxed(request: CompileRequest) -> list[CompileRequest]:
    """Requests that serve more calls than this one, the most general last.

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
    listed = signatures.parameters(request.function)
    ones = {p.name for p in listed if not p.constexpr and _is_one(request, p.name)}
    integer = "i64" if request.wide else "i32"
    return dataclasses.replace(
        request,
        signature={name: integer if name in ones else kind for name, kind in request.signature.items()},
        constexprs={name: value for name, value in request.constexprs.items() if name not in ones},
        divisible=frozenset[str](),
    )


def _is_one(request: CompileRequest, name: str) -> bool:
    return name in request.constexprs and value_text(request.constexprs[name]) == _ONE
