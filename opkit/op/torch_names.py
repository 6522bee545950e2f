"""Names of operators: what ``torch.ops`` and ``torch.library`` remember by them, forgotten and renewed."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import torch
from torch._library import utils as library_utils


def hidden_operator(name: str) -> Any:
    """An operator that nobody but its holder knows: ``torch.ops`` does not list it, also when it is gone."""
    overload = library_utils.lookup_op(name)
    forget_operator(*name.split("::"))
    return overload


def forget_operator(namespace: str, name: str) -> None:
    """Drop what ``torch.ops`` remembers of an operator, so that the next look-up asks the dispatcher."""
    known = getattr(torch.ops, namespace)
    if name in vars(known):
        delattr(known, name)
        known._dir.remove(name)  # else the name outlives the operator's removal, and listing the namespace fails


def renew_packet(overload: Any) -> None:
    """Have ``torch.ops`` name the operator by another object, which has the same overload."""
    namespace, name = overload.namespace, overload._overloadpacket.__name__
    forget_operator(namespace, name)
    packet = getattr(getattr(torch.ops, namespace), name)
    setattr(packet, overload._overloadname, overload)
    overload._overloadpacket = packet


def destroy_library(library: torch.library.Library) -> None:
    """Take out of PyTorch what a library registered, and leave nothing to do for when it is collected.

    torch forgets the library's names once more then, by which time other operators may have them.
    """
    from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE

    library._destroy()
    torch.library._defs.difference_update(library._op_defs)
    for qualname in library._op_defs:
        name, _, overload = qualname.partition(".")
        _SCHEMA_TO_SIGNATURE_CACHE.pop((name, overload), None)
    library._op_defs.clear()
    library._op_impls.clear()
