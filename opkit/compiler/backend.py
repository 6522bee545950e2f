"""The backend of ``torch.compile(model, backend="opkit")``.

Dynamo and AOTAutograd capture graphs, and this module compiles each of them to C. A graph that cannot be compiled runs in eager
mode, with a warning in the log, so that the compiler never ends a training run.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from opkit.compiler import diagnostics, graph_cache, joined
from opkit.compiler.capture import attention_masks, conversion, decompositions, division, in_place, partitioner, repeats
from opkit.compiler.capture import torch_private as private
from opkit.compiler.capture.checkpoint_names import remove_names
from opkit.compiler.capture.conversion import Captured, Unsupported
from opkit.compiler.capture.parts import Part
from opkit.compiler.capture.patterns.table import replace_patterns
from opkit.compiler.diagnostics import CompiledGraph, Stages
from opkit.compiler.ir.program import Strided
from opkit.compiler.lower.target import GPU, LoweringTarget
from opkit.compiler.options import DEFAULT, CompileOptions, compile_options
from opkit.compiler.run import cuda_graphs, driver, plan_cache
from opkit.compiler.run.cuda_graphs import RecordedRunner
from opkit.compiler.run.plan import GraphConstants
from opkit.compiler.run.runner import Runner, release_arenas
from opkit.compiler.run.torch_operators import fit
from opkit.errors import CompileError, ToolchainError
from opkit.kernels.cc import isa
from opkit.op.core import inlining, knows_lowerings

Boxed = Callable[[list[Any]], Any]


observer: contextvars.ContextVar[Callable[[CompiledGraph], None] | None] = contextvars.ContextVar(
    "opkit_observer", default=None
)
"""A function that is called with each graph that is compiled. While it is set, no plan is read from the disk."""

pattern_notes: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("opkit_pattern_notes", default=None)
"""A list to which notes on patterns in Dynamo's graphs are added."""

_KINDS = ("forward", "backward", "inference")


def opkit_backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured: Dynamo calls this function with each of them."""
    diagnostics.set_up_logs()
    chosen = compile_options(options, mode)
    with graph_cache.no_garbage_collection():
        return _compiled(module, example_inputs, chosen)


def _compiled(module: fx.GraphModule, example_inputs: Sequence[Any], chosen: CompileOptions) -> Callable[..., Any]:
    _rewrite(module)
    if private.is_saving():
        from opkit.compiler.saved_function import SavedFunction  # no other call needs it

        recording = graph_cache.Recording(None, example_inputs, is_saving=True)
        with private.without_autograd_cache():
            return SavedFunction(_compile_with_aot_autograd(module, example_inputs, chosen, recording), recording)
    blocks = _cut(module, example_inputs, chosen)
    if blocks is not None:
        parts = [_compiled_part(part, chosen) for part in blocks.parts]
        whole = dataclasses.replace(chosen, repeated_blocks=False)
        one_by_one = chosen.repeated_blocks or _on_cpu(example_inputs)
        otherwise = None if one_by_one else functools.partial(_compiled, module, example_inputs, whole)
        return joined.function(blocks, parts, chosen.strict, chosen.cuda_graphs, otherwise)
    entry = _entry(module, example_inputs, chosen)
    found = _found(entry)
    if found is not None:
        return found.function(chosen.cuda_graphs)
    return _compile_with_aot_autograd(module, example_inputs, chosen, graph_cache.Recording(entry, example_inputs))


def _cut(module: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions) -> repeats.Cut | None:
    """Return the graph cut at repeated blocks, or None."""
    if options.repeated_blocks is False:
        return None
    requested = options.repeated_blocks or _on_cpu(inputs)
    found = repeats.cut(module, inputs, repeats.MIN_BLOCKS if requested else repeats.MIN_BLOCKS_ON_GPUS)
    if found is None and options.repeated_blocks:
        diagnostics.log.info("No blocks are compiled once: none repeat, or parts of the graph would not mean the same.")
    return found


def _on_cpu(inputs: Sequence[Any]) -> bool:
    return all(value.device.type == "cpu" for value in inputs if isinstance(value, torch.Tensor))


def _compiled_part(part: Part, chosen: CompileOptions) -> joined.CompiledPart:
    """Compile a part of a graph, also its backward."""
    entry = _entry(part.module, part.inputs, chosen)
    found = _found(entry)
    if found is not None:
        return joined.CompiledPart(found, lambda: found.function(chosen.cuda_graphs))
    recording = graph_cache.Recording(entry, part.inputs, is_part=True)
    with private.backwards_at_once():
        function = _compile_with_aot_autograd(part.module, part.inputs, chosen, recording, part.count)
    return joined.CompiledPart(recording.plain, lambda: function, recording.refusal)


def _entry(module: fx.GraphModule, inputs: Sequence[Any], chosen: CompileOptions) -> str | None:
    """Return the key of the graph in the cache on the disk, or None if it cannot be there."""
    return graph_cache.key(module, inputs, f"{chosen} {_target()} {sorted(isa.cpu_features())}")


def _found(entry: str | None) -> graph_cache.PlainGraph | None:
    return None if entry is None or _is_observed() else graph_cache.find(entry)


def _compile_with_aot_autograd(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    recording: graph_cache.Recording,
    count: int = 1,
) -> Callable[..., Any]:
    """Return a function that runs Dynamo's graph; AOTAutograd calls ``compile_fx_graph`` with the graphs that it makes of it."""
    compilers = {
        kind: functools.partial(compile_fx_graph, kind=kind, options=options, recording=recording, count=count)
        for kind in _KINDS
    }
    make = private.aot_autograd(
        fw_compiler=compilers["forward"],
        bw_compiler=compilers["backward"],
        inference_compiler=compilers["inference"],
        partition_fn=partitioner.partition,
        # few: there are rules for composite operators, and fewer nodes take less time
        decompositions=decompositions.DECOMPOSITIONS,
        keep_inference_input_mutations=True,
    )
    tokens = inlining.set(options.inline), knows_lowerings.set(options.inline is None)
    try:
        with private.floats_as_arguments(), private.backwards_without_autocast():
            return recording.without_aot_autograd(make(module, example_inputs))
    finally:
        inlining.reset(tokens[0])
        knows_lowerings.reset(tokens[1])


def _rewrite(module: fx.GraphModule) -> None:
    """Replace what torch has faster functions for in Dynamo's graph, and in those that its operators call."""
    for part in [part for part in module.modules() if isinstance(part, fx.GraphModule)]:
        notes = replace_patterns(part)
        for note in notes:
            diagnostics.log.info("%s.", note)
        collected = pattern_notes.get()
        if collected is not None:
            collected += notes
        attention_masks.remove_constant_masks(part)
    remove_names(module)


# ---- one graph -------------------------------------------------------------------------------------------------------


def compile_fx_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    kind: str,
    options: CompileOptions = DEFAULT,
    recording: graph_cache.Recording | None = None,
    count: int = 1,
) -> Boxed:
    """Return a function for a graph of AOTAutograd's: it takes a list of inputs, which it empties.

    ``recording`` collects what the entry of the graph cache needs; ``count`` is how often the function is called in a step.

    Raises:
        CompileError: the compiler failed, and ``options.strict`` holds.
    """
    graph, recording = _GraphCompilation(module, kind, options, count), recording or graph_cache.Recording(None, ())
    if kind == "forward":
        private.disable_donated_buffers()
    function = graph.attempt(lambda: graph.start(example_inputs, functools.partial(recording.add_graph, kind)))
    recording.set_function(kind, function)
    return function


def _notify_observer(graph: CompiledGraph) -> None:
    notify = observer.get()
    if notify is not None:
        notify(graph)


class _GraphCompilation:
    """A graph on its way through the stages.

    The C compiler runs in the background while AOTAutograd continues: the last stages run at the first call.
    """

    def __init__(self, module: fx.GraphModule, kind: str, options: CompileOptions, count: int) -> None:
        self.module, self.kind, self.name, self.options = module, kind, graph_cache.next_name(kind), options
        self.count = count
        self.save_memory = kind != "inference"  # what a forward saves adds to the backward's peak
        self.stages = Stages()
        self.user_results: int | None = None
        self.saved_strides: list[tuple[int, ...] | None] = []  # of what a forward saves, as reported to AOTAutograd

    def attempt(self, stage: Callable[[], Boxed]) -> Boxed:
        """Return what ``stage`` returns, or a function that runs the graph in eager mode if it fails.

        Raises:
            CompileError, ToolchainError: it failed, and ``options.strict`` holds.
        """
        try:
            return stage()
        except Unsupported as error:
            reason = str(error)
            if self.options.strict:
                raise CompileError(f"torch.compile(backend='opkit') cannot compile {self.name}: {reason}.") from error
            diagnostics.report_unsupported(self.name, error)
        except ToolchainError as error:
            if self.options.strict:
                raise
            reason = str(error)
            diagnostics.warn_no_compiler(reason)
        except Exception as error:
            if self.stages.now == "bodies":  # one of them was reported
                raise
            reason = f"{type(error).__name__}: {error}"
            diagnostics.report_failure(self.module, self.name, self.stages.now, error, self.options.strict)
        _notify_observer(CompiledGraph(self.name, reason, count=self.count))
        return eager(self.module, self.saved_strides)

    def start(self, inputs: Sequence[Any], add_graph: Callable[[str, graph_cache.PlanBuild], None]) -> Boxed:
        """Run all stages but the last, and return a function that finishes the graph when it is first called."""
        # imported here because a process that finds all its graphs in the cache lowers nothing
        from opkit.compiler import pipeline, user_lowerings

        run, is_body = self.stages.run, self.kind == "body"
        self.user_results = None if is_body else private.user_result_count()
        divided = run("capture", division.divide, self.module)
        if divided is not None:
            return run("bodies", self._compiled_parts, divided)
        run("capture", in_place.write_in_place, self.module)
        captured = run("capture", conversion.capture, self.module, self.name, inputs, self.user_results, is_body)
        self._log_uncompiled_parts(captured)
        operators = user_lowerings.operators(captured.targets) if self.options.inline is None else {}
        target = _target() if captured.device.type == "cpu" else gpu_target()
        key_text = f"{target} {self.save_memory} {captured.key} {user_lowerings.identity(operators)}"
        plan_key = run("look-up", plan_cache.key, key_text)
        cached = None if _is_observed() else plan_cache.find(plan_key)
        if cached is None:
            compiled = pipeline.compile_graph(
                captured, target, self.stages, operators, self.options.strict, self.save_memory
            )
            _notify_observer(dataclasses.replace(compiled, count=self.count))
            assert compiled.plan is not None
            plan, texts = compiled.plan, compiled.texts
        else:
            plan, texts = cached
        constants = run("bodies", self._graph_constants, captured)
        store = functools.partial(plan_cache.store, plan_key, plan, texts) if cached is None else None
        build = run("build", graph_cache.build, plan, constants, texts, self.name, store)
        if not is_body:
            strides = list(map(_strides, plan.outputs))
            private.report_strides(strides)
            self.saved_strides = strides[len(strides) if self.user_results is None else self.user_results :]
        add_graph(plan_key, build)
        return _LazyFunction(lambda: self.attempt(lambda: self.finish(build)))

    def _compiled_parts(self, divided: division.Division) -> Boxed:
        """Compile the parts of a graph between operators that make sizes, and return the graph's function."""
        diagnostics.log.info("%s is compiled in parts, between %s.", self.name, ", ".join(divided.operators))
        return divided.function(
            {name: compile_fx_graph(part, (), "body", self.options) for name, part in divided.parts.items()}
        )

    def _log_uncompiled_parts(self, captured: Captured) -> None:
        """Log the parts of the graph that torch runs.

        Raises:
            Unsupported: there are such parts, and ``options.strict`` holds.
        """
        if captured.uncompiled and self.options.strict:
            raise Unsupported("; ".join(captured.uncompiled))
        for reason in captured.uncompiled:
            diagnostics.log.warning("%s: %s. torch runs it.", self.name, reason)

    def _graph_constants(self, captured: Captured) -> GraphConstants:
        """Compile the bodies of control flow operators, and return them with the graph's other constants."""
        bodies = {text: compile_fx_graph(body, (), "body", self.options) for text, body in captured.bodies.items()}
        return GraphConstants(
            captured.constants, captured.targets, {**captured.opaques, **bodies}, captured.computed, captured.resolved
        )

    def finish(self, build: graph_cache.PlanBuild) -> Boxed:
        """Wait for the C compiler and return the function of the plan."""
        runner = self.stages.run("build", lambda: build.runner)
        wanted = self.options.cuda_graphs
        return _with_negative_fallback(
            cuda_graphs.recorded(runner, wanted, self.kind, self.user_results), self.module, self.saved_strides
        )


class _LazyFunction:
    """A function that is built when it is first called."""

    def __init__(self, build: Callable[[], Boxed]) -> None:
        self._boxed_call = True  # torch hands over the only references to the inputs
        self._lock = threading.Lock()
        self._build: Callable[[], Boxed] | None = build
        self._run: Boxed | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        return (self._run or self._built())(inputs)

    def _built(self) -> Boxed:
        with self._lock:
            if self._run is None:
                assert self._build is not None
                self._run, self._build = self._build(), None
            return self._run


def _is_observed() -> bool:
    """Return whether an observer or the log needs details of fusion, which a stored plan does not contain."""
    return observer.get() is not None or diagnostics.fusion_log.isEnabledFor(logging.DEBUG)


def _target() -> LoweringTarget:
    target = LoweringTarget.of(frozenset(isa.cpu_features()), isa.last_cache())
    own = driver.has_own_products()
    return dataclasses.replace(target, own_products=own, mkl_convolutions=own and torch.get_num_threads() == 1)


def gpu_target() -> LoweringTarget:
    """Return the target of lowering for GPUs, with torch's settings."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    return dataclasses.replace(GPU, deterministic=deterministic, tf32=tf32)


def _strides(output: Any) -> tuple[int, ...] | None:
    """Return the strides of a result, or None if they are not all numbers."""
    strides = [s.constant for s in output.strides] if isinstance(output, Strided) else [None]
    return None if None in strides else tuple(s for s in strides if s is not None)


def _with_negative_fallback(
    runner: Runner | RecordedRunner, module: fx.GraphModule, saved_strides: Sequence[tuple[int, ...] | None]
) -> Boxed:
    """Return the runner; if it takes integers, the graph itself runs in eager mode for negative ones, which are no sizes.

    So it does for sizes of 0 that depend on data: torch compiles other graphs for the other sizes of 0.
    """
    if not runner.plan.sizes:
        return runner
    least = int(any(map(private.is_named_by_data, runner.plan.sizes)))
    fallback = eager(module, saved_strides)

    def run(inputs: list[Any]) -> Any:
        return runner(inputs) if min(runner.sizes(inputs)) >= least else fallback(inputs)

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _with_strides(result: Any, strides: tuple[int, ...] | None) -> Any:
    return (
        result if strides is None or not isinstance(result, torch.Tensor) else fit(result, tuple(result.shape), strides)
    )


def eager(module: fx.GraphModule, saved_strides: Sequence[tuple[int, ...] | None] = ()) -> Boxed:
    """Return a function that runs the graph in eager mode; its last results get the strides that a backward expects."""

    def run(inputs: list[Any]) -> Any:
        arguments = list(inputs)
        inputs.clear()
        results = module(*arguments)
        first = len(results) - len(saved_strides)
        return [*results[:first], *map(_with_strides, results[first:], saved_strides)]

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


opkit_backend.reset = release_arenas  # pyright: ignore[reportFunctionMemberAccess]
