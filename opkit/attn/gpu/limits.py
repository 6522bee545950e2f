"""Which devices Triton kernels are for, and which calls the portable ones take."""

from __future__ import annotations

import os

import torch

from opkit.attn.calls import AnyCall, AttentionCall
from opkit.attn.gpu import plans
from opkit.attn.masks import program
from opkit.attn.masks.program import bias_fits, mask_fits, shapes_fit, sinks_fit

LARGEST_HEAD, LARGEST_VALUES = 576, 512
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BIASES = (*_DTYPES, torch.float64)


def takes(call: AttentionCall) -> bool:
    """Return whether they take a call: no float64, heads of at most 576, of values at most 512, and all tensors fit."""
    return fits(call) and sinks_fit(call.sinks, call.q)


def fits(call: AnyCall) -> bool:
    """Return the same without the check of sinks."""
    return call.q.dtype in _DTYPES and sizes_fit(call)


def sizes_fit(call: AnyCall) -> bool:
    """Return the same without the check of the queries' dtype."""
    if not shapes_fit(call.q, call.k, call.v) or not 0 < call.q.shape[3] <= LARGEST_HEAD:
        return False
    added = bias_fits(call, functions=True) and (not call.bias_tensors or _are_added(call))
    return call.v.shape[3] <= LARGEST_VALUES and added and mask_fits(call, functions=True) and _functions_fit(call)


def _are_added(call: AnyCall) -> bool:
    """Return whether the tensors of biases, but for those that functions alone read, have dtypes that kernels add."""
    shape = plans.shape_of(tuple(call.mask), tuple(call.bias))
    read = {number for each in shape.functions if each.whose == "bias" for number in each.function.tensors}
    added = {number for whose, number, _ in shape.slots if whose == "bias"}
    return all(x.dtype in _BIASES for n, x in enumerate(call.bias_tensors) if n in added or n not in read)


def _functions_fit(call: AnyCall) -> bool:
    """Return whether kernels have room for a call's functions, if there are some: no tensor stands for these."""
    if program.FUNCTION not in call.mask and program.BIAS_FUNCTION not in call.bias:
        return True
    shape = plans.shape_of(tuple(call.mask), tuple(call.bias))
    return not shape.functions or shape.fits


def device() -> str:
    """Return the device that the kernels are for: "cpu" in a process in which Triton's interpreter runs."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def devices() -> list[str]:
    """Return the devices that the kernel runs on: the CPU too in a process in which Triton interprets."""
    return ["cuda", "cpu"] if os.environ.get("TRITON_INTERPRET") == "1" else ["cuda"]
