"""The demo's model, the text that it is trained on, and its training.

The model is a byte-level GPT: pre-norm blocks of causal attention and SwiGLU, built from the operators of :mod:`opkit.nn`. The
text is Python's own standard library, which every machine that runs this has. Two training runs that should be the same are
compared.
"""

from __future__ import annotations

import dataclasses
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.errors import DemoError
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
        """Return the logits of each next byte, ``(batch, length, vocabulary)``, for ``tokens``, ``(batch, length)``."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, window: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of each byte of ``window``, ``(batch, length + 1)``, after those before it."""
        return cross_entropy(self(window[:, :-1]), window[:, 1:])


def build(size: Size, seed: int, device: torch.device) -> GPT:
    """Return a model with the weights that ``seed`` determines, the same on every device; torch's own seed stays unchanged."""
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


# ---- the text --------------------------------------------------------------------------------------------------------


LIMIT = 4_000_000  #: bytes; a run sees less than this once
_GENERATED = "_sysconfigdata"  #: written by the machine that built Python, so left out


def read_text(folder: Path | None = None, limit: int = LIMIT) -> Tensor:
    """Return the first ``limit`` bytes of the ``.py`` files of ``folder``, in the order of their names.

    Args:
        folder: where to look; the standard library of the running Python where it is left out.
        limit: the most bytes to return.

    Returns:
        ``(bytes,)``, uint8.

    Raises:
        DemoError: there are no sources there.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    files = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith(_GENERATED)]
    text = b"".join(path.read_bytes() for path in files)[:limit]
    if not text:
        raise DemoError(
            f"opkit demo: no .py files in {folder}, where the standard library of this Python should be. "
            "It may be zipped or stored as bytecode alone: run the demo with a Python that has its sources."
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, *, steps: int, batch: int, length: int, seed: int) -> Tensor:
    """Return windows of ``text`` drawn uniformly, the same for the same seed on every machine.

    Returns:
        ``(steps, batch, length)``, int64.

    Raises:
        DemoError: ``text`` is shorter than one window.
    """
    if len(text) < length:
        raise DemoError(f"opkit demo: {len(text)} bytes of text are too few for windows of {length}.")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (steps, batch, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


# ---- training --------------------------------------------------------------------------------------------------------


LEARNING_RATE = 2e-3
WARM_UP = 10  #: steps over which the learning rate rises; it then falls linearly, to zero at the last

#: Eager and compiled round their float32 sums differently, nothing else, so their losses begin a few units in the last
#: place (5e-7) apart. Training amplifies that tenfold every twenty-odd steps, since Adam divides a gradient by its own
#: size, until single losses say nothing. On a CPU and an H200 the largest difference was 1e-6 within 100 steps, 6e-4
#: within 200 and 0.09 within 1000, where the means of a hundred losses were 0.003 apart. So each of the early losses is
#: compared, and the mean of the last ones. A derivative that is wrong shows at the second step.
EARLY = 100
TOLERANCE = 1e-3
TOLERANCE_END = 0.05


@dataclasses.dataclass(frozen=True)
class Curve:
    """The losses of one run, in nats for each byte, and the seconds that each step took."""

    name: str
    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """The median time of a step."""
        return sorted(self.seconds)[len(self.seconds) // 2]

    @property
    def start(self) -> float:
        """The mean loss of the first tenth of the steps."""
        return _mean(self.losses[: self._tenth])

    @property
    def end(self) -> float:
        """The mean loss of the last tenth of the steps."""
        return _mean(self.losses[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.losses) // 10)


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


Step = tuple[Tensor, float]  #: a batch of windows and the learning rate


def schedule(data: Tensor) -> list[Step]:
    """Return the steps of training on ``data``, ``(steps, batch, length)``.

    >>> [round(1e3 * rate, 2) for _, rate in schedule(torch.zeros(20, 1, 1))][::5]
    [0.2, 1.2, 1.0, 0.5]
    """
    fractions = [min((step + 1) / WARM_UP, 1 - step / len(data)) for step in range(len(data))]
    return [(windows, LEARNING_RATE * fraction) for windows, fraction in zip(data, fractions, strict=True)]


def train(
    name: str,
    model: GPT,
    loss: Callable[[Tensor], Tensor],
    data: Sequence[Step],
    progress: Callable[[float], None],
    budget: float = math.inf,
) -> Curve:
    """Train ``model`` by AdamW on the steps of ``data``, while there is time.

    Args:
        name: of the curve.
        model: trained in place.
        loss: the loss of ``model`` on a batch of windows: ``model.loss``, or that compiled.
        data: see :func:`schedule`; on the device of ``model``.
        progress: called with the loss after each step.
        budget: seconds after which no further step is begun.
    """
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses: list[float] = []
    seconds: list[float] = []
    for windows, rate in data:
        began = time.perf_counter()
        optimiser.param_groups[0]["lr"] = rate
        losses.append(_step(optimiser, loss(windows)))
        seconds.append(time.perf_counter() - began)
        progress(losses[-1])
        if sum(seconds) > budget:
            break
    return Curve(name, tuple(losses), tuple(seconds))


def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> float:
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()  # waits for the device, so that a clock read next is read after the step


def differences(one: Curve, other: Curve) -> tuple[float, ...]:
    """Return the differences between the losses of two runs at each step, in nats."""
    return tuple(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def check_falls(curve: Curve) -> None:
    """Raise unless the losses of ``curve`` fell; of a single step nothing can be said.

    Raises:
        DemoError: the last tenth of the steps has no lower mean loss than the first.
    """
    if len(curve.losses) > 1 and not curve.end < curve.start:
        raise DemoError(
            f"opkit demo: over {len(curve.losses)} steps the {curve.name} loss did not fall, but went from "
            f"{curve.start:.4f} to {curve.end:.4f}. Try torch.autograd.gradcheck on the operators of opkit.nn."
        )


def check_agree(one: Curve, other: Curve) -> None:
    """Raise unless two runs of the same model on the same data have the same losses, to rounding.

    Raises:
        DemoError: one of the :data:`EARLY` losses differs by more than :data:`TOLERANCE`, or the means of the last tenth
            by more than :data:`TOLERANCE_END`.
    """
    for step, gap in enumerate(differences(one, other)[:EARLY], start=1):
        _check_gap(f"at step {step} the losses", gap, TOLERANCE)
    _check_gap("the mean last losses", abs(one.end - other.end), TOLERANCE_END)


def _check_gap(subject: str, gap: float, tolerance: float) -> None:
    if not gap <= tolerance:
        raise DemoError(
            f"opkit demo: {subject}, eager and compiled, differ by {gap:.1g}, more than {tolerance:g}. "
            "Compare the operators of opkit.nn, as they are and under torch.compile."
        )
