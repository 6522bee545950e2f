"""The kernels of a large graph are shared out among units that are compiled side by side."""

import torch

from opkit.compiler import backend
from opkit.compiler.emit import source


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
