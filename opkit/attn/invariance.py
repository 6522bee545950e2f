"""``opkit.batch_invariant``: a context in which attention's results do not depend on the rest of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from opkit.attn.batch_invariant import NAME
from opkit.attn.operator import attention_operator
from opkit.attn.paged.api import paged_attention_operator
from opkit.op.operator import use_kernel


@contextlib.contextmanager
def batch_invariant() -> Generator[None]:
    """Within it, and in its thread, a query's result is the same to the last bit however it is batched.

    That is of :func:`opkit.attention` and :func:`opkit.paged_attention` on processors and GPUs, also where compiled code calls
    them; of one processor or GPU, since another has other instructions. It does not matter which other sequences, heads or
    queries a call has (a prefill whole or in chunks, or one query at a time with a cache, in pages or not), nor how many threads
    there are. ``OPKIT_BATCH_INVARIANT=1`` in the environment does the same for the whole process, and
    ``kernel="batch_invariant"`` for one call.

    Keys must lie where they lie: a sequence that is shifted by padding before it, or packed after others, gives the same if the
    shift is a multiple of 64. Padding must be finite. Gradients and other operators are not of it.

    Raises:
        KernelError: at a call that no such kernel takes: float64, or with dropout.

    >>> import opkit, torch
    >>> from opkit.masks import Causal
    >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
    >>> with opkit.batch_invariant():
    ...     whole = opkit.attention(q, k, v, mask=Causal())
    ...     last = opkit.attention(q[:1, :, -1:], k[:1], v[:1], mask=Causal("bottom-right"))
    >>> torch.equal(whole[:1, :, -1:], last)
    True
    """
    with use_kernel(attention_operator(), NAME), use_kernel(paged_attention_operator(), NAME):
        yield
