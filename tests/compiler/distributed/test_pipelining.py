"""Pipelines of two processes: ``pipelining_cases.py`` holds the checks, which one start of the processes runs."""

from pathlib import Path

import processes
import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch has no gloo here", allow_module_level=True)

FILE = Path(__file__).with_name("pipelining_cases.py")
CASES = ("zero_bubble_compiled",)
MORE = (
    "zero_bubble_eager", "gpipe_eager", "one_forward_one_backward_eager", "interleaved_eager", "v_zero_bubble_eager",
    "gpipe_compiled", "one_forward_one_backward_compiled", "interleaved_compiled", "v_zero_bubble_compiled", "zero_bubble_broken",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """The results of the cases that this run has chosen, with two processes."""
    chosen = processes.chosen(request, "test_losses_and_gradients")
    return processes.results_of(FILE, 2, chosen, tmp_path_factory.mktemp("processes"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_losses_and_gradients(name, results):
    assert results[name] == ["", ""], "\n".join(results[name])
