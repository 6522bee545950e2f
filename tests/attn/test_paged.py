"""Paged attention, and appending to pages: every instruction set, against float64."""

import itertools

import pytest
import torch

import opkit
from opkit.attn.paged.api import append_kv_operator, paged_attention_operator
from opkit.errors import ArgumentError, ArgumentTypeError, DtypeError, KernelError, ShapeError
from opkit.testing import tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KV = (*FLOATS, torch.int8, torch.float8_e4m3fn)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


class Cache:
    """Pages in a random order, of which those that are not used, and the ends of last pages, hold NaN."""

    def __init__(self, lengths, page_size=16, kv_heads=2, d=32, dv=None, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // page_size) for length in lengths]
        self.lengths, self.page_size = torch.tensor(lengths), page_size
        order = torch.randperm(sum(counts) + 3, generator=self.generator).int()
        self.table = torch.full((len(lengths), max([1, *counts]) + 1), -7, dtype=torch.int32)
        self.k, self.k_scale, self.k_dense = self._pages(len(order), kv_heads, d, dtype)
        self.v, self.v_scale, self.v_dense = self._pages(len(order), kv_heads, d if dv is None else dv, dtype)
        used = torch.zeros(len(order), page_size, dtype=torch.bool)
        for b, count in enumerate(counts):
            self.table[b, :count], order = order[:count], order[count:]
            used[self.table[b, :count].long()] = True
            if lengths[b] % page_size:
                used[self.table[b, count - 1].long(), lengths[b] % page_size :] = False
        for x in (self.k, self.v, self.k_scale, self.v_scale):
            if x is not None and x.dtype != torch.int8:
                x.view(torch.uint8 if x.itemsize == 1 else x.dtype)[~used] = 0x7F if x.itemsize == 1 else torch.nan

    def _pages(self, count, kv_heads, d, dtype):
        shape = (count, self.page_size, kv_heads, d)
        pages = torch.randn(shape, generator=self.generator)
        if dtype.itemsize > 1:
            return pages.to(dtype), None, pages.to(dtype).double()
        scale = torch.rand(shape[:3], generator=self.generator) / 20 + 0.01
        pages = (pages * 30).round().clamp(-127, 127).to(dtype)
        return pages, scale, pages.double() * scale.double()[..., None]

    def dense(self, b):
        """``(length, kv_heads, d)`` of a sequence's keys and values."""
        pages = self.table[b, : -(-int(self.lengths[b]) // self.page_size)].long()
        return [x[pages].flatten(0, 1)[: int(self.lengths[b])] for x in (self.k_dense, self.v_dense)]

    def queries(self, count, heads, dtype):
        return torch.randn(count, heads, self.k.shape[-1], generator=self.generator).to(dtype)

    def attend(self, q, **options):
        return opkit.paged_attention(
            q,
            self.k,
            self.v,
            self.table,
            self.lengths,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            return_lse=True,
            **options,
        )


def expected(cache, q, starts, left=None, right=0, scale=None, softcap=0.0, sinks=None, mask=None, bias=None):
    """A sequence and a query at a time, of the keys that the query sees."""
    out = torch.zeros(*q.shape[:2], cache.v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        k, v = cache.dense(b)
        for t in range(first, last):
            position = len(k) - (last - t)
            begin = 0 if left is None else max(0, position - left)
            end = max(begin, len(k) if right is None else position + right + 1)
            at = b, torch.arange(q.shape[1])[:, None], position, torch.arange(begin, min(end, len(k)))
            out[t], lse[t] = attend(q[t].double(), k[begin:end], v[begin:end], scale, softcap, sinks, mask, bias, at)
    return out, lse


def attend(q, k, v, scale, softcap, sinks, mask, bias, at):
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("hd,khd->hk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    logits = logits if bias is None else bias(logits, *at)
    logits = logits if mask is None else logits.masked_fill(~mask(*at), -torch.inf)
    sink = torch.full((q.shape[0],), -torch.inf) if sinks is None else sinks
    lse = torch.cat([logits, sink.double()[:, None]], 1).logsumexp(1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[:, None])
    return torch.einsum("hk,khd->hd", weights, v), lse


def bounds(cache, q, scale=None):
    """Of results: their rounding, that of weights (bf16 where all is), of int8's queries, a part in 2^17. Of log-sum-exps."""
    logits = 2.0**-17
    if cache.k.dtype == torch.int8:  # queries are rounded to at least 29,000 steps
        steps = q.double().abs().amax() / 2 / 29000
        logits += float(
            steps * cache.k_dense.abs().sum(-1).max() * (q.shape[-1] ** -0.5 if scale is None else abs(scale))
        )
    largest = max(1.0, cache.v_dense.abs().max().item())
    paired = q.dtype == cache.k.dtype == torch.bfloat16
    return (ROUNDING[q.dtype] + paired * 2.0**-9 + 2 * logits) * largest, logits


def check(cache, q, starts, options, **meaning):
    out, lse = cache.attend(q, cu_seqlens_q=torch.tensor(starts), **options)
    exact, exact_lse = expected(cache, q, starts, **meaning)
    bound, lse_bound = bounds(cache, q, meaning.get("scale"))
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2.0**-19, atol=lse_bound)


RAGGED = ([90, 0, 33, 1, 300], [0, 4, 4, 9, 10, 11])


@pytest.mark.parametrize("kv_dtype", KV, ids=str)
def test_ragged_batches_of_all_dtypes(subtests, isa, kv_dtype):
    for dtype in FLOATS:
        cache = Cache(RAGGED[0], dtype=kv_dtype)
        with subtests.test(str(dtype)):
            check(cache, cache.queries(11, 8, dtype), RAGGED[1], {})


@pytest.mark.sweep
@pytest.mark.parametrize("kv_dtype", KV, ids=str)
@pytest.mark.parametrize(("d", "dv"), [(1, 1), (7, 96), (96, 7), (128, 128), (576, 512)])
def test_sizes_of_heads(isa, kv_dtype, d, dv):
    cache = Cache([150, 17], kv_heads=1, d=d, dv=dv, dtype=kv_dtype)
    check(cache, cache.queries(3, 5, torch.bfloat16), [0, 2, 3], {})


@pytest.mark.sweep
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256, 1000])
def test_sizes_of_pages(isa, kv_dtype, page_size):
    cache = Cache([700, 1, page_size], page_size=page_size, dtype=kv_dtype)
    check(cache, cache.queries(4, 4, torch.bfloat16), [0, 2, 3, 4], {})


OPTIONS = [
    ({"window": 20}, {"left": 19}),
    ({"window": 20, "causal": False}, {"left": 19}),
    ({"window": (100, 0)}, {"left": 100}),
    ({"window": (10, 2), "causal": False}, {"left": 10, "right": 2}),
    ({"causal": False}, {"right": None}),
    ({"softcap": 2.0}, {"softcap": 2.0}),
    ({"scale": 0.5, "sinks": torch.arange(8.0) - 4}, {"scale": 0.5, "sinks": torch.arange(8.0) - 4}),
]


@pytest.mark.sweep
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("options", "meaning"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options(isa, kv_dtype, options, meaning):
    cache = Cache(RAGGED[0], dtype=kv_dtype)
    check(cache, cache.queries(11, 8, torch.float32), RAGGED[1], options, **meaning)


PROMPTS = ([200, 140, 0, 33, 135, 100], [0, 150, 151, 151, 155, 290, 420])  # the last has more queries than keys


@pytest.mark.parametrize("kv_dtype", KV, ids=str)
def test_many_queries_of_some_sequences(subtests, kv_dtype):
    for dtype in FLOATS:
        cache = Cache(PROMPTS[0], dtype=kv_dtype)
        with subtests.test(str(dtype)):
            check(cache, cache.queries(420, 4, dtype), PROMPTS[1], {})


@pytest.mark.parametrize(("options", "meaning"), OPTIONS, ids=[str(options) for options, _ in OPTIONS])
def test_options_of_many_queries(options, meaning):
    cache = Cache(PROMPTS[0], page_size=5)
    check(cache, cache.queries(420, 8, torch.float32), PROMPTS[1], options, **meaning)


def test_many_queries_of_what_is_out_of_range_are_refused():
    cache = Cache([40, 150])
    q, starts = cache.queries(151, 4, torch.float32), torch.tensor([0, 1, 151])
    cache.table[1, 3] = len(cache.k)
    with pytest.raises(ValueError, match="must be from 0 to"):
        cache.attend(q, cu_seqlens_q=starts)
    cache.lengths[1] = 10**6
    with pytest.raises(ValueError, match="a length is 1000000"):
        cache.attend(q, cu_seqlens_q=starts)


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_of_a_number_ends_at_the_own_place(causal, kernel):
    pages, q = torch.arange(6.0).reshape(1, 6, 1, 1), torch.zeros(1, 3, 1, 1)
    table, lengths = torch.tensor([[0]]), torch.tensor([6])
    out = opkit.paged_attention(q, pages, pages, table, lengths, causal=causal, window=2, kernel=kernel)
    torch.testing.assert_close(out.flatten(), torch.tensor([2.5, 3.5, 4.5]))


@pytest.mark.parametrize("kv_dtype", KV, ids=str)
def test_the_reference_computes_the_same(kv_dtype):
    cache = Cache(RAGGED[0], dtype=kv_dtype)
    options = {"kernel": "reference", "window": 50, "softcap": 4.0, "sinks": torch.arange(8.0) - 4}
    check(
        cache,
        cache.queries(11, 8, torch.float32),
        RAGGED[1],
        options,
        left=49,
        softcap=4.0,
        sinks=torch.arange(8.0) - 4,
    )


SLOPES = torch.linspace(0.01, 0.3, 8)
FUNCTIONS = [
    {"mask": lambda b, h, i, j: (i - j) % 3 != 1},
    {
        "mask": lambda b, h, i, j: ((i - j) % 3 != h % 3) | (j < 5 + b),
        "bias": lambda s, b, h, i, j: s - SLOPES[h] * (i - j),
    },
    {"mask": lambda b, h, i, j: (i // 40 == j // 40) & (b < 4)},
    {"mask": lambda b, h, i, j: (i - j < 50) & ((j - 3).abs() < 60) & (i + 2 > j)},
    {"mask": lambda b, h, i, j: ((i - j).abs() <= 20) & (j >= i - 9)},
    {"bias": lambda s, b, h, i, j: s * torch.sigmoid(s) + (i % 7) * 0.1},
]


@pytest.mark.parametrize("kernel", ["decode", "reference"])
@pytest.mark.parametrize("kv_dtype", KV, ids=str)
def test_functions_of_positions(subtests, kernel, kv_dtype):
    for functions, dtype in itertools.product(FUNCTIONS, FLOATS):
        cache = Cache(RAGGED[0], dtype=kv_dtype)
        with subtests.test(f"{dtype}"):
            check(cache, cache.queries(11, 8, dtype), RAGGED[1], {"kernel": kernel, **functions}, **functions)
    cache, options = Cache(RAGGED[0], dtype=kv_dtype), {"softcap": 4.0, "sinks": torch.arange(8.0) - 4, **FUNCTIONS[1]}
    meaning = {"left": 49, "right": 3, **options}
    own = {"window": (49, 3), "causal": False, "kernel": kernel, **options}
    check(cache, cache.queries(11, 8, torch.float32), RAGGED[1], own, **meaning)


@pytest.mark.parametrize(
    "backend",
    ["opkit", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("eager", "aot_eager", "inductor"))],
)
def test_functions_are_compiled_once(backend):
    """One graph with no breaks serves other lengths, captured numbers and captured tensors."""
    from torch._dynamo.testing import CompileCounterWithBackend

    documents = torch.arange(48) // 11

    def step(q, new, k, v, table, before, slopes, width, scale):
        def mask(b, h, i, j):
            return (i - j < width) & ((documents[i] == documents[j]) | ((i + j + b) % 3 == 0))

        opkit.append_kv(new, new, k, v, table, before)
        score = lambda s, b, h, i, j: s * scale + slopes[h] * (i - j)  # noqa: E731
        return opkit.paged_attention(q * 2, k, v, table, before + 1, mask=mask, bias=score).sin()

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    k, v = (torch.randn(20, 8, 2, 16) for _ in range(2))
    table, counts = torch.randperm(20)[:18].reshape(3, 6), []
    for lengths, width, scale in (([47, 20, 3], 20, 0.5), ([40, 21, 8], 9, 0.7), ([30, 20, 9], 30, -0.5)):
        inputs = torch.randn(3, 4, 16), torch.randn(3, 2, 16), k, v, table, torch.tensor(lengths), torch.rand(4)
        torch.testing.assert_close(compiled(*inputs, width, scale), step(*inputs, width, scale), rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
        documents += torch.arange(48) % 3
    assert counts == [counts[0]] * 3


def test_functions_of_positions_that_do_not_fit_are_refused():
    cache = Cache([2, 40])
    q = cache.queries(2, 4, torch.float32)
    few = torch.zeros(40)
    with pytest.raises(ShapeError, match="40"):
        cache.attend(q, bias=lambda s, b, h, i, j: s + few[j])
    with pytest.raises(ArgumentTypeError, match="mask is Causal, expected a function"):
        cache.attend(q, mask=opkit.masks.Causal())
    with pytest.raises(ValueError, match="the number of queries of sequence 0"):
        cache.attend(cache.queries(6, 4, torch.float32).unflatten(0, (2, 3)), mask=FUNCTIONS[0]["mask"])
    with pytest.raises(KernelError), opkit.batch_invariant():
        cache.attend(q, mask=FUNCTIONS[0]["mask"])


def test_shapes_of_queries():
    cache = Cache([40, 50, 60])
    q = cache.queries(6, 4, torch.float32)
    ragged, lse = cache.attend(q, cu_seqlens_q=torch.tensor([0, 2, 4, 6]))
    four, four_lse = cache.attend(q.unflatten(0, (3, 2)))
    assert torch.equal(four.flatten(0, 1), ragged)
    assert torch.equal(four_lse.flatten(0, 1), lse)
    last, _ = cache.attend(q[1::2])
    torch.testing.assert_close(last, ragged[1::2], rtol=0, atol=1e-6)  # other numbers of rows add up in another order


def test_more_queries_than_keys_see_nothing():
    cache = Cache([2])
    out, lse = cache.attend(cache.queries(5, 2, torch.float32)[None])
    assert not out[0, :3].any()
    assert (lse[0, :3] == -torch.inf).all()
    assert out[0, 3:].all()


def test_threads_change_no_bit(isa):
    cache = Cache([3000, 5, 0, 700], kv_heads=3, dtype=torch.bfloat16)
    q = cache.queries(8, 6, torch.bfloat16).unflatten(0, (4, 2))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cache.attend(q))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


def test_pages_of_any_strides():
    cache = Cache([40, 50], dtype=torch.bfloat16)
    q = cache.queries(2, 4, torch.bfloat16)
    plain, _ = cache.attend(q)
    cache.k = cache.k.transpose(1, 2).contiguous().transpose(1, 2)  # (pages, heads, size, d), as FlashInfer's HND
    cache.v = torch.stack([cache.v, cache.v], 1)[:, 1]
    assert torch.equal(cache.attend(q)[0], plain)


def test_scales_that_are_numbers():
    cache = Cache([40, 50], dtype=torch.float8_e4m3fn)
    q = cache.queries(2, 4, torch.float32)
    cache.k_scale, cache.v_scale = torch.full_like(cache.k_scale, 0.05), torch.full_like(cache.v_scale, 0.25)
    full, _ = cache.attend(q)
    cache.k_scale, cache.v_scale = 0.05, 0.25
    assert torch.equal(cache.attend(q)[0], full)


def test_what_does_not_fit_is_refused():
    cache = Cache([40, 50])
    q = cache.queries(2, 4, torch.float32)
    cases = [
        (ShapeError, "no multiple", (q[:, :3],), {}),
        (ShapeError, "batch size 1", (q[:1],), {}),
        (ShapeError, r"\(batch, heads, d\)", (q[0],), {}),
        (ArgumentError, "window", (q,), {"window": 0}),
        (ArgumentError, "softcap", (q,), {"softcap": -1.0}),
    ]
    for error, text, arguments, options in cases:
        with pytest.raises(error, match=text):
            cache.attend(*arguments, **options)
    with pytest.raises(DtypeError, match="k_scale is None"):
        opkit.paged_attention(q, cache.k.to(torch.int8), cache.v.to(torch.int8), cache.table, cache.lengths)


def test_pages_and_lengths_out_of_range_are_refused():
    cache = Cache([40, 50])
    q = cache.queries(2, 4, torch.float32)
    cache.table[1, 3] = len(cache.k)
    with pytest.raises(ValueError, match="a page of sequence 1"):
        cache.attend(q)
    cache.table[1, 3] = -1
    with pytest.raises(ValueError, match="a page of sequence 1 is -1"):
        cache.attend(q)
    cache.lengths[0] = 10**6
    with pytest.raises(ValueError, match="the length of sequence 0 is 1000000"):
        cache.attend(q)


def test_the_cpu_kernel_is_chosen_where_it_applies():
    cache = Cache([40])
    q = cache.queries(1, 4, torch.float32)
    arguments = (cache.table, cache.lengths, torch.tensor([0, 1]), 0, 0, 1.0, 0.0, None, None, None, [], [], [], [])
    op = paged_attention_operator()
    assert op.select(q, cache.k, cache.v, *arguments).kernel == "decode"
    assert op.select(q.double(), cache.k.double(), cache.v.double(), *arguments).kernel == "reference"
    assert op.select(cache.queries(128, 4, torch.float32), cache.k, cache.v, *arguments).kernel == "tiles"


# --- appending


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_appended_is_attended_to(dtype):
    table = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    k, v = torch.zeros(12, 16, 2, 32, dtype=dtype), torch.zeros(12, 16, 2, 32, dtype=dtype)
    new_k, new_v = (torch.randn(59 + 6, 2, 32).to(dtype) for _ in range(2))
    first, second = torch.tensor([0, 40, 43, 59]), torch.tensor([0, 2, 2, 6])
    zero, before = torch.zeros(3, dtype=torch.int64), torch.tensor([40, 3, 16])
    opkit.append_kv(new_k[:59], new_v[:59], k, v, table, zero, cu_seqlens=first)
    opkit.append_kv(new_k[59:], new_v[59:], k, v, table, before, cu_seqlens=second)
    for b, (old, new) in enumerate(
        ((slice(0, 40), slice(59, 61)), (slice(40, 43), slice(61, 61)), (slice(43, 59), slice(61, 65)))
    ):
        for pages, given in ((k, new_k), (v, new_v)):
            whole = torch.cat([given[old], given[new]])
            dense = pages[table[b].long()].flatten(0, 1)
            assert torch.equal(dense[: len(whole)], whole)
            assert not dense[len(whole) :].any()


@pytest.mark.parametrize(("dtype", "steps"), [(torch.int8, 2.0**-7.9), (torch.float8_e4m3fn, 2.0**-4)], ids=str)
def test_quantised_tokens_are_near(dtype, steps):
    k, v = torch.randn(2, 3, 2, 32) * 7, torch.randn(2, 3, 2, 16)
    k[0, 0, 0] = 0
    pages = [torch.zeros(4, 2, 2, d).to(dtype) for d in (32, 16)]
    scales = [torch.full((4, 2, 2), torch.nan) for _ in range(2)]
    table = torch.tensor([[2, 0], [3, 1]])
    opkit.append_kv(k, v, *pages, table, torch.zeros(2, dtype=torch.int32), k_scale=scales[0], v_scale=scales[1])
    for given, stored, scale in zip((k, v), pages, scales, strict=True):
        dense = (stored.float() * scale[..., None])[table].flatten(1, 2)[:, :3]
        assert ((dense - given).abs() <= given.abs().amax(-1, keepdim=True) * steps).all()
        assert scale[table].flatten(1, 2)[:, 3].isnan().all()


def test_appending_out_of_the_table_is_refused():
    x, pages = torch.zeros(1, 1, 1), torch.zeros(1, 2, 1, 1)
    with pytest.raises(IndexError):
        opkit.append_kv(x, x, pages, pages.clone(), torch.tensor([[0]]), torch.tensor([2]))
    with pytest.raises(DtypeError, match="int8"):
        opkit.append_kv(x, x, pages.to(torch.int8), pages.to(torch.int8), torch.tensor([[0]]), torch.tensor([0]))


# --- the contract

PAGED = (
    tensor("t hkv*2 d", FLOATS[:2]),
    tensor("p s hkv d"),
    tensor("p s hkv dv"),
    tensor("1 w", torch.int64, low=0, high="p-1"),
)
"""One sequence of all pages' keys: sizes that depend on each other are given by the wrapper below."""


def _all_keys(q, k_pages, v_pages, page_table):
    lengths = torch.full((1,), page_table.shape[1] * k_pages.shape[1], dtype=torch.int64)
    starts = torch.tensor([0, q.shape[0]])
    return paged_attention_operator()(
        q,
        k_pages,
        v_pages.to(k_pages.dtype),
        page_table,
        lengths,
        starts,
        -(2**62),
        0,
        0.5,
        0.0,
        None,
        None,
        None,
        [],
        [],
        [],
        [],
    )


def _by_reference(q, k_pages, v_pages, page_table):
    with opkit.use_kernel(paged_attention_operator(), "reference"):
        return _all_keys(q, k_pages, v_pages, page_table)


@pytest.mark.parametrize("examples", [4, pytest.param(25, marks=pytest.mark.exhaustive)])
def test_paged_attention_keeps_its_contract(examples):
    properties = ["memory.crash", "numbers.reference", "layout", "behaviour.deterministic", "behaviour.threads"]
    report = opkit.check(_all_keys, args=PAGED, reference=_by_reference, properties=properties, max_examples=examples)
    report.raise_for_failures()


def test_torch_checks_the_operators():
    cache = Cache([40, 3])
    q = cache.queries(2, 4, torch.float32)
    arguments = (
        q,
        cache.k,
        cache.v,
        cache.table.abs(),
        cache.lengths,
        torch.tensor([0, 1, 2]),
        -100,
        0,
        1.0,
        0.0,
        None,
        None,
        None,
        [],
        [],
        [],
        [],
    )
    torch.library.opcheck(
        paged_attention_operator()._opoverload, arguments, test_utils=("test_schema", "test_faketensor")
    )
    k = torch.randn(2, 2, 32)
    pages = [torch.zeros(4, 2, 2, 32) for _ in range(2)]
    arguments = (
        k,
        k,
        *pages,
        torch.tensor([[0, 1], [3, 2]]),
        torch.tensor([1, 0]),
        torch.tensor([0, 1, 2]),
        None,
        None,
    )
    torch.library.opcheck(append_kv_operator()._opoverload, arguments, test_utils=("test_schema", "test_faketensor"))
