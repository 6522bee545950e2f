"""The backward kernels for sm_90: they compile as they must here, and gradients are right where there is such a GPU."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from hopper_backward_calls import CALLS, HIDING, arguments, called, compared, compared_where_hidden
from hopper_calls import BF16, CAUSAL, FAR, FP16, SHARED, assembled, filled, on_hopper, shaped

from opkit.attn import program
from opkit.attn.calls import GradientCall
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.errors import KernelError
from opkit.kernels.triton import compiling
from opkit.op.triton.examples import request_for
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---- compiled --------------------------------------------------------------------------------------------------------

COMPILED = {  # most bytes of registers that a thread may put into memory, and the call
    "128": (128, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128))),
    "128, causal": (352, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128), mask=CAUSAL)),
    "128, causal, float16, capped": (
        640, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128, FP16), mask=CAUSAL, softcap=30.0),
    ),
    "96, causal": (352, lambda: arguments(*shaped((4, 2), 300, 300, 96, 96), mask=CAUSAL)),
    "256": (32, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256))),
    "256, causal": (160, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256), mask=CAUSAL)),
    "256, causal, float16, capped": (
        160, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256, FP16), mask=CAUSAL, softcap=30.0),
    ),
    "136 and 256, causal": (160, lambda: arguments(*shaped((4, 2), 300, 300, 136, 256), mask=CAUSAL)),
    "64": (96, lambda: arguments(*shaped((4, 2), 300, 300, 64, 64))),
    "64, causal": (128, lambda: arguments(*shaped((4, 2), 300, 300, 64, 64), mask=CAUSAL)),
}  # fmt: skip


def requested(given):
    """What is asked of the compiler for the kernel that multiplies."""
    with recording() as found:
        hopper_backward.backward(*given)
    return request_for(found[1], None, "sm_90")


def check_compiled(given, most, folder, record_property):
    report = compile_launches(lambda: hopper_backward.backward(*given), ["sm_90"])
    report.raise_for_failures()
    before, row, after = report.rows
    record_property("resources", f"{row.registers} registers, {row.shared} bytes shared, {row.spills} bytes spilled")
    assert row.registers == 168
    assert (before.spills, after.spills) == (0, 0)
    assert row.shared <= SHARED
    said = assembled(requested(given), folder)
    assert re.findall(r"\((C75\d\d)\)", said) == [], said  # a product that waits for the one before it
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())
    assert max(stores, loads) <= most, said


@pytest.mark.parametrize("case", COMPILED)
def test_compiles(case, tmp_path, record_property):
    most, given = COMPILED[case]
    check_compiled(given(), most, tmp_path, record_property)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", ["128, causal", "64", "256, causal"])
def test_compiles_deterministic(case, tmp_path, record_property):
    _, given = COMPILED[case]
    check_compiled(given(), 480, tmp_path, record_property)


@pytest.mark.parametrize("head", [128, 256])
def test_other_lengths_and_bands_compile_nothing_anew(head):
    def identity(queries, keys, lower, upper, heads=(4, 2)):
        band = (program.BAND, lower, upper)
        return compiling.identity(requested(arguments(*shaped(heads, queries, keys, head, head), mask=band)))

    first = identity(300, 300, -FAR, 0)
    assert identity(1, 1, -1, 0) == identity(4096, 512, -16, 16) == identity(77, 1000, 1, FAR, heads=(8, 1)) == first
    assert compiling.identity(requested(arguments(*shaped((4, 2), 300, 300, head, head)))) != first


# ---- what it takes ---------------------------------------------------------------------------------------------------

REFUSED = {
    "float32": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64, torch.float32)),
    "a head of 100": lambda: arguments(*shaped((4, 2), 8, 8, 100, 64)),
    "a head of 264": lambda: arguments(*shaped((4, 2), 8, 8, 64, 264)),
    "a head of 132": lambda: arguments(*shaped((4, 2), 8, 8, 132, 256)),
    "heads that do not divide": lambda: arguments(*shaped((4, 3), 8, 8, 64, 64)),
    "no keys": lambda: arguments(*shaped((4, 2), 8, 0, 64, 64)),
    "dropout": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), dropout_p=0.5),
    "two bands": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), mask=(*CAUSAL, *CAUSAL, program.AND)),
    "a bias": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), bias=(program.BIAS_ALIBI, 0)),
    "a negative scale": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), scale=-1.0),
    "another dtype of the gradient": lambda: arguments(
        *shaped((4, 2), 8, 8, 64, 64), gradient=torch.empty(2, 4, 8, 64, dtype=FP16, device="meta")
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    with pytest.raises(KernelError, match=r"kernel 'hopper' does not take q, k, v of .* Leave the choice"):
        hopper_backward.backward(*REFUSED[case]())


def test_takes_nothing_that_is_not_on_such_a_gpu():
    call = GradientCall(*arguments(*shaped((4, 2), 8, 8, 64, 64, device="cpu")))
    assert not hopper_backward.takes(*call[:7], call.mask, call.bias, call.scale, call.dropout_p)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper

    def test_are_the_references(self, case, dtype):
        sizes, what = CALLS[case]
        compared(called(filled(*sizes, dtype=dtype, heads_inside=what.get("heads_inside", False)), **what))


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.usefixtures("deterministic")
class TestDeterministic:
    pytestmark = on_hopper

    def test_numbers_are_the_references_and_the_same_in_every_run(self, case):
        sizes, what = CALLS[case]
        given = called(filled(*sizes, heads_inside=what.get("heads_inside", False)), **what)
        first = compared(given)
        for _ in range(3):
            assert all(map(torch.equal, first, hopper_backward.backward(*given)))


class TestOnGpu:
    pytestmark = on_hopper

    @pytest.mark.parametrize("case", HIDING)
    def test_hidden_keys_and_values_do_not_leak(self, case):
        head, mask = HIDING[case]
        compared_where_hidden(filled(1, (2, 1), 300, 300, head, head), mask)

    @pytest.mark.parametrize("head", [128, 256])
    def test_padding_in_memory_does_not_leak(self, head):
        q, k, v = filled(2, (2, 2), 300, 400, head, head)
        k[:, :, 300:], v[:, :, 300:] = float("nan"), float("nan")
        compared(called((q, k[:, :, :300], v[:, :, :300])))
        compared(called((q, k[:, :, :300], v[:, :, :300]), mask=CAUSAL))

    def test_strides_that_tma_cannot_follow_are_copied(self):
        q, k, v = filled(2, (4, 2), 200, 200, 64, 64)
        q = torch.randn(2, 4, 64, 200, device="cuda").to(BF16).mT
        k = torch.randn(2, 2, 200, 67, device="cuda").to(BF16)[..., 3:]
        v = v[:, :1].expand(2, 2, 200, 64)
        given = called((q, k, v), mask=CAUSAL)
        compared(given)
        compared((torch.ones((), device="cuda", dtype=BF16).expand(given[0].shape), *given[1:]))

    @pytest.mark.parametrize("head", [128, 256])
    def test_a_graph_can_be_captured(self, head):
        given = called(filled(2, (4, 2), 300, 300, head, head), mask=CAUSAL)
        hopper_backward.backward(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = hopper_backward.backward(*given)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            compared(given, found)

    @pytest.mark.parametrize("head", [128, 256])
    def test_determinism_is_asked_for_at_each_call(self, head):
        given = called(filled(1, (4, 2), 2000, 2000, head, head), mask=CAUSAL)
        run = hopper_backward.backward.prepare(*given)
        run(*given)
        torch.use_deterministic_algorithms(True)
        try:
            first = run(*given)
            assert all(all(map(torch.equal, first, run(*given))) for _ in range(5))
        finally:
            torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("head", [64, 256])
    def test_takes(self, head):
        call = GradientCall(*called(filled(1, (2, 1), 8, 8, head, head), mask=CAUSAL))
        assert hopper_backward.takes(*call[:7], call.mask, call.bias, call.scale, call.dropout_p)
