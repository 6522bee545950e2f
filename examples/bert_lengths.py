"""Encode requests of varied lengths with BERT, compiled once for all lengths: padded, and packed so that padding costs nothing.

    python examples/bert_lengths.py
    python examples/bert_lengths.py --size base --dtype bfloat16 --device cuda

A batch is padded to its longest request, or its requests lie one after another and attention takes their bounds. Sizes are
dynamic: the example asserts that no batch after the first compiles again, and that every token has the same result in each
variant. See docs/pipelines.md for tables.
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
from opkit.bench.compilation import captured_graphs
from opkit.masks import KeyPadding, VarLen


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int
    heads: int
    width: int
    longest: int
    requests: int
    batches: int
    vocabulary: int = 30522


SIZES = {
    "tiny": Sizes(layers=2, heads=4, width=64, longest=48, requests=4, batches=4, vocabulary=1000),
    "small": Sizes(layers=4, heads=8, width=512, longest=256, requests=8, batches=4),
    "base": Sizes(layers=12, heads=12, width=768, longest=512, requests=16, batches=4),
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Its norms come after the sums, as in BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.mlp_norm = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Return ``x`` of (..., tokens, width), attended: ``attention`` takes and returns (..., tokens, heads, head size)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        x = self.norm(x + self.out(attention(q, k, v).flatten(-2)))
        return self.mlp_norm(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, sizes.width) for n in (sizes.vocabulary, sizes.longest))
        self.norm = nn.LayerNorm(sizes.width, 1e-12)
        self.layers = nn.ModuleList(Layer(sizes.width, sizes.heads) for _ in range(sizes.layers))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def encoded(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x, attention)
        return x


class PaddedByTorch(nn.Module):
    """Tokens are (requests, longest); torch's attention takes a matrix of bools, here one row for all queries."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        visible = (positions < lengths[:, None])[:, None, None, :]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)

        return self.bert.encoded(tokens, positions, attention)


class Padded(nn.Module):
    """Tokens are (requests, longest); attention takes the lengths, and skips the keys after them."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return opkit.attention(q, k, v, mask=KeyPadding(lengths), layout="bshd")

        return self.bert.encoded(tokens, positions, attention)


class Packed(nn.Module):
    """Tokens are (total,), request after request; attention takes their bounds. Linear layers and norms see no padding."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: Tensor, positions: Tensor, bounds: Tensor) -> Tensor:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return opkit.attention(q, k, v, mask=VarLen(bounds), layout="thd")

        return self.bert.encoded(tokens, positions, attention)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests in both forms; ``where`` are the places of the packed tokens among the padded ones."""

    padded: Tensor
    lengths: Tensor
    packed: Tensor
    positions: Tensor
    bounds: Tensor
    where: Tensor


def batches(sizes: Sizes, device: str) -> list[Batch]:
    """Return batches of requests; most are short, and few are long, as a geometric distribution has them."""
    generator = torch.Generator().manual_seed(0)
    found: list[Batch] = []
    for number in range(sizes.batches):
        uniform = torch.rand(sizes.requests, generator=generator)
        lengths = (4 - sizes.longest / 4 * torch.log1p(-uniform)).long().clamp(max=sizes.longest - number)
        longest = int(lengths.max())
        tokens = torch.randint(1, sizes.vocabulary, (sizes.requests, longest), generator=generator)
        valid = torch.arange(longest) < lengths[:, None]
        bounds = F.pad(lengths.cumsum(0), (1, 0))
        where = valid.flatten().nonzero().flatten()
        parts = (tokens * valid, lengths, tokens[valid], where % longest, bounds.int(), where)
        batch = Batch(*(part.to(device) for part in parts))
        torch._dynamo.mark_dynamic(batch.padded, 1)
        torch._dynamo.mark_dynamic(batch.packed, 0)
        torch._dynamo.mark_dynamic(batch.positions, 0)
        found.append(batch)
    return found


Run = Callable[[Batch], Tensor]


def padded(call: Callable[..., Tensor]) -> Run:
    """Return a function of a batch that gives the results of its tokens, without those of the padding."""
    return lambda batch: call(batch.padded, batch.lengths).flatten(0, 1)[batch.where]


def packed(call: Callable[..., Tensor]) -> Run:
    return lambda batch: call(batch.packed, batch.positions, batch.bounds)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> list[Row]:
    """Return the table."""
    command = parser(__doc__, SIZES)
    options = parsed(command, arguments)
    sizes, device = SIZES[options.size], options.device
    torch.manual_seed(0)
    exact = Bert(sizes).double().to(device)
    bert = copy.deepcopy(exact).to(getattr(torch, options.dtype))
    exact.load_state_dict(bert.state_dict())  # what rounding of the parameters changes is no error of a backend
    runs: dict[str, Run] = {"eager, padded": padded(PaddedByTorch(bert))}
    for backend in options.backends.split(","):
        module = Padded(bert) if backend == "opkit" else PaddedByTorch(bert)
        runs[f"{backend}, padded"] = padded(compiled(module, backend, fullgraph=True))
        if backend == "opkit":
            runs[f"{backend}, packed"] = packed(compiled(Packed(bert), backend, fullgraph=True))
    requests = batches(sizes, device)
    expected = [padded(PaddedByTorch(exact))(batch) for batch in requests]
    graphs: dict[str, list[int]] = {}

    def encoded(name: str) -> list[Tensor]:
        results: list[Tensor] = []
        counts = graphs.setdefault(name, [])
        for batch in requests:
            before = captured_graphs()
            results.append(runs[name](batch))
            counts.append(captured_graphs() - before)
        return results

    rows = measured({name: (lambda name=name: encoded(name)) for name in runs}, device, expected)
    tokens, places = sum(len(each.packed) for each in requests), sum(each.padded.numel() for each in requests)
    lengths = [each.padded.shape[1] for each in requests]
    print(
        f"{len(requests)} batches of {sizes.requests} requests, padded to {lengths} tokens, {options.dtype};"
        f" {tokens} of {places} tokens are no padding:\n"
    )
    print(table(rows, tokens))
    for name, (first, *others) in graphs.items():
        assert first == int("eager" not in name), (name, first)
        assert sum(others) == 0, f"{name}: later batches were captured again"
    eager, *errors = (row.error or 0.0 for row in rows)
    assert all(error <= max(2 * eager, 1e-5) for error in errors), rows
    return rows


if __name__ == "__main__":
    main()
