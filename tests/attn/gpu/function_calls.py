"""Calls with users' functions as masks and biases, for tests of kernels for GPUs."""

import math

import torch

from opkit.attn.api import lowered
from opkit.attn.calls import AttentionCall, BiasCall, GradientCall
from opkit.masks import ALiBi, Causal, RelativePosition

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS = 2, 4, 2, 150, 170
generator = torch.Generator().manual_seed(0)


def made(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


IDS = torch.arange(KEYS).mul(3).div(KEYS, rounding_mode="floor").expand(BATCH, KEYS)
LENGTHS = torch.tensor([30, 50], dtype=torch.int32)
SLOPES = made(HEADS)
TABLE = made(2 * KEYS, HEADS, dtype=torch.float16).mT  # its columns are far apart
BUCKETS = made(16, HEADS, dtype=torch.bfloat16)
IMAGE = made(HEADS, 41, 15)
PER_KEY, PER_QUERY = made(KEYS + 3).double(), made(3, HEADS)
FULL = made(BATCH, HEADS, QUERIES, KEYS)
ALLOWED = torch.rand(7, 9, generator=generator) > 0.4


def near(width, step):
    return lambda b, h, i, j: (i >= j) & (i - j < width) & ((i - j) % step == 0)


def neighbours(width):
    return lambda b, h, i, j: ((i // width - j // width).abs() <= 1) & ((i % width - j % width).abs() <= 2)


def blocks(size):
    return lambda b, h, i, j: i // size == j // size


def scaled(factor, least):
    return lambda s, b, h, i, j: s * factor + (j - i).clamp(min=least) / 50


def bucket(distance):
    large = 8 + (torch.log(distance.float() / 8 + 1e-6) / math.log(16) * 8).int()
    return torch.where(distance < 8, distance, large.clamp(max=15))


MASKS = {
    "dilated": near(60, 3),
    "neighbourhood": neighbours(8),
    "by head": lambda b, h, i, j: torch.where(h < 2, i >= j, i <= j),
    "rows that see nothing": lambda b, h, i, j: (i > 5) & (j * 2 < i),
    "packed sequences with prefixes": lambda b, h, i, j: (
        ((j < LENGTHS[b]) | (i >= j)) & (IDS[b, i] == IDS[b, j] - (h % 2))
    ),
    "blocks": blocks(-64),
    "a table": lambda b, h, i, j: ALLOWED[i % 7 - 7, (j - i) % 9],
    "of queries alone": lambda b, h, i, j: (i * h) % 3 == 0,
}
SCORES = {
    "slopes": lambda s, b, h, i, j: s + SLOPES[h] * (j - i) / 9,
    "soft cap and more": lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + s,
    "relative": lambda s, b, h, i, j: s + TABLE[h, j - i + QUERIES - 1],
    "buckets": lambda s, b, h, i, j: s + BUCKETS[bucket((i - j).abs()), h],
    "signed buckets": lambda s, b, h, i, j: s + BUCKETS[bucket((i - j).abs()) // 2 + torch.where(j > i, 8, 0), h],
    "an image": lambda s, b, h, i, j: s + IMAGE[h, i // 8 - j // 8 + 21, i % 8 - j % 8 + 7],
    "hidden": lambda s, b, h, i, j: torch.where(i + 20 >= j, s * SLOPES[h], -float("inf")),
    "product": lambda s, b, h, i, j: s * torch.sigmoid(s) * SLOPES[h] ** 2 + PER_KEY[j],
    "of queries": lambda s, b, h, i, j: s * PER_QUERY[i % 3, h].exp(),
    "a tensor": lambda s, b, h, i, j: s * s * FULL[b, h, i, j] / 9 * SLOPES[h].exp(),
    "numbers": scaled(0.7, -20),
}
BOTH = {name: (mask, None) for name, mask in MASKS.items()} | {name: (None, score) for name, score in SCORES.items()}
BOTH["both"] = MASKS["dilated"], SCORES["buckets"]
BIASES = {
    "ALiBi": (Causal(), ALiBi(SLOPES), None),
    "dense": (None, FULL.bfloat16(), None),
    "dense, of heads and keys": (MASKS["dilated"], made(1, HEADS, 1, KEYS, dtype=torch.float16), None),
    "rows and columns": (None, RelativePosition(made(BATCH, HEADS, QUERIES, 17), made(BATCH, 1, QUERIES, 10)), None),
    "a soft cap and more": (None, (ALiBi(SLOPES), SCORES["product"]), 2.0),
}


def call_of(name, dtype, head=16, values=16):
    """The operator's arguments."""
    sizes = ((HEADS, QUERIES, head), (KEY_HEADS, KEYS, head), (KEY_HEADS, KEYS, values))
    q, k, v = (made(BATCH, *size, dtype=dtype) for size in sizes)
    mask, bias, softcap = BIASES.get(name) or (*BOTH[name], None)
    return AttentionCall(*lowered(q, k, v, mask, bias, None, softcap, None, 0.0, "bhsd")[:13])


def gradient_call(call, out, lse):
    rest = (call.mask_tensors, call.bias_tensors, call.mask, call.bias, call.scale, call.softcap, False)
    return GradientCall(made(*out.shape, dtype=out.dtype), None, *call[:3], out, lse, *rest)


def bias_call(call, delta):
    """The call of the gradients of all floating tensors of a bias."""
    wanted = [number for number, x in enumerate(call.bias_tensors) if x.is_floating_point()]
    return BiasCall(call.gradient, delta, *call[2:5], call.lse, *call[7:13], wanted)
