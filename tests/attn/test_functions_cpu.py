"""Users' functions in the CPU kernels: their values and gradients, which tiles they skip, what they read, and what is built."""

import functools

import pytest
import torch
from attention_oracle import TOLERANCE, randn

import opkit
from opkit import _core, errors
from opkit.attn import api
from opkit.attn.cpu import live_tiles
from opkit.attn.masks import program
from opkit.kernels.cc import toolchain
from opkit.masks import Causal

B, H, KV, S, D = 2, 4, 2, 150, 24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = torch.tensor([70, 150])
IDS = torch.bucketize(torch.arange(S), torch.tensor([20, 64, 65, 130]), right=True)
PREFIX = torch.tensor([3, 10, 1, 20, 5])
SLOPES = torch.linspace(0.1, 0.9, H)
TABLE = torch.linspace(-1, 1, H * 2 * S).sin().reshape(H, -1)
GRID = torch.linspace(-2, 2, S * S).cos().reshape(S, S)


def near(width, step):
    return lambda b, h, i, j: (i >= j) & (i - j < width) & ((i - j) % step == 0)


MASKS = {
    "dilated": near(90, 3),
    "documents": lambda b, h, i, j: (IDS[i] == IDS[j]) & ((j % 2 == 0) | (i >= j)),
    "PrefixLM of documents": lambda b, h, i, j: (IDS[i] == IDS[j]) & ((i >= j) | (j < PREFIX[IDS[j]] * 8)),
    "neighbourhood": lambda b, h, i, j: ((i // 12 - j // 12).abs() <= 2) & ((i % 12 - j % 12).abs() <= 3),
    "blocks of a table": lambda b, h, i, j: GRID[i // 50, j // 50] > 0,
    "by sequence and head": lambda b, h, i, j: torch.where(h < 2, j < LENGTHS[b], i <= j + 64),
    "exclusive or": lambda b, h, i, j: ((i ^ j) >= 100) | (i % 2 == j % 3),
    "far away": lambda b, h, i, j: (i - j).abs() >= 100,
    "rows that see nothing": lambda b, h, i, j: (i > 70) & (j * 2 < i - 40),
}
SCORES = {
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (j - i).abs(),
    "relative": lambda s, b, h, i, j: s + TABLE[h, j - i + S],
    "by element": lambda s, b, h, i, j: s * (1 + GRID[i, j]) + GRID[j // 2, i] * SLOPES[h],
    "gate": lambda s, b, h, i, j: s * torch.sigmoid(s) + torch.tanh(s * SLOPES[h]),
    "hidden": lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, -torch.inf, s * 2),
    "constant": lambda s, b, h, i, j: SLOPES[h] * (i % 7).float(),
    "choice": lambda s, b, h, i, j: torch.where(s > 0, s * 0.5, s.exp() - 1).clamp(max=2),
}
CASES = (
    [(name, None) for name in MASKS]
    + [(None, name) for name in SCORES]
    + [("dilated", "relative"), ("documents", "gate")]
)


def oracle(q, k, v, mask=None, score=None, softcap=None, bias=0.0):
    """Attention in float64, with the functions evaluated for all queries and keys."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    b, h, i, j = (
        torch.arange(n).reshape(-1, *[1] * dim) for n, dim in zip((*q.shape[:3], k.shape[2]), (3, 2, 1, 0), strict=True)
    )
    logits = q @ k.mT * q.shape[-1] ** -0.5
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) + bias
    logits = logits if score is None else score(logits, b, h, i, j).double().expand_as(logits)
    if mask is not None:
        logits = logits.masked_fill(~mask(b, h, i, j).expand_as(logits), -torch.inf)
    return logits.softmax(-1).nan_to_num() @ v


def inputs(dtype=torch.float32, queries=S, keys=S):
    made = randn(B, H, queries, D, dtype=dtype), *(randn(B, KV, keys, D, dtype=dtype, seed=n) for n in (1, 2))
    return [x.requires_grad_() for x in made]


def near_to(actual, expected, dtype, factor=4):
    for a, b in zip(actual, expected, strict=True):
        atol = factor * TOLERANCE[dtype] * max(1.0, b.abs().max().item())
        torch.testing.assert_close(a.double(), b.double(), rtol=factor * TOLERANCE[dtype], atol=atol)


def check(q, k, v, learned=(), mask=None, score=None, factor=4, **options):
    """The results and gradients of the tiles kernel are those of the formula."""
    out = opkit.attention(q, k, v, mask=mask, bias=score, kernel="tiles", **options)
    expected = oracle(q, k, v, mask, score, **options)
    near_to([out], [expected], q.dtype)
    wanted, gradient = [q, k, v, *learned], randn(*out.shape, dtype=q.dtype, seed=3)
    found = torch.autograd.grad(out, wanted, gradient, materialize_grads=True)
    right = torch.autograd.grad(expected, wanted, gradient.double(), materialize_grads=True)
    near_to(found, right, q.dtype, 2 * factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mask", "score"), CASES)
def test_results_and_gradients(mask, score, dtype):
    learned = [x.requires_grad_(score is not None) for x in (SLOPES, TABLE, GRID)] if score else []
    check(*inputs(dtype), learned, MASKS.get(mask), SCORES.get(score), 20 if learned else 4)


def test_instruction_sets(isa):
    for dtype in (torch.float32, torch.bfloat16):
        check(*inputs(dtype), (), MASKS["neighbourhood"], SCORES["gate"])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 130), (97, 65), (150, 64)])
def test_numbers_of_queries_and_keys(queries, keys):
    for mask in ("dilated", "documents", "neighbourhood"):
        check(*inputs(queries=queries, keys=keys), (), MASKS[mask], SCORES["relative"])


def test_no_queries_or_keys():
    slopes = SLOPES.clone().requires_grad_()
    for sizes in ({"queries": 0}, {"keys": 0}):
        q, k, v = inputs(**sizes)
        out = opkit.attention(q, k, v, mask=MASKS["dilated"], bias=lambda s, b, h, i, j: s * slopes[h], kernel="tiles")
        assert not out.any()
        assert not any(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v, slopes)))


def test_strides():
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    table = torch.randn(2 * S, 2 * H)[:, ::2].T.requires_grad_()

    def score(s, b, h, i, j):
        return s + table[h, j - i + S]

    check(*(x.requires_grad_() for x in (q, k, v)), [table], MASKS["dilated"], score, 20)


def test_soft_caps_and_tensors_before_a_function():
    table = torch.randn(B, 1, S, S, requires_grad=True)
    q, k, v = inputs()
    score = SCORES["gate"]
    out = opkit.attention(q, k, v, bias=[table, score, SCORES["alibi"]], softcap=3.0, kernel="tiles")
    twice = lambda s, b, h, i, j: SCORES["alibi"](score(s, b, h, i, j), b, h, i, j)  # noqa: E731
    expected = oracle(q, k, v, None, twice, 3.0, table.double())
    near_to([out], [expected], q.dtype)
    gradient = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, (q, k, v, table), gradient.to(x.dtype)) for x in (out, expected))
    near_to(found, right, q.dtype, 20)


# ---- few queries -----------------------------------------------------------------------------------------------------


def later(function, by):
    """A function of queries that come later in their sequence."""
    return function and (lambda *at: function(*at[:-2], at[-2] + by, at[-1]))


def check_few(q, k, v, mask=None, score=None, factor=4, **options):
    """The decoding kernel computes the formula."""
    out = opkit.attention(q, k, v, mask=mask, bias=score, kernel="decode", **options)
    near_to([out], [oracle(q, k, v, mask, score, **options)], q.dtype, factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mask", "score"), CASES)
def test_few_queries(mask, score, dtype):
    for queries in (1, 5):
        check_few(*inputs(dtype, queries), later(MASKS.get(mask), S - queries), later(SCORES.get(score), S - queries))


def test_few_queries_with_instruction_sets(isa):
    for dtype in DTYPES:
        check_few(*inputs(dtype, 3), later(MASKS["neighbourhood"], S - 3), later(SCORES["relative"], S - 3))


@pytest.mark.parametrize("band", [(0, 900), (300, 301), (37, 700), (100, 3)])
def test_few_queries_and_many_keys(band):
    q, k, v = (randn(B, heads, n, D, dtype=torch.float32, seed=n + heads) for heads, n in ((6, 2), (2, 901), (2, 901)))
    ids = torch.arange(901) // 190 % 3
    far, near = band
    masks = (
        lambda b, h, i, j: (j >= far) & (j <= near) & ((i + j) % 3 != 0),
        lambda b, h, i, j: (i + near >= j) & (i + far - j <= 0) & (ids[i] == ids[j]),
        lambda b, h, i, j: (i + near >= j) & ((j % 64 == h) | (j // 64 == 5 + b)),
    )
    for mask in masks:
        check_few(q, k, v, mask, softcap=2.0)
        check_few(q, k, v, mask, lambda s, b, h, i, j: s * 2 + (i - j) * 0.01 * h)


def test_values_that_few_queries_do_not_see():
    q, k, v = (x.detach() for x in inputs(queries=2))
    for mask in (lambda b, h, i, j: j % 3 != 1, lambda b, h, i, j: (j + i) % 3 == h % 3):
        seen = mask(0, torch.arange(H)[:, None, None], torch.arange(2)[:, None], torch.arange(S)).expand(H, 2, S).any(1)
        hidden = ~seen.reshape(KV, -1, S).any(1)
        spoiled = [x.masked_fill(hidden[None, :, :, None], torch.nan) for x in (k, v)]
        expected = opkit.attention(q, k, v, mask=mask, kernel="decode")
        torch.testing.assert_close(opkit.attention(q, *spoiled, mask=mask, kernel="decode"), expected, rtol=0, atol=0)


def test_the_decoding_kernel_takes_few_queries_with_functions():
    q, k, v = (randn(1, heads, n, 64, dtype=torch.float32) for heads, n in ((8, 1), (2, 512), (2, 512)))
    mask, score = (lambda b, h, i, j: j % 3 != 1), (lambda s, b, h, i, j: s * torch.sigmoid(s))
    assert api.select(q, k, v, mask=mask, bias=score).kernel == "decode"
    ids = torch.arange(512)[None] // 100
    for mask in (opkit.masks.Segments(ids[:, :1], ids), opkit.masks.Dense(ids[:, None, None] % 2 == 0)):
        out = opkit.attention(q, k, v, mask=mask, kernel="decode")
        near_to([out], [opkit.attention(q, k, v, mask=mask, kernel="reference").double()], q.dtype)


# ---- gradients of tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(B, H, S, S), (1, H, S, S), (B, 1, 1, S), (1, 1, S, 1), (H, S, S)])
def test_gradients_of_tensors_that_are_added(shape):
    table = torch.randn(shape, requires_grad=True)
    q, k, v = inputs()
    out = opkit.attention(q, k, v, mask=Causal(), bias=table, kernel="tiles")
    expected = oracle(q, k, v, lambda b, h, i, j: i >= j, bias=table.double())
    gradient = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, table, gradient.to(x.dtype)) for x in (out, expected))
    near_to(found, right, q.dtype, 20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_hidden_is_not_read(dtype):
    q, k, v = (x.detach() for x in inputs(dtype))
    k[:, :, 100:] = torch.nan
    v[:, :, 100:] = torch.inf
    slopes = SLOPES.clone().requires_grad_()

    def attend(mask, keys):
        own = [x.clone().requires_grad_() for x in (q, k[:, :, :keys], v[:, :, :keys])]
        out = opkit.attention(
            *own, mask=mask, bias=lambda s, b, h, i, j: s * slopes[h] + (s * s).sqrt(), kernel="tiles"
        )
        return out, torch.autograd.grad(out, (own[0], slopes), torch.ones_like(out))

    hidden, without = (
        attend(lambda b, h, i, j: (j < 100) & ((i * j) % 5 < 4), S),
        attend(lambda b, h, i, j: (i * j) % 5 < 4, 100),
    )
    torch.testing.assert_close(hidden, without, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


NUMBERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, *DTYPES, torch.float64]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_types_of_captured_tensors(dtype):
    numbers = (torch.arange(3 * S) % 5).to(dtype)[::3]
    grid = (torch.arange(S * S) % 3).to(dtype).reshape(S, S).T
    check(*inputs(), (), lambda b, h, i, j: (numbers[i] == numbers[j]) | (grid[i, j] != 0), None)
    check(*inputs(), (), None, lambda s, b, h, i, j: s + numbers[j] * grid[j, i])


def test_tensors_of_many_dimensions():
    table = torch.randn(2, 3, 2, S, 5, requires_grad=True)
    check(*inputs(), [table], None, lambda s, b, h, i, j: s + table[b, j % 3, h // 2, i, (i + j) % 5], 20)


def test_nothing_is_read_or_written_outside_of_a_tensor():
    memory = torch.full((3000,), torch.nan)
    table = memory[1000:1010].detach()
    table.copy_(torch.arange(10))
    table.requires_grad_()

    def score(s, b, h, i, j):
        return s + table[(i - j) * 100_003]

    def clamped(s, b, h, i, j):
        at = (i - j) * 100_003
        return s + table[torch.where(at < 0, at + 10, at).clamp(0, 9)]

    q, k, v = inputs()
    out, expected = opkit.attention(q, k, v, bias=score, kernel="tiles"), oracle(q, k, v, None, clamped)
    near_to([out], [expected], q.dtype)
    found, right = (torch.autograd.grad(x.sum(), table)[0] for x in (out, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert memory[:1000].isnan().all()
    assert memory[1010:].isnan().all()


def test_the_number_of_threads_does_not_matter():
    learned = [x.requires_grad_() for x in (SLOPES, TABLE, GRID)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            q, k, v = inputs()
            for score in ("relative", "by element"):
                out = opkit.attention(q, k, v, mask=MASKS["documents"], bias=SCORES[score], kernel="tiles")
                grads = torch.autograd.grad(out, [q, k, v, *learned], out.detach(), materialize_grads=True)
                found.append([out, *grads])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found[:2] * 2, found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_one_build_serves_other_numbers_and_sizes(settings, tmp_path):
    settings(cache_dir=tmp_path)

    def attend(width, slope, n, table):
        q, k, v = inputs(queries=n, keys=n)
        mask = lambda b, h, i, j: ((i - j) % width < 3) & (i * 7 - j < 300)  # noqa: E731
        score = lambda s, b, h, i, j: s * slope + table[h, (i * j) % 4]  # noqa: E731
        check(q, k, v, [table], mask, score, 20)

    attend(11, 0.5, 100, torch.randn(H, 4, requires_grad=True))
    built = list(tmp_path.rglob("*.so"))
    assert len(built) == 3  # the mask, the score and its derivatives
    attend(5, 1.5, 130, torch.randn(4, 2 * H)[:, ::2].T.requires_grad_())
    assert len(list(tmp_path.rglob("*.so"))) == len(built)


def test_without_a_compiler_the_reference_runs(monkeypatch):
    def missing(language):
        raise errors.ToolchainError(f"no compiler for {language}")

    monkeypatch.setattr(toolchain, "find", missing)
    q, k, v = inputs()
    selection = api.select(q, k, v, mask=MASKS["dilated"])
    assert selection.kernel == "reference"
    assert selection.refused["tiles"] == "there is no C compiler for the call's functions"
    with pytest.raises(errors.KernelError, match="no C compiler"):
        opkit.attention(q, k, v, mask=MASKS["dilated"], kernel="tiles")


def test_batch_invariant_kernels_take_functions():
    q, k, v = (x.detach() for x in inputs())
    mask, score = MASKS["neighbourhood"], SCORES["relative"]
    with torch.no_grad(), opkit.batch_invariant():
        whole = opkit.attention(q, k, v, mask=mask, bias=score)
        first = opkit.attention(q[:1, :, :100], k[:1], v[:1], mask=mask, bias=score)
    assert torch.equal(whole[:1, :, :100], first)


@pytest.mark.parametrize("name", MASKS)
def test_live_tiles_are_those_that_are_seen(name):
    n = 400
    ids, lengths = (
        torch.bucketize(torch.arange(n), torch.tensor([20, 192, 193, 300]), right=True),
        torch.tensor([70, 400]),
    )

    def inside(mask):
        return (
            mask if name in ("dilated", "neighbourhood", "far away", "exclusive or", "rows that see nothing") else None
        )

    own = {
        "documents": lambda b, h, i, j: (ids[i] == ids[j]) & ((j % 2 == 0) | (i >= j)),
        "PrefixLM of documents": lambda b, h, i, j: (ids[i] == ids[j]) & ((i >= j) | (j < PREFIX[ids[j]] * 8)),
        "blocks of a table": lambda b, h, i, j: GRID[i // 50, j // 50] > 0,
        "by sequence and head": lambda b, h, i, j: torch.where(h < 2, j < lengths[b], i <= j + 64),
    }
    mask = inside(MASKS[name]) or own[name]
    q, k, v = (x.detach() for x in inputs(queries=n, keys=n))
    found = live_tiles(api.lowered(q, k, v, mask, None, None, None, None, 0.0, "bhsd")).states
    b, h, i, j = (torch.arange(size).reshape(-1, *[1] * dim) for size, dim in ((B, 3), (H, 2), (n, 1), (n, 0)))
    seen = mask(b, h, i, j).expand(B, H, n, n)
    for row in range(found.shape[2]):
        for key in range(found.shape[3]):
            tile = seen[:, :, row * 96 : (row + 1) * 96, key * 64 : (key + 1) * 64].flatten(2)
            expected = torch.where(tile.all(2), 1, torch.where(tile.any(2), 2, 0))
            last = (key + 1) * 64 > n  # whose keys beyond the last one are hidden
            assert torch.equal(found[:, :, row, key], torch.where((expected == 1) & last, 2, expected).to(torch.uint8))


def test_select_prints_live_tiles():
    q = torch.zeros(1, 1, 192, 4)
    found = api.select(q, q, q, mask=lambda b, h, i, j: (i >= j) & (i - j < 70) & ((i + j) % 2 == 0))
    assert found.notes[0] == "6 tiles of 96 queries and 64 keys: 1 hidden, 0 full, 5 in part"
    assert [note.split()[0] for note in found.notes[1:]] == ["band", "band", "function"]
    assert api.select(q, q, q).notes == ()


def test_vmap():
    table = torch.randn(H, 2 * S)
    mask, score = MASKS["by sequence and head"], lambda s, b, h, i, j: s * (b + 1) + table[h, i - j + S]
    q, k, v = (torch.stack([x.detach(), x.detach() * 2, -x.detach()]) for x in inputs())
    attend = functools.partial(opkit.attention, mask=mask, bias=score)
    expected = torch.stack([attend(*each) for each in zip(q, k, v, strict=True)])
    assert torch.equal(torch.vmap(attend)(q, k, v), expected)


ELEMENTWISE = [
    "exp", "expm1", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asinh", "atan", "erf", "erfc", "exp2", "sqrt", "floor",
    "trunc", "round", "sigmoid", "log2", "log10", "acosh", "atanh", "asin", "acos", "rsqrt", "square",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions(name):
    fn = getattr(torch, name)
    table = torch.linspace(1.1, 2, S) if name == "acosh" else torch.linspace(0.1, 0.8, S)
    q, k, v = inputs()
    check(
        q, k, v, (), None, lambda s, b, h, i, j: s + fn(table[i] * table[j] if name != "acosh" else table[i] + table[j])
    )
    check(q, k, v, (), None, lambda s, b, h, i, j: fn(torch.sigmoid(s) * 0.8 + (1.1 if name == "acosh" else 0.1)), 20)


def test_programs_whose_functions_are_missing_are_refused():
    sizes = {
        "dtype": "float32",
        "sizes": (1, 1, 1, 1, 1, 8, 8),
        "strides": [(8, 8, 8)] * 4,
        "mask_tensors": [],
        "bias_tensors": [],
    }
    for programs in ({"mask": [program.FUNCTION, 0], "bias": []}, {"mask": [], "bias": [program.BIAS_FUNCTION, 2]}):
        with pytest.raises(ValueError, match="there is no function"):
            _core.AttentionForward(None, **sizes, **programs, scale=1.0, softcap=0.0)
