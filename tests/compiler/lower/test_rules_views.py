"""Views and copies that only move elements, lowered and interpreted, against eager."""

import functools

import torch
from torch.nn import functional as F

from tests.compiler.graphs import check, computes, externs, program_of

_VIEWS = {
    "view": lambda x: x.view(6, 4),
    "view back": lambda x: x.view(6, 4).view(2, 12),
    "view with -1": lambda x: x.view(-1, 2),
    "reshape of a transpose": lambda x: x.transpose(0, 2).reshape(8, 3),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "permute": lambda x: x.permute(2, 0, -2),
    "transpose": lambda x: x.transpose(-1, 0),
    "movedim": lambda x: x.movedim(0, -1),
    "expand": lambda x: x[:, :1].expand(5, 2, 3, 4),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "squeeze a dimension": lambda x: x.unsqueeze(1).squeeze(1).squeeze(0),
    "slice": lambda x: x[:, 1:, ::2],
    "slice from the end": lambda x: x[-1:, :-1, -3:100],
    "select": lambda x: x[1, :, -1],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "split": lambda x: x.split(2, 1),
    "split in sizes": lambda x: x.split([1, 3], -1),
    "chunk": lambda x: x.chunk(3, 2),
    "unbind": lambda x: x.unbind(1),
    "unfold": lambda x: x.unfold(2, 3, 1),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "diagonal below": lambda x: x.diagonal(-1, 0, 2),
    "as_strided": lambda x: (x + 1).as_strided((3, 4), (2, 3), 1),
    "flip": lambda x: x.flip(0, -1),
    "roll": lambda x: x.roll(1, 2),
    "roll two": lambda x: x.roll((1, -2), (0, 2)),
    "roll all": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
    "cat of types": lambda x: torch.cat([x.double(), x], -1),
    "stack": lambda x: torch.stack([x, x + 1], 1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=1.5),
    "crop": lambda x: F.pad(x, (-1, 2)),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, 1:] * 2, 1, 0, 2),
    "slice_scatter with steps": lambda x: torch.slice_scatter(x, x[..., :2] * 2, 2, 0, 4, 2),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, -1),
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x * 2, x[0, 1:, 1:] + 1, (2, 3), (4, 1), 5),
    "as_strided_scatter with steps": lambda x: torch.as_strided_scatter(x * 2, x[:, :, :1] + 1, (2, 3, 1), (2, 5, 7)),
    "as_strided_scatter of all": lambda x: torch.as_strided_scatter(x.new_zeros(24), x.mT, (2, 4, 3), (12, 3, 1)),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:, 0, :3] * 2, 0, 1, 2),
}


def test_views(subtests):
    x = torch.randn(2, 3, 4)
    for name in _VIEWS:
        with subtests.test(name):
            check(_VIEWS[name], x, exact=True, lowered=name != "as_strided")


def test_gradients_of_windows(subtests):
    def gradient(dim, size, step, grad):
        return torch.ops.aten.unfold_backward(grad, (2, 9, 8), dim, size, step)

    for size, step, dim, dtype in ((3, 2, 1, torch.float32), (2, 3, -1, torch.float32), (7, 1, 1, torch.bfloat16)):
        with subtests.test(size=size, step=step):
            windows = torch.randn(2, 9, 8).to(dtype).unfold(dim, size, step)
            grad = torch.randn(windows.shape).to(dtype)
            check(functools.partial(gradient, dim, size, step), grad)


def test_what_follows_a_view(subtests):
    def used(view, x):
        found = view(x * 2)
        return [y.sin() for y in (found if isinstance(found, tuple | list) else [found])]

    for name in _VIEWS:
        with subtests.test(name):
            check(functools.partial(used, _VIEWS[name]), torch.randn(2, 3, 4))


def test_views_are_not_steps(subtests):
    def used(view, x):
        found = view(x)
        return (found[0] if isinstance(found, tuple) else found) + 1

    def one(name):
        steps = computes(program_of(functools.partial(used, _VIEWS[name]), torch.randn(2, 3, 4)))
        assert len(steps) <= (2 if name == "reshape of a transpose" else 1)

    for case in ["view", "permute", "slice", "split", "flip", "reshape of a transpose"]:
        with subtests.test(str(case)):
            one(case)


def test_of_nothing():
    x = torch.randn(0, 3)
    check(
        lambda x: (x.view(3, 0), x.t(), x.unsqueeze(1), x.flip(0), torch.cat([x, x]), x.repeat(2, 2), F.pad(x, (1, 1))),
        x,
    )
    check(lambda x: (torch.cat([x, x.new_zeros(2, 3)]), x.reshape(0), x.expand(2, 0, 3), x[:, 1:]), x)


def test_of_no_dimensions():
    check(
        lambda x: (x.view(1), x.expand(3), x.unsqueeze(0), x.reshape(1, 1), x.flip(()), x.repeat(2)), torch.tensor(1.5)
    )


def test_a_view_into_an_extern_call_is_copied_only_where_it_must_be():
    program = program_of(lambda x: (x.t() @ x, x.flip(0) @ x), torch.randn(3, 3))
    assert len(computes(program)) == 1


def test_gradients_of_views():
    def gradient(x):
        x = x.detach().requires_grad_()
        y = torch.cat([x[:, 1:, 0], x[:, :2, 2]]).sin().sum() + x.diagonal(0, 1, 2).sum() + x.select(0, 1).exp().sum()
        return torch.autograd.grad(y, x)

    check(gradient, torch.randn(2, 3, 4))


def test_one_of_several_complex_results():
    program = program_of(lambda x: torch.linalg.eig(x)[1].real, torch.randn(3, 3))
    assert [line.split(":")[0] for line in externs(program)] == ["aten.linalg_eig.default", "aten.view_as_real.default"]


def test_dimensions_of_a_tensor_that_has_none():
    check(lambda x: (x.flip(0), x.roll(1), x.transpose(0, -1)), torch.tensor(2.0))
    check(lambda x: torch.movedim(x, 0, -1) + 1, torch.tensor(2.0))
