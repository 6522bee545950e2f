"""Which calls of Triton kernels stay units in programs of torch.compile: captured for a GPU that is none."""

from __future__ import annotations

import types

import pytest
import torch
import torch._inductor.config
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.op.triton.function import left_out


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


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


def _do_nothing(arguments):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"pre_hook": _do_nothing},
        {"configs": [triton.Config({"BLOCK": 64}, pre_hook=_do_nothing), triton.Config({"BLOCK": 32})]},
        {"reset_to_zero": ("out",)},
        {"maxnreg": 64},
        {"num_ctas": 2},
        {"configs": [{"BLOCK": 64, "maxnreg": 64}]},
    ],
    ids=["hook", "a config's hook", "reset_to_zero", "maxnreg", "num_ctas", "a config's option"],
)
def test_what_torch_cannot_record_is_a_unit(device, captured, options):
    given = {"BLOCK": 64, **options} if "configs" not in options else options
    op = device.define(plus, opkit.triton_kernel(add, grid=by_blocks, n=lambda out: out.numel, **given))
    traced(captured, op, *[torch.empty(100, device="meta")] * 2)
    assert not captured.launches
    assert len(captured.calls_of(op)) == 1


def test_an_option_at_its_default_is_nothing_to_record(device, captured):
    op = device.define(plus, adding(num_ctas=1))
    captured.compiled(op)(torch.randn(100), torch.randn(100))
    assert captured.kernels == [add]


def test_gluon_is_a_unit(device, captured):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @gluon.jit
    def copy(x, y, out, n, BLOCK: gl.constexpr):
        pass

    op = device.define(plus, opkit.triton_kernel(copy, grid=1, n=1, BLOCK=64))
    traced(captured, op, *[torch.empty(100, device="meta")] * 2)
    assert not captured.launches
    assert len(captured.calls_of(op)) == 1


def test_a_descriptor_makes_a_unit(device, captured):
    @triton.jit
    def copy(x_desc, y, out):
        pass

    op = device.define(plus, opkit.triton_kernel(copy, grid=1, x_desc=opkit.tensor_descriptor("x", block=(8, 8))))
    traced(captured, op, *[torch.empty(16, 16, device="meta")] * 2)
    assert not captured.launches
    assert len(captured.calls_of(op)) == 1


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
        captured.compiled(op)(torch.randn(100), torch.randn(100))
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


def test_many_elements_in_one_place_make_a_unit(device, captured):
    """A launch counts them, however they lie."""

    def first_of(x: Float[Tensor, "m"]) -> Float[Tensor, ""]:
        return x[0].clone()

    op = device.define(first_of, opkit.triton_kernel(first, grid=1))
    traced(captured, op, torch.empty_strided((2**31,), (0,), device="meta"))
    assert not captured.launches


def traced(captured, op, *like):
    """Compile for tensors of which there is no memory, up to where they would be needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        given = [torch.empty_strided(t.shape, t.stride(), device="cpu") for t in like]
        captured.compiled(op, dynamic=False)(*given)


SIZE = tl.constexpr(64)
WHOLE = 2
HALF = 0.5


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def four_times(x):
    return twice(twice(x))


doubled = twice
helpers = types.ModuleType("helpers")
helpers.twice = twice


@triton.jit
def by_name(x, out, n):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, four_times(tl.load(x + at, at < n)) * WHOLE, at < n)


@triton.jit
def by_module(x, out, n):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, helpers.twice(tl.load(x + at, at < n)), at < n)


@triton.jit
def through_another(x):
    return helpers.twice(x)


@triton.jit
def by_two_steps(x, out, n):
    at = tl.arange(0, SIZE)
    tl.store(out + at, through_another(tl.load(x + at, at < n)), at < n)


@triton.jit
def by_another_name(x, out, n):
    at = tl.arange(0, SIZE)
    tl.store(out + at, doubled(tl.load(x + at, at < n)), at < n)


@triton.jit
def with_a_float(x, out, n):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, at < n) * HALF, at < n)


@pytest.mark.parametrize(
    ("kernel", "missing"),
    [
        (by_name, ""),
        (by_module, "helpers"),
        (by_two_steps, "helpers"),
        (by_another_name, "doubled, whose own name is twice"),
        (with_a_float, "HALF"),
    ],
)
def test_what_is_left_out_is_named(kernel, missing):
    assert left_out(kernel.fn) == missing


def copied(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(("kernel", "launches"), [(by_name, 1), (by_module, 0)])
def test_a_kernel_that_inductor_cannot_write_is_a_unit(device, captured, kernel, launches):
    size = {"grid": lambda n: triton.cdiv(n, 64), "n": lambda out: out.numel}
    op = device.define(copied, opkit.triton_kernel(kernel, **size))
    captured.compiled(op)(torch.randn(100))
    assert len(captured.launches) == launches
    assert len(captured.calls_of(op)) == 1 - launches


@triton.jit
def scaled(x, out, n, by, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) * by, at < n)


def times(x: Tensor, by: float) -> Tensor:
    return x * by


@pytest.mark.parametrize(("widens", "launches"), [(True, 0), (False, 1)])
def test_a_float_that_inductor_would_widen_makes_a_unit(device, captured, monkeypatch, widens, launches):
    monkeypatch.setattr(torch._inductor.config, "_use_fp64_for_unbacked_floats", widens, raising=False)
    how = {"grid": lambda n, BLOCK: triton.cdiv(n, BLOCK), "n": lambda out: out.numel, "BLOCK": 64}
    op = device.define(times, opkit.triton_kernel(scaled, **how))
    captured.compiled(lambda x: op(x, 0.5))(torch.randn(100))
    assert len(captured.launches) == launches
    assert len(captured.calls_of(op)) == 1 - launches
