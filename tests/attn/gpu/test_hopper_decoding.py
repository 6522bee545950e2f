"""Decoding on sm_90 in Gluon: it compiles as it must here, and its numbers are right where there is such a GPU."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from hopper_calls import BF16, FP16, SHARED, arguments, assembled, compared, filled, on_hopper, shaped

from opkit.attn import program
from opkit.attn.calls import Call
from opkit.attn.gpu import decoding, hopper_decoding, portable
from opkit.attn.operator import attention_operator
from opkit.errors import KernelError
from opkit.op.triton.examples import request_for
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

FAR = program.UNLIMITED
LENGTH = (program.LENGTH, 0)
BOTH = (program.BAND, -FAR, 600, program.LENGTH, 0, program.AND)


def lengths(*numbers, device="cuda"):
    return [torch.tensor(numbers, dtype=torch.int32, device=device)]


COMPILED = {
    "splits": lambda: arguments(*shaped((32, 1), 1, 16384, 128, 128, batch=8)),
    "one split": lambda: arguments(*shaped((32, 4), 1, 8192, 128, 128, batch=64)),
    "64, sinks, capped, float16, lengths": lambda: arguments(
        *shaped((32, 1), 1, 16384, 64, 64, FP16, batch=8),
        mask=LENGTH,
        masks=lengths(*range(8), device="meta"),
        sinks=torch.empty(32, device="meta"),
        softcap=30.0,
    ),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_spills(case, tmp_path, record_property):
    def run():
        return hopper_decoding.forward(*COMPILED[case]())

    with recording() as found:
        run()
    report = compile_launches(run, ["sm_90"])
    report.raise_for_failures()
    row = report.rows[0]
    record_property("resources", f"{row.registers} registers, {row.shared} bytes shared, {row.spills} bytes spilled")
    assert (row.kernel, row.spills) == ("hopper_decode", 0)
    assert row.shared <= SHARED
    said = assembled(request_for(found[0], None, "sm_90"), tmp_path)
    assert re.findall(r"\((C75\d\d)\)", said) == [], said  # a product that waits for the one before it
    assert "0 bytes spill stores, 0 bytes spill loads" in said


REFUSED = {
    "float32": lambda: arguments(*shaped((4, 2), 1, 300, 64, 64, torch.float32)),
    "136 channels": lambda: arguments(*shaped((4, 2), 1, 300, 136, 128)),
    "channels that TMA cannot follow": lambda: arguments(*shaped((4, 2), 1, 300, 128, 60)),
    "two queries": lambda: arguments(*shaped((4, 2), 2, 300, 64, 64)),
    "a mask": lambda: arguments(*shaped((4, 2), 1, 300, 64, 64), mask=(program.DENSE, 0)),
    "lengths of another batch": lambda: arguments(
        *shaped((4, 2), 1, 300, 64, 64), mask=LENGTH, masks=lengths(1, 2, 3, device="meta")
    ),
    "a negative scale": lambda: arguments(*shaped((4, 2), 1, 300, 64, 64), scale=-1.0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    with pytest.raises(KernelError, match=r"kernel 'hopper_decode' does not take q, k, v of .* Leave the choice"):
        hopper_decoding.forward(*REFUSED[case]())


def test_batch_invariance_is_refused(monkeypatch):
    monkeypatch.setattr(decoding.config, "get", lambda: SimpleNamespace(batch_invariant=True))
    with pytest.raises(KernelError, match="OPKIT_BATCH_INVARIANT is set"):
        hopper_decoding.forward(*arguments(*shaped((4, 2), 1, 300, 64, 64)))


def chosen(monkeypatch, *sizes, **options):
    monkeypatch.setattr(hopper_decoding, "on_hopper", lambda q: True)
    call = Call(*arguments(*shaped(*sizes, **options)))
    return hopper_decoding.takes(*call[:4], call.sinks, call.mask, call.bias, call.scale, call.dropout_p)


def test_takes(monkeypatch):
    call = Call(*arguments(*shaped((32, 8), 1, 8192, 128, 128, batch=1)))
    assert not hopper_decoding.takes(*call[:4], None, [], [], 1.0, 0.0)  # there is no such GPU
    assert chosen(monkeypatch, (32, 8), 1, 8192, 128, 128, batch=1)
    assert not chosen(monkeypatch, (32, 8), 1, 8192, 128, 128, batch=16)  # fills the GPU undivided
    assert not chosen(monkeypatch, (32, 8), 1, 100, 128, 128, batch=1)
    assert not chosen(monkeypatch, (64, 1), 2, 8192, 128, 128, batch=1)


@pytest.mark.parametrize("few", [True, False])
def test_what_is_not_aligned_is_for_the_other_kernels(few, monkeypatch):
    q, k, v = shaped((4, 1), 1, 300, 64, 64, device="cpu")
    odd = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    mask = {} if few else {"mask": LENGTH, "masks": lengths(5, 6, device="cpu")}
    monkeypatch.setattr(decoding.decode, "prepare", lambda *given: lambda *_: "split")
    monkeypatch.setattr(portable, "forward", lambda call: lambda *_: "triton")
    assert hopper_decoding.forward(*arguments(q, odd, v, **mask)) == ("split" if few else "triton")


CALLS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "one key": ((2, (4, 2), 1, 1, 128, 128), {}),
    "a block": ((2, (4, 2), 1, 64, 128, 128), {}),
    "a block and a key": ((2, (4, 2), 1, 65, 128, 128), {}),
    "splits": ((1, (32, 8), 1, 8192, 128, 128), {}),
    "splits and a tail": ((3, (32, 1), 1, 5001, 128, 128), {}),
    "one split": ((70, (8, 2), 1, 1500, 128, 128), {}),
    "64": ((2, (4, 4), 1, 777, 64, 64), {}),
    "40 and 128": ((2, (4, 2), 1, 777, 40, 128), {}),
    "128 and 72": ((2, (4, 2), 1, 777, 128, 72), {}),
    "96 heads to one": ((2, (96, 1), 1, 777, 128, 128), {}),
    "128 heads to one, three queries": ((2, (128, 1), 3, 777, 128, 128), {"mask": (program.BAND, -FAR, 774)}),
    "a window": ((2, (4, 2), 1, 777, 128, 128), {"mask": (program.BAND, 300, 500)}),
    "nothing seen": ((2, (4, 2), 1, 777, 128, 128), {"mask": (program.BAND, -FAR, -2)}),
    "lengths": ((3, (8, 2), 1, 700, 128, 128), {"mask": LENGTH, "masks": (0, 700, 123)}),
    "one length": ((70, (8, 2), 1, 700, 128, 128), {"mask": LENGTH, "masks": (321,)}),
    "a band and lengths": ((3, (8, 2), 1, 700, 128, 128), {"mask": BOTH, "masks": (0, 700, 123)}),
    "sinks, capped": ((2, (4, 2), 1, 777, 128, 128), {"sinks": True, "softcap": 3.0}),
    "sinks, one split": ((70, (4, 2), 1, 300, 128, 128), {"sinks": True}),
    "heads inside": ((2, (4, 2), 1, 777, 128, 128), {"heads_inside": True}),
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper

    def test_are_the_references(self, case, dtype):
        sizes, what = CALLS[case]
        tensors = filled(*sizes, dtype=dtype, heads_inside=what.get("heads_inside", False))
        sinks = torch.randn(sizes[1][0], device="cuda") if what.get("sinks") else None
        masks = lengths(*what["masks"]) if "masks" in what else ()
        given = arguments(*tensors, **{**what, "sinks": sinks, "masks": masks})
        found = compared(given, hopper_decoding.forward(*given))
        assert all(map(torch.equal, found, hopper_decoding.forward(*given)))


class TestOnGpu:
    pytestmark = on_hopper

    def test_hidden_keys_and_values_do_not_leak(self):
        q, k, v = filled(3, (8, 2), 1, 700, 128, 128)
        for b, length in enumerate((5, 640, 333)):
            k[b, :, length:], v[b, :, length:] = torch.nan, torch.inf
        given = arguments(q, k, v, mask=LENGTH, masks=lengths(5, 640, 333))
        compared(given, hopper_decoding.forward(*given))

    def test_what_tma_cannot_follow_is_left_to_others_or_copied(self):
        q, k, v = filled(2, (8, 2), 1, 700, 128, 128)
        expected = hopper_decoding.forward(*arguments(q, k, v))
        odd = torch.empty(2, 8, 1, 129, device="cuda", dtype=BF16)[..., 1:].copy_(q)
        assert all(map(torch.equal, expected, hopper_decoding.forward(*arguments(odd, k, v))))
        odd = torch.empty(k.numel() + 1, device="cuda", dtype=BF16)[1:].view(k.shape).copy_(k)
        given = arguments(q, odd, v)
        compared(given, hopper_decoding.forward(*given))

    def test_it_is_chosen(self):
        given = arguments(*filled(1, (32, 8), 1, 4096, 128, 128))
        assert all(map(torch.equal, attention_operator()(*given), hopper_decoding.forward(*given)))

    def test_a_graph_can_be_captured(self):
        given = arguments(*filled(1, (32, 8), 1, 8192, 128, 128))
        expected = hopper_decoding.forward(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = hopper_decoding.forward(*given)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, expected, found))
