"""Each operator of opkit.nn against a float64 oracle in plain Python, its gradients against finite differences."""

import math
import pickle

import pytest
import torch

from opkit.errors import ShapeError
from opkit.nn import RMSNorm, SwiGLU, cross_entropy, rms_norm, rotary_embedding, swiglu

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)


def _randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _rows(x):
    """The last dimension of ``x`` as lists of Python floats."""
    return x.double().reshape(-1, x.shape[-1]).tolist() if x.numel() else []


def _as(rows, x):
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def _rms_norm(x, weight, eps):
    scales = [1 / math.sqrt(math.fsum(value**2 for value in row) / len(row) + eps) for row in _rows(x)]
    scaled = [[v * s for v in row] for row, s in zip(_rows(x), scales, strict=True)]
    return _as(scaled, x) * weight.double()


def _rotary_embedding(x, positions, base):
    """Each pair of features as one complex number, turned by an angle."""
    length, half = len(positions), x.shape[-1] // 2
    rows = []
    for number, row in enumerate(_rows(x)):
        position = int(positions[number % length])
        turned = [
            complex(row[i], row[i + half]) * complex(math.cos(angle), math.sin(angle))
            for i, angle in ((i, position * base ** (-i / half)) for i in range(half))
        ]
        rows.append([z.real for z in turned] + [z.imag for z in turned])
    return _as(rows, x)


def _swiglu(gate, up):
    pairs = zip(gate.double().flatten().tolist(), up.double().flatten().tolist(), strict=True)
    return _as([g / (1 + math.exp(-g)) * u for g, u in pairs], gate)


def _cross_entropy(logits, targets, ignore_index):
    tokens = [(row, t) for row, t in zip(_rows(logits), targets.flatten().tolist(), strict=True) if t != ignore_index]
    losses = [max(row) + math.log(math.fsum(math.exp(v - max(row)) for v in row)) - row[t] for row, t in tokens]
    return torch.tensor(math.fsum(losses) / len(losses), dtype=torch.float64)


def _assert_close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


SHAPES = ((5,), (1, 1), (3, 7), (2, 3, 65), (0, 4), (2, 0, 8))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_the_oracle(shape, dtype):
    x, weight = _randn(*shape, dtype=dtype), _randn(shape[-1], dtype=dtype, seed=1)
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    _assert_close(actual, _rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (7, 6), (2, 3, 5, 10), (0, 3, 4), (2, 0, 4)])
def test_rotary_embedding_is_the_oracle(shape, dtype):
    x, positions = _randn(*shape, dtype=dtype), torch.arange(shape[-2]) * 3 + 1
    actual = rotary_embedding(x, positions, 500.0)
    assert actual.dtype == dtype
    _assert_close(actual, _rotary_embedding(x, positions, 500.0), dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_is_the_oracle(shape, dtype):
    gate, up = _randn(*shape, dtype=dtype), _randn(*shape, dtype=dtype, seed=1)
    actual = swiglu(gate, up)
    assert actual.dtype == dtype
    _assert_close(actual, _swiglu(gate, up), dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 17)])
def test_cross_entropy_is_the_oracle(shape, dtype):
    logits = _randn(*shape, dtype=dtype) * 5
    targets = torch.arange(math.prod(shape[:-1])).reshape(shape[:-1]) % shape[-1]
    actual = cross_entropy(logits, targets, 1 if len(shape) > 1 else -100)
    wide = torch.promote_types(dtype, torch.float32)
    assert actual.dtype == wide
    _assert_close(actual, _cross_entropy(logits, targets, 1 if len(shape) > 1 else -100), wide)


def test_every_operator_takes_tensors_that_are_not_contiguous():
    x, other = _randn(6, 4, 3).transpose(0, 2), _randn(3, 4, 12, seed=1)[..., ::2]
    targets = torch.arange(12).reshape(4, 3).T % 6
    _assert_close(rms_norm(x, other[0, 0], 1e-6), _rms_norm(x, other[0, 0], 1e-6), torch.float64)
    _assert_close(swiglu(x, other), _swiglu(x, other), torch.float64)
    positions = torch.arange(8)[::2]
    _assert_close(rotary_embedding(x, positions), _rotary_embedding(x, positions, 1e4), torch.float64)
    _assert_close(cross_entropy(x, targets), _cross_entropy(x, targets, -100), torch.float64)


def _case_rms_norm(dtype):
    return rms_norm, (_randn(2, 3, 5, dtype=dtype), _randn(5, dtype=dtype, seed=1))


def _case_rotary_embedding(dtype):
    positions = torch.tensor([0, 3, 4])
    return (lambda x: rotary_embedding(x, positions)), (_randn(2, 3, 6, dtype=dtype),)


def _case_swiglu(dtype):
    return swiglu, (_randn(3, 5, dtype=dtype), _randn(3, 5, dtype=dtype, seed=1))


def _case_cross_entropy(dtype):
    targets = torch.tensor([[0, 4, -100], [2, 2, 1]])
    return (lambda x: cross_entropy(x, targets)), (_randn(2, 3, 5, dtype=dtype),)


CASES = (_case_rms_norm, _case_rotary_embedding, _case_swiglu, _case_cross_entropy)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.__name__.removeprefix("_case_") for case in CASES])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # forward mode imports it
@each_case
def test_gradients_and_their_gradients_are_those_of_finite_differences(case):
    function, args = case(torch.float64)
    args = tuple(arg.requires_grad_() for arg in args)
    assert torch.autograd.gradcheck(function, args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, args)


@each_case
def test_compiled_without_a_graph_break_it_gives_the_same_values_and_gradients(case):
    torch.compiler.reset()
    function, args = case(torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_value_and_gradients(compiled, args), _value_and_gradients(function, args))


def _value_and_gradients(function, args):
    args = [arg.detach().clone().requires_grad_() for arg in args]
    value = function(*args)
    return value.detach(), torch.autograd.grad(value.sum(), args)


@each_case
def test_vmap_is_a_loop(case):
    function, args = case(torch.float64)
    stacked = tuple(torch.stack((arg, 2 * arg)) for arg in args)
    looped = torch.stack([function(*(arg[i] for arg in stacked)) for i in range(2)])
    torch.testing.assert_close(torch.vmap(function)(*stacked), looped)


def test_vmap_over_targets_and_positions_is_a_loop():
    logits, targets = _randn(4, 3, 5), torch.arange(12).reshape(4, 3) % 5
    expected = torch.stack([cross_entropy(*pair) for pair in zip(logits, targets, strict=True)])
    torch.testing.assert_close(torch.vmap(cross_entropy)(logits, targets), expected)
    x, positions = _randn(4, 3, 6), torch.arange(12).reshape(4, 3)
    expected = torch.stack([rotary_embedding(*pair) for pair in zip(x, positions, strict=True)])
    torch.testing.assert_close(torch.vmap(rotary_embedding)(x, positions), expected)


def test_cross_entropy_keeps_its_precision_far_from_zero():
    logits = torch.tensor([[1e4, 1e4 - 1.0], [-1e30, 1e30]])
    actual = cross_entropy(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(actual, torch.tensor(math.log1p(math.exp(-1.0)) / 2))


def test_cross_entropy_gives_ignored_tokens_no_gradient():
    logits = _randn(3, 4).requires_grad_()
    cross_entropy(logits, torch.tensor([1, -100, 2])).backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[1], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("targets", [[], [-100, -100]])
def test_cross_entropy_of_no_token_is_nan(targets):
    targets = torch.tensor(targets, dtype=torch.int64)
    assert cross_entropy(torch.zeros(len(targets), 4), targets).isnan()


def test_cross_entropy_takes_other_integer_dtypes():
    logits = _randn(3, 4)
    expected = cross_entropy(logits, torch.tensor([1, 2, 3]))
    for dtype in (torch.int32, torch.uint8):
        torch.testing.assert_close(cross_entropy(logits, torch.tensor([1, 2, 3], dtype=dtype)), expected)


def test_rms_norm_of_zeros_is_zero_and_has_a_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    rms_norm(x, torch.ones(3)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_rotary_embedding_makes_products_depend_on_distance_alone():
    q, k = _randn(1, 8), _randn(1, 8, seed=1)
    products = [
        (rotary_embedding(q, torch.tensor([m])) * rotary_embedding(k, torch.tensor([n]))).sum()
        for m, n in ((0, 5), (7, 12), (100, 105))
    ]
    torch.testing.assert_close(products[1:], products[:1] * 2)


def test_rotary_embedding_refuses_an_odd_number_of_features():
    with pytest.raises(ShapeError, match=r"opkit::rotary_embedding: x of shape \(3, 5\) has 5 features"):
        rotary_embedding(torch.zeros(3, 5), torch.arange(3))


def test_modules_apply_their_operators():
    x = _randn(2, 3, 8, dtype=torch.float32)
    norm, layer = RMSNorm(8, eps=1e-3), SwiGLU(8, 12)
    torch.testing.assert_close(norm(x), rms_norm(x, torch.ones(8), 1e-3))
    torch.testing.assert_close(layer(x), layer.down(swiglu(layer.gate(x), layer.up(x))))
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))
