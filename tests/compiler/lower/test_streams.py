"""What is too large for the caches is written past them, and gives the same numbers."""

import torch

from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule, streamed
from tests.compiler import graphs, native


def scheduled(function, *args):
    graph, constants = graphs.graph_of(function, *args)
    assert not constants
    return schedule(lower(graph))


def marks(made):
    return [
        argument.streamed for step in made.steps if isinstance(step, KernelLaunch) for argument in step.kernel.arguments
    ]


def test_only_results_that_take_more_than_half_of_the_cache_are():
    made = scheduled(lambda x: (x + 1, (x * 2).sum(1)), torch.ones(64, 300))
    size = 64 * 300 * 4
    assert not any(marks(made))
    assert streamed(made, None) is made
    assert not any(marks(streamed(made, 2 * size)))
    assert sum(marks(streamed(made, 2 * size - 2))) == 1
    assert sum(marks(streamed(made, 2))) == 2


def test_numbers_are_the_same():
    x, weight = torch.randn(37, 300), torch.randn(300)
    made = streamed(scheduled(lambda x, w: torch.nn.functional.layer_norm(x, (300,), w), x, weight), 2)
    assert any(marks(made))
    names = [name for name in made.program.inputs if isinstance(name, str)]
    memory = native.run(made, dict(zip(names, (x.numpy(), weight.numpy()), strict=True)))
    found = torch.from_numpy(memory[made.program.outputs[0].buffer].copy()).reshape(37, 300)
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, (300,), weight))
