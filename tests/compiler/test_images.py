"""Convolutions, their norms and pooling, trained: what is between the convolutions is opkit's, channels innermost."""

import copy

import pytest
import torch
from torch import nn

import opkit
from opkit.compiler import backend
from opkit.compiler.capture.sizes import SymbolicSizes


class Stem(nn.Module):
    def __init__(self, dilation=1):
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, 2, padding=1, dilation=dilation)

    def forward(self, x):
        return self.pool(torch.relu(self.norm(self.convolution(x))))


def step(module, call, x):
    module.zero_grad()
    found = call(x)
    (found.float() * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
    return [found, *(p.grad for p in module.parameters()), *module.buffers()]


def compiled(module):
    return torch.compile(module, backend=backend.opkit_backend, options={"strict": True})


@pytest.mark.parametrize("dilation", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_stem_is_trained_as_in_eager(dilation):
    torch.manual_seed(0)
    module, other = Stem(dilation), Stem(dilation)
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 13, 10)
    for found, expected in zip(step(module, compiled(module), x), step(other, other, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_windows_of_each_channel_are_trained_as_in_float64(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 24, 1), nn.Conv2d(24, 24, 5, stride=2, padding=2, groups=24), nn.ReLU()).to(
        dtype
    )
    exact = copy.deepcopy(module).double()
    x = torch.randn(2, 3, 11, 9, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for found, expected in zip(step(module, compiled(module), x), step(exact, exact, x.double()), strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_norms_of_bfloat16_are_not_called():
    torch.manual_seed(0)
    module = Stem().bfloat16()
    graphs = opkit.explain(module, torch.randn(2, 3, 12, 12).bfloat16()).graphs
    assert {call.split(".default")[0] for graph in graphs for call in graph.calls} == {
        "aten.convolution",
        "aten.convolution_backward",
    }


@pytest.mark.parametrize("size", [3, pytest.param(7, marks=pytest.mark.exhaustive)])
def test_the_index_of_a_dilated_window_of_minus_infinity_is_in_the_window(size):
    x = torch.full((1, 2, 16, 16), -torch.inf)
    pool = nn.MaxPool2d(size, 1, padding=1, dilation=2, return_indices=True)
    for found, expected in zip(compiled(pool)(x), pool(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


LAYOUTS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "integers": lambda x: (x * 5).to(torch.int64)[:, :, :5, :5],
}


@pytest.mark.sweep(keep=["plain", "integers"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_nan_and_of_nothing_else_than_padding_and_minus_infinity(layout):
    x = torch.randn(2, 3, 9, 9)
    x[0, 0, :4, :4] = -torch.inf
    x[0, 1, 2, 2] = x[0, 1, 3, 3] = torch.nan
    pool = nn.MaxPool2d(3, 2, padding=1, return_indices=True)
    given = LAYOUTS[layout](x)
    for found, expected in zip(compiled(pool)(given), pool(given), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("fresh")
def test_positions_of_maxima_are_saved_in_two_bytes():
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    y = compiled(nn.MaxPool2d(3, 2, padding=1))(x)
    assert [t.dtype for t in y.grad_fn.saved_tensors if not t.is_floating_point()] == [torch.int16]
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(nn.functional.max_pool2d(x, 3, 2, 1).sum(), x)[0])


def test_weights_of_one_element_with_strides_and_few_channels():
    """oneDNN writes out of bounds for their gradient where images are channels-last."""
    layer = torch.nn.Conv2d(3, 64, 1, 2)
    x, compiled = torch.randn(2, 3, 96, 96), torch.compile(layer, backend="opkit")
    (wanted,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    for _ in range(4):
        (found,) = torch.autograd.grad(compiled(x).square().sum(), [layer.weight])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("channels", "groups"), [(12, 4), (6, 6), (5, 1)])
def test_group_norms_between_convolutions(channels, groups):
    """Their channels lie next to each other there; the oracle is float64, and odd sizes leave parts of vectors."""

    def made():
        torch.manual_seed(0)
        layers = nn.Conv2d(3, channels, 3), nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv2d(channels, 4, 1)
        return nn.Sequential(*layers, nn.GroupNorm(2, 4, affine=False))

    x = torch.randn(2, 3, 15, 9)
    module, exact = made(), made().double()
    for found, expected in zip(step(module, compiled(module), x), step(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


class PatchesPlusLayers(nn.Module):
    """The residual stream of vision transformers that keep rows and columns: channels are the last dimension."""

    def __init__(self):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 12, 4, 4), nn.LayerNorm(12)
        self.positions, self.layers = (
            nn.Parameter(torch.randn(5, 6, 12)),
            nn.ModuleList(nn.Linear(12, 12) for _ in range(2)),
        )
        self.neck = nn.Conv2d(12, 4, 1)

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1) + self.positions
        for layer in self.layers:
            x = x + layer(self.norm(x)).tanh()
        return self.neck(x.permute(0, 3, 1, 2)), x


def test_channels_of_the_last_dimension_after_a_convolution():
    """Results have the strides of eager mode, in which a channel's elements lie together."""
    torch.manual_seed(0)
    module, x = PatchesPlusLayers(), torch.randn(2, 3, 20, 24)
    wide = copy.deepcopy(module).double()
    found, exact = compiled(module)(x), wide(x.double())
    for one, other, eager in zip(found, exact, module(x), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        assert one.stride() == eager.stride()
    gradients = [
        torch.autograd.grad(sum(each.square().sum() for each in results), [*of.parameters()])
        for results, of in ((found, module), (exact, wide))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-2)


def test_images_of_symbolic_sizes_are_trained_in_their_layout():
    """torch's strides of such a result are products of ``Max(1, size)``, by which the backward reads what the forward stores."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.AvgPool2d(2), nn.SiLU()
    )
    module, eager = module.to(memory_format=torch.channels_last), copy.deepcopy(module)
    call = torch.compile(module, backend=backend.opkit_backend, options={"strict": True}, dynamic=True)
    for sizes in ((2, 4, 17, 14), (1, 4, 12, 21)):
        x = torch.randn(sizes).to(memory_format=torch.channels_last)
        found, expected = step(module, call, x), step(eager, eager, x)
        assert found[0].stride() == expected[0].stride()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_backward_reads_no_strides_that_it_cannot_know(monkeypatch):
    monkeypatch.setattr(SymbolicSizes, "stride", SymbolicSizes.index)  # then channels-last is not recognised
    module = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()).to(memory_format=torch.channels_last)
    call = torch.compile(module, backend=backend.opkit_backend, options={"strict": True}, dynamic=True)
    with pytest.raises(Exception, match="which is saved for the backward, has strides that torch does not expect"):
        call(torch.randn(2, 4, 17, 14).to(memory_format=torch.channels_last))


class Branches(nn.Module):
    """Branches that are joined and padded, windows of what they join, and a convolution with a large weight."""

    def __init__(self):
        super().__init__()
        self.first, self.pointwise = nn.Conv2d(3, 10, 3), nn.Conv2d(10, 7, 1)
        self.large, self.last = nn.Conv2d(27, 40, 3, bias=False), nn.Conv2d(40, 6, (1, 3), padding=(0, 1))

    def forward(self, x):
        x = self.first(x).relu()
        pool = nn.functional.max_pool2d(x, 3, 1, padding=1)
        x = torch.cat([x, self.pointwise(nn.functional.avg_pool2d(x, 3, 1, 1)), pool], 1)
        x = nn.functional.avg_pool2d(nn.functional.pad(x, (0, 1, 1, 0), value=0.5), 3, 2, ceil_mode=True)
        return self.last(nn.functional.silu(self.large(x)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_branches_are_trained_as_in_float64(layout):
    torch.manual_seed(0)
    module, exact = Branches().to(memory_format=layout), Branches().double()
    exact.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 11, 9)
    for found, expected in zip(step(module, compiled(module), x), step(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
