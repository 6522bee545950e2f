"""Calls of compiled graphs that are recorded as CUDA graphs: each call is compared with eager mode."""

from __future__ import annotations

import copy
import itertools
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit
from opkit.compiler.run import cuda_graphs

pytestmark = pytest.mark.gpu
ON_REQUEST = {"cuda_graphs": True, "strict": True}


def r(*shape, **options):
    return torch.randn(shape, device="cuda", **options)


@pytest.fixture
def replays(monkeypatch):
    """The names of the graphs that are replayed, in order; how long kernels take does not decide."""
    monkeypatch.setattr(cuda_graphs, "MAX_WAITING", math.inf)
    found = []
    replayed = cuda_graphs.RecordedRunner._replayed

    def counted(self, *args):
        found.append(self.plan.name)
        return replayed(self, *args)

    monkeypatch.setattr(cuda_graphs.RecordedRunner, "_replayed", counted)
    torch._dynamo.reset()
    return found


def network():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    return nn.Sequential(*layers, nn.Linear(64, 10)).cuda()


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_inference_is_replayed_and_results_are_the_callers(replays):
    model = network().eval().requires_grad_(False)
    compiled = torch.compile(model, backend="opkit", options={"strict": True})
    inputs = [r(32, 64) for _ in range(6)]
    results = [compiled(x) for x in inputs]
    for x, y in zip(inputs, results, strict=True):
        close(y, model(x))
    assert len(replays) >= 3
    model[0].weight.mul_(2)
    close(compiled(inputs[0]), model(inputs[0]))


def test_training(replays):
    model, other = network(), network()
    compiled = torch.compile(model, backend="opkit", options={"strict": True})
    one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    for _ in range(10):
        x, labels = r(32, 64), torch.randint(0, 10, (32,), device="cuda")
        for m, optimizer in ((compiled, one), (other, two)):
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), labels)
            loss.backward()
            optimizer.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            close(p, q)
    assert {name.split()[0] for name in replays} == {"forward", "backward"}
    assert len(replays) > 8


def test_joined_parts_are_one_recording_for_each_direction(replays):
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="opkit", options={"strict": True, "repeated_blocks": True})
    for _ in range(10):
        x = r(32, 64)
        for each in (compiled, other):
            each.zero_grad()
            each(x).square().mean().backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            close(p.grad, q.grad)
    assert sorted(name.split()[0] for name in {*replays}) == ["backward", "forward"]


def test_calls_that_wait_for_their_kernels_are_not_recorded(replays, monkeypatch, caplog):
    monkeypatch.setattr(cuda_graphs, "MAX_WAITING", 0)
    compiled = torch.compile(network().requires_grad_(False), backend="opkit")
    with caplog.at_level(logging.INFO, "opkit.compiler"):
        for _ in range(8):
            compiled(r(32, 64))
    assert not replays
    assert "its kernels take" in caplog.text


def test_one_slow_call_does_not_prevent_a_recording(replays, monkeypatch):
    compiled = torch.compile(network().requires_grad_(False), backend="opkit")
    monkeypatch.setattr(cuda_graphs, "MAX_WAITING", 0)  # as if another process used the GPU
    for _ in range(3):
        compiled(r(32, 64))
    monkeypatch.setattr(cuda_graphs, "MAX_WAITING", math.inf)
    for _ in range(3):
        compiled(r(32, 64))
    assert replays


def test_tensors_that_somebody_holds_are_not_overwritten(replays):
    model = network()
    compiled = torch.compile(model, backend="opkit", options=ON_REQUEST)
    for _ in range(8):
        compiled(r(32, 64)).sum().backward()
        model.zero_grad()
    assert any("backward" in name for name in replays)
    inputs = [r(32, 64) for _ in range(3)]
    results = [compiled(x) for x in inputs]  # three forwards, then their backwards
    for y in results:
        y.sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    kept = [p.grad for p in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        compiled(r(32, 64)).sum().backward()
    for k, f in zip(kept, found, strict=True):
        assert torch.equal(k, f)
    model.zero_grad()
    for x in inputs:
        model(x).sum().backward()
    for p, f in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(p.grad, f, rtol=1e-3, atol=1e-3)


def test_inputs_that_move_are_copied(replays):
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="opkit", options=ON_REQUEST)
    held = []
    for _ in range(12):
        held.append(r(64, 100))
        close(compiled(held[-1]), torch.softmax(held[-1], -1))
    assert replays


def test_buffers_that_a_graph_writes_to(replays):
    model = nn.BatchNorm1d(64).cuda()
    other = nn.BatchNorm1d(64).cuda()
    compiled = torch.compile(model, backend="opkit", options=ON_REQUEST)
    for _ in range(6):
        x = r(32, 64)
        close(compiled(x), other(x))
        close(model.running_mean, other.running_mean)
    assert replays


def test_an_input_that_is_written_to_and_always_moves_is_refused(replays, caplog):
    compiled = torch.compile(lambda x: x.mul_(2), backend="opkit", options=ON_REQUEST)
    held = []
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        for _ in range(10):
            x = r(100)
            held.append(x.clone())
            held.append(x)
            assert torch.equal(compiled(x), held[-2] * 2)
    assert not replays
    assert caplog.text.count("the addresses of its inputs change too often") == 1


@pytest.mark.parametrize("tokens", [30, 4])
def test_a_cache_that_moves_is_recorded_anew_while_that_pays(replays, caplog, tokens):
    """As when each text has a cache of its own."""

    def step(x, cache, at):
        cache.index_copy_(1, at, x)
        return (cache * 2).sum(1)

    compiled = torch.compile(step, backend="opkit", options=ON_REQUEST)
    held = []
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        for _ in range(8):
            caches = [torch.zeros(2, 32, 16, device="cuda") for _ in range(2)]
            held += caches
            for n in range(tokens):
                x, at = r(2, 1, 16), torch.tensor([n], device="cuda")
                close(compiled(x, caches[0], at), step(x, caches[1], at))
                assert torch.equal(*caches)
    if tokens == 30:
        assert len(replays) >= 8 * 28
        assert not caplog.text
    else:
        assert 0 < len(replays) < 8
        assert "change too often" in caplog.text


def test_a_recording_is_of_the_kernels_that_are_forced(replays):
    q, k = r(3, 8, 1, 64, dtype=torch.bfloat16), r(3, 2, 600, 64, dtype=torch.bfloat16)

    def attend(q, k):
        for _ in range(6):
            q = opkit.attention(q * 2, k, k)
        return q

    compiled = torch.compile(attend, backend="opkit", options={"strict": True})
    for _ in range(5):
        q.normal_()
        assert torch.equal(compiled(q, k), attend(q, k))
    for _ in range(5):
        with opkit.batch_invariant():
            assert torch.equal(compiled(q, k), attend(q, k))
    assert len(replays) >= 4


PAGE, ROOM, BATCH = 16, 40, 5  # keys of a page, pages of a sequence at most, and sequences


def attend(x, caches, table, before):
    """Layers of attention to pages, without roundings in which compiled code may differ from eager mode."""
    for keys, values, k_scale, v_scale in caches:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        opkit.append_kv(x[:, :2] * 2, x[:, 2:4] * -2, keys, values, table, before, **scales)
        x = opkit.paged_attention(x, keys, values, table, before + 1, **scales)
    return x


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("dtype", "pages"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.int8),
        (torch.float16, torch.float8_e4m3fn),
        (torch.float64, torch.float64),  # the reference
    ],
    ids=str,
)
def test_steps_of_decoding_with_other_lengths_and_pages(replays, dtype, pages, in_place):
    """By default: what is recorded has the sizes alone, and reads lengths and page tables in each replay."""
    torch.manual_seed(0)
    count = BATCH * ROOM + 1

    def cache():
        scale = torch.ones(count, PAGE, 2, device="cuda") if pages.itemsize == 1 else None
        new = torch.zeros(2, count, PAGE, 2, 64, device="cuda").to(pages)
        return (*new, scale, None if scale is None else scale.clone())

    caches = [cache() for _ in range(4)]
    others = [tuple(None if x is None else x.clone() for x in each) for each in caches]
    compiled = torch.compile(attend, backend="opkit", options={"strict": True})
    x = torch.empty(BATCH, 8, 64, device="cuda", dtype=dtype)
    table = torch.empty(BATCH, ROOM, device="cuda", dtype=torch.int32)
    before = torch.empty(BATCH, device="cuda", dtype=torch.int32)
    lengths, held = torch.tensor([0, 1, 15, 16, 600]), []
    numbers = torch.randperm(count)[: BATCH * ROOM].view(BATCH, ROOM)

    def check():
        nonlocal x, table, before
        if not in_place:
            held.extend([x, table, before])  # so that new ones are elsewhere
            x, table, before = (torch.empty_like(each) for each in (x, table, before))
        x.normal_()
        table.copy_(numbers)
        before.copy_(lengths)
        with torch.no_grad():
            assert torch.equal(compiled(x, caches, table, before), attend(x, others, table, before))
        for one, other in zip(caches, others, strict=True):
            for a, b in zip(one, other, strict=True):
                assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        lengths.add_(1)

    for number in range(24):
        if number % 5 == 4:  # a sequence ends, and another one takes its place with pages in another order
            row = number // 5
            lengths[row] = (37 * number) % (ROOM * PAGE - 24)
            numbers[row] = numbers[row][torch.randperm(ROOM)]
        if number == 13:
            numbers, lengths = numbers.flip(0), lengths.flip(0)
        check()
    assert len(replays) >= 20
    if dtype in (torch.bfloat16, torch.float32) and pages == dtype:
        for _ in range(5):  # what was recorded calls other kernels
            with opkit.batch_invariant():
                check()
        check()


def test_random_numbers_differ_from_call_to_call(replays):
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="opkit", options=ON_REQUEST)
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(1)
    first = [compiled(x) for _ in range(6)]
    assert len(replays) >= 3
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(first))
    torch.manual_seed(1)
    again = [compiled(x) for _ in range(6)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_each_size_on_request(replays):
    compiled = torch.compile(lambda x: (x * 2).sum(0), backend="opkit", options=ON_REQUEST, dynamic=True)
    for _ in range(5):
        for n in (5, 7, 9):
            x = r(n, 30)
            close(compiled(x), (x * 2).sum(0))
    assert len(replays) >= 6


def test_reasons_are_in_the_log(replays, caplog):
    with caplog.at_level(logging.INFO, "opkit.compiler"):
        torch.compile(lambda x: x[: int(x.sum().item())], backend="opkit", options={"cuda_graphs": True})(
            torch.ones(4, device="cuda")
        )
        torch._dynamo.reset()
        torch.compile(lambda x: x * 2, backend="opkit", dynamic=True)(r(5))
        torch._dynamo.reset()
        torch.compile(lambda x: x * 2, backend="opkit")(r(5))
        torch._dynamo.reset()
        wide = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.GELU())], nn.Linear(8, 4096))
        torch.compile(wide.cuda().requires_grad_(False), backend="opkit")(r(4096, 8))
    for reason in ("its sizes may change", "fewer than 8 steps", "would be copied in each call"):
        assert reason in caplog.text


def test_a_capture_that_fails_leaves_torch_as_it_was(replays, caplog):
    @opkit.custom_op("test_cuda_graphs::reads")
    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @reads.register_kernel("cuda")
    def _(x):
        return x * (2 if float(x.sum()) < 1e30 else 3)  # reads memory on the host

    compiled = torch.compile(lambda x: F.dropout(reads(x) + 1, 0.5), backend="opkit", options={"cuda_graphs": True})
    with caplog.at_level(logging.WARNING, "opkit.compiler"):
        for _ in range(5):
            found = compiled(torch.ones(100, device="cuda"))
            assert set(found.tolist()) == {0.0, 6.0}
    assert not replays
    assert "is not recorded as a CUDA graph" in caplog.text
    assert torch.rand(10, device="cuda").max() < 1
    torch.cuda.synchronize()


def test_streams_have_recordings_of_their_own(replays):
    compiled = torch.compile(lambda x: (x @ x).relu(), backend="opkit", options=ON_REQUEST)
    x = r(64, 64)
    torch.cuda.synchronize()
    for stream in [torch.cuda.current_stream(), torch.cuda.Stream()]:
        with torch.cuda.stream(stream):
            for _ in range(5):
                close(compiled(x), (x @ x).relu())
    assert len(replays) >= 5


def test_a_call_within_a_capture_of_the_users(replays):
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="opkit", options=ON_REQUEST)
    x = r(100)
    for _ in range(5):
        compiled(x)
    count, graph = len(replays), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x)
    x.copy_(r(100))
    graph.replay()
    close(y, torch.sin(x) + 1)
    assert len(replays) == count


def test_saved_tensors_outlive_the_replay_of_another_graph(replays):
    def score(x):
        return torch.sort(x * 2, dim=-1)[0].flatten(1)[:, ::3].sum(-1)

    def loss(x, w):
        return (torch.sort(x.sin(), dim=-1)[0] * w).sum()

    x, w = (r(64, 1024, requires_grad=True) for _ in range(2))
    other, saving = (torch.compile(f, backend="opkit", options=ON_REQUEST) for f in (score, loss))
    with torch.no_grad():
        for _ in range(4):
            other(x)  # recorded first: what it sorts is in memory that is free then
    for _ in range(8):
        x.grad = w.grad = None
        found = saving(x, w)
        with torch.no_grad():
            close(other(x), score(x))
        found.backward()
        close(torch.stack([x.grad, w.grad]), torch.stack(torch.autograd.grad(loss(x, w), (x, w))))
    assert {name.split()[0] for name in replays} == {"inference", "forward", "backward"}


def test_recordings_outlive_the_workspaces_of_cublas(replays):
    """Inductor releases these workspaces around its own recordings; their memory is then anybody's."""
    model = network().bfloat16().requires_grad_(False)
    compiled = torch.compile(model, backend="opkit", options=ON_REQUEST)
    x = r(32, 64, dtype=torch.bfloat16)
    expected = [compiled(x) for _ in range(4)][-1]
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), 7.0, device="cuda") for _ in range(64)]
    count = len(replays)
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
    assert len(replays) == count + 1
    assert all((each == 7).all() for each in others)
