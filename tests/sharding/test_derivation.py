"""Rules derived from references, without DTensor: what is offered for each size, and why others are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from opkit.sharding.derivation import derive
from opkit.sharding.propagation import RandomNumbers

INDICES = torch.int64


def rule(reference, *shapes, dtypes=None):
    with FakeTensorMode():
        args = pytree.tree_map_only(Shape, lambda s: torch.empty(s.sizes, dtype=s.dtype), shapes)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    names = [[f"{'abc'[i]}{dim}" for dim in range(t.ndim)] for i, t in enumerate(tensors)]
    return derive(reference, args, {}, names)


class Shape:
    def __init__(self, *sizes, dtype=torch.float32):
        self.sizes, self.dtype = sizes, dtype


def offered(reference, *shapes):
    found, _ = rule(reference, *shapes)
    sized = {s.size: str(s) for s in found.strategies if s.size}
    summands = [str(s) for s in found.strategies if not s.size][1:]
    assert set(sized).isdisjoint(size for size, _ in found.refused)
    return sized, summands


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def attention(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), -1), v)


def write(x, weight):
    x.mul_(weight)


def write_sum(x):
    x.copy_(x.sum(0, keepdim=True).expand_as(x))


SIZES = [
    (rms_norm, (Shape(4, 6, 8), Shape(8)), {
        "a0": "Shard(0), Replicate -> Shard(0)", "a1": "Shard(1), Replicate -> Shard(1)"}),
    (lambda x, y: torch.sigmoid(x) * y + 1, (Shape(4, 8), Shape(8)), {
        "a0": "Shard(0), Replicate -> Shard(0)", "a1": "Shard(1), Shard(0) -> Shard(1)"}),
    (F.linear, (Shape(4, 5, 6), Shape(7, 6)), {
        "a0": "Shard(0), Replicate -> Shard(0)", "a1": "Shard(1), Replicate -> Shard(1)",
        "a2": "Shard(2), Shard(1) -> Partial(sum)", "b0": "Replicate, Shard(0) -> Shard(2)"}),
    (F.linear, (Shape(4, 6), Shape(7, 6), Shape(7)), {
        "a0": "Shard(0), Replicate, Replicate -> Shard(0)", "b0": "Replicate, Shard(0), Shard(0) -> Shard(1)"}),
    (lambda x: torch.softmax(x, -1), (Shape(4, 8),), {"a0": "Shard(0) -> Shard(0)"}),
    (lambda x: x.sum(0), (Shape(4, 8),), {"a0": "Shard(0) -> Partial(sum)", "a1": "Shard(1) -> Shard(0)"}),
    (lambda x: x.sum(0) ** 2, (Shape(4, 8),), {"a1": "Shard(1) -> Shard(0)"}),
    (lambda x: 2 * x.sum(0) / 3, (Shape(4, 8),), {"a0": "Shard(0) -> Partial(sum)", "a1": "Shard(1) -> Shard(0)"}),
    (lambda x: x.sum(0) + 1, (Shape(4, 8),), {"a1": "Shard(1) -> Shard(0)"}),
    (lambda x: x.mean(0), (Shape(4, 8),), {
        "a0": "Shard(0) -> Partial(avg) (even pieces)", "a1": "Shard(1) -> Shard(0)"}),
    (lambda x: x.sum(0) / x.shape[0], (Shape(4, 8),), {"a1": "Shard(1) -> Shard(0)"}),
    (lambda x: x.amax(0), (Shape(4, 8),), {"a0": "Shard(0) -> Partial(max)", "a1": "Shard(1) -> Shard(0)"}),
    (lambda x: 2 * x.amin(0), (Shape(4, 8),), {"a1": "Shard(1) -> Shard(0)"}),
    (lambda x: x.max(0).values, (Shape(4, 8),), {"a1": "Shard(1) -> Shard(0)"}),
    (write, (Shape(4, 8), Shape(8)), {"a0": "Shard(0), Replicate -> nothing", "a1": "Shard(1), Shard(0) -> nothing"}),
    (write_sum, (Shape(4, 8),), {"a1": "Shard(1) -> nothing"}),
    (lambda x: (x * 2, x.sum(-1)), (Shape(4, 8),), {
        "a0": "Shard(0) -> Shard(0), Shard(0)", "a1": "Shard(1) -> Shard(1), Partial(sum)"}),
    (lambda xs, w: [x * w for x in xs], ([Shape(4, 8), Shape(3, 8)], Shape(8)), {
        "a0": "Shard(0), Replicate, Replicate -> Shard(0), Replicate",
        "a1": "Shard(1), Shard(1), Shard(0) -> Shard(1), Shard(1)",
        "b0": "Replicate, Shard(0), Replicate -> Replicate, Shard(0)",
        "a0 and b0": "Shard(0), Shard(0), Replicate -> Shard(0), Shard(0)"}),
    (lambda x, y: x.sum() + y.sum(), (Shape(4), Shape(6)), {"a0 and b0": "Shard(0), Shard(0) -> Partial(sum)"}),
    (lambda x, w: x if w is None else x * w, (Shape(4), None), {"a0": "Shard(0) -> Shard(0)"}),
    (lambda x: x.cumsum(1), (Shape(4, 8),), {"a0": "Shard(0) -> Shard(0)"}),
    (lambda x: x.flip(0), (Shape(4, 8),), {"a1": "Shard(1) -> Shard(1)"}),
    (lambda x: x[1:], (Shape(4, 8),), {"a1": "Shard(1) -> Shard(1)"}),
    (lambda x: torch.cat([x, x]), (Shape(4, 8),), {"a1": "Shard(1) -> Shard(1)"}),
    (lambda x: x.flatten(), (Shape(4, 8),), {"a0": "Shard(0) -> Shard(0) (even pieces)"}),
    (lambda x: x.t().reshape(-1), (Shape(4, 8),), {"a1": "Shard(1) -> Shard(0) (even pieces)"}),
    (lambda x: x.unflatten(1, (2, 4)).flatten(1) * 2, (Shape(4, 8),), {"a0": "Shard(0) -> Shard(0)"}),
    (attention, (Shape(2, 3, 4, 5), Shape(2, 3, 6, 5), Shape(2, 3, 6, 7)), {
        "a0": "Shard(0), Shard(0), Shard(0) -> Shard(0)", "a1": "Shard(1), Shard(1), Shard(1) -> Shard(1)",
        "a2": "Shard(2), Replicate, Replicate -> Shard(2)", "c3": "Replicate, Replicate, Shard(3) -> Shard(3)"}),
    (lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), (Shape(4, 6), Shape(6), Shape(6)), {
        "a0": "Shard(0), Replicate, Replicate -> Shard(0)"}),
    (lambda w, i: F.embedding(i, w), (Shape(40, 5), Shape(4, 6, dtype=INDICES)), {
        "a1": "Shard(1), Replicate -> Shard(2)", "b0": "Replicate, Shard(0) -> Shard(0)",
        "b1": "Replicate, Shard(1) -> Shard(1)"}),
    (lambda x, i: x.gather(1, i), (Shape(4, 8), Shape(3, 5, dtype=INDICES)), {"b1": "Replicate, Shard(1) -> Shard(1)"}),
    (lambda x, y: x[:, None] * y, (Shape(4), Shape(6)), {
        "a0": "Shard(0), Replicate -> Shard(0)", "b0": "Replicate, Shard(0) -> Shard(1)"}),
    (lambda x: x + x.T, (Shape(4, 4),), {}),
    (lambda x: x + torch.arange(x.shape[0])[:, None], (Shape(4, 8),), {"a1": "Shard(1) -> Shard(1)"}),
    (lambda x: x + torch.ones(x.shape[0], 1), (Shape(4, 8),), {
        "a0": "Shard(0) -> Shard(0)", "a1": "Shard(1) -> Shard(1)"}),
    (lambda x: x * 2 if x.shape[0] > 3 else x + 1, (Shape(4, 8),), {"a1": "Shard(1) -> Shard(1)"}),
    (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (Shape(4, 8),), {"a0": "Shard(0) -> Shard(0)"}),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "shapes", "sizes"), SIZES)
def test_sizes_that_may_be_sharded(reference, shapes, sizes):
    assert offered(reference, *shapes)[0] == sizes


@pytest.mark.parametrize(
    ("reference", "shapes", "summands"),
    [
        (F.linear, (Shape(4, 6), Shape(7, 6)), [
            "Partial(sum), Replicate -> Partial(sum)", "Replicate, Partial(sum) -> Partial(sum)"]),
        (lambda x, y: x + y, (Shape(4), Shape(4)), ["Partial(sum), Partial(sum) -> Partial(sum)"]),
        (lambda x, y: 2 * x - y.sum(0), (Shape(4), Shape(3, 4)), ["Partial(sum), Partial(sum) -> Partial(sum)"]),
        (rms_norm, (Shape(4, 8), Shape(8)), ["Replicate, Partial(sum) -> Partial(sum)"]),
        (lambda x: x + 1, (Shape(4),), []),
        (lambda x: x.abs(), (Shape(4),), []),
        (lambda x: x * x, (Shape(4),), []),
        (lambda x: (x, x * x), (Shape(4),), []),
        (lambda x: x.to(torch.int32), (Shape(4),), []),
        (lambda x: (x * 2, torch.zeros_like(x)), (Shape(4),), ["Partial(sum) -> Partial(sum), Replicate"]),
        (write, (Shape(4, 8), Shape(8)), ["Partial(sum), Replicate -> nothing"]),
    ],
)  # fmt: skip
def test_arguments_that_may_be_summands(reference, shapes, summands):
    assert offered(reference, *shapes)[1] == summands


@pytest.mark.parametrize(
    ("reference", "shapes", "sizes"),
    [
        (F.conv1d, (Shape(4, 5, 16), Shape(7, 5, 3)), {
            "a0": "Shard(0), Replicate -> Shard(0)", "a1": "Shard(1), Shard(1) -> Partial(sum)",
            "b0": "Replicate, Shard(0) -> Shard(1)"}),
        (lambda x, i: x[i], (Shape(4, 8), Shape(3, dtype=INDICES)), {
            "a1": "Shard(1), Replicate -> Shard(1)", "b0": "Replicate, Shard(0) -> Shard(0)"}),
        (lambda x, t: F.cross_entropy(x, t, reduction="none"), (Shape(4, 8), Shape(4, dtype=INDICES)), {
            "a0": "Shard(0), Shard(0) -> Shard(0)"}),
    ],
)  # fmt: skip
def test_steps_without_a_table_are_tried_on_pieces(reference, shapes, sizes):
    assert offered(reference, *shapes)[0] == sizes
    assert {s.origin for s in rule(reference, *shapes)[0].strategies if s.size} == {"by pieces"}


@pytest.mark.parametrize(
    ("reference", "shapes", "size", "reason"),
    [
        (lambda x: x.cumsum(1), (Shape(4, 8),), "a1", "cumsum runs along it"),
        (lambda x: x.sum(0) + 1, (Shape(4, 8),), "a0", "add follows its sum"),
        (lambda x: x.sum(0) / x.shape[0], (Shape(4, 8),), "a0", "div uses its number"),
        (lambda x: x * 2 if x.shape[0] > 3 else x + 1, (Shape(4, 8),), "a0", "decides by its number"),
        (lambda x: torch.stack([x[i] for i in range(x.shape[0])]), (Shape(4, 8),), "a0", "the reference uses its number"),
        (lambda x: x.t().reshape(-1), (Shape(4, 8),), "a0", "not contiguous in a result"),
        (lambda x: x + x.T, (Shape(4, 4),), "a0", "has it twice"),
        (write_sum, (Shape(4, 8),), "a0", "expand combines a reduction"),
        (lambda x, i: x[i], (Shape(4, 8), Shape(3, dtype=INDICES)), "a0", "no rule is known for aten.index"),
    ],
)  # fmt: skip
def test_refusals_have_reasons(reference, shapes, size, reason):
    assert reason in dict(rule(reference, *shapes)[0].refused)[size]


def test_a_reference_that_draws_random_numbers_has_no_rule():
    with pytest.raises(RandomNumbers, match="rand_like"):
        rule(F.dropout, Shape(4, 8))


def test_a_rule_holds_for_the_numbers_of_dimensions_unless_the_reference_branches():
    assert rule(rms_norm, Shape(4, 8), Shape(8))[1]
    assert not rule(lambda x: x * 2 if x.shape[0] > 3 else x, Shape(4, 8))[1]
