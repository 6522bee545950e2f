"""Calls of compiled functions with an empty cache and with a full one, for tests of what is found on the disk."""

import contextlib
import copy

import torch
from torch import nn

from opkit.compiler import backend
from opkit.compiler.backend import opkit_backend


@contextlib.contextmanager
def counted():
    """How many graphs of Dynamo's go through AOTAutograd."""
    found, original = [], backend._compile_with_aot_autograd
    backend._compile_with_aot_autograd = lambda *given: found.append(given) or original(*given)
    try:
        yield found
    finally:
        backend._compile_with_aot_autograd = original


def compiled(function, **more):
    torch._dynamo.reset()
    return torch.compile(function, backend=opkit_backend, options={"strict": True}, **more)


def cold_and_warm(call):
    """What ``call(compile)`` gives with an empty cache, and with what that left there."""
    with counted() as anew:
        cold = call(compiled)
        assert anew, "nothing was compiled"
        count = len(anew)
        warm = call(compiled)
        assert len(anew) == count, "the entry was not found"
    return cold, warm


def check(call):
    """Cold, warm and eager give the same."""
    cold, warm = cold_and_warm(call)
    torch.testing.assert_close(warm, cold, rtol=0, atol=0)
    torch.testing.assert_close(warm, call(lambda function: function), rtol=1e-4, atol=1e-4)


def misses(first, second):
    """The second call does not use what the first one left."""
    with counted() as anew:
        first(compiled)
        count = len(anew)
        second(compiled)
        assert len(anew) == 2 * count > 0


def trained(model, *inputs, loss=lambda out: out.square().sum()):
    """A function of a way to compile: the loss, gradients and buffers after two steps of a copy of the model."""

    def call(compile):
        mine, given = copy.deepcopy(model), [copy_of(each) for each in inputs]
        fast = compile(mine)
        torch.manual_seed(0)
        losses = [loss(fast(*given)) for _ in range(2)]
        for each in losses:
            each.backward()
        grads = [each.grad for each in (*mine.parameters(), *given) if each.grad is not None]
        return [each.detach() for each in losses], grads, list(mine.buffers())

    return call


def copy_of(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def mlp(p=0.0):
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(p), nn.Linear(8, 3))


X = torch.randn(5, 6)


def on(x, function=lambda x: x.exp() + 1, grad=False, **options):
    def call(compile):
        with torch.set_grad_enabled(grad):
            torch._dynamo.reset()
            return torch.compile(function, backend=opkit_backend, options={"strict": True, **options})(x)

    return call
