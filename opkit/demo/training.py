"""One training run, timed, and the comparison of two that should be the same."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from opkit.demo.model import GPT
from opkit.errors import DemoError

LEARNING_RATE = 2e-3
WARM_UP = 10  #: steps over which the learning rate rises

#: (step, nats): the losses of eager and compiled may differ by so much up to and with that step. The two round their
#: float32 sums differently, nothing else, so the first losses agree to a few units in the last place (5e-7 each).
#: Training amplifies that, since Adam divides a gradient by its own size: two eager runs from weights one part in a
#: million apart differed by 5e-6 within 100 steps, 3e-4 within 200, 0.015 within 300, and no more than 0.033 within 600.
#: A derivative that is wrong shows at the second step.
TOLERANCES = ((1, 1e-4), (100, 1e-3), (math.inf, 0.2))


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


def train(
    name: str,
    model: GPT,
    loss: Callable[[Tensor], Tensor],
    data: Tensor,
    progress: Callable[[float], None],
    budget: float = math.inf,
) -> Curve:
    """Train ``model`` by AdamW, one step for each batch of ``data`` while there is time.

    Args:
        name: of the curve.
        model: trained in place.
        loss: the loss of ``model`` on a batch of windows: ``model.loss``, or that compiled.
        data: ``(steps, batch, length)``, int64, on the device of ``model``.
        progress: called with the loss after each step.
        budget: seconds after which no further step is begun.
    """
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses: list[float] = []
    seconds: list[float] = []
    for step, windows in enumerate(data):
        began = time.perf_counter()
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
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


def tolerance(step: int) -> float:
    """The largest difference, in nats, that is put down to rounding at ``step``, the first being 1.

    >>> [tolerance(step) for step in (1, 2, 500)]
    [0.0001, 0.001, 0.2]
    """
    return next(nats for last, nats in TOLERANCES if step <= last)


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
        DemoError: they differ by more than :func:`tolerance` at some step.
    """
    for step, gap in enumerate(differences(one, other), start=1):
        if not gap <= tolerance(step):
            raise DemoError(
                f"opkit demo: at step {step} the losses of {one.name} and {other.name} differ by {gap:.1g}, more than "
                f"{tolerance(step):.1g}. Compare the operators of opkit.nn, as they are and under torch.compile."
            )
