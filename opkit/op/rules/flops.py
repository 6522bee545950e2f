"""The FLOP formula, derived: the reference is counted on fake tensors, formula by formula, by torch's own counter."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from opkit.op import torch_private as private
from opkit.op.trace.reference_trace import fake_like


def counter_in_use() -> bool:
    """Whether a FLOP counter may be among the dispatch modes in force."""
    return "torch.utils.flop_counter" in sys.modules


def formula(reference: Callable[..., Any]) -> Callable[..., int]:
    """A formula for ``torch.utils.flop_counter`` that counts ``reference`` on fake copies of the call's arguments."""

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
    """Make ``counted`` known to torch's registry and to the counters in force."""
    from torch.utils import flop_counter

    flop_counter.flop_registry.setdefault(packet, counted)
    for mode in private.current_modes():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry.setdefault(packet, counted)
