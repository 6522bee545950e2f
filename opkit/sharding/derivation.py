"""Derive the strategies of a call from the reference: symbolically, and by pieces where a step has no table.

The candidates are: each size of the arguments, sharded in all arguments that have it; and sets of arguments that are summands.
A size is offered only if :mod:`opkit.sharding.propagation` proves it, or if the reference gives the same numbers on pieces
(:mod:`opkit.sharding.pieces`). What is refused keeps its reason.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.sharding import pieces
from opkit.sharding.propagation import Propagation, RandomNumbers, Refused, Split, Unproved
from opkit.sharding.strategies import REPLICATE, Placement, ShardingRule, Strategy, partial, replicated, shard
from opkit.sharding.trace import Trace, demands_of, trace

_MAX_PARTIAL = 4
"""Up to so many arguments every subset of them is tried as summands, beyond that each alone and all together."""


def derive(
    reference: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[Sequence[str]]
) -> tuple[ShardingRule, bool]:
    """Return the rule of a call, and whether it is that of all calls with these numbers of dimensions.

    Args:
        reference: a function of schema values.
        args: the arguments; of tensors only sizes, strides, dtypes and devices are read.
        kwargs: the keyword arguments.
        names: for each tensor argument the name of each size.

    Raises:
        Refused: the reference cannot be traced.
    """
    try:
        traced = trace(reference, args, kwargs)
    except Exception as error:
        raise Refused(f"its reference cannot be traced: {type(error).__name__}: {error}".split("\n")[0]) from error
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise RandomNumbers(f"its reference draws random numbers ({node.target})")
    found = [replicated(len(traced.inputs), len(traced.outputs))]
    refused: list[tuple[str, str]] = []
    tests = pieces.Pieces(traced, reference, args, kwargs)
    for symbols in _candidates(traced, args):
        name = " and ".join(_name(traced, symbol, names) for symbol in sorted(symbols, key=str))
        try:
            found += _sharded(traced, tests, symbols, name)
        except Refused as reason:
            refused += [(name, str(reason))] if len(symbols) == 1 else []
    refused += [(names[i][dim], "the reference uses its number") for i, dim in traced.fixed]
    found += _partial(traced)
    return ShardingRule(tuple(found), tuple(refused)), traced.general


def _candidates(traced: Trace, args: Sequence[Any]) -> list[frozenset[Any]]:
    """Return each symbol, and the different symbols that the tensors of a list, or all tensors, have in one dimension."""
    shapes = [traced.shape(node.meta["val"]) for node in traced.inputs]
    ordered = [size for shape in shapes for size in shape if size.is_Symbol]
    ordered += [symbol for shape in shapes for size in shape for symbol in sorted(size.free_symbols, key=str)]
    positions = iter(range(len(shapes)))
    by_argument = [
        [next(positions) for leaf in pytree.tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args
    ]
    together = [
        frozenset().union(*(shapes[i][dim].free_symbols for i in chosen if dim < len(shapes[i])))
        for chosen in (*by_argument, range(len(shapes)))
        for dim in range(max((len(shapes[i]) for i in chosen), default=0))
    ]
    singles = [frozenset({symbol}) for symbol in ordered]
    return list(dict.fromkeys([*singles, *(symbols for symbols in together if len(symbols) > 1)]))


def _name(traced: Trace, symbol: Any, names: Sequence[Sequence[str]]) -> str:
    """Return the name of a size: that of the annotations, else where it is."""
    places = [
        name
        for node, named in zip(traced.inputs, names, strict=True)
        for size, name in zip(traced.shape(node.meta["val"]), named, strict=True)
        if size == symbol
    ]
    return min(places, key=lambda name: "." in name, default=str(symbol))


# ---- sizes -----------------------------------------------------------------------------------------------------------


def _sharded(traced: Trace, tests: pieces.Pieces, symbols: frozenset[Any], name: str) -> list[Strategy]:
    propagation = Propagation(traced, symbols)
    dims = [propagation.dim(node.meta["val"]) for node in traced.inputs]
    arguments = tuple(REPLICATE if dim is None else shard(dim) for dim in dims)
    _refuse_branches(traced, symbols)
    exact = _exact(traced, traced.inputs, symbols)
    try:
        values, written = propagation.run([propagation.piece(node.meta["val"]) for node in traced.inputs])
    except Unproved as reason:
        if len(symbols) > 1:
            raise
        try:
            results = tests.results(symbols, arguments)
        except Refused as failed:
            raise Refused(f"{reason}, and {failed}") from None
        return [Strategy(arguments, results, name, "by pieces", not exact)]
    for i, value in written.items():
        _placed(propagation, traced.inputs[i], value, arguments[i])
    results = [_placed(propagation, node, value) for node, value in zip(traced.outputs, values, strict=True)]
    exact = exact and _exact(traced, traced.outputs, symbols) and partial("avg") not in results
    return [Strategy(arguments, tuple(results), name, even=not exact)]


def _refuse_branches(traced: Trace, symbols: frozenset[Any]) -> None:
    for branch in traced.branches:
        if symbols & branch.free_symbols:
            raise Refused(f"the reference decides by its number ({branch})")
    for demand in traced.demands:
        if demands_of(demand, symbols):
            raise Refused(f"a reshape needs a multiple of some number ({demand})")


def _exact(traced: Trace, nodes: Sequence[Any], symbols: frozenset[Any]) -> bool:
    """Return whether each symbol is a dimension of its own wherever it is, so that uneven pieces lie as DTensor's do."""
    sizes = [size for node in nodes for size in traced.shape(node.meta["val"]) if symbols & size.free_symbols]
    return all(size in symbols for size in sizes)


def _placed(
    propagation: Propagation, node: Any, value: Split | Placement, wanted: Placement | None = None
) -> Placement:
    if isinstance(value, Split):
        if value.outer != 1:
            raise Refused("its pieces are not contiguous in a result")
        value = shard(propagation.dim(node.meta["val"]) or 0)
    if wanted is not None and value != wanted:
        raise Refused(f"an argument that is written to is {wanted} before and {value} after the call")
    return value


# ---- summands ----------------------------------------------------------------------------------------------------------


def _partial(traced: Trace) -> Iterator[Strategy]:
    """Yield the strategies with summands as arguments: of sets in which the reference is jointly linear."""
    dtypes = [node.meta["val"].dtype for node in traced.inputs]
    linear = [i for i, dtype in enumerate(dtypes) if dtype.is_floating_point or dtype.is_complex]
    sizes = range(1, len(linear) + 1) if len(linear) <= _MAX_PARTIAL else sorted({1, len(linear)})
    for chosen in itertools.chain.from_iterable(itertools.combinations(linear, size) for size in sizes):
        arguments = [partial() if i in chosen else REPLICATE for i in range(len(dtypes))]
        try:
            results, written = Propagation(traced).run(list(arguments))
        except Refused:
            continue
        if all(value == arguments[i] for i, value in written.items()):
            yield Strategy(tuple(arguments), tuple(value for value in results if isinstance(value, Placement)))


# ---- names -------------------------------------------------------------------------------------------------------------


def size_names(signature: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[str]]:
    """Return for each tensor argument the name of each size: of its annotation, else "argument.dimension"."""
    found: list[list[str]] = []
    values = dict(zip([a.name for a in signature.arguments], args, strict=False)) | kwargs
    for parameter in signature.parameters:
        for argument in parameter.arguments:
            leaves = pytree.tree_leaves(values.get(argument.name))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            many = len(leaves) > 1 or isinstance(values.get(argument.name), (list, tuple))
            found += [
                _names_of(argument.name + (f"[{i}]" if many else ""), tensor.ndim, parameter.pattern)
                for i, tensor in enumerate(tensors)
            ]
    return found


def _names_of(argument: str, ndim: int, pattern: Any) -> list[str]:
    places = [f"{argument}.{dim}" for dim in range(ndim)]
    if pattern is None:
        return places
    named = [(dim.text, dim.kind) for dim in pattern.dims]
    if (at := pattern.many) is not None:
        count = ndim - len(named) + 1
        text = named[at][0]
        spread = [(text if count == 1 else f"{text}[{i}]", "name" if text else "any") for i in range(count)]
        named[at : at + 1] = spread
    usable = [
        name if kind in ("name", "expression") else place for (name, kind), place in zip(named, places, strict=False)
    ]
    return usable if len(usable) == ndim else places
