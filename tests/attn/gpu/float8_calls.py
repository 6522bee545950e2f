"""Calls of ``opkit::attention_float8`` for the kernel for Hopper, and numbers beside the reference's."""

from __future__ import annotations

import torch
from hopper_calls import CAUSAL, bottom_right
from hopper_masks import documents

from opkit.attn.float8 import attention_float8
from opkit.attn.gpu.hopper import forward_cuda
from opkit.attn.masks import program

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]
DOCUMENTS = (program.SEGMENTS, 0, 1)
CALLS = {  # (batch, heads of queries and of keys, queries, keys), a mask, and whether it has documents
    "tails": ((1, (2, 1), 333, 300), (), False),
    "tails, causal": ((2, (2, 1), 300, 300), CAUSAL, False),
    "one query": ((1, (2, 1), 1, 77), (), False),
    "one key": ((3, (5, 1), 129, 1), (), False),
    "dead rows": ((1, (2, 2), 500, 70), bottom_right(500, 70), False),
    "all rows dead": ((1, (2, 1), 200, 200), (program.BAND, 1000, 2000), False),
    "window": ((2, (4, 1), 500, 500), (program.BAND, -100, 0), False),
    "many tiles": ((2, (4, 2), 640, 400), CAUSAL, False),
    "documents": ((2, (2, 1), 400, 400), DOCUMENTS, True),
    "causal documents": ((2, (2, 1), 400, 400), (*CAUSAL, *DOCUMENTS, program.AND), True),
}


def given(sizes, head, mask=(), documented=False, dtype=KINDS[0], out_is_bshd=False, device="cpu"):
    """The operator's arguments. Descales are of either sign, and one is 0."""
    batch, (heads, key_heads), queries, keys = sizes
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, *size, generator=generator).to(dtype)
        for size in ((heads, queries, head), (key_heads, keys, head), (key_heads, keys, head))
    )
    if out_is_bshd:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    descales = [torch.randn(batch, key_heads, generator=generator) for _ in range(3)]
    if batch * key_heads > 1:
        descales[1].view(-1)[-1] = 0
    masks = [documents(batch, queries, 4)] * 2 if documented else []
    there = [[x.to(device) for x in each] for each in ([q, k, v], descales, masks)]
    return (*there[0], there[1], there[2], [], None, list(mask), [], head**-0.5, 0.0, out_is_bshd)


def compared(call, found, of_logits=1e-4):
    """The kernel's results beside the reference's; products of tensor cores may be off by ``of_logits``."""
    expected, of_rows = attention_float8(*call)
    out, lse = found
    assert out.dtype == torch.bfloat16
    assert (out.transpose(1, 2) if call[-1] else out).is_contiguous()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, of_rows, rtol=1e-5, atol=of_logits)


def every_number(dtype, device="cpu"):
    """All bytes that are finite numbers, as values of which each query sees one, are what they are."""
    v = torch.arange(256).to(torch.uint8).view(dtype)
    v = v[v.float().isfinite()].reshape(1, 1, -1, 1).repeat(1, 1, 1, 128).to(device)
    q, ones = torch.zeros(1, 1, v.shape[2], 128).to(device, dtype), [torch.ones(1, 1, device=device)] * 3
    out, _ = forward_cuda.forward_float8(q, q, v, ones, [], [], None, [program.BAND, 0, 0], [], 1.0, 0.0, False)
    assert torch.equal(out, v.to(torch.bfloat16))


def hidden_stays_hidden(head, device="cpu"):
    """What is no number reaches the queries that see it alone. Those beside them are computed again, in another order."""
    call = given((1, (2, 1), 200, 200), head, CAUSAL, device=device)
    clean, _ = forward_cuda.forward_float8(*call)
    call[1].view(torch.uint8)[:, :, 150:] = 0x7F  # NaN
    call[2].view(torch.uint8)[:, :, 120, 3] = 0x7F
    out, _ = forward_cuda.forward_float8(*call)
    torch.testing.assert_close(out[:, :, :120], clean[:, :, :120], rtol=2**-7, atol=2**-8)
    assert out[:, :, 120:, 3].isnan().all()
    assert out[:, :, 150:].isnan().all()
