"""Calls through the launcher: what a miss makes of them, and which calls it serves afterwards. The driver is a fake."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from jaxtyping import Shaped
from torch import Tensor

import opkit
from opkit.op.triton import variants
from opkit.op.triton.launcher_table import Launching


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def nothing(x, y, out, n):
    pass


@triton.jit
def scale(x, out, a, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def increment(x, n):
    pass


@triton.jit
def strided(x, out, x_stride_0, x_stride_m1):
    pass


@triton.jit
def biased(x, bias, out, n):
    pass


def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def times(x: Tensor, a: float) -> Tensor:
    return x * a


def upwards(x: Tensor) -> None:
    x += 1


def same(x: Tensor) -> Tensor:
    return x.clone()


def rows(x: Shaped[Tensor, "m n"]) -> Shaped[Tensor, "m n"]:
    return x.clone()


def by_blocks(n, BLOCK):
    return triton.cdiv(n, BLOCK)


def adding(**options):
    return opkit.triton_kernel(add, **{"grid": by_blocks, "n": lambda out: out.numel, "BLOCK": 64, **options})


def known_size(**options):
    """The same by a size that is no constexpr and in no formula but the grid."""
    return opkit.triton_kernel(add, bind={"n": "x_numel"}, **{"grid": 1, "BLOCK": 64, **options})


def parameters(row):
    return [int.from_bytes(bytes.fromhex(part), "little") for part in row[-1].split()]


# ---- hits and misses -------------------------------------------------------------------------------------------------


def test_calls_of_one_kind_miss_once(device):
    asked = []
    op = device.define(plus, known_size(grid=lambda: asked.append("grid") or 1))
    for size in (32, 48, 4096):
        x, y = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(op(x, y), x + y)
    assert asked == ["grid"]
    assert len(device.requests) == 1
    assert device.requests[0].divisible == {"x", "y", "out", "n"}
    assert [parameters(row)[3] for row in device.launches] == [32, 48, 4096]


def test_each_class_of_a_size_has_a_variant_of_its_own(device):
    op = device.define(plus, known_size())
    for size in (32, 33, 1, 64, 65):
        x, y = torch.randn(size), torch.randn(size)
        op(x, y)
    assert [request.signature["n"] for request in device.requests] == ["i32", "i32", "constexpr"]
    assert ["n" in request.divisible for request in device.requests] == [True, False, False]
    assert device.requests[2].constexprs["n"] == 1


def test_dtypes_have_variants_of_their_own(device):
    op = device.define(plus, opkit.triton_kernel(nothing, grid=1, bind={"n": "x_numel"}))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        op(torch.ones(32, dtype=dtype), torch.ones(32, dtype=dtype))
    assert [request.signature["x"] for request in device.requests] == ["*fp32", "*bf16", "*fp64"]


def test_misaligned_views_have_a_variant_of_their_own(device):
    op = device.define(plus, known_size())
    room, y = torch.randn(65), torch.randn(64)
    for x in (room[:64], room[1:], room[:64], room[1:]):
        torch.testing.assert_close(op(x, y), x + y)
    assert ["x" in request.divisible for request in device.requests] == [True, False]


def test_a_new_size_of_a_known_variant_compiles_nothing(device):
    op = device.define(plus, adding())
    for size in (128, 256, 1024, 128):
        x, y = torch.randn(size), torch.randn(size)
        torch.testing.assert_close(op(x, y), x + y)
    assert device.grids == ["2,1,1", "4,1,1", "16,1,1", "2,1,1"]
    assert len(device.requests) == 1


def test_computed_numbers_are_passed_on(device):
    op = device.define(times, opkit.triton_kernel(scale, grid=1, n=lambda x: x.shape[0], a=lambda a: a * 2, BLOCK=64))
    x = torch.randn(50)
    torch.testing.assert_close(op(x, 1.5), x * 3)
    torch.testing.assert_close(op(x, -2.0), x * -4)
    assert len(device.requests) == 1


def test_formulas_are_not_asked_again_for_another_float_that_none_asks_for(device):
    asked = []
    grid = lambda x: asked.append(x.numel) or 1  # noqa: E731
    op = device.define(times, opkit.triton_kernel(scale, grid=grid, bind={"n": "x_numel"}, BLOCK=64))
    x = torch.randn(50)
    for a in (1.5, -2.0, 1.0):
        torch.testing.assert_close(op(x, a), x * a)
    assert asked == [50]


def test_constexprs_have_variants_of_their_own(device):
    op = device.define(plus, adding(BLOCK=lambda x: 64 if x.numel < 200 else 128))
    for size in (100, 150, 300):
        op(torch.ones(size), torch.ones(size))
    assert [request.constexprs["BLOCK"] for request in device.requests] == [64, 128]


def test_options_are_the_compilers(device):
    op = device.define(plus, adding(num_warps=lambda x: 8 if x.numel > 100 else 2, num_stages=3))
    op(torch.ones(50), torch.ones(50))
    op(torch.ones(500), torch.ones(500))
    assert [request.options for request in device.requests] == [
        {"num_warps": 2, "num_stages": 3},
        {"num_warps": 8, "num_stages": 3},
    ]


def test_none_is_a_null_pointer_and_a_variant(device):
    def op(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.clone() if bias is None else x + bias

    defined = device.define(op, opkit.triton_kernel(biased, grid=1, bind={"n": "x_numel"}))
    x = torch.randn(64)
    with opkit.use_kernel(defined, "biased"):
        defined(x)
        defined(x, x)
    assert [request.signature["bias"] for request in device.requests] == ["constexpr", "*fp32"]
    assert device.requests[0].constexprs["bias"] is None


# ---- how tensors lie -------------------------------------------------------------------------------------------------


def test_what_the_kernel_is_not_told_is_made_contiguous(device):
    op = device.define(plus, known_size())
    x, y = torch.randn(8, 6).t(), torch.randn(6, 16)[:, ::2]
    torch.testing.assert_close(op(x, y).contiguous(), x + y)


def test_strides_that_the_kernel_is_told_are_taken(device):
    op = device.define(rows, opkit.triton_kernel(strided, grid=1))
    x = torch.randn(10, 20)[:, ::2]
    op(x)
    address, _, first, last = parameters(device.launches[0])[:4]
    assert (address, first, last) == (x.data_ptr(), 20, 2)


def test_what_is_written_is_copied_back(device):
    op = device.define(upwards, opkit.triton_kernel(increment, grid=1, bind={"n": "x_numel"}), mutates_args=("x",))
    x = torch.zeros(4, 4)
    op(x[:, ::2])
    assert x.tolist() == [[1.0, 0.0, 1.0, 0.0]] * 4


# ---- grids -----------------------------------------------------------------------------------------------------------


def test_an_empty_tensor_asks_for_no_grid(device):
    op = device.define(plus, adding())
    assert op(torch.ones(0, 3), torch.ones(0, 3)).shape == (0, 3)
    assert not device.launches


def test_a_grid_of_nothing_is_an_error_where_an_output_would_stay_unwritten(device):
    op = device.define(plus, adding(grid=lambda n: n // 64), name="triton_launching::nothing")
    x = torch.ones(10)
    with pytest.raises(
        RuntimeError, match=r"triton_launching::nothing .*its grid \(0, 1, 1\) is empty, so out would be"
    ):
        op(x, x)


def test_grids_beyond_the_hardware_are_launched_in_pieces(device):
    op = device.define(plus, adding(grid=lambda n: (1, n)))
    x = torch.ones(70_000)
    op(x, x)
    assert device.grids == ["1,65535,1", "1,4465,1"]
    assert device.requests[0].offsets
    assert [parameters(row)[4:10] for row in device.launches] == [[0, 0, 0, 1, 70_000, 1], [0, 65_535, 0, 1, 70_000, 1]]
    op(x[:100], x[:100])
    assert [request.offsets for request in device.requests] == [True, False]
    op(torch.ones(80_000), torch.ones(80_000))
    assert len(device.requests) == 2
    assert device.grids[-2:] == ["1,65535,1", "1,14465,1"]


def test_what_is_no_grid(device):
    for said, grids in (
        ("one, two or three integers", ((1, 2, 3, 4), (), 2.5, "3", None)),
        ("cannot be negative", (-1, (2, -1))),
    ):
        for grid in grids:
            op = device.define(plus, adding(grid=lambda n, grid=grid: grid))
            with pytest.raises(RuntimeError, match=f"grid gave .*{said}"):
                pytest.fail(f"{grid!r} is a grid: {op(torch.ones(3), torch.ones(3))}")


def test_an_exception_in_a_grid_function_says_where_and_on_what(device):
    def broken(n):
        raise ZeroDivisionError("no programs")

    op = device.define(plus, adding(grid=broken), name="triton_launching::broken")
    message = (
        r"triton_launching::broken.*the function for grid \(.*test_launching.py:\d+\) failed on n=3: ZeroDivisionError"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            op(torch.ones(3), torch.ones(3))


# ---- 64 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "wide"), [(2**31 - 2, False), (2**31 - 1, True)])
def test_offsets_beyond_32_bits_have_a_wide_variant(device, last, wide):
    op = device.define(rows, opkit.triton_kernel(strided, grid=1))
    room = torch.empty(2**31 + 1, dtype=torch.int8)  # whose pages nobody touches
    op(room.as_strided((2, 1), (last, 1)))
    assert [request.wide for request in device.requests] == [wide]
    assert device.requests[0].signature["x_stride_0"] == ("i64" if wide else "i32")
    assert parameters(device.launches[0])[2] == last


def test_integers_of_a_wide_variant_have_64_bits(device):
    op = device.define(rows, opkit.triton_kernel(strided, grid=1, bind={"x_stride_m1": "n"}))
    op(torch.empty(2**31 + 1, dtype=torch.int8).as_strided((2, 3), (2**31 - 2, 1)))
    op(torch.empty(64, dtype=torch.int8).as_strided((2, 3), (32, 1)))
    assert [request.signature["x_stride_m1"] for request in device.requests] == ["i64", "i32"]


def test_an_integer_beyond_32_bits_is_passed_whole(device):
    def op(x: Tensor, y: int) -> Tensor:
        return x.clone()

    defined = device.define(op, opkit.triton_kernel(biased, grid=1, bind={"bias": "y", "n": "x_numel"}))
    x = torch.ones(3)
    for y in (7, 2**31, -(2**31), 2**62 + 1):
        defined(x, y)
    assert [request.signature["bias"] for request in device.requests] == ["i32", "i64", "i32", "i64"]
    assert not any(request.wide for request in device.requests)
    assert [parameters(row)[1] for row in device.launches] == [7, 2**31, 2**31, 2**62 + 1]


# ---- life ------------------------------------------------------------------------------------------------------------


def test_an_operator_is_removed_and_defined_again(device):
    for round_ in range(3):
        op = device.define(plus, adding(BLOCK=64 << round_), name="triton_launching::again")
        x = torch.randn(200)
        torch.testing.assert_close(op(x, x), x + x)
        opkit.remove(op.name)
    assert [request.constexprs["BLOCK"] for request in device.requests] == [64, 128, 256]


def test_functions_of_kernels_are_used_again(device):
    """There are 1,024 of them in the pool, so more kernels than that one after another need those that are gone."""
    op = device.define(plus, adding())
    bound = op._operator.kernels.kernels[0].function.bound
    for _ in range(1100):
        Launching(bound, variants.MACHINES["cpu"]).library()
    x = torch.randn(100)
    torch.testing.assert_close(op(x, x), x + x)


def test_more_shared_memory_than_the_gpu_has(device):
    device.shared = 300_000
    op = device.define(plus, adding())
    with pytest.raises(
        RuntimeError, match=f"needs 300000 bytes of shared memory, and {re.escape('a GPU that is none')} has"
    ):
        op(torch.ones(3), torch.ones(3))


def test_a_kernel_for_other_architectures(device):
    op = device.define(plus, adding(targets=("gfx942",)))
    with pytest.raises(RuntimeError, match=r"it is for gfx942, and this GPU is sm_90"):
        op(torch.ones(3), torch.ones(3))


def test_the_drivers_errors_name_the_operator(device):
    op = device.define(plus, adding(), name="triton_launching::refused")
    device.fake.fail("cuLaunchKernel", 701)
    with pytest.raises(RuntimeError, match=r"triton_launching::refused .*LAUNCH_OUT_OF_RESOURCES"):
        op(torch.ones(3), torch.ones(3))


def test_what_is_to_be_zero_is_zeroed_before_each_launch(device):
    op = device.define(plus, adding(reset_to_zero=("out",)))
    for _ in range(2):
        op(torch.ones(100), torch.ones(100))
    assert [row[1] for row in device.fake.noted("fill")] == ["400", "400"]
