"""Launches that do not depend on each other run side by side: in any order, they give the same."""

import dataclasses
import itertools

import torch

from opkit.compiler.ir.index import Axis, index, size
from opkit.compiler.ir.kernel import Kernel, KernelArgument, KernelLaunch, Loop, batches
from opkit.compiler.ir.program import Extern, Strided
from opkit.compiler.lower.batches import BATCH_MEMORY, BatchSizes, batched
from opkit.compiler.lower.scheduling import nbytes
from tests.compiler import native
from tests.compiler.lower.test_scheduling import check, r


def names(steps):
    return [[launch.kernel.name for launch in each] for each in batches(steps)]


def backwards(made):
    """The schedule with the launches of each batch in the opposite order."""
    steps = [
        dataclasses.replace(launch, joined=k > 0)
        for each in batches(made.steps)
        for k, launch in enumerate(reversed(each))
    ]
    return dataclasses.replace(made, steps=tuple(steps))


def both(x, y, z):
    """Sums over other axes, chains of small kernels, and a write to what others read."""
    rows = torch.softmax(x, -1)
    first = rows / rows.sum(0)
    second = torch.softmax(y, 0).sum(1) * 2
    third = z.cumsum(0).flip(0).cumsum(0)
    return first.t().cumsum(0), second, third, x.t().cumsum(1), z.mul_(2)


GIVEN = (r(9, 33), r(17, 5), r(20, 3))


def test_the_numbers_are_those_of_eager():
    made = check(both, *GIVEN, rtol=1e-5, atol=1e-5)
    assert max(map(len, batches(made.steps))) > 2


def test_the_order_within_a_batch_does_not_count(monkeypatch):
    run = native.run
    monkeypatch.setattr(native, "run", lambda made, inputs: run(backwards(made), inputs))
    check(both, *GIVEN, rtol=1e-5, atol=1e-5)


def test_what_lies_in_the_arena_at_one_moment_does_not_overlap():
    made = check(both, *GIVEN, rtol=1e-5, atol=1e-5)
    for each in batches(made.steps):
        touched = {name for launch in each for name in launch.buffers if name in made.places}
        spans = [(made.places[n].constant or 0, nbytes(made.buffers[n]).constant or 0) for n in touched]
        spans.sort()
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert made.places


def test_what_depends_on_another_one_comes_after_it_with_a_reason():
    made = check(lambda x: x.cumsum(0).cumsum(1), r(6, 5), rtol=1e-6, atol=1e-6)
    assert names(made.steps) == [["k0"], ["k1"]]
    assert made.apart == ("k1 comes after k0, for both use cumsum",)


def test_what_is_read_is_not_overwritten_at_the_same_time():
    made = check(lambda x: (x.cumsum(0), x.add_(1)), r(6, 5), rtol=1e-6, atol=1e-6)
    assert all(len(each) == 1 for each in batches(made.steps))


# ---- by hand ---------------------------------------------------------------------------------------------------------


def launch(name, read, written):
    arguments = (KernelArgument("p0", "f32", False), KernelArgument("p1", "f32", True))
    return KernelLaunch(Kernel(name, arguments, (), ()), (read, written))


def of(*steps, arena=()):
    made, reasons = batched(steps, BatchSizes({}, dict(arena)))
    return names(made), reasons, made


def test_small_launches_move_up_past_what_they_do_not_depend_on():
    chains = [launch(f"{c}{k}", f"{c}{k}", f"{c}{k + 1}") for c in "ab" for k in range(3)]
    assert of(*chains)[0] == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]


def test_a_large_launch_joins_the_last_batch_alone(monkeypatch):
    monkeypatch.setattr("opkit.compiler.lower.batches.SMALL_LAUNCH", 0.5)
    steps = [launch("a", "x", "y"), launch("b", "y", "z"), launch("c", "v", "w")]
    assert of(*steps)[0] == [["a"], ["b", "c"]]


def test_nothing_moves_past_a_call():
    call = Extern("aten.mm.default", (), {}, ())
    found, _, steps = of(launch("a", "x", "y"), call, launch("b", "v", "w"))
    assert found == [["a"], ["b"]]
    assert steps[1] is call


def test_memory_that_an_operator_gave_twice_is_one():
    def tensor(name):
        return Strided(name, (index(4),), (index(1),), index(0))

    call = Extern("aten.view.dtype", (tensor("x"),), {}, ("y",), aliases=True)
    again = Extern("aten.view.dtype", (tensor("y"),), {}, ("z",), aliases=True)
    reads_and_writes = launch("a", "x", "v"), launch("b", "w", "z")
    assert of(call, again, *reads_and_writes)[0] == [["a"], ["b"]]
    assert of(*reads_and_writes)[0] == [["a", "b"]]


def test_a_batch_needs_no_more_of_the_arena_than_it_may():
    half = BATCH_MEMORY / 2
    steps = [launch(name, f"{name}0", f"{name}1") for name in "abc"]
    found, reasons, _ = of(*steps, arena={"a1": half, "b1": half, "c1": half})
    assert found == [["a", "b"], ["c"]]
    assert reasons == ["c: with what is before it, it would need more memory at once"]


def test_a_write_waits_for_every_reader_before_it():
    steps = [launch("a", "x", "y"), launch("b", "y", "z"), launch("c", "x", "v"), launch("d", "w", "x")]
    assert of(*steps)[0] == [["a", "c"], ["b", "d"]]


def test_the_work_of_sizes_that_are_symbols_is_that_of_the_sizes_to_expect():
    n = size("n")
    kernel = Kernel("k", (), ("n",), (Loop(Axis(0, n), (), "parallel"),), 4)
    assert BatchSizes({"s": 40}, {}).work(KernelLaunch(kernel, (), ("s",))) == 10
    assert BatchSizes.of({"n": 160}, {"b": n * 4}).arena == {"b": 640}
