"""Calls of one kind again and again, which skip the lowering of their functions, with other tensors and numbers."""

import gc
import itertools
import weakref

import pytest
import torch

import opkit
from opkit.attn import recent

_N = 40
_Q, _K, _V = torch.randn(3, 2, 2, _N, 16, generator=torch.Generator().manual_seed(0))


def documents(ids, starts):
    """Return a mask of documents with prefixes, from each token's document and where each document starts."""
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & ((j < starts[ids[b, j]] + 3) | (i >= j))


def check(mask, bias, seen, added):
    """Check a call of functions against one of tensors."""
    found = opkit.attention(_Q, _K, _V, mask=mask, bias=bias)
    torch.testing.assert_close(found, opkit.attention(_Q, _K, _V, mask=seen, bias=added, kernel="reference"))


def tables(seed, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (2, _N), generator=generator).sort().values.to(dtype)
    return ids, torch.randint(0, _N, (4,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_other_tensors(dtype):
    for seed in range(6):
        ids, starts = tables(seed, dtype)
        i, j = torch.arange(_N)[:, None], torch.arange(_N)[None, :]
        seen = (ids[:, :, None] == ids[:, None, :]) & ((j < starts[ids][:, None, :] + 3) | (i >= j))
        check(documents(ids, starts), None, seen[:, None], None)


def test_tensors_of_one_storage():
    both = torch.randn(3, 2, _N)
    tensors = [both[0], both[1], both[0].clone(), both[2], both[1, :, :].contiguous(), both[0]]
    for one, other in itertools.pairwise(tensors):
        seen = one[None, :, None, :] < other[None, :, :, None]
        check(lambda b, h, i, j, one=one, other=other: one[h, j] < other[h, i], None, seen, None)


def test_views_and_writes():
    table = torch.randn(2, _N, _N)
    for view in (table, table, table, table.mT, table.mT, table[:, 1:, 1:], table):
        grown = torch.nn.functional.pad(view, (0, _N - view.shape[2], 0, _N - view.shape[1]))
        check(None, lambda s, b, h, i, j, t=grown: s + t[h, i, j], None, grown[None])
    for _ in range(5):
        table.neg_()
        check(None, lambda s, b, h, i, j: s + table[h, i, j], None, table[None])


def test_numbers_and_types():
    for window in (3, 3, 3, 3, 5, True, 3.0, 3):
        i, j = torch.arange(_N)[:, None], torch.arange(_N)[None, :]
        check(lambda b, h, i, j, w=window: (i - j).abs() < w, None, (i - j).abs() < window, None)


def test_a_table_that_is_learned_later():
    slopes = torch.rand(2)
    for step in range(8):
        slopes.requires_grad_(step >= 4)
        out = opkit.attention(_Q, _K, _V, bias=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
        assert out.requires_grad == (step >= 4)
        if step >= 4:
            (gradient,) = torch.autograd.grad(out.sum(), slopes)
            distance = (torch.arange(_N)[:, None] - torch.arange(_N)[None, :]).abs()
            bias = -slopes[:, None, None] * distance
            expected = torch.autograd.grad(
                opkit.attention(_Q, _K, _V, bias=bias[None], kernel="reference").sum(), slopes
            )
            torch.testing.assert_close(gradient, expected[0], rtol=1e-3, atol=1e-3)


def test_no_tensor_is_kept():
    ids, starts = tables(0)
    for _ in range(6):
        opkit.attention(_Q, _K, _V, mask=documents(ids, starts))
    alive = weakref.ref(starts)
    del starts, ids
    gc.collect()
    assert alive() is None


LIMIT, TABLE, COUNT = 3, torch.arange(_N) // 7, torch.tensor(0)


class Near:
    """What functions read of objects: of one, of its class, and by a method."""

    step = 5

    def __init__(self):
        self.width, self.table, self.pair = 2, torch.arange(_N) // 5, (1, 2)

    def near(self, i, j):
        return (i - j).abs() < self.width


def _nested(own):
    width, ids, other, near = 4, torch.arange(_N) // 9, own, own.near

    def inside(i, j, most=3, *, least=-2):
        return (i - j <= most) & (i - j >= least)

    def mask(b, h, i, j):
        mine = (i - j).abs() < width
        first = inside(i, j) | mine | near(i, j) | ((i - j) % own.step == 0)
        second = (TABLE[i] == TABLE[j]) & (i < max(LIMIT, 9))
        return first | second | (ids[i] == ids[j]) | ((i - j) % other.pair[1] == 7) | (own.table[i] == own.table[j] + 1)

    def change(what, value):
        nonlocal width, ids, inside, other, near
        if what == "width":
            width = value
        elif what == "ids":
            ids = value
        elif what == "inside":
            inside = value
        elif what == "other":
            other = value
        elif what == "near":
            near = value
        elif what == "most":
            inside.__defaults__ = (value,)
        elif what == "least":
            inside.__kwdefaults__ = {"least": value}

    return mask, change


def test_whatever_a_function_reads_may_change(monkeypatch):
    """Each change is seen by the next call; what a call read before is read again when it is changed back."""
    own = Near()
    mask, change = _nested(own)
    ids = torch.arange(_N) // 9
    scope = globals()
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (2, 2, _N, _N)), indexing="ij")
    changes = [
        lambda: change("width", 7),
        lambda: change("width", 7.5),
        lambda: change("ids", ids),
        lambda: ids.mul_(2),
        lambda: ids.__setitem__(3, 5),
        lambda: change("ids", ids[None].expand(2, -1)[0]),
        lambda: change("ids", TABLE),
        lambda: change("inside", lambda i, j: i - j == 9),
        lambda: change("inside", lambda i, j, most=1, *, least=0: (i - j <= most) & (i - j >= least)),
        lambda: change("most", 2),
        lambda: change("least", -1),
        lambda: setattr(own, "width", 1),
        lambda: setattr(own, "step", 6),
        lambda: setattr(own, "table", torch.arange(_N) // 3),
        lambda: setattr(own, "pair", (1, 9)),
        lambda: change("near", lambda i, j: i - j == 5),
        lambda: change("near", Near().near),
        lambda: change("other", Near()),
        lambda: monkeypatch.setattr(Near, "step", 4),
        lambda: delattr(own, "step"),
        lambda: monkeypatch.setitem(scope, "LIMIT", 12),
        lambda: monkeypatch.setitem(scope, "TABLE", torch.arange(_N) // 2),
        lambda: monkeypatch.setitem(scope, "max", lambda a, b: a + b),
        lambda: monkeypatch.delitem(scope, "max"),
        lambda: setattr(mask, "__code__", _nested(own)[0].__code__.replace(co_name="other")),
    ]
    for step in [lambda: None, *changes]:
        step()
        for _ in range(4):
            check(mask, None, mask(b, h, i, j), None)
        assert recent.find(_Q, _K, _V, mask, None, (None, None, "bhsd", True)) is not None


def test_values_that_a_function_reads_while_it_is_traced():
    i = torch.arange(_N)
    for value in (2, 5):
        COUNT.fill_(value)
        for _ in range(4):
            near = (i[:, None] - i).abs() < value
            check(lambda b, h, i, j: (i - j).abs() < COUNT.item(), None, near, None)
