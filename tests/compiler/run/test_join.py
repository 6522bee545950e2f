"""Plans that are joined. Those for GPUs run without a GPU: an interpreter computes each launch, in the memory of the CPU."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from opkit.compiler import backend, graph_cache, pipeline
from opkit.compiler.capture.parts import Call, Cut
from opkit.compiler.ir.index import ZERO, index
from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.ir.program import Buffer, Extern, Strided
from opkit.compiler.lower.target import GPU
from opkit.compiler.run.autograd import GraphResult, Wiring
from opkit.compiler.run.join import NotJoinable, joined
from opkit.compiler.run.library import LoadedKernel, LoadedSegments
from opkit.compiler.run.plan import ExecutionPlan, GpuLaunch, GraphConstants
from opkit.compiler.run.runner import Runner, assemble
from tests.compiler.emit.gpu_graphs import on_gpu
from tests.compiler.interpreter_kernel import STORED, run_kernel

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *(7 * [ctypes.c_uint]), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
_SPAN = 1 << 16  # bytes from a pointer on that kernels may touch

D, LAYERS = 4, 4


def plan_of(target, strides, result_shape, result_strides, dtype="f32"):
    """A plan of one call for a matrix of 2 by 3 or 3 by 2, whose result is returned with another shape and other strides."""
    shape = (2, 3) if strides[0] == 3 else (3, 2)
    layout = [tuple(map(index, of)) for of in (shape, strides)]
    buffers = {name: Buffer(name, dtype, *layout, role) for name, role in (("x", "input"), ("y", "made"))}
    step = Extern(target, (Strided("x", *layout, ZERO),), {}, ("y",), out=True)
    result = Strided("y", *(tuple(map(index, of)) for of in (result_shape, result_strides)), ZERO)
    return ExecutionPlan("", ("x",), buffers, (step,), (result,), {}, ZERO, (), ())


CALLS = Cut([], [Call(0, (0,), (1,)), Call(1, (1,), (2,))], 1, {}, 3, [2, 2])
INFERENCE = Wiring(1, (GraphResult(None, False),), (), (), False, False)


@pytest.mark.parametrize("strides", [(2, 1), (1, 3)], ids=["a copy", "in place"])
def test_a_value_comes_with_the_strides_that_the_next_part_expects(strides):
    plans = [plan_of("aten.neg.default", (3, 1), (3, 2), (1, 3)), plan_of("aten.exp.default", strides, (3, 2), strides)]
    found = joined(CALLS, [(INFERENCE, [(each, GraphConstants())]) for each in plans])
    ((plan, constants),) = found.graphs
    assert len(plan.steps) == 2 + (strides == (2, 1))
    x = torch.randn(2, 3)
    (result,) = assemble(plan, constants, LoadedSegments())([x])
    torch.testing.assert_close(result, x.neg().t().exp())
    assert (found.taken, found.made) == ((0,), (2,))


def test_plans_that_do_not_fit_are_not_joined():
    plans = [
        plan_of("aten.neg.default", (3, 1), (2, 3), (3, 1)),
        plan_of("aten.exp.default", (3, 1), (2, 3), (3, 1), "f64"),
    ]
    with pytest.raises(NotJoinable, match=r"a f64 of \(2, 3\) comes as a f32 of \(2, 3\)"):
        joined(CALLS, [(INFERENCE, [(each, GraphConstants())]) for each in plans])


# ---- for GPUs --------------------------------------------------------------------------------------------------------


class Code:
    """The kernels of a graph, whose addresses are their numbers in ``known``."""

    known: ClassVar[list] = []

    def __init__(self, schedule):
        kernels = dict.fromkeys(step.kernel for step in schedule.steps if isinstance(step, KernelLaunch))
        self.loaded = [LoadedKernel(len(self.known) + n + 1, 1, 0) for n in range(len(kernels))]
        self.known += kernels

    def wait(self):
        return LoadedSegments(kernels=self.loaded)


@_LAUNCH
def launch(function, *rest):
    kernel, parameters = Code.known[function - 1], rest[-2]
    arrays = {}
    for n, argument in enumerate(kernel.arguments):
        pointer = ctypes.cast(parameters[n], ctypes.POINTER(ctypes.c_void_p))[0]
        memory = (ctypes.c_char * _SPAN).from_address(pointer)
        arrays[argument.buffer] = np.frombuffer(memory, STORED[argument.dtype])
        arrays[argument.buffer].flags.writeable = True
    run_kernel(kernel, arrays, {})
    return 0


class InterpretedRunner(Runner):
    def __init__(self, plan, constants, segments):
        super().__init__(dataclasses.replace(plan, device="cpu"), constants, segments)

    def _create(self, block, sizes):
        frame = super()._create(block, sizes)
        frame.state.launch = ctypes.cast(launch, ctypes.c_void_p).value
        return frame


@pytest.fixture
def plans(monkeypatch, settings, tmp_path):
    """The plans that run, in order; graphs of the CPU are compiled as those of a GPU."""
    settings(cache_dir=tmp_path)
    torch._dynamo.reset()
    capture, compile_graph, schedules, found = backend.conversion.capture, pipeline.compile_graph, [], []

    def captured(*given):
        result = capture(*given)
        return dataclasses.replace(result, graph=on_gpu(result.graph), device=torch.device("cuda:0"))

    def compiled(*given):
        result = compile_graph(*given)
        schedules.append(result.schedule)
        return result

    def build(plan, constants, texts, name, store=None):
        return graph_cache.PlanBuild(dataclasses.replace(plan, name=name), constants, texts, Code(schedules[-1]))

    def assemble(*given):
        runner = InterpretedRunner(*given)
        found.append(given[0])
        return runner

    monkeypatch.setattr(backend.conversion, "capture", captured)
    monkeypatch.setattr(backend, "gpu_target", lambda: GPU)
    monkeypatch.setattr(pipeline, "compile_graph", compiled)
    monkeypatch.setattr(graph_cache, "build", build)
    monkeypatch.setattr(graph_cache, "assemble", assemble)
    return found


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(D), nn.Linear(D, D), nn.Linear(D, D, bias=False)

    def forward(self, x, y):
        return x + self.down(F.silu(self.up(self.norm(x))).square() + 1) * y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        x = self.first(x)
        y = x.sigmoid()
        for layer in self.layers:
            x = layer(x, y)
        return self.last(x), y


def test_training_with_the_kernels_of_each_part_once(plans):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, D)
    other = copy.deepcopy(model)
    fast = torch.compile(other, backend="opkit", options={"strict": True, "repeated_blocks": True})
    for each in (model, fast):
        sum(result.square().sum() for result in each(x)).backward()
    torch.testing.assert_close([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
    for kind in ("forward", "backward"):
        *parts, joined = sorted((p for p in plans if p.name.startswith(kind)), key=lambda plan: len(plan.steps))
        launches = [step for step in joined.steps if isinstance(step, GpuLaunch)]
        assert {step.kernel for step in launches} == set(range(len(joined.kernels)))
        assert len(joined.kernels) == sum(len(plan.kernels) for plan in parts)
        assert len(launches) >= LAYERS
        assert joined.arena.constant == max(plan.arena.constant for plan in parts)
