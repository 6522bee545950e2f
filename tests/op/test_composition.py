"""Operators among torch's other machinery: profiler, checkpointing, hooks, subclasses, modes, counters, copies."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import opkit

CALLS = []


@opkit.custom_op("tcompose::norm")
def norm(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """Root-mean-square normalisation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@opkit.custom_op("tcompose::norm_kernel")
def norm_kernel(
    x: Float[Tensor, "*batch d"], weight: Float[Tensor, "d"], eps: float = 1e-6
) -> Float[Tensor, "*batch d"]:
    """The same, with a kernel."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@norm_kernel.register_kernel("cpu")
def numpy_norm(x, weight, eps=1e-6):
    CALLS.append(tuple(x.shape))
    scale = 1.0 / np.sqrt(np.square(x.numpy()).mean(-1, keepdims=True) + eps)
    return torch.from_numpy((x.numpy() * scale * weight.numpy()).astype(np.float32))


OPS = {"reference": norm, "kernel": norm_kernel}
KINDS = pytest.mark.parametrize("kind", OPS)
SPELLINGS = pytest.mark.parametrize("spelling", ["object", "torch.ops"])


def spelled(op, spelling):
    return op if spelling == "object" else getattr(torch.ops.tcompose, op.name.split("::")[1])


@pytest.fixture(autouse=True)
def _no_calls_yet():
    CALLS.clear()


def inputs(train=True):
    return torch.randn(4, 8, requires_grad=train), torch.randn(8, requires_grad=train)


# ---- profiler -------------------------------------------------------------------------------------------------------


def profiled(function):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return [event.name for event in found.events()]


@SPELLINGS
@KINDS
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("seen_before", [False, True])
def test_the_profiler_shows_operator_and_kernel(kind, spelling, train, seen_before):
    op, (x, weight) = spelled(OPS[kind], spelling), inputs(train)
    if seen_before:
        op(x, weight)
    names = profiled(lambda: op(x, weight))
    name = OPS[kind].name
    assert names.count(name) == 1
    chosen = "numpy_norm" if kind == "kernel" else "reference"
    assert any(shown.startswith(name) and chosen in shown for shown in names), names


@SPELLINGS
def test_the_profiler_shows_the_kernel_of_compiled_code(spelling):
    op, (x, weight) = spelled(norm_kernel, spelling), inputs(False)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x, weight) + 1, backend="aot_eager", fullgraph=True)
    compiled(x)
    names = profiled(lambda: compiled(x))
    assert any("tcompose::norm_kernel" in name and "numpy_norm" in name for name in names), names


def test_the_profiler_shows_the_backward():
    x, weight = inputs()
    output = norm_kernel(x, weight).sum()
    names = profiled(lambda: output.backward())
    assert any("tcompose_norm_kernel" in name for name in names), names


# ---- activation checkpointing ---------------------------------------------------------------------------------------


def reference_gradients(x, weight):
    output = norm.reference(x.sin(), weight).cos()
    return torch.autograd.grad(output.sum(), (x, weight))


@SPELLINGS
@KINDS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(kind, spelling, use_reentrant):
    op, (x, weight) = spelled(OPS[kind], spelling), inputs()
    output = checkpoint(lambda x, w: op(x.sin(), w).cos(), x, weight, use_reentrant=use_reentrant)
    assert len(CALLS) == (kind == "kernel")
    output.sum().backward()
    assert len(CALLS) == 2 * (kind == "kernel")
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(x, weight))


@SPELLINGS
@KINDS
@pytest.mark.parametrize(("policy", "kernel_calls"), [("save", 1), ("recompute", 2)])
def test_selective_checkpointing_by_the_operator(kind, spelling, policy, kernel_calls):
    op, (x, weight) = spelled(OPS[kind], spelling), inputs()
    overload = OPS[kind]._opoverload
    seen = []

    def decide(ctx, func, *args, **kwargs):
        seen.append(func)
        named = policy == "save" and func is overload
        return CheckpointPolicy.MUST_SAVE if named else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    output = checkpoint(lambda x, w: op(x.sin(), w).cos(), x, weight, use_reentrant=False, context_fn=contexts)
    output.sum().backward()
    assert overload in seen
    if kind == "kernel":
        assert len(CALLS) == kernel_calls
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(x, weight))


@KINDS
def test_selective_checkpointing_by_a_list(kind):
    op, (x, weight) = OPS[kind], inputs()
    contexts = functools.partial(create_selective_checkpoint_contexts, [op._opoverload])
    checkpoint(lambda x, w: op(x.sin(), w).cos(), x, weight, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(CALLS) == (kind == "kernel")
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(x, weight))


@KINDS
@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_under_compile(kind, selective):
    torch._dynamo.reset()
    op, (x, weight) = OPS[kind], inputs()
    options = {}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [op._opoverload])

    def model(x, w):
        return checkpoint(lambda x, w: op(x.sin(), w).cos(), x, w, use_reentrant=False, **options)

    torch.compile(model, backend="aot_eager", fullgraph=True)(x, weight).sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), reference_gradients(x, weight))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_random_operator_is_recomputed_with_the_same_numbers(use_reentrant):
    op = opkit.custom_op("tcompose::noisy", lambda x: x * torch.rand_like(x), schema="(Tensor x) -> Tensor")
    x = torch.randn(6, requires_grad=True)
    torch.manual_seed(0)
    plain = torch.autograd.grad(op(x).square().sum(), x)[0]
    torch.manual_seed(0)
    checkpoint(lambda x: op(x), x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, plain)
    opkit.remove("tcompose::noisy")


# ---- saved-tensor hooks ---------------------------------------------------------------------------------------------


@SPELLINGS
@KINDS
@pytest.mark.parametrize("seen_before", [False, True])
def test_saved_tensor_hooks(kind, spelling, seen_before):
    op, (x, weight) = spelled(OPS[kind], spelling), inputs()
    if seen_before:
        op(x, weight).sum().backward()
        x.grad = weight.grad = None
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = op(x, weight)
    output.sum().backward()
    assert len(packed) == len(unpacked) > 0
    expected = torch.autograd.grad(norm.reference(x, weight).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


@KINDS
def test_saving_on_the_cpu(kind):
    x, weight = inputs()
    with torch.autograd.graph.save_on_cpu():
        output = OPS[kind](x, weight)
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(norm.reference(x, weight).sum(), x)[0])


# ---- subclasses and modes -------------------------------------------------------------------------------------------


@SPELLINGS
@KINDS
@pytest.mark.parametrize("train", [False, True])
def test_wrapper_subclasses(kind, spelling, train):
    op = spelled(OPS[kind], spelling)
    a, b, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    x = TwoTensor(a.clone(), b.clone()).requires_grad_(train)
    output = op(x, TwoTensor(weight, weight))
    assert type(output) is TwoTensor
    torch.testing.assert_close(output.a, norm.reference(a, weight))
    torch.testing.assert_close(output.b, norm.reference(b, weight))
    assert len(CALLS) == 2 * (kind == "kernel")
    if train:
        output.sum().backward()
        leaf = b.requires_grad_()
        torch.testing.assert_close(x.grad.b, torch.autograd.grad(norm.reference(leaf, weight).sum(), leaf)[0])


class Logged(torch.Tensor):
    """A subclass that notes the operators that reach it."""

    seen: ClassVar[list] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@SPELLINGS
@KINDS
def test_a_subclass_sees_the_operator(kind, spelling):
    Logged.seen.clear()
    x, weight = inputs(False)
    torch.testing.assert_close(spelled(OPS[kind], spelling)(Logged(x), weight), norm.reference(x, weight))
    assert Logged.seen == [OPS[kind]._opoverload]


@pytest.mark.parametrize("kind", OPS)
def test_subclasses_under_compile(kind):
    torch._dynamo.reset()
    a, b, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    compiled = torch.compile(lambda x, w: OPS[kind](x, w) + 1, backend="aot_eager", fullgraph=True)
    output = compiled(TwoTensor(a, b), TwoTensor(weight, weight))
    torch.testing.assert_close(output.b, norm.reference(b, weight) + 1)


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@SPELLINGS
@KINDS
@pytest.mark.parametrize("train", [False, True])
def test_modes_see_the_operator(kind, spelling, train):
    op, (x, weight) = spelled(OPS[kind], spelling), inputs(train)
    op(x, weight)
    with Recording() as mode:
        output = op(x, weight)
    assert mode.seen == [OPS[kind]._opoverload]
    torch.testing.assert_close(output, norm.reference(x, weight))
    if train:
        torch.testing.assert_close(
            torch.autograd.grad(output.sum(), (x, weight)),
            torch.autograd.grad(norm.reference(x, weight).sum(), (x, weight)),
        )


@KINDS
def test_function_modes_see_the_operator(kind):
    class Functions(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight = inputs(False)
    with Functions() as mode:
        OPS[kind](x, weight)
    assert OPS[kind]._opoverload in mode.seen


@KINDS
def test_registered_for_a_subclass(kind):
    op = opkit.custom_op(f"tcompose::dispatched_{kind}", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    if kind == "kernel":
        op.register_kernel("cpu", lambda x: x * 2)

    @op.register_torch_dispatch(TwoTensor)
    def _(cls, func, types, args=(), kwargs=None):
        return TwoTensor(args[0].a * 10, args[0].b * 10)

    found = op(TwoTensor(torch.ones(2), torch.ones(2)))
    torch.testing.assert_close(found.a, torch.full((2,), 10.0))
    opkit.remove(op.name)


# ---- counting and tags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [False, True])
@SPELLINGS
def test_flops(kernel, spelling):
    op = opkit.custom_op("tcompose::product", lambda a, b: a @ b, schema="(Tensor a, Tensor b) -> Tensor")
    if kernel:
        op.register_kernel("cpu", lambda a, b: torch.from_numpy(a.detach().numpy() @ b.detach().numpy()))
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    with FlopCounterMode(display=False) as counter:
        output = spelled(op, spelling)(a, b)
    assert counter.get_total_flops() == 2 * 3 * 4 * 5
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    # under a mode the backward runs the reference again, and the counter counts what runs
    assert 2 * 3 * 4 * 5 <= counter.get_total_flops() <= 2 * 2 * 3 * 4 * 5
    opkit.remove("tcompose::product")


TAGS = [
    "needs_fixed_stride_order",
    "needs_exact_strides",
    "flexible_layout",
    "cudagraph_unsafe",
    "nondeterministic_seeded",
]


@pytest.mark.parametrize("tag", TAGS)
def test_tags_reach_the_overload(tag):
    value = getattr(torch.Tag, tag, None)
    if value is None:
        pytest.skip(f"this torch has no torch.Tag.{tag}")
    op = opkit.custom_op("tcompose::tagged", lambda x: x * 2, schema="(Tensor x) -> Tensor", tags=value)
    assert value in op._opoverload.tags
    assert torch.Tag.pt2_compliant_tag in op._opoverload.tags
    opkit.remove("tcompose::tagged")


@pytest.mark.parametrize("tag", ["needs_fixed_stride_order", "needs_exact_strides"])
def test_stride_tags_bind_inductor(tag):
    torch._dynamo.reset()
    strides = []
    op = opkit.custom_op(
        "tcompose::strided", lambda x: x * 2, schema="(Tensor x) -> Tensor", tags=getattr(torch.Tag, tag)
    )
    op.register_kernel("cpu", lambda x: strides.append(x.stride()) or x * 2)
    x = torch.randn(4, 6)
    eager = op((x + 1).t())
    torch.testing.assert_close(torch.compile(lambda x: op((x + 1).t()), fullgraph=True)(x), eager)
    assert strides[0] == strides[-1] == (1, 6)
    opkit.remove("tcompose::strided")


@pytest.mark.skipif(not hasattr(torch._library, "effects"), reason="register_effect came with torch 2.13")
def test_register_effect():
    torch._dynamo.reset()
    log = []

    @opkit.custom_op("tcompose::effect", mutates_args=(), opaque=True)
    def effect(x: Tensor, label: int) -> Tensor:
        log.append(label)
        return x.clone()

    effect.register_fake(lambda x, label: torch.empty_like(x))
    effect.register_effect(torch._library.effects.EffectType.ORDERED)

    def model(x):
        effect(x, 1)
        effect(x, 2)
        return x + 1

    torch.compile(model, fullgraph=True)(torch.ones(2))
    assert log == [1, 2]
    opkit.remove("tcompose::effect")


# ---- copies ---------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.op(x, self.weight)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@KINDS
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_modules_hold_the_same_operator(kind, how):
    block, x = Block(OPS[kind]), torch.randn(3, 8)
    other = COPIES[how](block)
    assert other.op is OPS[kind]
    torch.testing.assert_close(other(x), block(x))
    assert (other.weight is block.weight) == (how == "copy")


@KINDS
def test_modules_are_saved_whole(kind):
    block, file = Block(OPS[kind]), io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert other.op is OPS[kind]


@KINDS
def test_traced_by_make_fx_and_fx(kind):
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight = inputs(False)
    graph = make_fx(lambda x, w: OPS[kind](x, w) + 1)(x, weight)
    assert OPS[kind]._opoverload in [node.target for node in graph.graph.nodes]
    torch.testing.assert_close(graph(x, weight), norm.reference(x, weight) + 1)
    symbolic = torch.fx.symbolic_trace(Block(OPS[kind]))
    torch.testing.assert_close(symbolic(x), norm.reference(x, torch.ones(8)))


@KINDS
def test_parametrised_and_functional_modules(kind):
    block, x = Block(OPS[kind]), torch.randn(3, 8)
    doubled = torch.func.functional_call(block, {"weight": torch.full((8,), 2.0)}, (x,))
    torch.testing.assert_close(doubled, norm.reference(x, torch.full((8,), 2.0)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@KINDS
def test_anomaly_mode_and_gradient_hooks(kind):
    x, weight = inputs()
    seen = []
    x.register_hook(lambda grad: seen.append(grad.shape))
    with torch.autograd.detect_anomaly(check_nan=True):
        OPS[kind](x, weight).sum().backward()
    assert seen == [x.shape]


@SPELLINGS
@KINDS
@pytest.mark.parametrize("train", [False, True])
def test_modes_see_an_operator_that_was_called_often(kind, spelling, train):
    from torch.fx.experimental.proxy_tensor import make_fx

    op, (x, weight) = spelled(OPS[kind], spelling), inputs(train)
    for _ in range(300):
        op(x, weight)
    with Recording() as mode:
        op(x, weight)
    assert mode.seen == [OPS[kind]._opoverload]
    graph = make_fx(lambda x, w: op(x, w))(x, weight)
    assert OPS[kind]._opoverload in [node.target for node in graph.graph.nodes]
    contexts = functools.partial(create_selective_checkpoint_contexts, [OPS[kind]._opoverload])
    CALLS.clear()
    checkpoint(lambda x, w: op(x.sin(), w), x, weight, use_reentrant=False, context_fn=contexts)
    assert len(CALLS) == (kind == "kernel")
    assert type(op(TwoTensor(x, x), weight)) is TwoTensor
