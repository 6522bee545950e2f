"""The sizes of a C kernel's outputs follow from its arguments in C as they do in the reference."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import opkit

pytestmark = pytest.mark.usefixtures("bridge")

NOTHING = "void nothing(const opk_tensor* x, int64_t n, const opk_tensor* out) { (void)x; (void)n; (void)out; }"

REFERENCES = {
    "transposed": lambda x, n: (x + n).transpose(0, 1),
    "permuted": lambda x, n: x.clone().permute(2, 0, 1) + n,
    "halved": lambda x, n: x[: x.shape[0] // 2, ::3].clone(),
    "rounded up": lambda x, n: x.new_zeros(-(-x.shape[1] // n) * n, x.shape[0] % n + 1),
    "pooled": lambda x, n: F.max_pool1d(x, 2, stride=n, ceil_mode=True),
    "at most": lambda x, n: x.new_zeros(max(x.shape[0], n), min(x.shape[1], n)),
    "the same": lambda x, n: x + n,
    "reduced": lambda x, n: x.sum(1, keepdim=True),
    "flattened": lambda x, n: (x + n).reshape(x.shape[0] * x.shape[1], -1),
    "padded": lambda x, n: F.pad(x, (n, 2)),
    "windows": lambda x, n: x.unfold(1, min(n, 2), 2).clone(),
    "n of them": lambda x, n: x.new_zeros(n, x.shape[-1] + 1),
    "outer": lambda x, n: x.reshape(-1)[:, None] * x.reshape(-1)[None, :7],
    "joined": lambda x, n: torch.cat([x, x[:, :1], x], 1),
    "broadcast": lambda x, n: x * x[:, :1] + x[0],
    "a number": lambda x, n: x.sum(),
    "channels last": lambda x, n: x[None].clone(memory_format=torch.channels_last),
}


@pytest.mark.sweep(keep=["permuted", "halved", "rounded up"])
@pytest.mark.parametrize("what", REFERENCES)
def test_sizes(name, what):
    reference = REFERENCES[what]

    @opkit.custom_op(name, mutates_args=())
    def op(x: Tensor, n: int) -> Tensor:
        return reference(x, n)

    op.register_kernel("cpu", opkit.c_kernel(NOTHING))
    checked = 0
    for sizes in [(4, 6, 5), (2, 2, 2), (3, 9, 4), (1, 6, 5), (5, 4, 1), (7, 3, 8), (4, 6, 5), (8, 8, 8), (2, 5, 0)]:
        for n, layout in itertools.product((1, 2, 3), (False, True)):
            x = torch.randn(sizes[::-1]).permute(2, 1, 0) if layout else torch.randn(sizes)
            try:
                expected = reference(x, n)
            except (RuntimeError, IndexError):
                continue
            for _ in range(2):
                result = op(x, n)
                assert result.shape == expected.shape, (sizes, n)
                assert result.stride() == expected.stride() or expected.numel() <= 1 or 1 in expected.shape, (sizes, n)
            checked += 1
    assert checked > 10
    assert op._operator.bridged.serving


@pytest.mark.parametrize("with_fake", [False, True])
def test_sizes_that_follow_from_what_is_read_beside_the_arguments(name, with_fake):
    settings = {"times": 2}

    @opkit.custom_op(name, mutates_args=())
    def repeated(x: Tensor) -> Tensor:
        return x.repeat(2 if with_fake else settings["times"])

    if with_fake:
        repeated.register_fake(lambda x: x.new_empty(x.shape[0] * settings["times"]))
    source = "void repeated(const float* x, int64_t x_numel, float* out, int64_t out_numel) { "
    source += "for (int64_t i = 0; i < out_numel; i++) out[i] = x[i % x_numel]; }"
    repeated.register_kernel("cpu", opkit.c_kernel(source))
    x, compiled = torch.arange(3.0), torch.compile(lambda x: repeated(x), backend="aot_eager")
    for times in (2, 3, 2, 1):
        settings["times"] = times
        for _ in range(3):
            for each in (repeated, getattr(torch.ops.drop_in, name.split("::")[1]), compiled):
                assert each(x).tolist() == x.repeat(times).tolist()
    assert repeated.select(x).kernel == "repeated"


def test_sizes_that_follow_from_a_float(name):
    @opkit.custom_op(name, mutates_args=())
    def resized(x: Tensor, scale: float, eps: float = 0.0) -> Tensor:
        return x.new_zeros(int(x.shape[0] * scale)) + eps

    source = "void resized(const float* x, double scale, float* out, int64_t out_numel) { (void)x; (void)scale; "
    source += "for (int64_t i = 0; i < out_numel; i++) out[i] = 0; }"
    resized.register_kernel("cpu", opkit.c_kernel(source))
    x = torch.randn(4)
    for _ in range(3):
        for scale in (2.0, 1.5, 0.25, 3.0, 0.0):
            assert resized(x, scale).shape == (int(4 * scale),)
            assert getattr(torch.ops.drop_in, name.split("::")[1])(x, scale).shape == (int(4 * scale),)
