"""Operators that the project has for other purposes: what they are compared with, and what they are called with."""

import torch
import torch.nn.functional as F

import opkit
from opkit.testing import tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16)
X, WEIGHT = tensor("*batch d", FLOATING), tensor("d", FLOATING)


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x, weight, eps=1e-6):
    return (_wide(x) / (_wide(x).square().mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


def _layer_norm(x, weight, bias, eps=1e-5):
    return F.layer_norm(_wide(x), x.shape[-1:], _wide(weight), _wide(bias), eps).to(x.dtype)


def _add_rms_norm(x, residual, weight, eps=1e-6):
    total = _wide(x) + _wide(residual)
    return total.to(x.dtype), _rms_norm(total.to(x.dtype), weight, eps)


def _swiglu(gate, up):
    return (_wide(gate) * torch.sigmoid(_wide(gate)) * up).to(gate.dtype)


def _geglu(gate, up):
    return (F.gelu(_wide(gate), approximate="tanh") * up).to(gate.dtype)


def _rotary(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
    left, right = _wide(x)[..., :half], _wide(x)[..., half:]
    cos, sin = angles.cos().to(left.dtype), angles.sin().to(left.dtype)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def _cross_entropy(logits, targets, ignore_index=-100):
    flat, wanted = _wide(logits).reshape(-1, logits.shape[-1]), targets.reshape(-1)
    return F.cross_entropy(flat, wanted, ignore_index=ignore_index)


def c_kernel(module):
    """``examples/c_kernel.py``."""
    module.rms_norm.register_kernel("cpu", module.KERNEL)
    return {"op": module.rms_norm, "args": (X, WEIGHT), "reference": _rms_norm}


def silu_mul(source):
    """``examples/packaged_op``: its C file."""

    @opkit.custom_op("mutants::silu_mul")
    def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    floating = (torch.float32, torch.bfloat16)
    silu_mul.register_kernel("cpu", opkit.c_kernel(source, dtypes=list(floating)))
    specs = (tensor("*batch d", floating), tensor("*batch d", floating))
    return {"op": silu_mul, "args": specs, "reference": lambda gate, up: F.silu(gate) * up}


def _of(name, reference, *args):
    return lambda module: {"op": getattr(module, name), "args": args, "reference": reference}


rms_norm = _of("rms_norm", _rms_norm, X, WEIGHT, 1e-6)
swiglu = _of("swiglu", _swiglu, X, X)
geglu = _of("geglu", _geglu, X, X)
softmax = _of("softmax", lambda x: torch.softmax(_wide(x), -1).to(x.dtype), X)
layer_norm = _of("layer_norm", _layer_norm, X, WEIGHT, WEIGHT, 1e-5)
add_rms_norm = _of("add_rms_norm", _add_rms_norm, X, X, WEIGHT, 1e-6)
rotary_embedding = _of(
    "rotary_embedding", _rotary, tensor("*batch n 8", FLOATING), tensor("n", torch.int64, low=0, high=50), 100.0
)
cross_entropy = _of(
    "cross_entropy", _cross_entropy, tensor("n 5", FLOATING), tensor("n", torch.int64, low=-1, high=4), -1
)
