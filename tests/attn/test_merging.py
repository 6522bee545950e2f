"""opkit.merge_attention: attention to all keys from attention to parts of them."""

import pytest
import torch

import opkit
from opkit.attn.merging import merge_attention_operator
from opkit.errors import ArgumentError, DtypeError, ShapeError
from opkit.masks import KeyPadding
from opkit.testing import tensor


def parts_of(q, k, v, *ends, masks=()):
    starts = (0, *ends[:-1])
    masks = masks or [None] * len(ends)
    return [
        opkit.attention(q, k[:, :, a:b], v[:, :, a:b], mask=mask, return_lse=True)
        for a, b, mask in zip(starts, ends, masks, strict=True)
    ]


def tensors(dtype=torch.float64, keys=30):
    torch.manual_seed(0)
    return torch.randn(2, 4, 5, 8).to(dtype), torch.randn(2, 2, keys, 8).to(dtype), torch.randn(2, 2, keys, 6).to(dtype)


@pytest.mark.parametrize("ends", [(30,), (1, 30), (7, 7, 19, 30), tuple(range(3, 31, 3))])
def test_parts_of_the_keys_are_as_all_of_them(ends):
    q, k, v = tensors()
    out, lse = opkit.merge_attention(parts_of(q, k, v, *ends))
    expected, expected_lse = opkit.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_gradients_are_as_of_all_keys():
    leaves = [x.requires_grad_() for x in tensors()]
    weights = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)

    def gradients(out, lse):
        return torch.autograd.grad((out * weights[0]).sum() + (lse * weights[1]).sum(), leaves)

    found = gradients(*opkit.merge_attention(parts_of(*leaves, 11, 30)))
    for mine, right in zip(found, gradients(*opkit.attention(*leaves, return_lse=True)), strict=True):
        torch.testing.assert_close(mine, right)


def test_what_sees_nothing_counts_for_nothing():
    q, k, v = tensors()
    lengths = torch.tensor([0, 9])
    hidden, rest = parts_of(q, k, v, 11, 30, masks=[KeyPadding(lengths), KeyPadding(lengths)])
    dirty = hidden[0].clone()
    dirty[0] = torch.nan
    out, lse = opkit.merge_attention([(dirty, hidden[1]), rest])
    assert lse[0].eq(-torch.inf).all()
    assert not out[0].any()
    expected = opkit.attention(
        q, torch.cat((k[:, :, :9], k[:, :, 11:20]), 2), torch.cat((v[:, :, :9], v[:, :, 11:20]), 2)
    )
    torch.testing.assert_close(out[1], expected[1])


def test_gradients_of_what_sees_nothing_are_zero():
    out, lse = torch.ones(3, 2, requires_grad=True), torch.full((3,), -torch.inf, requires_grad=True)
    merged, total = opkit.merge_attention([(out, lse), (out, lse)])
    found = torch.autograd.grad(merged.sum() + total.exp().sum(), (out, lse))
    assert all(not each.any() for each in found)


def test_narrow_results_keep_their_dtype():
    q, k, v = tensors(torch.bfloat16)
    out, lse = opkit.merge_attention(parts_of(q, k, v, 11, 30))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, opkit.attention(q, k, v), rtol=2e-2, atol=2e-2)


def test_results_from_pages_are_merged_too():
    torch.manual_seed(0)
    shared, own = torch.randn(1, 2, 12, 2, 8), torch.randn(2, 4, 8, 2, 8)  # keys and values, and pages of 8
    q, lengths = torch.randn(4, 4, 8), torch.tensor([5, 8, 1, 3])
    prefix_k, prefix_v = (x.transpose(0, 1).unsqueeze(0) for x in shared[0])
    together = opkit.attention(q.transpose(0, 1).unsqueeze(0), prefix_k, prefix_v, return_lse=True)
    prefix = together[0][0].transpose(0, 1), together[1][0].mT
    pages = torch.arange(4).unsqueeze(1)
    alone = opkit.paged_attention(q, own[0], own[1], pages, lengths, return_lse=True)
    out, _ = opkit.merge_attention([prefix, alone])
    for b, length in enumerate(lengths.tolist()):
        k, v = (torch.cat((shared[0, n], own[n, b, :length])).transpose(0, 1).unsqueeze(0) for n in (0, 1))
        expected = opkit.attention(q[b, None, :, None], k, v)[0, :, 0]
        torch.testing.assert_close(out[b], expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit():
    out, lse = torch.ones(2, 3), torch.ones(2)
    with pytest.raises(ArgumentError, match="parts is empty"):
        opkit.merge_attention([])
    with pytest.raises(ShapeError, match=r"part 1 has a result of \(2, 4\) .* expected \(2, 3\)"):
        opkit.merge_attention([(out, lse), (torch.ones(2, 4), lse)])
    with pytest.raises(ShapeError, match=r"a log-sum-exp of \(3,\); expected .* \(2,\)"):
        opkit.merge_attention([(out, torch.ones(3))])
    with pytest.raises(DtypeError, match=r"part 1 has a result of torch\.float16"):
        opkit.merge_attention([(out, lse), (out.half(), lse)])
    with pytest.raises(DtypeError, match=r"a log-sum-exp of torch\.int64"):
        opkit.merge_attention([(out, lse.long())])


GROUPS = ["fake", "gradients", "layout", "numbers", "schema", "transforms"]
TELLING = {"gradients.second", "gradients.forward", "transforms.vmap", "fake.symbolic", "numbers.extreme"}


@pytest.mark.parametrize(
    ("properties", "examples"),
    [([*TELLING, "numbers.reference", "schema"], 2), pytest.param(GROUPS, 8, marks=pytest.mark.exhaustive)],
    ids=["telling", "all"],
)
def test_the_operator_keeps_its_contract(properties, examples):
    parts = [tensor("b n d", dtypes=(torch.float32, torch.float64))] * 2
    sums = [tensor("b n", dtypes=(torch.float32, torch.float64))] * 2
    report = opkit.check(merge_attention_operator(), args=(parts, sums), max_examples=examples, properties=properties)
    report.raise_for_failures()
    passed = {each.property for each in report.passed}
    assert passed >= TELLING
