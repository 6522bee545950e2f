"""Finding attention in Dynamo's graph: from a softmax back to the product of queries and keys, and on to that with the values."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from opkit.compiler.capture.attention_masks import Constants
from opkit.compiler.capture.patterns.nodes import arguments, example, operation, tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """What a node does to the scores, or to the weights.

    Attributes:
        node: the node.
        kind: "same", "scale", "add", "subtract", "fill" or "dropout".
        value: the factor, the summand, the number that is filled in, or the rate; None if it is not known.
        mask: the mask of "fill".
        where: the value of this mask where scores are replaced.
    """

    node: fx.Node
    kind: str
    value: Any = None
    mask: Any = None
    where: bool = True

    @property
    def mask_node(self) -> fx.Node:
        return self.value if self.mask is None else self.mask


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor with its dimensions in another order."""

    node: Any
    order: Sequence[int]

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(tensor(self.node).shape[k] for k in self.order)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention in a graph; ``order`` is the order of the result's dimensions."""

    q: Operand
    k: Operand
    v: Operand
    product: fx.Node
    before: tuple[Step, ...]
    softmax: fx.Node
    after: tuple[Step, ...]
    result: fx.Node
    order: Sequence[int]

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes from the first product to the second."""
        before, after = ([step.node for step in steps] for steps in (self.before, self.after))
        return [*dict.fromkeys([self.product, *before, self.softmax, *after, self.result])]

    @property
    def masks(self) -> list[Step]:
        return [step for step in self.before if step.kind in ("add", "subtract", "fill")]

    @property
    def mask_nodes(self) -> list[fx.Node]:
        return [step.mask_node for step in self.masks]

    @property
    def scale(self) -> float:
        return math.prod(step.value for step in self.before if step.kind == "scale")

    @property
    def dropout(self) -> float:
        return max((step.value for step in self.after if step.kind == "dropout"), default=0.0)

    @property
    def dtype(self) -> torch.dtype:
        return tensor(self.result).dtype

    @property
    def mask_dtype(self) -> torch.dtype:
        summands = [tensor(step.value).dtype for step in self.masks if step.kind != "fill"]
        return functools.reduce(torch.promote_types, summands, self.dtype)

    @property
    def heads(self) -> tuple[Any, ...]:
        """The first two dimensions of the scores; some models merge them for the products."""
        shapes = [tensor(node).shape for node in self.nodes[:-1]]
        return next((tuple(shape[:2]) for shape in shapes if len(shape) == 4), (1, shapes[0][0]))


# ---- steps -----------------------------------------------------------------------------------------------------------


def find(softmax: fx.Node, constants: Constants) -> Attention | None:
    given = arguments(softmax, "input", "dim")
    scores = _scores(given["input"], constants, set())
    weights = _weights(softmax)
    if scores is None or weights is None or given.get("dim") not in (-1, tensor(softmax).dim() - 1):
        return None
    product, before = scores
    after, result = weights
    operands, values = _score_operands(product), _value_operands(result, after[-1].node if after else softmax)
    if operands is None or values is None:
        return None
    return Attention(*operands, values[0], product, (*_steps_of(product), *before), softmax, after, result, values[1])


def _scores(node: Any, constants: Constants, others: set[fx.Node]) -> tuple[fx.Node, tuple[Step, ...]] | None:
    """Return the product that scores come from, and the steps in between; ``others`` come from none."""
    if operation(node) in ("product", "product plus", "einsum"):
        return node, ()
    if node in others:
        return None
    others.add(node)
    for source, step in _BEFORE.get(operation(node), _none)(node, constants):
        same = example(source) is not None and _same_shape(source, node)
        found = _scores(source, constants, others) if same else None
        if found is not None:
            return found[0], (*found[1], step)
    return None


def _weights(softmax: fx.Node) -> tuple[tuple[Step, ...], fx.Node] | None:
    """Return the steps from a softmax to the product with the values, and this product."""
    node, steps = softmax, ()
    while True:
        product = next(
            (u for u in node.users if operation(u) in ("product", "einsum") and _value_operands(u, node)), None
        )
        if product is not None:
            return steps, product
        step = next((s for user in node.users if user.args[:1] == (node,) and (s := _step_after(user))), None)
        if step is None or not _same_shape(step.node, node):
            return None
        node, steps = step.node, (*steps, step)


def _same_shape(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes have the same rows of scores, in a view perhaps."""
    a, b = tensor(one), tensor(other)
    return a.shape == b.shape or (a.dim() > 2 and a.shape[-2:] == b.shape[-2:] and a.numel() == b.numel())


def _step_after(node: fx.Node) -> Step | None:
    kind = operation(node)
    if kind != "dropout":
        return Step(node, "same") if kind in ("cast", "copy", "view") else None
    given = arguments(node, "input", "p", "training")
    if not isinstance(given.get("p", 0.5), int | float):
        return None
    return Step(node, "dropout", given.get("p", 0.5) if given.get("training", given.get("train", True)) else 0.0)


def _none(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    yield from ()


def _same(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    yield arguments(node, "input").get("input"), Step(node, "same")


def _pair(node: fx.Node) -> tuple[Any, Any]:
    given = arguments(node, "input", "other")
    return given.get("input"), given.get("other")


def _multiply(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    a, b = _pair(node)
    yield a, Step(node, "scale", _number(b, constants))
    yield b, Step(node, "scale", _number(a, constants))


def _divide(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    a, b = _pair(node)
    divisor = None if "rounding_mode" in node.kwargs else _number(b, constants)
    yield a, Step(node, "scale", 1 / divisor if divisor else None)


def _add(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    a, b = _pair(node)
    yield a, Step(node, "add", None if "alpha" in node.kwargs else b)
    yield b, Step(node, "add", None if "alpha" in node.kwargs else a)


def _subtract(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    a, b = _pair(node)
    yield a, Step(node, "subtract", None if "alpha" in node.kwargs else b)


def _fill(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    given = arguments(node, "input", "mask", "value")
    yield given["input"], Step(node, "fill", _number(given["value"], constants), given["mask"])


def _where(node: fx.Node, constants: Constants) -> Iterator[tuple[Any, Step]]:
    names = ("condition", "input", "other") if node.op == "call_function" else ("input", "condition", "other")
    given = arguments(node, *names)
    mask, a, b = (given.get(name) for name in ("condition", "input", "other"))
    yield a, Step(node, "fill", _number(b, constants), mask, where=False)
    yield b, Step(node, "fill", _number(a, constants), mask)


_BEFORE: dict[str, Callable[[fx.Node, Constants], Iterator[tuple[Any, Step]]]] = {
    "cast": _same,
    "copy": _same,
    "view": _same,
    "multiply": _multiply,
    "divide": _divide,
    "add": _add,
    "subtract": _subtract,
    "fill": _fill,
    "where": _where,
}
"""For each operation: the arguments that may be scores, and what then happens to them."""


def _number(value: Any, constants: Constants) -> float | None:
    """Return a number, or a constant tensor of one element as a number; None for anything else."""
    if isinstance(value, fx.Node) and value in constants and tensor(value).numel() == 1:
        value = constants.value(value).item()
    return float(value) if isinstance(value, int | float) else None


# ---- products --------------------------------------------------------------------------------------------------------


def _steps_of(product: fx.Node) -> tuple[Step, ...]:
    """Return what ``baddbmm`` does to the scores."""
    if operation(product) != "product plus":
        return ()
    given = arguments(product, "input", "batch1", "batch2")
    scale, beta = Step(product, "scale", given.get("alpha", 1)), given.get("beta", 1)
    return (scale,) if beta == 0 else (scale, Step(product, "add", given["input"] if beta == 1 else None))


def _score_operands(product: fx.Node) -> tuple[Operand, Operand] | None:
    """Return the queries and the keys, each with its features last."""
    if operation(product) == "einsum":
        return _einsum_scores(product)
    q, k = product.args[-2:]
    rank = tensor(product).dim()
    if len(product.args) < 2 or not tensor(q).dim() == tensor(k).dim() == rank > 2:
        return None
    return Operand(q, range(rank)), Operand(k, (*range(rank - 2), rank - 1, rank - 2))


def _value_operands(product: fx.Node, weights: fx.Node) -> tuple[Operand, Sequence[int]] | None:
    """Return the values, and the order of the result's dimensions."""
    if operation(product) == "einsum":
        return _einsum_values(product, weights)
    if len(product.args) != 2 or product.args[0] is not weights or product.args[1] is weights:
        return None
    rank = tensor(product).dim()
    same = tensor(weights).dim() == tensor(product.args[1]).dim() == rank > 2
    return (Operand(product.args[1], range(rank)), range(rank)) if same else None


def _einsum_scores(product: fx.Node) -> tuple[Operand, Operand] | None:
    """Return the operands of "bqhd,bkhd->bhqk" and the like."""
    terms = _terms(product)
    if terms is None:
        return None
    (a, x), (b, y), out = terms
    if out[-2] in b:
        (a, x), (b, y) = (b, y), (a, x)
    features = "".join(sorted({*a} - {*out}))
    q, k = f"{out[:-1]}{features}", f"{out[:-2]}{out[-1]}{features}"
    if len(features) != 1 or sorted(a) != sorted(q) or sorted(b) != sorted(k):
        return None
    return Operand(x, [*map(a.index, q)]), Operand(y, [*map(b.index, k)])


def _einsum_values(product: fx.Node, weights: fx.Node) -> tuple[Operand, Sequence[int]] | None:
    """Return the values of "bhqk,bkhd->bqhd" and the like, and the order of the result's dimensions."""
    terms = _terms(product)
    if terms is None:
        return None
    (a, x), (b, y), out = terms
    if y is weights:
        (a, x), (b, y) = (b, y), (a, x)
    features = "".join(sorted({*b} - {*a}))
    v, rows = f"{a[:-2]}{a[-1]}{features}", f"{a[:-1]}{features}"
    if x is not weights or y is weights or len(features) != 1 or sorted(b) != sorted(v) or sorted(out) != sorted(rows):
        return None
    return Operand(y, [*map(b.index, v)]), [*map(rows.index, out)]


def _terms(product: fx.Node) -> tuple[tuple[str, Any], tuple[str, Any], str] | None:
    """Return the subscripts of the operands of an einsum of two, with the operands, and those of the result."""
    equation, *operands = product.args
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    given, out = equation.replace(" ", "").split("->")
    a, b = given.split(",")
    return ((a, operands[0]), (b, operands[1]), out) if len(out) > 2 else None
