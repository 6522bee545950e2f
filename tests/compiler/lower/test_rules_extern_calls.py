"""Products, attention and convolutions: which operators are called, on operands of which type and layout."""

import pytest
import torch
from torch.nn import functional as F

from opkit.compiler.ir.program import Compute, Extern
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.target import LoweringTarget
from tests.compiler import graphs

WIDE = LoweringTarget(narrow_products=False, channels_last=True)
NATIVE = LoweringTarget(narrow_products=True, channels_last=True)
OWN = LoweringTarget(channels_last=True, own_products=True, mkl_convolutions=True)


def r(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def narrow(*shape):
    return r(*shape, dtype=torch.bfloat16)


def check(function, *args, target=WIDE, **tolerances):
    """The program of a function, once it was found to give what eager gives."""
    graph, constants = graphs.graph_of(function, *args)
    program = lower(graph, target)
    found = graphs.run_graph(graph, program, constants, [a.clone() for a in args])
    expected = function(*args)
    for x, y in zip(found, expected if isinstance(expected, list | tuple) else [expected], strict=True):
        graphs.same(x, y, **tolerances)
    return program


def calls(program):
    return [step for step in program.steps if isinstance(step, Extern)]


def dtypes(program, call):
    return {program.buffers[a.buffer].dtype for a in call.args if hasattr(a, "buffer")}


def linear(x, w, b):
    return torch.addmm(b, x, w.t()).relu()


def test_a_bias_joins_what_comes_after():
    program = check(linear, r(4, 5), r(6, 5), r(6))
    assert [call.target for call in calls(program)] == ["aten.mm.default"]


@pytest.mark.parametrize(("target", "dtype"), [(WIDE, "f32"), (NATIVE, "bf16")])
def test_narrow_products_are_wide_where_the_processor_has_none(target, dtype):
    program = check(linear, narrow(4, 5), narrow(6, 5), narrow(6), target=target, rtol=2e-2, atol=5e-2)
    (call,) = calls(program)
    assert dtypes(program, call) == {dtype}
    assert call.out


def test_a_product_of_nothing_may_have_operands_of_different_dtypes():
    """Its result has the dtype that torch chooses, so torch allocates it."""
    products = (
        (torch.bmm, r(2, 2, 0).double(), r(2, 0, 2)),
        (torch.baddbmm, r(2, 2, 2), r(2, 2, 0), r(2, 0, 2).double()),
    )
    assert not any(call.out for product in products for call in calls(check(*product)))


def test_an_operand_is_widened_as_it_lies():
    program = check(linear, narrow(4, 5), narrow(6, 5), narrow(6), rtol=2e-2, atol=5e-2)
    (call,) = calls(program)
    assert [s.constant for s in call.args[1].strides] == [1, 5]


def test_batches():
    check(torch.bmm, r(2, 4, 5), r(2, 5, 3))
    check(lambda b, x, y: torch.baddbmm(b, x, y), r(2, 4, 3), r(2, 4, 5), r(2, 5, 3))
    check(torch.bmm, narrow(2, 4, 5), narrow(2, 5, 3), rtol=2e-2, atol=5e-2)


def test_what_the_rules_refuse_is_called_as_it_is():
    program = check(lambda b, x, y: torch.addmm(b, x, y, beta=2), r(3), r(4, 5), r(5, 3))
    assert [call.target for call in calls(program)] == ["aten.addmm.default"]
    i = torch.arange(12).reshape(3, 4)
    check(lambda b, x, y: torch.addmm(b, x, y), torch.arange(3), i, i.t().contiguous())


@pytest.mark.parametrize("make", [r, narrow])
def test_attention(make):
    def attention(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    program = check(attention, make(1, 2, 4, 8), make(1, 2, 5, 8), make(1, 2, 5, 8), rtol=2e-2, atol=2e-2)
    assert dtypes(program, calls(program)[0]) == {"f32"}


@pytest.mark.parametrize("make", [r, narrow])
def test_a_chain_of_convolutions_has_its_channels_innermost(make):
    def chain(x, w, b, v):
        return F.conv2d(F.conv2d(x, w, b, padding=1).relu(), v, stride=2)

    program = check(chain, make(2, 4, 5, 6), make(8, 4, 3, 3), make(8), make(3, 8, 2, 2), rtol=2e-2, atol=0.1)
    strides = [[s.constant for s in call.args[0].strides] for call in calls(program)]
    assert strides == [[120, 1, 24, 4], [240, 1, 48, 8]]
    copies = [s for s in program.steps if isinstance(s, Compute) and s.body.op == "load"]
    assert len(copies) == (
        2 if make is r else 1
    )  # the image, unless that is widened, and the result as eager lays it out


def test_the_gradients_of_a_convolution():
    def backward(g, x, w):
        settings = ([6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return list(torch.ops.aten.convolution_backward(g, x, w, *settings, [True, True, True]))

    check(backward, r(2, 6, 5, 5), r(2, 4, 5, 5), r(6, 4, 3, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "kernel", "layout"), [(3, 3, (2304, 9, 3, 1)), (12, 3, (36864, 1, 3072, 256)), (3, 1, (2304, 1, 768, 256))]
)
def test_torch_does_not_copy_a_large_weight_to_the_layout_of_small_images(size, kernel, layout):
    def backward(g, x, w):
        settings = ([64], [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        return list(torch.ops.aten.convolution_backward(g, x, w, *settings, [True, True, True]))

    x, w = r(2, 256, size, size), r(64, 256, kernel, kernel)
    limits = {"rtol": 1e-3, "atol": 1e-3}
    programs = [
        check(lambda x, w: F.conv2d(x, w, padding=kernel // 2), x, w, **limits),
        check(backward, r(2, 64, size, size), x, w, **limits),
    ]
    for program, argument in zip(programs, (0, 1), strict=True):
        (call,) = calls(program)
        assert tuple(s.constant for s in call.args[argument].strides) == layout


@pytest.mark.parametrize("settings", [([1, 1], [1, 1], [1, 1]), ([2, 1], [2, 0], [1, 2])])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_with_few_places_and_many_channels_is_products(settings, layout):
    settings = (*settings, False, [0, 0], 1)

    def forward(x, w, bias):
        return torch.ops.aten.convolution(x, w, bias, *settings)

    def backward(g, x, w):
        return list(torch.ops.aten.convolution_backward(g, x, w, [80], *settings, [True, True, True]))

    x, w, bias = r(1, 3, 2, 3).to(memory_format=layout), r(80, 3, 3, 2), r(80)
    g = torch.randn_like(forward(x, w, bias)).to(memory_format=layout)
    for function, args, count in ((forward, (x, w, bias), 1), (backward, (g, x, w), 2)):
        program = check(function, *args, rtol=1e-4, atol=1e-4)
        assert [call.target for call in calls(program)] == ["aten.mm.default"] * count


def test_a_convolution_with_as_many_places_as_channels_is_called():
    program = check(lambda x, w: F.conv2d(x, w, padding=1), r(1, 3, 5, 5), r(25, 3, 3, 3), rtol=1e-4, atol=1e-4)
    assert [call.target for call in calls(program)] == ["aten.convolution.default"]


def forward_and_backward(x, w, *settings, target):
    """The operators that a convolution and its derivatives call."""
    stride, padding, groups = settings
    settings = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)

    def backward(g, x, w):
        return list(torch.ops.aten.convolution_backward(g, x, w, [len(w)], *settings, [True, True, True]))

    def forward(x, w):
        return torch.ops.aten.convolution(x, w, None, *settings)

    g = torch.randn_like(forward(x, w))
    programs = (
        check(each, *args, target=target, rtol=1e-3, atol=1e-3)
        for each, *args in ((forward, x, w), (backward, g, x, w))
    )
    return [[call.target.split(".")[1] for call in calls(program)] for program in programs]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 3])
def test_convolutions_with_one_tap_are_products_where_these_are_faster(batch, layout):
    x, w = (each.to(memory_format=layout) for each in (r(batch, 64, 8, 9), r(65, 64, 1, 1)))
    assert forward_and_backward(x, w, 1, 0, 1, target=OWN) == [["mm"], ["mm", "mm"]]
    assert forward_and_backward(x, w, 1, 0, 1, target=NATIVE) == [["convolution"], ["convolution_backward"]]


WINOGRAD = {
    "plain": ((2, 32, 12, 11), (48, 32, 3, 3), (1, 1, 1)),
    "no padding": ((2, 32, 14, 13), (32, 32, 3, 3), (1, 0, 1)),
    "wide padding": ((1, 32, 15, 14), (32, 32, 3, 3), (1, 2, 1)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("x", "w", "settings"), WINOGRAD.values(), ids=WINOGRAD)
def test_convolutions_by_winograds_method(x, w, settings, layout):
    x, w = (r(*each).to(memory_format=layout) for each in (x, w))
    assert forward_and_backward(x, w, *settings, target=OWN) == [["winograd"], ["convolution_backward", "winograd"]]
    assert forward_and_backward(x, w, *settings, target=NATIVE) == [["convolution"], ["convolution_backward"]]


CALLED = {
    "one tap, stride": ((2, 64, 8, 9), (65, 64, 1, 1), (2, 0, 1)),
    "one tap, padding": ((2, 64, 8, 9), (65, 64, 1, 1), (1, 1, 1)),
    "one tap, groups": ((2, 128, 8, 9), (66, 64, 1, 1), (1, 0, 2)),
    "one tap, few channels": ((2, 63, 8, 9), (65, 63, 1, 1), (1, 0, 1)),
    "one tap, few places": ((2, 64, 5, 5), (65, 64, 1, 1), (1, 0, 1)),
    "one tap, many images": ((16, 64, 8, 9), (65, 64, 1, 1), (1, 0, 1)),
    "3 x 3, stride": ((2, 32, 24, 24), (32, 32, 3, 3), (2, 1, 1)),
    "3 x 3, groups": ((2, 64, 12, 12), (64, 32, 3, 3), (1, 1, 2)),
    "3 x 3, channels": ((2, 32, 12, 12), (36, 32, 3, 3), (1, 1, 1)),
    "3 x 3, few channels": ((2, 16, 12, 12), (32, 16, 3, 3), (1, 1, 1)),
    "3 x 3, few tiles": ((2, 32, 10, 10), (32, 32, 3, 3), (1, 1, 1)),
    "3 x 3, padding": ((2, 32, 12, 12), (32, 32, 3, 3), (1, 3, 1)),
    "3 x 5": ((2, 32, 12, 12), (32, 32, 3, 5), (1, 1, 1)),
}


@pytest.mark.parametrize(("x", "w", "settings"), CALLED.values(), ids=CALLED)
def test_other_convolutions_are_called(x, w, settings):
    assert forward_and_backward(r(*x), r(*w), *settings, target=OWN) == [["convolution"], ["convolution_backward"]]


def test_what_is_computed_from_a_convolution_that_is_a_product_has_its_layout():
    program = check(
        lambda x, w: F.conv2d(x, w).relu() + 1, r(2, 64, 8, 9), r(64, 64, 1, 1), target=OWN, rtol=1e-3, atol=1e-3
    )
    made = (buffer for buffer in program.buffers.values() if len(buffer.shape) == 4 and buffer.role == "made")
    assert (4608, 1, 576, 64) in [tuple(s.constant for s in buffer.strides) for buffer in made]


@pytest.mark.parametrize("image", [True, False])
def test_the_weight_of_a_depthwise_convolution_with_a_large_window_has_its_gradient_from_a_kernel(image):
    settings = ([16], [2, 1], [3, 2], [1, 2], False, [0, 0], 16)

    def backward(g, x, w):
        found = torch.ops.aten.convolution_backward(g, x, w, *settings, [image, True, True])
        return [each for each in found if each is not None]

    x, w = r(2, 16, 9, 8), r(16, 1, 6, 3)
    g = torch.ops.aten.convolution(x, w, None, *settings[1:])
    program = check(backward, torch.randn_like(g), x, w, rtol=1e-4, atol=1e-4)
    assert [call.args[-1] for call in calls(program)] == [[True, False, False]] * image


def test_other_convolutions_are_called_as_they_are():
    for function, *args in (
        (lambda x, w: F.conv1d(x, w), r(2, 4, 7), r(3, 4, 3)),
        (lambda x, w: F.conv_transpose2d(x, w), r(2, 4, 5, 5), r(4, 3, 2, 2)),
        (lambda x, w: F.conv2d(x, w), r(2, 1, 5, 5), r(3, 1, 2, 2)),
    ):
        program = check(function, *args, rtol=1e-4, atol=1e-5)
        assert [call.target for call in calls(program)] == ["aten.convolution.default"]


# ---- padded sizes ----------------------------------------------------------------------------------------------------

PADDED = LoweringTarget(product_alignment=8)


@pytest.mark.parametrize(
    ("function", "shapes", "padded"),
    [
        (torch.mm, ((300, 513), (513, 256)), [(300, 520), (520, 256)]),
        (lambda x, y: torch.mm(x + 1, y.t()), ((300, 513), (257, 513)), [(300, 520), (520, 264)]),
        (lambda x, y: torch.mm(x.t(), y), ((512, 300), (512, 256)), [(304, 512), (512, 256)]),
        (torch.mm, ((300, 512), (512, 256)), [(300, 512), (512, 256)]),
        (lambda x, y: torch.bmm(x.sin(), y), ((2, 256, 513), (2, 513, 256)), [(2, 256, 520), (2, 520, 256)]),
        (torch.mm, ((304, 512), (512, 256)), [(304, 512), (512, 256)]),
        (torch.mm, ((300, 513), (513, 8)), [(300, 513), (513, 8)]),  # too small
        (torch.mm, ((8, 513), (513, 256)), [(8, 513), (513, 256)]),
    ],
)
def test_sizes_of_large_narrow_products_are_padded(function, shapes, padded):
    program = check(function, *(narrow(*shape) for shape in shapes), target=PADDED, rtol=2e-2, atol=0.5)
    (call,) = calls(program)
    assert [tuple(n.constant for n in each.shape) for each in call.args] == padded


def test_a_padded_operand_is_laid_out_as_it_was():
    program = check(
        lambda x, y: torch.mm(x, y.t()), narrow(256, 256), narrow(257, 256), target=PADDED, rtol=2e-2, atol=0.5
    )
    (call,) = calls(program)
    assert [s.constant for s in call.args[1].strides] == [1, 256]


def test_two_products_share_a_padded_operand():
    def gradients(grad, x, w):
        grad = grad.sin()
        return torch.mm(grad, w), torch.mm(grad.t(), x)

    arguments = narrow(264, 513) / 8, narrow(264, 256), narrow(513, 256)
    program = check(gradients, *arguments, target=PADDED, rtol=2e-2, atol=0.5)
    one, two = calls(program)
    assert one.args[0].buffer == two.args[0].buffer
    assert sum(isinstance(step, Compute) for step in program.steps) <= 4  # sin, and each operand


def test_a_bias_is_added_to_a_padded_product():
    program = check(
        torch.addmm, narrow(257), narrow(256, 256) / 8, narrow(256, 257), target=PADDED, rtol=3e-2, atol=0.5
    )
    assert [call.target for call in calls(program)] == ["aten.mm.default"]


def test_infinities_and_nans_stay_in_their_rows():
    x = narrow(300, 513)
    x[7, 3], x[9, 512] = float("inf"), float("nan")
    check(torch.mm, x, narrow(513, 256).abs() + 1, target=PADDED, rtol=2e-2, atol=1.0)
