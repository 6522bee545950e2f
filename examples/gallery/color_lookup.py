"""Colour grading by a 3-D lookup table, with trilinear interpolation between the eight colours around a pixel's.

``table[r, g, b]`` has the new colour of the colours ``(r, g, b) / (size - 1)``; learned tables retouch photographs in real
time (Zeng et al., https://arxiv.org/abs/2009.14468). ``grid_sample`` does it with a table as a volume and the image as its
grid; the kernel reads a colour's three channels, which lie together, at once::

    python examples/gallery/color_lookup.py
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.testing import tensor


@opkit.custom_op("gallery::color_lookup")
def color_lookup(
    image: Float[Tensor, "*batch 3"], table: Float[Tensor, "red green blue channels"]
) -> Float[Tensor, "*batch channels"]:
    """Return the colours of an image, whose channels are last; those out of 0 to 1 count as the nearest."""
    sizes = table.shape[:3]
    for size in sizes:
        torch._check_value(
            size > 0, lambda: f"gallery::color_lookup: table has the shape {tuple(table.shape)}, and is empty."
        )
    at = [image[..., c].clamp(0, 1) * (sizes[c] - 1) for c in range(3)]
    low = [
        each.detach().nan_to_num().long().clamp(max=size - 2).clamp(min=0) for each, size in zip(at, sizes, strict=True)
    ]
    share = [each - first for each, first in zip(at, low, strict=True)]
    out = 0
    for corner in range(8):
        weight, index = 1, 0
        for c in range(3):
            upper = corner >> c & 1
            weight = weight * (share[c] if upper else 1 - share[c])
            index = index * sizes[c] + (low[c] + upper).clamp(max=sizes[c] - 1)
        found = table.flatten(0, 2).index_select(0, index.flatten())
        out = out + weight.unsqueeze(-1) * found.view(*image.shape[:-1], table.shape[-1])
    return out.contiguous()


SOURCE = """
void color_lookup(const T* image, const T* table, T* out, int64_t batch, int64_t red, int64_t green, int64_t blue,
                  int64_t channels) {
    const int64_t sizes[3] = {red, green, blue}, steps[3] = {green * blue * channels, blue * channels, channels};
    if (red * green * blue == 0) {
        opk_fail("table is empty");
        return;
    }
    #pragma omp parallel for if (batch > 1 << 12)
    for (int64_t i = 0; i < batch; i++) {
        T share[3];
        int64_t next[3], first = 0;
        for (int c = 0; c < 3; c++) {
            const T value = image[i * 3 + c], at = (value < 0 ? 0 : value > 1 ? 1 : value) * (sizes[c] - 1);
            int64_t low = at == at ? (int64_t)at : 0; /* NaN has a share of NaN */
            if (low > sizes[c] - 2) low = sizes[c] < 2 ? 0 : sizes[c] - 2;
            share[c] = at - low;
            first += low * steps[c];
            next[c] = low + 1 < sizes[c] ? steps[c] : 0;
        }
        T* to = out + i * channels;
        for (int64_t j = 0; j < channels; j++) {
            const T* from = table + first + j;
            T row[4];
            for (int k = 0; k < 4; k++) {
                const T* cell = from + (k & 1 ? next[0] : 0) + (k & 2 ? next[1] : 0);
                row[k] = (1 - share[2]) * cell[0] + share[2] * cell[next[2]];
            }
            const T low = (1 - share[0]) * row[0] + share[0] * row[1], high = (1 - share[0]) * row[2] + share[0] * row[3];
            to[j] = (1 - share[1]) * low + share[1] * high;
        }
    }
}
"""
color_lookup.register_kernel("cpu", opkit.c_kernel(SOURCE))


@triton.jit
def _cell(value, size):
    at = tl.where(value < 0, 0.0, tl.where(value > 1, 1.0, value)) * (size - 1)
    low = tl.minimum(tl.where(at == at, at, 0.0).to(tl.int32), tl.maximum(size - 2, 0))
    return low, tl.minimum(low + 1, size - 1), at - low  # NaN has a share of NaN


# A program has some pixels, and computes in float32; the table comes from the cache.
@triton.jit
def _color_lookup(
    image, table, out, batch, red, green, blue, channels, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    i, c = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS), tl.arange(0, CHANNELS)[None, :]
    r, next_r, share_r = _cell(tl.load(image + 3 * i, i < batch, other=0.0).to(tl.float32), red)
    g, next_g, share_g = _cell(tl.load(image + 3 * i + 1, i < batch, other=0.0).to(tl.float32), green)
    b, next_b, share_b = _cell(tl.load(image + 3 * i + 2, i < batch, other=0.0).to(tl.float32), blue)
    inside = (i < batch)[:, None] & (c < channels)
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for corner in tl.static_range(8):
        cell = (next_r if corner & 1 else r) * green + (next_g if corner & 2 else g)
        cell = cell * blue + (next_b if corner & 4 else b)
        weight = (share_r if corner & 1 else 1 - share_r) * (share_g if corner & 2 else 1 - share_g)
        weight *= share_b if corner & 4 else 1 - share_b
        total += weight[:, None] * tl.load(table + cell[:, None] * channels + c, inside, other=0.0).to(tl.float32)
    tl.store(out + i[:, None] * channels + c, total, inside)


TRITON = opkit.triton_kernel(
    _color_lookup,
    grid=lambda batch, PIXELS: triton.cdiv(batch, PIXELS),
    PIXELS=128,
    CHANNELS=lambda channels: triton.next_power_of_2(channels),
    examples=[{"image": "bf16[2160, 3840, 3]", "table": "bf16[33, 33, 33, 3]"}],
)
color_lookup.register_kernel(
    "cuda",
    TRITON,
    when=lambda table: table.numel() > 0 and table.shape[-1] <= 16,
    dtypes=[torch.float32, torch.bfloat16, torch.float16],
)

_DTYPES = (torch.float32, torch.float64)
OPKIT_CHECKS = {
    "gallery::color_lookup": {
        "args": (
            tensor("*batch 3", _DTYPES, low=-0.1, high=1.1, fills=("normal", "distinct", "positive")),
            tensor("red green blue channels", _DTYPES, fills=("normal", "integers", "ones")),
        )
    }
}
SIZES = [(1080, 1920, 33), (256, 256, 17)]
GPU_SIZES = [(2160, 3840, 33), (1080, 1920, 17)]


def arguments(h: int, w: int, size: int) -> tuple[Tensor, Tensor]:
    """Return an image, and a table that changes colours a little."""
    axis = torch.linspace(0, 1, size)
    table = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)
    return torch.rand(h, w, 3), table + 0.05 * torch.randn_like(table)


def alternative(image: Tensor, table: Tensor) -> Tensor:
    """``grid_sample`` of the table as a volume."""
    volume, grid = table.permute(3, 0, 1, 2).unsqueeze(0), (2 * image.flip(-1) - 1).unsqueeze(0).unsqueeze(0)
    found = torch.nn.functional.grid_sample(volume, grid, padding_mode="border", align_corners=True)
    return found[0, :, 0].permute(1, 2, 0)


def main() -> None:
    """Compare with grid_sample, gradients too."""
    inputs = [each.requires_grad_() for each in arguments(20, 30, 5)]
    results = color_lookup(*inputs), alternative(*inputs)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, expected = (torch.autograd.grad(each.square().sum(), inputs) for each in results)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
