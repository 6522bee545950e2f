"""Attention of several processes against that of one, which ``test_parallel`` starts."""

import dataclasses
import itertools

import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import case
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError
from opkit.masks import Blocks, Causal, Dense, KeyPadding, MaskFunction, PrefixLM, Segments, SlidingWindow, VarLen

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


def compare(mesh, method, balanced, keys=2, batch=2, dtype=torch.float64, sinks=None, whole=None, **options):
    """``whole``: other options of the call that is not divided."""
    q, k, v, weights = (numbers(batch, h, S, D, dtype=dtype) for h in (4, keys, keys, 4))
    expected = attended(q, k, v, weights, sinks, **(options if whole is None else whole))
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


IDS = torch.arange(S).div(7, rounding_mode="floor") + torch.tensor([[0], [1]]) * (torch.arange(S) > 9)


def near(width, step):
    return lambda b, h, i, j: (i - j < width) & ((i + h - j) % step != 1)


FUNCTIONS = {
    "documents": lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (i >= j),
    "blocks": lambda b, h, i, j: (i // 8 == j // 8) | (b * j + h == 5),
    "with masks": Causal() & near(20, 3) | ~MaskFunction(near(40, 5)) & KeyPadding(torch.tensor([40, 17])),
}


def scores():
    """Scores, and the captured tensors whose gradients are wanted."""
    slopes, table, start = torch.rand(4).double(), numbers(4, 2 * S - 1), 20
    learned = [x.requires_grad_() for x in (slopes, table)]

    def alibi(s, b, h, i, j):
        return s - slopes[h] * (i - j).abs()

    def relative(s, b, h, i, j):
        return torch.where(i - j < start, s * torch.sigmoid(s) + table[h, j - i + S - 1] * slopes[h], -torch.inf)

    return (alibi, relative), learned


@case
def functions(mesh):
    for method, balanced, keys in (("ring", True, 1), ("all_to_all", False, mesh.size())):
        for mask in FUNCTIONS.values():
            compare(mesh, method, balanced, keys, mask=mask)
        compare(mesh, method, balanced, keys, mask=near(20, 3), dtype=torch.float32)
        scored, learned = scores()
        for score, mask in zip(scored, (FUNCTIONS["documents"], Causal()), strict=True):
            options = {"mask": mask, "bias": [score, numbers(S, 1)], "softcap": 3.0}
            q, k, v, weights = (numbers(2, h, S, D) for h in (4, keys, keys, 4))
            out = opkit.attention(q, k, v, **options)
            expected = torch.autograd.grad((out * weights).sum(), learned, materialize_grads=True)
            with opkit.context_parallel(mesh, method=method, balanced=balanced) as parallel:
                q, k, v, weights = (parallel.shard(x, 2) for x in (q, k, v, weights))
                found = opkit.attention(q, k, v, **options)
                of_learned = torch.autograd.grad((found * weights).sum(), learned, materialize_grads=True)
            torch.testing.assert_close(parallel.unshard(found, 2), out)
            for ours, theirs in zip(of_learned, expected, strict=True):
                dist.all_reduce(ours)
                torch.testing.assert_close(ours, theirs)


def biases(kind):
    return {
        "alibi": lambda: opkit.masks.ALiBi(torch.rand(2, 4)),
        "grid": lambda: opkit.masks.RelativePosition(numbers(2, 4, S, S // 2), numbers(1, 4, 1, 2)),
        "tensors": lambda: [numbers(4, 1, S), numbers(S, 1), numbers(1, 4, S, S)],
    }[kind]()


def tensors_of(bias):
    return bias if isinstance(bias, list) else [getattr(bias, field.name) for field in dataclasses.fields(bias)]


@case
def gradients_of_biases(mesh):
    for kind, mask in (("alibi", Causal()), ("alibi", None), ("grid", ~Causal()), ("tensors", SlidingWindow(30, 9))):
        bias, limits = biases(kind), {"rtol": 1e-5, "atol": 1e-5} if kind == "alibi" else {}
        tensors = [x.requires_grad_() for x in tensors_of(bias)]
        for method, balanced, keys in methods(mesh):
            q, k, v, weights = (numbers(2, h, S, D) for h in (4, keys, keys, 4))
            out = opkit.attention(q, k, v, mask=mask, bias=bias, softcap=3.0)
            expected = torch.autograd.grad((out * weights).sum(), tensors)
            with opkit.context_parallel(mesh, method=method, balanced=balanced) as parallel:
                q, k, v, weights = (parallel.shard(x, 2) for x in (q, k, v, weights))
                found = opkit.attention(q, k, v, mask=mask, bias=bias, softcap=3.0)
                of_tensors = torch.autograd.grad((found * weights).sum(), tensors)
            torch.testing.assert_close(parallel.unshard(found, 2), out, **limits)
            for ours, theirs in zip(of_tensors, expected, strict=True):
                dist.all_reduce(ours)
                torch.testing.assert_close(ours, theirs, **limits)


@case
def alibi_of_more_keys_than_queries(mesh):
    bias, n = opkit.masks.ALiBi(torch.tensor([0.5, 0.25])), 2 * mesh.size()
    q, k = numbers(1, 2, 2 * n, D), numbers(1, 2, 3 * n, D)
    for balanced in (False, True):
        with opkit.context_parallel(mesh, method="ring", balanced=balanced) as parallel:
            out = opkit.attention(parallel.shard(q, 2), *[parallel.shard(k, 2)] * 2, bias=bias)
        torch.testing.assert_close(parallel.unshard(out, 2), opkit.attention(q, k, k, bias=bias))


@case
def dropout(mesh):
    """The result for values that are a unit matrix shows what is retained, with which gradients are computed by torch."""
    for method, balanced, keys in methods(mesh):
        whole = [numbers(2, 4, S, D), numbers(2, keys, S, D), torch.eye(S, dtype=torch.float64).expand(2, keys, S, S)]
        q, k, v = (x.clone().requires_grad_() for x in whole)
        with opkit.context_parallel(mesh, method=method, balanced=balanced) as parallel:
            own = [parallel.shard(x, 2).requires_grad_() for x in whole]
            out = opkit.attention(*own, mask=Causal(), dropout_p=0.3)
            retained = parallel.unshard(out, 2) != 0
            weights = numbers(2, 4, S, S)
            found = torch.autograd.grad((out * parallel.shard(weights, 2)).sum(), own)
        logits = q @ k.repeat_interleave(4 // keys, 1).mT * D**-0.5
        seen = torch.ones(S, S, dtype=torch.bool).tril()
        probabilities = logits.masked_fill(~seen, -torch.inf).softmax(-1) * retained / 0.7
        expected = probabilities @ v.repeat_interleave(4 // keys, 1)
        torch.testing.assert_close(parallel.unshard(out, 2), expected)
        theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
        for one, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(parallel.unshard(one, 2), other)
        drawn = retained[..., seen].double()
        assert abs(drawn.mean() - 0.7) < 0.03  # of 9408
        assert (drawn.flatten(0, 1).corrcoef() - torch.eye(8)).abs().max() < 0.2  # heads differ
        blocks = retained.unflatten(-1, (4, -1))[..., -S // 4 :, :3, :].movedim(-2, 0).flatten(1).double()
        assert (blocks.corrcoef() - torch.eye(3)).abs().max() < 0.2  # and so do blocks
    x, unit = (
        distribute_tensor(each, mesh, [Shard(1)])
        for each in (numbers(1, 4, S, D), torch.eye(S).double().expand(1, 4, S, S))
    )
    drawn = (opkit.attention(x, x, unit, dropout_p=0.3).full_tensor() != 0).flatten(0, 1).flatten(1).double()
    assert abs(drawn.mean() - 0.7) < 0.03
    assert (drawn.corrcoef() - torch.eye(4)).abs().max() < 0.2


@case
def autocast(mesh):
    q, k, v = (numbers(1, 4, S, D, dtype=torch.float32) for _ in range(3))
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
    part, rank = S // mesh.size(), mesh.get_rank()
    later = mesh.size() - 1 - rank
    hiding = lambda s, b, h, i, j: torch.where(j <= i, s, -torch.inf)  # noqa: E731
    calls = (
        ({"mask": Causal()}, later, rank),
        ({"mask": lambda b, h, i, j: (i >= j) & (IDS[b, i] >= 0)}, later, rank),
        ({"bias": hiding}, later, rank),
        ({"mask": lambda b, h, i, j: (i // part == j // part) & ((i - j).abs() % 3 != 1)}, 0, 0),
    )
    exchange = dist.batch_isend_irecv
    for options, sends, receives in calls:
        sent = []
        dist.batch_isend_irecv = lambda operations, sent=sent: sent.extend(operations) or exchange(operations)
        try:
            with opkit.context_parallel(mesh, method="ring") as parallel:
                x = parallel.shard(numbers(1, 2, S, D), 2)
                opkit.attention(x, x, x, **options)
        finally:
            dist.batch_isend_irecv = exchange
        kinds = [operation.op.__name__ for operation in sent]
        assert (kinds.count("isend"), kinds.count("irecv")) == (sends, receives)


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


def functions_of(captured):
    """A mask and a score of functions that count everything, for batches of 4."""
    seen = torch.tensor([40, 17, 30, 9])

    def mask(b, h, i, j):
        return (i >= j) & ((j + h) % 5 != 2) & (j <= seen[b]) | (i == j)

    def score(s, b, h, i, j):
        return s + captured[h] * (i - j) * (b + 1)

    return {"mask": mask, "bias": score}


@case
def functions_of_distributed_tensors(mesh):
    """Sharded by batch, heads or sequence, or keys alone."""
    for own, other in ((Shard(0),) * 2, (Shard(1),) * 2, (Shard(2),) * 2, (Replicate(), Shard(2))):
        captured = numbers(4).requires_grad_()
        whole = [numbers(4, 4, S, D) for _ in range(3)]
        options = functions_of(captured)
        out = opkit.attention(*whole, **options)
        (expected,) = torch.autograd.grad(out.square().sum(), captured)
        x, k, v = (distribute_tensor(x, mesh, [at]) for x, at in zip(whole, (own, other, other), strict=True))
        found = opkit.attention(x, k, v, **options)
        torch.testing.assert_close(found.full_tensor(), out)
        (of_captured,) = torch.autograd.grad(found.square().sum().full_tensor(), captured)
        dist.all_reduce(of_captured)
        torch.testing.assert_close(of_captured, expected)
        for placement in (Replicate(), Shard(0)):
            distributed = distribute_tensor(captured.detach(), mesh, [placement]).requires_grad_()
            found = opkit.attention(x, k, v, **functions_of(distributed))
            torch.testing.assert_close(found.full_tensor(), out)
            (of_captured,) = torch.autograd.grad(found.square().sum(), distributed)
            torch.testing.assert_close(of_captured.full_tensor(), expected)
    none = distribute_tensor(numbers(4, 4, 0, D), mesh, [Replicate()])
    assert opkit.attention(none, k, v, **options).shape == (4, 4, 0, D)


@case
def keys_divided_among_processes(mesh):
    """As in decoding: every process has the queries, and a part of the keys, which may be empty."""
    lengths = torch.tensor([40, 17, 30])
    masks = (None, Causal("bottom-right"), Causal() & KeyPadding(lengths), ~KeyPadding(lengths))
    for count, mask in itertools.product((S, S - 3, 1), masks):
        (q, weights), (k, v), sinks = numbers(2, 3, 4, 5, D), numbers(2, 3, 2, count, D), numbers(4)
        bias = [opkit.masks.ALiBi(torch.tensor([1.0, 0.5, 0.25, 0.125])), numbers(4, 5, count)]
        results = []
        for distributed in (False, True):
            inputs = [q, k, v, sinks]
            if distributed:
                placements = (Replicate(), Shard(2), Shard(2), Replicate())
                inputs = [distribute_tensor(x, mesh, [at]) for x, at in zip(inputs, placements, strict=True)]
            inputs = [x.detach().requires_grad_() for x in inputs]
            out, lse = opkit.attention(*inputs[:3], sinks=inputs[3], mask=mask, bias=bias, return_lse=True)
            factor = distribute_tensor(weights, mesh, [Replicate()]) if distributed else weights
            results.append([out, lse, *torch.autograd.grad((out * factor).sum() + lse.sum(), inputs)])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        assert results[1][0].placements == (Replicate(),)


@case
def pages_divided_among_processes(mesh):
    size, rank = mesh.size(), mesh.get_rank()
    pages, lengths = numbers(4 * size, 4, 2, D), torch.tensor([16 * size - 3, 7])
    table, q = torch.arange(4 * size).expand(2, -1), numbers(2, 4, D)
    own = (lengths - 16 * rank).clamp(0, 16)
    part = opkit.paged_attention(q, pages, pages, table[:, 4 * rank : 4 * rank + 4], own, return_lse=True)
    found = opkit.merge_attention([part], mesh=mesh)
    expected = opkit.paged_attention(q, pages, pages, table, lengths, return_lse=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# ---- compiled --------------------------------------------------------------------------------------------------------


def as_one_graph(function, inputs, backend, **more):
    """Compare the results and gradients of a function that is compiled as one graph with those of eager mode."""
    strict = {"options": {"strict": True}} if backend == "opkit" else {}
    torch._dynamo.reset()
    found = []
    for call in (function, torch.compile(function, backend=backend, fullgraph=True, **strict, **more)):
        torch.manual_seed(7)
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        results = call(*leaves)
        loss = sum((x.exp() * x.sin()).sum() for x in results)  # the log-sum-exp may be minus infinity
        wanted = [x for x in leaves if x.requires_grad]
        found.append([*results, *torch.autograd.grad(loss, wanted)])
    for ours, theirs in zip(*reversed(found), strict=True):
        assert getattr(ours, "placements", None) == getattr(theirs, "placements", None)
        torch.testing.assert_close(*(whole(x) for x in (ours, theirs)))


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def in_parts(mesh, method, balanced, keys, backend, mask=None, batch=2, **more):
    """A function of this process's part of a sequence, with biases and sinks whose gradients are computed."""
    sizes = [(batch, heads, S, D) for heads in (4, keys, keys)]
    with opkit.context_parallel(mesh, method=method, balanced=balanced) as parallel:
        parts = [parallel.shard(numbers(*each), 2) for each in sizes]

        def function(q, k, v, slopes, rows, sinks):
            bias = [opkit.masks.ALiBi(slopes), rows]
            return opkit.attention(q * 2, k, v, mask=mask, bias=bias, sinks=sinks, return_lse=True, **more)

        as_one_graph(function, (*parts, torch.rand(4), numbers(S, 1), numbers(4)), backend)


def of_distributed_tensors(mesh, backend, dim, layout="bhsd", replicated=False):
    """A function of DTensors that are sharded along a dimension, or whose keys are."""
    shape = (4, 4, S, D) if layout == "bhsd" else (4, S, 4, D)
    placements = [Replicate() if replicated else Shard(dim), Shard(dim), Shard(dim), Replicate()]
    inputs = [
        distribute_tensor(x, mesh, [at])
        for x, at in zip([*(numbers(*shape) for _ in range(3)), numbers(4)], placements, strict=True)
    ]
    mask = Causal() & KeyPadding(torch.tensor([40, 17, 30, 9])) & Dense(torch.rand(4, 4, 1, S) > 0.2)

    def function(q, k, v, sinks):
        return opkit.attention(q * 2, k, v, sinks=sinks, mask=mask, layout=layout, return_lse=True)

    as_one_graph(function, inputs, backend)


def functions_as_one_graph(mesh, method, keys, backend):
    with opkit.context_parallel(mesh, method=method, balanced=True) as parallel:
        parts = [parallel.shard(numbers(4, heads, S, D), 2) for heads in (4, keys, keys)]

        def function(q, k, v, slopes):
            options = functions_of(slopes)
            return opkit.attention(q * 2, k, v, mask=options["mask"], bias=[options["bias"]], return_lse=True)

        as_one_graph(function, (*parts, torch.rand(4)), backend)


@case
def functions_with_blocks(mesh):
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(near(20, 3), 2, 4, S, S, device="cpu", BLOCK_SIZE=16)
    for method, balanced, keys in methods(mesh):
        compare(mesh, method, balanced, keys, mask=Blocks(made), whole={"mask": near(20, 3)})


@case
def compiled_functions(mesh):
    for backend in ("aot_eager", "inductor"):
        functions_as_one_graph(mesh, "ring", 1, backend)
        functions_as_one_graph(mesh, "all_to_all", mesh.size(), backend)
    for own, other in ((Shard(0),) * 2, (Shard(1),) * 2, (Shard(2),) * 2, (Replicate(), Shard(2))):
        inputs = [distribute_tensor(numbers(4, 4, S, D), mesh, [at]) for at in (own, other, other)]
        as_one_graph(
            lambda q, k, v, slopes: [opkit.attention(q, k, v, **functions_of(slopes))], [*inputs, numbers(4)], "opkit"
        )


@case
def compiled(mesh):
    in_parts(mesh, "ring", True, 1, "opkit", Causal())
    functions_as_one_graph(mesh, "ring", 1, "opkit")
    of_distributed_tensors(mesh, "aot_eager", 2)


@case
def compiled_by_heads(mesh):
    in_parts(mesh, "all_to_all", False, mesh.size(), "aot_eager", Causal())
    of_distributed_tensors(mesh, "opkit", 1)


@case
def compiled_masks(mesh):
    for name in ("window", "band", "after", "prefix", "padding", "packed", "added"):
        for method, keys in (("ring", 1), ("all_to_all", mesh.size())):
            in_parts(mesh, method, True, keys, "aot_eager", MASKS[name](), 1 if name == "packed" else 2)


@case
def compiled_distributed_tensors(mesh):
    for layout, of_heads, of_sequence in (("bhsd", 1, 2), ("bshd", 2, 1)):
        for dim in (0, of_heads, of_sequence):
            of_distributed_tensors(mesh, "opkit", dim, layout)
    of_distributed_tensors(mesh, "opkit", 2, replicated=True)


@case
def compiled_by_inductor(mesh):
    for method, keys in (("ring", 1), ("all_to_all", mesh.size())):
        in_parts(mesh, method, False, keys, "inductor", Causal(), softcap=3.0, scale=0.3)
    of_distributed_tensors(mesh, "inductor", 1)
    of_distributed_tensors(mesh, "inductor", 2, replicated=True)


@case
def compiled_dropout(mesh):
    for method, balanced, keys in methods(mesh):
        in_parts(mesh, method, balanced, keys, "aot_eager", Causal(), dropout_p=0.3)
    x = distribute_tensor(numbers(2, 4, S, D), mesh, [Shard(1)])
    as_one_graph(lambda x: [opkit.attention(x, x, x, dropout_p=0.3)], [x], "aot_eager")


@case
def compiled_contexts(mesh):
    """The context is entered in what is compiled, or anew for each call; lengths change."""

    def function(x):
        with opkit.context_parallel(mesh, method="ring"):
            return [opkit.attention(x, x, x, mask=Causal())]

    as_one_graph(function, [numbers(1, 2, S, D)], "aot_eager")
    for method in ("ring", "all_to_all"):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        call = torch.compile(lambda x: opkit.attention(x, x, x, mask=Causal()), backend=counter, fullgraph=True)
        for length in (24, 40, 48, 64, 80, 96):
            with opkit.context_parallel(mesh, method=method) as parallel:
                x = parallel.shard(numbers(1, 2, length, D), 2)
                torch.testing.assert_close(call(x), opkit.attention(x, x, x, mask=Causal()))
        assert counter.frame_count == 2  # one length, and any other


@case
def compiled_pages(mesh):
    part = numbers(2, 4, 1, D), numbers(2, 4, 1)
    as_one_graph(lambda *part: opkit.merge_attention([part], mesh=mesh), part, "opkit")


@case
def bad_calls(mesh):
    x = numbers(1, 3, 8, D)
    with opkit.context_parallel(mesh, method="all_to_all"):
        with pytest.raises(ShapeError, match=r'3 heads of queries.*method="ring"'):
            opkit.attention(x, x, x)
        other = numbers(1, 3, 8 + mesh.get_rank(), D)
        with pytest.raises(ArgumentError, match=r"different calls\. rank 0: .* rank 1: "):
            opkit.attention(other, other, other)
        with pytest.raises(ArgumentError, match="got layout='thd'"):
            opkit.attention(x[0], x[0], x[0], layout="thd")
    with opkit.context_parallel(mesh, method="ring"):
        with pytest.raises(ArgumentError, match=r"dropout_p=1\.5 must be"):
            opkit.attention(x, x, x, dropout_p=1.5)
        with pytest.raises(ShapeError, match=r"RelativePosition with 16 columns .* parts of 8 keys"):
            opkit.attention(x, x, x, bias=opkit.masks.RelativePosition(numbers(1, 3, 16, 1), numbers(1, 3, 16, 16)))
        short = numbers(15)
        with pytest.raises(
            ShapeError, match=r"dimension 0 .* shape \(15,\) by the numbers of keys, of which there are 16"
        ):
            opkit.attention(x, x, x, bias=lambda s, b, h, i, j: s + short[j])  # on both
        for wrong in ({"bias": numbers(9, 1)}, {"mask": Causal() & Dense(numbers(8, 16) > 0)}):
            with pytest.raises(ShapeError, match=r"does not broadcast to .* = \(1, 3, 16, 16\)"):  # on both
                opkit.attention(x, x, x, **wrong)
        distributed = distribute_tensor(numbers(3), mesh, [Shard(0)])
        with pytest.raises(ArgumentError, match=r"captures a DTensor of shape \(3,\) .* \(Shard\(dim=0\),\).* Capture"):
            opkit.attention(x, x, x, bias=lambda s, b, h, i, j: s + distributed[h])
    with opkit.context_parallel(mesh, balanced=True) as parallel, pytest.raises(ShapeError, match="multiple of 4"):
        parallel.shard(numbers(1, 3, 6, D), 2)
    one, other = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(ArgumentError, match="sharded by batch, heads or sequence alike"):
        opkit.attention(one, other, other)
    for wrong in ({"bias": numbers(8, 5)}, {"mask": Dense(numbers(8, 5) > 0)}):
        with pytest.raises(ShapeError, match=r"does not broadcast to .* = \(1, 3, 8, 8\)"):
            opkit.attention(other, one, one, **wrong)
    with pytest.raises(ArgumentTypeError, match=r"merge_attention: mesh must be .*, got str"):
        opkit.merge_attention([(x, x[..., 0])], mesh="tp")
    longer = numbers(1, 3, 8 + mesh.get_rank(), D)
    for part in ((longer, longer[..., 0]), (x.to(torch.float64 if mesh.get_rank() else torch.float32), x[..., 0])):
        with pytest.raises(
            ArgumentError, match=r"merge_attention: the processes make different calls\. rank 0: .* rank 1"
        ):
            opkit.merge_attention([part], mesh=mesh)
    with pytest.raises(ShapeError, match="3 heads of queries and 3 of keys cannot be divided among 2"):
        opkit.attention(*(distribute_tensor(x, mesh, [Shard(1)]) for _ in range(3)))


if __name__ == "__main__":
    processes.main()
