"""Repeated calls one after another, with results and memory of their own. The driver is a fake that adds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from opkit import _core
from opkit.op import torch_private as private
from opkit.op.layout import program as layout_program

FLOATS = 40
BYTES = FLOATS * 4
FLOAT = layout_program.DTYPES[torch.float32]


@pytest.fixture
def add(fake):
    """``add(x, y, out)`` of FLOATS numbers, and the launcher of it."""
    op = fake.add()
    return op.launcher.repeat(lambda: op(torch.ones(FLOATS), torch.ones(FLOATS)))


def addresses(*tensors):
    return [x.data_ptr() for x in tensors]


def pointers(fake):
    """The addresses x, y, out of each launch."""
    return [[int.from_bytes(bytes.fromhex(word), "little") for word in row[-1].split()[:3]] for row in fake.launches]


def sum_of_three(add, memory=(BYTES,)):
    """x, y, z, out: x + y goes to memory, and that + z to out."""
    return _core.Series([(add, [0, 1, 4]), (add, [4, 2, 3])], addresses=4, results=[], memory=memory, device=-1)


def test_a_call_reads_from_memory_what_the_one_before_wrote(add):
    series = sum_of_three(add)
    for _ in range(3):
        x, y, z, out = torch.randn(4, FLOATS).unbind()
        kept = out.clone()
        series(addresses(x, y, z, out), 0)
        assert torch.equal(out, x + y + z)
        assert not torch.equal(out, kept)


def test_threads_do_not_share_memory(fake, add):
    fake.library.fake_quiet(1)
    series = sum_of_three(add)

    def work(number):
        x, y, z, out = torch.full((4, FLOATS), float(number)).unbind()
        right = True
        for _ in range(300):
            out.zero_()
            series(addresses(x, y, z, out), 0)
            right = right and bool((out == 3 * number).all())
        return right

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(1, 9))) == [True] * 8


def test_only_what_is_given_moves(fake, add):
    fake.library.fake_reset()
    series = sum_of_three(add)
    tensors = torch.zeros(9, FLOATS)
    starts = (0, 5, 0)
    for start in starts:
        series(addresses(*tensors[start : start + 4]), 0)
    made = pointers(fake)
    for start, first, second in zip(starts, made[::2], made[1::2], strict=True):
        x, y, z, out = addresses(*tensors[start : start + 4])
        assert (first[:2], second[1:]) == ([x, y], [z, out])
        assert first[2] == second[0]
        assert first[2] not in (x, y, z, out)


def test_pieces_of_memory_are_aligned_and_apart(fake, add):
    fake.library.fake_reset()
    steps = [(add, [0, 0, 1]), (add, [1, 1, 2]), (add, [2, 2, 3])]
    _core.Series(steps, addresses=1, results=[], memory=[BYTES, 0, BYTES], device=-1)(addresses(torch.ones(FLOATS)), 0)
    first, empty, last = (row[2] for row in pointers(fake))
    assert first % 128 == empty % 128 == last % 128 == 0
    assert first + BYTES <= empty <= last


def test_every_call_is_on_the_stream(fake, tensor_at):
    rows = [("PACKED_TENSOR", name, "tensor") for name in ("x", "out")]
    entry = fake.entry("none", [("ptr", 0, 0), ("ptr", 1, 0)])
    op = fake.unregistered("copy(Tensor x) -> Tensor", rows, lambda call: entry, cuda=True)
    call = op.launcher.repeat(lambda: op.direct(tensor_at(64, device=0), tensor_at(128, device=0), stream=7))
    _core.Series([(call, [0, 1]), (call, [1, 0])], addresses=2, results=[], memory=[], device=0)([64, 128], 9)
    assert [row[5] for row in fake.launches] == ["0x7", "0x9", "0x9"]


def test_descriptors_follow_the_addresses(fake):
    row = {"source": 0, "swizzle": 3, "elem_size": 4, "elem_type": 7, "block": [16, 32]}
    entry = fake.entry("none", [("map", 0, 0), ("ptr", 1, 0)], maps=[row])
    rows = [("TENSOR", "x", "tensor"), ("TENSOR", "out", "tensor_any")]
    op = fake.operator("described(Tensor x) -> Tensor", rows, lambda call: entry)
    call = op.launcher.repeat(lambda: op(torch.empty(100, 400)))
    series = _core.Series([(call, [0, 1]), (call, [2, 1])], addresses=2, results=[], memory=[100 * 400 * 4], device=-1)
    fake.library.fake_reset()
    given = torch.empty(3, 100, 400)
    for each in (0, 1, 0, 2):
        series(addresses(given[each], given[each]), 0)
    maps = [int.from_bytes(bytes.fromhex(row[-1].split()[0])[:8], "little") for row in fake.launches]
    assert maps[::2] == [given[each].data_ptr() for each in (0, 1, 0, 2)]
    assert all(each % 128 == 0 for each in maps[1::2])
    assert fake.noted("encode") == []


def test_a_launch_that_fails_says_why(fake, add):
    series = sum_of_three(add)
    x = torch.ones(FLOATS)
    fake.library.fake_reset()
    fake.fail("cuLaunchKernel", 2)
    with pytest.raises(RuntimeError, match="cuLaunchKernel"):
        series(addresses(x, x, x, x), 0)
    assert len(fake.launches) == 1
    assert torch.equal(x, torch.ones(FLOATS))


def test_as_many_addresses_as_was_said(add):
    with pytest.raises(ValueError, match="launched with 3 tensors, and takes 4"):
        sum_of_three(add)([0, 0, 0], 0)


@pytest.mark.parametrize(
    ("places", "memory", "message"),
    [
        ([0, 1], [], "a step has 2 places, and its call has 3 tensors"),
        ([0, 1, 2], [], "the place 2, and there are 2"),
        ([0, 1, 3], [4], "the place 3, and there are 3"),
        ([0, 1, 2], [-4], "a piece of memory has -4 bytes"),
    ],
)
def test_steps_that_do_not_fit(add, places, memory, message):
    with pytest.raises(ValueError, match=message):
        _core.Series([(add, places)], addresses=2, results=[], memory=memory, device=-1)


def test_results_are_new_tensors_of_the_caller(add):
    layouts = [((5, 8), (1, 5), FLOAT), ((FLOATS,), (1,), FLOAT)]
    series = _core.Series([(add, [0, 1, 2]), (add, [2, 2, 3])], addresses=2, results=layouts, memory=[], device=-1)
    x, y = torch.randn(2, FLOATS).unbind()
    first, second = (private.tensors_of_handles(series(addresses(x, y), 0)) for _ in range(2))
    assert [(each.shape, each.stride(), each.dtype) for each in first] == [
        ((5, 8), (1, 5), torch.float32), ((FLOATS,), (1,), torch.float32),
    ]  # fmt: skip
    assert torch.equal(first[0].t().flatten(), x + y)
    assert torch.equal(first[1], 2 * (x + y))
    assert len({each.untyped_storage().data_ptr() for each in (*first, *second)}) == 4
    assert all(map(torch.equal, first, second))
    assert not any(each.requires_grad for each in first)


def test_a_result_has_as_many_strides_as_sizes(add):
    with pytest.raises(ValueError, match="as many strides as sizes"):
        _core.Series([(add, [0, 0, 1])], addresses=1, results=[((4,), (1, 1), FLOAT)], memory=[], device=-1)


@pytest.mark.parametrize(
    "more", [{"memory": [2**62]}, {"results": [((2**60,), (1,), FLOAT)]}], ids=["memory", "results"]
)
def test_memory_that_is_not_there(fake, add, more):
    series = _core.Series([(add, [0, 0, 0])], **{"addresses": 1, "results": [], "memory": [], "device": -1, **more})
    fake.library.fake_reset()
    with pytest.raises(MemoryError):
        series([0], 0)
    assert fake.launches == []
