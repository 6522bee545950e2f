"""What models write by hand, and the functions that replace it in Dynamo's graphs."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import opkit
from opkit.compiler.capture.patterns import cross_entropy
from opkit.compiler.capture.patterns.table import replace_patterns

N, D = 256, 16  # enough keys for the CPU's kernel


def notes_and_graph(function, *args, dynamic=False):
    """What the patterns say about the graph of a function, and its nodes afterwards; its results are compared with eager's."""
    notes, nodes = [], []

    def backend(module, _):
        notes.extend(replace_patterns(module))
        nodes.extend(module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    torch.testing.assert_close(result, function(*args), equal_nan=True)
    return notes, nodes


def calls(nodes):
    return [node for node in nodes if node.target is F.scaled_dot_product_attention]


def r(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def causal(n=N):
    return torch.ones(n, n, dtype=torch.bool).tril()


def padding(*keys):
    """A mask of the keys that are seen: so many in each sequence."""
    return (torch.arange(N) < torch.tensor(keys)[:, None])[:, None, None]


# ---- attention as models write it ------------------------------------------------------------------------------------


def bert(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    weights = nn.functional.softmax(scores + (1.0 - mask.to(q.dtype)) * torch.finfo(q.dtype).min, dim=-1)
    out = torch.matmul(F.dropout(weights, 0.1, training=False), v)
    return out.permute(0, 2, 1, 3).contiguous().view(q.shape[0], q.shape[2], -1)


def gpt2(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    scores = torch.where(causal()[None, None], scores.to(scores.dtype), least)
    return (F.softmax(scores, dim=-1).type(v.dtype) @ v).transpose(1, 2)


def nano_gpt(q, k, v, buffer):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(buffer[:, :, :N, :N] == 0, float("-inf"))
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(q.shape[0], N, -1)


def annotated(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(scores.masked_fill(mask == 0, -1e9).softmax(dim=-1), v)


def t5(q, k, v, bias):
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    weights = F.softmax(scores.float() if q.dtype != torch.float64 else scores, dim=-1).type_as(scores)
    return torch.matmul(weights, v)


def einsum(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * D**-0.5, k)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def opt(q, k, v, mask):
    """Heads are merged for the products, and masks are added where they are not."""
    batch, n, *_ = q.shape
    q, k, v = (x.reshape(batch * n, -1, D) for x in (q * D**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, n, N, N) + mask
    weights = F.softmax(scores.view(batch * n, N, N), dim=-1)
    return torch.bmm(weights, v).view(batch, n, N, D).transpose(1, 2).reshape(batch, N, -1)


def bloom(q, k, v, alibi):
    batch, n, *_ = q.shape
    q, k, v = (x.reshape(batch * n, -1, D) for x in (q, k, v))
    scores = alibi.baddbmm(q, k.mT, beta=1.0, alpha=D**-0.5).view(batch, n, N, N)
    return torch.bmm(scores.softmax(-1).view(batch * n, N, N), v)


def diffusers(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], N, N, dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.25)
    return torch.bmm(scores.softmax(dim=-1).to(q.dtype), v)


def alibi(q, k, v):
    slopes = torch.tensor([0.5, 0.25], dtype=q.dtype)[:, None, None]
    positions = torch.arange(N)
    scores = q @ k.mT * 0.25 + slopes * (positions - positions[:, None])
    return torch.softmax(scores + torch.full((N, N), -torch.inf, dtype=q.dtype).triu(1), -1) @ v


def scaled_after(q, k, v, mask):
    return torch.softmax((q @ k.mT - mask) * 0.5, -1) @ v


def qkv(dtype=torch.float64, batch=2):
    return [r(batch, 2, N, D, dtype=dtype) for _ in range(3)]


SPELLINGS = {
    "BERT": (bert, lambda: [padding(3, N)]),
    "GPT-2": (gpt2, list),
    "nanoGPT": (nano_gpt, lambda: [causal()[None, None].to(torch.float64)]),
    "masked_fill": (annotated, lambda: [padding(3, N)]),
    "T5": (t5, lambda: [r(1, 2, N, N)]),
    "einsum": (einsum, lambda: [padding(3, N)]),
    "OPT": (opt, lambda: [torch.zeros(2, 1, N, N).double().masked_fill(~causal(), -torch.inf)]),
    "Bloom": (bloom, lambda: [r(4, 1, N)]),
    "baddbmm": (diffusers, list),
    "ALiBi": (alibi, list),
    "scaled after the mask": (scaled_after, lambda: [r(2, 1, 1, N)]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_is_replaced(name):
    function, more = SPELLINGS[name]
    torch.manual_seed(0)
    notes, nodes = notes_and_graph(function, *qkv(), *more())
    assert [note.split(" at ")[0] for note in notes] == ["replaced attention"]
    assert len(calls(nodes)) == 1
    names = {str(node.target) for node in nodes}
    assert not any("softmax" in each or "baddbmm" in each or "iadd" in each for each in names)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), torch.float64])
@pytest.mark.parametrize("name", SPELLINGS)
def test_compiled_results_and_gradients(name, dtype):
    function, more = SPELLINGS[name]
    torch.manual_seed(0)
    args = [x.requires_grad_() for x in qkv(dtype)]
    rest = [x.to(dtype) if x.is_floating_point() else x for x in more()]
    torch._dynamo.reset()
    found = torch.compile(function, backend="opkit", options={"strict": True})(*args, *rest)
    expected = function(*args, *rest)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, equal_nan=True)
    weights = torch.randn_like(expected)
    gradients, others = (torch.autograd.grad(out, args, weights) for out in (found, expected))
    torch.testing.assert_close(gradients, others, equal_nan=True)


# ---- rows that are masked throughout ---------------------------------------------------------------------------------


def with_gradients(function, *args, **options):
    args = [x.clone().requires_grad_(x.dim() == 4 and x.shape[-1] == D) for x in args]
    torch._dynamo.reset()
    call = torch.compile(function, backend="opkit", options={"strict": True}) if options.pop("compiled") else function
    out = call(*args)
    return out, torch.autograd.grad(out.square().sum(), args[:3])


def test_large_numbers_give_the_mean_of_the_values():
    torch.manual_seed(0)
    args = [*qkv(torch.float32), padding(0, 9)]
    found, expected = (with_gradients(annotated, *args, compiled=each) for each in (True, False))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0][0], args[2][0].mean(1, keepdim=True).expand_as(found[0][0]))
    found, expected = (with_gradients(bert, *args, compiled=each) for each in (True, False))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][2], expected[1][2])
    for a, b in zip(
        found[1][:2], expected[1][:2], strict=True
    ):  # by hand, rounding lets gradients of these rows through
        assert not a[0].any()
        torch.testing.assert_close(a[1], b[1])


INFINITE = {
    "nanoGPT": (nano_gpt, lambda: causal().tril(-1)[None, None].to(torch.float32)),
    "T5": (t5, lambda: torch.where(padding(0, 9), 0.0, -torch.inf)),
    "einsum": (einsum, lambda: padding(0, 9)),
}


@pytest.mark.parametrize("name", INFINITE)
def test_minus_infinity_gives_nan(name):
    function, mask = INFINITE[name]
    torch.manual_seed(0)
    args = [*qkv(torch.float32), mask()]
    found, expected = (with_gradients(function, *args, compiled=each) for each in (True, False))
    assert expected[0].isnan().any()
    torch.testing.assert_close((found[0], found[1][2]), (expected[0], expected[1][2]), equal_nan=True)


# ---- what is kept ----------------------------------------------------------------------------------------------------


def plain(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def two_masks(q, k, v, a, b):
    return torch.softmax(q @ k.mT + a + b, -1) @ v


def short(q, k, v):
    return plain(q[..., :8, :], k[..., :8, :], v[..., :8, :])


def with_weights(q, k, v):
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights


def with_scores(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v + scores.amax(-1, keepdim=True)


def written(q, k, v):
    v = v.clone()
    weights = torch.softmax(q @ k.mT, -1)
    v[:, :, 0] = 1
    return weights @ v


def upcast(q, k, v):
    return torch.softmax(q.float() @ k.float().mT, -1).to(v.dtype) @ v


KEPT = {
    "weights are a result": (with_weights, qkv, "is used by output"),
    "scores are read": (with_scores, qkv, "scores is used by amax"),
    "written in between": (written, qkv, "changes a tensor or a state in between"),
    "no dropout on CPUs": (
        lambda q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 1.0) @ v,
        qkv,
        "torch has no kernel with dropout for CPUs",
    ),
    "few keys": (short, qkv, "8 keys are fewer than 128"),
    "features": (plain, lambda: [*qkv()[:2], r(2, 2, N, 8)], "queries have 16 features, values 8"),
    "heads": (plain, lambda: [*qkv()[:2], r(1, 2, N, D)], "other numbers of heads"),
    "groups": (plain, lambda: [r(2, 2, 2, N, D) for _ in range(3)], "the scores have 5 dimensions"),
    "integers": (
        lambda q, k, v: torch.softmax((q @ k.mT).to(torch.float32), -1).to(torch.int64) @ v,
        lambda: [torch.ones(2, 2, N, D, dtype=torch.int64) for _ in range(3)],
        "torch has no kernel for torch.int64 on cpu",
    ),
    "dtypes": (upcast, lambda: qkv(torch.bfloat16), "queries, keys and values are torch.float32"),
    "a small number": (
        lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(~causal(), -5.0), -1) @ v,
        qkv,
        "replaces scores by -5.0",
    ),
    "a temperature": (
        lambda q, k, v, t: torch.softmax((q @ k.mT) * t, -1) @ v,
        lambda: [*qkv(), torch.tensor(2.0, dtype=torch.float64)],
        "multiplies scores by what is not a positive constant",
    ),
    "a mask with gradients": (
        lambda q, k, v, bias: torch.softmax(q @ k.mT + bias, -1) @ v,
        lambda: [*qkv(), r(1, 2, N, N).requires_grad_()],
        "gradients of a mask",
    ),
    "masks": (
        two_masks,
        lambda: [*qkv(), r(1, 2, N, N), r(2, 1, 1, N)],
        "the sum of the masks is as large as the scores",
    ),
    "a narrow mask": (
        lambda q, k, v, bias: torch.softmax(q @ k.mT + bias, -1) @ v,
        lambda: [*qkv(), r(N, N, dtype=torch.float16)],
        "is torch.float16, the result torch.float64",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_attention_is_kept(name):
    function, make, reason = KEPT[name]
    torch.manual_seed(0)
    notes, nodes = notes_and_graph(function, *make())
    (note,) = notes
    assert note.startswith("kept attention at ")
    assert reason in note
    assert not calls(nodes)


def test_other_softmaxes_have_no_note():
    def router(x, w):
        return torch.softmax(x @ w, -1).topk(2).values, torch.softmax(x.relu(), -1) @ x.mT

    notes, _ = notes_and_graph(router, r(3, 4, 16), r(16, 8))
    assert notes == []


def test_training_needs_more_keys_on_cpus():
    args = [x[:, :, :200] for x in qkv()]
    assert notes_and_graph(plain, *args)[0][0].startswith("replaced")
    assert "200 keys are fewer than 256" in notes_and_graph(plain, *(x.requires_grad_() for x in args))[0][0]


def test_causal_masks_become_is_causal():
    from opkit.compiler.capture.attention_masks import remove_constant_masks

    found = []

    def backend(module, _):
        replace_patterns(module)
        remove_constant_masks(module)
        found.extend(calls(module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    torch.compile(gpt2, backend=backend)(*qkv())
    (call,) = found
    assert call.kwargs["is_causal"]
    assert call.kwargs["attn_mask"] is None
    assert call.kwargs["scale"] == 0.25


def test_autocast():
    def cast(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.softmax(q @ k.mT * 0.25, -1) @ v

    torch.manual_seed(0)
    args = qkv(torch.float32)
    torch._dynamo.reset()
    explanation = opkit.explain(cast, *args)
    assert explanation.patterns == ["replaced attention at softmax"]
    assert explanation.result.dtype == torch.bfloat16
    torch.testing.assert_close(explanation.result.float(), plain(args[0] * 0.25, *args[1:]), atol=0.02, rtol=0.02)


def test_a_float32_mask_of_narrow_floats():
    def masked(q, k, v, bias, seen):
        return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill(~seen, -1e9), -1).to(v.dtype) @ v

    torch.manual_seed(0)
    args = [*qkv(torch.bfloat16), r(2, N, N, dtype=torch.float32), padding(0, 9)]
    explanation = opkit.explain(masked, *args)
    assert explanation.patterns == ["kept attention at softmax: the sum of the masks is as large as the scores"]
    explanation = opkit.explain(masked, *args[:3], args[3][:1, :1], args[4])
    assert explanation.patterns == ["replaced attention at softmax"]
    exact = masked(*(x.double() for x in args[:3]), args[3][:1, :1], args[4])
    torch.testing.assert_close(explanation.result.double(), exact, atol=0.02, rtol=0.02)


def test_changing_sizes():
    found = torch.compile(plain, backend="opkit", options={"strict": True}, dynamic=True)
    for keys in (300, 280):
        args = [x[:, :, :keys] for x in [r(2, 2, 300, D) for _ in range(3)]]
        torch.testing.assert_close(found(*args), plain(*args))


def test_notes_are_in_the_report():
    text = str(opkit.explain(short, *qkv()))
    assert text.endswith(
        "patterns:\n  kept attention at softmax: 8 keys are fewer than 128, from which torch's kernel for CPUs is faster"
    )


def test_checkpointed_attention():
    from torch.utils.checkpoint import checkpoint

    def saved(q, k, v):
        return checkpoint(plain, q, k, v, use_reentrant=False)

    args = [x.requires_grad_() for x in qkv()]
    explanation = opkit.explain(saved, *args)
    assert explanation.patterns == ["replaced attention at softmax"]
    found = torch.compile(saved, backend="opkit", options={"strict": True})(*args)
    gradients = [torch.autograd.grad(out.square().sum(), args) for out in (found, plain(*args))]
    torch.testing.assert_close(*gradients)


def test_other_ways_to_call_the_functions():
    def keywords(q, k, v, mask):
        scores = torch.add(input=torch.matmul(q, k.mT), other=torch.mul(input=mask, other=2.0))
        return torch.matmul(torch.softmax(input=scores, dim=3), v)

    def swapped(q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = torch.einsum("bkhd,bqhd->bhqk", k, q).multiply_(0.5)
        scores = torch.where(mask > 0, torch.tensor(-1e9, dtype=q.dtype), scores)
        return torch.einsum("bkhd,bhqk->bhqd", v, nn.Softmax(dim=-1)(scores))

    for function in (keywords, swapped):
        notes, nodes = notes_and_graph(function, *qkv(), r(1, 1, N, 1))
        assert len(calls(nodes)) == 1, notes


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a torch with CUDA")
def test_graphs_of_gpus():
    notes = []

    def backend(module, _):
        notes.extend(replace_patterns(module))
        return module.forward

    def trained(q, k, v, bias):
        return F.dropout(torch.softmax(q @ k.mT + bias, -1), 0.5) @ v

    with FakeTensorMode(allow_non_fake_inputs=True):
        for dtype, features in [(torch.bfloat16, 64), (torch.float64, 64), (torch.float32, 6)]:
            q = torch.empty(2, 4, 8, features, device="cuda", dtype=dtype, requires_grad=True)
            bias = torch.empty(1, 4, 8, 8, device="cuda", dtype=dtype, requires_grad=True)
            torch._dynamo.reset()
            torch.compile(trained, backend=backend)(q, q, q, bias)
    assert notes == [
        "replaced attention at softmax",
        "kept attention at softmax: torch has no kernel for torch.float64 on cuda",
        "kept attention at softmax: torch has no kernel for 6 features, which are no multiple of 8",
    ]


# ---- cross-entropy with its linear layer ------------------------------------------------------------------------------

ROWS, WIDTH, CLASSES = 200, 16, 50


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 4 * CLASSES)
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 64)


def loss_of(x, weight, bias, labels, **options):
    return F.cross_entropy(F.linear(x, weight, bias).view(-1, CLASSES), labels.view(-1), **options)


def loss_of_floats(x, weight, bias, labels):
    return F.cross_entropy(F.linear(x, weight).float().flatten(0, 1), labels.flatten(), ignore_index=3, reduction="sum")


def loss_arguments(dtype=torch.float64):
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (2, ROWS // 2))
    labels[0, :70] = -100
    return r(2, ROWS // 2, WIDTH, dtype=dtype), r(CLASSES, WIDTH, dtype=dtype), r(CLASSES, dtype=dtype), labels


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, True),
        ({"reduction": "sum"}, False),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in [({"ignore_index": 7}, True), ({}, False)]),
    ],
)
def test_cross_entropy_with_its_linear_layer(options, bias):
    *tensors, labels = loss_arguments()
    labels = labels.clamp(min=0) if options.get("ignore_index") else labels
    tensors = [x.requires_grad_() for x in tensors[: 2 + bias]]
    args = [*tensors, *([] if bias else [None]), labels]
    function = functools.partial(loss_of, **options)
    explanation = opkit.explain(function, *args)
    assert explanation.patterns == ["replaced cross-entropy at cross_entropy"]
    torch.testing.assert_close(explanation.result, function(*args))
    found = torch.compile(function, backend="opkit", options={"strict": True})(*args)
    for out in [(found, function(*args))]:
        gradients = [torch.autograd.grad(each * 3.5, tensors) for each in out]
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend="opkit")(*args), function(*args))


@pytest.mark.usefixtures("small_chunks")
def test_cross_entropy_computes_no_product_twice_and_holds_no_logits():
    arenas = []
    for times in (1, 4):
        x, weight, bias, labels = loss_arguments()
        args = [x.repeat(times, 1, 1).requires_grad_(), weight.requires_grad_(), bias, labels.repeat(times, 1)]
        forward, backward = opkit.explain(loss_of, *args).graphs
        chunks = -(-ROWS * times // 64)
        assert len(forward.calls) == 3 * chunks  # logits, and the gradients of x and of the weight
        assert not backward.calls
        arenas.append(forward.arena)
    assert arenas[1] < arenas[0] + ROWS * CLASSES * 8  # of 600 more rows


@pytest.mark.usefixtures("small_chunks")
def test_cross_entropy_of_narrow_floats():
    x, weight, _, labels = loss_arguments(torch.bfloat16)
    labels = labels.clamp(min=0)
    args = [x.requires_grad_(), weight.requires_grad_(), None, labels]
    explanation = opkit.explain(loss_of_floats, *args)
    assert explanation.patterns == ["replaced cross-entropy at cross_entropy"]
    assert explanation.result.dtype == torch.float32
    found = torch.compile(loss_of_floats, backend="opkit")(*args)
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), None, labels]
    exact = F.cross_entropy(F.linear(*wide[:2]).flatten(0, 1), labels.flatten(), ignore_index=3, reduction="sum")
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0)
    for a, b in zip(torch.autograd.grad(found, args[:2]), torch.autograd.grad(exact, wide[:2]), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() <= 0.01 * b.norm()


@pytest.mark.usefixtures("small_chunks")
def test_losses_of_no_rows_and_wrong_labels():
    x, weight, bias, labels = loss_arguments()
    found = torch.compile(loss_of, backend="opkit", options={"strict": True})
    assert found(x, weight, bias, torch.full_like(labels, -100)).isnan()
    labels[0, 0] = CLASSES
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        found(x, weight, bias, labels)


KEPT_LOSSES = {
    "logits are a result": (
        lambda x, w, b, y: [z := F.linear(x.flatten(0, 1), w), F.cross_entropy(z, y.flatten())],
        "too",
    ),
    "smoothing": (functools.partial(loss_of, label_smoothing=0.1), "label_smoothing is 0.1"),
    "no reduction": (functools.partial(loss_of, reduction="none"), "reduction is 'none'"),
    "classes in the middle": (
        lambda x, w, b, y: F.cross_entropy(F.linear(x, w).view(2, CLASSES, -1), y),
        "logits have the shape (2, 50, 100)",
    ),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", KEPT_LOSSES)
def test_cross_entropy_is_kept(name):
    function, reason = KEPT_LOSSES[name]
    (note,) = notes_and_graph(function, *loss_arguments())[0]
    assert note.startswith("kept cross-entropy at cross_entropy: ")
    assert reason in note


def test_small_logits_are_kept():
    (note,) = notes_and_graph(loss_of, *loss_arguments())[0]
    assert "200 rows are fewer than two chunks" in note


# ---- what fusion makes one kernel of ---------------------------------------------------------------------------------


def rms_norm(x, gain):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * wide.to(x.dtype)


def layer_norm(x, gain):
    centred = x - x.mean(-1, keepdim=True)
    return gain * (centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)) + gain


def rope(x, gain):
    left, right = x.chunk(2, -1)
    return x * gain + torch.cat((-right, left), -1) * gain


@pytest.mark.parametrize("function", [rms_norm, layer_norm, rope])
def test_norms_and_rotary_embeddings_are_one_kernel(function):
    x, gain = r(64, 256, dtype=torch.float32), r(256, dtype=torch.float32)
    explanation = opkit.explain(function, x, gain)
    torch.testing.assert_close(explanation.result, function(x, gain))
    assert explanation.kernels == 1


def test_a_gate_of_two_products_is_one_kernel():
    """The gate waits for the second product."""

    def gated(x, a, b):
        return F.silu(x @ a) * (x @ b)

    args = [r(64, 32), r(32, 48), r(32, 48)]
    explanation = opkit.explain(gated, *args)
    torch.testing.assert_close(explanation.result, gated(*args))
    assert (explanation.kernels, len(explanation.graphs[0].calls)) == (1, 2)

    def gate_is_needed_before(x, a, b):
        gate = F.silu(x @ a)
        return gate * (gate @ b)

    args[2] = r(48, 48)
    explanation = opkit.explain(gate_is_needed_before, *args)
    torch.testing.assert_close(explanation.result, gate_is_needed_before(*args))
    assert explanation.kernels == 2


def test_sums_of_products_do_not_wait():
    """Otherwise all products would be in memory at once."""

    def summed(x, *weights):
        total = x.exp()
        for weight in weights:
            total = total + x @ weight
        return total

    graph = opkit.explain(summed, *(r(48, 48) for _ in range(6))).graphs[0]
    assert graph.launches > 1
    assert graph.arena <= 4 * 48 * 48 * 8


def test_a_gate_does_not_wait_past_a_write_to_what_it_reads():
    def gated(x, a, b):
        gate = (x * 2).exp()
        x.copy_(a)
        return gate * (x @ b)

    args = [r(48, 48) for _ in range(3)]
    expected = gated(args[0].clone(), *args[1:])
    found = torch.compile(gated, backend="opkit", options={"strict": True})(*args)
    torch.testing.assert_close(found, expected)
