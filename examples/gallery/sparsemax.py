"""Sparsemax: the nearest point of the probability simplex, a softmax whose small results are exactly 0.

``y = max(x - tau, 0)``, where ``tau`` makes the sum 1 (Martins and Astudillo, https://arxiv.org/abs/1602.02068). The
reference sorts rows; the kernel raises ``tau`` from a lower bound until it does not change, in a few passes over the elements
that are above it (Michelot, 1986). The gradient is ``grad`` minus its mean, over the elements that are not 0::

    python examples/gallery/sparsemax.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::sparsemax")
def sparsemax(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Return the point for each row; a row with NaN, with infinity or of -inf alone gives NaN."""
    if x.shape[-1] == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    x = x - x.amax(-1, keepdim=True)
    ordered = x.sort(-1, descending=True).values
    place = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    excess = ordered.cumsum(-1) - 1
    count = (place * ordered > excess).sum(-1, keepdim=True)
    tau = excess.gather(-1, (count - 1).clamp(min=0)) / count
    return (x - tau).clamp(min=0).contiguous()


sparsemax.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))


def _save(ctx, inputs, output):
    ctx.save_for_backward(output)


def _gradient(ctx, grad):
    support = ctx.saved_tensors[0] > 0
    mean = torch.where(support, grad, 0).sum(-1, keepdim=True) / support.sum(-1, keepdim=True)
    return torch.where(support, grad - mean, 0)


sparsemax.register_autograd(_gradient, setup_context=_save)

# After one pass that finds the largest element, few are within 1 of it: only those can be above tau.
SOURCE = """
static void row(const T* x, T* out, T* near, int64_t d) {
    T largest = x[0];
    bool finite = true;
    for (int64_t j = 0; j < d; j++) {
        largest = x[j] > largest ? x[j] : largest;
        finite &= x[j] == x[j];
    }
    finite &= largest < INFINITY && largest > -INFINITY;
    int64_t count = 0;
    opk_acc sum = -1, tau = NAN;
    for (int64_t j = 0; finite && j < d; j++)
        if (x[j] - largest > -1) sum += near[count++] = x[j] - largest;
    for (int64_t before = count + 1; finite && count < before;) {
        tau = sum / count;
        before = count;
        count = 0;
        sum = -1;
        for (int64_t j = 0; j < before; j++)
            if (near[j] > tau) sum += near[count++] = near[j];
    }
    for (int64_t j = 0; j < d; j++) {
        const T y = x[j] - largest - tau;
        out[j] = y < 0 ? 0 : y;
    }
}

void sparsemax(const T* x, T* out, int64_t batch, int64_t d) {
    if (d == 0) return;
    #pragma omp parallel if (batch * d > 1 << 14)
    {
        T* near = (T*)malloc(d * sizeof(T));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) row(x + i * d, out + i * d, near, d);
        free(near);
    }
}
"""
sparsemax.register_kernel("cpu", opkit.c_kernel(SOURCE))


# A program has a row in registers, and computes in float32. At least the largest element is above tau, which starts at -1.
@triton.jit
def _sparsemax(x, out, d, BLOCK: tl.constexpr):
    at, column = tl.program_id(0).to(tl.int64) * d, tl.arange(0, BLOCK)
    value = tl.load(x + at + column, column < d, other=-float("inf")).to(tl.float32)
    value -= tl.max(value, 0)
    invalid = tl.sum(((value != value) & (column < d)).to(tl.int32), 0) > 0
    before, count = tl.full((), BLOCK + 2, tl.int32), tl.full((), BLOCK + 1, tl.int32)
    tau = tl.full((), -1.0, tl.float32)
    while count < before:
        above = value > tau
        before = count
        count = tl.sum(above.to(tl.int32), 0)
        tau = (tl.sum(tl.where(above, value, 0.0), 0) - 1) / count
    y = tl.where(value > tau, value - tau, 0.0)
    tl.store(out + at + column, tl.where(invalid, float("nan"), y), column < d)


TRITON = opkit.triton_kernel(
    _sparsemax,
    grid=lambda batch: batch,
    BLOCK=lambda d: triton.next_power_of_2(d),
    num_warps=lambda BLOCK: min(max(BLOCK // 512, 1), 16),
    examples=[{"x": "bf16[4096, 4096]"}, {"x": "fp32[512, 32768]"}],
)
sparsemax.register_kernel(
    "cuda", TRITON, when=lambda x: x.shape[-1] <= 32768, dtypes=[torch.float32, torch.bfloat16, torch.float16]
)

OPKIT_CHECKS = {"gallery::sparsemax": {"args": (tensor("*batch d", (torch.float32, torch.float64)),)}}
SIZES = [(512, 1000), (16, 32_000)]
GPU_SIZES = [(16384, 1000), (4096, 32_000)]


def arguments(rows: int, d: int) -> tuple[Tensor]:
    """Return logits."""
    return (2 * torch.randn(rows, d),)


def alternative(x: Tensor) -> Tensor:
    """``topk`` in place of a whole sort, of as many elements as are within 1 of the largest in any row."""
    x = x - x.amax(-1, keepdim=True)
    ordered = x.topk(int((x > -1).sum(-1).max())).values
    place = torch.arange(1, ordered.shape[-1] + 1, dtype=x.dtype, device=x.device)
    excess = ordered.cumsum(-1) - 1
    count = (place * ordered > excess).sum(-1, keepdim=True)
    return (x - excess.gather(-1, count - 1) / count).clamp(min=0)


gpu_alternative = torch.compile(alternative)


def main() -> None:
    """Rows sum to 1 and have zeros; gradients agree with the reference's."""
    (x,) = arguments(5, 40)
    x.requires_grad_()
    result = sparsemax(x)
    torch.testing.assert_close(result.sum(-1), torch.ones(5))
    assert (result == 0).any(-1).all()
    results = result, sparsemax.reference(x)
    torch.testing.assert_close(*results)
    ours, expected = (torch.autograd.grad(each.square().sum(), x)[0] for each in results)
    torch.testing.assert_close(ours, expected)


if __name__ == "__main__":
    main()
