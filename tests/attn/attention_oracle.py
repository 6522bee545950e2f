"""Attention written out: one row at a time, in Python's and torch's float64."""

import math

import torch


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
