"""Generate the C around an author's source: declarations of the C library before it, the kernel's descriptor behind it."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence

from opkit.kernels.binding import Bound, Slot
from opkit.kernels.facts import KINDS, Argument, Facts, Shape

# ---- the C library ---------------------------------------------------------------------------------------------------


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


# ---- the descriptor --------------------------------------------------------------------------------------------------


SOURCES = (
    "DATA", "TENSOR", "DATA_LIST", "TENSOR_LIST", "SCALAR", "SCALAR_POINTER", "STRING", "VALUES", "LENGTH", "NAMED_SIZE",
    "NUMEL", "RANK", "SIZE", "STRIDE", "STREAM", "INT_CONSTANT", "FLOAT_CONSTANT", "PACKED_TENSOR",
)  # fmt: skip
"""The ends of the names of ``opk_source``, in order."""

ELEMENTWISE_EXPORT = """\
OPK_EXPORT opk_trampoline opk_entry(int32_t number);
opk_trampoline opk_entry(int32_t number) { return opk_instances[number].call; }
"""
"""A function that the library of an elementwise kernel exports too: its trampolines, by the numbers of their types."""

_EXPORTS = """\
static opk_state opk_kernel_state;
static const opk_kernel opk_descriptor = {{
    OPK_ABI_VERSION, {operator}, {kernel}, {schema}, {cuda},
    {counts},
    {arguments}, {outputs}, {parameters}, {sizes}, {instances}, &opk_kernel_state
}};
const opk_runtime* opk_rt = 0;
OPK_EXPORT const opk_kernel* opk_describe(void);
OPK_EXPORT void opk_init(const opk_runtime* opk_new_runtime);
OPK_EXPORT void opk_boxed(uint64_t* opk_stack, uint64_t opk_inputs, uint64_t opk_outputs);
OPK_EXPORT void opk_boxed_with_layout(uint64_t* opk_stack, uint64_t opk_inputs, uint64_t opk_outputs);
const opk_kernel* opk_describe(void) {{ return &opk_descriptor; }}
void opk_init(const opk_runtime* opk_new_runtime) {{ opk_rt = opk_new_runtime; }}
void opk_boxed(uint64_t* opk_stack, uint64_t opk_inputs, uint64_t opk_outputs) {{
    opk_call_boxed(opk_rt, &opk_descriptor, opk_stack, opk_inputs, opk_outputs, 0);
}}
void opk_boxed_with_layout(uint64_t* opk_stack, uint64_t opk_inputs, uint64_t opk_outputs) {{
    opk_call_boxed(opk_rt, &opk_descriptor, opk_stack, opk_inputs, opk_outputs, 1);
}}
"""


def quoted(text: str) -> str:
    """Return a C string literal of any text.

    >>> print(quoted('a "b"'), quoted("line\\n"), quoted("é??/"))
    "a \\"b\\"" "line\\012" "\\303\\251\\?\\?/"
    """
    return '"' + "".join(_escaped(byte) for byte in text.encode("utf-8", "surrogateescape")) + '"'


def _escaped(byte: int) -> str:
    if chr(byte) in '"\\?':
        return "\\" + chr(byte)
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"


def _array(kind: str, name: str, rows: Sequence[str]) -> tuple[str, str]:
    """Return a static array's definition, and a reference to it: C has no empty arrays."""
    if not rows:
        return "", "0"
    listed = "".join(f"    {row},\n" for row in rows)
    return f"static const {kind} {name}[] = {{\n{listed}}};\n", name


def _dim(facts: Facts, size: str | int | None) -> str:
    if size is None:
        return "OPK_ANY"
    return f"OPK_LITERAL({size})" if isinstance(size, int) else str(facts.sizes.index(size))


def _variadic(facts: Facts, shape: Shape) -> str:
    if not shape.variadic:
        return "OPK_NO_NAME" if shape.variadic is None else "OPK_UNNAMED"
    return str(facts.sizes.index(shape.variadic))


def _shape(facts: Facts, number: int, shape: Shape) -> str:
    dims = [_dim(facts, size) for size in (*shape.before, *shape.after)]
    text, name = _array("int32_t", f"opk_dims_{number}", [", ".join(dims)] if dims else [])
    row = f"{len(shape.before)}, {_variadic(facts, shape)}, {len(shape.after)}, {name}"
    return f"{text}static const opk_shape opk_shape_{number} = {{{row}}};\n"


def _argument(number: int, argument: Argument) -> str:
    shape = "0" if argument.shape is None else f"&opk_shape_{number}"
    numbers = f"{KINDS.index(argument.kind)}, {int(argument.optional)}, {int(argument.written)}"
    return f"{{{quoted(argument.name)}, {numbers}, {shape}}}"


def _bits(constant: int | float | None) -> str:
    """Return a constant as an ``opk_value``, through its first member: C++ has no other initialiser for a union."""
    packed = struct.pack("<d", constant) if isinstance(constant, float) else struct.pack("<q", constant or 0)
    return f"{{(void*){int.from_bytes(packed, 'little'):#x}ull}}"


def _parameter(slot: Slot) -> str:
    numbers = f"{SOURCES.index(slot.source)}, {slot.argument}, {slot.detail}, {slot.dtype}"
    return f"{{{quoted(slot.name)}, {numbers}, {_bits(slot.constant)}}}"


def _instances(instances: Sequence[tuple[int, ...]]) -> tuple[str, list[str]]:
    types = [_array("int32_t", f"opk_dtypes_{number}", [str(n) for n in each]) for number, each in enumerate(instances)]
    return "".join(text for text, _ in types), [f"{{{name}, opk_call_{n}}}" for n, (_, name) in enumerate(types)]


def _tables(bound: Bound, instances: Sequence[tuple[int, ...]]) -> Iterable[tuple[str, str, list[str]]]:
    facts = bound.facts
    yield "arguments", "opk_argument", [_argument(number, each) for number, each in enumerate(facts.arguments)]
    outputs = [f"{{{quoted(each.name)}, {-1 if each.alias is None else each.alias}}}" for each in facts.outputs]
    yield "outputs", "opk_output", outputs
    yield "parameters", "opk_parameter", [_parameter(slot) for slot in bound.slots]
    yield "sizes", "char* const", [quoted(size) for size in facts.sizes]
    yield "instances", "opk_instance", _instances(instances)[1]


def _counts(tables: Mapping[str, list[str]], variables: int) -> str:
    names = ("arguments", "outputs", "parameters", "sizes")
    return ", ".join(str(n) for n in (*(len(tables[name]) for name in names), variables, len(tables["instances"])))


def descriptor(bound: Bound, kernel_name: str, cuda: bool, instances: Sequence[tuple[int, ...]]) -> str:
    """Return the descriptor and the exported functions; ``instances`` are numbers of dtypes, one for each type variable."""
    rows = {name: (kind, listed) for name, kind, listed in _tables(bound, instances)}
    arrays = {name: _array(kind, f"opk_{name}", listed) for name, (kind, listed) in rows.items()}
    shapes = [
        _shape(bound.facts, number, argument.shape)
        for number, argument in enumerate(bound.facts.arguments)
        if argument.shape is not None
    ]
    exports = _EXPORTS.format(
        operator=quoted(bound.facts.operator),
        kernel=quoted(kernel_name),
        schema=quoted(bound.facts.schema),
        cuda=int(cuda),
        counts=_counts({name: listed for name, (_, listed) in rows.items()}, len(bound.variables)),
        **{name: reference for name, (_, reference) in arrays.items()},
    )
    return "".join((*shapes, _instances(instances)[0], *(text for text, _ in arrays.values()), exports))
