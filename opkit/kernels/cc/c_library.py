"""Declare the functions of the C library that a C kernel uses without including a header.

Those that a source names and does not define are declared as the headers declare them, so that including the headers as
well does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_UNARY = re.findall(
    r"\w+",
    "acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 fabs floor lgamma log log10 log1p log2 "
    "logb nearbyint rint round sin sinh sqrt tan tanh tgamma trunc",
)
_BINARY = re.findall(r"\w+", "atan2 copysign fdim fmax fmin fmod hypot nextafter pow remainder")
_TO_INTEGER = {"lrint": "long", "lround": "long", "llrint": "long long", "llround": "long long", "ilogb": "int"}


def _floating(suffix: str, kind: str) -> dict[str, str]:
    unary = {f"{name}{suffix}": f"{kind} {name}{suffix}({kind})" for name in _UNARY}
    binary = {f"{name}{suffix}": f"{kind} {name}{suffix}({kind}, {kind})" for name in _BINARY}
    integer = {f"{name}{suffix}": f"{result} {name}{suffix}({kind})" for name, result in _TO_INTEGER.items()}
    rest = {
        f"fma{suffix}": f"{kind} fma{suffix}({kind}, {kind}, {kind})",
        f"ldexp{suffix}": f"{kind} ldexp{suffix}({kind}, int)",
        f"scalbn{suffix}": f"{kind} scalbn{suffix}({kind}, int)",
        f"frexp{suffix}": f"{kind} frexp{suffix}({kind}, int*)",
        f"modf{suffix}": f"{kind} modf{suffix}({kind}, {kind}*)",
    }
    return {**unary, **binary, **integer, **rest}


_QUIET = {
    **_floating("", "double"),
    **_floating("f", "float"),
    "abs": "int abs(int)",
    "labs": "long labs(long)",
    "llabs": "long long llabs(long long)",
    "memcpy": "void* memcpy(void* __restrict__, const void* __restrict__, size_t)",
    "memmove": "void* memmove(void*, const void*, size_t)",
    "memset": "void* memset(void*, int, size_t)",
    "memcmp": "int memcmp(const void*, const void*, size_t)",
    "strlen": "size_t strlen(const char*)",
    "strcmp": "int strcmp(const char*, const char*)",
    "strncmp": "int strncmp(const char*, const char*, size_t)",
    "malloc": "void* malloc(size_t)",
    "calloc": "void* calloc(size_t, size_t)",
    "realloc": "void* realloc(void*, size_t)",
    "free": "void free(void*)",
    "snprintf": "int snprintf(char* __restrict__, size_t, const char* __restrict__, ...)",
}
_THROWING = {
    "printf": "int printf(const char* __restrict__, ...)",
    "qsort": "void qsort(void*, size_t, size_t, int (*)(const void*, const void*))",
}
_TESTS = ("isnan", "isinf", "isfinite", "isnormal", "signbit")


def _used(text: str, defined: Collection[str]) -> list[str]:
    words = dict.fromkeys(re.findall(r"\b[a-z]\w*(?=\s*[(),;])", text))
    return [word for word in words if word not in defined]


def declarations(text: str, defined: Collection[str], cpp: bool) -> str:
    """Return declarations of the functions that ``text`` (without literals) names and does not define.

    >>> declarations("y = expf(x);", (), cpp=False)
    'float expf(float);\\n'
    """
    names = _used(text, defined)
    declared = [f"{_QUIET[name]}{' noexcept' if cpp else ''};" for name in names if name in _QUIET]
    declared += [f"{_THROWING[name]};" for name in names if name in _THROWING]
    lines = ['extern "C" {', *declared, "}"] if cpp and declared else declared
    return "".join(f"{line}\n" for line in lines)


def macros(text: str, defined: Collection[str]) -> dict[str, str]:
    """Return the definitions of the macros ``isnan(x)`` and the like that the text uses. No header may be included
    while they are defined.

    ``x * 1.0f`` makes a float of the types that C++ has as classes, and leaves a double as it is.
    """
    known = [name for name in _used(text, defined) if name in _TESTS]
    own = [name for name in known if re.search(rf"#\s*define\s+{name}\b", text)]
    return {name: f"__builtin_{name}((x) * 1.0f)" for name in known if name not in own}
