"""The kernel of latent attention for sm_90 (:mod:`opkit.attn.gpu.device.mla`): which calls it takes, and a call of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn import program
from opkit.attn.allocation import like, rows
from opkit.attn.calls import Call
from opkit.attn.gpu import decoding
from opkit.attn.gpu.decode_plan import device_of, splits_of
from opkit.attn.gpu.hopper import describable
from opkit.attn.memory_safety import mask_fits, shapes_fit
from opkit.errors import KernelError
from opkit.op.operator import CustomOp
from opkit.op.prepared import PreparedKernel

if TYPE_CHECKING:
    from opkit.op.triton.kernel import TritonKernel
    from opkit.op.triton.launch import PreparedLaunch

NAME = "mla"
DTYPES = (torch.bfloat16, torch.float16)
VALUES, MOST = 512, 576  #: channels of values, and the most of keys
FEWEST = 33  #: heads that share keys; with fewer more than half of a tile of 64 would be idle
_ROWS, _STEP = 64, 128  # heads of a tile, keys of a step
AHEAD = 1  #: pairs of blocks that are brought to the L2 cache before they are loaded
_LOG2E = 1.4426950408889634
_REGISTERS = (240, 24, 168)  # of a thread that multiplies, of the warp that loads, and of all before they are shared out
Run = Callable[..., tuple[Tensor, Tensor]]


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel for latent attention."""
    op.register_kernel("cuda", forward, when=takes, name=NAME, priority=2)


class Seen(NamedTuple):
    """A mask: query i sees key j if ``lower <= j - i <= upper`` and, with ``lengths``, the number of a tensor, j is before that."""

    lower: int
    upper: int
    lengths: int | None


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
    """Whether a call is for :func:`forward`: what it says there, few queries, on a GPU of compute capability 9.0."""
    if k.shape[2] < decoding.MANY or q.shape[2] * 4 > k.shape[2] or q.shape[1] < FEWEST * k.shape[1]:
        return False
    if not fits(q, k, v, mask_tensors, sinks, mask, bias, scale, dropout_p):
        return False
    return q.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(q.device) == (9, 0)


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
    if q.dtype not in DTYPES or not shapes_fit(q, k, v) or 0 in q.shape or 0 in k.shape:
        return False
    latent = VALUES == v.shape[3] < k.shape[3] <= MOST and k.stride() == v.stride() and describable(k)
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    tiled = q.shape[2] == k.shape[1] == 1 or (q.shape[1] // k.shape[1]) % _ROWS == 0
    short = max(q.shape[2], k.shape[2]) < decoding.FAR
    plain = not bias and dropout_p == 0 and scale > 0 and (sinks is None or tuple(sinks.shape) == (q.shape[1],))
    return latent and tiled and short and plain and seen(mask) is not None and mask_fits(mask, mask_tensors, sizes)


def seen(mask: list[int]) -> Seen | None:
    """What a mask's program says; None where it says something else than a band, lengths or both.

    >>> seen([program.LENGTH, 0]), seen([program.OR])
    (Seen(lower=-1073741824, upper=1073741824, lengths=0), None)
    """
    far = decoding.FAR
    lower, upper, lengths = -far, far, None
    rest = mask[:-1] if len(mask) == 6 and mask[-1] == program.AND else mask
    while rest:
        if rest[0] == program.BAND and len(rest) >= 3 and (lower, upper) == (-far, far):
            (lower, upper), rest = rest[1:3], rest[3:]
        elif rest[0] == program.LENGTH and len(rest) >= 2 and lengths is None:
            lengths, rest = rest[1], rest[2:]
        else:
            return None
    lower, upper = (max(-far, min(int(end), far)) for end in (lower, upper))
    return Seen(lower, upper, lengths)


@PreparedKernel
def forward(*given: Any) -> Run:
    """The operator's result and log-sum-exp, of its own arguments.

    It takes bfloat16 and float16; keys of more than 512 and at most 576 channels, the first 512 of which are the values, as
    TMA can follow them; one query and one head of keys, or heads that 64 divides to each of keys; no mask, one BAND, one LENGTH or both; a positive
    scale; a soft cap; sinks. Values that turn out to lie elsewhere than in the keys are left to the other kernels.

    Probabilities are rounded to q's dtype before they are multiplied with the values. Keys and values that are hidden do not
    reach a result, whatever they hold. How keys are divided among programs follows from shapes and the GPU alone: equal calls
    give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call, or batch invariance is asked for.
    """
    call = Call(*given)
    if not fits(*call[:4], call.sinks, call.mask, call.bias, call.scale, call.dropout_p):
        shapes = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, dropout_p={call.dropout_p}: it takes {VALUES} values that are the first channels of the keys, "
            f"of which there are at most {MOST}. Leave the choice to opkit, or force kernel='reference'."
        )
    decoding.refuse_batch_invariance("opkit::attention")
    new_out = like(rows(call.q, VALUES, call.heads_inside))
    new_lse = like(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    said = seen(call.mask) or Seen(0, 0, None)
    plan, others = _plan(call, said), _Others()

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, masks, _, sinks, *_ = given
        if k.data_ptr() != v.data_ptr() or k.data_ptr() % 16:
            return others(given)
        out, lse = new_out(), new_lse()
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        q = q if describable(q) and q.data_ptr() % 16 == 0 else q.clone(memory_format=torch.contiguous_format)
        lengths = None if said.lengths is None else masks[said.lengths]
        plan.run(q, k, lengths, out, lse, sinks)
        return out, lse

    return run


class _Others:
    """Calls whose values are not columns of their keys, by the kernel that is otherwise for them."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def __call__(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if self.run is None:
            from opkit.attn.gpu import portable

            call = Call(*given)
            few = decoding.takes_few(*call[:3], call.sinks, call.mask, call.bias, call.dropout_p)
            self.run = decoding.decode.prepare(*given) if few else portable.forward(call)
        return self.run(*given)


class Plan(NamedTuple):
    """The launches of calls of some shapes: of the kernel, and of that which merges splits where there are some.

    ``partial`` is the number of elements that are merged.
    """

    kernel: PreparedLaunch
    merge: PreparedLaunch | None
    partial: int

    def run(self, q: Tensor, k: Tensor, lengths: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        """Launch on what is read and what is written."""
        partial = lse if self.merge is None else lse.new_empty(self.partial)
        given = lse if sinks is None else sinks
        self.kernel(q, k, lengths, out, lse, given, partial)
        if self.merge is not None:
            self.merge(partial, out, lse, given, None, None)


_TENSORS = ("q", "k", "lengths", "out", "lse", "sinks", "partial")


def _plan(call: Call, said: Seen) -> Plan:
    from opkit.attn.gpu.decode_launches import merged
    from opkit.op.triton.launch import PreparedLaunch

    (batch, heads, queries, _), (_, kv_heads, keys, channels) = call.q.shape, call.k.shape
    group, gpu, capped = heads // kv_heads, device_of(decoding.index_of(call.q)), call.softcap > 0
    slots = batch * queries * -(-group // _ROWS)
    splits = splits_of(slots * kv_heads, gpu.processors, -(-keys // _STEP))
    numbers = {"slots": slots, "splits": splits, "kv_heads": kv_heads}
    given = {
        "lower": said.lower, "upper": said.upper, "channels": channels, "inner": call.scale / (call.softcap or 1.0),
        "factor": (call.softcap if capped else call.scale) * _LOG2E, **numbers,
    }  # fmt: skip
    kernel = _kernel(group, capped, call.sinks is not None, splits > 1, said.lengths is not None)
    launch = PreparedLaunch(kernel, _TENSORS, given)
    if splits == 1:
        return Plan(launch, None, 0)
    constants = {
        "GROUP": group, "DV": VALUES, "DV_WIDE": VALUES, "DV_REST": 0, "ROWS": _ROWS, "BATCH": 1, "PAGE": 0,
        "SINKS": call.sinks is not None, "PDL": gpu.overlaps,
    }  # fmt: skip
    merge = merged(constants, {**numbers, "height": min(group, _ROWS)})
    return Plan(launch, merge, slots * kv_heads * splits * _ROWS * (VALUES + 2))


@functools.cache
def _kernel(group: int, capped: bool, sinks: bool, split: bool, lengths: bool) -> TritonKernel:
    from triton.experimental.gluon import language as gl

    from opkit.attn.gpu.device.mla import mla
    from opkit.op.triton.declare import triton_kernel
    from opkit.op.triton.kernel import tensor_descriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    loops, loads, all_threads = _REGISTERS
    names = {f"{x}_{d}": f"{x}_stride_{n}" for x in ("q", "k", "lse") for n, d in enumerate("bht")}
    return triton_kernel(
        mla,
        grid=lambda slots, kv_heads, splits: slots * kv_heads * splits,
        bind={**names, "batch": "q_size_0", "queries": "q_size_2", "keys": "k_size_2"},
        q_desc=tensor_descriptor("q", block=(1, _ROWS, 1, 256), layout=layout),
        half_desc=tensor_descriptor("k", block=(1, 1, 64, 256), layout=layout),
        rest_desc=tensor_descriptor("k", block=(1, 1, 64, 64), layout=layout),
        out_desc=tensor_descriptor("out", block=(1, _ROWS, 1, 256), layout=layout),
        GROUP=group,
        CAPPED=capped,
        SINKS=sinks,
        SPLIT=split,
        LENGTHS=lengths,
        AHEAD=AHEAD,
        each_length=(lambda lengths: int(lengths.shape[0] > 1)) if lengths else 0,
        REGISTERS=loops,
        LOADER_REGISTERS=loads,
        num_warps=4,
        maxnreg=all_threads,
        targets=("sm_90",),
    )
