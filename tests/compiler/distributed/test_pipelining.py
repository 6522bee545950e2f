"""Pipelines of two processes: ``pipelining_cases.py`` holds the checks, which one start of the processes runs."""

from pathlib import Path

import processes
import pytest

processes.need_gloo()

FILE = Path(__file__).with_name("pipelining_cases.py")
CASES = ("zero_bubble_compiled",)
MORE = (
    "zero_bubble_eager", "gpipe_eager", "one_forward_one_backward_eager", "interleaved_eager", "v_zero_bubble_eager",
    "gpipe_compiled", "one_forward_one_backward_compiled", "interleaved_compiled", "v_zero_bubble_compiled", "zero_bubble_broken",
)  # fmt: skip


results = processes.fixture(FILE, "test_losses_and_gradients")


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_losses_and_gradients(name, results):
    assert results[name] == ["", ""], "\n".join(results[name])
