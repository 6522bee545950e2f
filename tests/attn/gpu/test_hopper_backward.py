"""The backward kernels for sm_90: they compile as they must here, and gradients are right where there is such a GPU."""

import re

import pytest
import torch
from hopper_backward_calls import (
    AND,
    CALLS,
    HIDING,
    LARGE,
    REPRESENTATIVE,
    ROWS_HIDING,
    SEGMENTS,
    arguments,
    called,
    compared,
    compared_where_a_query_is_hidden,
    compared_where_hidden,
    compared_where_rows_are_hidden,
    expected_of,
    large,
)
from hopper_calls import BF16, CAUSAL, FAR, FP16, SHARED, assembled, filled, on_hopper, refuses, shaped, unlike
from hopper_masks import documents, packed

from opkit.attn.calls import GradientCall
from opkit.attn.gpu.hopper import backward as hopper_backward
from opkit.attn.masks import program
from opkit.kernels.triton import compiling
from opkit.op.triton.building import request_for
from opkit.op.triton.launch import recording
from opkit.testing import compile_launches

# ---- compiled --------------------------------------------------------------------------------------------------------

COMPILED = {  # most bytes of registers that a thread may put into memory, and the call
    "128": (16, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128))),
    "128, causal": (16, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128), mask=CAUSAL)),
    "128, causal, float16, capped": (
        288, lambda: arguments(*shaped((4, 2), 300, 300, 128, 128, FP16), mask=CAUSAL, softcap=30.0),
    ),
    "96, causal": (16, lambda: arguments(*shaped((4, 2), 300, 300, 96, 96), mask=CAUSAL)),
    "256": (32, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256))),
    "256, causal": (32, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256), mask=CAUSAL)),
    "256, causal, float16, capped": (
        32, lambda: arguments(*shaped((4, 2), 300, 300, 256, 256, FP16), mask=CAUSAL, softcap=30.0),
    ),
    "136 and 256, causal": (32, lambda: arguments(*shaped((4, 2), 300, 300, 136, 256), mask=CAUSAL)),
    "64": (80, lambda: arguments(*shaped((4, 2), 300, 300, 64, 64))),
    "64, causal": (128, lambda: arguments(*shaped((4, 2), 300, 300, 64, 64), mask=CAUSAL)),
    "128, documents": (96, lambda: without_numbers("documents")),
    "128, causal documents": (64, lambda: without_numbers("causal documents")),
    "128, causal documents, capped": (288, lambda: without_numbers("causal documents", softcap=30.0)),
    "128, lengths": (96, lambda: without_numbers("lengths")),
    "128, bools": (224, lambda: without_numbers("bools of heads")),
    "128, a diagonal of each query": (112, lambda: without_numbers("a diagonal of each query")),
    "64, documents": (192, lambda: without_numbers("documents, 64")),
    "64, causal documents": (176, lambda: without_numbers("causal documents, 64")),
    "64, bools, capped": (528, lambda: without_numbers("blocks of bools, 64")),
    "256, documents": (96, lambda: without_numbers("256, documents")),
    "256, causal documents": (96, lambda: without_numbers("256, causal documents")),
    "256, causal documents, capped": (96, lambda: without_numbers("256, causal documents", softcap=30.0)),
    "256, lengths": (96, lambda: without_numbers("256, lengths")),
    "256, bools": (96, lambda: without_numbers("256, blocks of bools")),
    "256, a diagonal of each query": (96, lambda: without_numbers("256, a diagonal of each query")),
    "136 and 256, documents": (96, lambda: without_numbers("136 and 256, documents")),
}  # fmt: skip

MULTIPLY = ("hopper_backward", "hopper_backward_wide")  # the kernels that do


def without_numbers(case, **more):
    """One of the calls on tensors without numbers."""
    (batch, *sizes), what = CALLS[case]
    masks = [x.to("meta") for x in what["masks"]]
    given = {name: value for name, value in what.items() if name != "of_lse"}
    return arguments(*shaped(*sizes, batch=batch), **{**given, "masks": masks, **more})


def requested(given):
    """What is asked of the compiler for the kernel that multiplies."""
    with recording() as found:
        hopper_backward.backward(*given)
    return request_for(next(each for each in found if each.bound.kernel.name in MULTIPLY), None, "sm_90")


def check_compiled(given, most, folder, record_property):
    report = compile_launches(lambda: hopper_backward.backward(*given), ["sm_90"])
    report.raise_for_failures()
    rows = {row.kernel: row for row in report.rows}
    (row,) = (rows.pop(name) for name in MULTIPLY if name in rows)
    record_property("resources", f"{row.registers} registers, {row.shared} bytes shared, {row.spills} bytes spilled")
    assert row.registers == 168
    assert ("tile_lists" in rows) == bool(given[7])
    assert ("tile_turns" in rows) == (bool(given[7]) and torch.are_deterministic_algorithms_enabled())
    rows.pop("tile_lists", None)  # tests of the forward have it
    wide = hopper_backward.padded(max(given[3].shape[3], given[4].shape[3]))
    most_registers = hopper_backward._BEGIN_REGISTERS, hopper_backward._END_REGISTERS[wide]
    for name, registers in zip(("hopper_backward_begin", "hopper_backward_end"), most_registers, strict=True):
        assert rows.pop(name).registers <= registers  # what they spill is of large rows
    assert all(other.spills == 0 for other in rows.values()), rows
    assert row.shared <= SHARED
    said = assembled(requested(given), folder)
    assert re.findall(r"\((C75\d\d)\)", said) == [], said  # a product that waits for the one before it
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said).groups())
    assert max(stores, loads) <= most, said


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", COMPILED)
def test_compiles(case, tmp_path, record_property):
    most, given = COMPILED[case]
    check_compiled(given(), most, tmp_path, record_property)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case",
    [
        "256, causal documents",
        "128, causal",
        "64",
        "256, causal",
        "128, causal documents",
        "64, causal documents",
        "256, documents",
    ],
)
def test_compiles_deterministic(case, tmp_path, record_property):
    _, given = COMPILED[case]
    check_compiled(given(), 512, tmp_path, record_property)


@pytest.mark.parametrize("head", [128, 256])
def test_other_lengths_and_bands_compile_nothing_anew(head):
    def identity(queries, keys, lower, upper, heads=(4, 2)):
        band = (program.BAND, lower, upper)
        return compiling.identity(requested(arguments(*shaped(heads, queries, keys, head, head), mask=band)))

    first = identity(300, 300, -FAR, 0)
    assert identity(1, 1, -1, 0) == identity(4096, 512, -16, 16) == identity(77, 1000, 1, FAR, heads=(8, 1)) == first
    assert compiling.identity(requested(arguments(*shaped((4, 2), 300, 300, head, head)))) != first


@pytest.mark.parametrize("head", [128, 256])
def test_other_lengths_of_documents_compile_nothing_anew(head):
    def identity(queries, keys, heads=(4, 2), batches=1):
        masks = [torch.empty(batches, n, dtype=torch.int32, device="meta") for n in (queries, keys)]
        given = arguments(*shaped(heads, queries, keys, head, head), mask=(program.SEGMENTS, 0, 1), masks=masks)
        return compiling.identity(requested(given))

    assert identity(300, 300) == identity(4096, 512, batches=2) == identity(77, 1000, heads=(8, 1)) == identity(1, 1)


# ---- what it takes ---------------------------------------------------------------------------------------------------

REFUSED = {
    "float32": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64, torch.float32)),
    "a head of 100": lambda: arguments(*shaped((4, 2), 8, 8, 100, 64)),
    "a head of 264": lambda: arguments(*shaped((4, 2), 8, 8, 64, 264)),
    "a head of 132": lambda: arguments(*shaped((4, 2), 8, 8, 132, 256)),
    "heads that do not divide": lambda: arguments(*shaped((4, 3), 8, 8, 64, 64)),
    "no keys": lambda: arguments(*shaped((4, 2), 8, 0, 64, 64)),
    "dropout": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), dropout_p=0.5),
    "a mask without its tensor": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), mask=(program.LENGTH, 0)),
    "documents of other queries": lambda: arguments(
        *shaped((4, 2), 8, 8, 64, 64),
        mask=(program.SEGMENTS, 0, 0),
        masks=[torch.empty(1, 9, dtype=torch.int32, device="meta")],
    ),
    "a bias": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), bias=(program.BIAS_ALIBI, 0)),
    "a negative scale": lambda: arguments(*shaped((4, 2), 8, 8, 64, 64), scale=-1.0),
    "another dtype of the gradient": lambda: arguments(
        *shaped((4, 2), 8, 8, 64, 64), gradient=torch.empty(2, 4, 8, 64, dtype=FP16, device="meta")
    ),
}


def test_refuses():
    said = r"kernel 'hopper' does not take q, k, v of .* Leave the choice"
    assert not unlike(REFUSED, refuses(hopper_backward.backward, said))


def test_takes_nothing_that_is_not_on_such_a_gpu():
    call = GradientCall(*arguments(*shaped((4, 2), 8, 8, 64, 64, device="cpu")))
    assert not hopper_backward.takes(call)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper

    def test_are_the_references(self, case, dtype):
        sizes, what = CALLS[case]
        compared(called(filled(*sizes, dtype=dtype, out_is_bshd=what.get("out_is_bshd", False)), **what))


@pytest.mark.sweep(keep=REPRESENTATIVE)
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.usefixtures("deterministic")
class TestDeterministic:
    pytestmark = on_hopper

    def test_numbers_are_the_references_and_the_same_in_every_run(self, case):
        sizes, what = CALLS[case]
        given = called(filled(*sizes, out_is_bshd=what.get("out_is_bshd", False)), **what)
        first = compared(given)
        for _ in range(3):
            assert all(map(torch.equal, first, hopper_backward.backward(*given)))


class TestOnGpu:
    pytestmark = on_hopper

    @pytest.mark.parametrize("ordered", [False, True], ids=["", "deterministic"])
    @pytest.mark.parametrize("case", LARGE)
    def test_gradients_of_huge_logits(self, case, ordered, request):
        if ordered:
            request.getfixturevalue("deterministic")
        sizes, what = LARGE[case]
        made = filled(*sizes, dtype=FP16, out_is_bshd=what.get("out_is_bshd", False))
        given = called(large(made, "some" in case), **what)
        first = compared(given)
        assert not ordered or all(map(torch.equal, first, hopper_backward.backward(*given)))

    @pytest.mark.sweep(keep=["hidden, 128", "hidden, 200, both sides", "hidden, 64, documents", "hidden, 200, bools"])
    @pytest.mark.parametrize("case", HIDING)
    def test_hidden_keys_and_values_do_not_leak(self, case):
        head, what = HIDING[case]
        compared_where_hidden(filled(1, (2, 1), 300, 300, head, head), what)

    @pytest.mark.sweep(keep=["hidden rows, 128, documents", "hidden rows, 64, bools", "hidden rows, 256, bools"])
    @pytest.mark.parametrize("case", ROWS_HIDING)
    def test_hidden_queries_and_gradients_do_not_leak(self, case):
        head, what = ROWS_HIDING[case]
        compared_where_rows_are_hidden(filled(1, (2, 1), 300, 300, head, head), what)

    @pytest.mark.parametrize("head", [64, 128, 256])
    def test_a_hidden_query_does_not_leak(self, head):
        compared_where_a_query_is_hidden(filled(1, (2, 1), 300, 300, head, head))

    @pytest.mark.sweep
    @pytest.mark.parametrize("head", [64, 128, 256])
    @pytest.mark.parametrize("mask", [SEGMENTS, (*SEGMENTS, *CAUSAL, AND)], ids=["documents", "causal documents"])
    def test_long_documents_are_as_each_alone(self, head, mask):
        length, size = 16384, 2048
        alone = [slice(at, at + size) for at in range(0, length, size)]
        whole = filled(1, (4, 2), length, length, head, head)
        parts = [called([x[:, :, part] for x in whole], mask=mask[3:-1]) for part in alone]
        gradient, out, lse = (torch.cat([part[i] for part in parts], 2) for i in (0, 5, 6))
        ids = packed(*[size] * len(alone)).cuda()
        found = hopper_backward.backward(*arguments(*whole, out, lse, gradient, mask=mask, masks=[ids, ids]))
        exact = [torch.cat(each, 2) for each in zip(*map(expected_of, parts), strict=True)]
        for mine, expected in zip(found[:3], exact[:3], strict=True):
            torch.testing.assert_close(mine.double(), expected, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize("head", [128, 256])
    def test_padding_in_memory_does_not_leak(self, head):
        q, k, v = filled(2, (2, 2), 300, 400, head, head)
        k[:, :, 300:], v[:, :, 300:] = float("nan"), float("nan")
        compared(called((q, k[:, :, :300], v[:, :, :300])))
        compared(called((q, k[:, :, :300], v[:, :, :300]), mask=CAUSAL))

    def test_strides_that_tma_cannot_follow_are_copied(self):
        q, k, v = filled(2, (4, 2), 200, 200, 64, 64)
        q = torch.randn(2, 4, 64, 200, device="cuda").to(BF16).mT
        k = torch.randn(2, 2, 200, 67, device="cuda").to(BF16)[..., 3:]
        v = v[:, :1].expand(2, 2, 200, 64)
        given = called((q, k, v), mask=CAUSAL)
        compared(given)
        compared((torch.ones((), device="cuda", dtype=BF16).expand(given[0].shape), *given[1:]))

    @pytest.mark.parametrize("case", ["documents", "256, documents"])
    def test_a_graph_reads_what_the_mask_holds_when_it_is_replayed(self, case):
        sizes, what = CALLS[case]
        given = called(filled(*sizes), **what)
        hopper_backward.backward(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = hopper_backward.backward(*given)
        other = called(given[2:5], **{**what, "masks": [documents(2, sizes[2], 9, seed=5)] * 2})
        for x, y in zip((*given[5:7], *given[7]), (*other[5:7], *other[7]), strict=True):
            x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        compared(given, found=found)

    @pytest.mark.parametrize("head", [128, 256])
    def test_a_graph_can_be_captured(self, head):
        given = called(filled(2, (4, 2), 300, 300, head, head), mask=CAUSAL)
        hopper_backward.backward(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = hopper_backward.backward(*given)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            compared(given, found=found)

    @pytest.mark.parametrize("head", [128, 256])
    def test_determinism_is_asked_for_at_each_call(self, head):
        given = called(filled(1, (4, 2), 2000, 2000, head, head), mask=CAUSAL)
        run = hopper_backward.backward.prepare(*given)
        run(*given)
        torch.use_deterministic_algorithms(True)
        try:
            first = run(*given)
            assert all(all(map(torch.equal, first, run(*given))) for _ in range(5))
        finally:
            torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("head", [64, 256])
    def test_takes(self, head):
        call = GradientCall(*called(filled(1, (2, 1), 8, 8, head, head), mask=CAUSAL))
        assert hopper_backward.takes(call)
