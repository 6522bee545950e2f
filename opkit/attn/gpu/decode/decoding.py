"""Decoding on GPUs: the kernel of ``opkit::attention`` for few queries to a head of keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit import config
from opkit.attn.allocation import dense_rows, overwritten, rows
from opkit.attn.calls import AttentionCall, dtypes_and_shapes, predicate
from opkit.attn.gpu import arguments, functions, limits, search
from opkit.attn.gpu.decode import launches as decode_launches
from opkit.attn.gpu.decode.launches import KERNEL, SOURCES, DecodeLaunches, Results, divided, explained, tile_search_of
from opkit.attn.gpu.decode.plan import DecodeBlocks, DecodeShape, blocks_of, device_of, parts
from opkit.attn.gpu.limits import devices
from opkit.attn.gpu.plans import MaskShape
from opkit.attn.masks import program
from opkit.attn.masks.program import shapes_fit, sinks_fit
from opkit.errors import KernelError
from opkit.kernels.tuning.record_format import Identity
from opkit.op.kernel_kinds import TunedKernel
from opkit.op.operator import CustomOp

NAME = "split"
FEW = 128  #: rows of a head of keys, with which reading keys takes longer than the products
FEW_OF_PROGRAMS = 32  #: the same with programs of masks and biases, which take time for each row
MANY = 256  #: keys; with fewer there is nothing to divide
LONG = 4096  #: keys; with more rows than FEW, dividing pays where there are too few tiles for the GPU
LARGEST_HEAD = 576
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FAR = 2**30  #: a limit of bands that no distance reaches
_PRIORITY = 2  # above the kernels for many queries
TINY = 1e-30  #: stands for a scale of 0, times which minus infinity would be NaN


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::attention`` the kernel for few queries."""
    op.register_kernel(
        devices(), decode, when=predicate(AttentionCall, takes_few), name=NAME, priority=_PRIORITY, trusted=True
    )


# ---- what is taken ---------------------------------------------------------------------------------------------------


def takes_few(call: AttentionCall) -> bool:
    """Return whether a call is for :func:`decode`: few rows to a head of keys, or too few tiles of rows for the GPU."""
    q, k = call[:2]
    if k.shape[2] < MANY or not takes(call):
        return False
    height = q.shape[2] * (q.shape[1] // max(k.shape[1], 1))
    tiles = q.shape[0] * k.shape[1] * -(-height // FEW)
    return height <= (FEW_OF_PROGRAMS if _has_programs(call) else FEW) or (
        k.shape[2] >= LONG and 2 * tiles <= device_of(index_of(q)).processors
    )


def takes(call: AttentionCall) -> bool:
    """Return whether :func:`decode` can compute a call: a mask and a bias for which there is room, and no dropout."""
    q, k, v = call[:3]
    if not shapes_fit(q, k, v) or q.dtype not in FLOATS or max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        return False
    if call.dropout_p != 0 or not sinks_fit(call.sinks, q) or max(q.shape[2], k.shape[2]) >= FAR:
        return False
    banded = not call.mask or (len(call.mask) == 3 and call.mask[0] == program.BAND)
    return (banded and not call.bias) or (limits.sizes_fit(call) and arguments.shape_of(call).fits)


def _check_supported(call: AttentionCall) -> None:
    """A kernel that is forced is not asked whether it takes the call."""
    if takes(call):
        return
    shapes = dtypes_and_shapes(call[:3])
    raise KernelError(
        f"opkit::attention: kernel {NAME!r} does not take q, k, v of {shapes} with mask={call.mask}, bias={call.bias}, "
        f"dropout_p={call.dropout_p}. It takes masks and biases of few tensors, no dropout, and heads up to {LARGEST_HEAD}. "
        "Leave the choice to opkit, which opkit.attn.api.select explains, or force kernel='reference'."
    )


def refuse_batch_invariance(operator: str, kernel: str = NAME) -> None:
    """Raise for a kernel that was forced, whose last bits may depend on the rest of the batch, if they must not.

    Raises:
        KernelError: ``OPKIT_BATCH_INVARIANT`` is set.
    """
    if config.get().batch_invariant:
        raise KernelError(
            f"{operator}: OPKIT_BATCH_INVARIANT is set, and kernel {kernel!r} was forced, whose results may depend on what else "
            "is in the batch. Leave the choice to opkit, or force kernel='batch_invariant' or 'reference'."
        )


# ---- calls -----------------------------------------------------------------------------------------------------------


def notes(*args: Any) -> Sequence[str]:
    """Return how a call would be divided, and why."""
    call = AttentionCall(*args)
    shape = shape_of(call, _numbers(call), shared=False)
    gpu = device_of(index_of(call.q))
    return [
        explained(tile_search_of(shape, gpu, call.q.device, call.q.dtype), functools.partial(blocks_of, shape, gpu))
    ]


def identities() -> list[Identity]:
    """Return the kernel as results of searches are recorded."""
    return [search.identity(KERNEL, SOURCES)]


@functools.partial(TunedKernel, examples=tuple(search.decoding_examples()), identities=identities, notes=notes)
def decode(*args: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the operator's result and log-sum-exp, of its own arguments; :func:`takes` says of which.

    Keys and values are read once for all heads that share them and all queries of a tile. The number of splits follows
    from shapes and the GPU alone, and splits are merged in order: equal calls give equal bits. Nothing waits for the GPU.

    Raises:
        KernelError: it was forced on a call that it does not compute, or batch invariance is set.
    """
    call = AttentionCall(*args)
    _check_supported(call)
    refuse_batch_invariance("opkit::attention")
    shape = arguments.shape_of(call)
    out = rows(call.q, call.v.shape[3], call.out_is_bshd)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    results = {"out": overwritten(out), "lse": overwritten(lse)}
    if 0 in call.q.shape[:3]:
        return lambda *_: tuple([make() for make in results.values()])
    tensors = _programs_of(call, shape)
    names = ("q", "k", "v", *(("sinks",) if call.sinks is not None else ()), *tensors)
    may = (False, True) if may_share(call.k, call.v) else (False,)
    launches = [_plan(call, shape, shared, names, results) for shared in may]

    def run(*args: Any) -> tuple[Tensor, ...]:
        q, k, v, _, _, sinks = args[:6]
        launch = launches[len(launches) > 1 and k.data_ptr() == v.data_ptr()]
        read = [dense_rows(q), dense_rows(k), dense_rows(v)]
        if sinks is not None:
            read.append(sinks.contiguous())
        if tensors:
            read += _programs_of(AttentionCall(*args), shape).values()
        return launch(*read)

    return run


def _programs_of(call: AttentionCall, shape: MaskShape) -> dict[str, Tensor]:
    """Return the tensors of a call's mask and bias by the kernel's parameters."""
    tensors = zip(arguments.TENSORS, arguments.all_tensors_of(call, shape), strict=True)
    return {name: x for name, x in tensors if x is not None}


def _numbers(call: AttentionCall) -> dict[str, Any]:
    """Return the numbers that the kernel takes of a call: the ends of bands, what logits are times, those of programs."""
    shape = arguments.shape_of(call)
    numbers = numbers_of(shape.lower, shape.upper, call.scale, call.softcap)
    return {**arguments.numbers_of(call, shape), **numbers} if shape.mask or shape.bias else numbers


def numbers_of(lower: int, upper: int, scale: float, softcap: float) -> dict[str, Any]:
    """Return the numbers that the kernel takes of a band and of logits."""
    ends = {name: max(-FAR, min(int(end), FAR)) for name, end in (("lower", lower), ("upper", upper))}
    return {**ends, "scale": abs(float(scale)) or TINY, "softcap": float(softcap)}


def may_share(k: Tensor, v: Tensor) -> bool:
    """Return whether ``v`` may be the first columns of ``k``, as in multi-head latent attention."""
    return v.shape[3] == parts(k.shape[3])[0] < k.shape[3] and k.stride() == v.stride()


def shape_of(call: AttentionCall, numbers: dict[str, Any], shared: bool) -> DecodeShape:
    """Return a call as it matters for its division; ``numbers`` are those of :func:`numbers_of`."""
    q, k, v = call[:3]
    group, item = q.shape[1] // k.shape[1], k.element_size()
    programs = _has_programs(call)
    mixed = programs or (_banded(numbers) and q.shape[2] > 1 and group % 64 > 0)
    sizes = k.shape[2], k.shape[3], v.shape[3]
    return DecodeShape(
        group * q.shape[2], q.shape[0] * k.shape[1], *sizes, item, item, shared=shared, mixed=mixed, programs=programs
    )


def _has_programs(call: AttentionCall) -> bool:
    shape = arguments.shape_of(call)
    return bool(shape.mask or shape.bias)


def _banded(numbers: dict[str, Any]) -> bool:
    return bool(numbers["lower"] > -FAR or numbers["upper"] < FAR)


def _plan(
    call: AttentionCall, of_mask: MaskShape, shared: bool, names: Sequence[str], results: Results
) -> Callable[..., tuple[Tensor, ...]]:
    (q, k, v), numbers = call[:3], _numbers(call)
    (batch, heads, queries, _), kv_heads, keys, sizes = q.shape, k.shape[1], k.shape[2], (k.shape[3], v.shape[3])
    group, height, dtype = heads // kv_heads, heads // kv_heads * queries, q.dtype
    gpu, shape = device_of(index_of(q)), shape_of(call, numbers, shared)
    banded = _banded(numbers)
    settled = {
        "PAGE": 0, "BATCH": 1, "SHARED": shared, "CAPPED": call.softcap > 0, "SINKS": call.sinks is not None,
        "NEGATIVE": call.scale < 0, "K_SCALED": False, "V_SCALED": False, "FP8": False,
        "MASK": functions.words_of(of_mask.mask, of_mask.functions, program.FUNCTION, call.mask_tensors),
        "BIAS": functions.words_of(of_mask.bias, of_mask.functions, program.BIAS_FUNCTION, call.bias_tensors),
        "APART": _apart(call, of_mask),
    }  # fmt: skip
    programs = _has_programs(call)

    def made(blocks: DecodeBlocks) -> DecodeLaunches:
        constants = {
            **decode_launches.constants_of(blocks, group, sizes, dtype, gpu), **settled,
            "MIXED": banded and queries > 1 and group % blocks.rows != 0,
            "WHOLE": not (banded or programs or of_mask.lengths) and keys % blocks.block == 0,
        }  # fmt: skip
        slots = batch * -(-height // blocks.rows)
        return decode_launches.launches_of(blocks, constants, slots, kv_heads, min(height, blocks.rows), numbers)

    asked = tile_search_of(shape, gpu, q.device, dtype)
    return divided(asked, functools.partial(blocks_of, shape, gpu), made, names, results)


def _apart(call: AttentionCall, of_mask: MaskShape) -> bool:
    """Return whether rows that share a head of keys may see different keys by a mask's program."""
    if not of_mask.mask:
        return False
    (_, heads, queries, _), kv_heads = call.q.shape, call.k.shape[1]
    by_function = any("h" in each.variables for each in of_mask.functions if each.whose == "mask")
    by_tensor = any(
        whose == "mask" and call.mask_tensors[number].dim() == 4 and call.mask_tensors[number].shape[1] > 1
        for whose, number, _ in of_mask.slots
    )
    return queries > 1 or (heads > kv_heads and (by_function or by_tensor))


def index_of(x: Tensor) -> int:
    """Return the number of its GPU; -1 for a CPU tensor."""
    return -1 if x.device.type == "cpu" else x.get_device()
