"""Run an operator under ``torch.autocast``: cast its arguments by a declared policy, then run with autocast off.

=============  ================================================================================================
policy         floating arguments on the autocast device, float64 excepted
=============  ================================================================================================
``None``       stay as they are (the default)
``"low"``      become the autocast dtype, as for matrix products
``"full"``     become float32, as for reductions and losses
``"promote"``  become the widest floating dtype among them
=============  ================================================================================================

Since the body runs with autocast off whatever the policy, eager, inlined and kernel results have the same dtypes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from opkit.errors import DefinitionError

POLICIES = (None, "low", "full", "promote")


def check_policy(operator: str, policy: object) -> None:
    """Raise unless ``policy`` is one of the four."""
    if policy not in POLICIES:
        raise DefinitionError(f'{operator}: autocast={policy!r} is not a policy. Use "low", "full", "promote" or None.')


def cast(arguments: Any, device: str, policy: str | None, registered: torch.dtype | None) -> Any:
    """Cast ``arguments`` by ``policy``, or to the dtype that the author registered for ``device``."""
    if registered is None and policy is None:
        return arguments
    eligible = functools.partial(_eligible, device=device)
    target = registered or _target(policy, device, [x for x in pytree.tree_leaves(arguments) if eligible(x)])

    def convert(value: Any) -> Any:
        return value.to(target) if eligible(value) else value

    return pytree.tree_map(convert, arguments)


def _eligible(value: object, device: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device
    )


def _target(policy: str | None, device: str, tensors: list[torch.Tensor]) -> torch.dtype:
    if policy == "low":
        return torch.get_autocast_dtype(device)
    if policy == "full":
        return torch.float32
    dtypes = [tensor.dtype for tensor in tensors]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32
