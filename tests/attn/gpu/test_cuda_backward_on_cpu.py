"""The backward for sm_90a in CUDA C++, run on a processor in random orders of events: its numbers beside the reference's."""

import random

import pytest
import torch
from cuda_on_cpu import NONE, filled, on_cpu, survives
from hopper_backward_calls import (
    CALLS,
    HIDING,
    LARGE,
    ROWS_HIDING,
    called,
    compared,
    compared_where_hidden,
    compared_where_rows_are_hidden,
    large,
)
from hopper_calls import BF16, CAUSAL, FP16, arguments, bottom_right
from hopper_masks import documents, packed, padded, random_mask, shuffled

from opkit.attn import gradients, reference
from opkit.attn.calls import GradientCall
from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.hopper import backward_cuda, backward_kinds
from opkit.attn.masks import program

pytestmark = pytest.mark.emulated

GRADIENTS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one tile": ((1, (1, 1), 128, 128, 64, 64), {}),
    "tails, 128": ((1, (2, 1), 133, 150, 128, 128), {}),
    "tails, causal, 128": ((1, (2, 1), 300, 300, 128, 128), {"mask": CAUSAL}),
    "causal, 64": ((2, (4, 2), 300, 300, 64, 64), {"mask": CAUSAL}),
    "one query": ((1, (2, 1), 1, 77, 128, 128), {}),
    "one key": ((3, (5, 1), 129, 1, 64, 64), {}),
    "few keys": ((2, (4, 2), 300, 100, 72, 72), {"mask": CAUSAL, "out_is_bshd": True}),
    "256, few keys": ((1, (4, 2), 150, 50, 200, 256), {}),
    "dead rows": ((1, (2, 2), 300, 70, 128, 128), {"mask": bottom_right(300, 70)}),
    "all rows dead": ((1, (2, 1), 200, 200, 64, 64), {"mask": (program.BAND, 1000, 2000)}),
    "window": ((1, (4, 1), 400, 400, 64, 64), {"mask": (program.BAND, -100, 0)}),
    "window far behind": ((1, (2, 2), 257, 500, 128, 128), {"mask": (program.BAND, -200, -100)}),
    "many tiles": ((2, (4, 4), 260, 400, 64, 64), {"mask": CAUSAL}),
    "heads inside": ((1, (4, 2), 200, 200, 128, 128), {"mask": CAUSAL, "out_is_bshd": True}),
    "64 and 128": ((1, (2, 1), 200, 200, 64, 128), {"mask": CAUSAL}),
    "128 and 64": ((1, (2, 1), 200, 200, 128, 64), {"scale": 0.2}),
}


def gradient_call(sizes, dtype=BF16, of_lse=False, **what):
    """A call of the backward, with the reference's results; and their exact gradients."""
    q, k, v = filled(*sizes, dtype=dtype, out_is_bshd=what.get("out_is_bshd", False))
    return with_results(q, k, v, of_lse, **what)


def with_results(q, k, v, of_lse=False, **what):
    given = arguments(q, k, v, **what)
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    out, lse = reference.attention(*exact)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.empty_like(out, dtype=q.dtype).normal_(generator=generator)
    of_lse = torch.empty_like(lse, dtype=torch.float32).normal_(generator=generator) if of_lse else None
    rest = (given[3], [], given[7], [], given[9], 0.0, given[12])
    call = (gradient, of_lse, q, k, v, out.to(q.dtype), lse.float(), *rest)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in call]
    return call, gradients.attention_backward(*wide)


def off(found, expected):
    """How far the results are off at most, as a share of the greatest element; NaN if some element is."""
    shares = [(x.double() - y).abs().max() / y.abs().max().clamp(min=0.1) for x, y in zip(found, expected, strict=True)]
    return torch.stack(shares).max().item()


def let_helpers_prepare(monkeypatch):
    """Rows of all heads but the first ones, also in short calls."""
    for name in ("_CACHED", "_CACHED_SHORT", "_CACHED_WIDE", "_AHEAD", "_HELPED"):
        monkeypatch.setattr(backward_cuda, name, 0)


def problem_of(call):
    given = GradientCall(*call)
    return backward_cuda._problem(given, backward_kinds.kind_of(given, ordered=False))


class TestBackward:
    @pytest.mark.sweep
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("case", GRADIENTS)
    def test_numbers_are_the_references(self, machine, case, dtype):
        sizes, what = GRADIENTS[case]
        call, expected = gradient_call(sizes, dtype, **what)
        found = backward_cuda.backward(*call)
        assert [x.dtype for x in found] == [dtype] * 3 + [torch.float32]
        assert all((x.transpose(1, 2) if what.get("out_is_bshd") else x).is_contiguous() for x in found[:3])
        rounding = torch.finfo(dtype).eps
        assert off(found, expected) < 2 * rounding

    @pytest.mark.sweep
    @pytest.mark.parametrize("order", range(4))
    @pytest.mark.parametrize(("head", "mask"), [(64, CAUSAL), (128, ()), (128, (program.BAND, -150, 20))])
    def test_rows_that_helpers_prepare(self, machine, monkeypatch, head, mask, order):
        let_helpers_prepare(monkeypatch)
        call, expected = gradient_call((2, (6, 3), 200, 170, head, head), of_lse=True, mask=mask)
        assert problem_of(call).prepared < 12
        machine[0] = order
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps

    def test_a_gradient_of_the_log_sum_exp(self, machine):
        call, expected = gradient_call((1, (2, 1), 200, 150, 64, 64), of_lse=True, mask=CAUSAL)
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps

    @pytest.mark.sweep
    @pytest.mark.parametrize("order", range(1, 4))
    @pytest.mark.parametrize(("head", "mask"), [(64, CAUSAL), (128, CAUSAL), (64, ()), (128, (program.BAND, -150, 20))])
    def test_any_order_of_events_gives_the_same(self, machine, head, mask, order):
        call, expected = gradient_call((1, (4, 2), 300, 300, head, head), mask=mask)
        machine[0] = order
        found = backward_cuda.backward(*call)
        machine[0] = 0
        assert off(found, expected) < 2 * torch.finfo(BF16).eps
        assert all(
            map(torch.equal, found[1:], backward_cuda.backward(*call)[1:])
        )  # the gradient of queries is summed in any order

    @pytest.mark.sweep
    @pytest.mark.parametrize("head", [64, 128])
    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -50, 30)])
    def test_hidden_keys_and_values_do_not_leak(self, machine, head, mask):
        q, k, v = filled(1, (2, 1), 200, 300, head, head)
        call, expected = with_results(q, k, v, mask=mask)
        k[:, :, 240:], v[:, :, 240:] = (
            float("nan"),
            float("inf"),
        )  # no query sees them; keys before them, in the same tile, are seen
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps

    @pytest.mark.parametrize("helpers", [False, True])
    @pytest.mark.parametrize("case", LARGE)
    def test_rows_of_huge_logits(self, listed, monkeypatch, helpers, case):
        if helpers:
            let_helpers_prepare(monkeypatch)
        sizes, what = LARGE[case]
        tensors = large(filled(*sizes, FP16, what.get("out_is_bshd", False)), "some" in case)
        listed[0] = 1
        compared(called(tensors, **what), backward_cuda.backward)

    @pytest.mark.parametrize("head", [64, 128])
    def test_a_query_that_is_not_finite_reaches_what_it_sees_alone(self, machine, head):
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        call, expected = with_results(q, k, v, mask=CAUSAL)
        row = 170  # in a block of queries of which some keys' tile is partly seen
        q[:, :, row] = float("inf")
        call[6][:, :, row] = float("nan")  # its log-sum-exp
        of_q, of_k, of_v, _ = backward_cuda.backward(*call)
        others = torch.arange(300) != row
        found = of_q[:, :, others], of_k[:, :, row + 1 :], of_v[:, :, row + 1 :]
        same = expected[0][:, :, others], expected[1][:, :, row + 1 :], expected[2][:, :, row + 1 :]
        assert off(found, same) < 2 * torch.finfo(BF16).eps
        assert of_v[:, :, : row + 1].isnan().any()

    @pytest.mark.parametrize("head", [64, 128])
    def test_its_room_is_as_large_as_what_it_puts_there(self, machine, monkeypatch, head):
        let_helpers_prepare(monkeypatch)
        made = []

        def guarded(x, size, dtype):
            made.append(torch.full((size + 256,), 7.0, dtype=dtype))
            return made[-1][:size]

        monkeypatch.setattr(backward_cuda, "allocate_scratch", guarded)
        call, _ = gradient_call((3, (6, 2), 133, 150, head, head))
        backward_cuda.backward(*call)
        assert (made[0][-256:] == 7).all()
        assert made[0][-257] != 7  # the last count

    def test_strides_that_tma_cannot_follow_are_copied(self, machine):
        q, k, v = filled(1, (4, 2), 150, 150)
        q = q.mT.contiguous().mT
        k = torch.nn.functional.pad(k, (3, 0))[..., 3:]
        call, expected = with_results(q, k, v[:, :1].expand(1, 2, 150, 64), mask=CAUSAL)
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps


# ---- segments: steps come from lists --------------------------------------------------------------------------------------

SEGMENTS = {  # queries, keys, a mask, and numbers of segments
    "documents": (400, 400, (program.SEGMENTS, 0, 1), [documents(1, 400, 4)] * 2),
    "causal documents": (400, 400, (*CAUSAL, program.SEGMENTS, 0, 1, program.AND), [documents(2, 400, 4)] * 2),
    "documents of one tile": (256, 256, (*CAUSAL, program.SEGMENTS, 0, 1, program.AND), [packed(128, 128)] * 2),
    "other keys": (133, 300, (program.SEGMENTS, 0, 1), [documents(2, 133, 3), documents(1, 300, 3, seed=1)]),
    "shuffled": (200, 333, (program.SEGMENTS, 0, 1), [shuffled(2, 200), shuffled(2, 333)]),
    "a window": (400, 400, (program.BAND, -90, 0, program.SEGMENTS, 0, 1, program.AND), [documents(2, 400, 3)] * 2),
    "documents and padding": (400, 400, (*CAUSAL, program.SEGMENTS, 0, 1, program.AND), [padded(5, 100, 130, 120)] * 2),
    "in order in one batch alone": (
        300, 300, (program.SEGMENTS, 0, 1), [torch.cat([packed(100, 90, 110), shuffled(1, 300)])] * 2,
    ),
    "keys out of order": (333, 200, (program.SEGMENTS, 0, 1), [packed(100, 50, 183), shuffled(1, 200)]),
    "queries out of order": (280, 119, (program.SEGMENTS, 0, 1), [shuffled(1, 280), packed(50, 40, 29)]),
    "nothing in common": (200, 150, (program.SEGMENTS, 0, 1), [packed(200), packed(150) + 7]),
}  # fmt: skip


@pytest.mark.parametrize("head", [64, 128])
class TestSegments:
    @pytest.mark.sweep
    @pytest.mark.parametrize("case", SEGMENTS)
    def test_numbers_are_the_references_in_any_order_of_events(self, listed, monkeypatch, case, head):
        let_helpers_prepare(monkeypatch)
        queries, keys, mask, ids = SEGMENTS[case]
        call, expected = gradient_call((2, (2, 1), queries, keys, head, head), mask=mask, masks=ids)
        found = []
        for order in range(3):
            listed[0] = order
            found.append(backward_cuda.backward(*call))
            assert off(found[-1], expected) < 2 * torch.finfo(BF16).eps
            assert all(map(torch.equal, found[0][1:], found[-1][1:]))

    def test_float16_and_a_gradient_of_the_log_sum_exp(self, listed, head):
        what = {"mask": (program.SEGMENTS, 0, 1), "masks": [documents(2, 200, 3)] * 2}
        call, expected = gradient_call((2, (2, 2), 200, 200, head, head), FP16, of_lse=True, **what)
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(FP16).eps

    def test_what_is_not_finite_stays_in_its_segment(self, listed, head):
        ids = packed(150, 100, 50)
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        call, expected = with_results(q, k, v, mask=(*CAUSAL, program.SEGMENTS, 0, 1, program.AND), masks=[ids, ids])
        q[:, :, 170], k[:, :, 180], v[:, :, 200] = float("nan"), float("inf"), float("-inf")
        call[0][:, :, 220] = float("nan")
        others = ids[0] != 1
        found = [x[:, :, others] for x in backward_cuda.backward(*call)[:3]]
        assert off(found, [x[:, :, others] for x in expected[:3]]) < 2 * torch.finfo(BF16).eps

    def test_numbers_of_segments_that_lie_apart(self, listed, head):
        ids = documents(2, 200, 3)
        call, expected = gradient_call(
            (2, (2, 2), 200, 200, head, head), mask=(program.SEGMENTS, 0, 1), masks=[ids, ids]
        )
        call[7][:] = [ids.repeat_interleave(3, 1)[:, ::3], ids.t().contiguous().t()]
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps


# ---- what else calls ask for -------------------------------------------------------------------------------------------

ASKED = (
    "capped", "64, capped", "72 and 128", "40", "96", "lengths", "causal with lengths", "bools of heads", "seven tensors",
    "not these documents, or near", "a diagonal of each query", "blocks of bools, 64", "documents, 72 and 128",
    "256, tails", "256, causal", "256, capped", "136", "192 and 128", "64 and 256", "256, documents", "256, causal with lengths",
    "136, blocks of bools, capped", "192, bools of heads",
)  # fmt: skip
KEPT = (
    "capped", "72 and 128", "causal with lengths", "bools of heads", "a diagonal of each query", "256, causal",
    "136, blocks of bools, capped",
)  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(24))
def test_random_masks(listed, monkeypatch, seed):
    let_helpers_prepare(monkeypatch)
    choose = random.Random(seed)
    batch, heads = choose.choice([1, 2]), choose.choice([(1, 1), (2, 1), (3, 3)])
    sizes = choose.randint(1, 280), choose.randint(1, 280)
    mask, tensors = random_mask(seed, batch, heads[0], *sizes)
    head = (64, 128, 256)[seed % 3]
    call, expected = gradient_call((batch, heads, *sizes, head, head), mask=tuple(mask), masks=tensors)
    listed[0] = seed
    assert off(backward_cuda.backward(*call), expected) < 3 * torch.finfo(BF16).eps


@pytest.mark.sweep(keep=["a diagonal of each query"])
@pytest.mark.parametrize("case", ["not these documents, or near", "a diagonal of each query", "blocks of bools, 64"])
def test_some_tiles_of_a_mask_have_no_bits(listed, monkeypatch, case):
    monkeypatch.setattr(tile_lists, "bits_fit", lambda *of: False)
    sizes, what = CALLS[case]
    call, expected = gradient_call(sizes, **what)
    assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps


@pytest.mark.parametrize("ordered", [False, True], ids=["", "deterministic"])
@pytest.mark.sweep(keep=KEPT)
@pytest.mark.parametrize("case", ASKED)
def test_numbers_are_the_references_of_what_calls_ask_for(listed, request, monkeypatch, case, ordered):
    let_helpers_prepare(monkeypatch)
    if ordered:
        request.getfixturevalue("deterministic")
    sizes, what = CALLS[case]
    given = called(filled(*sizes, out_is_bshd=what.get("out_is_bshd", False)), **what)
    first = compared(given, backward_cuda.backward)
    listed[0] = 1
    found = backward_cuda.backward(*given)
    assert all(map(torch.equal, first[not ordered :], found[not ordered :]))


HIDDEN = (
    "hidden, 96, both sides",
    "hidden, 64, bools",
    "hidden, 136, lengths",
    "hidden, 256, causal documents, capped",
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_keys_and_values_do_not_leak(listed, case):
    head, what = HIDING[case]
    compared_where_hidden(filled(1, (2, 1), 300, 300, head, head), what, backward_cuda.backward)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", ["hidden rows, 128, bools", "hidden rows, 200, causal documents, capped"])
def test_hidden_queries_and_gradients_do_not_leak(listed, case):
    head, what = ROWS_HIDING[case]
    compared_where_rows_are_hidden(filled(1, (2, 1), 300, 300, head, head), what, backward_cuda.backward)


# ---- the machine finds what it is for ---------------------------------------------------------------------------------

BACKWARD_DEFECTS = {
    "none": NONE,
    "the other half of gradients of logits is not waited for": (
        "                wait(barriers + SLOPES_FULL + (slot ^ 1) * 8, (it - 1) / STAGES & 1);\n", "",
    ),
    "a buffer of these that is written too early": ("            wait(barriers + SLOPES_EMPTY + slot * 8, parity ^ 1);\n", ""),
}  # fmt: skip
HELPERS_DEFECTS = {
    "rows that nobody waits for": ("        if (head >= problem.prepared) wait_count(", "        if (false) wait_count("),
    "gradients that are rounded before all is added": (
        "        wait_count(summed(problem, key_head), tiles_of_head<S>(problem));\n", "",
    ),
    "rounded numbers that are overwritten": ("        stores_commit();\n        stores_read();\n", "        stores_commit();\n"),
    "an item that is overwritten": ("        if (it >= AT_ONCE) wait(place.done(), place.parity() ^ 1);\n", ""),
}  # fmt: skip
LISTS_DEFECTS = {
    "none": NONE,
    "a step that is published and loaded too early": (
        "        wait_empty(Q_EMPTY);\n        if (S::LISTED)", "        if (S::LISTED)",
    ),
    "a span that is not asked for": ("past = __float_as_int(both.y)", "past = problem.queries"),
    "a span from its end on": ("from &= 0x7fffffff", "from = 0"),
    "gradients that are not cleaned": ("    if (S::HIDES_ROWS) clean<S::BLOCK_BYTES>(", "    if (false) clean<S::BLOCK_BYTES>("),
}  # fmt: skip
WIDE_DEFECTS = {
    "none": NONE,
    "weights that are not waited for": ("        wait(W::barrier(WEIGHTS_FULL), it & 1);\n", ""),
    "slopes that are not waited for": ("        if constexpr (FOLLOWS) W::wait_slopes(it - 1);\n", ""),
}


class TestDefects:
    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("case", [*BACKWARD_DEFECTS, *HELPERS_DEFECTS])
    def test_of_the_backward_are_found(self, case, tmp_path, monkeypatch):
        if case in HELPERS_DEFECTS:  # two short tiles: helpers have little time, and sums of gradients to round
            call, expected = gradient_call((2, (8, 8), 128, 160, 64, 64))
        else:
            call, expected = gradient_call((1, (2, 1), 400, 300, 64, 64), mask=CAUSAL)

        def check(found):
            assert off(found, expected) < 2 * torch.finfo(BF16).eps

        let_helpers_prepare(monkeypatch)
        defect = (BACKWARD_DEFECTS | HELPERS_DEFECTS)[case]
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            assert survives(seed, lambda: backward_cuda.backward(*call), check) == (case == "none")

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("case", LISTS_DEFECTS)
    def test_of_lists_are_found(self, case, tmp_path, listed):
        ids = packed(150, 100, 150)
        call, expected = gradient_call((1, (2, 1), 400, 400, 64, 64), mask=(program.SEGMENTS, 0, 1), masks=[ids, ids])
        call[0][:, :, 170] = float("inf")

        def check(found):
            found, exact = ([x[:, :, ids[0] != 1] for x in each[:3]] for each in (found, expected))
            assert off(found, exact) < 2 * torch.finfo(BF16).eps

        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, LISTS_DEFECTS[case]) as seed:
            assert survives(seed, lambda: backward_cuda.backward(*call), check) == (case == "none")

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("case", WIDE_DEFECTS)
    def test_of_wide_heads_are_found(self, case, tmp_path):
        call, expected = gradient_call((1, (2, 1), 300, 130, 136, 136))

        def check(found):
            assert off(found, expected) < 2 * torch.finfo(BF16).eps

        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, WIDE_DEFECTS[case]) as seed:
            assert survives(seed, lambda: backward_cuda.backward(*call), check) == (case == "none")
