"""Generate the C constant ``opk_kernel``, which describes a kernel to the runtime, and the functions that export it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from opkit.kernels.binding.binding import Bound
from opkit.kernels.binding.facts import KINDS, Argument, Facts, Shape
from opkit.kernels.binding.slots import Slot

SOURCES = (
    "DATA", "TENSOR", "DATA_LIST", "TENSOR_LIST", "SCALAR", "SCALAR_POINTER", "STRING", "VALUES", "LENGTH", "NAMED_SIZE",
    "NUMEL", "RANK", "SIZE", "STRIDE", "STREAM", "INT_CONSTANT", "FLOAT_CONSTANT", "PACKED_TENSOR",
)  # fmt: skip
"""The ends of the names of ``opk_source``, in order."""

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
