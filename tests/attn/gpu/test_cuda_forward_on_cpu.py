"""The kernels for sm_90a in CUDA C++, run on a processor in random orders of events: their numbers beside the reference's."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cuda_on_cpu import filled, on_cpu, survives
from hopper_calls import BF16, CAUSAL, FP16, arguments, bottom_right, compared

from opkit.attn import gradients, program, reference
from opkit.attn.calls import GradientCall
from opkit.attn.gpu.hopper import backward_cuda, forward_cuda
from opkit.attn.gpu.hopper import forward as gluon


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path_factory.mktemp("machine")) as seed:
        yield seed


@pytest.fixture
def machine(built):
    """The seed of the order of events: 0, whatever tests before this one chose."""
    built[0] = 0
    return built


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


@pytest.mark.parametrize(("head", "dtype"), [(64, BF16), (64, FP16), (128, BF16), (256, FP16)])
@pytest.mark.parametrize("case", CALLS)
class TestForwardNumbers:
    def test_are_the_references(self, machine, head, case, dtype):
        sizes, what = CALLS[case]
        given = arguments(
            *filled(*sizes, head, head, dtype=dtype, heads_inside=what.get("heads_inside", False)), **what
        )
        compared(given, forward_cuda.forward(*given))


@pytest.mark.parametrize("head", forward_cuda.GROUPS)
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


# ---- backward --------------------------------------------------------------------------------------------------------

GRADIENTS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one tile": ((1, (1, 1), 128, 128, 64, 64), {}),
    "tails, 128": ((1, (2, 1), 133, 150, 128, 128), {}),
    "tails, causal, 128": ((1, (2, 1), 300, 300, 128, 128), {"mask": CAUSAL}),
    "causal, 64": ((2, (4, 2), 300, 300, 64, 64), {"mask": CAUSAL}),
    "one query": ((1, (2, 1), 1, 77, 128, 128), {}),
    "one key": ((3, (5, 1), 129, 1, 64, 64), {}),
    "dead rows": ((1, (2, 2), 300, 70, 128, 128), {"mask": bottom_right(300, 70)}),
    "all rows dead": ((1, (2, 1), 200, 200, 64, 64), {"mask": (program.BAND, 1000, 2000)}),
    "window": ((1, (4, 1), 400, 400, 64, 64), {"mask": (program.BAND, -100, 0)}),
    "window far behind": ((1, (2, 2), 257, 500, 128, 128), {"mask": (program.BAND, -200, -100)}),
    "many tiles": ((2, (4, 4), 260, 400, 64, 64), {"mask": CAUSAL}),
    "heads inside": ((1, (4, 2), 200, 200, 128, 128), {"mask": CAUSAL, "heads_inside": True}),
    "64 and 128": ((1, (2, 1), 200, 200, 64, 128), {"mask": CAUSAL}),
    "128 and 64": ((1, (2, 1), 200, 200, 128, 64), {"scale": 0.2}),
}


def gradient_call(sizes, dtype=BF16, of_lse=False, **what):
    """A call of the backward, with the reference's results; and their exact gradients."""
    q, k, v = filled(*sizes, dtype=dtype, heads_inside=what.get("heads_inside", False))
    return with_results(q, k, v, of_lse, **what)


def with_results(q, k, v, of_lse=False, **what):
    given = arguments(q, k, v, **what)
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    out, lse = reference.attention(*exact)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.empty_like(out, dtype=q.dtype).normal_(generator=generator)
    of_lse = torch.empty_like(lse, dtype=torch.float32).normal_(generator=generator) if of_lse else None
    rest = ([], [], given[7], [], given[9], 0.0, given[12])
    call = (gradient, of_lse, q, k, v, out.to(q.dtype), lse.float(), *rest)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in call]
    return call, gradients.attention_backward(*wide)


def off(found, expected):
    """How far the results are off, as shares of the greatest elements."""
    return [
        ((x.double() - y).abs().max() / y.abs().max().clamp(min=0.1)).item()
        for x, y in zip(found, expected, strict=True)
    ]


def let_helpers_prepare(monkeypatch):
    """Rows of all heads but the first ones, also in short calls."""
    for name in ("_CACHED", "_AHEAD", "_ALL_AHEAD"):
        monkeypatch.setattr(backward_cuda, name, 0)


class TestBackward:
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("case", GRADIENTS)
    def test_numbers_are_the_references(self, machine, case, dtype):
        sizes, what = GRADIENTS[case]
        call, expected = gradient_call(sizes, dtype, **what)
        found = backward_cuda.backward(*call)
        assert [x.dtype for x in found] == [dtype] * 3 + [torch.float32]
        assert all((x.transpose(1, 2) if what.get("heads_inside") else x).is_contiguous() for x in found[:3])
        rounding = torch.finfo(dtype).eps
        assert max(off(found, expected)) < 2 * rounding, off(found, expected)

    @pytest.mark.parametrize("order", range(4))
    @pytest.mark.parametrize(("head", "mask"), [(64, CAUSAL), (128, ()), (128, (program.BAND, -150, 20))])
    def test_rows_that_helpers_prepare(self, machine, monkeypatch, head, mask, order):
        let_helpers_prepare(monkeypatch)
        call, expected = gradient_call((2, (6, 3), 200, 170, head, head), of_lse=True, mask=mask)
        assert backward_cuda._problem(GradientCall(*call)).prepared < 12
        machine[0] = order
        assert max(off(backward_cuda.backward(*call), expected)) < 2 * torch.finfo(BF16).eps

    @pytest.mark.parametrize(("queries", "all_of_them"), [(512, True), (1023, True), (1024, False)])
    def test_all_rows_of_short_calls_are_prepared_before(self, machine, queries, all_of_them):
        q, k = (torch.empty(64, heads, queries, 128, dtype=BF16) for heads in (8, 4))
        call = GradientCall(q, None, q, k, k, q, torch.empty(q.shape[:3]), [], [], list(CAUSAL), [], 1.0, 0.0, False)
        assert (backward_cuda._problem(call).prepared == 64 * 8) == all_of_them

    def test_a_gradient_of_the_log_sum_exp(self, machine):
        call, expected = gradient_call((1, (2, 1), 200, 150, 64, 64), of_lse=True, mask=CAUSAL)
        assert max(off(backward_cuda.backward(*call), expected)) < 2 * torch.finfo(BF16).eps

    @pytest.mark.parametrize("order", range(1, 4))
    @pytest.mark.parametrize(("head", "mask"), [(64, CAUSAL), (128, CAUSAL), (64, ()), (128, (program.BAND, -150, 20))])
    def test_any_order_of_events_gives_the_same(self, machine, head, mask, order):
        call, expected = gradient_call((1, (4, 2), 300, 300, head, head), mask=mask)
        machine[0] = order
        found = backward_cuda.backward(*call)
        machine[0] = 0
        assert max(off(found, expected)) < 2 * torch.finfo(BF16).eps
        assert all(
            map(torch.equal, found[1:], backward_cuda.backward(*call)[1:])
        )  # the gradient of queries is summed in any order

    @pytest.mark.parametrize("head", [64, 128])
    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -50, 30)])
    def test_hidden_keys_and_values_do_not_leak(self, machine, head, mask):
        q, k, v = filled(1, (2, 1), 200, 300, head, head)
        call, expected = with_results(q, k, v, mask=mask)
        k[:, :, 240:], v[:, :, 240:] = (
            float("nan"),
            float("inf"),
        )  # no query sees them; keys before them, in the same tile, are seen
        assert max(off(backward_cuda.backward(*call), expected)) < 2 * torch.finfo(BF16).eps

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
        assert max(off(found, same)) < 2 * torch.finfo(BF16).eps
        assert of_v[:, :, : row + 1].isnan().any()

    @pytest.mark.parametrize("head", [64, 128])
    def test_its_room_is_as_large_as_what_it_puts_there(self, machine, monkeypatch, head):
        let_helpers_prepare(monkeypatch)
        made = []

        def guarded(x, size, dtype):
            made.append(torch.full((size + 256,), 7.0, dtype=dtype))
            return made[-1][:size]

        monkeypatch.setattr(backward_cuda, "room_beside", guarded)
        call, _ = gradient_call((3, (6, 2), 133, 150, head, head))
        backward_cuda.backward(*call)
        assert (made[0][-256:] == 7).all()
        assert made[0][-257] != 7  # the last count

    def test_strides_that_tma_cannot_follow_are_copied(self, machine):
        q, k, v = filled(1, (4, 2), 150, 150)
        q = q.mT.contiguous().mT
        k = torch.nn.functional.pad(k, (3, 0))[..., 3:]
        call, expected = with_results(q, k, v[:, :1].expand(1, 2, 150, 64), mask=CAUSAL)
        assert max(off(backward_cuda.backward(*call), expected)) < 2 * torch.finfo(BF16).eps


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
    "a weight too many": ("column <= last ?", "column <= last + 1 ?"),
    "a buffer that is never freed": ("    skip(shared.values, done.after);\n", ""),
}
DEFECTS_OF_TURNS = {
    "a turn that is not passed on": ("    pass_turn<L>(group);\n    products_wait", "    products_wait"),
    "a turn too many": (
        "    if (group == 0) take_turn<L>(group);  // the last one that was passed on\n",
        "    take_turn<L>(group);\n",
    ),
}
BACKWARD_DEFECTS = {
    "the other half of gradients of logits is not waited for": (
        "                wait(barriers + SLOPES_FULL + (slot ^ 1) * 8, (it - 1) / STAGES & 1);\n", "",
    ),
    "a buffer of these that is written too early": ("            wait(barriers + SLOPES_EMPTY + slot * 8, parity ^ 1);\n", ""),
}  # fmt: skip
HELPERS_DEFECTS = {
    "rows that nobody waits for": ("        if (head >= problem.prepared) wait_count(", "        if (false) wait_count("),
    "gradients that are rounded before all is added": (
        "        wait_count(summed(problem, key_head), tiles_of_head(problem));\n", "",
    ),
    "rounded numbers that are overwritten": ("        stores_commit();\n        stores_read();\n", "        stores_commit();\n"),
    "an item that is overwritten": ("        if (it >= STAGES) wait(place.done(), place.parity() ^ 1);\n", ""),
}  # fmt: skip


class TestDefects:
    @pytest.mark.parametrize(
        ("case", "head"),
        [*((case, head) for case in DEFECTS for head in (64, 256)), *((case, 128) for case in DEFECTS_OF_TURNS)],
    )
    def test_of_the_forward_are_found(self, case, head, tmp_path):
        given = arguments(*filled(1, (3, 1), 500, 700, head, head), mask=(program.BAND, -250, 100))
        defect = (DEFECTS | DEFECTS_OF_TURNS)[case]
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            assert not survives(seed, lambda: forward_cuda.forward(*given), lambda found: compared(given, found))

    @pytest.mark.parametrize("case", [*BACKWARD_DEFECTS, *HELPERS_DEFECTS])
    def test_of_the_backward_are_found(self, case, tmp_path, monkeypatch):
        if case in HELPERS_DEFECTS:  # tiles are short: helpers have little time
            call, expected = gradient_call((2, (8, 8), 128, 128, 64, 64))
        else:
            call, expected = gradient_call((1, (2, 1), 400, 300, 64, 64), mask=CAUSAL)

        def check(found):
            assert max(off(found, expected)) < 2 * torch.finfo(BF16).eps

        let_helpers_prepare(monkeypatch)
        defect = (BACKWARD_DEFECTS | HELPERS_DEFECTS)[case]
        with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path, defect) as seed:
            assert not survives(seed, lambda: backward_cuda.backward(*call), check)
