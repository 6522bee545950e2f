"""Paged attention on GPUs: against float64, in Triton's interpreter and on a GPU; code for four architectures."""

import pytest
import torch

pytest.importorskip("triton")
import decoding_kernels
from paged_calls import UNLIMITED, Cache, expected
from torch.utils import _pytree as pytree

import opkit
from opkit.attn.calls import PagedCall
from opkit.attn.functions.trace import trace
from opkit.attn.gpu.decode import paged
from opkit.attn.gpu.decode import plan as decode_plan
from opkit.attn.masks import program
from opkit.errors import KernelError
from opkit.kernels.triton import binaries, compiling
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KV = (*FLOATS, torch.int8, torch.float8_e4m3fn)
ROUNDING = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DEVICES = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def run(request):
    if request.param == "interpreter":
        interpreted = request.getfixturevalue("interpreter")
        return lambda *call: interpreted("opkit::paged_attention", *call, kernel="split")
    return on_gpu


def on_gpu(*call):
    arguments = [x.cuda() if isinstance(x, torch.Tensor) else x for x in call]
    with opkit.use_kernel(decoding_kernels.paged_attention, "split"):
        return tuple(x.cpu() for x in decoding_kernels.paged_attention(*arguments))


def check(run, cache, q, starts, **options):
    out, lse = run(*cache.call(q, starts, **options))
    exact, exact_lse = expected(cache, q, starts, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    largest = max(
        [1.0, *(x.abs().max().item() for b in range(len(cache.lengths)) for x in cache.dense(b)[1:] if len(x))]
    )
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=ROUNDING[q.dtype] * largest)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2.0**-17, atol=2.0**-15)
    return out, lse


RAGGED = ([130, 5, 0, 77, 300], [0, 1, 3, 4, 4, 9])


PAIRS = [  # the most important come first
    (torch.float32, torch.float32), (torch.bfloat16, torch.int8), (torch.float16, torch.float8_e4m3fn),
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("dtype", "kv"), PAIRS, ids=str)
def test_ragged_queries(run, dtype, kv):
    cache = Cache(RAGGED[0], dtype=kv)
    check(run, cache, cache.queries(9, 6, dtype), RAGGED[1])


@pytest.mark.emulated
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "options",
    [
        {"lower": -49, "softcap": 4.0, "sinks": torch.arange(4.0) - 2},
        {"lower": -10, "upper": -12},
        {"scale": -0.5, "upper": UNLIMITED},
        {"lower": -3, "upper": 2},
    ],
    ids=str,
)
def test_bands_caps_and_sinks(run, options):
    cache = Cache(RAGGED[0], page_size=5, d=20, dv=40)
    check(run, cache, cache.queries(9, 4), RAGGED[1], **options)


def test_values_that_are_columns_of_keys(interpreter):
    """As in multi-head latent attention: the kernel reads them once."""
    cache = Cache([100, 40], kv_heads=1, d=96)
    cache.k_exact, cache.v_exact = cache.k.double(), cache.k.double()[..., :64]
    cache.v = cache.k[..., :64]
    q, starts = cache.queries(3, 16), [0, 2, 3]
    arguments = (q, cache.k, 64, cache.table, cache.lengths, torch.tensor(starts))
    out = interpreter("decoding_tests::latent_pages", *arguments, kernel="interpreted")
    torch.testing.assert_close(out.double(), expected(cache, q, starts)[0], rtol=0, atol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("page_size", [7, 200, 1, 64])
def test_pages_of_any_size(run, page_size):
    cache = Cache([130, 64, 1], page_size=page_size, kv_heads=1)
    check(run, cache, cache.queries(3, 20), [0, 1, 2, 3])


def test_all_queries_may_be_of_one_sequence(run):
    """As many queries as sequences does not mean one each."""
    cache = Cache([40, 50, 60, 3])
    check(run, cache, cache.queries(4, 4), [0, 0, 4, 4, 4])


BY_POSITION, BY_SEQUENCE = torch.randn(9, 400), torch.tensor([3, 1, 2, 5, 4])
MODS = {
    "sparse": (lambda b, h, i, j: (j % BY_SEQUENCE[b] == 0) | (i - j < 4), None),
    "by head": (lambda b, h, i, j: (j + h) % 3 > 0, None),
    "score": (None, lambda s, b, h, i, j: torch.tanh(s) * 5 - (i - j) / 50 + BY_POSITION[h, j]),
    "both": (
        lambda b, h, i, j: i // 16 >= j // 16,
        lambda s, b, h, i, j: s * BY_SEQUENCE[b] + BY_POSITION[0, i] / (j + 1),
    ),
}


@pytest.mark.parametrize("pair", [(torch.float32, torch.float32), (torch.float16, torch.int8)], ids=str)
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("device", DEVICES)
def test_functions_of_positions(request, name, pair, device):
    cache, (mask, score) = Cache(RAGGED[0], dtype=pair[1]), MODS[name]
    q, starts = cache.queries(9, 6, pair[0]), RAGGED[1]
    words, tensors = [[], []], [[], []]
    for k, (function, kind, opcode) in enumerate(
        ((mask, "mask", program.FUNCTION), (score, "score", program.BIAS_FUNCTION))
    ):
        if function is not None:
            traced = trace(function, kind, torch.float32, torch.device("cpu"))
            words[k] = [opcode, *traced.function(traced.root, tensors[k]).words()]
    call = (*cache.call(q, starts, softcap=0.0)[:-4], *tensors, *words)
    if device == "interpreter":
        found = request.getfixturevalue("interpreter")("opkit::paged_attention", *call, kernel="split")
    else:
        call = pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), call)
        found = [x.cpu() for x in decoding_kernels.paged_attention(*call)]
    exact, exact_lse = expected(cache, q, starts, mask_mod=mask, score_mod=score)
    largest = max(1.0, exact.abs().max().item())
    torch.testing.assert_close(found[0].double(), exact, rtol=0, atol=4 * ROUNDING[q.dtype] * largest)
    torch.testing.assert_close(found[1].double(), exact_lse, rtol=2.0**-16, atol=2.0**-14)


def test_functions_whose_tensors_do_not_reach_all_positions_are_refused():
    cache = Cache([130, 900])
    traced = trace(lambda b, h, i, j: BY_POSITION[h, j] > 0, "mask", torch.float32, torch.device("cpu"))
    tensors = []
    words = [program.FUNCTION, *traced.function(traced.root, tensors).words()]
    call = PagedCall(*cache.call(cache.queries(2, 6), [0, 1, 2]))
    assert paged.takes_pages(call)
    assert not paged.takes_pages(call._replace(mask_tensors=tensors, mask=words))


def test_more_queries_than_keys_see_nothing(run):
    cache = Cache([2])
    out, lse = check(run, cache, cache.queries(5, 2), [0, 5])
    assert not out[:3].any()
    assert (lse[:3] == -torch.inf).all()


@pytest.mark.emulated
def test_a_visible_nan_is_seen_by_the_queries_that_see_it(run):
    for dtype in (torch.float32, torch.float8_e4m3fn):
        cache = Cache([100, 60], dtype=dtype)
        page, place = int(cache.table[0, 98 // 16]), 98 % 16
        cache.v.view(torch.uint8 if dtype.itemsize == 1 else dtype)[page, place, 1, 3] = (
            0x7F if dtype.itemsize == 1 else torch.nan
        )
        out, _ = run(*cache.call(cache.queries(4, 4), [0, 3, 4]))
        assert out[1:3, 2:, 3].isnan().all()
        out[1:3, 2:, 3] = 0
        assert out.isfinite().all()


@pytest.mark.emulated
def test_pages_of_any_strides(run):
    cache = Cache([40, 50], dtype=torch.float16)
    q = cache.queries(2, 4, torch.float16)
    plain, _ = run(*cache.call(q, [0, 1, 2]))
    cache.k = cache.k.transpose(1, 2).contiguous().transpose(1, 2)
    cache.v = torch.stack([cache.v, cache.v], 1)[:, 1]
    assert torch.equal(run(*cache.call(q, [0, 1, 2]))[0], plain)
    cache.table, cache.lengths = cache.table.long(), cache.lengths.int()
    assert torch.equal(run(*cache.call(q, [0, 1, 2]))[0], plain)


def test_what_is_out_of_range_is_read_nowhere(run):
    """The GPU cannot refuse: what is out of range is taken as the nearest that is not."""
    cache = Cache([40, 50])
    q = cache.queries(2, 4)
    cache.table[1, 1], cache.lengths[0] = 10**6, 10**6
    cache.k.nan_to_num_(0), cache.v.nan_to_num_(0)
    out, _ = run(*cache.call(q, [0, 1, 2]))
    assert out.isfinite().all()


def test_no_queries_and_no_keys(run):
    cache = Cache([0, 0])
    assert run(*cache.call(cache.queries(0, 4), [0, 0, 0]))[0].shape == (0, 4, 32)
    check(run, cache, cache.queries(2, 4), [0, 1, 2], sinks=torch.arange(4.0))


@pytest.mark.usefixtures("batch_invariance")
def test_batch_invariance_is_refused():
    cache = Cache([40])
    with pytest.raises(KernelError, match="OPKIT_BATCH_INVARIANT is set"):
        paged.paged(*cache.call(cache.queries(1, 4), [0, 1]))


def test_what_is_taken():
    cache = Cache([40])
    q = cache.queries(1, 4)
    call = PagedCall(*cache.call(q, [0, 1]))
    assert paged.takes_pages(call)
    others = (
        {"q": q.double()},
        {"v_pages": cache.v.half()},
        {"q": q[:, :3]},
        {"k_pages": cache.k[:0], "v_pages": cache.v[:0]},
    )
    for other in others:
        assert not paged.takes_pages(call._replace(**other))
    with pytest.raises(KernelError, match="does not take q, k_pages, v_pages"):
        paged.paged(*cache.call(q.double(), [0, 1]))


# ---- appending -------------------------------------------------------------------------------------------------------

STORED = [  # the most important come first
    (torch.bfloat16, None), (torch.int8, torch.float16), (torch.float8_e4m3fn, torch.float32), (torch.float32, None),
    (torch.int8, torch.float32), (torch.float8_e4m3fn, None),
]  # fmt: skip


@pytest.fixture(params=DEVICES)
def append(request):
    """The kernel as a function of the operator's arguments; what it writes to is theirs."""
    if request.param == "interpreter":
        interpreted = request.getfixturevalue("interpreter")
        return lambda *call: interpreted("opkit::append_kv", *call, kernel="split")
    return append_on_gpu


def append_on_gpu(*call):
    arguments = [x.cuda() if isinstance(x, torch.Tensor) else x for x in call]
    with opkit.use_kernel(decoding_kernels.append_kv, "split"):
        decoding_kernels.append_kv(*arguments)
    for mine, there in zip(call, arguments, strict=True):
        if isinstance(mine, torch.Tensor):
            mine.copy_(there)


def pages_of(dtype, scale, sizes=(20, 33), count=12):
    pages = [torch.zeros(count, 5, 2, d).to(dtype) for d in sizes]
    return pages, [None if scale is None else torch.full((count, 5, 2), 7.0, dtype=scale) for _ in sizes]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("dtype", "scale"), STORED, ids=str)
def test_what_is_appended_is_what_the_reference_appends(append, dtype, scale):
    for given in FLOATS:
        k, v = (torch.randn(9, 2, 20) * 7).to(given), (torch.randn(9, 2, 33) * torch.rand(9, 2, 1) * 50).to(given)
        k[0, 0], v[1, 0, :3] = 0, torch.tensor([1e-3, -2e-2, 1.0625])
        if dtype == torch.bfloat16:  # to which the interpreter does not round but cut
            k, v = k.to(dtype).to(given), v.to(dtype).to(given)
        table = torch.randperm(12).reshape(4, 3)
        before, starts = torch.tensor([3, 0, 8, 1]), torch.tensor([0, 2, 2, 6, 9])
        results = []
        for run in (append, decoding_kernels.append_kv.reference):
            pages, scales = pages_of(dtype, scale)
            run(k, v, *pages, table, before, starts, *scales)
            results.append([x.float() for x in (*pages, *scales) if x is not None])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_tokens_without_a_page_are_written_nowhere(append):
    pages, scales = pages_of(torch.float32, None)
    x = torch.ones(3, 2, 20), torch.ones(3, 2, 33)
    table = torch.tensor([[0, 1], [99, -1], [2, 3]])
    append(*x, *pages, table, torch.tensor([10, 0, 9]), torch.tensor([0, 1, 2, 3]), *scales)
    for written in pages:
        assert written.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [3 * 5 + 4]


# ---- code for GPUs that are not here ---------------------------------------------------------------------------------

GPUS = {
    "sm_80": decode_plan.Device(108, 166912, False, "tf32x3"),
    "sm_90": decode_plan.Device(132, 232448, True, "tf32x3"),
    "sm_100": decode_plan.Device(148, 232448, True, "tf32x3"),
    "gfx942": decode_plan.Device(304, 65536, False, "ieee"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_compiles_without_spills(kv, target, monkeypatch):
    monkeypatch.setattr(paged, "device_of", lambda index: GPUS[target])
    count = 4 if kv.itemsize > 1 else 1  # what converts many queries' pages takes long to compile
    cache = Cache([2048] * count, kv_heads=8, d=128, dtype=kv)
    call = cache.call(cache.queries(count, 8 * 4, torch.bfloat16), list(range(count + 1)))
    with recording() as found:
        paged.paged(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in call))
    for values in found:
        made = binaries.resources_of(compiling.build(request_for(values, None, target)))
        assert made.spills == 0, (values.bound.name, made)
        assert made.shared <= GPUS[target].shared


# ---- on a GPU alone --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kv", KV, ids=str)
def test_long_sequences_on_a_gpu(kv):
    cache = Cache([4000, 1, 777, 2049], kv_heads=2, d=128, dtype=kv)
    q = cache.queries(7, 16, torch.bfloat16)
    check(on_gpu, cache, q, [0, 1, 2, 3, 7])
    check(on_gpu, cache, q[:4], [0, 1, 2, 3, 4], lower=-1000)


@pytest.mark.gpu
def test_a_cuda_graph_serves_other_lengths():
    cache = Cache([4000, 800], kv_heads=8, d=128, dtype=torch.bfloat16)
    cache.k.nan_to_num_(0), cache.v.nan_to_num_(0)
    call = [
        x.cuda() if isinstance(x, torch.Tensor) else x
        for x in cache.call(cache.queries(2, 32, torch.bfloat16), [0, 1, 2])
    ]
    op = decoding_kernels.paged_attention
    op(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = op(*call)
    for lengths in ([4000, 800], [1, 799], [3000, 16]):
        call[4].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, op(*call)[0])
