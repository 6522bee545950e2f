"""Functions and modules that a model uses in place of torch's; each function is an opkit operator."""

from opkit.nn.functional import cross_entropy, rms_norm, rotary_embedding, swiglu
from opkit.nn.hub_layers import register_kernels
from opkit.nn.modules import MultiheadAttention, RMSNorm, SwiGLU

__all__ = [
    "MultiheadAttention",
    "RMSNorm",
    "SwiGLU",
    "cross_entropy",
    "register_kernels",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
]
