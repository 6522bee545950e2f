"""Kernels whose result for a row does not depend, to the last bit, on the rest of the batch.

The tiles kernel is one: it goes over the keys of a row 64 at a time from the first on, whatever other rows, heads, batches and
threads there are. What breaks the rule elsewhere is the choice of another kernel for few queries, and a division of the keys
that depends on how many there are of them (He et al., "Defeating Nondeterminism in LLM Inference", 2025,
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from opkit import config
from opkit.attn import cpu
from opkit.attn.calls import AttentionCall, PagedCall
from opkit.attn.paged import gathered
from opkit.attn.paged.cpu import available
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

NAME = "batch_invariant"
_FIRST = 2  # of priorities, above those of all kernels for processors


def register(op: CustomOp[Any, Any]) -> None:
    """Register the kernel of ``opkit::attention``: it runs where forced, or for all calls with ``OPKIT_BATCH_INVARIANT=1``."""
    op.register_kernel("cpu", forward, when=switched_on, name=NAME, priority=_FIRST, trusted=True)


def register_paged(op: CustomOp[Any, Any]) -> None:
    """Register the kernel of ``opkit::paged_attention``."""
    op.register_kernel("cpu", paged, when=switched_on, name=NAME, priority=_FIRST, trusted=True)


def switched_on() -> bool:
    """Return whether ``OPKIT_BATCH_INVARIANT`` is set."""
    return config.get().batch_invariant


@PreparedKernel
def forward(*arguments: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Run the tiles kernel, and no other.

    Raises:
        KernelError: it does not take the call.
    """
    call = AttentionCall(*arguments)
    if not cpu.takes(call):
        _refuse("opkit::attention", f"q of {call.q.dtype} {tuple(call.q.shape)} with dropout_p={call.dropout_p}")
    return cpu.forward.prepare(*arguments)


def paged(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Run the tiles kernel for each sequence on its gathered keys and values: equal to :func:`forward` of them, bit by bit.

    Pages that are quantised or of another dtype than ``q`` are computed in float32.

    Raises:
        KernelError: ``q`` is of another dtype than the tiles kernel takes, or there are functions.
        ValueError: a length or a page that is needed is out of range.
    """
    call = PagedCall(*arguments)
    q, k_pages = call.q, call.k_pages
    if call.mask or call.bias:
        _refuse("opkit::paged_attention", "functions of positions")
    if q.dtype not in cpu.NAMES or not available() or k_pages.shape[2] == 0 or q.shape[1] % k_pages.shape[2]:
        _refuse("opkit::paged_attention", f"q of {q.dtype} {tuple(q.shape)} with k_pages {tuple(k_pages.shape)}")
    out = q.new_zeros((*q.shape[:2], call.v_pages.shape[-1]))
    lse = torch.full(q.shape[:2], -torch.inf)
    gathered.attend(call, range(call.lengths.shape[0]), forward, out, lse)
    return out, lse


def _refuse(operator: str, details: str) -> NoReturn:
    raise KernelError(
        f"{operator}: no batch-invariant kernel takes {details}. It takes float32, bfloat16 and float16 without dropout, where "
        "opkit's compiled core is there. Convert the call, or make it outside of opkit.batch_invariant and OPKIT_BATCH_INVARIANT."
    )
