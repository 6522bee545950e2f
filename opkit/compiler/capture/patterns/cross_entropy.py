"""The cross-entropy of a linear layer's results, without all logits in memory.

The rows are computed in chunks. Where gradients are needed, those of a chunk follow its logits at once, for a gradient of 1 of
the loss, and the backward multiplies them by the true one: nothing is computed twice. Source: Hsu et al., "Liger Kernel:
Efficient Triton Kernels for LLM Training", 2024, https://arxiv.org/abs/2410.10989.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from opkit.compiler.capture.attention_masks import Constants
from opkit.compiler.capture.patterns.nodes import Kept, arguments, check_uses, operation, replace_nodes, tensor

MIN_LOGITS = 64 << 20
"""The bytes of a chunk's logits in float32, and the least of all logits."""

MIN_ROWS = 1024
"""The rows of a chunk, at least; with fewer, adding the gradients of the weight takes long compared with the products."""

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_DEFAULTS = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}


def replace(loss: fx.Node, constants: Constants) -> bool:
    """Replace a cross-entropy and its linear layer.

    Raises:
        Kept: there is a linear layer, but chunks would not compute the same, or save little memory.
    """
    given = {"ignore_index": -100, "reduction": "mean", **_DEFAULTS, **arguments(loss, *_NAMES)}
    nodes = _nodes(loss, given["input"])
    if operation(nodes[0]) != "linear":
        return False
    layer = {"bias": None, **arguments(nodes[0], "input", "weight", "bias")}
    check_uses(nodes)
    rows = _checked_rows(given, layer, nodes)
    options = (given["ignore_index"], given["reduction"] == "mean", tensor(nodes[0]).dtype, tensor(loss).dtype, rows)
    with loss.graph.inserting_before(loss):
        args = (layer["input"], layer["weight"], layer["bias"], given["target"], *options)
        new = loss.graph.call_function(linear_cross_entropy, args)
    new.meta = dict(loss.meta)
    replace_nodes(nodes, new)
    return True


def _nodes(loss: fx.Node, node: Any) -> list[fx.Node]:
    """Return the nodes from a linear layer to the loss, or from another node that is no conversion or view."""
    nodes = [loss]
    while operation(node) in ("cast", "copy", "view"):
        nodes.append(node)
        node = arguments(node, "input").get("input")
    return [node, *reversed(nodes)]


def _checked_rows(given: dict[str, Any], layer: dict[str, Any], nodes: list[fx.Node]) -> int:
    """Return the rows of a chunk.

    Raises:
        Kept: see ``replace``.
    """
    logits, target, x, weight = (
        tensor(each) for each in (given["input"], given["target"], layer["input"], layer["weight"])
    )
    for name, value in _DEFAULTS.items():
        if given[name] != value:
            raise Kept(f"{name} is {given[name]}")
    if given["reduction"] not in ("mean", "sum"):
        raise Kept(f"reduction is {given['reduction']!r}")
    if logits.dim() != 2 or target.dim() != 1 or target.dtype.is_floating_point or logits.shape[-1] != weight.shape[0]:
        raise Kept(f"logits have the shape {tuple(logits.shape)}, targets {tuple(target.shape)}")
    if any(type(n) is not int for n in (*logits.shape, *x.shape)) or type(given["ignore_index"]) is not int:
        raise Kept("sizes change")
    computed = tensor(nodes[0]).dtype
    if not all(each.is_floating_point for each in (x.dtype, weight.dtype, computed)):
        raise Kept(f"the layer computes {computed} of {x.dtype} and {weight.dtype}")
    if computed is torch.float16 and not x.dtype == weight.dtype == computed:
        raise Kept("under autocast the gradients of logits in float16 need the scale of the loss")
    size, classes = logits.shape
    rows = max(MIN_ROWS, weight.shape[1], -(-MIN_LOGITS // (4 * classes)))
    if size < 2 * rows:
        raise Kept(f"{size} rows are fewer than two chunks of {rows}")
    return -(-size // -(-size // rows))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignored: int,
    mean: bool,
    computed: torch.dtype,
    dtype: torch.dtype,
    rows: int,
) -> Tensor:
    """Return ``cross_entropy(linear(x, weight, bias), target)`` of all rows, computed in chunks of ``rows``.

    The layer's dtype is ``computed``, to which autocast casts its operands.
    """
    x, weight, bias = x.to(computed), weight.to(computed), None if bias is None else bias.to(computed)
    counted = target != ignored
    one = torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    share = one / counted.sum() if mean else one
    loss: Any = _Chunks.apply(x.flatten(0, -2), weight, bias, target[:, None], counted[:, None], share, rows)
    return loss.to(dtype)


class _Chunks(torch.autograd.Function):
    """The sum of the losses of the rows that are counted, times ``share``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        target, counted, share, rows = rest
        loss, in_x, in_weight, in_bias = torch.zeros_like(share), [], None, None
        for part, label, seen in zip(x.split(rows), target.split(rows), counted.split(rows), strict=True):
            logits = F.linear(part, weight, bias)
            log_p = logits.to(share.dtype).log_softmax(-1)
            losses = log_p.gather(-1, torch.where(seen, label, 0))
            loss = loss - torch.where(seen, losses, 0).sum() * share
            if any(ctx.needs_input_grad):
                hot = torch.arange(logits.shape[-1], device=label.device) == label
                in_logits = torch.where(seen, (log_p.exp() - hot.to(share.dtype)) * share, 0).to(logits.dtype)
                in_x.append(in_logits @ weight)
                in_weight = _sum(in_weight, (in_logits.T @ part).to(share.dtype))
                in_bias = None if bias is None else _sum(in_bias, in_logits.sum(0, dtype=share.dtype))
        if in_weight is not None:
            ctx.save_for_backward(
                torch.cat(in_x), in_weight.to(weight.dtype), None if in_bias is None else in_bias.to(weight.dtype)
            )
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = [None if each is None else (each * gradient).to(each.dtype) for each in ctx.saved_tensors]
        return (*gradients, None, None, None, None)


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more
