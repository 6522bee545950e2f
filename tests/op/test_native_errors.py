"""Errors in C kernels, and the messages that their authors and callers get."""

import inspect
import threading

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.errors import CompileError, DeclarationError, KernelError, NoCompilerWarning, SanitizerError
from opkit.kernels.cc import isa

pytestmark = pytest.mark.usefixtures("bridge")


@pytest.fixture
def doubled(name):
    @opkit.custom_op(name, mutates_args=())
    def doubled(x: Tensor, n: int = 0) -> Tensor:
        return x * 2

    return doubled


def line_of(text):
    """The number of the line of this file that ends in ``text``."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    return next(i + 1 for i, line in enumerate(lines) if line.endswith(text))


def test_a_compile_error_shows_the_authors_own_line(doubled):
    doubled.register_kernel(
        "cpu",
        opkit.c_kernel("""
        void twice(const T* x, T* out, int64_t x_numel) {
            for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * y[i];
        }"""),
    )
    with pytest.raises(CompileError) as caught:
        doubled(torch.ones(2))
    message = str(caught.value)
    assert f"{__file__}:{line_of('out[i] = 2 * y[i];')}" in message
    assert "y" in message
    assert "opk_boxed" not in message
    assert doubled.name in message
    assert caught.value.command
    with opkit.use_kernel(doubled, "reference"):
        assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_file_of_source_is_named_in_its_errors(doubled, tmp_path):
    path = tmp_path / 'a "quoted" $(name); rm -rf x.c'
    path.write_text("void twice(const float* x, float* out, int64_t x_numel) {\n    oops;\n}\n")
    doubled.register_kernel("cpu", opkit.c_kernel(path))
    with pytest.raises(CompileError, match="oops") as caught:
        doubled(torch.ones(2))
    assert f"{path.name}:2" in str(caught.value)


def test_a_declaration_that_does_not_fit_is_refused_at_registration(doubled):
    for source, message in (
        ("void f(const T* y, T* out) {}", "y"),
        ("void f(T* x, T* out) {}", "const"),
        ("void f(const T* x) {}", "out"),
        ("void f(const T* x, T* out, int64_t x_numle) {}", "x_numel"),
        ("float f(const T* x, T* out) { return 0; }", "int"),
        ("static void f(const T* x, T* out) {}", "static"),
        ("void f(const T* x, T* out) {} void g(const T* x, T* out) {}", "Several"),
        ("", "empty"),
    ):
        with pytest.raises(DeclarationError, match=message):
            pytest.fail(f"{source} is registered: {doubled.register_kernel('cpu', opkit.c_kernel(source))}")
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert doubled.select(torch.ones(2)).kernel == "reference"


def test_options_that_cannot_be(doubled):
    source = "void f(const T* x, T* out) {}"
    for options in ({"dtypes": ["float33"]}, {"dtypes": []}, {"isa": "mmx"}, {"dtypes": [torch.complex32]}):
        with pytest.raises(KernelError):
            opkit.c_kernel(source, **options)
    with pytest.raises(KernelError, match="cuda"):
        doubled.register_kernel("cuda", opkit.c_kernel(source))


FAILING = """
{returns} twice(const T* x, T* out, int64_t x_numel, int64_t n) {{
    for (int64_t i = 0; i < x_numel; i++) out[i] = 2 * x[i];
    {statement}
}}"""


@pytest.mark.parametrize(
    ("returns", "statement", "message"),
    [
        ("int", "return n ? 7 : 0;", "it returned the error code 7"),
        ("const char*", 'return n ? "n must be 0" : 0;', "n must be 0"),
        ("void", 'if (n) opk_fail("n is %d, not %s", (int)n, "0");', "n is 1, not 0"),
    ],
)
def test_a_kernel_reports_failure(doubled, returns, statement, message):
    source = FAILING.format(returns=returns, statement=statement)
    doubled.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"]))
    x = torch.ones(2)
    for _ in range(4):  # planned, then bridged
        assert doubled(x).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match=message) as caught:
            doubled(x, 1)
        assert doubled.name in str(caught.value)
        with pytest.raises(RuntimeError, match=message):
            getattr(torch.ops.drop_in, doubled.name.split("::")[1])(x, 1)


def test_failures_are_told_apart_between_threads(doubled):
    source = FAILING.format(returns="void", statement='if (n) opk_fail("thread %d", (int)n);')
    doubled.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float32"]))
    doubled(torch.ones(2))
    wrong = []

    def run(n):
        for _ in range(50):
            try:
                doubled(torch.ones(8), n)
            except RuntimeError as error:
                if f"thread {n} " not in str(error):
                    wrong.append(str(error))
            else:
                wrong.append("nothing was raised")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_compiler_the_reference_runs(doubled, settings):
    settings(cc="/nonexistent/cc")
    doubled.register_kernel("cpu", opkit.c_kernel("void f(const T* x, T* out, int64_t x_numel) {}"))
    with pytest.warns(NoCompilerWarning, match="OPKIT_CC"):
        assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert doubled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]  # without another word
    chosen = doubled.select(torch.ones(2))
    assert chosen.kernel == "reference"
    assert "OPKIT_CC" in chosen.refused["f"]


def test_a_debug_build_finds_what_lies_outside(name):
    @opkit.custom_op(name)
    def cumulated(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.cumsum(0)

    cumulated.register_kernel(
        "cpu",
        opkit.c_kernel(
            """
            void cumulated(const T* x, T* out, int64_t n) {
                T sum = 0;
                for (int64_t i = 0; i <= n; i++) out[i] = sum += x[i];
            }""",
            dtypes=["float32"],
            debug=True,
        ),
    )
    with pytest.raises(SanitizerError, match=r"'x'|'out'") as caught:
        cumulated(torch.ones(5))
    message = str(caught.value)
    assert f"{__file__}:{line_of('out[i] = sum += x[i];')}" in message
    assert "x=(5,) torch.float32" in message


def test_a_debug_build_gives_the_same_numbers(name):
    @opkit.custom_op(name)
    def scaled(
        x: Float[Tensor, "*b d"], w: Float[Tensor, "d"] | None, n: int | None, mode: str, k: list[int]
    ) -> tuple[Tensor, Tensor]:
        y = x * (1 if w is None else w) * (2 if n is None else n) + len(mode) + sum(k)
        return y, y.sum(-1)

    source = """
    int scaled(const opk_tensor* x, const T* w, const int64_t* n, const char* mode, int64_t mode_len, const int64_t* k,
               int64_t k_len, const opk_tensor* out0, T* out1, int64_t b, int64_t d) {
        if (x->rank != 2) return 3;
        for (int64_t i = 0; i < b; i++) {
            out1[i] = 0;
            for (int64_t j = 0; j < d; j++) {
                T y = ((const T*)x->data)[i * x->strides[0] + j * x->strides[1]] * (w ? w[j] : (T)1) * (n ? *n : 2);
                y += mode_len + (mode[0] == 'x');
                for (int64_t l = 0; l < k_len; l++) y += k[l];
                ((T*)out0->data)[i * out0->strides[0] + j * out0->strides[1]] = y;
                out1[i] += y;
            }
        }
        return 0;
    }"""
    scaled.register_kernel("cpu", opkit.c_kernel(source, dtypes=["float64", "float32"], debug=True))
    for dtype in (torch.float32, torch.float64):
        x, w = torch.randn(6, 4, dtype=dtype), torch.randn(8, dtype=dtype)[::2]
        for args in (
            (x, w, 3, "mode", [1, 2]),
            (x.t()[:, :4].contiguous().t(), w[:4], None, "", []),
            (x, None, 1, "m", []),
        ):
            with opkit.use_kernel(scaled, "reference"):
                expected = scaled(*args)
            torch.testing.assert_close(scaled(*args), expected)
    with pytest.raises(KernelError, match="error code 3"):
        scaled(torch.randn(2, 3, 4), None, None, "", [])


def test_a_debug_build_writes_in_place(name):
    @opkit.custom_op(name)
    def add_(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> None:
        x.add_(y)

    source = "void add(T* x, const T* y, int64_t n) { for (int64_t i = 0; i < n; i++) x[i] += y[i]; }"
    add_.register_kernel("cpu", opkit.c_kernel(source, debug=True))
    for x in (torch.zeros(4), torch.zeros(8)[::2]):
        add_(x, torch.ones(4))
        assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("(Tensor x, Scalar a) -> Tensor", "a of type number"),
        ("(Tensor x, complex z) -> Tensor", "z of type complex"),
        ("(Tensor x, Tensor?[] ys) -> Tensor", "ys of type"),
        ("(Tensor(a) x) -> Tensor(a)", "view"),
    ],
)
def test_operators_that_cannot_be_passed_to_c_are_refused_at_registration(name, schema, message):
    op = opkit.custom_op(name, lambda *args: args[0] * 2, schema=schema, opaque=True)
    with pytest.raises(KernelError, match=message):
        op.register_kernel("cpu", opkit.c_kernel("void f(const float* x, float* out) {}"))


def test_a_path_given_as_text_is_recognised(tmp_path):
    with pytest.raises(KernelError, match="Path"):
        opkit.c_kernel(str(tmp_path / "kernel.c"))


def test_an_output_of_another_dtype_is_named(name):
    op = opkit.custom_op(name, lambda x: x > 0, schema="(Tensor x) -> Tensor")
    op.register_kernel("cpu", opkit.c_kernel("void f(const float* x, float* out) { (void)x; (void)out; }"))
    with pytest.raises(RuntimeError, match="out has elements of type bool where float32 was expected"):
        op(torch.ones(3))


def test_an_instruction_set_of_another_processor_leaves_the_reference(doubled):
    foreign = "neon" if isa.machine() == "x86_64" else "avx2"
    doubled.register_kernel("cpu", opkit.c_kernel("void f(const float* x, float* out) {}", isa=foreign))
    with pytest.warns(NoCompilerWarning, match=foreign):
        assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
