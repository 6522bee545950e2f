"""Calls of ``opkit::attention_backward`` for the kernel for sm_90, and its gradients beside the reference's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from hopper_calls import CAUSAL, FAR

from opkit.attn import gradients, program, reference
from opkit.attn.gpu.hopper import backward as hopper_backward


def arguments(q, k, v, out=None, lse=None, gradient=None, of_lse=None, mask=(), scale=None, softcap=0.0, bias=(), dropout_p=0.0,
              heads_inside=False):  # fmt: skip
    """A call of ``opkit::attention_backward``; results and their gradients are empty by default."""
    out = q.new_empty((*q.shape[:3], v.shape[3])) if out is None else out
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if lse is None else lse
    gradient = torch.empty_like(out) if gradient is None else gradient
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return (
        gradient,
        of_lse,
        q,
        k,
        v,
        out,
        lse,
        [],
        [],
        list(mask),
        list(bias),
        scale,
        softcap,
        heads_inside,
        None,
        dropout_p,
    )


def window(width):
    return program.BAND, -width, 0


def bottom_right(queries, keys):
    return program.BAND, -FAR, keys - queries


CALLS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one tile": ((1, (1, 1), 128, 128, 128, 128), {}),
    "one tile, causal": ((1, (1, 1), 128, 128, 128, 128), {"mask": CAUSAL}),
    "whole tiles": ((2, (2, 2), 512, 384, 128, 128), {}),
    "tails": ((2, (4, 2), 333, 300, 128, 128), {}),
    "tails, causal": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL}),
    "gradient of lse": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "of_lse": True}),
    "one query": ((1, (2, 1), 1, 77, 128, 128), {}),
    "one key": ((3, (5, 1), 129, 1, 128, 128), {}),
    "few queries, bottom right": ((1, (1, 1), 64, 2048, 128, 128), {"mask": bottom_right(64, 2048)}),
    "dead rows": ((1, (2, 2), 500, 70, 128, 128), {"mask": bottom_right(500, 70), "of_lse": True}),
    "keys that nothing sees": ((1, (2, 2), 70, 500, 128, 128), {"mask": CAUSAL}),
    "all rows dead": ((1, (2, 1), 200, 200, 128, 128), {"mask": (program.BAND, 1000, 2000)}),
    "all rows dead, other side": ((1, (2, 1), 200, 200, 128, 128), {"mask": (program.BAND, -2000, -1000)}),
    "window": ((2, (4, 1), 1000, 1000, 128, 128), {"mask": window(100)}),
    "narrow window": ((1, (3, 3), 257, 777, 128, 128), {"mask": (program.BAND, 5, 40)}),
    "window far behind": ((1, (3, 3), 257, 777, 128, 128), {"mask": (program.BAND, -300, -200)}),
    "many tiles": ((8, (16, 4), 640, 640, 128, 128), {"mask": CAUSAL}),
    "a last section that is smaller": ((1, (35, 35), 2048, 1024, 128, 128), {"mask": CAUSAL}),
    "heads inside": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "heads_inside": True}),
    "capped": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "softcap": 3.0}),
    "another scale": ((2, (4, 2), 300, 300, 128, 128), {"scale": 0.25}),
    "96": ((2, (4, 2), 300, 300, 96, 96), {"mask": CAUSAL, "heads_inside": True}),
    "72 and 128": ((1, (2, 1), 190, 190, 72, 128), {"mask": CAUSAL}),
    "64": ((2, (4, 2), 777, 777, 64, 64), {}),
    "64, causal": ((2, (16, 16), 1024, 1024, 64, 64), {"mask": CAUSAL}),
    "64, capped": ((2, (4, 2), 300, 300, 64, 64), {"softcap": 3.0}),
    "64, tails, causal": ((2, (4, 2), 300, 300, 64, 64), {"mask": CAUSAL, "of_lse": True}),
    "256": ((2, (2, 2), 192, 128, 256, 256), {}),
    "256, tails": ((2, (4, 2), 333, 300, 256, 256), {}),
    "256, causal": ((2, (4, 2), 300, 300, 256, 256), {"mask": CAUSAL, "of_lse": True}),
    "256, window": ((1, (4, 1), 400, 400, 256, 256), {"mask": window(100)}),
    "256, narrow window": ((1, (3, 3), 257, 377, 256, 256), {"mask": (program.BAND, 5, 40)}),
    "256, dead rows": ((1, (2, 2), 250, 70, 256, 256), {"mask": bottom_right(250, 70), "of_lse": True}),
    "256, keys that nothing sees": ((1, (2, 2), 70, 250, 256, 256), {"mask": CAUSAL}),
    "256, one query": ((1, (2, 1), 1, 77, 256, 256), {}),
    "256, one key": ((3, (5, 1), 129, 1, 256, 256), {}),
    "256, capped": ((1, (4, 2), 200, 200, 256, 256), {"mask": CAUSAL, "softcap": 3.0}),
    "256, capped, full": ((1, (4, 2), 200, 200, 256, 256), {"softcap": 3.0}),
    "256, many tiles": ((2, (8, 4), 640, 640, 256, 256), {"mask": CAUSAL}),
    "136": ((1, (4, 2), 200, 200, 136, 136), {"mask": CAUSAL, "heads_inside": True}),
    "192 and 128": ((1, (2, 1), 190, 190, 192, 128), {"mask": CAUSAL}),
    "64 and 256": ((1, (2, 1), 190, 190, 64, 256), {}),
    "40": ((2, (4, 2), 300, 300, 40, 40), {"mask": window(70)}),
}


def called(tensors, of_lse=False, **what):
    """A call of normal gradients, with results that are the reference's."""
    found = arguments(*tensors, **what)
    mask, scale, softcap, heads_inside = found[9], found[11], found[12], found[13]
    exact = [x.double() for x in tensors]
    out, lse = reference.attention(*exact, [], [], None, None, mask, [], scale, softcap, 0.0, heads_inside)
    out, lse = out.to(tensors[0].dtype), lse.float()
    gradient = torch.randn_like(out)
    return arguments(*tensors, out, lse, gradient, torch.randn_like(lse) if of_lse else None, **what)


def expected_of(given):
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    return gradients.attention_backward(*exact)


def compared(given, found=None):
    """The kernel's gradients beside the reference's in float64."""
    found = hopper_backward.backward(*given) if found is None else found
    eps = torch.finfo(given[2].dtype).eps
    for name, mine, exact in zip(("q", "k", "v"), found, expected_of(given), strict=False):
        assert (mine.transpose(1, 2) if given[13] else mine).is_contiguous()
        size = exact.abs().amax().clamp(min=0.1)
        off = (mine.double() - exact).abs().amax() / size
        rms = (mine.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=0.01)
        assert off < 2 * eps, (name, off)
        assert rms < eps, (name, rms)
    torch.testing.assert_close(found[3].double(), expected_of(given)[3], rtol=1e-4, atol=1e-3)
    return found


HIDING = {  # a head's size, and a mask
    "hidden, 128": (128, CAUSAL),
    "hidden, 64": (64, window(50)),
    "hidden, 128, bottom right": (128, bottom_right(300, 200)),
    "hidden, 256": (256, CAUSAL),
    "hidden, 200, both sides": (200, (program.BAND, -40, 30)),
    "hidden, 96, both sides": (96, (program.BAND, -40, 30)),
}


def compared_where_hidden(tensors, mask):
    """The gradients that keys and values which are not finite must not reach, of tensors of 300 queries and keys."""
    q, k, v = tensors
    for j in (3, 150, 299):
        k[:, :, j], v[:, :, j, ::3], v[:, :, j, 1] = float("nan"), float("inf"), float("nan")
    given = called((q, k, v), mask=mask)
    of_q, of_k, of_v, _ = hopper_backward.backward(*given)
    exact = expected_of(given)
    clean = given[5].isfinite().all(-1)[0, 0]  # the rows that see none of the three
    seen = program.visible(list(mask), [], program.Grid(300, 300, q.device))[0, 0]
    kept = ~(seen & ~clean[:, None]).any(0)  # the keys that no other row sees
    assert clean.any()
    for found, expected, which in ((of_q, exact[0], clean), (of_k, exact[1], kept), (of_v, exact[2], kept)):
        torch.testing.assert_close(found[:, :, which].double(), expected[:, :, which], rtol=2e-2, atol=2e-2)
