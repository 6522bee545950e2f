"""Detection, segmentation, points, super-resolution, and the encoder of Segment Anything."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.bench.architecture import Architecture, Inputs, Size, Task, images, package, without_dropout


class Detector(nn.Module):
    """A detector of torchvision, which takes images of one size as one tensor, and with boxes returns its losses.

    The number of boxes that it finds depends on the images.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor, boxes: Tensor | None = None, labels: Tensor | None = None) -> Any:
        """Return boxes, scores and labels of each image of ``(batch, 3, side, side)``; in training, the losses."""
        if boxes is None or labels is None:
            return self.detector([*x])
        targets = [{"boxes": a, "labels": b} for a, b in zip(boxes, labels, strict=True)]
        return self.detector([*x], targets)


_DETECTORS = {
    "faster_rcnn": "fasterrcnn_mobilenet_v3_large_320_fpn",
    "retinanet": "retinanet_resnet50_fpn",
    "ssdlite": "ssdlite320_mobilenet_v3_large",
}


def _detector(name: str, size: Size) -> Task:
    side = 96 if size == "tiny" else 640
    sides = {} if name == "ssdlite" else {"min_size": side, "max_size": side}
    make = getattr(package("torchvision.models.detection"), _DETECTORS[name])
    module = Detector(make(weights=None, weights_backbone=None, num_classes=5, **sides))
    inputs = images(side)

    def training(batch: int) -> dict[str, Any]:
        corners = torch.rand(batch, 3, 2) * side * 0.5
        boxes = torch.cat([corners, corners + side * 0.3], -1)
        return {**inputs(batch), "boxes": boxes, "labels": torch.randint(1, 5, (batch, 3))}

    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 8, training)


_SEGMENTATION = {"deeplab": "deeplabv3_mobilenet_v3_large", "fcn": "fcn_resnet50"}


def _segmentation(name: str, size: Size) -> Task:
    make = getattr(package("torchvision.models.segmentation"), _SEGMENTATION[name])
    module = make(weights=None, weights_backbone=None, num_classes=5)
    return Task(without_dropout(module), images(64 if size == "tiny" else 512), 2 if size == "tiny" else 8)


def _sam_encoder(size: Size) -> Task:
    """The image encoder of Segment Anything (Kirillov et al., 2023): windowed attention, relative positions; ViT-B."""
    transformers = package("transformers")
    tiny = {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 8,
        "window_size": 4,
        "global_attn_indexes": [1],
        "mlp_dim": 64,
    }
    config = transformers.SamVisionConfig(**(tiny if size == "tiny" else {}))
    config.initializer_range = 0.02  # that of ViT; the default's weights of 1e-10 make results of 1e-21
    inputs = images(config.image_size, name="pixel_values")
    return Task(without_dropout(transformers.SamVisionModel(config)), inputs, 2)


class PointNet(nn.Module):
    """Classes of sets of points (Qi et al., 2017), with the transform of the input."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.transform = nn.Sequential(*self._block(3, width), *self._block(width, 2 * width))
        self.matrix = nn.Linear(2 * width, 9)
        self.features = nn.Sequential(*self._block(3, width), *self._block(width, 2 * width))
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, classes))

    @staticmethod
    def _block(a: int, b: int) -> tuple[nn.Module, ...]:
        return nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()

    def forward(self, points: Tensor) -> Tensor:
        """Return logits for ``(batch, 3, points)``."""
        matrix = self.matrix(self.transform(points).amax(-1)).unflatten(-1, (3, 3))
        turned = (matrix + torch.eye(3, dtype=points.dtype, device=points.device)) @ points
        return self.head(self.features(turned).amax(-1))


def _pointnet(size: Size) -> Task:
    width, count = (16, 64) if size == "tiny" else (512, 4096)
    inputs: Inputs = lambda batch: {"points": torch.randn(batch, 3, count)}  # noqa: E731
    return Task(PointNet(width, 10), inputs, 2 if size == "tiny" else 32)


class SuperResolution(nn.Module):
    """Residual blocks and sub-pixel convolutions (Shi et al., 2016; Lim et al., 2017), added to a bicubic enlargement."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.PReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks)
        )
        self.tail = nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return images of twice the side."""
        hidden = self.head(x)
        for block in self.blocks:
            hidden = hidden + 0.1 * block(hidden)
        return self.tail(hidden) + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)


def _super_resolution(size: Size) -> Task:
    module = SuperResolution(*((8, 2) if size == "tiny" else (64, 16)))
    return Task(module, images(16 if size == "tiny" else 128), 2 if size == "tiny" else 8)


ARCHITECTURES = [
    Architecture("sam_encoder", "vision", _sam_encoder, ("transformers",)),
    *(Architecture(name, "vision", functools.partial(_detector, name), ("torchvision",)) for name in _DETECTORS),
    *(Architecture(name, "vision", functools.partial(_segmentation, name), ("torchvision",)) for name in _SEGMENTATION),
    Architecture("pointnet", "vision", _pointnet),
    Architecture("super_resolution", "vision", _super_resolution),
]
