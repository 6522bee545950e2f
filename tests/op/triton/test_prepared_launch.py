"""Launches by hand whose numbers stay the same. The driver is a fake."""

import pytest
import torch
import triton
import triton.language as tl

import opkit
from opkit.errors import ArgumentError, CompileError, DeclarationError
from opkit.kernels.triton import compiling
from opkit.op.triton.launch import PreparedLaunch, recording
from opkit.testing import compile_launches


@triton.jit
def biased(x, bias, out, bias_stride_0, n, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n) * scale
    if bias is not None:
        value += tl.load(bias + at * bias_stride_0, at < n)
    tl.store(out + at, value, at < n)


def kernel(**options):
    return opkit.triton_kernel(biased, grid=lambda n, BLOCK: triton.cdiv(n, BLOCK), **{"BLOCK": 64, **options})


def parameters(row):
    return [int.from_bytes(bytes.fromhex(part), "little") for part in row[-1].split()]


def test_tensors_come_in_order_and_numbers_are_known(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    x, bias = torch.ones(100), torch.ones(200)[::2]
    for _ in range(3):
        out = torch.empty(100)
        launch(x, bias, out)
        assert parameters(device.launches[-1])[:5] == [x.data_ptr(), bias.data_ptr(), out.data_ptr(), 2, 100]
    assert device.grids == ["2,1,1"] * 3
    assert len(device.requests) == 1


def test_only_the_first_launch_passes_the_dispatcher(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    with torch.profiler.profile(acc_events=True) as profile:
        for _ in range(3):
            launch(torch.ones(100), None, torch.empty(100))
    assert len(device.launches) == 3
    assert sum(event.key.startswith("opkit_launch::") for event in profile.events()) == 1


def test_an_address_of_another_alignment_is_compiled_for(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    x, moved, out = torch.ones(100), torch.ones(101)[1:], torch.empty(100)
    for each in (x, moved, moved, x):
        launch(each, None, out)
    assert len(device.requests) == 2
    assert [parameters(row)[0] for row in device.launches] == [each.data_ptr() for each in (x, moved, moved, x)]


def test_a_launch_is_timed_in_place_of_made(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    x, out = torch.ones(100), torch.empty(100)
    assert launch.time(x, None, out) >= 0
    assert len(device.launches) > 1
    assert {tuple(parameters(row)[:2]) for row in device.launches} == {(x.data_ptr(), out.data_ptr())}
    before = len(device.launches)
    launch(x, None, out)
    launch(x, None, out)
    assert len(device.launches) == before + 2
    assert launch.time(x, None, out) >= 0  # although the table has it now
    assert len(device.launches) > before + 3


def test_what_fails_while_it_is_timed_keeps_its_class(device, monkeypatch):
    def refuse(request):
        raise CompileError("no such layout")

    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "build", refuse)
        with pytest.raises(CompileError, match="no such layout"):
            launch.time(torch.ones(100), None, torch.empty(100))
    launch(torch.ones(100), None, torch.empty(100))
    assert len(device.launches) == 1


def test_nothing_is_timed_in_a_capture(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    device.fake.library.fake_capture(1)
    try:
        with pytest.raises(RuntimeError, match="nothing can be measured while the stream is being captured"):
            launch.time(torch.ones(100), None, torch.empty(100))
    finally:
        device.fake.library.fake_capture(0)


def test_what_launches_nothing_is_not_remembered(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 0, "scale": 0.5})
    for _ in range(2):
        launch(torch.ones(0), None, torch.empty(0))
    assert device.launches == []


def test_a_tensor_that_is_none_is_compiled_without_and_its_strides_are_0(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    x, out = torch.ones(100), torch.empty(100)
    launch(x, None, out)
    launch(x, x, out)
    launch(x, None, out)
    assert [request.signature["bias"] for request in device.requests] == ["constexpr", "*fp32"]
    assert device.requests[0].constexprs["bias"] is None
    assert parameters(device.launches[0])[2:4] == [0, 100]
    assert parameters(device.launches[2])[2:4] == [0, 100]


def test_what_a_launch_by_hand_would_refuse(device):
    launch = PreparedLaunch(kernel(), ("x", "bias", "out", "more"), {"n": 100, "scale": 0.5})
    with pytest.raises(DeclarationError, match="launched with more=, which nothing uses"):
        launch(torch.ones(100), None, torch.empty(100), torch.ones(1))


def test_it_is_recorded_as_a_launch_by_hand_is():
    launch = PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})
    with recording() as found:
        launch(torch.ones(100), None, torch.empty(100))
        kernel()(x=torch.ones(100), bias=None, out=torch.empty(100), n=100, scale=0.5)
    first, second = ({name: value for name, value in each.named().items() if name in "n scale"} for each in found)
    assert first == second == {"n": 100, "scale": 0.5}


def test_launches_are_compiled_for_gpus_that_are_not_here():
    def call():
        x = torch.empty(100, device="meta")
        PreparedLaunch(kernel(), ("x", "bias", "out"), {"n": 100, "scale": 0.5})(x, None, x)
        kernel()(x=x, bias=x, out=x, n=100, scale=0.5)

    report = compile_launches(call, ["sm_90", "gfx942"])
    assert [(row.target, row.kernel, row.example) for row in report.rows] == [
        (target, "biased", f"launch {number}") for target in ("sm_90", "gfx942") for number in (0, 1)
    ]
    assert all(row.registers > 0 for row in report.rows)
    assert "biased" in str(report)


def test_a_kernel_for_some_gpus_is_not_compiled_for_others():
    def call():
        x = torch.empty(100, device="meta")
        kernel(targets=("sm_90",))(x=x, bias=x, out=x, n=100, scale=0.5)

    report = compile_launches(call, ["sm_80", "sm_90a"])
    assert [row.skipped for row in report.rows] == ["the kernel is for sm_90", ""]
    assert report.ok


@triton.jit
def broken(x):
    tl.store(x, undefined)


def test_a_launch_that_does_not_compile_says_so():
    report = compile_launches(lambda: opkit.triton_kernel(broken, grid=1)(x=torch.empty(1, device="meta")), ["sm_90"])
    assert not report.ok
    assert "undefined" in report.failures[0].error


def test_nothing_to_compile():
    with pytest.raises(ArgumentError, match="launches no Triton kernel by hand"):
        compile_launches(lambda: None, ["sm_90"])
    with pytest.raises(ArgumentError, match="no architecture"):
        compile_launches(lambda: None, ["sm_1"])
