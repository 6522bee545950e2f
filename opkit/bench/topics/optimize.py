"""``opkit.optimize`` on models of 4 layers and 256 features, compared with the models as they are."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import opkit
from opkit.bench.topics import Case, Setting, Ways

_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000, "use_cache": False}
_GPT2_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_BERT = {**_SIZES, "intermediate_size": 1024, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
_LLAMA = {**_SIZES, "intermediate_size": 768, "num_key_value_heads": 2, "use_cache": False}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertModel", "BertConfig", _BERT),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_GPT2_DROPOUT}),
}


class _ViT(nn.Module):
    """A vision transformer of torch's own modules: 256 patches of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 8, 8)
        layer = nn.TransformerEncoderLayer(
            256, 4, 1024, dropout=0.0, batch_first=True, activation="gelu", norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 100)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(images).flatten(2).mT).mean(1))


def cases(setting: Setting) -> Iterator[Case]:
    """Yield inference and training of each model; those of transformers if it is installed."""
    names = ["ViT", *(_MODELS if importlib.util.find_spec("transformers") else ())]
    for name in names:
        for length in (16,) if setting.quick else (128, 512):
            if name == "ViT" and length != 512 and not setting.quick:
                continue
            for training in (False, True):
                size = "128 x 128 pixels" if name == "ViT" else f"{length} tokens"
                title = f"{name}, {size}, {'training' if training else 'inference'}"
                yield Case(title, functools.partial(_ways, setting.device, name, length, training))


def _model(name: str, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    if name == "ViT":
        return _ViT(), {"images": torch.randn(2, 3, 128, 128)}
    transformers = importlib.import_module("transformers")
    model, config, values = _MODELS[name]
    module = getattr(transformers, model)(getattr(transformers, config)(**values))
    return module, {"input_ids": torch.randint(0, 1000, (2, length))}


def _ways(device: str, name: str, length: int, training: bool) -> Ways:
    torch.compiler.reset()
    plain, inputs = _model(name, length)
    plain, inputs = plain.to(device).train(training), {key: x.to(device) for key, x in inputs.items()}
    compiled, eager = copy.deepcopy(plain), copy.deepcopy(plain)
    opkit.optimize(compiled, verbose=False)
    opkit.optimize(eager, compile=False, verbose=False)
    models = {"opkit": compiled, "as it is": plain, "opkit, compile=False": eager}
    return {way: functools.partial(_step, each, inputs, training) for way, each in models.items()}


def _step(model: nn.Module, inputs: dict[str, Tensor], training: bool) -> None:
    with torch.set_grad_enabled(training):
        out = model(**inputs)
        out = out if isinstance(out, Tensor) else out[0]
    if training:
        out.square().mean().backward()
        model.zero_grad()
