"""Weighted bags of embeddings: each result is the sum, or the mean, of some rows of a table, each times its weight.

It is the input layer of recommendation models (DLRM, https://arxiv.org/abs/1906.00091) and of fastText. Bags have places for
``size`` rows, of which -1 marks those that are empty, so that bags of any length need no offsets. Unlike torch's, the mean may
have weights too. The reference gathers all rows before it adds them; the kernel reads each row once. The gradients of the table,
which is dense, and of the weights are an operator with a kernel of its own::

    python examples/gallery/embedding_bag.py
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor

Table = Float[Tensor, "rows d"]
Indices = Int64[Tensor, "*batch size"]
Weights = Float[Tensor, "*batch size"]
Bags = Float[Tensor, "*batch d"]


def _shares(indices: Tensor, weights: Tensor, mean: bool) -> Tensor:
    shares = torch.where(indices >= 0, weights, 0)
    return shares / (indices >= 0).sum(-1, keepdim=True).clamp(min=1) if mean else shares


@opkit.custom_op("gallery::embedding_bag")
def embedding_bag(table: Table, indices: Indices, weights: Weights, mean: bool = False) -> Bags:
    """Return the sum over each bag, or the mean over its places that are not empty; an empty bag has zeros."""
    rows = torch.nn.functional.pad(table, (0, 0, 1, 0))[indices + 1]  # row 0 is that of an empty place
    return (rows * _shares(indices, weights, mean).unsqueeze(-1)).sum(-2)


@opkit.custom_op("gallery::embedding_bag_backward")
def embedding_bag_backward(
    grad: Bags, table: Table, indices: Indices, weights: Weights, mean: bool = False
) -> tuple[Table, Weights]:
    """Return the gradients of the table and the weights from that of the result."""
    places, one = (indices + 1).flatten(), _shares(indices, torch.ones_like(weights), mean)
    rows = torch.nn.functional.pad(table, (0, 0, 1, 0))
    added = (grad.unsqueeze(-2) * (one * weights).unsqueeze(-1)).reshape(places.numel(), table.shape[1])
    dots = torch.where(indices >= 0, (grad.unsqueeze(-2) * rows[indices + 1]).sum(-1) * one, 0)
    return torch.zeros_like(rows).index_add(0, places, added)[1:].clone(), dots.contiguous()


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.mean = inputs[3]


def _gradient(ctx, grad):
    table, weights = embedding_bag_backward(grad, *ctx.saved_tensors, ctx.mean)
    return table, None, weights, None


embedding_bag.register_autograd(_gradient, setup_context=_save)

COMMON = """
static int outside(const int64_t* indices, int64_t n, int64_t rows) {
    for (int64_t i = 0; i < n; i++)
        if (indices[i] < -1 || indices[i] >= rows) {
            opk_fail("there is an index %lld, and -1 to %lld are expected", (long long)indices[i], (long long)rows - 1);
            return 1;
        }
    return 0;
}

static T factor(const int64_t* indices, int64_t size, bool mean) { /* of all weights of a bag */
    int64_t count = 0;
    for (int64_t i = 0; mean && i < size; i++) count += indices[i] >= 0;
    return count ? (T)1 / count : 1;
}
"""
# Of a bag, up to eight vectors of columns are added up in registers; a row that comes later is fetched meanwhile.
FORWARD = """
typedef T Vector __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
enum { LANES = 64 / sizeof(T), AHEAD = 16 };

static inline __attribute__((always_inline)) void columns(const T* table, const int64_t* indices, const T* weights, T* out,
                                                          int64_t size, int64_t left, int64_t d, T whole, int vectors) {
    Vector sum[8] = {0};
    for (int64_t i = 0; i < size; i++) {
        const T* later = table + indices[i + AHEAD < left ? i + AHEAD : left - 1] * d;
        for (int k = 0; k < vectors; k++) __builtin_prefetch(later + k * LANES);
        if (indices[i] < 0) continue;
        const T *row = table + indices[i] * d, share = weights[i] * whole;
        for (int k = 0; k < vectors; k++) sum[k] += share * *(const Vector*)(row + k * LANES);
    }
    for (int k = 0; k < vectors; k++) *(Vector*)(out + k * LANES) = sum[k];
}

void embedding_bag(const T* table, const int64_t* indices, const T* weights, bool mean, T* out, int64_t batch, int64_t size,
                   int64_t rows, int64_t d) {
    if (outside(indices, batch * size, rows)) return;
    #pragma omp parallel for if (batch * size * d > 1 << 15)
    for (int64_t b = 0; b < batch; b++) {
        const int64_t *at = indices + b * size, left = (batch - b) * size;
        const T *w = weights + b * size, whole = factor(at, size, mean);
        int64_t j = 0;
        for (; j + 8 * LANES <= d; j += 8 * LANES) columns(table + j, at, w, out + b * d + j, size, left, d, whole, 8);
        for (; j + 4 * LANES <= d; j += 4 * LANES) columns(table + j, at, w, out + b * d + j, size, left, d, whole, 4);
        for (; j + LANES <= d; j += LANES) columns(table + j, at, w, out + b * d + j, size, left, d, whole, 1);
        for (; j < d; j++) {
            T sum = 0;
            for (int64_t i = 0; i < size; i++)
                if (at[i] >= 0) sum += w[i] * whole * table[at[i] * d + j];
            out[b * d + j] = sum;
        }
    }
}
"""
BACKWARD = """
void embedding_bag_backward(const T* grad, const T* table, const int64_t* indices, const T* weights, bool mean, T* out0,
                            T* out1, int64_t batch, int64_t size, int64_t rows, int64_t d) {
    if (outside(indices, batch * size, rows)) return;
    memset(out0, 0, rows * d * sizeof(T));
    for (int64_t b = 0; b < batch; b++) {
        const T whole = factor(indices + b * size, size, mean);
        for (int64_t i = b * size; i < (b + 1) * size; i++) {
            const int64_t later = indices[i + 8 < batch * size ? i + 8 : i] * d;
            for (int64_t j = 0; j < d; j += 64 / sizeof(T)) {
                __builtin_prefetch(table + later + j);
                __builtin_prefetch(out0 + later + j, 1);
            }
            out1[i] = 0;
            if (indices[i] < 0) continue;
            const T *from = grad + b * d, *row = table + indices[i] * d, share = weights[i] * whole;
            T* restrict to = out0 + indices[i] * d;
            T dot = 0, part[16] = {0};
            int64_t j = 0;
            for (; j + 16 <= d; j += 16)
                for (int k = 0; k < 16; k++) {
                    to[j + k] += share * from[j + k];
                    part[k] += from[j + k] * row[j + k];
                }
            for (; j < d; j++) {
                to[j] += share * from[j];
                dot += from[j] * row[j];
            }
            for (int k = 0; k < 16; k++) dot += part[k];
            out1[i] = dot * whole;
        }
    }
}
"""
embedding_bag.register_kernel("cpu", opkit.c_kernel(COMMON + FORWARD))
embedding_bag_backward.register_kernel("cpu", opkit.c_kernel(COMMON + BACKWARD))


# A program has some columns of one bag, reads PLACES rows at once, and computes in float32. An index outside of the table
# gives NaN.
@triton.jit
def _embedding_bag(
    table, indices, weights, out, size, rows, d, mean: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total, count = tl.zeros([PLACES, COLUMNS], tl.float32), tl.zeros([PLACES], tl.int32)
    for first in range(0, size, PLACES):
        place = first + tl.arange(0, PLACES)
        index = tl.load(indices + bag * size + place, place < size, other=-1)
        full, valid = index >= 0, (index >= -1) & (index < rows)
        weight = tl.load(weights + bag * size + place, full & (place < size), other=0.0).to(tl.float32)
        at, inside = index[:, None] * d + column[None, :], (full & valid)[:, None] & (column < d)[None, :]
        value = tl.load(table + at, inside, other=0.0).to(tl.float32)
        total += value * tl.where(valid, weight, float("nan"))[:, None]
        count += full.to(tl.int32)
    sums = tl.sum(total, 0)
    if mean:
        sums /= tl.maximum(tl.sum(count, 0), 1)
    tl.store(out + bag * d + column, sums, column < d)


TRITON = opkit.triton_kernel(
    _embedding_bag,
    grid=lambda batch, d, COLUMNS: (batch, triton.cdiv(d, COLUMNS)),
    PLACES=8,
    COLUMNS=lambda d: min(triton.next_power_of_2(d), 256),
    num_warps=lambda COLUMNS: max(COLUMNS // 64, 1),
    examples=[{"table": "bf16[100000, 128]", "indices": "i64[4096, 20]", "weights": "bf16[4096, 20]"}],
)
embedding_bag.register_kernel("cuda", TRITON, dtypes=[torch.float32, torch.bfloat16, torch.float16])

_DTYPES = (torch.float32, torch.float64)
_ARGS = (
    tensor("rows d", _DTYPES),
    tensor("*batch size", torch.int64, low=-1, high="rows-1"),
    tensor("*batch size", _DTYPES),
    st.booleans(),
)
OPKIT_CHECKS = {
    "gallery::embedding_bag": {"args": _ARGS},
    "gallery::embedding_bag_backward": {"args": (tensor("*batch d", _DTYPES), *_ARGS)},
}
SIZES = [(100_000, 64, 4096, 20), (5_000, 128, 512, 50)]
GPU_SIZES = [(1_000_000, 128, 65536, 20), (100_000, 64, 4096, 50)]


def arguments(rows: int, d: int, bags: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return full bags of random rows."""
    return torch.randn(rows, d), torch.randint(rows, (bags, size)), torch.rand(bags, size)


def alternative(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """``torch.nn.functional.embedding_bag`` with ``per_sample_weights``."""
    return torch.nn.functional.embedding_bag(indices, table, mode="sum", per_sample_weights=weights)


def main() -> None:
    """Compare with torch's sums and means, gradients too; empty places count for nothing."""
    table, indices, weights = arguments(9, 70, 5, 4)
    inputs = table.requires_grad_(), weights.requires_grad_()
    results = [f(table, indices, weights) for f in (embedding_bag, alternative)]
    torch.testing.assert_close(*results)
    ours, expected = (torch.autograd.grad(each.square().sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    mean = torch.nn.functional.embedding_bag(indices, table, mode="mean")
    padded = torch.nn.functional.pad(indices, (2, 1), value=-1)
    torch.testing.assert_close(embedding_bag(table, padded, torch.ones(5, 7), mean=True), mean)


if __name__ == "__main__":
    main()
