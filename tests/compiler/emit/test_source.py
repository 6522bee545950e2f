"""The kernels of a large graph are shared out among units that are compiled side by side."""

import itertools

import numpy as np
import pytest
import torch

from opkit.compiler import backend
from opkit.compiler.emit import source
from opkit.compiler.ir.expr import const, load, op
from opkit.compiler.ir.index import Axis, axis, index
from opkit.compiler.ir.kernel import Kernel, KernelArgument, KernelLaunch, Loop, Store


def test_a_large_graph_is_compiled_in_two_units(monkeypatch):
    monkeypatch.setattr(source, "_WORTH_A_UNIT", 300)

    def function(x, w):
        return torch.softmax((x @ w).sigmoid() @ w, -1).cumsum(0)

    seen = []
    token = backend.observer.set(seen.append)
    try:
        args = torch.randn(6, 8), torch.randn(8, 8)
        found = torch.compile(function, backend=backend.opkit_backend, options={"strict": True})(*args)
    finally:
        backend.observer.reset(token)
    torch.testing.assert_close(found, function(*args))
    first, second = seen[0].texts
    assert "opkit_segment_0" in first
    assert "opkit_segment_" not in second
    assert "_range(" in second


def test_a_small_graph_is_one_unit():
    (text,) = source.source([[]], [], [], units=4)
    assert "opkit_segment_0" in text


# ---- launches side by side -------------------------------------------------------------------------------------------


def tripled(count, name):
    """y += 2 * x, so that an iteration that runs twice is seen."""
    at = axis(0, count)
    arguments = (KernelArgument("x", "f32", False), KernelArgument("y", "f32", True))
    more = Store("y", at, op("mul", load("x", "f32", at), const(2.0, "f32")), update="add")
    return Kernel(name, arguments, (), (Loop(Axis(0, index(count)), (more,), "parallel"),), 4)


@pytest.mark.parametrize("counts", [(5,), (3, 3), (37, 0, 1, 100, 2), (0, 0)])
def test_a_batch_is_shared_among_threads(subtests, segments, team, counts):
    """Every iteration runs once, also where OpenMP gives fewer threads than it was asked for."""
    library, call = segments
    names = [f"{b}{k}" for k in range(len(counts)) for b in "xy"]
    launches = [KernelLaunch(tripled(n, f"k{k}"), (f"x{k}", f"y{k}"), joined=k > 0) for k, n in enumerate(counts)]
    segment = library([launches], names).opkit_segment_0

    def shared(case):
        threads, present = case
        arrays = [np.arange(n + 1, dtype=np.float32) + k for k, n in enumerate(counts) for _ in "xy"]
        workers = team(threads, present)
        assert call(segment, arrays, runtime=workers.runtime) == (0, [0, 0, 0])
        for k, n in enumerate(counts):
            x, y = arrays[2 * k], arrays[2 * k + 1]
            assert np.array_equal(y[:n], 3 * x[:n])
            assert y[n] == n + k
        assert workers.parts == ([min(threads, sum(counts) // 4, 256)] if min(threads, sum(counts) // 4) > 1 else [])

    for case in [*itertools.product((1, 2, 3, 7, 300), (0, 1, None))]:
        with subtests.test(str(case)):
            shared(case)
