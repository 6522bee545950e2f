"""Softmax over segments of rows: of each column, the rows that have one segment number sum to 1.

Attention on graphs (GAT, https://arxiv.org/abs/1710.10903) takes it over the edges of each node, in any order. In torch it is
two scattered reductions and two gathers; the kernel keeps the maxima and sums of a segment in the cache and passes over the
rows three times::

    python examples/gallery/segment_softmax.py
"""

import torch
from hypothesis import strategies as st
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::segment_softmax")
def segment_softmax(x: Float[Tensor, "n d"], segment: Int64[Tensor, "n"], count: int) -> Float[Tensor, "n d"]:
    """Return the softmax of ``x`` within each segment; numbers of segments are in ``0 .. count - 1``."""
    index = segment.unsqueeze(-1).expand(x.shape)
    empty = x.new_full((count, x.shape[1]), -torch.inf)
    largest = empty.scatter_reduce(0, index, x.detach(), "amax")
    weight = (x - largest.gather(0, index)).exp()
    sums = torch.zeros_like(empty).scatter_add(0, index, weight)
    return (weight / sums.gather(0, index)).contiguous()


segment_softmax.register_fake(lambda x, segment, count: torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _save(ctx, inputs, output):
    ctx.count = inputs[2]
    ctx.save_for_backward(inputs[1], output)


def _gradient(ctx, grad):
    segment, output = ctx.saved_tensors
    flow = output * grad
    sums = flow.new_zeros(ctx.count, flow.shape[1]).index_add(0, segment, flow)
    return flow - output * sums.index_select(0, segment), None, None


segment_softmax.register_autograd(_gradient, setup_context=_save)

SOURCE = """
static T exponential(T x) { return sizeof(T) == sizeof(float) ? expf(x) : exp(x); }

void segment_softmax(const T* x, const int64_t* segment, int64_t count, T* out, int64_t n, int64_t d) {
    T* largest = (T*)malloc((2 * count * d + 1) * sizeof(T));
    T* sum = largest + count * d;
    for (int64_t i = 0; i < count * d; i++) largest[i] = -INFINITY, sum[i] = 0;
    for (int64_t i = 0; i < n; i++) {
        if (segment[i] < 0 || segment[i] >= count) {
            opk_fail("segment[%lld] is %lld, and 0 to %lld are expected", (long long)i, (long long)segment[i],
                     (long long)count - 1);
            free(largest);
            return;
        }
        T* most = largest + segment[i] * d;
        for (int64_t j = 0; j < d; j++) most[j] = x[i * d + j] > most[j] ? x[i * d + j] : most[j];
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < d; j++) {
            const T weight = exponential(x[i * d + j] - largest[segment[i] * d + j]);
            sum[segment[i] * d + j] += weight;
            out[i * d + j] = weight;
        }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < d; j++) out[i * d + j] /= sum[segment[i] * d + j];
    free(largest);
}
"""
segment_softmax.register_kernel("cpu", opkit.c_kernel(SOURCE))

OPKIT_CHECKS = {
    "gallery::segment_softmax": {
        "args": (
            tensor("n d", (torch.float32, torch.float64)),
            tensor("n", torch.int64, low=0, high=3),
            st.integers(4, 6),
        )
    }
}
SIZES = [(100_000, 8, 10_000), (200_000, 1, 5_000)]


def arguments(n: int, d: int, count: int) -> tuple[Tensor, Tensor, int]:
    """Return scores of ``n`` edges with ``d`` heads, and the node that each edge leads to."""
    return torch.randn(n, d), torch.randint(count, (n,)), count


@torch.compile
def alternative(x: Tensor, segment: Tensor, count: int) -> Tensor:
    """Scattered reductions and gathers, as PyTorch Geometric's softmax, compiled by Inductor."""
    index = segment.unsqueeze(-1).expand(x.shape)
    largest = x.new_zeros(count, x.shape[1]).scatter_reduce(0, index, x, "amax", include_self=False)
    weight = (x - largest.index_select(0, segment)).exp()
    return weight / weight.new_zeros(count, x.shape[1]).index_add(0, segment, weight).index_select(0, segment)


def main() -> None:
    """Compare with torch's softmax of each segment, and the gradient with the reference's."""
    x, segment, count = arguments(60, 3, 7)
    x.requires_grad_()
    result = segment_softmax(x, segment, count)
    for each in range(count):
        torch.testing.assert_close(result[segment == each], x[segment == each].softmax(0))
    results = result, segment_softmax.reference(x, segment, count)
    ours, expected = (torch.autograd.grad((each * x.detach()).sum(), x)[0] for each in results)
    torch.testing.assert_close(ours, expected)


if __name__ == "__main__":
    main()
