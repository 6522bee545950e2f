"""This module divides a graph at the operators whose results' sizes depend on values in tensors, such as ``nonzero``.

Between them are parts whose sizes are all known when they are called, and which are compiled one by one. In time::

    part    what needs no such size
    torch   nonzero
    part    what needs the size of nonzero's result, but no other that comes later
    torch   unique
    ...

An odd moment is a part, an even one calls of torch. A node is at the first moment at which its arguments are there, and not
before an earlier node with a side effect if it has one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.conversion import Unsupported, is_arithmetic
from opkit.compiler.capture.partitioner import has_effect, random_state
from opkit.compiler.capture.parts import used_outside

_COPY = torch.ops.aten.copy_.default


@dataclasses.dataclass(frozen=True)
class Division:
    """A graph, divided.

    Attributes:
        module: the graph, which calls ``parts`` by their names.
        parts: the parts, by the names of the module's attributes.
        operators: those that torch runs between them, apart from checks.
    """

    module: fx.GraphModule
    parts: dict[str, fx.GraphModule]
    operators: tuple[str, ...]

    def function(self, compiled: dict[str, Callable[[list[Any]], Any]]) -> Callable[[list[Any]], Any]:
        """Return the function of the graph, given those of its parts, which take lists of their inputs."""
        for name, part in compiled.items():
            setattr(self.module, name, _Part(part))

        def run(inputs: list[Any]) -> Any:
            arguments = list(inputs)
            inputs.clear()
            return self.module(*arguments)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run


class _Part(torch.nn.Module):
    """A compiled part as the module that a node calls."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(list(inputs))


def divide(module: fx.GraphModule) -> Division | None:
    """Return the graph divided, or None if no operator in it makes a size, or reads a condition that one has made.

    Raises:
        Unsupported: a size has no source, or a value that passes from part to part has a type that none can return.
    """
    _name_equal_sizes(module.graph)
    between = [node for node in module.graph.nodes if _makes_size(node) or _reads_condition(node)]
    return _Divider(module).run(between) if between else None


def _name_equal_sizes(graph: fx.Graph) -> None:
    """Give equal sizes one symbol.

    AOTAutograd makes one node of equal operators: the symbols of the others' results have no source then, and stand for the same.
    """
    known: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        found = {symbol for each in tree_leaves(value) for symbol in private.symbols_in(each)}
        if node.op == "placeholder" or _makes_size(node):
            known |= found
        elif node.op == "call_function" and found - known:
            arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
            with private.fake_mode():
                node.meta["val"] = node.target(*arguments, **named)


def _makes_size(node: fx.Node) -> bool:
    """Return whether an operator makes a size, a condition, or a tensor with such a size; a float is no size."""
    if node.op != "call_function" or not node.meta.get("unbacked_bindings"):
        return False
    return not isinstance(node.meta.get("val"), torch.SymFloat)


def _reads_condition(node: fx.Node) -> bool:
    """Return whether an operator takes a bool that is computed while the program runs."""
    if _is_on_demand(node) or _is_check(node) or node.op != "call_function":
        return False
    return any(isinstance(each.meta.get("val"), torch.SymBool) for each in node.all_input_nodes)


class _Divider:
    """The state of one division."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, fx.Graph()
        self.moments: dict[fx.Node, int] = {}
        self.made: dict[fx.Node, fx.Node] = {}  # nodes of the new graph, by those of the old one
        self.symbols: dict[
            Any, tuple[fx.Node, int | None]
        ] = {}  # the node of each symbol, or the dimension of a tensor
        self.parts: dict[str, fx.GraphModule] = {}

    def run(self, between: Sequence[fx.Node]) -> Division:
        nodes = list(self.module.graph.nodes)
        writes = [node for node in nodes if node.target is _COPY]
        computed = [node for node in nodes if node.op == "call_function" and node not in writes]
        for node in nodes:
            if node.op == "placeholder":
                self.moments[node] = 0
                self.made[node] = self.graph.node_copy(node)
                self._add_symbols(node)
        self._set_moments(computed)
        placed = [node for node in computed if not _is_on_demand(node)]
        for moment in range(max(map(self.moments.__getitem__, placed)) + 1):
            now = [node for node in placed if self.moments[node] == moment]
            if moment % 2 and now:
                self._add_part(now)
            elif not moment % 2:
                for node in now:
                    self._copied(node)
                    self._add_symbols(node)
        for node in writes:  # what is written to has been read
            self._copied(node)
        returned = private.output_of(self.module.graph)
        self.graph.output(tuple(self._copied(each) if isinstance(each, fx.Node) else each for each in returned))
        names = dict.fromkeys(str(node.target) for node in between)
        return Division(fx.GraphModule(self.module, self.graph), self.parts, tuple(names))

    def _set_moments(self, nodes: Sequence[fx.Node]) -> None:
        effects = 0
        for node in nodes:
            is_effect = (has_effect(node) and not _is_check(node)) or node.target is random_state
            moment = max((self.moments.get(each, 0) for each in node.all_input_nodes), default=0)
            if is_effect:
                moment = max(moment, effects)
            if not _is_on_demand(node) and moment % 2 != self._is_compiled(node):
                moment += 1
            self.moments[node] = moment
            if is_effect:
                effects = moment

    def _is_compiled(self, node: fx.Node) -> bool:
        if _makes_size(node) or _reads_condition(node) or _is_check(node):
            return False
        return node.target is not operator.getitem or self.moments.get(node.args[0], 0) % 2 == 1  # pyright: ignore

    # ---- calls of torch ----------------------------------------------------------------------------------------------

    def _copied(self, node: fx.Node) -> fx.Node:
        """Return a node of the new graph, with those that it needs."""
        if node not in self.made:
            if node.op != "get_attr" and not (_is_on_demand(node) or self.moments.get(node, 0) % 2 == 0):
                raise Unsupported(f"{node.name} ({node.target}) is needed where no part returns it")
            for each in node.all_input_nodes:
                self._copied(each)
            self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
        return self.made[node]

    def _add_symbols(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._add_symbol(value, node, None)
        if isinstance(value, torch.Tensor):
            for d, size in enumerate(value.shape):
                self._add_symbol(size, node, d)

    def _add_symbol(self, size: Any, node: fx.Node, d: int | None) -> None:
        symbol = private.symbol_of(size)
        if symbol is not None:
            self.symbols.setdefault(symbol, (node, d))

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _add_part(self, nodes: Sequence[fx.Node]) -> None:
        name = f"opkit_part{len(self.parts)}"
        results = [nodes[n] for n in used_outside([*nodes]) if self._is_needed_after(nodes[n], self.moments[nodes[n]])]
        part = _PartGraph(self.module, self.moments[nodes[0]], self.moments)
        for node in nodes:
            part.copied(node)
        given = [self._copied(node) for node in part.inputs]
        given = [*map(self._size, part.add_symbols(self.symbols)), *given]
        self.parts[name] = part.finished(results)
        call = self.graph.create_node("call_module", name, tuple(given))
        self.module.add_module(name, self.parts[name])
        for number, node in enumerate(results):
            self.made[node] = self.graph.call_function(operator.getitem, (call, number))
            self.made[node].meta = dict(node.meta)

    def _is_needed_after(self, node: fx.Node, now: int) -> bool:
        """Return whether later moments need a value: themselves, or for numbers that are computed where they are needed."""
        return any(
            self._is_needed_after(user, now) if _is_on_demand(user) else self.moments.get(user, -1) != now
            for user in node.users
        )

    def _size(self, symbol: Any) -> fx.Node:
        node, d = self.symbols[symbol]
        if d is None:
            return self.made[node]
        return self.graph.call_function(torch.ops.aten.sym_size.int, (self.made[node], d))


class _PartGraph:
    """A part that is being made: inputs come first, then what is computed."""

    def __init__(self, module: fx.GraphModule, moment: int, moments: dict[fx.Node, int]) -> None:
        self.module, self.moment, self.moments = module, moment, moments
        self.graph = fx.Graph()
        self.own: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.border = self.place = self.graph.create_node("get_attr", "unused")  # inputs are put before it

    def copied(self, node: fx.Node) -> fx.Node:
        if node in self.own:
            return self.own[node]
        is_here = _is_on_demand(node) or self.moments.get(node) == self.moment
        if node.op == "get_attr" or (node.op == "call_function" and is_here):
            for each in node.all_input_nodes:
                self.copied(each)
            self.own[node] = self.graph.node_copy(node, self.own.__getitem__)
        else:
            self.inputs.append(node)
            self.own[node] = self._input(node.name, node.meta.get("val"))
        return self.own[node]

    def _input(self, name: str, value: Any) -> fx.Node:
        if isinstance(value, list | tuple):
            raise Unsupported(f"{name} is a {type(value).__name__}, which passes from one part of a graph to another")
        with self.graph.inserting_before(self.place):
            made = self.graph.placeholder(name)
        made.meta["val"] = value
        return made

    def add_symbols(self, sources: dict[Any, tuple[fx.Node, int | None]]) -> list[Any]:
        """Make the symbols of all sizes the first inputs, and return them."""
        self.place = next(iter(self.graph.nodes))
        values = [value for node in self.graph.nodes for value in tree_leaves(node.meta.get("val"))]
        symbols = sorted({symbol for value in values for symbol in private.symbols_in(value)}, key=str)
        for symbol in symbols:
            if symbol not in sources:
                raise Unsupported(f"no operator makes the size {symbol}")
            node, d = sources[symbol]
            self._input(f"size_{symbol}", node.meta["val"] if d is None else node.meta["val"].shape[d])
        return symbols

    def finished(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        self.graph.erase_node(self.border)
        self.graph.output(tuple(self.own[node] for node in results))
        return fx.GraphModule(self.module, self.graph)


def _is_on_demand(node: fx.Node) -> bool:
    """Return whether a node computes a number from numbers and sizes, or reads a float: it is copied to where it is needed."""
    if node.op != "call_function" or _makes_size(node):
        return False
    value = node.meta.get("val")
    is_number = isinstance(value, torch.SymInt | torch.SymBool | int | bool) and is_arithmetic(node.target)
    return is_number or isinstance(value, torch.SymFloat)


def _is_check(node: fx.Node) -> bool:
    """Return whether a node checks sizes: it has no result, and reads nothing but numbers."""
    if node.op != "call_function" or node.meta.get("val") is not None or not node.all_input_nodes:
        return False
    return not any(isinstance(each.meta.get("val"), torch.Tensor | list | tuple) for each in node.all_input_nodes)
