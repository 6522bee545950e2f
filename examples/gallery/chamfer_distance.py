"""Chamfer distance of point clouds: the mean squared distance to the nearest point of the other cloud, both ways.

``mean_i min_j |x_i - y_j|^2 + mean_j min_i |x_i - y_j|^2``, a loss between shapes (Fan et al.,
https://arxiv.org/abs/1612.00603). The operator ``nearest_point`` finds the nearest points; its gradient flows through those
alone, and needs no distances again. ``chamfer_distance`` is made of it, and has no kernel of its own::

    python examples/gallery/chamfer_distance.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::nearest_point")
def nearest_point(
    x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]
) -> tuple[Float[Tensor, "*batch n"], Int64[Tensor, "*batch n"]]:
    """Return the squared distance of each ``x`` to its nearest ``y``, and the index of that; the first of several."""
    if y.shape[-2] == 0:
        raise ValueError("gallery::nearest_point: y has no points, and at least one is expected.")
    distance, index = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1).min(-1)
    return distance, index


@opkit.custom_op("gallery::chamfer_distance")
def chamfer_distance(x: Float[Tensor, "*batch n d"], y: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch"]:
    """Return the distance of each pair of clouds."""
    return nearest_point(x, y)[0].mean(-1) + nearest_point(y, x)[0].mean(-1)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx, grad, _):
    x, y, index = ctx.saved_tensors
    index = index.unsqueeze(-1).expand(x.shape)
    grad_x = 2 * grad.unsqueeze(-1) * (x - y.gather(-2, index))
    return grad_x, torch.zeros_like(y).scatter_add(-2, index, -grad_x)


nearest_point.register_autograd(_gradient, setup_context=_save)

# Candidates are compared 256 at a time; only where one of them is nearer than all before is its place looked for.
SOURCE = """
enum { WIDE = 256 };

static void one(const T* x, const T* parts, T* distance, int64_t* index, int64_t m, int64_t d) {
    *distance = INFINITY;
    *index = 0;
    for (int64_t first = 0; first < m; first += WIDE) {
        T sum[WIDE], least[WIDE / 4];
        int nan = 0, at = 0;
        for (int j = 0; j < WIDE; j++) sum[j] = 0;
        for (int64_t c = 0; c < d; c++, parts += WIDE)
            for (int j = 0; j < WIDE; j++) sum[j] += (x[c] - parts[j]) * (x[c] - parts[j]);
        for (int j = 0; j < WIDE; j++) nan |= sum[j] != sum[j];
        if (nan) { /* as torch.min: NaN is the least */
            while (sum[at] == sum[at]) at++;
            *distance = sum[at];
            *index = first + at;
            return;
        }
        for (int j = 0; j < WIDE / 4; j++) {
            const T a = sum[j] < sum[j + 64] ? sum[j] : sum[j + 64];
            const T b = sum[j + 128] < sum[j + 192] ? sum[j + 128] : sum[j + 192];
            least[j] = a < b ? a : b;
        }
        for (int half = WIDE / 8; half > 0; half /= 2)
            for (int j = 0; j < half; j++) least[j] = least[j] < least[j + half] ? least[j] : least[j + half];
        if (least[0] < *distance) {
            while (sum[at] != least[0]) at++;
            *distance = least[0];
            *index = first + at;
        }
    }
}

void nearest_point(const T* x, const T* y, T* out0, int64_t* out1, int64_t batch, int64_t n, int64_t m, int64_t d) {
    if (m == 0) {
        opk_fail("y has no points, and at least one is expected");
        return;
    }
    const int64_t padded = (m + WIDE - 1) / WIDE * WIDE;
    T* parts = (T*)malloc((padded * d + 1) * sizeof(T));
    for (int64_t i = 0; i < batch; i++, x += n * d, y += m * d, out0 += n, out1 += n) {
        for (int64_t j = 0; j < padded; j++) /* the last point again is never the first of those equally near */
            for (int64_t c = 0; c < d; c++)
                parts[(j / WIDE * d + c) * WIDE + j % WIDE] = y[(j < m ? j : m - 1) * d + c];
        #pragma omp parallel for if (n * m * d > 1 << 15)
        for (int64_t j = 0; j < n; j++) one(x + j * d, parts, out0 + j, out1 + j, m, d);
    }
    free(parts);
}
"""
nearest_point.register_kernel("cpu", opkit.c_kernel(SOURCE))


# A program has some points of x, and passes over y in tiles; the least of each column of tiles stays in registers. Distances
# that are NaN count as -1, less than all others.
@triton.jit
def _nearest_point(x, y, out0, out1, n, m, D: tl.constexpr, POINTS: tl.constexpr, TILE: tl.constexpr):
    cloud, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * POINTS + tl.arange(0, POINTS)
    least, index = tl.full([POINTS, TILE], float("inf"), tl.float32), tl.zeros([POINTS, TILE], tl.int32)
    for first in range(0, m, TILE):
        j = first + tl.arange(0, TILE)
        distance = tl.zeros([POINTS, TILE], tl.float32)
        for c in tl.static_range(D):
            value = tl.load(x + (cloud * n + i) * D + c, i < n, other=0.0).to(tl.float32)
            other = tl.load(y + (cloud * m + j) * D + c, j < m, other=0.0).to(tl.float32)
            difference = value[:, None] - other[None, :]
            distance += difference * difference
        distance = tl.where(distance != distance, -1.0, distance)
        nearer = (distance < least) & (j < m)[None, :]
        least = tl.where(nearer, distance, least)
        index = tl.where(nearer, j[None, :], index)
    lowest = tl.min(least, 1)
    tl.store(out0 + cloud * n + i, tl.where(lowest < 0, float("nan"), lowest), i < n)
    tl.store(out1 + cloud * n + i, tl.min(tl.where(least == lowest[:, None], index, m), 1), i < n)


TRITON = opkit.triton_kernel(
    _nearest_point,
    grid=lambda batch, n, POINTS: (batch, triton.cdiv(n, POINTS)),
    D=lambda d: d,
    POINTS=32,
    TILE=64,
    examples=[{"x": "fp32[16, 4096, 3]", "y": "fp32[16, 4096, 3]"}],
)
nearest_point.register_kernel(
    "cuda",
    TRITON,
    when=lambda x, y: x.shape[-1] <= 16 and y.shape[-2] > 0,
    dtypes=[torch.float32, torch.bfloat16, torch.float16],
)

_CLOUDS = (tensor("*batch n d", (torch.float32, torch.float64)), tensor("*batch m d", (torch.float32, torch.float64)))
OPKIT_CHECKS = {"gallery::nearest_point": {"args": _CLOUDS}, "gallery::chamfer_distance": {"args": _CLOUDS}}
SIZES = [(1, 2048), (16, 1024)]
GPU_SIZES = [(16, 4096), (1, 16384)]


def arguments(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Return two clouds of ``n`` points."""
    return torch.randn(batch, n, 3), torch.randn(batch, n, 3)


@torch.compile
def alternative(x: Tensor, y: Tensor) -> Tensor:
    """All distances and their minima, compiled by Inductor."""
    distance = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    return distance.amin(-1).mean(-1) + distance.amin(-2).mean(-1)


def main() -> None:
    """Compare with all distances, the gradients too."""
    x, y = (each.requires_grad_() for each in arguments(2, 70))
    results = [chamfer_distance(x, y[:, :50]), chamfer_distance.reference(x, y[:, :50])]
    torch.testing.assert_close(*results)
    with opkit.use_kernel(nearest_point, "reference"):
        expected = torch.autograd.grad(chamfer_distance(x, y[:, :50]).sum(), (x, y))
    for ours, each in zip(torch.autograd.grad(results[0].sum(), (x, y)), expected, strict=True):
        torch.testing.assert_close(ours, each)


if __name__ == "__main__":
    main()
