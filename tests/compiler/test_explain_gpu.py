"""opkit.explain of graphs for GPUs: what a launch moves, computes and takes of the hardware."""

import dataclasses
import types

import pytest
import torch

import opkit
from opkit.compiler import explain
from opkit.compiler.explained_graph import explain_graph, with_resources
from opkit.compiler.ir.expr import bound, load, op
from opkit.compiler.ir.index import ZERO, Axis, axis, index, size, value
from opkit.compiler.ir.kernel import Accumulator, Kernel, KernelArgument, KernelLaunch, Loop, Store, Update
from opkit.compiler.ir.program import Buffer
from opkit.compiler.kernel_figures import LAUNCH_SECONDS, KernelFigures, figures
from opkit.compiler.run import gpu_kernels
from opkit.op.triton import variants
from tests.compiler.run.test_gpu_launches import compiled

ROW, COLUMN = axis(0, 8), axis(1, 100)
ROWS, COLUMNS = Axis(0, index(8)), Axis(1, index(100))

# ---- bytes and operations ------------------------------------------------------------------------------------------------


def counted(body, *buffers, written=1, sizes=None):
    """The figures of statements over buffers of these dtypes and numbers of elements; the last ones are written."""
    names = [f"b{k}" for k in range(len(buffers))]
    arguments = [KernelArgument(f"p{k}", dtype, k >= len(buffers) - written) for k, (dtype, _) in enumerate(buffers)]
    of = zip(names, buffers, strict=True)
    known = {name: Buffer(name, dtype, (index(n),), (index(1),)) for name, (dtype, n) in of}
    kernel = Kernel("k", tuple(arguments), tuple(sizes or ()), tuple(body))
    return figures(KernelLaunch(kernel, tuple(names), tuple(sizes or ())), known, sizes or {})


def matrix(*stores):
    return [Loop(ROWS, (Loop(COLUMNS, stores, "vector"),), "parallel")]


def test_every_element_counts_once():
    x, row = load("p0", "f32", ROW * 100 + COLUMN), load("p1", "bf16", COLUMN)
    body = matrix(Store("p2", ROW * 100 + COLUMN, op("add", op("mul", x, x), row)))
    found = counted(body, ("f32", 800), ("bf16", 100), ("f32", 800))
    assert found == KernelFigures(read=3200 + 200, written=3200, operations=1600)


def test_several_accesses_are_no_more_than_the_buffer():
    first, second = (load("p0", "f32", ROW * 100 + COLUMN + k) for k in (0, 1))
    store = Store("p1", ROW * 100 + COLUMN, op("add", first, second))
    assert counted(matrix(store), ("f32", 801), ("f32", 800)).read == 801 * 4
    half = Store("p1", ROW * 100 + COLUMN, load("p0", "f32", COLUMN // 2))
    assert counted(matrix(half), ("f32", 800), ("f32", 800)).read == 50 * 4


def test_what_is_read_at_computed_places_is_at_most_the_buffer():
    at = value(bound(load("p0", "i64", ROW), index(30))) * 100 + COLUMN
    store = Store("p2", ROW * 100 + COLUMN, load("p1", "f32", at))
    found = counted(matrix(store), ("i64", 8), ("f32", 3000), ("f32", 800))
    assert (found.read, found.written) == (64 + 3200, 3200)
    assert counted(matrix(store), ("i64", 8), ("f32", 200), ("f32", 800)).read == 64 + 800


def test_what_is_updated_is_read_and_written():
    store = Store("p0", COLUMN, op("neg", load("p1", "f32", ROW * 100 + COLUMN)), "add", atomic=True)
    found = counted(matrix(store), ("f32", 100), ("f32", 800), written=2)
    assert found == KernelFigures(read=400 + 3200, written=400, operations=1600)


def test_reductions_and_sizes():
    n = size("n")
    update = Update("v", "sum", load("p0", "f32", ROW * n + axis(1, n)))
    row = [
        Accumulator("v", "f32", "sum"),
        Loop(Axis(1, n), (update,), "vector"),
        Store("p1", ROW, load("p0", "f32", ROW)),
    ]
    found = counted([Loop(ROWS, tuple(row), "parallel")], ("f32", 8000), ("f32", 8), sizes={"n": 50})
    assert found == KernelFigures(read=8 * 50 * 4 + 8 * 4, written=32, operations=400)


def test_operations_of_a_loop_that_ends_early_are_not_counted():
    loop = Loop(COLUMNS, (Store("p1", ROW, load("p0", "f32", ROW)),), stop=(COLUMN, ZERO))
    assert counted([Loop(ROWS, (loop,), "parallel")], ("f32", 8), ("f32", 8)).operations is None


def test_a_launch_that_moves_few_bytes_is_bound_by_latency():
    bandwidth = 1e12
    few, many = (KernelFigures(n, n, 0) for n in (1000, int(bandwidth * LAUNCH_SECONDS)))
    assert few.seconds(bandwidth) == pytest.approx(2e-9)
    assert (few.bound(bandwidth), many.bound(bandwidth)) == ("latency", "memory")


# ---- the report ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sm_90", "gfx942"])
def graph(request, monkeypatch):
    """A graph for a GPU, with its kernels compiled for an architecture."""
    machine = dataclasses.replace(variants.MACHINES["cuda"], target=lambda _: request.param)
    monkeypatch.setitem(variants.MACHINES, "cuda", machine)
    found, _ = compiled(lambda x, w: torch.relu(x @ w).softmax(1), (64, 32), (32, 300))
    made = explain_graph(found)
    build = gpu_kernels.GpuKernelsBuild(made.functions, made.source, torch.device(made.device))
    return with_resources(made, build.binaries(), 3e12)


def test_the_report_shows_what_a_launch_moves_and_takes(graph):
    (kernel,) = graph.kernels
    assert kernel.figures.read == kernel.figures.written == 64 * 300 * 4
    assert kernel.resources.registers > 0
    assert kernel.resources.threads % 32 == 0
    text = str(explain.Explanation(torch.relu, [graph]))
    assert "reads 76,800 B, writes 76,800 B, " in text
    assert "bound by latency: to move the bytes takes 0.05 us at 3,000 GB/s" in text
    assert " registers, " in text
    assert "bound by" not in str(explain.Explanation(torch.relu, [dataclasses.replace(graph, bandwidth=None)]))


def test_the_page_has_each_function_in_triton(graph, tmp_path):
    text = explain.Explanation(torch.relu, [graph]).to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<code>@triton.jit\ndef kernel_" in text
    assert " registers, " in text
    assert "<summary>Triton source</summary>" in text
    assert "C source" not in text
    assert graph.kernels[0].source.startswith("@triton.jit\ndef kernel_")


@pytest.mark.skipif(torch.version.hip is not None, reason="the clock of AMD's memory does not say what it moves")
@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"memory_clock_rate": 2_619_000, "memory_bus_width": 5120}, 3.352e12),
        ({"memory_clock_rate": 0}, None),
        ({}, None),
    ],
)
def test_the_bandwidth_is_that_of_the_memory_s_clock(properties, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(**properties))
    found = gpu_kernels.bandwidth(torch.device("cuda:0"))
    assert found == (expected and pytest.approx(expected, rel=1e-3))


@pytest.mark.gpu
def test_on_a_gpu():
    found = opkit.explain(lambda x: (x * 2).softmax(-1), torch.randn(4096, 4096, device="cuda"))
    (graph,) = found.graphs
    (kernel,) = graph.kernels
    assert kernel.figures.read == kernel.figures.written == 4096 * 4096 * 4
    assert kernel.resources.registers > 0
    assert graph.bandwidth is None or 1e11 < graph.bandwidth < 1e14
    assert graph.bandwidth is None or "bound by memory" in str(found)
