"""Recurrent networks, state-space models and speech."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opkit.bench.architecture import Architecture, Inputs, Size, Task, package, without_dropout


class LanguageModel(nn.Module):
    """Tokens to logits of the next ones, by a recurrent network."""

    def __init__(self, recurrent: type[nn.LSTM] | type[nn.GRU], vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = recurrent(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, length, vocabulary)`` for ``(batch, length)``."""
        return self.head(self.recurrent(self.embedding(tokens))[0])


def _recurrent(kind: type[nn.LSTM] | type[nn.GRU], size: Size) -> Task:
    vocabulary, width, length = (64, 32, 12) if size == "tiny" else (10000, 1024, 256)
    inputs: Inputs = lambda batch: {"tokens": torch.randint(0, vocabulary, (batch, length))}  # noqa: E731
    return Task(LanguageModel(kind, vocabulary, width), inputs, 2 if size == "tiny" else 32)


def _lstm(size: Size) -> Task:
    return _recurrent(nn.LSTM, size)


def _gru(size: Size) -> Task:
    return _recurrent(nn.GRU, size)


def _mamba(size: Size) -> Task:
    """Mamba (Gu and Dao, 2023), by the scan that transformers writes in torch's operators."""
    transformers = package("transformers")
    tiny = {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    length = 12 if size == "tiny" else 256
    config = transformers.MambaConfig(use_cache=False, **(tiny if size == "tiny" else {"num_hidden_layers": 12}))
    module = transformers.MambaForCausalLM(config)
    inputs: Inputs = lambda batch: {"input_ids": torch.randint(4, config.vocab_size, (batch, length))}  # noqa: E731
    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 8)


def _wav2vec2(size: Size) -> Task:
    """wav2vec 2.0 (Baevski et al., 2020), without the random masks of its training."""
    transformers = package("transformers")
    tiny = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "conv_dim": (16, 16, 16),
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 3),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    config = transformers.Wav2Vec2Config(apply_spec_augment=False, layerdrop=0.0, **(tiny if size == "tiny" else {}))
    for name in vars(config):
        if "dropout" in name:
            setattr(config, name, 0.0)
    samples = 1000 if size == "tiny" else 80000
    module = transformers.Wav2Vec2ForCTC(config)
    inputs: Inputs = lambda batch: {"input_values": torch.randn(batch, samples)}  # noqa: E731
    return Task(without_dropout(module), inputs, 2 if size == "tiny" else 8)


_BUILDERS = {"lstm": _lstm, "gru": _gru, "mamba": _mamba, "wav2vec2": _wav2vec2}
ARCHITECTURES = [
    Architecture(name, "sequences", build, () if name in ("lstm", "gru") else ("transformers",))
    for name, build in _BUILDERS.items()
]
