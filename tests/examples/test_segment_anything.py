"""examples/segment_anything.py: it asserts that results agree with float64."""

import pytest
import segment_anything
import torch


@pytest.mark.parametrize(
    "arguments",
    [
        ("--padded", "--dtype=bfloat16"),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ((), ("--padded",), ("--backends=inductor",))),
    ],
    ids=" ".join,
)
def test_encodings(arguments, capsys):
    torch._dynamo.reset()
    rows = segment_anything.main(["--backends=opkit", "--threads=1", "--batch=2", *arguments])
    assert [row.name for row in rows] == ["eager", "inductor" if "--backends=inductor" in arguments else "opkit"]
    assert "| eager |" in capsys.readouterr().out


def test_padding_is_hidden():
    """Values in it, however large, reach nothing else: only the neck's convolution reaches across the edge."""
    torch.manual_seed(0)
    sizes = segment_anything.SIZES["tiny"]
    model = segment_anything.without_matrices(segment_anything.Encoder(sizes))
    model.neck = torch.nn.Identity()
    images, extent = torch.randn(2, 3, sizes.image, sizes.image), torch.tensor([[7, 5], [10, 3]])
    with torch.inference_mode():
        first = model(images, extent)
        for image, (rows, columns) in enumerate((extent * sizes.patch).tolist()):
            images[image, :, rows:] = 1e3
            images[image, :, :, columns:] = -1e3
        second = model(images, extent)
    for image, (rows, columns) in enumerate(extent.tolist()):
        assert torch.equal(first[image, :, :rows, :columns], second[image, :, :rows, :columns])
        assert not torch.equal(first[image], second[image])
