"""What torch's profiler shows of operators, their kernels and their backwards."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


def profiled(function):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        function()
    return [event.name for event in found.events()]


@pytest.mark.sweep
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("seen_before", [False, True])
def test_the_profiler_shows_operator_and_kernel(train, seen_before, kind, op, spelled, inputs):
    call, (x, weight) = spelled(op), inputs(train)
    if seen_before:
        call(x, weight)
    names = profiled(lambda: call(x, weight))
    name = op.name
    assert names.count(name) == 1
    chosen = "numpy_norm" if kind == "kernel" else "reference"
    assert any(shown.startswith(name) and chosen in shown for shown in names), names


def test_the_profiler_shows_the_kernel_of_compiled_code(norm_kernel, spelled, inputs):
    call, (x, weight) = spelled(norm_kernel), inputs(False)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call(x, weight) + 1, backend="aot_eager", fullgraph=True)
    compiled(x)
    names = profiled(lambda: compiled(x))
    assert any("tnorm::norm_kernel" in name and "numpy_norm" in name for name in names), names


def test_the_profiler_shows_the_backward(norm_kernel, inputs):
    x, weight = inputs()
    output = norm_kernel(x, weight).sum()
    names = profiled(lambda: output.backward())
    assert any("tnorm_norm_kernel" in name for name in names), names
