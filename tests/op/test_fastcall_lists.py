"""The fast path for signatures with lists of tensors and of numbers, and for tensors that are None."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import opkit
from opkit.op.kernel_kinds import PreparedKernel


def summed(
    x: Tensor,
    others: list[Tensor],
    shifts: list[int],
    factors: list[float],
    w: Tensor | None = None,
    signs: list[bool] | None = None,
) -> tuple[Tensor, Tensor]:
    y = x.sin()
    for i, other in enumerate(others):
        y = y + other.sin() * (factors[i] if i < len(factors) else 1.0)
    y = y + sum(shifts)
    y = y if w is None else y * w
    y = -y if signs and signs[0] else y
    return y, y.sum(-1)


REFERENCE = opkit.custom_op("fastlists::reference", summed)
KERNEL = opkit.custom_op("fastlists::kernel", summed)
KERNEL.register_kernel("cpu", lambda *args: summed(*args), when=lambda shifts: len(shifts) < 9)
OPS = {"reference": REFERENCE, "kernel": KERNEL}


def arguments() -> list[tuple[Any, ...]]:
    x, w, a, b = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4), torch.randn(4)
    return [
        (x, [], [], []),
        (x, [a], [], []),
        (x, [a, b], [1, 2], [0.5]),
        (x, [b, a], [1, 2], [0.5]),
        (x, [a], [1, 2], [0.25, 1.0]),
        (x, [a], [2, 1], [], w),
        (x, [a], [2, 1], [], None, [True]),
        (x, [a], [2, 1], [], w, [True]),
        (x, [a], [2, 1], [], w, [False, True]),
        (x, [a.t().contiguous().t()], [], []),
        (x, [a, a], [], []),
        (x.double(), [a.double()], [3], [2.0]),
        (x, [a.clone().requires_grad_()], [], []),
        (x.clone().requires_grad_(), [a, b.clone().requires_grad_()], [1], [], w.clone().requires_grad_()),
        (torch.empty(0, 4), [b], [1], []),
        (x, [torch.full((3, 4), float("nan"))], list(range(9)), []),
    ]


@pytest.mark.parametrize("kind", OPS)
def test_both_paths_over_the_same_inputs(kind: str) -> None:
    op = OPS[kind]
    cases = arguments()
    for _ in range(3):  # so that guards are installed, hit and replaced
        for args in [case for case in cases for _ in range(3)]:
            want = summed(*args)
            for call in (op, getattr(torch.ops.fastlists, kind), op._dispatched):
                for got, exact in zip(call(*args), want, strict=True):
                    torch.testing.assert_close(got, exact, equal_nan=True)
                    assert (got.stride(), got.requires_grad) == (exact.stride(), exact.requires_grad)
    assert op._dispatcher.fast.call.__code__.co_filename.startswith("<opkit call")


@pytest.mark.parametrize("kind", OPS)
def test_gradients_of_what_is_in_lists(kind: str) -> None:
    op = OPS[kind]
    x, a, b = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for _ in range(5):
        leaves = (x, a, b)
        found = torch.autograd.grad(op(x, [a, b], [1], [0.5, 2.0])[0].cos().sum(), leaves)
        wanted = torch.autograd.grad(summed(x, [a, b], [1], [0.5, 2.0])[0].cos().sum(), leaves)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want)
        with torch.no_grad():
            assert not op(x, [a, b], [1], [0.5, 2.0])[0].requires_grad


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
    op, x, a = OPS[kind], torch.randn(3, 4), torch.randn(3, 4)
    rest = ([2], [0.5])
    for _ in range(6):
        op(x, [a], *rest)  # the guard is installed: only the circumstances differ below
    with Logging() as mode:
        op(x, [a], *rest)
    assert mode.seen[0] == f"fastlists.{kind}.default"
    pair = op(x, [TwoTensor(a, a + 1)], *rest)[0]
    assert isinstance(pair, TwoTensor)
    torch.testing.assert_close(pair.b, summed(x, [a + 1], *rest)[0])
    torch.testing.assert_close(torch.vmap(lambda a: op(x, [a], *rest)[0])(a[None])[0], summed(x, [a], *rest)[0])
    torch.testing.assert_close(torch.func.grad(lambda a: op(x, [a], *rest)[0].sum())(a), 0.5 * a.cos())
    _, tangent = torch.func.jvp(lambda a: op(x, [a], *rest)[0], (a,), (torch.ones_like(a),))
    torch.testing.assert_close(tangent, 0.5 * a.cos())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        out = op(x, [dual], *rest)[0]
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, 0.5 * a.cos())
    with torch.profiler.profile(acc_events=True) as profile:
        op(x, [a], *rest)
    assert any(event.key == f"fastlists::{kind}" for event in profile.key_averages())
    with torch.inference_mode():
        assert op(x, [a], *rest)[0].is_inference()
    assert torch.compile(lambda x, a: op(x, [a], *rest)[0], backend="eager")(x, a).shape == x.shape


def test_what_the_dispatcher_refuses_is_refused_with_a_guard_installed() -> None:
    x, a = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(6):
        KERNEL(x, [a], [1], [1.0])
    for wrong in ([1.0], ["1"], None, 1):
        with pytest.raises((RuntimeError, TypeError)):
            KERNEL(x, [a], wrong, [1.0])
    with pytest.raises((RuntimeError, TypeError)):
        KERNEL(x, [a, 2.0], [1], [1.0])
    torch.testing.assert_close(KERNEL(x, (a,), (1,), (1.0,)), summed(x, [a], [1], [1.0]))


def test_lists_of_a_kernel_are_its_own() -> None:
    def taken(x: Tensor, shifts: list[int], others: list[Tensor]) -> Tensor:
        return x + sum(shifts)

    op = opkit.custom_op("fastlists::taken", taken)

    @op.register_kernel("cpu")
    def _(x: Tensor, shifts: list[int], others: list[Tensor]) -> Tensor:
        found = x + sum(shifts)
        shifts.append(7)
        others.clear()
        return found

    shifts, others = [1], [torch.ones(2)]
    for _ in range(6):
        assert op(torch.zeros(2), shifts, others).tolist() == [1.0, 1.0]
    assert shifts == [1]
    assert len(others) == 1


def test_a_list_that_changes_after_the_call() -> None:
    op = opkit.custom_op("fastlists::scaled", scaled_by)
    op.register_autograd(
        lambda ctx, grad: (grad * sum(ctx.factors), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factors", inputs[1]),
    )
    x = torch.ones(2, requires_grad=True)
    for _ in range(6):
        factors = [2, 3]
        out = op(x, factors)
        factors.append(100)
        assert torch.autograd.grad(out.sum(), x)[0].tolist() == [5.0, 5.0]


def scaled_by(x: Tensor, factors: list[int]) -> Tensor:
    return x * sum(factors)


def test_lazy_bits_and_sparse_tensors_in_lists_reach_kernels_resolved() -> None:
    seen: list[bool] = []

    def total(others: list[Tensor]) -> Tensor:
        return torch.stack([other.to_dense() if other.is_sparse else other for other in others]).sum(0)

    op = opkit.custom_op("fastlists::total", total)

    @op.register_kernel("cpu")
    def _(others: list[Tensor]) -> Tensor:
        seen.extend(other.is_neg() or other.is_conj() for other in others)
        return total(others)

    z = torch.randn(3, dtype=torch.complex64)
    for _ in range(5):
        torch.testing.assert_close(op([z, z + 1]), 2 * z + 1)
        torch.testing.assert_close(op([z, z.conj()]), (2 * z.real).to(z.dtype))
        torch.testing.assert_close(op([z.real, torch._neg_view(z.real)]), torch.zeros(3))
        torch.testing.assert_close(op([torch.eye(3).to_sparse()]), torch.eye(3))
    assert not any(seen)


def test_prepared_kernels_are_prepared_once_for_calls_that_are_alike() -> None:
    prepared: list[Any] = []

    def shifted(x: Tensor, shifts: list[int], factor: float = 1.0) -> Tensor:
        return (x + sum(shifts)) * factor

    op = opkit.custom_op("fastlists::shifted", shifted)

    @PreparedKernel
    def kernel(x: Tensor, shifts: list[int], factor: float = 1.0) -> Any:
        prepared.append((tuple(x.shape), x.stride(), x.dtype, tuple(shifts), factor))
        shift = sum(shifts)
        return lambda x, *_: (x + shift) * factor

    op.register_kernel("cpu", kernel)
    x = torch.randn(4, 3)
    cases = [
        (x, [1], 2.0),
        (x, [1], 3.0),
        (x, [1, 1], 2.0),
        (x[:2], [1], 2.0),
        (x.t(), [1], 2.0),
        (x.double(), [1], 2.0),
    ]
    for _ in range(6):
        for args in cases:
            for call in (op, op._dispatched):
                torch.testing.assert_close(call(*args), shifted(*args))
    assert op.select(*cases[0]).kernel == "kernel"
    assert len(set(prepared)) == len(cases)
    assert len(prepared) <= 2 * len(cases)  # the written call and the backend have plans of their own


def test_prepared_kernels_take_gradients_and_other_paths() -> None:
    op = opkit.custom_op("fastlists::doubled", doubled)
    op.register_kernel("cpu", PreparedKernel(lambda x: lambda x: x * 2))
    x = torch.randn(3, requires_grad=True)
    for _ in range(5):
        assert torch.autograd.grad(op(x).sum(), x)[0].tolist() == [2.0] * 3
    torch.testing.assert_close(torch.vmap(op)(x.detach()), x.detach() * 2)
    report = opkit.check(op, properties=["numbers", "schema", "layout"], max_examples=10, database=False)
    report.raise_for_failures()


def doubled(x: Tensor) -> Tensor:
    return x * 2
