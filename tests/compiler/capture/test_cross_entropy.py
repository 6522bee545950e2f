"""Cross-entropy with its linear layer."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import opkit
from opkit.compiler.capture.patterns import cross_entropy
from tests.compiler.capture.pattern_calls import notes_and_graph, r

ROWS, WIDTH, CLASSES, CHUNK = 200, 16, 50, 96


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 4 * CLASSES)
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", CHUNK)


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
    assert notes_and_graph(function, *args)[0] == ["replaced cross-entropy at cross_entropy"]
    found = torch.compile(function, backend="opkit", options={"strict": True})(*args)
    torch.testing.assert_close(found, function(*args))
    gradients = [torch.autograd.grad(loss * 3.5, tensors) for loss in (found, function(*args))]
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, backend="opkit")(*args), function(*args))


@pytest.mark.usefixtures("small_chunks")
def test_cross_entropy_computes_no_product_twice_and_holds_no_logits():
    arenas = []
    for times in (1, 3):
        x, weight, bias, labels = loss_arguments()
        args = [x.repeat(times, 1, 1).requires_grad_(), weight.requires_grad_(), bias, labels.repeat(times, 1)]
        forward, backward = opkit.explain(loss_of, *args).graphs
        chunks = -(-ROWS * times // CHUNK)
        assert len(forward.calls) == 3 * chunks  # logits, and the gradients of x and of the weight
        assert not backward.calls
        arenas.append(forward.arena)
    assert arenas[1] < arenas[0] + ROWS * CLASSES * 8  # of 400 more rows


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
def test_cross_entropy_under_autocast():
    x, weight, bias, labels = loss_arguments(torch.float32)
    args = [*(each.requires_grad_() for each in (x, weight, bias)), labels]
    with torch.autocast("cpu", torch.bfloat16):
        explanation = opkit.explain(loss_of, *args)
        found = torch.compile(loss_of, backend="opkit", options={"strict": True})(*args)
    assert explanation.patterns == ["replaced cross-entropy at cross_entropy"]
    wide = [*(each.detach().double().requires_grad_() for each in args[:3]), labels]
    exact = loss_of(*wide)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0.01, atol=0)
    for a, b in zip(torch.autograd.grad(found, args[:3]), torch.autograd.grad(exact, wide[:3]), strict=True):
        assert a.dtype == torch.float32
        assert (a.double() - b).norm() <= 0.01 * b.norm()


@pytest.mark.usefixtures("small_chunks")
def test_cross_entropy_under_autocast_to_float16_is_kept():
    with torch.autocast("cpu", torch.float16):
        (note,) = opkit.explain(loss_of, *loss_arguments(torch.float32)).patterns
    assert note.endswith("the gradients of logits in float16 need the scale of the loss")


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


@pytest.mark.usefixtures("small_chunks")
def test_writes_whose_results_nothing_uses_stay():
    def written(x, weight, bias, labels):
        hidden = x * 2
        hidden.add_(bias.sum())
        hidden[0] = 1.0
        F.relu(hidden, inplace=True)
        return loss_of(hidden, weight, None, labels)

    *tensors, labels = loss_arguments()
    results = []
    for function in (written, torch.compile(written, backend="opkit", fullgraph=True)):
        leaves = [each.detach().requires_grad_() for each in tensors]
        loss = function(*leaves, labels)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(results[1], results[0])
