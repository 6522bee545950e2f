"""Find the function that a kernel calls in C, C++ or CUDA source, and read its declaration.

:mod:`opkit.kernels.cc.scanner` isolates the declaration, cffi reads it. What cffi does not know is replaced before: GNU's and
C++'s spellings by C's, and every unknown type (``T``, ``cudaStream_t``) by an opaque one of the same name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.cc import scanner
from opkit.kernels.cc.dtypes import C_TYPES

RETURNS = ("void", "int", "int32_t", "const char*")
"""What a kernel may return: nothing, a code (0: success), or a message (NULL: success)."""

TENSOR = "opk_tensor"


@dataclasses.dataclass(frozen=True)
class CParameter:
    """One parameter of a C function. ``type`` is the element's, without qualifiers and stars.

    ``const``: what the (innermost) pointer points to is const. ``inner_const``: of ``T* const*``, the pointers are.
    ``element`` is the T of an ``opk_tensor_of(T)``, and ``text`` the parameter as its author wrote it.
    """

    name: str
    type: str
    pointer: int
    const: bool
    text: str
    inner_const: bool = False
    element: str = ""

    @property
    def spelling(self) -> str:
        """The type as a cast spells it."""
        name = self.type if self.type != "function" else "void"
        inner = "* const*" if self.inner_const else "*" * self.pointer
        return f"{'const ' if self.const and self.pointer else ''}{name}{inner}"


@dataclasses.dataclass(frozen=True)
class CFunction:
    """The declaration of a C function; ``line`` counts from 1 in the text that declares it."""

    name: str
    returns: str
    parameters: tuple[CParameter, ...]
    line: int


# ---- the function in the source --------------------------------------------------------------------------------------

_SKIPPED = {"static", "inline", "__inline", "__inline__", "template", "__global__", "__device__"}
_NOT_CALLABLE = {"template": "a template", "__global__": "a __global__ function", "__device__": "a __device__ function"}


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _error(text: str, offset: int, message: str) -> DeclarationError:
    line = _line(text, offset)
    return DeclarationError(f"line {line}: `{text.splitlines()[line - 1].strip()}`: {message}")


def functions(text: str) -> list[scanner.ScannedFunction]:
    """Return every function at file scope of the text, definitions and declarations, in order."""
    for every_branch in (False, True):
        items = scanner.top_level_items(scanner.plain(text, every_branch))
        found = [function for function in map(scanner.as_function, items) if function is not None]
        if found:
            return found
    return []


def _named(text: str, name: str) -> scanner.ScannedFunction:
    listed = functions(text)
    matching = [function for function in listed if function.name == name]
    if not matching:
        known = ", ".join(dict.fromkeys(function.name for function in listed)) or "none"
        raise DeclarationError(f"No function {name!r} is defined at file scope. Found: {known}.")
    return next((function for function in matching if function.body), matching[-1])


def _only(text: str) -> scanner.ScannedFunction:
    """Return the only function that a kernel's source can mean: an external one with a body, else a declared one."""
    external = [function for function in functions(text) if not _SKIPPED & function.words]
    defined = [function for function in external if function.body] or external
    linked = [function for function in defined if function.c_linkage] or defined
    candidates = list({function.name: function for function in linked}.values())
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise DeclarationError(
            "No function that a kernel could call: define one at file scope that is neither static nor inline, "
            "neither a template nor within a namespace, or name the one to call."
        )
    listed = ", ".join(f"{function.name} (line {_line(text, function.start)})" for function in candidates)
    raise DeclarationError(
        f"Several functions could be the kernel: {listed}. Make all but one static, or name the one to call."
    )


# ---- its declaration, read by cffi -----------------------------------------------------------------------------------

_DROPPED = re.compile(
    r"\b(?:__restrict__|__restrict|restrict|__extension__|register|__host__|static|inline|__inline__|__inline|constexpr"
    r"|_Nonnull|_Nullable|__forceinline__|_Noreturn|volatile)\b"
)
_RESPELLED = (
    (re.compile(r"\b(?:__const(?:__)?|[A-Z]+_CONST)\b"), "const"),
    (re.compile(r"\bstd\s*::\s*complex\s*<\s*(float|double)\s*>"), r"opk_std_complex_\1"),
    (re.compile(r"\b__complex__\b"), "_Complex"),
    (re.compile(r"\b(float|double)\s+complex\b"), r"\1 _Complex"),
    (re.compile(r"\b_Complex\s+(float|double)\b"), r"\1 _Complex"),
    (re.compile(r"\blong\s+double\s+_Complex\b"), "opk_long_double_complex"),
    (re.compile(r"\b__int128\b"), "opk_int128"),
    (re.compile(r"(?:\bstd)?\s*::\s*(u?int\d+_t|size_t|ptrdiff_t)\b"), r" \1"),
    (re.compile(r"\bopk_tensor_of\s*\(\s*(\w+)\s*\)"), r"opk_tensor_of_\1"),
    (re.compile(rf"\bstruct\s+{TENSOR}\b"), TENSOR),
    (re.compile(r"\b(int|char)((?:\s+(?:unsigned|signed|short|long))+)\b"), r"\2 \1"),
    (re.compile(r"\[[^\[\]]*\]"), "[]"),
)
_SHOWN = {
    "opk_std_complex_float": "std::complex<float>",
    "opk_std_complex_double": "std::complex<double>",
    "opk_long_double_complex": "long double _Complex",
    "opk_int128": "__int128",
    "_cffi_float_complex_t": "float _Complex",
    "_cffi_double_complex_t": "double _Complex",
}
"""What a message and the generated C write for a type that has another name in cffi."""

_BUILTIN = frozenset(
    ("void", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "_Bool", "_Complex")
)
_KEYWORDS = _BUILTIN | {"const", "struct", "union", "enum"}


def _respelled(text: str) -> str:
    text = _DROPPED.sub(" ", text)
    for pattern, replacement in _RESPELLED:
        text = pattern.sub(replacement, text)
    return text


def _unknown_types(declaration: str) -> list[str]:
    """Return the words of a variable's declaration that must be types, though C does not know them."""
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\b(?:struct|union|enum)\s+\w+", "int", declaration))
    names = [word for word in words if word not in _KEYWORDS]
    known = any(word in _BUILTIN for word in words)
    return names[:-1] if known or len(names) > 1 else names


def _read(texts: Sequence[str]) -> list[CParameter]:
    """Read declarations of variables as the fields of one structure: cffi drops the names of a function's parameters.

    Raises:
        DeclarationError: cffi cannot read them, or one has no name.
    """
    # imported here: with the parser it takes 20 to 70 ms, mostly for pycparser
    from cffi import CDefError, FFIError, VerificationError
    from cffi.cparser import Parser

    declarations = [_respelled(text) for text in texts]
    types = dict.fromkeys(name for declaration in declarations for name in _unknown_types(declaration))
    parser = Parser()
    try:
        parser.parse(
            "".join(f"typedef ... {name};\n" for name in types)
            + f"struct opk_declared {{ {''.join(f'{declaration};' for declaration in declarations)} }};"
        )
        fields: Any = parser.parse_type("struct opk_declared")
        rows = zip(fields.fldnames, fields.fldtypes, fields.fldquals, texts, strict=False)
        parameters = [_parameter(name, kind, quals, " ".join(text.split())) for name, kind, quals, text in rows]
    except (
        CDefError,
        FFIError,
        VerificationError,
        NotImplementedError,
        ValueError,
        AssertionError,
        AttributeError,
        RecursionError,
    ) as error:  # cffi raises the first five; it asserts what C guarantees, and takes a #pragma for a declaration
        raise DeclarationError(f"cffi cannot read it: {error}") from error
    if "" in fields.fldnames or len(fields.fldnames) != len(texts):
        raise DeclarationError("a declaration has no name, or declares several")
    return parameters


def _parameter(name: str, kind: Any, quals: int, text: str) -> CParameter:
    element, consts = _element(kind, quals)
    inner = len(consts) == 3 and consts[1]
    of = element.removeprefix(f"{TENSOR}_of_") if element.startswith(f"{TENSOR}_of_") else ""
    shown = TENSOR if of else _SHOWN.get(element, element)
    return CParameter(name, shown, len(consts) - 1, consts[-1], text, inner, of)


def _element(kind: Any, quals: int) -> tuple[str, list[bool]]:
    """Return the element's type, and whether each level from the parameter itself to the element is const."""
    from cffi import model

    consts: list[bool] = []
    while isinstance(kind, (model.PointerType, model.ArrayType)):
        if isinstance(kind, model.PointerType):
            consts.append(bool(quals & model.Q_CONST))
            kind, quals = kind.totype, kind.quals
        elif isinstance(kind.item, model.ArrayType):
            return "array", [False, False]
        else:  # its qualifiers are the elements'
            consts.append(False)
            kind = kind.item
    if isinstance(kind, model.BaseFunctionType):
        return "function", [*consts, False, False]
    return kind.get_c_name(), [*consts, bool(quals & model.Q_CONST)]


def _split(text: str) -> list[tuple[int, str]]:
    """Return parameters with their offsets, split at commas outside brackets."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            found.append((start, text[start:place]))
            start = place + 1
    return [*found, (start, text[start:])]


def _returned(prefix: str) -> str:
    """Return the text of the return type alone: without macros such as an API's EXPORT."""
    words = re.findall(r"[A-Za-z_]\w*|\*", _respelled(prefix))
    known = _BUILTIN | C_TYPES.keys()
    if known & set(words):
        words = [word for word in words if word in known | _KEYWORDS or word == "*"]
    return " ".join(words)


def _readable(text: str) -> bool:
    try:
        return bool(_read([text]))
    except DeclarationError:
        return False


def _unreadable(source: str, function: scanner.ScannedFunction, chunks: Sequence[tuple[int, str]]) -> DeclarationError:
    """Return the error about the first part of a declaration that cannot be read."""
    for offset, chunk in chunks:
        text = " ".join(chunk.split())
        if _readable(chunk):
            continue
        if text == "...":
            message = "a kernel cannot take `...`. Name every parameter."
        elif _readable(f"{chunk} opk_name"):
            message = f"the parameter `{text}` has no name, and parameters are bound by name. Give it one."
        else:
            message = f"the parameter `{text}` cannot be read as C. Take a value, or a pointer to plain data."
        return _error(source, function.parameters_start + offset + len(chunk) - len(chunk.lstrip()), message)
    return _error(
        source,
        function.start,
        f"the declaration of {function.name} cannot be read as C. Write the type that it returns without macros, and give no "
        "parameter the name of a type.",
    )


def parse(source: str, name: str | None = None, returns: Sequence[str] | None = RETURNS) -> CFunction:
    """Read the declaration of the function ``name``, or of the only one that the source can mean.

    ``returns`` are the return types allowed; None allows any. Errors name the line within ``source``.

    >>> function = parse("static T one(T x) { return x; } void copy(const T* x, T* out, int64_t n) {}")
    >>> function.name, [parameter.spelling for parameter in function.parameters]
    ('copy', ['const T*', 'T*', 'int64_t'])
    """
    function = _named(source, name) if name is not None else _only(source)
    for word, what in _NOT_CALLABLE.items():
        if word in function.words:
            raise _error(source, function.start, f"{function.name} is {what}. Name a function that calls it.")
    chunks = [] if function.parameters.strip() in ("", "void") else _split(function.parameters)
    try:
        returned, *parameters = _read([f"{_returned(function.prefix)} opk_returned", *(chunk for _, chunk in chunks)])
    except DeclarationError as error:
        raise _unreadable(source, function, chunks) from error
    if returns is not None and returned.spelling not in returns:
        raise _error(
            source,
            function.start,
            f"{function.name} returns {returned.spelling}; a kernel returns void, int (0: all is well, else an error's code) "
            "or const char* (NULL: all is well, else an error's message). Write results to the outputs.",
        )
    return CFunction(function.name, returned.spelling, tuple(parameters), _line(source, function.start))
