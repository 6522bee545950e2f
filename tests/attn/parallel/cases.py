"""Attention of several processes against that of one, which ``test_parallel`` starts."""

import itertools

import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import case
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import opkit
from opkit.errors import ArgumentError, ShapeError
from opkit.masks import Causal, Dense, KeyPadding, PrefixLM, Segments, SlidingWindow, VarLen

S, D = 48, 8
MASKS = {
    "all": lambda: None,
    "causal": Causal,
    "window": lambda: Causal() & SlidingWindow(9),
    "band": lambda: SlidingWindow(5, 3) | Dense(torch.rand(S, 1) > 0.9),
    "after": lambda: ~Causal(),
    "prefix": lambda: PrefixLM(torch.tensor([13, 30])),
    "padding": lambda: KeyPadding(torch.tensor([40, 17])) & Segments(torch.arange(S) // 7),
    "packed": lambda: VarLen(torch.tensor([0, 5, 5, 21, 40, 44])) & Causal(),
    "dense": lambda: Dense(torch.rand(2, 4, S, S) > 0.5),
    "added": lambda: Causal() & Dense(torch.randn(2, 1, S, S)),
}


def numbers(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def attended(q, k, v, weights, sinks=None, **options):
    """The result, its log-sum-exp, and the gradients of q, k, v and the sinks of a sum of both."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    more = {} if sinks is None else {"sinks": inputs[3]}
    out, lse = opkit.attention(*inputs[:3], return_lse=True, **more, **options)
    sums = torch.where(lse > -torch.inf, lse, 0) * weights.mean(-1)
    return [out, lse, *torch.autograd.grad((out * weights).sum() + sums.sum(), inputs)]


def compare(mesh, method, balanced, keys=2, batch=2, dtype=torch.float64, sinks=None, **options):
    q, k, v, weights = (numbers(batch, h, S, D, dtype=dtype) for h in (4, keys, keys, 4))
    expected = attended(q, k, v, weights, sinks, **options)
    with opkit.context_parallel(mesh, method=method, balanced=balanced) as parallel:
        found = attended(*(parallel.shard(x, 2) for x in (q, k, v, weights)), sinks, **options)
    found[:5] = [parallel.unshard(x, 2) for x in found[:5]]
    for gradient in found[5:]:
        dist.all_reduce(gradient)
    limits = {} if dtype != torch.bfloat16 else {"rtol": 4e-2, "atol": 4e-2}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **limits)


def methods(mesh):
    """Each method with the most heads of keys that it can do without, and both orders of the sequence."""
    return [
        (m, b, keys) for (m, keys), b in itertools.product((("ring", 1), ("all_to_all", mesh.size())), (False, True))
    ]


@case
def masks(mesh):
    for name, mask in MASKS.items():
        for method, balanced, keys in methods(mesh):
            compare(mesh, method, balanced, keys, 1 if name == "packed" else 2, mask=mask())


@case
def options(mesh):
    for method, balanced, keys in methods(mesh):
        compare(mesh, method, balanced, keys, mask=Causal(), softcap=3.0, sinks=numbers(4))
        compare(mesh, method, balanced, keys, bias=[numbers(4, 1, S), numbers(S, 1)], scale=0.3)
        compare(mesh, method, balanced, keys, mask=Causal(), dtype=torch.bfloat16)
        compare(mesh, method, balanced, keys, mask=Causal("bottom-right"), dtype=torch.float32)


@case
def autocast(mesh):
    q, k, v = (numbers(1, 2, S, D, dtype=torch.float32) for _ in range(3))
    for method in ("ring", "all_to_all"):
        with torch.autocast("cpu", torch.bfloat16), opkit.context_parallel(mesh, method=method) as parallel:
            out = opkit.attention(*(parallel.shard(x, 2) for x in (q, k, v)))
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(parallel.unshard(out, 2).float(), opkit.attention(q, k, v), rtol=3e-2, atol=3e-2)


@case
def values_that_no_query_sees(mesh):
    q, k, v = (numbers(1, 2, S, D) for _ in range(3))
    expected = opkit.attention(q, k, v, mask=Causal() & SlidingWindow(3))[:, :, :20]
    k[:, :, 24:], v[:, :, 24:] = torch.nan, torch.inf
    with opkit.context_parallel(mesh, method="ring") as parallel:
        out = opkit.attention(*(parallel.shard(x, 2) for x in (q, k, v)), mask=Causal() & SlidingWindow(3))
    torch.testing.assert_close(parallel.unshard(out, 2)[:, :, :20], expected)


@case
def keys_that_no_query_sees_are_not_sent(mesh):
    sent = []
    exchange = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda operations: sent.extend(operations) or exchange(operations)
    try:
        with opkit.context_parallel(mesh, method="ring") as parallel:
            x = parallel.shard(numbers(1, 2, S, D), 2)
            opkit.attention(x, x, x, mask=Causal())
    finally:
        dist.batch_isend_irecv = exchange
    others = mesh.size() - 1
    kinds = [operation.op.__name__ for operation in sent]
    assert (kinds.count("isend"), kinds.count("irecv")) == (others - mesh.get_rank(), mesh.get_rank())


@case
def models_that_call_torchs_attention(mesh):
    q, k, v = (numbers(2, 4, S, D) for _ in range(3))
    with opkit.context_parallel(mesh, balanced=True) as parallel, opkit.sdpa_override():
        out = F.scaled_dot_product_attention(*(parallel.shard(x, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(parallel.unshard(out, 2), F.scaled_dot_product_attention(q, k, v, is_causal=True))


@case
def distributed_tensors(mesh):
    for layout, of_heads, of_sequence in (("bhsd", 1, 2), ("bshd", 2, 1)):
        for dim in (0, of_heads, of_sequence):
            shape = (3, 4, S, D) if layout == "bhsd" else (3, S, 4, D)
            q, k, v, weights = (numbers(*shape) for _ in range(4))
            sinks, mask = (
                numbers(4),
                Causal() & KeyPadding(torch.tensor([40, 17, 30])) & Dense(torch.rand(3, 4, 1, S) > 0.2),
            )
            results = []
            for placement in (None, Shard(dim)):
                inputs = [q, k, v, sinks]
                if placement is not None:
                    inputs = [distribute_tensor(x, mesh, [placement]) for x in (q, k, v)]
                    inputs.append(distribute_tensor(sinks, mesh, [Replicate()]))
                inputs = [x.detach().requires_grad_() for x in inputs]
                out = opkit.attention(*inputs[:3], sinks=inputs[3], mask=mask, layout=layout)
                factor = weights if placement is None else distribute_tensor(weights, mesh, [placement])
                results.append([out, *torch.autograd.grad((out * factor).sum(), inputs)])
            for theirs, ours in zip(*results, strict=True):
                assert isinstance(ours, DTensor)
                torch.testing.assert_close(ours.full_tensor(), theirs)
            assert results[1][0].placements == (Shard(dim),)
            assert results[1][4].placements == (Partial(),)


@case
def bad_calls(mesh):
    x = numbers(1, 3, 8, D)
    with opkit.context_parallel(mesh, method="all_to_all"):
        with pytest.raises(ShapeError, match=r'3 heads of queries.*method="ring"'):
            opkit.attention(x, x, x)
        with pytest.raises(ArgumentError, match="dropout within"):
            opkit.attention(x, x, x, dropout_p=0.5)
        with pytest.raises(ArgumentError, match="ALiBi cannot be divided"):
            opkit.attention(x, x, x, bias=opkit.masks.ALiBi(torch.ones(3)))
        other = numbers(1, 3, 8 + mesh.get_rank(), D)
        with pytest.raises(ArgumentError, match=r"different calls\. rank 0: .* rank 1: "):
            opkit.attention(other, other, other)
        with pytest.raises(ArgumentError, match="got layout='thd'"):
            opkit.attention(x[0], x[0], x[0], layout="thd")
    with opkit.context_parallel(mesh, balanced=True) as parallel, pytest.raises(ShapeError, match="multiple of 4"):
        parallel.shard(numbers(1, 3, 6, D), 2)
    one, other = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(ArgumentError, match="sharded by batch, heads or sequence alike"):
        opkit.attention(one, other, other)
    with pytest.raises(ShapeError, match="3 heads of queries and 3 of keys cannot be divided among 2"):
        opkit.attention(*(distribute_tensor(x, mesh, [Shard(1)]) for _ in range(3)))


if __name__ == "__main__":
    processes.main()
