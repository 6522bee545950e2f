"""Ball query: for each centre, the first ``k`` points within a radius, by index.

Point networks group their points so (PointNet++, https://arxiv.org/abs/1706.02413); ``points[index]`` gathers the groups. In
torch it takes all distances and a sort of every row; the kernel reads points 64 at a time, and stops at the ``k``-th that it
finds::

    python examples/gallery/ball_query.py
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from jaxtyping import Float, Int64
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::ball_query")
def ball_query(
    centers: Float[Tensor, "*batch m 3"], points: Float[Tensor, "*batch n 3"], radius: float, k: int
) -> Int64[Tensor, "*batch m k"]:
    """Return indices of points at distances below ``radius``, in rising order; -1 follows the last."""
    n = points.shape[-2]
    squares = (centers.unsqueeze(-2) - points.unsqueeze(-3)).square()
    near = squares[..., 0] + squares[..., 1] + squares[..., 2] < radius * radius
    index = torch.arange(n, device=points.device)
    first = torch.where(near, index, n).sort(-1).values[..., :k]
    first = torch.nn.functional.pad(first, (0, k - min(k, n)), value=n)
    return torch.where(first < n, first, -1).contiguous()


@ball_query.register_fake
def _(centers, points, radius, k):
    return torch.empty((*centers.shape[:-1], k), dtype=torch.int64, device=points.device)


# Points are stored by coordinate, 64 together, so that the loop over them is vectorised.
SOURCE = """
enum { PART = 64 };

static void one(const T* center, const T* parts, T limit, int64_t* out, int64_t n, int64_t k) {
    const T x = center[0], y = center[1], z = center[2];
    int64_t found = 0;
    for (int64_t first = 0; first < n && found < k; first += PART, parts += 3 * PART) {
        unsigned char near[PART], any = 0;
        for (int j = 0; j < PART; j++) {
            const T dx = x - parts[j], dy = y - parts[PART + j], dz = z - parts[2 * PART + j];
            near[j] = dx * dx + dy * dy + dz * dz < limit;
        }
        for (int j = 0; j < PART; j++) any |= near[j];
        for (int j = 0; any && j < PART && found < k; j++)
            if (near[j]) out[found++] = first + j;
    }
    while (found < k) out[found++] = -1;
}

void ball_query(const T* centers, const T* points, double radius, int64_t k, int64_t* out, int64_t batch, int64_t m,
                int64_t n) {
    const int64_t padded = (n + PART - 1) / PART * PART;
    T* parts = (T*)malloc((3 * padded + 1) * sizeof(T));
    for (int64_t i = 0; i < batch; i++, points += n * 3, centers += m * 3, out += m * k) {
        for (int64_t j = 0; j < padded; j++)
            for (int c = 0; c < 3; c++) parts[j / PART * 3 * PART + c * PART + j % PART] = j < n ? points[j * 3 + c] : NAN;
        #pragma omp parallel for if (m * n > 1 << 15)
        for (int64_t j = 0; j < m; j++) one(centers + j * 3, parts, (T)(radius * radius), out + j * k, n, k);
    }
    free(parts);
}
"""
ball_query.register_kernel("cpu", opkit.c_kernel(SOURCE, flags=["-ffp-contract=off"]))


# A program has one centre, reads POINTS points at once until it has found k, and computes in float32.
@triton.jit
def _ball_query(centers, points, out, limit, m, n, k, POINTS: tl.constexpr):
    row, cloud = tl.program_id(1).to(tl.int64) * m + tl.program_id(0), tl.program_id(1).to(tl.int64) * n
    x, y = tl.load(centers + 3 * row).to(tl.float32), tl.load(centers + 3 * row + 1).to(tl.float32)
    z = tl.load(centers + 3 * row + 2).to(tl.float32)
    found, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (first < n) & (found < k):
        i = first + tl.arange(0, POINTS)
        at = points + 3 * (cloud + i)
        dx = x - tl.load(at, i < n, other=0.0).to(tl.float32)
        dy = y - tl.load(at + 1, i < n, other=0.0).to(tl.float32)
        dz = z - tl.load(at + 2, i < n, other=0.0).to(tl.float32)
        near = ((dx * dx + dy * dy + dz * dz < limit) & (i < n)).to(tl.int32)
        place = found + tl.cumsum(near, 0) - 1
        tl.store(out + row * k + place, i, (near > 0) & (place < k))
        found += tl.sum(near, 0)
        first += POINTS
    while found < k:
        place = found + tl.arange(0, POINTS)
        tl.store(out + row * k + place, -1, place < k)
        found += POINTS


TRITON = opkit.triton_kernel(
    _ball_query,
    grid=lambda batch, m: (m, batch),
    limit=lambda radius: radius * radius,
    POINTS=512,
    enable_fp_fusion=False,  # the reference's rounding
    examples=[{"centers": "fp32[16, 1024, 3]", "points": "fp32[16, 16384, 3]", "radius": 0.1, "k": 32}],
)
ball_query.register_kernel("cuda", TRITON, dtypes=[torch.float32, torch.bfloat16, torch.float16])

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::ball_query": {
        "args": (
            tensor("*batch m 3", _DTYPES),
            tensor("*batch n 3", _DTYPES),
            st.sampled_from([0.5, 1.5, 4.0]),
            st.integers(0, 5),
        )
    }
}
SIZES = [(1024, 4096), (512, 32768)]
GPU_SIZES = [(16384, 4096), (16384, 131_072)]


def arguments(m: int, n: int) -> tuple[Tensor, Tensor, float, int]:
    """Return points in a unit cube, ``m`` of them as centres; a ball has about 17 of 4096 points."""
    points = torch.rand(n, 3)
    return points[:m].clone(), points, 0.1, 32


def alternative(centers: Tensor, points: Tensor, radius: float, k: int) -> Tensor:
    """``torch.cdist`` and ``topk`` of the indices."""
    n = len(points)
    index = torch.where(torch.cdist(centers, points) < radius, torch.arange(n, device=points.device), n)
    first = index.topk(min(k, n), largest=False).values
    return torch.where(first < n, first, -1)


def main() -> None:
    """Compare with the reference; each centre finds itself."""
    centers, points, radius, k = arguments(50, 700)
    index = ball_query(centers, points, radius, k)
    assert torch.equal(index, ball_query.reference(centers, points, radius, k))
    assert (index == torch.arange(50)[:, None]).any(1).all()


if __name__ == "__main__":
    main()
