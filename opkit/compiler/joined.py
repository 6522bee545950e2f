"""This module makes one function of the parts of a graph: with one plan for each direction where that is possible."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opkit.compiler import diagnostics, graph_cache
from opkit.compiler.capture.parts import Cut
from opkit.compiler.graph_cache import PlainGraph, PlanBuild
from opkit.compiler.run import join
from opkit.compiler.run.join import NotJoinable
from opkit.compiler.run.library import LoadedSegments
from opkit.errors import CompileError, ToolchainError


@dataclasses.dataclass(frozen=True)
class CompiledPart:
    """A part of a graph.

    Attributes:
        plain: its plans, if it runs without AOTAutograd.
        function: returns the function that runs it by itself.
        refusal: why it is not plain, if that is known.
    """

    plain: PlainGraph | None
    function: Callable[[], Callable[..., Any]]
    refusal: str = ""


def function(
    cut: Cut,
    parts: Sequence[CompiledPart],
    strict: bool,
    cuda_graphs: bool | None,
    otherwise: Callable[[], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Return the function of a graph that was cut.

    Args:
        cut: the graph.
        parts: its parts, compiled.
        strict: raise an error if joining them fails, apart from reasons that are known.
        cuda_graphs: as in CompileOptions.
        otherwise: returns the function if the parts cannot be joined; None: they are called one by one.
    """
    try:
        return _JoinedFunction(cut, parts, strict, cuda_graphs)
    except NotJoinable as reason:
        if otherwise is None:
            return _one_by_one(cut, parts, reason, strict)
        diagnostics.log.info("A graph with repeated blocks is compiled as a whole: %s.", reason)
        return otherwise()
    except Exception as reason:
        return _one_by_one(cut, parts, reason, strict)


def _one_by_one(cut: Cut, parts: Sequence[CompiledPart], reason: Exception, strict: bool) -> Callable[..., Any]:
    is_known = isinstance(reason, NotJoinable | CompileError | ToolchainError)  # the parts report errors of compilers
    if strict and not is_known:
        raise reason
    diagnostics.log.log(
        logging.INFO if is_known else logging.WARNING,
        "The parts of a graph with repeated blocks are called one by one: %s.",
        str(reason) if is_known else f"{type(reason).__name__}: {reason}",
        exc_info=None if is_known else reason,
    )
    return cut.function([part.function() for part in parts])


class _JoinedFunction:
    """The function of joined parts, which is built when it is first called: until then the C compiler runs.

    Raises:
        NotJoinable: the parts cannot be joined.
    """

    def __init__(self, cut: Cut, parts: Sequence[CompiledPart], strict: bool, cuda_graphs: bool | None) -> None:
        self._cut, self._parts, self._strict, self._cuda_graphs = cut, parts, strict, cuda_graphs
        self._lock = threading.Lock()
        self._run: Callable[..., Any] | None = None
        plain = [_plain(part) for part in parts]
        self._joined = join.joined(cut, [(each.wiring, [(b.plan, b.constants) for b in each.builds]) for each in plain])
        kinds = ("inference",) if len(self._joined.graphs) == 1 else ("forward", "backward")
        builds: list[PlanBuild] = []
        for n, (kind, (plan, constants)) in enumerate(zip(kinds, self._joined.graphs, strict=True)):
            named = dataclasses.replace(plan, name=graph_cache.next_name(kind))
            code = _SharedCode([each.builds[n] for each in plain if n < len(each.builds)])
            builds.append(PlanBuild(named, constants, (), code))
        self._graph = PlainGraph(self._joined.wiring, builds)

    def __call__(self, *inputs: Any) -> Any:
        return (self._run or self._built())(*inputs)

    def _built(self) -> Callable[..., Any]:
        with self._lock:
            if self._run is None:
                try:
                    self._run = self._whole(self._graph.function(self._cuda_graphs))
                except Exception as reason:
                    self._run = _one_by_one(self._cut, self._parts, reason, self._strict)
                self._parts = ()  # AOTAutograd's graphs among them
            return self._run

    def _whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of Dynamo's graph, from that of the joined one."""
        cut, taken = self._cut, self._joined.taken
        outside = cut.inputs + len(cut.attributes)
        held = [value for _, value in sorted(cut.attributes.items())]
        places = {n: outside + at for at, n in enumerate(self._joined.made)}
        same = self._joined.same
        results = [n if isinstance(n, list) else places.get(same.get(n, n), same.get(n, n)) for n in cut.results]

        def run(*inputs: Any) -> tuple[Any, ...]:
            given = [*inputs, *held]
            values = [*given, *call(*[given[n] for n in taken])]
            return tuple(n[0] if isinstance(n, list) else values[n] for n in results)

        return run


def _plain(part: CompiledPart) -> PlainGraph:
    if part.plain is None:
        raise NotJoinable(part.refusal or "one of them runs with AOTAutograd")
    return part.plain


class _SharedCode:
    """The code of several plans, in order."""

    def __init__(self, builds: Sequence[PlanBuild]) -> None:
        self._builds = builds

    def wait(self) -> LoadedSegments:
        """Wait for the compilers, and return all code.

        Raises:
            ToolchainError, CompileError: it cannot be compiled.
        """
        loaded = [build.runner.segments for build in self._builds]
        addresses = tuple(address for each in loaded for address in each.addresses)
        return LoadedSegments(addresses, kernels=[kernel for each in loaded for kernel in each.kernels])
