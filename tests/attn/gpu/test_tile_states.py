"""What tiles of bools have in them, from the kernel and from torch."""

import listing_kernels as kernels
import pytest
import torch
from hopper_masks import random_mask

from opkit.attn.gpu import plans
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.tile_lists import bits_of, states_of
from opkit.attn.masks.algebra import as_mask
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program import AND, BAND, DENSE, LENGTH, OR, SEGMENTS
from opkit.attn.masks.program_builder import CallSizes
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

TILES = [(32, 16), (64, 64), (16, 128)]


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """Calls the kernel."""
    if request.param == "gpu":
        return lambda x, *rest: kernels.states_by_kernel(on_gpu(x), *rest).cpu()
    process = request.getfixturevalue("interpreter")
    return lambda *given: process(kernels.states, *given, kernel="interpreted")


def on_gpu(x):
    """A tensor on the GPU, in a copy of all its memory: `cuda()` would give a view other strides."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).cuda()
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def bools(*shape, tiles=(16, 16)):
    """Tiles of which some are true, some false and the others mixed."""
    torch.manual_seed(sum(shape))
    counted = [-(-n // tile) for n, tile in zip(shape[-2:], tiles, strict=True)]
    share = torch.randint(0, 3, (*shape[:-2], *counted)) / 2
    share = share.repeat_interleave(tiles[0], -2).repeat_interleave(tiles[1], -1)[..., : shape[-2], : shape[-1]]
    return torch.rand(shape) < share


LAID_OUT = {
    "contiguous": lambda: bools(2, 3, 96, 128),
    "odd sizes": lambda: bools(1, 2, 77, 133),
    "rows of 16 bytes, columns cut off": lambda: bools(1, 1, 70, 160)[..., :150],
    "from an odd address": lambda: bools(1, 1, 70, 160)[..., 3:],
    "transposed": lambda: bools(2, 1, 144, 80).mT,
    "each second column": lambda: bools(1, 2, 64, 200)[..., ::2],
}


@pytest.mark.sweep(keep=["transposed", "rows of 16 bytes, columns cut off", "from an odd address"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("case", LAID_OUT)
def test_as_torch_finds_them(run, case, tiles):
    x = LAID_OUT[case]()
    given = (x, list(x.shape), list(x.stride()), *tiles)
    assert torch.equal(run(*given), kernels.states.reference(*given))


BROADCAST = {
    "keys alone": lambda: bools(2, 1, 1, 150, tiles=(1, 16)),
    "queries alone": lambda: bools(1, 3, 150, 1, tiles=(16, 1)),
    "heads alone": lambda: bools(1, 3, 1, 1, tiles=(1, 1)),
}


@pytest.mark.emulated
@pytest.mark.parametrize("case", BROADCAST)
def test_a_dimension_that_bools_do_not_depend_on_has_one_tile(run, case):
    x = BROADCAST[case]()
    shape = plans.shape_of((DENSE, 0), ())
    slot = plans.slots_of(shape, [x], [], (2, 3, 150, 150))[0]
    given = (x, list(slot.shape), list(slot.stride()), 32, 16)
    expected = kernels.states.reference(*given)
    assert torch.equal(run(*given), expected)
    with recording():
        states = states_of(slot.to("meta"), BlockSizes(32, 16, 0, 0))
    assert states.shape == expected.shape
    assert [stride == 0 for stride in states.stride()] == [stride == 0 for stride in slot.stride()]


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    x = torch.rand(1, 1, 512, 512, device="cuda").lt(0.5).repeat_interleave(128, 2).repeat_interleave(128, 3)
    x[:, :, 5], x[..., -1] = True, False
    given = (x, list(x.shape), list(x.stride()), 128, 128)
    assert torch.equal(kernels.states_by_kernel(*given), kernels.states.reference(*given))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("queries", [1000, 2**19], ids=["int32", "int64"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles(target, queries):
    x = torch.empty(2, 4, queries, 1024, dtype=torch.bool, device="meta")
    compile_launches(lambda: states_of(x, BlockSizes(128, 128, 0, 0)), [target]).raise_for_failures()


def test_no_length_is_compiled_in():
    from opkit.op.triton.building import request_for

    def form(*shape):
        with recording() as launches:
            states_of(torch.empty(shape, dtype=torch.bool, device="meta"), BlockSizes(128, 128, 0, 0))
        return str(request_for(launches[0], None, "sm_90"))

    assert form(2, 4, 1024, 1024) == form(3, 5, 1001, 1023) == form(16, 16, 4096, 555)


SIZES = (2, 2, 40, 70)
OF_TILES = {
    "by queries and keys": lambda x: lambda b, h, i, j: (i * 7 + j * 5) % 11 < 4,
    "of heads and batches": lambda x: lambda b, h, i, j: (j - i > 3 * h) ^ (x[b, j] > 0),
    "mostly whole": lambda x: lambda b, h, i, j: (i // 40 + j // 40) % 2 == 0,
}


@pytest.mark.sweep(keep=["of heads and batches"])
@pytest.mark.parametrize(("by_keys", "tile"), [(False, (32, 32)), (True, (32, 64))])
@pytest.mark.parametrize("case", OF_TILES)
@pytest.mark.parametrize("kind", ["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_bits_of_functions(request, kind, case, by_keys, tile):
    x = torch.randn(2, SIZES[3], generator=torch.Generator().manual_seed(0))
    lowered = lower(as_mask(OF_TILES[case](x)), CallSizes(*SIZES, x.device))
    for room in (1000, 1):
        found, expected = bits(request, kind, lowered.program, lowered.tensors or [x], tile, by_keys, room)
        assert torch.equal(found[found < 2], expected[found < 2])
        assert (found < 2).all() == (room == 1000)


def bits(request, kind, mask, tensors, tile, by_keys, room):
    """What the kernel finds, and what the reference does."""
    given = (mask, tensors, list(SIZES), *tile, by_keys, room)
    expected = kernels.bits.reference(*given)
    if kind == "gpu":
        return kernels.bits_by_kernel(mask, [each.cuda() for each in tensors], *given[2:]).cpu(), expected
    return request.getfixturevalue("interpreter")(kernels.bits, *given, kernel="interpreted"), expected


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("kind", ["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_bits_of_all_that_a_mask_says(request, kind, by_keys):
    allowed = torch.rand(2, 1, *SIZES[2:], generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[:, :, :32, 32:64], allowed[1, :, 32:] = True, False  # whole tiles, if the band and lengths leave them
    ids, lengths = torch.arange(SIZES[3]).int()[None] // 20, torch.tensor([70, 35], dtype=torch.int32)
    said = [DENSE, 0, SEGMENTS, 1, 2, OR, BAND, -60, 50, AND, LENGTH, 3, AND]
    found, expected = bits(request, kind, said, [allowed, ids[:, : SIZES[2]], ids, lengths], (32, 32), by_keys, 1000)
    assert torch.equal(found, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(24))
def test_bits_of_random_masks(request, seed):
    mask, tensors = random_mask(seed, *SIZES)
    found, expected = bits(request, "interpreted", mask, tensors, (64, 32), seed % 2 == 0, 1000)
    assert torch.equal(found, expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("tile", [(128, 128), (64, 64)])
def test_bits_compile(tile, by_keys):
    x, blocks, sizes = torch.empty(2, 1024), BlockSizes(*tile, 0, 0), (2, 3, 1000, 1024)
    lowered = lower(as_mask(OF_TILES["of heads and batches"](x)), CallSizes(*sizes, x.device))
    shape, tensors = plans.shape_of(tuple(lowered.program), ()), [each.to("meta") for each in lowered.tensors]
    report = compile_launches(lambda: bits_of(kernels.masked_call(tensors, sizes), shape, blocks, by_keys), ["sm_90"])
    report.raise_for_failures()
    assert not any(row.spills for row in report.rows)
