"""Decoding on GPUs, contiguous keys: against float64, in Triton's interpreter and on a GPU; code for four architectures."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
import decoding_kernels
from attention_oracle import naive

import opkit
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.decode import plan as decode_plan
from opkit.errors import KernelError
from opkit.kernels.triton import binaries, compiling
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of weights and results
UNLIMITED = 2**62
BAND = 3
DEVICES = [
    "interpreter",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def run(request):
    """The kernel as a function of the operator's arguments."""
    if request.param == "interpreter":
        interpreted = request.getfixturevalue("interpreter")
        return lambda *call, op="opkit::attention", kernel="split": interpreted(op, *call, kernel=kernel)
    return on_gpu


def on_gpu(*call, op="opkit::attention", kernel="split"):
    arguments = [x.cuda() if isinstance(x, torch.Tensor) else x for x in call]
    if op != "opkit::attention":
        return decoding_kernels.latent(*arguments).cpu()
    with opkit.use_kernel(decoding_kernels.attention, kernel):
        return tuple(x.cpu() for x in decoding_kernels.attention(*arguments))


def made(batch, heads, kv_heads, queries, keys, d, dv, dtype=torch.float32):
    shapes = ((batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, dv))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def arguments(q, k, v, lower=-UNLIMITED, upper=UNLIMITED, scale=0.25, softcap=0.0, sinks=None, out_is_bshd=False):
    mask = [] if (lower, upper) == (-UNLIMITED, UNLIMITED) else [BAND, lower, upper]
    return q, k, v, [], [], sinks, None, mask, [], scale, softcap, 0.0, out_is_bshd


def check(run, q, k, v, **options):
    """The error of a result is at most the rounding of weights and of the result."""
    out, lse = run(*arguments(q, k, v, **options))
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    seen = (distance >= options.get("lower", -UNLIMITED)) & (distance <= options.get("upper", UNLIMITED))
    softcap = options.get("softcap") or None
    exact, exact_lse = naive(
        q, k, v, seen, scale=options.get("scale", 0.25), softcap=softcap, sinks=options.get("sinks")
    )
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    largest = v.double().nan_to_num(0, 0, 0).abs().max().item() if v.numel() else 1.0
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2 * ROUNDING[q.dtype] * largest, equal_nan=True)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2.0**-18, atol=2.0**-16, equal_nan=True)
    return out, lse


SHAPES = [(1, 4, 2, 1, 700, 32, 32), (2, 6, 2, 3, 300, 96, 33), (1, 20, 1, 1, 257, 7, 80), (1, 2, 2, 40, 130, 16, 16)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_float64(run, shape, dtype):
    check(run, *made(*shape, dtype))


OPTIONS = [  # the most important come first
    {"upper": 290, "lower": 40, "softcap": 5.0, "sinks": torch.tensor([50.0, -50.0, 0.0, 1.0])},
    {"lower": 5, "upper": 4},
    {"lower": 2**40},
    {"sinks": torch.tensor([[0.5, -1.0, 3.0, 0.0]] * 2).T[:, 1]},
    {"scale": -0.3, "upper": 290},
    {"upper": 280},
    {"lower": -5, "upper": 3},
    {"lower": 100, "upper": 100},
    {"upper": -(2**40)},
    {"softcap": 1.5, "scale": 2.0},
    {"scale": 0.0, "upper": 290},
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bands_caps_and_sinks(run, options):
    check(run, *made(1, 4, 2, 5, 301, 32, 32), **options)


def test_huge_logits(run):
    q, k, v = made(1, 4, 2, 2, 300, 16, 16)
    check(run, q.mul(2).round(), k.mul(2).round(), v, scale=1e12)


def test_queries_that_see_nothing_give_zeros(run):
    q, k, v = made(1, 2, 1, 4, 100, 16, 16)
    out, lse = check(run, q, k, v, upper=-2)
    assert not out[:, :, :2].any()
    assert (lse[:, :, :2] == -torch.inf).all()
    check(run, q, k[:, :, :0], v[:, :, :0])
    check(run, q, k[:, :, :0], v[:, :, :0], sinks=torch.tensor([1.0, 2.0]))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "shape",
    [(0, 2, 2, 1, 5, 8, 8), (1, 0, 1, 1, 5, 8, 8), (1, 2, 1, 0, 5, 8, 8), (1, 2, 1, 1, 5, 8, 0), (1, 2, 1, 1, 5, 0, 8)],
)
def test_empty_tensors(run, shape):
    check(run, *made(*shape))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_does_not_leak(run, bad):
    q, k, v = made(1, 4, 2, 3, 203, 16, 16)
    for x in (k, v):
        x[:, :, :9], x[:, :, 202] = bad, bad
    out, _ = check(run, q, k, v, lower=9, upper=199)
    assert out.isfinite().all()


def test_values_that_are_not_finite_reach_the_queries_that_see_them(run):
    q, k, v = made(1, 4, 2, 3, 203, 16, 40)
    v[0, 0, 200, 3], v[0, 1, 201, 36], v[0, 1, 30, 2] = torch.inf, torch.nan, -torch.inf
    out, _ = check(run, q, k, v, upper=199)
    assert out[0, :, 0, 3].isfinite().all()
    assert (out[0, :2, 1:, 3] == torch.inf).all()
    assert (out[0, 2:, :, 2] == -torch.inf).all()
    assert out[0, 2:, 2, 36].isnan().all()


def test_nan_of_queries_and_keys_stays_in_its_rows(run):
    q, k, v = made(1, 2, 2, 2, 300, 8, 8)
    q[0, 0, 1, 3] = k[0, 1, 7, 2] = torch.nan
    out, lse = run(*arguments(q, k, v))
    assert out[0, 0, 0].isfinite().all()
    assert out[0, 0, 1].isnan().all()
    assert lse[0, 0, 1].isnan()
    assert out[0, 1].isnan().all()


def test_large_logits_do_not_overflow(run):
    q, k, v = made(1, 2, 1, 1, 300, 16, 16)
    out, lse = run(*arguments(q * 1e3, k * 1e3, v))
    exact, exact_lse = naive(q * 1e3, k * 1e3, v, scale=0.25)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


@pytest.mark.emulated
def test_strides_are_followed(run):
    q, k, v = made(2, 4, 2, 3, 90, 24, 40)
    plain = run(*arguments(q, k, v))
    others = [
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [x.mT.contiguous().mT for x in (q, k, v)],
        [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)],
        [x[:1].expand_as(x).contiguous().index_copy(0, torch.arange(2), x) for x in (q, k, v)],
    ]
    for tensors in others:
        for one, other in zip(plain, run(*arguments(*tensors)), strict=True):
            assert torch.equal(one, other)
    out, _ = run(*arguments(q, k, v, out_is_bshd=True))
    assert torch.equal(out, plain[0])
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.emulated
def test_values_that_are_columns_of_keys(run):
    """As in multi-head latent attention: the kernel reads them once."""
    q, k, _ = made(1, 16, 1, 2, 300, 96, 1)
    out = run(q, k, 64, op="decoding_tests::latent", kernel="interpreted")
    exact, _ = naive(q, k, k[..., :64], scale=0.1)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("batch_invariance")
def test_batch_invariance_is_refused():
    with pytest.raises(KernelError, match="OPKIT_BATCH_INVARIANT is set"):
        decoding.decode(*arguments(*made(1, 8, 1, 1, 256, 8, 8)))


def test_what_is_taken():
    q, k, v = made(1, 8, 1, 1, 256, 8, 8)
    call = AttentionCall(*arguments(q, k, v))
    assert decoding.takes_few(call)
    assert decoding.takes_few(call._replace(mask=[BAND, 0, 5]))
    assert not decoding.takes_few(call._replace(mask=[5, 0]))
    assert not decoding.takes_few(call._replace(bias=[1, 0]))
    assert not decoding.takes_few(call._replace(dropout_p=0.5))
    assert not decoding.takes_few(call._replace(q=q.double(), k=k.double(), v=v.double()))
    assert not decoding.takes_few(AttentionCall(*arguments(*made(1, 8, 1, 100, 256, 8, 8))))
    assert not decoding.takes_few(AttentionCall(*arguments(*made(1, 1, 1, 1, 256, 577, 8))))
    with pytest.raises(KernelError, match="takes masks and biases of few tensors, no dropout"):
        decoding.decode(*arguments(q, k, v)[:-2], 0.5, False)


# ---- divisions -------------------------------------------------------------------------------------------------------

H200 = decode_plan.Device(132, 232448, True, "tf32x3")
GPUS = {
    "sm_80": decode_plan.Device(108, 166912, False, "tf32x3"),
    "sm_90": H200,
    "sm_100": decode_plan.Device(148, 232448, True, "tf32x3"),
    "gfx942": decode_plan.Device(304, 65536, False, "ieee"),
}


def test_programs_fill_the_gpu():
    """There is work for all of it, and each split has some."""
    for heads, height in itertools.product((1, 7, 8, 100, 128, 140, 1000), (1, 4, 32, 100, 128, 2048)):
        shape = decode_plan.DecodeShape(height, heads, 65536, 128, 128, 2, 2)
        blocks = decode_plan.blocks_of(shape, H200)
        tiles = heads * -(-height // blocks.rows)
        assert tiles * blocks.splits >= min(0.6 * H200.processors, tiles * decode_plan.MOST_SPLITS), shape
        share = -(-65536 // blocks.block) // blocks.splits
        assert share >= 1, shape
        assert blocks.splits == 1 or share >= 2, shape


def test_few_tiles_have_as_many_rows_as_products_of_warpgroups_or_few_warps():
    def blocks(height, heads, gpu=H200, d=128):
        return decode_plan.blocks_of(decode_plan.DecodeShape(height, heads, 16384, d, d, 2, 2), gpu)

    assert blocks(32, 8) == decode_plan.DecodeBlocks(64, 64, 4, 4, 16)
    assert blocks(4, 8).warps == 2
    assert blocks(32, 100).rows == 32
    assert blocks(4, 100).warps == 4
    assert blocks(32, 8, GPUS["sm_80"]).rows == 32


def test_short_keys_are_not_divided():
    assert decode_plan.blocks_of(decode_plan.DecodeShape(4, 8, 100, 128, 128, 2, 2), H200).splits == 1


def recorded(target, monkeypatch, *shape, dtype=torch.bfloat16, **options):
    """What the kernels are launched with on a GPU of this architecture, which need not be here."""
    monkeypatch.setattr(decoding, "device_of", lambda index: GPUS[target])
    with recording() as found:
        decoding.decode(*arguments(*(x.to("meta") for x in made(*shape, dtype)), **options))
    return found


COMPILED = {
    "one query": ((1, 32, 8, 1, 2048, 128, 128), {}),
    "eight causal queries": ((1, 64, 8, 8, 2048, 128, 128), {"upper": 2040}),
    "four causal queries": ((1, 32, 8, 4, 2048, 128, 128), {"upper": 2044}),
    "32 heads to one": ((8, 32, 1, 1, 16384, 128, 128), {}),
    "float32": ((2, 32, 8, 1, 2048, 128, 128), {"dtype": torch.float32, "softcap": 5.0}),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills(name, target, monkeypatch):
    shape, options = COMPILED[name]
    for values in recorded(target, monkeypatch, *shape, **options):
        found = binaries.resources_of(compiling.build(request_for(values, None, target)))
        assert found.spills == 0, (values.bound.name, found)
        assert found.shared <= GPUS[target].shared


# ---- on a GPU alone --------------------------------------------------------------------------------------------------

LARGE = [
    (1, 32, 8, 1, 8192, 128, 128),
    (3, 64, 8, 8, 5000, 128, 128),
    (2, 8, 1, 256, 9000, 128, 128),
    (2, 32, 1, 1, 4097, 576, 512),
]


def exact_on_gpu(q, k, v, lower=-UNLIMITED, upper=UNLIMITED):
    """A head at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device="cuda")
    distance = torch.arange(k.shape[2], device="cuda") - torch.arange(q.shape[2], device="cuda")[:, None]
    hidden = (distance < lower) | (distance > upper)
    for h in range(q.shape[1]):
        kv = h * k.shape[1] // q.shape[1]
        logits = (q[:, h].double() @ k[:, kv].double().mT * 0.25).masked_fill(hidden, -torch.inf)
        out[:, h] = logits.softmax(-1) @ v[:, kv].double()
    return out


@pytest.mark.gpu
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_calls_on_a_gpu(shape, dtype):
    q, k, v = (x.cuda() for x in made(*shape, dtype))
    for band in ({}, {"upper": shape[4] - shape[3]}, {"lower": shape[4] - 700, "upper": shape[4] - shape[3]}):
        with opkit.use_kernel(decoding_kernels.attention, "split"):
            first, again = (decoding_kernels.attention(*arguments(q, k, v, **band)) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        bound = (2 * ROUNDING[dtype] + 2.0**-18) * v.double().abs().max().item()  # float32: three products of tf32 each
        torch.testing.assert_close(first[0].double(), exact_on_gpu(q, k, v, **band), rtol=0, atol=bound)


@pytest.mark.gpu
def test_a_cuda_graph_holds_a_call():
    q, k, v = (x.cuda() for x in made(1, 32, 8, 1, 8192, 128, 128, torch.bfloat16))
    attention = decoding_kernels.attention
    with opkit.use_kernel(attention, "split"):
        attention(*arguments(q, k, v))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attention(*arguments(q, k, v))
        for _ in range(3):
            q.normal_()
            graph.replay()
            for one, other in zip((out, lse), attention(*arguments(q, k, v)), strict=True):
                assert torch.equal(one, other)


def test_no_length_and_no_batch_is_compiled_in(monkeypatch):
    """Calls of other batches and keys that are divided alike ask the compiler for the same binaries."""
    blocks = decode_plan.DecodeBlocks(16, 64, 2, 4, 4)
    monkeypatch.setattr(decoding, "blocks_of", lambda shape, gpu: blocks)

    def forms(batch, keys):
        q, k = (
            torch.empty(batch, heads, n, 128, dtype=torch.bfloat16, device="meta") for heads, n in ((8, 1), (2, keys))
        )
        with recording() as launches:
            decoding.decode(q, k, k, [], [], None, None, [], [], 0.1, 0.0, 0.0, False)
        return [str(request_for(each, None, "sm_90")) for each in launches]

    assert len(forms(2, 1000)) == 2
    assert forms(2, 1000) == forms(3, 1001) == forms(16, 4095)
