"""Softmax over the last dimension and its gradient in Triton: short rows once over memory, long rows online.

Forward: ``exp(x - max) / sum(exp(x - max))``. A row of at most 32768 elements stays in registers: 2 elements of memory traffic
for each of ``x``, 4 bytes in bfloat16, which makes 125 us for 32768 rows of 4096 at 4.3 TB/s. A longer row is read twice:
first for the maximum and the sum together, where the sum is scaled down each time that the maximum grows, then, from its
end to its beginning, for the result. What was read last is read first the second time, from the cache; memory traffic is
between 2 and 3 elements for each of ``x``.

Backward, from the result ``y``: ``(grad - sum(grad * y)) * y``. 3 elements of memory traffic for each of ``x`` where rows have at
most 16384 elements, and up to 5 where they are longer::

    python examples/kernels/softmax.py

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
"""

import rows
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from rows import within
from torch import Tensor

import opkit

LONGEST, LONGEST_BACKWARD = 32768, 16384
SHAPES = [(32768, 1024), (16384, 4096), (8192, 8192)]
LONG = [(1024, 131072)]
CHUNKS = [
    {"BLOCK": 8 * threads, "PIECES": pieces, "num_warps": threads // rows.LANES}
    for threads, pieces in ((512, 2), (1024, 4), (1024, 2), (512, 4))
]
CHUNKS_BACKWARD = [
    {"BLOCK": block, "BACKWARDS": backwards, "num_warps": threads // rows.LANES}
    for block, threads, backwards in ((4096, 512, True), (16384, 1024, True), (16384, 1024, False), (8192, 1024, True))
]


@opkit.custom_op("kernels::softmax")
def softmax(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Exponentials of each row, scaled so that they add up to 1.

    Args:
        x: ``(*batch, d)``, any floating dtype. A row of which every element is -inf gives NaN, as in torch.

    Returns:
        ``(*batch, d)`` in the dtype of ``x``; computed in float32, or float64 for float64 ``x``.
    """
    return rows.wide(x).softmax(-1).to(x.dtype)


@opkit.custom_op("kernels::softmax_backward")
def softmax_backward(grad: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """The gradient of softmax's argument, from its result ``y`` and the gradient of that.

    Args:
        grad: ``(*batch, d)``, any floating dtype.
        y: ``(*batch, d)``, what softmax returned.

    Returns:
        ``(*batch, d)`` in the dtype of ``y``; computed in float32, or float64 for float64 ``y``.
    """
    g, p = rows.wide(grad), rows.wide(y)
    return ((g - (g * p).sum(-1, keepdim=True)) * p).to(y.dtype)


@triton.jit
def _softmax(x, out, x_stride_m2, batch, d: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    ROWS: tl.constexpr = TILE // BLOCK if TILE > BLOCK else 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = within(row, column, batch, d, ROWS)
    at = row[:, None] * x_stride_m2 + column[None, :]
    a = tl.load(x + at, mask=inside, other=-float("inf")).to(tl.float32)
    powers = tl.exp(a - tl.max(a, 1)[:, None])
    tl.store(out + row[:, None] * d + column[None, :], powers * (1.0 / tl.sum(powers, 1))[:, None], mask=inside)


# What a thread has of a tile is one column of each piece, so that the sum is scaled once for all pieces, by the thread alone.
@triton.jit
def _softmax_long(x, out, d: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    begin = tl.program_id(0) * d
    at = tl.arange(0, PIECES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, d, PIECES * BLOCK):
        column = start + at
        inside = (column < d) | (d % (PIECES * BLOCK) == 0)
        a = tl.load(x + begin + column, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        larger = tl.maximum(largest, tl.max(a, 0))
        base = _finite(larger)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(a - base[None, :]), 0)
        largest = larger
    base = _finite(tl.max(largest, 0))
    scale = 1.0 / tl.sum(total * tl.exp(largest - base), 0)
    for back in tl.range(0, d, PIECES * BLOCK):
        column = (d - 1) // (PIECES * BLOCK) * (PIECES * BLOCK) - back + at
        inside = (column < d) | (d % (PIECES * BLOCK) == 0)
        a = tl.load(x + begin + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(out + begin + column, tl.exp(a - base) * scale, mask=inside)


@triton.jit
def _finite(largest):
    # -inf less -inf would be NaN.
    return tl.where(largest == -float("inf"), 0.0, largest)


# Two passes over a row, as in rms_norm.py.
@triton.jit
def _softmax_backward(grad, y, out, batch, d: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    products = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = within(row, column, batch, d, ROWS)
        at = row[:, None] * d + column[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        products += g * tl.load(y + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    mean = tl.sum(products, 1)[:, None]
    for start in tl.range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = within(row, column, batch, d, ROWS)
        at = row[:, None] * d + column[None, :]
        p = tl.load(y + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(out + at, (g - mean) * p, mask=inside)


# One program of many threads fills a multiprocessor: with two, what they read would no longer fit into the cache together.
@triton.jit
def _softmax_backward_long(grad, y, out, d: tl.constexpr, BLOCK: tl.constexpr, BACKWARDS: tl.constexpr):
    begin = tl.program_id(0) * d
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, d, BLOCK):
        column = start + at
        inside = (column < d) | (d % BLOCK == 0)
        g = tl.load(grad + begin + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        p = tl.load(y + begin + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += g * p
    mean = tl.sum(total, 0)
    for start in tl.range(0, d, BLOCK):
        column = ((d - 1) // BLOCK * BLOCK - start if BACKWARDS else start) + at
        inside = (column < d) | (d % BLOCK == 0)
        g = tl.load(grad + begin + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        p = tl.load(y + begin + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(out + begin + column, (g - mean) * p, mask=inside)


def _long(function, names, configs):
    """A kernel for rows that are read in chunks."""
    examples = [dict.fromkeys(names, f"bf16[{n}, {d}]") for n, d in LONG]
    return opkit.triton_kernel(function, grid=lambda batch: batch, configs=configs, examples=examples)


# Kernels that were registered later are tried first.
softmax.register_kernel("cuda", _long(_softmax_long, ["x"], CHUNKS), dtypes=rows.LOW)
softmax.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _softmax,
        grid=lambda batch, BLOCK, TILE: triton.cdiv(batch, max(TILE // BLOCK, 1)),
        BLOCK=lambda d: triton.next_power_of_2(max(d, 1)),
        configs=rows.TILES,
        prune=lambda configs, d: rows.fitting(configs, d, 1024, 4096),
        examples=[{"x": f"bf16[{n}, {d}]"} for n, d in SHAPES],
    ),
    when=lambda x: x.dim() > 1 and x.shape[-1] <= LONGEST,
    dtypes=rows.LOW,
)
softmax_backward.register_kernel("cuda", _long(_softmax_backward_long, ["grad", "y"], CHUNKS_BACKWARD), dtypes=rows.LOW)
softmax_backward.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _softmax_backward,
        grid=lambda batch, ROWS: triton.cdiv(batch, ROWS),
        configs=rows.CHUNKED,
        prune=rows.cut,
        examples=[dict.fromkeys(["grad", "y"], f"bf16[{n}, {d}]") for n, d in SHAPES],
    ),
    when=lambda y: y.shape[-1] <= LONGEST_BACKWARD,
    dtypes=rows.LOW,
)


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)


def _gradient(ctx, grad):
    return softmax_backward(grad, *ctx.saved_tensors)


softmax.register_autograd(_gradient, setup_context=_save)


def main() -> None:
    """Compare softmax and its gradient with torch's, of short rows and of long ones."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for d in (1000, 100_000):
        x = torch.randn(64, d, device=device, requires_grad=True)
        grad = torch.randn_like(x)
        ours, theirs = softmax(x), x.softmax(-1)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, x, grad), torch.autograd.grad(theirs, x, grad))
        print(softmax.select(x))


if __name__ == "__main__":
    main()
