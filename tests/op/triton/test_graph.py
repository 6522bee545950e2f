"""What torch.compile sees of Triton kernels: programs are captured after AOTAutograd, for a GPU that is none."""

import pytest
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

import opkit

_LAUNCHES = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit
def add_into(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit
def first(x, out, m, x_stride_0):
    at = tl.arange(0, 16)
    tl.store(out + at, tl.load(x + at * x_stride_0, at < m), at < m)


@triton.jit
def outer(x, y, out, m, n):
    row = tl.program_id(0)
    at = tl.arange(0, 16)
    tl.store(out + row * n + at, tl.load(x + row) * tl.load(y + at, at < n), at < n)


def by_blocks(n, BLOCK):
    return triton.cdiv(n, BLOCK)


def adding(**options):
    return opkit.triton_kernel(add, **{"grid": by_blocks, "n": lambda out: out.numel, "BLOCK": 64, **options})


def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class Target:
    """What torch asks Triton's driver for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


class Pretended(torch.fx.Interpreter):
    """Runs a program whose launches do nothing."""

    def call_function(self, target, args, kwargs):
        if target is triton_kernel_wrapper_functional:
            return {name: kwargs["kwargs"][name].clone() for name in kwargs["tensors_to_clone"]}
        return None if target is triton_kernel_wrapper_mutation else super().call_function(target, args, kwargs)


class Captured:
    """A backend of torch.compile that keeps what it is given."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.programs = []
        self.backend = aot_autograd(fw_compiler=self.keep)

    def keep(self, program, _):
        from functorch.compile import make_boxed_func

        self.programs.append(program)
        return make_boxed_func(lambda *args: Pretended(program).run(*args))

    @property
    def nodes(self):
        return [node for program in self.programs for node in program.graph.nodes if node.op == "call_function"]

    @property
    def launches(self):
        return [node for node in self.nodes if node.target in _LAUNCHES]

    def calls_of(self, op):
        overload = torch.ops
        for part in op.name.split("::"):
            overload = getattr(overload, part)
        return [node for node in self.nodes if node.target is overload.default]

    @property
    def kernels(self):
        return [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in self.launches]

    def constants(self, node):
        return {**kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"]), **node.kwargs["kwargs"]}


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Target())
    return Captured()


def compiled(captured, function, **options):
    return torch.compile(function, backend=captured.backend, fullgraph=True, **options)


# ---- what is visible -------------------------------------------------------------------------------------------------


def test_a_launch_takes_the_operators_place(device, captured):
    op = device.define(plus, adding())
    x = torch.randn(100)
    compiled(captured, lambda x, y: op(x * 2, y) + 1)(x, x)
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
    compiled(captured, op)(torch.randn(100), torch.randn(100))
    (recorded,) = captured.kernels
    assert [(config.num_warps, config.num_stages) for config in recorded.configs] == [(8, 3)]


def test_configs_are_left_to_inductor(device, captured):
    configs = [{"BLOCK": 32, "num_warps": 2}, triton.Config({"BLOCK": 64}, num_warps=4), {"BLOCK": 128, "num_warps": 8}]
    kernel = opkit.triton_kernel(add, grid=by_blocks, n=lambda out: out.numel, configs=configs)
    op = device.define(plus, kernel)
    compiled(captured, op)(torch.randn(100), torch.randn(100))
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
    compiled(captured, op)(torch.randn(100), torch.randn(100))
    assert [config.kwargs for config in captured.kernels[0].configs] == [{"BLOCK": 32}, {"BLOCK": 64}]


def test_a_config_that_was_found_to_be_the_fastest_is_the_one(device, captured):
    from opkit.kernels.triton import records
    from opkit.kernels.triton.record_format import Tried

    kernel = opkit.triton_kernel(
        add, grid=by_blocks, n=lambda out: out.numel, configs=[{"BLOCK": 32}, {"BLOCK": 64}, {"BLOCK": 128}]
    )
    op = device.define(plus, kernel)
    chooser = op._operator.kernels.kernels[0].function.launching.chooser
    tried = [Tried(config.to_json(), ms) for config, ms in zip(kernel.configs, (3.0, 1.0, 2.0), strict=True)]
    records.remember(chooser.identity, "a GPU that is none", "float32 float32 | x_0=128 y_0=128", tried)
    compiled(captured, op)(torch.randn(100), torch.randn(100))
    (launch,) = captured.launches
    assert launch.kwargs["grid"] == [(2, 1, 1)]


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
    compiled(captured, op)(torch.randn(100), torch.randn(100))
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

    compiled(captured, program)(torch.randn(100), torch.randn(100))
    assert captured.kernels == [add_into]
    assert captured.launches[0].kwargs["tensors_to_clone"] == ["x"]


def test_a_layout_that_the_kernel_is_not_told_is_made_contiguous(device, captured):
    op = device.define(plus, adding())
    compiled(captured, op)(torch.randn(8, 6).t(), torch.randn(6, 8))
    (launch,) = captured.launches
    assert launch.kwargs["kwargs"]["x"].meta["val"].is_contiguous()


def test_empty_tensors_need_no_launch(device, captured):
    op = device.define(plus, adding())
    compiled(captured, op, dynamic=False)(torch.randn(0, 3), torch.randn(0, 3))
    assert not captured.launches
    assert not captured.calls_of(op)


# ---- symbolic sizes --------------------------------------------------------------------------------------------------


def test_one_program_for_several_shapes(device, captured):
    op = device.define(plus, adding())
    run = compiled(captured, lambda x, y: op(x * 2, y) + 1, dynamic=True)
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
    run = compiled(captured, op, dynamic=True)
    for size in (100, 77, 1000):
        run(torch.randn(size), torch.randn(size))
    assert len(captured.programs) == 1
    assert len(captured.kernels[0].configs) == 2


def test_a_constexpr_of_a_size_makes_the_program_for_it(device, captured):
    def rows(x: Float[Tensor, "m n"], y: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        return x + y

    kernel = opkit.triton_kernel(add, grid=lambda m: m, BLOCK=lambda n: triton.next_power_of_2(int(n)))
    op = device.define(rows, kernel)
    run = compiled(captured, op, dynamic=True)
    for shape in ((8, 16), (5, 16), (5, 24), (9, 24)):
        run(torch.randn(shape), torch.randn(shape))
    assert [captured.constants(launch)["BLOCK"] for launch in captured.launches] == [16, 32]


def test_sizes_that_depend_on_data_make_a_unit(device, captured):
    op = device.define(plus, adding())

    def program(x):
        chosen = x[x > 0]
        return op(chosen, chosen)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(captured, program)(torch.randn(100))
    assert not captured.launches
    assert len(captured.calls_of(op)) == 1


# ---- units -----------------------------------------------------------------------------------------------------------


def _do_nothing(arguments):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"pre_hook": _do_nothing},
        {"configs": [triton.Config({"BLOCK": 64}, pre_hook=_do_nothing), triton.Config({"BLOCK": 32})], "BLOCK": None},
        {"reset_to_zero": ("out",)},
        {"maxnreg": 64},
        {"num_ctas": 2},
        {"configs": [{"BLOCK": 64, "maxnreg": 64}], "BLOCK": None},
    ],
    ids=["hook", "a config's hook", "reset_to_zero", "maxnreg", "num_ctas", "a config's option"],
)
def test_what_torch_cannot_record_is_a_unit(device, captured, options, monkeypatch):
    from opkit.op.triton import python

    monkeypatch.setattr(python, "chosen", lambda values: values.bound.kernel.configs[0])
    monkeypatch.setattr(python, "_launch", lambda values, config: None)
    kernel = adding(**options)
    kernel.values.pop("BLOCK") if options.get("BLOCK", 64) is None else None
    op = device.define(plus, kernel)
    compiled(captured, lambda x, y: op(x, y) + 1)(torch.randn(100), torch.randn(100))
    assert not captured.launches
    assert len(captured.calls_of(op)) == 1


def test_an_option_at_its_default_is_nothing_to_record(device, captured):
    op = device.define(plus, adding(num_ctas=1))
    compiled(captured, op)(torch.randn(100), torch.randn(100))
    assert captured.kernels == [add]


def test_gluon_is_a_unit(device):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def copy(x, y, out, n, BLOCK: gl.constexpr):
        pass

    op = device.define(plus, opkit.triton_kernel(copy, grid=1, n=1, BLOCK=64))
    assert op._operator.kernels.kernels[0].function.visible is None


def test_a_descriptor_makes_a_unit(device):
    @triton.jit
    def copy(x_desc, y, out):
        pass

    op = device.define(plus, opkit.triton_kernel(copy, grid=1, x_desc=opkit.tensor_descriptor("x", block=(8, 8))))
    assert op._operator.kernels.kernels[0].function.visible is None


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
def test_export_keeps_the_operator(device, captured):
    op = device.define(plus, adding())

    class Module(torch.nn.Module):
        def forward(self, x, y):
            return op(x, y) + 1

    program = torch.export.export(Module(), (torch.randn(100), torch.randn(100)))
    for graph in (program.graph, program.run_decompositions().graph):
        targets = [node.target for node in graph.nodes if node.op == "call_function"]
        assert getattr(torch.ops.triton_launching, op.name.partition("::")[2]).default in targets


def test_a_large_argument_of_a_traceable_kernel_makes_a_unit(device, captured):
    def column(x: Float[Tensor, "m n"]) -> Float[Tensor, "m"]:
        return x[:, 0].clone()

    op = opkit.custom_op("triton_graph::column", column)
    device.defined.append(op.name)
    op.register_kernel("cpu", lambda x: x[:, 0] * 1, traceable=True)
    traced(captured, op, torch.empty_strided((2**20, 1), (2**12, 1), device="meta"))
    assert len(captured.calls_of(op)) == 1


def test_use_kernel_makes_a_unit(device, captured):
    op = device.define(plus, adding())
    with opkit.use_kernel(op, "add"):
        compiled(captured, op)(torch.randn(100), torch.randn(100))
    assert not captured.launches


@pytest.mark.parametrize("rows", [2**20, 2**8], ids=["beyond", "within"])
def test_offsets_beyond_32_bits_make_a_unit(device, captured, rows):
    """By strides, though there are few elements."""

    def column(x: Float[Tensor, "m n"]) -> Float[Tensor, "m"]:
        return x[:, 0].clone()

    op = device.define(column, opkit.triton_kernel(first, grid=1))
    traced(captured, op, torch.empty_strided((rows, 1), (2**12, 1), device="meta"))
    assert len(captured.launches) == (rows == 2**8)
    assert len(captured.calls_of(op)) == (rows == 2**20)


@pytest.mark.parametrize("m", [2**16, 2**4], ids=["beyond", "within"])
def test_an_output_beyond_32_bits_makes_a_unit(device, captured, m):
    def product(x: Float[Tensor, "m"], y: Float[Tensor, "n"]) -> Float[Tensor, "m n"]:
        return x[:, None] * y

    op = device.define(product, opkit.triton_kernel(outer, grid=lambda m: m))
    traced(captured, op, torch.empty(m, device="meta"), torch.empty(2**16, device="meta"))
    assert len(captured.launches) == (m == 2**4)
    assert len(captured.calls_of(op)) == (m == 2**16)


def traced(captured, op, *like):
    """Compile for tensors of which there is no memory, up to where they would be needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        given = [torch.empty_strided(t.shape, t.stride(), device="cpu") for t in like]
        compiled(captured, op, dynamic=False)(*given)


# ---- training --------------------------------------------------------------------------------------------------------


def test_training(device, captured):
    op = device.define(plus, adding())
    x = torch.randn(100, requires_grad=True)
    compiled(captured, lambda x, y: (op(x, y) * y).sum())(x, torch.randn(100)).backward()
    assert captured.kernels == [add]
    assert not captured.calls_of(op)
    assert x.grad is not None


def test_kernels_of_a_registered_gradient(device, captured):
    op, gradient = device.define(plus, adding()), device.define(plus, adding(num_warps=2))

    def backward(ctx, grad):
        return gradient(grad, grad), grad

    op.register_autograd(backward)
    x = torch.randn(100, requires_grad=True)
    compiled(captured, lambda x, y: op(x, y).sum())(x, torch.randn(100)).backward()
    assert len(captured.programs) == 2
    assert captured.kernels[0] is add
    assert [config.num_warps for config in captured.kernels[1].configs] == [2]
