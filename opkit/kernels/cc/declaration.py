"""From C, C++ or CUDA source to the declaration of the function that a kernel calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from opkit.errors import DeclarationError
from opkit.kernels.cc import scanner
from opkit.kernels.cc.dtypes import canonical

RETURNS = ("void", "int", "int32_t", "const char*")
"""What a kernel may return: nothing, a code (0: all is well), or a message (NULL: all is well)."""

TENSOR = "opk_tensor"


@dataclasses.dataclass(frozen=True)
class CParameter:
    """One parameter of a C function. ``type`` is the element's, qualifiers and stars aside.

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
class Function:
    """A C function as its declaration has it; ``line`` counts from 1 in the text it was found in."""

    name: str
    returns: str
    parameters: tuple[CParameter, ...]
    line: int


_SKIPPED = {"static", "inline", "__inline", "__inline__", "template", "__global__", "__device__"}
_NOT_CALLABLE = {"template": "a template", "__global__": "a __global__ function", "__device__": "a __device__ function"}
_DROPPED = re.compile(
    r"\b(?:__restrict__|__restrict|restrict|__extension__|register|__host__|static|inline|__inline__|__inline|constexpr"
    r"|_Nonnull|_Nullable|__forceinline__|_Noreturn|volatile)\b"
)
_SPELLED = (
    (re.compile(r"\b(?:__const(?:__)?|[A-Z]+_CONST)\b"), "const"),
    (re.compile(r"\b(float|double)\s+complex\b"), r"\1 _Complex"),
    (re.compile(r"\b__complex__\b"), "_Complex"),
    (re.compile(r"\bstd\s*::\s*complex\s*<\s*(float|double)\s*>"), r"opk_std_complex_\1"),
    (re.compile(r"(?:\bstd)?\s*::\s*(u?int\d+_t|size_t|ptrdiff_t)\b"), r" \1"),
    (re.compile(r"\bopk_tensor_of\s*\(\s*(\w+)\s*\)"), r"opk_tensor_of_\1"),
)
_BUILTIN = frozenset(
    ("void", "char", "short", "int", "long", "float", "double", "signed", "unsigned", "_Bool", "_Complex")
)
_KEYWORDS = _BUILTIN | {"const", "struct", "union", "enum", "__int128"}


class _Source:
    """The text being read, so that an error can show its line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def error(self, offset: int, message: str) -> DeclarationError:
        line = self.line(offset)
        return DeclarationError(f"line {line}: `{self.text.splitlines()[line - 1].strip()}`: {message}")


def functions(text: str) -> list[scanner.FoundFunction]:
    """Every function at file scope of the text, definitions and declarations, in order."""
    for every_branch in (False, True):
        found = [scanner.function(item) for item in scanner.items(scanner.plain(text, every_branch))]
        listed = [function for function in found if function is not None]
        if listed:
            return listed
    return []


def _named(text: str, name: str) -> scanner.FoundFunction:
    listed = functions(text)
    matching = [function for function in listed if function.name == name]
    if not matching:
        known = ", ".join(dict.fromkeys(function.name for function in listed)) or "none"
        raise DeclarationError(f"No function {name!r} is defined at file scope. Found: {known}.")
    return next((function for function in matching if function.body), matching[-1])


def _candidates(text: str) -> list[scanner.FoundFunction]:
    """The functions that a kernel's source may mean: external ones with a body; else those declared."""
    callable_ = [function for function in functions(text) if not _SKIPPED & function.words]
    defined = [function for function in callable_ if function.body] or callable_
    chosen = [function for function in defined if function.c_linkage] or defined
    return list({function.name: function for function in chosen}.values())


def _only(text: str) -> scanner.FoundFunction:
    candidates = _candidates(text)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise DeclarationError(
            "No function that a kernel could call: define one at file scope that is neither static nor inline, "
            "neither a template nor within a namespace, or name the one to call."
        )
    listed = ", ".join(f"{function.name} (line {_Source(text).line(function.start)})" for function in candidates)
    raise DeclarationError(
        f"Several functions could be the kernel: {listed}. Make all but one static, or name the one to call."
    )


def _spelled(text: str) -> str:
    text = _DROPPED.sub(" ", text)
    for pattern, replacement in _SPELLED:
        text = pattern.sub(replacement, text)
    return text


def _chunks(text: str) -> list[tuple[int, str]]:
    """Parameters with their offsets, split at commas outside brackets."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            found.append((start, text[start:place]))
            start = place + 1
    return [*found, (start, text[start:])]


def _unknown(chunk: str) -> list[str]:
    """The words of a parameter that must be types, though C does not know them."""
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\b(?:struct|union|enum)\s+\w+", "int", chunk))
    names = [word for word in words if word not in _KEYWORDS]
    known = any(word in _BUILTIN for word in words)
    return names[:-1] if known or len(names) > 1 else names


def _return_type(prefix: str) -> str:
    """The return type alone: without macros such as an API's EXPORT."""
    words = re.findall(r"[A-Za-z_]\w*|\*", _spelled(prefix))
    if _BUILTIN & set(words):
        words = [word for word in words if word in _KEYWORDS or word == "*"]
    stars = words.count("*")
    words = [word for word in words if word != "*"]
    const = "const" in words and stars > 0
    return f"{'const ' * const}{canonical(word for word in words if word != 'const')}{'*' * stars}"


def _syntax(source: _Source, offset: int, chunk: str) -> Any:
    """One parameter's syntax tree."""
    import pycparser  # it takes 30 ms to import, and most processes find their kernels in the cache

    typedefs = "".join(f"typedef int {name};" for name in dict.fromkeys(_unknown(chunk)))
    try:
        tree = pycparser.CParser().parse(f"{typedefs}void opk_f({chunk});")
    except Exception as error:
        raise source.error(
            offset,
            f"the parameter `{' '.join(chunk.split())}` cannot be read as C. Take a value, or a pointer to plain data.",
        ) from error
    return tree.ext[-1].type.args.params[0]


def _words(node: Any) -> str:
    kind = type(node).__name__
    if kind == "IdentifierType":
        return canonical(node.names)
    if kind == "Struct" and node.name == TENSOR:
        return TENSOR
    return f"{kind.lower()} {node.name}"


def _type(node: Any) -> tuple[str, list[list[str]]]:
    """The element's type, and the qualifiers of each level from the parameter itself to the element."""
    qualifiers: list[list[str]] = []
    while type(node).__name__ in ("PtrDecl", "ArrayDecl"):
        array = type(node).__name__ == "ArrayDecl"
        if array and type(node.type).__name__ == "ArrayDecl":
            return "array", [[], []]
        qualifiers.append([] if array else node.quals)
        node = node.type
    if type(node).__name__ != "TypeDecl":
        return "function", [*qualifiers, []]
    return _words(node.type), [*qualifiers, node.quals]


_STANDARD = {f"opk_std_complex_{part}": f"std::complex<{part}>" for part in ("float", "double")}


def _parameter(source: _Source, offset: int, chunk: str) -> CParameter:
    text = " ".join(chunk.split())
    offset += len(chunk) - len(chunk.lstrip())
    if text == "...":
        raise source.error(offset, "a kernel cannot take `...`. Name every parameter.")
    node = _syntax(source, offset, _spelled(chunk))
    name = getattr(node, "name", None)
    if not name:
        raise source.error(
            offset, f"the parameter `{text}` has no name, and parameters are bound by name. Give it one."
        )
    kind, levels = _type(node.type)
    element = kind.removeprefix("opk_tensor_of_") if kind.startswith("opk_tensor_of_") else ""
    inner = len(levels) == 3 and "const" in levels[1]
    kind = TENSOR if element else _STANDARD.get(kind, kind)
    return CParameter(name, kind, len(levels) - 1, "const" in levels[-1], text, inner, element)


def _parameters(source: _Source, found: scanner.FoundFunction) -> tuple[CParameter, ...]:
    if found.parameters.strip() in ("", "void"):
        return ()
    listed = _chunks(found.parameters)
    return tuple(_parameter(source, found.parameters_start + offset, chunk) for offset, chunk in listed)


def parse(source: str, name: str | None = None, returns: Sequence[str] | None = RETURNS) -> Function:
    """The declaration of the function ``name``, or of the only one that the source can mean.

    ``returns`` are the return types allowed; None allows any. Errors name the line within ``source``.

    >>> function = parse("static T one(T x) { return x; } void copy(const T* x, T* out, int64_t n) {}")
    >>> function.name, [parameter.spelling for parameter in function.parameters]
    ('copy', ['const T*', 'T*', 'int64_t'])
    """
    found = _named(source, name) if name is not None else _only(source)
    shown = _Source(source)
    for word, what in _NOT_CALLABLE.items():
        if word in found.words:
            raise shown.error(found.start, f"{found.name} is {what}. Name a function that calls it.")
    kind = _return_type(found.prefix)
    if returns is not None and kind not in returns:
        raise shown.error(
            found.start,
            f"{found.name} returns {kind}; a kernel returns void, int (0: all is well, else an error's code) or "
            "const char* (NULL: all is well, else an error's message). Write results to the outputs.",
        )
    return Function(found.name, kind, _parameters(shown, found), shown.line(found.start))
