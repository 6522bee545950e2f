"""A kernel with a mistake at the end of a row, found and made small; then the kernel without it.

The kernel works on blocks of 64 elements, as vectorised kernels do, and treats what is left over wrongly. Tests on round sizes
pass. ``opkit.check`` needs the arguments and a reference::

    python examples/check_operator.py
"""

import torch
from torch import Tensor

import opkit
from opkit.testing import tensor

BLOCK = 64


@torch.library.custom_op("check_example::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    """``x * factor``, wrong after the last whole block of a row."""
    out = x.clone()
    whole = x.shape[-1] // BLOCK * BLOCK if x.shape[-1] > BLOCK else x.shape[-1]
    out[..., :whole] *= factor
    return out


@scale.register_fake
def _(x, factor):
    return torch.empty_like(x)


def fixed(x: Tensor, factor: float) -> Tensor:
    """``x * factor``."""
    return x * factor


def check(op):
    """The check of either, for what an operator computes."""
    return opkit.check(
        op, args=(tensor("b n", torch.float32), 0.5), reference=fixed, properties=["numbers"], database=False
    )


def main() -> None:
    """Check both, and show the report of the first."""
    assert torch.equal(scale(torch.ones(8, 1024), 0.5), torch.full((8, 1024), 0.5))  # round sizes are right
    report = check(scale)
    print(report)
    assert not report.ok
    failure = report.failures[0]
    assert failure.args[0].shape == (1, BLOCK + 1)  # the smallest that goes wrong
    print(failure.repro)
    assert check(fixed).ok


if __name__ == "__main__":
    main()
