"""The two modes of a function that is computed again in its backward: one keeps results of operators, the other returns them.

``torch.utils.checkpoint.checkpoint`` calls the function a second time when the backward needs a value. Operators whose results
were kept do not run then. In torch's selective checkpointing an operator is chosen when it runs; here also later, when
``checkpoint_name`` gives its result a name. While AOTAutograd traces, torch's modes tag the nodes of the graph, and a partitioner
decides what the backward computes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_iter, tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from opkit.layers import torch_private as private
from opkit.layers.names import naming
from opkit.layers.offloading import hold

_PRODUCTS = ("mm", "mv", "dot", "linear", "_addmm_activation")  # ends of names


@functools.cache
def is_expensive(function: Any) -> bool:
    """Return whether an operator takes more than a few passes over its results: products, attention, and operators of others."""
    name = getattr(function, "_opname", "")
    is_product = name.endswith(_PRODUCTS) or name.startswith("_scaled_dot_product_") or "conv" in name
    return is_product or "attention" in name or not private.is_torchs(function)


def contexts(recomputed: str, names: tuple[str, ...], module: nn.Module | None = None) -> tuple[Any, Any]:
    """Return the contexts of the forward and of the recomputation.

    Args:
        recomputed: "cheap": the results of expensive operators are kept; "all": only named ones.
        names: the names of values to keep.
        module: a module whose buffers the recomputation leaves as they are.
    """
    cheap = recomputed == "cheap"
    if private.traced_graph() is not None:
        forward, again = create_selective_checkpoint_contexts(_save_expensive if cheap else _save_nothing)
        return _TaggingMode(forward, names), again
    if private.is_functionalizing():  # AOTAutograd looks at the results only
        return contextlib.nullcontext(), contextlib.nullcontext()
    kept: dict[_Call, _Kept] = {}
    keeps = cheap or bool(names)
    forward = _KeepingMode(kept, cheap, names) if keeps else contextlib.nullcontext()
    again = _ReturningMode(kept) if keeps else contextlib.nullcontext()
    return forward, again if module is None else WithBuffers(module, again)


# ---- eager mode ------------------------------------------------------------------------------------------------------

_Call = tuple[Any, Any, int]  # an operator, the types of its arguments, and which of its calls with such


@dataclasses.dataclass
class _Kept:
    """The results of a call.

    Attributes:
        results: the results, with functions that return them instead of tensors.
        random_state: the state of the generator after the call, if the operator draws from it, and its device.
    """

    results: Any
    random_state: tuple[torch.Tensor, torch.device] | None


@dataclasses.dataclass
class _Made:
    """A call that made storages.

    Attributes:
        call: the call.
        storages: references to the storages by address, so that no other storage gets one of these addresses.
        results: the results, which must live until one of them gets a name; None of a call with a single one.
        layout: the layout of a single result.
        random_state: as in :class:`_Kept`.
    """

    call: _Call
    storages: dict[int, Any]
    results: Any
    layout: Any
    random_state: tuple[torch.Tensor, torch.device] | None


class _CountingMode(private.TorchDispatchMode):
    """Knows which call of the recomputation is which call of the forward.

    Calls with arguments of other types are counted apart, since a function may compute a table in its first call only. For the
    same reason autocast caches no copies of parameters.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: dict[_Call, _Kept]) -> None:
        super().__init__()
        self.kept, self.counts = kept, collections.Counter[Any]()

    def __enter__(self) -> Any:
        self.counts.clear()
        self.autocast_caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_autocast_cache_enabled(self.autocast_caches)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if private.is_ignored(function):
            return function(*args, **(kwargs or {}))
        key = function, _types(args)
        self.counts[key] += 1
        return self.called((*key, self.counts[key]), args, kwargs or {})

    def name(self, value: torch.Tensor, name: str) -> None:
        """Give a value a name."""

    def called(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """Return the results of a call."""
        raise NotImplementedError


def _types(value: Any) -> Any:
    """Return what tells calls apart, of the tensors in some arguments."""
    if isinstance(value, torch.Tensor):
        return str(value.shape), value.dtype, value.requires_grad  # sizes of exported graphs have no hash
    return tuple(map(_types, value)) if isinstance(value, list | tuple) else None


class _KeepingMode(_CountingMode):
    """Runs operators, and keeps results."""

    def __init__(self, kept: dict[_Call, _Kept], keeps_expensive: bool, names: tuple[str, ...]) -> None:
        super().__init__(kept)
        self.keeps_expensive, self.names = keeps_expensive, names
        self.made: dict[Any, _Made] = {}  # by the address of a storage

    def __enter__(self) -> Any:
        naming.modes.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        naming.modes.remove(self)
        self.made.clear()
        super().__exit__(*error)

    def called(self, call: _Call, args: Any, kwargs: Any) -> Any:
        function = call[0]
        results = function(*args, **kwargs)
        for tensor in private.written(function, args, kwargs):
            self._forget(tensor)
        keeps = self.keeps_expensive and is_expensive(function)
        new = new_storages(results, args, kwargs) if keeps or self.names else None
        if new:
            storages = {address: private.storage_weakref(tensor) for address, tensor in new.items()}
            single = isinstance(results, torch.Tensor)
            state = private.random_state(results) if private.draws(function) else None
            layout = private.layout(results) if single and self.names else None
            made = _Made(call, storages, None if single or not self.names else results, layout, state)
            self.made |= dict.fromkeys(storages, made)
            if keeps:
                self._keep(made, results)
        return results

    def _keep(self, made: _Made, results: Any) -> None:
        self.kept[made.call] = _Kept(tree_map_only(torch.Tensor, hold, results), made.random_state)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Compute again what is written to, and what the same call returned."""
        if (made := self.made.get(private.storage_address(tensor))) is not None:
            self.kept.pop(made.call, None)
            for address in made.storages:
                self.made.pop(address, None)

    def name(self, value: torch.Tensor, name: str) -> None:
        value = private.without_transforms(value)
        made = self.made.get(private.storage_address(value))
        if name not in self.names or made is None or made.call in self.kept:
            return
        results = private.with_layout(value, made.layout) if made.results is None else made.results
        if results is not None:
            self._keep(made, results)


class _ReturningMode(_CountingMode):
    """Runs the operators whose results were not kept."""

    def called(self, call: _Call, args: Any, kwargs: Any) -> Any:
        kept = self.kept.get(call)
        if kept is None:
            return call[0](*args, **kwargs)
        if kept.random_state is not None:
            private.set_random_state(*kept.random_state)
        return tree_map(lambda get: get() if callable(get) else get, kept.results)


def new_storages(results: Any, *given: Any) -> dict[int, torch.Tensor]:
    """Return a tensor in each storage that a call made, by address.

    There are none if it returned views or wrote to what it was given, or if a tensor has no storage, such as sparse ones.
    """
    made, old = (
        {private.storage_address(t): t for t in tree_iter(v) if isinstance(t, torch.Tensor)} for v in (results, given)
    )
    known = None not in made and None not in old and not made.keys() & old.keys()
    return made if known else {}  # pyright: ignore[reportReturnType]


class WithBuffers:
    """A context after which the buffers of a module are what they were before: they have changed in the forward already."""

    def __init__(self, module: nn.Module, context: Any) -> None:
        self.module, self.context = module, context

    def __enter__(self) -> None:
        self.before = [
            (part, name, buffer, None if private.overlaps_itself(buffer) else buffer.clone())
            for part in self.module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        for part, name, buffer, value in self.before:
            part._buffers[name] = buffer
            if value is not None:  # torch refuses to write to expanded tensors
                with torch.no_grad(), private.same_version(buffer):
                    buffer.copy_(value)
        self.before.clear()


# ---- while AOTAutograd traces ----------------------------------------------------------------------------------------


def _save_nothing(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _save_expensive(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(function) else CheckpointPolicy.PREFER_RECOMPUTE


class _TaggingMode(private.TorchDispatchMode):
    """A mode of torch's, and tags for the nodes whose results have names to be kept."""

    def __init__(self, mode: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.mode, self.names = mode, names
        self.made: dict[Any, tuple[list[fx.Node], Any]] = {}  # by storage: the nodes that made it, and a reference

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as torch's modes of selective checkpointing do."""
        return True

    @property
    def ac_graph_id(self) -> Any:
        """The number of the region, which torch sets."""
        return self.mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: Any) -> None:
        self.mode.ac_graph_id = number

    def __enter__(self) -> Any:
        self.mode.__enter__()
        naming.modes.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        naming.modes.remove(self)
        self.mode.__exit__(*error)

    def name(self, value: torch.Tensor, name: str) -> None:
        """Give a value a name."""
        address = private.storage_address(private.without_transforms(value))
        nodes, _ = self.made.get(address, ((), None))
        for node in nodes if name in self.names else ():
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = private.traced_graph()
        before = 0 if graph is None else len(graph.nodes)
        results = function(*args, **(kwargs or {}))
        if graph is not None:
            nodes = [*itertools.islice(reversed(graph.nodes), len(graph.nodes) - before)]
            for address, tensor in new_storages(results, args, kwargs).items():
                self.made[address] = nodes, private.storage_weakref(tensor)  # no other storage gets the address
        return results
