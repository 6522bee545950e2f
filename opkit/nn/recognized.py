"""Modules that ``opkit.optimize`` recognizes: what their forward becomes, or why it is left alone.

A replacement is a function of the module and its arguments. It reads the module's attributes when it is called, so that copies,
other dtypes and devices, and new weights need nothing. Norms are recognized by their results, since names promise nothing: a
shallow copy of the module is run on random input and weights, without hooks.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opkit.attn.compat.sdpa import sdpa_override

# ---- replacements ----------------------------------------------------------------------------------------------------


def with_override(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own forward in :class:`opkit.sdpa_override`."""
    with sdpa_override():
        return type(module).forward(module, *args, **kwargs)


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """``x / rms(x) * weight`` as one call, in inference; the module's own forward if dtypes are mixed."""
    weight: Any = module.weight
    if x.dtype != weight.dtype or torch.is_grad_enabled():
        return type(module).forward(module, x)
    return F.rms_norm(x, weight.shape, weight, eps_of(module))


def zero_centered_norm(module: nn.Module, x: Tensor) -> Tensor:
    """``x / rms(x) * (1 + weight)``, as in Gemma: :func:`norm` with the sum in at least float32."""
    weight: Any = module.weight
    if x.dtype != weight.dtype or torch.is_grad_enabled():
        return type(module).forward(module, x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps_of(module)).to(x.dtype)


Replacement = Callable[..., Any]

DESCRIPTIONS: dict[Replacement, str] = {
    with_override: "scaled_dot_product_attention by opkit.attention",
    norm: "torch.nn.functional.rms_norm in inference",
    zero_centered_norm: "torch.nn.functional.rms_norm in inference, with 1 + weight",
}

# ---- recognition -----------------------------------------------------------------------------------------------------

_TORCHS_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)
_SDPA = "scaled_dot_product_attention"
_EPS = ("eps", "variance_epsilon", "epsilon")


def find(module: nn.Module, compiled: bool) -> Replacement | str | None:
    """Return what is to run in place of a module's forward, or a reason to leave the module alone.

    Args:
        module: it is read, not called or changed.
        compiled: the model is going to be compiled.

    Returns:
        None for a module that is not of a recognized kind.
    """
    found = _find(module, compiled)
    return "its forward was replaced before" if callable(found) and "forward" in vars(module) else found


def _find(module: nn.Module, compiled: bool) -> Replacement | str | None:
    if _calls_sdpa(type(module)):
        return with_override
    if isinstance(module, nn.MultiheadAttention):
        return "opkit.attention was not faster here; opkit.sdpa_override() runs it nevertheless"
    if isinstance(module, _TORCHS_NORMS):
        return "one call of torch's"
    if isinstance(module, nn.CrossEntropyLoss):
        return "opkit.nn.cross_entropy was not faster in eager mode; the compiler fuses the loss"
    if _is_gated_mlp(module):
        return "opkit.nn.swiglu was not faster in eager mode; the compiler fuses the gate"
    name = type(module).__name__
    if "Rotary" in name:
        return "rotations are functions that all models of a file share; the compiler fuses them"
    if "RMSNorm" not in name and list(module._parameters) != ["weight"]:
        return None
    replacement = _norm_of(module)
    if replacement is None:
        return "its results are not those of an RMS norm with one weight" if "RMSNorm" in name else None
    return "the compiler fuses it" if compiled else replacement


def _calls_sdpa(cls: type[nn.Module]) -> bool:
    """Return whether a method of a class, torch's own classes aside, names the function."""
    ours = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    functions = [each for base in ours for each in vars(base).values() if isinstance(each, types.FunctionType)]
    return any(_SDPA in inspect.unwrap(function).__code__.co_names for function in functions)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module has two linear layers from d to hidden features, and one back: ``down(act(gate(x)) * up(x))``."""
    linear = [child for child in module.children() if isinstance(child, nn.Linear)]
    shapes = [(child.in_features, child.out_features) for child in linear]
    return len(shapes) == 3 and any(
        shapes.count((d, h)) == 2 and shapes.count((h, d)) == 1 and d != h for d, h in shapes
    )


def eps_of(module: nn.Module) -> float:
    """Return the number that a norm adds to the mean square."""
    return next(value for name in _EPS if isinstance(value := getattr(module, name, None), float))


def _norm_of(module: nn.Module) -> Replacement | None:
    """Return the formula whose results a norm has, None if it has neither's."""
    weight = module._parameters.get("weight")
    known = weight is not None and weight.dim() == 1 and weight.numel() > 0 and len(module._parameters) == 1
    alone = not module._modules and not module._buffers and len(inspect.signature(type(module).forward).parameters) == 2
    if weight is None or not (known and alone and any(isinstance(getattr(module, name, None), float) for name in _EPS)):
        return None
    return next((each for each in (norm, zero_centered_norm) if _agrees(module, each, weight.numel())), None)


def _agrees(module: nn.Module, replacement: Replacement, d: int) -> bool:
    """Compare a formula with a module, for inputs of ordinary size and for some so small that eps counts."""
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        weight = torch.randn(d, generator=generator).to(dtype)
        vars(probe)["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
        for shape in ((3, d), (2, 3, d)):
            for size in (1.0, eps_of(module) ** 0.5, 0.0):
                x = (size * torch.randn(shape, generator=generator)).to(dtype)
                try:
                    with torch.no_grad():
                        found, expected = replacement(probe, x), type(module).forward(probe, x)
                    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
                except Exception:  # a module that fails on such input is no such norm
                    return False
    return True
