"""This module takes a captured graph through lowering, fusion, planning, and C or Triton.

A process that finds the plan and the text on the disk skips all of it, and does not import this module.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

from opkit.compiler import diagnostics, user_lowerings
from opkit.compiler.capture.conversion import Captured, Unsupported
from opkit.compiler.diagnostics import CompiledGraph, Stages
from opkit.compiler.emit.c.source import source
from opkit.compiler.emit.triton.expressions import NotEmittable
from opkit.compiler.emit.triton.source import module, triton_kernel
from opkit.compiler.ir.access import estimate
from opkit.compiler.ir.graph import Graph, Ref, TensorType
from opkit.compiler.ir.kernel import Kernel, KernelLaunch, Schedule, TritonKernel
from opkit.compiler.ir.program import Program
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule, streamed
from opkit.compiler.lower.target import LoweringTarget, TileSizes
from opkit.compiler.run.plan import gpu_plan, plan
from opkit.errors import OpkitError
from opkit.op.operator import CustomOp

_UNITS = 2  # translation units for a large graph, which as many compiler processes compile at once


def compile_graph(
    captured: Captured,
    target: LoweringTarget,
    stages: Stages,
    lowered: Mapping[str, CustomOp[Any, Any]],
    strict: bool,
    save_memory: bool,
) -> CompiledGraph:
    """Return the plan of a graph, the text of its kernels, and the forms between.

    Args:
        captured: the graph.
        target: the machine that the code is for.
        stages: runs each stage, and knows the current one.
        lowered: the opkit operators of the graph, by their targets.
        strict: whether a user's rule that fails is an error.
        save_memory: whether large buffers stay outside of the arena.
    """
    rules = user_lowerings.rules(lowered, functools.partial(_failed_rule, captured.graph.name, strict))
    program = stages.run("lower", lower, captured.graph, target, True, rules)
    _check_saved(captured.graph, program)
    scheduled = streamed(stages.run("fuse", schedule, program, target, save_memory), target.cache)
    name = captured.graph.name
    diagnostics.log_fusion(name, scheduled)
    kernels: dict[Kernel, TritonKernel] = {}
    if target.tiles is None:
        execution_plan, launches = stages.run("plan", plan, scheduled)
        texts = stages.run("emit", source, launches, execution_plan.table, execution_plan.sizes, _UNITS)
    else:
        kernels = stages.run("emit", _triton_kernels, scheduled, target.tiles)
        execution_plan = stages.run("plan", gpu_plan, scheduled, kernels, str(captured.device))
        texts = (module(kernels.values()),)
    triton = tuple(kernels.values())
    return CompiledGraph(name, "", captured, program, scheduled, execution_plan, texts, triton)


def _check_saved(graph: Graph, program: Program) -> None:
    """Check that what a forward saves has strides that its backward knows: numbers, which are reported, or else torch's.

    Raises:
        Unsupported: other strides depend on sizes. The backward would read wrong numbers.
    """
    types = {node.name: node.result for node in graph.nodes}
    at = functools.partial(estimate, sizes=program.sizes)
    first = len(graph.outputs) if graph.fixed is None else graph.fixed
    for output, found in zip(graph.outputs[first:], program.outputs[first:], strict=True):
        kind = types[output.name] if isinstance(output, Ref) else None
        if not isinstance(kind, TensorType) or all(s.constant is not None for s in found.strides):
            continue
        if any(at(n) > 1 and at(a) != at(b) for n, a, b in zip(kind.shape, found.strides, kind.strides, strict=True)):
            raise Unsupported(f"{output.name}, which is saved for the backward, has strides that torch does not expect")


def _triton_kernels(scheduled: Schedule, tiles: TileSizes) -> dict[Kernel, TritonKernel]:
    """Return the kernels of a schedule as Triton.

    Raises:
        Unsupported: one has something that Triton cannot express.
    """
    launches = {step.kernel: step for step in scheduled.steps if isinstance(step, KernelLaunch)}
    found: dict[Kernel, TritonKernel] = {}
    for kernel, launch in launches.items():
        expected = {name: scheduled.program.sizes[of] for name, of in zip(kernel.sizes, launch.sizes, strict=True)}
        plain = dataclasses.replace(kernel, name="", origins=())
        name = f"kernel_{hashlib.sha256(repr((plain, expected, tiles)).encode()).hexdigest()[:16]}"
        try:
            found[kernel] = triton_kernel(kernel, name, expected, tiles)
        except NotEmittable as error:
            raise Unsupported(f"{'; '.join(kernel.origins)}: a kernel has {error}") from error
    return found


def _failed_rule(graph: str, strict: bool, error: OpkitError) -> None:
    """Raise or log the failure of a user's rule; the operator is called instead."""
    if strict:
        raise error
    diagnostics.log.warning("%s: %s. The operator is called.", graph, error)
