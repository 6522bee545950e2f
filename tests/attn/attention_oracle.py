"""Attention written out: one row at a time, in Python's and torch's float64; what it is given, and how near it is."""

import math

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def naive(q, k, v, visible=None, bias=None, scale=None, softcap=None, sinks=None, kept=None, dropout_p=0.0):
    """The result and the log-sum-exp, (batch, heads, queries, d_v) and (batch, heads, queries), both float64.

    ``visible`` and ``kept`` are bool and ``bias`` is floating, each of a shape that broadcasts to the logits.
    """
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, queries, d = q.shape
    groups, keys = heads // k.shape[1], k.shape[2]
    full = (batch, heads, queries, keys)
    visible = torch.ones(full, dtype=torch.bool) if visible is None else visible.expand(full)
    bias = torch.zeros(full, dtype=torch.float64) if bias is None else bias.double().expand(full)
    kept = torch.ones(full, dtype=torch.bool) if kept is None else kept
    out, lse = torch.zeros(*full[:3], v.shape[3], dtype=torch.float64), torch.zeros(full[:3], dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, full[:3])).tolist():
        columns = visible[b, h, i].nonzero().flatten()
        logits = k[b, h // groups, columns] @ q[b, h, i] * (1 / math.sqrt(d) if scale is None else scale)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = (logits + bias[b, h, i, columns]).tolist()
        added = [] if sinks is None else [float(sinks[h])]
        top = max([*logits, *added], default=-math.inf)
        total = math.fsum(math.exp(x - top) for x in [*logits, *added]) if top > -math.inf else 0.0
        lse[b, h, i] = top + math.log(total) if total else -math.inf
        for j, x in zip(columns.tolist(), logits, strict=True):
            if total and kept[b, h, i, j]:
                out[b, h, i] += math.exp(x - top) / total / (1 - dropout_p) * v[b, h // groups, j]
    return out, lse


def randn(*shape, dtype=torch.float64, seed=0):
    """Drawn in float64, whatever the dtype."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch, heads, shared, queries, keys, d, d_v, dtype=torch.float64):
    """Queries, keys and values; ``shared`` is the number of heads of keys."""
    return (
        randn(batch, heads, queries, d, dtype=dtype),
        randn(batch, shared, keys, d, dtype=dtype, seed=1),
        randn(batch, shared, keys, d_v, dtype=dtype, seed=2),
    )


def close(actual, expected, dtype):
    """A result and a log-sum-exp are those of :func:`naive`, to the rounding of their dtypes."""
    assert actual[0].dtype == dtype
    assert actual[1].dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    wide = min(TOLERANCE[dtype], TOLERANCE[torch.float32])  # the log-sum-exp is never rounded to a narrow dtype
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=wide, atol=wide)
