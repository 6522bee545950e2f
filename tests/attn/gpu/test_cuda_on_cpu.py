"""The kernels for sm_90a in CUDA C++, run on a processor in random orders of events: their numbers beside the reference's."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cuda_on_cpu import on_cpu
from hopper_calls import BF16, CAUSAL, FAR, FP16, arguments, compared, shaped

from opkit.attn import program, reference
from opkit.attn.gpu.hopper import forward as gluon
from opkit.attn.gpu.hopper import forward_cuda


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, on_cpu(patch, tmp_path_factory.mktemp("machine")) as seed:
        yield seed


def filled(batch, heads, queries, keys, head=64, columns=64, dtype=BF16, heads_inside=False):
    generator = torch.Generator().manual_seed(0)
    made = shaped(heads, queries, keys, head, columns, dtype, "cpu", batch)
    made = [x.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else x for x in made]
    return [x.normal_(generator=generator) for x in made]


def bottom_right(queries, keys):
    return program.BAND, -FAR, keys - queries


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


class TestForward:
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    @pytest.mark.parametrize("case", CALLS)
    def test_numbers_are_the_references(self, machine, case, dtype):
        sizes, what = CALLS[case]
        given = arguments(*filled(*sizes, dtype=dtype, heads_inside=what.get("heads_inside", False)), **what)
        compared(given, forward_cuda.forward(*given))

    @pytest.mark.parametrize("order", range(1, 5))
    @pytest.mark.parametrize("mask", [(), CAUSAL, (program.BAND, -150, 20)])
    def test_any_order_of_events_gives_the_same(self, machine, mask, order):
        given = arguments(*filled(1, (4, 2), 500, 500), mask=mask)
        machine[0] = 0
        expected = forward_cuda.forward(*given)
        machine[0] = order
        assert all(map(torch.equal, expected, forward_cuda.forward(*given)))

    @pytest.mark.parametrize("mask", [CAUSAL, (program.BAND, -50, 0), bottom_right(300, 200), (program.BAND, -40, 30)])
    def test_hidden_keys_and_values_do_not_leak(self, machine, mask):
        q, k, v = filled(1, (2, 1), 300, 300)
        for j in (3, 150, 299):
            k[:, :, j], v[:, :, j, ::3], v[:, :, j, 1] = float("nan"), float("inf"), float("nan")
        out, lse = forward_cuda.forward(*(given := arguments(q, k, v, mask=mask)))
        expected, of_rows = reference.attention(*[x.double() if isinstance(x, torch.Tensor) else x for x in given])
        clean = expected.isfinite().all(-1)
        assert 0 < clean.sum() < clean.numel()
        torch.testing.assert_close(out[clean].double(), expected[clean], rtol=1e-2, atol=1e-2)
        assert out[~clean].isnan().any(-1).all()
        torch.testing.assert_close(lse.double(), of_rows, rtol=1e-5, atol=1e-4, equal_nan=True)

    def test_the_counter_is_left_as_it_was(self, machine, monkeypatch):
        kept = []
        counters = gluon.counters

        def remembered(device, size):
            new = counters(device, size)
            return lambda: kept.append(new()) or kept[-1]

        monkeypatch.setattr(gluon, "counters", remembered)
        q, k, v = filled(1, (2, 1), 300, 300)
        v[:, :, 30] = float("nan")  # some rows are computed again
        forward_cuda.forward(*arguments(q, k, v, mask=CAUSAL))
        assert len(kept) == 1
        assert not kept[0].any()
