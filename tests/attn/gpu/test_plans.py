"""The numbers of masks that kernels take, and which tiles they take: no GPU and no Triton."""

import pytest
import torch

from opkit.attn.gpu import blocks, plans
from opkit.attn.masks import program
from opkit.attn.masks.program import AND, BAND, BIAS_REL, DENSE, LENGTH, NOT, OR, SEGMENTS

FAR = program.UNLIMITED


def test_bands_and_lengths_of_the_whole_mask_are_numbers():
    shape = plans.shape_of((BAND, -FAR, 0, LENGTH, 2, AND, BAND, -9, 5, AND), ())
    assert (shape.lower, shape.upper, shape.lengths) == (-9, 0, (2,))
    assert shape.banded
    assert shape.mask == shape.slots == shape.numbers == ()


def test_what_is_in_a_disjunction_stays_a_program():
    shape = plans.shape_of((BAND, -FAR, 0, LENGTH, 0, OR), ())
    assert not shape.banded
    assert shape.mask == ((BAND, 0), (LENGTH, 0), (OR,))
    assert shape.numbers == (-plans.FAR, 0)
    assert shape.slots == (("mask", 0, "b"),)


def test_a_second_tensor_of_lengths_is_in_the_program():
    shape = plans.shape_of((LENGTH, 0, LENGTH, 1, AND), ())
    assert shape.lengths == (0,)
    assert shape.mask == ((LENGTH, 0),)
    assert shape.slots == (("mask", 1, "b"),)


def test_a_tensor_has_a_slot_for_each_way_it_is_read():
    shape = plans.shape_of((SEGMENTS, 0, 0, NOT), (BIAS_REL, 0, 1, 8))
    assert shape.mask == ((SEGMENTS, 0, 1), (NOT,))
    assert shape.bias == ((BIAS_REL, 2, 3, 0),)
    assert shape.numbers == (8,)
    sizes = (2, 3, 4, 5)
    tensors = plans.slots_of(
        shape, [torch.zeros(1, 4).int()], [torch.zeros(2, 1, 4, 1), torch.zeros(2, 3, 4, 8)], sizes
    )
    assert [x.stride() for x in tensors] == [(0, 0, 1, 0), (0, 0, 0, 1), (4, 0, 1, 0), (96, 32, 8, 1)]


def test_programs_too_long_are_written_out():
    mask = [SEGMENTS, 0, 1, SEGMENTS, 2, 3, OR, SEGMENTS, 4, 5, OR, SEGMENTS, 6, 7, OR]
    assert not plans.shape_of(tuple(mask), ()).fits
    tensors = [torch.randint(0, 9, (1, 6)).int() for _ in range(8)]
    grid = program.Grid(6, 6, torch.device("cpu"))
    words, seen, bias, added = plans.as_dense(mask, tensors, [], [], grid)
    assert words == [DENSE, 0]
    assert torch.equal(seen[0], program.visible(mask, tensors, grid))
    assert bias == added == []
    assert plans.shape_of(tuple(words), ()).fits


@pytest.mark.parametrize(
    "rules", [blocks.FORWARD, blocks.OF_KEYS, blocks.OF_QUERIES], ids=["forward", "keys", "queries"]
)
def test_every_head_and_dtype_has_a_row(rules):
    for head in (1, 64, 65, 128, 256, 576):
        for size in (2, 4):
            assert blocks.choose(rules, head, size, 4096, 65536, 2).rows >= 16


def test_smaller_tiles_for_few_queries_and_little_memory():
    assert blocks.choose(blocks.FORWARD, 128, 2, 20, 232448, 1).rows == 32
    large, small = (blocks.choose(blocks.FORWARD, 128, 2, 4096, memory, 1) for memory in (232448, 65536))
    assert small.rows * small.keys < large.rows * large.keys
    assert blocks.choose(blocks.FORWARD, 64, 2, 4096, 232448, 1, pair=4).keys < 128
