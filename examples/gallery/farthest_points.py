"""Farthest point sampling: ``k`` points, each the farthest from those chosen before it, from the first point on.

Point networks thin out their clouds so (PointNet++, https://arxiv.org/abs/1706.02413). The steps depend on one another: in
torch each is a few operators over all points; in the kernel it is one pass that updates distances and finds the largest::

    python examples/gallery/farthest_points.py
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::farthest_points")
def farthest_points(points: Float[Tensor, "*batch n 3"], k: int) -> Int64[Tensor, "*batch k"]:
    """Return the indices of the points in the order of choice, the first of those equally far."""
    if points.shape[-2] == 0:
        raise ValueError("gallery::farthest_points: points has no points, and at least one is expected.")
    distance = torch.full_like(points[..., 0], torch.inf)
    last = torch.zeros_like(points[..., 0, 0], dtype=torch.int64)
    chosen = []
    for _ in range(k):
        chosen.append(last)
        at = points.gather(-2, last[..., None, None].expand(*points.shape[:-2], 1, 3))
        squares = (points - at).square()
        distance = torch.minimum(distance, squares[..., 0] + squares[..., 1] + squares[..., 2])
        last = distance.argmax(-1)
    return torch.stack(chosen, -1) if chosen else last.unsqueeze(-1)[..., :0].contiguous()


@farthest_points.register_fake
def _(points, k):
    return torch.empty((*points.shape[:-2], k), dtype=torch.int64, device=points.device)


# Sixteen places keep the farthest point of their own, so that the loop over points is vectorised.
SOURCE = """
enum { WIDE = 16 };

static bool farther(T a, int64_t i, T b, int64_t j) { /* as torch.argmax: NaN first, and the first of equals */
    if (a != a || b != b) return a != a && (b == b || i < j);
    return a > b || (a == b && i < j);
}

static void cloud(const T* x, const T* y, const T* z, T* distance, int64_t* out, int64_t padded, int64_t k) {
    int64_t last = 0;
    for (int64_t step = 0; step < k; step++) {
        out[step] = last;
        const T x0 = x[last], y0 = y[last], z0 = z[last];
        T best[WIDE];
        int64_t at[WIDE];
        for (int j = 0; j < WIDE; j++) best[j] = -1, at[j] = j;
        for (int64_t first = 0; first < padded; first += WIDE)
            for (int j = 0; j < WIDE; j++) {
                const T dx = x[first + j] - x0, dy = y[first + j] - y0, dz = z[first + j] - z0;
                const T square = dx * dx + dy * dy + dz * dz, before = distance[first + j];
                const T now = square < before || square != square ? square : before;
                const bool better = now > best[j] || (now != now && best[j] == best[j]);
                distance[first + j] = now;
                best[j] = better ? now : best[j];
                at[j] = better ? first + j : at[j];
            }
        int most = 0;
        for (int j = 1; j < WIDE; j++)
            if (farther(best[j], at[j], best[most], at[most])) most = j;
        last = at[most];
    }
}

void farthest_points(const T* points, int64_t* out, int64_t batch, int64_t n, int64_t k) {
    if (n == 0) {
        opk_fail("points has no points, and at least one is expected");
        return;
    }
    const int64_t padded = (n + WIDE - 1) / WIDE * WIDE;
    #pragma omp parallel if (batch > 1 && batch * n * k > 1 << 15)
    {
        T* work = (T*)malloc(4 * padded * sizeof(T));
        #pragma omp for
        for (int64_t i = 0; i < batch; i++) {
            for (int64_t j = 0; j < padded; j++) { /* the last point again is never the first of those equally far */
                const T* point = points + (i * n + (j < n ? j : n - 1)) * 3;
                for (int c = 0; c < 3; c++) work[c * padded + j] = point[c];
                work[3 * padded + j] = INFINITY;
            }
            cloud(work, work + padded, work + 2 * padded, work + 3 * padded, out + i * k, padded, k);
        }
        free(work);
    }
}
"""
farthest_points.register_kernel("cpu", opkit.c_kernel(SOURCE, flags=["-ffp-contract=off"]))


# A program has a cloud in registers, and computes in float32. Bits of distances, which are not negative, are ordered as they
# are, with NaN above infinity; the index in the low bits makes the first of equals the largest.
@triton.jit
def _farthest_points(points, out, n, k, BLOCK: tl.constexpr):
    i, cloud = tl.arange(0, BLOCK), points + tl.program_id(0).to(tl.int64) * n * 3
    x = tl.load(cloud + 3 * i, i < n, other=0.0).to(tl.float32)
    y = tl.load(cloud + 3 * i + 1, i < n, other=0.0).to(tl.float32)
    z = tl.load(cloud + 3 * i + 2, i < n, other=0.0).to(tl.float32)
    distance, last = tl.full([BLOCK], float("inf"), tl.float32), tl.full((), 0, tl.int64)
    for step in range(k):
        tl.store(out + tl.program_id(0).to(tl.int64) * k + step, last)
        dx = x - tl.load(cloud + 3 * last).to(tl.float32)
        dy = y - tl.load(cloud + 3 * last + 1).to(tl.float32)
        dz = z - tl.load(cloud + 3 * last + 2).to(tl.float32)
        square = dx * dx + dy * dy + dz * dz
        distance = tl.where((square < distance) | (square != square), square, distance)
        bits = tl.where(distance != distance, 0x7FC00000, distance.to(tl.int32, bitcast=True)).to(tl.int64)
        key = tl.where(i < n, (bits << 32) | (BLOCK - 1 - i), -1)
        last = BLOCK - 1 - (tl.max(key, 0) & 0x7FFFFFFF)


TRITON = opkit.triton_kernel(
    _farthest_points,
    grid=lambda batch: batch,
    BLOCK=lambda n: triton.next_power_of_2(n),
    num_warps=lambda BLOCK: min(max(BLOCK // 512, 1), 16),
    enable_fp_fusion=False,  # the reference's rounding, on which the choice between points equally far depends
    examples=[{"points": "fp32[16, 4096, 3]", "k": 512}, {"points": "fp32[16, 8192, 3]", "k": 512}],
)
farthest_points.register_kernel(
    "cuda",
    TRITON,
    when=lambda points: 0 < points.shape[-2] <= 8192,
    dtypes=[torch.float32, torch.bfloat16, torch.float16],
)

OPKIT_CHECKS = {
    "gallery::farthest_points": {"args": (tensor("*batch n 3", (torch.float32, torch.float64)), st.integers(0, 5))}
}
SIZES = [(1, 4096, 256), (8, 2048, 128)]
GPU_SIZES = [(16, 4096, 512), (1, 8192, 512)]


def arguments(batch: int, n: int, k: int) -> tuple[Tensor, int]:
    """Return clouds of ``n`` points in a cube."""
    return torch.rand(batch, n, 3), k


_step = torch.compile(
    lambda points, distance, at: torch.minimum(distance, (points - at).square().sum(-1)), dynamic=False
)


def alternative(points: Tensor, k: int) -> Tensor:
    """The loop over ``k``, with each step compiled by Inductor."""
    distance = torch.full_like(points[..., 0], torch.inf)
    chosen = [torch.zeros(len(points), dtype=torch.int64, device=points.device)]
    every = torch.arange(len(points), device=points.device)
    for _ in range(k - 1):
        distance = _step(points, distance, points[every, chosen[-1]].unsqueeze(1))
        chosen.append(distance.argmax(-1))
    return torch.stack(chosen, -1)


def main() -> None:
    """Compare with the reference; corners of a square come before its centre."""
    square = torch.tensor([[0.0, 0, 0], [0.5, 0.5, 0], [1, 1, 0], [1, 0, 0], [0, 1, 0]])
    assert farthest_points(square, 5).tolist() == [0, 2, 3, 4, 1]
    points, k = arguments(3, 100, 20)
    assert torch.equal(farthest_points(points, k), farthest_points.reference(points, k))


if __name__ == "__main__":
    main()
