"""Convolutions and matrix products, each with what follows it, as one call: cuDNN and cuBLASLt compute both in one kernel.

==========================================  ==================================================================================
in the graph                                becomes
==========================================  ==================================================================================
``relu([batch_norm](convolution(x)))``      ``cudnn_convolution_relu``, with the norm in its weights and bias
``relu([batch_norm](convolution(x)) + z)``  ``cudnn_convolution_add_relu``; ``z`` may be another convolution with a norm
``relu(addmm)``, ``gelu(addmm)``            ``_addmm_activation``, for the GELU with tanh, also written as a formula
==========================================  ==================================================================================

A batch norm with running statistics multiplies each channel by a scale and adds a shift. Each call of the graph computes the
weights times the scale, in float32 and rounded once, so that a change of any parameter counts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from typing import Any

from opkit.compiler.ir.graph import Graph, Node, Ref, TensorType, refs
from opkit.compiler.ir.index import index, product
from opkit.compiler.lower import scalar as f
from opkit.compiler.lower.builder import Builder, element
from opkit.compiler.lower.registry import Table
from opkit.compiler.lower.rules.extern_calls import as_image, is_padded
from opkit.compiler.lower.scalar import Scalar
from opkit.compiler.lower.target import LoweringTarget
from opkit.compiler.lower.tensors import Shape, Tensor, channels_last

TABLE = Table()

_CONVOLUTION = "aten.convolution.default"
_CONVOLUTION_RELU = "opkit.convolution_relu"
_NORM = "aten._native_batch_norm_legit_no_training.default"
_RELU = "aten.relu.default"
_ADDMM_ACTIVATION = "aten._addmm_activation.default"
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")

_ADD, _MUL, _POW, _TANH = "aten.add.Tensor", "aten.mul.Tensor", "aten.pow.Tensor_Scalar", "aten.tanh.default"
_CUBIC = (_ADD, "x", (_MUL, (_POW, "x", 3.0), 0.044715))
_ACTIVATIONS = (
    ((_RELU, "x"), {}),
    (("aten.gelu.default", "x"), {"use_gelu": True}),
    ((_MUL, (_MUL, "x", 0.5), (_ADD, (_TANH, (_MUL, _CUBIC, math.sqrt(2 / math.pi))), 1.0)), {"use_gelu": True}),
)
"""Activations as operators of operators, and the options of a product's call that computes them."""

_OPTIONS: dict[str, dict[str, Any]] = {"aten.gelu.default": {"approximate": "tanh"}}

MAX_ELEMENTS = 2**31 - 1
"""The most elements of an image or a result; ``aten.convolution`` divides larger ones for libraries that count to no more."""


def with_epilogues(graph: Graph, target: LoweringTarget) -> tuple[Graph, dict[str, str]]:
    """Return the graph with such nodes merged, and why other convolutions and products before an activation are not, by name."""
    merging = _Merging(graph, target)
    for node in graph.nodes:
        if node.target == _RELU:
            merging.convolution(node)
        for pattern, options in _ACTIVATIONS:
            merging.product(node, pattern, options)
    merged = (merging.replaced.get(node.name, node) for node in graph.nodes)
    nodes = tuple(node for node in merged if node is not None)
    return dataclasses.replace(graph, nodes=nodes), merging.reasons


# ---- which nodes -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Convolution:
    """A convolution, and the batch norm after it if there is one.

    Attributes:
        node: the convolution's.
        norm: the batch norm's.
        path: all their nodes, from the result to the convolution.
    """

    node: Node
    norm: Node | None
    path: tuple[Node, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The convolution's first six arguments, and the norm's weight, bias, mean, variance and epsilon, or None."""
        return self.node.args[:6], None if self.norm is None else (*self.norm.args[1:5], self.norm.args[6])


class _Merging:
    """The state of the pass.

    Attributes:
        replaced: the node instead of each changed one, None for a removed one, by name.
        reasons: why a call has no epilogue, by its node's name.
    """

    def __init__(self, graph: Graph, target: LoweringTarget) -> None:
        self.target, self.sizes = target, graph.sizes
        self.nodes = {node.name: node for node in graph.nodes}
        self.places = {name: place for place, name in enumerate(self.nodes)}
        arguments = [(node.args, node.kwargs) for node in graph.nodes]
        self.uses = collections.Counter(ref.name for ref in refs([*arguments, graph.outputs]))
        self.writes = [self.places[node.name] for node in graph.nodes if node.is_in_place]
        self.replaced: dict[str, Node | None] = {}
        self.reasons: dict[str, str] = {}

    def convolution(self, relu: Node) -> None:
        """Merge a convolution, its norm and an addition into the ReLU after them."""
        total = self.nodes[relu.args[0].name]
        adds = (total,) if total.target == "aten.add.Tensor" and not total.kwargs else ()
        summands = [each for each in (total.args if adds else relu.args) if isinstance(each, Ref)]
        found = {ref: each for ref in summands if (each := self._convolution(ref))}
        refusals = {ref: self._refusal(each, relu, summands, adds) for ref, each in found.items()}
        self.reasons |= {found[ref].node.name: why for ref, why in refusals.items() if why}
        merged = {ref: each for ref, each in found.items() if not refusals[ref]}
        if not merged:
            return
        main = next(iter(merged))
        others = [merged[ref].arguments if ref in merged else ref for ref in summands if ref != main]
        self.replaced |= {node.name: None for node in (*adds, *(n for each in merged.values() for n in each.path))}
        args = (merged[main].arguments, *others)
        self.replaced[relu.name] = dataclasses.replace(relu, target=_CONVOLUTION_RELU, args=args)

    def _convolution(self, ref: Ref) -> _Convolution | None:
        """Return the convolution that a value is the result of, through a batch norm or not."""
        node, norm, path = self.nodes[ref.name], None, ()
        if node.target == "getitem" and node.args[1] == 0 and self.nodes[node.args[0].name].target == _NORM:
            norm = self.nodes[node.args[0].name]
            node, path = self.nodes[norm.args[0].name], (node, norm)
        return _Convolution(node, norm, (*path, node)) if node.target == _CONVOLUTION else None

    def _refusal(self, each: _Convolution, relu: Node, summands: list[Ref], adds: tuple[Node, ...]) -> str | None:
        """Return why a convolution cannot be merged into a ReLU, or None."""
        x, weight, *_, transposed, _, groups = each.node.args
        operands = [self.nodes[ref.name].result for ref in (x, weight)]
        kind: Any = relu.result
        results = [kind, each.node.result, *(self.nodes[ref.name].result for ref in summands)]
        between = range(self.places[each.node.name], self.places[relu.name])
        reasons = {
            "its results with a ReLU may vary, and deterministic algorithms are on": self.target.deterministic,
            "with a ReLU, convolutions of float32 are slower where TF32 is not allowed": not self.target.tf32
            and kind.dtype == "f32",
            "a result before the ReLU has another use": any(self.uses[n.name] != 1 for n in (*adds, *each.path)),
            "what is added has another type": not all(_alike(kind, result) for result in results),
            "it is transposed, or has groups": transposed or groups != 1,
            "not images of known sizes, of float32, bfloat16 or float16": not all(
                map(_is_image, [*results, *operands])
            ),
            "an argument is written to before the ReLU": any(place in between for place in self.writes),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def product(self, activation: Node, pattern: Any, options: dict[str, Any]) -> None:
        """Merge an activation into the product before it; views may be between the two."""
        found = self._matched(pattern, Ref(activation.name)) or []
        operands = {name for name, part in found if part == "x"}
        path = [self.nodes[name] for name in operands]
        while len(operands) == 1 and path[-1].target in _VIEWS:
            path.append(self.nodes[path[-1].args[0].name])
        if len(operands) != 1 or path[-1].target != "aten.addmm.default":
            return
        addmm = path[-1]
        inside = collections.Counter(name for name, _ in found if name != activation.name)
        if any(self.uses[name] != count for name, count in {**{n.name: 1 for n in path}, **inside}.items()):
            self.reasons[addmm.name] = "a result before the activation has another use"
        elif not _has_row_bias(self.nodes[addmm.args[0].name].result, addmm.result):
            self.reasons[addmm.name] = "not a bias for each column, of bfloat16 or float16"
        elif self._is_padded(addmm):
            self.reasons[addmm.name] = "its operands are padded"
        else:
            called = dataclasses.replace(addmm, target=_ADDMM_ACTIVATION, kwargs={**addmm.kwargs, **options})
            same = dataclasses.replace(activation, target="aten.alias.default", args=(Ref(path[0].name),), kwargs={})
            self.replaced |= {**dict.fromkeys(inside.keys() - operands), addmm.name: called, activation.name: same}

    def _is_padded(self, addmm: Node) -> bool:
        _, x, y = (self.nodes[ref.name].result for ref in addmm.args)
        assert isinstance(x, TensorType)
        assert isinstance(y, TensorType)
        return is_padded(self.target, self.sizes, x.dtype, [*x.shape, y.shape[-1]], x.strides[-2] == 1)

    def _matched(self, pattern: Any, value: Any) -> list[tuple[str, Any]] | None:
        """Return the nodes that a pattern's parts are, each as often as it is used; None if it is another formula."""
        if isinstance(pattern, float):
            is_number = isinstance(value, int | float) and math.isclose(value, pattern, rel_tol=1e-6)
            return [] if is_number else None
        if pattern == "x" or not isinstance(value, Ref):
            return [(value.name, "x")] if isinstance(value, Ref) else None
        (target, *parts), node = pattern, self.nodes[value.name]
        if node.target != target or node.kwargs != _OPTIONS.get(target, {}):
            return None
        for args in (node.args, node.args[::-1]):
            found = [self._matched(*pair) for pair in zip(parts, args, strict=True)]
            if None not in found:
                return [(value.name, target), *(each for part in found for each in part or ())]
        return None


def _alike(a: Any, b: Any) -> bool:
    """Return whether two results are tensors of one dtype and shape."""
    tensors = isinstance(a, TensorType) and isinstance(b, TensorType)
    return tensors and (a.dtype, a.shape) == (b.dtype, b.shape)


def _is_image(kind: Any) -> bool:
    """Return whether a result is a batch of images, or filters, that cuDNN's fused convolutions take."""
    if not isinstance(kind, TensorType) or kind.dtype not in ("f32", "bf16", "f16") or len(kind.shape) != 4:
        return False
    elements = product(kind.shape).constant
    has_layout = kind.shape[1] != 1  # with a single channel, torch sees both layouts in any tensor
    return kind.device == "cuda" and has_layout and elements is not None and 0 < elements <= MAX_ELEMENTS


def _has_row_bias(bias: Any, result: Any) -> bool:
    is_vector = isinstance(bias, TensorType) and bias.shape == result.shape[1:] and bias.device == "cuda"
    return is_vector and bias.dtype == result.dtype and result.dtype in ("bf16", "f16")


# ---- their rule ------------------------------------------------------------------------------------------------------


@TABLE.rule(_CONVOLUTION_RELU)
def _convolution_relu(b: Builder, convolution: Any, added: Any = None) -> Tensor:
    """Call a convolution with its ReLU, and with what is added between: a tensor, or another convolution with its norm."""
    (x, weight, *settings), shifts = _scaled(b, *convolution)
    if isinstance(added, tuple):
        (other, filters, *others), more = _scaled(b, *added)
        shifts += more
        added = _image(b, _CONVOLUTION, (other, filters, None, *others, False, [0, 0], 1))
    bias = _sum(b, shifts, weight.dtype)
    if added is None:
        return _image(b, "aten.cudnn_convolution_relu.default", (x, weight, bias, *settings, 1))
    args = (x, weight, as_image(b, added), 1.0, bias, *settings, 1)
    return _image(b, "aten.cudnn_convolution_add_relu.default", args)


def _image(b: Builder, target: str, args: tuple[Any, ...]) -> Tensor:
    """Return an image of the result's type, which a call computes."""
    kind = b.result()
    out = b.extern_buffer(dataclasses.replace(kind, strides=channels_last(kind.shape)))
    return b.call(target, args, [out])[0]


def _scaled(b: Builder, convolution: Any, norm: Any) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return a convolution's arguments but the bias, with a norm's scale in the weights, and what is added to each channel."""
    x, weight, bias, *settings = convolution
    shifts = [bias] if bias else []
    if norm is not None:
        shifts = [_shift(b, bias, norm)]
        body = element(weight, weight.shape, "f32") * _scale(norm, weight.shape)
        buffer = b.new_buffer(weight.dtype, weight.shape, channels_last(weight.shape))
        weight = b.compute(buffer, weight.shape, f.cast(body, weight.dtype).expr)
    return (as_image(b, x), weight, *settings), shifts


def _scale(norm: Any, shape: Shape) -> Scalar:
    """Return what a norm multiplies a channel by; channels are the first dimension of ``shape``."""
    weight, _, _, variance, epsilon = norm
    column = [shape[0], *[index(1)] * (len(shape) - 1)]
    rstd = 1 / f.sqrt(element(variance.reshaped(column), shape, "f32") + epsilon)
    return rstd if weight is None else rstd * element(weight.reshaped(column), shape, "f32")


def _shift(b: Builder, bias: Tensor | None, norm: Any) -> Tensor:
    """Return what a norm after a convolution with this bias adds to each channel."""
    _, beta, mean, *_ = norm
    offset = -element(mean, mean.shape, "f32")
    offset = offset if bias is None else offset + element(bias, mean.shape, "f32")
    scaled = offset * _scale(norm, mean.shape)
    return b.temporary((scaled if beta is None else scaled + element(beta, mean.shape, "f32")).expr, mean.shape)


def _sum(b: Builder, shifts: list[Tensor], dtype: str) -> Tensor | None:
    """Return the sum of tensors of one number for each channel, rounded once."""
    if not shifts or (len(shifts) == 1 and shifts[0].dtype == dtype):
        return shifts[0] if shifts else None
    total = functools.reduce(operator.add, [element(each, each.shape, "f32") for each in shifts])
    return b.temporary(f.cast(total, dtype).expr, shifts[0].shape)
