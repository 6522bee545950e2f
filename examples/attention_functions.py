"""Attention with masks, scores and transforms of rows that are functions, each compared with a formula in float64.

Run it with ``python examples/attention_functions.py``. A function gets numbers of batch, head, query and key, and the score or
the row, and reads whatever it needs around it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import opkit

BATCH, HEADS, SEQUENCE, HEAD_SIZE = 2, 4, 192, 32
Function = Callable[..., Tensor]


class Example(NamedTuple):
    """Functions, and the tensors that they capture and that are trained; ``key`` is ``query``, which both have the same one."""

    mask: Function | None = None
    score: Function | None = None
    trained: tuple[Tensor, ...] = ()
    query: Function | None = None
    output: Function | None = None


# ---- scores ----------------------------------------------------------------------------------------------------------


def alibi() -> Example:
    """Linear biases: the farther a key, the less it counts (Press et al., 2022, https://arxiv.org/abs/2108.12409)."""
    slopes = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
    return Example(causal, lambda score, b, h, i, j: score - slopes[h] * (i - j))


def relative_position() -> Example:
    """A learned number for each head and distance (Shaw et al., 2018, https://arxiv.org/abs/1803.02155)."""
    table = torch.randn(HEADS, 2 * SEQUENCE - 1)
    return Example(score=lambda score, b, h, i, j: score + table[h, j - i + SEQUENCE - 1], trained=(table,))


def t5_bias() -> Example:
    """A learned number for each head and bucket of distances, logarithmic ones far away (https://arxiv.org/abs/1910.10683)."""
    buckets, exact, farthest = 32, 16, 128
    table = torch.randn(buckets, HEADS)

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (i - j).clamp(min=0)
        far = torch.log(distance.clamp(min=1) / exact) * ((buckets - exact) / math.log(farthest / exact))
        bucket = torch.where(distance < exact, distance, (exact + far.int()).clamp(max=buckets - 1))
        return score + table[bucket, h]

    return Example(causal, score, (table,))


def soft_cap() -> Example:
    """Bounded logits (Gemma 2, https://arxiv.org/abs/2408.00118)."""
    return Example(causal, lambda score, b, h, i, j: 20.0 * torch.tanh(score / 20.0))


def temperature() -> Example:
    """A learned factor for each head, and a gate that grows with the score."""
    factors = torch.rand(HEADS) + 0.5
    return Example(score=lambda score, b, h, i, j: score * factors[h] * torch.sigmoid(score), trained=(factors,))


# ---- masks -----------------------------------------------------------------------------------------------------------


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Each query sees the keys up to its own."""
    return i >= j


def window() -> Example:
    """The nearest 32 keys of the past; the number may change from call to call."""
    width = 32
    return Example(lambda b, h, i, j: (i >= j) & (i - j < width))


def dilated() -> Example:
    """Every third key of the past (Child et al., 2019, https://arxiv.org/abs/1904.10509)."""
    return Example(lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0))


def packed_documents() -> Example:
    """Documents of several lengths, packed one after another; each is causal."""
    lengths = torch.tensor([50, 7, 101, 34])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return Example(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))


def prefix() -> Example:
    """All see the prefix of their sequence, and are causal after it (PrefixLM, https://arxiv.org/abs/1910.10683)."""
    lengths = torch.tensor([40, 96])
    return Example(lambda b, h, i, j: (j < lengths[b]) | (i >= j))


def prefixes_of_documents() -> Example:
    """Both: packed documents, each with a prefix that all of its queries see."""
    starts, prefixes = torch.tensor([0, 50, 57, 158]), torch.tensor([20, 3, 40, 10])
    ids = torch.bucketize(torch.arange(SEQUENCE), starts, right=True) - 1
    return Example(lambda b, h, i, j: (ids[i] == ids[j]) & ((j - starts[ids[j]] < prefixes[ids[j]]) | (i >= j)))


def neighbourhood() -> Example:
    """The 7 x 7 pixels around each pixel of an image of 12 x 16 (NATTEN, https://arxiv.org/abs/2204.07143)."""
    wide, radius = 16, 3

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i // wide - j // wide).abs() <= radius) & ((i % wide - j % wide).abs() <= radius)

    return Example(mask)


def sliding_tiles() -> Example:
    """A video of 6 frames of 4 x 8, in tiles of 2 x 2 x 4: each sees the tiles next to its own (https://arxiv.org/abs/2502.04507)."""
    high, wide = 4, 8

    def tile(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return at // (high * wide) // 2, at // wide % high // 2, at % wide // 4

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = [(x - y).abs() <= 1 for x, y in zip(tile(i), tile(j), strict=True)]
        return near[0] & near[1] & near[2]

    return Example(mask)


def tree() -> Example:
    """Speculative decoding: drafted tokens are a tree after the sequence, and each sees the tokens on its way to the root."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5])
    begin = SEQUENCE - len(parents)
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        drafted = ancestors[(i - begin).clamp(min=0), (j - begin).clamp(min=0)]
        return (i >= j) & ((j < begin) | drafted)

    return Example(mask)


# ---- functions of rows -----------------------------------------------------------------------------------------------


def angles(base: float = 10000.0) -> Tensor:
    """The angle of each position and pair of channels."""
    return torch.outer(torch.arange(SEQUENCE), base ** -torch.arange(0, 1, 2 / HEAD_SIZE))


def rotary() -> Example:
    """Rotated pairs of channels, one of each half (Su et al., 2021, https://arxiv.org/abs/2104.09864; as in Llama)."""
    cos, sin = angles().cos(), angles().sin()

    def rotate(x: Tensor, b: Tensor, h: Tensor, at: Tensor) -> Tensor:
        left, right = x.chunk(2)
        return torch.cat((left * cos[at] - right * sin[at], right * cos[at] + left * sin[at]))

    return Example(causal, query=rotate)


def rotary_of_neighbours() -> Example:
    """The same for pairs of neighbours, in the first half of the channels only (GPT-J)."""
    pairs = HEAD_SIZE // 4
    cos, sin = angles()[:, :pairs].cos(), angles()[:, :pairs].sin()

    def rotate(x: Tensor, b: Tensor, h: Tensor, at: Tensor) -> Tensor:
        even, odd = x[: 2 * pairs : 2], x[1 : 2 * pairs : 2]
        rotated = torch.stack((even * cos[at] - odd * sin[at], odd * cos[at] + even * sin[at]), dim=-1)
        return torch.cat((rotated.flatten(), x[2 * pairs :]))

    return Example(causal, query=rotate)


def query_key_norm() -> Example:
    """Queries and keys divided by their root mean square, with a learned weight (Henry et al., 2020; as in Qwen 3)."""
    weight = torch.rand(HEAD_SIZE) + 0.5
    return Example(causal, None, (weight,), lambda x, b, h, at: x * torch.rsqrt(x.square().mean() + 1e-6) * weight)


def gated() -> Example:
    """A gate for each channel of the result (Qiu et al., 2025, https://arxiv.org/abs/2505.06708)."""
    gate = torch.randn(BATCH, HEADS, SEQUENCE, HEAD_SIZE)
    return Example(causal, None, (gate,), output=lambda x, b, h, i: x * torch.sigmoid(gate[b, h, i]))


EXAMPLES: dict[str, Callable[[], Example]] = {
    each.__name__: each
    for each in (
        alibi, relative_position, t5_bias, soft_cap, temperature, window, dilated, packed_documents, prefix,
        prefixes_of_documents, neighbourhood, sliding_tiles, tree, rotary, rotary_of_neighbours, query_key_norm, gated,
    )
}  # fmt: skip


# ---- what they are compared with -------------------------------------------------------------------------------------


def formula(q: Tensor, k: Tensor, v: Tensor, example: Example) -> Tensor:
    """Return attention in float64, with the functions evaluated for all queries and keys."""
    q, k = (x if example.query is None else by_rows(example.query, x) for x in (q.double(), k.double()))
    sizes = (*q.shape[:3], k.shape[2])
    b, h, i, j = (torch.arange(n).reshape(-1, *[1] * (3 - axis)) for axis, n in enumerate(sizes))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if example.score is not None:
        logits = example.score(logits, b, h, i, j)
    if example.mask is not None:
        logits = logits.masked_fill(~example.mask(b, h, i, j), -torch.inf)
    out = logits.softmax(-1) @ v.double()
    return out if example.output is None else by_rows(example.output, out)


def by_rows(function: Function, x: Tensor) -> Tensor:
    """Return what a function makes of each row, one call after another."""
    places = torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1]))
    return torch.stack([function(x[tuple(place)], *place) for place in places]).reshape(x.shape)


def errors(name: str, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return the largest differences of an example's result, and of its gradients, from the formula's."""
    torch.manual_seed(0)
    example = EXAMPLES[name]()
    inputs = [torch.randn(BATCH, HEADS, SEQUENCE, HEAD_SIZE).to(dtype).requires_grad_() for _ in range(3)]
    wanted = [*inputs, *(x.requires_grad_() for x in example.trained)]
    q, k, v = inputs
    mask, bias, query, output = example.mask, example.score, example.query, example.output
    found = opkit.attention(q, k, v, mask=mask, bias=bias, query=query, key=query, output=output)
    right = formula(q, k, v, example)
    gradient = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad(x, wanted, gradient.to(x.dtype)) for x in (found, right))
    return {
        "result": _difference(found, right),
        "gradients": max(_difference(x, y) for x, y in zip(mine, theirs, strict=True)),
    }


def _difference(found: Any, right: Tensor) -> float:
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-12))


if __name__ == "__main__":
    for name in EXAMPLES:
        found = errors(name)
        print(f"{name:24}result {found['result']:.1e}   gradients {found['gradients']:.1e}")
