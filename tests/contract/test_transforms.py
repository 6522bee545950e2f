"""transforms: planted defects that each property must catch, right operators that it must pass."""

import pytest
import torch
import torch.nn.functional as F

from opkit.testing import tensor

TWO = (tensor("n"), tensor("n"))


def library_op(name, rule):
    @torch.library.custom_op(f"transforms_test::{name}", mutates_args=())
    def mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    mul.register_vmap(rule)
    return mul


def ignores_unmapped(info, in_dims, x, y):
    return torch.mul(x, y), 0


def wrong_out_dim(info, in_dims, x, y):
    x, y = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, y), in_dims, strict=True))
    return x * y, -1


def right_rule(info, in_dims, x, y):
    x, y = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((x, y), in_dims, strict=True))
    return x * y, 0


@pytest.mark.parametrize("rule", [ignores_unmapped, wrong_out_dim])
def test_a_wrong_batching_rule(fails, rule):
    failure = fails("transforms.vmap", library_op(rule.__name__, rule), args=TWO)
    assert max(failure.args[0].shape) <= 3


@pytest.mark.sweep(2)
@pytest.mark.parametrize("op", [library_op("right", right_rule), torch.mul, torch.atan2])
def test_right_batching_rules(holds, op):
    holds("transforms.vmap", op, args=TWO)


def test_a_jvp_that_torch_func_calls(fails):
    class Op(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

        @staticmethod
        def jvp(ctx, t):
            return -t * ctx.saved_tensors[0].cos()

    failure = fails("transforms.functional", lambda x: Op.apply(x), args=(tensor("n"),))
    assert failure.args[0].shape == (1,)


def test_an_operator_that_breaks_under_autocast(fails):
    def op(x, w):
        out = torch.zeros(x.shape[0], w.shape[1])
        return torch.add(out, 1).addmm_(x, w) if not torch.is_autocast_enabled("cpu") else out.copy_(1 / 0)

    fails("transforms.autocast", op, args=(tensor("m k"), tensor("k n")), reference=lambda x, w: x @ w + 1)


def test_a_fast_path_that_differs(fails):
    def op(x):
        return x * 2 if torch._C._len_torch_dispatch_stack() else x * 3

    assert fails("transforms.modes", op, args=(tensor("n"),)).args[0].shape == (1,)


def test_state_outside_the_graph(fails):
    kept = []

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept.append(None)
            ctx.save_for_backward(x, torch.tensor(float(len(kept))))
            ctx.turn = len(kept)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            _, turn = ctx.saved_tensors
            return g * (2 if int(turn) == ctx.turn else 3)

    fails("transforms.checkpoint", lambda x: Op.apply(x), args=(tensor("n"),))


GROUP = [
    (lambda x, w: F.layer_norm(x, x.shape[-1:], w), (tensor("b n"), tensor("n"))),
    (lambda x, i: x.index_select(0, i), (tensor("n d"), tensor("k", torch.int64, low=0, high="n-1"))),
    (lambda x: x.max(-1), (tensor("m n"),)),
    (torch.add, TWO),
    (torch.matmul, (tensor("m k"), tensor("k n"))),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("op", "args"), GROUP)
def test_right_operators(asked, op, args):
    report = asked("transforms", op, args=args, reference=op, max_examples=20)
    assert report.ok, str(report)
