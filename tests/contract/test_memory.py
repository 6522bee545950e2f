"""memory: a planted defect that each property must catch, right operators that it must pass."""

import ctypes

import numpy as np
import pytest
import torch

from opkit.testing import tensor

ROWS = (tensor("b n"),)
VECTOR = (tensor("n"),)


def copied(x, elements):
    """What a kernel reads that reads ``elements`` from the first on."""
    return torch.frombuffer(bytearray(ctypes.string_at(x.data_ptr(), 4 * elements)), dtype=torch.float32)


def reads_vectors(x):
    """Reads eight elements at a time, also at the end."""
    x = x.contiguous()
    if not x.numel():
        return x.clone()
    return copied(x, -(-x.numel() // 8) * 8)[: x.numel()].view(x.shape) + 1


def takes_for_contiguous(x):
    """Reads as many elements as there are, with no regard to strides."""
    return copied(x, x.numel()).view(x.shape) + 1 if x.numel() else x.clone()


def reads_one_before(x):
    ctypes.string_at(x.data_ptr() - 4 if x.numel() else 0, 4 * bool(x.numel()))
    return x + 1


def writes_past_the_end(x):
    if x.numel() > 2 and x.is_contiguous():
        ctypes.memset(x.data_ptr() + 4 * x.numel(), 0, 4)
    return x + 1


def adds_the_next(x):
    """Its last sum takes in one element too many."""
    return torch.as_strided(x, (x.numel() + 1,), (1,)).sum() if x.numel() and x.is_contiguous() else x.sum()


def test_reading_whole_vectors_is_found(fails):
    failure = fails("memory.guard", reads_vectors, args=VECTOR)
    assert "reads past the end of argument 0" in failure.message
    assert failure.args[0].shape == (1,)


def test_reading_before_the_beginning_is_found(fails):
    failure = fails("memory.guard", reads_one_before, args=VECTOR)
    assert "reads before the beginning of argument 0" in failure.message


def test_the_argument_that_is_left_is_named(fails):
    failure = fails("memory.guard", lambda x, y: x + reads_vectors(y), args=(*VECTOR, *VECTOR))
    assert "argument 1" in failure.message


def test_a_view_taken_for_contiguous_is_found(fails):
    failure = fails("memory.guard", takes_for_contiguous, args=ROWS)
    assert "past the end" in failure.message
    assert not failure.args[0].is_contiguous()


def test_writing_past_the_end_is_found(fails):
    failure = fails("memory.guard", writes_past_the_end, args=VECTOR)
    assert "writes past the end of argument 0" in failure.message
    assert failure.args[0].shape == (3,)
    failure = fails("memory.red_zone", writes_past_the_end, args=VECTOR)
    assert "element 0 past its end" in failure.message
    assert failure.args[0].shape == (3,)


def test_writing_to_a_gap_is_found(fails):
    def fills(x):
        torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).fill_(1)

    failure = fails("memory.red_zone", fills, args=VECTOR)
    assert "the gap" in failure.message
    assert failure.args[0].shape == (2,)


def test_results_that_depend_on_what_lies_beside_are_found(fails):
    failure = fails("memory.red_zone", adds_the_next, args=VECTOR)
    assert "reads memory next to" in failure.message
    assert failure.args[0].shape == (1,)


def test_an_index_from_beside_an_argument_is_found(fails):
    def op(x, index):
        return x[torch.as_strided(index, (index.numel() + 1,), (1,))][:-1] if index.numel() else x[index]

    index = tensor("k", torch.int64, low=0, high=0)
    fails("memory.red_zone", op, args=(tensor("3"), index))


def writer(past, fresh=torch.empty_like):
    """A kernel that writes ``past`` bytes more than its result has."""

    def op(x):
        result = fresh(x)
        values = x.contiguous()
        ctypes.memmove(result.data_ptr(), values.data_ptr(), 4 * x.numel())
        if x.numel() > 2:
            ctypes.memset(result.data_ptr() + 4 * x.numel(), 7, past)
        return result

    return op


def bare(x):
    """The memory of a tensor, behind torch's back."""
    return np.ctypeslib.as_array((ctypes.c_float * x.numel()).from_address(x.data_ptr()))


def doubles_and_halves(x):
    """Changes its argument, and puts it back."""
    if x.numel() < 3 or not x.is_contiguous():
        return x.sin()
    bare(x)[:] *= 2
    result = (x / 2).sin()
    bare(x)[:] /= 2
    return result


def adds_in_place(x, y):
    return x.add_(y)


def test_an_argument_that_is_written_and_put_back_is_found(fails):
    failure = fails("memory.read_only", doubles_and_halves, args=VECTOR, reference=torch.sin)
    assert failure.message.startswith("argument 0 is written to, if for a moment")
    assert failure.args[0].shape == (3,)


def test_writes_that_the_reference_makes_are_right(holds, fails):
    args = (*VECTOR, *VECTOR)
    holds("memory.read_only", adds_in_place, args=args, reference=torch.Tensor.add_)
    failure = fails("memory.read_only", lambda x, y: adds_in_place(y, x), args=args, reference=torch.Tensor.add_)
    assert "argument 1" in failure.message


def test_without_a_word_on_writes_nothing_is_asked(asked):
    assert asked("memory.read_only", torch.sin, args=VECTOR).skipped[0].reason == "nothing says what it may write to"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("past", [1, 64, 4, 32])
def test_writing_past_the_end_of_a_result_is_found(fails, past):
    failure = fails("memory.allocations", writer(past), args=VECTOR)
    assert failure.args[0].shape == (3,)


def test_writing_before_a_result_is_found(fails):
    def op(x):
        result = x + 1
        ctypes.memset(result.data_ptr() - 4, 7, 4) if x.numel() else None
        return result

    fails("memory.allocations", op, args=VECTOR)


def test_reading_past_the_end_of_a_workspace_is_found(fails):
    def op(x):
        workspace = x + 1
        copied(workspace, workspace.numel() + 16)
        return workspace * 2

    fails("memory.allocations", op, args=VECTOR)


def forgets(x, condition=lambda x: True):
    result = torch.empty(x.shape)
    result[..., : x.shape[-1] // 8 * 8 if condition(x) else None] = (
        x[..., : x.shape[-1] // 8 * 8] if condition(x) else x
    )
    return result


def never_begins(x):
    """Its sum begins with what its workspace holds."""
    return torch.empty(x.shape[:-1]).add_(x.sum(-1))


def numpy_forgets(x):
    result = np.empty(tuple(x.shape), np.float32)
    result[:-1] = x.numpy()[:-1]
    return torch.from_numpy(result)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "op",
    [
        forgets,
        never_begins,
        lambda x: forgets(x, lambda x: not x.is_contiguous()),
        lambda x: x.new_empty(x.shape, dtype=torch.bool),
        lambda x: torch.empty_like(x),
        lambda x: (x + 1, torch.empty(1)),
    ],
)
def test_results_that_are_not_all_written_are_found(fails, op):
    failure = fails("memory.uninitialized", op, args=ROWS)
    assert failure.args[0].numel() < 10


def test_an_array_of_numpy_that_is_not_all_written_is_found(fails):
    failure = fails("memory.uninitialized", numpy_forgets, args=ROWS)
    assert 256 <= failure.args[0].numel() <= 1024  # numpy hands out arrays below 1 KB as they were left


def test_an_argument_that_takes_what_fresh_memory_held_is_found(fails):
    fails("memory.uninitialized", lambda x: x.copy_(torch.empty(x.shape)) and None, args=ROWS)


def test_a_reference_may_leave_a_result_unwritten(holds):
    holds(
        "memory.uninitialized",
        lambda x: (x + 1, torch.empty(3)),
        args=ROWS,
        reference=lambda x: (x + 1, torch.empty(3)),
        max_examples=10,
    )


masks = {}


def keeps_masks(x):
    """A right operator that keeps what it has computed once for a size."""
    if x.numel() not in masks:
        masks[x.numel()] = torch.arange(x.numel()) % 2
    return x * masks[x.numel()].view(x.shape)


def test_memory_that_is_kept_for_the_next_call_is_right(holds):
    holds("memory.allocations", keeps_masks, args=ROWS)
    assert not masks


def resizes(x, out):
    out.resize_(x.shape).copy_(x)


def convolves(x, weight):
    return torch.nn.functional.conv1d(x, weight)


@pytest.mark.parametrize("name", ["guard", "read_only", "red_zone", "allocations", "uninitialized", "leak"])
def test_operators_that_are_right(holds, name):
    sizes = (tensor("1 2 n"), tensor("2 2 1"))
    convolved = holds(f"memory.{name}", convolves, args=sizes, reference=convolves, max_examples=10)
    assert convolved.tried > convolved.refused
    args = (*VECTOR, tensor("0"))
    assert holds(f"memory.{name}", resizes, args=args, reference=resizes, max_examples=10).refused < 10


kept = []


def keeps_workspace(x):
    kept.append(torch.empty(100))
    return x + 1


def keeps_argument(x):
    if x.numel() > 100:
        kept.append(x)
    return x + 1


def never_frees(x):
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    malloc(ctypes.c_size_t(max(4 * x.numel(), 48)))
    return x + 1


def never_forgets(x):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    return x + 1


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", [keeps_workspace, never_frees, never_forgets, keeps_argument])
def test_leaks_are_found(fails, op):
    failure = fails("memory.leak", op, args=ROWS)
    assert "after each call" in failure.message


caches = {}


def caches_once(x):
    key = tuple(x.shape)
    if key not in caches:
        caches[key] = torch.empty(10_000)
    return x + 1


def keeps_the_last(x):
    kept[:] = [*kept, x][-20:]
    return x + 1


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [caches_once, keeps_the_last, lambda x: [x + 1, x * 2], lambda x: x.mul_(2)])
def test_caches_that_fill_are_no_leaks(holds, op):
    holds("memory.leak", op, args=ROWS)


# ---- on a GPU ----------------------------------------------------------------------------------------------------------


def beside_on_gpu(x):
    """Its last sum takes in what lies behind a tensor."""
    return torch.as_strided(x, (x.numel() + 1,), (1,)).sum() if x.numel() and x.is_contiguous() else x.sum()


def unwritten_on_gpu(x):
    result = torch.empty_like(x)
    result[: x.numel() // 2 + 1] = x[: x.numel() // 2 + 1]
    return result


def keeps_on_gpu(x):
    kept.append(torch.empty(100, device=x.device))
    return x + 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "wrong"), [("red_zone", beside_on_gpu), ("uninitialized", unwritten_on_gpu), ("leak", keeps_on_gpu)]
)
def test_memory_of_a_gpu(fails, holds, name, wrong):
    fails(f"memory.{name}", wrong, args=VECTOR, device="cuda", max_examples=20)
    for right in (torch.sin, lambda x: x.sort().values, lambda x: x.cumsum(0)):
        holds(f"memory.{name}", right, args=VECTOR, device="cuda", max_examples=20)
    kept.clear()
