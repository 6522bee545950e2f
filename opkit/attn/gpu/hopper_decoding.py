"""The kernel for one query to a head on sm_90 (:mod:`opkit.attn.gpu.device.hopper_decode`): which calls it takes; a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.allocation import like, rows
from opkit.attn.calls import Call
from opkit.attn.gpu import decoding
from opkit.attn.gpu.decode_plan import device_of, splits_of
from opkit.attn.gpu.hopper import describable
from opkit.attn.gpu.mla import DTYPES, Queries, Seen, factors, on_hopper, seen
from opkit.attn.memory_safety import mask_fits, shapes_fit
from opkit.errors import KernelError
from opkit.op.operator import CustomOp
from opkit.op.prepared import PreparedKernel

if TYPE_CHECKING:
    from opkit.attn.gpu.hopper_launches import Form, Plan
    from opkit.op.triton.kernel import TritonKernel

NAME = "hopper_decode"
_PRIORITY = 3  # above the kernel for few queries
_ROWS = 64  # heads of a tile
_LOADER_REGISTERS = 24
_SIZES = (64, 128)  # of heads, padded
Run = Callable[..., tuple[Tensor, Tensor]]


class Tile(NamedTuple):
    """How programs are laid out: keys of a block, buffers for such blocks, and programs on a multiprocessor."""

    keys: int = 64
    stages: int = 6
    at_once: int = 1


TILE = Tile()


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel."""
    op.register_kernel("cuda", forward, when=takes, name=NAME, priority=_PRIORITY)


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    sinks: Tensor | None,
    mask: list[int],
    bias: list[int],
    scale: float,
    dropout_p: float,
) -> bool:
    """Whether a call is for :func:`forward`: one query, and so few heads of keys that these are divided, on such a GPU."""
    if q.shape[2] != 1 or k.shape[2] < decoding.MANY:
        return False
    if not fits(q, k, v, mask_tensors, sinks, mask, bias, scale, dropout_p) or not on_hopper(q):
        return False
    return 2 * q.shape[0] * k.shape[1] <= device_of(decoding.index_of(q)).processors


def fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_tensors: list[Tensor],
    sinks: Tensor | None,
    mask: list[int],
    bias: list[int],
    scale: float,
    dropout_p: float,
) -> bool:
    """Whether :func:`forward` can compute a call."""
    if q.dtype not in DTYPES or not shapes_fit(q, k, v) or 0 in q.shape or 0 in v.shape:
        return False
    small = max(q.shape[3], v.shape[3]) <= _SIZES[-1] and describable(k) and describable(v)
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    tiled = q.shape[2] == 1 or (q.shape[1] // k.shape[1]) % _ROWS == 0
    short = max(q.shape[2], k.shape[2]) < decoding.FAR
    plain = not bias and dropout_p == 0 and scale > 0 and (sinks is None or tuple(sinks.shape) == (q.shape[1],))
    return small and tiled and short and plain and seen(mask) is not None and mask_fits(mask, mask_tensors, sizes)


@PreparedKernel
def forward(*given: Any) -> Run:
    """The operator's result and log-sum-exp, of its own arguments.

    It takes bfloat16 and float16; heads of at most 128 channels; keys and values as TMA can follow them; one query, or heads
    that 64 divides to each of keys; no mask, one BAND, one LENGTH or both; a positive scale; a soft cap; sinks. Keys and
    values that are hidden do not reach a result, whatever they hold. How keys are divided among programs follows from shapes
    and the GPU alone: equal calls give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call, or batch invariance is asked for.
    """
    call = Call(*given)
    if not fits(*call[:4], call.sinks, call.mask, call.bias, call.scale, call.dropout_p):
        shapes = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, dropout_p={call.dropout_p}. Leave the choice to opkit, or force kernel='reference'."
        )
    decoding.refuse_batch_invariance("opkit::attention")
    new_out = like(rows(call.q, call.v.shape[3], call.heads_inside))
    new_lse = like(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    said = seen(call.mask) or Seen(0, 0, None)
    queries, others = Queries(call.q, lambda: _plan(call, said)), _Others()

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, masks, _, sinks, *_ = given
        if (k.data_ptr() | v.data_ptr()) % 16:
            return others(given)
        out, lse = new_out(), new_lse()
        lengths = None if said.lengths is None else masks[said.lengths].contiguous()
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        q, plan = queries(q)
        plan.run((q, k, v), out, lse, sinks, None, lengths, None)
        return out, lse

    return run


class _Others:
    """Calls whose keys or values TMA cannot follow where they lie."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def __call__(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        from opkit.attn.gpu import portable

        call = Call(*given)
        if self.run is None:
            few = decoding.takes_few(*call[:3], call.sinks, call.mask, call.bias, call.dropout_p)
            self.run = decoding.decode.prepare(*given) if few else portable.forward(call)
        return self.run(*given)


def _plan(call: Call, said: Seen) -> Plan:
    from opkit.attn.gpu import hopper_launches

    (batch, heads, queries, _), (_, kv_heads, keys, columns) = call.q.shape, call.v.shape
    group, gpu = heads // kv_heads, device_of(decoding.index_of(call.q))
    slots = batch * queries * -(-group // _ROWS)
    splits = splits_of(slots * kv_heads, gpu.processors * TILE.at_once, -(-keys // TILE.keys))
    lengths = 0 if said.lengths is None else 1 + (call.mask_tensors[said.lengths].shape[0] > 1)
    form = hopper_launches.Form(group, call.softcap > 0, call.sinks is not None, lengths)
    padded = tuple(next(n for n in _SIZES if n >= x) for x in (call.q.shape[3], columns))
    division = hopper_launches.Division(slots, splits, kv_heads, columns, padded[1])
    numbers = {"lower": said.lower, "upper": said.upper, "columns": columns, **factors(call.scale, call.softcap)}
    kernel = _kernel(form, TILE, splits > 1, padded, gpu.overlaps)
    return hopper_launches.plan(kernel, ("q", "k", "v"), form, division, gpu.overlaps, numbers)


@functools.cache
def _kernel(form: Form, tile: Tile, split: bool, padded: tuple[int, ...], overlaps: bool) -> TritonKernel:
    from triton.experimental.gluon import language as gl

    from opkit.attn.gpu.device.hopper_decode import hopper_decode
    from opkit.op.triton.declare import triton_kernel
    from opkit.op.triton.kernel import tensor_descriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    d, dv = padded
    strides = {f"{x}_{dim}": f"{x}_stride_{n}" for x in ("out", "lse") for n, dim in enumerate("bht")}
    constants = {name.upper(): getattr(form, name) for name in ("group", "capped", "sinks", "lengths")}
    return triton_kernel(
        hopper_decode,
        grid=lambda slots, kv_heads, splits: slots * kv_heads * splits,
        bind={**strides, "batch": "q_size_0", "queries": "q_size_2", "keys": "k_size_2"},
        q_desc=tensor_descriptor("q", block=(1, _ROWS, 1, d), layout=layout),
        k_desc=tensor_descriptor("k", block=(1, 1, tile.keys, d), layout=layout),
        v_desc=tensor_descriptor("v", block=(1, 1, tile.keys, dv), layout=layout),
        **constants,
        SPLIT=split,
        STAGES=tile.stages,
        REGISTERS=_LOADER_REGISTERS,
        PDL=overlaps,
        num_warps=4,
        maxnreg=255 // tile.at_once // 8 * 8,
        targets=("sm_90",),
        **({"launch_pdl": True} if overlaps else {}),
    )
