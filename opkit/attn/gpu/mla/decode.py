"""The kernel of latent attention for sm_90 (:mod:`opkit.attn.gpu.mla.device.decode`): which calls it takes, and a call of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.allocation import overwritten, rows
from opkit.attn.calls import Call, dtypes_and_shapes, predicate
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode.plan import device_of, splits_of
from opkit.attn.gpu.hopper.forward import describable, on_hopper
from opkit.attn.masks import program
from opkit.attn.masks.memory_safety import mask_fits, shapes_fit, sinks_fit
from opkit.errors import KernelError
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp

if TYPE_CHECKING:
    from opkit.attn.gpu.mla.launches import Plan

NAME = "mla"
DTYPES = (torch.bfloat16, torch.float16)
VALUES, MOST = 512, 576  #: channels of values, and the most of keys
FEWEST = 33  #: heads that share keys; with fewer more than half of a tile of 64 would be idle
STEP = 128  #: keys of a pair of blocks
_LOG2E = 1.4426950408889634
_ROWS = 64  # heads of a tile
_PRIORITY = 3  # above the kernel for few queries
Run = Callable[..., tuple[Tensor, Tensor]]


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel for latent attention."""
    op.register_kernel("cuda", forward, when=predicate(Call, takes), name=NAME, priority=_PRIORITY, trusted=True)


class Seen(NamedTuple):
    """A mask: query i sees key j if ``lower <= j - i <= upper``, and j is before ``lengths``, the number of a tensor, if any."""

    lower: int
    upper: int
    lengths: int | None


def takes(call: Call) -> bool:
    """Whether a call is for :func:`forward`: what it says there, few queries, on a GPU of compute capability 9.0."""
    q, k = call[:2]
    if k.shape[2] < decoding.MANY or q.shape[2] * 4 > k.shape[2] or q.shape[1] < FEWEST * k.shape[1]:
        return False
    return fits(call) and on_hopper(q)


def fits(call: Call) -> bool:
    """Whether :func:`forward` can compute a call."""
    q, k, v = call[:3]
    if q.dtype not in DTYPES or not shapes_fit(q, k, v) or 0 in q.shape or 0 in k.shape:
        return False
    latent = VALUES == v.shape[3] < k.shape[3] <= MOST and k.stride() == v.stride() and describable(k)
    tiled = q.shape[2] == k.shape[1] == 1 or (q.shape[1] // k.shape[1]) % _ROWS == 0
    short = max(q.shape[2], k.shape[2]) < decoding.FAR
    plain = not call.bias and call.dropout_p == 0 and call.scale > 0 and sinks_fit(call.sinks, q)
    return latent and tiled and short and plain and seen(call.mask) is not None and mask_fits(call)


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
    TMA can follow them; one query and one head of keys, or heads that 64 divides to each of keys; no mask, one BAND, one
    LENGTH or both; a positive scale; a soft cap; sinks. Values that turn out to lie elsewhere than in the keys are left to the
    other kernels.

    Probabilities are rounded to q's dtype before they are multiplied with the values. Keys and values that are hidden do not
    reach a result, whatever they hold. How keys are divided among programs follows from shapes and the GPU alone: equal calls
    give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call, or batch invariance is asked for.
    """
    call = Call(*given)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, dropout_p={call.dropout_p}: it takes {VALUES} values that are the first channels of the keys, "
            f"of which there are at most {MOST}. Leave the choice to opkit, or force kernel='reference'."
        )
    decoding.refuse_batch_invariance("opkit::attention")
    new_out = overwritten(rows(call.q, VALUES, call.out_is_bshd))
    new_lse = overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    said = seen(call.mask) or Seen(0, 0, None)
    queries, others = Queries(call.q, lambda: _plan(call, said)), _Others()

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, masks, _, sinks, *_ = given
        if k.data_ptr() != v.data_ptr() or k.data_ptr() % 16:
            return others(given)
        out, lse = new_out(), new_lse()
        lengths = None if said.lengths is None else masks[said.lengths].contiguous()
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        q, found = queries(q)
        found.run(q, k, out, lse, sinks, None, lengths, None)
        return out, lse

    return run


class _Others:
    """Calls whose values are not columns of their keys, by the kernel that is otherwise for them."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def __call__(self, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if self.run is None:
            from opkit.attn.gpu.portable import forward as portable

            call = Call(*given)
            few = decoding.takes_few(call)
            self.run = decoding.decode.prepare(*given) if few else portable.forward(call)
        return self.run(*given)


class Queries:
    """Queries as TMA can read them, and the launches for them: a copy's strides may be others, so it has its own."""

    def __init__(self, q: Tensor, plan: Callable[[], Plan]) -> None:
        self.plan, self.described = plan, describable(q)
        self.plans: dict[bool, Plan] = {}

    def __call__(self, q: Tensor) -> tuple[Tensor, Plan]:
        copied = not self.described or q.data_ptr() % 16 > 0
        found = self.plans.get(copied)
        if found is None:
            found = self.plans[copied] = self.plan()
        return q.clone(memory_format=torch.contiguous_format) if copied else q, found


def _plan(call: Call, said: Seen) -> Plan:
    from opkit.attn.gpu.mla.launches import Division, Form, plan

    (batch, heads, queries, _), (_, kv_heads, keys, channels) = call.q.shape, call.k.shape
    group, gpu = heads // kv_heads, device_of(decoding.index_of(call.q))
    slots = batch * queries * -(-group // _ROWS)
    splits = splits_of(slots * kv_heads, gpu.processors, -(-keys // STEP))
    lengths = 0 if said.lengths is None else 1 + (call.mask_tensors[said.lengths].shape[0] > 1)
    form = Form(group, call.softcap > 0, call.sinks is not None, lengths)
    numbers = {"lower": said.lower, "upper": said.upper, "channels": channels, **factors(call.scale, call.softcap)}
    return plan(form, Division(slots, splits, kv_heads), gpu, numbers)


def factors(scale: float, softcap: float) -> dict[str, float]:
    """What logits are multiplied by, to be exponents of 2: before the cap, and after it."""
    if softcap > 0:
        return {"factor": softcap * _LOG2E, "inner": scale / softcap}
    return {"factor": scale * _LOG2E, "inner": 1.0}
