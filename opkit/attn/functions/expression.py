"""The expression of a user's mask or score function: as words of a program, its meaning in torch, and its derivatives.

An expression is one of the compiler's (:mod:`opkit.compiler.ir.expr`), of the variables ``score`` and ``b``, ``h``, ``i``, ``j``
(int32: batch, head, query, key), of the captured numbers ``n0``, ``n1``, ... (int64) and ``x0``, ``x1``, ... (float32), and of
loads from the captured tensors ``t0``, ``t1``, .... Coordinates of loads are expressions too; a negative one counts from the end.

In a program an expression is text, seven bytes to a word, so that the operators that take programs need no other type, and saved
graphs and files hold it. Captured numbers are words next to the text: another number is no other expression, and needs no other
kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from opkit.compiler.ir import expr
from opkit.compiler.ir.dtypes import DTYPES, is_float, is_int
from opkit.compiler.ir.expr import Expr, rewrite
from opkit.compiler.ir.index import Value, value
from opkit.compiler.lower import scalar
from opkit.compiler.lower.scalar import Scalar

INDEX = "i32"  #: the type of b, h, i and j
_BYTES = 7  # of text in a word, which is a signed integer of 64 bits


@dataclasses.dataclass(frozen=True)
class Function:
    """An expression with the numbers of the tensors that it captures, in a program's list of tensors, and captured numbers.

    Attributes:
        root: the expression.
        tensors: the place of ``t0``, ``t1``, ... in the list.
        integers: the values of ``n0``, ``n1``, ....
        floats: the values of ``x0``, ``x1``, ....
    """

    root: Expr
    tensors: tuple[int, ...]
    integers: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()

    def words(self) -> list[int]:
        """Return the operands of an opcode: how many follow, then three lists, each after its length, and the text."""
        bits = [struct.unpack("<q", struct.pack("<d", x))[0] for x in self.floats]
        lists = [word for each in (self.tensors, self.integers, bits) for word in (len(each), *each)]
        text = text_words(self.root)
        return [len(lists) + len(text), *lists, *text]

    def batched(self, batch: int, places: Sequence[int], mapped: Sequence[bool]) -> Function:
        """Return the function for batches of ``batch`` that follow each other in one.

        Args:
            batch: the size of each.
            places: the new places of ``t0``, ``t1``, ....
            mapped: which of these have a first dimension with an element for each of the batches, which is the largest.
        """
        size = expr.var(f"n{len(self.integers)}", "i64")
        number = expr.cast(expr.var("b", INDEX), "i64")
        own, outer = expr.cast(expr.op("rem", number, size), INDEX), expr.op("floordiv", number, size)

        def change(node: Expr) -> Expr:
            if node.op == "var" and node.data == "b":
                return own
            if node.op != "load":
                return node
            at = [rewrite(each, change) for each in coordinates(node)]
            return load(node.data[0], node.dtype, *([outer] if mapped[int(node.data[0][1:])] else []), *at)

        return Function(rewrite(self.root, change), tuple(places), (*self.integers, batch), self.floats)

    @classmethod
    def of(cls, operands: Sequence[int]) -> Function:
        """Return what :meth:`words` returned as a function.

        >>> i, j = (expr.var(name, INDEX) for name in "ij")
        >>> words = Function(expr.op("le", j, i), (), (3,), (0.5,)).words()
        >>> Function.of(words)
        Function(root=le(j, i), tensors=(), integers=(3,), floats=(0.5,))
        """
        lists: list[tuple[int, ...]] = []
        at = 1
        for _ in range(3):
            end = at + 1 + operands[at]
            lists.append(tuple(operands[at + 1 : end]))
            at = end
        floats = tuple(struct.unpack("<d", struct.pack("<q", word))[0] for word in lists[2])
        return cls(_root(tuple(operands[at:])), lists[0], lists[1], floats)

    def gradients(
        self, of: Tensor, seen: Tensor, variables: Mapping[str, Tensor], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of the score and of ``t0``, ``t1``, ..., from that of the result, in torch operations.

        Args:
            of: the gradient of :meth:`evaluate` for the same ``variables`` and ``tensors``, of the score's shape.
            seen: where the gradients are not 0, whatever the derivative is there; broadcasts to that shape.

        Returns:
            A gradient of the score's shape, then one of each tensor's shape, None for tensors that the result does not depend on.
        """
        evaluated = _Evaluation(self._known(variables, tensors), of.device)
        of_score, found = torch.zeros_like(of), cast("list[Tensor | None]", [None] * len(self.tensors))
        for node, derivative in derivatives(self.root).items():
            part = torch.where(seen, of * evaluated(derivative), 0.0)
            if node.op == "var":
                of_score = part
                continue
            place = int(node.data[0][1:])
            tensor = tensors[self.tensors[place]]
            at = [evaluated(each).long() for each in coordinates(node)]
            if at:
                at = [each.expand_as(part) for each in torch.broadcast_tensors(*at)]
                part = torch.zeros(tensor.shape, dtype=of.dtype, device=of.device).index_put(
                    tuple(at), part, accumulate=True
                )
            else:
                part = part.sum()
            earlier = found[place]
            found[place] = part if earlier is None else earlier + part
        return of_score, found

    def evaluate(self, variables: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Return the value of the expression, in torch operations.

        Args:
            variables: the values of ``score`` (not of a mask), ``b``, ``h``, ``i`` and ``j``, which broadcast to each other.
            tensors: the program's.
        """
        return _Evaluation(self._known(variables, tensors), variables["j"].device)(self.root)

    def places(self, load: Expr, variables: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the coordinates of one of its loads, int64, for the arguments of :meth:`evaluate`."""
        evaluated = _Evaluation(self._known(variables, tensors), variables["j"].device)
        return [evaluated(each).long() for each in coordinates(load)]

    def _known(self, variables: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> dict[str, Any]:
        return {
            **variables,
            **{f"t{k}": tensors[number] for k, number in enumerate(self.tensors)},
            **{f"n{k}": number for k, number in enumerate(self.integers)},
            **{f"x{k}": number for k, number in enumerate(self.floats)},
        }


@functools.lru_cache(256)
def text_words(root: Expr) -> tuple[int, ...]:
    text = text_of(root).encode()
    text += b" " * (-len(text) % _BYTES)
    return tuple(int.from_bytes(text[at : at + _BYTES], "little") for at in range(0, len(text), _BYTES))


@functools.lru_cache(256)
def _root(words: tuple[int, ...]) -> Expr:
    return parsed(b"".join(int(word).to_bytes(_BYTES, "little") for word in words).decode())


# ---- text ------------------------------------------------------------------------------------------------------------


def text_of(root: Expr) -> str:
    """Return an expression as JSON: a list of nodes, each [op, type, numbers of arguments, data], arguments first.

    >>> text_of(expr.op("le", expr.var("j", INDEX), expr.var("i", INDEX)))
    '[["var","i32",[],"j"],["var","i32",[],"i"],["le","b1",[0,1],null]]'
    """
    nodes = root.walk()
    number = {node: k for k, node in enumerate(nodes)}
    rows = [[n.op, n.dtype, [number[a] for a in n.args], _data(n, number)] for n in nodes]
    return json.dumps(rows, separators=(",", ":"))


def _data(node: Expr, number: Mapping[Expr, int]) -> Any:
    if node.op == "load":
        return [node.data[0], [number[at] for at in coordinates(node)]]
    if node.op == "const" and is_float(node.dtype):
        return node.data.hex()
    return node.data


def parsed(text: str) -> Expr:
    """Return the expression of a text that :func:`text_of` returned."""
    nodes: list[Expr] = []
    for op, dtype, args, data in json.loads(text):
        if op == "load":
            made = load(data[0], dtype, *(nodes[k] for k in data[1]))
        else:
            data = float.fromhex(data) if op == "const" and is_float(dtype) else data
            made = expr.make(op, dtype, tuple(nodes[k] for k in args), data)
        nodes.append(made)
    return nodes[-1]


def load(tensor: str, dtype: str, *at: Expr) -> Expr:
    """Return an element of a captured tensor, at coordinates that are expressions."""
    return expr.load(tensor, dtype, *map(value, at))


@functools.lru_cache(1024)
def coordinates(node: Expr) -> tuple[Expr, ...]:
    """Return the expressions that are the coordinates of a load."""
    found: list[Expr] = []
    for at in node.data[1]:
        (leaf,) = at.leaves()
        assert isinstance(leaf, Value)
        found.append(leaf.expr)
    return tuple(found)


@functools.lru_cache(1024)
def loads_of(root: Expr) -> tuple[Expr, ...]:
    """Return the loads of an expression, those in coordinates too."""
    return tuple(node for node in root.walk() if node.op == "load")


@functools.lru_cache(256)
def indexed(root: Expr) -> tuple[tuple[Expr, tuple[str | None, ...]], ...]:
    """Return the loads of an expression, each with the variables that its coordinates are, None for those that are computed.

    >>> h, j = (expr.var(name, INDEX) for name in "hj")
    >>> indexed(load("t0", "f32", h, expr.op("add", j, j)))
    ((t0[[h], [add(j, j)]], ('h', None)),)
    """
    return tuple((node, tuple(map(_variable, coordinates(node)))) for node in loads_of(root))


def _variable(at: Expr) -> str | None:
    while at.op == "cast" and is_int(at.dtype) and is_int(at.args[0].dtype):
        (at,) = at.args
    return at.data if at.op == "var" and at.data in ("b", "h", "i", "j") else None


# ---- the meaning, in torch -------------------------------------------------------------------------------------------

_TORCH: dict[str, Callable[..., Tensor]] = {
    "where": torch.where, "add": torch.add, "sub": torch.sub, "mul": torch.mul, "neg": torch.neg, "abs": torch.abs,
    "floordiv": functools.partial(torch.div, rounding_mode="floor"), "rem": torch.remainder, "fmod": torch.fmod,
    "min": torch.minimum, "max": torch.maximum, "pow": torch.pow, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "not": torch.bitwise_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne, "round": torch.round, "nonzero": lambda x: x,
    **{name: getattr(torch, name) for name in (
        "floor", "trunc", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos",
        "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    )},
}  # fmt: skip


class _Evaluation:
    """An evaluation of expressions for some values of the variables; each node is computed once."""

    def __init__(self, known: Mapping[str, Any], device: torch.device) -> None:
        self.known = known
        self.device = device

    def __call__(self, root: Expr) -> Tensor:
        values: dict[Expr, Tensor] = {}
        for node in root.walk():
            values[node] = self._value(node, values)
        return values[root]

    def _value(self, node: Expr, values: Mapping[Expr, Tensor]) -> Tensor:
        dtype = torch_dtype(node.dtype)
        if node.op == "const":
            return torch.full((), node.data, dtype=dtype, device=self.device)
        if node.op == "var":
            found = self.known[node.data]
            return found if isinstance(found, Tensor) else torch.full((), found, dtype=dtype, device=self.device)
        if node.op == "load":
            tensor, at = self.known[node.data[0]], coordinates(node)
            # tensor[...] reads indices of no dimensions on the host, which no graph can
            return torch.ops.aten.index.Tensor(tensor, [values[each].long() for each in at]) if at else tensor
        args = [values[each] for each in node.args]
        if node.op == "cast":
            return args[0].to(dtype)
        if node.op == "bitcast":
            return args[0].view(dtype)
        if node.op == "div":
            return torch.div(*args, rounding_mode=None if is_float(node.dtype) else "trunc")
        return _TORCH[node.op](*args)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of one of the compiler's types."""
    return getattr(torch, DTYPES[name].torch)


# ---- derivatives -----------------------------------------------------------------------------------------------------


def derivatives(root: Expr) -> dict[Expr, Expr]:
    """Return the derivative of an expression by its score and by each of its loads of floats; those that are 0 are left out.

    >>> s = expr.var("score", "f32")
    >>> derivatives(expr.op("mul", s, s))
    {score: add(score, score)}
    """
    return dict(_derivatives(root))


@functools.lru_cache(256)
def _derivatives(root: Expr) -> tuple[tuple[Expr, Expr], ...]:
    of: dict[Expr, Scalar] = {root: scalar.number(1.0, root.dtype)}
    found: list[tuple[Expr, Expr]] = []
    for node in reversed(root.walk()):
        gradient = of.get(node)
        if gradient is None:
            continue
        if node.op in ("var", "load"):
            found.append((node, gradient.expr))
            continue
        for argument, part in zip(node.args, _parts(node, gradient), strict=False):
            if part is not None and is_float(argument.dtype):
                of[argument] = of[argument] + part if argument in of else part
    variables = [each for each in found if each[0].op == "load" or each[0].data == "score"]
    return tuple(reversed([each for each in variables if not _is_zero(each[1])]))


def _is_zero(node: Expr) -> bool:
    return node.op == "const" and node.data == 0


def _parts(node: Expr, g: Scalar) -> tuple[Scalar | None, ...]:
    """Return the gradients of a node's arguments from its own; None for those that do not depend on it."""
    y, args = Scalar(node), [Scalar(each) for each in node.args]
    if node.op == "where":
        return None, scalar.where(args[0], g, 0.0), scalar.where(args[0], 0.0, g)
    if node.op == "cast":
        return (scalar.cast(g, args[0].dtype) if is_float(args[0].dtype) else None,)
    rule = _RULES.get(node.op)
    return () if rule is None or not is_float(node.dtype) else rule(g, y, *args)


def _of_least(g: Scalar, a: Scalar, b: Scalar) -> tuple[Scalar, Scalar]:
    """Return the gradients of ``min(a, b)``: of equal arguments each has a half, as in torch."""
    return tuple(
        scalar.where(one < other, g, scalar.where(other < one, 0.0, g * 0.5)) for one, other in ((a, b), (b, a))
    )  # type: ignore[return-value]


def _times_exponential(g: Scalar, y: Scalar) -> Scalar:
    """Return ``g y``, and 0 where g is 0 and y may be infinite, as in the derivative of ``1 / (1 + exp(-x))`` at -100."""
    return g * y if g.expr.op == "const" else scalar.where(scalar.apply("eq", g, 0.0), 0.0, g * y)


_LN2, _LN10, _OF_ERF = math.log(2), math.log(10), 2 / math.sqrt(math.pi)
_f = scalar
_RULES: dict[str, Callable[..., tuple[Scalar, ...]]] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, -g),
    "mul": lambda g, y, a, b: (g * b, g * a),
    "div": lambda g, y, a, b: (g / b, -g * y / b),
    "rem": lambda g, y, a, b: (g, -g * _f.floor(a / b)),
    "fmod": lambda g, y, a, b: (g, -g * _f.trunc(a / b)),
    "neg": lambda g, y, a: (-g,),
    "abs": lambda g, y, a: (_f.where(a > 0.0, g, _f.where(a < 0.0, -g, 0.0)),),
    "min": lambda g, y, a, b: _of_least(g, a, b),
    "max": lambda g, y, a, b: _of_least(g, b, a)[::-1],
    "pow": lambda g, y, a, b: (g * b * _f.power(a, b - 1.0), g * y * _f.log(a)),
    "sqrt": lambda g, y, a: (g / (y * 2.0),),
    "exp": lambda g, y, a: (_times_exponential(g, y),),
    "exp2": lambda g, y, a: (_times_exponential(g * _LN2, y),),
    "expm1": lambda g, y, a: (g * (y + 1.0),),
    "log": lambda g, y, a: (g / a,),
    "log2": lambda g, y, a: (g / (a * _LN2),),
    "log10": lambda g, y, a: (g / (a * _LN10),),
    "log1p": lambda g, y, a: (g / (a + 1.0),),
    "sin": lambda g, y, a: (g * _f.cos(a),),
    "cos": lambda g, y, a: (-g * _f.sin(a),),
    "tan": lambda g, y, a: (g * (y * y + 1.0),),
    "asin": lambda g, y, a: (g / _f.sqrt(1.0 - a * a),),
    "acos": lambda g, y, a: (-g / _f.sqrt(1.0 - a * a),),
    "atan": lambda g, y, a: (g / (a * a + 1.0),),
    "atan2": lambda g, y, a, b: (g * b / (a * a + b * b), -g * a / (a * a + b * b)),
    "sinh": lambda g, y, a: (g * _f.function("cosh")(a),),
    "cosh": lambda g, y, a: (g * _f.function("sinh")(a),),
    "tanh": lambda g, y, a: (g * (1.0 - y * y),),
    "asinh": lambda g, y, a: (g / _f.sqrt(a * a + 1.0),),
    "acosh": lambda g, y, a: (g / _f.sqrt(a * a - 1.0),),
    "atanh": lambda g, y, a: (g / (1.0 - a * a),),
    "erf": lambda g, y, a: (g * _OF_ERF * _f.exp(-a * a),),
    "erfc": lambda g, y, a: (-g * _OF_ERF * _f.exp(-a * a),),
}
