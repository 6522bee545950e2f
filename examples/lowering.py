"""Lowering rules: how an author tells torch.compile(backend="opkit") what an operator computes.

Without a rule the compiler traces an operator's reference. A rule is for what the reference does not express well:
a body that leaves torch, a formula with fewer passes over memory, an index map where the reference copies. Three of them,
from a formula to a reduction to an index map::

    python examples/lowering.py
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit import lowering as low
from opkit.lowering import Builder, Scalar

# ---- a formula: the body leaves torch, and the rule says what it computes -------------------------------------------------


@opkit.custom_op("example::softcap", mutates_args=())
def softcap(x: Float[Tensor, "*shape"], cap: float = 30.0) -> Float[Tensor, "*shape"]:
    """Squash to (-cap, cap), as Gemma 2 does with its logits."""
    return torch.from_numpy(np.asarray(cap * np.tanh(x.numpy() / cap), x.numpy().dtype))


@softcap.register_fake
def _(x: Tensor, cap: float = 30.0) -> Tensor:
    return torch.empty_like(x)


@softcap.register_lowering
def softcap_loop(b: Builder, x: low.Tensor, cap: float) -> low.Tensor:
    """``pointwise`` gives the formula elements in the type in which the result's arithmetic is done."""

    def formula(x: Scalar) -> Scalar:
        return low.tanh(x / cap) * cap

    return low.pointwise(b, formula, [x])


# ---- a reduction: the steps of one rule become one kernel ---------------------------------------------------------------------


@opkit.custom_op("example::log_sum_exp")
def log_sum_exp(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """log(sum(exp(x))) along the last dimension."""
    return torch.logsumexp(x, -1)


@log_sum_exp.register_lowering
def log_sum_exp_loop(b: Builder, x: low.Tensor) -> low.Tensor:
    """The largest element, then the sum of what is left: no exponential overflows, and none is infinity less infinity."""
    last, kind = len(x.shape) - 1, b.result()
    inner = low.DTYPES[x.dtype].compute
    value = low.element(x, x.shape, inner)
    largest = b.reduce("max", value, x.shape, [last], inner, keep=True)
    shift = _finite(low.element(largest, x.shape))
    total = b.reduce("sum", low.exp(value - shift), x.shape, [last], inner)
    moved = _finite(low.element(largest.reshaped(kind.shape), kind.shape))
    result = low.log(low.element(total, kind.shape)) + moved
    return b.elementwise(low.cast(result, kind.dtype).expr)


def _finite(x: Scalar) -> Scalar:
    return low.where(low.equal(low.absolute(x), float("inf")), 0.0, x)


# ---- an index map: what the reference copies is read where it lies ------------------------------------------------------------


@opkit.custom_op("example::rotary")
def rotary(
    x: Float[Tensor, "*batch length d"], cosine: Float[Tensor, "length d"], sine: Float[Tensor, "length d"]
) -> Float[Tensor, "*batch length d"]:
    """Rotary position embedding (Su et al., 2021), with the halves of a head turned against each other."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


@rotary.register_lowering
def rotary_loop(b: Builder, x: low.Tensor, cosine: low.Tensor, sine: low.Tensor) -> low.Tensor:
    """The partner of element j is j + d/2, modulo d; in the first half it counts negative."""
    *outer, j = low.axes(x.shape)
    d = x.shape[-1]
    half = d // 2
    partner = x.mapped(x.shape, [*outer, (j + half) % d])
    kind = b.result()
    inner = low.DTYPES[kind.dtype].compute
    own, other, c, s = (low.element(t, kind.shape, inner) for t in (x, partner, cosine, sine))
    turned = low.where(low.number(j, "i64") < half, -other, other)
    return b.elementwise(low.cast(own * c + turned * s, kind.dtype).expr)


# ---- what becomes of them -------------------------------------------------------------------------------------------------


def kernels(function, *inputs: Tensor) -> int:
    """How many kernels run for ``function``, whose result must be what eager mode gives."""
    explanation = opkit.explain(function, *inputs)
    torch.testing.assert_close(explanation.result, function(*inputs))
    assert not any(graph.calls for graph in explanation.graphs), "an operator was called"
    return explanation.kernels


def main() -> None:
    """Each operator and its neighbours are one kernel."""
    x = torch.randn(4, 16, 64)
    assert kernels(lambda x: torch.relu(softcap(x * 3)) + 1, x) == 1

    assert kernels(lambda x: log_sum_exp(x * 2) - 1, x) == 1
    assert kernels(log_sum_exp, torch.tensor([[1e4, 1e4], [-torch.inf, -torch.inf], [0.0, torch.inf]])) == 1

    angle = torch.outer(torch.arange(16.0), 1e4 ** -(torch.arange(64) % 32 / 32))
    cosine, sine = angle.cos(), angle.sin()
    assert kernels(lambda x: rotary(x + 1, cosine, sine) * 2, x) == 1

    trained = x.clone().requires_grad_()
    backward = opkit.explain(lambda x: rotary(x, cosine, sine), trained).graphs[-1]  # it is derived, as ever
    assert backward.name.startswith("backward")
    print(opkit.explain(lambda x: torch.relu(softcap(x * 3)) + 1, x))


if __name__ == "__main__":
    main()
