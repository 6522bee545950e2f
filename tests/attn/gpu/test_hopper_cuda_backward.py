"""The backward for sm_90a in CUDA C++: which calls it takes, what happens without it, and its numbers on such a GPU."""

from types import SimpleNamespace

import pytest
import torch
from hopper_backward_calls import (
    CALLS,
    HIDING,
    LARGE,
    REPRESENTATIVE,
    ROWS_HIDING,
    called,
    compared,
    compared_where_hidden,
    compared_where_rows_are_hidden,
    large,
)
from hopper_calls import (
    BF16,
    CAUSAL,
    FP16,
    arguments,
    bottom_right,
    filled,
    on_hopper_with_compiler,
    refuses,
    shaped,
    unlike,
)
from hopper_masks import documents, packed, shuffled

from opkit.attn import gradients, reference
from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import plans
from opkit.attn.gpu.decode import decoding
from opkit.attn.gpu.hopper import backward as gluon_backward
from opkit.attn.gpu.hopper import backward_cuda, backward_kinds, calls, decode_cuda, library
from opkit.attn.gpu.hopper import forward_cuda as cuda
from opkit.attn.gpu.portable import forward as portable_forward
from opkit.attn.masks import program
from opkit.errors import CompileError, NoCompilerWarning

SEGMENTS = (program.SEGMENTS, 0, 1)
PACKED = (*CAUSAL, *SEGMENTS, program.AND)

# ---- which calls it takes --------------------------------------------------------------------------------------------


def gradient_call(batch, heads, queries, keys, head, columns, dtype=BF16, device="meta", **what):
    q, k, v = shaped(heads, queries, keys, head, columns, dtype, device, batch)
    if device != "meta":
        q, k, v = (x.normal_() for x in (q, k, v))
    return with_results(q, k, v, **what)


def with_results(q, k, v, mask=(), scale=None, softcap=0.0, dropout_p=0.0, out_is_bshd=False, masks=()):
    """The arguments of a backward of a forward with random gradients; on meta tensors without numbers."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if q.is_meta:
        out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)
        gradient = out
    else:
        masks = [each.to(q.device) for each in masks]
        given = arguments(q, k, v, mask=mask, masks=masks, scale=scale, out_is_bshd=out_is_bshd)
        out, lse = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        out, lse = out.to(q.dtype), lse.float()
        gradient = torch.randn_like(out)
    return (
        gradient,
        None,
        q,
        k,
        v,
        out,
        lse,
        list(masks),
        [],
        list(mask),
        [],
        scale,
        softcap,
        out_is_bshd,
        None,
        dropout_p,
    )


def bools(queries, keys):
    return {"mask": (program.DENSE, 0), "masks": [torch.ones(1, 1, queries, keys, dtype=torch.bool)]}


TAKEN = {
    "128": lambda: gradient_call(2, (4, 4), 4096, 4096, 128, 128),
    "128, causal": lambda: gradient_call(2, (4, 2), 8192, 8192, 128, 128, mask=CAUSAL),
    "128, a window": lambda: gradient_call(2, (4, 2), 8192, 8192, 128, 128, mask=(program.BAND, -1024, 0)),
    "128, 512 queries": lambda: gradient_call(16, (16, 16), 512, 512, 128, 128, mask=CAUSAL),
    "128, one tile of keys": lambda: gradient_call(32, (16, 16), 200, 128, 128, 128, mask=CAUSAL),
    "128, short and capped": lambda: gradient_call(16, (16, 16), 256, 256, 128, 128, softcap=3.0),
    "64, short": lambda: gradient_call(32, (32, 16), 128, 128, 64, 64),
    "64 and 128": lambda: gradient_call(2, (4, 2), 8192, 8192, 64, 128, mask=CAUSAL),
    "40": lambda: gradient_call(2, (4, 2), 8192, 8192, 40, 40),
    "96": lambda: gradient_call(2, (4, 2), 8192, 8192, 96, 96),
    "192": lambda: gradient_call(2, (4, 2), 4096, 4096, 192, 192, mask=CAUSAL),
    "192 and 256": lambda: gradient_call(2, (4, 2), 4096, 4096, 192, 256, mask=CAUSAL),
    "72, short": lambda: gradient_call(16, (16, 16), 256, 256, 72, 72),
    "256, documents": lambda: gradient_call(
        2, (4, 2), 8192, 8192, 256, 256, mask=SEGMENTS, masks=[documents(2, 8192, 9)] * 2
    ),
    "a soft cap": lambda: gradient_call(2, (4, 2), 8192, 8192, 64, 64, softcap=3.0),
    "documents": lambda: gradient_call(2, (4, 2), 8192, 8192, 64, 64, mask=SEGMENTS, masks=[documents(2, 8192, 9)] * 2),
    "bools": lambda: gradient_call(2, (4, 2), 8192, 8192, 64, 64, **bools(8192, 8192)),
    "documents and lengths": lambda: gradient_call(
        1, (2, 2), 16384, 16384, 64, 64, mask=(*SEGMENTS, program.LENGTH, 2, program.AND),
        masks=[documents(1, 16384, 9)] * 2 + [torch.tensor([9], dtype=torch.int32)],
    ),
    "many heads": lambda: gradient_call(2, (32768, 32768), 2, 2, 64, 64),
}  # fmt: skip
SLOWER = {
    "short": lambda: gradient_call(32, (16, 16), 256, 256, 128, 128, mask=CAUSAL),
    "96, short": lambda: gradient_call(32, (16, 16), 256, 256, 96, 96, mask=CAUSAL),
    "a narrow window": lambda: gradient_call(2, (4, 2), 8192, 8192, 128, 128, mask=(program.BAND, -256, 0)),
    "fewer tiles than multiprocessors": lambda: gradient_call(1, (16, 16), 1024, 1024, 64, 64),
    "256": lambda: gradient_call(2, (4, 2), 8192, 8192, 256, 256),
}
REFUSED_GRADIENTS = {
    "264": lambda: gradient_call(2, (4, 2), 4096, 4096, 264, 264),
    "100": lambda: gradient_call(2, (4, 2), 4096, 4096, 100, 100),
    "float32": lambda: gradient_call(2, (4, 2), 4096, 4096, 64, 64, torch.float32),
    "dropout": lambda: gradient_call(2, (4, 2), 4096, 4096, 64, 64, dropout_p=0.5),
    "the least scales": lambda: gradient_call(2, (4, 2), 4096, 4096, 64, 64, scale=2.0**-70),
}


@pytest.mark.usefixtures("a_hopper")
class TestTakesGradients:
    def test_calls_for_which_it_is_faster_and_no_others(self):
        calls = TAKEN | SLOWER | REFUSED_GRADIENTS
        taken = [case for case, given in calls.items() if backward_cuda.takes(GradientCall(*given()))]
        assert taken == [*TAKEN]

    @pytest.mark.parametrize("dtype", [BF16, torch.float32])
    @pytest.mark.parametrize("head", [64, 128])
    def test_relative_positions_of_narrow_heads_unless_in_16_bits(self, head, dtype):
        call = GradientCall(*gradient_call(2, (4, 2), 4096, 4096, head, head))
        tensors = [torch.empty(2, 4, 4096, 64, dtype=dtype, device="meta") for _ in range(2)]
        call = call._replace(bias=[program.BIAS_REL, 0, 1, 64], bias_tensors=tensors)
        assert backward_cuda.takes(call) == (head == 128 or dtype == torch.float32)

    def test_it_fits_others_too(self):
        assert all(backward_cuda.fits(GradientCall(*given())) for given in SLOWER.values())

    def test_none_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(library, "compiler_there", lambda: False)
        assert not backward_cuda.takes(GradientCall(*TAKEN["128"]()))


def test_refuses_gradients():
    said = r"kernel 'hopper_cuda' does not take q, k, v of .* Leave the choice"
    assert not unlike(REFUSED_GRADIENTS, refuses(backward_cuda.backward, said))


@pytest.mark.usefixtures("a_hopper")
@pytest.mark.parametrize("kernel", ["forward", "backward", "decode"])
def test_where_the_compiler_refuses_it_calls_get_another_one(kernel, monkeypatch):
    def refuse(request):
        raise CompileError(f"NVRTC refused {request.units[0].name}.\nMore of what it said.")

    module, other, call = {
        "forward": (cuda, portable_forward, arguments(*shaped((4, 2), 8192, 8192, 64, 64), mask=CAUSAL)),
        "backward": (backward_cuda, gluon_backward, TAKEN["128"]()),
        "decode": (decode_cuda, decoding, arguments(*shaped((4, 2), 1, 8192, 64, 64))),
    }[kernel]
    monkeypatch.setattr(library, "_refused", set())
    monkeypatch.setattr(library, "build", refuse)
    if kernel == "forward":
        monkeypatch.setattr(other, "prepare_forward", lambda call: lambda *again: "another")
    else:
        monkeypatch.setattr(other, kernel, SimpleNamespace(prepare=lambda *given: lambda *again: "another"))
    library.kernels.cache_clear()
    read = GradientCall if kernel == "backward" else AttentionCall
    assert module.takes(read(*call))
    with pytest.warns(
        NoCompilerWarning, match=rf"{kernel}\.cu could not be compiled.*NVRTC refused {kernel}\.cu for .*\. It needs"
    ):
        assert getattr(module, kernel)(*call) == "another"
    assert not module.takes(read(*call))
    assert getattr(module, kernel)(*call) == "another"  # without asking the compiler again


# ---- how a call is divided --------------------------------------------------------------------------------------------


def causal_call(batch, heads, queries, head=128, mask=CAUSAL, masks=()):
    q = torch.empty(batch, heads, queries, head, dtype=BF16, device="meta")
    return GradientCall(q, None, q, q, q, q, q[..., 0], list(masks), [], list(mask), [], 1.0, 0.0, False)


def problem_of(call, ordered=False):
    return backward_cuda._problem(call, backward_kinds.kind_of(call, ordered))


def test_sections_are_about_as_large(monkeypatch):
    monkeypatch.setattr(calls, "processors", lambda device: 132)
    of = (2, 16, 8192), (1, 16, 16384), (1, 40, 8192), (16, 16, 512)
    assert [problem_of(causal_call(*sizes)).section for sizes in of] == [4, 2, 4, 32]


def test_all_rows_of_short_calls_are_prepared_before(monkeypatch):
    monkeypatch.setattr(calls, "processors", lambda device: 2)
    for queries, all_of_them in ((512, True), (1023, True), (1024, False)):
        prepared = problem_of(causal_call(64, 8, queries)).prepared
        assert (prepared == 64 * 8) == all_of_them, queries


def test_the_longest_tiles_do_not_come_last():
    for heads, length, head, mask, share in (  # of the tiles those that go from the first queries to the last
        (64, 2048, 128, CAUSAL, 0.0),
        (32, 8192, 128, CAUSAL, 28 / 32),
        (64, 2048, 64, CAUSAL, 1 / 2),
        (32, 8192, 128, (program.BAND, -1024, 0), 1.0),
    ):
        section = calls.evenly(heads, backward_cuda._CACHED // (length * head * 8))
        call = causal_call(1, heads, length, head, mask)
        found = backward_cuda._turned(
            call, plans.shape_of(mask, ()), section, backward_kinds.kind_of(call, ordered=True)
        )
        assert found == share * heads * (length // 128), (heads, length, head, mask)


INTERLEAVED = {  # a mask, and heads that are interleaved, of 64 and of 128 channels: in any order, and in order
    "causal": (CAUSAL, [(4, 4), (2, 2)]),
    "window": ((program.BAND, -1024, 0), [(4, 8), (2, 2)]),
    "causal documents": (PACKED, [(4, 8), (2, 2)]),
    "documents": (SEGMENTS, [(4, 11), (2, 4)]),
}


def test_more_heads_are_interleaved_where_tiles_would_wait_for_one_another():
    ids = [torch.empty(1, 16384, device="meta")] * 2
    for case, (mask, expected) in INTERLEAVED.items():
        calls = [causal_call(2, 16, 16384, head, mask, ids) for head in (64, 128)]
        found = [tuple(problem_of(call, ordered).section for ordered in (False, True)) for call in calls]
        assert found == expected, case


@pytest.mark.usefixtures("deterministic")
def test_a_call_has_the_kernels_of_whether_sums_are_made_in_order(monkeypatch):
    asked, made = [], SimpleNamespace(launching=lambda *of_call: lambda problem, stream: None)
    made.numbers = {"gradients": (384, 0, 128, 128, 1, 64), "after_products": (256, 0, 2)}
    monkeypatch.setattr(library, "kernels_or_none", lambda name, dtype, defined, lists: asked.append(defined) or made)
    monkeypatch.setattr(calls, "processors", lambda device: 2)
    call = gradient_call(1, (1, 1), 256, 256, 64, 64, device="cpu")
    run = backward_cuda.backward.prepare(*call)
    for ordered in (True, False, True, False):
        torch.use_deterministic_algorithms(ordered)
        run(*call)
    assert [text.splitlines()[0].split()[-2] for text in asked] == ["true,", "false,"]


# ---- numbers ---------------------------------------------------------------------------------------------------------

GRADIENTS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one tile": ((1, (1, 1), 128, 128, 128, 128), {}),
    "tails": ((2, (4, 2), 333, 300, 128, 128), {}),
    "tails, causal": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL}),
    "causal, 64": ((2, (4, 2), 300, 300, 64, 64), {"mask": CAUSAL}),
    "dead rows": ((1, (2, 2), 500, 70, 64, 64), {"mask": bottom_right(500, 70)}),
    "window": ((1, (4, 1), 1000, 1000, 128, 128), {"mask": (program.BAND, -100, 0)}),
    "many tiles": ((8, (16, 4), 640, 640, 64, 64), {"mask": CAUSAL}),
    "many tiles, 128": ((8, (16, 16), 640, 640, 128, 128), {"mask": CAUSAL}),
    "rows that helpers prepare": ((4, (32, 16), 1536, 1024, 128, 128), {}),
    "rows that helpers prepare, 64": ((4, (32, 16), 1024, 1100, 64, 64), {"mask": CAUSAL}),
    "heads inside": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "out_is_bshd": True}),
    "64 and 128": ((1, (2, 1), 500, 500, 64, 128), {"mask": CAUSAL}),
    "long": ((1, (2, 1), 4500, 4500, 64, 64), {"mask": CAUSAL}),
    "documents": ((2, (4, 2), 1500, 1500, 128, 128), {"mask": SEGMENTS, "masks": [documents(2, 1500, 5)] * 2}),
    "causal documents": ((8, (16, 4), 1100, 1100, 128, 128), {"mask": PACKED, "masks": [documents(8, 1100, 5)] * 2}),
    "causal documents, 64": ((2, (16, 16), 1100, 1100, 64, 64), {"mask": PACKED, "masks": [documents(1, 1100, 5)] * 2}),
    "shuffled": ((2, (4, 4), 500, 700, 64, 64), {"mask": SEGMENTS, "masks": [shuffled(2, 500), shuffled(2, 700)]}),
}


def compared_gradients(call):
    found = backward_cuda.backward(*call)
    expected = gradients.attention_backward(*[x.double() if isinstance(x, torch.Tensor) else x for x in call])
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).abs().max() <= 2 * torch.finfo(call[2].dtype).eps * y.abs().max().clamp(min=0.1)
    return found


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbersOfAllCalls:
    pytestmark = on_hopper_with_compiler

    def test_are_the_references(self, case, dtype):
        sizes, what = CALLS[case]
        compared(called(filled(*sizes, dtype, what.get("out_is_bshd", False)), **what), backward_cuda.backward)


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.usefixtures("deterministic")
class TestDeterministic:
    pytestmark = on_hopper_with_compiler

    def test_numbers_are_the_references_and_the_same_in_every_run(self, case):
        sizes, what = CALLS[case]
        given = called(filled(*sizes, out_is_bshd=what.get("out_is_bshd", False)), **what)
        first = compared(given, backward_cuda.backward)
        for _ in range(3):
            assert all(map(torch.equal, first, backward_cuda.backward(*given)))


class TestGradientsOnGpu:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.parametrize("case", LARGE)
    def test_of_huge_logits(self, case):
        sizes, what = LARGE[case]
        made = filled(*sizes, FP16, what.get("out_is_bshd", False))
        compared(called(large(made, "some" in case), **what), backward_cuda.backward)

    @pytest.mark.sweep(keep=["hidden, 64, bools", "hidden, 136, lengths", "hidden, 256, causal documents, capped"])
    @pytest.mark.parametrize("case", HIDING)
    def test_what_is_hidden_does_not_leak(self, case):
        head, what = HIDING[case]
        compared_where_hidden(filled(1, (2, 1), 300, 300, head, head), what, backward_cuda.backward)

    @pytest.mark.sweep(keep=["hidden rows, 128, bools", "hidden rows, 200, causal documents, capped"])
    @pytest.mark.parametrize("case", ROWS_HIDING)
    def test_hidden_queries_and_gradients_do_not_leak(self, case):
        head, what = ROWS_HIDING[case]
        compared_where_rows_are_hidden(filled(1, (2, 1), 300, 300, head, head), what, backward_cuda.backward)

    @pytest.mark.sweep
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("case", GRADIENTS)
    def test_are_the_references(self, case, dtype):
        sizes, what = GRADIENTS[case]
        compared_gradients(gradient_call(*sizes, dtype, "cuda", **what))

    @pytest.mark.parametrize("head", [64, 128])
    def test_hidden_keys_and_values_do_not_leak(self, head):
        call = list(gradient_call(1, (2, 1), 200, 300, head, head, device="cuda", mask=CAUSAL))
        expected = backward_cuda.backward(*call)
        call[3], call[4] = call[3].clone(), call[4].clone()
        call[3][:, :, 210:], call[4][:, :, 210:] = float("nan"), float("inf")
        for x, y in zip(backward_cuda.backward(*call), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)

    def test_gradients_of_keys_and_values_are_deterministic(self):
        call = gradient_call(4, (16, 4), 700, 900, 128, 128, device="cuda", mask=CAUSAL)
        first = backward_cuda.backward(*call)
        for _ in range(3):
            assert all(map(torch.equal, first[1:], backward_cuda.backward(*call)[1:]))

    @pytest.mark.usefixtures("deterministic")
    @pytest.mark.parametrize("case", GRADIENTS)
    def test_with_deterministic_algorithms_all_are(self, case):
        sizes, what = GRADIENTS[case]
        self.same_bits(gradient_call(*sizes, device="cuda", **what))

    @pytest.mark.usefixtures("deterministic")
    @pytest.mark.sweep
    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -1000, 0), (program.BAND, -program.UNLIMITED, 300)])
    @pytest.mark.parametrize("head", [64, 128])
    def test_heads_that_go_one_way_and_others_that_go_the_other_are(self, monkeypatch, head, mask):
        monkeypatch.setattr(backward_cuda, "_CACHED", 6 << 20)  # sections of a few heads
        call = gradient_call(1, (6, 6), 2500, 2500, head, head, device="cuda", mask=mask)
        self.same_bits(call)

    @staticmethod
    def same_bits(call):
        first = compared_gradients(call)
        for _ in range(5):
            assert all(map(torch.equal, first, backward_cuda.backward(*call)))

    def test_a_segment_does_not_leak_into_others(self):
        call = gradient_call(
            1, (2, 1), 300, 300, 128, 128, device="cuda", mask=PACKED, masks=[packed(150, 100, 50)] * 2
        )
        expected = backward_cuda.backward(*call)
        for place, row in ((2, 170), (3, 180), (4, 200), (0, 220)):
            call[place][:, :, row] = float("nan")
        others = packed(150, 100, 50)[0] != 1
        for x, y in zip(backward_cuda.backward(*call)[:3], expected, strict=False):
            torch.testing.assert_close(x[:, :, others], y[:, :, others], rtol=2e-2, atol=2e-2)

    def test_a_graph_can_be_captured(self):
        call = gradient_call(2, (4, 2), 300, 300, 64, 64, device="cuda", mask=CAUSAL)
        expected = backward_cuda.backward(*call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = backward_cuda.backward(*call)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected[1:], found[1:]))
        torch.testing.assert_close(expected[0], found[0], rtol=2e-2, atol=2e-2)
