"""Operations of torch as functions of JAX: results and gradients of each row of opkit's table."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax_comparison import close, same, to_array

import opkit

PLACES = torch.tensor([[0, 2, 1], [3, 1, 0], [2, 1, 0]])
ROWS = torch.tensor([0, 2, 1])


def unary(x):
    near, positive = x.tanh(), x.abs() + 0.1
    return (
        x.sin()
        + x.cos() * x.tan()
        - x.exp().log1p()
        + x.sigmoid()
        + x.erf()
        + x.expm1()
        + x.sinh()
        + x.cosh()
        + x.atan(),
        x.asinh() + x.neg() + x.exp2() + x.erfc() + x.square() + x.reciprocal() + x.abs() + near.asin() + near.acos(),
        positive.sqrt()
        + positive.rsqrt()
        + positive.log()
        + positive.log2()
        + positive.log10()
        + (positive + 1).acosh(),
        (near * 0.9).atanh() + near.erfinv() + positive.lgamma() + positive.digamma() + x.sigmoid().logit(),
        x.sign() + x.floor() + x.ceil() + x.round() + x.trunc() + x.frac() + x.round(decimals=1),
    )


def activations(x):
    wide = 100 * x  # where a formula overflows, so that a derivative would be NaN
    return (
        F.relu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.elu(wide) + F.softplus(wide) + F.mish(x),
        F.leaky_relu(x)
        + F.hardtanh(x)
        + F.hardswish(x)
        + F.hardsigmoid(x)
        + F.logsigmoid(wide)
        + F.selu(x)
        + F.celu(x),
        F.softshrink(x) + F.hardshrink(x) + F.tanhshrink(x) + F.relu6(x) + F.softsign(x),
        F.glu(x),
    )


def binary(x, y):
    return (
        x * y
        + x / y
        - torch.maximum(x, y) * torch.minimum(x, y)
        + torch.atan2(x, y)
        + x.abs() ** y
        + x**2
        + x**3
        + 2**x,
        torch.hypot(x, y)
        + torch.logaddexp(x, y)
        + torch.lerp(x, y, 0.3)
        + torch.addcmul(x, y, x)
        + torch.copysign(x, y),
        torch.xlogy(x, y.abs()) + x.add(y, alpha=2) + x.sub(y, alpha=3) + torch.rsub(x, y) + x.abs() ** 0.5,
        x.clamp(-0.5, 0.5)
        + x.clamp(min=y)
        + torch.where(x > 0, x, y)
        + x.masked_fill(y > 0, 2.0)
        + torch.where(x > 0, x, 0.0),
        torch.fmod(x, y.detach()) + torch.remainder(x, y.detach()),
        (x > y, x <= y, x == y, x != y, torch.div(x, y, rounding_mode="trunc"), torch.div(x, y, rounding_mode="floor")),
    )


def reductions(x):
    return (
        (
            x.sum(),
            x.sum(1),
            x.mean(0),
            x.mean(),
            x.amax(1),
            x.amin(0, keepdim=True),
            x.prod(1),
            x.prod(),
            x.sum((0, 1)),
        ),
        (
            x.var(1),
            x.var(0, unbiased=False),
            x.std(1),
            torch.var_mean(x, 1),
            x.logsumexp(1),
            x.nansum(),
            x.count_nonzero(),
        ),
        (x.norm(), x.norm(dim=1), x.norm(p=1), *(torch.linalg.vector_norm(x, ord=p, dim=1) for p in (torch.inf, 3, 0))),
        (x.max(), x.min(), x.max(1), x.min(0, keepdim=True), x.argmax(), x.argmax(1), x.argmin(0, keepdim=True)),
        (x.cumsum(1), x.cumprod(0), x.logcumsumexp(1), x.softmax(1), x.log_softmax(0), x.any(), x.all(1), x.aminmax()),
        (x.sort(1), x.sort(0, descending=True), x.argsort(1), x.topk(2), x.topk(2, largest=False)),
    )


def views(x):
    return (
        (x.T, x.reshape(2, 6), x[1], x[:, 1:3], x[::2], x[..., -1], x.unsqueeze(1).expand(3, 5, 4), x.unfold(1, 2, 1)),
        (x.flip(0), x.roll(1, 1), x.roll(2), x.repeat(2, 3), torch.cat([x, x], 1), torch.stack([x, x]), x.chunk(2, 1)),
        (
            x.split([1, 3], 1),
            x.unbind(0),
            x.diagonal(),
            x.diagonal(1),
            x[:3, :3].diag(),
            x.tril(),
            x.triu(1),
            x.trace(),
        ),
        (
            F.pad(x, (1, -1, 2, 0), value=3.0),
            x.diff(dim=1),
            torch.block_diag(x, x),
            x.repeat_interleave(2, 1),
            x.rot90(),
        ),
        (torch.arange(1, 7, 2), torch.arange(0, 1, 0.25), torch.linspace(0, 1, 5), torch.eye(3), torch.tensor([1, 2])),
        (x.to(torch.bfloat16), (x * 3).long(), x.bool(), x.half().float(), x.new_full((2,), 3.0), torch.empty(0)),
    )


def places(x, y):
    z = y[:, :3]
    return (
        (
            x.gather(1, PLACES),
            x.gather(0, ROWS[:2, None]),
            x[ROWS],
            x[:, ROWS],
            x[ROWS, ROWS],
            x[:, None, ROWS],
            x.take(PLACES),
        ),
        (x.index_select(1, ROWS), F.embedding(ROWS, x), x.scatter(1, PLACES, z), x.scatter(1, PLACES, 2.0), x[[-1, 0]]),
        (
            x.scatter_add(1, PLACES, z),
            x.scatter_reduce(1, PLACES, z, "sum", include_self=False),
            x.index_add(1, ROWS, z),
        ),
        (x.index_copy(1, ROWS, z), x.index_fill(1, ROWS, 0.5), x.index_put((ROWS, ROWS), z[0], accumulate=True)),
        (x.slice_scatter(y[:, :2], 1, 1, 3), x.select_scatter(y[:, 0], 1, 2), x.diagonal_scatter(z[0])),
        (
            torch.bucketize(x.detach(), torch.tensor([-1.0, 1.0])),
            torch.searchsorted(torch.tensor([-1.0, 1.0]), x.detach()),
        ),
    )


def writes(x, y):
    z = torch.zeros(3, 4)
    z[0] = x[0]
    z[:, 1] += y[:, 1]
    z[1:, 2:].mul_(2).add_(1)
    w = x.clone()
    w[y > 0] = 0
    w.t()[0] = 5
    w.diagonal().zero_()
    return z, w, x.clone().masked_fill_(y > 0, 1.0)


def products(x, y):
    square = x @ y.T
    return (
        (
            square,
            x @ y[0],
            x[0].dot(y[0]),
            torch.einsum("ij,kj->ik", x, y),
            torch.addmm(square, x, y.T, beta=0.5, alpha=2),
        ),
        (torch.bmm(x[None], y.T[None]), torch.baddbmm(square[None], x[None], y.T[None]), F.linear(x, y, x[:, 0])),
        (
            torch.addmv(x[:, 0], x, y[0]),
            torch.addr(x, x[:, 0], y[0]),
            torch.outer(x[0], y[0]),
            F.cosine_similarity(x, y),
        ),
    )


def norms_and_losses(x, v):
    chosen = torch.tensor([0, -100, 2])
    return (
        (
            F.layer_norm(x, (4,), v, v),
            F.rms_norm(x, (4,), v),
            F.group_norm(x, 2, v, v),
            F.normalize(x),
            F.instance_norm(x[None]),
        ),
        (F.batch_norm(x, None, None, v, v, training=True), F.batch_norm(x, v.detach(), v.detach() ** 2, v, v)),
        (
            F.cross_entropy(x, chosen),
            F.mse_loss(x, 2 * x),
            F.l1_loss(x, 2 * x),
            F.smooth_l1_loss(x, 2 * x),
            F.huber_loss(x, 2 * x),
        ),
        (
            F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
            F.binary_cross_entropy_with_logits(x, x.sigmoid().detach()),
        ),
    )


def convolutions(x, weight, transposed):
    return (
        (
            F.conv2d(x, weight, stride=2, padding=1, dilation=2),
            F.conv2d(x, weight[:, :2], weight[:, 0, 0, 0], groups=2),
        ),
        (
            F.conv_transpose2d(x, transposed, stride=2, padding=1, output_padding=1),
            F.conv_transpose2d(x, transposed, groups=2),
        ),
        (F.conv1d(x[:, :, 0], weight[:, :, 0]), F.conv3d(x[:, :, None], weight[:, :, None])),
    )


def pooling(x):
    return (
        (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), F.avg_pool1d(x[:, :, 0], 2)),
        (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, dilation=2), F.adaptive_avg_pool2d(x, 3)),
        (F.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2, mode="bilinear"), F.pixel_shuffle(x, 2)),
        (F.pad(x, (1, 1, 1, 1), mode="reflect"), F.pad(x, (1, 1, 1, 1), mode="replicate"), F.unfold(x, 2)),
    )


def attended(q, k, v):
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def complexes(x):
    z = torch.complex(x, x.flip(0))
    return (
        torch.view_as_real(torch.polar(x.abs(), x)),
        z.abs(),
        (z * 1j).imag,
        z.real,
        torch.view_as_complex(x.view(3, 2, 2)).angle(),
    )


def scalars(x):
    return (
        x.sum(),
        x.mean(),
        x.max(0),
        x.softmax(0),
        x.cumsum(0),
        x.squeeze(),
        x.expand(3),
        x.sort(),
        x.topk(1)[0],
        x.var(correction=0),
    )


IMAGE = (2, 4, 6, 7)
CASES = {
    "unary": (unary, (3, 4)), "activations": (activations, (3, 4)), "binary": (binary, (3, 4), (3, 4)),
    "reductions": (reductions, (3, 4)), "views": (views, (3, 4)), "places": (places, (3, 4), (3, 4)),
    "writes": (writes, (3, 4), (3, 4)), "products": (products, (3, 4), (3, 4)), "scalars": (scalars, ()),
    "norms": (norms_and_losses, (3, 4), (4,)), "convolutions": (convolutions, IMAGE, (6, 4, 3, 3), (4, 3, 3, 3)),
    "pooling": (pooling, IMAGE), "attended": (attended, (1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)), "complex": (complexes, (3, 4)),
}  # fmt: skip


@pytest.mark.sweep(keep=["binary", "places", "writes"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    torch.manual_seed(0)
    function, *shapes = CASES[name]
    same(function, *[torch.randn(shape) for shape in shapes], rtol=1e-4, atol=2e-5)


def test_integers_and_bools():
    def function(a, b, m):
        return (
            (
                a + b,
                a * b,
                a / b,
                a // b,
                a % b,
                torch.div(a, b, rounding_mode="trunc"),
                torch.fmod(a, b),
                a**2,
                -a,
                a.abs(),
            ),
            (
                a & b,
                a | b,
                a ^ b,
                ~a,
                a << b,
                a >> 1,
                a.sum(),
                a.prod(),
                a.cumsum(0),
                a.max(),
                a.float().mean(),
                a + 0.5,
            ),
            (
                m & ~m,
                m | m,
                m.logical_not(),
                m.sum(),
                m.any(),
                m.all(0),
                m + 1,
                m * 2.5,
                torch.logical_xor(m, m),
                a * m,
            ),
        )

    arguments = torch.tensor([7, -7, 5, -3]), torch.tensor([2, 3, 2, 4]), torch.tensor([True, False, True, True])
    close(opkit.to_jax(function)(*map(to_array, arguments)), function(*arguments))


def test_numbers_that_are_none():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -2.0])

    def function(x):
        bounds = x.clamp(-1, 1), x.maximum(-x), x.relu(), x.sort(), x.max(0), x.nan_to_num()
        return x.isnan(), x.isinf(), x.isfinite(), x.sign(), x.sgn(), x.signbit(), bounds

    close(opkit.to_jax(function)(to_array(x)), function(x))


def test_half_precision_is_summed_in_single():
    x = torch.ones(1000, dtype=torch.bfloat16) / 3

    def function(x):
        return x.sum(), x.mean(), x.cumsum(0), x.softmax(0), x.norm(), x.var(), x * 3 + 1, x + torch.ones(1000)

    close(opkit.to_jax(function)(to_array(x)), function(x), rtol=8e-3, atol=1e-3)


def test_integers_are_summed_in_64_bits_where_there_are_some():
    with jax.enable_x64(True):
        total = opkit.to_jax(lambda x: (x.sum(), x.cumsum(0)))(jnp.full(3, 2**30, jnp.int32))
        close(total, [torch.tensor(3 * 2**30), torch.tensor([2**30, 2**31, 3 * 2**30])])
