"""Derive the FLOP formula: torch's own counter counts the reference on fake tensors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from opkit.op import torch_private as private
from opkit.op.trace.reference_trace import fake_like


def counter_in_use() -> bool:
    """Return whether a FLOP counter may be among the active dispatch modes."""
    return "torch.utils.flop_counter" in sys.modules


def formula(reference: Callable[..., Any]) -> Callable[..., int]:
    """Return a formula for ``torch.utils.flop_counter`` that counts ``reference`` on fake copies of the call's arguments."""

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.flop_counter import FlopCounterMode

        with private.no_modes():
            mode = FakeTensorMode()
            fake_args, fake_kwargs = fake_like((args, kwargs), mode)
            counter = FlopCounterMode(display=False)
            with mode, counter:
                reference(*fake_args, **fake_kwargs)
        return counter.get_total_flops()

    return count


def install(packet: Any, counted: Callable[..., int]) -> None:
    """Register ``counted`` with torch's registry and the active counters."""
    from torch.utils import flop_counter

    flop_counter.flop_registry.setdefault(packet, counted)
    for mode in private.current_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry.setdefault(packet, counted)
