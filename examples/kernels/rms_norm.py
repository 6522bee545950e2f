"""RMS norm and its gradients in Triton: each row is read once and written once.

Forward: ``x * rsqrt(mean(x**2) + eps) * weight`` over the last dimension. A program holds a tile of whole rows in registers
between the reduction and the result, so the time is that of copying ``x``: 2 elements of memory traffic for each of its
own, 4 bytes in bfloat16, which makes 125 us for 32768 rows of 4096 at 4.3 TB/s.

Backward: with ``n = x * rstd`` and ``h = grad * weight``, the gradient of ``x`` is ``(h - n * mean(n * h)) * rstd`` and
that of ``weight`` the sum of ``grad * n`` over rows. ``rstd`` is computed again: both means come from one reduction over a row
that is read anyway, which is cheaper than storing it. Memory traffic is 3 elements for each of ``x``, 6 bytes in
bfloat16 (187 us), and the partial sums of ``weight``'s gradient (see ``rows.py``), which are 1% of that::

    python examples/kernels/rms_norm.py

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467; the gradients
follow by the chain rule.
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


@opkit.custom_op("kernels::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Divide ``x`` by its root mean square over the last dimension, then scale it by ``weight``.

    Args:
        x: ``(*batch, d)``, any floating dtype.
        weight: ``(d,)``, any floating dtype.
        eps: added to the mean square.

    Returns:
        ``(*batch, d)`` in the dtype of ``x``; computed in float32, or float64 for float64 ``x``.
    """
    scale = torch.rsqrt(rows.wide(x).square().mean(-1, keepdim=True) + eps)
    return (rows.wide(x) * scale * weight).to(x.dtype)


@opkit.custom_op("kernels::rms_norm_backward")
def rms_norm_backward(
    grad: Float[Tensor, "*batch d"], x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float, programs: int
) -> tuple[Float[Tensor, "*batch d"], Tensor]:
    """The gradient of ``x``, and ``programs`` partial sums over rows of that of ``weight``.

    Args:
        grad: ``(*batch, d)``, the gradient of the norm.
        x: ``(*batch, d)``, any floating dtype.
        weight: ``(d,)``, any floating dtype.
        eps: added to the mean square.
        programs: how many partial sums; the ``p``-th is over rows ``p``, ``p + programs``, ...

    Returns:
        ``(*batch, d)`` in the dtype of ``x``, and ``(programs, d)`` in float32, or float64 for float64 ``x``.
    """
    scale = torch.rsqrt(rows.wide(x).square().mean(-1, keepdim=True) + eps)
    normal, h = rows.wide(x) * scale, rows.wide(grad) * weight
    dx = (h - normal * (normal * h).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), rows.partial_sums(rows.wide(grad) * normal, programs)


# Two passes over a row, the second from the cache: fewer registers than holding it takes, and so more rows at a time.
@triton.jit
def _rms_norm(x, weight, out, x_stride_m2, batch, d: tl.constexpr, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = within(row, column, batch, d, ROWS)
        at = row[:, None] * x_stride_m2 + column[None, :]
        a = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += a * a
    scale = tl.rsqrt(tl.sum(squares, 1) / d + eps)
    for start in tl.range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = within(row, column, batch, d, ROWS)
        at = row[:, None] * x_stride_m2 + column[None, :]
        a = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + column, mask=column < d, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(out + row[:, None] * d + column[None, :], a * scale[:, None] * w[None, :], mask=inside)


# tl.join puts two terms side by side, so that one reduction across warps makes both sums. STAGES - 1 tiles of both inputs
# are on their way to shared memory while one is computed. Where registers do not hold a row of everything (BLOCK > 8192),
# the weight is not held, and the inputs are read again, from the cache, after the reduction.
@triton.jit
def _rms_norm_backward(
    grad, x, weight, dx, partial, batch, d, eps, programs,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK if TILE > BLOCK else 1
    HELD: tl.constexpr = BLOCK <= 8192
    ONCE: tl.constexpr = "" if HELD else "evict_last"
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if HELD:
        w = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
    for first in tl.range(program, batch, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS) * programs
        at = row[:, None] * d + column[None, :]
        inside = (row < batch)[:, None] & (column < d)[None, :]
        a = tl.load(x + at, mask=inside, other=0.0, eviction_policy=ONCE).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy=ONCE).to(tl.float32)
        if not HELD:
            w = tl.load(weight + column, mask=column < d, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares, products = tl.split(tl.sum(tl.join(a * a, a * (g * w[None, :])), 1))
        scale = tl.rsqrt(squares / d + eps)
        if not HELD:
            a = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            w = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
        normal = a * scale[:, None]
        change = g * w[None, :] - normal * (scale * products / d)[:, None]
        tl.store(dx + at, change * scale[:, None], mask=inside)
        total += g * normal
    tl.store(partial + program * d + column, tl.sum(total, 0), mask=column < d)


rms_norm.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _rms_norm,
        grid=lambda batch, ROWS: triton.cdiv(batch, ROWS),
        configs=rows.CHUNKED,
        prune=rows.cut,
        examples=[{"x": f"bf16[{n}, {d}]", "weight": f"bf16[{d}]", "eps": 1e-6} for n, d in SHAPES],
    ),
    when=lambda x: x.dim() > 1 and x.shape[-1] <= LONGEST,
    dtypes=rows.LOW,
)

rms_norm_backward.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _rms_norm_backward,
        grid=lambda programs: programs,
        outputs=("dx", "partial"),
        BLOCK=lambda d: triton.next_power_of_2(max(d, 1)),
        configs=rows.PERSISTENT,
        prune=lambda configs, d: rows.fitting(configs, d, 4096, 8192),
        examples=[
            {"grad": f"bf16[{n}, {d}]", "x": f"bf16[{n}, {d}]", "weight": f"bf16[{d}]", "eps": 1e-6, "programs": 264}
            for n, d in SHAPES
        ],
    ),
    when=lambda x: x.shape[-1] <= LONGEST_BACKWARD,
    dtypes=rows.LOW,
)


def _save(ctx, inputs, output):
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx, grad):
    x, weight = ctx.saved_tensors
    dx, partial = rms_norm_backward(grad, x, weight, ctx.eps, rows.programs(x))
    return dx, rows.column_sums(partial, weight.dtype), None


rms_norm.register_autograd(_gradients, setup_context=_save)


def main() -> None:
    """Compare the norm and its gradients with torch's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight = torch.randn(512, 1000, device=device), torch.randn(1000, device=device)
    inputs = [each.requires_grad_() for each in (x, weight)]
    ours, theirs = rms_norm(x, weight), torch.nn.functional.rms_norm(x, [1000], weight, 1e-6)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), rtol=1e-4, atol=1e-4
    )
    print(rms_norm.select(x, weight))


if __name__ == "__main__":
    main()
