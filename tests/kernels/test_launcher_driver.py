"""What the driver is asked for: modules, contexts, attributes, grids; CUDA's and HIP's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading

import pytest
import torch

from opkit import _core

OUT = [("TENSOR", "out", "tensor_any")]


def _launch(fake, kernel="none", params=(("ptr", 0, 0),), grid=(1, 1, 1), **options):
    entry = fake.entry(kernel, params, grid, **options)
    op = fake.operator("launched(Tensor x) -> Tensor", OUT, lambda call: entry)
    return op(torch.ones(2))


def test_a_driver_that_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"the GPU's driver cannot be opened: .*libnone\.so"):
        _core.Driver(str(tmp_path / "libnone.so"), "cuda")


def test_a_driver_of_another_kind_is_an_error(fake):
    with pytest.raises(RuntimeError, match='a driver is of the kind "cuda" or "hip", not "metal"'):
        _core.Driver(str(fake.path), "metal")


def test_what_a_driver_lacks_is_named(tmp_path, fake):
    path = tmp_path / "libless.so"
    assert shutil.which("gcc")
    source = tmp_path / "less.c"
    source.write_text("int cuInit(unsigned flags) { return (int)flags; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(
        RuntimeError, match=r"libless\.so lacks cuDriverGetVersion, .*, cuLaunchKernel, .*; a newer driver"
    ):
        _core.Driver(str(path), "cuda")
    with pytest.raises(RuntimeError, match=r"lacks hipInit, "):
        _core.Driver(str(fake.path), "hip")


def test_a_module_is_loaded_once_for_each_device_in_its_context(fake, tensor_at):
    entry = fake.entry("none", [("ptr", 0, 0)])
    op = fake.unregistered("on(Tensor x) -> ()", [("TENSOR", "x", "tensor_any")], lambda call: entry, cuda=True)
    for device in (0, 3, 0, 3):
        op.direct(tensor_at(64, device=device), stream=0x70)
    assert fake.noted("load", "retain") == [
        ["retain", "0"],
        ["load", "image", "mode 2", "context 0x1"],
        ["retain", "3"],
        ["load", "image", "mode 2", "context 0x4"],
    ]
    assert [row[5] for row in fake.launches] == ["0x70"] * 4


def test_loading_leaves_context_and_capture_mode_as_they_were(fake, tensor_at):
    fake.library.fake_context(ctypes.c_void_p(9))
    binary = fake.binary("none 8")
    for device in (1, 2):
        binary.attributes(device)
    loaded = [row[2:] for row in fake.noted("load")]
    assert loaded == [["mode 2", "context 0x2"], ["mode 2", "context 0x3"]]
    current, mode = ctypes.c_void_p(), ctypes.c_int(7)
    fake.library.cuCtxGetCurrent(ctypes.byref(current))
    fake.library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert (current.value, mode.value) == (9, 0)


def test_a_thread_without_a_context_gets_the_devices(fake, tensor_at):
    entry = fake.entry("none", [("ptr", 0, 0)])
    op = fake.unregistered("on(Tensor x) -> ()", [("TENSOR", "x", "tensor_any")], lambda call: entry, cuda=True)
    op.direct(tensor_at(64, device=2), stream=0)
    before = len(fake.noted("retain"))

    def work() -> None:
        fake.library.fake_context(None)
        for _ in range(2):
            op.direct(tensor_at(64, device=2), stream=0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert fake.noted("retain")[before:] == [["retain", "2"]]
    assert len(fake.launches) == 3


def test_a_device_of_too_high_a_number_is_an_error(fake, tensor_at):
    entry = fake.entry("none", [("ptr", 0, 0)])
    op = fake.unregistered("on(Tensor x) -> ()", [("TENSOR", "x", "tensor_any")], lambda call: entry, cuda=True)
    with pytest.raises(RuntimeError, match="the device index 64 is above what opkit counts to"):
        op.direct(tensor_at(64, device=64), stream=0)


def test_attributes_of_a_binary(fake):
    found = fake.binary("none 8", shared=100).attributes(0)
    assert found == {"registers": 40, "local_bytes": 8, "shared_bytes": 116, "max_threads": 1024}


def test_shared_memory_above_48_kib_is_asked_for(fake):
    _launch(fake, shared=48 * 1024)
    assert not fake.noted("attribute", "cache")
    _launch(fake, shared=200_000)
    assert fake.noted("attribute", "cache") == [["cache", "1"], ["attribute", "8", "200000"]]
    assert fake.launches[-1][4] == "200000"


def test_more_shared_memory_than_there_is_is_an_error(fake):
    message = r"it needs 300000 bytes of shared memory for a block, and the device has 232448; use smaller blocks"
    with pytest.raises(RuntimeError, match=message):
        _launch(fake, shared=300_000)


def test_launch_attributes(fake):
    for options, attributes in (
        ({"pdl": True}, "6=1,0,0"),
        ({"cooperative": True}, "2=1,0,0"),
        ({"cluster": (2, 1, 1)}, "4=2,1,1 5=1,0,0"),
        ({"cluster": (2, 2, 1), "pdl": True, "cooperative": True}, "6=1,0,0 2=1,0,0 4=2,2,1 5=1,0,0"),
    ):
        _launch(fake, grid=(3, 5, 7), **options)
        function, _, grid, *_ = fake.launches[-1]
        assert function == "cuLaunchKernelEx", options
        cluster = options.get("cluster", (1, 1, 1))
        assert grid == ",".join(str(n * c) for n, c in zip((3, 5, 7), cluster, strict=True)), options
        assert fake.launches[-1][6] == attributes, options
    assert not fake.noted("attribute")


def test_clusters_above_8_blocks_are_allowed_first(fake):
    _launch(fake, cluster=(16, 1, 1))
    assert fake.noted("attribute") == [["attribute", "14", "1"]]


def test_a_failed_launch_names_the_clusters(fake):
    fake.fail("cuLaunchKernelEx", 1)
    with pytest.raises(
        RuntimeError, match=r"INVALID_VALUE.*the grid is \(1, 1, 1\), clusters of \(2, 1, 1\), a block has"
    ):
        _launch(fake, cluster=(2, 1, 1))


def test_hip(fake_hip):
    for options, function, attributes in (
        ({}, "hipModuleLaunchKernel", ""),
        ({"pdl": True}, "hipModuleLaunchKernel", ""),
        ({"shared": 60_000}, "hipModuleLaunchKernel", ""),
        ({"cooperative": True}, "hipModuleLaunchCooperativeKernel", ""),
        ({"cluster": (2, 1, 1), "cooperative": True}, "hipDrvLaunchKernelEx", "2=1,0,0 4=2,1,1"),
    ):
        fake_hip.library.fake_reset()
        _launch(fake_hip, grid=(3, 1, 1), threads=256, **options)
        assert [(row[0], row[3], row[6]) for row in fake_hip.launches] == [(function, "256,1,1", attributes)], options
        assert fake_hip.noted("device") == [["device", "0"], ["device", "0"]], options


def test_hip_has_no_tensor_descriptors(fake_hip):
    row = {"source": 0, "swizzle": 3, "elem_size": 2, "elem_type": 6, "block": [64, 64]}
    with pytest.raises(ValueError, match="HIP has no tensor descriptors of this kind"):
        fake_hip.entry("none", [("map", 0, 0)], maps=[row])


# ---- grids and memory -----------------------------------------------------------------------------------------------


def test_a_large_grid_is_launched_in_pieces(fake):
    params = [("ptr", 0, 0), ("offset", 0, 0), ("total", 0, 0)]
    entry = fake.entry("mark", params, (10, 1, 1), chunk=(4, 9, 9), zero=[0])
    op = fake.operator("marked(Tensor x) -> Tensor", OUT, lambda call: entry)
    for _ in range(2):
        assert torch.equal(op(torch.ones(10)), torch.full((10,), 10.0))
    assert [row[2] for row in fake.launches[:3]] == ["4,1,1", "4,1,1", "2,1,1"]


def test_pieces_along_every_axis(fake):
    params = [*(("offset", 0, axis) for axis in range(3)), *(("total64", 0, axis) for axis in range(3))]
    _launch(fake, params=params, grid=(3, 5, 2), chunk=(2, 4, 1))
    given = [[int.from_bytes(bytes.fromhex(word), "little") for word in row[-1].split()] for row in fake.launches]
    pieces = [(row[2], tuple(words[:3])) for row, words in zip(fake.launches, given, strict=True)]
    assert pieces[:4] == [("2,4,1", (0, 0, 0)), ("1,4,1", (2, 0, 0)), ("2,1,1", (0, 4, 0)), ("1,1,1", (2, 4, 0))]
    assert [offset for _, offset in pieces[4:]] == [(0, 0, 1), (2, 0, 1), (0, 4, 1), (2, 4, 1)]
    assert all(words[3:] == [3, 5, 2] for words in given)


def test_a_grid_of_more_than_32_bits(fake):
    entry = fake.entry("none", [("offset64", 0, 0)], (2**32 + 5, 1, 1), chunk=(2**31 - 1, 65535, 65535))
    fake.operator("large(Tensor x) -> Tensor", OUT, lambda call: entry)(torch.ones(2))
    assert [row[2] for row in fake.launches] == ["2147483647,1,1", "2147483647,1,1", "7,1,1"]
    assert [int.from_bytes(bytes.fromhex(row[-1]), "little") for row in fake.launches] == [0, 2**31 - 1, 2**32 - 2]


def test_tensors_are_zeroed_before_each_launch(fake):
    rows = [("TENSOR", "acc", "tensor_any"), ("NUMEL", "acc", "int")]
    entry = fake.entry("increment", [("ptr", 0, 0), ("i32", 1, 0)], zero=[0])
    op = fake.operator("counted(Tensor(a!) acc) -> ()", rows, lambda call: entry)
    acc = torch.full((3, 4), 7.0)
    for view in (acc, acc, acc.t()):
        op(view)
        assert torch.equal(acc, torch.ones(3, 4))
    assert fake.noted("fill")[0] == ["fill", "48", "(nil)"]


@pytest.mark.parametrize("view", [lambda x: x[:, ::2], lambda x: x[:, :4], lambda x: x[:, :1].expand(8, 4)])
def test_a_tensor_with_gaps_is_not_zeroed(fake, view):
    rows = [("TENSOR", "acc", "tensor_any")]
    entry = fake.entry("none", [("ptr", 0, 0)], zero=[0])
    op = fake.operator("counted(Tensor(a!) acc) -> ()", rows, lambda call: entry)
    with pytest.raises(
        RuntimeError, match="acc is to be set to zero before the launch, but there are gaps between its el"
    ):
        op(view(torch.ones(8, 8)))


def test_none_and_empty_tensors_need_no_zeroing(fake):
    rows = [("TENSOR", "acc", "tensor_any"), *OUT]
    entry = fake.entry("none", [("ptr", 0, 0)], zero=[0])
    op = fake.operator("counted(Tensor(a!)? acc, Tensor x) -> Tensor", rows, lambda call: entry)
    for acc in (None, torch.ones(0, 3)):
        op(acc, torch.ones(2), layout=[6, 1, 2, 1])
    assert not fake.noted("fill")


def test_scratch_is_there_as_long_as_the_launch(fake):
    params = [("scratch", 0, 0), ("const", 0, 3 * 5 * 2 * 100)]
    _launch(fake, "use", params, grid=(3, 5, 1), cluster=(2, 1, 1), scratch=100, scratch_align=256)
    address = int.from_bytes(bytes.fromhex(fake.launches[0][-1].split()[0]), "little")
    assert address != 0
    assert address % 256 == 0


def test_both_kinds_of_scratch(fake):
    params = [("scratch", 0, 0), ("profile_scratch", 0, 0)]
    _launch(fake, params=params, profile_scratch=64)
    _launch(fake, params=params)
    assert [[word == "00" * 8 for word in row[-1].split()] for row in fake.launches] == [[True, False], [True, True]]
