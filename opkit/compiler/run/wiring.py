"""The calling convention of compiled graphs."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GraphResult:
    """A result of the user's function.

    Attributes:
        input: the number of the input that is this result; None for a new tensor.
        differentiable: whether gradients flow through it.
        is_view: whether it is a view of a tensor that the user does not see, which autograd must not know.
    """

    input: int | None
    differentiable: bool
    is_view: bool = False


@dataclasses.dataclass(frozen=True)
class Wiring:
    """The calling convention of the graphs of one graph of Dynamo's.

    Attributes:
        inputs: the number of inputs.
        results: the user's results, which the graph returns first, in order.
        written: the inputs that the graph writes to, which autograd must know.
        detached: the inputs with a history that never get a gradient: they are detached.
        autocast: whether autocast was on; it must not apply a second time.
        deterministic: whether the backward was compiled with deterministic algorithms only.
    """

    inputs: int
    results: tuple[GraphResult, ...]
    written: tuple[int, ...]
    detached: tuple[int, ...]
    autocast: bool
    deterministic: bool
