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
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_iter, tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from opkit.errors import CheckpointError
from opkit.layers import offloading
from opkit.layers import torch_private as private
from opkit.layers.names import NAME, naming

_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_grouped_mm",
    "_scaled_mm",
    "_int_mm",
    "_addmm_activation",
)


def is_expensive(function: Any) -> bool:
    """Return whether an operator takes more than a few passes over its results: products, attention, and operators of others."""
    name = getattr(function, "_opname", "")
    own = getattr(function, "namespace", "") in ("aten", "prims", "prim")
    return (
        name in _PRODUCTS or name.startswith("_scaled_dot_product_") or "conv" in name or "attention" in name or not own
    )


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
        return _TaggingMode(forward, names), _WithoutNames(again)
    kept: dict[_Call, _Kept] = {}
    keeps = cheap or bool(names)
    forward = _KeepingMode(kept, cheap, names) if keeps else contextlib.nullcontext()
    again = _ReturningMode(kept) if keeps else contextlib.nullcontext()
    return forward, again if module is None else WithBuffers(module, again)


# ---- eager mode ------------------------------------------------------------------------------------------------------

_Call = tuple[Any, int]  # an operator, and which of its calls


@dataclasses.dataclass
class _Kept:
    """The results of a call.

    Attributes:
        results: the results, with functions that return them instead of tensors.
        random_state: the state of the generator after the call, if the operator draws from it, and its device.
    """

    results: Any
    random_state: tuple[torch.Tensor, torch.device] | None


def _hold(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Keep a tensor, and return the function that returns it if it was not written to."""
    region, version = offloading.running(), tensor._version
    moved = None if region is None else region.keep(tensor)
    held = private.detached(tensor) if moved is None else None
    original = weakref.ref(tensor)

    def get() -> torch.Tensor:
        now = original() if held is None else held
        if now is not None and now._version != version:
            raise CheckpointError(
                f"a value of shape {tuple(now.shape)} was kept for the backward and has been written to since. "
                "Write to a copy of it, or choose another policy, such as 'recompute_all'."
            )
        return private.detached(held) if held is not None else moved()  # pyright: ignore[reportOptionalCall]

    return get


class _CountingMode(private.TorchDispatchMode):
    """Knows which call of the recomputation is which call of the forward."""

    supports_higher_order_operators = True

    def __init__(self, kept: dict[_Call, _Kept]) -> None:
        super().__init__()
        self.kept, self.counts = kept, collections.Counter[Any]()

    def __enter__(self) -> Any:
        self.counts.clear()
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if private.is_ignored(function):
            return function(*args, **(kwargs or {}))
        if function is NAME:
            self.name(*args)
            return args[0]
        self.counts[function] += 1
        return self.called((function, self.counts[function]), args, kwargs or {})

    def name(self, value: torch.Tensor, name: str) -> None:
        """Give a value a name."""

    def called(self, call: _Call, args: Any, kwargs: Any) -> Any:
        """Return the results of a call."""
        raise NotImplementedError


class _KeepingMode(_CountingMode):
    """Runs operators, and keeps results."""

    def __init__(self, kept: dict[_Call, _Kept], keeps_expensive: bool, names: tuple[str, ...]) -> None:
        super().__init__(kept)
        self.keeps_expensive, self.names = keeps_expensive, names
        self.made: dict[
            int, tuple[_Call, Any, Any]
        ] = {}  # by storage: the call that made it, its results, random state

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
            self._forget(private.storage_address(tensor))
        addresses = new_storages(results, args, kwargs)
        if addresses:
            state = private.random_state(results) if private.draws(function) else None
            # the other results of a call must live until one of them gets a name
            self.made |= dict.fromkeys(addresses, (call, results if len(addresses) > 1 else None, state))
            if self.keeps_expensive and is_expensive(function):
                self._keep(call, results, state)
        return results

    def _keep(self, call: _Call, results: Any, state: Any) -> None:
        self.kept[call] = _Kept(tree_map_only(torch.Tensor, _hold, results), state)

    def _forget(self, address: int) -> None:
        """Compute again what is written to."""
        if address in self.made:
            self.kept.pop(self.made.pop(address)[0], None)

    def name(self, value: torch.Tensor, name: str) -> None:
        if name in self.names and (found := self.made.get(private.storage_address(value))) is not None:
            call, results, state = found
            whole = value if value._base is None else value._base
            if call not in self.kept:
                self._keep(call, whole if results is None else results, state)


class _ReturningMode(_CountingMode):
    """Runs the operators whose results were not kept."""

    def called(self, call: _Call, args: Any, kwargs: Any) -> Any:
        kept = self.kept.get(call)
        if kept is None:
            return call[0](*args, **kwargs)
        if kept.random_state is not None:
            private.set_random_state(*kept.random_state)
        return tree_map(lambda get: get() if callable(get) else get, kept.results)


def new_storages(results: Any, *given: Any) -> set[int]:
    """Return the storages that a call made; none if it returned views or wrote to what it was given."""
    made, old = (
        {private.storage_address(t) for t in tree_iter(v) if isinstance(t, torch.Tensor)} for v in (results, given)
    )
    return set() if made & old else made


class WithBuffers:
    """A context after which the buffers of a module are what they were before: they have changed in the forward already."""

    def __init__(self, module: nn.Module, context: Any) -> None:
        self.module, self.context = module, context

    def __enter__(self) -> None:
        self.before = [
            (part, name, buffer, buffer.clone())
            for part in self.module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        for part, name, buffer, value in self.before:
            part._buffers[name] = buffer
            with torch.no_grad(), private.same_version(buffer):
                buffer.copy_(value)
        self.before.clear()


# ---- while AOTAutograd traces ----------------------------------------------------------------------------------------


def _save_nothing(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _save_expensive(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(function) else CheckpointPolicy.PREFER_RECOMPUTE


class _WithoutNames(private.TorchDispatchMode):
    """A mode of torch's in which the operator that gives names returns its argument, so that no graph has it."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, as torch's modes of selective checkpointing do."""
        return True

    def __enter__(self) -> Any:
        self.mode.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.mode.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is NAME else function(*args, **(kwargs or {}))


class _TaggingMode(_WithoutNames):
    """Tags the nodes whose results have names to be kept."""

    def __init__(self, mode: Any, names: tuple[str, ...]) -> None:
        super().__init__(mode)
        self.names = names
        self.made: dict[int, list[fx.Node]] = {}  # by storage: the nodes of the call that made it

    @property
    def ac_graph_id(self) -> Any:
        """The number of the region, which torch sets."""
        return self.mode.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, number: Any) -> None:
        self.mode.ac_graph_id = number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is NAME:
            found = self.made.get(private.storage_address(args[0]), []) if args[1] in self.names else []
            for node in found:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return args[0]
        graph = private.traced_graph()
        before = 0 if graph is None else len(graph.nodes)
        results = function(*args, **(kwargs or {}))
        if graph is not None:
            new = [*itertools.islice(reversed(graph.nodes), len(graph.nodes) - before)]
            self.made |= dict.fromkeys(new_storages(results, args, kwargs), new)
        return results
