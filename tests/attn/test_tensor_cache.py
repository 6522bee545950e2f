"""What is derived of a mask's tensors is kept while they are what they are, and nothing else is."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import opkit
from opkit.attn import tensor_cache
from opkit.attn.masks.lowering import lower
from opkit.attn.masks.program_builder import CallSizes
from opkit.attn.tensor_cache import TensorCache, get_or_compute
from opkit.masks import Causal, Dense, KeyPadding, PrefixLM, Segments, VarLen

CPU = torch.device("cpu")
SIZES = CallSizes(1, 2, 7, 7, CPU)


def starts(dtype=torch.int64):
    return torch.tensor([0, 3, 7], dtype=dtype)


# Of each, the mask of some tensors and the tensors.
MASKS = {
    "ids of one dimension": (Segments, lambda: [torch.arange(7, dtype=torch.int32)]),
    "ids of 64 bits": (Segments, lambda: [torch.arange(7)[None], torch.arange(7)]),
    "bools": (Dense, lambda: [torch.rand(7, 7) > 0.5]),
    "lengths": (KeyPadding, lambda: [torch.tensor([3])]),
    "one length": (KeyPadding, lambda: [torch.tensor(3, dtype=torch.int32)]),
    "prefixes": (PrefixLM, lambda: [torch.tensor([2])]),
    "documents": (lambda q: VarLen(q) & Causal(), lambda: [starts()]),
    "documents elsewhere": (lambda q, k: VarLen(q, k) & Causal("bottom-right"), lambda: [starts(), starts() * 1]),
    "first keys of documents": (lambda q, n: VarLen(q) & KeyPadding(n), lambda: [starts(), torch.tensor([2, 1])]),
}  # fmt: skip


def same(found, others):
    assert len(found.tensors) == len(others.tensors)
    return [x is y for x, y in zip(found.tensors, others.tensors, strict=True)]


@pytest.mark.parametrize("case", MASKS)
def test_a_users_tensors_are_lowered_once(case):
    mask, tensors = MASKS[case]
    given = tensors()
    first = lower(mask(*given), SIZES)
    assert first.tensors
    assert all(same(first, lower(mask(*given), SIZES)))
    others = tensors()
    assert not any(same(first, lower(mask(*others), SIZES)))


def write(x):
    """Flip bools; take one from integers, of several not from the first."""
    if x.dtype == torch.bool:
        x.logical_not_()
    else:
        (x.flatten()[1:] if x.numel() > 1 else x).sub_(1)


@pytest.mark.parametrize("case", MASKS)
def test_what_is_written_to_them_counts_from_the_next_call_on(case):
    mask, tensors = MASKS[case]
    given, q = tensors(), torch.randn(1, 2, 7, 4)
    for _ in range(3):
        got = opkit.attention(q, q, q, mask=mask(*given))
        copied = mask(*(each.clone() for each in given))
        torch.testing.assert_close(got, opkit.attention(q, q, q, mask=copied, kernel="reference"))
        for each in given:
            write(each)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", MASKS)
def test_nothing_is_kept_of_what_is_gone(case):
    mask, tensors = MASKS[case]
    given = tensors()
    refs = [weakref.ref(x) for x in (*given, *lower(mask(*given), SIZES).tensors)]
    given.clear()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_mask_reaches_the_backward_as_it_was_found():
    ids, q = torch.arange(7), torch.randn(1, 2, 7, 4, requires_grad=True)
    outputs = [opkit.attention(q, q, q, mask=Segments(ids)) for _ in range(2)]
    first, second = (out.grad_fn.saved_tensors for out in outputs)
    assert first[5] is second[5]
    assert first[5].dtype == torch.int32


def test_sizes_count():
    ids = starts()
    found = [lower(VarLen(ids), CallSizes(1, 1, n, n, CPU)).tensors[0].shape for n in (7, 8, 7)]
    assert found == [(1, 7), (1, 8), (1, 7)]


def count(what, *sources):
    """How many times of two something is made of these tensors."""
    made = []
    for _ in range(2):
        get_or_compute(what, sources, lambda: made.append(1) or torch.zeros(1))
    return len(made)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_nothing_is_kept_where_it_would_be_seen(monkeypatch):
    x, counts = torch.arange(3), []

    def counting(y):
        counts.append(count("x", x))
        return y + 1

    for mode in (Watching(), Overriding(), torch.device("cpu")):
        with mode:
            assert count("x", x) == 2
    torch.vmap(counting)(torch.ones(2))
    torch.jit.trace(counting, torch.ones(2), check_trace=False)
    assert set(counts) == {2}
    with monkeypatch.context() as patched:
        patched.setattr(tensor_cache, "stream_of", lambda device: None)
        patched.setattr(torch.Tensor, "is_cuda", True)
        assert count("x", x) == 2
    assert count("x", x) == 1


def test_a_compiled_program_computes_it_anew():
    ids, q = torch.tensor([0, 0, 1, 1, 1]), torch.randn(1, 1, 5, 4)
    compiled = torch.compile(lambda q, ids: opkit.attention(q, q, q, mask=Segments(ids)), backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(q, ids), opkit.attention(q, q, q, mask=Segments(ids)))
        ids = ids.flip(0)


def test_tensors_that_do_not_say_when_they_are_written_to():
    array = np.arange(3)
    read = torch.arange(3)
    read[1:].numpy()
    with torch.inference_mode():
        inference = torch.arange(3)
    shared, moved = torch.arange(3).share_memory_(), torch.arange(3)
    untrusted = (torch.from_numpy(array), read, inference, shared, torch.arange(3).as_subclass(Own), torch.ones(3))
    for each in (*untrusted, torch.nn.Parameter(torch.arange(3), requires_grad=False)):
        assert count("x", each) == 2
        assert count("x", torch.arange(3), each) == 2
    assert count("x", moved) == 1
    moved.data = torch.arange(3)
    assert count("x", moved) == 1
    moved.share_memory_()
    assert count("x", moved) == 2


def test_what_is_derived_in_inference_serves_training():
    ids, q = torch.tensor([0, 0, 1]), torch.randn(1, 1, 3, 4, requires_grad=True)
    with torch.inference_mode():
        inferred = opkit.attention(q, q, q, mask=Segments(ids))
        assert count("x", ids) == 1
    out = opkit.attention(q, q, q, mask=Segments(ids))
    out.sum().backward()
    torch.testing.assert_close(out.detach(), inferred.clone())


def test_those_found_last_are_kept():
    some, xs = TensorCache(2), [torch.arange(2) for _ in range(3)]
    for each in (0, 1, 0, 2):
        some.get_or_create("x", [xs[each]], lambda: each)  # noqa: B023 - called at once
    assert [some.get_or_create("x", [x], lambda: "new") for x in (xs[0], xs[2], xs[1])] == [0, 2, "new"]
    assert len(some) == 2


def test_another_tensor_of_the_same_address_is_another():
    some, memory = TensorCache(8), torch.arange(4)
    first, second = memory[:2].detach(), memory[:2].detach()
    assert first.data_ptr() == second.data_ptr()
    assert [some.get_or_create("x", [x], lambda: "made") for x in (first, second)] == ["made"] * 2
    assert len(some) == 2
    place = id(first)
    del first
    for _ in range(64):  # until one has the place in memory that the dead one had
        third = memory[2:].detach()
        if id(third) == place:
            break
    assert some.get_or_create("x", [third], lambda: "anew") == "anew"


class Deadly:
    """Lets a tensor go while its hash is asked, which is while the lock is held."""

    def __init__(self, victims):
        self.victims = victims

    def __hash__(self):
        self.victims.clear()
        return 1


def test_a_tensor_that_dies_while_the_lock_is_held_is_let_go():
    some, x, victims = TensorCache(8), torch.arange(2), [torch.arange(2)]
    some.get_or_create("x", victims, lambda: 1)
    assert len(some) == 1
    some.get_or_create(Deadly(victims), [x], lambda: 2)
    assert len(some) == 1
    del x
    assert len(some) == 0


def test_what_was_made_may_let_others_go():
    """A kept tensor is what another thing was made of: both go with the first's source."""
    some, x = TensorCache(8), torch.arange(2)
    made = some.get_or_create("first", [x], lambda: torch.arange(3))
    some.get_or_create("second", [made], lambda: 5)
    del made
    assert len(some) == 2
    del x
    assert len(some) == 0


def test_nothing_is_kept_where_it_is_switched_off(settings):
    ids = torch.tensor([0, 0, 1, 1])
    settings(keep_masks=0)
    assert count("int32", ids) == 2
    settings(keep_masks=1)
    assert count("int32", ids) == 1
