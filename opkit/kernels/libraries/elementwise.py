"""Make the kernel that applies a library's function of numbers, such as ``double tgamma(double x)``, to every element.

The tensors may have any strides and broadcast. Dimensions are put in the order of the output's strides and merged where
all tensors allow it, so that tensors of one dense layout are one row, whichever layout that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from opkit.kernels.binding import Constant
from opkit.kernels.cc.declaration import TENSOR, CFunction, CParameter
from opkit.kernels.cc.dtypes import C_TYPES
from opkit.kernels.cc.native import Elements, NativeKernel
from opkit.kernels.libraries import foreign as foreigns
from opkit.kernels.libraries.foreign import Foreign
from opkit.kernels.libraries.shared_library import SharedLibrary

OUTPUT = "out"
_GRAIN = 2048  # elements: some 40 microseconds of a function of 20 ns, a few times what waking a thread costs
_FLOATING = ("float", "complex")
_WITHOUT_TENSORS = (
    "none of its parameters would be a tensor: floating parameters are, unless bind gives them a number, and integers are "
    "not. Give a reference= that takes tensors, or write a C kernel."
)
_WITHOUT_TENSORS_OF_REFERENCE = (
    "none of its parameters is a tensor of the reference. Annotate the reference's parameters (x: Tensor), and call them as "
    "the declaration does, or assign them in bind."
)

# The part that does not depend on the function: the loop's dimensions, and the rows of each thread.
_LOOP = """\
typedef struct opk_loop {
    char* data[OPK_TENSORS];
    int64_t strides[OPK_TENSORS][64]; /* in bytes */
    int64_t sizes[64];
    int rank;
    const opk_numbers* numbers;
} opk_loop;

static void opk_row(const opk_numbers* numbers, char* const* at, const int64_t* strides, int64_t count);

static void opk_rows(int64_t begin, int64_t end, void* context) {
    const opk_loop* loop = (const opk_loop*)context;
    const int last = loop->rank - 1;
    int64_t inner[OPK_TENSORS];
    for (int k = 0; k < OPK_TENSORS; k++) inner[k] = loop->strides[k][last];
    while (begin < end) {
        char* at[OPK_TENSORS];
        const int64_t first = begin % loop->sizes[last], left = loop->sizes[last] - first;
        const int64_t count = left < end - begin ? left : end - begin;
        for (int k = 0; k < OPK_TENSORS; k++) at[k] = loop->data[k] + first * inner[k];
        int64_t rest = begin / loop->sizes[last];
        for (int d = last - 1; d >= 0 && rest > 0; d--) {
            const int64_t index = rest % loop->sizes[d];
            rest /= loop->sizes[d];
            for (int k = 0; k < OPK_TENSORS; k++) at[k] += index * loop->strides[k][d];
        }
        opk_row(loop->numbers, at, inner, count);
        begin += count;
    }
}

/* The dimensions of the output that have more than one index, those of the longest strides first. */
static void opk_order(const opk_tensor* out, int* order, int* rank) {
    *rank = 0;
    for (int d = 0; d < out->rank; d++) {
        if (out->sizes[d] == 1) continue;
        int place = (*rank)++;
        for (; place > 0 && out->strides[order[place - 1]] < out->strides[d]; place--) order[place] = order[place - 1];
        order[place] = d;
    }
}

/* The stride in bytes of tensor k along a dimension of the output; 0 where it broadcasts. */
static int64_t opk_stride(const opk_tensor* tensor, const opk_tensor* out, int dimension, int64_t bytes) {
    const int64_t own = dimension - (out->rank - tensor->rank);
    return own < 0 || tensor->sizes[own] == 1 ? 0 : tensor->strides[own] * bytes;
}

static int opk_fits(const opk_tensor* tensor, const opk_tensor* out) {
    if (tensor->rank > out->rank) return 0;
    for (int64_t d = 0; d < tensor->rank; d++) {
        const int64_t size = tensor->sizes[d];
        if (size != 1 && size != out->sizes[out->rank - tensor->rank + d]) return 0;
    }
    return 1;
}

static void opk_merge(opk_loop* loop) {
    int last = 0;
    for (int d = 1; d < loop->rank; d++) {
        int mergeable = 1;
        for (int k = 0; k < OPK_TENSORS; k++)
            mergeable &= loop->strides[k][last] == loop->strides[k][d] * loop->sizes[d];
        last += !mergeable;
        loop->sizes[last] = mergeable ? loop->sizes[last] * loop->sizes[d] : loop->sizes[d];
        for (int k = 0; k < OPK_TENSORS; k++) loop->strides[k][last] = loop->strides[k][d];
    }
    loop->rank = last + 1;
}

static int opk_apply(const opk_tensor* const* tensors, const int64_t* bytes, const opk_numbers* numbers) {
    const opk_tensor* out = tensors[0];
    opk_loop loop = {{0}, {{0}}, {1}, 0, numbers};
    int order[64];
    if (out->rank > 64) {
        opk_fail("a tensor of %lld dimensions; at most 64 are supported", (long long)out->rank);
        return -1;
    }
    opk_order(out, order, &loop.rank);
    for (int k = 0; k < OPK_TENSORS; k++) {
        if (!opk_fits(tensors[k], out)) {
            opk_fail("the output's sizes are not those to which the arguments broadcast");
            return -1;
        }
        loop.data[k] = (char*)tensors[k]->data;
        for (int d = 0; d < loop.rank; d++) loop.strides[k][d] = opk_stride(tensors[k], out, order[d], bytes[k]);
    }
    for (int d = 0; d < loop.rank; d++) loop.sizes[d] = out->sizes[order[d]];
    opk_merge(&loop);
    int64_t total = 1;
    for (int d = 0; d < loop.rank; d++) total *= loop.sizes[d];
    OPK_RUN(total, &loop);
    return 0;
}
"""
_PARALLEL = "#define OPK_RUN(total, loop) opk_parallel_for(0, total, %d, opk_rows, loop)\n"
_SERIAL = "#define OPK_RUN(total, loop) opk_rows(0, total, loop)\n"


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """A function of numbers; ``tensors`` are the parameters that become tensors."""

    foreign: Foreign
    tensors: tuple[CParameter, ...]

    @property
    def dtypes(self) -> dict[str, str]:
        """The element type of each tensor."""
        return {parameter.name: dtype_of(parameter.type) for parameter in self.tensors}

    @property
    def result(self) -> str:
        """The element type of the output."""
        return dtype_of(self.foreign.function.returns)

    @property
    def numbers(self) -> list[CParameter]:
        """The parameters that stay numbers."""
        return [parameter for parameter in self.foreign.function.parameters if parameter not in self.tensors]


def dtype_of(c_type: str) -> str:
    """Return the dtype of a C type, or "" where torch has none.

    >>> dtype_of("double"), dtype_of("enum kind"), dtype_of("long double")
    ('float64', 'int32', '')
    """
    known = C_TYPES.get("int" if c_type.startswith("enum ") else c_type)
    return (known and known.dtype) or ""


def read(foreign: Foreign, bind: Mapping[str, Constant], tensors: Collection[str] | None = None) -> Elementwise:
    """Choose the parameters that become tensors: those named, or every floating one without a number in ``bind``.

    Raises:
        DeclarationError: no parameter would; or one, or the result, has a type that torch lacks.
    """
    foreigns.check_bind(foreign, bind)
    chosen = [p for p in foreign.function.parameters if _is_tensor(p, bind, tensors)]
    if not chosen:
        raise foreign.error(_WITHOUT_TENSORS if tensors is None else _WITHOUT_TENSORS_OF_REFERENCE)
    for parameter in chosen:
        if not dtype_of(parameter.type):
            raise foreign.parameter_error(parameter, f"no tensor has elements of type {parameter.type}.")
    if not dtype_of(foreign.function.returns):
        raise foreign.error(f"no tensor has elements of type {foreign.function.returns}, which it returns.")
    return Elementwise(foreign, tuple(chosen))


def _is_tensor(parameter: CParameter, bind: Mapping[str, Constant], tensors: Collection[str] | None) -> bool:
    value = bind.get(parameter.name, parameter.name)
    if tensors is not None:
        return isinstance(value, str) and value in tensors
    return isinstance(value, str) and C_TYPES[foreigns.numeric(parameter.type)].kind in _FLOATING


def kernel(
    function: Elementwise,
    library: SharedLibrary,
    bind: Mapping[str, Constant],
    preamble: str = "",
    flags: Sequence[str] = (),
    parallel: bool = True,
) -> NativeKernel:
    """Make the kernel that applies the function to every element."""
    foreign = function.foreign
    taken = [_parameter(parameter, parameter in function.tensors) for parameter in foreign.function.parameters]
    out = CParameter("opk_out", TENSOR, 1, True, foreign.text, element=foreign.function.returns)
    entry = CFunction(f"call_{foreign.symbol}", "int", (*taken, out), 1)
    running = _PARALLEL % _GRAIN if parallel else _SERIAL
    pieces = (
        preamble,
        foreigns.prototype(foreign),
        _numbers(function),
        running,
        _LOOP,
        _row(function),
        _entry(function, entry),
    )
    native = foreigns.native(foreign, library, "\n".join(pieces), entry, {**bind, "opk_out": OUTPUT}, flags)
    return dataclasses.replace(native, elements=_elements(function, library, parallel))


def _elements(function: Elementwise, library: SharedLibrary, parallel: bool) -> Elements:
    declared = function.foreign.function
    listed = tuple((p.name, foreigns.numeric(p.type)) for p in declared.parameters)
    tensors = frozenset(p.name for p in function.tensors)
    returned = foreigns.numeric(declared.returns)
    return Elements(function.foreign.symbol, library.path, listed, returned, tensors, parallel)


def _parameter(parameter: CParameter, tensor: bool) -> CParameter:
    kind = foreigns.numeric(parameter.type)
    if not tensor:
        return dataclasses.replace(parameter, type=kind)
    return dataclasses.replace(parameter, type=TENSOR, pointer=1, const=True, element=kind)


def _numbers(function: Elementwise) -> str:
    fields = "".join(f" {foreigns.numeric(p.type)} opk_{p.name};" for p in function.numbers) or " char opk_none;"
    return f"enum {{ OPK_TENSORS = {len(function.tensors) + 1} }};\ntypedef struct opk_numbers {{{fields} }} opk_numbers;\n"


def _types(function: Elementwise) -> list[str]:
    """Return the element types: the output's, then the tensors'."""
    return [foreigns.numeric(text) for text in (function.foreign.function.returns, *(p.type for p in function.tensors))]


def _row(function: Elementwise) -> str:
    """Return the function of one row, with a loop of its own for contiguous tensors, in which the compiler sees arrays."""
    types = _types(function)
    dense = " && ".join(f"strides[{k}] == (int64_t)sizeof({text})" for k, text in enumerate(types))
    arrays = [f"(({text}*)at[{k}])[i]" for k, text in enumerate(types)]
    strided = [f"*({text}*)(at[{k}] + i * strides[{k}])" for k, text in enumerate(types)]
    return (
        "static void opk_row(const opk_numbers* numbers, char* const* at, const int64_t* strides, int64_t count) {\n"
        f"    (void)numbers;\n    if ({dense})\n        for (int64_t i = 0; i < count; i++) {_applied(function, arrays)}\n"
        f"    else\n        for (int64_t i = 0; i < count; i++) {_applied(function, strided)}\n}}\n"
    )


def _applied(function: Elementwise, places: Sequence[str]) -> str:
    """Return the statement that stores the function's value in the first place, computed from the others."""
    elements = dict(zip((p.name for p in function.tensors), places[1:], strict=True))
    values = [elements.get(p.name, f"numbers->opk_{p.name}") for p in function.foreign.function.parameters]
    return f"{places[0]} = opk_foreign({', '.join(values)});"


def _entry(function: Elementwise, entry: CFunction) -> str:
    listed = ", ".join(f"{parameter.spelling} {parameter.name}" for parameter in entry.parameters)
    tensors = ", ".join(("opk_out", *(parameter.name for parameter in function.tensors)))
    sizes = ", ".join(f"sizeof({text})" for text in _types(function))
    numbers = ", ".join(parameter.name for parameter in function.numbers) or "0"
    return (
        f"int {entry.name}({listed}) {{\n    const opk_tensor* const opk_tensors[] = {{{tensors}}};\n"
        f"    const int64_t opk_bytes[] = {{{sizes}}};\n    const opk_numbers opk_constants = {{{numbers}}};\n"
        "    return opk_apply(opk_tensors, opk_bytes, &opk_constants);\n}\n"
    )
