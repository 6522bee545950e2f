"""Relative positions on Hopper, as channels of queries and keys; on such a GPU the results are right."""

import pytest
import torch
from hopper_calls import BF16, FP16, compared, on_hopper_with_compiler, refuses, unlike
from relative_kernels import call_of

import opkit
from opkit.attn.gpu.hopper import relative
from opkit.masks import Causal, RelativePosition
from opkit.testing import compile_launches


def drawn(heads, queries, high, wide, head, dtype=FP16, batch=2, device="cpu"):
    """Queries whose heads are inside, keys, and the numbers of rows and columns, those of columns the same for all queries."""
    generator = torch.Generator().manual_seed(0)
    sizes = (batch, queries, heads[0], head), (batch, heads[1], high * wide, head), (batch, heads[0], queries, high)
    q, k, rel_h, rel_w = (torch.randn(s, generator=generator) for s in (*sizes, (batch, heads[0], 1, wide)))
    found = (q.transpose(1, 2), k, rel_h, rel_w.expand(-1, -1, queries, -1))
    return [x.to(device, dtype) for x in found]


@pytest.mark.parametrize(
    "case",
    [((4, 2), 37, 5, 7, 64, 0.125), ((2, 2), 20, 4, 5, 16, 0.25), ((1, 1), 3, 1, 9, 8, 1.0)],
    ids=lambda case: str(case[1]),
)
def test_products_are_the_logits(case, interpreter):
    *sizes, scale = case
    q, k, rel_h, rel_w = drawn(*sizes)
    rel_h[0, 0, 2, 0] = -torch.inf
    arguments = q, k, rel_h, rel_w, scale
    found = interpreter("relative_tests::logits", *arguments, kernel="extended")
    expected = interpreter("relative_tests::logits", *arguments, kernel="reference")
    assert torch.equal(found < -6e4, expected.isinf())
    torch.testing.assert_close(found[found > -6e4], expected[found > -6e4], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_it_compiles_without_spills(dtype):
    call = call_of(*drawn((4, 2), 196, 14, 14, 64, dtype, device="meta"), 0.125)
    report = compile_launches(lambda: relative.extended(call), ["sm_90"])
    report.raise_for_failures()
    assert [row.spills for row in report.rows] == [0, 0]


def given(*sizes, dtype=BF16, scale=0.125, **changes):
    return lambda: call_of(*drawn(*sizes, dtype, device="meta"), scale)._replace(**changes)


SIZES = (4, 2), 196, 14, 14, 64
REFUSED = {
    "float32": given(*SIZES, dtype=torch.float32),
    "numbers of another dtype": given(*SIZES, bias_tensors=[torch.empty(2, 4, 196, 14, device="meta")] * 2),
    "a scale without an inverse": given(*SIZES, scale=0.3),
    "too many rows": given((4, 2), 4096, 130, 66, 64),
    "a soft cap": given(*SIZES, softcap=3.0),
    "no bias": given(*SIZES, bias=[], bias_tensors=[]),
    "a negative scale": given(*SIZES, scale=-0.125),
}


@pytest.mark.usefixtures("a_hopper")
def test_which_calls_it_takes():
    assert relative.takes(given(*SIZES)())
    assert relative.takes(given((12, 12), 4096, 64, 64, 64)())
    assert not unlike(REFUSED, lambda call: not relative.takes(call))


def test_refuses():
    arguments = {name: (lambda made=made: tuple(made())) for name, made in REFUSED.items()}
    assert not unlike(
        arguments, refuses(relative.forward, r"kernel 'relative' does not take q, k, v of .* Leave the choice")
    )


class TestNumbers:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize(
        "sizes", [SIZES, ((2, 1), 150, 11, 13, 64), ((2, 2), 1024, 64, 64, 64), ((3, 3), 77, 7, 3, 16)]
    )
    def test_are_the_references(self, sizes, dtype):
        call = call_of(*drawn(*sizes, dtype, device="cuda"), 1 / 8 if sizes[-1] == 64 else 1 / 4)
        assert relative.takes(call)
        compared(call, relative.forward(*call))

    def test_of_a_mask_and_with_gradients(self):
        q, k, rel_h, rel_w = (x.requires_grad_() for x in drawn((2, 2), 256, 16, 16, 64, BF16, device="cuda"))
        wide = [x.detach().double().requires_grad_() for x in (q, k, rel_h, rel_w)]

        def step(q, k, rel_h, rel_w):
            out = opkit.attention(q, k, k, mask=Causal(), bias=RelativePosition(rel_h, rel_w))
            return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, rel_h, rel_w))]

        for found, expected in zip(step(q, k, rel_h, rel_w), step(*wide), strict=True):
            error = (found.double() - expected).norm() / expected.norm()
            assert error < 2e-2
