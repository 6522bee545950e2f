"""What a kernel is given in one call, worked out in Python: named sizes, measures, strides, constexprs and grids."""

import pytest
import torch
import triton
import triton.language as tl

import opkit
from opkit.errors import KernelError
from opkit.kernels.facts import Argument, Facts, Output, Shape
from opkit.op.layout.outputs import sizes_of
from opkit.op.triton.binding import bind
from opkit.op.triton.evaluation import TensorInfo
from opkit.op.triton.python import Values, checked, launch_of, packed, shown


def facts(*arguments):
    return Facts("t::f", "t::f(...) -> Tensor", arguments, (Output("out"),))


def tensor(name, shape=None, **options):
    return Argument(name, "tensor", shape=shape, **options)


def launch(function, given, operands, *, config=None, **options):
    out = torch.empty_like(next(value for value in operands if isinstance(value, torch.Tensor)))
    bound = bind(opkit.triton_kernel(function, **{"grid": 1, **options}), given)
    return launch_of(Values(bound, operands, [out]), config)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_named_sizes():
    for shape, sizes, named in (
        (Shape(("m", "n")), (3, 4), {"m": 3, "n": 4}),
        (Shape((), "batch", ("d",)), (2, 3, 4), {"batch": 6, "d": 4}),
        (Shape((), "batch", ("d",)), (4,), {"batch": 1, "d": 4}),
        (Shape(("b",), "rest", ("h", "d")), (2, 3, 5, 7, 11), {"b": 2, "rest": 15, "h": 7, "d": 11}),
        (Shape(("b",), "", ("d",)), (2, 3, 4), {"b": 2, "d": 4}),
        (Shape(("b", 3, None)), (2, 3, 4), {"b": 2}),
        (Shape((), "all"), (2, 0, 3), {"all": 0}),
        (Shape((), "all"), (), {"all": 1}),
        (None, (2, 3), {}),
    ):
        assert sizes_of(facts(tensor("x", shape)), [torch.empty(sizes)]) == named, (shape, sizes)


def test_the_first_tensor_that_has_a_size_names_it():
    given = facts(tensor("mask", Shape(("n",)), optional=True), tensor("x", Shape(("n", "m"))))
    assert sizes_of(given, [None, torch.empty(3, 4)]) == {"n": 3, "m": 4}


def test_a_size_of_a_tensor_that_is_not_there_is_zero():
    @triton.jit
    def kernel(x, out, m):
        pass

    given = facts(tensor("x", Shape(("n",))), tensor("mask", Shape(("m",)), optional=True))
    assert launch(kernel, given, [torch.ones(3), None]).arguments["m"] == 0


# ---- measures --------------------------------------------------------------------------------------------------------


@triton.jit
def measured(
    x,
    out,
    x_numel,
    x_rank,
    x_size_0,
    x_size_m1,
    x_stride_0,
    x_stride_m1,
    x_stride_m3,
    x_size_m3,
    mask_numel,
    mask_size_0,
):
    pass


def test_measures():
    x = torch.randn(6, 8).t()
    arguments = launch(measured, facts(tensor("x"), tensor("mask", optional=True)), [x, None]).arguments
    assert arguments["x"] is x
    del arguments["x"], arguments["out"]
    assert arguments == {
        "x_numel": 48,
        "x_rank": 2,
        "x_size_0": 8,
        "x_size_m1": 6,
        "x_stride_0": 1,
        "x_stride_m1": 8,
        "x_stride_m3": 0,  # a leading dimension that it does not have
        "x_size_m3": 1,
        "mask_numel": 0,
        "mask_size_0": 0,
    }


def test_a_dimension_that_a_tensor_does_not_have():
    @triton.jit
    def kernel(x, out, x_size_2):
        pass

    with pytest.raises(KernelError, match="x_size_2 asks for dimension 2 of a tensor that has 2"):
        launch(kernel, facts(tensor("x")), [torch.ones(2, 2)])


def test_how_functions_see_values():
    assert shown(torch.ones(2, 3, dtype=torch.bfloat16)) == TensorInfo("bfloat16", (2, 3), (3, 1))
    assert shown(torch.float16) == "float16"
    assert shown([1, 2]) == (1, 2)
    assert shown(None) is None
    assert shown(2.5) == 2.5


# ---- launches --------------------------------------------------------------------------------------------------------


@triton.jit
def blocked(x, out, n, HALF: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    pass


def test_constants_functions_configs_and_options():
    given = facts(tensor("x"), Argument("kind", "str"))
    made = launch(
        blocked,
        given,
        [torch.ones(100), "fast"],
        config={"BLOCK": 32, "num_warps": 2},
        grid=lambda n, HALF: (triton.cdiv(n, HALF), 2),
        n=lambda x: x.numel,
        HALF=lambda BLOCK: BLOCK // 2,
        num_stages=lambda HALF: HALF // 8,
        configs=[{"BLOCK": 32, "num_warps": 2}],
        bind={"KIND": "kind"},
    )
    assert {k: v for k, v in made.arguments.items() if k not in ("x", "out")} == {
        "n": 100,
        "HALF": 16,
        "BLOCK": 32,
        "KIND": "fast",
    }
    assert made.options == {"num_warps": 2, "num_stages": 2}
    assert made.grid == (7, 2, 1)


def test_an_empty_grid_leaves_an_output_unwritten():
    given = facts(tensor("x"))

    @triton.jit
    def kernel(x, out):
        pass

    bound = bind(opkit.triton_kernel(kernel, grid=lambda x: x.numel // 8), given)
    for size, fails in ((4, True), (0, False), (8, False)):
        x = torch.ones(size)
        values = Values(bound, [x], [torch.empty_like(x)])
        if fails:
            with pytest.raises(
                KernelError, match=r"its grid \(0, 1, 1\) is empty, so that its output would be left unwritten"
            ):
                checked(values, launch_of(values))
        else:
            checked(values, launch_of(values))


def test_a_descriptor_of_another_shape():
    pytest.importorskip("triton.tools.tensor_descriptor")

    @triton.jit
    def kernel(x_desc, out):
        pass

    made = launch(
        kernel,
        facts(tensor("x", Shape((), "batch", ("d",)))),
        [torch.ones(2, 3, 8)],
        x_desc=opkit.tensor_descriptor("x", block=lambda d: (4, d), shape=lambda batch, d: (batch, d)),
    )
    descriptor = made.arguments["x_desc"]
    assert (list(descriptor.shape), list(descriptor.strides), descriptor.block_shape) == ([6, 8], [8, 1], [4, 8])


# ---- strides ---------------------------------------------------------------------------------------------------------


def test_which_strides_follow_from_those_that_are_told():
    for sizes, strides, told, expected in (
        ((), (), (), True),
        ((4,), (1,), (), True),
        ((4,), (2,), (), False),
        ((4,), (2,), (0,), True),
        ((4,), (2,), (-1,), True),
        ((2, 3), (3, 1), (), True),
        ((2, 3), (1, 2), (), False),
        ((2, 3), (1, 2), (0, 1), True),
        ((2, 3), (5, 1), (), False),
        ((2, 3), (5, 1), (0,), True),
        ((2, 3), (5, 1), (-2,), True),
        ((2, 3), (5, 2), (0,), False),
        ((2, 3, 4), (15, 5, 1), (-2,), True),  # rows apart, and the matrices around them without gaps
        ((2, 3, 4), (20, 5, 1), (-2,), False),
        ((2, 3, 4), (20, 5, 1), (0, 1), True),
        ((2, 1, 4), (4, 77, 1), (), True),  # a size of 1 lies anyhow
        ((1, 3), (99, 1), (), True),
        ((2, 3), (0, 1), (), False),
        ((2, 3), (0, 1), (0,), True),
        ((2, 3), (3, 1), (5, -7), True),  # dimensions that it does not have
    ):
        x = torch.empty(200).as_strided(sizes, strides)
        assert packed(x, told) is expected, (sizes, strides, told)
        assert not packed(x, told) or packed(x, (*told, *range(x.dim()))), (sizes, strides, told)
