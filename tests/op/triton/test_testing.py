"""opkit.testing.compile_for: every kernel, for every architecture, without a GPU."""

import pytest
import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import ArgumentError, KernelError
from opkit.testing import compile_for


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def define(name):
    def define(reference, *kernels):
        op = opkit.custom_op(name, reference)
        for number, kernel in enumerate(kernels):
            op.register_kernel("cuda", kernel, name=f"kernel{number}")
        return op

    return define


@triton.jit
def copy(x, out, x_numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < x_numel), at < x_numel)


@triton.jit
def broken(x, out):
    tl.store(out, tl.load(x) + undefined)


@triton.jit
def hungry(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at[:, None] * BLOCK + at[None, :])
    tl.store(out + at[:, None] * BLOCK + at[None, :], tl.dot(value, value))


def same(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.clone()


def copying(**options):
    return opkit.triton_kernel(copy, **{"grid": lambda n, BLOCK: triton.cdiv(n, BLOCK), "BLOCK": 256, **options})


def test_a_row_for_each_kernel_example_config_and_architecture(define):
    configs = [{"BLOCK": 64, "num_warps": 1}, {"BLOCK": 2048, "num_warps": 8}]
    tuned = opkit.triton_kernel(
        copy, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), configs=configs,
        prune=lambda configs, n: [c for c in configs if c["BLOCK"] < n], examples=[{"x": "fp32[4096]"}, {"x": "bf16[100]"}],
    )  # fmt: skip
    op = define(same, copying(examples=[{"x": "fp16[64]"}]), tuned)
    report = compile_for(op, ["sm_90", "gfx942"])
    found = sorted(
        (row.kernel, row.example.partition("(")[2], row.config, row.target, row.threads) for row in report.rows
    )
    first, second = "BLOCK=64, num_warps=1", "BLOCK=2048, num_warps=8"
    assert found == sorted(
        [
            ("kernel0", "x=fp16[64])", "", "sm_90", 128),
            ("kernel0", "x=fp16[64])", "", "gfx942", 256),
            *(("kernel1", "x=fp32[4096])", first, target, n) for target, n in (("sm_90", 32), ("gfx942", 64))),
            *(("kernel1", "x=fp32[4096])", second, target, n) for target, n in (("sm_90", 256), ("gfx942", 512))),
            *(("kernel1", "x=bf16[100])", first, target, n) for target, n in (("sm_90", 32), ("gfx942", 64))),
        ]
    )
    assert report.ok
    assert all(row.registers > 0 for row in report.rows)


def test_calls_are_made_up_where_none_are_named(define):
    report = compile_for(define(same, copying()), ["sm_80"])
    assert [row.example.partition("=")[2] for row in report.rows] == ["bf16[1024])", "fp16[1024])", "fp32[1024])"]


def test_arguments_may_be_given(define):
    report = compile_for(define(same, copying()), ["sm_80"], args=[{"x": "fp64[10]"}])
    assert [row.example.partition("=")[2] for row in report.rows] == ["fp64[10])"]


def test_what_does_not_compile_is_told_with_its_line(define):
    report = compile_for(define(same, opkit.triton_kernel(broken, grid=1)), ["sm_80"], args=[{"x": "fp32[10]"}])
    assert not report.ok
    assert "undefined" in report.failures[0].error
    assert "test_testing.py" in report.failures[0].error
    with pytest.raises(KernelError, match=r"kernel0, sm_80: .*"):
        report.raise_for_failures()


def test_a_kernel_for_other_architectures_is_skipped(define):
    report = compile_for(define(same, copying(targets=("sm_90",))), ["sm_80", "sm_90"], args=[{"x": "fp32[10]"}])
    assert [row.skipped for row in report.rows] == ["the kernel is for sm_90", ""]
    assert report.ok
    assert "the kernel is for sm_90" in str(report)


def test_shared_memory_is_told(define):
    def square(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        return x @ x

    kernel = opkit.triton_kernel(hungry, grid=1, BLOCK=lambda n: n)
    (row,) = compile_for(define(square, kernel), ["sm_80"], args=[{"x": "fp32[64, 64]"}]).rows
    assert row.shared >= 64 * 64 * 4


def test_no_triton_kernel(define):
    with pytest.raises(ArgumentError, match=r"has no Triton kernel to compile. It has no kernels"):
        compile_for(define(same), ["sm_80"])


def test_no_such_architecture(define):
    with pytest.raises(ArgumentError, match="sm90a_"):
        compile_for(define(same, copying()), ["sm90a_"])


def test_arguments_that_the_operator_does_not_have(define):
    with pytest.raises(ArgumentError, match="has no argument z"):
        compile_for(define(same, copying()), ["sm_80"], args=[{"z": "fp32[10]"}])


def test_nothing_is_kept_of_an_example(define):
    """The examples' tensors have no memory: an example may be as large as a real call."""
    assert compile_for(define(same, copying()), ["sm_80"], args=[{"x": f"bf16[{2**40}]"}]).ok


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_registers_are_those_that_the_driver_tells(define):
    op = define(same, copying())
    op(torch.ones(1000, device="cuda"))
    major, minor = torch.cuda.get_device_capability()
    (row,) = compile_for(op, [f"sm_{major}{minor}"], args=[{"x": "fp32[1000]"}]).rows
    assert row.registers > 0
