"""This module holds the record of a compiled graph, with every form that it went through."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from opkit.compiler.capture.conversion import Captured
from opkit.compiler.ir.kernel import Schedule
from opkit.compiler.ir.program import Program
from opkit.compiler.run.plan import ExecutionPlan


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """A graph in each form of the compiler; if it runs in eager mode, the forms are None and ``reason`` says why."""

    name: str
    reason: str = ""
    captured: Captured | None = None
    program: Program | None = None
    schedule: Schedule | None = None
    plan: ExecutionPlan | None = None
    texts: tuple[str, ...] = ()


class Stages:
    """The stage that a graph is in, for the error message if it fails there."""

    def __init__(self) -> None:
        self.now = ""

    def run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.now = name
        return function(*arguments)
