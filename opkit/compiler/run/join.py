"""This module joins the plans of a graph's parts: one plan for the whole forward, and one for the whole backward.

Each call of a part becomes the part's steps, with buffers of its own. Calls share the code of kernels, and the arena: what is in
it lives no longer than a call. What passes between parts are buffers of the joined plan. The backward has the calls in reverse
order, and adds gradients of one value in the order in which autograd would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from opkit.compiler.capture.parts import Call, Cut
from opkit.compiler.ir.index import ZERO, Index, index, product
from opkit.compiler.ir.program import Buffer, Extern, Strided, reads, renamed_argument, writes
from opkit.compiler.run.driver_program import alignments
from opkit.compiler.run.plan import ExecutionPlan, GpuLaunch, GraphConstants, PlanStep, Segment
from opkit.compiler.run.wiring import GraphResult, Wiring

Graph = tuple[ExecutionPlan, GraphConstants]


class NotJoinable(Exception):
    """The reason why parts stay apart."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """A graph as one.

    Attributes:
        wiring: its calling convention.
        taken: the numbers of the values that it takes; the graph's inputs and the tensors that it holds come first.
        made: the numbers of the values that it returns.
        same: the numbers of results of parts that are inputs of theirs, with the number of the value that each is.
        graphs: the inference, or the forward and the backward.
    """

    wiring: Wiring
    taken: tuple[int, ...]
    made: tuple[int, ...]
    same: Mapping[int, int]
    graphs: tuple[Graph, ...]


def joined(cut: Cut, parts: Sequence[tuple[Wiring, Sequence[Graph]]]) -> Joined:
    """Return the calls of parts as one graph.

    Args:
        cut: the calls.
        parts: of each part, its calling convention, and its inference, or its forward and its backward.

    Raises:
        NotJoinable: the plans do not say enough, or a value cannot pass as it is.
    """
    return _Join(cut, parts).joined()


class _Join:
    def __init__(self, cut: Cut, parts: Sequence[tuple[Wiring, Sequence[Graph]]]) -> None:
        self.cut, self.parts = cut, parts
        self.outside = cut.inputs + len(cut.attributes)
        self.same: dict[int, int] = {}
        self.values: dict[int, Strided] = {}  # those that parts make, in the forward
        self.results: dict[int, GraphResult] = {}  # what each of them is for its part
        self.saved: list[list[Strided]] = []  # by call
        self.forward = _JoinedPlan([graphs[0] for _, graphs in parts])
        self.backward = _JoinedPlan([graphs[1] if len(graphs) > 1 else None for _, graphs in parts])

    def joined(self) -> Joined:
        for number, call in enumerate(self.cut.calls):
            self._add_forward(number, call)
        returned = [self._value(n) for n in self.cut.results if isinstance(n, int)]
        made = tuple(dict.fromkeys(n for n in returned if n >= self.outside))
        taken = tuple(n for n in self.forward.inputs if isinstance(n, int))
        results = [self.values[n] for n in made]
        if all(len(graphs) == 1 for _, graphs in self.parts):
            plan = self.forward.plan(taken, results)
            return Joined(self._wiring(taken, made, {}), taken, made, self.same, (plan,))
        if not made:
            raise NotJoinable("all results are inputs")
        tangents = [n for n in made if self.results[n].differentiable]
        gradients = self._gradients(tangents)
        kept = [key for key in self.backward.inputs if isinstance(key, tuple)]
        forward = self.forward.plan(taken, [*results, *(strided for strided, *_ in kept)])
        backward = self.backward.plan([*kept, *tangents], [gradients.get(n) for n in taken])
        return Joined(self._wiring(taken, made, gradients), taken, made, self.same, (forward, backward))

    def _value(self, number: int) -> int:
        return self.same.get(number, number)

    def _arguments(self, call: Call) -> list[int]:
        return [self._value(n) for n in call.arguments]

    def _add_forward(self, number: int, call: Call) -> None:
        wiring, graphs = self.parts[call.part]
        plan, constants = graphs[0]
        given = self._arguments(call)
        arguments = [
            self.forward.input(n, plan, at, at in constants.resolved) if n < self.outside else self.values[n]
            for at, n in enumerate(given)
        ]
        found = [each for each in self.forward.call(call.part, number, arguments) if each is not None]
        if len(found) < len(plan.outputs):
            raise NotJoinable("a result of a part is no tensor")
        for n, value, result in zip(call.results, found, wiring.results, strict=False):
            if result.input is not None:
                self.same[n] = given[result.input]
            else:
                self.values[n], self.results[n] = value, result
        self.saved.append(found[len(wiring.results) :])

    # ---- the backward ------------------------------------------------------------------------------------------------

    def _gradients(self, tangents: Sequence[int]) -> dict[int, Strided]:
        """Add the backward's steps, and return the gradients of values."""
        places = {
            n: (k, at) for k, call in enumerate(self.cut.calls) for at, n in enumerate(self._differentiable(call))
        }
        found: dict[int, Strided] = {}
        for n in tangents:  # autograd adds the gradients of parts to those of the caller
            number, at = places[n]
            plan, _ = self._graph(self.cut.calls[number])
            found[n] = self.backward.input(n, plan, len(self.saved[number]) + at, True)
        for number, call in reversed([*enumerate(self.cut.calls)]):
            if len(self.parts[call.part][1]) > 1 and any(n in found for n in self._differentiable(call)):
                self._add_backward(number, call, found)
        return found

    def _graph(self, call: Call) -> Graph:
        return self.parts[call.part][1][1]

    def _differentiable(self, call: Call) -> list[int]:
        """Return the results whose gradients the backward of a call takes."""
        results = zip(call.results, self.parts[call.part][0].results, strict=True)
        return [n for n, result in results if result.input is None and result.differentiable]

    def _add_backward(self, number: int, call: Call, gradients: dict[int, Strided]) -> None:
        own, plan = self._differentiable(call), self._graph(call)[0]
        saved = [self._saved(value, plan, at) for at, value in enumerate(self.saved[number])]
        tangents = [
            gradients[n] if n in gradients else self.backward.zeros(plan.buffers[str(plan.inputs[at])])
            for at, n in enumerate(own, len(saved))
        ]
        found = self.backward.call(call.part, number, [*saved, *tangents])
        for n, gradient in zip(self._arguments(call), found, strict=True):
            if gradient is None or not (n < self.outside or self.results[n].differentiable):
                continue
            gradients[n] = self.backward.sum(gradients[n], gradient) if n in gradients else gradient

    def _saved(self, value: Strided, plan: ExecutionPlan, at: int) -> Strided:
        """Return a tensor that the forward saves: once, if several calls save it."""
        buffer = plan.buffers[str(plan.inputs[at])]
        if buffer.dtype != self.forward.buffers[value.buffer].dtype:
            raise NotJoinable(f"a tensor is saved in another dtype than {buffer.dtype}")
        return self.backward.input((value, buffer.shape, buffer.strides, buffer.role), plan, at, False)

    # ---- the calling convention --------------------------------------------------------------------------------------

    def _wiring(self, taken: Sequence[int], made: Sequence[int], gradients: Mapping[int, Strided]) -> Wiring:
        calls = [(self.parts[call.part][0], self._arguments(call)) for call in self.cut.calls]
        written = {given[at] for wiring, given in calls for at in wiring.written}
        detached = {given[at] for wiring, given in calls for at in wiring.detached}
        if not written.issubset(taken):
            raise NotJoinable("a part writes to a result of another")
        return Wiring(
            len(taken),
            tuple(dataclasses.replace(self.results[n], input=None) for n in made),
            tuple(at for at, n in enumerate(taken) if n in written),
            tuple(at for at, n in enumerate(taken) if n in detached and n not in gradients),
            any(wiring.autocast for wiring, _ in calls),
            all(wiring.deterministic for wiring, _ in calls),
        )


# ---- one plan --------------------------------------------------------------------------------------------------------


class _JoinedPlan:
    """A plan that grows by the steps of calls.

    Attributes:
        graphs: those of the parts; None for a part that is never called.
        inputs: the buffers of inputs, by what names them outside.
        buffers: all buffers, by name.
    """

    def __init__(self, graphs: Sequence[Graph | None]) -> None:
        self.graphs = graphs
        self.inputs: dict[Hashable, str] = {}
        self.buffers: dict[str, Buffer] = {}
        self._resolved: set[str] = set()
        self._places: dict[str, Index] = {}
        self._steps: list[PlanStep] = []
        self._table: list[str] = []
        self._written: set[str] = set()
        plans = [None if graph is None else graph[0] for graph in graphs]
        self._plans = [plan for plan in plans if plan is not None]
        for graph in filter(None, graphs):
            _check(*graph, self._plans[0].device)
        counts = [(0, 0) if plan is None else (plan.segments, len(plan.kernels)) for plan in plans]
        self._first = [tuple(map(sum, zip((0, 0), *counts[:n], strict=True))) for n in range(len(counts))]
        """The numbers of the first segment and of the first kernel of each part."""

    def input(self, key: Hashable, plan: ExecutionPlan, at: int, is_resolved: bool) -> Strided:
        """Return an input of the joined plan, which is the input number ``at`` of a part's plan."""
        buffer = plan.buffers[str(plan.inputs[at])]
        name = self.inputs.setdefault(key, f"in{len(self.inputs)}")
        known = self.buffers.setdefault(name, dataclasses.replace(buffer, name=name))
        if is_resolved:
            self._resolved.add(name)
        return Strided(name, known.shape, known.strides, ZERO)

    def call(self, part: int, number: int, arguments: Sequence[Strided]) -> list[Strided | None]:
        """Add the steps of a call of a part, and return its results."""
        graph = self.graphs[part]
        assert graph is not None
        plan, _ = graph
        given = zip(map(str, plan.inputs), arguments, strict=True)
        names = {name: self._passed(argument, plan.buffers[name]) for name, argument in given}
        for name, buffer in plan.buffers.items():
            if name not in names:
                is_shared = name in plan.places or buffer.role == "constant"  # by the calls of this part
                names[name] = f"part{part}.{name}" if is_shared else f"call{number}.{name}"
                self.buffers[names[name]] = dataclasses.replace(buffer, name=names[name])
        self._places |= {names[name]: place for name, place in plan.places.items()}
        self._written |= {names[name] for name in plan.written}
        first_segment, first_kernel = self._first[part]
        for step in plan.steps:
            if isinstance(step, Extern):
                self._steps.append(_renamed(step, names))
                continue
            buffers = tuple(names[name] for name in step.buffers)
            if isinstance(step, Segment):
                moved = {"number": step.number + first_segment, "first": len(self._table)}
            else:
                moved = {"kernel": step.kernel + first_kernel}
            self._steps.append(dataclasses.replace(step, buffers=buffers, **moved))
        self._table += [names[name] for name in plan.table]
        return [renamed_argument(each, names) for each in plan.outputs]

    def _passed(self, value: Strided, to: Buffer) -> str:
        """Return the buffer that a call gets for a value: the value's own, or a copy with other strides."""
        own = self.buffers[value.buffer]
        if (value.shape, own.dtype, own.role == "number") != (to.shape, to.dtype, to.role == "number"):
            raise NotJoinable(f"a {to.dtype} of {_numbers(to.shape)} comes as a {own.dtype} of {_numbers(value.shape)}")
        strides = zip(value.shape, value.strides, to.strides, strict=True)
        is_whole = (value.shape, value.strides) == (own.shape, own.strides)
        # a call may read a single number from the whole buffer
        if value.offset == 0 and all(s == t or n == 1 for n, s, t in strides) and (is_whole or product(to.shape) != 1):
            return value.buffer
        if value.buffer in self.inputs.values() or not _is_dense(to.shape, to.strides):
            raise NotJoinable(f"a tensor with the strides {_numbers(value.strides)} must have {_numbers(to.strides)}")
        return self._computed("aten.clone.default", (value,), to).buffer

    def sum(self, x: Strided, y: Strided) -> Strided:
        """Add a step for the sum of two gradients."""
        dtype = self.buffers[x.buffer].dtype
        if (self.buffers[y.buffer].dtype, y.shape) != (dtype, x.shape):
            raise NotJoinable("gradients of one value have several types")
        contiguous = tuple(product(x.shape[d + 1 :]) for d in range(len(x.shape)))
        strides = x.strides if _is_dense(x.shape, x.strides) else contiguous
        return self._computed("aten.add.Tensor", (x, y), Buffer("", dtype, x.shape, strides))

    def zeros(self, like: Buffer) -> Strided:
        """Add a step for the gradient of a result that nothing differentiable uses."""
        name = f"own{len(self._steps)}"
        return self._computed("aten.zero.default", (Strided(name, like.shape, like.strides, ZERO),), like)

    def _computed(self, target: str, args: tuple[Any, ...], like: Buffer) -> Strided:
        """Add a call of an operator, and return its result: a new tensor."""
        name = f"own{len(self._steps)}"
        self.buffers[name] = Buffer(name, like.dtype, like.shape, like.strides)
        self._steps.append(Extern(target, args, {}, (name,), out=True))
        return Strided(name, like.shape, like.strides, ZERO)

    def plan(self, inputs: Sequence[Hashable], outputs: Sequence[Strided | None]) -> Graph:
        """Return the plan and its torch objects."""
        names = [self.inputs[key] for key in inputs]
        device = self._plans[0].device
        launched = dict.fromkeys(b for step in self._steps if isinstance(step, GpuLaunch) for b in step.buffers)
        functions = {plan.functions for plan in self._plans} - {()}
        if len(functions) > 1:
            raise NotJoinable("kernels of several parts call functions of libraries")
        plan = ExecutionPlan(
            "", tuple(names), self.buffers, tuple(self._steps), tuple(outputs), self._places,
            index(max(plan.arena.constant or 0 for plan in self._plans)),
            tuple(self._table if device == "cpu" else launched), (), *functions,
            device=device, kernels=tuple(kernel for plan in self._plans for kernel in plan.kernels),
            written=tuple(sorted(self._written)),
        )  # fmt: skip
        _check_alignment(plan)
        resolved = frozenset(at for at, name in enumerate(names) if name in self._resolved)
        return plan, self._constants(resolved)

    def _constants(self, resolved: frozenset[int]) -> GraphConstants:
        tensors = {
            f"part{part}.{name}": tensor
            for part, graph in enumerate(self.graphs)
            if graph is not None
            for name, tensor in graph[1].tensors.items()
        }
        targets, opaques = (
            _together([getattr(graph[1], field) for graph in self.graphs if graph is not None])
            for field in ("targets", "opaques")
        )
        return GraphConstants(tensors, targets, opaques, {}, resolved)


def _check(plan: ExecutionPlan, constants: GraphConstants, device: str) -> None:
    """Raise an error if a plan cannot be part of another one.

    Raises:
        NotJoinable: it cannot.
    """
    if plan.sizes or constants.computed:
        raise NotJoinable("sizes may change")
    if plan.device != device:
        raise NotJoinable(f"parts run on {device} and on {plan.device}")
    if not all(isinstance(each, str) for each in plan.inputs):
        raise NotJoinable("an input of a part is no tensor")
    if not all(each is None or isinstance(each, Strided) for each in plan.outputs):
        raise NotJoinable("a result of a part is no tensor")


def _check_alignment(plan: ExecutionPlan) -> None:
    """Raise an error if a buffer may have to be copied to an aligned address, for some kernels, and others must not see a copy.

    Raises:
        NotJoinable: there is such a buffer.
    """
    calls = [step for step in plan.steps if isinstance(step, Extern)]
    views = {name for call in calls if call.aliases for name in writes(call)}
    in_place = views.union(plan.written, *(reads(call) for call in calls if call.uses_storage))
    if any(len(found) > 1 and buffer in in_place for buffer, found in alignments(plan).items()):
        raise NotJoinable("a part needs an aligned tensor where another one uses it in place")


def _renamed(step: Extern, names: Mapping[str, str]) -> Extern:
    return dataclasses.replace(
        step,
        args=renamed_argument(step.args, names),
        kwargs=renamed_argument(step.kwargs, names),
        outputs=tuple(names[each] if isinstance(each, str) else each for each in step.outputs),
        mutated=frozenset(names[name] for name in step.mutated),
    )


def _together(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of tables.

    Raises:
        NotJoinable: one name means several things.
    """
    found: dict[str, Any] = {}
    for name, value in (item for table in tables for item in table.items()):
        if found.setdefault(name, value) is not value and found[name] != value:
            raise NotJoinable(f"{name} is another thing in each part")
    return found


def _is_dense(shape: Sequence[Index], strides: Sequence[Index]) -> bool:
    """Return whether a layout of constant sizes has neither gaps nor elements that share memory."""
    dimensions = sorted((s.constant or 0, n.constant or 0) for n, s in zip(shape, strides, strict=True) if n != 1)
    expected = 1
    for stride, extent in dimensions:
        if stride != expected:
            return False
        expected *= extent
    return True


def _numbers(sizes: Sequence[Index]) -> tuple[int, ...]:
    return tuple(size.constant or 0 for size in sizes)
