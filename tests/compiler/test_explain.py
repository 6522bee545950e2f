"""opkit.explain: graphs, kernels, refusals, memory, guards, as attributes, as text and as a page."""

import pytest
import torch

import opkit

pytestmark = pytest.mark.usefixtures("fresh")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_inference():
    block, x = Block(), torch.randn(4, 16)
    with torch.no_grad():
        found = opkit.explain(block, x)
        torch.testing.assert_close(found.result, block(x))
    (graph,) = found.graphs
    assert graph.name.startswith("inference")
    assert found.kernels == graph.launches == 3
    assert len(graph.calls) == 2
    assert all(call.startswith("aten.mm.default, of aten.addmm.default") for call in graph.calls)
    assert "aten.native_layer_norm.default" in graph.captured
    assert "call aten.mm" in graph.program
    assert graph.kernels[0].text.startswith("kernel k0(")
    assert "opkit_segment_0" in graph.source
    assert any("L['x']" in guard for guard in found.guards[0])


def test_steps():
    with torch.no_grad():
        (graph,) = opkit.explain(Block(), torch.randn(4, 16)).graphs
    assert [step.name for step in graph.steps] == ["k0", "aten.mm.default", "k1", "aten.mm.default", "k2"]
    first, product = graph.steps[:2]
    assert sorted(first.reads.values()) == ["f32[16]", "f32[16]", "f32[4, 16]"]
    assert product.reads.keys() & first.writes.keys()
    assert (product.figures.read, product.figures.written) == (4 * (4 * 16 + 16 * 32), 4 * 4 * 32)
    assert product.figures.operations == 2 * 4 * 16 * 32
    assert [step.kernel for step in graph.steps] == [0, None, 1, None, 2]
    assert all(f" k_{kernel.name}(" in kernel.source for kernel in graph.kernels)


def test_a_convolution_counts_its_operations():
    with torch.no_grad():
        (graph,) = opkit.explain(torch.nn.Conv2d(8, 6, 3, groups=2), torch.randn(2, 8, 7, 5)).graphs
    (step,) = (step for step in graph.steps if step.name.startswith("aten.convolution"))
    assert step.figures.operations == 2 * (2 * 6 * 5 * 3) * (4 * 3 * 3)


def test_times_are_measured_on_request():
    found = opkit.explain(Block(), torch.randn(4, 16))
    assert found.graphs[0].seconds is None
    found.measure()
    assert not found.not_measured
    assert all(step.seconds > 0 for graph in found.graphs for step in graph.steps)
    assert found.peaks.bandwidth > 0
    assert "  time " in str(found)


def test_graphs_that_are_not_timed_say_why():
    found = opkit.explain(lambda x: x.view(torch.uint8) + 1, torch.ones(4).view(torch.float4_e2m1fn_x2))
    found.measure()
    (reason,) = found.not_measured
    assert "runs in eager mode" in reason


def test_memory():
    with torch.no_grad():
        (graph,) = opkit.explain(Block(), torch.randn(4, 16)).graphs
    places = {place.buffer: place for place in graph.places}
    assert max(place.begin + place.nbytes for place in places.values()) == graph.arena
    assert any(place.reuses for place in places.values())
    for place in places.values():
        for name in place.reuses:
            assert places[name].last < place.first


def test_training_tells_of_the_backward_and_leaves_gradients_alone():
    block = Block()
    found = opkit.explain(block, torch.randn(4, 16))
    assert [graph.name.split()[0] for graph in found.graphs] == ["forward", "backward"]
    assert all(parameter.grad is None for parameter in block.parameters())


def test_a_plan_of_the_disk_is_not_taken_while_somebody_looks():
    x = torch.randn(3, 5)
    first, second = (opkit.explain(lambda x: x.exp() + 1, x) for _ in range(2))
    assert first.graphs[0].kernels == second.graphs[0].kernels
    assert first.kernels == 1


def test_recompilation_and_its_reason():
    found = opkit.explain(lambda x: x * 2 + 1, torch.randn(4, 3))
    assert found.recompiles == []
    found.call(torch.randn(5, 3))
    assert len(found.graphs) == 2
    assert "expected 4, actual 5" in found.recompiles[0]
    assert "compiled again" in str(found)


def test_graph_breaks():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    found = opkit.explain(broken, torch.randn(3))
    assert len(found.graphs) == 2
    assert len(found.breaks) == 1
    assert "graph breaks" in str(found)


def test_refusals_have_reasons():
    (graph,) = opkit.explain(lambda x: x.exp().sum(0).cos().sum(), torch.randn(8, 16)).graphs
    assert graph.refusals
    assert all(": " in refusal for refusal in graph.refusals)


def test_what_runs_in_eager_mode_says_why():
    found = opkit.explain(lambda x: x.view(torch.uint8) + 1, torch.ones(4).view(torch.float4_e2m1fn_x2))
    assert "runs in eager mode: " in str(found)
    assert "float4_e2m1fn_x2" in str(found)


def test_the_page_loads_nothing_and_escapes(tmp_path):
    x = torch.randn(4, 16)
    found = opkit.explain(lambda x: torch.where(x < 0, x * 2, x), x)  # <script>alert("&")</script>
    path = found.to_html(tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "http" not in text.replace("http-equiv", "")
    assert "for (int64_t a0 = begin; a0 &lt; end;" in text
    assert text.count("<script>") == 1
    assert "Loop nest" in text
    assert "C source" in text


def test_the_report_begins_with_the_table():
    text = str(opkit.explain(lambda x: x + 1, torch.randn(3))).splitlines()
    assert text[0] == "1 graph, 1 kernel, 0 calls of torch's operators"
    assert text[2].split()[:2] == ["graph", "operators"]
