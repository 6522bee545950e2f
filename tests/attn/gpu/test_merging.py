"""The kernel that merges attention to parts of the keys."""

import pytest
import torch

from opkit.attn import merging
from opkit.attn.merging import merge_attention_operator, reference
from opkit.op.forcing import use_kernel
from opkit.testing import compile_launches


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def merge(request):
    if request.param == "interpreted":
        process = request.getfixturevalue("interpreter")
        return lambda *lists: process("opkit::merge_attention", *lists, kernel="triton")

    def on_gpu(*lists):
        there = [[x.cuda() for x in each] for each in lists]
        with use_kernel(merge_attention_operator(), "triton"):
            return tuple(x.cpu() for x in merge_attention_operator()(*there))

    return on_gpu


def made(count, *shape, dtype=torch.float32):
    torch.manual_seed(0)
    lses = [3 * torch.randn(shape[:-1]) for _ in range(count)]
    for part in range(count):
        lses[part].flatten()[part :: count + 1] = -torch.inf  # some rows see nothing of a part
    lses[0].flatten()[::7], lses[-1].flatten()[::7] = -torch.inf, -torch.inf
    return [torch.randn(shape).to(dtype) for _ in range(count)], lses


@pytest.mark.emulated
@pytest.mark.sweep
@pytest.mark.parametrize("count", [8, 1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 37, 16), torch.float32), ((5, 2, 9), torch.float16), ((3, 130), torch.bfloat16), ((0, 4), torch.float32)],
    ids=str,
)
def test_as_the_reference(merge, count, shape, dtype):
    outs, lses = made(count, *shape, dtype=dtype)
    for out, lse in zip(outs, lses, strict=True):
        out[lse == -torch.inf] = torch.nan  # of what sees nothing
    found, total = merge(outs, lses)
    exact, exact_total = reference([x.double() for x in outs], [x.double() for x in lses])
    assert found.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
    torch.testing.assert_close(total.double(), exact_total, rtol=1e-5, atol=1e-5)


def test_parts_of_any_strides(merge):
    outs, lses = made(2, 4, 6, 8)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in outs], [x.t().contiguous().t() for x in lses]
    for mine, right in zip(merge(*apart), reference(outs, lses), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_what_is_taken():
    out, lse = torch.ones(2, 3), torch.ones(2)
    assert merging.takes([out] * 8, [lse] * 8)
    assert not merging.takes([out] * 9, [lse] * 9)
    assert not merging.takes([out.double()], [lse])
    assert not merging.takes([out], [lse.double()])
    assert not merging.takes([torch.ones(2, 4097)], [lse])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["gfx942", "sm_80", "sm_90", "sm_100"])
def test_compiles(target):
    out, lse = torch.empty(8, 100, 128, dtype=torch.bfloat16, device="meta"), torch.empty(8, 100, device="meta")
    (row,) = compile_launches(lambda: merging.merge([out] * 3, [lse] * 3), [target]).rows
    assert not row.error
    assert row.spills == 0
