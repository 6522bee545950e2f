"""What is known of a graph that was compiled, or is being compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from opkit.compiler.capture.conversion import Captured
from opkit.compiler.ir.program import Program
from opkit.compiler.ir.schedule import Schedule
from opkit.compiler.run.plan import ExecutionPlan


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """What became of a graph, form by form; or None, and the reason for which it runs in eager mode."""

    name: str
    reason: str = ""
    captured: Captured | None = None
    program: Program | None = None
    schedule: Schedule | None = None
    plan: ExecutionPlan | None = None
    texts: tuple[str, ...] = ()


class Stages:
    """Which stage a graph is in, for what is said if it fails there."""

    def __init__(self) -> None:
        self.now = ""

    def run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.now = name
        return function(*arguments)
