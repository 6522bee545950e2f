"""Attention that no function replaces, and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import opkit
from opkit.compiler.capture.patterns.table import replace_patterns
from tests.compiler.capture.pattern_calls import D, N, calls, causal, notes_and_graph, plain, qkv, r


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


def test_notes_are_in_the_report():
    text = str(opkit.explain(short, *qkv()))
    assert text.endswith(
        "patterns:\n  kept attention at softmax: 8 keys are fewer than 128, from which torch's kernel for CPUs is faster"
    )


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
