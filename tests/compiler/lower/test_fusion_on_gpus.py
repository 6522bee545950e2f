"""What shares a kernel in programs for GPUs: each kernel should move as few bytes as it can."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opkit.compiler.ir.kernel import KernelLaunch
from opkit.compiler.lower.graph_to_program import lower
from opkit.compiler.lower.scheduling import schedule
from opkit.compiler.lower.target import GPU
from tests.compiler import graphs
from tests.compiler.emit.gpu_graphs import on_gpu


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def launches(function, *args):
    """The buffers of each launch and call of a function's program for a GPU, inputs by the names of its parameters."""
    graph, _ = graphs.graph_of(function, *args)
    made = schedule(lower(on_gpu(graph), GPU), GPU)
    return [step for step in made.steps if isinstance(step, KernelLaunch)], made


def rms_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight


def test_a_norms_backward_reads_its_rows_once_and_its_columns_once():
    x, weight, grad = bf16(2048, 512), bf16(512), bf16(2048, 512)

    def backward(x, weight, grad):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(rms_norm(x, weight), (x, weight), grad)

    found, made = launches(backward, x, weight, grad)
    large = [
        n for n, b in made.buffers.items() if b.shape and len(b.shape) == 2 and b.shape[0] == 2048 and b.shape[1] == 512
    ]
    stored = {a for launch in found for a in launch.buffers} & {*large}
    assert len(found) == 3  # rows, columns in parts, and their sum
    assert {made.buffers[name].dtype for name in stored} == {"bf16"}


def test_what_one_step_needs_is_computed_there_and_not_stored_across_a_call():
    found, _ = launches(lambda x, g, u: F.silu(x @ g) * (x @ u), bf16(64, 32), bf16(32, 128), bf16(32, 128))
    assert len(found) == 1


def test_what_a_call_needs_too_is_read_and_not_computed_again():
    """The sum reads the norm's result, which the product has in memory, and not the norm's input and statistics."""
    found, _ = launches(lambda x, w: (y := F.layer_norm(x, (32,))) + y @ w, bf16(64, 32), bf16(32, 32))
    norm, total = ({*launch.buffers} for launch in found)
    assert (len(norm), len(total), len(norm & total)) == (2, 3, 1)


def test_memory_is_overwritten_after_what_reads_a_view_of_it():
    def written(x):
        y = x.as_strided((2,), (1,)).relu()
        y[::2].copy_(y[::2])
        x.fill_(1)
        return y

    found, made = launches(written, torch.randn(2))
    given = made.program.inputs[0]
    assert [given in launch.buffers for launch in found] == [False, True]


def test_a_sum_over_few_elements_joins_its_neighbours():
    found, _ = launches(lambda x: (x.sin().view(4, 8, 2, 512).sum(2) + 1).bfloat16(), bf16(4, 16, 512))
    assert len(found) == 1
    assert "for" not in str(found[0].kernel.origins)


def test_the_result_of_an_elementwise_step_keeps_eager_modes_layout():
    """A rotary embedding adds a row-major tensor to one whose heads lie next to each other."""

    def rotated(x, cos, sin):
        x = x.view(2, 16, 4, 8).transpose(1, 2)
        return torch.matmul(x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin, x.transpose(2, 3))

    graph, _ = graphs.graph_of(rotated, bf16(2, 16, 32), bf16(16, 8), bf16(16, 8))
    program = lower(on_gpu(graph), GPU)
    added = next(node for node in graph.nodes if node.target == "aten.add.Tensor")
    assert program.buffers[added.name].strides == added.result.strides


def test_a_sum_that_is_in_memory_is_read_and_not_recomputed_from_its_summands():
    """The residual sums of three blocks: each is the input of a product, so it is in memory."""

    def blocks(x, a, b, c):
        first = torch.relu(x.sin() @ a + x)
        second = torch.relu(first @ b + first)
        return torch.relu(second @ c + second)

    found, made = launches(blocks, *(bf16(256, 256) for _ in range(4)))
    large = [{n for n in launch.buffers if made.buffers[n].shape == (256, 256)} for launch in found]
    assert [len(names) for names in large] == [2, 3, 3, 3]


def test_a_running_mean_is_written_where_it_is_read():
    def update(x, mean):
        mean.copy_(mean * 0.9 + x.mean(1) * 0.1)
        return mean * 1

    found, _ = launches(update, torch.randn(64, 512), torch.randn(64))
    assert len(found) == 1


def test_passes_over_long_rows_are_kernels_of_their_own():
    """A program along a row of 2 MB finds nothing of the pass before in the caches, and leaves most of the GPU idle."""

    def group_norm(x):
        return F.group_norm(x, 4)

    # parts, their sums, and those of a group's channels for the mean, and for the variance; and the result
    for side, count in ((512, 7), (16, 1)):
        x = torch.empty(2, 8, side, side).contiguous(memory_format=torch.channels_last)
        found, _ = launches(group_norm, x)
        assert len(found) == count


def test_large_groups_of_channels_last_images_are_summed_by_channel():
    """Parts of an image are read whole, and not a group's few channels of each position."""

    def norm(x):
        return F.group_norm(x, 8)

    def sums(size):
        found, made = launches(norm, torch.randn(1, 64, size, size).contiguous(memory_format=torch.channels_last))
        shapes = {str(made.buffers[name].shape) for launch in found for name in launch.buffers}
        return any("64" in shape and str(size) not in shape for shape in shapes)

    assert sums(160)
    assert not sums(40)


def test_norms_read_the_channels_of_a_convolution_next_to_each_other():
    """Eager mode has them apart where the convolution's result is permuted."""

    def stream(x, w, y, layer):
        x = F.conv2d(x, w).permute(0, 2, 3, 1) + y
        for _ in range(3):
            x = x + F.layer_norm(x, (32,)) @ layer
        return x.sum(3)

    args = torch.randn(2, 8, 10, 12), torch.randn(32, 8, 3, 3), torch.randn(8, 10, 32), torch.randn(32, 32)
    _, made = launches(stream, *args)
    strides = {b.strides for b in made.buffers.values() if [n.constant for n in b.shape] == [2, 8, 10, 32]}
    assert [each[-1].constant for each in strides] == [1]
