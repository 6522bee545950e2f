"""Define ``opkit::attention``, the operator behind :func:`opkit.attention`, and register its kernels.

Each module in :data:`KERNELS` has kernels; its ``register(op)`` is called when the operator is first used, and calls
``op.register_kernel(device, function, when=..., dtypes=..., name=...)``. The function has the signature of
:func:`opkit.attn.reference.attention`. ``op.select(...)`` says which kernel a call gets, and why not another.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opkit.attn import gradients, reference
from opkit.attn.calls import AttentionCall
from opkit.attn.masks import program
from opkit.op.aot import call_code
from opkit.op.definition import custom_op
from opkit.op.forcing import with_kernel_argument
from opkit.op.operator import CustomOp
from opkit.op.rules import transforms

NAME = "opkit::attention"

KERNELS: tuple[str, ...] = ("opkit.attn.cpu", "opkit.attn.batch_invariant", "opkit.attn.gpu.kernels")
"""Modules with kernels, in the order of registration: the last of those that support a call is chosen."""


@functools.cache
def attention_operator() -> CustomOp[Any, tuple[Tensor, Tensor]]:
    """Return the operator; the first call defines it and registers its kernels.

    >>> import torch
    >>> q = torch.ones(1, 2, 3, 4)
    >>> out, lse = attention_operator()(q, q, q, [], [], None, None, [], [], 0.5, 0.0, 0.0, False)
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3]))
    """
    op = custom_op(NAME, mutates_args=())(reference.attention)
    op.register_fake(_fake)
    op.register_vmap(functools.partial(_mapped, attention_operator))
    op.register_autograd(gradients.backward, setup_context=gradients.setup_context)
    for module in KERNELS:
        importlib.import_module(module).register(op)
    call_code.WRITERS[NAME] = _units
    return op


@functools.cache
def attention_with_kernel() -> CustomOp[Any, tuple[Tensor, Tensor]]:
    """Return ``opkit::attention_with_kernel``, whose last argument names the kernel; the first call defines it."""
    op = with_kernel_argument(attention_operator())
    op.register_vmap(functools.partial(_mapped, attention_with_kernel))
    op.register_autograd(lambda *found: (*gradients.backward(*found), None), setup_context=gradients.setup_context)
    return op


def _units(calls: Iterable[call_code.Call]) -> list[str]:
    from opkit.attn.functions.c import saved

    return saved.units(calls)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return empty results; the reference's operations would compare sizes that depend on data with 0."""
    call = AttentionCall(*arguments)
    (batch, heads, queries, _), columns = call.q.shape, call.v.shape[3]
    if call.out_is_bshd:
        out = call.q.new_empty((batch, queries, heads, columns)).transpose(1, 2)
    else:
        out = call.q.new_empty((batch, heads, queries, columns))
    return out, call.q.new_empty((batch, heads, queries), dtype=torch.promote_types(call.q.dtype, torch.float32))


def _mapped(operator: Callable[[], Any], info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    """Make one call with the mapped dimension folded into the batch.

    Make a call for each index with mapped sinks, dropout, or a tensor that is both lengths and the numbers of rows.
    """
    sinks, seed = args[5:7]
    masks, mask_dims = args[3], in_dims[3] or [None] * len(args[3])
    unmapped = [x if dim is None else x.select(dim, 0) for x, dim in zip(masks, mask_dims, strict=True)]
    mapped_sinks = sinks is not None and in_dims[5] is not None
    if seed is not None or mapped_sinks or program.lengths_are_rows(args[7], unmapped):
        return transforms.loop_over_batch(operator(), info, in_dims, args, {})
    q, dim = args[0], in_dims[0]
    batch = (q if dim is None else q.movedim(dim, 0)[0]).shape[0]
    folded = list(args)
    for i in range(3):
        folded[i] = _folded(args[i], in_dims[i], info.batch_size, batch)
    flat = program.flat_rows(args[7], unmapped)
    for tensors, words, operands, rows in ((3, 7, program.MASK_OPERANDS, flat), (4, 8, program.BIAS_OPERANDS, set())):
        dims = in_dims[tensors] or [None] * len(args[tensors])
        folded[tensors], folded[words] = _folded_program(
            args[words], operands, args[tensors], dims, info.batch_size, batch, rows
        )
    out, lse = operator()(*folded)
    return (out.unflatten(0, (info.batch_size, batch)), lse.unflatten(0, (info.batch_size, batch))), (0, 0)


def _folded(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Return a tensor with ``size * batch`` in place of the batch."""
    mapped = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.expand(size, batch, *mapped.shape[2:]).flatten(0, 1)


def _folded_program(
    words: list[int],
    operands: Mapping[int, int],
    tensors: list[Tensor],
    dims: Sequence[Any],
    size: int,
    batch: int,
    flat: set[int],
) -> tuple[list[Tensor], list[int]]:
    """Return a program, and its tensors, for ``size * batch`` in place of the batch.

    A batch of 1 stays where no dimension is mapped, and so do ``flat`` tensors, which lack the batch. Functions read their
    tensors unfolded, by two numbers made of the batch's.
    """
    functions, others = program.used_tensors(words, operands)
    unfolded = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
    found = list(unfolded)
    for number in others:
        x, dim = unfolded[number], dims[number]
        if dim is not None:
            found[number] = _folded(x.unsqueeze(1) if number in flat else x, 0, size, batch)
        elif number not in flat and x.shape[0] != 1:
            found[number] = _folded(x, None, size, batch)
    places = {number: number if number not in others else -1 for number in functions}
    for number in sorted(functions & others):
        places[number] = len(found)
        found.append(unfolded[number])
    return found, program.with_functions(
        words,
        operands,
        lambda function: function.batched(
            batch, [places[t] for t in function.tensors], [dims[t] is not None for t in function.tensors]
        ),
    )
