"""Calls of operators that write to arguments, and scatters: in place where nobody needs the old values.

In AOTAutograd's graphs a call of an operator that writes to arguments is a functional one, whose results are the arguments after
it, with a copy of each to the graph's input at the end; ``index_put_`` and its like are ``index_put`` and a copy. As they are,
these copy all that they write to, a whole KV cache for a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from opkit.compiler.capture import torch_private as private

aten = torch.ops.aten
_COPY = aten.copy_.default
_SCATTERS = {
    aten.index_put.default, aten._unsafe_index_put.default, aten.index_copy.default, aten.index_add.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
    aten.slice_scatter.default, aten.select_scatter.default,
}  # fmt: skip


def write_in_place(module: fx.GraphModule) -> None:
    """Call operators that write to arguments as they are, with the arguments or copies of them; ``meta["writes"]`` names these.

    Calls that write to parts of what the graph computes, or to parts that indexing does not give, stay functional. A scatter into
    an input that the graph writes to at its end may write there at once: ``meta["writes"]`` names it.
    """
    graph = _Graph(module.graph)
    for node in list(module.graph.nodes):
        if node.target is private.functional_call:
            graph.replace(node)
        elif node.target in _SCATTERS:
            graph.allow_scatter(node)


class _Graph:
    """A graph, and which of its nodes are tensors in the same memory.

    The storages of an argument and of the same after a call become one, where the call writes to the argument.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.places = {node: number for number, node in enumerate(graph.nodes)}
        self.roots: dict[int, int] = {}  # of storages, those that they are one with
        self.sharing: dict[int, set[fx.Node]] = {}
        for node in graph.nodes:
            self._add_storages(node)
        self.results = {each for each in private.output_of(graph) if isinstance(each, fx.Node)}

    def _add_storages(self, node: fx.Node) -> None:
        for tensor in _tensors(node):
            self.sharing.setdefault(self._root(tensor), set()).add(node)

    def _add(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """Add a new node that stands where another one does."""
        self.places[node] = self.places[place]
        self._add_storages(node)
        return node

    def _erase(self, node: fx.Node) -> None:
        for tensor in _tensors(node):
            self.sharing[self._root(tensor)].discard(node)
        self.graph.erase_node(node)

    def _root(self, tensor: torch.Tensor) -> int:
        storage = private.storage_address(tensor)
        while storage in self.roots:
            storage = self.roots[storage]
        return storage

    def _unite(self, after: fx.Node, before: fx.Node) -> None:
        """Make the storage of a tensor after a call that of the same before it."""
        one, other = self._root(after.meta["val"]), self._root(before.meta["val"])
        if one != other:
            self.roots[one] = other
            self.sharing[other] |= self.sharing.pop(one)

    def replace(self, node: fx.Node) -> None:
        """Replace a functional call, if all that it writes to are whole tensors or parts of inputs."""
        op, named = node.args[0], {**node.kwargs}
        bases: Any = named.pop("_all_bases", ())
        if not private.is_overload(op) or not bases:
            return
        written = private.written_arguments(op, named, bases)  # the others stay in ``named``
        may_write = [
            self._may_write(node, base, named, [_result_of(node, k) for k, each in enumerate(bases) if each is base])
            for base in bases
        ]
        parts: dict[int, list[tuple[Any, tuple[Any, ...]]]] = {}
        for view in tree_leaves(written, is_leaf=private.is_view):
            if view is None or private.is_whole(view):
                continue
            base = bases[view.base_index]
            indexing = _indexing(base.meta["val"], view) if base.op == "placeholder" else None
            if indexing is None or not may_write[view.base_index]:
                return
            parts[id(view)] = indexing
        with self.graph.inserting_before(node):
            memory = [
                base if free else self._clone(node, number)
                for number, (base, free) in enumerate(zip(bases, may_write, strict=True))
            ]

            def argument(view: Any) -> Any:
                return view if view is None else self._part(node, memory[view.base_index], parts.get(id(view), []))

            arguments = tree_map(argument, written, is_leaf=private.is_view)
            call = self.graph.call_function(op, (), {**named, **arguments})  # pyright: ignore[reportArgumentType]
        returned = len(private.schema(op).returns)
        values = node.meta["val"][:returned]
        call.meta = {**node.meta, "val": values[0] if returned == 1 else values if returned else None}
        call.meta["writes"] = [each for each in tree_leaves(arguments) if each is not None]
        self._add(call, node)
        for result in list(node.users):
            number: Any = result.args[1]
            if number < max(returned, 1):
                self._replace_result(result, call, returned)
            else:
                self._replace_written(result, memory[number - max(returned, 1)])
        self._erase(node)

    def allow_scatter(self, node: fx.Node) -> None:
        """Let a scatter write to its first argument, if that is an input, or the result of another such scatter."""
        base, *others = node.args
        if not isinstance(base, fx.Node) or not (base.op == "placeholder" or "writes" in base.meta):
            return
        is_input = any(each.op == "placeholder" for each in self.sharing[self._root(base.meta["val"])])
        if is_input and self._may_write(node, base, (others, node.kwargs), [node.meta["val"]]):
            node.meta["writes"] = [base]
            self._unite(node, base)

    def _replace_result(self, result: fx.Node, call: fx.Node, returned: int) -> None:
        if returned == 1:
            self._replace_uses(result, call)
        elif returned:
            result.args = (call, result.args[1])

    def _replace_written(self, result: fx.Node, memory: fx.Node) -> None:
        """Let users of an argument after the call read its memory, which needs no copy to itself."""
        self._unite(result, memory)
        self._replace_uses(result, memory)
        for user in list(memory.users):
            if user.target is _COPY and user.args[0] is user.args[1]:
                self._erase(user)

    def _replace_uses(self, old: fx.Node, new: fx.Node) -> None:
        if old in self.results:
            self.results.add(new)
        old.replace_all_uses_with(new)
        self._erase(old)

    def _clone(self, node: fx.Node, number: int) -> fx.Node:
        base: Any = node.kwargs["_all_bases"]
        clone = self.graph.call_function(aten.clone.default, (base[number],))
        clone.meta = {**base[number].meta, "val": _result_of(node, number)}
        return self._add(clone, node)

    def _part(self, node: fx.Node, memory: fx.Node, indexing: Sequence[tuple[Any, tuple[Any, ...]]]) -> fx.Node:
        for op, arguments in indexing:
            part = self.graph.call_function(op, (memory, *arguments))
            part.meta = {**memory.meta, "val": op(memory.meta["val"], *arguments)}
            memory = self._add(part, node)
        return memory

    # ---- what may be written to --------------------------------------------------------------------------------------

    def _may_write(self, node: fx.Node, base: fx.Node, others: Any, results: list[Any]) -> bool:
        """Return whether nothing reads a tensor, or what shares its memory, when a call has written to it.

        Args:
            node: the call.
            base: the tensor.
            others: the call's other arguments.
            results: the values of the tensor after the call.
        """
        shared, place = self.sharing[self._root(base.meta["val"])], self.places[node]
        uses = [(each, user) for each in shared for user in each.users if self.places[user] > place]
        if any(user.target is not _COPY or user.args[0] is not each for each, user in uses):
            return False
        if not shared.isdisjoint(each for each in tree_leaves(others) if isinstance(each, fx.Node)):
            return False
        if any(each.op == "get_attr" for each in shared):
            return False
        inputs = [each for each in shared if each.op == "placeholder"]
        after = (self.sharing.get(self._root(value), set[fx.Node]()) for value in results)
        is_returned = any(not nodes.isdisjoint(self.results) for nodes in after)
        return not inputs or (not is_returned and all(_is_written(each) for each in inputs))


def _result_of(node: fx.Node, number: int) -> Any:
    """Return the value of the argument with this number after a functional call."""
    bases: Any = node.kwargs["_all_bases"]
    return node.meta["val"][number - len(bases)]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    if node.target is private.functional_call:  # its results are the nodes that take them from it
        return []
    values = tree_leaves(node.meta.get("val"))
    return [each for each in values if isinstance(each, torch.Tensor) and each.layout is torch.strided]


def _is_written(node: fx.Node) -> bool:
    """Return whether the graph writes to an input at its end."""
    return any(user.target is _COPY and user.args[0] is node for user in node.users)


def _indexing(base: torch.Tensor, view: Any) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Return the operators, with their arguments after the first, that give a view of a tensor; None if there are none."""
    sizes, strides, offset = private.layout_of(view, base)
    rest, found, dim = offset - base.storage_offset(), [], 0
    if not all(type(n) is int for n in (*base.shape, *base.stride(), rest, *sizes, *strides)):
        return None
    wanted = list(zip(sizes, strides, strict=True))
    if sorted(base.stride(), reverse=True) != [*base.stride()] or 0 in base.stride():
        return None
    for size, stride in zip(base.shape, base.stride(), strict=True):
        start, rest = divmod(rest, stride)
        if wanted and wanted[0][1] == stride:
            count, _ = wanted.pop(0)
            end = start + count
            found.append((aten.slice.Tensor, (dim, start, end)))
            dim += 1
        else:
            end = start + 1
            found.append((aten.select.int, (dim, start)))
        if not 0 <= start < end <= size:
            return None
    return None if wanted or rest else found
