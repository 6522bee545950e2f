"""Soft dynamic time warping: a differentiable cost of aligning two sequences, from the costs of pairs of their elements.

``R[i, j] = cost[i, j] + softmin(R[i-1, j], R[i, j-1], R[i-1, j-1])`` with ``softmin(a) = -gamma * log(sum(exp(-a / gamma)))``
(Cuturi and Blondel, https://arxiv.org/abs/1703.01541). The reference goes along antidiagonals; the kernel along rows. The
gradient is the expected alignment, by a recurrence from the end, and has an operator and a kernel of its own::

    python examples/gallery/soft_dtw.py
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor

Costs = Float[Tensor, "batch n m"]
_FAR = 1e10  # instead of infinity, of whose differences there is no gradient


@opkit.custom_op("gallery::soft_dtw")
def soft_dtw(cost: Costs, gamma: float = 1.0) -> Float[Tensor, "batch"]:
    """Return the cost of each pair of sequences, of at least one element; ``gamma`` is above 0."""
    batch, n, m = cost.shape
    if n == 0 or m == 0:
        raise ValueError("gallery::soft_dtw: sequences of at least one element are expected.")
    i = torch.arange(n, device=cost.device)
    before, last = (cost.new_full((batch, n + 1), _FAR) for _ in range(2))
    before[:, 0] = 0
    for k in range(n + m - 1):
        j = k - i
        inside = (j >= 0) & (j < m)
        ways = torch.stack((last[:, :-1], last[:, 1:], before[:, :-1]))
        near = -gamma * torch.logsumexp(ways / -gamma, 0)
        now = torch.where(inside, cost[:, i, j.clamp(0, m - 1)] + near, _FAR)
        before, last = last, torch.nn.functional.pad(now, (1, 0), value=_FAR)
    return last[:, -1].contiguous()


@opkit.custom_op("gallery::soft_dtw_backward")
def soft_dtw_backward(grad: Float[Tensor, "batch"], cost: Costs, gamma: float = 1.0) -> Costs:
    """Return the gradient of ``cost`` from that of the result."""
    with torch.enable_grad():
        cost = cost.detach().requires_grad_()
        result = soft_dtw.reference(cost, gamma)
    return torch.autograd.grad(result, cost, grad)[0].contiguous()


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.gamma = inputs[1]


def _gradient(ctx, grad):
    return soft_dtw_backward(grad, *ctx.saved_tensors, ctx.gamma), None


soft_dtw.register_fake(lambda cost, gamma=1.0: cost.new_empty(cost.shape[0]))
soft_dtw_backward.register_fake(lambda grad, cost, gamma=1.0: cost.new_empty(cost.shape))
soft_dtw.register_autograd(_gradient, setup_context=_save)

# The table has a border, row 0 and column 0, so that all elements are computed alike.
COMMON = """
static T exponential(T x) { return sizeof(T) == sizeof(float) ? expf(x) : exp(x); }

static void table(const T* cost, T* r, double gamma, int64_t n, int64_t m) {
    for (int64_t j = 0; j <= m; j++) r[j] = INFINITY;
    r[0] = 0;
    for (int64_t i = 1; i <= n; i++) {
        T* row = r + i * (m + 1);
        const T* above = row - (m + 1);
        row[0] = INFINITY;
        for (int64_t j = 1; j <= m; j++) {
            const T a = above[j], b = row[j - 1], c = above[j - 1], least = a < b ? (a < c ? a : c) : (b < c ? b : c);
            const T scale = -1 / gamma, sum = exponential((a - least) * scale) + exponential((b - least) * scale)
                                              + exponential((c - least) * scale);
            row[j] = cost[(i - 1) * m + j - 1] + least - (T)gamma * (T)log(sum);
        }
    }
}
"""
FORWARD = """
void soft_dtw(const T* cost, double gamma, T* out, int64_t batch, int64_t n, int64_t m) {
    if (n == 0 || m == 0) {
        opk_fail("sequences of at least one element are expected");
        return;
    }
    const int64_t size = (n + 1) * (m + 1);
    #pragma omp parallel if (batch > 1)
    {
        T* r = (T*)malloc(size * sizeof(T));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) {
            table(cost + i * n * m, r, gamma, n, m);
            out[i] = r[size - 1];
        }
        free(r);
    }
}
"""
# By expected alignments: element (i, j) passes on what comes in to its neighbours, in proportion to their shares in the softmin.
BACKWARD = """
static void one(T grad, const T* cost, T* out, T* r, double gamma, int64_t n, int64_t m) {
    const int64_t wide = m + 1;
    const T scale = -1 / gamma;
    table(cost, r, gamma, n, m);
    memset(out, 0, n * m * sizeof(T));
    out[n * m - 1] = grad;
    for (int64_t i = n; i > 0; i--)
        for (int64_t j = m; j > 0; j--) {
            const int64_t at = i * wide + j, to = (i - 1) * m + j - 1;
            const T near = r[at] - cost[to];
            if (i > 1) out[to - m] += out[to] * exponential((r[at - wide] - near) * scale);
            if (j > 1) out[to - 1] += out[to] * exponential((r[at - 1] - near) * scale);
            if (i > 1 && j > 1) out[to - m - 1] += out[to] * exponential((r[at - wide - 1] - near) * scale);
        }
}

void soft_dtw_backward(const T* grad, const T* cost, double gamma, T* out, int64_t batch, int64_t n, int64_t m) {
    if (n == 0 || m == 0) {
        opk_fail("sequences of at least one element are expected");
        return;
    }
    #pragma omp parallel if (batch > 1)
    {
        T* r = (T*)malloc((n + 1) * (m + 1) * sizeof(T));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) one(grad[i], cost + i * n * m, out + i * n * m, r, gamma, n, m);
        free(r);
    }
}
"""
soft_dtw.register_kernel("cpu", opkit.c_kernel(COMMON + FORWARD))
soft_dtw_backward.register_kernel("cpu", opkit.c_kernel(COMMON + BACKWARD))


# A program has a pair of sequences, whose last antidiagonal is in registers, by row, and computes in float32.
@triton.jit
def _soft_dtw(cost, out, gamma, n, m, BLOCK: tl.constexpr):
    i, far = tl.arange(0, BLOCK), 1e10
    costs = cost + tl.program_id(0).to(tl.int64) * n * m
    last, corner = tl.full([BLOCK], far, tl.float32), tl.where(i == 0, 0.0, far)
    for k in range(n + m - 1):
        up = tl.where(i == 0, far, tl.gather(last, tl.maximum(i - 1, 0), 0))
        least = tl.minimum(tl.minimum(up, corner), last)
        least = tl.where(tl.abs(least) == float("inf"), 0.0, least)
        sums = tl.exp((least - up) / gamma) + tl.exp((least - corner) / gamma) + tl.exp((least - last) / gamma)
        inside = (k >= i) & (k < i + m) & (i < n)
        now = tl.load(costs + i * m + k - i, inside, other=0.0).to(tl.float32) + least - gamma * tl.log(sums)
        last, corner = tl.where(inside, now, far), up  # which is the next diagonal's corner
    tl.store(out + tl.program_id(0), tl.sum(tl.where(i == n - 1, last, 0.0), 0))


TRITON = opkit.triton_kernel(
    _soft_dtw,
    grid=lambda batch: batch,
    BLOCK=lambda n: triton.next_power_of_2(n),
    num_warps=lambda BLOCK: min(max(BLOCK // 64, 1), 16),
    examples=[{"cost": "fp32[64, 512, 512]"}],
)
soft_dtw.register_kernel(
    "cuda",
    TRITON,
    when=lambda cost: 0 < cost.shape[1] <= 4096 and cost.shape[2] > 0,
    dtypes=[torch.float32, torch.bfloat16, torch.float16],
)

_DTYPES = (torch.float32, torch.float64)
_COST = tensor(
    "batch n m", _DTYPES, low=0, high=9, fills=("normal", "integers", "ones", "positive"), largest=17
)  # the reference is a loop over n + m
OPKIT_CHECKS = {
    "gallery::soft_dtw": {"args": (_COST, st.sampled_from([0.5, 1.0]))},
    "gallery::soft_dtw_backward": {"args": (tensor("batch", _DTYPES), _COST, st.sampled_from([0.5, 1.0]))},
}
SIZES = [(8, 100, 100), (1, 400, 400)]
GPU_SIZES = [(128, 512, 512), (16, 2048, 2048)]


def arguments(batch: int, n: int, m: int) -> tuple[Tensor, float]:
    """Return squared distances of random walks."""
    a, b = torch.randn(batch, n, 1).cumsum(1), torch.randn(batch, 1, m).cumsum(2)
    return (a - b).square() / 10, 1.0


def alternative(cost: Tensor, gamma: float) -> Tensor:
    """The reference: a loop over antidiagonals."""
    return soft_dtw.reference(cost, gamma)


def main() -> None:
    """Compare with the reference, gradients too; with a small ``gamma`` the cost is that of the best alignment."""
    cost = torch.tensor([[[1.0, 5], [2, 3], [9, 1]]])
    torch.testing.assert_close(soft_dtw(cost, 0.01), torch.tensor([4.0]), rtol=0, atol=0.02)  # 1 + 2 + 1
    cost = arguments(2, 12, 15)[0].requires_grad_()
    results = soft_dtw(cost), soft_dtw.reference(cost)
    torch.testing.assert_close(*results)
    ours, expected = (torch.autograd.grad(each.square().sum(), cost)[0] for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
