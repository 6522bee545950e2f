"""This module makes graphs for CPUs call products and convolutions with constant weights that are packed (``products.py``)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from opkit.ship import products
from opkit.ship import torch_private as private
from opkit.ship.entry import add_constant
from opkit.ship.freezing import constant_of

aten, own = torch.ops.aten, torch.ops.opkit
_LINEAR, _CONVOLUTION = own.packed_linear.default, own.packed_convolution.default
_ADDEND = 3  # the place of a convolution's argument


@dataclasses.dataclass
class PackedWeights:
    """The packed weights of a file: one of each weight, also if several entries use it.

    Attributes:
        direct: whether no convolution is computed by Winograd's method, whose weights are larger.
    """

    direct: bool = False
    _known: dict[Any, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(
        default_factory=dict[Any, tuple[torch.Tensor, torch.Tensor]]
    )
    _depths: dict[int, int] = dataclasses.field(default_factory=dict[int, int])

    def get(self, weight: torch.Tensor, groups: int = 1, tile: int = 0) -> torch.Tensor:
        """Return a packed weight: ``(out, in)`` of a product or ``(out, in / groups, height, width)`` of a convolution."""
        key = (weight.data_ptr(), tuple(weight.shape), weight.stride(), groups, tile)
        if key not in self._known:
            is_product = weight.dim() == 2
            packed = products.pack_linear(weight) if is_product else products.pack_convolution(weight, groups, tile)
            self._known[key] = weight, packed  # an address names the weight until it is freed
            self._depths[packed.data_ptr()] = weight[0].numel()
        return self._known[key][1]

    def depth(self, tensor: torch.Tensor) -> int | None:
        """Return the depth of the panels of a packed weight; None for other tensors."""
        return self._depths.get(tensor.data_ptr())


def pack_weights(module: fx.GraphModule, weights: PackedWeights) -> None:
    """Pack the constant weights of products and convolutions, and fuse what can be computed with them."""
    for node in list(module.graph.nodes):
        if node.target is aten.convolution.default:
            _pack_convolution(module, node, weights)
        elif node.target in (aten.mm.default, aten.addmm.default):
            _pack_product(module, node, weights)
    _fuse(module)
    module.graph.eliminate_dead_code()
    private.propagate(module)
    module.recompile()


def _pack_product(module: fx.GraphModule, node: fx.Node, weights: PackedWeights) -> None:
    bias, x, weight = (None, *node.args) if node.target is aten.mm.default else node.args
    tensor = constant_of(weight)
    if tensor is None or tensor.dtype != torch.float32 or node.kwargs or tensor.numel() == 0:
        return
    columns = tensor.shape[1]
    inside = bias if bias is not None and _is_bias(bias, columns) else None
    with module.graph.inserting_before(node):
        held = add_constant(module, node, weights.get(tensor.t()))
        product = module.graph.call_function(_LINEAR, (x, held, columns, inside, "none"))
        product.meta = {**node.meta}
        if inside is not bias:
            product = module.graph.call_function(aten.add.Tensor, (product, bias))
            product.meta = {**node.meta}
    node.replace_all_uses_with(product)


def _is_bias(node: Any, columns: int) -> bool:
    tensor = constant_of(node)
    return (
        tensor is not None and tensor.dtype == torch.float32 and tensor.shape == (columns,) and tensor.is_contiguous()
    )


def _pack_convolution(module: fx.GraphModule, node: fx.Node, weights: PackedWeights) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    tensor, images = constant_of(weight), x.meta["val"]  # pyright: ignore
    if tensor is None or transposed or tensor.dtype != torch.float32 or images.dim() != 4 or tensor.numel() == 0:
        return
    channels, _, *kernel = tensor.shape
    if bias is not None and not _is_bias(bias, channels):
        return
    size = node.meta["val"].shape[2:]
    tile = 0
    if not weights.direct and all(isinstance(n, int) for n in size):
        tile = products.winograd_tile(tensor, stride, dilation, groups, size)  # pyright: ignore[reportArgumentType]
    with module.graph.inserting_before(node):
        held = add_constant(module, node, weights.get(tensor, groups, tile))  # pyright: ignore[reportArgumentType]
        args = (x, held, bias, None, kernel, stride, padding, dilation, groups, channels, tile, "none")
        new = module.graph.call_function(_CONVOLUTION, args)
    new.meta = {**node.meta}
    node.replace_all_uses_with(new)


# ---- what is computed with them --------------------------------------------------------------------------------------


def _fuse(module: fx.GraphModule) -> None:
    """Let convolutions add a tensor of the shape of their result, and products and convolutions apply ReLU."""
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs:
            _fuse_sum(module, node, order)
    for node in list(module.graph.nodes):
        if node.target is aten.relu.default:
            _fuse_relu(node)


def _fuse_sum(module: fx.GraphModule, node: fx.Node, order: dict[fx.Node, int]) -> None:
    operands = [each for each in node.args if isinstance(each, fx.Node)]
    candidates = [each for each in operands if _takes_addend(each)]
    if len(operands) != 2 or not candidates or operands[0] is operands[1]:
        return
    last = max(candidates, key=lambda each: order.get(each, 0))
    other = operands[0] if operands[1] is last else operands[1]
    shapes = {str(each.meta["val"].shape) for each in (last, other, node)}  # sizes that may change have no hash
    if len(shapes) != 1 or other.meta["val"].dtype != torch.float32:
        return
    with module.graph.inserting_before(node):
        new = module.graph.call_function(_CONVOLUTION, (*last.args[:_ADDEND], other, *last.args[_ADDEND + 1 :]))
    new.meta = {**node.meta}
    node.replace_all_uses_with(new)


def _takes_addend(node: fx.Node) -> bool:
    return node.target is _CONVOLUTION and node.args[_ADDEND] is None and len(node.users) == 1


def _fuse_relu(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target in (_LINEAR, _CONVOLUTION) and len(source.users) == 1:
        source.update_arg(len(source.args) - 1, "relu")
        node.replace_all_uses_with(source)
