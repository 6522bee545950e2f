"""The portable forward kernel: from the arguments of an operator to launches, also for ``opkit::attention_float8``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import dense_bytes, dense_rows, overwritten, rows
from opkit.attn.calls import AttentionCall, Float8Call, dtypes_and_shapes, predicate
from opkit.attn.gpu import arguments, blocks, search
from opkit.attn.gpu.arguments import Run
from opkit.attn.gpu.limits import LARGEST_HEAD, LARGEST_VALUES, device, sizes_fit
from opkit.attn.masks.program import sinks_fit
from opkit.errors import KernelError
from opkit.kernels.triton.named import Named
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel

_DESCALES = ("q_by", "k_by", "v_by")
_TENSORS = ("q", "k", "v", *_DESCALES, "out", "lse", "sinks", "seed", *arguments.TENSORS)
_RESULTS = slice(6, 8)  # of these, out and lse
_FORWARD = Named("opkit.attn.gpu.portable.device.forward", "attention_forward")
NAME = "triton"
_MIN_FLOAT8_HEAD = 16  #: channels; products of float8 take more at once
_FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@functools.cache
def forward_kernel(constants: arguments.Constants) -> TritonKernel:
    """Return the forward kernel with its constants settled."""
    return triton_kernel(
        _FORWARD,
        grid=lambda queries, programs, ROWS: (blocks.tiles_in(queries, ROWS), programs),
        **dict(constants),
    )


def prepare_forward(example: AttentionCall, ordered: bool = False, fp8: str = "") -> Run:
    """Return the operator's result and log-sum-exp, for calls like ``example``; descales may follow the arguments of a call.

    With ``ordered`` a query's result does not depend, to the last bit, on the rest of the batch. ``fp8`` is as
    :func:`opkit.attn.gpu.device.tile.widened` has it; results are in bfloat16 then.
    """
    q, _, v = example[:3]
    of_result = torch.empty_like(q, dtype=torch.bfloat16) if fp8 else q
    new_out = overwritten(rows(of_result, v.shape[3], example.out_is_bshd))
    new_lse = overwritten(q.new_empty(q.shape[:3], dtype=torch.float32))
    if 0 in (*q.shape[:3], v.shape[3]):
        return lambda *args: (new_out(), new_lse())
    roomy = arguments.fit_to_slots(example)
    fits, shape = roomy is example, arguments.shape_of(roomy)
    tiles = arguments.invariant_tiles_of(roomy, shape) if ordered else tiles_of(roomy)
    numbers, constants = (
        {**_numbers(example), **arguments.numbers_of(roomy, shape)},
        (("ORDERED", ordered), ("FP8", fp8)),
    )
    launch = arguments.Tiled(
        forward_kernel, tiles, shape, q.dtype, _TENSORS, numbers, written=_RESULTS, constants=constants
    )

    def run(*args: Any, by: Sequence[Tensor | None] = (None, None, None)) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*args) if fits else arguments.fit_to_slots(AttentionCall(*args))
        out, lse = new_out(), new_lse()
        read = dense_rows(call.q), dense_rows(call.k), dense_rows(call.v)
        launch(call, *read, *by, out, lse, call.sinks, call.seed, *arguments.all_tensors_of(call, shape))
        return out, lse

    return run


def tiles_of(call: AttentionCall) -> search.Tiles[Any, Any]:
    """Return the tiles of calls like this one, whose mask and bias have room in the kernel."""
    return arguments.tiles_of(blocks.FORWARD_KERNEL, call, arguments.shape_of(call))


def _numbers(call: AttentionCall) -> dict[str, Any]:
    """Return the numbers that the kernel takes."""
    (batch, heads, queries, _), (_, kv_heads, keys, _) = call.q.shape, call.v.shape
    return {
        "programs": batch * heads, "heads": heads, "group": heads // max(kv_heads, 1), "queries": queries, "keys": keys,
        "scale": call.scale, "softcap": call.softcap, "threshold": math.ceil(call.dropout_p * 2**32),
        "rescale": arguments.rescale(call.dropout_p),
    }  # fmt: skip


def register_float8(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention_float8`` its kernel."""
    op.register_kernel(device(), forward_float8, when=predicate(Float8Call, takes_float8), name=NAME, trusted=True)


def takes_float8(call: Float8Call) -> bool:
    """Return whether :func:`forward_float8` takes a call: what the portable forward takes, in float8_e4m3fn or float8_e5m2."""
    sizes = call.q.shape[0], call.k.shape[1]
    descaled = len(call.descales) == 3 and all(x.shape == sizes and x.dtype == torch.float32 for x in call.descales)
    return call.q.dtype in _FLOAT8 and descaled and sizes_fit(call.plain) and sinks_fit(call.sinks, call.q)


@arguments.tuned_float8
def forward_float8(*args: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    Products of queries and keys are those of the tensor cores for float8 where these have some (NVIDIA's from compute
    capability 8.9 on, of heads of more than 16), and of float16 elsewhere. On Hopper the former keep 14 bits of a sum.
    Probabilities are rounded to float16 before they meet the values, which float16 holds exactly.

    Raises:
        KernelError: it does not take the call.
    """
    call = Float8Call(*args)
    if not takes_float8(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention_float8: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}. "
            f"It takes float8_e4m3fn and float8_e5m2, heads of at most {LARGEST_HEAD} (of values {LARGEST_VALUES}), and tensors "
            "as opkit.attention makes them. Leave the choice to opkit, or force kernel='reference'."
        )
    native = multiplies_float8(call.q.device) and call.q.shape[3] > _MIN_FLOAT8_HEAD
    inner = prepare_forward(call.plain, fp8="native" if native else _FLOAT8[call.q.dtype])

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        call = Float8Call(*args)
        plain = call.plain
        if not native:
            plain = plain._replace(q=dense_bytes(call.q), k=dense_bytes(call.k), v=dense_bytes(call.v))
        return inner(*plain, by=[each.contiguous() for each in call.descales])

    return run


def multiplies_float8(device: torch.device) -> bool:
    """Return whether the tensor cores of a GPU multiply these kinds of float8; of no GPU, those of an H200."""
    if device.type != "cuda":
        return device.type == "meta"
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
