"""What an architecture of the zoo is: a builder that needs no download, and inputs for any batch size."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

Size = Literal["tiny", "real"]
Inputs = Callable[[int], dict[str, Any]]
"""Takes a batch size, and returns keyword arguments of the module, on the CPU, floating-point tensors in float32."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A module with random weights, and its inputs.

    Attributes:
        module: without dropout and other randomness, so that runs can be compared.
        inputs: for inference.
        batch: the batch size.
        training_inputs: for training, if they differ: with labels. The loss is the result called "loss", the sum of results if
            all are losses, and else the mean of the squares of all floating-point results.
        batches: further batch sizes, of which each is called in turn; the first is ``batch``.
    """

    module: nn.Module
    inputs: Inputs
    batch: int
    training_inputs: Inputs | None = None

    @property
    def batches(self) -> tuple[int, ...]:
        """Five batch sizes, none of which is 1; torch.compile makes a graph of its own for that one."""
        return tuple(self.batch + step for step in (0, 1, 3, 2, 5))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        name: its name in the zoo.
        family: the file that it is in: "transformers", "timm", "graphs" and the like.
        build: makes its task for a size; the caller seeds torch's generator.
        packages: what it imports, by the names of the modules.
        substitutes: the name in torch's list that it stands for, if today's package has no such model.
    """

    name: str
    family: str
    build: Callable[[Size], Task]
    packages: tuple[str, ...] = ()
    substitutes: str = ""

    def missing_packages(self) -> list[str]:
        """Return its packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


PIP_COMMAND = 'pip install "opkit[models]"'


def package(name: str) -> Any:
    """Import a package of the extra ``models``, which only the process that builds a model needs."""
    return importlib.import_module(name)


def without_dropout(module: nn.Module) -> nn.Module:
    """Set every probability of dropout and of dropped paths to 0, and return the module."""
    for each in module.modules():
        if isinstance(each, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            each.p = 0.0
        for name, value in vars(each).items():
            if isinstance(value, float) and any(
                part in name for part in ("dropout", "drop_prob", "drop_rate", "pdrop", "layerdrop")
            ):
                setattr(each, name, 0.0)
    return module


def images(side: int, channels: int = 3, name: str = "x") -> Inputs:
    """Return random images of ``(batch, channels, side, side)``."""
    return lambda batch: {name: torch.randn(batch, channels, side, side)}
