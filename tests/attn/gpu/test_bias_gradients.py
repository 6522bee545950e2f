"""The gradients of biases by the portable kernel, against the formula in float64."""

import itertools

import pytest
import torch

import opkit
from opkit.attn import gradients, reference
from opkit.attn.calls import BiasCall, GradientCall
from opkit.attn.gpu import blocks, kernels
from opkit.attn.gpu.portable import backward as portable_bias
from opkit.attn.masks import program
from opkit.attn.masks.program import AND, BAND, BIAS_ALIBI, BIAS_DENSE, BIAS_REL, DENSE, LENGTH, SEGMENTS
from opkit.masks import ALiBi, Causal, RelativePosition, Segments
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

from .test_portable import BOUNDS, FAR, Case, close, numbers, r, wide


def added(sizes, *biases, **others):
    """A case of DENSE biases of these shapes."""
    words = [word for n in range(len(biases)) for word in (BIAS_DENSE, n)]
    return Case(sizes, bias=tuple(words), biases=tuple((lambda shape=shape: r(*shape)) for shape in biases), **others)


SIZES = (2, 4, 2, 70, 90, 16, 8)
BROADCAST = {
    f"of {''.join(name for name, kept in zip('bhqk', kept, strict=True) if kept) or 'nothing'}": added(
        SIZES, tuple(size if here else 1 for size, here in zip((2, 4, 70, 90), kept, strict=True))
    )
    for kept in itertools.product((True, False), repeat=4)
}
CASES = BROADCAST | {
    "causal": added(SIZES, (1, 4, 70, 90), mask=(BAND, -FAR, 0)),
    "a window": added((1, 2, 1, 190, 210, 16, 16), (1, 2, 1, 210), (1, 1, 190, 1), mask=(BAND, -20, 30)),
    "rows that see nothing": added(SIZES, (2, 1, 70, 90), mask=(BAND, -FAR, -40)),
    "lengths": added(SIZES, (1, 1, 70, 90), mask=(LENGTH, 0), masks=(lambda: torch.tensor([0, 55]).int(),)),
    "causal documents": added(
        (1, 2, 2, 200, 200, 16, 16), (1, 2, 200, 200),
        mask=(SEGMENTS, 0, 0, BAND, -FAR, 0, AND), masks=(lambda: numbers(200, 43),),
    ),
    "bools": added(SIZES, (1, 4, 1, 90), mask=(DENSE, 0), masks=(lambda: torch.rand(2, 1, 70, 90) > 0.5,)),
    "softcap, a negative scale": added(SIZES, (1, 1, 70, 90), softcap=2.0, scale=-0.8, mask=(BAND, -FAR, 5)),
    "heads of two parts, and narrow": added((1, 2, 1, 20, 40, 520, 16), (1, 2, 20, 40), scale=0.05, narrow=True),
    "narrow": added((2, 2, 1, 70, 90, 96, 40), (1, 2, 70, 90), narrow=True),
    "dropout": added(SIZES, (1, 1, 70, 90), (2, 4, 1, 1), dropout_p=0.3),
    "two, one of them twice": Case(
        SIZES, bias=(BIAS_DENSE, 1, BIAS_DENSE, 0, BIAS_DENSE, 1), biases=(lambda: r(1, 4, 1, 90), lambda: r(2, 1, 70, 1))
    ),
    "slopes": Case(SIZES, bias=(BIAS_ALIBI, 0), biases=(lambda: torch.rand(1, 4),), mask=(BAND, -FAR, 20)),
    "slopes of batches": Case((2, 2, 1, 90, 70, 16, 16), bias=(BIAS_ALIBI, 0), biases=(lambda: torch.rand(2, 2),)),
    "relative positions": Case(
        (1, 2, 1, 70, 96, 16, 16), bias=(BIAS_REL, 0, 1, 8), biases=(lambda: r(1, 2, 70, 12), lambda: r(1, 2, 70, 8))
    ),
    "relative positions, dropout and a mask": Case(
        (2, 2, 1, 70, 95, 16, 16), bias=(BIAS_REL, 0, 1, 19), biases=(lambda: r(2, 2, 70, 5), lambda: r(2, 1, 1, 19)),
        dropout_p=0.2, mask=(BAND, -30, 70),
    ),
    "an image of one column": Case(
        (1, 2, 1, 20, 50, 16, 16), bias=(BIAS_REL, 0, 1, 1), biases=(lambda: r(1, 2, 20, 50), lambda: r(1, 2, 20, 1))
    ),
    "an image of one row": Case(
        (1, 2, 1, 20, 50, 16, 16), bias=(BIAS_REL, 0, 1, 50), biases=(lambda: r(1, 2, 20, 1), lambda: r(1, 2, 20, 50))
    ),
    "all kinds": Case(
        (1, 2, 1, 20, 48, 16, 16), bias=(BIAS_REL, 0, 1, 8, BIAS_ALIBI, 2, BIAS_DENSE, 3),
        biases=(lambda: r(1, 2, 20, 6), lambda: r(1, 2, 20, 8), lambda: torch.rand(1, 2), lambda: r(1, 1, 20, 48)),
    ),
    "more tensors than slots": Case(
        (1, 1, 1, 40, 50, 16, 16),
        mask=(SEGMENTS, 0, 1, SEGMENTS, 2, 3, AND, SEGMENTS, 4, 5, AND, SEGMENTS, 6, 7, AND),
        masks=tuple((lambda n=n, of=of: numbers(n, of)) for of in (30, 25, 17, 41) for n in (40, 50)),
        bias=(BIAS_ALIBI, 0, BIAS_DENSE, 1), biases=(lambda: torch.rand(1, 1), lambda: r(1, 1, 1, 50)),
    ),
}  # fmt: skip


REPRESENTATIVE = (
    "heads of two parts, and narrow", "all kinds", "more tensors than slots",
)  # fmt: skip


def bias_call(case, dtype):
    """A call with the results of the formula in float64, and the same all in float64."""
    call = case.call(dtype)
    exact, lse = reference.attention(*wide(call._replace(bias_tensors=wide(call.bias_tensors))))
    gradient, of_lse = r(*exact.shape).to(dtype), torch.where(lse.isfinite(), r(*lse.shape), 0.0)
    rest = (call.mask_tensors, wide(call.bias_tensors), call.mask, call.bias, call.scale, call.softcap)
    given = GradientCall(*wide((gradient, of_lse, *call[:3])), exact, lse, *rest, False, call.seed, call.dropout_p)
    _, delta = gradients.reference_gradients(given)
    wanted = list(range(len(call.bias_tensors)))
    precise = BiasCall(gradient.double(), delta, *given[2:5], lse, *rest, wanted, call.seed, call.dropout_p)
    narrow = precise._replace(
        gradient=gradient,
        delta=delta.float(),
        q=call.q,
        k=call.k,
        v=call.v,
        lse=lse.float(),
        bias_tensors=call.bias_tensors,
    )
    return narrow, precise


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("name", CASES)
def test_of_the_formula(run, name):
    case = CASES[name]
    dtype = run.narrow if case.narrow else torch.float32
    call, precise = bias_call(case, dtype)
    found = run("opkit::attention_bias_backward", *call)
    expected = gradients.attention_bias_backward(*precise)
    of_logits = gradients._logit_gradients(precise, precise.delta).of_logits.abs()
    everywhere = torch.ones_like(of_logits, dtype=torch.bool)
    grid = program.Grid.of(call)
    _, added = program.bias_gradients(of_logits, everywhere, of_logits, call.bias, call.bias_tensors, grid)
    for mine, right, size, tensor in zip(found, expected, added, call.bias_tensors, strict=True):
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
        size = max(right.abs().max().item(), 0.02 * size.abs().max().item(), 1e-3)  # sums may cancel
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=4 * BOUNDS[dtype] * size)


@pytest.mark.emulated
def test_only_what_is_wanted_in_the_dtypes_of_the_tensors(run):
    case = added(SIZES, (1, 4, 70, 90), (1, 1, 1, 90), (2, 4, 1, 1))
    call, precise = bias_call(case, torch.float32)
    dtypes = (torch.float32, torch.float64, torch.float16)
    tensors = [x.to(dtype) for x, dtype in zip(call.bias_tensors, dtypes, strict=True)]
    found = run("opkit::attention_bias_backward", *call._replace(bias_tensors=tensors, wanted=[2, 1]))
    expected = gradients.attention_bias_backward(*precise)
    assert [x.dtype for x in found] == [torch.float16, torch.float64]
    close(found[0], expected[2], 2e-3)
    close(found[1], expected[1], 1e-3)  # the last tensor was rounded


def test_what_is_hidden_does_not_leak(run):
    case = added((1, 2, 1, 70, 90, 16, 16), (1, 2, 1, 90), mask=(LENGTH, 0), masks=(lambda: torch.tensor([60]).int(),))
    call, _ = bias_call(case, torch.float32)
    expected = run("opkit::attention_bias_backward", *call)
    call.k[..., 60:, :], call.v[..., 65:, 3] = torch.nan, torch.inf
    found = run("opkit::attention_bias_backward", *call)
    assert torch.equal(found[0], expected[0])
    assert not found[0][..., 60:].any()


@pytest.mark.parametrize("sizes", [(1, 2, 1, 0, 9, 16, 16), (1, 2, 1, 9, 0, 16, 16), (0, 2, 1, 9, 9, 16, 16)], ids=str)
def test_of_nothing(run, sizes):
    call, _ = bias_call(added(sizes, (1, 2, *sizes[3:5]), (1, 1, 1, 1)), torch.float32)
    found = run("opkit::attention_bias_backward", *call)
    assert [x.shape for x in found] == [x.shape for x in call.bias_tensors]
    assert not any(x.any() for x in found)


# ---- memory, kernels and rules ---------------------------------------------------------------------------------------


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_call(biases, bias, mask=(), masks=(), dtype=torch.bfloat16, length=1024, head=64, dropout_p=0.0):
    q, k, sums = (*(meta(2, n, length, head, dtype=dtype) for n in (4, 2)), meta(2, 4, length, dtype=torch.float32))
    seed = meta(2, dtype=torch.int64) if dropout_p else None
    return BiasCall(
        q, sums, q, k, k, sums, list(masks), list(biases), list(mask), list(bias), 0.1, 0.0, list(range(len(biases))), seed,
        dropout_p,
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape", [(1, 4, 16384, 16384), (1, 4, 1, 16384), (2, 1, 16384, 1), (1, 4, 1, 1), (1, 1, 1, 1)], ids=str
)
def test_memory_is_that_of_the_gradient_and_a_bounded_workspace(shape):
    """What is written is the gradient itself, or a few tiles of float32 for each multiprocessor."""
    given = meta_call([meta(*shape)], [BIAS_DENSE, 0], length=16384)
    with recording() as launches:
        (found,) = kernels.bias_backward(*given)
    (launched,) = launches
    written = launched.named()["of_bias"]
    assert found.shape == shape
    if written.dtype == "float32":
        tiles = portable_bias._PROGRAMS * blocks.processors(given.q.device)
        assert written.numel <= tiles * 64 * 64
    else:
        assert written.shape[0] == 1
        assert written.numel == found.numel()


FLOATS, INTS = torch.float32, torch.int32
COMPILED = {
    "all dimensions, causal": lambda: meta_call([meta(1, 4, 1024, 1024)], [BIAS_DENSE, 0], [BAND, -FAR, 0], head=128),
    "keys, documents": lambda: meta_call(
        [meta(1, 4, 1, 1024)], [BIAS_DENSE, 0], [SEGMENTS, 0, 0], [meta(1, 1024, dtype=INTS)], head=96
    ),
    "slopes, float32": lambda: meta_call([meta(1, 4, dtype=FLOATS)], [BIAS_ALIBI, 0], dtype=FLOATS),
    "positions, dropout": lambda: meta_call(
        [meta(2, 4, 1024, 32), meta(2, 4, 1024, 32)], [BIAS_REL, 0, 1, 32], dropout_p=0.1
    ),
    "a head of 512": lambda: meta_call([meta(1, 4, 1024, 1024)], [BIAS_DENSE, 0], head=512),
}
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


@pytest.mark.sweep(1, keep=["keys, documents"])
@pytest.mark.parametrize(
    ("case", "target"),
    [(case, target) for n, case in enumerate(COMPILED) for target in (SHARED if n == 0 else ("sm_90", "gfx942"))],
)
def test_compiles(monkeypatch, case, target):
    monkeypatch.setattr(blocks, "shared_memory", lambda device: SHARED[target])
    given = COMPILED[case]()
    report = compile_launches(lambda: kernels.bias_backward(*given), [target])
    report.raise_for_failures()
    assert all(row.shared <= SHARED[target] for row in report.rows)


def test_lengths_and_batches_are_not_compiled_in():
    from opkit.op.triton.building import request_for

    def forms(batch, length):
        biases = [meta(1, 4, length, length)]
        given = meta_call(biases, [BIAS_DENSE, 0], [BAND, -FAR, 0], length=length)
        q, k, sums = meta(batch, 4, length, 64), meta(batch, 2, length, 64), meta(batch, 4, length, dtype=FLOATS)
        with recording() as launches:
            kernels.bias_backward(*given._replace(gradient=q, delta=sums, q=q, k=k, v=k, lse=sums))
        return [str(request_for(each, None, "sm_90")) for each in launches]

    assert forms(2, 1024) == forms(3, 1024 + 16 * 7)


def test_what_is_not_taken():
    call, _ = bias_call(added((1, 2, 1, 5, 9, 16, 16), (1, 2, 5, 9)), torch.float32)
    assert kernels.takes_bias_gradients(call)
    for name, other in {
        "wanted": [1], "delta": call.delta.double(), "lse": call.lse[:, :1], "gradient": call.gradient[..., :3],
        "bias_tensors": [r(1, 2, 5, 8)],
    }.items():  # fmt: skip
        assert not kernels.takes_bias_gradients(call._replace(**{name: other}))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_the_function_on_a_gpu(dtype):
    """Through autograd, the same in every run, near float64 and in little memory."""
    n, heads = 1024, 8
    of = {"dtype": dtype, "device": "cuda"}
    q, k, v, gradient = (torch.randn(2, heads, n, 64, **of) for _ in range(4))
    biases = [torch.randn(1, heads, n, n, **of), torch.rand(heads, device="cuda")]
    biases += [torch.randn(1, heads, n, 32, **of), torch.randn(2, heads, n, 32, **of)]
    documents = torch.arange(n, device="cuda")[None].div(300, rounding_mode="floor").int()

    def found(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *biases)]
        dense, slopes, rel_h, rel_w = leaves[3:]
        bias = [dense, ALiBi(slopes), RelativePosition(rel_h, rel_w)]
        out = opkit.attention(*leaves[:3], mask=Causal() & Segments(documents), bias=bias)
        return torch.autograd.grad(out, leaves, gradient.to(dtype))

    first = found(dtype)
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(found(dtype), first, strict=True))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found(dtype)
    torch.cuda.synchronize()
    logits = 2 * heads * n * n * 4
    assert torch.cuda.max_memory_allocated() - before < logits
    for mine, right in zip(first, found(torch.float64), strict=True):
        close(mine, right, 4 * BOUNDS[dtype])
