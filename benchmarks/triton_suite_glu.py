"""Gated units, rotary embedding, cross-entropy, routing and quantisation for ``benchmarks/triton_kernels.py``.

A size is a number of tokens; widths are those of models of 8 billion parameters.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_suite import Case

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "kernels"))

import glu
import linear_cross_entropy as ce
import quantize
import rotary
import router

TOKENS, LOGITS = (4096, 16384), (4096, 8192)
HIDDEN, INNER, CLASSES, FEW_CLASSES = 4096, 14336, 128256, 32000
HEADS, KV_HEADS, HEAD_DIM, SEQ = 32, 8, 128, 4096
ROUTERS = ((128, 8, 2**20), (64, 6, 2**21), (8, 2, 2**23))  # experts, how many each token uses, tokens at the most
Tensors = tuple[Tensor, ...]


def _liger(run: Callable[..., Any]) -> Callable[..., Any] | None:
    return None if importlib.util.find_spec("liger_kernel") is None else run


def _matrices(count: int, width: int) -> Callable[[int, torch.dtype, Any], Tensors]:
    def inputs(size: int, dtype: torch.dtype, device: Any) -> Tensors:
        return tuple(torch.randn(size, width, dtype=dtype, device=device) for _ in range(count))

    return inputs


def _moved(count: int, width: int) -> Callable[[int, torch.dtype], int]:
    return lambda size, dtype: count * size * width * dtype.itemsize


# ---- gated units -----------------------------------------------------------------------------------------------------


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _pulled(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensors]:
    """The gradients of ``activation(gate) * up`` by torch's derivatives."""

    def backward(grad: Tensor, gate: Tensor, up: Tensor) -> Tensors:
        value, pull = torch.func.vjp(activation, gate)
        return pull(grad * up)[0], grad * value

    return backward


def _liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(gate, up)[2]


def _liger_swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> Tensors:
    from liger_kernel.ops.swiglu import swiglu_backward

    return swiglu_backward(gate, up, grad)


def _liger_geglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.geglu import geglu_forward

    return geglu_forward(gate, up)[2]


def _liger_geglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> Tensors:
    from liger_kernel.ops.geglu import geglu_backward

    return geglu_backward(gate, up, grad)


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def _heads(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    shapes = [(size // SEQ, SEQ, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS)]
    q, k = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    cos, sin = (angle.to(device, dtype) for angle in rotary.angles(SEQ, HEAD_DIM))
    return q, k, cos, sin


def _rotated_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def _plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    return tuple(x * cos[:, None] + _rotated_half(x) * sin[:, None] for x in (q, k))


def _plain_rotary_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    return tuple(x * cos[:, None] - _rotated_half(x * sin[:, None]) for x in (q, k))


def _liger_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    from liger_kernel.ops.rope import rope_forward

    turned = rope_forward(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def _liger_rotary_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    from liger_kernel.ops.rope import rope_backward

    turned = rope_backward(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


def _logits(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    return _matrices(1, FEW_CLASSES)(size, dtype, device)[0], torch.randint(FEW_CLASSES, (size,), device=device)


def _logits_and_sums(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    logits, targets = _logits(size, dtype, device)
    sums = torch.cat([part.float().logsumexp(-1) for part in logits.split(1024)])
    return torch.ones((), device=device), logits, targets, sums, torch.full((), float(size), device=device)


def _plain_logits_gradient(grad: Tensor, logits: Tensor, targets: Tensor, sums: Tensor, count: Tensor) -> Tensor:
    shares = (logits.float() - sums[:, None]).exp()
    classes = torch.arange(logits.shape[-1], device=logits.device)
    return ((shares - (classes == targets[:, None]).float()) * (grad / count)).to(logits.dtype)


def _liger_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    with torch.no_grad():
        return LigerCrossEntropyFunction.apply(logits, targets, None)[0]


def _layer(size: int, dtype: torch.dtype, device: Any) -> Tensors:
    hidden = torch.randn(size, HIDDEN, dtype=dtype, device=device) / 16
    weight = torch.randn(CLASSES, HIDDEN, dtype=dtype, device=device) / 4
    return hidden, weight, torch.randint(CLASSES, (size,), device=device)


def _loss_and_gradients(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
    return ce.linear_cross_entropy_parts(hidden, weight, targets, -100, True, True)


def _plain_loss_and_gradients(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
    logits = hidden @ weight.T
    loss, pull = torch.func.vjp(lambda x: F.cross_entropy(x.float(), targets), logits)
    (grad,) = pull(torch.ones_like(loss))
    return loss, grad.to(hidden.dtype) @ weight, grad.to(hidden.dtype).T @ hidden


def _liger_loss_and_gradients(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = LigerFusedLinearCrossEntropyFunction.apply(*leaves, targets)[0]
    return loss, *torch.autograd.grad(loss, leaves)


def _layer_bytes(size: int, dtype: torch.dtype) -> int:
    return 2 * (size + CLASSES) * HIDDEN * dtype.itemsize + 8 * size


# ---- routing ---------------------------------------------------------------------------------------------------------


def _routed(experts: int) -> Callable[[int, torch.dtype, Any], Tensors]:
    """Logits without equal ones in a token, for the order of which there is no rule: whole numbers over 16."""

    def inputs(size: int, dtype: torch.dtype, device: Any) -> Tensors:
        return ((torch.rand(size, experts, device=device).argsort(-1) / 16).to(dtype),)

    return inputs


def _chosen(experts: int, k: int) -> Callable[[int, torch.dtype, Any], Tensors]:
    def inputs(size: int, dtype: torch.dtype, device: Any) -> Tensors:
        (logits,) = _routed(experts)(size, dtype, device)
        weights, index = _plain_router(k)(logits)
        return torch.randn_like(weights), logits, weights, index

    return inputs


def _plain_router(k: int) -> Callable[[Tensor], Tensors]:
    def routed(logits: Tensor) -> Tensors:
        weights, index = logits.softmax(-1, dtype=torch.float32).topk(k, -1)
        return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), index

    return routed


def _plain_router_gradient(grad: Tensor, logits: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    g, w = grad.float(), weights.float()
    chosen = w * (g - (g * w).sum(-1, keepdim=True))
    return torch.zeros_like(logits).scatter(-1, index, chosen.to(logits.dtype))


def _router_bytes(experts: int, k: int, back: bool = False) -> Callable[[int, torch.dtype], int]:
    return lambda size, dtype: size * (experts * dtype.itemsize + k * ((2 if back else 1) * dtype.itemsize + 8))


def _routers(experts: int, k: int, most: int) -> list[Case]:
    name, sizes = f"router {k} of {experts}", (most // 8, most)
    return [
        Case(
            name, sizes, _routed(experts), lambda logits: router.router(logits, k), _plain_router(k), None,
            _router_bytes(experts, k),
        ),
        Case(
            f"{name} backward", sizes, _chosen(experts, k), lambda *arguments: router.router_backward(*arguments, True),
            _plain_router_gradient, None, _router_bytes(experts, k, back=True),
        ),
    ]  # fmt: skip


# ---- quantisation ----------------------------------------------------------------------------------------------------


def _plain_quantize(dtype: torch.dtype) -> Callable[[Tensor], Tensors]:
    largest = quantize.LARGEST[dtype]

    def quantized(x: Tensor) -> Tensors:
        most = x.float().abs().amax(-1).clamp_min(1e-12)
        scaled = x.float() * (largest / most)[:, None]
        return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), most / largest

    return quantized


def _quantized(dtype: torch.dtype) -> Callable[[int, torch.dtype, Any], Tensors]:
    def inputs(size: int, _: torch.dtype, device: Any) -> Tensors:
        return _plain_quantize(dtype)(torch.randn(size, HIDDEN, device=device))

    return inputs


def _plain_dequantize(q: Tensor, scales: Tensor) -> Tensor:
    return (q.float() * scales[:, None]).to(torch.bfloat16)


def _quantize_bytes(size: int, dtype: torch.dtype) -> int:
    return size * (HIDDEN * (dtype.itemsize + 1) + 4)


def _quantizers(name: str, dtype: torch.dtype, op: Callable[..., Any]) -> list[Case]:
    sizes, back = (8192, 32768), lambda size, _: _quantize_bytes(size, torch.bfloat16)
    return [
        Case(f"quantize {name}", sizes, _matrices(1, HIDDEN), op, _plain_quantize(dtype), None, _quantize_bytes),
        Case(f"dequantize {name}", sizes, _quantized(dtype), quantize.dequantize, _plain_dequantize, None, back),
    ]


CASES = [
    Case(
        "swiglu", TOKENS, _matrices(2, INNER), glu.swiglu, lambda gate, up: F.silu(gate) * up, _liger(_liger_swiglu),
        _moved(3, INNER),
    ),
    Case(
        "swiglu backward", TOKENS, _matrices(3, INNER), glu.swiglu_backward, _pulled(F.silu),
        _liger(_liger_swiglu_gradients), _moved(5, INNER),
    ),
    Case(
        "geglu", TOKENS, _matrices(2, INNER), glu.geglu, lambda gate, up: _gelu(gate) * up, _liger(_liger_geglu),
        _moved(3, INNER),
    ),
    Case(
        "geglu backward", TOKENS, _matrices(3, INNER), glu.geglu_backward, _pulled(_gelu), _liger(_liger_geglu_gradients),
        _moved(5, INNER),
    ),
    Case(
        "rotary", (16384, 65536), _heads, rotary.rotary, _plain_rotary, _liger(_liger_rotary),
        _moved(2, (HEADS + KV_HEADS) * HEAD_DIM),
    ),
    Case(
        "rotary backward", (16384, 65536), _heads, rotary.rotary_backward, _plain_rotary_back, _liger(_liger_rotary_back),
        _moved(2, (HEADS + KV_HEADS) * HEAD_DIM),
    ),
    Case(
        "cross_entropy", LOGITS, _logits, lambda logits, targets: ce.cross_entropy(logits, targets)[0],
        lambda logits, targets: F.cross_entropy(logits.float(), targets), _liger(_liger_cross_entropy),
        _moved(1, FEW_CLASSES),
    ),
    Case(
        "cross_entropy backward", LOGITS, _logits_and_sums, lambda *arguments: ce.cross_entropy_backward(*arguments, -100),
        _plain_logits_gradient, None, _moved(2, FEW_CLASSES),
    ),
    Case(
        "linear_cross_entropy, both ways", LOGITS, _layer, _loss_and_gradients, _plain_loss_and_gradients,
        _liger(_liger_loss_and_gradients), _layer_bytes,
        slack=4.0,  # the weight's gradient is added up in its own dtype over 8 chunks
    ),
    *[case for routed in ROUTERS for case in _routers(*routed)],
    *_quantizers("int8", torch.int8, quantize.quantize_int8),
    *_quantizers("fp8", torch.float8_e4m3fn, quantize.quantize_fp8),
]  # fmt: skip
