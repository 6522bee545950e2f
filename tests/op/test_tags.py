"""Counters of operations, tags and effects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import opkit


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", [False, True])
def test_flops(kernel, spelled):
    op = opkit.custom_op("ttags::product", lambda a, b: a @ b, schema="(Tensor a, Tensor b) -> Tensor")
    if kernel:
        op.register_kernel("cpu", lambda a, b: torch.from_numpy(a.detach().numpy() @ b.detach().numpy()))
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    with FlopCounterMode(display=False) as counter:
        output = spelled(op)(a, b)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    # under a mode the backward runs the reference again, and the counter counts what runs
    assert 2 * 3 * 4 * 5 <= counter.get_total_flops() <= 2 * 2 * 3 * 4 * 5
    opkit.remove("ttags::product")


TAGS = [
    "needs_fixed_stride_order",
    "needs_exact_strides",
    "flexible_layout",
    "cudagraph_unsafe",
    "nondeterministic_seeded",
]


@pytest.mark.parametrize("tag", TAGS)
def test_tags_reach_the_overload(tag):
    value = getattr(torch.Tag, tag, None)
    if value is None:
        pytest.skip(f"this torch has no torch.Tag.{tag}")
    op = opkit.custom_op("ttags::tagged", lambda x: x * 2, schema="(Tensor x) -> Tensor", tags=value)
    assert value in op._opoverload.tags
    assert torch.Tag.pt2_compliant_tag in op._opoverload.tags
    opkit.remove("ttags::tagged")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tag", ["needs_fixed_stride_order", "needs_exact_strides"])
def test_stride_tags_bind_inductor(tag):
    torch._dynamo.reset()
    strides = []
    op = opkit.custom_op("ttags::strided", lambda x: x * 2, schema="(Tensor x) -> Tensor", tags=getattr(torch.Tag, tag))
    op.register_kernel("cpu", lambda x: strides.append(x.stride()) or x * 2)
    x = torch.randn(4, 6)
    eager = op((x + 1).t())
    torch.testing.assert_close(torch.compile(lambda x: op((x + 1).t()), fullgraph=True)(x), eager)
    assert strides[0] == strides[-1] == (1, 6)
    opkit.remove("ttags::strided")


@pytest.mark.skipif(not hasattr(torch._library, "effects"), reason="register_effect came with torch 2.13")
def test_register_effect():
    torch._dynamo.reset()
    log = []

    @opkit.custom_op("ttags::effect", mutates_args=(), opaque=True)
    def effect(x: Tensor, label: int) -> Tensor:
        log.append(label)
        return x.clone()

    effect.register_fake(lambda x, label: torch.empty_like(x))
    effect.register_effect(torch._library.effects.EffectType.ORDERED)

    def model(x):
        effect(x, 1)
        return effect(x, 2)

    torch.compile(model, fullgraph=True)(torch.ones(2))
    assert log == [1, 2]
    opkit.remove("ttags::effect")
