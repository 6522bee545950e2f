"""Measuring a kernel leaves what it writes as it was."""

from __future__ import annotations

import pytest
import torch

from opkit import _core

FLUSH = str(256 << 20)


def _timed(fake, entry, **options):
    """Increments its argument; the call is measured first. What the measurement gave."""
    took = []

    def miss(call: _core.Call) -> _core.Entry:
        took.append(call.time(entry, **options))
        return entry

    rows = [("TENSOR", "x", "tensor"), ("NUMEL", "x", "int")]
    return fake.operator("timed(Tensor(a!) x) -> ()", rows, miss), took


def _increment(fake, **options):
    return fake.entry("increment", [("ptr", 0, 0), ("i32", 1, 0)], **options)


def test_the_median_of_launches_with_cold_caches(fake):
    op, took = _timed(fake, _increment(fake), warmup_ms=1, run_ms=2.5)
    x = torch.zeros(4)
    op(x)
    assert took == [0.25]
    each = 0.25 / 5  # the fake driver's clock says a quarter of a millisecond whatever happens
    launches = 1 + 5 + int(1 / each) + int(2.5 / each)
    assert len(fake.noted("fill")) == launches
    assert len(fake.launches) == launches + 1
    assert torch.equal(x, torch.full((4,), launches + 1.0))
    assert [row[0] for row in fake.log][-9:] == ["fill", "record", "cuLaunchKernel", "record"] * 2 + ["cuLaunchKernel"]
    assert fake.noted("fill")[0][1] == FLUSH


def test_what_is_written_is_restored(fake):
    op, took = _timed(fake, _increment(fake), written=[0], warmup_ms=0, run_ms=0)
    x = torch.arange(12.0).view(3, 4)
    op(x)
    assert took == [0.25]
    assert torch.equal(x, torch.arange(12.0).view(3, 4) + 1)
    assert fake.noted("copy") == [["copy", "48", "(nil)"]] * 2


def test_gaps_between_elements_are_saved_too(fake):
    op, _ = _timed(fake, _increment(fake), written=[0])
    x = torch.zeros(8)
    op(x[::2])  # the kernel takes no strides: it increments the first four places
    assert torch.equal(x, torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0]))
    assert fake.noted("copy")[0][1] == "28"


def test_zeroing_is_not_measured(fake):
    op, _ = _timed(fake, _increment(fake, zero=[0]), run_ms=0, warmup_ms=0)
    op(torch.zeros(4))
    rows = [row[0] if row[0] != "fill" else row[1] for row in fake.log]
    at = rows.index("record")
    assert rows[at - 2 : at + 4] == [FLUSH, "16", "record", *rows[at + 1 : at + 4]]
    assert [row for row in rows[at + 1 : at + 4] if row in ("16", FLUSH)] == []


def test_an_empty_grid_takes_no_time(fake):
    op, took = _timed(fake, _increment(fake, grid=(0, 1, 1)))
    op(torch.zeros(4))
    assert took == [0]
    assert not fake.launches


def test_nothing_is_measured_while_a_stream_is_captured(fake):
    op, _ = _timed(fake, _increment(fake))
    fake.library.fake_capture(1)
    with pytest.raises(
        RuntimeError, match="nothing can be measured while the stream is being captured; call the operator"
    ):
        op(torch.zeros(4))
    assert not fake.launches


def test_a_kernel_that_fails_is_an_error_and_memory_is_restored(fake):
    op, _ = _timed(fake, _increment(fake), written=[0])
    fake.fail("cuLaunchKernel", 701)
    x = torch.arange(4.0)
    with pytest.raises(
        RuntimeError, match=r"RuntimeError: cuLaunchKernel failed with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    ):
        op(x)
    assert torch.equal(x, torch.arange(4.0))
    assert len(fake.noted("copy")) == 2


def test_written_must_be_tensors(fake):
    for written in ([1], [5]):
        op, _ = _timed(fake, _increment(fake), written=written)
        with pytest.raises(RuntimeError, match="ValueError: "):
            op(torch.zeros(4))


def test_the_entry_that_was_best_can_be_chosen(fake):
    """What a tuner does: each is measured, a failing one is left out, one is returned."""
    entries = [_increment(fake, threads=threads) for threads in (32, 64)]
    broken = fake.entry("increment", [("ptr", 0, 0), ("i32", 1, 0)], shared=300_000)
    tried = []

    def miss(call: _core.Call) -> _core.Entry:
        for entry in (broken, *entries):
            try:
                tried.append(call.time(entry, warmup_ms=0, run_ms=0, written=[0]))
            except RuntimeError as error:
                tried.append(str(error))
        return entries[1]

    op = fake.operator("tuned(Tensor(a!) x) -> ()", [("TENSOR", "x", "tensor"), ("NUMEL", "x", "int")], miss)
    x = torch.zeros(3)
    op(x)
    assert torch.equal(x, torch.ones(3))
    assert "300000 bytes of shared memory" in tried[0]
    assert tried[1:] == [0.25, 0.25]
    assert fake.launches[-1][3] == "64,1,1"
