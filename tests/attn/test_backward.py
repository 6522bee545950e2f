"""The backward kernels for processors: every ISA that runs here, against float64 and autograd."""

import itertools
import random

import pytest
import torch

from opkit.attn import cpu
from opkit.attn.calls import GradientCall
from tests.attn.test_forward import FAR, Leaves, expected, r, run

FLOATS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def gradients(
    q, k, v, gradient, of_lse=None, mask=(), tensors=(), bias=(), added=(), scale=None, softcap=0.0, sinks=None
):
    out, lse = run(q, k, v, mask, tensors, bias, added, sinks, scale, softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rest = (list(tensors), list(added), list(mask), list(bias), scale, softcap, False)
    return cpu.backward(gradient, of_lse, q, k, v, out, lse, *rest)[:3]


def exact(q, k, v, gradient, of_lse=None, **how):
    given = [each.double().requires_grad_() for each in (q, k, v)]
    out, lse = expected(*given, **how)
    loss = (out * gradient).sum() + (0 if of_lse is None else (lse * of_lse).nan_to_num(posinf=0, neginf=0).sum())
    return torch.autograd.grad(loss, given)


def close(found, wanted, bound):
    for mine, theirs in zip(found, wanted, strict=True):
        size = max(theirs.abs().max().item(), 0.1) if theirs.numel() else 1.0
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound * size)


def three(b, h, hk, n, m, d, dv, dtype=torch.float32):
    return (
        r(b, h, n, d, dtype=dtype),
        r(b, hk, m, d, dtype=dtype),
        r(b, hk, m, dv, dtype=dtype),
        r(b, h, n, dv, dtype=dtype),
    )


SHAPES = [  # batch, heads, heads of keys, queries, keys, elements of a key, of a value
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 2, 130, 150, 64, 64),
    (1, 3, 1, 97, 65, 7, 9),
    (1, 1, 1, 95, 700, 20, 33),
    (1, 2, 1, 13, 70, 575, 512),
    (3, 6, 6, 12, 64, 48, 16),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_key_is_seen(subtests, isa, dtype):
    for shape in SHAPES:
        q, k, v, gradient = three(*shape, dtype=dtype)
        with subtests.test(str(shape)):
            close(gradients(q, k, v, gradient), exact(q, k, v, gradient), FLOATS[dtype])


def test_the_gradient_of_the_lse(isa):
    q, k, v, gradient = three(2, 2, 1, 50, 70, 16, 8)
    of_lse = r(2, 2, 50)
    close(gradients(q, k, v, gradient, of_lse), exact(q, k, v, gradient, of_lse), 1e-5)


def test_strides(isa):
    q, k, v, gradient = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in three(2, 3, 3, 50, 70, 15, 8))
    close(gradients(q, k, v, gradient.expand_as(gradient)), exact(q, k, v, gradient), 1e-5)
    one = torch.ones(()).expand(2, 3, 50, 8)
    close(gradients(q, k, v, one), exact(q, k, v, one), 1e-5)


def test_masks(subtests, isa):
    for seed in range(12):
        chance = random.Random(seed)
        b, h, n, m = (chance.choice(sizes) for sizes in ([1, 2], [2, 4], [1, 33, 130], [7, 64, 65, 200]))
        leaves = Leaves(b, h, n, m, seed)
        program, truth = leaves.tree(seed % 4)
        q, k, v, gradient = three(b, h, h // 2, n, m, 16, 8)
        truth = truth.expand(b, h, n, m)
        found = gradients(q, k, v, gradient, mask=program, tensors=leaves.tensors)
        seen = truth.any(-1, keepdim=True)
        scores = torch.where(seen, truth, True)  # softmax of a row that sees nothing has no gradient in autograd
        with subtests.test(f"{seed}, {program}"):
            close(found, exact(q, k, v, gradient * seen, visible=scores), 1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_caps_sinks_and_biases(isa, dtype):
    q, k, v, gradient = three(2, 4, 2, 70, 90, 20, 20, dtype=dtype)
    bias, causal = r(2, 4, 70, 90), torch.ones(70, 90, dtype=torch.bool).tril()
    how = {"softcap": 2.0, "scale": 0.7, "sinks": torch.tensor([0.5, -3.0, 4.0, -torch.inf])}
    found = gradients(q, k, v, gradient, mask=[3, -FAR, 0], bias=[0, 0], added=[bias], **how)
    close(found, exact(q, k, v, gradient, visible=causal, added=bias, **how), FLOATS[dtype])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_is_hidden_does_not_leak(isa, dtype, bad):
    q, k, v, gradient = three(1, 2, 2, 100, 100, 12, 12, dtype=dtype)
    lengths = torch.tensor([50], dtype=torch.int32)
    clean = gradients(q, k, v, gradient, mask=[5, 0], tensors=[lengths])
    k, v = k.clone(), v.clone()
    k[:, :, 50:], v[:, :, 60:] = bad, bad
    found = gradients(q, k, v, gradient, mask=[5, 0], tensors=[lengths])
    assert all(torch.equal(a, b) for a, b in zip(found, clean, strict=True))
    assert found[1][:, :, 50:].eq(0).all()
    q_gradient, _, _ = gradients(q, k, v, gradient, mask=[3, -FAR, 0])
    assert q_gradient[:, :, :50].isfinite().all()


def test_nothing(isa):
    for n, m in ((0, 3), (3, 0)):
        found = gradients(*three(1, 2, 1, n, m, 4, 5))
        assert all(each.eq(0).all() for each in found)


@pytest.mark.parametrize(("heads", "keys"), [(1, 500), (3, 300), (16, 100)])
def test_the_number_of_threads_does_not_matter(heads, keys):
    given = three(1, heads, heads, 200, keys, 32, 32, dtype=torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(*given))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for one, other in itertools.pairwise(found) for a, b in zip(one, other, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_no_larger_than_those_of_torch(dtype, causal):
    q, k, v, gradient = three(1, 2, 2, 500, 500, 64, 64, dtype=dtype)
    given = [each.clone().requires_grad_() for each in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    torchs = torch.autograd.grad(out, given, gradient)
    visible = torch.ones(500, 500, dtype=torch.bool).tril() if causal else None
    mine = gradients(q, k, v, gradient, mask=[3, -FAR, 0] if causal else [])
    for one, other, wanted in zip(mine, torchs, exact(q, k, v, gradient, visible=visible), strict=True):
        errors = [(each.double() - wanted).square().mean().sqrt().item() for each in (one, other)]
        assert errors[0] <= 1.1 * errors[1]


X, L = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5)
REFUSED = {
    "the result's shape": {"out": X[:, :, :4]},
    "the gradient's dtype": {"gradient": X.bfloat16()},
    "the log-sum-exp's dtype": {"lse": L.double()},
    "the log-sum-exp's shape": {"lse": L[:, :1]},
    "its gradient's shape": {"of_lse": L[:, :, :1]},
    "keys": {"k": X[..., :3]},
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_not_taken(case):
    """The kernels trust what they are told of memory."""
    given = {"gradient": X, "of_lse": None, "q": X, "k": X, "v": X, "out": X, "lse": L}
    rest = {"mask_tensors": [], "bias_tensors": [], "mask": [], "bias": [], "scale": 1.0, "softcap": 0.0}
    call = GradientCall(**given, **rest, out_is_bshd=False)
    assert cpu.takes_gradients(call)
    assert not cpu.takes_gradients(call._replace(**case))
