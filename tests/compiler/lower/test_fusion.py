"""What fusion makes one kernel of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import opkit
from tests.compiler.capture.pattern_calls import r


def rms_norm(x, gain):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * wide.to(x.dtype)


def layer_norm(x, gain):
    centred = x - x.mean(-1, keepdim=True)
    return gain * (centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)) + gain


def rope(x, gain):
    left, right = x.chunk(2, -1)
    return x * gain + torch.cat((-right, left), -1) * gain


@pytest.mark.parametrize("function", [rms_norm, layer_norm, rope])
def test_norms_and_rotary_embeddings_are_one_kernel(function):
    x, gain = r(64, 256, dtype=torch.float32), r(256, dtype=torch.float32)
    explanation = opkit.explain(function, x, gain)
    torch.testing.assert_close(explanation.result, function(x, gain))
    assert explanation.kernels == 1


def test_a_gate_of_two_products_is_one_kernel():
    """The gate waits for the second product."""

    def gated(x, a, b):
        return F.silu(x @ a) * (x @ b)

    args = [r(64, 32), r(32, 48), r(32, 48)]
    explanation = opkit.explain(gated, *args)
    torch.testing.assert_close(explanation.result, gated(*args))
    assert (explanation.kernels, len(explanation.graphs[0].calls)) == (1, 2)

    def gate_is_needed_before(x, a, b):
        gate = F.silu(x @ a)
        return gate * (gate @ b)

    args[2] = r(48, 48)
    explanation = opkit.explain(gate_is_needed_before, *args)
    torch.testing.assert_close(explanation.result, gate_is_needed_before(*args))
    assert explanation.kernels == 2


def test_sums_of_products_do_not_wait():
    """Otherwise all products would be in memory at once."""

    def summed(x, *weights):
        total = x.exp()
        for weight in weights:
            total = total + x @ weight
        return total

    graph = opkit.explain(summed, *(r(48, 48) for _ in range(6))).graphs[0]
    assert graph.launches > 1
    assert graph.arena <= 4 * 48 * 48 * 8


def test_a_concatenation_is_not_chosen_from_for_each_element_of_a_window():
    """Each part of it is stored once, for the average and both convolutions."""
    a, b, weight = r(2, 8, 9, 9), r(2, 4, 9, 9), r(10, 10, 1, 1)

    def averaged(a, b, weight):
        x = torch.cat([F.conv2d(a, weight[:6, :8]), F.conv2d(b, weight[:4, :4])], 1)
        return F.conv2d(x, weight), F.conv2d(x.relu(), weight), F.avg_pool2d(x, 3, 1, 1)

    explanation = opkit.explain(averaged, a, b, weight)
    torch.testing.assert_close(explanation.result, averaged(a, b, weight), rtol=1e-4, atol=1e-4)
    texts = [kernel.text for kernel in explanation.graphs[0].kernels]
    assert sum("aten.cat" in text for text in texts) <= 2
    (pool,) = (text for text in texts if "aten.avg_pool2d" in text)
    assert len(pool.split("(")[1].split(",")) == 2  # what it reads, and what it writes


def test_a_gate_does_not_wait_past_a_write_to_what_it_reads():
    def gated(x, a, b):
        gate = (x * 2).exp()
        x.copy_(a)
        return gate * (x @ b)

    args = [r(48, 48) for _ in range(3)]
    expected = gated(args[0].clone(), *args[1:])
    found = torch.compile(gated, backend="opkit", options={"strict": True})(*args)
    torch.testing.assert_close(found, expected)
