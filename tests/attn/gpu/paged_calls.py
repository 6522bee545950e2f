"""Calls of paged attention, and their results in float64."""

import itertools

import torch

UNLIMITED = 2**62


class Cache:
    """Pages in a random order; those that are not used, and the ends of last pages, hold NaN."""

    def __init__(self, lengths, page_size=16, kv_heads=2, d=32, dv=None, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths, self.page_size = torch.tensor(lengths), page_size
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=self.generator).int()
        shape = (len(order), page_size, kv_heads)
        used = torch.zeros(shape[:2], dtype=torch.bool)
        self.table = torch.full((len(lengths), max([1, *counts]) + 1), -7, dtype=torch.int32)
        for b, count in enumerate(counts):
            self.table[b, :count], order = order[:count], order[count:]
            places = torch.arange(count * page_size).reshape(count, page_size) < lengths[b]
            used[self.table[b, :count].long()] = places
        self.k, self.k_scale, self.k_exact = self._pages((*shape, d), dtype, used)
        self.v, self.v_scale, self.v_exact = self._pages((*shape, d if dv is None else dv), dtype, used)

    def _pages(self, shape, dtype, used):
        pages = torch.randn(shape, generator=self.generator)
        scale = None
        if dtype.itemsize == 1:
            scale = torch.rand(shape[:3], generator=self.generator) / 20 + 0.01
            pages = (pages * 30).round().clamp(-127, 127)
        pages = pages.to(dtype)
        exact = pages.double() if scale is None else pages.double() * scale.double()[..., None]
        for x in (pages, scale):
            if x is not None and x.dtype != torch.int8:
                x.view(torch.uint8 if x.itemsize == 1 else x.dtype)[~used] = 0x7F if x.itemsize == 1 else torch.nan
        return pages, scale, exact

    def dense(self, b):
        """``(length, kv_heads, size)`` of a sequence's keys and values."""
        pages = self.table[b, : -(-int(self.lengths[b]) // self.page_size)].long()
        return [x[pages].flatten(0, 1)[: int(self.lengths[b])] for x in (self.k_exact, self.v_exact)]

    def queries(self, count, heads, dtype=torch.float32):
        return torch.randn(count, heads, self.k.shape[-1], generator=self.generator).to(dtype)

    def call(self, q, starts, lower=-UNLIMITED, upper=0, scale=0.25, softcap=0.0, sinks=None):
        starts = torch.tensor(starts)
        return (
            q, self.k, self.v, self.table, self.lengths, starts, lower, upper, scale, softcap, sinks, self.k_scale, self.v_scale,
            [], [], [], [],
        )  # fmt: skip


def expected(
    cache, q, starts, lower=-UNLIMITED, upper=0, scale=0.25, softcap=0.0, sinks=None, mask_mod=None, score_mod=None
):
    """A sequence and a query at a time, of the keys that it sees."""
    out = torch.zeros(*q.shape[:2], cache.v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in cache.dense(b))
        for t in range(first, last):
            position = len(k) - (last - t)
            seen = slice(max(0, position + lower), max(0, position + upper + 1))
            logits = torch.einsum("hd,khd->hk", q[t].double(), k[seen]) * scale
            logits = torch.tanh(logits / softcap) * softcap if softcap else logits
            at = torch.tensor(b), torch.arange(q.shape[1])[:, None], torch.tensor(position), torch.arange(len(k))[seen]
            logits = logits if score_mod is None else score_mod(logits, *at)
            logits = logits if mask_mod is None else logits.masked_fill(~mask_mod(*at), -torch.inf)
            sink = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
            lse[t] = torch.cat([logits, sink.double()[:, None]], 1).logsumexp(1)
            weights = torch.exp(logits - lse[t].masked_fill(lse[t] == -torch.inf, 0)[:, None])
            out[t] = torch.einsum("hk,khd->hd", weights, v[seen])
    return out, lse


def of_pages(found, cache, q, starts, **what):
    """The results beside those in float64, as far off as rounding weights and the results explains."""
    (out, lse), (exact, exact_lse) = found, expected(cache, q, starts, **what)
    rounding = torch.finfo(q.dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=1.5 * rounding)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)
