"""Kernels that are made ready once for calls of some shapes and choose among configurations by themselves."""

import pytest
import torch
from torch import Tensor

import opkit
from opkit.kernels.tuning.record_format import Identity
from opkit.op.aot import tuning
from opkit.op.kernel_kinds import TunedKernel

SCALED = Identity("tuned_tests::scaled", "scaled", "abc")


def _prepare(x, factor):
    return lambda x, factor: x * factor


KERNEL = TunedKernel(
    _prepare,
    examples=({"x": "fp32[4, 8]", "factor": 2.0},),
    identities=lambda: [SCALED],
    notes=lambda x, factor: [f"rows of {x.shape[-1]} times {factor}"],
)


@pytest.fixture
def op():
    made = opkit.custom_op("tuned_tests::scaled", scaled, mutates_args=())
    made.register_kernel("cpu", KERNEL, name="tuned")
    yield made
    opkit.remove("tuned_tests::scaled")


def scaled(x: Tensor, factor: float = 1.0) -> Tensor:
    return x * factor


def test_it_runs_as_a_prepared_kernel(op):
    assert torch.equal(op(torch.ones(3), 2.0), torch.full((3,), 2.0))


def test_select_has_its_notes_by_the_operator_s_arguments(op):
    chosen = op.select(torch.ones(2, 3))
    assert chosen.notes == ("rows of 3 times 1.0",)
    assert str(chosen).splitlines()[:2] == ["tuned_tests::scaled: tuned", "  rows of 3 times 1.0"]
    op.register_kernel("cpu", lambda x, factor: x * factor, name="plain", priority=1)
    assert op.select(torch.ones(2, 3)).notes == ()


def test_opkit_tune_has_its_examples_and_its_identity(op):
    assert [str(each) for each in tuning.calls(op)] == ["tuned_tests::scaled(x=fp32[4, 8], factor=2.0)"]
    assert tuning.identities()["tuned_tests::scaled", "scaled"] == "abc"
