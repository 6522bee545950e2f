"""The operators of examples/kernels that work on rows, and calls of them: imported by tests, and by the interpreter."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "examples" / "kernels"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))

import add_rms_norm  # noqa: E402  (the folder is on the path from here on)
import dropout  # noqa: E402
import layer_norm  # noqa: E402
import rms_norm  # noqa: E402
import rows  # noqa: E402
import softmax  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODULES = (add_rms_norm, dropout, layer_norm, rms_norm, rows, softmax)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator, what it is called with for an input of a shape, and whether it has a gradient of its own.

    ``scale`` is how large the terms are, of which small results are differences.
    """

    op: Any
    arguments: Callable[..., tuple[Any, ...]]
    gradient: bool = False
    scale: float = 1.0


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers around 1, so that neither means nor squares vanish."""
    return (1 + torch.randn(shape)).to(dtype)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, wide: int, narrow: int = 0) -> list[torch.Tensor]:
    """So many tensors of a shape, and so many of its last dimension."""
    return [normal(*size, dtype=dtype) for size in [shape] * wide + [shape[-1:]] * narrow]


CASES = {
    "rms_norm": Case(rms_norm.rms_norm, lambda shape, dtype: (*inputs(shape, dtype, 1, 1), 1e-5), True),
    "rms_norm_backward": Case(rms_norm.rms_norm_backward, lambda shape, dtype: (*inputs(shape, dtype, 2, 1), 1e-5, 3)),
    "add_rms_norm": Case(add_rms_norm.add_rms_norm, lambda shape, dtype: (*inputs(shape, dtype, 2, 1), 1e-5), True),
    "add_rms_norm_backward": Case(
        add_rms_norm.add_rms_norm_backward, lambda shape, dtype: (*inputs(shape, dtype, 3, 1), 1e-5, 3)
    ),
    "layer_norm": Case(layer_norm.layer_norm, lambda shape, dtype: (*inputs(shape, dtype, 1, 2), 1e-5), True),
    "layer_norm_backward": Case(
        layer_norm.layer_norm_backward, lambda shape, dtype: (*inputs(shape, dtype, 2, 1), 1e-5, 3)
    ),
    "softmax": Case(softmax.softmax, lambda shape, dtype: (*inputs(shape, dtype, 1),), True, 0.0),
    "softmax_backward": Case(
        softmax.softmax_backward,
        lambda shape, dtype: (normal(*shape, dtype=dtype), normal(*shape, dtype=torch.float32).softmax(-1).to(dtype)),
        scale=0.0,
    ),
}


def exact(case: Case, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """The operator's results in float64."""
    return tensors(case.op.reference(*[a.double() if isinstance(a, torch.Tensor) else a for a in arguments]))


def tensors(result: Any) -> list[torch.Tensor]:
    """An operator's results as a list."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def leaves(arguments: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    """The arguments with each tensor changed, and asking for its gradient."""
    return tuple(change(a.detach()).clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments)


def exact_gradients(case: Case, arguments: tuple[Any, ...], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of the tensors among the arguments, in float64, by autograd through the reference."""
    wide = leaves(arguments, torch.Tensor.double)
    wanted = [a for a in wide if isinstance(a, torch.Tensor)]
    return list(torch.autograd.grad(tensors(case.op.reference(*wide)), wanted, [c.double() for c in cotangents]))


# The last bit of each dtype; bfloat16 is cut off and not rounded in Triton's interpreter.
_RELATIVE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}


def check(result: torch.Tensor, expected: torch.Tensor, bits: float = 1.0, scale: float = 0.0) -> None:
    """Compare with a result in float64: ``bits`` last bits of its largest element, or of ``scale`` where that is more."""
    assert result.shape == expected.shape
    relative = bits * _RELATIVE[result.dtype]
    largest = max(scale, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(result.double().cpu(), expected.cpu(), rtol=relative, atol=relative * largest)
