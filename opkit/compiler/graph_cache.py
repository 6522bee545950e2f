"""What AOTAutograd made of Dynamo's graphs, on the disk: a process that finds it needs neither AOTAutograd nor lowering.

An entry says how graphs are called (``Wiring``) and under which keys their plans are kept. There are entries for plain
graphs alone; what stands against others is logged. One that is damaged, or whose plan is not there, is made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from opkit.compiler import logs
from opkit.compiler.capture import cache_key, wiring
from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.cache_key import NotCacheable
from opkit.compiler.run import autograd, library, plan_cache
from opkit.compiler.run.autograd import Wiring
from opkit.compiler.run.graph_constants import GraphConstants, from_json, to_json
from opkit.compiler.run.library import flags
from opkit.compiler.run.plan import ExecutionPlan
from opkit.compiler.run.runner import Runner, assemble

_GRAPHS = {1: ("inference",), 2: ("forward", "backward")}
_numbers = {kind: itertools.count() for kind in ("forward", "backward", "inference", "body")}


def next_name(kind: str) -> str:
    """The name of the next graph of a kind."""
    return f"{kind} {next(_numbers[kind])}"


def key(module: fx.GraphModule, inputs: Sequence[Any], about: str) -> str | None:
    """What the entry of Dynamo's graph is kept under; None where there can be none.

    Args:
        module: the graph.
        inputs: what it will be called with.
        about: all that decides how AOTAutograd's graphs are compiled.
    """
    try:
        if private.caches_disabled():
            raise NotCacheable("caches are disabled")
        versions = f"{torch.version.git_version} {private.cache_tag()!r}"
        return plan_cache.key(f"dynamo {about} {versions} {cache_key.identity(module, inputs)}")
    except NotCacheable as why:
        logs.compiler.debug("Dynamo's graph is not kept: %s.", why)
        return None


# ---- reading ---------------------------------------------------------------------------------------------------------


def find(entry: str) -> Callable[..., Any] | None:
    """What runs Dynamo's graph; None where there is no entry that can be used."""
    content = plan_cache.read(entry)
    if content is None:
        return None
    try:
        with _no_collection():
            return function(content)
    except Exception as error:
        logs.compiler.debug("The entry of Dynamo's graph %s is not used.", entry, exc_info=error)
        return None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of small objects are made, and all are kept: looking for garbage among Dynamo's takes longer than they do."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def function(content: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function of an entry's content, or of what ``Recording.saved`` is.

    Raises:
        LookupError: one of its plans is not there.
    """
    graphs, found = content["graphs"], plan_cache.decode(content["wiring"])
    runners = [_runner(each, kind) for each, kind in zip(graphs, _GRAPHS[len(graphs)], strict=True)]
    made = autograd.inference(found, *runners) if len(runners) == 1 else autograd.training(found, *runners)
    return torch.compiler.disable(made)


def _runner(content: Mapping[str, Any], kind: str) -> Callable[[list[Any]], list[Any]]:
    planned, texts = plan_cache.from_json(content.get("content")) or plan_cache.find(content["plan"]) or (None, ())
    if planned is None:
        raise LookupError(f"there is no plan {content['plan']}")
    runner = build(planned, texts, next_name(kind)).load(from_json(content["surroundings"]))
    return _without_negatives(runner) if planned.sizes else runner


def _without_negatives(runner: Runner) -> Callable[[list[Any]], list[Any]]:
    """Return a graph that refuses integers which stand for no size: it was saved without the graph that takes them."""

    def run(inputs: list[Any]) -> list[Any]:
        if min(runner.sizes(inputs)) < 0:
            raise ValueError(
                f"A saved function takes no negative integers, got {runner.sizes(inputs)} in {runner.plan.name}."
            )
        return runner(inputs)

    return run


@dataclasses.dataclass(frozen=True)
class PlanBuild:
    """A plan whose C is being compiled."""

    planned: ExecutionPlan
    texts: Sequence[str]
    segments: library.SegmentsBuild

    def load(self, constants: GraphConstants) -> Runner:
        """The function that runs the plan, once there is its C.

        Raises:
            ToolchainError, CompileError: the C cannot be compiled.
        """
        runner = assemble(self.planned, constants, self.segments.wait())
        logs.output_code.debug(
            "%s\n%s\n%s", self.planned.name, "\n".join(self.texts), f"{runner.code.python}\n{runner.code.text}"
        )
        return runner


def build(planned: ExecutionPlan, texts: Sequence[str], name: str) -> PlanBuild:
    """Have a plan's C compiled; the plan is called ``name``, for another graph of the same content may have been first."""
    segments = library.SegmentsBuild(texts, planned.segments, f"torch.compile: {name}", flags())
    return PlanBuild(dataclasses.replace(planned, name=name), texts, segments)


# ---- writing ---------------------------------------------------------------------------------------------------------


class Recording:
    """What becomes of one graph of Dynamo's, until all is known that its entry needs.

    Attributes:
        entry: the key; None if there is to be no entry.
        saved: what a function that is saved consists of, in terms of JSON; None until all of it is known.
        refusal: why it cannot be saved.
    """

    def __init__(self, entry: str | None, inputs: Sequence[Any], is_saving: bool = False) -> None:
        self.entry, self.is_saving = entry, is_saving
        self.saved: dict[str, Any] | None = None
        self.refusal = ""
        self._inputs = len(inputs)
        self._shared = (entry is not None or is_saving) and bool(cache_key.shared(inputs))
        self._autocast = private.autocasts()
        self._wiring: Wiring | None = None
        self._graphs: dict[str, dict[str, Any]] = {}
        self._made: dict[str, Callable[[list[Any]], Any]] = {}

    def keep(self, kind: str, made: Callable[[list[Any]], Any]) -> None:
        """The function of a graph of AOTAutograd's."""
        self._made[kind] = made

    def without_aot_autograd(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which AOTAutograd made; a training goes without AOTAutograd once its backward was compiled."""
        if self.entry is None or tuple(self._graphs) != ("forward",):
            return function
        own: list[Callable[..., Any]] = []

        def run(*inputs: Any) -> Any:
            if not own:
                if not self._is_complete():
                    return function(*inputs)
                own.append(self._training())
            return own[0](*inputs)

        return run

    def _is_complete(self) -> bool:
        return self.entry is not None and tuple(self._graphs) == tuple(self._made) == _GRAPHS[2]

    def _training(self) -> Callable[..., Any]:
        assert self._wiring is not None
        return autograd.training(self._wiring, self._made["forward"], self._made["backward"])

    def add_graph(
        self, kind: str, plan_key: str, planned: ExecutionPlan, texts: Sequence[str], constants: GraphConstants
    ) -> None:
        """A graph of AOTAutograd's was compiled. The entry appears with the last of them, which may be long after."""
        if self.refusal or (self.entry is None and not self.is_saving):
            return
        try:
            self._add_graph(kind, plan_key, planned, texts, constants)
        except Exception as why:
            logs.compiler.debug("Dynamo's graph of %s is not kept: %s.", planned.name, why)
            self.entry, self.refusal = None, str(why)

    def _add_graph(
        self, kind: str, plan_key: str, planned: ExecutionPlan, texts: Sequence[str], constants: GraphConstants
    ) -> None:
        if (planned.sizes and not self.is_saving) or kind in self._graphs:
            raise NotCacheable("its sizes may change")
        self._graphs[kind] = {"plan": plan_key, "surroundings": to_json(constants)}
        if self.is_saving:
            self._graphs[kind]["content"] = plan_cache.to_json(planned, texts)
        if kind != "backward":
            metadata = private.forward_metadata()
            self._wiring = wiring.wiring(metadata, self._inputs, self._shared, self._autocast, self.is_saving)
        elif self._wiring is not None:
            self._wiring = wiring.connected(self._wiring, planned.outputs)
        if tuple(self._graphs) in _GRAPHS.values() and self._wiring is not None:
            self._write(self._wiring)

    def _write(self, found: Wiring) -> None:
        content = {"wiring": plan_cache.encode(found), "graphs": [*self._graphs.values()]}
        if self.is_saving:
            self.saved = content
        elif self.entry is not None:
            plan_cache.write(self.entry, content)
