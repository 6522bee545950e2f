"""Several launches by hand, one after another, of which only the tensors move. The driver is a fake."""

import pytest
import torch
import triton
import triton.language as tl
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

import opkit
from opkit.op.triton.launch import PreparedLaunch, PreparedSeries, ScratchTensor, recording
from opkit.testing import compile_launches

N = 100


@triton.jit
def square(x, bias, squares, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n)
    if bias is not None:
        value += tl.load(bias + at, at < n)
    tl.store(squares + at, value * value, at < n)


@triton.jit
def double(squares, signs, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(signs + at, 1, at < n)
    tl.store(out + at, 2 * tl.load(squares + at, at < n), at < n)


def prepared(n=N):
    kernels = [opkit.triton_kernel(f, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), BLOCK=64) for f in (square, double)]
    names = ("x", "bias", "squares"), ("squares", "signs", "out")
    return [PreparedLaunch(kernel, each, {"n": n}) for kernel, each in zip(kernels, names, strict=True)]


def series(names=("x", "out"), n=N, **results):
    rooms = {"squares": ScratchTensor((n,), torch.float32), "signs": ScratchTensor((n, 1), torch.int8)}
    return PreparedSeries(prepared(n), names, results, rooms)


def pointers(row, count):
    return [int.from_bytes(bytes.fromhex(part), "little") for part in row[-1].split()[:count]]


def test_tensors_come_in_order_and_rooms_are_shared(device):
    call = series()
    for _ in range(3):
        x, out = torch.ones(N), torch.empty(N)
        call(x, out)
        first, second = (pointers(row, count) for row, count in zip(device.launches[-2:], (2, 3), strict=True))
        assert (first[0], second[2]) == (x.data_ptr(), out.data_ptr())
        assert first[1] == second[0]
        assert len({*first, *second}) == 4
    assert [row[1].split()[0] for row in device.launches] == ["square", "double"] * 3
    assert device.grids == ["2,1,1"] * 6
    assert len(device.requests) == 2
    assert device.requests[0].constexprs["bias"] is None


def test_a_name_that_is_given_is_there(device):
    call = series(("bias", "out", "x"))
    for _ in range(2):
        x, bias, out = torch.ones(N), torch.ones(N), torch.empty(N)
        call(bias, out, x)
        assert pointers(device.launches[-2], 2) == [x.data_ptr(), bias.data_ptr()]
    assert device.requests[0].signature["bias"] == "*fp32"


def test_only_the_first_launches_pass_the_dispatcher(device):
    call = series()
    with torch.profiler.profile(acc_events=True) as profile:
        for _ in range(3):
            call(torch.ones(N), torch.empty(N))
    assert sum(event.key.startswith("opkit_launch::") for event in profile.events()) == 2
    assert len(device.launches) == 6


def test_an_address_of_another_alignment_is_compiled_for(device):
    call = series()
    x, moved, out = torch.ones(N), torch.ones(N + 1)[1:], torch.empty(N)
    for each in (x, x, moved, moved, x):
        call(each, out)
    assert len(device.requests) == 3
    assert [pointers(row, 1)[0] for row in device.launches[::2]] == [
        each.data_ptr() for each in (x, x, moved, moved, x)
    ]


def test_launches_of_nothing(device):
    call = series(n=0)
    for _ in range(3):
        call(torch.ones(0), torch.empty(0))
    assert device.launches == []


class Seen(TorchDispatchMode):
    """Notes what it is asked for, and launches nothing."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return None if isinstance(function, HigherOrderOperator) else function(*args, **(kwargs or {}))


def test_a_mode_sees_every_launch(device):
    call = series()
    for _ in range(2):
        call(torch.ones(N), torch.empty(N))
    x, out = torch.ones(N), torch.empty(N)
    with Seen() as seen:
        call(x, out)
    assert seen.names == ["empty.memory_format"] * 2 + ["triton_kernel_wrapper_mutation"] * 2
    assert len(device.launches) == 4


def test_launches_are_recorded_one_by_one(device):
    call = series()
    for _ in range(2):
        call(torch.ones(N), torch.empty(N))
    before = len(device.launches)
    with recording() as found:
        call(torch.ones(N), torch.empty(N))
    assert [each.bound.kernel.name for each in found] == ["square", "double"]
    assert found[0].named()["squares"].shape == (N,)
    assert found[1].named()["signs"].dtype == "int8"
    assert len(device.launches) == before


def test_launches_are_compiled_for_gpus_that_are_not_here():
    def call():
        x = torch.empty(N, device="meta")
        series()(x, x)

    report = compile_launches(call, ["sm_90"])
    assert [row.kernel for row in report.rows] == ["square", "double"]
    assert report.ok


def test_as_many_tensors_as_names(device):
    with pytest.raises(ValueError, match="zip"):
        series()(torch.ones(N))
    call = series()
    call(torch.ones(N), torch.empty(N))
    with pytest.raises(ValueError, match="launched with 1 tensors, and takes 2"):
        call(torch.ones(N))


def made():
    """Results, as they are made one by one, and how many were."""
    tensors = []

    def make():
        tensors.append(torch.empty(20, 5, dtype=torch.float32).t())
        return tensors[-1]

    return make, tensors


def test_results_are_made_for_each_call(device):
    make, tensors = made()
    call = series(("x",), out=make)
    x = torch.ones(N)
    results = [call(x) for _ in range(3)]
    assert [pointers(row, 3)[2] for row in device.launches[1::2]] == [out.data_ptr() for (out,) in results]
    assert all((out.shape, out.stride(), out.dtype) == ((5, 20), (1, 5), torch.float32) for (out,) in results)
    assert len({out.data_ptr() for (out,) in results}) == 3
    assert tensors == [results[0][0]]


def test_what_torch_has_no_memory_for_is_asked_of_torch(device, monkeypatch):
    make, tensors = made()
    call = series(("x",), out=make)
    call(torch.ones(N))

    def refuse(addresses, stream):
        raise MemoryError

    monkeypatch.setattr(call, "_series", refuse)
    (out,) = call(torch.ones(N))
    assert out is tensors[1]
    assert len(device.launches) == 4


@pytest.mark.parametrize("fill", [True, False])
def test_memory_is_not_filled_under_determinism(device, monkeypatch, fill):
    call = series()
    x, out = torch.ones(N), torch.empty(N)
    call(x, out)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
            call(x, out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(device.launches) == 4
    filled = [each.input_shapes[0] for each in profile.events() if each.key == "aten::fill_"]
    assert not any(torch.Size(shape).numel() for shape in filled)
