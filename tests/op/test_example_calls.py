"""Calls made up from annotations: the programs that they give fit the calls that users make."""

import logging

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opkit
from opkit.op.aot.package import layout_programs
from opkit.op.examples.calls import variations_of
from opkit.op.layout.outputs import layout_of
from opkit.op.layout.program import run

_programs = {}


def native(op, source, **options):
    op.register_kernel("cpu", opkit.c_kernel(source, **options))
    return op._operator.kernels.kernels[0].function


def layouts(function, *values):
    """What the programs of a kernel say of a call; equal to what its reference does, or empty."""
    if function not in _programs:
        _programs[function] = layout_programs(function)[0]
    kinds = [argument.kind for argument in function.bound.facts.arguments]
    found = [made for each in _programs[function] if (made := run(each.words, kinds, values)) is not None]
    assert all(made == layout_of(function.operator, values, {}) for made in found)
    return found


@pytest.fixture(scope="module")
def rms_norm():
    @opkit.custom_op("variations_of::rms_norm")
    def rms_norm(
        x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6
    ) -> Float[Tensor, "*batch d"]:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    source = "void f(const T* x, const T* weight, double eps, T* out, int64_t batch, int64_t d) {}"
    yield native(rms_norm, source, dtypes=["float32"])
    opkit.remove("variations_of::rms_norm")


def test_shapes_of_annotated_tensors(rms_norm):
    for shape in ((7,), (9, 8), (1, 8), (3, 1, 8), (1, 3, 8), (1, 1, 8), (5, 4, 3, 8), (1, 4, 3, 2, 8)):
        assert layouts(rms_norm, torch.empty(shape), torch.empty(shape[-1]), 0.5), shape


def test_what_is_not_foreseen(rms_norm):
    assert not layouts(rms_norm, torch.empty(0, 8), torch.empty(8), 0.5)
    assert not layouts(rms_norm, torch.empty(8, 3).t(), torch.empty(8), 0.5)
    assert not layouts(rms_norm, torch.empty(3, 8, dtype=torch.float16), torch.empty(8, dtype=torch.float16), 0.5)


def test_tensors_without_annotation_have_equal_shapes(name):
    @opkit.custom_op(name, mutates_args=())
    def total(x: Tensor, y: Tensor | None, keep: bool, dim: int = -1) -> tuple[Tensor, Tensor]:
        added = x if y is None else x + y
        return added, added.sum(dim, keepdim=keep)

    source = "void f(const T* x, const T* y, _Bool keep, int64_t dim, T* out0, T* out1, int64_t x_numel) {}"
    function = native(total, source, dtypes=["float32"])
    x = torch.empty(4, 5)
    for keep in (True, False):
        for other in (x, None):
            assert layouts(function, x, other, keep, -1)
            assert layouts(function, x, other, keep, 0)


def test_sizes_that_follow_from_others(name):
    @opkit.custom_op(name)
    def glu(x: Float[Tensor, "b 2*d"], y: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        return x.chunk(2, -1)[0] * y

    function = native(glu, "void f(const T* x, const T* y, T* out, int64_t x_numel) {}", dtypes=["float32"])
    assert layouts(function, torch.empty(3, 8), torch.empty(3, 4))


def test_named_sizes_of_1(name):
    @opkit.custom_op(name)
    def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return a @ b

    source = "void f(const T* a, const T* b, T* out, int64_t m, int64_t n, int64_t k) {}"
    function = native(product, source, dtypes=["float32", "float64"])
    for m, k, n in ((2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4)):
        for dtype in (torch.float32, torch.float64):
            assert layouts(function, torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype))


def test_lists_and_dtypes(name):
    @opkit.custom_op(name, mutates_args=())
    def joined(xs: list[Float[Tensor, "n"]], sizes: list[int], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.cat(xs).new_empty(sizes, dtype=dtype)

    function = native(joined, "void f(const T* const* xs, const int64_t* sizes, void* out) {}", dtypes=["float32"])
    for count in (1, 2, 3):
        assert layouts(function, [torch.empty(3)] * count, [7], torch.float64)
    assert layouts(function, [torch.empty(3)] * 2, [3, 4], torch.float64)


def test_an_operator_that_wants_even_sizes(name):
    @opkit.custom_op(name, mutates_args=())
    def halves(x: Float[Tensor, "b d"]) -> Tensor:
        return x.unflatten(-1, (2, x.shape[-1] // 2)).sum(-2)

    function = native(halves, "void f(const T* x, T* out, int64_t x_numel) {}", dtypes=["float32"])
    assert layouts(function, torch.empty(3, 12))


def test_an_operator_whose_sizes_are_not_known(name, caplog):
    @opkit.custom_op(name, mutates_args=())
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    function = native(positive, "void f(const T* x, T* out, int64_t x_numel) {}")
    with caplog.at_level(logging.ERROR):
        found, reason = layout_programs(function)
    assert not found
    assert "depend on the data" in reason
    assert not caplog.records


def test_an_operator_without_new_outputs_needs_none(name):
    @opkit.custom_op(name, mutates_args=("x",))
    def doubled(x: Tensor) -> None:
        x.mul_(2)

    assert layout_programs(native(doubled, "void f(T* x, int64_t x_numel) {}")) == ([], "")


def test_annotations_limit_the_dtypes(name):
    @opkit.custom_op(name)
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    function = native(twice, "void f(const T* x, T* out, int64_t n) {}", dtypes=["float32", "int64"])
    assert {values[0].dtype for values in variations_of(function)} == {torch.float32}
