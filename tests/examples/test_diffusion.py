"""examples/diffusion.py: it asserts that images agree with float64."""

import diffusion
import pytest
import torch


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arguments",
    [("--backends=opkit",), ("--backends=opkit", "--dtype=bfloat16"), ("--backends=inductor",)],
    ids=" ".join,
)
def test_images(arguments, capsys):
    torch._dynamo.reset()
    rows = diffusion.main(["--threads=1", "--steps=2", *arguments])
    assert [*rows] == ["images"]
    assert "| opkit |" in capsys.readouterr().out or "--backends=inductor" in arguments


def test_fused_projections_are_the_same_function():
    torch.manual_seed(0)
    x, text = torch.randn(2, 7, 16), torch.randn(2, 5, 12)
    with torch.inference_mode():
        for attention, others, products in (
            (diffusion.Attention(16, 2), (), 1),
            (diffusion.Attention(16, 2, text=12), (text,), 2),
        ):
            expected = attention(x, *others)
            attention.fuse()
            assert len(attention.projections) == products
            torch.testing.assert_close(attention(x, *others), expected)
