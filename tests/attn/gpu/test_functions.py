"""Users' functions in the kernels for GPUs, against the formulas in float64."""

import pytest
import torch
from function_calls import BIASES, BOTH, SLOPES, bias_call, call_of, gradient_call, made
from hopper_backward_calls import large
from hopper_calls import on_hopper_with_compiler
from torch.utils import _pytree as pytree

from opkit.attn import gradients, reference
from opkit.attn.api import lowered
from opkit.attn.calls import AttentionCall, BiasCall, GradientCall
from opkit.attn.functions.trace import trace
from opkit.attn.gpu import kernels, limits, tile_lists
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.hopper import backward_cuda, forward_cuda, mla
from opkit.attn.masks import program
from opkit.attn.operator import attention_operator
from opkit.masks import ALiBi, KeyPadding, MaskFunction
from opkit.testing import compile_launches

from .conftest import OnGpu
from .test_portable import BOUNDS, close, wide

REPRESENTATIVE = ("packed sequences with prefixes", "both")


def exactly(call):
    """The result and log-sum-exp, in float64."""
    return reference.attention(*wide(call._replace(bias_tensors=wide(call.bias_tensors))))


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("name", BOTH)
def test_of_the_formula(run, name):
    call = call_of(name, torch.float32)
    if name in REPRESENTATIVE:  # of which the interpreter, in the default run too, computes half the heads
        call = call._replace(q=call.q[:, :2], k=call.k[:, :1], v=call.v[:, :1])
    check_formula(run, call, BOUNDS[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_the_formula_in_narrow_dtypes(name, dtype):
    check_formula(OnGpu(), call_of(name, getattr(torch, dtype), 64, 64), BOUNDS[getattr(torch, dtype)])


def check_formula(run, call, bound):
    out, lse = run("opkit::attention", *call)
    exact, exact_lse = exactly(call)
    close(out, exact, bound)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=max(1e-5, bound))
    given = gradient_call(call, out, lse)
    found = run("opkit::attention_backward", *given)
    precise = GradientCall(*wide(given))._replace(out=exact, lse=exact_lse, bias_tensors=wide(call.bias_tensors))
    expected, delta = gradients.reference_gradients(precise)
    for mine, right in zip(found, (*expected, delta), strict=True):
        close(mine, right, 4 * bound)
    of_bias = bias_call(given, found[3])
    if not of_bias.wanted:
        return
    mine = run("opkit::attention_bias_backward", *of_bias)
    right = BiasCall(*wide(of_bias))._replace(lse=exact_lse, bias_tensors=precise.bias_tensors)
    for one, other, number in zip(mine, gradients.attention_bias_backward(*right), of_bias.wanted, strict=True):
        assert (one.dtype, one.shape) == (call.bias_tensors[number].dtype, call.bias_tensors[number].shape)
        close(one, other, max(6 * bound, 4 * torch.finfo(one.dtype).eps))


@pytest.mark.sweep(keep=("both", "by head"))
@pytest.mark.parametrize("queries", [1, 5, 150])
@pytest.mark.parametrize("name", BOTH)
def test_decoding_of_the_formula(run, name, queries):
    check_decoding(run, few(call_of(name, torch.float32), queries), 2.0**-18)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", BOTH)
def test_decoding_of_the_formula_in_bfloat16(name, queries):
    check_decoding(OnGpu(), few(call_of(name, torch.bfloat16, 128, 128), queries), BOUNDS[torch.bfloat16])


def few(call, queries):
    """A call of the first queries; those of tensors of biases are more than there are then."""
    return call._replace(q=call.q[:, :, :queries])


def check_decoding(run, call, bound):
    out, lse = run("opkit::attention", *call, kernel="split")
    exact, exact_lse = exactly(call)
    close(out, exact, bound)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=max(1e-5, bound))


def test_decoding_of_other_masks_and_biases(run):
    q, k, v = (made(2, heads, n, 24) for heads, n in ((4, 3), (2, 700), (2, 700)))
    padded = KeyPadding(torch.tensor([0, 613]))
    cases = [(padded & ~MaskFunction(lambda b, h, i, j: j % 3 == h % 2), ALiBi(SLOPES / 99)), (padded, None)]
    for given, bias in (*cases, (None, made(1, 4, 1, 700))):
        call = AttentionCall(*lowered(q, k, v, given, bias, None, None, None, 0.0, "bhsd")[:13])
        check_decoding(run, call, 2.0**-18)


def latent(queries, dtype, heads=2, keys=256):
    """A call of latent attention, whose values are the first 512 of 576 channels of keys, with functions of all kinds."""
    q, k = made(1, heads, queries, 576, dtype=dtype), made(1, 1, keys, 576, dtype=dtype)
    later, ids, slopes = keys - queries, torch.arange(keys) // 70, torch.linspace(0.1, 0.9, heads)

    def mask(b, h, i, j):
        return (i + later >= j) & (ids[i + later] - ids[j] <= 2) & ((j + h) % 3 != 1)

    score = lambda s, b, h, i, j: s * torch.sigmoid(s) + slopes[h] * (j - i - later) / 99  # noqa: E731
    return AttentionCall(*lowered(q, k, k[..., :512], mask, score, None, None, None, 0.0, "bhsd")[:13])


@pytest.mark.parametrize(("queries", "kernel"), [(1, "split"), (20, "triton")])
def test_latent_attention(run, queries, kernel):
    call = latent(queries, torch.float32)
    assert not mla.fits(latent(queries, torch.bfloat16, heads=64))  # nor does it on Hopper, where these kernels run
    assert decoding.takes_few(call) if kernel == "split" else limits.takes(call)
    out, lse = run("opkit::attention", *call, kernel=kernel)
    exact, exact_lse = exactly(call)
    close(out, exact, 2.0**-16)  # logits are sums of 576 products, and are multiplied by one another
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "kernel"), [(1, "split"), (1000, "triton")])
def test_latent_attention_gets_a_kernel_that_takes_functions(queries, kernel):
    call = latent(queries, torch.bfloat16, 16, 4000)
    given = AttentionCall(*pytree.tree_map_only(torch.Tensor, lambda x: x.cuda(), call))
    given = given._replace(v=given.k[..., :512])
    assert attention_operator().select(*given).kernel == kernel
    close(attention_operator()(*given)[0].cpu(), exactly(call)[0], BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("queries", [1, 4])
def test_what_functions_hide_does_not_leak_where_keys_are_split(run, queries):
    call = few(call_of("by head", torch.float32), queries)
    call.k[..., 1, 3], call.v[..., 1, 5] = torch.nan, torch.inf
    out, _ = run("opkit::attention", *call, kernel="split")
    seen = program.visible(call.mask, call.mask_tensors, program.Grid.of(call))[..., 1].expand(2, 4, queries)
    assert out[~seen].isfinite().all()
    assert not out[seen].isfinite().all(-1).any()


def test_what_functions_hide_does_not_leak(run):
    call = call_of("dilated", torch.float32)
    out, _ = run("opkit::attention", *call)
    call.k[..., 60, 3], call.v[..., 61, 5] = torch.nan, torch.inf
    dirty, _ = run("opkit::attention", *call)
    seen = program.visible(call.mask, call.mask_tensors, program.Grid.of(call))[0, 0, :, 60:62].any(-1)
    torch.testing.assert_close(dirty[:, :, ~seen], out[:, :, ~seen])
    assert not dirty[:, :, seen].isfinite().all(-1).any()


def test_gradients_without_an_order_are_refused_where_algorithms_are_deterministic(deterministic):
    for name, takes in (
        ("an image", False),
        ("buckets", True),
        ("signed buckets", True),
        ("relative", True),
        ("a tensor", True),
    ):
        call = call_of(name, torch.float32)
        given = gradient_call(call, *reference.attention(*call))
        assert bool(kernels.takes_bias_gradients(bias_call(given, given.lse))) is takes


def test_algorithms_may_become_deterministic_after_a_call_was_prepared():
    call = call_of("an image", torch.float32)
    given = gradient_call(call, *reference.attention(*call))
    of_bias = bias_call(given, given.lse)
    run = kernels.bias_backward.prepare(*of_bias)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(run(*of_bias), gradients.attention_bias_backward(*of_bias), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_traced_for_a_gpu_an_expression_is_the_same():
    def score(s, b, h, i, j):
        return torch.where(i - j < 3, torch.tanh(s / 2) * 20, s * torch.sigmoid(s))

    found = (trace(score, "score", torch.float32, torch.device(device)) for device in ("cpu", "cuda"))
    assert len({each.root for each in found}) == 1


def test_more_captured_tensors_than_kernels_have_room_for():
    q = torch.randn(1, 2, 9, 16)
    tables = [torch.randn(2) for _ in range(9)]

    def score(s, b, h, i, j):
        return s * sum(each[h] for each in tables)

    call = AttentionCall(*lowered(q, q, q, None, score, None, None, None, 0.0, "bhsd")[:13])
    assert not limits.takes(call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("name", ["a table", "numbers", "signed buckets", "an image", "relative", "buckets", "both"])
def test_compiles(name, target, head):
    call = call_of(name, torch.bfloat16, head, head)
    here = AttentionCall(*pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), tuple(call)))
    given = gradient_call(here, here.q, torch.empty(here.q.shape[:3], device="meta"))
    given = given._replace(gradient=here.q)
    of_bias = bias_call(given, given.lse)

    def launches():
        kernels.forward(*here)
        decoding.decode(*few(here, 4))
        kernels.backward(*given)
        if of_bias.wanted:
            kernels.bias_backward(*of_bias)

    report = compile_launches(launches, [target])
    report.raise_for_failures()
    assert all(row.shared <= 232448 for row in report.rows if target == "sm_90")
    assert all(row.spills <= 256 for row in report.rows if target == "sm_90" and row.kernel == "decode")


# ---- CUDA C++ for sm_90 -----------------------------------------------------------------------------------------------


def lists(call, shape, blocks, by_keys, bits=()):
    """What :func:`opkit.attn.gpu.tile_lists.lists_of` builds on a GPU: here all tiles, each of them partly visible."""
    own, others = -(-call.q.shape[2] // blocks.rows), -(-call.k.shape[2] // blocks.keys)
    own, others = (others, own) if by_keys else (own, others)
    tiles = torch.arange(others).flip(0).int().expand(*call.q.shape[:2], own, others).contiguous()
    counts = torch.tensor([0, others]).int().expand(*call.q.shape[:2], own, 2).contiguous()
    return tile_lists.TileLists(tiles, counts)


@pytest.mark.emulated
@pytest.mark.sweep(keep=("both", "hidden", "neighbourhood", "a soft cap and more"))
@pytest.mark.parametrize("name", [*BOTH, *BIASES])
def test_cuda_forward_of_the_formula(machine, monkeypatch, name):
    monkeypatch.setattr(tile_lists, "lists_of", lists)
    call = call_of(name, torch.bfloat16, 64, 64)
    out, lse = forward_cuda.forward(*call)
    exact, exact_lse = exactly(call)
    close(out, exact, BOUNDS[torch.bfloat16])
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.emulated
@pytest.mark.sweep(keep=("dilated", "by head", "both", "a soft cap and more"))
@pytest.mark.parametrize("name", [*BOTH, *BIASES])
def test_cuda_backward_of_the_formula(machine, monkeypatch, name):
    monkeypatch.setattr(tile_lists, "lists_of", lists)
    check_cuda_backward(backward_cuda.backward, call_of(name, torch.bfloat16, 64, 64))


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "head"), [("product", 128), ("both", 200)])
def test_cuda_backward_of_the_formula_of_larger_heads(machine, monkeypatch, name, head):
    monkeypatch.setattr(tile_lists, "lists_of", lists)
    check_cuda_backward(backward_cuda.backward, call_of(name, torch.bfloat16, head, head))


@pytest.mark.emulated
def test_cuda_backward_of_the_formula_of_huge_logits(machine):
    call = call_of("soft cap and more", torch.float16, 64, 64)
    large(call[:3], some=True)
    call.v.mul_(0.25)  # gradients are within float16
    check_cuda_backward(backward_cuda.backward, call)


def check_cuda_backward(run, call):
    exact, exact_lse = exactly(call)
    given = gradient_call(call, exact.to(call.q.dtype), exact_lse.float())
    found = run(*given)
    precise = GradientCall(*wide(given))._replace(out=exact, lse=exact_lse, bias_tensors=wide(call.bias_tensors))
    expected, delta = gradients.reference_gradients(precise)
    for mine, right in zip(found, (*expected, delta), strict=True):
        close(mine, right, 4 * BOUNDS[call.q.dtype])


@pytest.mark.parametrize("name", [*BOTH, *BIASES])
class TestOnHopper:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.parametrize("head", [64, 128])
    def test_cuda_forward_of_the_formula(self, name, head):
        call = call_of(name, torch.bfloat16, head, head)
        out, lse = OnGpu()("opkit::attention", *call, kernel="hopper_cuda")
        exact, exact_lse = exactly(call)
        close(out, exact, BOUNDS[torch.bfloat16])
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-2)

    @pytest.mark.parametrize("head", [64, 128, 256])
    def test_cuda_backward_of_the_formula(self, name, head):
        def run(*given):
            return OnGpu()("opkit::attention_backward", *given, kernel="hopper_cuda")

        check_cuda_backward(run, call_of(name, torch.bfloat16, head, head))


@pytest.mark.emulated
def test_cuda_forward_recomputes_rows_with_functions(machine, monkeypatch):
    monkeypatch.setattr(tile_lists, "lists_of", lists)
    call = call_of("both", torch.bfloat16, 64, 64)
    call.v[..., 61, 5] = torch.nan
    out, _ = forward_cuda.forward(*call)
    exact, _ = exactly(call)
    assert torch.equal(out.isfinite(), exact.isfinite())
    finite = exact.isfinite()
    torch.testing.assert_close(out[finite].double(), exact[finite], rtol=2e-2, atol=2e-2)
