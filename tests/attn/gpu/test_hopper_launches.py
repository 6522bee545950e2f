"""What the kernels for sm_90 are launched with, call after call, of which only the tensors move. The driver is a fake."""

import launched_kernels
import pytest
import torch
from hopper_backward_calls import arguments
from hopper_calls import CAUSAL, shaped
from launched_kernels import found_at

from opkit.attn.gpu import tile_lists
from opkit.attn.gpu.hopper import backward
from opkit.attn.masks import program

fake_libraries, fake, fake_h200 = launched_kernels.fake_libraries, launched_kernels.fake, launched_kernels.fake_h200
LENGTHS = (program.LENGTH, 0)


@pytest.fixture
def gpu(fake_h200):
    _forget()
    yield fake_h200
    _forget()


def _forget():
    kernels = (backward._begin_kernel, backward._end_kernel, backward._kernel)
    for each in (*kernels, tile_lists._kernel, tile_lists._turns_kernel):
        each.cache_clear()


BACKWARD = {
    "plain": {},
    "causal": {"mask": CAUSAL},
    "of_lse": {"of_lse": True},
    "heads inside": {"out_is_bshd": True},
    "lengths": {"mask": LENGTHS, "of_lse": True},
}


def tensors(mask=(), **what):
    """New ones of one call, and what else it has."""
    masks = [torch.tensor([30, 40], dtype=torch.int32)] if mask == LENGTHS else []
    return shaped((4, 2), 70, 90, 64, 128, device="cpu"), {"mask": mask, "masks": masks, **what}


def backward_call(of_lse=False, **what):
    made, what = tensors(**what)
    return arguments(*made, of_lse=torch.empty(2, 4, 70) if of_lse else None, **what)


def check_backward(launched, given, results, ordered=False):
    """They read and write a call's tensors, and pass each other the sums and the turns of this call alone."""
    (_, begin), (_, main), (_, end) = launched
    at = found_at(given, ("gradient", "of_lse", "q", "k", "v", "out", "lse"))
    at |= found_at(results, ("of_q", "of_k", "of_v", "delta"))
    at |= {name: begin[name] for name in ("sums", "total", "turns") if name in begin}
    own = {*at.values(), main["counter"]}
    assert len(own) == len(at) + 1
    assert ("turns" in begin) is ordered
    assert {**main, "total": main["sum"]} == {**main, "total": begin["total"]}
    for launch in (begin, main, end):
        for name in at.keys() & launch.keys():
            assert launch[name] == at[name], name
    asked = [("out", "gradient", "lse", "delta"), ("q", "k", "v", "gradient", "of_k", "of_v"), ("total", "of_q")]
    for launch, names in zip((begin, main, end), asked, strict=True):
        assert launch.keys() >= {*names}
    assert ("of_lse" in begin) is (given[1] is not None)


@pytest.fixture
def deterministic():
    """Says whether algorithms are to be deterministic."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("what", BACKWARD.values(), ids=BACKWARD)
def test_backward_follows_its_tensors(gpu, deterministic, what):
    calls = [backward_call(**what) for _ in range(6)]
    run, kept = backward.backward.prepare(*calls[0]), []
    for number, given in enumerate([*calls, *calls]):
        ordered = number % 4 >= 2
        deterministic(ordered)
        results = run(*given)
        launched = [each for each in gpu.launched() if each[0] in "bme"]
        assert [name for name, _ in launched] == ["b", "m", "e"]
        check_backward(launched, given, results, ordered)
        if what.get("mask") == LENGTHS:
            assert launched[1][1]["lengths"] == given[7][0].data_ptr()
        kept.append(results)
    assert len({x.data_ptr() for results in kept for x in results}) == 4 * len(kept)


def test_results_of_backward_have_the_layout_that_was_asked_for(gpu):
    for inside in (False, True):
        given = backward_call(out_is_bshd=inside)
        run = backward.backward.prepare(*given)
        for results in (run(*given), run(*given)):
            for x, like in zip(results[:3], given[2:5], strict=True):
                assert (x.shape, x.dtype) == (like.shape, like.dtype)
                assert (x.transpose(1, 2) if inside else x).is_contiguous()
            assert (results[3].shape, results[3].dtype) == (given[6].shape, torch.float32)
            assert results[3].is_contiguous()


def moved(x):
    """The same sizes and strides, two bytes further than a multiple of sixteen."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


@pytest.mark.parametrize("which", [0, 2, 3, 4])
def test_what_tma_cannot_read_is_copied_for_that_call_alone(gpu, which):
    name = {0: "gradient", 2: "q", 3: "k", 4: "v"}[which]
    calls = [backward_call() for _ in range(6)]
    run = backward.backward.prepare(*calls[0])
    for number, given in enumerate(calls):
        given = [moved(x) if number % 2 and i == which else x for i, x in enumerate(given)]
        run(*given)
        (main,) = [addresses for letter, addresses in gpu.launched() if letter == "m"]
        assert main[name] % 16 == 0
        assert (main[name] == given[which].data_ptr()) is (number % 2 == 0)
