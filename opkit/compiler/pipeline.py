"""This module takes a captured graph through lowering, fusion, planning and C.

A process that finds the plan and the C on the disk skips all of it, and does not import this module.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from opkit.compiler import diagnostics, user_lowerings
from opkit.compiler.capture.conversion import Captured
from opkit.compiler.diagnostics import CompiledGraph, Stages
from opkit.compiler.emit.c.source import source
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule, streamed
from opkit.compiler.lower.target import LoweringTarget
from opkit.compiler.run.plan import plan
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
    """Return the plan of a graph, the C of its segments, and the forms between.

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
    scheduled = streamed(stages.run("fuse", schedule, program, save_memory), target.cache)
    execution_plan, launches = stages.run("plan", plan, scheduled)
    name = captured.graph.name
    diagnostics.log_fusion(name, scheduled)
    texts = stages.run("emit", source, launches, execution_plan.table, execution_plan.sizes, _UNITS)
    return CompiledGraph(name, "", captured, program, scheduled, execution_plan, texts)


def _failed_rule(graph: str, strict: bool, error: OpkitError) -> None:
    """Raise or log the failure of a user's rule; the operator is called instead."""
    if strict:
        raise error
    diagnostics.log.warning("%s: %s. The operator is called.", graph, error)
