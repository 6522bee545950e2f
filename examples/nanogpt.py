"""Train a GPT on characters in eager mode, by Inductor and by opkit: the same batches, losses side by side, and who is first.

    python examples/nanogpt.py
    python examples/nanogpt.py --size small --dtype bfloat16
    python examples/nanogpt.py --size 124M --device cuda --dtype bfloat16 --steps 200

The text is Python's own documentation, which is in its standard library. All backends train at once, a step each in turn, with
AdamW, a cosine schedule, and gradients that are clipped; with ``--dtype float16`` a GradScaler scales the loss. The example
asserts that the losses agree. See docs/pipelines.md for tables.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from pipeline_table import Row, compiled, measured, parsed, parser, table
from torch import Tensor, nn

import opkit
from opkit.bench.timing import timed
from opkit.masks import Causal


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    rate: float
    vocabulary: int = 128


SIZES = {
    "tiny": Sizes(layers=2, heads=4, width=64, context=64, batch=8, steps=40, rate=1e-3),
    "small": Sizes(layers=6, heads=6, width=384, context=256, batch=8, steps=40, rate=6e-4),
    "124M": Sizes(layers=12, heads=12, width=768, context=1024, batch=12, steps=200, rate=6e-4, vocabulary=50304),
}

TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far a loss may be from that of the first backend, relatively.

Adam divides each gradient by its size: where a gradient is nearly 0, rounding decides the sign of a whole step, so curves move
apart by more than the rounding of one step. At the rates of ``SIZES`` they stay together; at three times the rate of "tiny",
float16 leaves the curve of float32 in eager mode as well.
"""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def opkit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return opkit.attention(q, k, v, mask=Causal())


class Block(nn.Module):
    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.attention = sizes.heads, attention
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """The logits' weight is the embedding's."""

    def __init__(self, sizes: Sizes, attention: Attention = torch_attention) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, sizes.width) for n in (sizes.vocabulary, sizes.context))
        self.blocks = nn.ModuleList(Block(sizes, attention) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = (2 * sizes.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * small)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def characters() -> Tensor:
    """Return Python's documentation as ASCII codes."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)


def batch(text: Tensor, sizes: Sizes, step: int) -> Tensor:
    """Return the sequences of a step, with one character more than the model reads."""
    generator = torch.Generator().manual_seed(step)
    begin = torch.randint(len(text) - sizes.context, (sizes.batch, 1), generator=generator)
    return text[begin + torch.arange(sizes.context + 1)].long()


class Trainer:
    """A model, its optimizer, and the losses and seconds of its steps."""

    def __init__(self, model: GPT, backend: str, sizes: Sizes, device: str, dtype: torch.dtype, steps: int) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.call = model if backend == "eager" else compiled(model, backend, fullgraph=True)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=sizes.rate, betas=(0.9, 0.95), fused=True)
        warmup = max(1, steps // 10)

        def rate(step: int) -> float:
            progress = max(0.0, (step - warmup) / max(1, steps - warmup))
            return (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def loss(self, sequences: Tensor) -> Tensor:
        narrow = self.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(self.device, self.dtype) if narrow else contextlib.nullcontext():
            return self.call(sequences[:, :-1], sequences[:, 1:])

    def gradients(self, sequences: Tensor) -> list[Tensor]:
        """Return the loss and all gradients as one vector: some, such as those of keys' biases, are 0 but for rounding."""
        self.optimizer.zero_grad()
        loss = self.loss(sequences)
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        return [
            loss.detach(),
            torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]) / scale,
        ]

    def step(self, sequences: Tensor) -> None:
        loss, seconds = timed(lambda: self._step(sequences), self.device)
        self.losses.append(loss.item())
        self.seconds.append(seconds)

    def _step(self, sequences: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(sequences)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.detach()


def reached(losses: Sequence[float], goal: float, tolerance: float) -> int | None:
    """Return the first step at which the mean of the last five losses is the goal, or None."""
    steps = range(5, len(losses) + 1)
    return next((n for n in steps if statistics.fmean(losses[n - 5 : n]) <= goal * (1 + tolerance)), None)


def report(trainers: dict[str, Trainer], rows: Sequence[Row], tokens: int, tolerance: float) -> str:
    """Return the losses of each step, tokens per second, and when each backend has the first one's last loss."""
    first = next(iter(trainers.values()))
    steps = len(first.losses)
    lines = ["| step | " + " | ".join(trainers) + " |", "| ---: |" + " ---: |" * len(trainers)]
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        lines.append(f"| {step} | " + " | ".join(f"{each.losses[step]:.4f}" for each in trainers.values()) + " |")
    lines += [
        "",
        "| backend | tokens/s | times as fast | s to eager's last loss | with the first call |",
        "| --- |" + " ---: |" * 4,
    ]
    goal = statistics.fmean(first.losses[-5:])
    for row, each in zip(rows, trainers.values(), strict=True):
        ratio = statistics.median(a / b for a, b in zip(first.seconds, each.seconds, strict=True))
        end = reached(each.losses, goal, tolerance)
        seconds = sum(each.seconds[:end])
        times = "- | -" if end is None else f"{seconds:.2f} | {seconds + row.first:.2f}"
        lines.append(f"| {row.name} | {tokens / statistics.median(each.seconds):,.0f} | {ratio:.2f} | {times} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> tuple[dict[str, list[float]], list[Row]]:
    """Return the losses of each backend, and the table of one step."""
    command = parser(__doc__, SIZES, "eager,inductor,opkit")
    command.add_argument("--steps", type=int)
    options = parsed(command, arguments)
    sizes, dtype, device = SIZES[options.size], getattr(torch, options.dtype), options.device
    steps = options.steps or sizes.steps
    text = characters()
    torch.manual_seed(0)
    initial = GPT(sizes)
    trainers: dict[str, Trainer] = {}
    for backend in options.backends.split(","):
        model = GPT(sizes, opkit_attention if backend == "opkit" else torch_attention)
        model.load_state_dict(initial.state_dict())
        trainers[backend] = Trainer(model.to(device), backend, sizes, device, dtype, steps)

    sequences = batch(text, sizes, 0).to(device)
    exact = Trainer(copy.deepcopy(initial).double().to(device), "eager", sizes, device, torch.float64, steps)
    expected = exact.gradients(sequences)
    calls = {name: (lambda each=each: each.gradients(sequences)) for name, each in trainers.items()}
    rows = measured(calls, device, expected)
    del exact, expected
    tokens = sizes.batch * sizes.context
    print(f"One batch of {sizes.batch} sequences of {sizes.context}, forward and backward, {options.dtype}:\n")
    print(table(rows, tokens))

    for step in range(steps):
        sequences = batch(text, sizes, step).to(device)
        for each in trainers.values():
            each.step(sequences)
    tolerance = TOLERANCES[dtype]
    print(f"\nTraining for {steps} steps:\n\n{report(trainers, rows, tokens, tolerance)}")

    first, *others = trainers.values()
    assert statistics.fmean(first.losses[-5:]) < 0.9 * first.losses[0], first.losses
    for each in others:
        torch.testing.assert_close(torch.tensor(each.losses), torch.tensor(first.losses), rtol=tolerance, atol=0)
    eager, *errors = (row.error or 0.0 for row in rows)
    assert all(error <= max(3 * eager, 1e-5) for error in errors), rows
    return {name: each.losses for name, each in trainers.items()}, rows


if __name__ == "__main__":
    main()
