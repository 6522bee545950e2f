"""Plans for GPUs, and the driver's steps for them, without a GPU: a Python function launches the kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from opkit.compiler import diagnostics, pipeline
from opkit.compiler.capture import conversion
from opkit.compiler.capture.conversion import Unsupported
from opkit.compiler.capture.decompositions import DECOMPOSITIONS
from opkit.compiler.lower.target import GPU
from opkit.compiler.run import driver, driver_program, plan_cache, torch_operators
from opkit.compiler.run.driver_program import STEPS
from opkit.compiler.run.plan import GpuLaunch
from opkit.op.triton import variants
from tests.compiler.emit.gpu_graphs import on_gpu

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *(7 * [ctypes.c_uint]),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)


def frame(words, tensors, launch=None, function=None):
    """The function of a frame without slots for results; what failed is appended to the list that comes with it."""
    failures = []
    tables = {
        "pointers": (ctypes.c_void_p * 4)(0x10, 0x20, 0x30, 0x40),
        "sizes": (ctypes.c_int64 * 1)(),
        "runtime": (ctypes.c_int64 * 1)(),
    }
    calls = {"functions": (function,), "finished": None, "failed": lambda at, error: failures.append((at, error))}
    slots = len(tensors)
    run, state = driver.function(words, slots, list(range(slots)), [], tables, calls)
    if launch is not None:
        state.launch = ctypes.cast(launch, ctypes.c_void_p).value
    return run, state, tables["pointers"], failures


def launch_words(programs):
    parameters = [2, 0, 0, 0, -1, 7, -1, 0, -1, 0]  # two pointers, a size, and two of Triton's
    return [STEPS.index("launch"), 6, 0xABC, programs, 128, 4096, 5, *parameters, STEPS.index("end"), 0]


def test_a_launch_passes_pointers_sizes_and_the_stream():
    seen = []

    @_LAUNCH
    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        values = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_int64))[0] for i in range(5)]
        seen.append((function, gx, gy, gz, bx, by, bz, shared, stream, values, extra))
        return 0

    run, state, _, failures = frame(launch_words(3), [], launch)
    state.stream = 0x77
    assert run([]) == []
    assert not failures
    assert seen == [(0xABC, 3, 1, 1, 128, 1, 1, 4096, 0x77, [0x30, 0x10, 7, 0, 0], None)]


def test_an_empty_grid_is_not_launched():
    run, _, _, failures = frame(launch_words(0), [], _LAUNCH(lambda *_: 1))
    assert run([]) == []
    assert not failures


def test_a_launch_that_fails_is_reported_with_its_code():
    run, _, _, failures = frame(launch_words(1), [], _LAUNCH(lambda *_: 701))
    with pytest.raises(RuntimeError, match="a step of a compiled graph failed"):
        run([])
    assert failures == [(0, 701)]


def test_the_driver_of_hip_is_the_one_that_is_loaded(monkeypatch):
    monkeypatch.setattr(variants, "_HIP_LIBRARIES", ("libnone.so.7", loaded := driver.library()._name, "libnone.so"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert variants.driver_library.__wrapped__() == loaded
    monkeypatch.setattr(variants, "_HIP_LIBRARIES", ("libnone.so.7", "libnone.so"))
    assert variants.driver_library.__wrapped__() == "libnone.so"


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_an_input_at_an_odd_address_is_copied(offset):
    copies = []

    def aligned(tensors):
        copies.append(torch_operators.aligned(tensors))
        return copies[-1]

    x = torch.arange(12.0)[offset : offset + 8].view(2, 4).t()
    words = [STEPS.index("align"), 0, 0, STEPS.index("point"), 0, 1, STEPS.index("end"), 1, 0, 1]
    run, _, pointers, _ = frame(words, [x], function=aligned)
    (found,) = run([x])
    assert torch.equal(found, x)
    assert found.stride() == x.stride()
    assert (found.data_ptr() == x.data_ptr()) == (not copies) == (offset % 4 == 0)
    assert pointers[1] == found.data_ptr()


def test_a_number_is_read_from_the_memory_of_the_cpu():
    words = [STEPS.index("value"), 0, 1, STEPS.index("end"), 0]
    run, _, pointers, _ = frame(words, [torch.empty(0)])
    assert run([torch.tensor(0.3, dtype=torch.float64)]) == []
    assert pointers[1] == torch.tensor(0.3, dtype=torch.float64).view(torch.int64).item()


# ---- plans -----------------------------------------------------------------------------------------------------------


def traced(function, *shapes, devices=("cuda",), floats=0, decompositions=None):
    with FakeTensorMode(shape_env=ShapeEnv() if floats else None):
        args = [torch.empty(s, device=devices[i % len(devices)]) for i, s in enumerate(shapes)]
        return make_fx(function, decompositions)(*args, *(torch.empty((), dtype=torch.float64) for _ in range(floats)))


def compiled(function, *shapes, **how):
    captured = conversion.capture(traced(function, *shapes, **how), "test")
    found = pipeline.compile_graph(captured, GPU, diagnostics.Stages(), {}, True, False)
    single = functools.partial(torch_operators.single, targets=captured.targets)
    return found, driver_program.write(found.plan, single, captured.resolved)


def test_a_plan_has_launches_products_and_allocations():
    found, code = compiled(lambda x, w: torch.relu(x @ w).sum(0), (64, 32), (32, 16))
    assert code.text.splitlines()[2:] == [
        "    aten_mm_default_out(b_x_1, b_w_1, out=view0)",
        "    del b_x_1, b_w_1",
        "    b_sum_1 = empty_strided((16,), (1,), dtype=float32)",
        f"    kernel0[{found.plan.steps[1].programs}](b_mm, b_sum_1)",
        "    return [b_sum_1]",
    ]
    assert found.plan.device == "cuda:0"
    assert found.plan.kernels[0].name in found.texts[0]


def test_calls_with_what_follows_them():
    _, code = compiled(lambda x, w, b: torch.conv2d(x, w, b).relu(), (2, 4, 9, 9), (8, 4, 3, 3), (8,))
    assert "aten_cudnn_convolution_relu_default(view0, b_w_1, b_b_1, [1, 1], [0, 0], [1, 1], 1)" in code.text
    _, code = compiled(lambda *args: torch.addmm(*(a.half() for a in args)).relu(), (8,), (4, 16), (16, 8))
    assert "aten__addmm_activation_default_out(" in code.text


def test_a_plan_can_be_stored():
    found, _ = compiled(lambda x: torch.softmax(x, -1), (64, 32))
    assert plan_cache.decode(plan_cache.encode(found.plan)) == found.plan


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch with CUDA")
def test_a_root_mean_square_norm_is_fused():
    found, _ = compiled(lambda x, w: F.rms_norm(x, (64,), w) * 2, (32, 64), (64,), decompositions=DECOMPOSITIONS)
    assert [type(step) for step in found.plan.steps] == [GpuLaunch]


def test_equal_kernels_are_one():
    found, _ = compiled(lambda x, w: torch.relu(torch.relu(x @ w) @ w), (64, 64), (64, 64))
    launches = [step for step in found.plan.steps if isinstance(step, GpuLaunch)]
    assert len(launches) == 2
    assert len(found.plan.kernels) == 1


def test_inputs_that_are_written_need_not_be_aligned():
    found, code = compiled(lambda x, y: torch.ops.aten.copy_.default(x, x + y), (64,), (64,))
    assert found.plan.kernels[0].unaligned == {"p0"}
    assert code.words.count(STEPS.index("align")) >= 1
    assert "aligned" in code.functions


def test_constants_of_the_cpu_become_numbers():
    found, _ = compiled(lambda x: x * torch.tensor(2.5), (64,))
    assert len(found.plan.steps) == 1
    assert "2.5" in found.texts[0]


def relative(table):
    positions = torch.arange(4)[:, None] * 1.0 - torch.arange(4)[None, :]
    return torch.ops.aten.index(table, [(positions + 3).long()]) * 2  # indexing in Python needs a torch with CUDA


MADE_ON_THE_CPU = {
    "positions": (relative, (7, 3)),
    "a matrix that is copied": (lambda x: x + (-torch.eye(4)).to(x.device), (4, 4)),
    "a number": (lambda x: torch.where(x > 0, x, torch.full((), 3.0)), (5,)),
    "places of values": (lambda x: torch.ops.aten.index_put(x, [torch.arange(2)], x.narrow(0, 0, 2) * 2), (5,)),
    "a number that is put": (lambda x: torch.ops.aten.index_put(x, [torch.arange(2)], torch.full((), 3.0)), (5,)),
    "a constant": (lambda x: x / torch.sqrt(torch.tensor(64.0) * 2).to(x.dtype), (5,)),
    "tensors that are copied together": (lambda x: x + torch.cat([torch.ones(2), torch.zeros(3)]).to(x.device), (5,)),
}


@pytest.mark.parametrize("name", MADE_ON_THE_CPU)
def test_what_only_the_gpu_uses_is_made_on_it(name):
    function, shape = MADE_ON_THE_CPU[name]
    found, _ = compiled(function, shape)
    assert all(isinstance(step, GpuLaunch) for step in found.plan.steps)


STAYS_ON_THE_CPU = {
    "a result": (lambda x: (x + torch.arange(4.0).to(x.device), torch.arange(4.0) * 2), ["arange", "mul"]),
    "also for a result": (lambda x: (x + (a := torch.arange(4.0)).to(x.device), a * 2), ["arange", "_to_copy", "mul"]),
    "random numbers": (lambda x: torch.eye(4).to(x.device) + torch.rand(4).to(x.device), ["rand", "_to_copy"]),
    "memory that is written to": (lambda x: x + torch.zeros(4).add_(1).to(x.device), ["zeros", "add_", "_to_copy"]),
    "values of an index": (lambda x: (x, torch.eye(4)[torch.arange(2)]), ["eye", "arange", "index"]),
}


@pytest.mark.parametrize("name", STAYS_ON_THE_CPU)
def test_what_else_is_made_on_the_cpu_stays_there(name):
    function, expected = STAYS_ON_THE_CPU[name]
    found, _ = compiled(function, (4,))
    calls = [step.target for step in found.plan.steps if not isinstance(step, GpuLaunch)]
    assert [target.split(".")[1] for target in calls] == expected


def test_kernels_take_floats_by_value_and_calls_as_the_host_computes_them():
    found, code = compiled(lambda x, s: torch.relu(x * (s.item() * 0.5)).renorm(2, 0, s.item() + 1), (64, 32), floats=1)
    assert ("p1", "fp64") in found.plan.kernels[0].parameters
    assert code.words[: 2 * 3 : 3] == [STEPS.index("align"), STEPS.index("point")]
    assert code.words[6:9] == [STEPS.index("value"), 1, found.plan.table.index("s_1")]
    assert "aten_renorm_default(view0, 2, 0, (b_s_1.item() + 1.0))" in code.text
    assert plan_cache.decode(plan_cache.encode(found.plan)) == found.plan


def test_other_numbers_on_the_cpu_are_left_to_torch():
    with pytest.raises(Unsupported, match="reads a number from a tensor on the CPU"):
        compiled(lambda x, s: x * (s * 2).item(), (64,), floats=1)


def test_a_graph_of_two_gpus_is_left_to_torch():
    module = traced(lambda x, y: (x + 1, y + 1), (4,), (4,), devices=("cuda:0", "cuda:1"))
    with pytest.raises(Unsupported, match="cuda:0 and cuda:1, and a graph is compiled for one device"):
        conversion.capture(module, "test")


def test_tensors_on_the_cpu_are_left_to_torch():
    found, _ = compiled(lambda x, y: (x * 2, (y * 2).sum()), (4,), (4,), devices=("cuda", "cpu"))
    targets = [step.target for step in found.plan.steps if not isinstance(step, GpuLaunch)]
    assert targets == ["aten.mul.Tensor", "aten.sum.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.ops.aten.slice.Tensor(x, 0, 1), x * 2),
        lambda x: torch.as_strided(x * 2, (4,), (1,), 2) + torch.ops.aten.as_strided.default(x, (4,), (1,), 2),
    ],
)
def test_inputs_whose_memory_counts_are_never_copied(function):
    found, code = compiled(function, (64,))
    assert code.words[0] == STEPS.index("point")  # of the input, which is not aligned before
    assert any(kernel.unaligned for kernel in found.plan.kernels)


def test_a_copy_whose_gaps_as_strided_reads_is_never_copied():
    def function(x):
        copied = torch.ops.aten.copy.default(x[::2], x[1::2])
        return torch.as_strided(copied, (8,), (1,)) * 2, copied + 1

    on_cpu = conversion.capture(traced(function, (8, 3), devices=("cpu",)), "test")  # a fake copy on a GPU needs CUDA
    captured = dataclasses.replace(on_cpu, graph=on_gpu(on_cpu.graph), device=torch.device("cuda:0"))
    plan = pipeline.compile_graph(captured, GPU, diagnostics.Stages(), {}, True, False).plan
    launches = [(plan.kernels[step.kernel], step.buffers) for step in plan.steps if isinstance(step, GpuLaunch)]
    unaligned = {
        buffer
        for of, buffers in launches
        for (p, _), buffer in zip(of.parameters, buffers, strict=False)
        if p in of.unaligned
    }
    assert unaligned == {"copy"}
