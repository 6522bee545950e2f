"""Which kernel computes a call: chosen by its arguments, named by the user, called by transforms."""

import fresh_process
import pytest
import torch
from attention_inputs import inputs, randn

import opkit
from opkit import _core
from opkit.attn import api
from opkit.masks import Causal, KeyPadding


@pytest.fixture
def doubling(operator):
    """The operator with a kernel for float32 on the CPU whose results are twice the reference's, and the kernel's calls."""
    calls = []

    def kernel(*args):
        calls.append(args)
        out, lse = operator.reference(*args)
        return 2 * out, lse

    operator.register_kernel(
        "cpu", kernel, name="doubling", dtypes=[torch.float32], when=lambda q: q.shape[-1] % 8 == 0, priority=9
    )
    return operator, calls


def test_a_kernel_is_selected_forced_and_explained(doubling):
    q, k, v = inputs()
    assert api.select(q, k, v).kernel == "doubling"
    refused = str(api.select(q.double(), k.double(), v.double(), mask=Causal()))
    assert "not doubling: the arguments have torch.float64; it takes torch.float32" in refused
    plain = opkit.attention(q, k, v, kernel="reference")
    torch.testing.assert_close(opkit.attention(q, k, v), 2 * plain)
    torch.testing.assert_close(opkit.attention(q, k, v, kernel="doubling"), 2 * plain)
    torch.testing.assert_close(
        opkit.attention(q[..., :7], k[..., :7], v), opkit.attention(q[..., :7], k[..., :7], v, kernel="reference")
    )
    with opkit.use_kernel(doubling[0], "reference"):
        torch.testing.assert_close(opkit.attention(q, k, v), plain)


@pytest.mark.parametrize("kernel", ["tiles", "decode"])
def test_a_kernel_has_the_reference_s_gradients(kernel):
    args = [randn(1, 4, 3, 8), randn(1, 2, 300, 8, seed=1), randn(1, 2, 300, 8, seed=2)]
    args = [x.requires_grad_() for x in args]
    mask, weights = Causal("bottom-right"), randn(1, 4, 3, 8, seed=3)
    out = opkit.attention(*args, mask=mask, kernel=kernel)
    exact = opkit.attention(*(x.double() for x in args), mask=mask)
    grads = [torch.autograd.grad((x * weights).sum(), args) for x in (out, exact)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_kernels_are_chosen_by_shapes():
    q, k = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 300, 8)
    assert api.select(q, k, k).kernel == "decode"
    assert api.select(q, k, k, mask=Causal("bottom-right")).kernel == "decode"
    assert api.select(torch.zeros(2, 4, 9, 8), k[:, :, :200], k[:, :, :200]).kernel == "tiles"
    assert api.select(q, k, k, mask=KeyPadding(torch.tensor([2, 6]))).kernel == "decode"
    long = [torch.zeros(1, 2, 64, 8)] * 3
    assert api.select(*long, mask=Causal()).kernel == "tiles"
    assert api.select(*(x.double() for x in long)).kernel == "reference"
    assert api.select(*long, dropout_p=0.1).kernel == "reference"


AVX512 = {"avx512", "avx512_bf16"}
MEASURED = {"avx2", *AVX512}
DECODED = (  # queries, heads that share keys, keys, and the instruction sets of tiles beside which these are decoded
    (8, 1, 1, MEASURED),
    (9, 1, 255, set()),
    (4, 8, 1, MEASURED),
    (5, 4, 255, set()),
    (1, 32, 1, MEASURED),
    (1, 33, 255, set()),
    (16, 1, 256, {"baseline", "neon", "amx", *MEASURED}),
    (1, 16, 256, {"baseline", "neon", "amx", *MEASURED}),
    (17, 1, 256, MEASURED),
    (32, 1, 256, MEASURED),
    (33, 1, 4095, set()),
    (33, 1, 4096, AVX512),
    (1, 64, 4096, AVX512),
    (65, 1, 9000, set()),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_few_rows_are_decoded(isa, dtype):
    tiles = "avx512" if isa == "amx" and dtype != torch.bfloat16 else isa
    for queries, heads, keys, beside in DECODED:
        k = torch.zeros(1, 1, keys, 8, dtype=dtype)
        found = api.select(torch.zeros(1, heads, queries, 8, dtype=dtype), k, k).kernel
        assert found == ("decode" if tiles in beside else "tiles"), (queries, heads, keys)


def test_beside_tiles_of_amx_fewer_rows_are_decoded(monkeypatch):
    monkeypatch.setattr(_core, "isa_table", lambda: {"attention_bf16": "amx", "attention_f32": "avx512"})
    k = torch.zeros(1, 1, 256, 8)
    for rows, dtype, kernel in (
        (16, torch.bfloat16, "decode"),
        (17, torch.bfloat16, "tiles"),
        (17, torch.float32, "decode"),
    ):
        q = torch.zeros(1, 1, rows, 8, dtype=dtype)
        assert api.select(q, k.to(dtype), k.to(dtype)).kernel == kernel


def test_a_kernel_is_called_once_for_a_mapped_call(doubling):
    q, k, v = (torch.stack((x, x + 1)) for x in inputs())
    out = torch.vmap(lambda *x: opkit.attention(*x, mask=Causal()))(q, k, v)
    assert [args[0].shape for args in doubling[1]] == [(4, 4, 5, 8)]
    for n in range(2):
        torch.testing.assert_close(out[n], 2 * opkit.attention(q[n], k[n], v[n], mask=Causal(), kernel="reference"))


def test_the_reference_is_selected_for_what_no_kernel_takes():
    q = torch.zeros(1, 1, 2, 4, device="meta")
    assert opkit.attention(q, q, q).shape == (1, 1, 2, 4)
    assert api.select(*inputs(dtype=torch.float64)).operator == "opkit::attention"


def test_modules_with_kernels_register_them_when_the_operator_is_first_asked_for():
    source = """
import sys, types, torch, opkit
from opkit.attn import operator
mine = types.ModuleType("mine")
mine.register = lambda op: op.register_kernel("cpu", op.reference, name="mine", dtypes=[torch.float32])
sys.modules["mine"], operator.KERNELS = mine, ("mine",)
q = torch.zeros(1, 1, 2, 4)
from opkit.attn.api import select
print(select(q, q, q).kernel, select(q.double(), q.double(), q.double()).kernel)
"""
    assert fresh_process.run(["-c", source]).stdout.split() == ["mine", "reference"]
