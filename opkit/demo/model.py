"""A byte-level GPT: pre-norm blocks of causal attention and SwiGLU, built from the operators of :mod:`opkit.nn`."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.nn import RMSNorm, SwiGLU, cross_entropy, rotary_embedding


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a model; the defaults make one of 2.0 million parameters."""

    vocabulary: int = 256
    layers: int = 3
    heads: int = 7
    width: int = 224
    hidden: int = 672
    context: int = 128


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attend within ``x``, ``(batch, length, width)``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        q, k = rotary_embedding(q, positions), rotary_embedding(k, positions)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then the feed-forward layer, each normalised before and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = RMSNorm(size.width)
        self.feed_forward = SwiGLU(size.width, size.hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply the block to ``x``, ``(batch, length, width)``."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """The language model; the embedding of a byte is also the weight of its logit."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=size.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next byte, ``(batch, length, vocabulary)``, for ``tokens``, ``(batch, length)``."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, window: Tensor) -> Tensor:
        """The mean cross-entropy, in nats, of each byte of ``window``, ``(batch, length + 1)``, given those before."""
        return cross_entropy(self(window[:, :-1]), window[:, 1:])


def build(size: Size, seed: int, device: torch.device) -> GPT:
    """A model with the weights that ``seed`` gives, whatever the device; torch's own seed is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(size).to(device)


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, *, count: int, temperature: float, seed: int) -> bytes:
    """Draw ``count`` bytes that follow ``prompt``, ``(length,)``, one at a time, each from as many before it.

    The window stays as long as the prompt, so every step has the same shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt.tolist()
    for _ in range(count):
        window = torch.tensor([tokens[-len(prompt) :]], device=prompt.device)
        odds = (model(window)[0, -1].float().cpu() / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(tokens[len(prompt) :])
