"""Gated linear units in Triton: SwiGLU and GeGLU, and their gradients. Every element is read and written once.

Forward: ``silu(gate) * up``, or ``gelu(gate) * up`` with the tanh form of GELU. Memory traffic is three elements for each one
of the result, 6 bytes in bfloat16: 33.5 million elements (8192 x 4096) take 47 us at 4.3 TB/s, the time to copy half as
many bytes. Backward: ``grad``, ``gate`` and ``up`` in, the gradients of both out: five elements, 10 bytes.

Both activations are ``x * sigmoid(u(x))``, for ``tanh(y) = 2 * sigmoid(2 * y) - 1``; so one kernel serves both, with one
exponential and one inverse root an element. The rows of ``gate`` and ``up`` may lie apart, as those of the two halves of one
projection do: ``swiglu(*projected.chunk(2, -1))`` copies nothing::

    python examples/kernels/glu.py

Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202; Hendrycks and Gimpel, "Gaussian
Error Linear Units", 2016, https://arxiv.org/abs/1606.08415.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit

LOW = [torch.float32, torch.bfloat16, torch.float16]
"""The dtypes of the kernels, which compute in float32."""

_SLOPE = 2 * math.sqrt(2 / math.pi)  # gelu(x) = x * sigmoid(_SLOPE * (x + _CUBIC * x**3))
_CUBIC = 0.044715
SLOPE, SLOPE_CUBIC = tl.constexpr(_SLOPE), tl.constexpr(_SLOPE * _CUBIC)
LOG2_E = tl.constexpr(math.log2(math.e))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- the operators --------------------------------------------------------------------------------------------------


@opkit.custom_op("kernels::swiglu")
def swiglu(gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """``silu(gate) * up``.

    Args:
        gate: ``(*batch, d)``, any floating dtype.
        up: ``(*batch, d)``, the dtype of ``gate``.

    Returns:
        ``(*batch, d)`` in the dtype of ``gate``; computed in float32, or float64 for float64 ``gate``.
    """
    return (F.silu(_wide(gate)) * up).to(gate.dtype)


@opkit.custom_op("kernels::geglu")
def geglu(gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """``gelu(gate, approximate="tanh") * up``; arguments and result as those of :data:`swiglu`."""
    return (F.gelu(_wide(gate), approximate="tanh") * up).to(gate.dtype)


@opkit.custom_op("kernels::swiglu_backward")
def swiglu_backward(
    grad: Float[Tensor, "*batch d"], gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]]:
    """The gradients of ``gate`` and ``up`` from that of :data:`swiglu`; all of one shape and dtype."""
    x = _wide(gate)
    share = torch.sigmoid(x)
    slope = share * (1 + x * (1 - share))
    return (grad * up * slope).to(gate.dtype), (grad * (x * share)).to(up.dtype)


@opkit.custom_op("kernels::geglu_backward")
def geglu_backward(
    grad: Float[Tensor, "*batch d"], gate: Float[Tensor, "*batch d"], up: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]]:
    """The gradients of ``gate`` and ``up`` from that of :data:`geglu`; all of one shape and dtype."""
    x = _wide(gate)
    share = torch.sigmoid(_SLOPE * (x + _CUBIC * x**3))
    slope = share + x * share * (1 - share) * _SLOPE * (1 + 3 * _CUBIC * x.square())
    return (grad * up * slope).to(gate.dtype), (grad * (x * share)).to(up.dtype)


# ---- the kernels ----------------------------------------------------------------------------------------------------


# One over something by way of its inverse root, for which GPUs have an instruction; a division takes eight.
@triton.jit
def _sigmoid(u):
    root = tl.rsqrt(1 + tl.exp2(u * -LOG2_E))
    return root * root


@triton.jit
def _gated(x, up, GELU: tl.constexpr):
    return x * _sigmoid(x * (x * x * SLOPE_CUBIC + SLOPE) if GELU else x) * up


@triton.jit
def _gradients(grad, x, up, GELU: tl.constexpr):
    share = _sigmoid(x * (x * x * SLOPE_CUBIC + SLOPE) if GELU else x)
    active = x * share
    slope_of_u = x * x * (3 * SLOPE_CUBIC) + SLOPE if GELU else 1.0
    return grad * up * (share + active * (1 - share) * slope_of_u), grad * active


# A program takes TILE elements, COLUMNS of each row; programs that follow one another take neighbouring tiles.
@triton.jit
def _tile(batch, d, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    ROWS: tl.constexpr = TILE // COLUMNS
    across = tl.cdiv(d, COLUMNS)
    program = tl.program_id(0)
    row = program // across * ROWS + tl.arange(0, ROWS)[:, None]
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < batch) & (column < d)


@triton.jit
def _glu(
    gate, up, out, gate_stride_m2, up_stride_m2, batch, d, GELU: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr
):
    row, column, inside = _tile(batch, d, TILE, COLUMNS)
    x = tl.load(gate + row * gate_stride_m2 + column, mask=inside).to(tl.float32)
    y = tl.load(up + row * up_stride_m2 + column, mask=inside).to(tl.float32)
    tl.store(out + row * d + column, _gated(x, y, GELU), mask=inside)


@triton.jit
def _glu_backward(
    grad, gate, up, d_gate, d_up, gate_stride_m2, up_stride_m2, batch, d,
    GELU: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _tile(batch, d, TILE, COLUMNS)
    g = tl.load(grad + row * d + column, mask=inside).to(tl.float32)
    x = tl.load(gate + row * gate_stride_m2 + column, mask=inside).to(tl.float32)
    y = tl.load(up + row * up_stride_m2 + column, mask=inside).to(tl.float32)
    of_gate, of_up = _gradients(g, x, y, GELU)
    tl.store(d_gate + row * d + column, of_gate, mask=inside)
    tl.store(d_up + row * d + column, of_up, mask=inside)


# ---- how they are launched ------------------------------------------------------------------------------------------

CONFIGS = [{"TILE": tile, "num_warps": warps} for tile, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8))]
SHAPES = [(8192, 4096), (8192, 14336)]
NAMES = {"gate": "d_gate", "up": "d_up"}


def _kernel(function: triton.JITFunction, gelu: bool, arguments: tuple[str, ...], outputs: tuple[str, ...] = ()):
    return opkit.triton_kernel(
        function,
        grid=lambda batch, d, TILE, COLUMNS: triton.cdiv(batch, TILE // COLUMNS) * triton.cdiv(d, COLUMNS),
        COLUMNS=lambda d, TILE: min(triton.next_power_of_2(max(d, 1)), TILE),
        GELU=gelu,
        configs=CONFIGS,
        outputs=outputs,
        examples=[dict.fromkeys(arguments, f"bf16[{rows}, {d}]") for rows, d in SHAPES],
    )


for _forward, _backward, _gelu in ((swiglu, swiglu_backward, False), (geglu, geglu_backward, True)):
    _forward.register_kernel("cuda", _kernel(_glu, _gelu, ("gate", "up")), dtypes=LOW)
    _gradient = _kernel(_glu_backward, _gelu, ("grad", "gate", "up"), ("d_gate", "d_up"))
    _backward.register_kernel("cuda", _gradient, dtypes=LOW)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors), setup_context=_save)
geglu.register_autograd(lambda ctx, grad: geglu_backward(grad, *ctx.saved_tensors), setup_context=_save)


def main() -> None:
    """Compare both with torch's functions in float64: the result and the gradients, on the halves of one projection."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    projected = torch.randn(64, 2 * 1000, device=device, requires_grad=True)
    exact = projected.detach().double().requires_grad_()
    for op, activation in ((swiglu, F.silu), (geglu, lambda x: F.gelu(x, approximate="tanh"))):
        result = op(*projected.chunk(2, -1))
        gate, up = exact.chunk(2, -1)
        expected = activation(gate) * up
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        (ours,) = torch.autograd.grad(result.square().sum(), projected)
        (theirs,) = torch.autograd.grad(expected.square().sum(), exact)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
