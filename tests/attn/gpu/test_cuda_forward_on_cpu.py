"""The forward for sm_90a in CUDA C++, run on a processor in random orders of events: its numbers beside the reference's."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cuda_on_cpu import filled, on_cpu, survives
from hopper_calls import BF16, CAUSAL, FP16, arguments, bottom_right, compared

from opkit.attn import program, reference
from opkit.attn.gpu.hopper import forward as gluon
from opkit.attn.gpu.hopper import forward_cuda

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
    "heads inside": ((2, (4, 2), 300, 300), {"mask": CAUSAL, "heads_inside": True}),
    "another scale": ((1, (4, 2), 300, 300), {"mask": CAUSAL, "scale": 0.7}),
}


@pytest.mark.parametrize("case", CALLS)
class TestForwardNumbers:
    def test_are_the_references(self, machine, head, case):
        (sizes, what), dtype = CALLS[case], BF16 if head == 128 else FP16
        given = arguments(
            *filled(*sizes, head, head, dtype=dtype, heads_inside=what.get("heads_inside", False)), **what
        )
        compared(given, forward_cuda.forward(*given))


class TestForward:
    @pytest.mark.parametrize("order", range(1, 5))
    @pytest.mark.parametrize("mask", [(), CAUSAL, (program.BAND, -150, 20)])
    def test_any_order_of_events_gives_the_same(self, machine, head, mask, order):
        given = arguments(*filled(1, (4, 2), 500, 500, head, head), mask=mask)
        machine[0] = 0
        expected = forward_cuda.forward(*given)
        machine[0] = order
        assert all(map(torch.equal, expected, forward_cuda.forward(*given)))

    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -50, 0), bottom_right(300, 200), (program.BAND, -40, 30)])
    def test_hidden_keys_and_values_do_not_leak(self, machine, head, mask):
        q, k, v = filled(1, (2, 1), 300, 300, head, head)
        for j in (3, 150, 299):
            k[:, :, j], v[:, :, j, ::3], v[:, :, j, 1] = float("nan"), float("inf"), float("nan")
        out, lse = forward_cuda.forward(*(given := arguments(q, k, v, mask=mask)))
        expected, of_rows = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        clean = expected.isfinite().all(-1)
        assert 0 < clean.sum() < clean.numel()
        torch.testing.assert_close(out[clean].double(), expected[clean], rtol=1e-2, atol=1e-2)
        assert out[~clean].isnan().any(-1).all()
        torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)

    def test_the_counter_is_left_as_it_was(self, machine, head, monkeypatch):
        kept = []
        counters = gluon.counters

        def remembered(device, size):
            new = counters(device, size)
            return lambda: kept.append(new()) or kept[-1]

        monkeypatch.setattr(gluon, "counters", remembered)
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

        monkeypatch.setattr(gluon, "counters", guarded)
        q, k, v = filled(2, (3, 1), 200, 150, head, head)
        v[:, :, ::7] = float("nan")  # all rows are marked
        forward_cuda.forward(*arguments(q, k, v, mask=CAUSAL))
        assert (made[0][-256:] == 7).all()


# ---- the machine finds what it is for ---------------------------------------------------------------------------------

DEFECTS = {
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
DEFECTS_OF_TURNS = {
    "a turn that is not passed on": ("    pass_turn<L>(group);\n    products_wait", "    products_wait"),
    "a turn too many": (
        "    if (group == 0) take_turn<L>(group);  // the last one that was passed on\n",
        "    take_turn<L>(group);\n",
    ),
}


class TestDefects:
    @pytest.mark.parametrize(
        ("case", "head"),
        [*((case, head) for case in DEFECTS for head in ("64", "256")), *((case, "128") for case in DEFECTS_OF_TURNS)],
        indirect=["head"],
    )
    def test_of_the_forward_are_found(self, case, head, tmp_path):
        given = arguments(*filled(1, (3, 1), 500, 700, head, head), mask=(program.BAND, -250, 100))
        defect = (DEFECTS | DEFECTS_OF_TURNS)[case]
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            assert not survives(seed, lambda: forward_cuda.forward(*given), lambda found: compared(given, found))
