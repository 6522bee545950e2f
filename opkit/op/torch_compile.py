"""Find out what torch.compile is doing, add guards to the programs that it traces, and renew the keys of its caches.

AOTAutograd's and Inductor's caches identify a custom operator by its name only. Their keys do include
``torch.compiler.config.cache_key_tag``; so when a compiler first traces an operator, the operator's contract hash joins
that tag. Operators that no compiled program uses never enter it.

The private torch names are those of torch 2.13; torch 2.11 and 2.14 have them too.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import _C, _compile
from torch._subclasses.functional_tensor import FunctionalTensor

from opkit.op import torch_private as private

disable_dynamo: Callable[..., Any] = _compile._disable_dynamo
"""``torch.compiler.disable`` that imports Dynamo, which takes seconds, at the first call only."""


def while_tracing(function: Any) -> Any:
    """Let Dynamo run a function of constants when it traces a call, as ``torch.compiler.assume_constant_result`` does."""
    function._dynamo_marked_constant = True
    return function


def in_compilation() -> bool:
    """Return whether torch.compile, AOTInductor or export is tracing."""
    return torch._guards.TracingContext.try_get() is not None or ahead_of_time()


def ahead_of_time() -> bool:
    """Return whether AOTInductor is compiling."""
    virtualized: Any = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and bool(virtualized.V.aot_compilation)


def in_guarded_compilation() -> bool:
    """Return whether torch.compile is tracing a program that it guards, unlike one that is exported or compiled ahead."""
    return in_compilation() and not (ahead_of_time() or torch.compiler.is_exporting())


def compiling() -> bool:
    """Return whether torch.compile or AOTInductor is tracing, and not export."""
    if ahead_of_time():  # its AOTAutograd calls itself an export, and has no tracing context
        return True
    return torch._guards.TracingContext.try_get() is not None and not torch.compiler.is_exporting()


def functionalizing() -> bool:
    """Return whether AOTAutograd (or export) is functionalising the program that calls us."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL) is not None


def fake_mode_in_force() -> Any:
    """Return the active fake mode if it refuses real tensors; else None."""
    mode: Any = torch._guards.detect_fake_mode()
    return None if mode is None or mode.allow_non_fake_inputs else mode


def without_functional_wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that functionalisation wraps; any other one as it is."""
    return torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor


def guards_left_out() -> str:
    """Return the name of an active setting by which torch leaves out guards on symbolic sizes; empty where none is."""
    from torch.fx.experimental import _config

    names = ("backed_size_oblivious", "aggressive_guard_free_semantics")
    return next((name for name in names if getattr(_config, name, False)), "")


def inductor_widens_floats() -> bool:
    """Return whether Inductor passes floats to the user's kernels as float64, where Triton itself takes them as float32."""
    from torch._inductor import config as inductor  # slow to import, and the caller is about to compile

    return bool(getattr(inductor, "_use_fp64_for_unbacked_floats", False))


def add_guard(create: Callable[[Any, Any], None]) -> None:
    """Let ``create(builder, guard)`` add a test (:func:`add_test`) to the program that torch.compile is tracing."""
    from torch._dynamo.source import GlobalStateSource

    context = torch._guards.TracingContext.get()
    context.guards_context.dynamo_guards.add(torch._guards.Guard(GlobalStateSource(), create))


def add_test(builder: Any, guard: Any, test: Callable[[], bool], text: str) -> None:
    """Guard a compiled program on ``test``; ``text`` describes it in torch's logs."""
    guard.set_export_info(guard.inner_create_fn().__name__, None, [text], None)

    def check(_: object) -> bool:
        return test()

    builder.guard_manager.root.add_lambda_guard(check, [text], guard.user_stack)


# ---- keys of torch's compile caches ----------------------------------------------------------------------------------


_MARK = "|opkit:"
_lock = threading.Lock()
_traced: dict[str, str] = {}
_registrations = itertools.count()
_latest = ""


def note_traced(operator: Any) -> None:
    """Add the operator's contract hash to the key of torch's compile caches, once a compiler traces the operator."""
    if not in_compilation():
        return
    config: Any = torch.compiler.config
    state = operator.state.current(versions=True)
    known = operator.traced_hash and operator.traced_state == state
    if known and _MARK in str(config.cache_key_tag):  # the user may have set the tag since
        return
    with _lock:
        operator.traced_hash, operator.traced_state = operator.contract_hash(), state
        _traced[operator.name] = operator.traced_hash
        user_tag = str(config.cache_key_tag).split(_MARK)[0]
        digest = hashlib.sha256(repr(sorted(_traced.items())).encode()).hexdigest()
        config.cache_key_tag = f"{user_tag}{_MARK}{digest}"


def renew_cache_key(operator: Any) -> str:
    """Stop programs compiled against the old operator from being used again, after a registration; return a unique text.

    Compiled code guards on the identity of ``torch.ops.namespace.name``. Dropping torch's cached object makes the next
    look-up return a new one, and so recompiles what used the old. The overload stays the same object, because the dispatcher
    passes it to modes, whose traced graphs refer to it.
    """
    global _latest
    operator.changed()
    if operator.traced_hash:
        operator.traced_hash = ""
        private.renew_packet(operator.overload)
    _latest = f"registration {next(_registrations)}"
    return _latest


def latest_registration() -> str:
    """Return the text of the last registration of any operator: what was made with another one may be outdated."""
    return _latest
