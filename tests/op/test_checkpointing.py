"""Operators under activation checkpointing and saved-tensor hooks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import opkit

# ---- activation checkpointing ---------------------------------------------------------------------------------------


def reference_gradients(norm, x, weight):
    output = norm.reference(x.sin(), weight).cos()
    return torch.autograd.grad(output.sum(), (x, weight))


@pytest.mark.sweep
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, norm, kind, op, spelled, inputs, calls):
    call, (x, weight) = spelled(op), inputs()
    output = checkpoint(lambda x, w: call(x.sin(), w).cos(), x, weight, use_reentrant=use_reentrant)
    assert len(calls) == (kind == "kernel")
    output.sum().backward()
    assert len(calls) == 2 * (kind == "kernel")
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(norm, x, weight))


@pytest.mark.sweep
@pytest.mark.parametrize(("policy", "kernel_calls"), [("save", 1), ("recompute", 2)])
def test_selective_checkpointing_by_the_operator(policy, kernel_calls, norm, kind, op, spelled, inputs, calls):
    call, (x, weight) = spelled(op), inputs()
    overload = op._opoverload
    seen = []

    def decide(ctx, func, *args, **kwargs):
        seen.append(func)
        named = policy == "save" and func is overload
        return CheckpointPolicy.MUST_SAVE if named else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    output = checkpoint(lambda x, w: call(x.sin(), w).cos(), x, weight, use_reentrant=False, context_fn=contexts)
    output.sum().backward()
    assert overload in seen
    if kind == "kernel":
        assert len(calls) == kernel_calls
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(norm, x, weight))


def test_selective_checkpointing_by_a_list(norm, kind, op, inputs, calls):
    x, weight = inputs()
    contexts = functools.partial(create_selective_checkpoint_contexts, [op._opoverload])
    checkpoint(lambda x, w: op(x.sin(), w).cos(), x, weight, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(calls) == (kind == "kernel")
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(norm, x, weight))


@pytest.mark.sweep
@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_under_compile(selective, norm, op, inputs):
    torch._dynamo.reset()
    x, weight = inputs()
    options = {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [op._opoverload])

    def model(x, w):
        return checkpoint(lambda x, w: op(x.sin(), w).cos(), x, w, use_reentrant=False, **options)

    torch.compile(model, backend="aot_eager", fullgraph=True)(x, weight).sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(norm, x, weight))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_random_operator_is_recomputed_with_the_same_numbers(use_reentrant):
    op = opkit.custom_op("tcheckpointing::noisy", lambda x: x * torch.rand_like(x), schema="(Tensor x) -> Tensor")
    x = torch.randn(6, requires_grad=True)
    torch.manual_seed(0)
    plain = torch.autograd.grad(op(x).square().sum(), x)[0]
    torch.manual_seed(0)
    checkpoint(lambda x: op(x), x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, plain)
    opkit.remove("tcheckpointing::noisy")


# ---- saved-tensor hooks ---------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("seen_before", [False, True])
def test_saved_tensor_hooks(seen_before, norm, op, spelled, inputs):
    call, (x, weight) = spelled(op), inputs()
    if seen_before:
        call(x, weight).sum().backward()
        x.grad = weight.grad = None
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = call(x, weight)
    output.sum().backward()
    assert len(packed) == len(unpacked) > 0
    expected = torch.autograd.grad(norm.reference(x, weight).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


def test_saving_on_the_cpu(norm, op, inputs):
    x, weight = inputs()
    with torch.autograd.graph.save_on_cpu():
        output = op(x, weight)
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(norm.reference(x, weight).sum(), x)[0])
