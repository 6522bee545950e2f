"""What torch.compile is doing at the moment, and guards that opkit adds to the programs that it traces.

The private torch names are those of torch 2.13; torch 2.11 and 2.14 have them too.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._subclasses.functional_tensor import FunctionalTensor


def in_compilation() -> bool:
    """Whether torch.compile, AOTInductor or export is tracing."""
    return torch._guards.TracingContext.try_get() is not None or ahead_of_time()


def ahead_of_time() -> bool:
    """Whether AOTInductor is compiling."""
    virtualized: Any = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def in_guarded_compilation() -> bool:
    """Whether torch.compile is tracing a program that it guards; what is exported or compiled ahead of time is not."""
    return in_compilation() and not (ahead_of_time() or torch.compiler.is_exporting())


def compiling() -> bool:
    """Whether the tracing in progress belongs to torch.compile or AOTInductor, and not to export."""
    if ahead_of_time():  # its AOTAutograd calls itself an export, and has no tracing context
        return True
    return torch._guards.TracingContext.try_get() is not None and not torch.compiler.is_exporting()


def functionalizing() -> bool:
    """Whether AOTAutograd (or export) is functionalising the program that calls us."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL) is not None


def fake_mode_in_force() -> Any:
    """The fake mode that refuses real tensors and is tracing the program that calls us; None where there is none."""
    mode: Any = torch._guards.detect_fake_mode()
    return None if mode is None or mode.allow_non_fake_inputs else mode


def without_functional_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that functionalisation wraps; any other one as it is."""
    return torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor


def guards_left_out() -> str:
    """The setting, if one is on, by which torch leaves out guards on symbolic sizes."""
    from torch.fx.experimental import _config

    names = ("backed_size_oblivious", "aggressive_guard_free_semantics")
    return next((name for name in names if getattr(_config, name, False)), "")


def inductor_widens_floats() -> bool:
    """Whether Inductor hands floats to kernels of the user's as float64, where Triton itself takes them for float32."""
    from torch._inductor import config as inductor  # takes a while to import, and what asks is about to compile

    return bool(getattr(inductor, "_use_fp64_for_unbacked_floats", False))


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
