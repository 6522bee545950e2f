"""Attention to float8 for sm_90a in CUDA C++, run on a processor: its numbers beside the reference's."""

import pytest
import torch
from cuda_on_cpu import NONE, on_cpu, survives
from float8_calls import CALLS, KINDS, compared, every_number, given, hidden_stays_hidden
from hopper_calls import CAUSAL

from opkit.attn import api, float8
from opkit.attn.calls import Float8Call
from opkit.attn.gpu.hopper import forward_cuda
from opkit.attn.masks import program
from opkit.errors import KernelError


@pytest.mark.emulated
@pytest.mark.sweep
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    def test_are_the_references(self, listed, head, case):
        sizes, mask, documented = CALLS[case]
        if documented and head == 256:
            pytest.skip("heads of 256 have no segments in CUDA C++")
        dtype = KINDS[([*CALLS].index(case) + head // 64) % 2]  # each case in both, and each head
        call = given(sizes, head, mask, documented, dtype)
        compared(call, forward_cuda.forward_float8(*call))


@pytest.mark.emulated
@pytest.mark.sweep
@pytest.mark.parametrize("order", range(1, 4))
def test_any_order_of_events_gives_the_same(machine, head, order):
    call = given((1, (4, 2), 500, 500), head, CAUSAL, out_is_bshd=True)
    machine[0] = 0
    expected = forward_cuda.forward_float8(*call)
    machine[0] = order
    assert all(map(torch.equal, expected, forward_cuda.forward_float8(*call)))
    compared(call, expected)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_number_is_what_it_is(machine, dtype):
    every_number(dtype)


@pytest.mark.emulated
def test_what_is_hidden_does_not_leak(machine, head):
    hidden_stays_hidden(head)


@pytest.mark.emulated
def test_tensors_that_tma_cannot_follow_are_copied(machine):
    call = list(given((1, (2, 1), 200, 200), 128, CAUSAL))
    call[:3] = [torch.cat([x, x[..., :3]], -1)[..., :128] for x in call[:3]]
    compared(call, forward_cuda.forward_float8(*call))


DEFECTS = {
    "none": NONE,
    "signs are not turned round": ("DESCALED && work.tile.factor < 0", "false"),
    "the descale of another head": ("+ head / problem.group;", "+ 0;"),
    "values are not descaled": ("DESCALED ? problem.v_by[descale_of(problem, batch, head)] : 1.f", "1.f"),
    "recomputed rows are not": ("Result(sums[n] * by)", "Result(sums[n])"),
}


@pytest.mark.emulated
@pytest.mark.sweep(2)
@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(defect, monkeypatch, tmp_path):
    call = given((2, (2, 2), 300, 300), 128, (program.BAND, -150, 0))
    call[2].view(torch.uint8)[0, :, 40, ::9] = 0x7F  # NaN
    with on_cpu(monkeypatch, tmp_path, DEFECTS[defect]) as seed:
        expected = float8.attention_float8(*call)[0]
        seen = expected.isfinite()

        def check(found):
            torch.testing.assert_close(found[0][seen], expected[seen], rtol=2**-6, atol=2**-6)

        assert survives(seed, lambda: forward_cuda.forward_float8(*call), check) == (defect == "none")


# ---- which calls it is for ------------------------------------------------------------------------------------------------


def test_long_calls_get_it_on_hopper(a_hopper):
    x = torch.empty(1, 2, 4096, 128, dtype=KINDS[0], device="meta")
    call = Float8Call(*given((1, (1, 1), 1, 1), 128, CAUSAL))._replace(
        q=x, k=x, v=x, descales=[torch.empty(1, 2, device="meta")] * 3
    )
    assert forward_cuda.takes_float8(call)
    assert not forward_cuda.takes_float8(call._replace(softcap=1.0))
    assert not forward_cuda.takes_float8(call._replace(q=x[:, :, :5]))
    assert not forward_cuda.takes_float8(call._replace(descales=call.descales[:2]))
    assert not forward_cuda.takes_float8(call._replace(q=x.half(), k=x.half(), v=x.half()))


def test_what_it_does_not_take_is_said():
    call = Float8Call(*given((1, (1, 1), 4, 4), 64))
    with pytest.raises(KernelError, match=r"kernel 'hopper_cuda' does not take q, k, v of torch.float8_e4m3fn"):
        forward_cuda.forward_float8(*call._replace(softcap=1.0))


def test_select_names_it():
    q = torch.empty(1, 1, 4, 64, dtype=KINDS[0])
    assert "hopper_cuda" in str(api.select(q, q, q))
