"""C kernels on operators: what is passed to C, which calls they take, and that every rule still holds."""

import contextlib

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

pytestmark = pytest.mark.usefixtures("planned")

RMS_NORM = """
void rms_norm(const T* x, const T* weight, double eps, T* out, int64_t batch, int64_t d) {
    for (int64_t i = 0; i < batch; i++) {
        opk_acc sum = 0;
        for (int64_t j = 0; j < d; j++) sum += (opk_acc)x[i * d + j] * (opk_acc)x[i * d + j];
        const opk_acc scale = (opk_acc)(1 / sqrt((double)sum / d + eps));
        for (int64_t j = 0; j < d; j++) out[i * d + j] = (T)((opk_acc)x[i * d + j] * scale * (opk_acc)weight[j]);
    }
}
"""


@contextlib.contextmanager
def defined(name):
    @opkit.custom_op(name)
    def rms_norm(
        x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6
    ) -> Float[Tensor, "*batch d"]:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    kernel = opkit.c_kernel(RMS_NORM, dtypes=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
    rms_norm.register_kernel("cpu", kernel)
    yield rms_norm
    opkit.remove(name)


@pytest.fixture(scope="module")
def rms_norm(bridge):
    with defined("native::rms_norm") as op:
        yield op


@pytest.fixture
def planned_rms_norm(planned):
    # One name: the kernel is built once, as the name is part of what is built.
    with defined("native::planned_rms_norm") as op:
        yield op


def assert_like_reference(op, *args, **kwargs):
    with torch.no_grad():
        result = op(*args, **kwargs)
        with opkit.use_kernel(op, "reference"):
            expected = op(*args, **kwargs)
    half = isinstance(expected, Tensor) and expected.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(result, expected, **({"rtol": 0.03, "atol": 0.01} if half else {}))
    if isinstance(expected, Tensor):
        assert result.stride() == expected.stride() or expected.numel() == 0


@pytest.mark.sweep
@pytest.mark.parametrize("planned", ["bridge", "python"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), (0, 5), (3, 1), (2, 0)])
def test_a_kernel_gives_what_the_reference_gives(planned_rms_norm, dtype, shape):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
    assert planned_rms_norm.select(x, weight).kernel == "rms_norm"
    for _ in range(3):
        assert_like_reference(planned_rms_norm, x, weight)
        assert_like_reference(planned_rms_norm, x, weight, 0.5)


def test_layouts(rms_norm):
    x, weight = torch.randn(6, 8), torch.randn(16)
    for view in (
        x.t(),
        x[::2],
        x[:, 1:7],
        x[:, ::2],
        x.unfold(0, 3, 1),
        x[:1].expand(4, 8),
        x.unsqueeze(1).transpose(0, 2),
    ):
        for _ in range(3):
            assert_like_reference(rms_norm, view, weight[::2][: view.shape[-1]])


def test_a_dtype_that_was_not_compiled_goes_to_the_reference(name):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_kernel("cpu", opkit.c_kernel(TWICE, dtypes=["float32"]))
    assert doubled.select(torch.ones(2)).kernel == "twice"
    chosen = doubled.select(torch.ones(2, dtype=torch.float64))
    assert chosen.kernel == "reference"
    assert "x has torch.float64; it takes torch.float32" in chosen.refused["twice"]
    assert doubled(torch.ones(2, dtype=torch.float64)).tolist() == [2.0, 2.0]


TWICE = "void twice(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i]; }"


def test_integers_and_complex_numbers(name):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    integers = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
    dtypes = [*integers, torch.complex64, torch.complex128]
    doubled.register_kernel("cpu", opkit.c_kernel(TWICE, dtypes=dtypes))
    for dtype in dtypes:
        x = torch.arange(5).to(dtype)
        assert doubled.select(x).kernel == "twice", dtype
        assert_like_reference(doubled, x)


def test_bools(name):
    @opkit.custom_op(name, mutates_args=())
    def negation(x: Tensor) -> Tensor:
        return ~x

    source = (
        "void negate(const T* x, T* out, int64_t x_numel) { for (int64_t i = 0; i < x_numel; i++) out[i] = !x[i]; }"
    )
    negation.register_kernel("cpu", opkit.c_kernel(source, dtypes=[torch.bool]))
    assert_like_reference(negation, torch.tensor([True, False, True]))


def test_gradients(rms_norm):
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rms_norm, (x, weight), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(rms_norm, (x, weight))


def test_transforms(rms_norm):
    x, weight = torch.randn(4, 3, 5), torch.randn(5)
    looped = torch.stack([rms_norm(row, weight) for row in x])
    torch.testing.assert_close(torch.vmap(rms_norm, in_dims=(0, None))(x, weight), looped)
    jacobian = torch.func.jacrev(rms_norm)(x[0], weight)
    assert jacobian.shape == (3, 5, 3, 5)
    _, tangent = torch.func.jvp(lambda x: rms_norm(x, weight), (x,), (torch.ones_like(x),))
    assert tangent.abs().sum() > 0


def test_forward_mode_keeps_its_tangents(rms_norm):
    x, weight = torch.randn(3, 5), torch.ones(5)
    for _ in range(4):
        rms_norm(x, weight)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(rms_norm(dual, weight)).tangent is not None
        direct = torch.ops.native.rms_norm(dual, weight)
        assert torch.autograd.forward_ad.unpack_dual(direct).tangent is not None


def test_inference_mode_and_no_grad(rms_norm):
    x, weight = torch.randn(3, 5, requires_grad=True), torch.ones(5)
    expected = rms_norm(x, weight).detach()
    with torch.inference_mode():
        torch.testing.assert_close(rms_norm(x, weight), expected)
    with torch.no_grad():
        result = rms_norm(x, weight)
    assert not result.requires_grad


def test_compile_and_export(rms_norm):
    x, weight = torch.randn(3, 5), torch.randn(5)

    def model(x, weight):
        return rms_norm(x + 1, weight) * 2

    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x, weight), model(x, weight))

    class Model(torch.nn.Module):
        def forward(self, x, weight):
            return model(x, weight)

    program = torch.export.export(Model(), (x, weight))
    assert "native.rms_norm" in program.graph_module.code
    torch.testing.assert_close(program.module()(x, weight), model(x, weight))


def test_autocast(rms_norm):
    x, weight = torch.randn(3, 5), torch.randn(5)
    with torch.autocast("cpu", torch.bfloat16):
        result = rms_norm(x, weight)
        with opkit.use_kernel(rms_norm, "reference"):
            assert result.dtype == rms_norm(x, weight).dtype


def test_shapes_are_checked(rms_norm):
    for _ in range(4):
        rms_norm(torch.randn(3, 5), torch.ones(5))
    with pytest.raises(opkit.errors.ShapeError, match="weight"):
        rms_norm(torch.randn(3, 5), torch.ones(6))
