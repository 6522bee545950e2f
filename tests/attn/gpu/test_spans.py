"""Which keys each query sees under segments, from the kernel and from torch; and when this is kept."""

import listing_kernels as kernels
import pytest
import torch
from hopper_masks import documents, packed, padded, shuffled

from opkit.attn.calls import AttentionCall
from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.tile_lists import Within, spans_of
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

CASES = {  # numbers of queries and of keys
    "documents": lambda: [documents(2, 700, 6)] * 2,
    "one number": lambda: [packed(1)] * 2,
    "one document": lambda: [packed(300)] * 2,
    "padding": lambda: [padded(5, 100, 130, 120)] * 2,
    "padding that is not less": lambda: [padded(5, 100, 130, 120) - 3 * (padded(355) == 0) + 2] * 2,
    "negative numbers": lambda: [packed(3, 70, 1) - 50, packed(1, 5, 640) - 50],
    "other keys": lambda: [documents(1, 133, 3), documents(2, 2100, 3, seed=1)],
    "rows that see nothing": lambda: [packed(100, 100, 100), packed(100, 200)],
    "nothing in common": lambda: [packed(200), packed(150) + 7],
    "shuffled": lambda: [shuffled(2, 200), shuffled(2, 333)],
    "queries out of order": lambda: [shuffled(1, 200), packed(100, 50, 183)],
    "keys out of order": lambda: [packed(100, 50, 50), shuffled(1, 333)],
    "in order in one batch alone": lambda: [torch.cat([packed(100, 90, 110), shuffled(1, 300)])] * 2,
    "they lie apart": lambda: [
        documents(2, 300, 3).repeat_interleave(3, 1)[:, ::3],
        documents(2, 300, 3).t().contiguous().t(),
    ],
}


REPRESENTATIVE = (
    "one number", "padding", "other keys", "nothing in common", "shuffled", "in order in one batch alone", "they lie apart",
)  # fmt: skip


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """Calls the kernel."""
    if request.param == "gpu":
        return lambda *given: [
            x.cpu() for x in kernels.spans_by_kernel(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in given))
        ]
    process = request.getfixturevalue("interpreter")
    return lambda *given: process(kernels.spans, *given, kernel="interpreted")


@pytest.mark.parametrize("tile", [64, 256])
@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("case", CASES)
def test_as_torch_finds_them(run, case, tile):
    own, others = CASES[case]()
    for found, expected in zip(
        run(own, others, tile, *Within()), kernels.spans_in_torch(own, others, tile, Within()), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("within", [
    Within(-100, 0), Within(-5, 300, torch.tensor([250], dtype=torch.int32)),
    Within(lengths=torch.tensor([0, 130], dtype=torch.int32), of_rows=True), Within(2000, 3000),
])  # fmt: skip
@pytest.mark.sweep(keep=("padding", "shuffled"))
@pytest.mark.parametrize("case", ["padding", "shuffled", "other keys"])
def test_within_a_band_and_lengths(run, case, within):
    own, others = CASES[case]()
    expected = kernels.spans_in_torch(own, others, 64, within)
    assert all(map(torch.equal, run(own, others, 64, *within), expected))


def test_of_documents_and_of_padding():
    rows, tiles = kernels.spans_in_torch(torch.tensor([[1, 1, 2, 0]]), torch.tensor([[1, 2, 2, 0]]), 2, Within())
    assert rows.tolist() == [[[0, 1], [0, 1], [1, 3], [3, 4]]]
    assert tiles.tolist() == [[[0, 1, 0, 1], [1, 4, 3, 3]]]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles(target):
    own = torch.empty(2, 5000, dtype=torch.int32, device="meta")
    compile_launches(lambda: spans_of(own, own, 64, Within()), [target]).raise_for_failures()


def test_they_are_kept_with_the_tensors_of_the_mask():
    ids = torch.empty(1, 1024, dtype=torch.int32, device="meta")
    q = torch.empty(1, 2, 1024, 64, device="meta")
    call = AttentionCall(q, q, q, [ids], [], None, None, [], [], 0.1, 0.0, 0.0, False)

    def launched(what="all"):
        with recording() as launches:
            tile_lists.spans_of_call(call, ids, ids, 64, Within(), what)
        return len(launches)

    assert [launched(), launched(), launched("others")] == [1, 0, 1]
    ids.add_(1)
    assert launched() == 1
