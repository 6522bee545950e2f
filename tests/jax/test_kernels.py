"""Kernels in C and C++ that JAX calls on its CPU: results, gradients, transforms, errors."""

import itertools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_comparison import close, same, to_array
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

import opkit
from opkit import errors

_names = itertools.count()
FAILED = (ValueError, jax.errors.JaxRuntimeError)  # the former where the call is not asynchronous
SQUARE = """
void square(const T* x, T* out, int64_t x_numel) {
    for (int64_t i = 0; i < x_numel; i++) out[i] = (T)((opk_acc)x[i] * (opk_acc)x[i] + 1000);
}
"""  # 1000 more than the reference, so that results say which of them ran


def define(function, **options):
    return opkit.custom_op(f"jaxk::{function.__name__}_{next(_names)}", mutates_args=(), **options)(function)


@pytest.fixture(scope="module")
def square():
    def square(x: Tensor) -> Tensor:
        return x * x

    op = define(square)
    op.register_kernel("cpu", opkit.c_kernel(SQUARE, dtypes=[torch.float32, torch.bfloat16]), trusted=True)
    return op


def test_kernel_runs_forward_and_the_reference_gives_gradients(square):
    f = opkit.to_jax(square)
    x = jnp.arange(6.0).reshape(2, 3)
    for run in (f, jax.jit(f)):
        np.testing.assert_array_equal(run(x), x * x + 1000)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x).sum()))(x), 2 * x)
    np.testing.assert_array_equal(jax.jvp(f, (x,), (x,))[1], 2 * x * x)
    np.testing.assert_array_equal(jax.hessian(lambda x: f(x).sum())(x[0]), 2 * np.eye(3))
    np.testing.assert_array_equal(jax.vmap(f)(x), x * x + 1000)
    np.testing.assert_array_equal(f(x.astype(jnp.bfloat16)), (x * x + 1000).astype(jnp.bfloat16))


def test_reference_runs_where_the_kernel_does_not(square):
    f = opkit.to_jax(square)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(f(x.astype(jnp.int32)), x * x)  # which the kernel was not compiled for
    with opkit.use_kernel(square, "reference"):
        np.testing.assert_array_equal(f(x), x * x)
    with square.set_kernel_enabled("cpu", False):
        np.testing.assert_array_equal(f(x), x * x)
    np.testing.assert_array_equal(f(x), x * x + 1000)
    np.testing.assert_array_equal(f(x[:0]), x[:0])


def test_forced_kernel_that_jax_cannot_run_is_refused(square):
    square.register_kernel("cpu", lambda x: x * x, name="in_python", priority=-1)
    with (
        opkit.use_kernel(square, "in_python"),
        pytest.raises(errors.KernelError, match="'in_python', which JAX cannot run"),
    ):
        opkit.to_jax(square)(jnp.ones(2))


def test_exported_programs_hold_the_reference_or_call_the_kernel(square):
    f, x = jax.jit(lambda x: opkit.to_jax(square)(x)), jnp.ones(2)
    check = jax.export.DisabledSafetyCheck.custom_call
    with pytest.raises(ValueError, match="custom call") as raised:
        jax.export.export(f)(x)
    target = re.search(r"@([\w.]+)", str(raised.value))[1]
    assert "stablehlo.custom_call" in jax.export.export(f, disabled_checks=[check(target)])(x).mlir_module()
    with opkit.use_kernel(square, "reference"):
        assert "multiply" in jax.export.export(jax.jit(lambda x: opkit.to_jax(square)(x)))(x).mlir_module()


EVERYTHING = """
static void fill(int64_t begin, int64_t end, void* context) {
    for (int64_t i = begin; i < end; i++) ((float*)context)[i] = 1;
}
const char* everything(const opk_tensor* x, const float* weight, const float* const* xs, int64_t xs_len, const int64_t* sizes,
                       int64_t sizes_len, const double* factor, const char* mode, int64_t n, int32_t flag, float* out0,
                       opk_tensor_of(float) const* out1, int64_t x_stride_m2, int64_t x_size_1) {
    const float* data = (const float*)x->data;
    if (flag) return "flagged";
    if (n == 13) opk_fail("%d is unlucky", 13);
    opk_parallel_for(0, 1, 1, fill, out1->data);
    float sum = 0;
    for (int64_t i = 0; i < sizes_len; i++) sum += (float)sizes[i];
    for (int64_t j = 0; j < xs_len; j++) sum += xs[j][0];
    for (int64_t i = 0; i < x->sizes[0]; i++)
        for (int64_t j = 0; j < x_size_1; j++)
            out0[i * x->strides[0] + j] = data[i * x_stride_m2 + j] * (weight ? weight[j] : 1) * (factor ? (float)*factor : 1)
                + sum + (float)(mode[0] == 'b');
    return 0;
}
"""


@pytest.fixture(scope="module")
def everything():
    def everything(
        x: Float[Tensor, "m d"], weight: Float[Tensor, "d"] | None, xs: list[Tensor], sizes: list[int], *,
        factor: float | None = None, mode: str = "a", n: int = 0, flag: bool = False,
    ) -> tuple[Float[Tensor, "m d"], Tensor]:  # fmt: skip
        out = x if weight is None else x * weight
        out = out if factor is None else out * factor
        return out + sum(sizes) + sum(y.flatten()[0] for y in xs) + float(mode == "b"), x.new_ones(1)

    op = define(everything)
    op.register_kernel("cpu", opkit.c_kernel(EVERYTHING, dtypes=[torch.float32]), name="c")
    return op


@pytest.mark.parametrize("given", [True, False])
def test_parameters_of_every_kind(everything, given):
    x, weight, xs = torch.randn(3, 4), torch.randn(4), [torch.randn(2), torch.randn(1, 3)]
    options = {"factor": 2.5, "mode": "b"} if given else {}
    args = (x, weight, xs, [2, 3]) if given else (x, None, [], [])
    assert everything.select(*args, **options).kernel == "c"
    same(everything, *args, **options)


def test_errors_of_kernels_name_operator_and_kernel(everything):
    f, x = opkit.to_jax(everything), jnp.ones((2, 2))
    with pytest.raises(FAILED, match=r"jaxk::everything_\d+, kernel c: flagged"):
        f(x, None, [], [], flag=True)[0].block_until_ready()
    with pytest.raises(FAILED, match=r"kernel c: 13 is unlucky \(.*test_kernels.py:\d+\)"):
        jax.jit(lambda x: f(x, None, [], [], n=13))(x)[0].block_until_ready()
    f(x, None, [], [])  # and the next call is none


def test_named_sizes_and_large_blocks():
    def padded(x: Shaped[Tensor, "*batch d"], by: list[int]) -> Shaped[Tensor, "*batch d"]:
        return x + sum(by)

    source = """
    void padded(const T* x, const int64_t* by, int64_t by_len, T* out, int64_t batch, int64_t d) {
        T sum = 0;
        for (int64_t i = 0; i < by_len; i++) sum += (T)by[i];
        for (int64_t i = 0; i < batch * d; i++) out[i] = x[i] + sum;
    }
    """
    op = define(padded)
    op.register_kernel("cpu", opkit.c_kernel(source, dtypes=["int32", "float32"]))
    for x in (torch.ones(2, 3, 4, dtype=torch.int32), torch.ones(5), torch.ones(2, 0)):
        by = list(range(300))
        close(opkit.to_jax(op)(to_array(x), by), op(x, by))


def test_exceptions_of_a_kernel_in_cpp():
    def thrown(x: Tensor) -> Tensor:
        return x + 1

    source = 'extern "C" void thrown(const float* x, float* out, int64_t x_numel) { if (x[0] > 0) throw 1; out[0] = x[0] + 1; }'
    op = define(thrown)
    op.register_kernel("cpu", opkit.cpp_kernel(source, dtypes=["float32"]))
    f = opkit.to_jax(op)
    np.testing.assert_array_equal(f(jnp.zeros(1)), jnp.ones(1))
    with pytest.raises(FAILED, match="it threw an exception"):
        f(jnp.ones(1)).block_until_ready()


def test_operator_that_only_a_kernel_computes():
    def opaque(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * x.numpy())

    op = define(opaque, opaque=True)
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_kernel("cpu", opkit.c_kernel(SQUARE.replace("square", "opaque"), dtypes=[torch.float32]), trusted=True)
    f, x = opkit.to_jax(op), jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(f)(x), x * x + 1000)
    with pytest.raises(errors.RuleError, match="no autograd formula was registered"):
        jax.grad(lambda x: f(x).sum())(x)
    op.register_autograd(lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad, setup_context=_save)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(x), 2 * x)


def test_kernels_for_int64_are_not_given_int32():
    def doubled(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return x * 2

    loop = "for (int64_t i = 0; i < n; i++) out[i] = 2 * x[i] + 1000;"
    source = f"void doubled(const int64_t* x, int64_t* out, int64_t n) {{ {loop} }}"
    op = define(doubled)
    op.register_kernel("cpu", opkit.c_kernel(source))
    f = opkit.to_jax(op)
    np.testing.assert_array_equal(f(jnp.arange(3)), [0, 2, 4])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(f(jnp.arange(3)), [1000, 1002, 1004])


def test_functions_of_installed_libraries():
    op = opkit.from_library(f"jaxk::hypot_{next(_names)}", "m", "float hypotf(float x, float y)")
    f, x = opkit.to_jax(op), jnp.asarray([[3.0], [5.0]])
    np.testing.assert_allclose(f(x, jnp.asarray([4.0, 12.0])), [[5.0, 12.369317], [6.403124, 13.0]], rtol=1e-6)
    with pytest.raises(
        errors.RuleError, match=r"leaves torch.*\n  hypotf does not run: x has torch.bfloat16; it takes"
    ):
        f(x.astype(jnp.bfloat16), x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def test_results_that_jax_has_no_dtype_for():
    def wider(x: Tensor) -> Tensor:
        return x.double()

    op = define(wider)
    source = "void wider(const float* x, double* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = x[i]; }"
    op.register_kernel("cpu", opkit.c_kernel(source))
    f, x = opkit.to_jax(op), jnp.arange(3.0)
    assert f(x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(x).dtype == jnp.float64
        np.testing.assert_array_equal(f(x), x)


def test_without_a_compiler_the_reference_runs(settings):
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    op = define(doubled)
    op.register_kernel("cpu", opkit.c_kernel(SQUARE.replace("square", "doubled")))
    settings(cc="/nonexistent/cc")
    with pytest.warns(errors.NoCompilerWarning, match="the reference runs in its place"):
        np.testing.assert_array_equal(opkit.to_jax(op)(jnp.ones(2)), 2 * jnp.ones(2))
