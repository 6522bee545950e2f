"""Numbers of compiled graphs: rounded where eager rounds, exact where eager is exact, and no farther from float64."""

import math

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("fresh")


def compiled(function):
    return torch.compile(function, backend="opkit", options={"strict": True})


def test_rounding_and_exact_points():
    """One graph: products and sums of operators of their own, logarithms and powers, constants narrower than operands."""
    x, powers, tens = torch.randn(1024), torch.arange(-126.0, 128), torch.arange(16)
    wide, mask = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.tensor([True, False, True, True, False])

    def f(x, y, two, ten, wide, mask):
        z = torch.complex(x, y)
        logs = (
            torch.log2(two),
            torch.log2(two.double()),
            torch.log10(ten.float()),
            torch.log10(ten),
            torch.exp2(two.log2()),
        )
        constants = wide * torch.full((5,), 0.1), wide * (mask * (1 / 0.9)), wide * torch.full((5,), 0.1).bfloat16()
        return x * x - y * y, (z * z.conj()).imag, logs, constants

    two = torch.tensor([2.0**k for k in range(-126, 128)])
    ten = torch.tensor([10.0**k for k in range(16)], dtype=torch.float64)
    zero, imaginary, logs, constants = compiled(f)(x, x.clone(), two, ten, wide, mask)
    assert not zero.any()
    assert not imaginary.any()
    for found, expected in zip(logs, (powers, powers, tens, tens, two), strict=True):
        assert torch.equal(found, expected.to(found.dtype))
    for found, expected in zip(constants, f(x, x, two, ten, wide, mask)[3], strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(y.sum(), wide, retain_graph=True)[0] for y in (found, expected)))


def error(found, exact):
    scale = exact.abs().max()
    return float(((found.double() - exact).abs() / exact.abs().clamp_min(1e-3 * scale)).max())


def assert_as_accurate(function, x, times=2.0):
    """The results, compared with float64, are no farther off than eager's so many times, and one unit in the last place."""
    exact, eager, ours = function(x.double()), function(x), compiled(function)(x)
    for wanted, by_eager, by_us in zip(exact, eager, ours, strict=True):
        assert error(by_us, wanted) <= times * error(by_eager, wanted) + torch.finfo(x.dtype).eps


def statistics(x):
    mean, var = torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(x.shape[1], dtype=x.dtype)
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    return mean, var


def test_long_sums():
    x = torch.rand(100_000, 16)
    assert_as_accurate(lambda x: (x.flatten().cumsum(0), x.sum(0), x.var(0), *statistics(x + 10)), x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(3_000_000,), (4, 500_000), (500_000, 4), (1000, 1000), (100_000, 32), (8, 16, 96, 96)]
)
def test_reductions_scans_and_norms(shape, dtype):
    x = torch.rand(shape).to(dtype)

    def f(x):
        scans = x.cumsum(0), x.cumsum(-1), (1 + (x - 0.5) * 1e-4).cumprod(-1), x.logcumsumexp(-1)
        sums = x.sum(), x.sum(-1), x.mean(), x.mean(0), x.nansum(), (x * x).sum(0), (1 + (x - 0.5) * 1e-4).prod(-1)
        spread = x.var(), x.std(-1), (x + 100).var(-1), x.var(0)
        norms = torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 3), torch.linalg.vector_norm(x, 1, 0)
        soft = x.softmax(0), x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1), x.logsumexp(0)
        losses = F.mse_loss(x, 0 * x), F.l1_loss(x, 0 * x), F.huber_loss(x, 0 * x), F.layer_norm(x, x.shape[-1:])
        found = (*scans, *sums, *spread, *norms, *soft, *losses)
        return (*found, *(statistics(x) if x.dim() > 1 and dtype != torch.bfloat16 else ()))

    assert_as_accurate(f, x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_are_exact(dtype):
    """Of what the type can hold; ``pow`` with a tensor of exponents, so that no exponent is seen to be small."""
    digits, greatest = {torch.float32: (24, 127), torch.float64: (53, 1023)}[dtype]
    rows = [(a, k, a**k) for a in range(2, 3000) for k in range(1, 60) if a**k < 2**greatest]
    exact = [
        row for row in rows if (odd := row[2] >> (row[2] & -row[2]).bit_length() - 1).bit_length() <= digits and odd
    ]
    base, exponent, expected = (
        torch.tensor([float(n) for n in column], dtype=dtype) for column in zip(*exact, strict=True)
    )
    assert torch.equal(compiled(torch.pow)(base, exponent), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logarithms_are_exact(dtype):
    low, high = {torch.float32: (-149, 128), torch.float64: (-1074, 1024)}[dtype]
    exponents = torch.arange(low, high, dtype=dtype)
    two = torch.tensor([math.ldexp(1, k) for k in range(low, high)], dtype=dtype)
    step = compiled(lambda two, exponents: (torch.log2(two), torch.exp2(exponents)))
    found = step(two, exponents)
    assert torch.equal(found[0], exponents)
    assert torch.equal(found[1], two)


def test_integers_divided_by_zero():
    """Raise what they raise in eager mode, also where a padded row around them holds zeros."""
    x, y = torch.arange(6), torch.tensor([1, 2, 0, 4, 5, 6])
    divide = compiled(
        lambda x, y: (F.pad(x // y, (1, 1)), x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc"))
    )
    for found, expected in zip(
        divide(x, y + 1), (F.pad(x // (y + 1), (1, 1)), x % (y + 1), torch.fmod(x, y + 1)), strict=False
    ):
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        divide(x, y)


@pytest.mark.parametrize("name", ["group", "instance", "batch"])
def test_norms_of_bfloat16_with_float32_weights(name):
    """What autocast gives a U-Net; the statistics are float32, so that a mean that is large costs no digits."""
    values = torch.rand(8) + 0.5, torch.randn(8), torch.randn(8), torch.rand(8)
    x, grad = (torch.randn(2, 8, 6) + 50).bfloat16(), torch.randn(2, 8, 6).bfloat16()
    norm = {
        "group": lambda x, w, b, *_: F.group_norm(x, 4, w, b),
        "instance": lambda x, w, b, *_: F.instance_norm(x, None, None, w, b),
        "batch": lambda x, w, b, *running: F.batch_norm(x, *running, w, b, training=True),
    }[name]

    def trained(function, dtype=None):
        weight, bias, *running = (t.clone().to(dtype) for t in values)
        leaves = [t.requires_grad_() for t in (x.clone().to(dtype), weight, bias)]
        y = function(*leaves, *running)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype)), *running]

    for found, eager, exact in zip(trained(compiled(norm)), trained(norm), trained(norm, torch.float64), strict=True):
        assert found.dtype == eager.dtype
        assert (found - exact).abs().max() <= 1.5 * (eager - exact).abs().max() + 2e-6 * exact.abs().max()
