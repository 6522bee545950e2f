"""opkit.nn.MultiheadAttention beside torch's: results, probabilities and gradients over the options of both."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import opkit
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, ShapeError
from opkit.masks import Causal, Dense, KeyPadding, SlidingWindow
from opkit.nn import MultiheadAttention

EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 7
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest number
CANCELLED = 1e-2  # of the largest number of all tensors: of what sums to 0 the rounding is that of the terms


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def close(found, expected):
    """Each tensor beside its peer."""
    assert len(found) == len(expected)
    largest = [b.abs().max().item() if b.numel() else 0.0 for b in expected]
    least = max(CANCELLED * max(largest), 1e-3)
    for a, b, most in zip(found, expected, largest, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[b.dtype] * max(most, least))


def pair(**how):
    """torch's and opkit's modules with the same parameters, none of which are zero."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, **how)
    with torch.no_grad():
        for each in theirs.parameters():
            each.copy_(torch.randn_like(each) / 3)
    mine = MultiheadAttention(EMBED, HEADS, **how)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, mine


def inputs(kind, module, batched, dtype):
    """Queries, keys and values in the layout of ``module``: of self attention, of shared keys and values, or of three."""
    queries = KEYS if kind == "self" else QUERIES
    sizes = ((queries, module.embed_dim), (KEYS, module.kdim), (KEYS, module.vdim))
    shapes = [(BATCH, n, d) if module.batch_first else (n, BATCH, d) for n, d in sizes]
    shapes = shapes if batched else sizes
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return {"self": (query, query, query), "memory": (query, key, key), "three": (query, key, value)}[kind]


def mask_of(kind, shape, dtype):
    """True, or minus infinity and random numbers, where a key is hidden; the first key is seen by all."""
    if kind is None:
        return None
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    return hidden if kind == "bool" else torch.randn(shape, dtype=dtype).masked_fill(hidden, -torch.inf)


def results(module, given, **how):
    """What a module gives, and the gradients of its parameters and of what it was given."""
    out, weights = module(*given, **how)
    loss = out.square().sum() + (0 if weights is None else (weights.square() * 3).sum())
    leaves = [*module.parameters(), *{id(x): x for x in given}.values()]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [out, *([] if weights is None else [weights]), *(each for each in grads if each is not None)]


OPTIONS = {
    "kind": st.sampled_from(["self", "memory", "three", "sizes"]),
    "batched": st.booleans(),
    "batch_first": st.booleans(),
    "bias": st.booleans(),
    "bias_kv": st.booleans(),
    "zero": st.booleans(),
    "padding": st.sampled_from([None, "bool", "float"]),
    "attn": st.sampled_from([None, "bool", "float"]),
    "flat": st.booleans(),
    "need": st.booleans(),
    "average": st.booleans(),
    "dtype": st.sampled_from([torch.float32, torch.float64]),
    "seed": st.integers(0, 99),
}
ONE_KEY_IS_SEEN = ("sizes", False, False, True, False, False, "bool", None, False, False, False, torch.float64, 19)


@pytest.mark.parametrize("examples", [50, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_options(examples):
    test = example(*ONE_KEY_IS_SEEN)(given(**OPTIONS)(check_options))
    settings(max_examples=examples, deadline=None)(test)()


def check_options(
    kind, batched, batch_first, bias, bias_kv, zero, padding, attn, flat, need, average, dtype, seed
):  # fmt: skip
    torch.manual_seed(seed)
    how = {"batch_first": batch_first, "bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero, "dtype": dtype}
    if kind == "sizes":
        kind, how = "three", {**how, "kdim": 8, "vdim": 10}
    theirs, mine = pair(**how)
    given = inputs(kind, theirs, batched, dtype)
    batch, queries = BATCH if batched else 1, KEYS if kind == "self" else QUERIES
    both = "float" if padding and attn and "float" in (padding, attn) else None  # torch warns where they differ
    call = {
        "key_padding_mask": mask_of(padding and (both or padding), (batch, KEYS) if batched else (KEYS,), dtype),
        "attn_mask": mask_of(
            attn and (both or attn), (queries, KEYS) if flat else (batch * HEADS, queries, KEYS), dtype
        ),
        "need_weights": need,
        "average_attn_weights": average,
    }
    close(results(mine, given, **call), results(theirs, given, **call))


@pytest.mark.sweep
@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_causal(padded, need):
    theirs, mine = pair(dtype=torch.float64)
    given = inputs("self", theirs, True, torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(KEYS, dtype=torch.float64)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.float64)
    padding[1, 5:] = -torch.inf
    call = {"attn_mask": mask, "is_causal": True, "need_weights": need, "key_padding_mask": padding if padded else None}
    expected = results(theirs, given, **call)
    for attn_mask in (mask, None, Causal()):
        close(results(mine, given, **{**call, "attn_mask": attn_mask}), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("bias_kv", [False, True])
@pytest.mark.parametrize("need", [False, True])
@pytest.mark.parametrize(
    "mask",
    [
        Causal("bottom-right"),
        SlidingWindow(1, 2),
        KeyPadding(torch.tensor([3, 7])),
        Causal() & Dense(torch.randn(QUERIES, KEYS, generator=torch.Generator().manual_seed(1))),
    ],
    ids=lambda mask: type(mask).__name__,
)
def test_masks_of_the_algebra(mask, need, bias_kv):
    theirs, mine = pair(batch_first=True, add_bias_kv=bias_kv, add_zero_attn=bias_kv)
    given = inputs("memory", theirs, True, torch.float32)
    q = torch.randn(BATCH, HEADS, QUERIES, 4)
    hidden = (
        opkit.attention(q, torch.zeros(BATCH, HEADS, KEYS, 4), torch.eye(KEYS).expand(2, 3, -1, -1), mask=mask) == 0
    )
    added = torch.where(hidden, -torch.inf, 0.0)
    if isinstance(mask, opkit.masks.And):
        added = added + mask.parts[1].tensor
    call = {"need_weights": need, "average_attn_weights": False}
    found = results(mine, given, attn_mask=mask, **call)
    close(found, results(theirs, given, attn_mask=added.flatten(0, 1), **call))


@pytest.mark.parametrize("need", [False, True])
def test_queries_that_see_nothing(need):
    mine = MultiheadAttention(EMBED, HEADS, batch_first=True)
    nn.init.normal_(mine.out_proj.bias)
    x = torch.randn(BATCH, KEYS, EMBED, requires_grad=True)
    out, weights = mine(x, x, x, key_padding_mask=torch.tensor([[False] * KEYS, [True] * KEYS]), need_weights=need)
    torch.testing.assert_close(out[1], mine.out_proj.bias.expand(KEYS, -1))
    assert weights is None or weights[1].eq(0).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()
    assert grad[1].eq(0).all()


@pytest.mark.parametrize("need", [False, True])
def test_hidden_keys_that_are_no_numbers(need):
    mine = MultiheadAttention(EMBED, HEADS, batch_first=True)
    query, memory = torch.randn(BATCH, QUERIES, EMBED, requires_grad=True), torch.randn(BATCH, KEYS, EMBED)
    hidden = torch.tensor([[False] * 5 + [True] * 2] * BATCH)
    expected = mine(query, memory, memory, key_padding_mask=hidden)[0]
    poisoned = torch.where(hidden.unsqueeze(-1), torch.nan, memory)
    out = mine(query, poisoned, poisoned, key_padding_mask=hidden, need_weights=need)[0]
    torch.testing.assert_close(out, expected)
    assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()


def test_no_matrix_is_made():
    from torch.utils._python_dispatch import TorchDispatchMode

    mine, n, largest = MultiheadAttention(8, 2, batch_first=True), 2048, []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    x = torch.randn(1, n, 8)
    with Note():
        mine(x, x, x, need_weights=False, is_causal=True, key_padding_mask=torch.zeros(1, n, dtype=torch.bool))
    assert max(largest) < n * n // 8


@pytest.mark.parametrize("how", [{}, {"kdim": 8, "vdim": 4}, {"add_bias_kv": True}, {"bias": False}], ids=str)
def test_state_and_initialisation(how):
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(EMBED, HEADS, **how)
    torch.manual_seed(7)
    mine = MultiheadAttention(EMBED, HEADS, **how)
    torch.testing.assert_close(dict(mine.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    theirs.load_state_dict(mine.state_dict(), strict=True)


@pytest.mark.parametrize("how", [{}, {"kdim": 8, "vdim": 4}, {"add_bias_kv": True}, {"bias": False}], ids=str)
def test_from_torch(how):
    theirs = nn.MultiheadAttention(EMBED, HEADS, dropout=0.1, add_zero_attn=True, **how).eval()
    mine = MultiheadAttention.from_torch(theirs)
    assert not mine.training
    assert mine.dropout == 0.1
    assert {name: id(each) for name, each in mine.named_parameters()} == {
        name: id(each) for name, each in theirs.named_parameters()
    }
    given = inputs("three", theirs, True, torch.float32)
    torch.testing.assert_close(mine(*given), theirs(*given))


def test_dropout():
    mine = MultiheadAttention(EMBED, HEADS, dropout=0.5)
    x = torch.randn(64, BATCH, EMBED)
    for need in (False, True):
        torch.manual_seed(3)
        first = mine(x, x, x, need_weights=need)
        torch.manual_seed(3)
        torch.testing.assert_close(mine(x, x, x, need_weights=need), first)
        assert not torch.equal(mine(x, x, x, need_weights=need)[0], first[0])
    weights = mine(x, x, x, average_attn_weights=False)[1]
    assert 0.4 < weights.eq(0).float().mean() < 0.6
    torch.testing.assert_close(weights.mean(), torch.tensor(1 / 64), rtol=0.05, atol=0)
    mine.eval()
    torch.testing.assert_close(mine(x, x, x)[0], mine(x, x, x, need_weights=False)[0])


def test_in_a_layer_of_torch_s():
    theirs = nn.TransformerDecoderLayer(EMBED, HEADS, 16, dropout=0.0, batch_first=True)
    x, memory = torch.randn(BATCH, QUERIES, EMBED), torch.randn(BATCH, KEYS, EMBED)
    mask = nn.Transformer.generate_square_subsequent_mask(QUERIES)
    expected = theirs(x, memory, tgt_mask=mask, tgt_is_causal=True)
    theirs.self_attn = MultiheadAttention.from_torch(theirs.self_attn)
    theirs.multihead_attn = MultiheadAttention.from_torch(theirs.multihead_attn)
    torch.testing.assert_close(theirs(x, memory, tgt_mask=mask, tgt_is_causal=True), expected, rtol=1e-4, atol=1e-5)


class Model(nn.Module):
    """A padded batch's attention."""

    def __init__(self, attention, need):
        super().__init__()
        self.attention, self.need = attention, need

    def forward(self, query, key, value, padding):
        return self.attention(query, key, value, key_padding_mask=padding, need_weights=self.need)[0]


def padded(need):
    """torch's and opkit's model, and what they are given."""
    theirs, mine = pair(batch_first=True)
    padding = torch.tensor([[False] * KEYS, [False] * 4 + [True] * 3])
    return Model(theirs, need), Model(mine, need), (*inputs("three", mine, True, torch.float32), padding)


@pytest.mark.parametrize("need", [False, True])
def test_under_autocast(need):
    theirs, model, given = padded(need)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = model(*given), theirs(*given)
    assert out.dtype == torch.bfloat16
    close([out], [expected])


@pytest.mark.exhaustive
@pytest.mark.parametrize("need", [False, True])
def test_compiled_and_exported(need):
    theirs, model, given = padded(need)
    expected, query = theirs(*given), given[0]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    close([compiled(*given)], [expected])
    close(*[torch.autograd.grad(f(*given).square().sum(), query) for f in (compiled, theirs)])
    size = torch.export.Dim("batch", min=2, max=64)
    dims = {name: {0: size} for name in ("query", "key", "value", "padding")}
    program = torch.export.export(model, tuple(x.detach() for x in given), dynamic_shapes=dims).module()
    larger = tuple(torch.cat([x.detach()] * 3) for x in given)
    close([program(*larger)], [theirs(*larger)])


def test_empty_sizes():
    mine = MultiheadAttention(EMBED, HEADS, batch_first=True)
    for shape in ((0, 3, EMBED), (2, 0, EMBED)):
        for need in (False, True):
            assert mine(*[torch.randn(shape)] * 3, need_weights=need)[0].shape == shape


def test_mistakes():
    mine = MultiheadAttention(EMBED, HEADS, batch_first=True)
    x = torch.randn(BATCH, KEYS, EMBED)
    cases = [
        (ShapeError, "query of shape", {"query": x[..., :3]}),
        (ShapeError, "of one length", {"value": x[:, 1:]}),
        (ShapeError, "of one batch", {"query": x[:1]}),
        (ShapeError, "must be .*without a batch", {"key": x[0], "value": x[0]}),
        (ArgumentTypeError, "query must be a tensor", {"query": [1.0]}),
        (ShapeError, r"attn_mask of shape \(3, 3\)", {"attn_mask": torch.zeros(3, 3)}),
        (DtypeError, "attn_mask has dtype torch.int64", {"attn_mask": torch.zeros(7, 7, dtype=torch.int64)}),
        (ArgumentTypeError, "attn_mask must be a tensor", {"attn_mask": "causal"}),
        (ShapeError, "key_padding_mask of shape", {"key_padding_mask": torch.zeros(2, 3).bool()}),
        (DtypeError, "key_padding_mask has dtype", {"key_padding_mask": torch.zeros(2, 7, dtype=torch.int32)}),
        (ArgumentTypeError, "key_padding_mask must", {"key_padding_mask": KeyPadding(torch.tensor([1, 2]))}),
        (ArgumentError, "nested", {"query": torch.nested.as_nested_tensor([x[0]], layout=torch.jagged)}),
    ]
    for error, match, wrong in cases:
        with pytest.raises(error, match=match):
            mine(**{"query": x, "key": x, "value": x, **wrong})
