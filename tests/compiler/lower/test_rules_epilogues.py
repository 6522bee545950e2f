"""Convolutions and products with what follows them: which calls a GPU's program has, what it computes, and refusals."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from opkit.compiler.ir.program import Compute, Extern
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.rules import epilogues
from opkit.compiler.lower.target import GPU, LoweringTarget
from tests.compiler import graphs
from tests.compiler.emit.gpu_graphs import on_gpu

aten = torch.ops.aten
RELU, ADD_RELU = "aten.cudnn_convolution_relu.default", "aten.cudnn_convolution_add_relu.default"
CONVOLUTION, ADDMM, ACTIVATION = "aten.convolution.default", "aten.addmm.default", "aten._addmm_activation.default"


def r(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def norm(x, gain, bias, mean, var):
    return aten._native_batch_norm_legit_no_training(x, gain, bias, mean, var, 0.1, 1e-3)[0]


def statistics(channels):
    return [r(channels) + 2, r(channels + 1)[1:], r(channels + 2)[2:], r(channels + 3)[3:].abs() + 0.1]


def program_of(function, *args, target=GPU):
    graph, constants = graphs.graph_of(function, *args)
    graph = on_gpu(graph)
    return graph, lower(graph, target), constants


def calls(program):
    return [step.target for step in program.steps if isinstance(step, Extern)]


def reasons(program):
    return [step.reason for step in program.steps if isinstance(step, Extern)]


def check(function, *args, **tolerances):
    """The calls of a function's program, once that was found to give what eager gives."""
    graph, program, constants = program_of(function, *args)
    (found,) = graphs.run_graph(graph, program, constants, [a.clone() for a in args])
    graphs.same(found, function(*args), **{"rtol": 1e-4, "atol": 1e-4, **tolerances})
    return calls(program)


IMAGES = [r(2, 4, 7, 6), r(8, 4, 3, 3)]
RESIDUAL = r(2, 8, 7, 6)


def test_a_norm_is_in_the_weights():
    def block(x, w, *stats):
        return norm(F.conv2d(x, w, padding=1), *stats).relu()

    _, program, _ = program_of(block, *IMAGES, *statistics(8))
    assert check(block, *IMAGES, *statistics(8)) == [RELU]
    (call,) = [step for step in program.steps if isinstance(step, Extern)]
    assert [s.constant for s in call.args[1].strides] == [36, 1, 12, 4]
    assert {a.buffer for a in call.args[1:3]} <= {step.buffer for step in program.steps if isinstance(step, Compute)}


@pytest.mark.parametrize(
    "block",
    [
        lambda x, w, b, z, *s: F.conv2d(x, w, b, padding=1).relu(),
        lambda x, w, b, z, *s: F.conv2d(x, w, padding=1).relu(),
        lambda x, w, b, z, *s: norm(F.conv2d(x, w, b, padding=1), *s).relu(),
        lambda x, w, b, z, *s: norm(F.conv2d(x, w, b, padding=1), None, None, *s[2:]).relu(),
        lambda x, w, b, z, *s: F.conv2d(x, w, b, stride=2, padding=2, dilation=2).relu(),
    ],
)
def test_a_relu_joins_its_convolution(block):
    assert check(block, *IMAGES, r(8), RESIDUAL, *statistics(8)) == [RELU]


@pytest.mark.parametrize(
    "block",
    [
        lambda x, w, b, z, *s: (F.conv2d(x, w, b, padding=1) + z).relu(),
        lambda x, w, b, z, *s: (z * 2 + norm(F.conv2d(x, w, b, padding=1), *s)).relu(),
        lambda x, w, b, z, *s: (norm(F.conv2d(x, w, padding=1), *s) + z).relu(),
    ],
)
def test_an_addition_joins_too(block):
    assert check(block, *IMAGES, r(8), RESIDUAL, *statistics(8)) == [ADD_RELU]


@pytest.mark.parametrize("bias", [None, r(8)])
def test_the_norm_of_a_second_convolution_that_is_added(bias):
    def block(x, w, v, *stats):
        return (norm(F.conv2d(x, w, padding=1), *stats) + norm(F.conv2d(x, v, bias), *reversed(stats))).relu()

    stats = [s.abs() + 0.5 for s in statistics(8)]
    assert check(block, *IMAGES, r(8, 4, 1, 1), *stats) == [CONVOLUTION, ADD_RELU]


def test_a_cpu_calls_convolutions_alone():
    def block(x, w, *stats):
        return norm(F.conv2d(x, w, padding=1), *stats).relu()

    graph, _ = graphs.graph_of(block, *IMAGES, *statistics(8))
    assert calls(lower(graph, LoweringTarget(channels_last=True))) == [CONVOLUTION]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folding_costs_no_more_than_the_weights_own_rounding(dtype):
    def block(x, w, z, *stats):
        return (norm(F.conv2d(x, w, padding=1), *stats) + z).relu()

    args = [a.to(dtype) for a in (r(2, 32, 9, 9), r(32, 32, 3, 3) / 17, r(2, 32, 9, 9), *statistics(32))]
    graph, program, constants = program_of(block, *args)
    (found,) = graphs.run_graph(graph, program, constants, args)
    exact = block(*(a.double() for a in args))
    error, eager = ((y.double() - exact).norm() / exact.norm() for y in (found, block(*args)))
    assert error < 1.3 * eager


def used_twice(x, w, z):
    y = F.conv2d(x, w, padding=1)
    return y.relu() * y


SHARED, KIND = "a result before the ReLU has another use", "not images of known sizes, of float32, bfloat16 or float16"


@pytest.mark.parametrize(
    ("reason", "function", "args"),
    [
        (SHARED, used_twice, IMAGES),
        ("what is added has another type", lambda x, w, z: (F.conv2d(x, w, padding=1) + z[:1]).relu(), IMAGES),
        ("it is transposed, or has groups", lambda x, w, z: F.conv2d(x, w[:, :2], groups=2).relu(), IMAGES),
        ("it is transposed, or has groups", lambda x, w, z: F.conv_transpose2d(z, w).relu(), IMAGES),
        (KIND, lambda x, w, z: F.conv2d(x.double(), w.double()).relu(), IMAGES),
        (KIND, lambda x, w, z: F.conv2d(x[:, :1], w[:, :1]).relu(), IMAGES),
        (KIND, lambda x, w, z: F.conv1d(x[:, :, 0], w[:, :, 0]).relu(), IMAGES),
    ],
)
def test_refusals(reason, function, args):
    _, program, _ = program_of(function, *args, RESIDUAL)
    assert calls(program) == [CONVOLUTION]
    assert reasons(program) == [reason]


def test_an_image_that_is_written_to_before_the_relu():
    def step(x, w):
        y = F.conv2d(x, w, padding=1).relu()
        x.add_(1)
        return y

    graph, _ = graphs.graph_of(step, *IMAGES)
    *others, relu = sorted(on_gpu(graph).nodes, key=lambda node: node.target == "aten.relu.default")
    assert others[-1].target == "aten.copy_.default"
    program = lower(dataclasses.replace(graph, nodes=(*others, relu)), GPU)
    assert reasons(program) == ["an argument is written to before the ReLU"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"deterministic": True}, "its results with a ReLU may vary, and deterministic algorithms are on"),
        ({"tf32": False}, "with a ReLU, convolutions of float32 are slower where TF32 is not allowed"),
    ],
)
def test_settings_of_torch(options, reason):
    target = dataclasses.replace(GPU, **options)
    _, program, _ = program_of(lambda x, w: F.conv2d(x, w).relu(), *IMAGES, target=target)
    assert reasons(program) == [reason]


def test_larger_images_than_libraries_count(monkeypatch):
    monkeypatch.setattr(epilogues, "MAX_ELEMENTS", 671)
    _, program, _ = program_of(lambda x, w: F.conv2d(x, w, padding=1).relu(), *IMAGES)
    assert reasons(program) == [KIND]


# ---- products --------------------------------------------------------------------------------------------------------


def narrow(*shape):
    return r(*shape, dtype=torch.bfloat16)


def gelu(x, cubic=0.044715):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + cubic * torch.pow(x, 3.0))))


LINEAR = [narrow(2, 5, 8), narrow(16, 8), narrow(16)]


@pytest.mark.parametrize(
    ("function", "kwargs"),
    [
        (lambda x, w, b: F.linear(x, w, b).relu(), {}),
        (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), {"use_gelu": True}),
        (lambda x, w, b: gelu(F.linear(x, w, b)), {"use_gelu": True}),
        (lambda x, w, b: torch.addmm(b, x[0], w.t(), beta=2, alpha=0.5).relu(), {"beta": 2, "alpha": 0.5}),
    ],
)
def test_an_activation_joins_its_product(function, kwargs):
    assert check(function, *LINEAR, rtol=2e-2, atol=2e-2) == [ACTIVATION]
    _, program, _ = program_of(function, *LINEAR)
    (call,) = (step for step in program.steps if isinstance(step, Extern))
    assert call.kwargs == kwargs
    assert call.out
    assert reasons(program) == [""]


def twice(x, w, b):
    y = torch.addmm(b, x[0], w.t())
    return y.relu() + y


def formula_twice(x, w, b):
    y = torch.addmm(b, x[0], w.t())
    return gelu(y) + y


@pytest.mark.parametrize(
    ("reason", "function"),
    [
        ("", lambda x, w, b: F.gelu(F.linear(x, w, b))),
        ("", lambda x, w, b: gelu(F.linear(x, w, b), 0.05)),
        ("", lambda x, w, b: gelu(x[0]) * torch.addmm(b, x[0], w.t()).mean()),
        ("a result before the activation has another use", twice),
        ("a result before the activation has another use", formula_twice),
        (
            "not a bias for each column, of bfloat16 or float16",
            lambda x, w, b: torch.addmm(b.expand(5, 16), x[0], w.t()).relu(),
        ),
        ("", lambda x, w, b: torch.mm(x[0], w.t()).relu()),
    ],
)
def test_products_without_activation(reason, function):
    _, program, _ = program_of(function, *LINEAR)
    assert calls(program) in ([ADDMM], ["aten.mm.default"])
    assert reasons(program) == [reason]


def test_a_product_whose_operands_are_padded():
    args = [narrow(256, 257), narrow(257, 256), narrow(256)]
    _, program, _ = program_of(lambda x, w, b: torch.addmm(b, x, w).relu(), *args)
    assert calls(program) == ["aten.mm.default"]
    assert reasons(program) == ["its operands are padded"]


def test_a_scaled_product_is_one_call():
    def scaled(b, x, y):
        return torch.baddbmm(b, x, y, beta=0.5, alpha=2)

    args = [narrow(2, 4, 3), narrow(2, 4, 5), narrow(2, 5, 3)]
    assert check(scaled, *args, rtol=2e-2, atol=2e-2) == ["aten.baddbmm.default"]
    assert check(lambda b, x, y: torch.addmm(b, x, y, alpha=3), *(a[0] for a in args), rtol=2e-2, atol=5e-2) == [ADDMM]
