"""What the decoding kernels are launched with, call after call, of which only the tensors move. The driver is a fake."""

import launched_kernels
import pytest
import torch
from launched_kernels import found_at

from opkit.attn.calls import PagedCall
from opkit.attn.gpu.decode import decoding, launches, paged
from opkit.attn.masks import program
from opkit.op.triton.launch import PreparedSeries

fake_libraries, fake, fake_h200 = launched_kernels.fake_libraries, launched_kernels.fake, launched_kernels.fake_h200
HEADS, KEYS, HEAD = 4, 3000, 64


@pytest.fixture
def gpu(fake_h200):
    for each in (launches._kernel, launches._merging):
        each.cache_clear()
    yield fake_h200
    for each in (launches._kernel, launches._merging):
        each.cache_clear()


def empty(*sizes, dtype=torch.bfloat16):
    return torch.empty(*sizes, dtype=dtype)


def dense_call(keys=KEYS, sinks=False):
    q, k, v = (empty(2, heads, n, HEAD) for heads, n in ((HEADS, 1), (2, keys), (2, keys)))
    return (q, k, v, [], [], torch.zeros(HEADS) if sinks else None, None, [], [], 0.1, 0.0, 0.0, False)


def paged_call(scaled=False):
    pages = [torch.zeros(40, 16, 2, HEAD, dtype=torch.int8 if scaled else torch.bfloat16) for _ in range(2)]
    scales = [torch.ones(40, 16, 2) if scaled else None for _ in range(2)]
    table, lengths = torch.arange(40, dtype=torch.int32).view(2, 20), torch.tensor([300, 320], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    far = program.UNLIMITED
    return PagedCall(
        empty(2, HEADS, HEAD), *pages, table, lengths, starts, -far, far, 0.1, 0.0, None, *scales, [], [], [], []
    )


CASES = {
    "in splits": (decoding.decode, dense_call, "dj", ("q", "k", "v")),
    "in splits, sinks": (decoding.decode, lambda: dense_call(sinks=True), "dj", ("q", "k", "v")),
    "whole": (decoding.decode, lambda: dense_call(keys=40), "d", ("q", "k", "v")),
    "pages": (paged.paged, paged_call, None, ("q", "k", "v", "table", "lengths", "starts")),
    "pages with scales": (paged.paged, lambda: paged_call(True), None, ("q", "k", "v", "table", "lengths", "starts")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_launches_follow_their_tensors(gpu, case, monkeypatch):
    kernel, make, letters, names = case
    one_by_one, slow = PreparedSeries._one_by_one, []
    monkeypatch.setattr(PreparedSeries, "_one_by_one", lambda *given: [slow.append(0), one_by_one(*given)][1])
    calls = [make() for _ in range(3)]
    run, kept = kernel.prepare(*calls[0]), []
    for given in [*calls, *calls]:
        results = run(*given)
        launched = gpu.launched()
        assert letters in (None, "".join(letter for letter, _ in launched))
        at = found_at(given, names) | found_at(results, ("out", "lse"))
        assert len({*at.values()}) == len(at)
        for letter, addresses in launched:
            for name in at.keys() & addresses.keys():
                assert addresses[name] == at[name], (letter, name)
        check_others(given, launched, at)
        kept.append(results)
    assert len({x.data_ptr() for results in kept for x in results}) == 2 * len(kept)
    assert len(slow) == 1  # the first call; later ones are made by one call


def check_others(given, launched, at):
    """Sinks and what is merged: kernels have the log-sum-exp by these names where there are none."""
    (_, decode), *merge = launched
    sinks = given[5] if not isinstance(given, PagedCall) else given.sinks
    assert decode["sinks"] == (at["lse"] if sinks is None else sinks.data_ptr())
    if merge:
        ((_, merged),) = merge
        assert merged["partial"] == decode["partial"]
        assert decode["partial"] not in at.values()
        assert merged["sinks"] == decode["sinks"]
    else:
        assert decode["partial"] == at["lse"]
