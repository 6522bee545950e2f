"""Graphs on a CUDA device, compiled and compared with eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import opkit
from opkit.compiler import graph_cache
from opkit.compiler.capture.patterns import cross_entropy as patterns_cross_entropy
from opkit.compiler.run.plan import GpuLaunch

pytestmark = pytest.mark.gpu


def r(*shape, **options):
    return torch.randn(shape, device="cuda", **options)


def compiled(function, dynamic=False):
    torch._dynamo.reset()
    return torch.compile(function, backend="opkit", options={"strict": True}, dynamic=dynamic)


def block(x, w1, w2, gain, bias):
    y = F.layer_norm(x, (x.shape[-1],), gain, bias)
    return x + F.gelu(y @ w1) @ w2


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def attention_by_hand(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) / 8
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~causal, torch.finfo(q.dtype).min) + 5 * mask
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


def image(x, w, gain, bias):
    y = F.conv2d(x, w, padding=1)
    return F.relu(F.batch_norm(y, None, None, gain, bias, training=True)).mean((2, 3))


def cross_entropy(x, w, labels):
    return F.cross_entropy((x @ w).float(), labels)


CASES = {
    "chain": (lambda x, y: torch.relu(x * y + 1) * torch.sigmoid(x), lambda: [r(33, 1000), r(1000)]),
    "linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), lambda: [r(64, 128), r(256, 128), r(256)]),
    "batched product": (lambda x, y: torch.baddbmm(x[:, :, :64], x, y), lambda: [r(3, 50, 70), r(3, 70, 64)]),
    "softmax": (lambda x: torch.softmax(x, -1), lambda: [r(70, 513)]),
    "long rows": (lambda x: torch.softmax(x, -1), lambda: [r(9, 40_000)]),
    "columns": (lambda x: x.sum(0), lambda: [r(5000, 300)]),
    "all": (lambda x: (x * x).mean(), lambda: [r(700, 301)]),
    "norm": (lambda x, g, b: F.layer_norm(x, (300,), g, b), lambda: [r(50, 300), r(300), r(300)]),
    "block": (block, lambda: [r(4, 32, 64), r(64, 256), r(256, 64), r(64), r(64)]),
    "attention": (attention, lambda: [r(2, 4, 128, 64) for _ in range(3)]),
    "attention by hand": (attention_by_hand, lambda: [*(r(2, 4, 128, 64) for _ in range(3)), r(128, 128)]),
    "image": (image, lambda: [r(4, 16, 20, 20), r(32, 16, 3, 3), r(32), r(32)]),
    "transpose": (lambda x: x.transpose(0, 2).contiguous() * 2, lambda: [r(30, 40, 50)]),
    "cat": (lambda x, y: torch.cat([x, y], 1).relu(), lambda: [r(7, 40), r(7, 33)]),
    "var": (lambda x: x.var(1), lambda: [r(40, 333)]),
    "cumsum": (lambda x: x.cumsum(1), lambda: [r(20, 50)]),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 0)).exp(), lambda: [r(20, 30)]),
    "group norm": (lambda x, g, b: F.group_norm(x, 4, g, b), lambda: [r(2, 16, 9, 9), r(16), r(16)]),
    "padded rows": (lambda x, w: F.log_softmax(x @ w.t(), -1), lambda: [r(300, 64), r(1027, 64)]),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, padding=1), lambda: [r(2, 8, 33, 33)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    function, arguments = CASES[name]
    torch.manual_seed(0)
    args = [a.to(dtype).requires_grad_() for a in arguments()]
    found, expected = compiled(function)(*args), function(*args)
    wide = [a.detach().double().requires_grad_() for a in args]
    exact = function(*wide)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((found * weights).sum(), args)
    eager = torch.autograd.grad((expected * weights).sum(), args)
    exact_gradients = torch.autograd.grad((exact * weights.double()).sum(), wide)
    assert found.stride() == expected.stride()
    if name != "attention by hand":  # its gradients are laid out as those of torch's function for attention
        assert [g.stride() for g in gradients] == [g.stride() for g in eager]
    for a, b, c in zip([found, *gradients], [expected, *eager], [exact, *exact_gradients], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        scale = c.abs().max() + 1e-30
        error, eager_error = (a.double() - c).abs().max() / scale, (b.double() - c).abs().max() / scale
        assert error <= 3 * eager_error + torch.finfo(dtype).eps * 4, (error, eager_error)


class Residual(nn.Module):
    """Convolutions with batch norm, of which some are added, and a linear layer with an activation."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second, self.third, self.shortcut = (
            nn.Sequential(nn.Conv2d(i, o, k, padding=k // 2, bias=k == 3), nn.BatchNorm2d(o))
            for i, o, k in ((16, 32, 1), (32, 32, 3), (32, 64, 1), (16, 64, 1))
        )
        self.again = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(64, 128), activation)

    def forward(self, x):
        y = (self.third(self.second(self.first(x).relu()).relu()) + self.shortcut(x)).relu()
        return self.head((self.again(y) + y).relu().mean((2, 3)))


class WrittenGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU("tanh"), WrittenGELU()])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_convolutions_and_products_with_what_follows_them(dtype, layout, activation):
    torch.manual_seed(0)
    model = Residual(activation).cuda()
    with torch.no_grad():
        for _ in range(4):
            model(r(8, 16, 15, 15) + 1)
        model, x = model.eval().to(dtype), r(8, 16, 15, 15).to(dtype).to(memory_format=layout)
        found, explained = compiled(model)(x), opkit.explain(model, x).graphs[0]
        expected, exact = model(x), copy.deepcopy(model).double()(x.double())
    calls = [call.split(",")[0] for call in explained.calls]
    product = "aten.mm.default" if dtype == torch.float32 else "aten._addmm_activation.default"
    assert calls[-1].startswith(product)
    assert [call.startswith("aten.cudnn_convolution") for call in calls[:-1]] == [True, True, False, True, True]
    error, eager_error = ((y.double() - exact).norm() / exact.norm() for y in (found, expected))
    assert error <= 1.5 * eager_error + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_convolution_keeps_nan_and_does_not_read_its_result(dtype):
    """Memory that was freed holds NaN, which a result that is multiplied by 0 would take over."""
    x, w = (r(*shape).to(dtype).to(memory_format=torch.channels_last) for shape in ((4, 32, 14, 14), (64, 32, 3, 3)))
    x[0, 0, 7, 7] = torch.nan
    function = compiled(lambda x, w: F.conv2d(x, w, padding=1).relu())
    freed = [torch.full((4, 64, 14, 14), torch.nan, device="cuda", dtype=dtype) for _ in range(20)]
    del freed
    with torch.no_grad():
        found = function(x, w)
    assert torch.equal(found.isnan(), F.conv2d(x, w, padding=1).relu().isnan())


def test_a_norm_that_changes_after_a_call():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).cuda().eval()
    function, x = compiled(model), r(2, 8, 9, 9)
    with torch.no_grad():
        for _ in range(3):
            expected = model(x)
            error = (function(x) - expected).norm()
            assert error <= 1e-2 * expected.norm()  # in TF32, of which single elements lose more
            model[1].running_mean.normal_()
            model[1].weight.normal_()
            model[0].weight.normal_()


def test_embedding_and_cross_entropy():
    torch.manual_seed(0)
    table, w = r(100, 32, requires_grad=True), r(32, 100, requires_grad=True)
    tokens = torch.randint(0, 100, (4, 50), device="cuda")

    def loss(table, w):
        return cross_entropy(F.embedding(tokens, table).flatten(0, 1), w, tokens.flatten())

    found = torch.autograd.grad(compiled(loss)(table, w), (table, w))
    torch.testing.assert_close(found, torch.autograd.grad(loss(table, w), (table, w)))


def test_dropout_is_the_same_in_the_backward():
    x = torch.ones(1000, device="cuda", requires_grad=True)
    f = compiled(lambda x: F.dropout(x, 0.3))
    y = f(x)
    assert 200 < (y == 0).sum() < 400
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    torch.manual_seed(5)
    first = f(x)
    torch.manual_seed(5)
    assert torch.equal(f(x), first)
    assert not torch.equal(f(x), first)


def test_sizes_that_change():
    f = compiled(lambda x, w: torch.softmax(x @ w, -1).sum(0), dynamic=True)
    for rows in (5, 40, 700):
        x, w = r(rows, 16), r(16, rows + 3)
        torch.testing.assert_close(f(x, w), torch.softmax(x @ w, -1).sum(0))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_floats_that_change():
    counters.clear()
    f = compiled(lambda x, s: torch.renorm(F.leaky_relu(x, s * 0.5), 2, 0, s + 1) * s, dynamic=True)
    for s in (0.5, 0.7, 0.9):
        x = r(30, 40).requires_grad_()
        expected = torch.renorm(F.leaky_relu(x, s * 0.5), 2, 0, s + 1) * s
        torch.cuda.set_sync_debug_mode(
            "error" if s > 0.5 else "default"
        )  # after the first call, nothing waits for the GPU
        try:
            found = f(x, s)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found, expected)
        pairs = [torch.autograd.grad(y.sum(), x) for y in (found, expected)]
        torch.testing.assert_close(*pairs)
    assert counters["stats"]["unique_graphs"] == 1


def test_an_input_that_is_written_and_one_at_an_odd_address():
    def step(x, y):
        x.add_(y * 2)
        return x.sum()

    f = compiled(step)
    for offset in (0, 1):
        x, y = r(1001)[offset : 1000 + offset], r(1001)[offset : 1000 + offset]
        expected = x + y * 2
        torch.testing.assert_close(f(x, y), expected.sum())
        torch.testing.assert_close(x, expected)


def test_as_strided_reads_the_gaps_of_a_copy_at_an_odd_address():
    def function(x):
        x.t().copy_(x.t())
        return x.as_strided((x.numel(),), (1,)).float()

    x, y = ((torch.arange(88, device="cuda").view(11, 8) % 3 == 0)[1::2] for _ in range(2))
    assert torch.equal(compiled(function)(x), function(y))


def test_constants_and_numbers_of_the_cpu():
    f = compiled(lambda x: x * torch.tensor(2.0) + torch.arange(4, device="cuda"))
    x = r(3, 4)
    torch.testing.assert_close(f(x), x * 2 + torch.arange(4, device="cuda"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_positions_and_masks_that_are_made_on_the_cpu(seen, dynamic):
    def function(x, table):
        n = x.shape[0]
        positions = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        return x * (1 - torch.eye(n).to(x.device)) + table[positions + n - 1] * torch.arange(n).float().cuda()

    x, table = r(9, 9, requires_grad=True), r(17, requires_grad=True)
    found, expected = compiled(function, dynamic)(x, table), function(x, table)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(each, [x, table], grad) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert all(isinstance(step, GpuLaunch) for graph in seen for step in graph.plan.steps)


def test_constants_that_are_found_on_the_disk_are_on_the_device(cache, monkeypatch):
    def function(x):
        return x * torch.as_tensor((1.0, 2.0, 3.0, 4.0), dtype=x.dtype, device=x.device)

    found, find = [], graph_cache.find
    monkeypatch.setattr(graph_cache, "find", lambda entry: found.append(find(entry)) or found[-1])
    x = r(100, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(function)(x), function(x), rtol=0, atol=0)
    cold, warm = found
    assert cold is None
    # kernels of some GPUs can read the memory of the CPU, so that the result alone does not show where a constant is
    assert [t.device for build in warm.builds for t in build.constants.tensors.values()] == [x.device]


@opkit.custom_op("test_cuda::scaled")
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.tanh(x) * by


@scaled.register_kernel("cpu")
def _(x, by):
    return torch.tanh(x) * by


def test_an_operator_without_a_kernel_for_the_device_fuses():
    x = r(100)
    explanation = opkit.explain(lambda x: scaled(x + 1, 2.0).relu(), x)
    torch.testing.assert_close(explanation.result, (torch.tanh(x + 1) * 2).relu())
    assert explanation.kernels == 1


def test_streams():
    f = compiled(lambda x: (x @ x).relu().sum(1))
    x, side = r(256, 256), torch.cuda.Stream()
    expected = f(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = [f(x) for _ in range(3)]
    side.synchronize()
    assert all(torch.equal(each, expected) for each in found)


def test_training_a_small_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)).cuda()
    other = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4)).cuda()
    other.load_state_dict(model.state_dict())
    run = compiled(model)
    for each, call in ((model, run), (other, other)):
        torch.manual_seed(1)
        optimiser = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(5):
            loss = F.cross_entropy(call(r(16, 32)), torch.arange(16, device="cuda") % 4)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_an_index_out_of_range_is_an_error():
    code = """
import torch
f = torch.compile(lambda x, i: x[i] * 2, backend="opkit", options={"strict": True})
f(torch.ones(4, device="cuda"), torch.tensor([1, 9], device="cuda"))
torch.cuda.synchronize()
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode
    assert "device-side assert" in done.stderr


def test_rows_of_attention_by_hand_that_are_masked_throughout():
    def attend(q, k, v, seen, number):
        weights = (q @ k.mT).masked_fill(~seen, number).softmax(-1)
        return weights @ v

    seen = torch.arange(128, device="cuda") < torch.tensor([0, 9], device="cuda")[:, None, None, None]
    args = [r(2, 4, 128, 64).requires_grad_() for _ in range(3)]
    for number in (-1e9, float("-inf")):
        explanation = opkit.explain(attend, *args, seen, number)
        assert [note.split(" at ")[0] for note in explanation.patterns] == ["replaced attention"]
        expected = attend(*args, seen, number)
        torch.testing.assert_close(explanation.result, expected, equal_nan=True, atol=1e-3, rtol=1e-3)
        found = torch.compile(attend, backend="opkit")(*args, seen, number)
        gradients = [torch.autograd.grad(out[1].square().sum(), args) for out in (found, expected)]
        torch.testing.assert_close(gradients[0][2], gradients[1][2], equal_nan=True, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_in_chunks(dtype, monkeypatch):
    monkeypatch.setattr(patterns_cross_entropy, "MIN_LOGITS", 4)
    torch.manual_seed(0)
    labels = torch.randint(0, 3000, (4096,), device="cuda")
    labels[:100] = -100

    def loss(x, w):
        return F.cross_entropy(F.linear(x, w).float(), labels)

    args = [r(4096, 64).to(dtype).requires_grad_(), r(3000, 64).to(dtype).requires_grad_()]
    assert opkit.explain(loss, *args).patterns == ["replaced cross-entropy at cross_entropy"]
    found, expected = compiled(loss)(*args), loss(*args)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for a, b in zip(torch.autograd.grad(found, args), torch.autograd.grad(expected, args), strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


def test_explain_times_kernels_and_calls():
    width = 64
    args = r(32, width), r(width, width), r(width, width), r(width), r(width)
    found = opkit.explain(block, *args)
    found.measure()
    assert not found.not_measured
    (graph,) = found.graphs
    assert len(graph.steps) > sum(step.kernel is not None for step in graph.steps) >= 2
    assert all(0 < step.seconds < 1 for step in graph.steps)
    assert found.peaks.dtype == torch.bfloat16
