"""Calls of ``opkit::attention_backward`` for the kernels for sm_90, and their gradients beside the reference's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from hopper_calls import CAUSAL, FAR, bottom_right, hide
from hopper_masks import blocks_of_bools, bools, documents, lengths, packed, shuffled

from opkit.attn import gradients, reference
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.masks import program


def arguments(q, k, v, out=None, lse=None, gradient=None, of_lse=None, mask=(), scale=None, softcap=0.0, bias=(), dropout_p=0.0,
              out_is_bshd=False, masks=()):  # fmt: skip
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
        list(masks),
        [],
        list(mask),
        list(bias),
        scale,
        softcap,
        out_is_bshd,
        None,
        dropout_p,
    )


def window(width):
    return program.BAND, -width, 0


SEGMENTS, LENGTH, DENSE, AND = (program.SEGMENTS, 0, 1), (program.LENGTH, 0), (program.DENSE, 0), program.AND
OR = program.OR


def masked(mask, *masks, **what):
    """What else a call has that has a mask with tensors."""
    return {"mask": mask, "masks": masks, **what}


CALLS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one tile": ((1, (1, 1), 128, 128, 128, 128), {}),
    "one tile, causal": ((1, (1, 1), 128, 128, 128, 128), {"mask": CAUSAL}),
    "whole tiles": ((2, (2, 2), 512, 384, 128, 128), {}),
    "tails": ((2, (4, 2), 333, 300, 128, 128), {}),
    "tails, causal": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL}),
    "gradient of lse": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "of_lse": True}),
    "one query": ((1, (2, 1), 1, 77, 128, 128), {}),
    "one key": ((3, (5, 1), 129, 1, 128, 128), {}),
    "few keys": ((2, (4, 2), 300, 100, 72, 72), {"mask": CAUSAL, "out_is_bshd": True}),
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
    "heads inside": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "out_is_bshd": True}),
    "capped": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "softcap": 3.0}),
    "another scale": ((2, (4, 2), 300, 300, 128, 128), {"scale": 0.25}),
    "96": ((2, (4, 2), 300, 300, 96, 96), {"mask": CAUSAL, "out_is_bshd": True}),
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
    "256, few keys": ((2, (4, 2), 150, 50, 200, 256), {}),
    "256, one key": ((3, (5, 1), 129, 1, 256, 256), {}),
    "256, capped": ((1, (4, 2), 200, 200, 256, 256), {"mask": CAUSAL, "softcap": 3.0}),
    "256, capped, full": ((1, (4, 2), 200, 200, 256, 256), {"softcap": 3.0}),
    "256, many tiles": ((2, (8, 4), 640, 640, 256, 256), {"mask": CAUSAL}),
    "136": ((1, (4, 2), 200, 200, 136, 136), {"mask": CAUSAL, "out_is_bshd": True}),
    "192 and 128": ((1, (2, 1), 190, 190, 192, 128), {"mask": CAUSAL}),
    "64 and 256": ((1, (2, 1), 190, 190, 64, 256), {}),
    "40": ((2, (4, 2), 300, 300, 40, 40), {"mask": window(70)}),
    "two bands": ((1, (2, 1), 300, 300, 128, 128), {"mask": (*CAUSAL, program.BAND, -30, 30, AND)}),
    "documents": ((2, (4, 2), 300, 300, 128, 128), masked(SEGMENTS, *[documents(2, 300, 5)] * 2)),
    "documents of whole tiles": ((1, (1, 1), 640, 640, 128, 128), masked(SEGMENTS, *[packed(256, 128, 256)] * 2)),
    "causal documents": (
        (1, (2, 2), 500, 500, 128, 128), masked((*SEGMENTS, *CAUSAL, AND), *[documents(1, 500, 4)] * 2, of_lse=True),
    ),
    "documents of other keys": (
        (2, (2, 1), 200, 400, 128, 128), masked(SEGMENTS, documents(2, 200, 5), documents(2, 400, 5, 3)),
    ),
    "no order": ((1, (2, 1), 300, 300, 128, 128), masked(SEGMENTS, shuffled(1, 300), shuffled(1, 300))),
    "nothing is seen": (
        (2, (2, 1), 300, 300, 128, 128), masked(SEGMENTS, documents(1, 300, 3), documents(1, 300, 3) + 100, of_lse=True),
    ),
    "lengths": ((3, (2, 1), 200, 400, 128, 128), masked(LENGTH, lengths(0, 333, 400))),
    "causal with lengths": ((2, (2, 1), 400, 400, 128, 128), masked((*LENGTH, *CAUSAL, AND), lengths(128, 355))),
    "two lengths": (
        (2, (1, 1), 200, 400, 128, 128),
        masked((*LENGTH, program.LENGTH, 1, OR), lengths(50, 400), lengths(300)),
    ),
    "bools": ((2, (2, 1), 200, 200, 128, 128), masked(DENSE, bools(2, 1, 200, 200))),
    "bools of heads": ((2, (2, 1), 200, 200, 128, 128), masked(DENSE, bools(1, 2, 200, 1))),
    "blocks of bools": ((1, (4, 2), 300, 390, 128, 128), masked(DENSE, blocks_of_bools(4, 300, 390))),
    "not these documents, or near": (
        (2, (2, 1), 300, 300, 64, 64),
        masked((*SEGMENTS, program.NOT, program.BAND, -30, 30, OR), *[documents(2, 300, 3)] * 2),
    ),
    "a diagonal of each query": (
        (2, (1, 1), 200, 400, 128, 128), masked((program.BAND_AT, 0, -20, 20), shuffled(2, 200) * 100),
    ),
    "seven tensors": (
        (1, (2, 2), 200, 200, 128, 128),
        masked(
            (*SEGMENTS, program.SEGMENTS, 2, 3, OR, program.SEGMENTS, 4, 5, OR, program.BAND_AT, 6, -5, 5, OR),
            *[documents(1, 200, 3, seed) for seed in range(7)],
        ),
    ),
    "documents, capped": ((1, (2, 1), 300, 300, 128, 128), masked(SEGMENTS, *[documents(1, 300, 3)] * 2, softcap=3.0)),
    "documents, 72 and 128": (
        (1, (2, 1), 300, 300, 72, 128), masked(SEGMENTS, *[documents(1, 300, 3)] * 2, out_is_bshd=True),
    ),
    "documents, 64": ((2, (2, 1), 400, 400, 64, 64), masked(SEGMENTS, *[documents(2, 400, 3)] * 2)),
    "causal documents, 64": ((1, (2, 1), 600, 600, 64, 64), masked((*SEGMENTS, *CAUSAL, AND), *[documents(1, 600, 3)] * 2)),
    "blocks of bools, 64": ((1, (2, 1), 450, 390, 64, 64), masked(DENSE, blocks_of_bools(2, 450, 390), softcap=3.0)),
    "documents, one query": ((1, (2, 1), 1, 300, 64, 64), masked(SEGMENTS, documents(1, 1, 1), documents(1, 300, 3))),
    "256, two bands": ((1, (2, 1), 200, 200, 256, 256), {"mask": (*CAUSAL, program.BAND, -30, 30, AND)}),
    "256, documents": ((2, (4, 2), 200, 200, 256, 256), masked(SEGMENTS, *[documents(2, 200, 5)] * 2)),
    "256, documents of whole tiles": ((1, (1, 1), 320, 320, 256, 256), masked(SEGMENTS, *[packed(128, 64, 128)] * 2)),
    "256, causal documents": (
        (1, (2, 2), 300, 300, 256, 256), masked((*SEGMENTS, *CAUSAL, AND), *[documents(1, 300, 4)] * 2, of_lse=True),
    ),
    "200, documents of other keys": (
        (2, (2, 1), 140, 220, 200, 256), masked(SEGMENTS, documents(2, 140, 5), documents(2, 220, 5, 3)),
    ),
    "256, no order": ((1, (2, 1), 150, 150, 256, 256), masked(SEGMENTS, shuffled(1, 150), shuffled(1, 150))),
    "256, nothing is seen": (
        (2, (2, 1), 150, 150, 256, 256), masked(SEGMENTS, documents(1, 150, 3), documents(1, 150, 3) + 100, of_lse=True),
    ),
    "256, lengths": ((3, (2, 1), 100, 200, 256, 256), masked(LENGTH, lengths(0, 133, 200))),
    "256, causal with lengths": ((2, (2, 1), 200, 200, 256, 256), masked((*LENGTH, *CAUSAL, AND), lengths(64, 155))),
    "256, two lengths": (
        (2, (1, 1), 100, 200, 256, 256), masked((*LENGTH, program.LENGTH, 1, OR), lengths(50, 200), lengths(150)),
    ),
    "256, bools": ((2, (2, 1), 120, 120, 256, 256), masked(DENSE, bools(2, 1, 120, 120))),
    "192, bools of heads": ((2, (2, 1), 150, 150, 192, 192), masked(DENSE, bools(1, 2, 150, 1))),
    "256, blocks of bools": ((1, (4, 2), 300, 290, 256, 256), masked(DENSE, blocks_of_bools(4, 300, 290))),
    "136, blocks of bools, capped": (
        (1, (2, 1), 250, 190, 136, 136), masked(DENSE, blocks_of_bools(2, 250, 190), softcap=3.0),
    ),
    "256, not these documents, or near": (
        (2, (2, 1), 150, 150, 256, 256),
        masked((*SEGMENTS, program.NOT, program.BAND, -30, 30, OR), *[documents(2, 150, 3)] * 2),
    ),
    "256, a diagonal of each query": (
        (2, (1, 1), 150, 200, 256, 256), masked((program.BAND_AT, 0, -20, 20), shuffled(2, 150) * 50),
    ),
    "256, seven tensors": (
        (1, (2, 2), 130, 130, 256, 256),
        masked(
            (*SEGMENTS, program.SEGMENTS, 2, 3, OR, program.SEGMENTS, 4, 5, OR, program.BAND_AT, 6, -5, 5, OR),
            *[documents(1, 130, 3, seed) for seed in range(7)],
        ),
    ),
    "256, documents, capped": ((1, (2, 1), 200, 200, 256, 256), masked(SEGMENTS, *[documents(1, 200, 3)] * 2, softcap=3.0)),
    "136 and 256, documents": (
        (1, (2, 1), 200, 200, 136, 256), masked(SEGMENTS, *[documents(1, 200, 3)] * 2, out_is_bshd=True),
    ),
    "256, documents, one query": ((1, (2, 1), 1, 200, 256, 256), masked(SEGMENTS, documents(1, 1, 1), documents(1, 200, 3))),
    "256, documents, many tiles": (
        (1, (8, 2), 500, 500, 256, 256), masked((*SEGMENTS, *CAUSAL, AND), *[documents(1, 500, 3)] * 2),
    ),
}  # fmt: skip


REPRESENTATIVE = (
    "one tile, causal", "tails", "tails, causal", "gradient of lse", "one query", "one key", "few keys", "dead rows",
    "keys that nothing sees", "all rows dead", "window far behind", "many tiles", "heads inside", "capped",
    "72 and 128", "64, causal", "256, tails", "256, causal", "256, capped", "136", "64 and 256", "documents",
    "causal documents", "documents of other keys", "no order", "nothing is seen", "causal with lengths",
    "bools of heads", "not these documents, or near", "a diagonal of each query", "seven tensors", "documents, 64",
    "256, documents", "256, lengths", "256, blocks of bools", "256, documents, many tiles",
)  # fmt: skip
"""The calls that the default run keeps."""


def called(tensors, of_lse=False, **what):
    """A call of normal gradients, with results that are the reference's."""
    what["masks"] = [x.to(tensors[0].device) for x in what.get("masks", ())]
    found = arguments(*tensors, **what)
    masks, mask, scale, softcap, out_is_bshd = found[7], found[9], found[11], found[12], found[13]
    exact = [x.double() for x in tensors]
    out, lse = reference.attention(*exact, masks, [], None, None, mask, [], scale, softcap, 0.0, out_is_bshd)
    out, lse = out.to(tensors[0].dtype), lse.float()
    gradient = torch.randn_like(out)
    return arguments(*tensors, out, lse, gradient, torch.randn_like(lse) if of_lse else None, **what)


def expected_of(given):
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    return gradients.attention_backward(*exact)


def compared(given, kernel=hopper_backward.backward, found=None):
    """The kernel's gradients beside the reference's in float64."""
    found = kernel(*given) if found is None else found
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


LARGE = {  # as CALLS, of queries and keys that :func:`large` makes
    "large, 128": ((1, (2, 1), 70, 60, 128, 128), {}),
    "large, 64 and 128, some rows": ((1, (2, 1), 150, 150, 64, 128), {"mask": window(30), "of_lse": True}),
    "large, 256, causal": ((1, (2, 2), 70, 60, 256, 256), {"mask": CAUSAL}),
    "large, 72, causal documents, some rows": (
        (2, (2, 1), 50, 50, 72, 72), masked((*SEGMENTS, *CAUSAL, AND), *[documents(2, 50, 3)] * 2, out_is_bshd=True),
    ),
    "large, 64, lengths": ((2, (2, 1), 50, 50, 64, 64), masked(LENGTH, lengths(0, 30))),
}  # fmt: skip


def large(tensors, some):
    """Fill queries, keys and values so that logits are some 1e6 and exact; of ``some`` rows, one in three, a few hundred.

    Those of a row have one sign: where huge terms added up to little, products would round what they add to it.
    """
    q, k, v = tensors
    v.copy_(torch.randint(-3, 4, v.shape))
    k.copy_(torch.randint(1, 4, k.shape))
    q.copy_(torch.randint(1, 4, q.shape) * (1 - 2 * torch.randint(0, 2, (*q.shape[:3], 1))))
    q *= 2.0**11
    q[..., 4:] = 0  # so that the greatest logits are some keys', and gradients not 0
    k *= 2.0**10  # gradients of queries are within float16
    if some:
        q[:, :, ::3] *= 2.0**-14
    return tensors


HIDING = {  # a head's size, and a mask
    "hidden, 128": (128, {"mask": CAUSAL}),
    "hidden, 64": (64, {"mask": window(50)}),
    "hidden, 128, bottom right": (128, {"mask": bottom_right(300, 200)}),
    "hidden, 256": (256, {"mask": CAUSAL}),
    "hidden, 200, both sides": (200, {"mask": (program.BAND, -40, 30)}),
    "hidden, 96, both sides": (96, {"mask": (program.BAND, -40, 30)}),
    "hidden, 128, documents": (128, masked(SEGMENTS, *[packed(20, 20, 100, 160)] * 2)),
    "hidden, 64, documents": (64, masked((*SEGMENTS, *CAUSAL, AND), *[packed(20, 20, 100, 160)] * 2)),
    "hidden, 128, lengths": (128, masked((*LENGTH, program.BAND, 1, FAR, AND), lengths(299))),
    "hidden, 64, bools": (64, masked(DENSE, bools(1, 2, 300, 300))),
    "hidden, 256, documents": (256, masked(SEGMENTS, *[packed(20, 20, 100, 160)] * 2)),
    "hidden, 256, causal documents, capped": (
        256,
        masked((*SEGMENTS, *CAUSAL, AND), *[packed(20, 20, 100, 160)] * 2, softcap=3.0),
    ),
    "hidden, 136, lengths": (136, masked((*LENGTH, program.BAND, 1, FAR, AND), lengths(299))),
    "hidden, 200, bools": (200, masked(DENSE, bools(1, 2, 300, 300))),
}
ROWS_HIDING = {
    "hidden rows, 128, documents": (128, masked(SEGMENTS, packed(20, 20, 100, 160), packed(20, 20, 260))),
    "hidden rows, 64, documents": (
        64,
        masked((*SEGMENTS, *CAUSAL, AND), packed(20, 20, 100, 160), packed(20, 20, 260)),
    ),
    "hidden rows, 128, bools": (128, masked(DENSE, blocks_of_bools(2, 300, 300, 30, 0.3))),
    "hidden rows, 64, bools": (64, masked(DENSE, blocks_of_bools(2, 300, 300, 30, 0.3))),
    "hidden rows, 256, documents": (256, masked(SEGMENTS, packed(20, 20, 100, 160), packed(20, 20, 260))),
    "hidden rows, 200, causal documents, capped": (
        200,
        masked((*SEGMENTS, *CAUSAL, AND), packed(20, 20, 100, 160), packed(20, 20, 260), softcap=3.0),
    ),
    "hidden rows, 256, bools": (256, masked(DENSE, blocks_of_bools(2, 300, 300, 30, 0.3))),
}


def compared_where_rows_are_hidden(tensors, what, kernel=hopper_backward.backward):
    """The gradients that queries, and gradients of results, which are not finite must not reach; of 300 queries and keys.

    They are where the reference has them when these are zeros, and NaN where a gradient that is not finite is seen.
    """
    q, k, v = tensors
    bad, lost = (3, 129, 254), (4, 131, 299)  # queries, gradients
    clean = called((q.clone(), k, v), **what)
    gradient, changed = clean[0].clone(), q.clone()
    for i in bad:
        changed[:, :, i], changed[:, :, i, 5] = float("nan"), float("inf")
    for i in lost:
        gradient[:, :, i], gradient[:, :, i, ::7] = float("nan"), float("inf")
    given = called((changed, k, v), **what)
    found = kernel(gradient, *given[1:])
    seen = program.visible(clean[9], clean[7], program.Grid(300, 300, q.device)).expand(*q.shape[:3], 300)
    rows = torch.zeros(300, dtype=torch.bool, device=q.device)
    rows[[*bad, *lost]] = True
    kept = ~(seen & rows[:, None]).flatten(0, -2).any(0)  # keys that none of these rows sees
    dead = ~seen.any(-1)
    exact = expected_of((torch.where(rows[:, None], 0.0, clean[0]), *clean[1:]))
    assert kept.any()
    assert not kept.all()
    assert (dead & rows).any()
    fine = ~rows | dead
    torch.testing.assert_close(found[0][fine].double(), exact[0][fine], rtol=2e-2, atol=2e-2)
    for mine, expected in zip(found[1:3], exact[1:3], strict=True):
        torch.testing.assert_close(mine[:, :, kept].double(), expected[:, :, kept], rtol=2e-2, atol=2e-2)
        assert mine[:, :, ~kept].isnan().any(-1).all()


QUERY_HIDING = {"a hidden query, 128": 128, "a hidden query, 64": 64, "a hidden query, 256": 256}  # a head's size


def compared_where_a_query_is_hidden(tensors, kernel=hopper_backward.backward):
    """The gradients of keys and values that come after query 200 of 300, which is NaN and which they do not see."""
    q, k, v = tensors
    clean, changed = called((q.clone(), k, v), mask=CAUSAL), q.clone()
    changed[:, :, 200] = float("nan")
    found = kernel(clean[0], *called((changed, k, v), mask=CAUSAL)[1:])
    exact = expected_of(clean)
    for mine, expected in zip(found[1:3], exact[1:3], strict=True):
        torch.testing.assert_close(mine[:, :, 201:].double(), expected[:, :, 201:], rtol=2e-2, atol=2e-2)
        assert mine[:, :, :201].isnan().any(-1).all()


def compared_where_hidden(tensors, what, kernel=hopper_backward.backward):
    """The gradients that keys and values which are not finite must not reach, of tensors of 300 queries and keys."""
    q, k, v = tensors
    hide(k, v)
    given = called((q, k, v), **what)
    of_q, of_k, of_v, _ = kernel(*given)
    exact = expected_of(given)
    clean = given[5].isfinite().all(-1)  # the rows that see none of the three
    seen = program.visible(given[9], given[7], program.Grid(300, 300, q.device)).expand(*q.shape[:3], 300)
    kept = ~(seen & ~clean.unsqueeze(-1)).flatten(0, -2).any(0)  # the keys that no other row sees
    assert clean.any()
    torch.testing.assert_close(of_q[clean].double(), exact[0][clean], rtol=2e-2, atol=2e-2)
    for found, expected in ((of_k, exact[1]), (of_v, exact[2])):
        torch.testing.assert_close(found[:, :, kept].double(), expected[:, :, kept], rtol=2e-2, atol=2e-2)
