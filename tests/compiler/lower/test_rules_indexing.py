"""Reads and writes at places that tensors hold, against eager."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from opkit.compiler.lower.graph_to_program import lower
from tests.compiler import interpreter
from tests.compiler.graphs import check, computes, externs, graph_of, program_of, run_graph, to_numpy

aten = torch.ops.aten
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def numbers(*shape, dtype=torch.float32):
    torch.manual_seed(len(shape))
    return torch.randn(*shape).to(dtype)


def refuses(function, *args):
    """Both eager and the program stop where an index is outside; the program is made with indices that are not."""
    with pytest.raises((IndexError, RuntimeError)):
        function(*(a.clone() for a in args))
    program = program_of(function, *(a.clamp(0, 0) if not a.is_floating_point() else a for a in args))
    assert not externs(program)
    with pytest.raises(IndexError, match="outside a dimension"):
        interpreter.run(program, [to_numpy(a) for a in args])


# ---- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
@pytest.mark.parametrize("index", [ints(0, 4, 2, 2), ints([1, 3], [0, 4], dtype=torch.int32), torch.tensor(3)])
def test_embedding(dtype, index):
    check(lambda w, i: aten.embedding(w, i), numbers(5, 3, dtype=dtype), index, exact=True)


def test_embedding_is_one_compute():
    assert len(computes(program_of(lambda w, i: aten.embedding(w, i) * 2, numbers(5, 3), ints(1, 2)))) == 2


@pytest.mark.parametrize("index", [ints(0, 5), ints(-1, 2)])
def test_embedding_outside(index):
    refuses(lambda w, i: aten.embedding(w, i), numbers(5, 3), index)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_index_select(dim):
    check(lambda x, i: x.index_select(dim, i), numbers(4, 5, 3), ints(2, 0, 0), exact=True)
    check(lambda x, i: x.index_select(dim, i), numbers(4, 5, 3), ints(2, 0, dtype=torch.int32), exact=True)
    check(lambda x, i: x.index_select(dim, i), numbers(4, 5, 3), torch.tensor(1), exact=True)
    check(lambda x, i: x.index_select(dim, i), numbers(4, 5, 3), torch.tensor([], dtype=torch.int64), exact=True)


def test_index_select_outside():
    refuses(lambda x, i: x.index_select(0, i), numbers(4, 3), ints(-1))
    refuses(lambda x, i: x.index_select(0, i), numbers(1, 3), ints(0, 1))


def test_a_constant_is_read_with_a_check():
    refuses(lambda i: torch.zeros(3).gather(0, i), ints(0, 3))


def test_of_no_dimensions():
    check(lambda x, i: x.index_select(0, i), torch.tensor(2.0), ints(0), exact=True)
    check(lambda x, i: x.gather(0, i), torch.tensor(2.0), torch.tensor(0), exact=True)
    check(lambda x, i: x.gather(0, i), numbers(4), torch.tensor(2), exact=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather(dim):
    check(lambda x, i: x.gather(dim, i), numbers(4, 5), ints([0, 3, 1], [2, 2, 0]), exact=True)
    check(lambda x, i: x.t().gather(dim, i), numbers(5, 4), ints([0, 3, 1], [2, 2, 0]), exact=True)


def test_gather_outside():
    refuses(lambda x, i: x.gather(1, i), numbers(4, 5), ints([0], [5]))
    refuses(lambda x, i: x.gather(1, i), numbers(4, 5), ints([0], [-1]))


def test_take():
    check(lambda x, i: x.take(i), numbers(4, 5), ints([0, 19], [-1, -20]), exact=True)
    check(lambda x, i: x.t().take(i), numbers(4, 5), ints(7, 8), exact=True)
    refuses(lambda x, i: x.take(i), numbers(4, 5), ints(20))


# ---- tensors of indices ----------------------------------------------------------------------------------------------

SELECTIONS = {
    "first": lambda x, i, j: x[i],
    "middle": lambda x, i, j: x[:, i],
    "last": lambda x, i, j: x[..., i],
    "adjacent": lambda x, i, j: x[:, i, j],
    "separated": lambda x, i, j: x[i, :, j],
    "separated later": lambda x, i, j: x[:, i, :, j],
    "broadcast": lambda x, i, j: x[:, i[:, None], j],
    "of two dimensions": lambda x, i, j: x[:, torch.stack([i, j])],
    "permuted": lambda x, i, j: x.permute(3, 1, 0, 2)[i, j],
    "all": lambda x, i, j: x[i, j, i, j],
}


@pytest.mark.parametrize(("i", "j"), [(ints(0, 2, -1), ints(1, -3, 0)), (ints(), ints())], ids=["some", "none"])
def test_index(subtests, i, j):
    for name in SELECTIONS:
        with subtests.test(name):
            check(SELECTIONS[name], numbers(4, 3, 5, 3), i, j, exact=True)


def test_index_of_a_range():
    check(lambda i: torch.arange(10, 20)[i] + torch.ones(10)[i], ints(3, -1, 0))


def test_index_outside():
    refuses(lambda x, i: x[i], numbers(4, 3), ints(4))
    refuses(lambda x, i: x[:, i], numbers(4, 3), ints(-4))
    refuses(lambda x, i: x[i], numbers(1, 3), ints(1))


def test_masks_are_called():
    x = numbers(4, 3)
    assert externs(program_of(lambda x: x[torch.ones(4, dtype=torch.bool)], x)) != []


# ---- writes ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
@pytest.mark.parametrize("dim", [0, -1])
def test_scatter(dtype, dim):
    index = ints([0, 3, 1], [2, 1, 0])
    check(lambda x, i, s: x.scatter(dim, i, s), numbers(4, 5, dtype=dtype), index, numbers(3, 4, dtype=dtype))
    check(lambda x, i: x.scatter(dim, i, 2), numbers(4, 5, dtype=dtype), index, exact=True)
    check(lambda x, i: x.scatter(dim, i, 2, reduce="multiply"), numbers(4, 5, dtype=dtype), index)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8])
def test_scatter_add_of_duplicates(dtype):
    index = ints([0, 3, 0], [0, 0, 0], [3, 3, 1])
    x, source = (numbers(4, 4, dtype=torch.float32) * 3).to(dtype), (numbers(3, 3) * 5).to(dtype)
    check(lambda x, i, s: x.scatter_add(1, i, s), x, index, source)
    check(lambda x, i, s: x.scatter_add(0, i, s), x, index, source)


def test_scatter_of_duplicates_keeps_the_last():
    check(lambda x, i, s: x.scatter(0, i, s), numbers(4), ints(1, 1, 2, 1), numbers(4), exact=True)


def test_scatter_nothing():
    none = ints()
    check(lambda x, i, s: x.scatter(0, i, s), numbers(4, 3), none, numbers(2, 2), exact=True)
    check(lambda x, i, s: x.scatter_add(0, i, s), numbers(4), none, numbers(0), exact=True)


def test_scatter_outside():
    refuses(lambda x, i: x.scatter(1, i, 2.0), numbers(4, 3), ints([3]))
    refuses(lambda x, i, s: x.scatter_add(0, i, s), numbers(4), ints(-1), numbers(1))


@pytest.mark.sweep
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_scatter_reduce(dtype, reduce, include_self):
    index = ints([0, 3, 0], [0, 0, 2])
    x, source = (numbers(4, 3).abs() * 3).to(dtype), (numbers(2, 3).abs() * 2).to(dtype)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, reduce, include_self=include_self), x, index, source)


@pytest.mark.parametrize("reduce", ["amax", "amin", "sum"])
def test_scatter_reduce_of_nan(reduce):
    source = torch.tensor([1.0, float("nan"), 2.0, float("inf"), float("-inf")])
    x, index = torch.tensor([float("nan"), 0.0, 1.0, 2.0]), ints(0, 1, 1, 2, 3)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, reduce), x, index, source)
    check(lambda x, i, s: x.scatter_reduce(0, i, s, reduce, include_self=False), x, index, source)


def test_means_are_called():
    called = program_of(lambda x, i: x.scatter_reduce(0, i, x, "mean"), numbers(4), ints(0, 1, 1, 2))
    assert externs(called) == ["aten.scatter_reduce.two: scattering with mean"]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices(dtype, dim):
    x, index = numbers(3, 3, 3, dtype=dtype), ints(2, 0, 2)
    source = (numbers(3, 3, 3).flip(0) * 2).to(dtype)
    check(lambda x, i, s: x.index_add(dim, i, s), x, index, source)
    check(lambda x, i, s: x.index_add(dim, i, s, alpha=2), x, index, source)
    check(lambda x, i, s: x.index_copy(dim, i, s), x, ints(2, 0, 1), source, exact=True)
    check(lambda x, i: x.index_fill(dim, i, 3), x, ints(-1, 0), exact=True)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(("reduce", "include_self"), [("prod", True), ("amax", False), ("amin", True)])
def test_slices_reduced(reduce, include_self):
    x, index, source = numbers(4, 3), ints(0, 2, 0), numbers(3, 3)
    check(lambda x, i, s: x.index_reduce(0, i, s, reduce, include_self=include_self), x, index, source)


def test_slices_outside():
    refuses(lambda x, i, s: x.index_add(0, i, s), numbers(4, 3), ints(4), numbers(1, 3))
    refuses(lambda x, i, s: x.index_copy(0, i, s), numbers(4, 3), ints(-1), numbers(1, 3))
    refuses(lambda x, i: x.index_fill(0, i, 1), numbers(4, 3), ints(-5))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("padding", [-1, 2])
def test_embedding_backward(dtype, padding):
    grad, index = numbers(2, 4, 3, dtype=dtype), ints([0, 2, 2, 1], [0, 0, 4, 2])
    check(lambda g, i: aten.embedding_dense_backward(g, i, 5, padding, False), grad, index, rtol=1e-2, atol=1e-2)


def test_embedding_backward_of_nothing_and_by_frequency():
    none = ints()
    check(lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, False), numbers(0, 3), none)
    called = program_of(lambda g, i: aten.embedding_dense_backward(g, i, 5, -1, True), numbers(2, 3), ints(0, 1))
    assert "how often" in externs(called)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_index_put(dtype, accumulate):
    x, i, j = numbers(4, 3, 5, dtype=dtype), ints(0, 2, -1), ints(1, -3, 0)
    put = aten.index_put

    def values(*shape):
        return torch.ones(shape).to(dtype)

    check(lambda x, i, v: put(x, [i], v, accumulate), x, i, values(3, 3, 5))
    check(lambda x, i, v: put(x, [i], v, accumulate), x, i, values())
    check(lambda x, i, j, v: put(x, [i, None, j], v, accumulate), x, i, j, values(3, 1))
    check(lambda x, i, j, v: put(x, [None, i[:, None] % 3, j], v, accumulate), x, i, j, values(4, 3, 3))


def test_index_put_with_duplicates():
    x, i, v = numbers(3, 2), ints(1, 1, -2, 0), numbers(4, 2)
    check(lambda x, i, v: aten.index_put(x, [i], v, True), x, i, v)
    check(lambda x, i, v: aten.index_put(x, [i], v), x, i, v, exact=True)
    check(lambda x, i, v: aten._unsafe_index_put(x, [i], v, True), x, i, v)
    refuses(lambda x, i, v: aten.index_put(x, [i], v), x, ints(3), numbers(1, 2))


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_with_a_mask(accumulate):
    x, mask = numbers(4, 3), numbers(4, 3) > 0
    put = aten.index_put
    check(lambda x, m, v: put(x, [m], v, accumulate), x, mask, torch.tensor(2.0))
    check(lambda x, m, v: put(x, [m], v, accumulate), x, mask, torch.tensor([2.0]))
    check(lambda x, m, v: put(x, [m], v, accumulate), x, mask[:, 0], numbers(3))
    check(lambda x, m, v: put(x, [None, m], v, accumulate), x, mask[0], torch.tensor(2.0))
    many = program_of(lambda x, m, v: put(x, [m], v), x, torch.ones(4, 3, dtype=torch.bool), numbers(12))
    assert "a value for each" in externs(many)[0]


# ---- derivatives of views --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_views(dtype):
    grad = numbers(3, 2, dtype=dtype)
    check(lambda g: aten.select_backward(g, [3, 4, 2], 1, -1), grad, exact=True)
    check(lambda g: aten.slice_backward(g, [7, 2], 0, 1, 4, 1), grad, exact=True)
    check(lambda g: aten.slice_backward(g, [7, 2], 0, 0, 9223372036854775807, 3), grad, exact=True)
    check(lambda g: aten.slice_backward(g, [3, 5], -1, -2, 9223372036854775807, 1), grad, exact=True)
    check(lambda g: aten.diagonal_backward(g, [3, 2, 3], 1, 1, 2), grad, exact=True)


# ---- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 43), (0,), ()])
@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (7, -0.3, 1.1), (1, -1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histc(shape, bins, low, high, dtype):
    x = torch.randn(shape, dtype=dtype)
    if x.dim() > 1:
        x[0, :8] = torch.tensor([torch.nan, torch.inf, -torch.inf, low, high, high + 1, 0, 1])
        x[1] = low + (high - low) / bins * torch.arange(43) % (high + 1)  # the ends of bins
    check(lambda x: torch.histc(x, bins, low, high), x, rtol=0, atol=0)
    assert not externs(program_of(lambda x: torch.histc(x, bins, low, high), x))


def test_histc_of_integers():
    """Kernels on GPUs count them, no kernel on CPUs does: the types in the graph are replaced."""
    graph, constants = graph_of(lambda x: torch.histc(x, 4, 0, 6), torch.arange(-3.0, 9.0))
    nodes = tuple(dataclasses.replace(n, result=dataclasses.replace(n.result, dtype="i64")) for n in graph.nodes)
    graph = dataclasses.replace(graph, nodes=nodes)
    (counts,) = run_graph(graph, lower(graph), constants, [torch.arange(-3, 9)])
    assert counts.tolist() == [2, 1, 2, 2]


@pytest.mark.parametrize(("dtype", "range_"), [(torch.float32, ()), (torch.bfloat16, (0, 3))])
def test_histc_is_called(dtype, range_):
    assert externs(program_of(lambda x: torch.histc(x, 4, *range_), torch.randn(5, dtype=dtype)))
