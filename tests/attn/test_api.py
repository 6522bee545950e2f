"""opkit.attention: layouts, mistakes, and what importing opkit leaves for later."""

import json

import fresh_process
import pytest
import torch
from attention_inputs import inputs, randn
from torch.utils._python_dispatch import TorchDispatchMode

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, KernelError, ShapeError
from opkit.masks import ALiBi, Causal, KeyPadding, RelativePosition, VarLen

# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, Causal("bottom-right"), KeyPadding(torch.tensor([2, 6]))])
def test_batch_sequence_heads_is_the_same_transposed(mask):
    q, k, v = inputs()
    expected, expected_lse = opkit.attention(q, k, v, mask=mask, return_lse=True)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out, lse = opkit.attention(*turned, mask=mask, layout="bshd", return_lse=True)
    assert out.shape == (2, 5, 4, 3)
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), expected)
    torch.testing.assert_close(lse, expected_lse)
    assert lse.is_contiguous()


def test_packed_sequences_are_those_of_a_batch():
    lengths, (q, k, v) = (2, 0, 3), inputs(batch=3, queries=3, keys=3)
    mask = VarLen(torch.tensor([0, 2, 2, 5])) & Causal()
    packed = [torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for x in (q, k, v)]
    out, lse = opkit.attention(*packed, mask=mask, layout="thd", return_lse=True)
    assert out.shape == (5, 4, 3)
    assert lse.shape == (4, 5)
    assert out.is_contiguous()
    at = 0
    for b, n in enumerate(lengths):
        one, one_lse = opkit.attention(*(x[b : b + 1, :, :n] for x in (q, k, v)), mask=Causal(), return_lse=True)
        torch.testing.assert_close(out[at : at + n].transpose(0, 1), one[0])
        torch.testing.assert_close(lse[:, at : at + n], one_lse[0])
        at += n


class Calls(TorchDispatchMode):
    """Notes what ``opkit::attention`` is called with."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == "opkit.attention.default":
            self.given.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd"])
def test_results_are_contiguous_and_arguments_are_not_copied(layout):
    shape = (5, 4, 8) if layout == "thd" else (2, 5, 4, 8)
    q, k, v = (randn(*shape, seed=n) for n in range(3))
    with Calls() as calls:
        assert opkit.attention(q, k, v, layout=layout).is_contiguous()
    assert [x.data_ptr() for x in calls.given[0][:3]] == [x.data_ptr() for x in (q, k, v)]


def test_any_strides_are_as_good_as_contiguous_ones():
    q, k, v = inputs()
    expected = opkit.attention(q, k, v)
    strided = [torch.stack((x, x), -1)[..., 0] for x in (q, k, v)]
    turned = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (q, k, v)]
    for args in (strided, turned):
        out = opkit.attention(*args)
        torch.testing.assert_close(out, expected)
        assert out.is_contiguous()


def test_the_log_sum_exp_is_returned_when_asked_for():
    q, k, v = inputs(dtype=torch.bfloat16)
    out, lse = opkit.attention(q, k, v, scale=0.25, return_lse=True)
    assert torch.equal(opkit.attention(q, k, v, scale=0.25), out)
    logits = q.float() @ k.float().repeat_interleave(2, 1).mT * 0.25
    torch.testing.assert_close(lse, logits.logsumexp(-1))


def test_autocast_casts_queries_keys_and_values():
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = opkit.attention(q, k.bfloat16(), v, bias=ALiBi(torch.ones(4)), return_lse=True)
        assert opkit.attention(q.double(), k.double(), v.double()).dtype == torch.float64
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    plain = opkit.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=ALiBi(torch.ones(4)))
    assert torch.equal(out, plain)


def test_a_call_writes_to_nothing():
    q, k, v = inputs()
    lengths, bias = torch.tensor([2, 3]), randn(5, 6)
    before = [x.clone() for x in (q, k, v, lengths, bias)]
    opkit.attention(q, k, v, mask=Causal() & KeyPadding(lengths), bias=bias)
    assert all(map(torch.equal, before, (q, k, v, lengths, bias)))


# ---- mistakes --------------------------------------------------------------------------------------------------------

Q, K, V = inputs()


def call(q=Q, k=K, v=V, **options):
    return lambda: opkit.attention(q, k, v, **options)


WRONG = (
    (call(q=3), ArgumentTypeError, r"q must be a tensor, got int: 3"),
    (call(q=Q.int()), DtypeError, r"q has dtype torch.int32, expected float32, .* Convert it with .to\(torch.float32\)"),
    (call(k=K.double()), DtypeError, r"k has dtype torch.float64, q has torch.float32. Convert it with .to\(q.dtype\)"),
    (call(v=V.to("meta")), ArgumentError, r"v is on meta, q is on cpu. Move it with .to\(q.device\)"),
    (call(q=Q[0]), ShapeError, r"q of shape \(4, 5, 8\) has 3 dimensions; the layout 'bhsd' is \(batch, heads, sequence"),
    (call(k=K[:1]), ShapeError, r"q of shape \(2, 4, 5, 8\) and k of shape \(1, 2, 6, 8\) must agree in batch: 2 and 1"),
    (call(k=K[..., :7]), ShapeError, r"q of .* and k of shape \(2, 2, 6, 7\) must agree in head size: 8 and 7"),
    (call(v=V[:, :, :5]), ShapeError, r"k of .* and v of shape \(2, 2, 5, 3\) must agree in sequence: 6 and 5"),
    (call(v=V[:, :1]), ShapeError, r"k of .* and v of shape \(2, 1, 6, 3\) must agree in heads: 2 and 1"),
    (call(q=Q[:, :3]), ShapeError, r"q has 3 heads and k 2, in the layout 'bhsd', .* a multiple of k's"),
    (call(k=K[:, :0], v=V[:, :0]), ShapeError, r"q has 4 heads and k 0"),
    (call(q=Q[..., :0], k=K[..., :0]), ShapeError, r"has heads of size 0, expected 1 or more"),
    (call(layout="sbhd"), ArgumentError, r"layout='sbhd' is unknown. There are 'bhsd': \(batch, heads, .*'thd': \(total"),
    (call(layout="thd"), ShapeError, r"q of shape \(2, 4, 5, 8\) has 4 dimensions; the layout 'thd' is \(total, heads, head"),
    (call(q=Q[0], k=K[0], v=V[0, :, :5], layout="thd"), ShapeError, r"must agree in heads: 6 and 5"),
    (call(softcap=0), ArgumentError, r"softcap=0 must be above 0, or None for no bound"),
    (call(dropout_p=1.5), ArgumentError, r"dropout_p=1.5 must be between 0 and 1"),
    (call(sinks=[1.0]), ArgumentTypeError, r"sinks must be a tensor, got list: \[1.0\]"),
    (call(sinks=torch.zeros(2)), ShapeError, r"sinks of shape \(2,\) must be \(heads,\) = \(4,\), q's heads"),
    (call(sinks=torch.zeros(4).int()), DtypeError, r"sinks has dtype torch.int32, expected a floating one"),
    (call(sinks=torch.zeros(4, device="meta")), ArgumentError, r"sinks is on meta, q is on cpu"),
    (call(bias="alibi"), ArgumentTypeError, r"a bias is a floating tensor, .* a function, or a list .* got str"),
    (call(bias=torch.ones(5, 6).bool()), DtypeError, r"bias has dtype torch.bool, expected floating"),
    (call(bias=torch.ones(6, 5)), ShapeError, r"bias of shape \(6, 5\) does not broadcast to .* = \(2, 4, 5, 6\)"),
    (call(bias=ALiBi(torch.ones(2))), ShapeError, r"ALiBi: slopes of shape \(2,\) must be \(heads,\) = \(4,\) or"),
    (call(bias=ALiBi(torch.ones(4).int())), DtypeError, r"ALiBi: slopes has dtype torch.int32, expected a floating one"),
    (
        call(bias=RelativePosition(torch.ones(2, 4, 5, 2), torch.ones(2, 4, 5, 2))), ShapeError,
        r"rel_h has 2 rows and rel_w 2 columns, that is 4 keys; there are 6",
    ),
    (
        call(bias=RelativePosition(torch.ones(2, 4, 3, 2), torch.ones(2, 4, 5, 3))), ShapeError,
        r"RelativePosition: rel_h of shape \(2, 4, 3, 2\) must be \(batch, heads, queries, n\) = \(2, 4, 5, n\)",
    ),
    (call(kernel="flash"), KernelError, r"there is no kernel named 'flash'. There are: reference"),
)  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_mistakes_are_explained(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_alibi_beside_documents_at_different_places_is_refused():
    q, k = torch.zeros(4, 2, 8), torch.zeros(5, 2, 8)
    mask = VarLen(torch.tensor([0, 2, 4]), torch.tensor([0, 3, 5]))
    with pytest.raises(ArgumentError, match="ALiBi counts distances in the packed sequences"):
        opkit.attention(q, k, k, layout="thd", mask=mask & Causal(), bias=[ALiBi(torch.ones(2))])


def test_alibi_beside_documents_at_the_same_places_counts_within_them():
    q, k, v = (randn(6, 2, 8, seed=n) for n in range(3))
    slopes = torch.tensor([0.5, 0.1])
    out = opkit.attention(q, k, v, layout="thd", mask=VarLen(torch.tensor([0, 2, 6])), bias=ALiBi(slopes))
    alone = opkit.attention(q[2:], k[2:], v[2:], layout="thd", bias=ALiBi(slopes))
    torch.testing.assert_close(out[2:], alone)


# ---- attributes of opkit ---------------------------------------------------------------------------------------------


def test_importing_opkit_leaves_attention_for_later():
    source = (
        "import sys, json, opkit; before = [m for m in sys.modules if m.startswith(('opkit.attn', 'opkit.masks'))]; "
        "opkit.masks.Causal(); opkit.attention; print(json.dumps([before, 'opkit.attn.api' in sys.modules]))"
    )
    assert json.loads(fresh_process.run(["-c", source]).stdout) == [[], True]


def test_opkit_has_no_other_attributes():
    with pytest.raises(AttributeError, match="module 'opkit' has no attribute 'atention'"):
        opkit.atention  # noqa: B018
