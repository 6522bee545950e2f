"""The forward kernels for processors: every ISA that runs here, against float64."""

import itertools
import random

import pytest
import torch

import opkit
from opkit.attn import cpu
from opkit.attn.calls import AttentionCall
from opkit.errors import KernelError

FLOATS = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
FAR = 2**62


def r(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def run(q, k, v, mask=(), tensors=(), bias=(), added=(), sinks=None, scale=None, softcap=0.0, out_is_bshd=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = (list(tensors), list(added), sinks, None, list(mask), list(bias), scale, softcap, 0.0, out_is_bshd)
    return cpu.forward(q, k, v, *given)


def expected(q, k, v, visible=None, added=None, sinks=None, scale=None, softcap=0.0):
    """In float64; a row that sees nothing is zero."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if added is None else scores + added.double()
    scores = scores if visible is None else torch.where(visible, scores, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, column], -1), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
    return torch.einsum("bhij,bhjd->bhid", weights, v), lse


def close(found, wanted, bound):
    (out, lse), (exact, exact_lse) = found, wanted
    assert out.shape == exact.shape
    size = exact.abs().max().item() if exact.numel() else 1.0
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound * max(size, 1e-3))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2e-2 if out.dtype == torch.bfloat16 else 1e-4)


SHAPES = [  # batch, heads, heads of keys, queries, keys, elements of a key, of a value
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 2, 130, 150, 64, 64),
    (1, 3, 1, 97, 65, 7, 9),
    (1, 2, 2, 200, 33, 96, 33),
    (1, 2, 1, 13, 70, 575, 512),
    (3, 5, 5, 12, 64, 128, 16),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_key_is_seen(subtests, isa, dtype):
    for shape in SHAPES:
        b, h, hk, n, m, d, dv = shape
        q, k, v = r(b, h, n, d, dtype=dtype), r(b, hk, m, d, dtype=dtype), r(b, hk, m, dv, dtype=dtype)
        with subtests.test(str(shape)):
            close(run(q, k, v), expected(q, k, v), FLOATS[dtype])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides(isa, dtype):
    """Heads inside of the sequence, a slice of a wider tensor, an expanded head, rows of odd length, a transposed matrix."""
    q, k = r(2, 70, 3, 41, dtype=dtype).transpose(1, 2)[..., 1:40], r(2, 90, 3, 39, dtype=dtype).transpose(1, 2)
    v = r(2, 1, 90, 20, dtype=dtype).expand(2, 3, 90, 20)
    close(run(q, k, v), expected(q, k, v), FLOATS[dtype])
    k = r(2, 3, 39, 90, dtype=dtype).mT
    close(run(q, k, v), expected(q, k, v), FLOATS[dtype])


def test_the_result_lies_as_it_is_asked_for(isa):
    q = r(2, 3, 20, 8)
    for out_is_bshd in (False, True):
        out, lse = run(q, q, q, out_is_bshd=out_is_bshd)
        assert (out.transpose(1, 2) if out_is_bshd else out).is_contiguous()
        assert lse.is_contiguous()
        close((out, lse), expected(q, q, q), 2e-6)


def test_nothing(isa):
    for shape in ((0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4)):
        out, lse = run(torch.ones(shape), torch.ones(shape), torch.ones(shape))
        assert out.shape == shape
        assert lse.shape == shape[:3]
    out, lse = run(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 6))
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    _, lse = run(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 6), sinks=torch.tensor([1.0, 2.0]))
    assert lse[0, :, 0].tolist() == [1.0, 2.0]


# ---- masks -----------------------------------------------------------------------------------------------------------


class Leaves:
    """Leaves of programs with their tensors, and what they mean."""

    def __init__(self, b, h, n, m, seed):
        self.shape, self.tensors, self.random = (b, h, n, m), [], random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.i, self.j = torch.arange(n)[:, None], torch.arange(m)[None]

    def add(self, tensor):
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def ints(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.torch, dtype=torch.int32)

    def band(self):
        low, high = sorted(self.random.choice([-FAR, -70, -3, 0, 5, 64, FAR]) for _ in range(2))
        return [3, low, high], (low <= self.j - self.i) & (self.j - self.i <= high)

    def segments(self):
        b, _, n, m = self.shape
        batches = self.random.choice([1, b])
        mine, theirs = (self.ints(0, 4, batches, size) for size in (n, m))
        if self.random.random() < 0.7:
            mine, theirs = mine.sort(-1).values, theirs.sort(-1).values
        return [4, self.add(mine), self.add(theirs)], (mine[:, :, None] == theirs[:, None])[:, None]

    def length(self):
        lengths = self.ints(0, self.shape[3] + 2, self.random.choice([1, self.shape[0]]))
        return [5, self.add(lengths)], self.j < lengths[:, None, None, None]

    def dense(self):
        shape = [self.random.choice([1, size]) for size in self.shape]
        truth = torch.rand(shape, generator=self.torch) > self.random.choice([0.05, 0.6, 1.0])
        return [6, self.add(truth.expand(self.shape))], truth

    def band_at(self):
        b, _, n, _ = self.shape
        offset = self.ints(-20, 20, self.random.choice([1, b]), n)
        low, high = sorted(self.random.choice([-FAR, -30, 0, 9, FAR]) for _ in range(2))
        distance = self.j - self.i - offset[:, None, :, None]
        return [7, self.add(offset), low, high], (low <= distance) & (distance <= high)

    def tree(self, depth):
        if depth == 0 or self.random.random() < 0.2:
            return self.random.choice([self.band, self.segments, self.length, self.dense, self.band_at])()
        program, truth = self.tree(depth - 1)
        if self.random.random() < 0.25:
            return [*program, 2], ~truth
        other, second = self.tree(depth - 1)
        opcode = self.random.choice([0, 1])
        return [*program, *other, opcode], truth & second if opcode == 0 else truth | second


def test_masks(subtests, isa):
    for seed in range(16):
        chance = random.Random(seed)
        b, h, n, m = (chance.choice(sizes) for sizes in ([1, 2], [2, 4], [1, 33, 130], [7, 64, 65, 200]))
        leaves = Leaves(b, h, n, m, seed)
        program, truth = leaves.tree(seed % 4)
        q, k, v = r(b, h, n, 16), r(b, h // 2, m, 16), r(b, h // 2, m, 8)
        with subtests.test(f"{seed}, {program}"):
            close(run(q, k, v, program, leaves.tensors), expected(q, k, v, truth.expand(b, h, n, m)), 2e-6)


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ([9], KernelError, r"does not take .*mask=\[9\]"),
        ([3, 1], KernelError, r"does not take .*mask=\[3, 1\]"),
        ([0], ValueError, "no operand"),
        ([3, 0, 1, 3, 0, 1], ValueError, "more than one"),
    ],
)
def test_programs_that_are_none(program, error, said):
    x = torch.ones(1, 1, 2, 2)
    with pytest.raises(error, match=said):
        run(x, x, x, program)


def test_rows_that_see_nothing(isa):
    q = r(1, 2, 70, 8)
    out, lse = run(q, q, q, [3, 5, FAR])
    assert out[:, :, 65:].eq(0).all()
    assert lse[:, :, 65:].eq(-torch.inf).all()
    close((out, lse), expected(q, q, q, torch.ones(70, 70, dtype=torch.bool).triu(5)), 2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_hidden_does_not_leak(isa, dtype, bad):
    """The keys of a padding and of the future are no numbers; rows that see none of them are as if they were."""
    q, k, v = (r(1, 2, 100, 12, dtype=dtype) for _ in range(3))
    clean, _ = run(q, k, v, [3, -FAR, 0])
    k, v = k.clone(), v.clone()
    k[:, :, 50], v[:, :, 60] = bad, bad
    out, _ = run(q, k, v, [3, -FAR, 0])
    assert torch.equal(out[:, :, :50], clean[:, :, :50])
    assert not out[:, :, 60:].isfinite().any()
    lengths = torch.tensor([50], dtype=torch.int32)
    out, _ = run(q, k, v, [5, 0], [lengths])
    torch.testing.assert_close(out, run(q, k[:, :, :50], v[:, :, :50])[0], rtol=0, atol=0)


def test_what_is_seen_and_no_number_is_told(isa):
    q, k, v = (r(1, 1, 20, 8) for _ in range(3))
    v[:, :, 3, 2] = torch.nan
    out, _ = run(q, k, v)
    assert out[..., 2].isnan().all()
    assert out[..., 3].isfinite().all()
    q[:, :, 5] = torch.nan
    assert run(q, k, v)[0][:, :, 5].isnan().all()


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_caps_sinks_and_scales(isa, dtype):
    q, k, v = r(2, 4, 70, 20, dtype=dtype), r(2, 2, 90, 20, dtype=dtype), r(2, 2, 90, 20, dtype=dtype)
    how = {"softcap": 2.0, "scale": 0.7, "sinks": torch.tensor([0.5, -3.0, 4.0, -torch.inf])}
    close(run(q, k, v, **how), expected(q, k, v, **how), FLOATS[dtype])
    causal = torch.ones(70, 90, dtype=torch.bool).tril()
    close(run(q, k, v, [3, -FAR, 0], **how), expected(q, k, v, causal, **how), FLOATS[dtype])
    close(run(q, k, v, scale=-0.3), expected(q, k, v, scale=-0.3), FLOATS[dtype])


def test_a_cap_keeps_small_scores(isa):
    q = r(1, 1, 64, 8) * 1e-3
    v = r(1, 1, 64, 8)
    close(run(q, q, v, softcap=50.0), expected(q, q, v), 1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_biases(isa, kind):
    q, k, v = r(2, 2, 70, 16), r(2, 2, 96, 16), r(2, 2, 96, 16)
    full, row = r(2, 2, 70, 96, dtype=kind), r(1, 2, 1, 96, dtype=kind).expand(2, 2, 70, 96)
    slopes, down, across = torch.tensor([[0.5, 0.03]]), r(2, 2, 70, 8, dtype=kind), r(2, 2, 70, 12, dtype=kind)
    distance = (torch.arange(70)[:, None] + 26 - torch.arange(96)).abs()
    linear = -slopes[..., None, None] * distance
    relative = (down[..., :, None].double() + across[..., None, :].double()).flatten(-2)
    cases = [
        ([0, 0], [full], full),
        ([0, 0], [row], row),
        ([1, 0], [slopes], linear),
        ([2, 0, 1, 12], [down, across], relative),
    ]
    for program, tensors, added in cases:
        close(run(q, k, v, bias=program, added=tensors), expected(q, k, v, added=added), 3e-6)
    both = full.double() + linear.double()
    causal = torch.ones(70, 96, dtype=torch.bool).tril()
    found = run(q, k, v, [3, -FAR, 0], bias=[0, 0, 1, 1], added=[full, slopes], softcap=3.0)
    close(found, expected(q, k, v, causal, added=both, softcap=3.0), 3e-6)


def test_large_scores(isa):
    """The greatest of a row comes late, early, and in between."""
    q, k, v = r(1, 3, 40, 4) * 40, r(1, 3, 300, 4) * torch.linspace(0, 9, 300)[:, None], r(1, 3, 300, 4)
    k[:, 1] = k[:, 1].flip(1)
    close(run(q, k, v), expected(q, k, v), 2e-5)


def test_the_largest_scores_that_there_are(isa):
    q, v = torch.zeros(1, 1, 2, 3), r(1, 1, 5, 3)
    huge = torch.tensor([0.0, 3.4e38, -3.4e38, -torch.inf, 1.0]).expand(1, 1, 2, 5)
    out, lse = run(q, r(1, 1, 5, 3), v, bias=[0, 0], added=[huge])
    torch.testing.assert_close(out, v[:, :, [1, 1]], rtol=0, atol=0)
    assert lse.tolist() == [[[3.3999999521443642e38] * 2]]


# ---- promises --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "queries"), [(1, 500), (3, 300), (8, 100)])
def test_the_number_of_threads_does_not_matter(heads, queries):
    q, k, v = (r(1, heads, queries, 32, dtype=torch.bfloat16) for _ in range(3))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(q, k, v, [3, -FAR, 0]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for one, other in itertools.pairwise(found) for a, b in zip(one, other, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_no_larger_than_those_of_torch(dtype, causal):
    q, k, v = (r(1, 2, 777, 64, dtype=dtype) for _ in range(3))
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    exact, _ = expected(q, k, v, torch.ones(777, 777, dtype=torch.bool).tril() if causal else None)
    mine, _ = run(q, k, v, [3, -FAR, 0] if causal else [])
    errors = [(each.double() - exact).square().mean().sqrt().item() for each in (mine, torchs)]
    assert errors[0] <= 1.05 * errors[1]


def takes(q, k=None, v=None, mask_tensors=(), bias_tensors=(), sinks=None, mask=(), bias=(), dropout_p=0.0):
    k = q if k is None else k
    v = k if v is None else v
    return cpu.takes(
        AttentionCall(q, k, v, mask_tensors, bias_tensors, sinks, None, mask, bias, 1.0, 0.0, dropout_p, False)
    )


def test_what_is_taken():
    q, ids = torch.ones(2, 4, 6, 8), torch.zeros(2, 6, dtype=torch.int32)
    assert takes(q)
    assert takes(q, torch.ones(2, 2, 6, 8), torch.ones(2, 2, 6, 5))
    assert takes(q, mask=[4, 0, 0, 5, 1, 0], mask_tensors=[ids, ids[:, 0]], sinks=torch.ones(4))
    assert takes(
        q, bias=[1, 0, 2, 1, 2, 3], bias_tensors=[torch.ones(1, 4), torch.ones(2, 4, 6, 2), torch.ones(1, 1, 1, 3)]
    )


X, IDS = torch.ones(2, 4, 6, 8), torch.zeros(2, 6, dtype=torch.int32)
REFUSED = {
    "float64": {"q": X.double()},
    "two dtypes": {"q": X, "k": X.bfloat16()},
    "batches": {"q": X, "k": X[:1]},
    "heads": {"q": X, "k": X[:, :3]},
    "heads of values": {"q": X, "v": X[:, :2]},
    "keys and values": {"q": X, "v": X[:, :, :5]},
    "sizes of heads": {"q": X, "k": X[..., :7]},
    "dropout": {"q": X, "dropout_p": 0.1},
    "sinks": {"q": X, "sinks": torch.ones(3)},
    "integers as a bias": {"q": X, "bias": [0, 0], "bias_tensors": [torch.ones(1, 1, 6, 6, dtype=torch.int64)]},
    "a bias's shape": {"q": X, "bias": [0, 0], "bias_tensors": [torch.ones(1, 1, 6, 5)]},
    "slopes": {"q": X, "bias": [1, 0], "bias_tensors": [torch.ones(1, 3)]},
    "few relative rows": {"q": X, "bias": [2, 0, 0, 2], "bias_tensors": [torch.ones(2, 4, 6, 2)]},
    "another width": {"q": X, "bias": [2, 0, 0, 3], "bias_tensors": [torch.ones(2, 4, 6, 2)]},
    "a kind that is none": {"q": X, "bias": [3, 0], "bias_tensors": [X]},
    "a missing tensor": {"q": X, "mask": [6, 0]},
    "half a step": {"q": X, "mask": [3, 0]},
    "wide ids": {"q": X, "mask": [4, 0, 0], "mask_tensors": [IDS.long()]},
    "few ids": {"q": X, "mask": [4, 0, 0], "mask_tensors": [IDS[:, :5]]},
    "lengths": {"q": X, "mask": [5, 0], "mask_tensors": [torch.zeros(3, dtype=torch.int32)]},
    "floats as truths": {"q": X, "mask": [6, 0], "mask_tensors": [torch.ones(1, 1, 6, 6)]},
    "offsets": {"q": X, "mask": [7, 0, 0, 1], "mask_tensors": [IDS[:, :4]]},
}


def test_what_is_not_taken():
    """The kernels trust what they are told of memory."""
    assert [name for name, case in REFUSED.items() if takes(**case)] == []


@pytest.mark.parametrize("kernel", ["tiles", "decode"])
def test_a_forced_kernel_refuses_what_it_does_not_compute(kernel):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(KernelError, match=f"kernel '{kernel}' does not take .*dropout_p=0.5"):
        opkit.attention(q, q, q, dropout_p=0.5, kernel=kernel)


def test_every_float16_comes_through(isa):
    """With one key a result is its value."""
    v = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(1, 256, 1, 256)
    q = torch.zeros(1, 256, 1, 8, dtype=torch.float16)
    out, _ = run(q, q, v)
    torch.testing.assert_close(out, v, rtol=0, atol=0, equal_nan=True)
