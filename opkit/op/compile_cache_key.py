"""Add to the keys of torch's compile caches which operators a graph depends on, and what they compute.

AOTAutograd's and Inductor's caches identify a custom operator by its name only. Their keys do include
``torch.compiler.config.cache_key_tag``; so when a compiler first traces an operator, the operator's contract hash joins
that tag. Operators that no compiled program uses never enter it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import itertools
import threading
from typing import Any

import torch

from opkit.op import torch_compile
from opkit.op import torch_private as private
from opkit.op.core import Operator

_MARK = "|opkit:"
_lock = threading.Lock()
_traced: dict[str, str] = {}
_registrations = itertools.count()


def note_traced(operator: Operator) -> None:
    """Add the operator's contract hash to the key of torch's compile caches, once a compiler traces the operator."""
    if not torch_compile.in_compilation():
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


def renew(operator: Operator) -> str:
    """Stop programs compiled against the old operator from being used again, after a registration; return a unique text.

    Compiled code guards on the identity of ``torch.ops.namespace.name``. Dropping torch's cached object makes the next
    look-up return a new one, and so recompiles what used the old. The overload stays the same object, because the dispatcher
    passes it to modes, whose traced graphs refer to it.
    """
    operator.changed()
    if operator.traced_hash:
        operator.traced_hash = ""
        private.renew_packet(operator.overload)
    return f"registration {next(_registrations)}"
