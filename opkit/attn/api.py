"""Check and convert the arguments of ``opkit.attention`` and call its operator; the context ``opkit.batch_invariant``."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Generator
from typing import Any, Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from opkit.attn import arguments, autocast, float8, parallel, recent, reference
from opkit.attn.batch_invariant import NAME
from opkit.attn.compat import torch_private
from opkit.attn.functions import graph_calls, rows
from opkit.attn.functions.pending import Functions
from opkit.attn.masks.lowering import Bias, MaskLike, programs_of
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.operator import attention_operator, attention_with_kernel
from opkit.attn.paged.api import paged_attention_operator
from opkit.op import torch_private as private
from opkit.op.dispatch.fastcall import no_active_modes
from opkit.op.dispatch.selection import REFERENCE, Selection
from opkit.op.forcing import call_kernel, use_kernel, with_kernel_argument

_OPERATOR, _FLOAT8 = attention_operator(), float8.attention_float8_operator()
_WITH_KERNEL, _FLOAT8_WITH_KERNEL = attention_with_kernel(), with_kernel_argument(_FLOAT8)
_MODULES = sys.modules
context: Any = None  # the active `context_parallel`, of all threads: a backward runs in other threads
_DTYPES = arguments.DTYPES | float8.DTYPES


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = ...,
    bias: Bias | None = ...,
    query: rows.RowFunction | None = ...,
    key: rows.RowFunction | None = ...,
    output: rows.RowFunction | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    descales: float8.Descales | None = ...,
    return_lse: Literal[False] = ...,
    layout: str = ...,
    kernel: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = ...,
    bias: Bias | None = ...,
    query: rows.RowFunction | None = ...,
    key: rows.RowFunction | None = ...,
    output: rows.RowFunction | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    descales: float8.Descales | None = ...,
    return_lse: Literal[True],
    layout: str = ...,
    kernel: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = None,
    bias: Bias | None = None,
    query: rows.RowFunction | None = None,
    key: rows.RowFunction | None = None,
    output: rows.RowFunction | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    descales: float8.Descales | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention: each query's mean of the values, weighted by the exponentials of its logits with the keys.

    Computed in float32, or float64 for float64 ``q``. A query that sees no key gives zeros, and has zero gradients.

    Args:
        q: queries, (batch, heads, queries, d), float32, float64, bfloat16, float16, float8_e4m3fn or float8_e5m2, of any
            strides. In float8 there are no gradients and no dropout.
        k: keys, (batch, key heads, keys, d) of ``q``'s dtype. ``heads`` is a multiple of the key heads: as many
            consecutive query heads share a head of keys.
        v: values, (batch, key heads, keys, d_v) of ``q``'s dtype.
        mask: says which keys a query sees: a mask of :mod:`opkit.masks`; a function ``mask_mod(b, h, q_idx, kv_idx)``, as in
            ``opkit.masks.MaskFunction``; a tensor, as in ``opkit.masks.Dense``; or a ``CausalBias`` of
            ``torch.nn.attention.bias``, as the diagonal that it stands for. None: all keys.
        bias: is added to the logits: a floating tensor that broadcasts to (batch, heads, queries, keys), an
            ``opkit.masks.ALiBi``, an ``opkit.masks.RelativePosition``; or a function ``score_mod(score, b, h, q_idx, kv_idx)``,
            whose result is the logit; or several of them in a list, one after another.
        query: a function ``query(x, b, h, q_idx)`` that is mapped over the rows of ``q`` first: it gets a row, (d,), in float32
            or float64, and int32 numbers, and returns a row. Its results are rounded to ``q``'s dtype.
        key: the same for ``k``, ``key(x, b, h, kv_idx)`` with the numbers of heads of keys.
        output: the same for the rows of the result, ``output(x, b, h, q_idx)``.
        scale: a factor of the logits; ``1 / sqrt(d)`` by default.
        softcap: the logits become ``softcap * tanh(logits / softcap)``, before biases are added.
        sinks: (heads,), a further logit of every query of a head, which has no value.
        dropout_p: the share of probabilities set to zero; their seed comes from torch's generator.
        descales: for float8 only, the factors of q, k and v: three floats, or float32 tensors that broadcast to (batch, key
            heads). None: ones.
        return_lse: also return the logarithm of the sum of the exponentials of each row's logits.
        layout: "bhsd" as above; "bshd", (batch, sequence, heads, head size); or "thd", (total, heads, head size) for
            sequences packed one after another. Masks and biases have queries and keys last in every layout, and the batch
            size 1 for "thd".
        kernel: the name of a kernel to force, or "reference"; None: the best that supports the call.

    Returns:
        The result, in ``layout`` and contiguous, of ``q``'s dtype, or bfloat16 for float8; with ``return_lse`` also the
        log-sum-exp, (batch, heads, queries), or (heads, total) for "thd", in float32 or float64; minus infinity for a query
        that sees nothing.

    Raises:
        ShapeError, DtypeError, ArgumentTypeError, ArgumentError: an argument does not fit; the message says which.
        ArgumentError: context parallelism of torch.distributed is on, where each rank has a part of the keys; see
            :func:`opkit.context_parallel`.
        KernelError: there is no kernel of that name, or it does not support the call.

    >>> import opkit, torch
    >>> from opkit.masks import Causal, SlidingWindow
    >>> q, k, v = torch.ones(2, 8, 6, 16), torch.ones(2, 4, 6, 16), torch.ones(2, 4, 6, 32)
    >>> opkit.attention(q, k, v, mask=Causal() & SlidingWindow(3)).shape
    torch.Size([2, 8, 6, 32])

    Sources: Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762; sinks: OpenAI, "gpt-oss
    model card", 2025, https://arxiv.org/abs/2508.10925; softcap: Gemma 2, 2024, https://arxiv.org/abs/2408.00118.
    """
    if _in_context_parallel():
        arguments.refuse_context_parallel()
    in_parts = context is not None or (type(q) is not Tensor and torch_private.is_dtensor(q))
    if query is not None or key is not None or output is not None:
        q, k = rows.before(q, k, v, query, key, output, layout, in_parts)
    if in_parts:
        return _in_parts(q, k, v, mask, bias, scale, softcap, sinks, dropout_p, descales, return_lse, layout, kernel)
    found = asked = None
    plain = sinks is None and dropout_p == 0 and kernel is None and descales is None
    if plain and not is_dynamo_compiling():
        options = (scale, softcap, layout, is_grad_enabled())
        found = recent.find(q, k, v, mask, bias, options)
        asked = recent.asked_of(mask, bias, options) if found is None else None
    if found is not None and (fn := found[0].fn) is not None and no_active_modes():
        out, lse = fn(*as_bhsd(q, k, v, layout), *found[0].result.arguments(found[1]))
    else:
        functions: Functions | None = [] if is_dynamo_compiling() else None
        call = lowered(q, k, v, mask, bias, scale, softcap, sinks, dropout_p, layout, functions)
        if (found or asked) and call[0].dtype not in float8.DTYPES:
            recent.remember(_OPERATOR, q, k, v, asked, found and found[0], call)
        if descales is not None or call[0].dtype in float8.DTYPES:
            out, lse = _call_float8(kernel, call, descales)
        else:
            out, lse = graph_calls.call(lambda: _call(kernel, call, functions), functions, call[0])
    if layout != "bhsd":
        out, lse = from_bhsd(out, layout), lse.squeeze(0) if layout == "thd" else lse
    if output is not None:
        out = rows.mapped(output, "output", out, layout).contiguous()
    return (out, lse) if return_lse else out


@torch_private.traced_with_ranks
def _in_parts(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, scale: float | None, softcap: float | None, sinks: Tensor | None,
    dropout_p: float, descales: Any, return_lse: bool, layout: str, kernel: str | None,
) -> Any:  # fmt: skip
    """Return what :func:`attention` returns for a sequence that is divided among processes."""
    arguments.check_parallel(layout, descales, kernel)
    if isinstance(q, Tensor) and autocast.is_on(q.device.type):
        q, k, v = autocast.cast(q, k, v)
    if torch_private.is_dtensor(q):
        _import_dtensor()
        module: Any = parallel
        return module.dtensor.attention(q, k, v, mask, bias, scale, softcap, sinks, dropout_p, return_lse, layout)
    q, k, v = as_bhsd(q, k, v, layout)
    _check_sizes(q, k, v, "bhsd")
    out, lse = context.attention(q, k, v, mask, bias, sinks, context.options(scale, softcap, dropout_p, q.device))
    out = from_bhsd(out, layout)
    return (out, lse) if return_lse else out


@torch_private.while_tracing
def _import_dtensor() -> None:
    importlib.import_module("opkit.attn.parallel.dtensor")  # which imports torch.distributed.tensor, and this module


def select(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    descales: float8.Descales | None = None,
    layout: str = "bhsd",
) -> Selection:
    """Return the kernel that :func:`opkit.attention` would run for these arguments, and why each other one was refused.

    Args:
        q: and all others: see :func:`opkit.attention`.

    >>> import torch
    >>> q = torch.ones(1, 1, 2, 4)
    >>> select(q, q, q).operator
    'opkit::attention'
    """
    call = lowered(q, k, v, mask, bias, scale, softcap, sinks, dropout_p, layout)
    if descales is not None or call[0].dtype in float8.DTYPES:
        return _FLOAT8.select(*float8.float8_call(call, descales))
    return _OPERATOR.select(*call)


def _in_context_parallel() -> bool:
    """Return whether torch's context parallelism is on; compiled code is compiled again when that changes."""
    if is_dynamo_compiling():
        return torch_private.context_parallel()
    return torch_private.CONTEXT_PARALLEL in _MODULES and torch_private.context_parallel()


def lowered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None,
    bias: Bias | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    layout: str,
    functions: Functions | None = None,
) -> tuple[Any, ...]:
    """Return the operator's arguments, checked; ``functions`` as in :func:`opkit.attn.masks.lowering.programs_of`."""
    q, k, v = as_bhsd(q, k, v, layout)
    if isinstance(q, Tensor) and autocast.is_on(q.device.type):
        q, k, v = autocast.cast(q, k, v)
    sizes = _check_sizes(q, k, v, layout)
    if softcap is not None:
        arguments.check_softcap(softcap)
    programs = programs_of(mask, bias, softcap, sizes, q.dtype, functions)
    if sinks is not None:
        arguments.check_sinks(sinks, q, sizes.heads)
    return (
        q, k, v, programs.mask_tensors, programs.bias_tensors, sinks, drawn_seed(dropout_p, q.device), programs.mask,
        programs.bias, q.shape[3] ** -0.5 if scale is None else float(scale), programs.softcap, float(dropout_p),
        layout != "bhsd",
    )  # fmt: skip


def drawn_seed(dropout_p: float, device: torch.device) -> Tensor | None:
    """Return a seed of dropout from torch's generator, or None without dropout."""
    if dropout_p == 0:
        return None
    arguments.check_dropout(dropout_p)
    return torch.randint(0, 2**32, (2,), dtype=torch.int64, device=device)


def as_bhsd(q: Any, k: Any, v: Any, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (batch, heads, sequence, head size)."""
    if layout == "bhsd":
        return q, k, v
    arguments.check_layout(layout)
    if not all(isinstance(x, Tensor) and x.dim() == len(layout) for x in (q, k, v)):
        arguments.explain(q, k, v, layout)
    if layout == "bshd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def _check_sizes(q: Any, k: Any, v: Any, layout: str) -> CallSizes:
    try:
        batch, heads, queries, d = q.shape
        batch_k, shared, keys, d_k = k.shape
        batch_v, shared_v, keys_v, _ = v.shape
        dtype, device = q.dtype, q.device
        may = private.or_true  # sizes that depend on data are checked by the kernel when the program runs
        fits = (
            may(batch == batch_k) and may(batch == batch_v) and may(d == d_k) and may(keys == keys_v) and may(shared == shared_v)
            and may(d > 0) and may(shared > 0) and may(heads % shared == 0) and dtype is k.dtype and dtype is v.dtype
            and dtype in _DTYPES and device == k.device and device == v.device
            and q.layout is k.layout is v.layout is torch.strided
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError, ValueError):  # nested tensors have no shape
        fits = False
    if not fits:
        arguments.explain(from_bhsd(q, layout), from_bhsd(k, layout), from_bhsd(v, layout), layout)
    return CallSizes(batch, heads, queries, keys, device)  # pyright: ignore[reportPossiblyUnboundVariable]


def from_bhsd(x: Any, layout: str) -> Any:
    """Return the view in the user's layout."""
    if layout == "bhsd":
        return x
    return x.transpose(1, 2) if layout == "bshd" else x.squeeze(0).transpose(0, 1)


def _call(kernel: str | None, call: tuple[Any, ...], functions: Functions | None) -> tuple[Tensor, Tensor]:
    if kernel is None:
        return _OPERATOR(*call)
    if (
        kernel == REFERENCE and torch.compiler.is_compiling() and not functions
    ):  # so that the compiler sees its operations
        return reference.attention(*call)
    return call_kernel(_OPERATOR, _WITH_KERNEL, kernel, call)


def _call_float8(kernel: str | None, call: tuple[Any, ...], descales: float8.Descales | None) -> tuple[Tensor, Tensor]:
    float8_call = float8.float8_call(call, descales)
    return _FLOAT8(*float8_call) if kernel is None else call_kernel(_FLOAT8, _FLOAT8_WITH_KERNEL, kernel, float8_call)


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
        KernelError: at a call that no such kernel takes: float64, with dropout, or of pages with functions.

    >>> import opkit, torch
    >>> from opkit.masks import Causal
    >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
    >>> with opkit.batch_invariant():
    ...     whole = opkit.attention(q, k, v, mask=Causal())
    ...     last = opkit.attention(q[:1, :, -1:], k[:1], v[:1], mask=Causal("bottom-right"))
    >>> torch.equal(whole[:1, :, -1:], last)
    True
    """
    with contextlib.ExitStack() as stack:
        for operator in (attention_operator(), paged_attention_operator()):
            stack.enter_context(use_kernel(operator, NAME))
        yield
