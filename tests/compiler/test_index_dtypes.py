"""Indices and class targets of every integer dtype: what eager mode takes and refuses, and its errors."""

import pytest
import torch
from torch.nn import functional as F

import opkit

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore:index_reduce")]  # it is in beta

TABLE = torch.linspace(-2, 3, 35).reshape(7, 5)
AT = torch.tensor([0, 3, 6, 2])
INTEGERS = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip

OPERATORS = {
    "embedding": lambda x, i: F.embedding(i, x, padding_idx=3),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x, torch.tensor([0, 2]).to(i.dtype), mode="mean"),
    "sparse embedding": lambda x, i: F.embedding(i, x, sparse=True),
    "index_select": lambda x, i: x.index_select(0, i),
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:, None].expand(4, 5), 0),
    "take": lambda x, i: x.take(i),
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(4, 5)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(4, 5)),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), torch.ones(4, 5)),
    "index_put, sums": lambda x, i: x.index_put((i,), torch.ones(4, 5), accumulate=True),
    "index_reduce": lambda x, i: x.index_reduce(0, i, torch.ones(4, 5), "amax"),
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], torch.ones(4, 1)),
    "cross_entropy": lambda x, i: F.cross_entropy(x.T[:4], i),
    "cross_entropy, smoothed": lambda x, i: F.cross_entropy(x.T[:4], i, label_smoothing=0.1),
    "nll_loss": lambda x, i: F.nll_loss(x.T[:4], i),
}


def outcome(function, indices):
    """Return the result and the gradient, or the error."""
    x = TABLE.clone().requires_grad_()
    try:
        result = function(x, indices)
        result.sum().backward()
    except Exception as error:
        return error
    return result.detach(), x.grad.to_dense()


def compare(name, indices):
    torch._dynamo.reset()
    eager = outcome(OPERATORS[name], indices)
    found = outcome(torch.compile(OPERATORS[name], backend="opkit"), indices)
    if not isinstance(eager, Exception):
        torch.testing.assert_close(found, eager)
    elif not isinstance(found, torch._dynamo.exc.TorchRuntimeError):  # of torch's fake implementation
        assert isinstance(found, type(eager)), (found, eager)
    return eager


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("embedding", torch.int32),
        ("embedding_bag", torch.int32),
        ("cross_entropy", torch.int64),
        ("sparse embedding", torch.int32),
    ],
)
def test_indices_that_eager_mode_takes(name, dtype):
    assert not isinstance(compare(name, AT.to(dtype)), Exception)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("embedding", torch.uint32, RuntimeError),
        ("cross_entropy", torch.int32, RuntimeError),
        ("index_select", torch.uint32, RuntimeError),
        ("index_put", torch.int16, IndexError),
        ("index_copy", torch.int32, RuntimeError),
    ],
)
def test_indices_that_eager_mode_refuses(name, dtype, kind):
    assert type(compare(name, AT.to(dtype))) is kind


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", OPERATORS)
def test_indices_of_every_dtype(name, dtype):
    if dtype is torch.uint8 and name in ("cross_entropy", "nll_loss", "cross_entropy, smoothed"):
        pytest.skip("torch's fake implementation refuses what eager mode takes")
    compare(name, AT.to(dtype))


@pytest.mark.parametrize("name", ["embedding", "gather"])  # eager mode raises IndexError and RuntimeError
def test_an_index_out_of_range(name):
    assert isinstance(compare(name, torch.tensor([0, 1, 9, 2])), IndexError if name == "embedding" else RuntimeError)


def test_targets_of_every_dtype():
    """opkit's own loss takes them all, compiled or not."""
    logits = TABLE[:4]
    expected = F.cross_entropy(logits, torch.tensor([0, 3, 4, 2]))
    for dtype in INTEGERS:
        targets = torch.tensor([0, 3, 4, 2]).to(dtype)
        torch.testing.assert_close(opkit.nn.functional.cross_entropy(logits, targets), expected)
    fast = torch.compile(opkit.nn.functional.cross_entropy, backend="opkit")
    torch.testing.assert_close(fast(logits, torch.tensor([0, 3, 4, 2]).to(torch.uint32)), expected)
