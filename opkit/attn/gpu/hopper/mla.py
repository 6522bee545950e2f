"""Latent attention of few queries on sm_90: which calls the kernel takes, and its launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opkit.attn.allocation import allocate_scratch, overwritten, rows
from opkit.attn.calls import AttentionCall, dtypes_and_shapes, predicate
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode.launches import merged
from opkit.attn.gpu.decode.plan import Device, device_of, splits_of
from opkit.attn.gpu.hopper.calls import DTYPES, LOG2E, describable, on_hopper
from opkit.attn.gpu.portable import forward as portable
from opkit.attn.masks import program
from opkit.attn.masks.program import mask_fits, shapes_fit, sinks_fit
from opkit.errors import KernelError
from opkit.kernels.triton.named import Layout, Named
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel, tensor_descriptor
from opkit.op.triton.launch import PreparedLaunch

NAME = "mla"
VALUES, MOST = 512, 576  #: channels of values, and the most of keys
FEWEST = 33  #: heads that share keys; with fewer more than half of a tile of 64 would be idle
STEP = 128  #: keys of a pair of blocks
ROWS = 64  # heads of a tile
_PRIORITY = 3  # above the kernel for few queries
Run = Callable[..., tuple[Tensor, Tensor]]
_REGISTERS, _LOADER_REGISTERS, _ALL_REGISTERS = 240, 24, 168  # the last of each thread before they are shared out
_MLA = Named("opkit.attn.gpu.hopper.device.mla", "mla")
_TENSORS = ("q", "k", "out", "lse", "sinks", "partial", "table", "lengths", "starts")


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel for latent attention."""
    op.register_kernel(
        "cuda", forward, when=predicate(AttentionCall, takes), name=NAME, priority=_PRIORITY, trusted=True
    )


class Seen(NamedTuple):
    """A mask: query i sees key j if ``lower <= j - i <= upper``, and j is before ``lengths``, the number of a tensor, if any."""

    lower: int
    upper: int
    lengths: int | None


def takes(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`forward`: what it says there, few queries, on a GPU of compute capability 9.0."""
    q, k = call[:2]
    if k.shape[2] < decoding.MANY or q.shape[2] * 4 > k.shape[2] or q.shape[1] < FEWEST * k.shape[1]:
        return False
    return fits(call) and on_hopper(q)


def fits(call: AttentionCall) -> bool:
    """Return whether :func:`forward` can compute a call."""
    q, k, v = call[:3]
    if q.dtype not in DTYPES or not shapes_fit(q, k, v) or 0 in q.shape or 0 in k.shape:
        return False
    latent = VALUES == v.shape[3] < k.shape[3] <= MOST and k.stride() == v.stride() and describable(k)
    tiled = q.shape[2] == k.shape[1] == 1 or (q.shape[1] // k.shape[1]) % ROWS == 0
    short = max(q.shape[2], k.shape[2]) < decoding.FAR
    plain = not call.bias and call.dropout_p == 0 and call.scale > 0 and sinks_fit(call.sinks, q)
    return latent and tiled and short and plain and seen(call.mask) is not None and mask_fits(call)


def seen(mask: list[int]) -> Seen | None:
    """Return what a mask's program says; None where it says something else than a band, lengths or both.

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
def forward(*args: Any) -> Run:
    """Compute the operator's result and log-sum-exp; the arguments are the operator's.

    It takes bfloat16 and float16; keys of more than 512 and at most 576 channels, the first 512 of which are the values, as
    TMA can follow them; one query and one head of keys, or heads that 64 divides to each of keys; no mask, one BAND, one
    LENGTH or both; a positive scale; a soft cap; sinks. Values that turn out to lie elsewhere than in the keys are left to the
    other kernels.

    Probabilities are rounded to q's dtype before they are multiplied with the values. Keys and values that are hidden do not
    reach a result, whatever they hold. How keys are divided among programs follows from shapes and the GPU alone: equal calls
    give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it does not take the call, or batch invariance is set.
    """
    call = AttentionCall(*args)
    if not fits(call):
        shapes = dtypes_and_shapes(call[:3])
        raise KernelError(
            f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes}, mask={call.mask}, bias={call.bias}, "
            f"scale={call.scale}, dropout_p={call.dropout_p}: it takes {VALUES} values that are the first channels of the keys, "
            f"of which there are at most {MOST}. Leave the choice to opkit, or force kernel='reference'."
        )
    decoding.refuse_batch_invariance("opkit::attention", NAME)
    new_out = overwritten(rows(call.q, VALUES, call.out_is_bshd))
    new_lse = overwritten(call.q.new_empty(call.q.shape[:3], dtype=torch.float32))
    said = seen(call.mask) or Seen(0, 0, None)
    queries, others = Queries(call.q, lambda: _plan(call, said)), _Others()

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, masks, _, sinks, *_ = args
        if k.data_ptr() != v.data_ptr() or k.data_ptr() % 16:
            return others(args)
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

    def __call__(self, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if self.run is None:
            call = AttentionCall(*args)
            few = decoding.takes_few(call)
            self.run = decoding.decode.prepare(*args) if few else portable.prepare_forward(call)
        return self.run(*args)


class Queries:
    """Queries as TMA can read them, and the launches for them: a copy's strides may be others, so it has its own."""

    def __init__(self, q: Tensor, plan: Callable[[], MlaLaunches]) -> None:
        self.plan, self.described = plan, describable(q)
        self.plans: dict[bool, MlaLaunches] = {}

    def __call__(self, q: Tensor) -> tuple[Tensor, MlaLaunches]:
        copied = not self.described or q.data_ptr() % 16 > 0
        found = self.plans.get(copied)
        if found is None:
            found = self.plans[copied] = self.plan()
        return q.clone(memory_format=torch.contiguous_format) if copied else q, found


def _plan(call: AttentionCall, said: Seen) -> MlaLaunches:
    (batch, heads, queries, _), (_, kv_heads, keys, channels) = call.q.shape, call.k.shape
    group, gpu = heads // kv_heads, device_of(decoding.index_of(call.q))
    slots = batch * queries * -(-group // ROWS)
    splits = splits_of(slots * kv_heads, gpu.processors, -(-keys // STEP))
    lengths = 0 if said.lengths is None else 1 + (call.mask_tensors[said.lengths].shape[0] > 1)
    form = MlaForm(group, call.softcap > 0, call.sinks is not None, lengths)
    numbers = {"lower": said.lower, "upper": said.upper, "channels": channels, **factors(call.scale, call.softcap)}
    return launches_of(form, MlaDivision(slots, splits, kv_heads), gpu, numbers)


def factors(scale: float, softcap: float) -> dict[str, float]:
    """Return what logits are multiplied by, to be exponents of 2: before the cap, and after it."""
    if softcap > 0:
        return {"factor": softcap * LOG2E, "inner": scale / softcap}
    return {"factor": scale * LOG2E, "inner": 1.0}


class MlaLaunches(NamedTuple):
    """The launches of calls of some shapes.

    Attributes:
        kernel: the launch of the kernel.
        merge: that of the kernel that merges splits; None where there is one split.
        partial: elements of what is merged.
        paged: whether results are of (total, heads), of which the kernel makes (1, heads, total).
    """

    kernel: PreparedLaunch
    merge: PreparedLaunch | None
    partial: int
    paged: bool

    def run(self, q: Tensor, k: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *pages: Tensor | None) -> None:
        """Launch on what is read and what is written, and on the table of pages, lengths and starts, each perhaps None."""
        partial = lse if self.merge is None else allocate_scratch(lse, self.partial)
        sinks_or_lse = lse if sinks is None else sinks
        written = (out.transpose(0, 1).unsqueeze(0), lse.t().unsqueeze(0)) if self.paged else (out, lse)
        self.kernel(q, k, *written, sinks_or_lse, partial, *pages)
        if self.merge is not None:
            self.merge(partial, out, lse, sinks_or_lse, *pages[1:])


class MlaForm(NamedTuple):
    """What the kernel is compiled for: the parameters of the device function with these names in capitals."""

    group: int
    capped: bool = False
    sinks: bool = False
    lengths: int = 0
    page: int = 0
    batch: int = 1


class MlaDivision(NamedTuple):
    """How a call is divided: slots of tiles for each head of keys, splits of each tile, and heads of keys of a sequence."""

    slots: int
    splits: int
    kv_heads: int


def launches_of(form: MlaForm, division: MlaDivision, gpu: Device, numbers: dict[str, Any]) -> MlaLaunches:
    """Return the launches of a division of a call; ``numbers`` are those of the device function that follow from no tensor."""
    shared = division._asdict()
    launch = PreparedLaunch(_kernel(form, division.splits > 1), _TENSORS, {**numbers, **shared})
    if division.splits == 1:
        return MlaLaunches(launch, None, 0, form.page > 0)
    constants = {
        "GROUP": form.group, "DV": VALUES, "DV_WIDE": VALUES, "DV_REST": 0, "ROWS": ROWS, "BATCH": form.batch,
        "PAGE": form.page, "SINKS": form.sinks, "PDL": gpu.overlaps,
    }  # fmt: skip
    keys = {"keys": numbers["keys"]} if form.page else {}
    merge = merged(constants, {**shared, **keys, "height": min(form.group, ROWS)})
    programs = division.slots * division.splits * division.kv_heads
    return MlaLaunches(launch, merge, programs * ROWS * (VALUES + 2), form.page > 0)


@functools.cache
def _kernel(form: MlaForm, split: bool) -> TritonKernel:
    layout = Layout("NVMMASharedLayout", swizzle_byte_width=128, element_bitwidth=16, rank=4)
    rows, half, rest = (1, ROWS, 1, 256), (1, 1, 64, 256), (1, 1, 64, 64)
    if form.page:
        half, rest = ((x[0], x[2], x[1], x[3]) for x in (half, rest))
    strides = {f"{x}_{d}": f"{x}_stride_{n}" for x in ("q", "lse") for n, d in enumerate("bht")}
    sizes = {"batch": "q_size_0", "queries": "q_size_2"}
    constants: dict[str, Any] = {name.upper(): value for name, value in form._asdict().items()}
    if form.page:
        sizes |= {"batch": "lengths_size_0", "pages": "k_size_0", "table_b": "table_stride_0"}
    else:
        sizes |= {"keys": "k_size_2"}
        constants |= {"pages": 0, "table_b": 0}
    return triton_kernel(
        _MLA,
        grid=lambda slots, kv_heads, splits: slots * kv_heads * splits,
        bind={**strides, **sizes},
        q_desc=tensor_descriptor("q", block=rows, layout=layout),
        half_desc=tensor_descriptor("k", block=half, layout=layout),
        rest_desc=tensor_descriptor("k", block=rest, layout=layout),
        out_desc=tensor_descriptor("out", block=rows, layout=layout),
        **constants,
        SPLIT=split,
        REGISTERS=_REGISTERS,
        LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4,
        maxnreg=_ALL_REGISTERS,
        targets=("sm_90",),
    )
