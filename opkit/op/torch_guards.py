"""Guards of opkit's own in what torch.compile traces. The private torch names are those of torch 2.13, and in 2.11 and 2.14."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkit.op import torch_private as private


def in_guarded_compilation() -> bool:
    """Whether torch.compile is tracing a program that it guards; what is exported or compiled ahead of time is not."""
    return private.in_compilation() and not (private.ahead_of_time() or torch.compiler.is_exporting())


def add_guard(create: Callable[[Any, Any], None]) -> None:
    """Have ``create(builder, guard)`` add a test (:func:`add_test`) to the program that torch.compile is tracing."""
    from torch._dynamo.source import GlobalStateSource

    context = torch._guards.TracingContext.get()
    context.guards_context.dynamo_guards.add(torch._guards.Guard(GlobalStateSource(), create))


def add_test(builder: Any, guard: Any, test: Callable[[], bool], text: str) -> None:
    """Have a compiled program used only while ``test`` is true; ``text`` says so to a person."""
    guard.set_export_info(guard.inner_create_fn().__name__, None, [text], None)

    def check(_: object) -> bool:
        return test()

    builder.guard_manager.root.add_lambda_guard(check, [text], guard.user_stack)
