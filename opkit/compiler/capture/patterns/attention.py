"""Attention that a model writes by hand: two products of matrices with a softmax in between.

The scores may be scaled, masked (by a sum, ``masked_fill`` or ``where``), converted and viewed in any order. What is done to
them becomes one scale and one mask that is added.

Rows that are masked throughout. By hand their weights are NaN if the mask is -inf, and uniform if it is a large negative number,
in which the scores are lost to rounding. torch's kernels give zeros, or gradients that are too large. A mask that is not
constant may have such rows, so they are computed like this::

    peak = mask.amax(-1, keepdim=True)
    fully = peak <= lowest                    # the rows
    q = q.masked_fill(fully, 0)               # uniform weights, which pass no gradient to queries and keys
    out = scaled_dot_product_attention(q, k, v, mask.masked_fill(fully, 0))
    out = out * (NaN where peak is -inf, 1 elsewhere)

A number of -10,000 or less that replaces scores counts as a large one: the weights are 0 by hand too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from opkit.compiler.capture.attention_masks import Constants
from opkit.compiler.capture.patterns.attention_match import Attention, Operand, Step, find
from opkit.compiler.capture.patterns.nodes import Kept, check_uses, example, insert, operation, replace_nodes, tensor

_LARGE = -1e4
_LOWEST = {torch.float64: -1e20, torch.float32: -1e8, torch.bfloat16: -1e8, torch.float16: -3e4}
"""Where the greatest number in a row of a mask is not above this one, scores are lost to rounding."""

_DTYPES = {"cpu": tuple(_LOWEST), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
_MIN_KEYS = {False: 128, True: 256}
"""The least number of keys for which torch's kernel for CPUs is faster, in inference and in training."""


def replace(softmax: fx.Node, constants: Constants) -> bool:
    """Replace the attention that this softmax is of.

    Raises:
        Kept: it is attention that torch's function does not compute, or not as fast.
    """
    found = find(softmax, constants)
    if found is None:
        return False
    check_uses(found.nodes)
    for check in (_check_shapes, _check_steps, _check_masks, _check_device):
        check(found)
    function = functools.partial(_attention, found, _special_rows(found, constants))
    new = insert(found.result, function, found.q.node, found.k.node, found.v.node, found.mask_nodes)
    replace_nodes(found.nodes, new)
    return True


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_shapes(found: Attention) -> None:
    product, weights = tensor(found.product).shape, tensor(found.nodes[-2]).shape
    ranks = {tensor(node).dim() for node in found.nodes[:-1]}
    if not ranks <= {3, 4}:
        raise Kept(f"the scores have {max(ranks)} dimensions")
    if not found.q.shape[:-2] == found.k.shape[:-2] == product[:-2] or found.v.shape[:-2] != weights[:-2]:
        raise Kept("queries, keys and values have other numbers of heads")
    if found.v.shape[-1] != found.q.shape[-1]:
        raise Kept(f"queries have {found.q.shape[-1]} features, values {found.v.shape[-1]}")
    if len(ranks) == 2 and any(type(n) is not int for n in product):
        raise Kept("heads are merged, and sizes change")


def _check_steps(found: Attention) -> None:
    for step in found.before:
        name = step.node.name
        if step.kind == "scale" and (step.value is None or not step.value > 0):
            raise Kept(f"{name} multiplies scores by what is not a positive constant")
        if step.kind in ("add", "subtract") and example(step.value) is None:
            raise Kept(f"{name} adds what is not a tensor, or with a factor")
        if step.kind == "fill" and not (step.value is not None and step.value <= _LARGE):
            raise Kept(f"{name} replaces scores by {step.value}, next to which they count")


def _check_masks(found: Attention) -> None:
    wide = _device(found) == "cpu" and found.dtype in (torch.bfloat16, torch.float16)  # its kernel takes both
    allowed = {found.dtype, torch.float32} if wide else {found.dtype}
    masks = [tensor(node) for node in found.mask_nodes]
    for step, mask in zip(found.masks, masks, strict=True):
        if mask.dtype not in (allowed if step.mask is None else {torch.bool}):
            raise Kept(f"the mask of {step.node.name} is {mask.dtype}, the result {found.dtype}")
        if mask.requires_grad and _device(found) == "cpu":
            raise Kept(f"torch has no kernel for CPUs with gradients of a mask, which {step.node.name} needs")
        if not mask.dim():
            raise Kept(f"the mask of {step.node.name} has no dimensions")
    if len(masks) > 1 and all(type(n) is int for mask in masks for n in mask.shape):
        size = math.prod(torch.broadcast_shapes(*(mask.shape for mask in masks)))
        if size == tensor(found.product).numel() > max(mask.numel() for mask in masks):
            raise Kept("the sum of the masks is as large as the scores")


def _check_device(found: Attention) -> None:
    device, dtypes = _device(found), [tensor(x.node).dtype for x in (found.q, found.k, found.v)]
    if found.dtype not in _DTYPES.get(device, ()):
        raise Kept(f"torch has no kernel for {found.dtype} on {device}")
    if any(dtype != found.dtype for dtype in dtypes) and tensor(found.product).dtype != found.dtype:
        raise Kept(f"queries, keys and values are {', '.join(map(str, dtypes))}")
    if device == "cpu":
        if found.dropout:
            raise Kept("torch has no kernel with dropout for CPUs")
        keys, least = found.k.shape[-2], _MIN_KEYS[tensor(found.result).requires_grad]
        if keys < least:
            raise Kept(f"{keys} keys are fewer than {least}, from which torch's kernel for CPUs is faster")
    elif found.q.shape[-1] % 8:
        raise Kept(f"torch has no kernel for {found.q.shape[-1]} features, which are no multiple of 8")


def _device(found: Attention) -> str:
    return tensor(found.result).device.type


# ---- replacing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _SpecialRows:
    """Which rows may be masked throughout: by large numbers (``uniform``), or by -inf (``nan``)."""

    uniform: bool
    nan: bool


def _special_rows(found: Attention, constants: Constants) -> _SpecialRows:
    if all(node in constants for node in found.mask_nodes):
        mask = _mask(found, {node: constants.value(node) for node in found.mask_nodes})
        fully = mask is not None and bool((mask.amax(-1) <= _LOWEST[mask.dtype]).any())
        return _SpecialRows(fully, fully)
    adds = any(step.kind != "fill" for step in found.masks)
    infinite = [step.value == -math.inf for step in found.masks if step.kind == "fill"]
    return _SpecialRows(adds or not all(infinite), adds or any(infinite))


def _mask(found: Attention, given: Mapping[fx.Node, Any]) -> Any:
    """Return the sum of all masks, for the tensors of their nodes; None without masks."""
    mask: Any = None
    for place, step in enumerate(found.before):
        if step not in found.masks:
            continue
        each = _four_mask(found, given[step.mask_node], step)
        if step.kind == "fill":
            there = each if step.where else each.logical_not()
            number = step.value if step.value == -math.inf else torch.finfo(found.mask_dtype).min
            below = torch.zeros_like(there, dtype=found.mask_dtype) if mask is None else mask
            mask = below.masked_fill(there, number)
        else:
            factor = math.prod(later.value for later in found.before[place:] if later.kind == "scale")
            factor = factor if step.kind == "add" else -factor
            each = each if factor == 1 else each * factor
            mask = each if mask is None else mask + each
    return mask


def _four_mask(found: Attention, mask: Any, step: Step) -> Any:
    """Return a mask so that it broadcasts to (batch, heads, queries, keys)."""
    kind = tensor(step.mask_node)
    if kind.dim() == 4:
        return mask
    if kind.dim() == 3 == tensor(step.node).dim() and kind.shape[0] != 1:
        return mask.unflatten(0, found.heads)
    return mask[(None,) * (4 - kind.dim())]


def _attention(found: Attention, rows: _SpecialRows, q: Any, k: Any, v: Any, masks: Sequence[Any]) -> Any:
    """Compute attention with torch's function; see the top of the file for the special rows."""
    q, k, v = (_four(found, x, of) for x, of in ((q, found.q), (k, found.k), (v, found.v)))
    mask = _mask(found, dict(zip(found.mask_nodes, masks, strict=True)))
    peak: Any = None
    if rows.uniform or rows.nan:
        peak = mask.detach().amax(-1, keepdim=True)
        fully = peak <= _LOWEST[found.mask_dtype]
        mask = mask.masked_fill(fully, 0)
        q = q.masked_fill(fully, 0) if rows.uniform else q
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=found.dropout, scale=found.scale)
    if rows.nan:
        factor = torch.ones_like(peak, dtype=found.dtype).masked_fill(peak == -math.inf, math.nan)
        out = out * factor
    out = out if _is_copied(found.result) else out.contiguous()  # as the product's result is; the kernels' may not be
    out = out.flatten(0, 1) if len(found.order) == 3 else out
    return out if [*found.order] == [*range(len(found.order))] else out.permute(*found.order)


def _four(found: Attention, x: Any, operand: Operand) -> Any:
    """Return queries, keys or values as (batch, heads, length, features)."""
    if [*operand.order] != [*range(len(operand.order))]:
        x = x.permute(*operand.order)
    if tensor(operand.node).dtype != found.dtype:  # autocast converts them for the product
        x = x.to(found.dtype)
    if len(operand.order) == 4:
        return x
    return x.unsqueeze(0) if found.heads[0] == 1 else x.unflatten(0, found.heads)


def _is_copied(result: fx.Node) -> bool:
    """Return whether nothing can see the strides of a result: it is only read into new memory."""
    reads = ("copy", "linear", "product")
    copies = [operation(user) in reads or user.target in ("reshape", "flatten") for user in result.users]
    views = [operation(user) == "transpose" and _is_copied(user) for user in result.users]
    return all(a or b for a, b in zip(copies, views, strict=True))
