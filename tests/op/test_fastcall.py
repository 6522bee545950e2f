"""The fast path and the dispatcher give the same over the same inputs, and the fast path knows when not to be taken."""

import contextlib
import dataclasses
import enum
import itertools
import threading
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import opkit


def weighted(
    x: Float[Tensor, "*batch d"],
    w: Float[Tensor, "d"] | None = None,
    scale: float = 2.0,
    flip: bool = False,
    power: int = 1,
    *,
    kind: str = "sin",
) -> Float[Tensor, "*batch d"]:
    y = getattr(torch, kind)(x) ** power * scale
    y = -y if flip else y
    return y if w is None else y * w


REFERENCE = opkit.custom_op("fast::reference", weighted)
KERNEL = opkit.custom_op("fast::kernel", weighted)
KERNEL.register_kernel("cpu", lambda *args, **kwargs: weighted(*args, **kwargs))
OPS = {"reference": REFERENCE, "kernel": KERNEL}


def arguments() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    x, w = torch.randn(3, 4), torch.randn(4)
    return [
        ((x,), {}),
        ((x, w), {}),
        ((x, w, 3.0), {}),
        ((x, w, 3), {}),
        ((x,), {"scale": 0.5, "flip": True}),
        ((x, None, 1.0, True, 3), {"kind": "cos"}),
        ((x.t().contiguous().t(),), {}),
        ((x[:, :2],), {}),
        ((x[::2],), {}),
        ((torch.randn(2, 2, 4).expand(2, 2, 4),), {}),
        ((torch.empty(0, 4), w), {}),
        ((x.double(), w.double()), {}),
        ((torch.nn.Parameter(x), w), {}),
        ((x.clone().requires_grad_(), w), {}),
        ((x, w.clone().requires_grad_()), {"flip": True}),
        ((torch.full((2, 4), float("nan")), w), {}),
    ]


@pytest.mark.parametrize("kind", OPS)
def test_both_paths_over_the_same_inputs(kind: str) -> None:
    op = OPS[kind]
    through_dispatcher = getattr(torch.ops.fast, kind)
    cases = arguments()
    for _ in range(4):  # so that guards are installed, hit and replaced
        for args, kwargs in cases:
            want = weighted(*args, **kwargs)
            for call in (op, through_dispatcher, op._dispatched):
                got = call(*args, **kwargs)
                torch.testing.assert_close(got, want, equal_nan=True)
                assert (got.stride(), got.requires_grad) == (want.stride(), want.requires_grad)
    assert op._dispatcher.fast.call.__code__.co_filename.startswith("<opkit call")


@pytest.mark.parametrize("kind", OPS)
def test_no_grad_inference_and_gradients_alternate(kind: str) -> None:
    op = OPS[kind]
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(4):
        assert op(x).requires_grad
        with torch.no_grad():
            assert not op(x).requires_grad
        with torch.inference_mode():
            assert op(x).is_inference()
            assert op(torch.randn(3, 4)).is_inference()
        torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], 2 * x.cos())


def test_gradients_are_recorded_after_many_calls_without() -> None:
    def sine(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() * y

    op = opkit.custom_op("fast::sine", sine)
    op.register_kernel("cpu", lambda x, y: sine(x.detach(), y.detach()))  # which autograd does not see
    for x, y in (
        (torch.nn.Parameter(torch.randn(3)), torch.randn(3)),
        (torch.randn(4, requires_grad=True), torch.randn(4)),
    ):
        for record in (False, True, False, True):
            with torch.set_grad_enabled(record):
                for call in (op, op._dispatched) * 9:
                    assert call(x, y).requires_grad == record
                    assert not call(x.detach(), y).requires_grad
            torch.testing.assert_close(torch.autograd.grad(op(x, y).sum(), x)[0], x.detach().cos() * y)


class Logging(TorchDispatchMode):
    """Notes the names of the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", OPS)
def test_modes_subclasses_transforms_autocast_and_the_profiler_are_noticed(kind: str) -> None:
    op, x = OPS[kind], torch.randn(3, 4)
    for _ in range(4):
        op(x)  # the guard for these shapes is installed: only the circumstances differ below
    with Logging() as mode:
        op(x)
    assert mode.seen[0] == f"fast.{kind}.default"

    pair = op(TwoTensor(x, x + 1))
    assert isinstance(pair, TwoTensor)
    torch.testing.assert_close(pair.b, weighted(x + 1))

    torch.testing.assert_close(torch.vmap(op)(x), weighted(x))
    torch.testing.assert_close(torch.func.grad(lambda x: op(x).sum())(x), 2 * x.cos())
    _, tangent = torch.func.jvp(op, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, 2 * x.cos())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(op(dual)).tangent, 2 * x.cos())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(x).dtype is torch.float32
    with torch.profiler.profile(acc_events=True) as profile:
        op(x)
    assert any(event.key == f"fast::{kind}" for event in profile.key_averages())
    with torch.device("meta"):
        torch.testing.assert_close(op(x), weighted(x))


def test_lazy_negation_and_conjugation_reach_kernels_resolved() -> None:
    seen: list[bool] = []

    def plain(x: Tensor) -> Tensor:
        return x * 2

    op = opkit.custom_op("fast::resolved", plain)

    @op.register_kernel("cpu")
    def _(x: Tensor) -> Tensor:
        seen.append(x.is_neg() or x.is_conj())
        return x * 2

    z = torch.randn(3, dtype=torch.complex64)
    for _ in range(4):
        torch.testing.assert_close(op(z.conj()), z.conj() * 2)
        torch.testing.assert_close(op(torch._neg_view(z.real)), -z.real * 2)
        torch.testing.assert_close(op(z), z * 2)
    assert not any(seen)


def test_sparse_tensors_reach_the_reference() -> None:
    def plain(x: Tensor) -> Tensor:
        return x * 2

    op = opkit.custom_op("fast::sparse", plain)
    x = torch.eye(3).to_sparse()
    for _ in range(3):
        torch.testing.assert_close(op(x).to_dense(), torch.eye(3) * 2)


def test_the_same_tensor_twice() -> None:
    def product(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * y

    op = opkit.custom_op("fast::product", product)
    op.register_kernel("cpu", product)
    x = torch.randn(3, requires_grad=True)
    for _ in range(6):
        torch.testing.assert_close(torch.autograd.grad(op(x, x).sum(), x)[0], 2 * x)
        torch.testing.assert_close(op(x.detach(), x.detach()), x.detach() ** 2)


def dots(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "1 1"]:
    if x.shape[0] == 9:
        raise ValueError("nine")
    return x[None] @ y[:, None]


CONTEXTS = {
    "grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("policy", [None, "low"])
@pytest.mark.parametrize("kernel", [False, True])
def test_shapes_repeated_tensors_and_contexts_in_turn(kernel: bool, policy: Any) -> None:
    name = f"dots_{kernel}_{policy}"
    op = opkit.custom_op(f"fast::{name}", dots, autocast=policy)
    if kernel:
        op.register_kernel("cpu", lambda x, y: dots(x, y))
    calls = (op, getattr(torch.ops.fast, name))
    for context, in_context in [*CONTEXTS.items()] * 2:
        for size in [*range(1, 7)] * 2:  # guards of sizes, and then one for all
            x, y = torch.randn(size, requires_grad=size % 2 == 0), torch.randn(size)
            with in_context():
                for call, (a, b) in itertools.product(calls, ((x, y), (x, x), (y, y), (y, x))):
                    got = call(a, b)
                    low = context == "autocast" and policy == "low"
                    assert got.dtype is (torch.bfloat16 if low else torch.float32)  # the body runs with autocast off
                    torch.testing.assert_close(got.float(), dots(a.float(), b.float()).float(), atol=0.1, rtol=0.02)
                    recorded = (a.requires_grad or b.requires_grad) and context in ("grad", "autocast")
                    assert got.requires_grad == recorded
                    if recorded and not low:
                        b_grad = 2 * a if a is b else (b if a is x else a)
                        with torch.autocast("cpu", enabled=False):
                            torch.testing.assert_close(torch.autograd.grad(got.sum(), x)[0], b_grad)


def test_autocast_is_on_again_after_an_error() -> None:
    op = opkit.custom_op("fast::nine", dots)
    with torch.autocast("cpu", torch.bfloat16):
        for size in (3, 3, 3, 9, 9, 3):
            x = torch.ones(size)
            with pytest.raises(ValueError, match="nine") if size == 9 else contextlib.nullcontext():
                op(x, x)
            assert (x[None] @ x[:, None]).dtype is torch.bfloat16


class Wave(enum.Enum):
    SINE = "sin"
    COSINE = "cos"


@dataclasses.dataclass
class Scale:
    factor: float
    bias: Tensor | None = None


def waves(
    x: Tensor, scale: Scale, wave: Wave = Wave.SINE, *, steps: tuple[int, float] = (1, 0.5)
) -> tuple[Tensor, ...]:
    y = getattr(x, wave.value)() * scale.factor * steps[1]
    return y if scale.bias is None else y + scale.bias, y * steps[0]


@pytest.mark.parametrize("kernel", [False, True])
def test_structures_in_turn(kernel: bool) -> None:
    op = opkit.custom_op(f"fast::waves_{kernel}", waves, mutates_args=())
    if kernel:
        op.register_kernel("cpu", waves, when=lambda scale: scale.factor > 0)
    for size in [*range(1, 7)] * 2:
        x = torch.randn(size, requires_grad=size % 2 == 0)
        for scale, context in itertools.product(
            (Scale(2.0), Scale(-1.0), Scale(0.5, torch.randn(size))), CONTEXTS.values()
        ):
            for rest, named in (((), {}), ((Wave.COSINE,), {}), ((Wave.SINE,), {"steps": (3, 2.0)})):
                with context():
                    torch.testing.assert_close(op(x, scale, *rest, **named), waves(x, scale, *rest, **named))
    with pytest.raises(opkit.errors.ArgumentTypeError, match="the argument scale: expected a Scale"):
        op(torch.ones(2), 2.0)


def test_parameters_named_like_the_helpers() -> None:
    def named(entries: Tensor, plan: int = 1, slow: float = 1.0, plans: bool = True) -> Tensor:
        return entries * plan * slow

    def reserved(result: Tensor, entry: int = 1) -> Tensor:
        return result * entry

    for function in (named, reserved):
        op = opkit.custom_op(f"fast::{function.__name__}", function)
        for _ in range(4):
            assert op(torch.ones(1), 3).item() == 3


def test_integer_and_flag_values_are_told_apart() -> None:
    def stepped(x: Int[Tensor, "n"], step: int = 1, up: bool = True) -> Int[Tensor, "n"]:
        return x + step if up else x - step

    op = opkit.custom_op("fast::stepped", stepped)
    op.register_kernel("cpu", stepped, when=lambda step: step > 0)
    x = torch.arange(3)
    for _ in range(5):
        for step, up in ((1, True), (2, True), (1, False), (-1, True)):
            assert torch.equal(op(x, step, up), stepped(x, step, up))


def test_calls_from_many_threads() -> None:
    def scaled(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
        return x.sin() * w

    op = opkit.custom_op("fast::threads", scaled)
    op.register_kernel("cpu", scaled)
    failures: list[BaseException] = []

    def work(step: int) -> None:
        try:
            for i in range(30):
                x, w = torch.randn(1 + i * step % 5, 4, requires_grad=i % 2 == 0), torch.randn(4)
                y = op(x, w)
                torch.testing.assert_close(y, scaled(x, w))
                if x.requires_grad:
                    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.cos() * w)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not torch.fx._symbolic_trace.is_fx_tracing()  # what traces of backwards patch is put back


def test_calls_without_data_and_lazy_ones_reach_their_own_rule_after_plain_ones() -> None:
    def doubled(x: Tensor) -> Tensor:
        read.append(x.data_ptr() != 0 and not x.is_neg())
        return torch.from_numpy(x.detach().numpy() * 2)

    read: list[bool] = []
    alone = opkit.custom_op("fast::alone", doubled, mutates_args=())
    alone.register_fake(torch.empty_like)
    with_reference = opkit.custom_op("fast::with_reference", doubled, mutates_args=(), reference=lambda x: x * 2)
    everywhere = opkit.custom_op("fast::everywhere", lambda x: x * 2, schema="(Tensor x) -> Tensor")
    everywhere.register_kernel(None, doubled)
    for op, packet in (
        (alone, torch.ops.fast.alone),
        (with_reference, torch.ops.fast.with_reference),
        (everywhere, torch.ops.fast.everywhere),
    ):
        for call in (op, packet):
            for _ in range(3):
                call(torch.ones(3))
            read.clear()
            assert call(torch.empty(3, device="meta")).is_meta
            assert call(torch.empty(3, device="meta", requires_grad=True)).is_meta
            with torch.device("meta"):
                assert call(torch.ones(3)).is_meta
            assert not read
            x = torch.arange(3.0)
            torch.testing.assert_close(call(torch._neg_view(x)), -2 * x)  # pyright: ignore[reportPrivateUsage]
            torch.testing.assert_close(call(torch._efficientzerotensor((3,))), torch.zeros(3))
            assert all(read)


def test_a_factory_told_to_use_the_meta_device_gives_its_fake() -> None:
    op = opkit.custom_op("fast::factory", lambda n, device: _unread(), schema="(int n, Device device) -> Tensor")
    op.register_fake(lambda n, device: torch.empty(n, device=device))
    assert op(3, torch.device("meta")).is_meta


def _unread() -> Tensor:
    raise AssertionError("the body ran")
