"""One training run, timed, and the comparison of two that should be the same."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opkit.demo.model import GPT
from opkit.errors import DemoError

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
    """The steps of training on ``data``, ``(steps, batch, length)``.

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
    """How far apart the losses of two runs are at each step, in nats."""
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
