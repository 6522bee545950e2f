"""Which calls the kernels for GPUs take, and what they say to others: no GPU and no Triton."""

import subprocess
import sys

import pytest
import torch

from opkit.attn import gradients
from opkit.attn.calls import AttentionCall, GradientCall
from opkit.attn.gpu import kernels
from opkit.attn.masks.program import BAND, DENSE
from opkit.attn.operator import attention_operator
from opkit.errors import KernelError


def call(q, k=None, v=None, masks=(), sinks=None, mask=()):
    k = q if k is None else k
    return q, k, k if v is None else v, list(masks), [], sinks, None, list(mask), [], 0.5, 0.0, 0.0, False


def takes(*args, **kwargs):
    return kernels.takes(AttentionCall(*call(*args, **kwargs)))


def test_what_is_taken():
    q = torch.ones(1, 4, 3, 8)
    assert takes(q, q[:, :2])
    assert takes(q.bfloat16(), mask=(BAND, -1, 0))
    assert takes(torch.ones(1, 1, 2, 576), torch.ones(1, 1, 2, 576), torch.ones(1, 1, 2, 512))


@pytest.mark.parametrize(
    ("args", "others"),
    [
        ((torch.ones(1, 4, 3, 8, dtype=torch.float64),), {}),
        ((torch.ones(1, 4, 3, 577),), {}),
        ((torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 513)), {}),
        ((torch.ones(1, 4, 3, 8), torch.ones(1, 3, 3, 8)), {}),
        ((torch.ones(1, 4, 3, 8),), {"sinks": torch.ones(3)}),
        ((torch.ones(1, 4, 3, 8),), {"mask": (DENSE, 0)}),
        ((torch.ones(1, 4, 3, 8),), {"mask": (DENSE, 0), "masks": (torch.ones(1, 1, 3, 4) > 0,)}),
    ],
    ids=["float64", "a head of 577", "values of 513", "heads", "sinks", "no tensor", "a tensor's shape"],
)
def test_what_is_not(args, others):
    assert not takes(*args, **others)
    with pytest.raises(KernelError, match="kernel 'triton' does not take q, k, v of"):
        kernels.forward(*call(*args, **others))


def test_gradients_of_another_dtype_are_not_taken():
    q = torch.ones(1, 4, 3, 8)
    lse = torch.ones(1, 4, 3)
    taken = GradientCall(q, None, q, q, q, q, lse, [], [], [], [], 0.5, 0.0, False)
    assert kernels.takes_gradients(taken)
    assert not kernels.takes_gradients(taken._replace(gradient=q.half()))
    with pytest.raises(KernelError, match="kernel 'triton' does not take"):
        kernels.backward(*taken._replace(gradient=q.half()))


@pytest.mark.usefixtures("batch_invariance")
def test_batch_invariance_is_refused():
    with pytest.raises(KernelError, match="OPKIT_BATCH_INVARIANT is set, and kernel 'triton' was forced"):
        kernels.forward(*call(torch.ones(1, 4, 3, 8)))


def test_both_operators_have_them():
    q, lse = torch.ones(1, 4, 3, 8), torch.ones(1, 4, 3)
    assert attention_operator().select(*call(q)).refused["triton"] == "it runs on cuda, the arguments are on cpu"
    given = (q, None, q, q, q, q, lse, [], [], [], [], 0.5, 0.0, False)
    assert "triton" in gradients.backward_operator().select(*given).refused


def test_they_are_registered_without_triton(tmp_path):
    """Neither the registration nor the choice of a kernel imports Triton."""
    program = (
        "import sys, torch, opkit.attn.api as api\n"
        "q = torch.ones(1, 1, 2, 4, device='meta')\n"
        "print(api.select(q, q, q).refused)\n"
        "assert 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "triton" in done.stdout
