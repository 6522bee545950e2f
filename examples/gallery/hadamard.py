"""Walsh-Hadamard transform of the last dimension: ``y = x H / sqrt(d)``, in ``d log2(d)`` additions for each row.

``H`` is the Hadamard matrix of order ``d``, a power of two, with elements 1 and -1 (Sylvester's order). Rotations by it
spread outliers over all features, so that activations and weights can be quantised (QuaRot,
https://arxiv.org/abs/2404.00456). The transform is its own inverse and its own transpose, so the gradient is the operator
again::

    python examples/gallery/hadamard.py
"""

import functools

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::hadamard")
def hadamard(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Return the transform of each row; ``d`` must be a power of two."""
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ValueError(f"gallery::hadamard: x has {d} features, and a power of two is expected; pad x with zeros.")
    y = x.reshape(-1, d)
    half = 1
    while half < d:
        y = y.reshape(-1, d // (2 * half), 2, half)
        left, right = y.unbind(2)
        y = torch.stack((left + right, left - right), 2)
        half *= 2
    return y.reshape(x.shape) * d**-0.5


hadamard.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
hadamard.register_autograd(lambda ctx, grad: hadamard(grad))

# Two steps at a time, so that a row, which stays in the cache, is read half as often.
SOURCE = """
static void row(const T* x, T* out, opk_acc* y, int64_t d, opk_acc scale) {
    for (int64_t j = 0; j < d; j++) y[j] = (opk_acc)x[j] * scale;
    int64_t step = 1;
    for (; step * 4 <= d; step *= 4)
        for (int64_t i = 0; i < d; i += 4 * step)
            for (int64_t j = i; j < i + step; j++) {
                const opk_acc a = y[j] + y[j + step], b = y[j] - y[j + step];
                const opk_acc e = y[j + 2 * step] + y[j + 3 * step], f = y[j + 2 * step] - y[j + 3 * step];
                y[j] = a + e;
                y[j + step] = b + f;
                y[j + 2 * step] = a - e;
                y[j + 3 * step] = b - f;
            }
    if (step < d)
        for (int64_t j = 0; j < step; j++) {
            const opk_acc a = y[j], b = y[j + step];
            y[j] = a + b;
            y[j + step] = a - b;
        }
    for (int64_t j = 0; j < d; j++) out[j] = (T)y[j];
}

void hadamard(const T* x, T* out, int64_t batch, int64_t d) {
    if (d < 1 || (d & (d - 1))) {
        opk_fail("x has %lld features, and a power of two is expected; pad x with zeros", (long long)d);
        return;
    }
    const opk_acc scale = 1 / sqrt((double)d);
    #pragma omp parallel if (batch * d > 1 << 15)
    {
        opk_acc* y = (opk_acc*)malloc(d * sizeof(opk_acc));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) row(x + i * d, out + i * d, y, d, scale);
        free(y);
    }
}
"""
hadamard.register_kernel("cpu", opkit.c_kernel(SOURCE, dtypes=[torch.float32, torch.float64, torch.bfloat16]))


# A program has some rows in registers, and computes in float32. A sum of two elements that lie apart is a step's addition, and
# with the second one's sign changed its subtraction. One warp needs no shared memory: with four, 4,096 features take three times
# as long.
@triton.jit
def _hadamard(x, out, x_numel, scale, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, at < x_numel, other=0.0).to(tl.float32)
    second = tl.arange(0, 2)[None, :, None] == 1
    for bit in tl.static_range(BITS):
        y = tl.reshape(y, [BLOCK >> (bit + 1), 2, 1 << bit])
        difference = tl.sum(tl.where(second, -y, y), 1, keep_dims=True)
        y = tl.where(second, difference, tl.sum(y, 1, keep_dims=True))
    tl.store(out + at, tl.reshape(y, [BLOCK]) * scale, at < x_numel)


TRITON = opkit.triton_kernel(
    _hadamard,
    grid=lambda x_numel, BLOCK: triton.cdiv(x_numel, BLOCK),
    scale=lambda d: d**-0.5,
    BITS=lambda d: d.bit_length() - 1,
    BLOCK=lambda d: max(d, 1024),
    num_warps=1,
    examples=[{"x": "bf16[4096, 4096]"}, {"x": "fp32[4096, 128]"}],
)
hadamard.register_kernel(
    "cuda",
    TRITON,
    when=lambda x: 0 < x.shape[-1] <= 4096 and x.shape[-1].bit_count() == 1,
    dtypes=[torch.float32, torch.bfloat16, torch.float16],
)

OPKIT_CHECKS = {"gallery::hadamard": {"args": (tensor("*batch 64", (torch.float32, torch.float64, torch.bfloat16)),)}}
SIZES = [(2048, 1024), (512, 4096)]
GPU_SIZES = [(16384, 4096), (65536, 128)]


def arguments(rows: int, d: int) -> tuple[Tensor]:
    """Return activations of ``rows`` tokens."""
    return (torch.randn(rows, d),)


def alternative(x: Tensor) -> Tensor:
    """Two products with Hadamard matrices of order ``sqrt(d)``, whose Kronecker product is ``H``."""
    bits = x.shape[-1].bit_length() - 1
    left, right = (_matrix(2**each, x.device) for each in (bits // 2, bits - bits // 2))
    return (left @ x.reshape(-1, len(left), len(right)) @ right).reshape(x.shape)


@functools.cache
def _matrix(order: int, device: torch.device) -> Tensor:
    one = torch.ones(1, 1, device=device)
    while len(one) < order:
        one = torch.cat((torch.cat((one, one), 1), torch.cat((one, -one), 1)))
    return one * order**-0.5


def main() -> None:
    """Compare with products of matrices, and transform twice."""
    (x,) = arguments(64, 512)
    torch.testing.assert_close(hadamard(x), alternative(x))
    torch.testing.assert_close(hadamard(hadamard(x)), x)


if __name__ == "__main__":
    main()
