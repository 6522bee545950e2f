"""Tensor descriptors: encoded once, given another address while sizes and strides stay the same."""

from __future__ import annotations

import pytest
import torch

ROW = {"source": 0, "swizzle": 3, "elem_size": 4, "elem_type": 7, "block": [16, 32]}


def _described(fake, **changes):
    entry = fake.entry("none", [("map", 0, 0), ("ptr", 1, 0)], maps=[ROW | changes])
    rows = [("TENSOR", "x", "tensor"), ("TENSOR", "out", "tensor_any")]
    op = fake.operator("described(Tensor? x, Tensor y) -> Tensor", rows, lambda call: entry)
    return lambda x: op(x, torch.ones(2), layout=[6, 1, 2, 1])


def _maps(fake):
    return [bytes.fromhex(row[-1].split()[0]) for row in fake.launches]


def _address(tensor_map: bytes) -> int:
    return int.from_bytes(tensor_map[:8], "little")


def test_a_map_is_encoded_once_and_its_address_replaced(fake):
    call = _described(fake)
    x, y = torch.empty(100, 400), torch.empty(100, 400)
    for tensor in (x, x, y, x):
        call(tensor)
    assert len(fake.noted("encode")) == 1
    assert len(fake.noted("replace")) == 2
    assert [_address(each) for each in _maps(fake)] == [t.data_ptr() for t in (x, x, y, x)]


def test_sizes_and_strides_are_given_in_bytes_from_the_innermost_dimension(fake):
    _described(fake)(torch.empty(100, 400)[:50])
    #                                     type, rank, size:stride:block:step, interleave, swizzle, promotion, fill, alignment
    assert fake.noted("encode") == [["encode", "7", "2", "400:0:32:1 50:1600:16:1 ", "0", "3", "2", "0", "0"]]


def test_options(fake):
    for changes, where, what in (
        ({"padding_nan": True}, 7, "1"),
        ({"tf32": True}, 1, "11"),
        ({"swizzle": 0}, 5, "0"),
        ({"fp4_padded": True}, 3, "800:0:32:1 100:1600:16:1 "),
    ):
        _described(fake, **changes)(torch.empty(100, 400))
        assert fake.noted("encode")[-1][where] == what, changes


def test_other_sizes_are_encoded_again(fake):
    call = _described(fake)
    x = torch.empty(100, 400)
    for tensor in (x, x[:50], x[:50], x[:, :200], x):
        call(tensor)
    assert len(fake.noted("encode")) == 4


@pytest.mark.parametrize(
    ("version", "size", "cleared"), [(13010, 100, True), (13010, 1000, False), (13020, 100, False)]
)
def test_a_bit_that_older_drivers_set_wrongly_is_cleared(fake, version, size, cleared):
    fake.library.fake_driver_version(version)
    _described(fake)(torch.empty(size, 100))
    word = int.from_bytes(_maps(fake)[0][8:16], "little")
    assert word == 2**64 - 1 - (cleared << 21)


def test_none_is_a_map_of_zeros(fake):
    _described(fake)(None)
    assert _maps(fake) == [bytes(128)]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.empty(4, 4, 4),
            r"no tensor descriptor can be made of x: it must have 2 dimensions; its sizes are \[4, 4, 4\]",
        ),
        (
            torch.empty(8, 8).t(),
            r"its last dimension must have the stride 1; .* its strides \[1, 8\] in elements of 4 bytes",
        ),
    ],
)
def test_tensors_that_cannot_be_described(fake, tensor, message):
    with pytest.raises(RuntimeError, match=message):
        _described(fake)(tensor)


def test_what_the_driver_refuses_is_told_with_the_tensor(fake):
    call = _described(fake)
    fake.fail("cuTensorMapEncodeTiled", 1)
    message = r"made of x: cuTensorMapEncodeTiled failed with CUDA_ERROR_INVALID_VALUE .*the block is \[16, 32\]"
    with pytest.raises(RuntimeError, match=message):
        call(torch.empty(100, 400))
    fake.fail("", 0)
    call(torch.empty(100, 400))
    assert len(fake.noted("encode")) == 2


def test_several_maps(fake):
    entry = fake.entry("none", [("map", 1, 0), ("map", 0, 0)], maps=[ROW, ROW | {"source": 1, "block": [8]}])
    rows = [("TENSOR", "x", "tensor"), ("TENSOR", "y", "tensor"), ("TENSOR", "out", "tensor_any")]
    op = fake.operator("described(Tensor x, Tensor y) -> Tensor", rows, lambda call: entry)
    x, y = torch.empty(100, 400), torch.empty(64)
    op(x, y)
    words = [bytes.fromhex(word) for word in fake.launches[0][-1].split()]
    assert [_address(each) for each in words] == [y.data_ptr(), x.data_ptr()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": []}, "from 1 to 5 dimensions"),
        ({"block": [1] * 6}, "from 1 to 5"),
        ({"elem_size": 0}, "the size of its el"),
    ],
)
def test_maps_that_are_none(fake, changes, message):
    with pytest.raises(ValueError, match=message):
        _described(fake, **changes)


def test_too_many_maps(fake):
    with pytest.raises(ValueError, match="at most 16 tensor descriptors"):
        fake.entry("none", [], maps=[ROW] * 17)
