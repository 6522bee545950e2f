"""Launches of kernels that take one structure: what the driver is asked for."""

from __future__ import annotations

import ctypes

import pytest

from opkit import _core


class Problem(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("data", "batch", "head", "row")),
    )


MAP = (8, 9, 2, (64, 100, 2, 3, 4), (64, 32, 2, 1, 1))


def launched(fake, *, maps=(MAP,), device=1, data=1 << 20, **options):
    """Launch two kernels, of a problem and its maps; the second early."""
    first = fake.binary(f"first {ctypes.sizeof(Problem)} 128", threads=256)
    second = fake.binary(f"second {ctypes.sizeof(Problem)} 128", threads=384, shared=200_000, pdl=True, **options)
    run = _core.ProblemLaunch([(first, (5, 1, 1)), (second, (7, 2, 3))], maps, ctypes.sizeof(Problem), device)
    problem = Problem(77, data, 38400, 12800, 128)
    run(ctypes.addressof(problem), 0x70)
    return run, problem


def test_kernels_are_launched_in_order_with_the_structure_and_its_maps(fake):
    launched(fake)
    first, second = fake.launches
    assert first[1].startswith("first")
    assert second[1].startswith("second")
    assert first[2:6] == ["5,1,1", "256,1,1", "0", "0x70"]
    assert second[2:6] == ["7,2,3", "384,1,1", "200000", "0x70"]
    assert (first[6], second[6]) == ("", "6=1,0,0")
    for row in (first, second):
        problem, encoded = map(bytes.fromhex, row[-1].split())
        assert problem == bytes(Problem(77, 1 << 20, 38400, 12800, 128))
        assert int.from_bytes(encoded[:8], "little") == 1 << 20
    (encoded,) = fake.noted("encode")  # strides in bytes; no interleaving, 128 bytes swizzled, 256 promoted, zeros
    assert encoded[1:-1] == ["9", "5", "64:0:64:1 100:256:32:1 2:128:2:1 3:25600:1:1 4:76800:1:1 ", "0", "3", "3", "0"]


def test_a_map_of_another_place_is_an_error(fake):
    with pytest.raises(ValueError, match="of a place that the problem does not have"):
        launched(fake, maps=[(16, *MAP[1:])])
    with pytest.raises(ValueError, match="a problem has a kernel or more"):
        _core.ProblemLaunch([], [MAP], 100, 0)


def test_what_the_driver_refuses_is_raised(fake):
    fake.fail("cuLaunchKernelEx", 701)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with "):
        launched(fake)


def test_the_context_is_the_devices_for_a_while(fake):
    fake.library.fake_context(ctypes.c_void_p(9))
    launched(fake, device=2)
    assert [row[-1] for row in fake.noted("load")] == ["context 0x3"] * 2
    current = ctypes.c_void_p()
    fake.library.cuCtxGetCurrent(ctypes.byref(current))
    assert current.value == 9


def test_the_cache_may_be_left_to_the_driver(fake):
    launched(fake, prefer_shared=False)
    assert fake.noted("cache") == []
    launched(fake)
    assert fake.noted("cache") == [["cache", "1"]]
