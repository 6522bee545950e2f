"""Sparsemax: the nearest point of the probability simplex, a softmax whose small results are exactly 0.

``y = max(x - tau, 0)``, where ``tau`` makes the sum 1 (Martins and Astudillo, https://arxiv.org/abs/1602.02068). The
reference sorts rows; the kernel raises ``tau`` from a lower bound until it does not change, in a few passes over the elements
that are above it (Michelot, 1986). The gradient is ``grad`` minus its mean, over the elements that are not 0::

    python examples/gallery/sparsemax.py
"""

import torch
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

OPKIT_CHECKS = {"gallery::sparsemax": {"args": (tensor("*batch d", (torch.float32, torch.float64)),)}}
SIZES = [(512, 1000), (16, 32_000)]


def arguments(rows: int, d: int) -> tuple[Tensor]:
    """Return logits."""
    return (2 * torch.randn(rows, d),)


def alternative(x: Tensor) -> Tensor:
    """``topk`` in place of a whole sort, of as many elements as are within 1 of the largest in any row."""
    x = x - x.amax(-1, keepdim=True)
    ordered = x.topk(int((x > -1).sum(-1).max())).values
    place = torch.arange(1, ordered.shape[-1] + 1, dtype=x.dtype)
    excess = ordered.cumsum(-1) - 1
    count = (place * ordered > excess).sum(-1, keepdim=True)
    return (x - excess.gather(-1, count - 1) / count).clamp(min=0)


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
