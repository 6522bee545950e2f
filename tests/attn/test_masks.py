"""Masks: what each leaf and each combination lets a query see, against a function of four integers."""

import itertools
import random

import attention_inputs
import pytest
import torch

import opkit
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program_builder import CallSizes
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.masks import (
    And,
    Blocks,
    Causal,
    Dense,
    KeyPadding,
    Not,
    Or,
    PrefixLM,
    Segments,
    SlidingWindow,
    Softcap,
    VarLen,
)

BATCH, HEADS = 2, 3
SHAPES = ((4, 6), (6, 4), (5, 5), (1, 7), (0, 3), (3, 0))


def seen(mask, queries, keys, batch=BATCH):
    return attention_inputs.seen(mask, batch, HEADS, queries, keys)


def told(predicate, queries, keys, batch=BATCH):
    """The same from a function of batch, head, query and key."""
    places = itertools.product(range(batch), range(HEADS), range(queries), range(keys))
    values = [bool(predicate(*place)) for place in places]
    return torch.tensor(values, dtype=torch.bool).reshape(batch, HEADS, queries, keys)


def leaves(queries, keys, rng):
    """Masks of random numbers, each with the function that says what it means."""
    shift = keys - queries
    left, right, padding = rng.randint(0, 4), rng.randint(0, 4), [rng.randint(0, keys) for _ in range(BATCH)]
    of_queries = [[rng.randint(0, 2) for _ in range(queries)] for _ in range(BATCH)]
    of_keys = [[rng.randint(0, 2) for _ in range(keys)] for _ in range(BATCH)]
    lengths, generator = torch.tensor(padding), torch.Generator().manual_seed(rng.randint(0, 999))
    dense = torch.rand(BATCH, 1, queries, keys, generator=generator) < 0.5
    row = torch.rand(HEADS, 1, keys, generator=generator) < 0.5
    ids = [torch.tensor(x, dtype=torch.int64).reshape(BATCH, -1) for x in (of_queries, of_keys)]
    return [
        (Causal(), lambda b, h, i, j: j <= i),
        (Causal("bottom-right"), lambda b, h, i, j: j <= i + shift),
        (SlidingWindow(left, right), lambda b, h, i, j: i - left <= j <= i + right),
        (SlidingWindow(None, right), lambda b, h, i, j: j <= i + right),
        (SlidingWindow(left), lambda b, h, i, j: j >= i - left),
        (SlidingWindow(), lambda b, h, i, j: True),
        (
            SlidingWindow(left, right, align="bottom-right"),
            lambda b, h, i, j: i + shift - left <= j <= i + shift + right,
        ),
        (Segments(*ids), lambda b, h, i, j: of_queries[b][i] == of_keys[b][j]),
        (Segments(ids[0][:1], ids[1][1]), lambda b, h, i, j: of_queries[0][i] == of_keys[1][j]),
        (KeyPadding(lengths), lambda b, h, i, j: j < padding[b]),
        (KeyPadding(lengths[0]), lambda b, h, i, j: j < padding[0]),
        (PrefixLM(lengths), lambda b, h, i, j: j < padding[b] or j <= i),
        (PrefixLM(lengths, "bottom-right"), lambda b, h, i, j: j < padding[b] or j <= i + shift),
        (Dense(dense), lambda b, h, i, j: dense[b, 0, i, j]),
        (Dense(row), lambda b, h, i, j: row[h, 0, j]),
    ]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_each_mask_shows_what_it_says(queries, keys):
    for mask, predicate in leaves(queries, keys, random.Random(queries)):
        assert torch.equal(seen(mask, queries, keys), told(predicate, queries, keys)), mask


def combined(pairs, rng, depth):
    if depth == 0:
        return rng.choice(pairs)
    kind = rng.choice("&|~")
    left, says_left = combined(pairs, rng, depth - 1)
    if kind == "~":
        return ~left, lambda *place: not says_left(*place)
    right, says_right = combined(pairs, rng, depth - 1)
    if kind == "&":
        return left & right, lambda *place: says_left(*place) and says_right(*place)
    return left | right, lambda *place: says_left(*place) or says_right(*place)


def test_random_combinations_show_what_they_say():
    for seed in range(40):
        rng = random.Random(seed)
        queries, keys = rng.choice(SHAPES)
        mask, predicate = combined(leaves(queries, keys, rng), rng, rng.randint(1, 4))
        assert torch.equal(seen(mask, queries, keys), told(predicate, queries, keys)), (seed, mask)


def places(starts, count):
    """Of each row: its document, its place within it, and the document's length; None after the last document."""
    found = [(d, t - starts[d], starts[d + 1] - starts[d]) for d in range(len(starts) - 1)
             for t in range(starts[d], starts[d + 1])]  # fmt: skip
    return found + [None] * (count - len(found))


def packed(predicate, starts_q, starts_k, queries, keys):
    """``predicate`` of document, query, key, and the document's numbers of queries and of keys, in packed places."""
    of_queries, of_keys = places(starts_q, queries), places(starts_k, keys)

    def says(b, h, i, j):
        one, other = of_queries[i], of_keys[j]
        if one is None or other is None or one[0] != other[0]:
            return False
        return predicate(one[0], one[1], other[1], one[2], other[2])

    return told(says, queries, keys, batch=1)


STARTS = (([0, 3, 3, 7], [0, 2, 4, 9]), ([0, 4], [0, 6]), ([0, 0, 5, 6], [0, 3, 3, 4]), ([0, 2, 5, 5, 6],) * 2)
each_start = pytest.mark.parametrize(("starts_q", "starts_k"), STARTS)


@each_start
def test_in_packed_documents_places_count_within_the_document(starts_q, starts_k):
    queries, keys = starts_q[-1] + 2, starts_k[-1] + 1
    var_len = VarLen(torch.tensor(starts_q), torch.tensor(starts_k, dtype=torch.int32).long())
    lengths = [1, 0, 2, 1][: len(starts_q) - 1]
    given = torch.tensor(lengths)
    cases = [
        (var_len, lambda d, i, j, nq, nk: True),
        (var_len & Causal(), lambda d, i, j, nq, nk: j <= i),
        (Causal("bottom-right") & var_len, lambda d, i, j, nq, nk: j <= i + nk - nq),
        (var_len & SlidingWindow(1, 0), lambda d, i, j, nq, nk: i - 1 <= j <= i),
        (SlidingWindow(1, 1, "bottom-right") & var_len, lambda d, i, j, nq, nk: abs(i + nk - nq - j) <= 1),
        (var_len & (SlidingWindow(0, 0) | Causal()) & Causal(), lambda d, i, j, nq, nk: j <= i),
        (var_len & ~Causal(), lambda d, i, j, nq, nk: j > i),
        (var_len & KeyPadding(given), lambda d, i, j, nq, nk: j < lengths[d]),
        (var_len & PrefixLM(given), lambda d, i, j, nq, nk: j < lengths[d] or j <= i),
    ]
    for mask, predicate in cases:
        expected = packed(predicate, starts_q, starts_k, queries, keys)
        assert torch.equal(seen(mask, queries, keys, batch=1), expected), mask


def test_documents_reach_only_their_conjunction():
    starts = [0, 2, 5]
    var_len = VarLen(torch.tensor(starts), torch.tensor([0, 3, 5]))
    within = packed(lambda d, i, j, nq, nk: j <= i, starts, [0, 3, 5], 5, 5)
    outside = told(lambda b, h, i, j: j > i, 5, 5, batch=1)
    assert torch.equal(seen((var_len & Causal()) | ~Causal(), 5, 5, batch=1), within | outside)


def test_what_is_written_to_the_tensor_of_a_mask_counts():
    lengths = torch.tensor([1, 2])
    mask = Causal() & KeyPadding(lengths)
    before = seen(mask, 4, 6)
    lengths += 3
    assert not torch.equal(before, seen(mask, 4, 6))


def test_a_band_that_hides_nothing_is_left_out():
    def words(mask, queries, keys):
        return lower(mask, CallSizes(BATCH, HEADS, queries, keys, torch.device("cpu"))).program

    assert words(Causal("bottom-right"), 1, 7) == []
    assert words(Causal("bottom-right"), 2, 7) != []
    assert words(Causal(), 1, 2) != []
    assert words(SlidingWindow(3), 4, 9) == []
    assert words(SlidingWindow(2), 4, 9) != []
    padding = KeyPadding(torch.tensor([1, 2]))
    assert words(Causal("bottom-right") & padding & SlidingWindow(9), 1, 7) == words(padding, 1, 7)
    assert words(~Causal("bottom-right"), 1, 7) != []


def test_a_tensor_stands_once_however_often_the_mask_refers_to_it():
    ids = torch.zeros(BATCH, 4, dtype=torch.int32)
    lowered = lower(Segments(ids) & Segments(ids), CallSizes(BATCH, HEADS, 4, 4, torch.device("cpu")))
    assert len(lowered.tensors) == 1
    assert lowered.tensors[0] is ids


def block_masks(queries, keys):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    window = torch.tensor([1, 3])

    def near(b, h, i, j):
        return (i - j).abs() <= window[b] + h

    made = flex.create_block_mask(near, BATCH, HEADS, queries, keys, device="cpu", BLOCK_SIZE=(4, 8))
    yield made, lambda b, h, i, j: abs(i - j) <= [1, 3][b] + h
    made = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, queries, keys, device="cpu", BLOCK_SIZE=8)
    yield made, lambda b, h, i, j: i >= j
    counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0], [2, 0]]]])
    listed = {0: (1,), 1: (2, 0)}
    made = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(8, 8), seq_lengths=(queries, keys))
    yield made, lambda b, h, i, j: j // 8 in listed[i // 8]


def test_block_masks_show_what_they_say():
    for made, predicate in block_masks(13, 21):
        assert torch.equal(seen(Blocks(made), 13, 21), told(predicate, 13, 21))


def test_block_masks_combine():
    for made, predicate in block_masks(13, 21):
        expected = told(lambda *p, says=predicate: p[3] <= p[2] and not says(*p), 13, 21)
        assert torch.equal(seen(Causal() & ~Blocks(made), 13, 21), expected)


def test_names_are_as_good_as_signs():
    a, b = Causal(), SlidingWindow(1)
    assert And((a, b)) == a & b
    assert Or((a, b)) == a | b
    assert Not(a) == ~a


@pytest.mark.parametrize("made", [lambda: And((Causal(), 1)), lambda: Or((lambda *_: True,)), lambda: Not(None)])
def test_parts_are_masks(made):
    with pytest.raises(opkit.errors.ArgumentTypeError, match=r"a part is a mask of opkit\.masks, got"):
        made()


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: Softcap("a"), ArgumentError, r"Softcap: cap='a' must be a number above 0\."),
        (lambda: Softcap(torch.ones(2)), ArgumentError, r"Softcap: cap=tensor\(.* must be a number above 0"),
        (lambda: And(1), ArgumentTypeError, r"And: parts=1 must be a tuple of masks"),
        (lambda: Or(torch.ones(2, 2)), ArgumentTypeError, r"(?s)Or: parts=tensor\(.* must be a tuple of masks"),
        (lambda: Dense(0.5), ArgumentTypeError, r"Dense: tensor=0\.5 must be a tensor, got float"),
    ],
)
def test_wrong_arguments_are_named(made, error, message):
    with pytest.raises(error, match=message):
        made()


def test_parts_in_a_list():
    assert And([Causal(), SlidingWindow(1)]) == Causal() & SlidingWindow(1)


@pytest.mark.parametrize("kind", [And, Or])
def test_no_parts_are_refused(kind):
    with pytest.raises(opkit.errors.ArgumentError, match=f"{kind.__name__}: there are no parts"):
        kind(())


def test_masks_are_frozen_and_compare_by_value_or_by_tensor():
    assert Causal() == Causal("top-left")
    assert hash(Causal() & SlidingWindow(3)) == hash(Causal() & SlidingWindow(3))
    lengths = torch.tensor([1])
    assert KeyPadding(lengths) != KeyPadding(lengths)
    with pytest.raises(AttributeError):
        Causal().align = "bottom-right"


def test_tensors_combine_with_masks():
    tensor = torch.rand(4, 6) < 0.5
    expected = told(lambda b, h, i, j: j <= i and tensor[i, j], 4, 6)
    assert torch.equal(seen(Causal() & tensor, 4, 6), expected)
    assert torch.equal(seen(Causal() | tensor, 4, 6), told(lambda b, h, i, j: j <= i or tensor[i, j], 4, 6))


def call(mask, queries=4, keys=6):
    q, kv = torch.zeros(BATCH, HEADS, queries, 8), torch.zeros(BATCH, HEADS, keys, 8)
    return opkit.attention(q, kv, kv, mask=mask)


WRONG = (
    (lambda: Causal("top"), ArgumentError, r"align='top' must be 'top-left' \(query 0 .*the default.*'bottom-right'"),
    (lambda: SlidingWindow(-1), ArgumentError, r"SlidingWindow: left=-1 must be a number of keys, 0 or more, or None"),
    (lambda: SlidingWindow(2, 0.5), ArgumentError, r"SlidingWindow: right=0.5 must be"),
    (lambda: bool(Causal()), ArgumentTypeError, r"Combine masks with &, \| and ~"),
    (lambda: Causal() and KeyPadding(torch.ones(2)), ArgumentTypeError, r"Combine masks with &, \| and ~"),
    (lambda: Causal() & 3, ArgumentTypeError, r"a mask is one of opkit.masks, a function or a tensor, got int: 3"),
    (lambda: Blocks(torch.ones(3)), ArgumentTypeError, r"Blocks takes a BlockMask .* got Tensor"),
    (lambda: call("causal"), ArgumentTypeError, r"a mask is one of opkit.masks, a function or a tensor, got str: 'causal'"),
    (lambda: call(KeyPadding(torch.ones(2))), DtypeError, r"KeyPadding: lengths has dtype torch.float32, expected integers"),
    (lambda: call(KeyPadding([3, 4])), ArgumentTypeError, r"KeyPadding: lengths must be a tensor, got list: \[3, 4\]"),
    (
        lambda: call(KeyPadding(torch.ones(3).int())), ShapeError,
        r"KeyPadding: lengths of shape \(3,\) must be one for each batch, \(2,\), or a scalar",
    ),
    (
        lambda: call(Segments(torch.ones(2, 5).int())), ShapeError,
        r"Segments: q_ids of shape \(2, 5\) must be \(batch, queries\) = \(2, 4\), or \(4,\)",
    ),
    (
        lambda: call(Segments(torch.ones(4).int())), ShapeError,
        r"Segments: kv_ids of shape \(4,\) must be \(batch, keys\) = \(2, 6\), or \(6,\)",
    ),
    (
        lambda: call(Dense(torch.ones(5, 6).bool())), ShapeError,
        r"Dense of shape \(5, 6\) does not broadcast to \(batch, heads, queries, keys\) = \(2, 3, 4, 6\)",
    ),
    (lambda: call(Dense(torch.ones(4, 6).int())), DtypeError, r"Dense has dtype torch.int32, expected bool"),
    (lambda: call(~Dense(torch.ones(4, 6))), ArgumentError, r"a floating Dense mask .* can only be combined with &"),
    (lambda: call(Dense(torch.ones(4, 6)) | Causal()), ArgumentError, r"can only be combined with &"),
    (
        lambda: call(KeyPadding(torch.ones(2, device="meta").int())), ArgumentError,
        r"KeyPadding: lengths is on meta, q is on cpu. Move it with .to\(q.device\)",
    ),
    (lambda: call(VarLen(torch.tensor([0, 4]))), ShapeError, r'the batch is 2. Use layout="thd"'),
    (
        lambda: call(VarLen(torch.tensor([0, 4]), torch.tensor([0, 3, 6]))), ShapeError,
        r"cu_seqlens_k of shape \(3,\) must be \(sequences \+ 1,\), the same for queries and keys",
    ),
    (lambda: call(VarLen(torch.tensor([0]))), ShapeError, r"cu_seqlens_q of shape \(1,\)"),
)  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_mistakes_are_explained(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_two_packings_in_one_conjunction_are_refused():
    q = torch.zeros(4, 1, 8)
    both = VarLen(torch.tensor([0, 4])) & VarLen(torch.tensor([0, 2, 4]))
    with pytest.raises(ArgumentError, match=r"holds 2 VarLen masks, one is allowed\. Use Segments"):
        opkit.attention(q, q, q, mask=both, layout="thd")
