"""What diffusion models are made of, from ``diffusers``: a U-Net, a transformer, and an autoencoder."""

from __future__ import annotations

import torch

from opkit.bench.architecture import Architecture, Inputs, Size, Task, package, without_dropout


def _unet(size: Size) -> Task:
    """That of Stable Diffusion 1 (Rombach et al., 2022)."""
    tiny = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 4,
    }
    side, width, length = (8, 32, 12) if size == "tiny" else (64, 768, 77)
    module = package("diffusers").UNet2DConditionModel(
        sample_size=side, cross_attention_dim=width, **(tiny if size == "tiny" else {})
    )

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        return {
            "sample": torch.randn(batch, 4, side, side),
            "timestep": torch.randint(0, 1000, (batch,)),
            "encoder_hidden_states": torch.randn(batch, length, width),
        }

    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 4)


def _dit(size: Size) -> Task:
    """The diffusion transformer (Peebles and Xie, 2023): XL/2."""
    tiny = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
    side = 8 if size == "tiny" else 32
    module = package("diffusers").DiTTransformer2DModel(sample_size=side, **(tiny if size == "tiny" else {}))

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        return {
            "hidden_states": torch.randn(batch, 4, side, side),
            "timestep": torch.randint(0, 1000, (batch,)),
            "class_labels": torch.randint(0, 1000, (batch,)),
        }

    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 8)


def _vae(size: Size) -> Task:
    """The autoencoder of Stable Diffusion; its code is the mean, not a sample."""
    widths = (16, 32) if size == "tiny" else (128, 256, 512, 512)
    side = 32 if size == "tiny" else 256
    module = package("diffusers").AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        latent_channels=4,
        layers_per_block=1 if size == "tiny" else 2,
        norm_num_groups=8 if size == "tiny" else 32,
    )
    inputs: Inputs = lambda batch: {"sample": torch.randn(batch, 3, side, side)}  # noqa: E731
    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 4)


_BUILDERS = {"diffusion_unet": _unet, "dit": _dit, "diffusion_vae": _vae}
ARCHITECTURES = [Architecture(name, "diffusion", build, ("diffusers",)) for name, build in _BUILDERS.items()]
