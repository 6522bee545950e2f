"""On a GPU: CUDA graphs that replay forward and backward with new data, and the same bits in every run."""

import contextlib

import pytest
import torch

import opkit
from opkit.attn import gradients
from opkit.attn.operator import attention_operator
from opkit.masks import Causal, Dense, KeyPadding, Segments, SlidingWindow
from opkit.op.forcing import use_kernel

pytestmark = pytest.mark.gpu

BATCH, HEADS, SHARED, LENGTH, HEAD = 2, 8, 4, 700, 64
MASKS = {
    "no mask": lambda data: None,
    "causal": lambda data: Causal(),
    "a window and lengths": lambda data: SlidingWindow(100, 20) & KeyPadding(data["lengths"]),
    "causal documents": lambda data: Causal() & Segments(data["documents"]),
    "bools": lambda data: Dense(data["seen"]),
}


def given(seed, dtype=torch.bfloat16, length=LENGTH):
    """A call's tensors by name; documents and lengths are others for another seed."""
    random = torch.Generator("cuda").manual_seed(seed)
    shapes = {"q": (HEADS, HEAD), "k": (SHARED, HEAD), "v": (SHARED, HEAD), "gradient": (HEADS, HEAD)}
    found = {
        name: torch.randn(BATCH, heads, length, head, generator=random, device="cuda").to(dtype)
        for name, (heads, head) in shapes.items()
    }
    drawn = torch.rand(BATCH, length, generator=random, device="cuda")
    found["documents"] = (drawn > 0.99).cumsum(1).int()
    found["lengths"] = torch.randint(0, length, (BATCH,), generator=random, device="cuda").int()
    found["seen"] = torch.rand(length, length, generator=random, device="cuda") > 0.3
    return found


@contextlib.contextmanager
def portable():
    """The portable kernels, which sum in one order only."""
    with (
        use_kernel(attention_operator(), "triton"),
        use_kernel(gradients.backward_operator(), "triton"),
        torch.autograd.set_multithreading_enabled(False),  # what is forced is so in this thread
    ):
        yield


@contextlib.contextmanager
def chosen():
    """The kernels that calls get, with ordered sums."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[portable, chosen], ids=["portable", "chosen"], autouse=True)
def kernels(request):
    with request.param():
        yield


def step(mask, data, **how):
    """The result, the log-sum-exp and the gradients."""
    leaves = [data[name].detach().requires_grad_() for name in "qkv"]
    made = MASKS[mask](data)
    out, lse = opkit.attention(*leaves, mask=made, return_lse=True, **how)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, data["gradient"])


def captured(mask, data, **how):
    """A graph of :func:`step`, and what it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(mask, data, **how)  # what is compiled and noted with the first call
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(mask, data, **how)
    return graph, found


def same(found, expected):
    return all(torch.equal(mine, right) for mine, right in zip(found, expected, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS)
def test_a_graph_replays_with_new_data(mask):
    held, others = given(0), [given(1), given(2), given(0)]
    graph, found = captured(mask, held)
    for other in others:
        for name, value in other.items():
            held[name].copy_(value)
        graph.replay()
        assert same(found, step(mask, other))


def test_dropout_draws_anew_in_every_replay():
    held = given(0)
    graph, found = captured("causal", held, dropout_p=0.5)
    graph.replay()
    before = [x.clone() for x in found]
    graph.replay()
    assert torch.equal(before[1], found[1])  # of the log-sum-exp nothing is dropped
    assert not any(torch.equal(x, y) for i, (x, y) in enumerate(zip(before, found, strict=True)) if i != 1)


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_run_gives_the_same_bits(mask, dtype):
    data = given(0, dtype, 1500)
    first = step(mask, data)
    assert all(same(step(mask, data), first) for _ in range(10))


def test_compiled_calls_of_other_packed_sequences():
    """The numbers of sequences lie in the same memory in each call, and in a recorded one."""

    def packed(x, bounds):
        for _ in range(3):
            x = torch.nn.functional.layer_norm(
                x + opkit.attention(x, x, x, mask=opkit.masks.VarLen(bounds), layout="thd"), (HEAD,)
            )
        return x

    x = torch.randn(3000, HEADS, HEAD, device="cuda", dtype=torch.bfloat16)
    for graphs in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(packed, backend="opkit", options={"cuda_graphs": graphs, "strict": True})
        for middle in (1000, 10, 2900, 1500, 500, 2000):
            bounds = torch.tensor([0, middle, 3000], device="cuda", dtype=torch.int32)
            with torch.inference_mode():
                torch.testing.assert_close(compiled(x, bounds), packed(x, bounds), rtol=2e-2, atol=2e-2)
