"""The models that benchmarks/compile.py compiles, with random weights and inputs: no network is needed.

``MODELS`` are for CPUs. ``GPU_MODELS`` have larger batches, tokens from the whole vocabulary, and a Llama four times as wide.

Four are those of ``transformers``, with configurations written here; a ResNet-50 is written here too, and the last is the
demo's GPT, which is made of opkit's own operators. Dropout is each configuration's own: on in training.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.demo.model import GPT, Size


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and what it is called with.

    Attributes:
        build: makes the module, in training mode, for a number of layers (None: its own); ``small`` makes a tiny one.
        inputs: of a batch and a length (or a side, for images): what the module is called with, labels included.
        batch: for inference.
        length: tokens, or pixels a side.
        training_batch: the same as ``batch`` where None.
    """

    build: Callable[[int | None, bool], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    batch: int
    length: int
    training_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to do again and again: a forward pass, or a forward and a backward pass.

    Attributes:
        module: in the mode and of the requested dtype.
        inputs: keyword arguments for it.
        training: whether there is a backward pass.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    training: bool

    def step(self, compiled: Callable[..., Any] | None = None) -> Callable[[], Tensor]:
        """The thing itself, through ``compiled`` where there is one: returns the logits, or the loss."""
        call = self.module if compiled is None else compiled
        return self._trained(call) if self.training else self._inferred(call)

    def _inferred(self, call: Callable[..., Any]) -> Callable[[], Tensor]:
        @torch.no_grad()
        def inference() -> Tensor:
            return call(**self.inputs)["logits"]

        return inference

    def _trained(self, call: Callable[..., Any]) -> Callable[[], Tensor]:
        def training() -> Tensor:
            self.module.zero_grad(set_to_none=True)
            loss = call(**self.inputs)["loss"]
            loss.backward()
            return loss.detach()

        return training


def task(
    name: str,
    mode: str,
    dtype: torch.dtype,
    *,
    small: bool = False,
    layers: int | None = None,
    shape: tuple[int, int] | None = None,
    device: str = "cpu",
) -> Task:
    """The task of a model.

    Args:
        name: one of :data:`MODELS`.
        mode: "inference", "training", or "gradients", which is training without dropout.
        dtype: of weights and images.
        small: a tiny model and a tiny batch, which say nothing of speed, to try the benchmark itself.
        layers: instead of the model's own.
        shape: a batch and a length, instead of the model's own.
        device: where weights and inputs are made; not on the CPU, the model is that of :data:`GPU_MODELS`, if not ``small``.
    """
    model = MODELS[name] if small or device == "cpu" else GPU_MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        module = model.build(layers, small).to(dtype).train(mode == "training")
        batch = model.training_batch if mode != "inference" and model.training_batch else model.batch
        shape = shape or ((2, 32) if small else (batch, model.length))
        return Task(module, inputs_of(model, mode, dtype, shape), mode != "inference")


def inputs_of(model: Model, mode: str, dtype: torch.dtype, shape: tuple[int, int]) -> dict[str, Tensor]:
    """What a model is called with for a batch and a length; labels where it trains."""
    inputs = model.inputs(*shape)
    return {key: _cast(value, dtype) for key, value in inputs.items() if key != "labels" or mode != "inference"}


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _tokens(vocabulary: int) -> Callable[[int, int], dict[str, Tensor]]:
    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, vocabulary, (batch, length))
        return {"input_ids": tokens, "labels": tokens.roll(1)}

    return inputs


def _images(batch: int, side: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 10, (batch,))}


_VOCABULARY = 256  # the tiny models' own, and the largest token of every model: the others' are larger

_NARROW = {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_attention_heads": 4}


def _bert(layers: int | None, small: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM  # takes seconds to import, and not every model needs it

    narrow = {**_NARROW, "intermediate_size": 128} if small else {}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers or (2 if small else 12), **narrow))


def _gpt2(layers: int | None, small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    narrow = (
        {"vocab_size": _VOCABULARY, "n_embd": 64, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0} if small else {}
    )
    made = GPT2LMHeadModel(GPT2Config(n_layer=layers or (2 if small else 12), use_cache=False, **narrow))
    made.loss_type = "ForCausalLM"  # where it is None, forward logs a warning, which breaks the graph
    return made


def _llama(layers: int | None, small: bool, large: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32000, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1376}
    sizes |= {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 5632} if large else {}
    sizes |= {**_NARROW, "intermediate_size": 172} if small else {}
    heads = sizes["num_attention_heads"] // 2
    config = LlamaConfig(
        num_hidden_layers=layers or (2 if small else 8), num_key_value_heads=heads, use_cache=False, **sizes
    )
    return LlamaForCausalLM(config)


def _vit(layers: int | None, small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    narrow = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32} if small else {}
    config = ViTConfig(num_hidden_layers=layers or (2 if small else 12), num_labels=10, **narrow)
    return ViTForImageClassification(config)


class Bottleneck(nn.Module):
    """He et al., 2016 (arXiv:1512.03385): 1x1, 3x3 and 1x1 convolutions around which the input is added; stride in the 3x3."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = _convolution(channels, width, 1, 1)
        self.middle = _convolution(width, width, 3, stride)
        self.expand = _convolution(width, 4 * width, 1, 1)
        changes = stride != 1 or channels != 4 * width
        self.shortcut = _convolution(channels, 4 * width, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to ``x``, ``(batch, channels, height, width)``."""
        inner = F.relu(self.middle(F.relu(self.reduce(x))))
        return F.relu(self.expand(inner) + self.shortcut(x))


def _convolution(channels: int, width: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class ResNet(nn.Module):
    """A ResNet of bottlenecks; ``(3, 4, 6, 3)`` of them make the ResNet-50."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        channels, made = width, []
        for stage, count in enumerate(blocks):
            for number in range(count):
                made.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(channels, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The logits of ``pixel_values``, ``(batch, 3, height, width)``, and the loss where there are ``labels``."""
        logits = self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))
        return {"logits": logits} if labels is None else {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def _resnet(layers: int | None, small: bool) -> nn.Module:
    blocks = (1, 1) if small else (3, 4, 6, 3)
    return ResNet(blocks if layers is None else (layers,), 16 if small else 64, 1000)


class DemoGPT(nn.Module):
    """The demo's GPT, called as the models of ``transformers`` are."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = GPT(size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The logits of ``input_ids``, ``(batch, length)``; with ``labels``, the loss in their place, as the demo trains."""
        return {"logits": self.model(input_ids)} if labels is None else {"loss": self.model.loss(input_ids)}


def _demo(layers: int | None, small: bool) -> nn.Module:
    own = Size(width=56, hidden=168) if small else Size()
    return DemoGPT(dataclasses.replace(own, layers=layers or own.layers))


MODELS: dict[str, Model] = {
    "bert": Model(_bert, _tokens(_VOCABULARY), 8, 128),
    "gpt2": Model(_gpt2, _tokens(_VOCABULARY), 4, 256),
    "llama": Model(_llama, _tokens(_VOCABULARY), 4, 256),
    "vit": Model(_vit, _images, 8, 224),
    "resnet50": Model(_resnet, _images, 8, 224, training_batch=4),
    "demo": Model(_demo, _tokens(_VOCABULARY), 4, 129),
}

GPU_MODELS: dict[str, Model] = {
    "llama": Model(functools.partial(_llama, large=True), _tokens(32000), 4, 2048),
    "bert": Model(_bert, _tokens(30522), 16, 512),
    "vit": Model(_vit, _images, 64, 224),
    "gpt2": Model(_gpt2, _tokens(50257), 8, 1024),
    "resnet50": Model(_resnet, _images, 64, 224),
    "demo": Model(_demo, _tokens(_VOCABULARY), 64, 129),
}

TRANSFORMERS = ("llama", "bert", "vit", "gpt2")
"""The models that need the package ``transformers``."""
