"""Every kind of argument that a schema has, as a C kernel receives it."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

pytestmark = pytest.mark.usefixtures("planned")
bridge_and_python = pytest.mark.parametrize("planned", ["bridge", "python"], indirect=True)


def registered(op, source, dtypes=("float32",), **options):
    op.register_kernel("cpu", opkit.c_kernel(source, dtypes=dtypes, **options))
    return op


def assert_kernel_like_reference(op, *args, **kwargs):
    """Often enough for every path: planned, settled, bridged."""
    with opkit.use_kernel(op, "reference"):
        expected = op(*args, **kwargs)
    assert op.select(*args, **kwargs).kernel != "reference"
    for _ in range(3):
        torch.testing.assert_close(op(*args, **kwargs), expected)


def test_scalars_of_every_kind(name):
    @opkit.custom_op(name, mutates_args=())
    def scaled(x: Tensor, n: int, a: float, negate: bool, b: float = 0.5, m: int = -3) -> Tensor:
        return (x * n * a + b + m) * (-1 if negate else 1)

    source = """
    void scaled(const float* x, int32_t n, double a, bool negate, float b, int64_t m, float* out, int64_t x_numel) {
        for (int64_t i = 0; i < x_numel; i++) out[i] = (x[i] * n * (float)a + b + m) * (negate ? -1 : 1);
    }"""
    registered(scaled, source)
    for args in ((3, 2.0, False), (3, 2.0, True), (-1, 0.25, True, 2.5, 7), (2**30, 1.0, False)):
        assert_kernel_like_reference(scaled, torch.randn(3, 2), *args)
    with pytest.raises(RuntimeError, match="n"):
        scaled(torch.randn(3), 2**40, 1.0, False)


def test_optional_scalars(name):
    @opkit.custom_op(name, mutates_args=())
    def shifted(x: Tensor, a: float | None = None, n: int | None = None, flag: bool | None = None) -> Tensor:
        return x + (0.0 if a is None else a) + (0 if n is None else n) + (10 if flag else 0)

    source = """
    void shifted(const float* x, const double* a, const int64_t* n, const bool* flag, float* out, int64_t x_numel) {
        const double by = (a ? *a : 0) + (n ? *n : 0) + (flag && *flag ? 10 : 0);
        for (int64_t i = 0; i < x_numel; i++) out[i] = (float)(x[i] + by);
    }"""
    registered(shifted, source)
    x = torch.randn(4)
    for args in ((), (1.5,), (None, 3), (2.0, None, True), (None, None, False), (0.0, 0, False)):
        assert_kernel_like_reference(shifted, x, *args)


@bridge_and_python
def test_strings_dtypes_and_lists_of_numbers(name):
    @opkit.custom_op(name, mutates_args=())
    def combined(
        x: Tensor,
        mode: str,
        ns: list[int],
        fs: list[float],
        bs: list[bool],
        dtype: torch.dtype,
        note: str | None = None,
    ) -> Tensor:
        total = sum(ns) + sum(fs) + sum(bs) + len(mode.encode()) + len((note or "").encode())
        return x * total + (1 if dtype is torch.float64 else 0)

    source = """
    void combined(const float* x, const char* mode, int64_t mode_len, const int64_t* ns, int64_t ns_len, const double* fs,
                  int64_t fs_len, const bool* bs, int64_t bs_len, int32_t dtype, const char* note, int64_t note_len,
                  float* out, int64_t x_numel) {
        double total = mode_len + note_len;
        for (int64_t i = 0; i < ns_len; i++) total += ns[i];
        for (int64_t i = 0; i < fs_len; i++) total += fs[i];
        for (int64_t i = 0; i < bs_len; i++) total += bs[i];
        if (mode[mode_len] != 0 || (note && note[note_len] != 0)) opk_fail("a string does not end");
        for (int64_t i = 0; i < x_numel; i++) out[i] = (float)(x[i] * total + (dtype == OPK_FLOAT64));
    }"""
    registered(combined, source)
    x = torch.randn(2, 3)
    assert_kernel_like_reference(combined, x, "sum", [1, 2], [0.5], [True, False], torch.float64)
    assert_kernel_like_reference(combined, x, "", [], [], [], torch.float32, "a note")
    assert_kernel_like_reference(combined, x, "ü", [5], [1.5, 2.5, 3.5], [True], torch.float64, "")


def test_optional_tensors(name):
    @opkit.custom_op(name)
    def linear(x: Float[Tensor, "n"], bias: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
        return x * 2 if bias is None else x * 2 + bias

    source = """
    void linear(const T* x, const T* bias, T* out, int64_t n, int64_t bias_numel) {
        for (int64_t i = 0; i < n; i++) out[i] = 2 * x[i] + (bias ? bias[i] : 0);
        if (bias_numel != (bias ? n : 0)) opk_fail("bias_numel is %d", (int)bias_numel);
    }"""
    registered(linear, source)
    for _ in range(2):
        assert_kernel_like_reference(linear, torch.randn(5))
        assert_kernel_like_reference(linear, torch.randn(5), torch.randn(5))


@bridge_and_python
@pytest.mark.sweep(2)
@pytest.mark.parametrize("parameter", ["const T* const* xs", "const opk_tensor* xs"])
def test_lists_of_tensors(name, parameter):
    @opkit.custom_op(name, mutates_args=())
    def total(xs: list[Tensor]) -> Tensor:
        return sum(xs[1:], xs[0].clone())

    item = "xs[k][i]" if "T*" in parameter else "((const T*)xs[k].data)[i]"
    source = f"""
    void total({parameter}, int64_t xs_len, T* out, int64_t out_numel) {{
        for (int64_t i = 0; i < out_numel; i++) {{
            T sum = 0;
            for (int64_t k = 0; k < xs_len; k++) sum += {item};
            out[i] = sum;
        }}
    }}"""
    registered(total, source, dtypes=["float32", "float64"])
    for count in (1, 2, 20):
        assert_kernel_like_reference(total, [torch.randn(3, 2) for _ in range(count)])
    assert_kernel_like_reference(total, [torch.randn(3, dtype=torch.float64)] * 2)


def test_several_outputs(name):
    @opkit.custom_op(name)
    def moments(x: Float[Tensor, "b n"]) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"], Tensor]:
        return x.mean(1), x.pow(2).mean(1), x.argmax(1)

    source = """
    void moments(const T* x, T* out0, T* out1, int64_t* out2, int64_t b, int64_t n) {
        for (int64_t i = 0; i < b; i++) {
            opk_acc sum = 0, squares = 0;
            int64_t best = 0;
            for (int64_t j = 0; j < n; j++) {
                const T value = x[i * n + j];
                sum += value; squares += value * value;
                if (value > x[i * n + best]) best = j;
            }
            out0[i] = sum / n; out1[i] = squares / n; out2[i] = best;
        }
    }"""
    registered(moments, source, dtypes=["float32", "float64"])
    assert_kernel_like_reference(moments, torch.randn(4, 7))
    assert_kernel_like_reference(moments, torch.randn(7, 4, dtype=torch.float64).t())


def test_strided_tensors_are_not_copied(name):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    source = """
    static void map(const opk_tensor* x, const opk_tensor* out, int64_t d, const T* from, T* to) {
        if (d == x->rank) { *to = 2 * *from; return; }
        for (int64_t i = 0; i < x->sizes[d]; i++) map(x, out, d + 1, from + i * x->strides[d], to + i * out->strides[d]);
    }
    void doubled(const opk_tensor* x, const opk_tensor* out, int64_t x_stride_0) {
        if (x->rank > 0 && x_stride_0 != x->strides[0]) opk_fail("the stride is %d", (int)x_stride_0);
        map(x, out, 0, (const T*)x->data, (T*)out->data);
    }"""
    registered(doubled, source, dtypes=["float32", "float64"])
    x = torch.randn(4, 6)
    for view in (x, x.t(), x[::2, 1:], x.expand(2, 4, 6), x.unsqueeze(1), torch.empty(0, 3), x.double().t()):
        assert_kernel_like_reference(doubled, view)
        assert doubled(view).stride() == (view * 2).stride()


def test_in_place(name):
    @opkit.custom_op(name)
    def add_(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> None:
        x.add_(y)

    source = "void add(T* x, const T* y, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] += y[i]; }"
    registered(add_, source)
    assert add_.describe().mutates == ("x",)
    for x in (torch.zeros(4), torch.zeros(8)[::2], torch.zeros(0)):
        for k in range(1, 5):
            version = x._version
            add_(x, torch.ones_like(x))
            assert x.tolist() == [float(k)] * len(x)
            assert x._version > version


def test_a_stale_backward_raises(name):
    @opkit.custom_op(name)
    def add_(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> None:
        x.add_(y)

    source = "void add(T* x, const T* y, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] += y[i]; }"
    registered(add_, source)
    for _ in range(4):
        a, w = torch.ones(3), torch.ones(3, requires_grad=True)
        loss = (w * a).sum()
        add_(a, torch.ones(3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_named_sizes_and_measures(name):
    @opkit.custom_op(name)
    def counted(x: Float[Tensor, "*batch 3 d"]) -> Float[Tensor, "6"]:
        sizes = [x.numel(), x.dim(), x.shape[-1], x.shape[0], x.stride(0), x[..., 0, 0].numel()]
        return torch.stack([x.new_full((), float(s)) for s in sizes])

    source = """
    void counted(const float* x, int64_t x_numel, int32_t x_rank, int64_t d, int64_t x_size_0, int64_t x_stride_0,
                 int64_t batch, float* out) {
        (void)x;
        out[0] = x_numel; out[1] = x_rank; out[2] = d; out[3] = x_size_0; out[4] = x_stride_0; out[5] = batch;
    }"""
    registered(counted, source)
    for shape in ((3, 5), (2, 3, 5), (4, 2, 3, 1)):
        assert_kernel_like_reference(counted, torch.randn(shape))


def test_bind_gives_parameters_other_meanings(name):
    @opkit.custom_op(name)
    def axpy(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 3 * x + y

    source = """
    void axpy(int64_t count, float alpha, const float* a, const float* b, float* result, const void* unused) {
        for (int64_t i = 0; i < count; i++) result[i] = alpha * a[i] + b[i] + (unused != 0);
    }"""
    bind = {"count": "n", "alpha": 3.0, "a": "x", "b": "y", "result": "out", "unused": None}
    registered(axpy, source, bind=bind)
    assert_kernel_like_reference(axpy, torch.randn(9), torch.randn(9))


@bridge_and_python
def test_several_type_variables(name):
    @opkit.custom_op(name)
    def gather(x: Float[Tensor, "n"], index: Tensor) -> Tensor:
        return x[index.long()]

    source = """
    void gather(const T* x, const I* index, T* out, int64_t index_numel, int64_t n) {
        for (int64_t i = 0; i < index_numel; i++) {
            if (index[i] < 0 || index[i] >= n) { opk_fail("index %d is out of range", (int)index[i]); return; }
            out[i] = x[index[i]];
        }
    }"""
    kernel = opkit.c_kernel(source, dtypes={"T": ["float32", "bfloat16"], "I": ["int32", "int64"]})
    gather.register_kernel("cpu", kernel)
    for dtype in (torch.float32, torch.bfloat16):
        for index in (torch.int32, torch.int64):
            assert_kernel_like_reference(gather, torch.randn(5, dtype=dtype), torch.tensor([4, 0, 2], dtype=index))
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"gather.*index 9 is out of range \(.*test_native_arguments.py:\d+\)"):
            gather(torch.randn(5), torch.tensor([9]))
    assert gather.select(torch.randn(5), torch.tensor([1], dtype=torch.uint8)).kernel == "reference"
