"""Schedules for GPUs, run in Triton's interpreter: it must be on before Triton is imported, so this is for a child process."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from opkit.compiler.emit.triton.expressions import NotEmittable
from opkit.compiler.emit.triton.source import module, triton_kernel
from opkit.compiler.ir.dtypes import DTYPES, is_complex
from opkit.compiler.ir.index import Index, Symbol
from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.ir.program import ScalarItem, Strided
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule
from opkit.compiler.lower.target import GPU
from tests.compiler import graphs
from tests.compiler.emit.gpu_graphs import on_gpu

_NUMPY = {"pow": "power", "acos": "arccos", "asin": "arcsin", "atan": "arctan", "atan2": "arctan2", "acosh": "arccosh"}
_NUMPY |= {"asinh": "arcsinh", "atanh": "arctanh"}


class Libdevice:
    """CUDA's library of functions, which the interpreter lacks, with numpy and torch."""

    def __getattr__(self, name):
        def function(*args):
            arrays = [np.asarray(a.handle.data) for a in args]
            with np.errstate(all="ignore"):
                if name in ("erf", "erfc"):
                    found = getattr(torch.special, name)(torch.from_numpy(arrays[0].copy())).numpy()
                else:
                    found = getattr(np, _NUMPY.get(name, name))(*arrays)
            found = np.asarray(found, arrays[0].dtype)
            scalar = args[0].dtype
            kind = tl.block_type(scalar, list(found.shape)) if found.shape else scalar
            return tl.core.tensor(interpreter.TensorHandle(found, scalar), kind)

        return function


def _rounded(convert):
    """The interpreter's conversions of floats; it cuts off bits of bfloat16, where GPUs round to the nearest."""

    def converted(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        narrow = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy()).bfloat16()
        return narrow.view(torch.int16).numpy().view(np.uint16)

    return converted


def _reduced(ops, tensors):
    """A reduction of halves with each other, as on GPUs; the interpreter's own visits one element after the other."""
    (tensor,) = tensors
    found = tensor.handle.data
    while found.shape[ops.axis] > 1:
        halves = (ops.to_tensor(half, tensor.dtype) for half in np.split(found, 2, ops.axis))
        found = ops.combine_fn.fn(*halves).handle.data
    return [ops.to_tensor(found.squeeze(ops.axis), tensor.dtype)]


def _scanned(ops, tensors):
    """A scan in steps of 1, 2, 4 and so on."""
    (tensor,) = tensors
    found = tensor.handle.data
    columns = np.arange(found.shape[1])
    for step in 1 << np.arange(columns.size.bit_length() - 1):
        pair = (ops.to_tensor(each, tensor.dtype) for each in (np.roll(found, step, 1), found))
        found = np.where(columns < step, found, ops.combine_fn.fn(*pair).handle.data)
    return [ops.to_tensor(found, tensor.dtype)]


interpreter._convert_float = _rounded(interpreter._convert_float)
interpreter.ReduceOps.generic_reduce = _reduced
interpreter.ScanOps.generic_scan = _scanned
# as kernels with checks are built
_OPTIONS = dataclasses.replace(interpreter.interpreter_builder.options, debug=True, sanitize_overflow=False)
interpreter.interpreter_builder.options = _OPTIONS


def _number(value):
    """A float64 as a kernel gets it; the interpreter passes a Python float as it is."""
    return tl.core.tensor(interpreter.TensorHandle(value, tl.float64), tl.float64)


class Run:
    """A graph's results by the kernels of its schedule.

    Attributes:
        kernels: the kernels, in order.
        text: their module.
        results: the graph's outputs. Arguments that the graph writes to are changed.
    """

    def __init__(self, graph, constants, args, target=GPU):
        self.program = lower(on_gpu(graph), target)
        self.symbols = {Symbol(name, least): n for name, n in graph.sizes.items() for least in (0, 1, 2)}
        self.schedule = schedule(self.program, target)
        inputs = [n.name for n in graph.nodes if n.target == "input"]
        self.memory = {b.name: self._memory(b) for b in self.program.buffers.values() if not b.whole}
        self.memory |= {b.name: self._memory(b) for b in self.schedule.buffers.values() if b.name not in self.memory}
        for key, value in [*zip(inputs, args, strict=True), *constants.items()]:
            if key in self.memory:
                self.view(key).copy_(value)
        launches = [step for step in self.schedule.steps if isinstance(step, KernelLaunch)]
        names = {step.kernel: f"kernel_{k}" for k, step in enumerate(launches)}
        made = {kernel: triton_kernel(kernel, name, graph.sizes, target.tiles) for kernel, name in names.items()}
        self.kernels = list(made.values())
        self.text = module(self.kernels)
        functions = _compiled(self.text)
        for step in self.schedule.steps:
            if isinstance(step, KernelLaunch):
                self._launch(step, made[step.kernel], functions)
            else:
                self._call(step)
        for key, value in zip(inputs, args, strict=True):
            if key in self.memory:
                value.copy_(self.view(key))
        self.results = [self._result(output) for output in self.program.outputs]

    def view(self, name):
        buffer = self.program.buffers.get(name) or self.schedule.buffers[name]
        return torch.as_strided(self.memory[name], *self._numbers(buffer.shape, buffer.strides))

    def _launch(self, step, kernel, functions):
        pairs = zip(step.buffers, step.kernel.arguments, strict=True)
        arrays = [
            _number(self.memory[b].numpy())
            if a.by_value
            else self.memory[b].view(getattr(torch, DTYPES[a.dtype].torch))
            for b, a in pairs
        ]
        (grid,) = self._numbers([kernel.programs])
        numbers = [self.schedule.program.sizes[name] for name in step.sizes]
        if 0 not in grid:
            with np.errstate(all="ignore"):
                getattr(functions, kernel.name)[tuple(grid)](*arrays, *numbers, **dict(kernel.constants))

    def _call(self, step):
        found = graphs.call(step, self._arguments(step.args), self._arguments(step.kwargs))
        found = found if isinstance(found, tuple | list) else (found,)
        for output, each in zip(step.outputs, found, strict=True):
            if isinstance(output, str):
                self.view(output).copy_(torch.as_tensor(each))

    def _arguments(self, argument):
        if isinstance(argument, Strided):
            return graphs.to_numpy(self._strided(argument))
        if isinstance(argument, ScalarItem):
            return self.memory[argument.buffer][0].item()
        if isinstance(argument, Index):
            return argument.constant
        if isinstance(argument, dict):
            return {key: self._arguments(a) for key, a in argument.items()}
        if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
            return type(argument)(self._arguments(a) for a in argument)
        return argument

    def _strided(self, at):
        shape, strides = self._numbers(at.shape, at.strides)
        return torch.as_strided(self.memory[at.buffer], shape, strides, self._numbers([at.offset])[0][0]).clone()

    def _result(self, output):
        if isinstance(output, Strided):
            return self._strided(output)
        if isinstance(output, Index):
            return output.constant
        return self.memory[output.buffer][0].item() if isinstance(output, ScalarItem) else output

    def _numbers(self, *of):
        return [[int(n.substitute(self.symbols).constant) for n in each] for each in of]

    def _memory(self, buffer):
        """Memory for a buffer, filled with what no result should depend on."""
        shape, strides = self._numbers(buffer.shape, buffer.strides)
        size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 1
        kind = getattr(torch, DTYPES[buffer.dtype].torch)
        floating = kind.is_floating_point or is_complex(buffer.dtype)
        return torch.full((size,), torch.nan if floating else 1 if kind == torch.bool else 77, dtype=kind)


def _compiled(text: str):
    """The module of kernels, with functions of libdevice that the interpreter has."""
    folder = tempfile.mkdtemp(prefix="opkit_interpreted")
    path = Path(folder, "kernels.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(Path(folder).name, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    shutil.rmtree(folder)
    functions = sys.modules.get("opkit.compiler.emit.triton.functions")
    for each in (made, functions):
        if each is not None:
            each.libdevice = Libdevice()
    return made


def run_kernel(kernel, arrays, sizes, runtime=None):
    """Run one kernel on flat arrays, as ``in_c`` of the tests of the C emitter does."""
    try:
        made = triton_kernel(kernel, "kernel", sizes, GPU.tiles)
    except NotEmittable as refusal:
        pytest.skip(f"not emittable: {refusal}")
    tensors = {a.buffer: torch.from_numpy(arrays[a.buffer]) for a in kernel.arguments}
    given = [tensors[a.buffer].view(getattr(torch, DTYPES[a.dtype].torch)) for a in kernel.arguments]
    symbols = {leaf: sizes[leaf.name] for leaf in made.programs.leaves()}
    grid = (int(made.programs.substitute(symbols).constant),)
    numbers = [sizes[name] for name in kernel.sizes]
    if 0 not in grid:
        with np.errstate(all="ignore"):
            _compiled(module([made])).kernel[grid](*given, *numbers, **dict(made.constants))
    return 0, [0, 0, 0]


# ---- a plugin of pytest: the tests of lowering and of the C emitter's kernels, with Triton in place of numpy and C ----------


def pytest_configure(config):
    def run_graph(graph, program, constants, args):
        try:
            return Run(graph, constants, args).results
        except NotEmittable as refusal:
            pytest.skip(f"not emittable: {refusal}")

    graphs.run_graph = run_graph


def pytest_plugin_registered(plugin):
    if hasattr(plugin, "in_c"):
        plugin.in_c = run_kernel
        plugin.library, plugin.call = _segments, _call_segment


def _segments(launches, buffers):
    made = types.SimpleNamespace()
    for number, (launch,) in enumerate(launches):
        setattr(made, f"opkit_segment_{number}", (launch.kernel, buffers))
    return made


def _call_segment(segment, arrays, sizes, runtime):
    kernel, names = segment
    return run_kernel(kernel, dict(zip(names, arrays, strict=True)), {})


def pytest_collection_modifyitems(items):
    """Leave out what runs no kernel, or is about C and threads."""

    def fits(item):
        return not {"same", "all_same"}.isdisjoint(item.fixturenames) and "team" not in item.fixturenames

    items[:] = [item for item in items if not item.path.match("emit/test_*.py") or fits(item)]
