"""The kernel of attention in float8: bytes that become float16 in the interpreter, products of float8 on GPUs that have them."""

import float8_kernels
import pytest
import torch
import triton

from opkit.attn.calls import Float8Call
from opkit.attn.float8 import attention_float8
from opkit.attn.gpu.portable import forward
from opkit.attn.masks import program
from opkit.attn.masks.program import AND, BAND, BIAS_ALIBI, DENSE, LENGTH, OR, SEGMENTS
from opkit.errors import KernelError
from opkit.op.forcing import use_kernel
from opkit.testing import compile_launches

FAR = program.UNLIMITED
KINDS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    if request.param == "interpreted":
        process = request.getfixturevalue("interpreter")
        return lambda *call: process("opkit::attention_float8", *call, kernel="triton")

    def on_gpu(*call):
        there = [
            [x.cuda() for x in each] if type(each) is list and each and torch.is_tensor(each[0]) else each
            for each in call
        ]
        there = [each.cuda() if torch.is_tensor(each) else each for each in there]
        with use_kernel(float8_kernels.attention_float8, "triton"):
            return tuple(x.cpu() for x in float8_kernels.attention_float8(*there))

    return on_gpu


def made(sizes, dtype, mask=(), masks=(), bias=(), biases=(), sinks=None, softcap=0.0, inside=False):
    torch.manual_seed(0)
    b, h, hk, n, m, d, e = sizes
    q, k, v = (torch.randn(shape).to(dtype) for shape in ((b, h, n, d), (b, hk, m, d), (b, hk, m, e)))
    descales = [torch.rand(b, hk) + 0.5 for _ in range(3)]
    return q, k, v, descales, list(masks), list(biases), sinks, list(mask), list(bias), 0.3, softcap, inside


CASES = {
    "plain": lambda dtype: made((1, 2, 1, 37, 150, 16, 16), dtype),
    "causal, heads inside": lambda dtype: made((2, 4, 2, 90, 90, 64, 32), dtype, (BAND, -FAR, 0), inside=True),
    "padded heads": lambda dtype: made((1, 2, 2, 70, 65, 7, 3), dtype, (BAND, -20, 5)),
    "a head of two parts": lambda dtype: made((1, 1, 1, 20, 40, 520, 16), dtype),
    "rows that see nothing": lambda dtype: made((1, 2, 1, 90, 50, 16, 16), dtype, (BAND, -FAR, -30)),
    "documents and lengths": lambda dtype: made(
        (2, 2, 1, 150, 150, 16, 16), dtype, (SEGMENTS, 0, 0, LENGTH, 1, AND),
        [torch.arange(150).div(40, rounding_mode="floor").int()[None], torch.tensor([150, 70]).int()],
    ),
    "bools": lambda dtype: made(
        (1, 2, 1, 70, 90, 16, 16), dtype, (DENSE, 0, BAND, -3, 3, OR), [torch.rand(1, 2, 70, 90) < 0.5]
    ),
    "slopes, sinks and a cap": lambda dtype: made(
        (1, 2, 1, 70, 90, 16, 16), dtype, (BAND, -FAR, 20), (), (BIAS_ALIBI, 0), [torch.rand(1, 2)], torch.randn(2), 2.0, True
    ),
}  # fmt: skip
REPRESENTATIVE = "padded heads", "documents and lengths", "bools", "slopes, sinks and a cap"


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("case", CASES)
def test_as_the_reference(run, case, dtype):
    call = CASES[case](dtype)
    out, lse = run(*call)
    expected, of_rows = attention_float8(*call)
    assert out.dtype == torch.bfloat16
    assert (out.transpose(1, 2) if call[-1] else out).is_contiguous()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    native = run.__name__ == "on_gpu" and forward.multiplies_float8(torch.device("cuda")) and call[0].shape[3] > 16
    atol = 1e-2 if native else 1e-4  # Hopper's products of float8 keep 14 bits of a sum
    torch.testing.assert_close(lse, of_rows, rtol=1e-5, atol=atol)


def test_every_number_is_what_it_is(run):
    """All 256 bytes but those that are no finite number, as values of which each query sees one."""
    for dtype in KINDS:
        v = torch.arange(256).to(torch.uint8).view(dtype)
        v = v[v.float().isfinite()].reshape(1, 1, -1, 1)
        count = v.shape[2]
        q = torch.zeros(1, 1, count, 16).to(dtype)
        ones = [torch.ones(1, 1)] * 3
        out, _ = run(q, q, v, ones, [], [], None, [BAND, 0, 0], [], 1.0, 0.0, False)
        assert torch.equal(out, v.to(torch.bfloat16))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_what_is_hidden_does_not_leak(run, dtype):
    call = made((1, 2, 1, 90, 90, 16, 16), dtype, (BAND, -FAR, 0, LENGTH, 0, AND), [torch.tensor([70]).int()])
    clean = run(*call)
    for x in call[1:3]:
        x.view(torch.uint8)[:, :, 70:] = 0x7F  # NaN
    for found, before in zip(run(*call), clean, strict=True):
        assert torch.equal(found, before)
    call[2].view(torch.uint8)[:, :, 40, 3] = 0x7F
    out, _ = run(*call)
    assert out[:, :, :40].isfinite().all()
    assert out[:, :, 40:, 3].isnan().all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("target", "native"), [("sm_90", True), ("sm_80", False), ("sm_100", True), ("gfx942", False)])
def test_compiles(target, native, dtype, monkeypatch):
    if target == "gfx942" and triton.__version__ < "3.7":
        pytest.skip("Triton 3.6 fails on it (PassManager::run failed)")
    monkeypatch.setattr(forward, "multiplies_float8", lambda device: native)
    q, descale = torch.empty(2, 8, 300, 128, dtype=dtype, device="meta"), torch.empty(2, 8, device="meta")
    call = q, q, q, [descale] * 3, [], [], None, [BAND, -FAR, 0], [], 0.1, 0.0, False
    report = compile_launches(lambda: forward.forward_float8(*call), [target])
    report.raise_for_failures()


def test_what_is_taken():
    x, ones = torch.ones(1, 2, 3, 4).to(KINDS[0]), torch.ones(1, 2)
    call = Float8Call(x, x, x, [ones] * 3, [], [], None, [], [], 1.0, 0.0, False)
    assert forward.takes_float8(call)
    assert not forward.takes_float8(call._replace(descales=[ones] * 2))
    assert not forward.takes_float8(call._replace(descales=[ones.double()] * 3))
    assert not forward.takes_float8(call._replace(q=x.half(), k=x.half(), v=x.half()))
    with pytest.raises(KernelError, match=r"kernel 'triton' does not take q, k, v of torch.float8_e4m3fn"):
        forward.forward_float8(*call._replace(descales=[ones] * 2))
