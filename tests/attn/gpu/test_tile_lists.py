"""When lists of tiles are built, and when they are kept: launches are recorded, on tensors without memory."""

import gc
import weakref

import pytest
import torch

import opkit
from opkit.attn import tensor_cache
from opkit.attn.calls import GradientCall
from opkit.attn.gpu import kernels, tile_lists
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.gpu.hopper import library
from opkit.attn.masks import program
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program import AND, BAND, LENGTH, SEGMENTS
from opkit.attn.masks.program_builder import CallSizes
from opkit.masks import Causal, Dense, Segments, VarLen
from opkit.op.triton.launch import recording

DOCUMENTS = [SEGMENTS, 0, 0]


def ids(length=1024, batch=1):
    return torch.empty(batch, length, dtype=torch.int32, device="meta")


def launched(mask, tensors, length=1024, heads=4):
    """The kernels that a forward launches, and where the lists that it reads come from."""
    q = torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device="meta")
    with recording() as launches:
        kernels.forward(q, q, q, tensors, [], None, None, mask, [], 0.1, 0.0, 0.0, False)
    return [each.bound.kernel.name for each in launches]


@pytest.fixture(autouse=True)
def _nothing_kept():
    for each in (tile_lists._lists_cache, tile_lists._order_cache, tensor_cache._tensors):
        each.clear()


def test_lists_are_kept_while_the_tensor_stays_what_it_is():
    documents = ids()
    assert launched(DOCUMENTS, [documents]) == ["tile_lists", "attention_forward"]
    assert launched(DOCUMENTS, [documents]) == ["attention_forward"]
    documents.add_(1)
    assert launched(DOCUMENTS, [documents]) == ["tile_lists", "attention_forward"]
    assert launched(DOCUMENTS, [ids()]) == ["tile_lists", "attention_forward"]
    assert launched([*DOCUMENTS, BAND, -5, 5, AND], [documents]) == ["tile_lists", "attention_forward"]


def test_lists_of_tensors_that_are_gone_are_let_go():
    for _ in range(3):
        launched(DOCUMENTS, [ids()])
        gc.collect()
        assert len(tile_lists._lists_cache) == 0


def test_no_more_than_some_are_kept():
    kept = [ids() for _ in range(tile_lists._MAX_CACHED + 3)]
    for each in kept:
        launched(DOCUMENTS, [each])
    assert len(tile_lists._lists_cache) == tile_lists._MAX_CACHED
    assert launched(DOCUMENTS, [kept[-1]]) == ["attention_forward"]
    assert launched(DOCUMENTS, [kept[0]]) == ["tile_lists", "attention_forward"]


def test_tensors_of_inference_mode_say_nothing_of_writes():
    with torch.inference_mode():
        documents = ids()
    for _ in range(2):
        assert launched(DOCUMENTS, [documents]) == ["tile_lists", "attention_forward"]


def test_bands_lengths_and_short_sequences_need_none():
    assert launched([BAND, -program.UNLIMITED, 0, LENGTH, 0, AND], [ids(1)[0]]) == ["attention_forward"]
    assert launched(DOCUMENTS, [ids(100)], length=100) == ["attention_forward"]


def test_a_list_for_what_the_mask_depends_on():
    """Tiles of 128 queries by 128 keys: one list for all batches and heads, or one for each batch."""
    q = torch.empty(2, 4, 1024, 64, dtype=torch.bfloat16, device="meta")
    shapes = []
    for documents in (ids(), ids(batch=2)):
        with recording() as launches:
            kernels.forward(q, q, q, [documents], [], None, None, DOCUMENTS, [], 0.1, 0.0, 0.0, False)
        shapes.append(tuple(launches[0].named()["tiles"].shape))
    assert shapes == [(1, 1, 8, 8), (2, 1, 8, 8)]


def users(mask, length=1024):
    """The kernels that a forward launches for a user's mask."""
    lowered = lower(mask, CallSizes(1, 4, length, length, torch.device("meta")))
    q = torch.empty(1, 4, length, 64, dtype=torch.bfloat16, device="meta")
    with recording() as launches:
        kernels.forward(q, q, q, lowered.tensors, [], None, None, lowered.program, [], 0.1, 0.0, 0.0, False)
    return [each.bound.kernel.name for each in launches]


# Of each, the mask of a tensor, the tensor, and the kernels that make its lists.
BUILT = ["tile_lists"]
USERS = {
    "ids of one dimension": (Segments, lambda: torch.empty(1024, dtype=torch.int32, device="meta"), BUILT),
    "ids of 64 bits": (Segments, lambda: torch.empty(1, 1024, dtype=torch.int64, device="meta"), BUILT),
    "bools": (Dense, lambda: torch.empty(1024, 1024, dtype=torch.bool, device="meta"), ["tile_states", *BUILT]),
    "documents": (lambda x: VarLen(x) & Causal(), lambda: torch.empty(9, dtype=torch.int32, device="meta"), BUILT),
}  # fmt: skip


@pytest.mark.parametrize("case", USERS)
def test_lists_of_a_users_tensor_are_built_once(case):
    mask, tensor, built = USERS[case]
    x = tensor()
    assert users(mask(x)) == [*built, "attention_forward"]
    assert users(mask(x)) == ["attention_forward"]
    x.zero_()
    assert users(mask(x)) == [*built, "attention_forward"]
    assert users(mask(x)) == ["attention_forward"]
    other = tensor()
    assert other.data_ptr() == x.data_ptr()
    assert users(mask(other)) == [*built, "attention_forward"]
    gone = weakref.ref(x)
    del x, other
    gc.collect()
    assert gone() is None
    assert (len(tile_lists._lists_cache), len(tensor_cache._tensors)) == (0, 0)


class OnGpu(torch.fx.Interpreter):
    """Runs a compiled graph, with the portable kernel for attention."""

    def call_function(self, target, args, kwargs):
        fn = kernels.forward if target is torch.ops.opkit.attention.default else target
        return super().call_function(fn, args, kwargs)


@pytest.mark.parametrize("sizes", [(1024,), (1, 1024)], ids=str)
def test_lists_are_built_once_for_the_calls_of_compiled_code(sizes):
    @torch.compile(fullgraph=True, backend=lambda graph, _: OnGpu(graph).run)
    def compiled(q, x):
        return opkit.attention(q, q, q, mask=Segments(x) & Causal())

    q = torch.empty(1, 4, 1024, 64, dtype=torch.bfloat16, device="meta")
    x = torch.empty(sizes, dtype=torch.int32, device="meta")
    launches = []
    for _ in range(3):
        with recording() as recorded:
            compiled(q, x)
        launches.append([each.bound.kernel.name for each in recorded])
    assert launches == [["tile_lists", "attention_forward"], *[["attention_forward"]] * 2]


def turned(documents):
    """The kernels that a backward launches where programs take turns."""
    q = torch.empty(2, 4, 1024, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 4, 1024, device="meta")
    with recording() as launches:
        hopper_backward.backward(q, None, q, q, q, q, lse, [documents], [], DOCUMENTS, [], 0.1, 0.0, False)
    return [each.bound.kernel.name for each in launches if "tile" in each.bound.kernel.name]


def test_turns_are_kept_beside_the_lists(deterministic):
    documents = ids()
    assert turned(documents) == ["tile_lists", "tile_lists", "tile_turns"]
    assert turned(documents) == []
    documents.add_(1)
    assert turned(documents) == ["tile_lists", "tile_lists", "tile_turns"]
    del documents
    assert len(tile_lists._order_cache) == 0


def test_visits_are_kept_beside_the_lists_and_apart_from_turns(deterministic):
    documents = ids()
    q, lse = torch.empty(2, 4, 1024, 64, dtype=torch.bfloat16, device="meta"), torch.empty(2, 4, 1024, device="meta")
    call = GradientCall(q, None, q, q, q, q, lse, [documents], [], DOCUMENTS, [], 0.1, 0.0, False)
    tile = hopper_backward.TILES[64]
    assert turned(documents) == ["tile_lists", "tile_lists", "tile_turns"]
    with recording() as launches:
        for _ in range(2):
            _, read = library.lists_of(call, tile.rows, tile.keys, by_keys=True, in_order=True)
    assert [each.bound.kernel.name for each in launches if "tile" in each.bound.kernel.name] == ["tile_visits"]
    assert read[-1].shape == (*read[2].shape, 2)
