"""``opkit.merge_attention``: combine attention to parts of the keys into attention to all, as where sequences share a prefix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn.allocation import overwritten
from opkit.attn.compat import torch_private
from opkit.attn.gpu.blocks import tiles_in
from opkit.attn.gpu.limits import device
from opkit.attn.parallel.gather import gather_parts
from opkit.attn.parallel.layout import group_of
from opkit.errors import ArgumentError, DtypeError, ShapeError
from opkit.kernels.triton.named import Named
from opkit.op.definition import custom_op
from opkit.op.kernel_kinds import PreparedKernel
from opkit.op.operator import CustomOp
from opkit.op.triton.declare import triton_kernel
from opkit.op.triton.kernel import TritonKernel
from opkit.op.triton.launch import PreparedLaunch

_LSES = (torch.float32, torch.float64)
NAME = "triton"
MOST_PARTS, LARGEST = 8, 4096
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS = 2048  # of a program's rows
_MERGE = Named("opkit.attn.gpu.decode.device.merge", "merge_parts")
_TENSORS = (*(f"out{i}" for i in range(MOST_PARTS)), *(f"lse{i}" for i in range(MOST_PARTS)), "out", "lse")


@functools.cache
def merge_attention_operator() -> CustomOp[Any, tuple[Tensor, Tensor]]:
    """Return ``opkit::merge_attention``; the first call defines it and registers its kernel."""
    op = custom_op("opkit::merge_attention", mutates_args=())(reference)
    register(op)
    return op


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]], *, mesh: Any = None) -> tuple[Tensor, Tensor]:
    """Return the result of attention to all keys, from its results for parts of them: each key is in one part.

    Sequences that share a prefix attend to it together, each to the rest of its own keys alone, and the two results are
    merged. Gradients reach all parts.

    Args:
        parts: the result and the log-sum-exp of each, as ``return_lse=True`` returns them: (..., d_v), of one shape and dtype,
            and (...), float32 or float64. Without a sink, or with it in one part alone.
        mesh: a ``DeviceMesh`` of one dimension, or a process group: the parts are those of all its processes, each of which gives
            its own, of the same shape on all. All get the same result; gradients are those of computing the same from it.

    Returns:
        The result, of the parts' shape and dtype, and the log-sum-exp; zeros and minus infinity where no part sees a key.
        A part that sees none does not count, whatever its result holds. The number of a part's keys is known from its
        log-sum-exp only: for logits so large that float32 rounds the logarithm of a sum away (``finfo.min`` throughout, as in
        padded rows), parts count alike.

    Raises:
        ArgumentError: there are no parts; or, on every process of ``mesh``, their parts have different shapes or dtypes. GPUs
            compare the first call of a kind only.
        ArgumentTypeError: ``mesh`` is neither a mesh nor a process group.
        ShapeError, DtypeError: the parts do not fit each other.

    >>> import opkit, torch
    >>> q, k, v = torch.randn(3, 1, 2, 6, 4)
    >>> first = opkit.attention(q, k[:, :, :4], v[:, :, :4], return_lse=True)
    >>> rest = opkit.attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True)
    >>> out, lse = opkit.merge_attention([first, rest])
    >>> torch.allclose(out, opkit.attention(q, k, v), atol=1e-6)
    True

    Source: Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding", 2024.
    """
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    _check(outs, lses)
    if mesh is not None:
        outs, lses = _of_all(outs, lses, mesh)
    return _OPERATOR(outs, lses)


@torch_private.traced_with_ranks
def _of_all(outs: list[Tensor], lses: list[Tensor], mesh: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of all processes, of which each sends one."""
    own = _OPERATOR(outs, lses) if len(outs) > 1 else (outs[0], lses[0])
    of_all, sums = gather_parts(*own, group_of(mesh, "opkit.merge_attention").group_name)
    return [*of_all], [*sums]


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if not outs:
        raise ArgumentError("opkit.merge_attention: parts is empty; it needs a result and its log-sum-exp at least.")
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1] or out.dim() == 0:
            raise ShapeError(
                f"opkit.merge_attention: part {number} has a result of {tuple(out.shape)} and a log-sum-exp of "
                f"{tuple(lse.shape)}; expected {tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}, as of part 0."
            )
        if out.dtype != outs[0].dtype or lse.dtype != lses[0].dtype or lse.dtype not in _LSES:
            raise DtypeError(
                f"opkit.merge_attention: part {number} has a result of {out.dtype} and a log-sum-exp of {lse.dtype}; expected "
                f"{outs[0].dtype} and {lses[0].dtype}, as of part 0, the latter float32 or float64."
            )


def reference(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge in plain torch: the weights of the parts are the softmax of their log-sum-exps."""
    each = torch.stack(lses)
    masked = (each == -torch.inf).all(0)
    each = torch.where(masked, 0.0, each)  # with nothing but minus infinity these have no derivative
    lse, weights = each.logsumexp(0), torch.where(masked, 0.0, each.softmax(0)).unsqueeze(-1)
    total = outs[0].new_zeros(outs[0].shape, dtype=torch.promote_types(lses[0].dtype, torch.float32))  # dense
    for out, weight in zip(outs, weights, strict=True):
        total = total + weight * torch.where(weight > 0, out.to(total.dtype), 0.0)
    return total.to(outs[0].dtype), torch.where(masked, -torch.inf, lse)


def register(op: CustomOp[Any, Any]) -> None:
    """Give ``opkit::merge_attention`` its kernel for GPUs."""
    op.register_kernel(device(), merge, when=takes, name=NAME, trusted=True)


def takes(outs: list[Tensor], lses: list[Tensor]) -> bool:
    """Return whether :func:`merge` takes a call: at most eight parts, no float64, rows of at most 4096."""
    first, sums = outs[0], lses[0]
    dtypes = first.dtype in _DTYPES and sums.dtype == torch.float32
    same = all(x.shape == first.shape and x.dtype == first.dtype for x in outs)
    return dtypes and same and len(outs) == len(lses) <= MOST_PARTS and 0 < first.shape[-1] <= LARGEST


@functools.cache
def _kernel(count: int, columns: int) -> TritonKernel:
    wide = 1 << (columns - 1).bit_length()
    return triton_kernel(
        _MERGE, grid=lambda rows, ROWS: tiles_in(rows, ROWS), COUNT=count, D=columns, WIDE=wide,
        ROWS=max(1, _ELEMENTS // wide),
    )  # fmt: skip


@PreparedKernel
def merge(outs: list[Tensor], lses: list[Tensor]) -> Any:
    """Return the merged result and log-sum-exp; its arguments are those of :func:`opkit.attn.merging.reference`."""
    rows = lses[0].numel()
    new = [overwritten(torch.empty(x.shape, dtype=x.dtype, device=x.device)) for x in (outs[0], lses[0])]
    launch = PreparedLaunch(_kernel(len(outs), outs[0].shape[-1]), _TENSORS, {"rows": rows})

    def run(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
        read = [_padded([x.contiguous() for x in each]) for each in (outs, lses)]
        out, lse = (make() for make in new)
        if rows:
            launch(*read[0], *read[1], out, lse)
        return out, lse

    return run


def _padded(tensors: list[Tensor]) -> list[Tensor | None]:
    return [*tensors, *[None] * (MOST_PARTS - len(tensors))]


_OPERATOR = merge_attention_operator()  # not at the first call, which compilers may trace
