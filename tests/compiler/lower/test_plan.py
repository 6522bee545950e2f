"""What the planner makes of programs, run as C: the same numbers as eager, in few kernels."""

import pytest
import torch

from opkit.compiler.ir.program import Extern, Strided
from opkit.compiler.lower.lowering import lower
from opkit.compiler.lower.plan import schedule
from tests.compiler import graphs, native

_TORCH = {"<u2": torch.bfloat16}


def compiled(function, *args):
    """The results of a function's kernels, and its schedule."""
    graph, constants = graphs.graph_of(function, *args)
    program = lower(graph)
    made = schedule(program)
    names = [name for name in program.inputs if isinstance(name, str)]
    inputs = {name: bits(a) for name, a in zip(names, args, strict=True)}
    memory = native.run(made, inputs | {k: bits(v) for k, v in constants.items()})
    for name, a in zip(names, args, strict=True):
        a.untyped_storage().copy_(as_tensor(memory[name], a.dtype).untyped_storage())
    types = {name: buffer.dtype for name, buffer in made.buffers.items()}
    return [result(output, memory, types) for output in program.outputs], made


def bits(tensor):
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return (flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat).numpy()


def as_tensor(array, dtype):
    found = torch.from_numpy(array.copy())
    return found.view(torch.bfloat16) if dtype == torch.bfloat16 else found


def result(output, memory, types):
    assert isinstance(output, Strided)
    dtype = torch.bfloat16 if types[output.buffer] == "bf16" else None
    flat = as_tensor(memory[output.buffer], dtype)
    shape, strides = ([n.constant for n in part] for part in (output.shape, output.strides))
    return flat.as_strided(shape, strides, output.offset.constant)


def check(function, *args, kernels=None, **tolerances):
    expected_args = [a.clone() for a in args]
    expected = function(*expected_args)
    expected = expected if isinstance(expected, tuple | list) else [expected]
    given = [a.clone() for a in args]
    found, made = compiled(function, *given)
    for x, y in zip([*found, *given], [*expected, *expected_args], strict=True):
        graphs.same(x, y, **tolerances)
    if kernels is not None:
        assert len(made.steps) == kernels, "\n".join(map(str, made.refusals))
    return made


def test_sums_over_no_dimensions_beside_sums_over_some():
    x = torch.randn(1, 2, 3)
    check(graphs.gradients(lambda x, w, c: torch.nn.functional.layer_norm(x, (1, 2, 3), w, c)), x, x + 1, x + 2)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.view_as_complex(x * 2), lambda x: torch.as_strided_scatter(x * 2, x[0] + 1, (2,), (1,))],
)
def test_what_is_called_with_a_whole_storage_has_one_of_its_own(function):
    """The arena is reused by the next call, and begins elsewhere."""
    made = schedule(graphs.program_of(function, torch.randn(3, 2)))
    first = next(step for step in made.steps if isinstance(step, Extern))
    assert first.args[0].buffer not in made.places
