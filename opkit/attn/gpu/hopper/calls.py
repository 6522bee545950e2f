"""What kernels for sm_90 share: which calls they take, the counters of their launches, and the order of heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn.calls import AnyCall, AttentionCall, GradientCall
from opkit.attn.gpu.arguments import MIN_SCALE
from opkit.attn.gpu.hopper import functions
from opkit.attn.masks.program import bias_fits, mask_fits, results_fit, shapes_fit, sinks_fit
from opkit.op import torch_private as private

DTYPES = (torch.bfloat16, torch.float16)
_FAR = 2**30  #: further than any two positions are apart
LOG2E = 1.4426950408889634
MAX_FACTOR = 1024.0  #: of logits: a cap, or a scale where there is none
_ALIGNED = 8  #: elements: TMA's strides are multiples of 16 bytes
HEADS = (64, 128, 256)  #: channels of a head in shared memory; fewer are padded


def applies(call: AnyCall) -> bool:
    """Return whether calls get kernels for Hopper where these fit."""
    return not config.get().batch_invariant and on_hopper(call.q)


def on_hopper(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU of compute capability 9.0."""
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) == (9, 0)


def fits(call: AttentionCall) -> bool:
    """Return whether the forward can compute a call."""
    return call.q.dtype in DTYPES and sizes_fit(call)


def gradient_fits(call: GradientCall) -> bool:
    """Return whether the backward can compute a call in DTYPES."""
    return sizes_fit(call) and results_fit(call) and (call.softcap > 0 or call.scale > MIN_SCALE)


def sizes_fit(call: AttentionCall | GradientCall) -> bool:
    """Return the same of one in DTYPES."""
    q, k, v = call.q, call.k, call.v
    if not shapes_fit(q, k, v) or 0 in q.shape or 0 in v.shape:
        return False
    heads = all(size % _ALIGNED == 0 and size <= HEADS[-1] for size in (q.shape[3], v.shape[3]))
    lengths = max(q.shape[2], k.shape[2]) < _FAR and q.shape[0] * q.shape[1] * q.shape[2] < 2**31
    if not mask_fits(call, functions=True) or not bias_fits(call, functions=True) or not functions.fit(call):
        return False
    return heads and lengths and call.dropout_p == 0 and has_moderate_factor(call) and sinks_fit(call.sinks, q)


def has_moderate_factor(call: AnyCall) -> bool:
    """Return whether the logits of usual queries and keys are of a size to which float32 resolves their differences.

    Rows with greater logits are computed apart here, slowly. The portable kernels take those of great factors.
    """
    return call.scale > 0 and (call.softcap or call.scale) <= MAX_FACTOR


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


# ---- the counter of tiles --------------------------------------------------------------------------------------------

_known_counters: dict[tuple[int, int], Tensor] = {}


def counters(device: torch.device, size: int) -> Callable[[], Tensor]:
    """Return a function that returns ``size`` zeros or more, with which a launch counts tiles and marks rows to recompute.

    A kernel leaves them as zeros, so that launches on one stream can share them. A graph that is captured may run at the same
    time as others, and gets its own.
    """
    new = functools.partial(torch.zeros, size, dtype=torch.int32, device=device)
    if device.type != "cuda":
        return new

    def counter() -> Tensor:
        if private.capturing():
            return new()
        key = device.index, private.current_stream(device.index)
        found = _known_counters.get(key)
        if found is None or found.shape[0] < size:
            found = _known_counters[key] = new()
        return found

    return counter


# ---- tensors for TMA -------------------------------------------------------------------------------------------------


def describable(x: Tensor) -> bool:
    """Return whether TMA can follow the strides."""
    aligned = 16 // x.element_size()
    return x.stride(3) == 1 and all(0 < stride < 2**37 and stride % aligned == 0 for stride in x.stride()[:3])


# ---- the order of heads ----------------------------------------------------------------------------------------------


def padded(channels: int) -> int:
    """Return the size of a head in registers and shared memory."""
    return next(size for size in HEADS if channels <= size)


def heads_within(limit: int, q: Any, k: Any, v: Any) -> int:
    """Return how many heads of queries have at most ``limit`` bytes of keys and values; those of one head of keys at least."""
    of_head = k.shape[2] * (padded(k.shape[3]) + padded(v.shape[3])) * 2
    return q.shape[1] // k.shape[1] * evenly(k.shape[0] * k.shape[1], limit // of_head)


def evenly(heads: int, most: int) -> int:
    """At most so many of ``heads``, so that sections are about as large: at the end of a small last one many would have no tile.

    >>> evenly(40, 16)
    14
    """
    return -(-heads // -(-heads // max(most, 1)))
