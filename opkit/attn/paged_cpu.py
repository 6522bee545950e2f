"""Decoding attention on the CPU: what `cpp_ext/attention` computes, for contiguous and for paged keys and values.

:func:`decode` is for few queries to contiguous keys; ``opkit.attention`` may call it. :func:`paged` is the kernel of
``opkit.paged_attention``. Both read keys and values once for all query heads of a KV head and all queries.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from opkit.errors import KernelError

UNLIMITED = 2**62  #: an end of a band that hides nothing
LARGEST_HEAD = 1024
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


@functools.cache
def available() -> bool:
    """Whether opkit's compiled core is there."""
    try:
        import opkit._core
    except ImportError:
        return False
    return hasattr(opkit._core, "decode_attention")


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these dtypes and head sizes; it asks neither numbers nor devices."""
    return (
        q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and k.dtype == v.dtype
        and k.dtype in _TYPES
        and max(q.shape[-1], v.shape[-1]) <= LARGEST_HEAD
        and available()
    )


def takes_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """:func:`takes`, and the heads of queries are a multiple of those of keys."""
    return takes(q, k_pages, v_pages) and k_pages.shape[2] > 0 and q.shape[1] % k_pages.shape[2] == 0


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

    Query ``i`` sees key ``j`` iff ``lower <= j - i <= upper``. What limits it is reading ``k`` and ``v``, up to about 16
    queries of all query heads of a KV head; with more, a kernel that packs keys is faster.

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
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    _call(
        sequences=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], queries=q.shape[2], keys=k.shape[2],
        starts=0, lengths=0, table=0, table_row=0, page_size=0, pages=0,
        **_shared(q, k, v, lower, upper, scale, softcap), **_sinks(sinks), from_end=False,
        **_places("q", q, ("sequence", "head", "token")), **_places("out", out, ("sequence", "head", "token")),
        **_places("lse", lse, ("sequence", "head", "token"), size=1),
        **_places("k", k, ("page", "head", "token")), **_places("v", v, ("page", "head", "token")),
        **_scales("k", None), **_scales("v", None),
    )  # fmt: skip
    return out, lse


def paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    lower: int,
    upper: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The CPU kernel of ``opkit.paged_attention``; arguments as its reference has them.

    Raises:
        ValueError: a length, a start of queries or a page that is needed is out of range.
    """
    if not takes_pages(q, k_pages, v_pages):
        raise KernelError(
            f"opkit::paged_attention: kernel 'decode' does not take q {_told(q)} with k_pages {_told(k_pages)}"
        )
    q, k, v = _dense_rows(q), _dense_rows(k_pages), _dense_rows(v_pages)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    k_scale, v_scale = _single(k_scale), _single(v_scale)
    table = page_table.to(torch.int32).contiguous()
    lengths, starts = lengths.to(torch.int64).contiguous(), starts.to(torch.int64).contiguous()
    out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    _call(
        sequences=lengths.numel(), heads=q.shape[1], kv_heads=k.shape[2], queries=q.shape[0],
        keys=table.shape[1] * k.shape[1], starts=starts.data_ptr(), lengths=lengths.data_ptr(),
        table=table.data_ptr() or 64, table_row=table.shape[1], page_size=max(k.shape[1], 1), pages=k.shape[0],
        **_shared(q, k, v, lower, upper, scale, softcap), **_sinks(sinks), from_end=True,
        **_places("q", q, ("token", "head")), q_sequence=0,
        **_places("out", out, ("token", "head")), out_sequence=0,
        **_places("lse", lse, ("token", "head"), size=1), lse_sequence=0,
        **_places("k", k, ("page", "token", "head")), **_places("v", v, ("page", "token", "head")),
        **_scales("k", k_scale), **_scales("v", v_scale),
    )  # fmt: skip
    return out, lse


def _call(**fields: Any) -> None:
    from opkit import _core

    _core.decode_attention(**fields)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _single(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32)


def _shared(
    q: Tensor, k: Tensor, v: Tensor, lower: int, upper: int, scale: float | None, softcap: float
) -> dict[str, Any]:
    return {
        "d": q.shape[-1], "dv": v.shape[-1], "q_type": _TYPES[q.dtype], "kv_type": _TYPES[k.dtype],
        "lower": max(lower, -UNLIMITED), "upper": min(upper, UNLIMITED), "softcap": softcap,
        "scale": max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
    }  # fmt: skip


def _places(name: str, x: Tensor, dims: tuple[str, ...], size: int | None = None) -> dict[str, int]:
    """The address of a tensor, and its strides: in bytes, or in units of ``size`` elements."""
    unit = x.element_size() if size is None else size
    return dict(zip(_names(name, dims), (x.data_ptr(), *[stride * unit for stride in x.stride()]), strict=False))


@functools.cache
def _names(name: str, dims: tuple[str, ...]) -> tuple[str, ...]:
    return (name, *(f"{name}_{dim}" for dim in dims))


def _scales(name: str, scale: Tensor | None) -> dict[str, int]:
    if scale is None:
        return dict.fromkeys(_names(f"{name}_scale", ("page", "token", "head")), 0)
    return _places(f"{name}_scale", scale, ("page", "token", "head"), size=1)


def _sinks(sinks: Tensor | None) -> dict[str, int]:
    return {"sinks": 0 if sinks is None else sinks.data_ptr()}
