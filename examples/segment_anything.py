"""Encode images as Segment Anything does, without a matrix of relative positions: eager mode, Inductor and opkit.

    python examples/segment_anything.py                                             # a tiny encoder
    python examples/segment_anything.py --size vit_b --dtype bfloat16 --device cuda # SAM's smallest
    python examples/segment_anything.py --padded                                    # the lower half of the image is padding

The encoder is a vision transformer (Kirillov et al., 2023, https://arxiv.org/abs/2304.02643). Most blocks attend within windows,
a few across the whole image, and all add a position's relative rows and columns to the scores (Li et al., 2021,
https://arxiv.org/abs/2112.01526). Added as a tensor, these are as large as the scores: 768 MiB in float32 for each global block
of ViT-B. Segment Anything Fast (https://pytorch.org/blog/accelerating-generative-ai/) wrote a kernel for them; opkit's kernels
have them built in, and padding is a function. Weights and images are random.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pipeline_table import Row, compiled, measured, parsed, parser, table
from torch import Tensor, nn

import opkit
from opkit.masks import RelativePosition


@dataclasses.dataclass(frozen=True)
class Sizes:
    image: int
    width: int
    layers: int
    heads: int
    window: int
    across: tuple[int, ...]  # the layers that attend across the image
    out: int
    patch: int = 16

    @property
    def grid(self) -> int:
        return self.image // self.patch


SIZES = {
    "tiny": Sizes(image=160, width=64, layers=2, heads=2, window=4, across=(1,), out=32),
    "small": Sizes(image=512, width=384, layers=6, heads=6, window=14, across=(2, 5), out=256),
    "vit_b": Sizes(image=1024, width=768, layers=12, heads=12, window=14, across=(2, 5, 8, 11), out=256),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Windows:
    """Squares of positions: which of them are part of the image, by the number of the window and of the position in it.

    Args:
        grid: positions in a row, and in a column, of the image.
        side: positions in a row of a window.
        extent: (images, 2), the rows and columns that are not padding; None if all are, and are to be seen.
    """

    def __init__(self, grid: int, side: int, extent: Tensor | None) -> None:
        self.side, self.extent = side, extent
        self.wide = -(-grid // side)

    def divide(self, x: Tensor) -> Tensor:
        """Return (images * windows, side, side, width) of (images, grid, grid, width), with zeros where windows reach beyond."""
        beyond = self.wide * self.side - x.shape[1]
        x = F.pad(x, (0, 0, 0, beyond, 0, beyond))
        x = x.unflatten(2, (self.wide, self.side)).unflatten(1, (self.wide, self.side))
        return x.transpose(2, 3).flatten(0, 2)

    def join(self, x: Tensor, grid: int) -> Tensor:
        """Undo :meth:`divide`."""
        x = x.unflatten(0, (-1, self.wide, self.wide)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)[:, :grid, :grid]


def within(extent: Tensor, wide: int, side: int, window: Tensor, position: Tensor) -> Tensor:
    """Return whether a position of a window is within the extent of its image."""
    image, place = window // (wide * wide), window % (wide * wide)
    row, column = place // wide * side + position // side, place % wide * side + position % side
    return (row < extent[image, 0]) & (column < extent[image, 1])


class Attention(nn.Module):
    """Attention of the positions of a square, whose scores know how far apart rows and columns are."""

    apart: Tensor

    def __init__(self, sizes: Sizes, side: int) -> None:
        super().__init__()
        self.heads, self.size = sizes.heads, sizes.width // sizes.heads
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.rows, self.columns = (nn.Parameter(torch.randn(2 * side - 1, self.size) * 0.1) for _ in range(2))
        at = torch.arange(side)
        self.register_buffer("apart", at[:, None] - at + side - 1, persistent=False)
        self.without_matrix = False

    def forward(self, x: Tensor, windows: Windows) -> Tensor:
        side = x.shape[1]
        q, k, v = self.qkv(x).flatten(1, 2).unflatten(2, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
        image = q.unflatten(2, (side, side))
        by_row = torch.einsum("bhrcd,rkd->bhrck", image, self.rows[self.apart]).flatten(2, 3)
        by_column = torch.einsum("bhrcd,ckd->bhrck", image, self.columns[self.apart]).flatten(2, 3)
        attend = attend_without_a_matrix if self.without_matrix else attend_with_a_tensor
        attended = attend(q, k, v, by_row, by_column, windows)
        return self.out(attended.transpose(1, 2).flatten(2).unflatten(1, (side, side)))


def attend_with_a_tensor(
    q: Tensor, k: Tensor, v: Tensor, by_row: Tensor, by_column: Tensor, windows: Windows
) -> Tensor:
    """Attend as the original does: with a bias for each query and key, in which hidden keys have minus infinity."""
    bias = (by_row[..., None] + by_column[..., None, :]).flatten(3)
    if windows.extent is not None:
        window, position = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2]))
        seen = within(windows.extent, windows.wide, windows.side, window[:, None], position)
        bias = bias.masked_fill(~(seen[:, None, :, None] & seen[:, None, None, :]), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def attend_without_a_matrix(
    q: Tensor, k: Tensor, v: Tensor, by_row: Tensor, by_column: Tensor, windows: Windows
) -> Tensor:
    """Attend with a bias that kernels compute from its parts, and a function that hides padding, whose tiles are left out."""
    side, wide, extent = windows.side, windows.wide, windows.extent
    relative = RelativePosition(by_row, by_column)
    if extent is None:
        return opkit.attention(q, k, v, bias=relative)

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return within(extent, wide, side, b, q_idx) & within(extent, wide, side, b, kv_idx)

    return opkit.attention(q, k, v, mask=seen, bias=relative)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, side: int) -> None:
        super().__init__()
        self.side = side
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width, eps=1e-6), nn.LayerNorm(sizes.width, eps=1e-6)
        self.attention = Attention(sizes, side)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: Tensor, extent: Tensor | None) -> Tensor:
        grid = x.shape[1]
        windows = Windows(grid, self.side, extent)
        x = x + windows.join(self.attention(windows.divide(self.norm1(x)), windows), grid)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ChannelNorm(nn.Module):
    """Layer norm of the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """(images, 3, image, image) to (images, out, grid, grid); ``extent`` is that of :class:`Windows`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)
        self.positions = nn.Parameter(torch.randn(sizes.grid, sizes.grid, sizes.width) * 0.02)
        sides = [sizes.grid if layer in sizes.across else sizes.window for layer in range(sizes.layers)]
        self.blocks = nn.ModuleList(Block(sizes, side) for side in sides)
        self.neck = nn.Sequential(
            nn.Conv2d(sizes.width, sizes.out, 1, bias=False),
            ChannelNorm(sizes.out),
            nn.Conv2d(sizes.out, sizes.out, 3, padding=1, bias=False),
            ChannelNorm(sizes.out),
        )

    def forward(self, images: Tensor, extent: Tensor | None = None) -> Tensor:
        x = self.patches(images).permute(0, 2, 3, 1) + self.positions
        for block in self.blocks:
            x = block(x, extent)
        return self.neck(x.permute(0, 3, 1, 2))


def without_matrices(model: Encoder) -> Encoder:
    """Return a copy, with the same parameters, whose attention makes no matrix of biases."""
    changed = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for module in changed.modules():
        if isinstance(module, Attention):
            module.without_matrix = True
    return changed


def main(arguments: list[str] | None = None) -> list[Row]:
    command = parser(__doc__, SIZES, dtypes=("float32", "bfloat16"))
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--padded", action="store_true", help="the lower half of the images is padding, and hidden")
    options = parsed(command, arguments)
    sizes, dtype = SIZES[options.size], getattr(torch, options.dtype)
    torch.manual_seed(0)
    model = Encoder(sizes).to(options.device, dtype).eval()
    images = torch.randn(options.batch, 3, sizes.image, sizes.image).to(options.device, dtype)
    extent = None
    if options.padded:
        extent = torch.tensor([[sizes.grid // 2, sizes.grid]] * options.batch, dtype=torch.int32, device=options.device)
        images[:, :, sizes.image // 2 :] = 0
    models: dict[str, Callable[..., Tensor]] = {"eager": model}
    for backend in options.backends.split(","):
        models[backend] = compiled(without_matrices(model) if backend == "opkit" else model, backend)
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(images.double(), extent)
        calls = {name: functools.partial(each, images, extent) for name, each in models.items()}
        rows = measured(calls, options.device, exact)
    print(table(rows, options.batch, "images"))
    assert all(row.error is not None and row.error < TOLERANCE[dtype] for row in rows), rows
    return rows


if __name__ == "__main__":
    main()
