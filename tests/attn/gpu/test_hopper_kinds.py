"""Calls of the forward for sm_90 that ask for more than a band: what is compiled for them, and numbers on such a GPU."""

import pytest
import torch
from hopper_calls import (
    BF16,
    CAUSAL,
    FP16,
    arguments,
    bottom_right,
    compared,
    compared_where_hidden,
    filled,
    hide,
    on_hopper_with_compiler,
    shaped,
)

from opkit.attn.calls import AttentionCall
from opkit.attn.gpu.hopper import forward_cuda, forward_kinds
from opkit.attn.gpu.hopper.biases import as_functions
from opkit.attn.masks import program
from opkit.attn.masks.algebra import as_mask
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program_builder import CallSizes

# ---- kinds -----------------------------------------------------------------------------------------------------------

LENGTHS, SEGMENTS = (program.LENGTH, 0), (program.SEGMENTS, 0, 1)
LAYOUTS = {  # heads of keys and of values, queries and keys, a mask; and the layout
    "few queries": (64, 64, 128, 4096, (), "Low<64, 64>"),
    "few blocks": (64, 64, 300, 300, CAUSAL, "Low<64, 64>"),
    "few keys": (64, 64, 4096, 1024, (), "Brief<64, 64>"),
    "a narrow window": (64, 64, 8192, 8192, (program.BAND, -1023, 0), "Brief<64, 64>"),
    "a band": (64, 64, 8192, 8192, CAUSAL, "Narrow<false, 64, 64>"),
    "no mask": (64, 64, 8192, 8192, (), "Narrow<true, 64, 64>"),
    "lengths": (64, 64, 8192, 8192, LENGTHS, "Narrow<true, 64, 64>"),
    "segments": (64, 64, 8192, 8192, SEGMENTS, "Brief<64, 64>"),
    "bools": (64, 64, 8192, 8192, (program.DENSE, 0), "Low<64, 64>"),
    "40": (40, 40, 8192, 8192, CAUSAL, "Narrow<false, 48, 64>"),
    "72": (72, 72, 8192, 8192, CAUSAL, "Middle<true, 80, 96>"),
    "128": (128, 128, 8192, 8192, (), "Middle<true, 128, 128>"),
    "128 and 64": (128, 64, 8192, 8192, (), "Middle<false, 128, 64>"),
    "128 and 64, few keys": (128, 64, 1024, 1024, (), "Middle<true, 128, 64>"),
    "192 and 128": (192, 128, 8192, 8192, CAUSAL, "Deep<192, 128>"),
    "192": (192, 192, 8192, 8192, CAUSAL, "Wide<80, 192, 192>"),
    "256": (256, 256, 8192, 8192, CAUSAL, "Wide<80, 256, 256>"),
    "256, few keys": (256, 256, 300, 300, CAUSAL, "Wide<64, 256, 256>"),
    "256, segments": (256, 256, 8192, 8192, SEGMENTS, "Wide<64, 256, 256>"),
}


def kind_of(head, columns, queries, keys, mask, **what):
    what.setdefault("masks", [torch.empty(1, 1, queries, keys, dtype=torch.bool, device="meta")])
    call = AttentionCall(*arguments(*shaped((16, 2), queries, keys, head, columns), mask=mask, **what))
    return forward_kinds.kind_of(call)


def test_work_is_laid_out_by_sizes_and_masks():
    found = {case: kind_of(*of).layout.text for case, (*of, _) in LAYOUTS.items()}
    assert found == {case: text for case, (*_, text) in LAYOUTS.items()}


@pytest.mark.parametrize(
    ("queries", "layout", "in_order"),
    [(1, "Brief<64, 64>", True), (8192, "Low<64, 64>", False)],
    ids=["of keys", "of pairs"],
)
def test_biases_are_laid_out_by_what_they_load(queries, layout, in_order):
    bias = torch.empty(1, 1, queries, 8192, dtype=BF16, device="meta")
    call = AttentionCall(*arguments(*shaped((16, 2), 8192, 8192, 64, 64), bias=(program.BIAS_DENSE, 0)))
    kind = forward_kinds.kind_of(as_functions(call._replace(bias_tensors=[bias])))
    assert kind.layout.text == layout
    assert ("#define KEYS_READ true" in kind.definitions) == in_order


def test_other_lengths_and_bands_compile_nothing_anew():
    first = kind_of(128, 128, 300, 300, CAUSAL)
    assert first == kind_of(128, 128, 4000, 77, (program.BAND, -16, 16))
    assert first != kind_of(128, 128, 300, 300, ())
    assert first != kind_of(128, 128, 300, 300, CAUSAL, softcap=1.0)
    assert first != kind_of(128, 128, 300, 300, (*CAUSAL, *LENGTHS, program.AND))


def test_a_mask_of_more_tensors_than_there_is_room_for_becomes_bools():
    mask = SEGMENTS
    for number in range(2, 8, 2):
        mask = (*mask, program.SEGMENTS, number, number + 1, program.OR)
    assert kind_of(128, 128, 300, 300, mask) == kind_of(128, 128, 300, 300, (program.DENSE, 0))


def test_segments_with_a_band_and_lengths_need_no_bits():
    mask = (*CAUSAL, *SEGMENTS, program.AND, program.LENGTH, 2, program.AND)
    assert kind_of(128, 128, 300, 300, mask).asked.tile == ()


def test_one_kernel_serves_all_masks_that_are_read_as_bits():
    def of_function(function, length):
        lowered = lower(as_mask(function), CallSizes(1, 16, length, length, torch.device("cpu")))
        return kind_of(128, 128, length, length, tuple(lowered.program), masks=lowered.tensors)

    table = torch.ones(8192, dtype=torch.bool)
    first = of_function(lambda b, h, i, j: (i - j) % 3 == 0, 8192)
    assert first == of_function(lambda b, h, i, j: table[(i * j) % 8192], 8192)
    assert first == kind_of(128, 128, 300, 300, (*CAUSAL, program.DENSE, 0, program.AND))
    long = of_function(lambda b, h, i, j: (i - j) % 3 == 0, 65536)  # there is no room for bits of all tiles
    assert long.asked.mask
    assert "user_0" in long.definitions


def test_heads_are_interleaved_as_the_cache_holds():
    sizes = (16, 512, 64), (16, 512, 128), (16, 1024, 128), (2, 8192, 128), (16, 512, 256), (2, 8192, 256)
    found = [
        forward_cuda._section(*shaped((16, 16), length, length, head, head, batch=batch))
        for batch, length, head in sizes
    ]
    assert found == [256, 32, 32, 8, 32, 2]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def misaligned(x):
    """The same with the same strides, eight bytes after a multiple of sixteen."""
    room = torch.empty(x.untyped_storage().nbytes() // x.element_size() + 8, dtype=x.dtype, device=x.device)
    start = (16 - room.data_ptr() % 16) // x.element_size() % 8 + 4
    return room[start:].as_strided(x.shape, x.stride()).copy_(x)


def window(width):
    return program.BAND, -width, 0


CALLS = {  # (batch, heads of queries and of keys, queries, keys, head, columns), and what else
    "sinks": ((1, (4, 2), 300, 200, 128, 128), {"mask": bottom_right(300, 200), "sinks": True}),
    "capped": ((2, (4, 2), 300, 300, 128, 128), {"mask": CAUSAL, "softcap": 3.0}),
    "sinks and capped": ((2, (4, 2), 300, 300, 128, 128), {"sinks": True, "softcap": 30.0}),
    "96": ((2, (4, 2), 300, 300, 96, 96), {"mask": CAUSAL, "out_is_bshd": True}),
    "72 and 128": ((1, (2, 1), 190, 190, 72, 128), {"mask": CAUSAL}),
    "64": ((2, (4, 2), 777, 777, 64, 64), {}),
    "64, causal": ((2, (16, 16), 1024, 1024, 64, 64), {"mask": CAUSAL}),
    "40": ((2, (4, 2), 300, 300, 40, 40), {"mask": CAUSAL}),
    "256": ((2, (4, 2), 300, 300, 256, 256), {}),
    "256, causal": ((2, (4, 2), 300, 300, 256, 256), {"mask": CAUSAL}),
    "192 and 128": ((1, (2, 1), 300, 300, 192, 128), {"mask": CAUSAL}),
    "64 and 256": ((1, (2, 1), 300, 300, 64, 256), {"mask": CAUSAL}),
    "160 and 200": ((1, (2, 1), 500, 300, 160, 200), {"mask": CAUSAL}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", CALLS)
class TestNumbers:
    pytestmark = on_hopper_with_compiler

    def test_are_the_references(self, case, dtype):
        sizes, what = CALLS[case]
        tensors = filled(*sizes, dtype=dtype, out_is_bshd=what.get("out_is_bshd", False))
        sinks = torch.randn(sizes[1][0], device="cuda") if what.get("sinks") else None
        compared(arguments(*tensors, **{**what, "sinks": sinks}))


class TestOnGpu:
    pytestmark = on_hopper_with_compiler

    @pytest.mark.parametrize("what", [{"softcap": 3.0}, {"sinks": True}, {}])
    def test_hidden_keys_and_values_do_not_leak(self, what):
        q, k, v = filled(1, (2, 1), 300, 300, 96, 96)
        hide(k, v)
        sinks = torch.randn(2, device="cuda") if what.get("sinks") else None
        compared_where_hidden(arguments(q, k, v, mask=(program.BAND, -40, 30), **{**what, "sinks": sinks}))

    def test_strides_that_tma_cannot_follow_are_copied(self):
        q, k, v = filled(2, (4, 2), 200, 200, 64, 64)
        q = torch.randn(2, 4, 64, 200, device="cuda").to(BF16).mT
        k = torch.randn(2, 2, 200, 67, device="cuda").to(BF16)[..., 3:]
        v = v[:, :1].expand(2, 2, 200, 64)
        compared(arguments(q, k, v, mask=CAUSAL))

    def test_tensors_that_are_not_aligned_after_some_that_are(self):
        inside = filled(2, (4, 2), 200, 200, 64, 64, out_is_bshd=True)
        given = arguments(*inside, mask=CAUSAL)
        run = forward_cuda.forward.prepare(*given)
        for tensors in (inside, [misaligned(x) for x in inside], inside):
            compared(given, run(*arguments(*tensors, mask=CAUSAL)))
