"""Calls of launched kernels: entries are made once for each kind of call, and what goes wrong is said."""

from __future__ import annotations

import inspect
import re
import signal

import pytest
import torch

from opkit import _core


def test_a_call_is_launched_and_later_ones_ask_python_no_more(fake):
    add = fake.add()
    x, y = torch.randn(40, 8), torch.randn(40, 8)
    for _ in range(3):
        assert torch.equal(add(x, y), x + y)
    assert len(add.missed) == 1
    assert add.launcher.entries == 1
    addresses = [value[0] for value in add.missed[0][:3]]
    assert addresses[:2] == [x.data_ptr(), y.data_ptr()]
    assert add.missed[0][0][1:] == (6, -1, (40, 8), (8, 1))
    function, name, grid, block, shared, stream, attributes, parameters = fake.launches[0]
    assert (function, name, grid, block, shared) == ("cuLaunchKernel", "add 8 8 8 4", "3,1,1", "128,1,1", "0")
    assert (stream, attributes) == ("(nil)", "")
    expected = [*(address.to_bytes(8, "little").hex() for address in addresses), (320).to_bytes(4, "little").hex()]
    assert parameters.split() == expected


def test_a_module_is_loaded_once(fake):
    add = fake.add()
    for _ in range(3):
        add(torch.ones(16), torch.ones(16))
    assert len(fake.noted("load")) == 1


def test_a_tensor_without_strides_is_made_contiguous(fake):
    add = fake.add()
    x, y = torch.randn(8, 40).t(), torch.randn(40, 16)[:, ::2]
    assert torch.equal(add(x, y), x + y)
    assert [value[3:] for value in add.missed[0][:2]] == [((40, 8), (8, 1))] * 2


def test_a_written_tensor_is_copied_back(fake):
    rows = [("PACKED_TENSOR", "x", "tensor"), ("NUMEL", "x", "int")]
    entry = fake.entry("increment", [("ptr", 0, 0), ("i32", 1, 0)])
    increment = fake.operator("increment(Tensor(a!) x) -> ()", rows, lambda call: entry)
    x = torch.zeros(4, 4)
    increment(x[:, ::2])
    assert x.sum() == 8
    assert x[:, ::2].sum() == 8


def test_a_tensor_with_strides_is_taken_as_it_lies(fake):
    rows = [("TENSOR", "x", "tensor"), ("STRIDE", "x", 1, "int"), ("TENSOR", "out", "tensor")]
    entry = fake.entry("none", [("ptr", 0, 0), ("i64", 1, 0)])
    op = fake.operator("strided(Tensor x) -> Tensor", rows, lambda call: entry)
    x = torch.randn(4, 8)[:, ::2]
    op(x)
    assert op.missed[0][0][0] == x.data_ptr()
    assert op.missed[0][1] == 2


def test_none_is_a_null_pointer_and_another_kind_of_call(fake):
    rows = [("PACKED_TENSOR", "x", "tensor"), ("PACKED_TENSOR", "bias", "tensor"), ("TENSOR", "out", "tensor")]
    entry = fake.entry("none", [("ptr", 1, 0)])
    op = fake.operator("biased(Tensor x, Tensor? bias) -> Tensor", rows, lambda call: entry)
    x = torch.randn(4)
    op(x, None)
    op(x, x)
    op(x, None)
    assert [values[1] is None for values in op.missed] == [True, False]
    assert [row[-1] == "00" * 8 for row in fake.launches] == [True, False, True]


def test_an_empty_output_needs_no_launch(fake):
    add = fake.add()
    assert add(torch.ones(0, 3), torch.ones(0, 3)).shape == (0, 3)
    assert not add.missed


def test_a_grid_of_nothing_is_an_error_where_an_output_would_stay_unwritten(fake):
    rows = [("TENSOR", "x", "tensor"), ("TENSOR", "out", "tensor")]
    op = fake.operator("none(Tensor x) -> Tensor", rows, lambda call: fake.entry("none", [("ptr", 1, 0)], (0, 1, 1)))
    message = rf"t::{op.name} \(kernel _k\): its grid \(0, 1, 1\) is empty, so out would be left unwritten"
    with pytest.raises(RuntimeError, match=message):
        op(torch.ones(3))
    assert not fake.launches


def test_a_grid_of_nothing_is_no_error_where_the_output_is_zeroed(fake):
    rows = [("TENSOR", "x", "tensor"), ("TENSOR", "out", "tensor")]
    entry = fake.entry("none", [("ptr", 1, 0)], (0, 1, 1), zero=[1])
    op = fake.operator("none(Tensor x) -> Tensor", rows, lambda call: entry)
    assert torch.equal(op(torch.ones(3)), torch.zeros(3))
    assert not fake.launches


def test_a_failed_launch_says_what_was_launched(fake):
    add = fake.add(threads=256, shared=100)
    fake.fail("cuLaunchKernel", 701)
    message = (
        rf"t::{add.name} \(kernel _k\): cuLaunchKernel failed with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES \(too many resources "
        r"requested for launch\); the grid is \(1, 1, 1\), a block has 256 threads and 100 bytes of shared memory"
    )
    with pytest.raises(RuntimeError, match=message):
        add(torch.ones(4), torch.ones(4))
    assert add.launcher.entries == 0
    fake.fail("", 0)
    assert torch.equal(add(torch.ones(4), torch.ones(4)), torch.full((4,), 2.0))


def test_a_module_that_cannot_be_loaded_is_an_error_and_tried_again(fake):
    add = fake.add()
    fake.fail("cuModuleGetFunction", 1)
    message = (
        r"the compiled kernel add 8 8 8 4 cannot be loaded on device 0: cuModuleGetFunction failed with CUDA_ERROR_INV"
    )
    with pytest.raises(RuntimeError, match=message):
        add(torch.ones(4), torch.ones(4))
    assert fake.noted("unload")
    fake.fail("", 0)
    add(torch.ones(4), torch.ones(4))


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TypeError("no such grid"), "TypeError: no such grid"),
        (KeyError("BLOCK"), "KeyError: 'BLOCK'"),
        (Odd(), "Odd"),
        (ValueError("long" * 500), f"ValueError: {'long' * 175}..."),
    ],
)
def test_what_python_raises_is_told_with_the_authors_line(fake, error, text):
    def author(call: _core.Call) -> None:
        raise error

    op = fake.operator("raises(Tensor x) -> Tensor", [("TENSOR", "out", "tensor")], author)
    line = inspect.getsourcelines(author)[1] + 1
    message = rf"t::{op.name} \(kernel _k\): {re.escape(text)} \({re.escape(__file__)}:{line}\)"
    with pytest.raises(RuntimeError, match=message):
        op(torch.ones(3))


def test_the_line_is_not_one_of_torchs(fake):
    def author(call: _core.Call) -> None:
        torch.ones(3).view(5, 5)
        torch.testing.assert_close(torch.ones(1), torch.zeros(1))

    op = fake.operator("raises(Tensor x) -> Tensor", [("TENSOR", "out", "tensor")], author)
    with pytest.raises(RuntimeError, match=rf"{re.escape(__file__)}:\d+"):
        op(torch.ones(3))


def test_an_interrupt_is_one_after_the_error_too(fake):
    def interrupted(call: _core.Call) -> None:
        raise KeyboardInterrupt

    op = fake.operator("raises(Tensor x) -> Tensor", [("TENSOR", "out", "tensor")], interrupted)
    problem = None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background has none
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            try:
                op(torch.ones(3))
            except RuntimeError as error:
                problem = error
            for _ in range(100):
                torch.ones(1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "KeyboardInterrupt" in str(problem)


def test_an_answer_that_is_no_entry_is_an_error(fake):
    op = fake.operator("odd(Tensor x) -> Tensor", [("TENSOR", "out", "tensor")], lambda call: "grid")
    with pytest.raises(RuntimeError, match="an Entry was expected, not 'grid'"):
        op(torch.ones(3))


def test_no_answer_means_that_the_work_is_done(fake):
    def miss(call: _core.Call) -> None:
        call.launch(fake.entry("increment", [("ptr", 0, 0), ("i32", 1, 0)]))

    rows = [("PACKED_TENSOR", "x", "tensor"), ("NUMEL", "x", "int")]
    op = fake.operator("increment(Tensor(a!) x) -> ()", rows, miss)
    x = torch.zeros(3)
    for times in (1, 2):
        op(x)
        assert torch.equal(x, torch.full((3,), float(times)))
    assert len(op.missed) == 2
    assert op.launcher.entries == 0


def test_a_call_ends_with_the_answer(fake):
    calls = []
    entry = fake.entry("none", [("ptr", 0, 0)])

    def miss(call: _core.Call) -> _core.Entry:
        calls.append(call)
        assert call.device == -1
        assert not call.capturing
        return entry

    op = fake.operator("kept(Tensor x) -> Tensor", [("TENSOR", "out", "tensor")], miss)
    op(torch.ones(3))
    (call,) = calls
    for use in (
        lambda: call.values,
        lambda: call.device,
        lambda: call.capturing,
        lambda: call.launch(entry),
        lambda: call.time(entry),
    ):
        with pytest.raises(RuntimeError, match="this call has ended"):
            use()


def test_an_entry_that_asks_a_source_for_what_it_has_not_is_refused(fake):
    rows = [("TENSOR", "x", "tensor"), ("NUMEL", "x", "int"), ("TENSOR", "out", "tensor")]
    for params, options, message in (
        ([("ptr", 1, 0)], {}, "ptr asks for a tensor, and x is none"),
        ([("i32", 0, 0)], {}, "i32 asks for a number, and x is none"),
        ([("i32", 9, 0)], {}, "an entry asks for the source 9 of 3"),
        ([("ptr", -1, 0)], {}, "an entry asks for the source -1 of 3"),
        ([("ptr", 0, 0)], {"zero": [1]}, "zero asks for a tensor, and x is none"),
    ):
        entry = fake.entry("none", params, **options)
        op = fake.operator("odd(Tensor x) -> Tensor", rows, lambda call, entry=entry: entry)
        with pytest.raises(RuntimeError, match=message):
            op(torch.ones(3))
    assert not fake.launches


def test_a_view_of_the_capture_state(fake):
    seen = []
    entry = fake.entry("none", [("ptr", 0, 0)])

    def miss(call: _core.Call) -> _core.Entry:
        seen.append(call.capturing)
        return entry

    op = fake.operator("captured(Tensor x) -> Tensor", [("TENSOR", "out", "tensor")], miss)
    op(torch.ones(3))
    op.launcher.clear()
    fake.library.fake_capture(1)
    op(torch.ones(3))
    assert seen == [False, True]
