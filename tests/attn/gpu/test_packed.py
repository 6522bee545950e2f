"""Few queries as rows of the forward for Hopper: what is made of a call here, and numbers where there is such a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from hopper_calls import CAUSAL, arguments, compared, on_hopper_with_compiler, shaped

from opkit.attn import reference
from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.decode import plan as decode_plan
from opkit.attn.gpu.hopper import calls, forward_cuda, packed
from opkit.attn.operator import attention_operator
from opkit.errors import KernelError

BF16 = torch.bfloat16


def filled(*sizes, dtype=torch.float64, device="cpu", batch=2):
    return [torch.randn_like(x) for x in shaped(*sizes, dtype, device, batch)]


@pytest.mark.parametrize(("heads", "queries"), [((8, 2), 5), ((6, 6), 3), ((8, 1), 1), ((4, 2), 1)])
def test_rows_are_the_queries_of_heads_that_share_keys(heads, queries, monkeypatch):
    seen = []
    monkeypatch.setattr(
        forward_cuda.forward,
        "prepare",
        lambda q, *rest: seen.append(q.shape) or (lambda *given: reference.attention(*given)),
    )
    given = arguments(*filled(heads, queries, 33, 16, 8))
    expected = reference.attention(*given)
    for one, other in zip(expected, packed.forward(*given), strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    assert seen == [(2, heads[1], queries * heads[0] // heads[1], 16)]


def chosen(monkeypatch, given, out_is_bshd=False):
    monkeypatch.setattr(forward_cuda, "takes", calls.fits)
    monkeypatch.setattr(packed, "device_of", lambda index: decode_plan.Device(132, 232448, True, "tf32x3"))
    return packed.takes(AttentionCall(*given)._replace(out_is_bshd=out_is_bshd))


def test_takes(monkeypatch):
    assert not packed.takes(AttentionCall(*arguments(*shaped((64, 8), 16, 8192, 128, 128, device="cpu", batch=1))))
    assert chosen(monkeypatch, arguments(*shaped((64, 8), 16, 8192, 128, 128, batch=16)))
    assert not chosen(monkeypatch, arguments(*shaped((64, 8), 16, 8192, 128, 128, batch=16)), out_is_bshd=True)
    assert not chosen(monkeypatch, arguments(*shaped((64, 8), 16, 8192, 128, 128, batch=16), mask=CAUSAL))
    assert not chosen(monkeypatch, arguments(*shaped((64, 8), 16, 8192, 128, 128, batch=2)))  # is divided
    assert not chosen(monkeypatch, arguments(*shaped((64, 8), 8, 8192, 128, 128, batch=16)))  # half a tile
    assert not chosen(monkeypatch, arguments(*shaped((64, 8), 32, 8192, 128, 128, batch=16)))  # is for many queries
    q, k, v = shaped((64, 8), 16, 8192, 128, 128, batch=16)
    assert not chosen(monkeypatch, arguments(q.transpose(1, 2).contiguous().transpose(1, 2), k, v))


def test_refuses():
    for given in (
        arguments(*shaped((8, 2), 5, 33, 16, 8), mask=CAUSAL),
        arguments(*shaped((8, 2), 5, 33, 16, 8), sinks=torch.empty(8, device="meta")),
        arguments(*shaped((8, 2), 5, 33, 16, 8), out_is_bshd=True),
    ):
        with pytest.raises(KernelError, match=r"kernel 'packed' does not take q of .* Leave the choice"):
            packed.forward(*given)


@pytest.mark.parametrize(("heads", "queries"), [((64, 8), 16), ((24, 2), 7), ((128, 1), 1)])
class TestNumbers:
    pytestmark = on_hopper_with_compiler

    def test_are_the_references(self, heads, queries):
        given = arguments(*filled(heads, queries, 777, 128, 128, dtype=BF16, device="cuda"))
        compared(given, packed.forward(*given))

    def test_it_is_chosen(self, heads, queries):
        given = arguments(*filled(heads, queries, 300, 128, 128, dtype=BF16, device="cuda", batch=132 // heads[1]))
        found, expected = attention_operator()(*given), packed.forward(*given)
        assert all(map(torch.equal, found, expected))
