"""opkit.aoti_compile_and_package: the package contains the kernels, and a process that never imports opkit runs it."""

import os
from collections.abc import Sequence

import fresh_process
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import PackageError, ToolchainError
from opkit.kernels.cc import toolchain


@opkit.custom_op("aoti_packages::rms_norm")
def rms_norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


# the kernels add 1000, so that a reference cannot take their place
rms_norm.register_kernel(
    "cpu",
    opkit.c_kernel("""
        void rms_norm(const T* x, const T* weight, double eps, T* out, int64_t batch, int64_t d) {
            for (int64_t i = 0; i < batch; i++, x += d, out += d) {
                double sum = 0;
                for (int64_t j = 0; j < d; j++) sum += x[j] * x[j];
                for (int64_t j = 0; j < d; j++) out[j] = x[j] / sqrt(sum / d + eps) * weight[j] + 1000;
            }
        }
    """),
)


@opkit.custom_op("aoti_packages::mixed", mutates_args=())
def mixed(
    x: Tensor,
    bias: Tensor | None,
    others: Sequence[Tensor],
    n: int,
    scale: float | None,
    flag: bool,
    mode: str,
    counts: Sequence[int],
    weights: Sequence[float] | None,
    flags: Sequence[bool],
    name: str | None = None,
    k: int | None = None,
    on: bool | None = None,
) -> tuple[Tensor, Tensor]:
    y = (
        x
        + n
        + (scale or 0)
        + 2 * flag
        + len(mode)
        + sum(counts)
        + sum(weights or [])
        + 3 * sum(flags)
        + len(name or "")
    )
    y = y + (k or 0) + 5 * bool(on) + (0 if bias is None else bias)
    for other in others:
        y = y + other
    return y, y * 2


mixed.register_kernel(
    "cpu",
    opkit.c_kernel("""
        void mixed(const T* x, const T* bias, const T* const* others, int64_t others_len, int64_t n, const double* scale,
                   bool flag, const char* mode, const int64_t* counts, int64_t counts_len, const double* weights,
                   int64_t weights_len, const uint8_t* flags, int64_t flags_len, const char* name, const int64_t* k,
                   const uint8_t* on, T* out0, T* out1, int64_t x_numel) {
            double sum = n + (scale ? *scale : 0) + 2 * flag + strlen(mode) + (name ? strlen(name) : 0) + (k ? *k : 0);
            sum += on && *on ? 5 : 0;
            for (int64_t i = 0; i < counts_len; i++) sum += counts[i];
            for (int64_t i = 0; i < weights_len; i++) sum += weights[i];
            for (int64_t i = 0; i < flags_len; i++) sum += 3 * flags[i];
            for (int64_t i = 0; i < x_numel; i++) {
                double value = x[i] + sum + (bias ? bias[i] : 0);
                for (int64_t j = 0; j < others_len; j++) value += others[j][i];
                out0[i] = value;
                out1[i] = 2 * value + 1000;
            }
        }
    """),
)


@opkit.custom_op("aoti_packages::add_", mutates_args=("x",))
def add_(x: Tensor, by: float) -> None:
    x.add_(by)


add_.register_kernel(
    "cpu",
    opkit.c_kernel(
        "void add(T* x, double by, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) x[i] += by + 1000; }"
    ),
)


@opkit.custom_op("aoti_packages::add_and_sum", mutates_args=("x",))
def add_and_sum(x: Float[Tensor, "n d"], by: float) -> Float[Tensor, "d"]:
    x.add_(by)
    return x.sum(0)


add_and_sum.register_kernel(
    "cpu",
    opkit.c_kernel("""
        void add_and_sum(T* x, double by, T* out, int64_t n, int64_t d) {
            for (int64_t i = 0; i < n * d; i++) x[i] += by + 1000;
            for (int64_t j = 0; j < d; j++) {
                out[j] = 0;
                for (int64_t i = 0; i < n; i++) out[j] += x[i * d + j];
            }
        }
    """),
)


class Small(torch.nn.Module):
    """Two dtypes, and little that Inductor would have to compile."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, x, doubles):
        return rms_norm(x, self.weight), rms_norm(doubles, doubles[0], 1e-3)


class Large(torch.nn.Module):
    """Every kind of argument, tensors that operators write to, and calls in graphs of a graph."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0, 1, 8).reshape(1, 8))
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, doubles):
        normed = rms_norm(self.linear(x) + doubles.float(), self.weight[0]) * 2
        halves = rms_norm(x.half(), self.weight[0].half())  # the kernel takes none, so the reference is compiled
        rows = x.shape[0]
        a, b = mixed(x, x * 2, [x, x + 1], rows, None, False, "", [rows, 2], None, [], "na", 5, True)
        _, c = mixed(self.weight, None, [self.weight], 3, 0.5, True, "abc", [1, 2], [0.25], [True, False])
        d, _ = mixed(x.t().contiguous(), None, [], 3, 0.5, True, "abc", [], [], [True])
        e = torch.cond(x.sum() > 0, lambda x: rms_norm(x * 2, x[0]) + 1, lambda x: rms_norm(x, x[0]), (x,))
        written, summed = x + c, x * 3
        add_(written, 2.0)
        return normed, halves, a, b, d, e, written, add_and_sum(summed, 1.0), summed


def bare():
    """An environment without opkit and compilers."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": "/nonexistent"}


LOADED = """
import sys, torch
model = torch._inductor.aoti_load_package(sys.argv[1])
for given, expected in torch.load(sys.argv[2]):
    torch.testing.assert_close(tuple(model(*given)), expected, rtol=2e-3, atol=2e-3)
print([name for name in sys.modules if name.startswith("opkit")])
"""


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of a line of torch 2.13's
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "freezing"),
    [
        pytest.param(Small, False, id="small"),
        pytest.param(Large, False, id="large"),
        pytest.param(Large, True, id="frozen"),
    ],
)
def test_a_process_without_opkit_runs_a_package(tmp_path, model, freezing):
    model = model()
    rows = torch.export.Dim("rows")
    cases = [(torch.randn(rows, 8), torch.randn(rows, 8, dtype=torch.float64)) for rows in (4, 1, 7)]
    program = torch.export.export(model, cases[0], dynamic_shapes=({0: rows}, {0: rows}))
    targets = [node.target for node in program.graph.nodes]
    configs = {"freezing": freezing}
    path = opkit.aoti_compile_and_package(program, package_path=tmp_path / "model.pt2", inductor_configs=configs)
    assert [node.target for node in program.graph.nodes] == targets
    assert configs == {"freezing": freezing}
    with torch.no_grad():
        torch.save([(case, model(*case)) for case in cases], tmp_path / "cases")
    assert fresh_process.run(["-c", LOADED, path, tmp_path / "cases"], bare()).stdout == "[]\n"


def packaged(function, x, package_path=None, **dynamic):
    class Calls(torch.nn.Module):
        def forward(self, x):
            return function(x)

    program = torch.export.export(Calls(), (x,), **dynamic)
    return opkit.aoti_compile_and_package(program, package_path=package_path)


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_a_kernel_in_cuda_is_in_a_package(tmp_path, name):
    try:
        toolchain.find("cuda")
    except ToolchainError as error:
        pytest.skip(str(error).splitlines()[0])
    op = opkit.custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor")
    kernel = opkit.cuda_kernel("""
        template <class T> __global__ void run(const T* x, T* out, int64_t n) {
            const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
            if (i < n) out[i] = x[i] * T(2) + T(1000);
        }
        extern "C" void twice(const T* x, T* out, int64_t x_numel, cudaStream_t stream) {
            run<T><<<(x_numel + 255) / 256, 256, 0, stream>>>(x, out, x_numel);
        }
    """)
    op.register_kernel("cuda", kernel)
    x = torch.randn(8, 4, device="cuda")
    path = packaged(lambda x: (op(x + 1) * 3,), x, package_path=tmp_path / "model.pt2")
    torch.save([((x,), (((x + 1) * 2 + 1000) * 3,))], tmp_path / "cases")
    assert fresh_process.run(["-c", LOADED, path, tmp_path / "cases"], bare()).stdout == "[]\n"


# ---- refusals ----------------------------------------------------------------------------------------------------------


def doubling(name):
    op = opkit.custom_op(name, lambda x: x * 2, schema="(Tensor x) -> Tensor")
    kernel = opkit.c_kernel(
        "void f(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = x[i]; }"
    )
    return op, kernel


def test_a_kernel_in_python_is_refused(name):
    op, _ = doubling(name)
    op.register_kernel("cpu", lambda x: x * 2, name="plain")
    with pytest.raises(PackageError, match=rf"{name} .*its kernel plain is called from Python\. With torch\._inductor"):
        packaged(op, torch.ones(3))


def test_a_condition_on_sizes_that_change_is_refused(name):
    op, kernel = doubling(name)
    op.register_kernel("cpu", kernel, name="g", priority=-1)
    op.register_kernel("cpu", kernel, when=lambda x: x.shape[0] > 5)
    with pytest.raises(PackageError, match=r"its kernel f takes it depends on .*lambda.*, for sizes that may change"):
        packaged(op, torch.ones(3), dynamic_shapes=({0: torch.export.Dim("rows")},))


def test_a_tensor_that_is_not_row_major_is_refused(name):
    op, kernel = doubling(name)
    op.register_kernel("cpu", kernel)
    with pytest.raises(PackageError, match=r"it is not row-major; call \.contiguous\(\) on it in the model"):
        packaged(lambda x: op(x.t()), torch.ones(3, 2))
