"""The backward for sm_90a in CUDA C++ with sums in one order, run on a processor in random orders of events."""

import pytest
import torch
from cuda_on_cpu import NONE, on_cpu, survives
from hopper_calls import BF16, CAUSAL, FP16, bottom_right
from hopper_masks import packed
from test_cuda_backward_on_cpu import (
    GRADIENTS,
    SEGMENTS,
    gradient_call,
    let_helpers_prepare,
    off,
)

from opkit.attn.gpu.hopper import backward_cuda, calls
from opkit.attn.masks import program

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("deterministic")]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("case", GRADIENTS)
def test_numbers_are_the_references(machine, case, dtype):
    sizes, what = GRADIENTS[case]
    call, expected = gradient_call(sizes, dtype, **what)
    assert off(backward_cuda.backward(*call), expected) < 2 * torch.finfo(dtype).eps


BITS = {
    "causal, 128": ((1, (4, 2), 500, 500, 128, 128), CAUSAL),
    "causal, 64": ((2, (2, 2), 600, 600, 64, 64), CAUSAL),
    "no mask": ((1, (4, 4), 300, 700, 128, 128), ()),
    "window": ((1, (4, 1), 900, 900, 64, 64), (program.BAND, -200, 0)),
    "band ahead": ((1, (2, 1), 300, 900, 128, 128), (program.BAND, 100, 300)),
    "dead rows": ((1, (4, 4), 600, 300, 128, 128), bottom_right(600, 300)),
}
SECTIONS = {"all heads at once, last queries first": (4, 0), "first queries first": (1, 4), "one head of each": (1, 1)}
"""Heads of keys of a section at most, and how many sections go from the first queries to the last."""


@pytest.mark.sweep
@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("case", BITS)
def test_any_order_of_events_gives_the_same_bits(machine, monkeypatch, case, sections):
    sizes, mask = BITS[case]
    call, expected = gradient_call(sizes, mask=mask, of_lse=True)
    in_sections(monkeypatch, call, *SECTIONS[sections])
    found = []
    for order in range(3):
        machine[0] = order
        found.append(backward_cuda.backward(*call))
        assert all(map(torch.equal, found[0], found[-1]))
    assert off(found[0], expected) < 2**-6


def in_sections(monkeypatch, call, width, upwards):
    heads, keys = call[3].shape[0] * call[3].shape[1], call[3].shape[2]
    width = min(width, heads)
    monkeypatch.setattr(calls, "evenly", lambda count, most: width)
    tiles = min(upwards * width, heads) * -(-keys // 128)
    monkeypatch.setattr(backward_cuda, "_turned", lambda *given: tiles)


def test_its_room_is_as_large_as_what_it_puts_there(machine, monkeypatch):
    made = []

    def guarded(x, size, dtype):
        made.append(torch.full((size + 256,), 7.0))
        return made[-1][:size]

    monkeypatch.setattr(backward_cuda, "allocate_scratch", guarded)
    call, _ = gradient_call((2, (4, 2), 300, 300, 64, 64), mask=CAUSAL)
    backward_cuda.backward(*call)
    assert (made[0][-256:] == 7).all()
    counts = made[0][:-256].view(torch.int32)
    assert counts[-1] == 3  # tiles of keys that have added to the last block of the last head


THE_ONE_BEFORE = """\
            if (before) add_count(before, 1);
            before = added<S>(problem, walk.head, walk.visit(problem, tile).block);
"""
THIS_ONE = """\
            before = added<S>(problem, walk.head, walk.visit(problem, tile).block);
            add_count(before, 1);
"""
THE_LAST_IS_ADDED = "        wait(barriers + SUMMED + (n & 1) * 8, n >> 1 & 1);\n"
TURN = "wait_count(added<S>(problem, head, block), turn_of<S>(problem, tile, head, step, block)"
DEFECTS = {
    "none": NONE,
    "nobody waits for a turn": (f"        {TURN});\n", ""),
    "a turn too early": (TURN, f"{TURN} - 1"),
    "a turn too late": (TURN, f"{TURN} + 1"),
    "passed on before it is added": (THE_ONE_BEFORE, THIS_ONE),
    "the last one passed on before it is added": (THE_LAST_IS_ADDED, ""),
    "products wait for no turn": (
        "S::ORDERED && (barrier == K_EMPTY || of_slopes)",
        "S::ORDERED && barrier == K_EMPTY",
    ),
    "first keys first": ("S::ORDERED && !down ? of_head - 1 - rest / width", "false ? rest / width"),
}
OF_BANDS = {"first keys first"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(defect, monkeypatch, tmp_path):
    mask = CAUSAL if defect in OF_BANDS else ()
    call, expected = gradient_call((1, (2, 1), 700, 700, 64, 64), mask=mask)
    in_sections(monkeypatch, call, 1, 1)
    shown(call, expected, DEFECTS[defect], monkeypatch, tmp_path)


def shown(call, expected, defect, monkeypatch, tmp_path):
    """Some order of events shows a defect."""
    first = []

    def check(found):
        first[:] = first or found
        assert all(map(torch.equal, found, first))
        assert off(found, expected) < 2**-6

    with on_cpu(monkeypatch, tmp_path, defect) as seed:
        assert survives(seed, lambda: backward_cuda.backward(*call), check) == (defect is NONE)


# ---- segments: turns come from lists --------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("case", SEGMENTS)
def test_any_order_of_events_gives_the_same_bits_under_segments(listed, monkeypatch, case, head):
    let_helpers_prepare(monkeypatch)
    queries, keys, mask, ids = SEGMENTS[case]
    call, expected = gradient_call((2, (2, 1), queries, keys, head, head), mask=mask, masks=ids)
    first = backward_cuda.backward(*call)
    assert off(first, expected) < 2 * torch.finfo(BF16).eps
    listed[0] = 1
    assert all(map(torch.equal, first, backward_cuda.backward(*call)))


DEFECTS_OF_LISTS = {
    "none": NONE,
    "no turns": ("return listed_visit<S>(problem, tile, head, step).y;", "return 0;"),
    "parts not known": ("(mark & 1) != 0}", "false}"),
    "always the first visit": (
        "lists.visits[place_of_list<S>(problem, tile, head) + step]",
        "lists.visits[place_of_list<S>(problem, tile, head)]",
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("defect", DEFECTS_OF_LISTS)
def test_defects_of_turns_in_lists_are_found(listed, defect, monkeypatch, tmp_path):
    ids = packed(650, 50)
    call, expected = gradient_call((1, (2, 1), 700, 700, 64, 64), mask=(program.SEGMENTS, 0, 1), masks=[ids, ids])
    shown(call, expected, DEFECTS_OF_LISTS[defect], monkeypatch, tmp_path)
