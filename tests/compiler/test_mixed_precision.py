"""Training with autocast and a gradient scaler, and products of tensors under autocast, as in eager mode."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")]

NARROW = (torch.bfloat16, torch.float16)


def compiled(function):
    return torch.compile(function, backend="opkit")


# ---- scaled losses ---------------------------------------------------------------------------------------------------


def trained(optimizer, clip=True, compile_model=False, compile_optimizer=False, compile_step=False):
    """Train with float16 and a scale that is too large at first; return the losses, and the scale before each step."""
    torch.manual_seed(0)
    x, labels = torch.randn(24, 16), torch.randint(4, (24,))
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    optimizer = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=4)
    call = compiled(model) if compile_model else model
    if compile_optimizer:
        optimizer.step = compiled(optimizer.step)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(call(x), labels)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    run = compiled(step) if compile_step else step
    losses, scales = [], []
    for _ in range(20):
        scales.append(scaler.get_scale())
        losses.append(run().item())
    return losses, scales


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused_adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)  # takes the scale, and skips steps itself


@pytest.mark.filterwarnings("ignore:Dynamo detected")
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (sgd, {"compile_model": True}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (sgd, {"compile_model": True, "clip": False}),
                (adam, {"compile_model": True, "compile_optimizer": True}),
                (fused_adam, {"compile_model": True, "clip": False}),
                (fused_adam, {"compile_model": True, "compile_optimizer": True, "clip": False}),
                (adam, {"compile_step": True}),
            )
        ),
    ],
)
def test_a_gradient_scaler_skips_the_steps_of_eager_mode(optimizer, options):
    losses, scales = trained(optimizer, **options)
    expected_losses, expected_scales = trained(optimizer, clip=options.get("clip", True))
    assert scales == expected_scales
    assert any(after < before for before, after in itertools.pairwise(scales))  # steps were skipped
    assert any(after > before for before, after in itertools.pairwise(scales))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-2, atol=1e-3)
    assert losses[-1] < losses[0] - 0.1


# ---- products --------------------------------------------------------------------------------------------------------


def einsum(equation, *shapes):
    return functools.partial(torch.einsum, equation), shapes


def times(alpha, beta, function):
    return lambda *args: function(*args, alpha=alpha, beta=beta)


PRODUCTS = {
    "einsum, a matrix": einsum("ij,jk->ik", (3, 5), (5, 4)),
    "einsum, batches": einsum("bij,bjk->bik", (2, 3, 5), (2, 5, 4)),
    "einsum, heads": einsum("bqhd,bkhd->bhqk", (2, 3, 2, 5), (2, 4, 2, 5)),
    "einsum, any dimensions": einsum("...d,de->...e", (2, 3, 5), (5, 4)),
    "einsum, rows": einsum("ij,ij->i", (3, 5), (3, 5)),
    "einsum, outer": einsum("i,j->ij", (3,), (5,)),
    "einsum, a diagonal": einsum("ii->i", (4, 4)),
    "einsum, three": einsum("bi,oij,bj->bo", (3, 5), (2, 5, 4), (3, 4)),
    "mm": (torch.mm, ((3, 5), (5, 4))),
    "mv": (torch.mv, ((3, 5), (5,))),
    "dot": (torch.dot, ((5,), (5,))),
    "bmm": (torch.bmm, ((2, 3, 5), (2, 5, 4))),
    "matmul, a vector": (torch.matmul, ((5,), (5, 4))),
    "matmul, broadcast": (torch.matmul, ((3, 2, 3, 5), (2, 5, 4))),
    "addmm": (times(2.0, 0.5, torch.addmm), ((4,), (3, 5), (5, 4))),
    "addmv": (torch.addmv, ((3,), (3, 5), (5,))),
    "addr": (torch.addr, ((3, 4), (3,), (4,))),
    "addbmm": (torch.addbmm, ((3, 4), (2, 3, 5), (2, 5, 4))),
    "baddbmm": (times(2.0, 0.5, torch.baddbmm), ((3, 4), (2, 3, 5), (2, 5, 4))),
    "tensordot": (functools.partial(torch.tensordot, dims=([1, 2], [0, 1])), ((3, 5, 2), (5, 2, 4))),
    "inner": (torch.inner, ((2, 3, 5), (4, 5))),
    "outer": (torch.outer, ((3,), (5,))),
    "kron": (torch.kron, ((2, 3), (3, 2))),
    "chain_matmul": (torch.chain_matmul, ((3, 5), (5, 4), (4, 2))),
    "multi_dot": (lambda *args: torch.linalg.multi_dot(args), ((5,), (5, 4), (4, 2), (2,))),
    "matrix_power": (functools.partial(torch.linalg.matrix_power, n=3), ((4, 4),)),
    "vecdot": (torch.linalg.vecdot, ((3, 5), (3, 5))),
    "bilinear": (F.bilinear, ((3, 5), (3, 4), (2, 5, 4), (2,))),
    "linear": (F.linear, ((2, 3, 5), (4, 5), (4,))),
    "cdist": (torch.cdist, ((2, 3, 5), (2, 4, 5))),
    "cdist, by products": (functools.partial(torch.cdist, compute_mode="use_mm_for_euclid_dist"), ((3, 5), (4, 5))),
    "cdist, sums": (functools.partial(torch.cdist, p=1.0), ((3, 5), (4, 5))),
    "conv2d": (F.conv2d, ((2, 3, 5, 6), (4, 3, 3, 3), (4,))),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 3, 4, 5), (3, 2, 3, 3))),
    "attention": (F.scaled_dot_product_attention, ((2, 2, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8))),
    "a product and wide results": (lambda a, b: ((a @ b).softmax(-1), a @ b, (a @ b).norm()), ((3, 5), (5, 4))),
    "a product, joined": (lambda a, b: torch.cat([a @ b, a]), ((3, 3), (3, 3))),
}


def first_derivatives(function, args, dtype):
    """Return the results, and the gradients of a weighted sum of them."""
    args = [each.clone().requires_grad_() for each in args]
    with torch.autocast("cpu", dtype, enabled=dtype in NARROW):
        results = function(*args)
    results = results if isinstance(results, tuple) else (results,)
    sum((each.to(torch.float64) * _weights(each)).sum() for each in results).backward()
    return [*(each.detach() for each in results), *(each.grad for each in args)]


def second_derivatives(function, args, dtype, compile=lambda function: function):
    """Return the gradients of the squares of the gradients, which torch.compile has within a graph alone."""
    every = tuple(range(len(args)))

    def weighted(*args):
        results = function(*args)
        return sum((each.to(torch.float64) * _weights(each)).sum() for each in torch.utils._pytree.tree_leaves(results))

    def squares(*args):
        return sum(each.to(torch.float64).square().sum() for each in torch.func.grad(weighted, every)(*args))

    with torch.autocast("cpu", dtype, enabled=dtype in NARROW):
        return compile(lambda *args: torch.func.grad(squares, every)(*args))(*args)


def _weights(tensor):
    return torch.linspace(-1, 2, tensor.numel(), dtype=torch.float64).reshape(tensor.shape)


def check_precision(found, eager, exact, dtype):
    """Compare the dtypes, and the errors against float64, of which one of rounding is none."""
    assert [each.dtype for each in found] == [each.dtype for each in eager]
    for each, of_eager, reference in zip(found, eager, exact, strict=True):
        errors = [
            (tensor.double() - reference).norm() / reference.norm().clamp_min(1e-9) for tensor in (each, of_eager)
        ]
        assert errors[0] <= max(4 * errors[1], 2 * torch.finfo(dtype).eps)


def cases(*telling):
    return [
        name if name in telling else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in PRODUCTS  # each compiles a graph or two
    ]


def _args(name):
    function, shapes = PRODUCTS[name]
    generator = torch.Generator().manual_seed(3)
    return function, [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", cases("einsum, three", "baddbmm", "bilinear", "cdist, by products", "multi_dot"))
def test_products_under_autocast(name, dtype):
    function, args = _args(name)
    exact = first_derivatives(function, [each.double() for each in args], torch.float64)
    eager, found = (first_derivatives(each, args, dtype) for each in (function, compiled(function)))
    check_precision(found, eager, exact, dtype)


class Product(torch.autograd.Function):
    """A product of matrices whose gradients are products, too."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return (a @ b).float()

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


def product(a, b):
    return Product.apply(a, b)


def test_backward_is_outside_of_autocast():
    """As in eager mode, where ``backward`` is called after the block; AOTAutograd traces it in the block."""
    args = torch.randn(3, 5), torch.randn(5, 4)
    eager, found = (first_derivatives(each, args, torch.bfloat16) for each in (product, compiled(product)))
    torch.testing.assert_close(found, eager)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", cases())
def test_second_derivatives_under_autocast(name, dtype):
    function, args = _args(name)
    try:
        exact = second_derivatives(function, [each.double() for each in args], torch.float64)
        eager = second_derivatives(function, args, dtype)
    except RuntimeError as error:
        pytest.skip(f"eager mode has none: {error}")
    check_precision(second_derivatives(function, args, dtype, compiled), eager, exact, dtype)
