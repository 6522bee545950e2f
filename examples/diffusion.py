"""Draw images as Stable Diffusion does, in a few steps, with fused projections: eager mode, Inductor and opkit.

    python examples/diffusion.py                                              # a tiny model
    python examples/diffusion.py --size sd15 --dtype bfloat16 --device cuda   # the sizes of Stable Diffusion 1.5

A U-Net removes noise from latents, step by step, and a decoder makes images of them (Rombach et al., 2022,
https://arxiv.org/abs/2112.10752); steps are those of DDIM without noise (Song et al., 2021, https://arxiv.org/abs/2010.02502),
with classifier-free guidance (https://arxiv.org/abs/2207.12598). As in "Accelerating Generative AI Part III: Diffusion, Fast"
(https://pytorch.org/blog/accelerating-generative-ai-3/), the optimised models compute queries, keys and values as one product and
are compiled. Weights, noise and text are random; what is compared is the images.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pipeline_table import Row, compiled, measured, parsed, parser, table
from torch import Tensor, nn

import opkit

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Sizes:
    latent: int  # rows, and columns, of the latents
    channels: tuple[int, ...]  # of the U-Net's levels, each with half the rows and columns of the one before
    transformers: int  # levels that have them, from the first
    layers: int  # residual blocks of a level
    heads: int
    words: int
    text: int  # channels of a word
    decoder: tuple[int, ...]  # channels of the decoder's levels, from the smallest image
    groups: int = 32


SIZES = {
    "tiny": Sizes(8, (8, 16), 1, 1, 2, words=5, text=24, decoder=(16, 8), groups=4),
    "small": Sizes(32, (64, 128, 256), 2, 1, 4, words=77, text=256, decoder=(128, 64, 32)),
    "sd15": Sizes(64, (320, 640, 1280, 1280), 3, 2, 8, words=77, text=768, decoder=(512, 512, 256, 128)),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
LATENT_CHANNELS = 4


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, groups: int, time: int | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, out)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out) if time else None
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None and time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Attention of positions to positions, or to words of ``text`` channels, with separate projections until :meth:`fuse`."""

    def __init__(self, width: int, heads: int, text: int | None = None) -> None:
        super().__init__()
        self.heads, self.crosses = heads, text is not None
        self.projections = nn.ModuleList(
            nn.Linear(size, width, bias=False) for size in (width, text or width, text or width)
        )
        self.out = nn.Linear(width, width)
        self.attend: Attend = F.scaled_dot_product_attention

    def fuse(self) -> None:
        """Make one product of the projections of one tensor: of queries, keys and values, or of keys and values of the text."""
        first = 1 if self.crosses else 0
        weight = torch.cat([each.get_parameter("weight") for each in self.projections[first:]])
        fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        fused.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.projections = nn.ModuleList([*self.projections[:first], fused])

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        sources = [x, text if self.crosses else x, text if self.crosses else x][: len(self.projections)]
        width = self.out.in_features
        parts = [
            part
            for layer, source in zip(self.projections, sources, strict=True)
            for part in layer(source).split(width, -1)
        ]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Attention of an image's positions to one another and to the text, and a gated feed-forward, as one residual block."""

    def __init__(self, channels: int, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(sizes.groups, channels)
        self.into, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.own, self.cross = Attention(channels, sizes.heads), Attention(channels, sizes.heads, sizes.text)
        self.up, self.down = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x = self.into(self.norm(image).flatten(2).transpose(1, 2))
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), text)
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        x = x + self.down(value * F.gelu(gate))
        return image + self.out(x).transpose(1, 2).unflatten(2, image.shape[2:])


class Level(nn.Module):
    """A residual block, a transformer where the level has them."""

    def __init__(self, channels: int, out: int, sizes: Sizes, level: int) -> None:
        super().__init__()
        self.block = ResidualBlock(channels, out, sizes.groups, 4 * sizes.channels[0])
        self.transformer = Transformer(out, sizes) if level < sizes.transformers else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.block(x, time)
        return x if self.transformer is None else self.transformer(x, text)


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """(images, 4, rows, columns) latents, (images,) times and (images, words, text) to the noise in the latents."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        channels, levels = sizes.channels, range(len(sizes.channels))
        self.width, time = channels[0], 4 * channels[0]
        self.time = nn.Sequential(nn.Linear(channels[0], time), nn.SiLU(), nn.Linear(time, time))
        self.into = nn.Conv2d(LATENT_CHANNELS, channels[0], 3, padding=1)
        stored, at = [channels[0]], channels[0]
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level in levels:
            for _ in range(sizes.layers):
                self.downs.append(Level(at, channels[level], sizes, level))
                stored.append(at := channels[level])
            if level + 1 < len(channels):
                self.downs.append(nn.Conv2d(at, at, 3, stride=2, padding=1))
                stored.append(at)
        self.middle = nn.ModuleList(Level(at, at, sizes, level) for level in (0, len(channels)))
        for level in reversed(levels):
            for _ in range(sizes.layers + 1):
                self.ups.append(Level(at + stored.pop(), channels[level], sizes, level))
                at = channels[level]
            if level:
                self.ups.append(Upsample(at))
        self.out = nn.Sequential(
            nn.GroupNorm(sizes.groups, at), nn.SiLU(), nn.Conv2d(at, LATENT_CHANNELS, 3, padding=1)
        )

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        half = self.width // 2
        angles = times[:, None] * 10000.0 ** (-torch.arange(half, device=times.device) / half)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(latents.dtype))
        x = self.into(latents)
        stored = [x]
        for part in self.downs:
            x = part(x, time, text) if isinstance(part, Level) else part(x)
            stored.append(x)
        for part in self.middle:
            x = part(x, time, text)
        for part in self.ups:
            x = part(torch.cat([x, stored.pop()], 1), time, text) if isinstance(part, Level) else part(x)
        return self.out(x)


class Decoder(nn.Module):
    """(images, 4, rows, columns) latents to (images, 3, ...) images: twice the rows and columns for each level but the first."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        channels, groups = sizes.decoder, sizes.groups
        at = channels[0]
        self.into = nn.Conv2d(LATENT_CHANNELS, at, 3, padding=1)
        self.norm, self.attention = nn.GroupNorm(groups, at), Attention(at, 1)
        self.middle = nn.ModuleList(ResidualBlock(at, at, groups) for _ in range(2))
        parts: list[nn.Module] = []
        for level, out in enumerate(channels):
            for _ in range(sizes.layers + 1):
                parts.append(ResidualBlock(at, out, groups))
                at = out
            if level + 1 < len(channels):
                parts.append(Upsample(at))
        self.ups = nn.Sequential(*parts, nn.GroupNorm(groups, at), nn.SiLU(), nn.Conv2d(at, 3, 3, padding=1))

    def forward(self, latents: Tensor) -> Tensor:
        x = self.middle[0](self.into(latents))
        attended = self.attention(self.norm(x).flatten(2).transpose(1, 2))
        x = x + attended.transpose(1, 2).unflatten(2, x.shape[2:])
        return self.ups(self.middle[1](x))


Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(
    unet: Predict, decoder: Callable[[Tensor], Tensor], noise: Tensor, text: Tensor, steps: int, guidance: float = 3.0
) -> Tensor:
    """Return images of ``noise`` and (2 * images, words, text), of which the first half is an empty text.

    The loop computes in the dtype of ``noise``, the models in that of ``text``.
    """
    signal = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square().neg().add(1).cumprod(0)
    times = torch.linspace(999, 0, steps + 1).long()
    latents = noise
    for now, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        time = torch.full((text.shape[0],), float(now), device=noise.device)
        without, with_text = unet(latents.to(text.dtype).repeat(2, 1, 1, 1), time, text).to(noise.dtype).chunk(2)
        found = without + guidance * (with_text - without)
        a, b = signal[now].item(), signal[after].item()
        clean = (latents - (1 - a) ** 0.5 * found) / a**0.5
        latents = b**0.5 * clean + (1 - b) ** 0.5 * found
    return decoder(latents.to(text.dtype))


def optimised(model: nn.Module, attend: Attend) -> nn.Module:
    """Return a copy with fused projections and another function of attention."""
    changed = copy.deepcopy(model)
    for module in changed.modules():
        if isinstance(module, Attention):
            module.fuse()
            module.attend = attend
    return changed


def main(arguments: list[str] | None = None) -> dict[str, list[Row]]:
    command = parser(__doc__, SIZES, dtypes=("float32", "bfloat16"))
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--steps", type=int, default=4)
    command.add_argument("--parts", action="store_true", help="also time one call of the U-Net, and of the decoder")
    options = parsed(command, arguments)
    sizes, dtype, device = SIZES[options.size], getattr(torch, options.dtype), options.device
    torch.manual_seed(0)
    # the layout of GPUs' convolutions: else each call changes that of all weights
    layout = torch.channels_last if device == "cuda" else torch.contiguous_format
    unet, decoder = (make(sizes).to(device, dtype).to(memory_format=layout).eval() for make in (UNet, Decoder))
    noise = torch.randn(options.batch, LATENT_CHANNELS, sizes.latent, sizes.latent).to(device)
    text = torch.randn(2 * options.batch, sizes.words, sizes.text).to(device, dtype)
    text[: options.batch] = text[0]

    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {"eager": (unet, decoder)}
    for name in options.backends.split(","):
        attend = opkit.attention if name == "opkit" else F.scaled_dot_product_attention
        fast = [optimised(each, attend) for each in (unet, decoder)]
        pairs[name] = (compiled(fast[0], name), compiled(fast[1], name))
    with torch.inference_mode():
        time = torch.full((2 * options.batch,), 999.0, device=device)
        latents = noise.to(dtype).repeat(2, 1, 1, 1)
        wide = [copy.deepcopy(each).double() for each in (unet, decoder)]
        exact = draw(wide[0], wide[1], noise.double(), text.double(), options.steps)
        calls: dict[str, dict[str, Callable[[], Tensor]]] = {
            "images": {name: lambda pair=pair: draw(*pair, noise, text, options.steps) for name, pair in pairs.items()},
        }
        if options.parts:
            calls["U-Net"] = {name: lambda pair=pair: pair[0](latents, time, text) for name, pair in pairs.items()}
            calls["decoder"] = {
                name: lambda pair=pair: pair[1](latents[: options.batch]) for name, pair in pairs.items()
            }
        rows = {part: measured(each, device, exact if part == "images" else None) for part, each in calls.items()}
    for part, each in rows.items():
        print(f"\n{part}\n\n{table(each, options.batch, 'images')}")
    assert all(row.error is not None and row.error < TOLERANCE[dtype] for row in rows["images"]), rows
    return rows


if __name__ == "__main__":
    main()
