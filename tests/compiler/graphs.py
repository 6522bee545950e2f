"""Graphs for the tests of the compiler: a function of tensors as make_fx traces it, and its program run with numpy."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from opkit.compiler.ir.dtypes import DTYPES, OF_TORCH
from opkit.compiler.ir.graph import Graph, Node, OpaqueValue, Ref, TensorType, TypeName
from opkit.compiler.ir.index import index
from opkit.compiler.ir.program import Compute, Extern, Program
from opkit.compiler.lower.graph_to_program import lower
from tests.compiler import interpreter


def graph_of(function, *args, decompositions=None):
    """The graph of ATen's operators that a function of tensors runs, without writes but those to its arguments."""
    traced = make_fx(function, decomposition_table=decompositions or {})(*(a.clone() for a in args))
    if any(
        str(node.target).split(".")[-2:][0].endswith("_") for node in traced.graph.nodes if node.op == "call_function"
    ):
        traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*(a.clone() for a in args))
    traced.graph.eliminate_dead_code()
    nodes, constants = [], {}
    for node in traced.graph.nodes:
        if node.op == "output":
            outputs = node.args[0] if isinstance(node.args[0], list | tuple) else (node.args[0],)
        else:
            nodes.append(_node(traced, node, constants))
    return Graph("test", tuple(nodes), tuple(_argument(o) for o in outputs), {}), constants


def _node(traced, node, constants):
    result = _type(node.meta.get("val"))
    if node.op == "placeholder":
        return Node(node.name, "input", (), {}, result)
    if node.op == "get_attr":
        constants[node.name] = getattr(traced, node.target)
        return Node(node.name, "constant", (), {}, _type(constants[node.name]))
    target = "getitem" if getattr(node.target, "__name__", "") == "getitem" else str(node.target)
    args = tuple(_argument(a) for a in node.args)
    return Node(node.name, target, args, {k: _argument(v) for k, v in node.kwargs.items()}, result)


def _type(value):
    if isinstance(value, torch.Tensor):
        shape, strides = tuple(map(index, value.shape)), tuple(map(index, value.stride()))
        return TensorType(
            OF_TORCH[str(value.dtype).removeprefix("torch.")], shape, strides, index(0), value.device.type
        )
    return tuple(map(_type, value)) if isinstance(value, list | tuple) else None


def _argument(value):
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, torch.dtype):
        return TypeName(OF_TORCH[str(value).removeprefix("torch.")])
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return OpaqueValue(str(value))
    if isinstance(value, list | tuple):
        return [_argument(v) for v in value]
    return value


def program_of(function, *args, **options) -> Program:
    return lower(graph_of(function, *args, **options)[0])


def externs(program: Program) -> list[str]:
    """The operators that a program calls, with the reasons."""
    return [f"{s.target}: {s.reason}" for s in program.steps if isinstance(s, Extern)]


def computes(program: Program) -> list[Compute]:
    return [s for s in program.steps if isinstance(s, Compute)]


def interpreted(function, *args, **options):
    """What the lowered function gives, by the interpreter; tensors among the arguments that it writes to are changed."""
    graph, constants = graph_of(function, *args, **options)
    return run_graph(graph, lower(graph), constants, args)


def run_graph(graph, program, constants, args):
    """A graph's results by its program."""
    arrays = [to_numpy(a) for a in args]
    found = interpreter.run(program, arrays, call=call, constants={k: to_numpy(v) for k, v in constants.items()})
    for given, array in zip(args, arrays, strict=True):
        given.copy_(torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape))
    dtypes = [{n.name: n.result for n in graph.nodes}.get(o[0]) if isinstance(o, Ref) else None for o in graph.outputs]
    return [_tensor(a, kind) for a, kind in zip(found, dtypes, strict=True)]


def to_numpy(x):
    x = x.detach()
    return (x.float() if x.dtype == torch.bfloat16 else x).clone().numpy()


def _tensor(array, kind):
    if not isinstance(array, np.ndarray):
        return array
    return torch.from_numpy(array).to(getattr(torch, DTYPES[kind.dtype].torch))


def call(step, args, kwargs):
    """Runs an extern call of torch's on arrays."""
    if step.target == "opkit.seed":
        return np.asarray(1234)
    function = _ON_CPU.get(step.target) or operator.attrgetter(step.target)(torch.ops)
    found = function(*_tensors(args), **_tensors(kwargs))
    if isinstance(found, tuple | list):
        return tuple(to_numpy(f) if isinstance(f, torch.Tensor) else f for f in found)
    return to_numpy(found) if isinstance(found, torch.Tensor) else found


def _convolution_relu(x, w, bias, stride, padding, dilation, groups):
    return torch.conv2d(x, w, bias, stride, padding, dilation, groups).relu()


def _convolution_add_relu(x, w, z, alpha, bias, *settings):
    stride, padding, dilation, groups = settings
    return (torch.conv2d(x, w, bias, stride, padding, dilation, groups) + alpha * z).relu()


def _winograd(x, w, padding, transposed):
    return (torch.conv_transpose2d if transposed else torch.conv2d)(x, w, None, 1, padding)


_ON_CPU = {
    "opkit.winograd": _winograd,
    "aten.cudnn_convolution_relu.default": _convolution_relu,
    "aten.cudnn_convolution_add_relu.default": _convolution_add_relu,
}


def _tensors(argument):
    if isinstance(argument, np.ndarray):
        return torch.from_numpy(argument) if argument.flags.writeable else torch.tensor(argument)
    if isinstance(argument, TypeName):
        return getattr(torch, DTYPES[argument.name].torch)
    if isinstance(argument, OpaqueValue):
        return eval(argument.text, {"torch": torch, "cpu": torch.device("cpu"), "device": torch.device})
    if isinstance(argument, dict):
        return {k: _tensors(v) for k, v in argument.items()}
    if isinstance(argument, list | tuple):
        return type(argument)(_tensors(a) for a in argument)
    return argument


def check(function, *args, lowered=True, exact=False, **tolerances):
    """Compares the lowered function with eager, values and types, and what it writes to its arguments."""
    copies = [a.clone() for a in args]
    expected = function(*copies)
    expected = expected if isinstance(expected, list | tuple) else [expected]
    given = [a.clone() for a in args]
    graph, constants = graph_of(function, *args)
    program = lower(graph)
    assert not (lowered and externs(program)), (externs(program), str(graph))
    found = run_graph(graph, program, constants, given)
    for x, y in zip([*found, *given], [*expected, *copies], strict=True):
        same(x, y, exact, **tolerances)


def gradients(function):
    """The function's gradients with regard to all of its arguments."""

    def both(*args):
        args = [a.detach().requires_grad_() for a in args]
        y = function(*args)
        weights = torch.arange(y.numel()).reshape(y.shape).to(y.dtype) / y.numel()
        return (y.detach(), *torch.autograd.grad((y * weights).sum(), args))

    return both


def same(x, y, exact=False, **tolerances):
    if not isinstance(y, torch.Tensor):
        assert x == y
        return
    assert (x.dtype, x.shape) == (y.dtype, y.shape), (x.dtype, x.shape, y.dtype, y.shape)
    limits = {"rtol": 0, "atol": 0} if exact else {**_LIMITS.get(y.dtype, {}), **tolerances}
    torch.testing.assert_close(x, y, equal_nan=True, **limits)
    if exact and y.dtype.is_floating_point:
        assert torch.equal(torch.signbit(x) | x.isnan(), torch.signbit(y) | y.isnan()), "signs of zeros"


_LIMITS = {torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}, torch.float16: {"rtol": 2e-3, "atol": 1e-3}}
