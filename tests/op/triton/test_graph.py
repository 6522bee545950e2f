"""What torch.compile sees of Triton kernels: programs are captured after AOTAutograd, for a GPU that is none."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit
def add_into(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


def by_blocks(n, BLOCK):
    return triton.cdiv(n, BLOCK)


def adding(**options):
    return opkit.triton_kernel(add, **{"grid": by_blocks, "n": lambda out: out.numel, "BLOCK": 64, **options})


def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y


# ---- what is visible -------------------------------------------------------------------------------------------------


def test_a_launch_takes_the_operators_place(device, captured):
    op = device.define(plus, adding())
    x = torch.randn(100)
    captured.compiled(lambda x, y: op(x * 2, y) + 1)(x, x)
    (launch,) = captured.launches
    assert captured.kernels == [add]
    assert launch.kwargs["grid"] == [(2, 1, 1)]
    assert captured.constants(launch)["n"] == 100
    assert captured.constants(launch)["BLOCK"] == 64
    assert launch.kwargs["tensors_to_clone"] == ["out"]
    assert not captured.calls_of(op)
    assert not device.launches


def test_options_are_recorded(device, captured):
    op = device.define(plus, adding(num_warps=8, num_stages=lambda n: 1 if n < 10 else 3))
    captured.compiled(op)(torch.randn(100), torch.randn(100))
    (recorded,) = captured.kernels
    assert [(config.num_warps, config.num_stages) for config in recorded.configs] == [(8, 3)]


def test_configs_are_left_to_inductor(device, captured):
    configs = [{"BLOCK": 32, "num_warps": 2}, triton.Config({"BLOCK": 64}, num_warps=4), {"BLOCK": 128, "num_warps": 8}]
    kernel = opkit.triton_kernel(add, grid=by_blocks, n=lambda out: out.numel, configs=configs)
    op = device.define(plus, kernel)
    captured.compiled(op)(torch.randn(100), torch.randn(100))
    (launch,) = captured.launches
    (tuner,) = captured.kernels
    assert [config.kwargs for config in tuner.configs] == [{"BLOCK": 32}, {"BLOCK": 64}, {"BLOCK": 128}]
    assert [config.num_warps for config in tuner.configs] == [2, 4, 8]
    assert launch.kwargs["grid"] == [(4, 1, 1), (2, 1, 1), (1, 1, 1)]


def test_configs_that_are_pruned_are_not_shown(device, captured):
    kernel = opkit.triton_kernel(
        add, grid=by_blocks, n=lambda out: out.numel, configs=[{"BLOCK": 32}, {"BLOCK": 64}, {"BLOCK": 128}],
        prune=lambda configs, x: [c for c in configs if c["BLOCK"] < x.numel],
    )  # fmt: skip
    op = device.define(plus, kernel)
    captured.compiled(op)(torch.randn(100), torch.randn(100))
    assert [config.kwargs for config in captured.kernels[0].configs] == [{"BLOCK": 32}, {"BLOCK": 64}]


def test_a_config_that_was_found_to_be_the_fastest_is_the_one(device, captured):
    kernel = opkit.triton_kernel(
        add, grid=by_blocks, n=lambda out: out.numel, configs=[{"BLOCK": 32}, {"BLOCK": 64}, {"BLOCK": 128}]
    )
    op = device.define(plus, kernel)
    op(torch.randn(100), torch.randn(100))  # which times them, and launches with the fastest at the end
    captured.compiled(op)(torch.randn(100), torch.randn(100))
    (launch,) = captured.launches
    assert launch.kwargs["grid"] == [tuple(map(int, device.grids[-1].split(",")))]


def test_several_launches(device, captured):
    kernel = adding()

    def twice(x: Tensor, y: Tensor) -> Tensor:
        return x + 2 * y

    def launched(x, y):
        once, again = torch.empty_like(x), torch.empty_like(x)
        kernel(x=x, y=y, out=once)
        kernel(x=once, y=y, out=again)
        return again

    op = opkit.custom_op("triton_graph::twice", twice)
    device.defined.append(op.name)
    op.register_kernel("cpu", launched, traceable=True)
    captured.compiled(op)(torch.randn(100), torch.randn(100))
    assert captured.kernels == [add, add]
    assert not captured.calls_of(op)


def test_an_argument_that_is_written_to(device, captured):
    def into(x: Tensor, y: Tensor) -> None:
        x += y

    kernel = opkit.triton_kernel(add_into, grid=by_blocks, n=lambda x: x.numel, BLOCK=64)
    op = device.define(into, kernel, mutates_args=("x",))

    def program(x, y):
        z = x * 2
        op(z, y)
        return z + 1

    captured.compiled(program)(torch.randn(100), torch.randn(100))
    assert captured.kernels == [add_into]
    assert captured.launches[0].kwargs["tensors_to_clone"] == ["x"]


def test_a_layout_that_the_kernel_is_not_told_is_made_contiguous(device, captured):
    op = device.define(plus, adding())
    captured.compiled(op)(torch.randn(8, 6).t(), torch.randn(6, 8))
    (launch,) = captured.launches
    assert launch.kwargs["kwargs"]["x"].meta["val"].is_contiguous()


def test_empty_tensors_need_no_launch(device, captured):
    op = device.define(plus, adding())
    captured.compiled(op, dynamic=False)(torch.randn(0, 3), torch.randn(0, 3))
    assert not captured.launches
    assert not captured.calls_of(op)


# ---- symbolic sizes --------------------------------------------------------------------------------------------------


def test_one_program_for_several_shapes(device, captured):
    op = device.define(plus, adding())
    run = captured.compiled(lambda x, y: op(x * 2, y) + 1, dynamic=True)
    for shape in ((8, 16), (5, 7), (100, 3)):
        assert run(torch.randn(shape), torch.randn(shape)).shape == shape
    assert len(captured.programs) == 1
    (launch,) = captured.launches
    assert isinstance(launch.kwargs["grid"][0][0], torch.fx.Node)


def test_one_program_for_several_shapes_with_configs(device, captured):
    kernel = opkit.triton_kernel(
        add, grid=by_blocks, n=lambda out: out.numel, configs=[{"BLOCK": 32}, {"BLOCK": 64}], num_warps=2
    )
    op = device.define(plus, kernel)
    run = captured.compiled(op, dynamic=True)
    for size in (100, 77, 1000):
        run(torch.randn(size), torch.randn(size))
    assert len(captured.programs) == 1
    assert len(captured.kernels[0].configs) == 2


def test_a_constexpr_of_a_size_makes_the_program_for_it(device, captured):
    def rows(x: Float[Tensor, "m n"], y: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        return x + y

    kernel = opkit.triton_kernel(add, grid=lambda m: m, BLOCK=lambda n: triton.next_power_of_2(int(n)))
    op = device.define(rows, kernel)
    run = captured.compiled(op, dynamic=True)
    for shape in ((8, 16), (5, 16), (5, 24), (9, 24)):
        run(torch.randn(shape), torch.randn(shape))
    assert [captured.constants(launch)["BLOCK"] for launch in captured.launches] == [16, 32]


def test_sizes_that_depend_on_data_make_a_unit(device, captured):
    op = device.define(plus, adding())

    def program(x):
        chosen = x[x > 0]
        return op(chosen, chosen)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured.compiled(program)(torch.randn(100))
    assert not captured.launches
    assert len(captured.calls_of(op)) == 1


# ---- training --------------------------------------------------------------------------------------------------------


def test_training(device, captured):
    op = device.define(plus, adding())
    x = torch.randn(100, requires_grad=True)
    captured.compiled(lambda x, y: (op(x, y) * y).sum())(x, torch.randn(100)).backward()
    assert captured.kernels == [add]
    assert not captured.calls_of(op)
    assert x.grad is not None


def test_kernels_of_a_registered_gradient(device, captured):
    op, gradient = device.define(plus, adding()), device.define(plus, adding(num_warps=2))

    def backward(ctx, grad):
        return gradient(grad, grad), grad

    op.register_autograd(backward)
    x = torch.randn(100, requires_grad=True)
    captured.compiled(lambda x, y: op(x, y).sum())(x, torch.randn(100)).backward()
    assert len(captured.programs) == 2
    assert captured.kernels[0] is add
    assert [config.num_warps for config in captured.kernels[1].configs] == [2]
