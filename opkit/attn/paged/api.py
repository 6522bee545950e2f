"""``opkit.paged_attention`` and ``opkit.append_kv``: a KV cache in pages, which sequences take as they grow.

A sequence's keys lie in the pages that its row of the page table names, in order (Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from opkit.attn import batch_invariant
from opkit.attn.calls import PagedCall, predicate
from opkit.attn.functions import graph_calls, known
from opkit.attn.functions.pending import SUBSTITUTES, Functions, Pending, with_kernel
from opkit.attn.functions.trace import Traced, describe, score_dtype, trace
from opkit.attn.gpu.decode.paged import register_append, register_paged
from opkit.attn.gpu.hopper import decode_cuda
from opkit.attn.gpu.hopper import mla_paged as mla_paged
from opkit.attn.gpu.portable import invariant
from opkit.attn.masks.algebra import Mask
from opkit.attn.masks.biases import Bias
from opkit.attn.masks.program import BIAS_FUNCTION, FUNCTION, UNLIMITED
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.paged import cpu as paged_cpu
from opkit.attn.paged import gathered
from opkit.attn.paged import reference as paged_reference
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.op.definition import custom_op
from opkit.op.forcing import call_kernel, with_kernel_argument
from opkit.op.operator import CustomOp


@functools.cache
def paged_attention_operator() -> CustomOp[Any, tuple[Tensor, Tensor]]:
    """Return ``opkit::paged_attention``; the first call defines it and registers its kernels."""
    op = custom_op("opkit::paged_attention", mutates_args=(), inline=False)(paged_reference.paged_attention)
    op.register_fake(_fake)
    when = predicate(PagedCall, paged_cpu.takes_pages)
    op.register_kernel("cpu", paged_cpu.paged, when=when, name="decode", trusted=True)
    many = predicate(PagedCall, gathered.takes)
    op.register_kernel("cpu", gathered.paged, when=many, name="tiles", priority=1, trusted=True)
    batch_invariant.register_paged(op)
    register_paged(op)
    decode_cuda.register_paged(op)
    mla_paged.register_paged(op)
    invariant.register_paged(op)
    return op


@functools.cache
def append_kv_operator() -> CustomOp[Any, None]:
    """Return ``opkit::append_kv``; the first call defines it and registers its kernel."""
    written = ("k_pages", "v_pages", "k_scale", "v_scale")
    op = custom_op("opkit::append_kv", mutates_args=written, inline=False)(paged_reference.append_kv)
    op.register_fake(_nothing)
    register_append(op)
    return op


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    mask: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    bias: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Any:
    """Attention of each sequence's last queries to its keys and values, which lie in pages.

    The last query of a sequence sees all of its ``lengths`` keys; those before see, if ``causal``, one fewer each. A sequence
    without keys gives zeros. What pages hold apart from visible keys does not matter, NaN included.

    Args:
        q: ``(batch, heads, d)``, one query for each sequence; ``(batch, n, heads, d)``, n queries each; or, with
            ``cu_seqlens_q``, ``(total, heads, d)``. Float32, float64, bfloat16 or float16.
        k_pages: ``(pages, page_size, kv_heads, d)``, of any strides; floating, int8 or float8_e4m3fn. ``heads`` is a multiple of
            ``kv_heads``.
        v_pages: ``(pages, page_size, kv_heads, dv)``, of the same dtype.
        page_table: ``(batch, most_pages)``, integers. Entries after a sequence's last page may hold anything.
        lengths: ``(batch,)``, integers: keys of each sequence, those of its queries included.
        cu_seqlens_q: ``(batch + 1,)``, integers: where each sequence's queries begin, and the total.
        causal: whether a query sees no key after its own position.
        window: how many keys a query sees, its own position's being the last whether ``causal`` or not; or, as in FlashAttention,
            how many it sees before and after its own position, -1 for all of them.
        scale: of logits; ``d ** -0.5`` if left out.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: ``(heads,)``, one more logit for each query, without a value.
        k_scale, v_scale: what the elements of pages are times: a number, or ``(pages, page_size, kv_heads)``.
        mask: a function ``mask_mod(b, h, q_idx, kv_idx)`` as in :func:`opkit.attention`, which hides further keys: ``b`` is the
            sequence, ``q_idx`` and ``kv_idx`` are positions in it. What it captures has an element for each position that the
            page table has room for, where it is indexed by one. Pass ``causal=False`` if it alone decides.
        bias: a function ``score_mod(score, b, h, q_idx, kv_idx)``, whose result is the logit.
        return_lse: whether to return the log-sum-exp too.
        kernel: the name of the kernel to run, or "reference"; opkit chooses if it is left out.

    Returns:
        ``q``'s shape with ``dv`` in place of ``d``, of ``q``'s dtype. With ``return_lse`` a pair: also the natural
        log-sum-exp of the logits, of ``q``'s shape without the last size, float32 (float64 for float64); -inf where
        nothing is seen.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: int8 pages without scales.
        ArgumentError: ``window`` or ``softcap`` cannot be used.
        ArgumentTypeError: ``mask`` or ``bias`` is no function.
        KernelError: there are functions under :func:`opkit.batch_invariant`.

    >>> import opkit, torch
    >>> pages = torch.arange(8.0).reshape(4, 2, 1, 1)  # four pages of two keys
    >>> table, lengths = torch.tensor([[3, 0], [2, -1]]), torch.tensor([3, 1])
    >>> opkit.paged_attention(torch.zeros(2, 1, 1), pages, pages, table, lengths).flatten()
    tensor([4.3333, 4.0000])
    """
    _check(q, k_pages, v_pages, page_table, lengths, cu_seqlens_q)
    rows, starts = _ragged(q, lengths, cu_seqlens_q)
    lower, upper = _band(causal, window)
    if softcap is not None and softcap < 0:
        raise ArgumentError(f"opkit.paged_attention: softcap is {softcap}; it must be positive, or None for no cap")
    factor = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    k_by, v_by = _scale_of("k_scale", k_scale, k_pages), _scale_of("v_scale", v_scale, v_pages)
    numbers = (lower, upper, factor, softcap or 0.0)
    call = (rows, k_pages, v_pages, page_table, lengths, starts, *numbers, sinks, k_by, v_by, [], [], [], [])
    functions: Functions | None = [] if is_dynamo_compiling() else None
    if mask is not None or bias is not None:
        call = _with_functions(PagedCall(*call), mask, bias, functions)
    out, lse = graph_calls.call(
        lambda: _PAGED(*call) if kernel is None else call_kernel(_PAGED, _WITH_KERNEL, kernel, call), functions, rows
    )
    if q.dim() == 4:
        out, lse = out.unflatten(0, q.shape[:-2]), lse.unflatten(0, q.shape[:-2])
    return (out, lse) if return_lse else out


def _with_functions(call: PagedCall, mask: Any, bias: Any, functions: Functions | None) -> PagedCall:
    """Return the call with the programs of a mask's and a score's function; where Dynamo traces, with their numbers."""
    for name, function in (("mask", mask), ("bias", bias)):
        if function is not None and (isinstance(function, (Tensor, Mask, Bias)) or not callable(function)):
            raise ArgumentTypeError(
                f"opkit.paged_attention: {name} is {type(function).__name__}, expected a function of positions."
            )
    if functions is not None:
        if mask is not None:
            call.mask.extend((FUNCTION, *Pending.of(mask, "mask", functions).words()))
        if bias is not None:
            call.bias.extend((BIAS_FUNCTION, *Pending.of(bias, "score", functions).words()))
        return call
    dtype, device = score_dtype(call.q.dtype), call.q.device
    hides = None if mask is None else trace(mask, "mask", dtype, device)
    scores = None if bias is None else trace(bias, "score", dtype, device)
    return _with_traced(call, hides, scores, describe(mask), describe(bias))


def _with_traced(
    call: PagedCall,
    hides: Traced | None,
    scores: Traced | None,
    mask: str = "the mask_mod",
    bias: str = "the score_mod",
) -> PagedCall:
    """Return the call with the programs of functions; ``mask`` and ``bias`` are their names, for errors."""
    sizes = CallSizes(*call.sizes, call.q.device)
    if hides is not None:
        known.check_sizes(hides, hides.root, sizes, mask)
        lower, upper, root = known.without_bands(hides, call.lower, call.upper)
        call = call._replace(lower=lower, upper=upper)
        if root is not None:
            call.mask.extend((FUNCTION, *hides.function(root, call.mask_tensors).words()))
    if scores is not None:
        known.check_sizes(scores, scores.root, sizes, bias)
        call.bias.extend((BIAS_FUNCTION, *scores.function(scores.root, call.bias_tensors).words()))
    return call


def _substituted(*arguments: Any, functions: Sequence[Traced]) -> PagedCall:
    """Return the arguments of the operator with the programs of functions in place of their numbers."""
    call = PagedCall(*arguments)
    hides, scores = (
        Pending.of_words(words[1:]).traced(functions) if words else None for words in (call.mask, call.bias)
    )
    return _with_traced(call._replace(mask_tensors=[], bias_tensors=[], mask=[], bias=[]), hides, scores)


SUBSTITUTES["opkit.paged_attention.default"] = _substituted
SUBSTITUTES["opkit.paged_attention_with_kernel.default"] = with_kernel(_substituted)


def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths_before: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values after those that the sequences have, in place.

    Args:
        k: ``(batch, kv_heads, d)``, one token for each sequence; ``(batch, n, kv_heads, d)``, n each; or, with ``cu_seqlens``,
            ``(total, kv_heads, d)``. Floating.
        v: the same with ``dv``.
        k_pages: ``(pages, page_size, kv_heads, d)``, written to; as in :func:`paged_attention`.
        v_pages: ``(pages, page_size, kv_heads, dv)``, written to.
        page_table: ``(batch, most_pages)``, integers, with room for the new tokens. No two tokens may have the same place.
        lengths_before: ``(batch,)``, integers: keys of each sequence before this call.
        cu_seqlens: ``(batch + 1,)``, integers: where each sequence's tokens begin, and the total.
        k_scale, v_scale: ``(pages, page_size, kv_heads)``, floating, written to: each token's and head's greatest
            magnitude is stored as 127 for int8 pages, which need scales, and 448 for float8_e4m3fn.

    Raises:
        ShapeError: the shapes do not fit each other.
        DtypeError: int8 pages without scales.
        IndexError: a token has no page.

    >>> import opkit, torch
    >>> pages = torch.zeros(2, 2, 1, 1)
    >>> new = torch.tensor([5.0, 6.0]).reshape(1, 2, 1, 1)
    >>> opkit.append_kv(new, new, pages, pages.clone(), torch.tensor([[1, 0]]), torch.tensor([1]))
    >>> pages.flatten()
    tensor([6., 0., 0., 5.])
    """
    _check(k, k_pages, v_pages, page_table, lengths_before, cu_seqlens, "append_kv", "k")
    for name, scale, pages in (("k_scale", k_scale, k_pages), ("v_scale", v_scale, v_pages)):
        _scale_of(name, scale, pages, "append_kv")
    rows, starts = _ragged(k, lengths_before, cu_seqlens)
    v_rows = v if v.dim() == 3 else v.flatten(0, 1)
    _APPEND(rows, v_rows, k_pages, v_pages, page_table, lengths_before, starts, k_scale, v_scale)


def _fake(q: Tensor, k_pages: Tensor, v_pages: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((q.shape[0], q.shape[1], v_pages.shape[-1])), q.new_empty(q.shape[:2], dtype=wide)


def _nothing(*_: Any) -> None:
    """The fake implementation of an operator that returns nothing."""


def _ragged(x: Tensor, lengths: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``(total, heads, d)``, and where each sequence's tokens begin."""
    if starts is not None:
        return x, starts
    starts = torch.arange(lengths.shape[0] + 1, device=lengths.device)
    return (x, starts) if x.dim() == 3 else (x.flatten(0, 1), starts * x.shape[1])


def _band(causal: bool, window: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return the least and the greatest of a key's position minus its query's."""
    left, right = window if isinstance(window, tuple) else (-1 if window is None else window - 1, -1)
    if isinstance(window, int) and window < 1:
        raise ArgumentError(f"opkit.paged_attention: window is {window}; a query sees at least 1 key, or pass None")
    if isinstance(window, int):
        right = 0
    lower = -UNLIMITED if left < 0 else -left
    upper = UNLIMITED if right < 0 else right
    return lower, min(upper, 0) if causal else upper


def _scale_of(
    name: str, scale: Tensor | float | None, pages: Tensor, function: str = "paged_attention"
) -> Tensor | None:
    if scale is None:
        if pages.dtype == torch.int8:
            raise DtypeError(
                f"opkit.{function}: {name} is None, and the pages are int8. Pass the scales, {_shape_of_scales(pages)}."
            )
        return None
    tensor = torch.as_tensor(scale, dtype=None if isinstance(scale, Tensor) else torch.float32, device=pages.device)
    if tensor.numel() == 1 and function == "paged_attention":
        return tensor.expand(pages.shape[:3])
    if tensor.shape != pages.shape[:3]:
        raise ShapeError(f"opkit.{function}: {name} is {tuple(tensor.shape)}; expected {_shape_of_scales(pages)}")
    return tensor


def _shape_of_scales(pages: Tensor) -> str:
    return f"{tuple(pages.shape[:3])} (pages, page_size, kv_heads)"


def _check(
    x: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    function: str = "paged_attention",
    name: str = "q",
) -> None:
    """Check what the operator's shape patterns do not say."""
    if k_pages.dim() != 4 or v_pages.dim() != 4 or k_pages.dtype != v_pages.dtype:
        raise ShapeError(
            f"opkit.{function}: k_pages is {k_pages.dtype} {tuple(k_pages.shape)} and v_pages {v_pages.dtype} "
            f"{tuple(v_pages.shape)}; both are (pages, page_size, kv_heads, head size), of the same dtype"
        )
    if x.dim() not in ((3,) if starts is not None else (3, 4)):
        expected = (
            "(total, heads, d) with cu_seqlens" if starts is not None else "(batch, heads, d) or (batch, n, heads, d)"
        )
        raise ShapeError(f"opkit.{function}: {name} is {tuple(x.shape)}; expected {expected}")
    if starts is None and x.shape[0] != lengths.shape[0]:
        raise ShapeError(
            f"opkit.{function}: {name} has batch size {x.shape[0]}, and there are {lengths.shape[0]} lengths"
        )
    heads, kv_heads = x.shape[-2], k_pages.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"opkit.{function}: {heads} heads of {name} are no multiple of k_pages' {kv_heads}")


# here, since compilers warn of cached functions
_PAGED, _APPEND = paged_attention_operator(), append_kv_operator()
_WITH_KERNEL = with_kernel_argument(_PAGED)
