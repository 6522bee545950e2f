"""Which blocks of queries a tile of keys visits and in which turns, from the kernel and from torch."""

import listing_kernels as kernels
import pytest
import torch
from cuda_on_cpu import lists_in_torch
from hopper_calls import CAUSAL
from hopper_masks import documents, packed, padded, shuffled

from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.blocks import BlockSizes
from opkit.attn.gpu.tile_lists import TileLists, visits_of
from opkit.attn.masks import program
from opkit.testing import compile_launches

BLOCKS = BlockSizes(16, 32, 0, 0)
SEGMENTS = (program.SEGMENTS, 0, 1)
CASES = {  # whether it is causal; numbers of queries and of keys
    "documents": (False, lambda: [documents(2, 700, 6)] * 2),
    "causal documents": (True, lambda: [documents(2, 700, 6)] * 2),
    "documents of whole tiles": (True, lambda: [packed(128, 64, 320)] * 2),
    "padding": (False, lambda: [padded(5, 100, 130, 120)] * 2),
    "other keys": (False, lambda: [documents(1, 133, 3), documents(2, 2100, 3, seed=1)]),
    "shuffled": (True, lambda: [shuffled(2, 200), shuffled(2, 333)]),
    "nothing in common": (False, lambda: [packed(200), packed(150) + 7]),
}


def lists(causal, numbers):
    """By keys and by queries, tensors of their own."""
    own, others = numbers
    q, k = (torch.empty(2, 3, x.shape[1], 16) for x in numbers)
    mask = [*CAUSAL, *SEGMENTS, program.AND] if causal else [*SEGMENTS]
    call = AttentionCall(q, k, k, [own, others], [], None, None, mask, [], 1.0, 0.0, 0.0, False)
    return [x.contiguous() for by_keys in (True, False) for x in lists_in_torch(call, None, BLOCKS, by_keys)]


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """Calls the kernel."""
    if request.param == "gpu":
        return lambda *given: kernels.visits_by_kernel(*(x.cuda() for x in given)).cpu()
    process = request.getfixturevalue("interpreter")
    return lambda *given: process(kernels.visits, *given, kernel="interpreted")


@pytest.mark.sweep(keep=["shuffled"])
@pytest.mark.parametrize("case", CASES)
def test_as_torch_finds_them(run, case):
    causal, numbers = CASES[case]
    given = lists(causal, numbers())
    assert torch.equal(run(*given), kernels.visits(*given))


def test_those_of_two_documents():
    """A tile of keys is half of one, half of the other, and adds to the first's queries before the tile before it."""
    given = lists(False, [packed(48, 16)] * 2)
    found = kernels.visits(*given)[0, 0].tolist()
    assert found == [[[0, 1], [2, 1], [4, 1], [-1, -1]], [[1, 0], [3, 0], [5, 0], [7, 0]]]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles(target):
    mine, theirs = (
        TileLists(*(torch.empty(2, 1, own, size, dtype=torch.int32, device="meta") for size in (others, 2)))
        for own, others in ((40, 80), (80, 40))
    )
    compile_launches(lambda: visits_of(mine, theirs), [target]).raise_for_failures()
