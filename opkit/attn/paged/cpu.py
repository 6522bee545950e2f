"""The CPU kernel of decoding attention (`cpp_ext/attention`), for contiguous and for paged keys and values.

:func:`decode` is for few queries to contiguous keys; ``opkit.attention`` may call it. :func:`paged` is the kernel of
``opkit.paged_attention``. Both read keys and values once for all query heads of a KV head and all queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn import cpu_programs
from opkit.attn.allocation import address, addresses, dense_rows, like, overwritten
from opkit.attn.calls import PagedCall
from opkit.attn.masks.program import UNLIMITED, bias_words_fit, mask_words_fit
from opkit.errors import KernelError
from opkit.op.dispatch.selection import Refused
from opkit.op.kernel_kinds import PreparedKernel

LARGEST_HEAD = 1024
Tensors = Sequence[Tensor]
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


@functools.cache
def available() -> bool:
    """Return whether opkit's compiled core is installed."""
    try:
        import opkit._core
    except ImportError:
        return False
    return hasattr(opkit._core, "DecodeAttention")


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the kernel takes these dtypes and head sizes; it checks neither counts nor devices."""
    return (
        q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and k.dtype == v.dtype
        and k.dtype in _TYPES
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD
        and available()
    )


def takes_pages(call: PagedCall) -> bool | Refused:
    """Return whether :func:`paged` takes a call: its dtypes and heads; of functions, where there is a C compiler."""
    heads, kv_heads = call.q.shape[1], call.k_pages.shape[2]
    fits = (
        takes(call.q, call.k_pages, call.v_pages)
        and kv_heads > 0
        and heads % kv_heads == 0
        and mask_words_fit(call.mask, call.mask_tensors, call.sizes)
        and bias_words_fit(call.bias, call.bias_tensors, call.sizes)
    )
    obstacle = cpu_programs.obstacle(call) if fits else None
    return fits if obstacle is None else Refused(obstacle)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lower: int = -UNLIMITED,
    upper: int = UNLIMITED,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of few queries to contiguous keys.

    Query ``i`` sees key ``j`` iff ``lower <= j - i <= upper``. What limits one query is reading ``k`` and ``v``; with more than
    32 to 64 rows (queries times the heads that share keys), a kernel that packs keys is faster.

    Args:
        q: ``(batch, heads, queries, d)``, float32, bfloat16 or float16.
        k: ``(batch, kv_heads, keys, d)``, of any strides; float32, bfloat16, float16, or int8 or float8_e4m3fn as they are.
        v: ``(batch, kv_heads, keys, dv)``, of ``k``'s dtype.
        lower, upper: the band.
        scale: of logits; ``d ** -0.5`` if left out.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0: they stay.
        sinks: ``(heads,)``, one more logit of each row, without a value.

    Returns:
        ``(batch, heads, queries, dv)`` of ``q``'s dtype and the natural log-sum-exp, ``(batch, heads, queries)``, float32;
        zeros and -inf for a query that sees nothing.

    >>> q, k, v = (torch.ones(1, heads, length, 4) for heads, length in ((2, 1), (1, 3), (1, 3)))
    >>> out, lse = decode(q, k, v, scale=1.0)
    >>> out.shape, lse
    (torch.Size([1, 2, 1, 4]), tensor([[[5.0986],
             [5.0986]]]))
    """
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    factor = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    return contiguous(q, k, v, out, lower, upper, factor, softcap)(q, k, v, sinks)


def contiguous(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lower: int,
    upper: int,
    scale: float,
    softcap: float,
    programs: dict[str, Any] | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """:func:`decode` of ``(q, k, v, sinks)`` for tensors of these sizes, strides and dtypes; its result is like ``out``.

    ``programs``: of masks and biases, whose tensors are further arguments: see :func:`opkit.attn.cpu_programs.of_few`.
    """
    from opkit import _core

    new_out, new_lse = overwritten(out), overwritten(q.new_empty(q.shape[:3], dtype=torch.float32))
    q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
    dims = ("sequence", "head", "token")
    kernel = _core.DecodeAttention(
        sequences=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], queries=q.shape[2], keys=k.shape[2],
        table_row=0, page_size=0, pages=0, from_end=False, **_shared(q, k, v, lower, upper, scale, softcap),
        **_strides("q", q, dims), **_strides("out", out, dims), **_strides("lse", new_lse(), dims, size=1),
        **_strides("k", k, ("page", "head", "token")), **_strides("v", v, ("page", "head", "token")),
        **_scale_strides("k_scale", None), **_scale_strides("v_scale", None), programs=programs,
    )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask_tensors: Tensors = (), bias_tensors: Tensors = ()
    ) -> tuple[Tensor, Tensor]:
        q, k, v, out, lse = dense_rows(q), dense_rows(k), dense_rows(v), new_out(), new_lse()
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        read = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), address(sinks)
        if programs is None:
            kernel(*read)
        else:
            kernel(*read, mask_tensors=addresses(mask_tensors), bias_tensors=addresses(bias_tensors))
        return out, lse

    return run


@PreparedKernel
def paged(*arguments: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the CPU kernel of ``opkit.paged_attention``; its arguments are a :class:`PagedCall`.

    Raises:
        ValueError: a length, a start of queries or a page that is needed is out of range; or, in calls with functions, a
            sequence has fewer keys than queries.
    """
    from opkit import _core

    call = PagedCall(*arguments)
    supported = takes_pages(call)
    if not supported:
        raise KernelError(
            f"opkit::paged_attention: kernel 'decode' does not take q {_shape(call.q)} with k_pages "
            f"{_shape(call.k_pages)}{f': {supported.reason}' if isinstance(supported, Refused) else ''}"
        )
    new_out = like(call.q.new_empty((*call.q.shape[:2], call.v_pages.shape[-1])))
    new_lse = like(call.q.new_empty(call.q.shape[:2], dtype=torch.float32))
    programs = cpu_programs.of_few(call, call.sizes) if call.mask or call.bias else None
    kernel = _core.DecodeAttention(**_paged_shape(_readable(call), new_out(), new_lse()), programs=programs)
    converted = not all(a is b for a, b in zip(call, _readable(call), strict=True))

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        q, k, v, table, lengths, starts, _, _, _, _, sinks, k_scale, v_scale, mask_tensors, bias_tensors, _, _ = (
            _readable(PagedCall(*arguments)) if converted else arguments
        )
        out, lse = new_out(), new_lse()
        read = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), address(sinks), table.data_ptr() or 64,
            lengths.data_ptr(), starts.data_ptr(), address(k_scale), address(v_scale),
        )  # fmt: skip
        if programs is None:
            kernel(*read)
        else:
            kernel(*read, mask_tensors=addresses(mask_tensors), bias_tensors=addresses(bias_tensors))
        return out, lse

    return run


def _readable(call: PagedCall) -> PagedCall:
    """Return the call as the kernel reads it: dense rows, and the dtypes of its page table, lengths, sinks and scales."""
    return call._replace(
        q=dense_rows(call.q), k_pages=dense_rows(call.k_pages), v_pages=dense_rows(call.v_pages),
        page_table=call.page_table.to(torch.int32).contiguous(), lengths=call.lengths.to(torch.int64).contiguous(),
        starts=call.starts.to(torch.int64).contiguous(), k_scale=_single(call.k_scale), v_scale=_single(call.v_scale),
        sinks=None if call.sinks is None else call.sinks.to(torch.float32).contiguous(),
    )  # fmt: skip


def _paged_shape(call: PagedCall, out: Tensor, lse: Tensor) -> dict[str, Any]:
    q, k, v, table = call[:4]
    rows, pages = ("token", "head"), ("page", "token", "head")
    return {
        "sequences": call.lengths.numel(), "heads": q.shape[1], "kv_heads": k.shape[2], "queries": q.shape[0],
        "keys": table.shape[1] * k.shape[1], "table_row": table.shape[1], "page_size": max(k.shape[1], 1), "pages": k.shape[0],
        "from_end": True, "q_sequence": 0, "out_sequence": 0, "lse_sequence": 0,
        **_shared(q, k, v, call.lower, call.upper, call.scale, call.softcap),
        **_strides("q", q, rows), **_strides("out", out, rows), **_strides("lse", lse, rows, size=1),
        **_strides("k", k, pages), **_strides("v", v, pages),
        **_scale_strides("k_scale", call.k_scale), **_scale_strides("v_scale", call.v_scale),
    }  # fmt: skip


def _shape(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _single(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32)


def _shared(q: Tensor, k: Tensor, v: Tensor, lower: int, upper: int, scale: float, softcap: float) -> dict[str, Any]:
    return {
        "d": q.shape[-1], "dv": v.shape[-1], "q_type": _TYPES[q.dtype], "kv_type": _TYPES[k.dtype],
        "lower": max(lower, -UNLIMITED), "upper": min(upper, UNLIMITED), "scale": scale, "softcap": softcap,
    }  # fmt: skip


def _strides(name: str, x: Tensor, dims: tuple[str, ...], size: int | None = None) -> dict[str, int]:
    """Strides of the first dimensions by name: in bytes, or in units of ``size`` elements."""
    unit = x.element_size() if size is None else size
    return {f"{name}_{dim}": stride * unit for dim, stride in zip(dims, x.stride(), strict=False)}


def _scale_strides(name: str, scale: Tensor | None) -> dict[str, int]:
    dims = ("page", "token", "head")
    return {f"{name}_{dim}": 0 for dim in dims} if scale is None else _strides(name, scale, dims, size=1)
