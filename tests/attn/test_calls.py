"""What ``opkit.attention`` remembers of a call is used for calls like it alone, and lets go where something has changed."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opkit
from opkit import masks
from opkit.attn import api
from opkit.errors import ShapeError

OFTEN = 7
MASKS = [None, masks.Causal(), masks.Causal("bottom-right"), masks.SlidingWindow(2, 0) | masks.SlidingWindow(0, 1)]


def r(*sizes, **options):
    return torch.randn(*sizes, **options)


def often(*args, **kwargs):
    """The last of so many calls that the last ones run directly."""
    for _ in range(OFTEN):
        out = opkit.attention(*args, **kwargs)
    return out


def exact(q, k, v, mask=None, scale=None, softcap=None):
    return opkit.attention(q, k, v, mask=mask, scale=scale, softcap=softcap, kernel="reference")


def test_calls_that_differ_in_one_thing_take_turns():
    q, k, v = r(2, 4, 5, 8), r(2, 2, 7, 8), r(2, 2, 7, 6)
    tensors = [
        (q, k, v),
        (q[:, :2], k, v),
        (q, k[:, :, :5], v[:, :, :5]),
        (q.mT.contiguous().mT, k, v),
        (q.half(), k.half(), v.half()),
    ]
    cases = list(itertools.product(tensors, MASKS, ({}, {"scale": 0.5}, {"softcap": 1.5})))
    wanted = [exact(*given, mask=mask, **options) for given, mask, options in cases]
    for _ in range(OFTEN):
        for (given, mask, options), want in zip(cases, wanted, strict=True):
            bound = 1e-5 if given[0].dtype == torch.float32 else 2e-3
            torch.testing.assert_close(opkit.attention(*given, mask=mask, **options), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_layouts(layout):
    q, k, v = (r(1, 2, 5, 8) for _ in range(3))
    back = {"bhsd": lambda x: x, "bshd": lambda x: x.transpose(1, 2), "thd": lambda x: x[0].transpose(0, 1)}[layout]
    given = [back(x).contiguous() for x in (q, k, v)]
    for _ in range(7):
        out, lse = opkit.attention(*given, layout=layout, mask=masks.Causal(), return_lse=True)
        torch.testing.assert_close(out, back(exact(q, k, v, mask=masks.Causal())))
        assert out.is_contiguous()
        assert lse.shape == ((2, 5) if layout == "thd" else (1, 2, 5))


def test_masks_that_are_equal_are_found_and_those_with_tensors_are_looked_at_anew():
    q, k, v = (r(1, 1, 4, 8) for _ in range(3))
    for _ in range(7):
        torch.testing.assert_close(opkit.attention(q, k, v, mask=masks.Causal()), exact(q, k, v, masks.Causal()))
    seen = torch.ones(4, 4, dtype=torch.bool)
    for column in range(4):
        seen[:, column] = False
        for mask in (seen, masks.Dense(seen), masks.Causal() & seen):
            torch.testing.assert_close(often(q, k, v, mask=mask), exact(q, k, v, mask))


def test_gradients_no_grad_and_inference_alternate():
    q, k, v = (r(1, 2, 3, 8, requires_grad=True) for _ in range(3))
    wanted = torch.autograd.grad(exact(q, k, v).sin().sum(), (q, k, v))
    for _ in range(7):
        out = opkit.attention(q, k, v)
        for got, want in zip(torch.autograd.grad(out.sin().sum(), (q, k, v)), wanted, strict=True):
            torch.testing.assert_close(got, want)
        with torch.no_grad():
            assert not opkit.attention(q, k, v).requires_grad
        with torch.inference_mode():
            assert opkit.attention(q, k, v).is_inference()
        assert not opkit.attention(q.detach(), k.detach(), v.detach()).requires_grad


def test_a_list_kept_for_the_backward_is_no_other_calls():
    q, k, v = (r(1, 1, 3, 8, requires_grad=True) for _ in range(3))
    outs = [opkit.attention(q, k, v, mask=masks.Causal()) for _ in range(8)]
    kept = [out.grad_fn.rest[0] for out in outs]
    assert len({id(each) for each in kept}) == len(kept)


class Seen(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_circumstances_are_noticed():
    q, k, v = (r(1, 2, 3, 8) for _ in range(3))
    want = often(q, k, v)
    with Seen() as mode:
        opkit.attention(q, k, v)
    assert mode.names[0] == "opkit.attention.default"
    with torch.profiler.profile(acc_events=True) as profile:
        opkit.attention(q, k, v)
    assert any(event.key.startswith("opkit::attention") for event in profile.key_averages())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert opkit.attention(q, k, v).dtype == torch.bfloat16
    torch.testing.assert_close(torch.vmap(opkit.attention)(q[None], k[None], v[None])[0], want)
    _, tangent = torch.func.jvp(lambda v: opkit.attention(q, k, v), (v,), (v,))
    torch.testing.assert_close(tangent, want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        out = torch.autograd.forward_ad.unpack_dual(opkit.attention(q, k, dual))
        torch.testing.assert_close(out.tangent, want)
    with torch.device("meta"):
        torch.testing.assert_close(opkit.attention(q, k, v), want)
    torch.testing.assert_close(torch.compile(opkit.attention, backend="eager")(q, k, v), want)


def test_a_new_kernel_and_a_forced_one_are_noticed(operator):
    q, k, v = (r(1, 2, 3, 8) for _ in range(3))
    calls = []

    def counted(*args):
        calls.append(1)
        return operator.reference(*args)

    often(q, k, v)
    operator.register_kernel("cpu", counted, name="counted", priority=9)
    often(q, k, v)
    assert len(calls) == OFTEN
    with opkit.use_kernel(operator, "reference"):
        assert api.select(q, k, v).kernel == "reference"
        often(q, k, v)
    assert len(calls) == OFTEN
    often(q, k, v)
    assert len(calls) == 2 * OFTEN


def test_errors_are_the_same_after_calls_that_fit():
    q, k, v = (r(1, 2, 3, 8) for _ in range(3))
    often(q, k, v)
    with pytest.raises(ShapeError, match="must agree in sequence"):
        opkit.attention(q, k, v[:, :, :2])
    with pytest.raises(opkit.errors.ArgumentTypeError):
        opkit.attention(q, k, None)
    with pytest.raises(opkit.errors.ArgumentError, match="softcap"):
        opkit.attention(q, k, v, softcap=-1.0)


@pytest.mark.parametrize("size", [(1, 1, 1, 8), (0, 2, 3, 8), (1, 2, 0, 8), (3, 2, 70, 33)])
def test_results_are_new_each_time(size):
    q, k, v = (r(size) for _ in range(3))
    outs = [opkit.attention(q, k, v, return_lse=True) for _ in range(8)]
    for out, lse in outs:
        torch.testing.assert_close(out, exact(q, k, v))
        assert (out.shape, lse.shape) == (size, size[:3])
    if outs[0][0].numel():
        assert len({x.data_ptr() for pair in outs for x in pair}) == 2 * len(outs)
