"""Layer norm and its gradients in Triton: each row is read once and written once.

Forward: ``(x - mean) * rstd * weight + bias`` over the last dimension, with the variance as the mean square of what is left
after the mean is taken off, both in registers. 2 elements of memory traffic for each of ``x``, 4 bytes in bfloat16: 125 us
for 32768 rows of 4096 at 4.3 TB/s.

Backward: with ``n = (x - mean) * rstd`` and ``h = grad * weight``, the gradient of ``x`` is
``(h - mean(h) - n * mean(n * h)) * rstd``, that of ``weight`` the sum of ``grad * n`` over rows and that of ``bias`` the sum of
``grad``. All four sums over a row come from one reduction, for which each row is first shifted by its first element: without
a shift, ``mean(x**2) - mean(x)**2`` would lose what is small compared with the mean. 3 elements of memory traffic for each of
``x``, 6 bytes in bfloat16 (187 us), and the partial sums of two gradients (see ``rows.py``)::

    python examples/kernels/layer_norm.py

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450; Chan, Golub and LeVeque,
"Algorithms for Computing the Sample Variance", 1983, https://doi.org/10.1080/00031305.1983.10483115, for the shift.
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


@opkit.custom_op("kernels::layer_norm")
def layer_norm(
    x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], bias: Float[Tensor, "d"], eps: float = 1e-5
) -> Float[Tensor, "*batch d"]:
    """Shift and scale each row to mean 0 and variance 1, then to ``bias`` and ``weight``.

    Args:
        x: ``(*batch, d)``, any floating dtype.
        weight: ``(d,)``, any floating dtype.
        bias: ``(d,)``, any floating dtype.
        eps: added to the variance.

    Returns:
        ``(*batch, d)`` in the dtype of ``x``; computed in float32, or float64 for float64 ``x``.
    """
    centred = rows.wide(x) - rows.wide(x).mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight + bias).to(x.dtype)


@opkit.custom_op("kernels::layer_norm_backward")
def layer_norm_backward(
    grad: Float[Tensor, "*batch d"], x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float, programs: int
) -> tuple[Float[Tensor, "*batch d"], Tensor]:
    """The gradient of ``x``, and partial sums over rows of those of ``weight`` and ``bias``.

    Args:
        grad: ``(*batch, d)``, the gradient of the norm.
        x: ``(*batch, d)``, any floating dtype.
        weight: ``(d,)``, any floating dtype.
        eps: added to the variance.
        programs: how many partial sums; the ``p``-th is over rows ``p``, ``p + programs``, ...

    Returns:
        ``(*batch, d)`` in the dtype of ``x``, and ``(2, programs, d)`` in float32, or float64 for float64 ``x``.
    """
    centred = rows.wide(x) - rows.wide(x).mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal, g = centred * scale, rows.wide(grad)
    h = g * weight
    dx = (h - h.mean(-1, keepdim=True) - normal * (normal * h).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), torch.stack([rows.partial_sums(g * normal, programs), rows.partial_sums(g, programs)])


# As in rms_norm.py. The sums are of what is left of a row when its first element is taken from each: with that, little is
# lost where the mean is much larger than the deviation.
@triton.jit
def _layer_norm(
    x, weight, bias, out, x_stride_m2, batch, d: tl.constexpr, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    shift = tl.load(x + row * x_stride_m2, mask=row < batch, other=0.0).to(tl.float32)[:, None]
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = within(row, column, batch, d, ROWS)
        at = row[:, None] * x_stride_m2 + column[None, :]
        a = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        a = tl.where(inside, a - shift, 0.0)
        sums += a
        squares += a * a
    mean = tl.sum(sums, 1) / d
    scale = tl.rsqrt(tl.maximum(tl.sum(squares, 1) / d - mean * mean, 0.0) + eps)
    centre = shift + mean[:, None]
    for start in tl.range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = within(row, column, batch, d, ROWS)
        at = row[:, None] * x_stride_m2 + column[None, :]
        a = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + column, mask=column < d, other=0.0, eviction_policy="evict_last").to(tl.float32)
        b = tl.load(bias + column, mask=column < d, other=0.0, eviction_policy="evict_last").to(tl.float32)
        normal = (a - centre) * scale[:, None] * w[None, :] + b[None, :]
        tl.store(out + row[:, None] * d + column[None, :], normal, mask=inside)


@triton.jit
def _sums(a, h):
    # Sums over rows of a, h, a * a and a * h, from one reduction across warps.
    singles, products = tl.split(tl.sum(tl.join(tl.join(a, h), tl.join(a * a, a * h)), 1))
    sum_a, sum_h = tl.split(singles)
    sum_aa, sum_ah = tl.split(products)
    return sum_a, sum_h, sum_aa, sum_ah


# STAGES and HELD are as in rms_norm.py.
@triton.jit
def _layer_norm_backward(
    grad, x, weight, dx, partial, batch, d: tl.constexpr, eps, programs,
    BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK if TILE > BLOCK else 1
    HELD: tl.constexpr = BLOCK <= 8192
    ONCE: tl.constexpr = "" if HELD else "evict_last"
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    total_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    if HELD:
        w = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
    following = program + tl.arange(0, ROWS) * programs  # the first element of a row is loaded a step ahead
    next_shift = tl.load(x + following * d, mask=following < batch, other=0.0).to(tl.float32)
    for first in tl.range(program, batch, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS) * programs
        at = row[:, None] * d + column[None, :]
        inside = within(row, column, batch, d, ROWS)
        shift = next_shift[:, None]
        following = row + programs * ROWS
        next_shift = tl.load(x + following * d, mask=following < batch, other=0.0).to(tl.float32)
        a = tl.load(x + at, mask=inside, other=0.0, eviction_policy=ONCE).to(tl.float32)
        g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy=ONCE).to(tl.float32)
        if not HELD:
            w = tl.load(weight + column, mask=column < d, other=0.0, eviction_policy="evict_last").to(tl.float32)
        a = tl.where(inside, a - shift, 0.0)
        sum_a, sum_h, sum_aa, sum_ah = _sums(a, g * w[None, :])
        mean = sum_a / d
        scale = tl.rsqrt(tl.maximum(sum_aa / d - mean * mean, 0.0) + eps)
        along = scale * (sum_ah - mean * sum_h) / d
        if not HELD:
            a = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32) - shift
            g = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            w = tl.load(weight + column, mask=column < d, other=0.0).to(tl.float32)
        normal = (a - mean[:, None]) * scale[:, None]
        change = g * w[None, :] - (sum_h / d)[:, None] - normal * along[:, None]
        tl.store(dx + at, change * scale[:, None], mask=inside)
        total_weight += g * normal
        total_bias += g
    tl.store(partial + program * d + column, tl.sum(total_weight, 0), mask=column < d)
    tl.store(partial + (programs + program) * d + column, tl.sum(total_bias, 0), mask=column < d)


layer_norm.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _layer_norm,
        grid=lambda batch, ROWS: triton.cdiv(batch, ROWS),
        configs=rows.CHUNKED,
        prune=rows.cut,
        examples=[
            {"x": f"bf16[{n}, {d}]", "weight": f"bf16[{d}]", "bias": f"bf16[{d}]", "eps": 1e-5} for n, d in SHAPES
        ],
    ),
    when=lambda x: x.dim() > 1 and x.shape[-1] <= LONGEST,
    dtypes=rows.LOW,
)

layer_norm_backward.register_kernel(
    "cuda",
    opkit.triton_kernel(
        _layer_norm_backward,
        grid=lambda programs: programs,
        outputs=("dx", "partial"),
        BLOCK=lambda d: triton.next_power_of_2(max(d, 1)),
        configs=rows.PERSISTENT,
        prune=lambda configs, d: rows.fitting(configs, d, 4096, 8192),
        examples=[
            {"grad": f"bf16[{n}, {d}]", "x": f"bf16[{n}, {d}]", "weight": f"bf16[{d}]", "eps": 1e-5, "programs": 264}
            for n, d in SHAPES
        ],
    ),
    when=lambda x: x.shape[-1] <= LONGEST_BACKWARD,
    dtypes=rows.LOW,
)


def _save(ctx, inputs, output):
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = bias.dtype


def _gradients(ctx, grad):
    x, weight = ctx.saved_tensors
    dx, partial = layer_norm_backward(grad, x, weight, ctx.eps, rows.programs(x))
    dweight, dbias = rows.column_sums(partial, weight.dtype).unbind()
    return dx, dweight, dbias.to(ctx.bias_dtype), None


layer_norm.register_autograd(_gradients, setup_context=_save)


def main() -> None:
    """Compare the norm and its gradients with torch's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((512, 1000), (1000,), (1000,))]
    x, weight, bias = inputs
    ours, theirs = layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, [1000], weight, bias)
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(x)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), rtol=1e-4, atol=1e-4
    )
    print(layer_norm.select(x, weight, bias))


if __name__ == "__main__":
    main()
