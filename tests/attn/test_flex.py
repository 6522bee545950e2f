"""Masks and biases as torch's flex_attention calls them, and opkit's flex_attention beside torch's."""

import itertools
import random
import warnings

import attention_inputs
import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, ShapeError
from opkit.masks import (
    ALiBi,
    Blocks,
    Causal,
    Dense,
    KeyPadding,
    MaskFunction,
    Not,
    PrefixLM,
    RelativePosition,
    ScoreMods,
    Segments,
    SlidingWindow,
    Softcap,
    VarLen,
)
from opkit.nn.functional import flex_attention

BATCH, HEADS = 2, 4
SHAPES = ((40, 70), (70, 40), (64, 64), (1, 33))


def r(*shape, **how):
    return torch.randn(shape, **how)


def seen(mask, queries, keys, batch=BATCH):
    return attention_inputs.seen(mask, batch, HEADS, queries, keys)


def leaves(queries, keys):
    """Masks of each kind, of random numbers."""
    ids = [torch.randint(0, 3, (BATCH, n)) for n in (queries, keys)]
    lengths = torch.randint(0, keys + 1, (BATCH,))
    dense = torch.rand(BATCH, 1, queries, keys) < 0.5
    return [
        Causal(), Causal("bottom-right"), SlidingWindow(5, 3), SlidingWindow(2, align="bottom-right"),
        SlidingWindow(None, 4), SlidingWindow(), Segments(*ids), Segments(ids[0][:1], ids[1][1]), KeyPadding(lengths),
        KeyPadding(lengths[0]), PrefixLM(lengths), PrefixLM(lengths[:1], "bottom-right"), Dense(dense),
        Dense(torch.rand(HEADS, 1, keys) < 0.5), Dense(torch.rand(keys) < 0.5),
    ]  # fmt: skip


def packed():
    """Masks of 64 packed queries and keys, the last few of no document, and of documents that lie elsewhere for keys."""
    same = VarLen(torch.tensor([0, 10, 10, 37, 60]))
    moved = VarLen(torch.tensor([0, 10, 10, 37, 60]), torch.tensor([0, 3, 20, 50, 61]))
    lengths = torch.tensor([4, 2, 9, 30])
    others = (Causal(), Causal("bottom-right"), SlidingWindow(6, 2), KeyPadding(lengths), PrefixLM(lengths))
    for documents in (same, moved):
        yield documents
        yield from (documents & other for other in others)
        yield documents & ~KeyPadding(lengths) & (Causal() | SlidingWindow(3, 3))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_masks_are_functions(queries, keys):
    rng = random.Random(queries)
    made = leaves(queries, keys)
    made += [rng.choice([a & b, a | b, ~a, a & ~b | a]) for a, b in itertools.combinations(made, 2)]
    for mask in made:
        found = theirs.create_mask(mask.sized(queries, keys), BATCH, HEADS, queries, keys, "cpu")
        assert torch.equal(found, seen(mask, queries, keys)), mask


def test_masks_of_documents_are_functions():
    for mask in packed():
        assert torch.equal(theirs.create_mask(mask, 1, HEADS, 64, 64, "cpu"), seen(mask, 64, 64, batch=1)), mask


def test_masks_that_need_no_sizes():
    for mask in (Causal(), SlidingWindow(3) & ~Segments(torch.arange(9) // 4), PrefixLM(torch.tensor([3, 5]))):
        assert torch.equal(theirs.create_mask(mask, BATCH, HEADS, 9, 9, "cpu"), seen(mask, 9, 9))


def test_a_mask_that_needs_sizes_says_so():
    with pytest.raises(ArgumentError, match=r"Give mask.sized\(queries, keys\)"):
        theirs.create_mask(Causal("bottom-right"), 1, 1, 4, 4, "cpu")
    with pytest.raises(ArgumentError, match="it is a bias"):
        theirs.create_mask(Dense(torch.zeros(4, 4)), 1, 1, 4, 4, "cpu")


@pytest.mark.parametrize(("queries", "keys"), [(5, 6), (6, 6), (1, 6)])
def test_biases_are_functions(queries, keys):
    q, k = r(BATCH, HEADS, queries, 8), r(BATCH, HEADS, keys, 8)
    for bias in (
        ALiBi(torch.rand(HEADS)),
        ALiBi(torch.rand(BATCH, HEADS)),
        RelativePosition(r(BATCH, HEADS, queries, 2), r(1, HEADS, 1, 3)),
    ):
        axes = [
            torch.arange(n).reshape([-1 if d == at else 1 for d in range(4)])
            for at, n in enumerate((2, 4, queries, keys))
        ]
        logits = bias.sized(queries, keys)(torch.zeros(BATCH, HEADS, queries, keys), *axes)
        v = r(BATCH, HEADS, keys, 3)
        torch.testing.assert_close(opkit.attention(q, k, v, bias=bias), opkit.attention(q, k, v, bias=logits))


# ---- beside torch's --------------------------------------------------------------------------------------------------


def torchs(*given, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it was not compiled
        return theirs.flex_attention(*given, **how)


def blocks(mask, queries, keys, batch=None, size=16):
    return theirs.create_block_mask(mask, batch, None, queries, keys, device="cpu", BLOCK_SIZE=size)


WINDOW, PADDING = Causal("bottom-right") & SlidingWindow(20, align="bottom-right"), KeyPadding(torch.tensor([0, 33]))
MODS = {  # a mask, and the score_mod from slopes, positions and logits
    "none": (None, lambda slopes, positions, logits: None),
    "cap": (WINDOW, lambda slopes, positions, logits: Softcap(2.0)),
    "slopes": (PADDING, lambda slopes, positions, logits: slopes),
    "positions": (None, lambda slopes, positions, logits: positions),
    "cap, slopes and logits": (WINDOW, lambda slopes, positions, logits: ScoreMods(Softcap(1.5), slopes, logits)),
    "slopes and positions": (PADDING, lambda slopes, positions, logits: ScoreMods(slopes, positions)),
    "none of several": (None, lambda slopes, positions, logits: ScoreMods()),
}


@pytest.mark.sweep(keep=["slopes", "positions", "cap, slopes and logits"])
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize(("queries", "keys"), [(40, 70), (64, 60)])
def test_beside_torch(queries, keys, name):
    q, k, v = r(BATCH, HEADS, queries, 8), r(BATCH, 2, keys, 8), r(BATCH, 2, keys, 8)
    mask, make = MODS[name]
    positions = RelativePosition(r(BATCH, HEADS, queries, 10), r(BATCH, HEADS, queries, keys // 10))
    score_mod = make(ALiBi(torch.rand(HEADS)).sized(queries, keys), positions, r(BATCH, HEADS, queries, keys))
    block_mask = None if mask is None else blocks(mask.sized(queries, keys), queries, keys, BATCH)
    how = {"score_mod": score_mod, "block_mask": block_mask, "scale": 0.4, "enable_gqa": True}
    expected = torchs(q, k, v, return_aux=theirs.AuxRequest(lse=True), **how)
    found = flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=True), **how)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1].lse, expected[1].lse, rtol=1e-4, atol=1e-5)
    assert found[1].max_scores is None
    out, lse = flex_attention(q, k, v, return_lse=True, **{**how, "block_mask": mask})
    torch.testing.assert_close(out, found[0])
    torch.testing.assert_close(lse, found[1].lse)


def test_a_batch_of_one_of_keys():
    q, k = r(BATCH, HEADS, 20, 8), r(1, HEADS, 20, 8)
    block_mask = blocks(Causal(), 20, 20, BATCH)
    torch.testing.assert_close(flex_attention(q, k, k, block_mask=block_mask), torchs(q, k, k, block_mask=block_mask))


def test_functions_of_torch_s_kind_within_a_block_mask():
    documents, queries = torch.arange(50) // 13, 50
    rows = torch.randint(0, 2, (BATCH, 50)).bool()

    def function(b, h, i, j):
        return (documents[i] == documents[j]) & ((j <= i) | rows[b, j])

    made = blocks(function, queries, queries, BATCH)
    q = r(BATCH, HEADS, queries, 8)
    assert Blocks(made).mask.function is function
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=made), torchs(q, q, q, block_mask=made))


def test_a_block_mask_of_a_mask_is_that_mask():
    mask = Causal("bottom-right") & KeyPadding(torch.tensor([20, 70]))
    for given in (mask.sized(40, 70), Segments(torch.arange(40), torch.arange(70)), Causal() & SlidingWindow(7)):
        made = Blocks(blocks(given, 40, 70, BATCH))
        assert made.mask is getattr(given, "mask", given)
        assert torch.equal(seen(made, 40, 70), seen(made.mask, 40, 70))
        assert Blocks(made.block_mask).mask is made.mask
    assert torch.equal(seen(Not(Blocks(blocks(Causal(), 40, 70))), 40, 70), ~seen(Causal(), 40, 70))


def test_blocks_that_are_not_the_mask_s_count():
    counts, columns = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    fewer = theirs.BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=16, mask_mod=Causal())
    more = theirs.BlockMask.from_kv_blocks(
        counts, columns, counts, columns, BLOCK_SIZE=16, mask_mod=SlidingWindow(3, 3)
    )
    tile = (torch.arange(32)[:, None] // 16 == torch.arange(32) // 16).expand(BATCH, HEADS, -1, -1)
    for made, expected in ((fewer, tile & seen(Causal(), 32, 32)), (more, tile)):
        assert isinstance(Blocks(made).mask, MaskFunction)
        assert torch.equal(seen(Blocks(made), 32, 32), expected)


def test_a_function_that_is_put_in_a_block_mask_s_counts():
    made = blocks(Causal(), 20, 20)
    assert Blocks(made).mask == Causal()
    made.mask_mod = lambda b, h, i, j: j < i
    assert torch.equal(seen(Blocks(made), 20, 20), torch.ones(20, 20).tril(-1).bool().expand(BATCH, HEADS, -1, -1))


def test_gradients():
    slopes, q, k = torch.rand(HEADS, requires_grad=True), r(1, HEADS, 20, 8), r(1, HEADS, 20, 8)
    leaves = [slopes, q.requires_grad_(), k.requires_grad_()]
    score_mod, mask = ScoreMods(Softcap(3.0), ALiBi(slopes)), Causal() & SlidingWindow(4)
    logits = score_mod((q @ k.mT) * 8**-0.5, *[
        torch.arange(n).reshape([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate((1, HEADS, 20, 20))
    ])  # fmt: skip
    expected = logits.masked_fill(~seen(mask, 20, 20, batch=1), -torch.inf).softmax(-1) @ k
    found = flex_attention(q, k, k, score_mod=score_mod, block_mask=blocks(mask, 20, 20))
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compiled():
    slopes, q = torch.rand(HEADS), r(BATCH, HEADS, 20, 8)
    mask = Causal() & SlidingWindow(4)
    made = blocks(mask, 20, 20)

    def ours(q, slopes, made):
        return flex_attention(q, q, q, score_mod=ScoreMods(Softcap(3.0), ALiBi(slopes)), block_mask=made)

    expected = ours(q, slopes, mask)
    for given in (mask, made):
        torch.compiler.reset()
        found = torch.compile(ours, fullgraph=True, backend="aot_eager")(q, slopes, given)
        torch.testing.assert_close(found, expected)


def test_torch_s_own_takes_them_compiled():
    q, slopes = r(1, HEADS, 32, 16), torch.rand(HEADS)
    mask = Causal() & Segments(torch.arange(32) // 10)
    made, score_mod = blocks(mask, 32, 32), ScoreMods(Softcap(3.0), ALiBi(slopes))
    torch.compiler.reset()
    found = torch.compile(theirs.flex_attention, backend="aot_eager")(q, q, q, score_mod=score_mod, block_mask=made)
    expected = opkit.attention(q, q, q, mask=mask, softcap=3.0, bias=ALiBi(slopes))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive  # Inductor compiles its template for over a minute
def test_torch_s_own_takes_documents_compiled_by_inductor():
    qkv, starts = [r(1, HEADS, 64, 16) for _ in range(3)], torch.arange(0, 65, 4)  # torch 2.11 takes no tensor twice
    mask = VarLen(starts) & Causal()
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(theirs.flex_attention, dynamic=False)(*qkv, block_mask=blocks(mask, 64, 64))
    torch.testing.assert_close(found, opkit.attention(*qkv, mask=mask), rtol=1e-4, atol=1e-5)


def test_no_matrix_is_made():
    from torch.utils._python_dispatch import TorchDispatchMode

    n, largest = 2048, []
    made = blocks(Causal() & SlidingWindow(100), n, n, size=128)

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    q = r(1, 1, n, 8)
    with Note():
        flex_attention(q, q, q, block_mask=made, score_mod=ALiBi(torch.tensor([0.5])))
    assert max(largest) <= 128 * n


def test_mistakes():
    q = r(1, HEADS, 20, 8)
    cases = [
        (
            ArgumentTypeError,
            "a score_mod is a function, or one of opkit.masks",
            {"score_mod": torch.ones(20, 20).bool()},
        ),
        (ArgumentTypeError, "got int: 3", {"block_mask": 3}),
        (ShapeError, r"block_mask is for .*\(10, 20\); there are \(20, 20\)", {"block_mask": blocks(Causal(), 10, 20)}),
        (ShapeError, r"Causal was made for .* \(10, 20\)", {"block_mask": Causal().sized(10, 20)}),
        (ShapeError, r"ALiBi was made for .* \(10, 20\)", {"score_mod": ALiBi(torch.ones(4)).sized(10, 20)}),
        (ArgumentError, "max_scores", {"return_aux": theirs.AuxRequest(max_scores=True)}),
        (ArgumentError, "not both", {"return_aux": theirs.AuxRequest(lse=True), "return_lse": True}),
    ]
    for error, match, wrong in cases:
        with pytest.raises(error, match=match):
            flex_attention(q, q, q, **wrong)
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        flex_attention(q, q[:, :2], q[:, :2])
    with pytest.raises(ArgumentError, match="must be the first"):
        ScoreMods(ALiBi(torch.ones(4)), Softcap(2.0))
    with pytest.raises(ArgumentError, match="above 0"):
        Softcap(0.0)
    with pytest.raises(ArgumentTypeError, match="a bias is"):
        opkit.attention(q, q, q, bias=2.0)
