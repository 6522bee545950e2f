"""A cache on the disk of what AOTAutograd made of Dynamo's graphs: a process with a hit runs neither AOTAutograd nor lowering.

An entry contains the calling convention of the graphs (``Wiring``) and the keys of their plans. Only plain graphs have entries;
the log says why another graph has none. An entry that is damaged, or whose plan is missing, is written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from opkit.compiler import diagnostics
from opkit.compiler.capture import cache_key
from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.cache_key import NotCacheable
from opkit.compiler.run import autograd, library, plan_cache
from opkit.compiler.run.cuda_graphs import recorded
from opkit.compiler.run.library import LoadedSegments, flags
from opkit.compiler.run.plan import ExecutionPlan, GraphConstants, constants_from_json, constants_to_json
from opkit.compiler.run.runner import Runner, assemble
from opkit.compiler.run.wiring import Wiring

_GRAPHS = {1: ("inference",), 2: ("forward", "backward")}
_numbers = {kind: itertools.count() for kind in ("forward", "backward", "inference", "body")}


def next_name(kind: str) -> str:
    """Return the name of the next graph of a kind: "forward 0" and so on."""
    return f"{kind} {next(_numbers[kind])}"


def key(module: fx.GraphModule, inputs: Sequence[Any], about: str) -> str | None:
    """Return the key of the entry of Dynamo's graph, or None if it cannot have one.

    Args:
        module: the graph.
        inputs: the inputs it will be called with.
        about: everything that decides how AOTAutograd's graphs are compiled.
    """
    try:
        if private.caches_disabled():
            raise NotCacheable("caches are disabled")
        versions = f"{torch.version.git_version} {private.cache_tag()!r}"
        return plan_cache.key(f"dynamo {about} {versions} {cache_key.key_text(module, inputs)}")
    except NotCacheable as why:
        diagnostics.log.debug("Dynamo's graph is not cached: %s.", why)
        return None


# ---- plain graphs ----------------------------------------------------------------------------------------------------


class Build(Protocol):
    """Code that is being compiled."""

    def wait(self) -> LoadedSegments:
        """Wait for the compiler, and return what it made."""
        ...


@dataclasses.dataclass(frozen=True)
class PlanBuild:
    """A plan whose C or Triton is being compiled.

    Attributes:
        plan, constants: the plan and its torch objects.
        texts: the C or Triton.
        segments: the code.
        store: writes the plan to the disk, once its code is compiled; None if it is there.
    """

    plan: ExecutionPlan
    constants: GraphConstants
    texts: Sequence[str]
    segments: Build
    store: Callable[[], None] | None = None

    @functools.cached_property
    def runner(self) -> Runner:
        """The function that runs the plan.

        Raises:
            ToolchainError, CompileError: the code cannot be compiled.
        """
        runner = assemble(self.plan, self.constants, self.segments.wait())
        if self.store is not None:
            self.store()
        diagnostics.output_code_log.debug(
            "%s\n%s\n%s", self.plan.name, "\n".join(self.texts), f"{runner.code.python}\n{runner.code.text}"
        )
        return runner


def build(
    plan: ExecutionPlan,
    constants: GraphConstants,
    texts: Sequence[str],
    name: str,
    store: Callable[[], None] | None = None,
) -> PlanBuild:
    """Start to compile a plan's C or Triton; the plan gets this name, since it may have been stored for an equal graph."""
    if plan.device == "cpu":
        segments = library.SegmentsBuild(texts, plan.segments, f"torch.compile: {name}", flags())
    else:
        from opkit.compiler.run.gpu_kernels import GpuKernelsBuild  # graphs for CPUs do not need it

        segments = GpuKernelsBuild(plan.kernels, texts[0], torch.device(plan.device))
    return PlanBuild(dataclasses.replace(plan, name=name), constants, texts, segments, store)


@dataclasses.dataclass(frozen=True)
class PlainGraph:
    """A graph of Dynamo's that runs without AOTAutograd.

    Attributes:
        wiring: the calling convention.
        builds: the graph for inference, or the forward and the backward.
    """

    wiring: Wiring
    builds: Sequence[PlanBuild]

    def function(self, cuda_graphs: bool | None = False) -> Callable[..., Any]:
        """Return the function that runs it, once its code is compiled; ``cuda_graphs`` is as in CompileOptions.

        Raises:
            ToolchainError, CompileError: the code cannot be compiled.
        """
        record = functools.partial(recorded, wanted=cuda_graphs, user_results=len(self.wiring.results))
        runners = [
            _refusing_negative_sizes(each.runner) if each.plan.sizes else record(each.runner, kind=kind)
            for each, kind in zip(self.builds, _GRAPHS[len(self.builds)], strict=True)
        ]
        of = autograd.inference if len(runners) == 1 else autograd.training
        return torch.compiler.disable(of(self.wiring, *runners))


def _refusing_negative_sizes(runner: Runner) -> Callable[[list[Any]], list[Any]]:
    """Return a function that refuses negative integers, which are no sizes: the graph that takes them was not saved."""

    def run(inputs: list[Any]) -> list[Any]:
        if min(runner.sizes(inputs)) < 0:
            raise ValueError(
                f"A saved function takes no negative integers, got {runner.sizes(inputs)} in {runner.plan.name}."
            )
        return runner(inputs)

    return run


# ---- reading ---------------------------------------------------------------------------------------------------------


def find(entry: str) -> PlainGraph | None:
    """Return Dynamo's graph with its code loaded, or None if no usable entry exists."""
    content = plan_cache.read(entry)
    if content is None:
        return None
    try:
        with no_garbage_collection():
            return loaded(content)
    except Exception as error:
        diagnostics.log.debug("The entry of Dynamo's graph %s is not used.", entry, exc_info=error)
        return None


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off.

    Compiling, and reading an entry, make thousands of small objects that stay alive; a collection, which also goes through
    Dynamo's objects, takes longer than making them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def loaded(content: Mapping[str, Any]) -> PlainGraph:
    """Return the graph of an entry's content, or of ``Recording.saved``, with its code loaded.

    Raises:
        LookupError: one of its plans is missing.
        ToolchainError, CompileError: the code cannot be compiled.
    """
    graphs = content["graphs"]
    builds = [_build(each, kind) for each, kind in zip(graphs, _GRAPHS[len(graphs)], strict=True)]
    for each in builds:
        _ = each.runner
    return PlainGraph(plan_cache.decode(content["wiring"]), builds)


def _build(content: Mapping[str, Any], kind: str) -> PlanBuild:
    plan, texts = plan_cache.from_json(content.get("content")) or plan_cache.find(content["plan"]) or (None, ())
    if plan is None:
        raise LookupError(f"there is no plan {content['plan']}")
    return build(plan, constants_from_json(content["constants"]), texts, next_name(kind))


# ---- writing ---------------------------------------------------------------------------------------------------------


class Recording:
    """The compiled graphs of one graph of Dynamo's, collected until its cache entry is complete.

    Args:
        entry: the key; None if no entry is written.
        inputs: what the graph will be called with, or tensors like that.
        is_saving: whether it will be saved.
        is_part: whether it is part of a graph, and joined with others if it is plain.

    Attributes:
        saved: the content of a saved function as JSON; None until it is complete.
        refusal: the reason why it cannot be saved, or is not plain.
        plain: the graph; None until it is complete.
    """

    def __init__(
        self, entry: str | None, inputs: Sequence[Any], is_saving: bool = False, is_part: bool = False
    ) -> None:
        self.entry, self.is_saving = entry, is_saving
        self.saved: dict[str, Any] | None = None
        self.refusal = ""
        self.plain: PlainGraph | None = None
        self._is_part = is_part and not (private.modes() or private.compiles_backwards())
        self._inputs = len(inputs)
        self._shares_memory = self._is_active() and bool(cache_key.shared(inputs))
        self._autocast = private.autocasts()
        self._wiring: Wiring | None = None
        self._builds: dict[str, tuple[str, PlanBuild]] = {}
        self._functions: dict[str, Callable[[list[Any]], Any]] = {}

    def _is_active(self) -> bool:
        return self.entry is not None or self.is_saving or self._is_part

    def set_function(self, kind: str, function: Callable[[list[Any]], Any]) -> None:
        """Store the function of a graph of AOTAutograd's."""
        self._functions[kind] = function

    def without_aot_autograd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, AOTAutograd's, wrapped: a training bypasses AOTAutograd once its backward is compiled."""
        if self.entry is None or tuple(self._builds) != ("forward",):
            return function
        own: list[Callable[..., Any]] = []

        def run(*inputs: Any) -> Any:
            if not own:
                if self.entry is None or not tuple(self._builds) == tuple(self._functions) == _GRAPHS[2]:
                    return function(*inputs)
                assert self._wiring is not None
                own.append(autograd.training(self._wiring, self._functions["forward"], self._functions["backward"]))
            return own[0](*inputs)

        return run

    def add_graph(self, kind: str, plan_key: str, graph: PlanBuild) -> None:
        """Add a compiled graph of AOTAutograd's. The last one writes the entry, which may be much later than the first."""
        if self.refusal or not self._is_active():
            return
        try:
            self._add_graph(kind, plan_key, graph)
        except Exception as why:
            diagnostics.log.debug("Dynamo's graph of %s is not cached: %s.", graph.plan.name, why)
            self.entry, self.refusal = None, str(why)

    def _add_graph(self, kind: str, plan_key: str, graph: PlanBuild) -> None:
        if (graph.plan.sizes and not self.is_saving) or kind in self._builds:
            raise NotCacheable("its sizes may change")
        self._builds[kind] = plan_key, graph
        if kind != "backward":
            metadata = private.forward_metadata()
            self._wiring = autograd.wiring_of(
                metadata, self._inputs, self._shares_memory, self._autocast, self.is_saving
            )
        elif self._wiring is not None:
            self._wiring = autograd.connected(self._wiring, graph.plan.outputs)
        if tuple(self._builds) in _GRAPHS.values() and self._wiring is not None:
            self.plain = PlainGraph(self._wiring, [each for _, each in self._builds.values()])
            self._write(self._wiring)

    def _write(self, graph_wiring: Wiring) -> None:
        graphs = [
            {"plan": plan_key, "constants": constants_to_json(each.constants)}
            | ({"content": plan_cache.to_json(each.plan, each.texts)} if self.is_saving else {})
            for plan_key, each in self._builds.values()
        ]
        content = {"wiring": plan_cache.encode(graph_wiring), "graphs": graphs}
        if self.is_saving:
            self.saved = content
        elif self.entry is not None:
            plan_cache.write(self.entry, content)
