"""The forward for sm_90a in CUDA C++, run on a processor in random orders of events: its numbers beside the reference's."""

import math
import random

import pytest
import torch
from cuda_on_cpu import NONE, filled, on_cpu, survives
from hopper_calls import BF16, CAUSAL, FP16, arguments, bottom_right, compared, compared_where_hidden, hide, overflowing
from hopper_masks import bools, documents, lengths, packed, padded, random_mask, shuffled

from opkit.attn import reference
from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.hopper import calls, forward_cuda, forward_kinds
from opkit.attn.masks import program

pytestmark = pytest.mark.emulated

CALLS = {  # (batch, heads of queries and of keys, queries, keys), and what else
    "one tile": ((1, (1, 1), 192, 128), {}),
    "tails": ((1, (2, 1), 333, 300), {}),
    "tails, causal": ((1, (2, 1), 300, 300), {"mask": CAUSAL}),
    "one query": ((1, (2, 1), 1, 77), {}),
    "one key": ((3, (5, 1), 129, 1), {}),
    "few queries, bottom right": ((1, (1, 1), 64, 1000), {"mask": bottom_right(64, 1000)}),
    "dead rows": ((1, (2, 2), 500, 70), {"mask": bottom_right(500, 70)}),
    "all rows dead": ((1, (2, 1), 200, 200), {"mask": (program.BAND, 1000, 2000)}),
    "window": ((2, (4, 1), 500, 500), {"mask": (program.BAND, -100, 0)}),
    "narrow window": ((1, (3, 3), 257, 777), {"mask": (program.BAND, 5, 40)}),
    "window far behind": ((1, (3, 3), 257, 777), {"mask": (program.BAND, -300, -200)}),
    "many tiles": ((2, (8, 4), 640, 640), {"mask": CAUSAL}),
    "many tiles of one step": ((2, (8, 4), 640, 100), {}),
    "heads inside": ((2, (4, 2), 300, 300), {"mask": CAUSAL, "out_is_bshd": True}),
    "another scale": ((1, (4, 2), 300, 300), {"mask": CAUSAL, "scale": 0.7}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", CALLS)
class TestForwardNumbers:
    def test_are_the_references(self, machine, head, case):
        (sizes, what), dtype = CALLS[case], BF16 if head == 128 else FP16
        given = arguments(*filled(*sizes, head, head, dtype=dtype, out_is_bshd=what.get("out_is_bshd", False)), **what)
        compared(given, forward_cuda.forward(*given))


class TestForward:
    @pytest.mark.sweep
    @pytest.mark.parametrize("order", range(1, 5))
    @pytest.mark.parametrize("mask", [(), CAUSAL, (program.BAND, -150, 20)])
    def test_any_order_of_events_gives_the_same(self, machine, head, mask, order):
        given = arguments(*filled(1, (4, 2), 500, 500, head, head), mask=mask)
        machine[0] = 0
        expected = forward_cuda.forward(*given)
        machine[0] = order
        assert all(map(torch.equal, expected, forward_cuda.forward(*given)))

    @pytest.mark.sweep
    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -50, 0), bottom_right(300, 200), (program.BAND, -40, 30)])
    def test_hidden_keys_and_values_do_not_leak(self, machine, head, mask):
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        hide(k, v)
        compared_where_hidden(arguments(q, k, v, mask=mask))

    @pytest.mark.parametrize("mask", [CAUSAL, ()])
    @pytest.mark.parametrize("size", [1e6, 1e12])
    def test_huge_logits(self, machine, head, mask, size):
        q, k, v = (x.round_() for x in filled(1, (2, 1), 300, 300, head, head))
        q[..., 4:] = 0  # products are exact, and several keys' weights matter
        q *= 2.0 ** round(math.log2(size))
        given = arguments(q, k, v, mask=mask, scale=0.25)
        compared(given, forward_cuda.forward(*given))

    @pytest.mark.parametrize("head", ["64", "128"], indirect=True)
    def test_rounded_weights_that_overflow_before_a_greater_logit_comes(self, head, tmp_path):
        logit = "s[4 * i + 2 * half + j]"
        fused = (f"{logit} * factor - base", f"fmaf({logit}, factor, -base)")  # as on a GPU
        given = overflowing(head, "cpu")
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, fused):
            compared(given, forward_cuda.forward(*given))

    def test_the_counter_is_left_as_it_was(self, machine, head, monkeypatch):
        kept = []
        counters = calls.counters

        def remembered(device, size):
            new = counters(device, size)
            return lambda: kept.append(new()) or kept[-1]

        monkeypatch.setattr(calls, "counters", remembered)
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        v[:, :, 30] = float("nan")  # some rows are computed again
        forward_cuda.forward(*arguments(q, k, v, mask=CAUSAL))
        assert len(kept) == 1
        assert not kept[0].any()

    def test_what_it_counts_and_marks_with_is_all_its_own(self, machine, head, monkeypatch):
        made = []

        def guarded(device, size):
            made.append(torch.cat([torch.zeros(size, dtype=torch.int32), torch.full((256,), 7, dtype=torch.int32)]))
            return lambda: made[-1][:size]

        monkeypatch.setattr(calls, "counters", guarded)
        q, k, v = filled(2, (3, 1), 200, 150, head, head)
        v[:, :, ::7] = float("nan")  # all rows are marked
        forward_cuda.forward(*arguments(q, k, v, mask=CAUSAL))
        assert (made[0][-256:] == 7).all()


# ---- segments: steps come from lists --------------------------------------------------------------------------------------

DOCUMENTS = (program.SEGMENTS, 0, 1)
CAUSAL_DOCUMENTS = (*CAUSAL, *DOCUMENTS, program.AND)
SEGMENTS = {  # queries, keys, a mask, and numbers of segments
    "documents": (400, 400, DOCUMENTS, [documents(1, 400, 4)] * 2),
    "causal documents": (400, 400, CAUSAL_DOCUMENTS, [documents(2, 400, 4)] * 2),
    "documents of one tile": (512, 512, CAUSAL_DOCUMENTS, [packed(256, 256)] * 2),
    "documents and padding": (400, 400, CAUSAL_DOCUMENTS, [padded(5, 100, 130, 120)] * 2),
    "in order in one batch alone": (300, 300, DOCUMENTS, [torch.cat([packed(100, 90, 110), shuffled(1, 300)])] * 2),
    "queries out of order": (200, 333, DOCUMENTS, [shuffled(1, 200), packed(100, 50, 183)]),
    "far apart": (1300, 1300, DOCUMENTS, [packed(600, 50, 650)] * 2),
    "far apart, causal": (1300, 1300, CAUSAL_DOCUMENTS, [packed(600, 50, 650)] * 2),
    "one document": (300, 300, CAUSAL_DOCUMENTS, [packed(300)] * 2),
    "other keys": (133, 300, DOCUMENTS, [documents(2, 133, 3), documents(1, 300, 3, seed=1)]),
    "shuffled": (200, 333, DOCUMENTS, [shuffled(2, 200), shuffled(2, 333)]),
    "a window": (400, 400, (program.BAND, -90, 0, *DOCUMENTS, program.AND), [documents(2, 400, 3)] * 2),
    "nothing in common": (200, 150, DOCUMENTS, [packed(200), packed(150) + 7]),
    "rows that see nothing": (300, 300, DOCUMENTS, [packed(100, 100, 100), packed(100, 200)]),
}


@pytest.mark.parametrize("channels", [64, 128])
class TestSegments:
    @pytest.mark.sweep
    @pytest.mark.parametrize("case", SEGMENTS)
    def test_numbers_are_the_references_in_any_order_of_events(self, listed, case, channels):
        queries, keys, mask, ids = SEGMENTS[case]
        given = arguments(*filled(2, (2, 1), queries, keys, channels, channels), mask=mask, masks=ids)
        found = []
        for order in range(2):
            listed[0] = order
            found.append(forward_cuda.forward(*given))
            compared(given, found[-1])
            assert all(map(torch.equal, found[0], found[-1]))

    def test_float16_and_numbers_that_lie_apart(self, listed, channels):
        ids = documents(2, 300, 3)
        q, k, v = filled(2, (2, 1), 300, 300, channels, channels, dtype=FP16)
        given = arguments(
            q, k, v, mask=DOCUMENTS, masks=[ids.repeat_interleave(3, 1)[:, ::3], ids.t().contiguous().t()]
        )
        compared(given, forward_cuda.forward(*given))

    def test_what_is_not_finite_stays_in_its_segment(self, listed, channels):
        ids = packed(150, 100, 50)
        q, k, v = filled(1, (2, 1), 300, 300, channels, channels)
        given = arguments(q, k, v, mask=CAUSAL_DOCUMENTS, masks=[ids, ids])
        expected = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        k[:, :, 180], v[:, :, 200], v[:, :, 160, 1] = float("nan"), float("inf"), float("nan")
        others = ids[0] != 1
        for found, exact in zip(forward_cuda.forward(*given), expected, strict=True):
            torch.testing.assert_close(found[:, :, others].double(), exact[:, :, others], rtol=1e-2, atol=1e-2)


# ---- kinds: what a call asks for besides ------------------------------------------------------------------------------------

LENGTHS = (program.LENGTH, 0)
KINDS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "a cap, 64": ((1, (2, 1), 300, 300, 64, 64), {"mask": CAUSAL, "softcap": 3.0}),
    "a cap, 128": ((1, (2, 1), 300, 300, 128, 128), {"mask": CAUSAL, "softcap": 3.0}),
    "a cap, 256": ((1, (2, 1), 200, 300, 256, 256), {"softcap": 30.0}),
    "sinks": ((1, (4, 2), 300, 200, 64, 64), {"mask": bottom_right(300, 200), "sinks": True}),
    "sinks and a cap": ((1, (2, 1), 300, 300, 128, 128), {"sinks": True, "softcap": 3.0}),
    "sinks and a cap, few queries": (
        (2, (2, 1), 100, 300, 64, 64),
        {"mask": bottom_right(100, 300), "sinks": True, "softcap": 3.0},
    ),
    "sinks that are all that is seen": (
        (1, (2, 1), 200, 200, 64, 64),
        {"mask": (program.BAND, 500, 600), "sinks": True},
    ),
    "lengths": ((3, (2, 1), 200, 500, 64, 64), {"mask": LENGTHS, "masks": [lengths(0, 333, 500)]}),
    "lengths, 128": ((3, (2, 1), 200, 500, 128, 128), {"mask": LENGTHS, "masks": [lengths(0, 333, 700)]}),
    "causal lengths": (
        (2, (2, 1), 400, 400, 128, 128),
        {"mask": (*LENGTHS, *CAUSAL, program.AND), "masks": [lengths(100, 355)]},
    ),
    "causal lengths of many keys": (
        (2, (2, 1), 600, 600, 64, 64),
        {"mask": (*LENGTHS, *CAUSAL, program.AND), "masks": [lengths(100, 355)]},
    ),
    "lengths of a wide head": (
        (2, (2, 1), 200, 300, 256, 256),
        {"mask": (*LENGTHS, *CAUSAL, program.AND), "masks": [lengths(30, 255)]},
    ),
    "40": ((1, (2, 1), 200, 200, 40, 40), {"mask": CAUSAL}),
    "72 and 128": ((1, (2, 1), 190, 190, 72, 128), {"mask": CAUSAL}),
    "80": ((1, (2, 1), 200, 300, 80, 80), {}),
    "96": ((2, (4, 2), 300, 300, 96, 96), {"mask": CAUSAL, "out_is_bshd": True}),
    "64 and 128": ((1, (2, 1), 300, 300, 64, 128), {"mask": CAUSAL}),
    "128 and 64": ((1, (2, 1), 300, 300, 128, 64), {"mask": CAUSAL}),
    "128 and 64, many keys": ((1, (2, 1), 300, 300, 128, 64), {}),
    "192 and 128": ((1, (2, 1), 400, 400, 192, 128), {"mask": CAUSAL}),
    "192 and 128, many tiles": ((2, (4, 2), 300, 200, 192, 128), {}),
    "64 and 256": ((1, (2, 1), 300, 300, 64, 256), {"mask": CAUSAL}),
    "160 and 200": ((1, (2, 1), 300, 200, 160, 200), {"mask": CAUSAL}),
    "192": ((1, (2, 1), 300, 200, 192, 192), {"softcap": 3.0}),
    "96, documents": ((2, (2, 1), 300, 300, 96, 96), {"mask": DOCUMENTS, "masks": [documents(2, 300, 4)] * 2}),
    "256, documents": (
        (2, (2, 1), 300, 300, 256, 256),
        {"mask": CAUSAL_DOCUMENTS, "masks": [documents(2, 300, 4)] * 2},
    ),
    "256, documents far apart": (
        (1, (2, 1), 900, 900, 256, 256),
        {"mask": DOCUMENTS, "masks": [packed(420, 50, 430)] * 2},
    ),
    "documents with sinks": (
        (2, (2, 1), 300, 300, 64, 64),
        {"mask": CAUSAL_DOCUMENTS, "masks": [shuffled(2, 300)] * 2, "sinks": True},
    ),
    "documents and lengths": (
        (2, (2, 1), 300, 300, 64, 64),
        {
            "mask": (*DOCUMENTS, program.LENGTH, 2, program.AND),
            "masks": [documents(2, 300, 4)] * 2 + [lengths(77, 222)],
        },
    ),
    "bools": ((2, (4, 2), 200, 333, 128, 128), {"mask": (program.DENSE, 0), "masks": [bools(2, 1, 200, 333)]}),
    "bools, 64": (
        (2, (4, 2), 300, 500, 64, 64),
        {"mask": (*CAUSAL, program.DENSE, 0, program.AND), "masks": [bools(1, 1, 300, 500)], "softcap": 2.0},
    ),
    "bools of queries": ((2, (4, 2), 200, 300, 128, 128), {"mask": (program.DENSE, 0), "masks": [bools(1, 1, 200, 1)]}),
    "not these documents, or near": (
        (2, (2, 1), 300, 300, 64, 64),
        {"mask": (*DOCUMENTS, program.NOT, program.BAND, -30, 30, program.OR), "masks": [documents(2, 300, 3)] * 2},
    ),
    "a diagonal of each query": (
        (2, (2, 2), 200, 300, 128, 128),
        {"mask": (program.BAND_AT, 0, -20, 20), "masks": [shuffled(2, 200) * 100]},
    ),
    "two lengths": (
        (2, (2, 1), 300, 300, 256, 256),
        {"mask": (*LENGTHS, program.LENGTH, 1, program.OR), "masks": [lengths(50, 200), lengths(100)]},
    ),
}


def of_kind(case):
    (batch, heads, queries, keys, head, columns), what = KINDS[case]
    tensors = filled(batch, heads, queries, keys, head, columns, out_is_bshd=what.get("out_is_bshd", False))
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(0)) if what.get("sinks") else None
    return arguments(*tensors, **{**what, "sinks": sinks})


class TestKinds:
    @pytest.mark.sweep
    @pytest.mark.parametrize("case", KINDS)
    def test_numbers_are_the_references_in_any_order_of_events(self, listed, monkeypatch, case):
        if not case.endswith("few queries"):
            monkeypatch.setattr(forward_kinds, "is_low", lambda call, shape: False)
        if case.endswith("many keys"):
            monkeypatch.setattr(forward_kinds, "_FEW", (0, 0))
        given, found = of_kind(case), []
        for order in range(2):
            listed[0] = order
            found.append(forward_cuda.forward(*given))
            compared(given, found[-1])
            assert all(map(torch.equal, found[0], found[-1]))

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize("seed", range(24))
    def test_random_masks(self, listed, seed):
        choose = random.Random(seed)
        batch, heads = choose.choice([1, 2]), choose.choice([(1, 1), (2, 1), (3, 3)])
        sizes = choose.randint(1, 280), choose.randint(1, 280)
        mask, tensors = random_mask(seed, batch, heads[0], *sizes)
        head = (64, 128, 256)[seed % 3]
        given = arguments(*filled(batch, heads, *sizes, head, head), mask=tuple(mask), masks=tensors)
        listed[0] = seed
        compared(given, forward_cuda.forward(*given))

    @pytest.mark.sweep(keep=["a diagonal of each query"])
    @pytest.mark.parametrize("case", ["not these documents, or near", "a diagonal of each query", "bools, 64"])
    def test_some_tiles_of_a_mask_have_no_bits(self, listed, monkeypatch, case):
        monkeypatch.setattr(tile_lists, "bits_fit", lambda *of: False)
        given = of_kind(case)
        compared(given, forward_cuda.forward(*given))

    @pytest.mark.sweep
    @pytest.mark.parametrize(
        "case", ["a cap, 128", "sinks", "causal lengths", "96", "bools", "a diagonal of each query"]
    )
    def test_hidden_keys_and_values_do_not_leak(self, listed, case):
        given = of_kind(case)
        hide(given[1], given[2], (3, 150, 199))
        compared_where_hidden(given)

    def test_huge_logits_with_sinks(self, machine):
        q, k, v = (x.round_() for x in filled(1, (2, 1), 300, 300))
        q[..., 4:] = 0  # products are exact
        given = arguments(q * 2.0**20, k, v, sinks=torch.tensor([3e7, -1.0]), scale=0.25)
        compared(given, forward_cuda.forward(*given))


# ---- the machine finds what it is for ---------------------------------------------------------------------------------

DEFECTS = {
    "none": NONE,
    "values that are not waited for": ("    shared.values.wait_full();\n", ""),
    "keys that are freed before they are multiplied": (
        "    products_wait<1>();\n    hold(mine.s);\n    shared.keys.free();\n",
        "    shared.keys.free();\n    products_wait<1>();\n    hold(mine.s);\n",
    ),
    "queries that are freed a step early": (
        "if (i + 1 < work.steps) shared.keys.wait_full();",
        "if (i + 2 < work.steps) shared.keys.wait_full();",
    ),
    "a weight too many": (": end) - column)", ": end) + 1 - column)"),
    "a weight too few": ("problem.lower - column - 1)", "problem.lower - column)"),
    "a buffer that is never freed": ("    skip(shared.values, done.after);\n", ""),
}
DEFECTS_OF_LISTS = {
    "none": NONE,
    "a step that is published too early": (
        "        shared.keys.wait_empty();\n        store_four(",
        "        store_four(",
    ),
    "steps that are whole by mistake": ("n < parts ? OTHERS : NOTHING};", "NOTHING};"),
    "a segment that is not asked for": ("if (step.hidden == OTHERS) hide_others", "if (false) hide_others"),
    "results that are computed again of all keys": (
        "        if (!sees<L, BANDED>(problem, batch, head, i, j)) continue;\n",
        "",
    ),
}
DEFECTS_OF_SPANS = {
    "none": NONE,
    "a step that is published too early": DEFECTS_OF_LISTS["a step that is published too early"],
    "steps that are whole by mistake": ("plan.to ? BEYOND : NOTHING};", "plan.to ? NOTHING : NOTHING};"),
    "a key too many": ("span.y - 1, column)", "span.y, column)"),
    "a key too few": ("columns_to(first - 1 - column)", "columns_to(first - column)"),
    "steps that no warpgroup but the first needs": (
        "if (seen.x < seen.y) plan.at",
        "if (seen.x < seen.y && group == 0) plan.at",
    ),
}
DEFECTS_OF_TURNS = {
    "none": NONE,
    "a turn that is not passed on": ("    pass_turn<L>(group);\n    products_wait", "    products_wait"),
    "a turn too many": (
        "    if (group == 0) take_turn<L>(group);  // the last one that was passed on\n",
        "    take_turn<L>(group);\n",
    ),
}


class TestDefects:
    @pytest.mark.sweep(2)
    @pytest.mark.parametrize(
        ("case", "head"),
        [*((case, head) for case in DEFECTS for head in ("64", "256")), *((case, "128") for case in DEFECTS_OF_TURNS)],
        indirect=["head"],
    )
    def test_of_the_forward_are_found(self, case, head, tmp_path):
        given = arguments(*filled(1, (3, 1), 500, 700, head, head), mask=(program.BAND, -250, 100))
        defect = (DEFECTS | DEFECTS_OF_TURNS)[case]
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            found = survives(seed, lambda: forward_cuda.forward(*given), lambda found: compared(given, found))
            assert found == (defect is NONE)

    @pytest.mark.sweep(2)
    @pytest.mark.parametrize(
        "case", [*((case, True) for case in DEFECTS_OF_SPANS), *((case, False) for case in DEFECTS_OF_LISTS)]
    )
    def test_of_segments_are_found(self, case, tmp_path, listed):
        name, in_order = case
        ids = documents(1, 500, 5)
        q, k, v = filled(1, (3, 1), 500, 500)
        given = arguments(q, k, v, mask=CAUSAL_DOCUMENTS, masks=[ids if in_order else -ids] * 2)
        expected = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        v[:, :, 300] = float("nan")
        others = ids[0] != ids[0, 300]

        def check(found):
            for x, exact in zip(found, expected, strict=True):
                torch.testing.assert_close(x[:, :, others].double(), exact[:, :, others], rtol=1e-2, atol=1e-2)

        defect = (DEFECTS_OF_SPANS if in_order else DEFECTS_OF_LISTS)[name]
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            assert survives(seed, lambda: forward_cuda.forward(*given), check) == (defect is NONE)

    @pytest.mark.exhaustive
    def test_warpgroups_that_pass_over_more_than_there_are_buffers_for_are_found(self, tmp_path, listed):
        given = arguments(*filled(1, (2, 1), 1300, 1300, 64, 64), mask=DOCUMENTS, masks=[packed(600, 50, 650)] * 2)
        defect = ("constexpr int NEAR = 3;", "constexpr int NEAR = 99;")
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            assert not survives(seed, lambda: forward_cuda.forward(*given), lambda found: compared(given, found))
