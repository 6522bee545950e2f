"""Right operators with kernels in C, most of them those of docs/native.md; mutants are made of their sources."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

import opkit
from opkit.testing import tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16)

SOFTSIGN = """
void softsign(const T* x, T* out, int64_t x_numel) {
    int64_t i = 0;
    for (; i + 8 <= x_numel; i += 8)
        for (int64_t k = 0; k < 8; k++) {
            const opk_acc a = (opk_acc)x[i + k];
            out[i + k] = (T)(a / (1 + fabs(a)));
        }
    for (; i < x_numel; i++) {
        const opk_acc a = (opk_acc)x[i];
        out[i] = (T)(a / (1 + fabs(a)));
    }
}
"""

DOT = """
void dot(const T* x, const T* y, T* out, int64_t batch, int64_t n) {
    for (int64_t i = 0; i < batch; i++) {
        opk_acc sum = 0;
        for (int64_t j = 0; j < n; j++) sum += (opk_acc)x[i * n + j] * (opk_acc)y[j];
        out[i] = (T)sum;
    }
}
"""

GATHER = """
void gather(const T* x, const int64_t* index, T* out, int64_t count, int64_t n, int64_t d) {
    for (int64_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= n) {
            opk_fail("index %d is not in 0 .. %d", (int)index[i], (int)n - 1);
            return;
        }
        for (int64_t j = 0; j < d; j++) out[i * d + j] = x[index[i] * d + j];
    }
}
"""

TRACE = """
void trace(const opk_tensor_of(T)* x, T* out, int64_t n) {
    const T* data = (const T*)x->data;
    opk_acc sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (opk_acc)data[i * (x->strides[0] + x->strides[1])];
    *out = (T)sum;
}
"""

CUMULATED = """
void cumulated(const T* x, T* out, int64_t batch, int64_t n) {
    for (int64_t i = 0; i < batch; i++) {
        opk_acc sum = 0;
        for (int64_t j = 0; j < n; j++) {
            sum += (opk_acc)x[i * n + j];
            out[i * n + j] = (T)sum;
        }
    }
}
"""

SCALE_ROWS = """
void scale_rows(const opk_tensor_of(T)* x, const T* by, T* out, int64_t m, int64_t n) {
    const T* data = (const T*)x->data;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            const opk_acc value = (opk_acc)data[i * x->strides[0] + j * x->strides[1]];
            out[i * n + j] = (T)(value * (opk_acc)by[i] + 1);
        }
}
"""

MASKED_MEAN = """
void masked_mean(const T* x, const bool* mask, T* out, int64_t batch, int64_t n) {
    for (int64_t i = 0; i < batch; i++) {
        opk_acc sum = 0;
        int64_t count = 0;
        for (int64_t j = 0; j < n; j++)
            if (mask[i * n + j]) {
                sum += (opk_acc)x[i * n + j];
                count += 1;
            }
        out[i] = count > 0 ? (T)(sum / (opk_acc)count) : (T)0;
    }
}
"""

HISTOGRAM = """
void histogram(const int64_t* x, int64_t* out, int64_t n, int64_t bins) {
    for (int64_t k = 0; k < bins; k++) out[k] = 0;
    for (int64_t i = 0; i < n; i++)
        if (x[i] >= 0 && x[i] < bins) out[x[i]] += 1;
}
"""


def build_softsign():
    """Element by element, in blocks of 8 with a tail."""

    @opkit.custom_op("mutants::softsign")
    def softsign(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return x / (1 + x.abs())

    softsign.register_kernel("cpu", opkit.c_kernel(SOFTSIGN, dtypes=FLOATING))
    return {"op": softsign, "args": (tensor("*shape", FLOATING),)}


def build_dot():
    """A sum over the last dimension."""

    @opkit.custom_op("mutants::dot")
    def dot(x: Float[Tensor, "*batch n"], y: Float[Tensor, "n"]) -> Float[Tensor, "*batch"]:
        return (x * y).sum(-1)

    dot.register_kernel("cpu", opkit.c_kernel(DOT, dtypes=FLOATING))
    return {"op": dot, "args": (tensor("*batch n", FLOATING), tensor("n", FLOATING))}


def build_gather():
    """Rows by index, which is checked."""

    @opkit.custom_op("mutants::gather")
    def gather(x: Float[Tensor, "n d"], index: Int[Tensor, "count"]) -> Float[Tensor, "count d"]:
        return x.index_select(0, index)

    gather.register_kernel("cpu", opkit.c_kernel(GATHER, dtypes=FLOATING))
    return {"op": gather, "args": (tensor("n d", FLOATING), tensor("count", torch.int64, low=0, high="n-1"))}


def build_trace():
    """A strided walk over memory as it lies."""

    @opkit.custom_op("mutants::trace")
    def trace(x: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
        return x.diagonal().sum()

    trace.register_kernel("cpu", opkit.c_kernel(TRACE, dtypes=FLOATING))
    return {"op": trace, "args": (tensor("n n", FLOATING),)}


def build_cumulated():
    """A running sum."""

    @opkit.custom_op("mutants::cumulated")
    def cumulated(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x.cumsum(-1)

    cumulated.register_kernel("cpu", opkit.c_kernel(CUMULATED, dtypes=FLOATING))
    return {"op": cumulated, "args": (tensor("*batch n", FLOATING),)}


def build_scale_rows():
    """Two dimensions by their strides, and one number for each row."""

    @opkit.custom_op("mutants::scale_rows")
    def scale_rows(x: Float[Tensor, "m n"], by: Float[Tensor, "m"]) -> Float[Tensor, "m n"]:
        return (x * by[:, None] + 1).contiguous()

    scale_rows.register_kernel("cpu", opkit.c_kernel(SCALE_ROWS, dtypes=FLOATING))
    return {"op": scale_rows, "args": (tensor("m n", FLOATING), tensor("m", FLOATING))}


def build_masked_mean():
    """A mean of what a mask leaves; 0 where it leaves nothing."""

    @opkit.custom_op("mutants::masked_mean")
    def masked_mean(x: Float[Tensor, "*batch n"], mask: Bool[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        count = mask.sum(-1)
        return torch.where(mask, x, 0).sum(-1) / count.clamp(min=1).to(x.dtype)

    masked_mean.register_kernel("cpu", opkit.c_kernel(MASKED_MEAN, dtypes=FLOATING))
    return {"op": masked_mean, "args": (tensor("*batch n", FLOATING), tensor("*batch n", torch.bool))}


def build_histogram():
    """Whole numbers counted; those outside are left out."""

    @opkit.custom_op("mutants::histogram")
    def histogram(x: Int[Tensor, "n"], bins: int) -> Tensor:
        at = torch.where((x >= 0) & (x < bins), x, bins)
        return torch.zeros(bins + 1, dtype=torch.int64).index_add(0, at, torch.ones_like(x))[:bins].clone()

    histogram.register_kernel("cpu", opkit.c_kernel(HISTOGRAM, dtypes=[torch.int64]))
    return {"op": histogram, "args": (tensor("n", torch.int64, low=-2, high=9), 7)}
