"""Bilinear splat: points add their values to the four grid cells around them, in proportion to nearness.

It is the transpose of bilinear sampling: rasterising particles (particle-in-cell), forward warping of images by an optical
flow, bird's-eye-view pooling. In torch it is four scattered additions with temporaries as large as all values; the kernel
reads each value once. The gradients, with respect to positions too, are derived from the reference::

    python examples/gallery/splat.py
"""

import torch
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::splat")
def splat(
    positions: Float[Tensor, "batch n 2"], values: Float[Tensor, "batch n channels"], h: int, w: int
) -> Float[Tensor, "batch h w channels"]:
    """Return the grid; ``positions`` are ``(x, y)`` in cells, whose centres have whole numbers. Cells outside are left out."""
    batch, _, channels = values.shape
    x, y = positions.unbind(-1)
    left, top = x.detach().floor(), y.detach().floor()
    grid = values.new_zeros(batch, h * w, channels)
    for column, share_x in ((left, left + 1 - x), (left + 1, x - left)):
        for row, share_y in ((top, top + 1 - y), (top + 1, y - top)):
            inside = ((column >= 0) & (column < w) & (row >= 0) & (row < h)).unsqueeze(-1)
            index = torch.where(inside, (row * w + column).unsqueeze(-1), 0).long()
            added = torch.where(inside, (share_x * share_y).unsqueeze(-1) * values, 0)
            if h * w:
                grid = grid.scatter_add(1, index.expand(added.shape), added)
    return grid.view(batch, h, w, channels)


@splat.register_fake
def _(positions, values, h, w):
    return values.new_empty(values.shape[0], h, w, values.shape[2])


SOURCE = """
static inline void add(T* restrict cell, const T* restrict value, T share, int64_t channels) {
    int64_t j = 0;
    for (; j + 8 <= channels; j += 8) /* a vector without a remainder */
        for (int64_t k = j; k < j + 8; k++) cell[k] += share * value[k];
    for (; j < channels; j++) cell[j] += share * value[j];
}

void splat(const T* positions, const T* values, int64_t h, int64_t w, T* out, int64_t batch, int64_t n, int64_t channels) {
    memset(out, 0, batch * h * w * channels * sizeof(T));
    #pragma omp parallel for if (batch > 1)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = b * n; i < (b + 1) * n; i++) {
            const T x = positions[2 * i], y = positions[2 * i + 1];
            if (!(x > -1 && x < w && y > -1 && y < h)) continue;
            const int64_t left = (int64_t)(x + 1) - 1, top = (int64_t)(y + 1) - 1;
            for (int64_t corner = 0; corner < 4; corner++) {
                const int64_t column = left + corner % 2, row = top + corner / 2;
                if (column < 0 || column >= w || row < 0 || row >= h) continue;
                const T share_x = corner % 2 ? x - left : left + 1 - x, share_y = corner / 2 ? y - top : top + 1 - y;
                add(out + ((b * h + row) * w + column) * channels, values + i * channels, share_x * share_y, channels);
            }
        }
}
"""
splat.register_kernel("cpu", opkit.c_kernel(SOURCE))

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::splat": {
        "args": (
            tensor("batch n 2", _DTYPES, low=-1.5, high=6, fills=("normal", "distinct", "positive")),
            tensor("batch n channels", _DTYPES),
            st.integers(1, 5),
            st.integers(1, 5),
        )
    }
}
SIZES = [(1, 100_000, 8), (4, 20_000, 32)]


def arguments(batch: int, n: int, channels: int) -> tuple[Tensor, Tensor, int, int]:
    """Return ``n`` points on a grid of 128 by 128 cells."""
    return 128 * torch.rand(batch, n, 2), torch.randn(batch, n, channels), 128, 128


@torch.compile
def alternative(positions: Tensor, values: Tensor, h: int, w: int) -> Tensor:
    """One ``index_add`` with the four corners of all points, compiled by Inductor."""
    batch, _, channels = values.shape
    corner = positions.floor().unsqueeze(-2) + torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    share = (1 - (positions.unsqueeze(-2) - corner).abs()).prod(-1)
    x, y = corner.unbind(-1)
    share = torch.where((x >= 0) & (x < w) & (y >= 0) & (y < h), share, 0)
    first = h * w * torch.arange(batch).view(batch, 1, 1)
    index = (first + y.clamp(0, h - 1).long() * w + x.clamp(0, w - 1).long()).flatten()
    added = (share.unsqueeze(-1) * values.unsqueeze(-2)).view(-1, channels)
    return values.new_zeros(batch * h * w, channels).index_add(0, index, added).view(batch, h, w, channels)


def main() -> None:
    """Compare with the reference, gradients too; nothing is lost inside the grid."""
    positions, values = 1 + 4 * torch.rand(2, 30, 2), torch.randn(2, 30, 3)
    inputs = positions.requires_grad_(), values.requires_grad_()
    results = splat(*inputs, 7, 8), splat.reference(*inputs, 7, 8)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(results[0].sum((1, 2)), values.sum(1), rtol=1e-4, atol=1e-4)
    ours, expected = (torch.autograd.grad(each.square().sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected)


if __name__ == "__main__":
    main()
