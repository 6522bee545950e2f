"""``torch.compile(model, backend="opkit")``: Dynamo and AOTAutograd capture, and each graph is compiled to C.

A graph that is not compiled runs in eager mode, with a warning in the log, so that a training never dies of it.
"""

from __future__ import annotations

import contextvars
import dataclasses
import difflib
import functools
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from opkit import config
from opkit.compiler import graph_cache, logs
from opkit.compiler.capture import conversion, partition, reproduction
from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.conversion import Captured, Unsupported
from opkit.compiler.capture.decompositions import DECOMPOSITIONS
from opkit.compiler.compiled_graph import CompiledGraph, Stages
from opkit.compiler.ir.graph import Node
from opkit.compiler.ir.program import Strided
from opkit.compiler.lower.target import LoweringTarget
from opkit.compiler.run import arena, plan_cache
from opkit.compiler.run.plan import ExecutionPlan
from opkit.compiler.run.runner import GraphConstants, Runner
from opkit.errors import ArgumentError, CompileError, NoCompilerWarning, ToolchainError
from opkit.kernels.cc import isa
from opkit.op.core import inlining, knows_lowerings

Boxed = Callable[[list[Any]], Any]


observer: contextvars.ContextVar[Callable[[CompiledGraph], None] | None] = contextvars.ContextVar(
    "opkit_observer", default=None
)
"""Who is told of each graph that is compiled. While there is somebody, no plan comes from the disk."""

_KINDS = ("forward", "backward", "inference")


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """What ``torch.compile(..., options={...})`` takes.

    Attributes:
        strict: raise where a graph, or the body of a control flow operator, is not compiled, rather than running it in eager
            mode.
        inline: True: see through opkit operators, also where they have a kernel; False: call them; None: each as defined, and
            by the rule of ``register_lowering`` where it has one.
    """

    strict: bool = False
    inline: bool | None = None


def options(given: Mapping[str, Any] | None) -> CompileOptions:
    """The options of a call of torch.compile.

    Raises:
        ArgumentError: one that does not exist, or of the wrong type.
    """
    known = [field.name for field in dataclasses.fields(CompileOptions)]
    for name, value in (given or {}).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(f"backend='opkit' has no option {name!r}; it has {', '.join(map(repr, known))}.{hint}")
        if not isinstance(value, bool) and not (name == "inline" and value is None):
            raise ArgumentError(f"backend='opkit': options[{name!r}]={value!r} must be True or False.")
    return CompileOptions(**{"strict": config.get().strict, **(given or {})})


def opkit_backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: what Dynamo calls with each graph that it captured."""
    if mode is not None:
        raise ArgumentError(f"backend='opkit' has no modes, got mode={mode!r}. Leave it out.")
    logs.set_up()
    chosen = _options(options)
    if private.is_saving():
        from opkit.compiler.saved_function import SavedFunction  # no other call needs it

        recording = graph_cache.Recording(None, example_inputs, is_saving=True)
        with private.without_autograd_cache():
            return SavedFunction(_captured_anew(module, example_inputs, chosen, recording), recording)
    entry = graph_cache.key(module, example_inputs, f"{chosen} {_target()} {sorted(isa.cpu_features())}")
    found = None if entry is None or _is_watched() else graph_cache.find(entry)
    return found or _captured_anew(module, example_inputs, chosen, graph_cache.Recording(entry, example_inputs))


def _captured_anew(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions, recording: graph_cache.Recording
) -> Callable[..., Any]:
    """What runs Dynamo's graph, by way of AOTAutograd."""
    compilers = {
        kind: functools.partial(compile_fx_graph, kind=kind, options=options, recording=recording) for kind in _KINDS
    }
    make = private.aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=partition.partition,
        decompositions=DECOMPOSITIONS,  # few: there are rules for composite operators, and fewer nodes take less time
        keep_inference_input_mutations=True,
    )
    tokens = inlining.set(options.inline), knows_lowerings.set(options.inline is None)
    try:
        return recording.shortened(make(module, example_inputs))
    finally:
        inlining.reset(tokens[0])
        knows_lowerings.reset(tokens[1])


_options = options


# ---- one graph -------------------------------------------------------------------------------------------------------


def compile_fx_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: str,
    options: CompileOptions = CompileOptions(),
    recording: graph_cache.Recording | None = None,
) -> Boxed:
    """A function for a graph of AOTAutograd's: it takes a list of inputs, which it empties. ``recording`` is told of it.

    Raises:
        CompileError: the compiler failed, and ``options.strict`` holds.
    """
    graph, recording = _Graph(module, kind, options), recording or graph_cache.Recording(None, ())
    if kind == "forward":
        private.donate_nothing()
    made = graph.attempt(lambda: graph.begun(example_inputs, functools.partial(recording.note, kind)))
    recording.keep(kind, made)
    return made


def _tell(what: CompiledGraph) -> None:
    told = observer.get()
    if told is not None:
        told(what)


def _told(what: CompiledGraph) -> tuple[ExecutionPlan, tuple[str, ...]]:
    _tell(what)
    assert what.plan is not None
    return what.plan, what.texts


class _Graph:
    """A graph on its way through the stages. gcc works while AOTAutograd goes on: the last stages wait for the first call."""

    def __init__(self, module: fx.GraphModule, kind: str, options: CompileOptions) -> None:
        self.module, self.kind, self.name, self.options = module, kind, graph_cache.numbered(kind), options
        self.save_memory = kind != "inference"  # memory: what a forward keeps meets the backward's peak
        self.stages = Stages()

    def attempt(self, make: Callable[[], Boxed]) -> Boxed:
        """What ``make`` returns; the graph in eager mode if it fails.

        Raises:
            CompileError, ToolchainError: it failed, and ``options.strict`` holds.
        """
        try:
            return make()
        except Unsupported as error:
            reason = str(error)
            if self.options.strict:
                raise CompileError(f"torch.compile(backend='opkit') cannot compile {self.name}: {reason}.") from error
            logs.compiler.warning("%s runs in eager mode: %s.", self.name, reason)
        except ToolchainError as error:
            if self.options.strict:
                raise
            reason = str(error)
            _warn_no_compiler(reason)
        except Exception as error:
            if self.stages.now == "bodies":  # one of them was reported
                raise
            reason = f"{type(error).__name__}: {error}"
            _report(self.module, self.name, self.stages.now, error, self.options.strict)
        _tell(CompiledGraph(self.name, reason))
        return eager(self.module)

    def begun(
        self, inputs: Sequence[Any], note: Callable[[str, ExecutionPlan, Sequence[str], GraphConstants], None]
    ) -> Boxed:
        """A function that finishes the graph when it is called."""
        from opkit.compiler import (  # a process that finds all its graphs on the disk lowers nothing
            pipeline,
            user_lowerings,
        )

        run, is_body = self.stages.run, self.kind == "body"
        of_user = None if is_body else private.results_of_the_user()
        captured = run("capture", conversion.capture, self.module, self.name, inputs, of_user, is_body)
        self._note_left(captured)
        lowered = user_lowerings.operators(captured.targets) if self.options.inline is None else {}
        target = _target()
        identity = run(
            "look-up", plan_cache.key, f"{target} {self.save_memory} {captured.key} {user_lowerings.identity(lowered)}"
        )
        found = None if _is_watched() else plan_cache.find(identity)
        planned, texts = found or _told(
            pipeline.compile_graph(captured, target, self.stages, lowered, self.options.strict, self.save_memory)
        )
        constants = run("bodies", self._graph_constants, captured)
        build = run("build", graph_cache.build, planned, texts, self.name)
        if not is_body:
            private.report_strides(map(_strides, planned.outputs))
        note(identity, planned, texts, constants)
        keep = functools.partial(plan_cache.store, identity, planned, texts) if found is None else None
        return _Awaited(lambda: self.attempt(lambda: self.finished(build, constants, keep)))

    def _note_left(self, captured: Captured) -> None:
        """Log which parts of the graph torch runs.

        Raises:
            Unsupported: there are some, and ``options.strict`` holds.
        """
        if captured.left and self.options.strict:
            raise Unsupported("; ".join(captured.left))
        for reason in captured.left:
            logs.compiler.warning("%s: %s. torch runs it.", self.name, reason)

    def _graph_constants(self, captured: Captured) -> GraphConstants:
        """What the graph uses of torch, and its bodies, which are compiled."""
        bodies = {text: compile_fx_graph(body, (), "body", self.options) for text, body in captured.bodies.items()}
        return GraphConstants(
            captured.constants, captured.targets, {**captured.opaques, **bodies}, captured.computed, captured.resolved
        )

    def finished(
        self, build: graph_cache.PlanBuild, constants: GraphConstants, keep: Callable[[], None] | None
    ) -> Boxed:
        """The function of a plan whose C is being compiled; ``keep`` is called once it is."""
        runner = self.stages.run("build", build.loaded, constants)
        if keep is not None:
            keep()
        return _checked(runner, self.module)


class _Awaited:
    """A function that is made when it is called first."""

    def __init__(self, make: Callable[[], Boxed]) -> None:
        self._boxed_call = True  # torch hands over the only references to the inputs
        self._lock = threading.Lock()
        self._make: Callable[[], Boxed] | None = make
        self._run: Boxed | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        return (self._run or self._made())(inputs)

    def _made(self) -> Boxed:
        with self._lock:
            if self._run is None:
                assert self._make is not None
                self._run, self._make = self._make(), None
            return self._run


def _is_watched() -> bool:
    """Whether somebody wants to know which kernels there are, and why: a stored plan does not say."""
    return observer.get() is not None or logs.fusion.isEnabledFor(logging.DEBUG)


def _target() -> LoweringTarget:
    return LoweringTarget.of(frozenset(isa.cpu_features()), isa.last_cache())


def _strides(output: Any) -> tuple[int, ...] | None:
    """The strides of a result, where they are numbers."""
    found = [s.constant for s in output.strides] if isinstance(output, Strided) else [None]
    return None if None in found else tuple(s for s in found if s is not None)


def _checked(runner: Runner, module: fx.GraphModule) -> Boxed:
    """The runner; where it takes integers, which can be negative, those that stand for no size go to the graph itself."""
    if not runner.plan.sizes:
        return runner
    otherwise = eager(module)

    def run(inputs: list[Any]) -> Any:
        return runner(inputs) if min(runner.sizes(inputs)) >= 0 else otherwise(inputs)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def eager(module: fx.GraphModule) -> Boxed:
    """The graph itself, as torch runs it."""

    def run(inputs: list[Any]) -> Any:
        given = list(inputs)
        inputs.clear()
        return module(*given)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


# ---- what is told ----------------------------------------------------------------------------------------------------


@functools.cache
def _warn_no_compiler(reason: str) -> None:
    warnings.warn(f"torch.compile(backend='opkit') runs in eager mode: {reason}", NoCompilerWarning, stacklevel=2)


def _report(module: fx.GraphModule, name: str, stage: str, error: Exception, strict: bool) -> None:
    path = reproduction.write(module, stage, error)
    node = _node_of(error)
    where = "" if node is None else f" at the node {node.name} ({node.target}, {node.origin or 'of no known line'})"
    again = "" if path is None else f" {path} shows it again."
    message = (
        f"opkit's compiler failed on {name} in the stage {stage!r}{where}: {type(error).__name__}: {error}.{again}"
    )
    if strict:
        raise CompileError(message) from error
    logs.compiler.warning("%s The graph runs in eager mode.", message, exc_info=error)


def _node_of(error: Exception) -> Node | None:
    """The node that was worked on: the innermost one that a frame of the traceback holds."""
    held = [frame.f_locals.get("node") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((node for node in reversed(held) if isinstance(node, Node)), None)


opkit_backend.reset = arena.release  # pyright: ignore[reportFunctionMemberAccess]
