"""What the planner makes of programs, run as C: the same numbers as eager, in few kernels."""

import pytest
import torch

from opkit.compiler.ir.kernel import KernelLaunch, Loop, Scratch, walk
from opkit.compiler.ir.program import Extern, Strided
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule, streamed
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


# ---- pointwise -------------------------------------------------------------------------------------------------------


def r(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape))).to(dtype)


ONE_KERNEL = {
    "broadcast": (lambda x, y: (x + y).sigmoid(), r(5, 7), r(7)),
    "scalars": (lambda x: x * 2, torch.tensor(3.0)),
    "nothing": (lambda x: x * 2, r(0, 3)),
    "integers": (lambda x: (x // 3) % 5, torch.arange(-10, 10)),
    "a reshape between": (lambda x, y: x.exp().reshape(15, 7) + y, r(3, 5, 7), r(15, 7)),
    "slices": (lambda x: x[:, 1:3].exp() + x[:, 2:4], r(5, 7)),
    "a transposed read": (lambda x, y: x.exp().permute(0, 2, 1) + y, r(3, 5, 7), r(3, 7, 5)),
    "positions": (lambda x: x.tril() + torch.arange(7), r(7, 7)),
    "padding": (lambda x: torch.nn.functional.pad(x, (1, 2)), r(3, 4)),
    "in place": (lambda x: x.add_(1), r(5, 7)),
    "narrow floats": (
        lambda x, y: torch.nn.functional.gelu(x) * y,
        r(30, 8, dtype=torch.bfloat16),
        r(8, dtype=torch.bfloat16),
    ),
    "two of their own, then both": (lambda x, y: x.sigmoid() + y.exp(), r(6, 5), r(6, 5)),
    "a row and a point, then both": (lambda x, y: torch.softmax(x, -1) * (y + 1).exp(), r(9, 33), r(9, 33)),
    "three of their own": (lambda x, y, z: (x.exp() + y.exp()) * z.sum(1, keepdim=True), r(6, 5), r(6, 5), r(6, 5)),
    "two results": (lambda x, y: (x + y, x * y), r(6, 5), r(6, 5)),
    "softmax": (lambda x: torch.softmax(x, -1), r(9, 33)),
    "softmax of columns": (lambda x: torch.softmax(x, 0), r(9, 33)),
    "layer norm": (lambda x, w: torch.nn.functional.layer_norm(x, (33,), w), r(4, 9, 33), r(33)),
    "layer norm of one row": (lambda x: torch.nn.functional.layer_norm(x, (1, 2, 3)), r(1, 2, 3)),
    "long rows": (lambda x: torch.softmax(x, -1), r(8, 70000)),
    "a sum of columns": (lambda x: (x * 2).sum(0), r(100, 48)),
    "a sum with what follows": (lambda x: (x.sum(1, keepdim=True) + 1).sqrt().sigmoid(), r(40, 9).abs()),
    "a sum of two axes": (lambda x: x.sum((0, 2)), r(4, 5, 6)),
    "the greatest, with NaN": (lambda x: torch.where(x > 1, torch.nan, x).amax(1), r(8, 19)),
    "where the greatest is": (lambda x: x.argmax(1), r(8, 19)),
    "a running sum": (lambda x: x.cumsum(1), r(3, 20)),
}
FEW = [
    "a reshape between",
    "a transposed read",
    "in place",
    "two results",
    "a row and a point, then both",
    "layer norm",
]
FEW += ["softmax of columns", "long rows", "a sum of columns", "where the greatest is", "a running sum"]


@pytest.mark.sweep(keep=FEW)
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_is_one_kernel(name):
    function, *args = ONE_KERNEL[name]
    limits = {"rtol": 1.6e-2, "atol": 1e-2} if args[0].dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 2e-5}
    check(function, *args, kernels=1, **limits)


def test_a_narrow_float_that_the_user_asked_for_is_rounded():
    check(lambda x: x.to(torch.bfloat16).float() * 3, r(30), kernels=1, exact=True)


def test_a_narrow_float_between_steps_is_not_rounded():
    x = r(64)
    (found,), _ = compiled(lambda x: (x.to(torch.bfloat16) * 3 + 1).float(), x)
    exact = x.to(torch.bfloat16).float() * 3 + 1
    assert torch.equal(found, exact)


def test_a_long_sum_is_shared_out():
    made = check(lambda x: (x * x).sum(), r(1 << 16), kernels=2, rtol=1e-5, atol=1e-3)
    assert made.steps[0].kernel.body[0].how == "parallel"


def test_partial_sums_of_equal_kernels_have_memory_of_their_own():
    def chain(w, x, y, z):
        total = torch.ones(())
        for each in (w, x, y, z):
            total = (each * total).sum() / each.numel()
        return total

    made = check(chain, *(r(1 << n) + 1 for n in (18, 18, 18, 16)), rtol=1e-5, atol=1e-6)
    launches = [step for step in made.steps if isinstance(step, KernelLaunch)]
    assert len({launch.kernel.name for launch in launches}) < len(launches)
    writes = [
        buffer
        for launch in launches
        for argument, buffer in zip(launch.kernel.arguments, launch.buffers, strict=True)
        if argument.written and buffer in made.places
    ]
    assert len(set(writes)) == len(writes)


def test_a_long_row_is_left_to_several_kernels():
    made = check(lambda x: torch.softmax(x, -1), r(2, 70000), rtol=1e-5, atol=1e-6)
    assert any("too few to divide" in str(refusal) for refusal in made.refusals)


def test_what_is_overwritten_is_read_before():
    check(lambda x: (x.mul_(2), x.flip(0) + 1), r(5, 7))
    check(lambda x, y: (y + x, x.copy_(y * 2)), r(5, 7), r(5, 7))


def test_two_groups_stay_apart_where_what_is_between_them_needs_the_first():
    def function(x, y, w):
        first = x.exp()
        return (first @ w) + y.sigmoid() + first

    made = schedule(lower(graphs.graph_of(function, r(6, 6), r(6, 6), r(6, 6))[0]))
    assert [isinstance(step, Extern) for step in made.steps] == [False, True, False]


def test_two_groups_stay_apart_where_the_first_is_overwritten_in_between():
    def function(x, y):
        first = x.exp()
        x.mul_(y.sum(0))
        return first + x.sigmoid() + y.exp()

    check(function, r(6, 6), r(6, 6), rtol=1e-5, atol=1e-5)


def test_an_optimiser_step_is_one_kernel_a_parameter():
    def step(p, q, g, h, m, n):
        torch._foreach_lerp_([m, n], [g, h], 0.1)
        root = torch._foreach_sqrt([g * g, h * h])
        torch._foreach_add_(root, 1.0)
        torch._foreach_addcdiv_([p, q], [m, n], root, -0.1)

        return p * 1

    check(step, *[r(6, 5), r(40)] * 3, kernels=2, rtol=1e-5, atol=1e-5)


def test_sums_over_other_axes_have_kernels_of_their_own_and_a_reason():
    made = check(lambda x: (x.exp().sum(0), x.exp().sum(1)), r(6, 40), kernels=2, rtol=1e-5, atol=1e-5)
    assert any("they reduce over other axes" in str(refusal) for refusal in made.refusals)


def test_parts_put_together_for_one_use_are_not_stored():
    check(lambda x, y: torch.cat([x, y.exp()], 1) * 2, r(3, 5), r(3, 4), kernels=2)
    check(lambda x, y: torch.cat([x, y, x[:1]], 0).sin(), r(3, 4), r(2, 4), kernels=1)

    def rotated(x, c, s):
        half = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * c + half * s

    check(rotated, r(2, 3, 8), r(3, 8), r(3, 8), kernels=1)


def test_what_is_dear_is_computed_for_the_few_elements_that_are_read():
    """The loss reads one logarithm of a probability a row: the others are not even computed."""
    x, target = torch.randn(6, 50), torch.tensor([3, 0, 49, 7, 7, 20])
    made = check(lambda x, t: torch.nn.functional.cross_entropy(x, t), x, target)
    assert (6, 50) not in [buffer.shape for buffer in made.buffers.values() if buffer.role == "made"]
    made = check(lambda x, t: (torch.nn.functional.cross_entropy(x, t), torch.log_softmax(x, 1)), x, target)
    assert (6, 50) in [buffer.shape for buffer in made.buffers.values() if buffer.role == "made"]


def test_parts_that_are_returned_are_stored():
    check(lambda x, y: torch.cat([x, y.exp()], 1), r(3, 5), r(3, 4), kernels=2)


def test_equal_steps_share_a_kernel():
    made = check(lambda x, y: (x.softmax(1) + 1, y.softmax(1) + 1), r(6, 40), r(6, 40), rtol=1e-5, atol=1e-6)
    assert len({step.kernel.name for step in made.steps}) == 1 < len(made.steps)


def test_buffers_that_are_never_needed_together_share_memory():
    made = check(lambda x: x.softmax(0).softmax(1).softmax(0).softmax(1), r(64, 64), rtol=1e-5, atol=1e-6)
    assert made.arena.constant < 4 * 64 * 64 * 4


def test_sums_over_no_dimensions_beside_sums_over_some():
    x = torch.randn(1, 2, 3)
    check(graphs.gradients(lambda x, w, c: torch.nn.functional.layer_norm(x, (1, 2, 3), w, c)), x, x + 1, x + 2)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 2).view(torch.int32), lambda x: torch.as_strided_scatter(x * 2, x[:2] + 1, (2, 2), (1, 1))],
)
def test_what_is_called_with_a_whole_storage_has_one_of_its_own(function):
    """The arena is reused by the next call, and begins elsewhere."""
    made = schedule(graphs.program_of(function, torch.randn(3, 2)))
    first = next(step for step in made.steps if isinstance(step, Extern))
    assert first.args[0].buffer not in made.places


@pytest.mark.parametrize("moved", [lambda x: x.t(), lambda x: x.flip(0), lambda x: x.roll(1, 1)])
def test_what_is_overwritten_with_its_own_elements_in_another_order(moved):
    """Computing them again, for want of a kernel to join, would read what was overwritten."""

    def function(x, y):
        product, other = x * y, moved(x).clone()
        x.copy_(other)
        return product + other, other.abs()

    check(function, r(40, 40), r(40, 40) + 1)


def test_reshapes_that_undo_each_other_copy_nothing():
    def function(x, w):
        rows = x.reshape(16, 6)
        product = (rows @ w).view(2, 8, 5).view(16, 5)
        return product.t() @ rows

    steps = lower(graphs.graph_of(function, r(2, 8, 6), r(6, 5))[0]).steps
    assert all(isinstance(step, Extern) for step in steps), steps
    assert len(steps) == 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize("columns", [1021, 24, 2 * 17 * 19, 4096])
def test_sums_of_columns_in_blocks_and_what_is_left_over(columns):
    x = r(33, columns)
    made = check(lambda x: ((x * 2).sum(0) + 1, x.amax(0)), x, rtol=1e-5, atol=1e-4)
    blocks = [s.kernel for s in made.steps if isinstance(s, KernelLaunch)]
    assert len(blocks) <= 2


def test_a_sum_of_columns_reads_along_the_rows_however_many_rows_statistics_it_reads():
    def function(x, *of_rows):
        return sum(((x * row[:, None]).exp() for row in of_rows), x).sum(0)

    made = check(function, r(40, 96), *[r(40) * k for k in range(5)], rtol=1e-5, atol=1e-4)
    kernel = made.steps[-1].kernel
    assert any(isinstance(statement, Scratch) for statement in walk(kernel.body)), "no block of accumulators"


# ---- scatters ---------------------------------------------------------------------------------------------------------

INDEX = torch.tensor([[0, 3, 3], [3, 1, 0]])


def test_a_place_that_an_input_holds():
    check(lambda x, i, s: x.scatter_add(0, i, s), torch.randn(4, 3), INDEX, torch.randn(2, 3))
    check(lambda x, i, s: x.index_copy(0, i, s), torch.randn(5, 3), INDEX[1], torch.randn(3, 3))


def test_a_place_that_a_step_before_it_computes():
    check(lambda x, i, s: x.index_put((i * 2 - 3,), s, True), torch.randn(4, 5), INDEX, torch.randn(2, 3, 5))


def test_statistics_of_groups_are_read_by_vectors_of_channels():
    """The quotient of a channel's number, its group, is computed for each channel, not for each element of an image."""

    def norm(x, w):
        return torch.nn.functional.group_norm(x, 8, w).square().sum((2, 3))

    x = torch.randn(1, 32, 40, 25).contiguous(memory_format=torch.channels_last)
    w = torch.randn(32)
    (found,), made = compiled(norm, x, w)
    graphs.same(found, norm(x, w))
    bodies = [s for step in made.steps if isinstance(step, KernelLaunch) for s in walk(step.kernel.body)]
    over_elements = [s for s in bodies if isinstance(s, Loop) and s.axis.extent == 1000]
    assert len(over_elements) == 3  # the mean, the variance, the result
    assert not any("//" in str(s) for s in over_elements)


def test_a_derivative_of_maxima():
    x, grad = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 3, 3)
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    check(lambda g, x, i: backward(g, x, [3, 3], [2, 2], [1, 1], [1, 1], False, i), grad, x, indices)


# ---- stores past the caches -------------------------------------------------------------------------------------------


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
