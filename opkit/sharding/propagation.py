"""Prove one strategy: follow a sharded size, or partial arguments, through the traced reference.

Each value of the graph is whole on every device (``REPLICATE``), a summand of the whole value (``partial``), or one piece of it
(``Split``). A piece needs no dimension: it is the one dimension whose size has the sharded symbol. Each step of the graph must
compute, from the pieces, the pieces of its result. What an operator does along which dimension is in the tables below.

A reshape may merge the sharded size with others. ``Split.outer`` is the product of the sizes in the same dimension that vary
slower: 1 where the pieces are contiguous along the dimension.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from opkit.sharding.strategies import REPLICATE, Placement, partial

if TYPE_CHECKING:
    from opkit.sharding.trace import Trace


class Refused(Exception):
    """The strategy does not hold; the message says why."""


class RandomNumbers(Refused):
    """The reference draws random numbers, so that not even copies of the arguments give copies of the results."""


class Unproved(Refused):
    """No table says what a step does, so that nothing is known about the strategy."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A value of which each device holds the piece that belongs to its piece of the sharded size ``symbol``."""

    symbol: Any
    outer: Any = 1


_Value = Split | Placement

_RESHAPES = {"view", "_unsafe_view", "reshape"}
_FILLS = {"full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty", "expand"}
_LIKE = {"full_like", "zeros_like", "ones_like", "empty_like"}
_MAPS = {
    "alias", "detach", "clone", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "_to_copy", "lift_fresh_copy",
    "copy", "where", *_LIKE,
}  # fmt: skip
"""These map over every dimension, as operators with torch's tag ``pointwise`` do."""

_ALONG = {
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "topk", "flip",
    "roll", "select", "slice", "split", "split_with_sizes", "unbind", "cat", "index_select", "var", "var_mean", "std", "prod",
    "any", "all", "argmax", "argmin", "linalg_vector_norm", "max", "min", "median", "kthvalue", "tril", "triu", "embedding",
}  # fmt: skip
"""These treat the dimensions in their argument ``dim`` or ``dims`` (all where there is none) as a whole, and map over others."""

_FIXED_DIMS = {"tril": (-2, -1), "triu": (-2, -1), "embedding": (0,)}
_REDUCTIONS = {
    "sum": "sum", "mean": "avg", "amax": "max", "amin": "min", "max.default": "max", "min.default": "min",
}  # fmt: skip
_PRODUCTS = {"mm": (1, 0), "bmm": (2, 1), "mv": (1, 0), "dot": (0, 0), "addmm": (1, 0), "baddbmm": (2, 1)}
"""Products of matrices, and the dimension of each factor that is summed over."""

_MOVES = {
    "alias", "detach", "clone", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "_to_copy", "select", "slice",
    "split", "split_with_sizes", "unbind", "flip", "roll", "index_select", *_RESHAPES,
}  # fmt: skip
_LINEAR = {
    "sum": _MOVES | {"neg", "sum", "mean", "cumsum", "gather", "embedding", "tril", "triu", "real", "imag"},
    "max": _MOVES | {"amax", "max.default"},
    "min": _MOVES | {"amin", "min.default"},
}
_LINEAR["avg"] = _LINEAR["sum"]
"""For each reduction the operators that may follow it: they commute with it in their first argument."""

_BILINEAR = {"mul", "mm", "bmm", "mv", "dot"}
_JOINTLY_LINEAR = {"add", "sub", "cat"}

MAPPED_OPS = _RESHAPES | _FILLS | _MAPS | _ALONG | _PRODUCTS.keys() | {"sum", "mean", "amax", "amin", "gather"}
"""Operators that the tables know, besides pointwise ones; all others are decomposed where torch can."""


def name_of(node: Any) -> str:
    """Return the name of the operator that a node calls."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(node.target)


def along_of(node: Any, ndim: int) -> set[int]:
    """Return the dimensions of a tensor of ``ndim`` that an operator does not map over."""
    dims: Any = _FIXED_DIMS.get(name_of(node))
    for index, argument in enumerate(node.target._schema.arguments if dims is None else ()):
        if argument.name in ("dim", "dims"):
            dims = (
                node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % max(ndim, 1) for dim in dims or range(ndim)}


class Propagation:
    """One candidate: the sharded symbols, none where arguments are partial.

    Several symbols are sharded at once where tensors have nothing to do with one another, as in a list.
    """

    def __init__(self, trace: Trace, symbols: frozenset[Any] = frozenset()) -> None:
        self.trace, self.symbols = trace, symbols
        self.values: dict[Any, Any] = {}

    def run(self, arguments: list[_Value]) -> tuple[list[_Value], dict[int, _Value]]:
        """Return the results, and the last values of arguments that are written to, by their positions.

        Raises:
            Refused: some step does not compute its result from the pieces.
        """
        self.values.update(zip(self.trace.inputs, arguments, strict=True))
        for node in self.trace.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = REPLICATE
            elif node.op == "call_function" and self._tensors(node.meta.get("val")):
                self.values[node] = self._step(node)
        written = {i: self.values[node] for i, node in self.trace.written.items()}
        return [self.values[node] for node in self.trace.outputs], written

    def dim(self, value: Any) -> int | None:
        """Return the dimension of a tensor that has the sharded symbol; None where none has it."""
        shape = self.trace.shape(value)
        dims = [dim for dim, size in enumerate(shape) if self.symbols & size.free_symbols]
        if len(dims) > 1:
            raise Refused("a tensor has it twice")
        if dims and self.symbols & (shape[dims[0]] / self._symbol(shape[dims[0]])).free_symbols:
            raise Refused(f"a tensor has a dimension of size {shape[dims[0]]}, which is not a multiple of it")
        return dims[0] if dims else None

    def piece(self, value: Any) -> _Value:
        """Return the state of an argument: a piece if it has a sharded symbol."""
        dim = self.dim(value)
        return REPLICATE if dim is None else Split(self._symbol(self.trace.shape(value)[dim]))

    def _symbol(self, size: Any) -> Any:
        return next(iter(self.symbols & size.free_symbols))

    @staticmethod
    def _tensors(value: Any) -> list[Any]:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _step(self, node: Any) -> Any:
        if node.target is operator.getitem:
            value = self.values[node.args[0]]
            return value[node.args[1]] if isinstance(value, list) else value
        name = name_of(node)
        inputs = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if n in self.values]
        states = [self.values[n] for n in inputs]
        self._refuse_number(node, name)
        if any(isinstance(state, Placement) and state.kind == "partial" for state in states):
            return self._after_reduction(node, name, states)
        if all(state == REPLICATE for state in states):
            return self._from_whole(node, name)
        rule = self._rule_of(node, name)
        return rule(node, name, [(n.meta["val"], state) for n, state in zip(inputs, states, strict=True)])

    def _rule_of(self, node: Any, name: str) -> Any:
        if name in _RESHAPES:
            return self._reshaped
        if name in _PRODUCTS:
            return self._multiplied
        if name == "gather":
            return self._gathered
        if torch.Tag.pointwise in node.target.tags or name in _MAPS:
            return self._mapped
        if name in _ALONG or self._reduction(node, name):
            return self._along
        raise Unproved(f"no rule is known for aten.{name}")

    def _refuse_number(self, node: Any, name: str) -> None:
        """Refuse a step that uses the sharded size as a number: a device would use that of its piece."""
        if name in _FILLS | _RESHAPES | {"slice", "split", "split_with_sizes"}:
            return
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else leaf
            symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            if symbolic and self.symbols & self.trace.env.replace(value.node.expr).free_symbols:
                raise Refused(f"{name} uses its number")

    def _from_whole(self, node: Any, name: str) -> _Value:
        if all(self.dim(value) is None for value in self._tensors(node.meta["val"])):
            return REPLICATE
        if name in _FILLS:
            return Split(self._symbol(sum(self.trace.shape(node.meta["val"]))))
        raise Refused(f"{name} makes different values along it")

    def _same(self, states: list[Any]) -> Split:
        (split, *others) = {state for state in states if isinstance(state, Split)}
        if others:
            raise Refused("tensors have it merged with other sizes in different orders, or another size in its place")
        return split

    def _mapped(self, node: Any, name: str, inputs: list[tuple[Any, _Value]]) -> Split:
        split, result = self._same([state for _, state in inputs]), node.meta["val"]
        if torch.Tag.pointwise in node.target.tags or name == "where":
            places = {value.ndim - (self.dim(value) or 0) for value, state in inputs if isinstance(state, Split)}
            places |= {result.ndim - (self.dim(result) or 0)}
            if len(places) > 1:
                raise Refused(f"{name} has it in different dimensions")
        return self._checked(node, name, split)

    def _checked(self, node: Any, name: str, split: Split) -> Split:
        if any(self.dim(value) is None for value in self._tensors(node.meta["val"])):
            raise Refused(f"{name} removes it")
        return split

    def _reduction(self, node: Any, name: str) -> str | None:
        return _REDUCTIONS.get(f"{name}.{node.target._overloadname}", _REDUCTIONS.get(name))

    def _along(self, node: Any, name: str, inputs: list[tuple[Any, _Value]]) -> Any:
        split = self._same([state for _, state in inputs])
        whole = inputs[:1] if name in ("embedding", "index_select") else inputs
        for value, state in whole:
            if isinstance(state, Split) and self.dim(value) in along_of(node, value.ndim):
                if name == "slice" and self.trace.shape(value) == self.trace.shape(node.meta["val"]):
                    continue
                if (reduction := self._reduction(node, name)) is None:
                    raise Refused(f"{name} runs along it")
                return partial(reduction)
        if len(self._tensors(node.meta["val"])) > 1 and isinstance(node.meta["val"], (list, tuple)):
            return [self._checked(node, name, split) for _ in node.meta["val"]]
        return self._checked(node, name, split)

    def _gathered(self, node: Any, name: str, inputs: list[tuple[Any, _Value]]) -> Split:
        (source, source_state), (_, index_state) = inputs
        (along,) = along_of(node, source.ndim)
        at = self.dim(node.meta["val"])
        if isinstance(source_state, Split) and (self.dim(source) == along or not isinstance(index_state, Split)):
            raise Refused("gather runs along it")
        if not isinstance(source_state, Split) and at != along:
            raise Refused("gather reads the first rows of its source along it")
        return self._same([source_state, index_state])

    def _reshaped(self, node: Any, name: str, inputs: list[tuple[Any, _Value]]) -> Split:
        import sympy

        ((value, state),) = inputs
        before, after = self.trace.shape(value), self.trace.shape(node.meta["val"])
        at, to = self.dim(value), self.dim(node.meta["val"])
        assert isinstance(state, Split)
        if at is None or to is None:
            raise Refused(f"{name} removes it")
        outer = sympy.Mul(*before[:at], state.outer) / sympy.Mul(*after[:to])
        inner = after[to] / (outer * state.symbol)
        if any(sympy.fraction(sympy.together(part))[1] != 1 for part in (outer, inner)):
            raise Refused(f"{name} merges it with other sizes, and splits them otherwise")
        return Split(state.symbol, outer)

    def _multiplied(self, node: Any, name: str, inputs: list[tuple[Any, _Value]]) -> Any:
        split = self._same([state for _, state in inputs])
        for (value, state), dim in zip(inputs[-2:], _PRODUCTS[name], strict=True):
            if isinstance(state, Split) and self.dim(value) == dim:
                if len(inputs) > 2:
                    raise Refused(f"{name} adds a tensor to the sum over it")
                return partial("sum")
        return self._checked(node, name, split)

    # ---- after a reduction -------------------------------------------------------------------------------------------

    def _after_reduction(self, node: Any, name: str, states: list[Any]) -> _Value:
        kinds = {state for state in states if state != REPLICATE}
        if len(kinds) > 1:
            raise Refused(f"{name} combines a reduction over it with something else")
        (reduced,) = kinds
        if name in _LIKE:
            return REPLICATE
        if not self._commutes(node, name, reduced, states):
            raise Refused(f"{name} follows its {reduced.reduction}, and the two cannot be exchanged")
        if any(self.dim(value) is not None for value in self._tensors(node.meta["val"])):
            raise Refused(f"{name} combines a reduction over it with something else")
        return reduced

    def _commutes(self, node: Any, name: str, reduced: Placement, states: list[Any]) -> bool:
        first_alone = states[0] == reduced and all(state == REPLICATE for state in states[1:])
        if name == "_to_copy" and self._changes_kind(node):
            return False
        if name in _LINEAR[reduced.reduction] or f"{name}.{node.target._overloadname}" in _LINEAR[reduced.reduction]:
            return first_alone
        if reduced.reduction not in ("sum", "avg"):
            return False
        if name in _JOINTLY_LINEAR:
            scalars = [a for a in node.args[:2] if isinstance(a, (int, float, complex))] if name != "cat" else []
            return not scalars and all(state == reduced for state in states)
        if name in _BILINEAR:
            return states.count(reduced) == 1
        return name == "div" and first_alone and node.kwargs.get("rounding_mode") is None

    @staticmethod
    def _changes_kind(node: Any) -> bool:
        before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        rounds = (before.is_floating_point or before.is_complex) and not (after.is_floating_point or after.is_complex)
        return rounds or after is torch.bool or (before.is_complex and not after.is_complex)
