"""One call of each kernel for sm_90a in CUDA C++, run on a processor; of each source only what its heads need is compiled."""

import float8_calls
import pytest
import torch
from cuda_on_cpu import filled, on_cpu
from hopper_calls import BF16, CAUSAL, arguments, compared
from paged_calls import Cache, of_pages
from test_cuda_backward_on_cpu import gradient_call, let_helpers_prepare, off
from test_cuda_decode_on_cpu import OTHERS, divided

from opkit.attn.gpu.hopper import backward_cuda, decode_cuda, forward_cuda

HEAD = 64


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Has kernels run on the processor, but for what a pattern leaves out."""

    def on(unused=""):
        return on_cpu(monkeypatch, tmp_path, unused=unused)

    return on


def test_the_forward(machine):
    given = arguments(*filled(2, (2, 1), 200, 150, HEAD, HEAD, out_is_bshd=True), mask=CAUSAL, out_is_bshd=True)
    with machine():
        compared(given, forward_cuda.forward(*given))


@pytest.mark.emulated
def test_float8(machine):
    call = float8_calls.given((2, (2, 1), 200, 150), HEAD, CAUSAL)
    with machine():
        float8_calls.compared(call, forward_cuda.forward_float8(*call))


@pytest.mark.emulated
@pytest.mark.parametrize("ordered", [False, True])
def test_the_backward(machine, monkeypatch, request, ordered):
    if ordered:
        request.getfixturevalue("deterministic")
    let_helpers_prepare(monkeypatch)
    call, expected = gradient_call((2, (2, 1), 200, 150, HEAD, HEAD), of_lse=True, mask=CAUSAL)
    with machine():
        assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(BF16).eps


@pytest.mark.emulated
def test_decoding_from_keys_and_from_pages(machine, monkeypatch):
    divided(monkeypatch, 2)
    given = arguments(*filled(2, (6, 2), 2, 77), sinks=torch.linspace(-1, 3, 6))
    cache, starts, what = Cache([130, 5, 0, 77], 16, 2, HEAD, dtype=BF16), [0, 1, 2, 2, 3], {"lower": -70, "scale": 0.1}
    q = cache.queries(3, 6, BF16)
    with machine(OTHERS.format("(128|256)")):
        compared(given, decode_cuda.decode(*given))
        of_pages(decode_cuda.paged(*cache.call(q, starts, **what)), cache, q, starts, **what)
