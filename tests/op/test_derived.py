"""Rules derived from the reference, each against the reference itself or a float64 oracle."""

import gc
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import opkit
from opkit.errors import OutputError, StrideWarning

calls: dict[str, int] = {}


def counted(op: Any, name: str = "counted") -> Any:
    """Register on ``op`` a CPU kernel that is its own reference and counts its calls."""
    key = op.name
    calls[key] = 0

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[key] += 1
        return op.reference(*args, **kwargs)

    op.register_kernel("cpu", kernel, name=name)
    return op


def rms_norm(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def softmax(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    return torch.softmax(x, -1)


def swiglu(x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    return torch.nn.functional.silu(x) * y


def total(x: Float[Tensor, "*batch"]) -> Float[Tensor, ""]:
    return x.sum()


def two_results(x: Float[Tensor, "n m"]) -> tuple[Float[Tensor, "n m"], Int[Tensor, "n"]]:
    return x.exp() * x, x.argmax(-1)


def in_place_inside(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    t = x * 2
    t.view(-1)[:2].mul_(3)
    return t * x


def with_detach(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    return x * x.detach().exp()


def with_no_grad(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
    with torch.no_grad():
        scale = x.abs().amax()
    return x * x / scale


def attention_like(q: Float[Tensor, "n d"], k: Float[Tensor, "m d"], v: Float[Tensor, "m e"]) -> Float[Tensor, "n e"]:
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


CASES: dict[str, tuple[Any, Any]] = {
    "rms_norm": (rms_norm, lambda: (normal(2, 3, 4), normal(4))),
    "softmax": (softmax, lambda: (normal(3, 5),)),
    "swiglu": (swiglu, lambda: (normal(3, 5), normal(3, 5))),
    "total": (total, lambda: (normal(3, 5),)),
    "two_results": (two_results, lambda: (normal(3, 5),)),
    "in_place_inside": (in_place_inside, lambda: (normal(3, 5),)),
    "with_detach": (with_detach, lambda: (normal(3, 5),)),
    "with_no_grad": (with_no_grad, lambda: (normal(3, 5),)),
    "attention_like": (attention_like, lambda: (normal(3, 4), normal(5, 4), normal(5, 2))),
}
OPS = {name: opkit.custom_op(f"derived::{name}", function) for name, (function, _) in CASES.items()}
KERNELS = {name: counted(opkit.custom_op(f"derived::{name}_kernel", f)) for name, (f, _) in CASES.items()}


def first(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else value[0]


def both(case: str, seed: int = 0) -> tuple[Any, Any, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    function, make = CASES[case]
    return KERNELS[case], function, make()


@pytest.mark.sweep(keep=["rms_norm", "total", "two_results", "in_place_inside", "with_no_grad"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", ["op", "torch.ops"])
def test_backward_and_double_backward(case: str, path: str) -> None:
    op, reference, args = both(case)
    call = op if path == "op" else getattr(torch.ops.derived, f"{case}_kernel")
    args = tuple(a.requires_grad_() for a in args)
    results = []
    for function in (call, reference):
        out = first(function(*args))
        torch.manual_seed(1)
        seeds = torch.randn_like(out)
        grads = torch.autograd.grad(out, args, seeds, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in grads if g.requires_grad) + 0 * out.sum(), args)
        results.append([out, *grads, *second])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", ["rms_norm", "attention_like", "in_place_inside", "softmax", "swiglu", "total"])
def test_gradcheck(case: str) -> None:
    op, _, args = both(case)
    args = tuple(a.requires_grad_() for a in args)
    assert torch.autograd.gradcheck(op, args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, args)


@pytest.mark.sweep(keep=["rms_norm", "with_no_grad"])
@pytest.mark.parametrize("case", [*reversed(CASES)])
def test_every_subset_of_inputs(case: str) -> None:
    op, reference, args = both(case)
    for mask in range(1, 2 ** len(args)):
        chosen = tuple(a.clone().requires_grad_(bool(mask >> i & 1)) for i, a in enumerate(args))
        wanted = [a for a in chosen if a.requires_grad]
        got = torch.autograd.grad(first(op(*chosen)).sum(), wanted)
        want = torch.autograd.grad(first(reference(*chosen)).sum(), wanted)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_the_kernel_computes_the_training_forward_once() -> None:
    op, _, args = both("rms_norm")
    x, w = (a.requires_grad_() for a in args)
    op(x, w).sum().backward()
    before = calls[op.name]
    op(x, w).sum().backward()
    assert calls[op.name] == before + 1
    torch.func.grad(lambda x: op(x, w).sum())(x)
    assert calls[op.name] == before + 2


def test_the_backward_is_traced_once_for_many_shapes() -> None:
    runs: list[int] = []

    def noted(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d"]) -> Float[Tensor, "*batch d"]:
        runs.append(1)
        return rms_norm(x, w)

    op = opkit.custom_op("derived::traced_once", noted)
    op.register_kernel("cpu", rms_norm)
    for rows in (2, 3, 5, 8):
        x = torch.randn(rows, 6, requires_grad=True)
        op(x, torch.ones(6)).sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(rms_norm(x, torch.ones(6)).sum(), x)[0])
        assert bool(runs) == (rows == 2), f"at {rows} rows the reference ran {len(runs)} times"
        runs.clear()


def saved_bytes(function: Any, args: tuple[Tensor, ...]) -> int:
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = function(*args)
    del output
    gc.collect()
    return sum(saved.values())


@pytest.mark.sweep(keep=["rms_norm", "softmax"])
@pytest.mark.parametrize("case", ["rms_norm", "softmax", "swiglu", "total", "attention_like"])
def test_saved_bytes_are_at_most_the_references_own(case: str) -> None:
    op, reference, args = both(case)
    args = tuple(a.requires_grad_() for a in args)
    assert saved_bytes(op, args) <= 1.1 * saved_bytes(reference, args)


def test_an_input_that_only_lends_its_sizes_is_not_saved() -> None:
    op, _, args = both("total")
    assert saved_bytes(op, tuple(a.requires_grad_() for a in args)) == 0


def test_non_contiguous_and_expanded_gradients_and_inputs() -> None:
    op, reference, _ = both("rms_norm")
    x = normal(4, 3).t().requires_grad_()
    w = normal(4)
    for seeds in (torch.ones(1, 1, dtype=torch.float64).expand(3, 4), normal(4, 3).t()):
        got = torch.autograd.grad(op(x, w), x, seeds)[0]
        torch.testing.assert_close(got, torch.autograd.grad(reference(x, w), x, seeds)[0])


def test_integer_outputs_take_no_gradient() -> None:
    op, _, args = both("two_results")
    values, indices = op(args[0].requires_grad_())
    assert values.requires_grad
    assert not indices.requires_grad


def test_an_output_that_the_reference_cuts_off_is_not_differentiable() -> None:
    def cut(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return x * 2, (x > 0).to(x.dtype)

    op = counted(opkit.custom_op("derived::cut", cut))
    saved, mask = op(torch.randn(3, requires_grad=True))
    assert saved.requires_grad
    assert not mask.requires_grad


def test_tensor_lists() -> None:
    def stack(xs: list[Float[Tensor, "n"]], extra: list[Float[Tensor, "n"] | None], k: float = 2.0) -> list[Tensor]:
        y = torch.stack(xs) * k
        return [y, sum(e for e in extra if e is not None) + y[0]]

    op = counted(opkit.custom_op("derived::stack", stack, mutates_args=()))
    xs = [torch.randn(3, requires_grad=True) for _ in range(3)]
    extra = [torch.randn(3, requires_grad=True), None]
    leaves = [*xs, extra[0]]
    for _ in range(2):
        got = torch.autograd.grad(sum(t.sin().sum() for t in op(xs, extra, 3.0)), leaves)
        want = torch.autograd.grad(sum(t.sin().sum() for t in stack(xs, extra, 3.0)), leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def test_fake() -> None:
    for case in CASES:
        op, reference, args = both(case)
        real = reference(*args)
        with FakeTensorMode() as mode:
            fake = op(*[mode.from_tensor(a) for a in args])
        for a, b in zip(torch.utils._pytree.tree_leaves(fake), torch.utils._pytree.tree_leaves(real), strict=True):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device), case


def test_meta_tensors() -> None:
    out = OPS["rms_norm"](torch.empty(3, 4, device="meta"), torch.empty(4, device="meta"))
    assert out.shape == (3, 4)
    assert out.is_meta
    assert KERNELS["rms_norm"](torch.empty(3, 4, device="meta"), torch.empty(4, device="meta")).is_meta


def test_fake_of_data_dependent_outputs() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def positives(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
        return x[x > 0]

    op = counted(opkit.custom_op("derived::positives", positives))
    with FakeTensorMode(shape_env=ShapeEnv(allow_dynamic_output_shape_ops=True)):
        out = op(torch.randn(5))
    assert isinstance(out.shape[0], torch.SymInt)
    x = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("case", [*reversed(CASES)])
def test_forward_mode(case: str) -> None:
    op, reference, args = both(case)
    tangents = tuple(torch.randn_like(a) for a in args)
    run = lambda f: torch.func.jvp(lambda *a: first(f(*a)), args, tangents)  # noqa: E731
    for call in (op, OPS[case], getattr(torch.ops.derived, f"{case}_kernel")):
        for got, want in zip(run(call), run(reference), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", ["rms_norm", "softmax", "swiglu"])
def test_functorch_compositions(case: str) -> None:
    op, reference, args = both(case)
    x, *rest = args
    seeds = torch.randn_like(x)
    f = lambda g: lambda x: (g(x, *rest) * seeds).sum()  # noqa: E731
    for transform in (
        torch.func.grad,
        lambda g: torch.func.jacrev(lambda x: g(x) * x.sum()),
        lambda g: torch.func.jacfwd(lambda x: g(x) * x.sum()),
        lambda g: torch.func.grad(lambda x: torch.func.grad(g)(x).pow(2).sum()),
        lambda g: (
            lambda x: torch.func.vmap(torch.func.grad(lambda r: g(x + r)))(torch.zeros(2, *x.shape, dtype=x.dtype))
        ),
        torch.func.hessian,
    ):
        torch.testing.assert_close(transform(f(op))(x), transform(f(reference))(x))


def test_flops() -> None:
    def products(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
        return (x @ y) * 2

    for op in (
        opkit.custom_op("derived::products", products),
        counted(opkit.custom_op("derived::products_kernel", products)),
    ):
        x, y = torch.randn(3, 4), torch.randn(4, 5)
        op(x, y)
        with FlopCounterMode(display=False) as counter:
            op(x, y)
            getattr(torch.ops.derived, op.name.split("::")[1])(x, y)
        assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5


def test_kernels_are_compared_with_the_reference() -> None:
    def half(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return x.t().contiguous().t() * 0.5

    op = opkit.custom_op("derived::half", half)
    op.register_kernel("cpu", lambda x: (x * 0.5).double(), name="wrong_dtype")
    with pytest.raises(OutputError, match=r"wrong_dtype.*torch.float64.*torch.float32"):
        op(torch.randn(2, 3))
    op.register_kernel("cpu", lambda x: x * 0.5, name="wrong_strides")
    with pytest.warns(StrideWarning, match="wrong_strides"):
        out = op(torch.randn(2, 3))
    assert out.stride() == (1, 2)
    assert op(torch.randn(2, 3)).stride() == (1, 2)


def test_empty_and_zero_dimensional_tensors() -> None:
    for ops in (OPS, KERNELS):
        assert ops["rms_norm"](torch.empty(0, 4), torch.ones(4)).shape == (0, 4)
        x = torch.empty(0, 4, requires_grad=True)
        ops["rms_norm"](x, torch.ones(4)).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (0, 4)
        assert ops["total"](torch.tensor(3.0)).item() == 3
