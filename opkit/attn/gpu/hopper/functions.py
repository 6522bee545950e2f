"""Users' functions in the kernels for sm_90a: their text in CUDA C++, and what they read.

A kernel is compiled with the functions of its calls' masks and biases (``cuda/functions.cuh`` has what they call). One of a mask
becomes bits of keys in the expression of the mask, and those of biases, one after another, become one of the logit, which in the
backward gives its derivative too; :mod:`opkit.attn.gpu.hopper.biases` writes other biases as functions. Which tensors and
numbers they capture is in :mod:`opkit.attn.gpu.functions`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from opkit.attn.calls import AnyCall
from opkit.attn.functions.expression import coordinates, derivatives, indexed
from opkit.attn.gpu import functions, plans
from opkit.attn.gpu.functions import Placed
from opkit.attn.masks import program
from opkit.compiler.ir.dtypes import DTYPES, is_float
from opkit.compiler.ir.expr import Expr

_TYPES = {
    "b1": "bool", "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "i8": "int8_t", "i16": "int16_t",
    "i32": "int", "i64": "int64_t", "f16": "float", "bf16": "float", "f32": "float", "f64": "double",
}  # fmt: skip
_ELEMENTS = {**_TYPES, "b1": "uint8_t", "f16": "Half", "bf16": "Bfloat16"}
_NARROW = {"f16": "Half", "bf16": "Bfloat16"}

# {a} {b} {c} are the arguments. Floats without a row are functions of C, with an f of float32.
_SPELLED: dict[str, dict[str, str]] = {
    "where": dict.fromkeys("bif", "({a} ? {b} : {c})"),
    "add": {"b": "({a} | {b})", "i": "({a} + {b})", "f": "({a} + {b})"},
    "sub": dict.fromkeys("if", "({a} - {b})"),
    "mul": {"b": "({a} & {b})", "i": "({a} * {b})", "f": "({a} * {b})"},
    "div": {"i": "div_of({a}, {b})", "f": "({a} / {b})"},
    "floordiv": {"i": "floor_of({a}, {b})"},
    "rem": {"i": "rem_of({a}, {b})", "f": "remainder_of({a}, {b})"},
    "fmod": {"i": "fmod_of({a}, {b})"},
    "neg": dict.fromkeys("if", "(-{a})"),
    "abs": {"i": "({a} < 0 ? -{a} : {a})"},
    "min": {"b": "({a} & {b})", "i": "min_of({a}, {b})", "f": "min_of({a}, {b})"},
    "max": {"b": "({a} | {b})", "i": "max_of({a}, {b})", "f": "max_of({a}, {b})"},
    "pow": {"i": "pow_of({a}, {b})"},
    "and": dict.fromkeys("bi", "({a} & {b})"),
    "or": dict.fromkeys("bi", "({a} | {b})"),
    "xor": dict.fromkeys("bi", "({a} ^ {b})"),
    "not": {"b": "(!{a})", "i": "(~{a})"},
    "shl": {"i": "shl_of({a}, {b})"},
    "shr": {"i": "shr_of({a}, {b})"},
    "lt": dict.fromkeys("bif", "({a} < {b})"),
    "le": dict.fromkeys("bif", "({a} <= {b})"),
    "eq": dict.fromkeys("bif", "({a} == {b})"),
    "ne": dict.fromkeys("bif", "({a} != {b})"),
}  # fmt: skip
_LIBRARY = {"round": "rint", "abs": "fabs"}
_QUICK = {"exp": "exp_of", "tanh": "tanh_of", "exp2": "exp2_approx", "div": "quotient"}  # of float32
_LONG = frozenset({
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "expm1",
    "log1p", "pow", "rem", "fmod",
})  # fmt: skip
"""Ops of floats that are many instructions. A function with some of them is called and not inlined: there are as many logits as
registers, and a compiler would take minutes."""


class Captured(ctypes.Structure):
    """A captured tensor, with its strides by dimension."""

    _fields_ = (("data", ctypes.c_void_p), ("by", ctypes.c_int64 * 4))


class Functions(ctypes.Structure):
    """What functions capture, as ``cuda/functions.cuh`` says."""

    _fields_ = (
        ("tensors", Captured * functions.SLOTS),
        ("numbers", ctypes.c_int64 * functions.NUMBERS),
        ("factors", ctypes.c_uint32 * functions.NUMBERS),
    )


class Lies(NamedTuple):
    """How a captured tensor lies in memory.

    Attributes:
        wide: whether places in it take 64 bits.
        dense: whether the elements of its last dimension are next to each other: numbers of keys need no multiplication then.
    """

    wide: bool
    dense: bool

    @classmethod
    def of(cls, x: Tensor) -> Lies:
        return cls(functions.is_wide(x), x.dim() > 0 and x.stride(-1) == 1)


class Texts(NamedTuple):
    """The definitions with which a kernel is compiled; empty is none.

    Attributes:
        functions: all functions.
        score: the name of that of logits.
        of_keys: "true" if all that this loads for each key are numbers of the keys, in their order.
    """

    functions: str
    score: str
    of_keys: str


def fit(call: AnyCall) -> bool:
    """Return whether kernels can call the functions of a call, if it has any, and its bias is nothing else."""
    if not call.bias and program.FUNCTION not in call.mask:
        return True
    shape = plans.shape_of(tuple(call.mask), tuple(call.bias))
    if not all(word[0] == program.BIAS_FUNCTION for word in shape.bias):
        return False
    of_score = not shape.bias or call.softcap == 0
    return not shape.functions or (shape.fits and of_score and all(map(_is_writable, shape.functions)))


def _is_writable(placed: Placed) -> bool:
    """Return whether there is a spelling of all that a function says, and its derivative."""
    nodes = (node for root in _roots_of(placed) for node in root.walk())
    return all(node.op not in ("bitcast", "index", "random", "call") and node.dtype in _TYPES for node in nodes)


def _roots_of(placed: Placed, sloped: bool = True) -> list[Expr]:
    """Return a function's expression; if it is a bias's and ``sloped``, then its derivative by the logit, unless that is 0."""
    root = placed.function.root
    slopes = derivatives(root).items() if sloped and placed.whose == "bias" else ()
    return [root, *(slope for node, slope in slopes if node.op == "var")]


def texts_of(call: AnyCall, sloped: bool, of_masks: bool) -> Texts:
    """Return the functions of a call, of masks too if ``of_masks``; if ``sloped``, that of logits gives its derivative too."""
    shape = plans.shape_of(tuple(call.mask), tuple(call.bias))
    if not shape.functions:
        return Texts("", "", "")
    lists = {"mask": call.mask_tensors, "bias": call.bias_tensors}
    lie = tuple(
        tuple(Lies.of(lists[each.whose][number]) for number in each.function.tensors) for each in shape.functions
    )
    return _texts(shape, lie, sloped, of_masks)


@functools.lru_cache(maxsize=256)
def _texts(shape: plans.MaskShape, lie: tuple[tuple[Lies, ...], ...], sloped: bool, of_masks: bool) -> Texts:
    placed = enumerate(zip(shape.functions, lie, strict=True))
    written = [_text(number, each, of, sloped) for number, (each, of) in placed if of_masks or each.whose == "bias"]
    if not shape.bias:
        return Texts(" ".join(written), "", "")
    calls = [f"{name_of(word[1])}(problem, b, h, i, j, score)" for word in shape.bias]
    if sloped:
        steps = [f"found = {call}; score = found.x; slope *= found.y;" for call in calls]
        steps = ["float2 found; float slope = 1;", *steps, "return make_float2(score, slope);"]
    else:
        steps = [*(f"score = {call};" for call in calls), "return score;"]
    written.append(f"{_head('float2' if sloped else 'float', 'user_score')} {{ {' '.join(steps)} }}")
    return Texts(" ".join(written), "user_score", "true" if key_loads(shape) == {True} else "")


def key_loads(shape: plans.MaskShape) -> set[bool]:
    """Return of all loads by functions of logits that depend on the key whether they are of numbers of keys, in their order."""
    roots = (each.function.root for each in shape.functions if each.whose == "bias")
    return {_is_of_keys(*load) for root in roots for load in indexed(root) if "j" in _depends(load[0])}


def _is_of_keys(load: Expr, variables: Sequence[str | None]) -> bool:
    """Return whether a load is of a number of each key, in the order of keys; the same for all queries."""
    return variables[-1] == "j" and "i" not in _depends(load)


def _depends(load: Expr) -> frozenset[str]:
    return frozenset().union(*map(functions.variables_of, coordinates(load)))


def name_of(number: int) -> str:
    """Return the name of a function."""
    return f"user_{number}"


def captured(call: AnyCall) -> Functions:
    """Return what the functions of a call read, without the addresses of tensors."""
    shape, found = plans.shape_of(tuple(call.mask), tuple(call.bias)), Functions()
    for place, x in enumerate(functions.tensors_of(shape.functions, call.mask_tensors, call.bias_tensors)):
        if x is not None:
            found.tensors[place].by = (ctypes.c_int64 * functions.DIMS)(*x.stride())
    numbers = functions.numbers_of(shape.functions, call.mask_tensors, call.bias_tensors)
    for place, number in enumerate(numbers.values()):
        found.numbers[place] = number or 0
        found.factors[place] = _reciprocal(number) if type(number) is int else 0
    return found


def _reciprocal(by: int) -> int:
    """Return what ``floor_of`` of ``cuda/functions.cuh`` multiplies with; 0 if it divides.

    >>> [_reciprocal(by) for by in (1, 3, 4, -2)]
    [2147483648, 2863311531, 2147483648, 0]
    """
    return -(-(1 << 31 + (by - 1).bit_length()) // by) if 0 < by < 1 << 31 else 0


def places_of(call: AnyCall) -> list[tuple[bool, int]]:
    """Return of each captured tensor whether it is a mask's, and its number there."""
    shape = plans.shape_of(tuple(call.mask), tuple(call.bias))
    return [(each.whose == "mask", number) for each in shape.functions for number in each.function.tensors]


def set_addresses(
    read: Functions, places: Sequence[tuple[bool, int]], masks: Sequence[Tensor], biases: Sequence[Tensor]
) -> None:
    """Set the addresses of the captured tensors of a call."""
    for captured, (of_mask, number) in zip(read.tensors, places, strict=False):
        captured.data = (masks if of_mask else biases)[number].data_ptr()


# ---- text ------------------------------------------------------------------------------------------------------------


def _head(result: str, name: str, inlined: bool = True) -> str:
    kind = "SM90" if inlined else "static __device__ __noinline__"
    return f"{kind} {result} {name}(const Problem& problem, int b, int h, int i, int j, float score)"


def _text(number: int, placed: Placed, lie: Sequence[Lies], sloped: bool) -> str:
    writing, roots = _Writing(placed, lie), _roots_of(placed, sloped)
    nodes = list(dict.fromkeys(node for root in roots for node in root.walk()))
    lines = [writing.line(node) for node in nodes]
    result, *slope = (writing.names[root] for root in roots)
    kind = "bool" if placed.whose == "mask" else "float"
    returned = f"{kind}({result})"
    if sloped and placed.whose == "bias":
        kind, returned = "float2", f"make_float2({result}, {slope[0] if slope else 0})"
    inlined = not any(node.op in _LONG and is_float(node.dtype) for node in nodes)
    return f"{_head(kind, name_of(number), inlined)} {{ {' '.join([*lines, f'return {returned};'])} }}"


class _Writing:
    """Writes the statements of a function; ``names`` are those of the nodes."""

    def __init__(self, placed: Placed, lie: Sequence[Lies]) -> None:
        self.placed, self.lie = placed, lie
        self.names: dict[Expr, str] = {}

    def line(self, node: Expr) -> str:
        text = self._text(node)
        self.names[node] = name = f"x{len(self.names)}"
        return f"const {_TYPES[node.dtype]} {name} = {text};"

    def _text(self, node: Expr) -> str:
        if node.op == "const":
            return literal(node.data, node.dtype)
        if node.op == "var":
            return self._variable(node)
        if node.op == "load":
            return self._load(node)
        texts = [self.names[each] for each in node.args]
        if node.op in ("floordiv", "rem") and node.dtype == "i32":
            texts[1] = self._divisor(node.args[1]) or texts[1]
        if node.op == "nonzero":
            return texts[0]
        if node.op == "cast":
            found = f"({texts[0]} != 0)" if node.dtype == "b1" else f"{_TYPES[node.dtype]}({texts[0]})"
        else:
            found = applied(node.op, node.args[-1].dtype, texts)
        return f"float({_NARROW[node.dtype]}({found}))" if node.dtype in _NARROW else found

    def _divisor(self, node: Expr) -> str | None:
        (by,) = node.args if node.op == "cast" else (node,)
        if by.op == "var" and by.data[0] == "n":
            return f"divisor(problem.functions, {self.placed.numbers + int(by.data[1:])})"
        return None

    def _variable(self, node: Expr) -> str:
        kind, integers = node.data[0], len(self.placed.function.integers)
        if kind not in "nx" or node.data == "score":
            return f"{_TYPES[node.dtype]}({node.data})"
        place = self.placed.numbers + int(node.data[1:]) + (integers if kind == "x" else 0)
        number = f"problem.functions.numbers[{place}]"
        return f"{_TYPES[node.dtype]}({f'__int_as_float(int({number}))' if kind == 'x' else number})"

    def _load(self, node: Expr) -> str:
        tensor = int(node.data[0][1:])
        of, lies = f"problem.functions.tensors[{self.placed.tensors + tensor}]", self.lie[tensor]
        bits = "int64_t" if lies.wide else "int"
        ((_, variables),) = ((each, at) for each, at in indexed(node) if each is node)
        pad, in_order = functions.DIMS - len(variables), lies.dense and _is_of_keys(node, variables)
        sizes = self.placed.sizes(tensor)
        steps: list[str] = []
        for dim, (at, variable) in enumerate(zip(coordinates(node), variables, strict=True)):
            place = variable or f"within({self.names[at]}, {bits}(problem.functions.numbers[{sizes + dim}]))"
            apart = not (in_order and pad + dim == functions.DIMS - 1)
            steps.append(f"{bits}({place})" + (f" * {bits}({of}.by[{pad + dim}])" if apart else ""))
        found = f"element_of<{_ELEMENTS[node.dtype]}>({of}, {' + '.join(steps) or 0})"
        return f"({found} != 0)" if node.dtype == "b1" else f"{_TYPES[node.dtype]}({found})"


def applied(op: str, dtype: str, texts: Sequence[str]) -> str:
    """Return an op of values of a type in CUDA C++; narrow floats are computed in float32.

    >>> applied("add", "i32", ["x", "y"]), applied("tanh", "f32", ["x"]), applied("sin", "f64", ["x"])
    ('int(x + y)', 'tanh_of(x)', 'sin(x)')
    """
    row = DTYPES[dtype]
    text = _SPELLED.get(op, {}).get(row.kind[0])
    if op == "abs" and row.kind == "int" and not row.signed:
        return texts[0]
    if dtype != "f64" and row.kind == "float" and op in _QUICK:
        return f"{_QUICK[op]}({', '.join(texts)})"
    if text is not None:
        text = text.format(**dict(zip("abc", texts, strict=False)))
        computed = row.kind == "int" and op not in ("lt", "le", "eq", "ne")
        return f"{_TYPES[dtype]}{text if text[0] == '(' else f'({text})'}" if computed else text
    return f"{_LIBRARY.get(op, op)}{'' if dtype == 'f64' else 'f'}({', '.join(texts)})"


def literal(value: Any, dtype: str) -> str:
    """Return a number in C++.

    >>> literal(1.5, "f32"), literal(-(2**63), "i64"), literal(True, "b1"), literal(math.inf, "f32")
    ('0x1.8000000000000p+0f', '(-9223372036854775807ll - 1)', 'true', 'INFINITY')
    """
    if dtype == "b1":
        return str(bool(value)).lower()
    if not is_float(dtype):
        return (
            f"({value + 1}ll - 1)"
            if value == -(2**63)
            else f"{_TYPES[dtype]}({value}{'ull' if value >= 2**63 else 'll'})"
        )
    real = float(value)
    if not math.isfinite(real):
        return "NAN" if math.isnan(real) else "INFINITY" if real > 0 else "-INFINITY"
    return f"{real.hex()}{'' if dtype == 'f64' else 'f'}"
