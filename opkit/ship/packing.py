"""This module makes graphs for CPUs call oneDNN with constant weights in its own layouts, so that no call converts them.

The functions are those that torch's Inductor uses for frozen weights (``torch/_inductor/fx_passes/mkldnn_fusion.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from opkit.ship import torch_private as private
from opkit.ship.entry import add_constant
from opkit.ship.freezing import constant_of
from opkit.ship.weights import PackedWeight

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn

MAX_ROWS = 256
"""Of a product with a packed weight: with more rows, torch's product of plain matrices is as fast, or faster (x86-64)."""


def pack_weights(module: fx.GraphModule) -> dict[str, PackedWeight]:
    """Lay out the constant weights of products and convolutions for oneDNN, and fuse what it can compute with them.

    Return the weights by the names of their attributes.
    """
    found: dict[str, PackedWeight] = {}
    if not torch.backends.mkldnn.is_available():  # pyright: ignore[reportPrivateImportUsage]
        return found
    for node in list(module.graph.nodes):
        if node.target is aten.convolution.default:
            _pack_convolution(module, node, found)
        elif node.target in (aten.mm.default, aten.addmm.default):
            _pack_product(module, node, found)
    _fuse(module)
    module.graph.eliminate_dead_code()
    private.propagate(module)
    module.recompile()
    return found


def _pack_product(module: fx.GraphModule, node: fx.Node, found: dict[str, PackedWeight]) -> None:
    bias, x, weight = (None, *node.args) if node.target is aten.mm.default else node.args
    tensor, rows = constant_of(weight), x.meta["val"].shape[0]  # pyright: ignore
    if tensor is None or tensor.dtype != torch.float32 or node.kwargs or tensor.numel() == 0:
        return
    if isinstance(rows, int) and not 0 < rows <= MAX_ROWS:
        return
    hint = rows if isinstance(rows, int) else None
    with module.graph.inserting_before(node):
        held = _add_packed(module, node, tensor.t(), ("product", hint), found)
        args = (x, held, None, "none", [], "")
        product = module.graph.call_function(mkldnn._linear_pointwise.default, args)
        product.meta = {**node.meta}
        if bias is not None:
            product = module.graph.call_function(aten.add.Tensor, (product, bias))
            product.meta = {**node.meta}
    node.replace_all_uses_with(product)


def _pack_convolution(module: fx.GraphModule, node: fx.Node, found: dict[str, PackedWeight]) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    tensor, images = constant_of(weight), x.meta["val"]  # pyright: ignore
    if tensor is None or transposed or tensor.dtype != torch.float32 or images.dim() != 4 or tensor.dim() != 4:
        return
    if bias is not None and constant_of(bias) is None:
        return
    sizes = [int(n) if isinstance(n, int) else private.hint(n) for n in images.shape]
    if 0 in sizes:
        return
    packing = ("convolution", padding, stride, dilation, groups, sizes)
    with module.graph.inserting_before(node):
        held = _add_packed(module, node, tensor, packing, found)
        args = (x, held, bias, padding, stride, dilation, groups, "none", [], "")
        new = module.graph.call_function(mkldnn._convolution_pointwise.default, args)
    new.meta = {**node.meta}
    node.replace_all_uses_with(new)


def _add_packed(
    module: fx.GraphModule,
    before: fx.Node,
    plain: torch.Tensor,
    packing: tuple[Any, ...],
    found: dict[str, PackedWeight],
) -> fx.Node:
    packed = private.packed(plain, *packing)
    node = add_constant(module, before, packed)
    node.meta = {"plain": plain}
    found[str(node.target)] = PackedWeight(packed, plain, packing)
    return node


# ---- what convolutions compute besides -------------------------------------------------------------------------------


def _fuse(module: fx.GraphModule) -> None:
    """Let convolutions add a tensor of the shape of their result, and apply ReLU."""
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs:
            _fuse_sum(module, node, order)
    for node in list(module.graph.nodes):
        if node.target is aten.relu.default:
            _fuse_relu(node)


def _is_plain_convolution(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not mkldnn._convolution_pointwise.default:
        return False
    return node.args[7] == "none" and len(node.users) == 1  # pyright: ignore[reportReturnType]


def _fuse_sum(module: fx.GraphModule, node: fx.Node, order: dict[fx.Node, int]) -> None:
    operands = [each for each in node.args if isinstance(each, fx.Node)]
    candidates = [each for each in operands if _is_plain_convolution(each)]
    if len(operands) != 2 or not candidates or operands[0] is operands[1]:
        return
    last = max(candidates, key=lambda each: order.get(each, 0))
    other = operands[0] if operands[1] is last else operands[1]
    shapes = [tuple(each.meta["val"].shape) for each in (last, other, node)]
    if len({*shapes}) != 1 or other.meta["val"].dtype != torch.float32:
        return
    x, weight, bias, padding, stride, dilation, groups, *_ = last.args
    with module.graph.inserting_before(node):
        args = (x, other, weight, bias, padding, stride, dilation, groups, "add", 1.0, None, [], None)
        new = module.graph.call_function(mkldnn._convolution_pointwise.binary, args)
    new.meta = {**node.meta}
    node.replace_all_uses_with(new)


def _fuse_relu(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if len(source.users) != 1:
        return
    if _is_plain_convolution(source):
        source.update_arg(7, "relu")
    elif source.target is mkldnn._convolution_pointwise.binary:
        source.update_arg(10, "relu")
    else:
        return
    node.replace_all_uses_with(source)
