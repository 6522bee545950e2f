"""The portable kernels compile for GPUs that are not here, and their tiles have room there."""

import functools

import pytest
import torch

from opkit.attn.gpu import blocks, kernels
from opkit.attn.masks import program
from opkit.attn.masks.program import AND, BAND, BIAS_ALIBI, BIAS_DENSE, SEGMENTS
from opkit.testing import compile_launches

SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes that a block may have
FAR = program.UNLIMITED


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(dtype, head, columns, mask=(), masks=(), bias=(), biases=(), dropout_p=0.0):
    """A forward and a backward call of 4 heads and 2 of keys."""
    of = functools.partial(meta, dtype=dtype)
    q, k, v, out = of(2, 4, 1024, head), of(2, 2, 1024, head), of(2, 2, 1024, columns), of(2, 4, 1024, columns)
    lse, seed = meta(2, 4, 1024, dtype=torch.float32), meta(2, dtype=torch.int64) if dropout_p else None
    numbers = (list(mask), list(bias), head**-0.5, 0.0)
    tensors = (list(masks), list(biases))
    return {
        "forward": (kernels.forward, (q, k, v, *tensors, None, seed, *numbers, dropout_p, False)),
        "backward": (kernels.backward, (out, None, q, k, v, out, lse, *tensors, *numbers, False, seed, dropout_p)),
    }


def documents():
    return meta(1, 1024, dtype=torch.int32)


CASES = {
    "bfloat16, causal": lambda: calls(torch.bfloat16, 128, 128, mask=(BAND, -FAR, 0)),
    "float16, 96, causal documents": lambda: calls(
        torch.float16, 96, 96, mask=(SEGMENTS, 0, 0, BAND, -FAR, 0, AND), masks=(documents(),)
    ),
    "bfloat16, biases and dropout": lambda: calls(
        torch.bfloat16, 64, 64, bias=(BIAS_DENSE, 0, BIAS_ALIBI, 1), dropout_p=0.1,
        biases=(meta(1, 4, 1024, 1024, dtype=torch.bfloat16), meta(1, 4, dtype=torch.float32)),
    ),
    "float32": lambda: calls(torch.float32, 64, 64),
    "bfloat16, 576 and 512": lambda: calls(torch.bfloat16, 576, 512),
}  # fmt: skip


EVERYWHERE = ("bfloat16, causal", "float16, 96, causal documents")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("of", ["forward", "backward"])
@pytest.mark.parametrize(
    ("case", "target"),
    [(case, target) for case in CASES for target in (SHARED if case in EVERYWHERE else ("sm_90", "gfx942"))],
)
def test_compiles(monkeypatch, case, target, of):
    monkeypatch.setattr(blocks, "shared_memory", lambda device: SHARED[target])
    function, call = CASES[case]()[of]
    report = compile_launches(lambda: function(*call), [target])
    report.raise_for_failures()
    for row in report.rows:
        assert row.shared <= SHARED[target], row


def test_no_length_and_no_batch_is_compiled_in(monkeypatch):
    """Calls of other batches, heads and sequences ask the compiler for the same binary."""
    from opkit.op.triton.building import request_for
    from opkit.op.triton.launch import recording

    def forms(batch, heads, queries, keys):
        q, k = (meta(batch, heads, n, 128, dtype=torch.bfloat16) for n in (queries, keys))
        with recording() as launches:
            kernels.forward(q, k, k, [], [], None, None, [BAND, -FAR, keys - queries], [], 0.1, 0.0, 0.0, False)
        return [str(request_for(each, None, "sm_90")) for each in launches]

    assert forms(2, 4, 1024, 1024) == forms(3, 5, 1001, 1023) == forms(16, 16, 4096, 555)
