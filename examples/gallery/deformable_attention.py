"""Deformable attention: each query samples a few places of a feature map, between its pixels, and adds them up by weights.

``out[q, head] = sum_p weights[q, head, p] * bilinear(value[head], locations[q, head, p])``, with zeros outside of the map
(Deformable DETR, https://arxiv.org/abs/2010.04159); with several maps, add the results. In torch it is ``grid_sample`` on
maps with channels first, and a product; the kernel reads the channels of a head, which lie together, for each of the four
pixels around a place::

    python examples/gallery/deformable_attention.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::deformable_attention")
def deformable_attention(
    value: Float[Tensor, "batch h w heads d"],
    locations: Float[Tensor, "batch queries heads points 2"],
    weights: Float[Tensor, "batch queries heads points"],
) -> Float[Tensor, "batch queries heads d"]:
    """Return the sampled values; ``locations`` are ``(x, y)`` from 0 to 1 over the map, at whose pixels' corners these lie."""
    batch, h, w, heads, d = value.shape
    torch._check_value(
        h > 0 and w > 0,
        lambda: (
            f"gallery::deformable_attention: value of shape {tuple(value.shape)} is a map without pixels, (batch, h, w, "
            "heads, d); leave empty maps out."
        ),
    )
    x, y = locations[..., 0] * w - 0.5, locations[..., 1] * h - 0.5
    left, top = x.detach().floor(), y.detach().floor()
    flat = value.reshape(batch, h * w, heads, d).transpose(1, 2)
    out = 0
    for column, share_x in ((left, left + 1 - x), (left + 1, x - left)):
        for row, share_y in ((top, top + 1 - y), (top + 1, y - top)):
            inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
            index = torch.where(inside, row * w + column, 0).long().transpose(1, 2).flatten(2)
            found = flat.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, d)).unflatten(2, locations.shape[1:4:2])
            added = (share_x * share_y * weights).transpose(1, 2).unsqueeze(-1) * found
            out = out + torch.where(inside.transpose(1, 2).unsqueeze(-1), added, 0).sum(3)
    return out.transpose(1, 2).contiguous()


SOURCE = """
void deformable_attention(const T* value, const T* locations, const T* weights, T* out, int64_t batch, int64_t h, int64_t w,
                          int64_t heads, int64_t d, int64_t queries, int64_t points) {
    #pragma omp parallel for collapse(2) if (batch * queries * heads * points * d > 1 << 14)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t at = 0; at < queries * heads; at++) {
            const int64_t i = b * queries * heads + at;
            const T* map = value + (b * h * w * heads + at % heads) * d;
            T* restrict sum = out + i * d;
            memset(sum, 0, d * sizeof(T));
            for (int64_t p = i * points; p < (i + 1) * points; p++) {
                const T x = locations[2 * p] * w - (T)0.5, y = locations[2 * p + 1] * h - (T)0.5;
                if (!(x > -1 && x < w && y > -1 && y < h)) continue;
                const int64_t left = (int64_t)(x + 1) - 1, top = (int64_t)(y + 1) - 1;
                for (int64_t corner = 0; corner < 4; corner++) {
                    const int64_t column = left + corner % 2, row = top + corner / 2;
                    if (column < 0 || column >= w || row < 0 || row >= h) continue;
                    const T share_x = corner % 2 ? x - left : left + 1 - x, share_y = corner / 2 ? y - top : top + 1 - y;
                    const T share = share_x * share_y * weights[p];
                    const T* restrict pixel = map + (row * w + column) * heads * d;
                    for (int64_t j = 0; j < d; j++) sum[j] += share * pixel[j];
                }
            }
        }
}
"""
deformable_attention.register_kernel("cpu", opkit.c_kernel(SOURCE), when=lambda value: 0 not in value.shape[1:3])


# A program has a head of one query, and computes in float32.
@triton.jit
def _deformable_attention(
    value, locations, weights, out, h, w, heads, d, queries, points, POINTS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    i, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    first, total = i // (queries * heads) * h * w, tl.zeros([POINTS, CHANNELS], tl.float32)
    for start in range(0, points, POINTS):
        used, at = start + tl.arange(0, POINTS) < points, i * points + start + tl.arange(0, POINTS)
        x = tl.load(locations + 2 * at, used, other=0.0).to(tl.float32) * w - 0.5
        y = tl.load(locations + 2 * at + 1, used, other=0.0).to(tl.float32) * h - 0.5
        weight = tl.load(weights + at, used, other=0.0).to(tl.float32)
        for corner in tl.static_range(4):
            column, row = tl.floor(x) + corner % 2, tl.floor(y) + corner // 2
            inside = (used & (column >= 0) & (column < w) & (row >= 0) & (row < h))[:, None] & (channel < d)[None, :]
            pixel = first + row.to(tl.int32) * w + column.to(tl.int32)
            found = tl.load(value + (pixel * heads + i % heads)[:, None] * d + channel[None, :], inside, other=0.0)
            share = (1 - tl.abs(x - column)) * (1 - tl.abs(y - row)) * weight
            total += tl.where(inside, share[:, None] * found.to(tl.float32), 0.0)
    tl.store(out + i * d + channel, tl.sum(total, 0), channel < d)


TRITON = opkit.triton_kernel(
    _deformable_attention,
    grid=lambda batch, queries, heads: batch * queries * heads,
    POINTS=4,
    CHANNELS=lambda d: max(triton.next_power_of_2(d), 1),
    num_warps=lambda CHANNELS: max(CHANNELS // 64, 1),
    examples=[
        {
            "value": "bf16[4, 64, 64, 8, 32]",
            "locations": "bf16[4, 4096, 8, 4, 2]",
            "weights": "bf16[4, 4096, 8, 4]",
        }
    ],
)
deformable_attention.register_kernel(
    "cuda",
    TRITON,
    when=lambda value: 0 not in value.shape[1:3] and value.shape[-1] <= 512,
    dtypes=[torch.float32, torch.bfloat16, torch.float16],
)

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::deformable_attention": {
        "args": (
            tensor("batch h w heads d", _DTYPES),
            tensor(
                "batch queries heads points 2", _DTYPES, low=-0.2, high=1.2, fills=("normal", "distinct", "positive")
            ),
            tensor("batch queries heads points", _DTYPES),
        )
    }
}
SIZES = [(1, 64, 64, 300), (2, 32, 32, 1024)]
GPU_SIZES = [(8, 64, 64, 4096), (1, 128, 128, 900)]


def arguments(batch: int, h: int, w: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a map of 8 heads with 32 channels each, and 4 places for each query."""
    value = torch.randn(batch, h, w, 8, 32)
    locations = torch.rand(batch, queries, 8, 4, 2) * 1.2 - 0.1
    return value, locations, torch.randn(batch, queries, 8, 4).softmax(-1)


def alternative(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """``grid_sample``, as Deformable DETR's own implementation in torch."""
    batch, h, w, heads, d = value.shape
    maps = value.permute(0, 3, 4, 1, 2).reshape(batch * heads, d, h, w)
    grid = (2 * locations - 1).transpose(1, 2).flatten(0, 1)
    found = torch.nn.functional.grid_sample(maps, grid, align_corners=False)
    shares = weights.transpose(1, 2).flatten(0, 1).unsqueeze(1)
    return (found * shares).sum(-1).view(batch, heads, d, -1).permute(0, 3, 1, 2)


gpu_alternative = torch.compile(alternative)


def main() -> None:
    """Compare with grid_sample, gradients too."""
    inputs = [each.requires_grad_() for each in arguments(2, 7, 9, 5)]
    results = deformable_attention(*inputs), alternative(*inputs)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, expected = (torch.autograd.grad(each.square().sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
