"""Products and convolutions with packed weights, for every instruction set that runs here, against float64."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from opkit import _core
from opkit.errors import ArgumentError
from opkit.ship.products import pack_convolution, pack_linear, winograd_tile

own = torch.ops.opkit
ISAS = _core.isas()


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("OPKIT_ISA", request.param)
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(found, wanted, depth):
    assert found.dtype is torch.float32
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs()
    assert bool((error <= 4e-7 * max(depth, 1) + 1e-6 * wanted.abs()).all()), error.max()


def check_product(rows, columns, depth, activation="none", with_bias=True):
    x, w, bias = torch.rand(rows, depth) - 0.5, torch.rand(columns, depth) - 0.5, torch.rand(columns)
    y = own.packed_linear(x, pack_linear(w), columns, bias if with_bias else None, activation)
    wanted = x.double() @ w.double().T + (bias.double() if with_bias else 0)
    close(y, wanted.relu() if activation == "relu" else wanted, depth)


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 70, 5), (13, 33, 17), (7, 16, 1024), (150, 97, 771), (12, 250, 1600), (3, 1, 1)]
)
def test_products(isa, threads, rows, columns, depth):
    check_product(rows, columns, depth, "relu" if columns % 2 else "none", depth % 2 == 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", range(1, 31))
def test_products_of_all_sizes(isa, rows):
    for columns, depth in itertools.product((1, 15, 16, 17, 32, 47, 64, 65, 129), (1, 2, 3, 4, 5, 8, 31, 512)):
        check_product(rows, columns, depth)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 4, 5), (3, 4, 0), (3, 0, 5)])
def test_empty_products(rows, columns, depth):
    check_product(rows, columns, depth)


def test_operands_of_any_strides(isa):
    x, w = torch.randn(5, 2, 19).transpose(0, 1), torch.randn(19, 21).T
    close(own.packed_linear(x, pack_linear(w), 21, None, "none"), x.double() @ w.double().T, 19)
    assert torch.equal(pack_linear(w), pack_linear(w.contiguous()))
    wide = torch.randn(19, 42).T[::2]
    assert torch.equal(pack_linear(wide), pack_linear(wide.contiguous()))


def test_nan_stays_where_it_belongs(isa):
    x, w = torch.randn(14, 20), torch.randn(40, 20)
    x[3, 7], w[38, 2] = torch.nan, torch.inf
    y = own.packed_linear(x, pack_linear(w), 40, None, "relu")
    assert bool(y[3].isnan().all())
    odd = ~y.isfinite()
    odd[3], odd[:, 38] = False, False
    assert not bool(odd.any())


CONVOLUTIONS = {
    # channels, out, groups, kernel, stride, padding, dilation, height, width
    "1 x 1": (7, 18, 1, (1, 1), (1, 1), (0, 0), (1, 1), 5, 6),
    "3 x 3": (19, 33, 1, (3, 3), (1, 1), (1, 1), (1, 1), 9, 7),
    "one channel": (1, 16, 1, (5, 3), (2, 1), (2, 0), (1, 1), 11, 8),
    "few channels": (3, 17, 1, (7, 7), (2, 2), (3, 3), (1, 1), 20, 23),
    "dilation": (5, 9, 1, (3, 2), (1, 2), (2, 1), (2, 3), 12, 11),
    "padding alone": (4, 5, 1, (3, 3), (2, 2), (4, 4), (1, 1), 2, 1),
    "many channels": (300, 21, 1, (3, 3), (1, 1), (1, 1), (1, 1), 4, 5),
    "stride": (16, 8, 1, (1, 1), (2, 2), (0, 0), (1, 1), 9, 9),
    "groups": (12, 18, 3, (3, 3), (1, 1), (1, 1), (1, 1), 6, 7),
    "depthwise": (21, 21, 21, (3, 3), (2, 1), (1, 1), (1, 1), 9, 7),
    "depthwise, dilation": (40, 40, 40, (2, 5), (1, 3), (0, 4), (3, 2), 9, 13),
    "two for each channel": (6, 12, 6, (3, 3), (1, 1), (1, 1), (1, 1), 5, 5),
}


def check_convolution(case, images=2, memory_format=torch.channels_last, fused=True, tile=0):
    channels, out, groups, kernel, stride, padding, dilation, height, width = case
    x = (torch.rand(images, channels, height, width) - 0.5).contiguous(memory_format=memory_format)
    w, bias = torch.rand(out, channels // groups, *kernel) - 0.5, torch.rand(out) if fused else None
    wanted = F.conv2d(
        x.double(), w.double(), bias if bias is None else bias.double(), stride, padding, dilation, groups
    )
    addend = torch.rand(wanted.shape) - 0.5
    settings = (kernel, stride, padding, dilation, groups, out, tile, "relu" if fused else "none")
    y = own.packed_convolution(x, pack_convolution(w, groups, tile), bias, addend if fused else None, *settings)
    close(y, (wanted + addend).relu() if fused else wanted, w[0].numel())
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(isa, threads, name):
    check_convolution(CONVOLUTIONS[name], fused=threads == 3)


def test_convolutions_of_other_strides(isa):
    check_convolution(CONVOLUTIONS["3 x 3"], memory_format=torch.contiguous_format)
    check_convolution(CONVOLUTIONS["groups"], images=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(50))
def test_convolutions_of_random_sizes(isa, seed):
    rng = random.Random(seed)

    def pair(least, most):
        return rng.randint(least, most), rng.randint(least, most)

    groups, (channels, out) = rng.choice([1, 1, 2, 5]), pair(1, 40)
    kernel, stride, padding, dilation = pair(1, 5), pair(1, 3), pair(0, 4), pair(1, 3)
    size = (d * (k - 1) + 1 + rng.randint(0, 12) for d, k in zip(dilation, kernel, strict=True))
    check_convolution(
        (channels * groups, out * groups, groups, kernel, stride, padding, dilation, *size), rng.randint(1, 3)
    )


# ---- results in tensors of the caller ---------------------------------------------------------------------------------


def test_results_in_tensors_of_any_strides():
    x, packed, images, kernels = (
        torch.randn(3, 5),
        pack_linear(torch.randn(4, 5)),
        torch.randn(2, 4, 5, 6),
        torch.randn(6, 4, 3, 3),
    )
    settings = (pack_convolution(kernels, 1), None, None, (3, 3), (1, 1), (0, 0), (1, 1), 1, 6, 0, "relu")
    for operator, args in (
        (own.packed_linear, (x, packed, 4, None, "relu")),
        (own.packed_convolution, (images, *settings)),
    ):
        wanted = operator(*args)
        for out in (torch.empty_like(wanted), torch.empty([*wanted.shape, 2])[..., 1]):
            assert operator.out(*args, out=out) is out
            assert torch.equal(out, wanted)
        with pytest.raises(ArgumentError, match="out="):
            operator.out(*args, out=torch.empty(2))


# ---- Winograd's method -----------------------------------------------------------------------------------------------

TILES = pytest.mark.parametrize("tile", [2, 4])
WINOGRAD = {
    # channels, out, images, padding, height, width
    "odd sizes": (16, 48, 1, (1, 1), 9, 7),
    "one pixel": (32, 16, 2, (1, 1), 1, 1),
    "no padding": (48, 16, 3, (0, 0), 3, 11),
    "wide padding": (16, 32, 2, (3, 2), 5, 4),
    "many tiles": (16, 80, 3, (1, 0), 41, 50),
    "many channels": (768, 32, 1, (1, 1), 6, 6),
}


def winograd(x, w, tile, bias=None, addend=None, padding=(1, 1), activation="none"):
    packed = pack_convolution(w, 1, tile)
    settings = ((3, 3), (1, 1), padding, (1, 1), 1, len(w), tile, activation)
    return own.packed_convolution(x, packed, bias, addend, *settings)


@TILES
@pytest.mark.parametrize("name", WINOGRAD)
def test_convolutions_by_winograd(isa, threads, name, tile):
    channels, out, images, padding, height, width = WINOGRAD[name]
    case = (channels, out, 1, (3, 3), (1, 1), padding, (1, 1), height, width)
    check_convolution(case, images, fused=threads == 3, tile=tile)


@pytest.mark.exhaustive
@TILES
@pytest.mark.parametrize("seed", range(30))
def test_convolutions_by_winograd_of_random_sizes(isa, seed, tile):
    rng = random.Random(seed)
    channels, out = 16 * rng.randint(1, 12), 16 * rng.randint(1, 12)
    padding = rng.randint(0, 3), rng.randint(0, 3)
    size = rng.randint(3, 40), rng.randint(3, 40)
    case = (channels, out, 1, (3, 3), (1, 1), padding, (1, 1), *size)
    check_convolution(case, rng.randint(0, 4), rng.choice([torch.channels_last, torch.contiguous_format]), tile=tile)


@pytest.mark.parametrize(("tile", "most"), [(2, 1.5), (4, 3)])
def test_errors_by_winograd(isa, tile, most):
    x, w = torch.randn(2, 64, 20, 20).relu(), torch.randn(64, 64, 3, 3)
    exact = F.conv2d(x.double(), w.double(), padding=1)
    found, direct = ((winograd(x, w, each) - exact).square().mean() for each in (tile, 0))
    assert (found / direct).sqrt() < most


@TILES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -3e38])
def test_winograd_does_not_spread_what_is_not_finite(isa, threads, tile, value):
    x, w = torch.randn(3, 16, 10, 9), torch.randint(-3, 4, (32, 16, 3, 3)) / 8.0
    bias, addend = torch.randn(32), torch.randn(3, 32, 10, 9)
    plain = winograd(x, w, tile, bias, addend, activation="relu")
    x[1, 5, 3, 4] = value  # -3e38 is finite, and so are its products, but not all of its values at points
    found, direct = (winograd(x, w, each, bias, addend, activation="relu") for each in (tile, 0))
    atol = 1e-6 * abs(value) if abs(value) < torch.inf else 5e-5
    torch.testing.assert_close(found, direct, equal_nan=True, rtol=1e-5, atol=atol)
    torch.testing.assert_close(winograd(x, w, tile), winograd(x, w, 0), equal_nan=True, rtol=1e-5, atol=atol)
    assert torch.equal(found[::2], plain[::2])


def test_operands_of_winograd_that_are_not_finite(isa):
    x, w, addend = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3), torch.randn(1, 16, 8, 8)
    plain = winograd(x, w, 2)
    addend[0, 3, 4, 5] = torch.nan
    found = winograd(x, w, 2, None, addend)
    assert torch.equal(found.isnan(), addend.isnan())
    assert torch.equal(found.nan_to_num(), torch.where(addend.isnan(), 0, plain + addend))
    w[3, 4, 1, 1] = torch.inf
    assert winograd_tile(w, (1, 1), (1, 1), 1, (56, 56)) == 0
    with pytest.raises(ArgumentError, match="weights below"):
        pack_convolution(w, 1, 2)


@pytest.mark.parametrize(
    ("weight", "size", "tile"),
    [
        ((64, 64, 3, 3), (56, 56), 4),
        ((256, 256, 3, 3), (14, 14), 2),
        ((512, 512, 3, 3), (7, 7), 0),
        ((64, 24, 3, 3), (56, 56), 0),
        ((64, 64, 3, 1), (56, 56), 0),
        ((64, 1024, 3, 3), (56, 56), 0),
    ],
)
def test_the_choice_of_tiles(weight, size, tile):
    w = torch.ones(1).expand(weight)
    assert winograd_tile(w, (1, 1), (1, 1), 1, size) == tile
    assert winograd_tile(w, (2, 1), (1, 1), 1, size) == 0
    assert winograd_tile(w, (1, 1), (1, 2), 1, size) == 0
    assert winograd_tile(w, (1, 1), (1, 1), 2, size) == 0


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_the_operators_keep_their_contract():
    x, packed = torch.randn(2, 3, 5), pack_linear(torch.randn(4, 5))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(own.packed_linear.default, (x, packed, 4, torch.randn(4), "relu"), test_utils=checks)
    x, packed = torch.randn(2, 4, 5, 6), pack_convolution(torch.randn(6, 2, 3, 1), 2)
    args = (x, packed, None, None, (3, 1), (2, 1), (1, 0), (1, 1), 2, 6, 0, "none")
    torch.library.opcheck(own.packed_convolution.default, args, test_utils=checks)


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(2, 4), torch.ones(80), 3, None, "none"),
        (torch.ones(2, 5).double(), torch.ones(80), 3, None, "none"),
        (torch.ones(2, 5), torch.ones(80).double(), 3, None, "none"),
        (torch.ones(2, 5), torch.ones(80), 3, torch.ones(4), "none"),
        (torch.ones(2, 5), torch.ones(80), 17, None, "none"),
        (torch.ones(2, 5), torch.ones(80), 3, None, "gelu"),
    ],
)
def test_arguments_that_do_not_fit(args):
    with pytest.raises((ArgumentError, ValueError), match=r"packed_linear|gelu"):
        own.packed_linear(*args)
    with pytest.raises(ArgumentError, match="packed_convolution"):
        own.packed_convolution(
            torch.ones(1, 4, 5, 5), torch.ones(80), None, None, (3, 3), (1, 1), (0, 0), (1, 1), 3, 2, 0, "none"
        )
    x, packed = torch.ones(1, 16, 5, 5), pack_convolution(torch.ones(16, 16, 3, 3), 1, 2)
    with pytest.raises(ArgumentError, match="tile=2"):
        own.packed_convolution(x, packed, None, None, (3, 3), (2, 2), (0, 0), (1, 1), 1, 16, 2, "none")
