"""Kernels of functions of rows in eager mode: what they serve, and what torch operations compute in place of them."""

import pytest
import torch
from row_functions import COS, LEARNED, D, H, formula, inputs, rotary, rotated, row_by_row

import opkit
from opkit.attn.functions import rows
from opkit.masks import Causal


@pytest.fixture
def no_torch_operations(monkeypatch):
    """Call it, and functions of rows cannot be mapped any more: kernels must do."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch.vmap is called")

    return lambda: monkeypatch.setattr(torch, "vmap", refuse)


def gated_rotary(number, weight, gate):
    def query(x, b, h, at):
        return rotary(x * torch.rsqrt(x.square().mean() + number) * weight, b, h, at + 1)

    return query, query, lambda x, b, h, i: x * torch.sigmoid(gate[b, h, i] * number)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_a_kernel_serves_other_sizes_numbers_and_tensors(no_torch_operations, dtype, limit):
    for n, (batch, queries, number) in enumerate([(2, 9, 1e-3), (3, 14, 0.5), (2, 33, 0.25)]):
        q, k, v = (x.transpose(1, 2) if n else x for x in inputs(dtype, batch, queries, queries))
        q, k, v = (x.detach().transpose(1, 2).contiguous() if n else x for x in (q, k, v))
        weight, gate = torch.rand(D).add(0.5), torch.randn(batch, H, queries, D).to(dtype)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, weight, gate)]
        query, key, output = gated_rotary(number, *leaves[3:])
        found = opkit.attention(*leaves[:3], mask=Causal(), query=query, key=key, output=output)
        gradient = torch.randn_like(found)
        got = torch.autograd.grad(found, leaves, gradient)
        no_torch_operations()
        wide = [x.detach().double().requires_grad_() for x in leaves]
        right = formula(*wide[:3], *gated_rotary(number, *wide[3:]))
        expected = torch.autograd.grad(right, wide, gradient.double())
        for one, other in zip((found, *got), (right, *expected), strict=True):
            assert (one.double() - other).abs().max() <= limit * (1 + other.abs().max())


def normed_and_gated(number, weight, gate, cos):
    def output(x, b, h, i):
        x = x * torch.rsqrt(x.square().mean() + number) * weight
        return (x * cos[i % 64] + rotated(x)) * torch.sigmoid(gate[b, h, i])

    return output


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_kernels_on_a_gpu(no_torch_operations, dtype, limit):
    table = COS.float()
    for n, (queries, number) in enumerate([(9, 1e-3), (70, 0.5)]):
        x, gate = torch.randn(2, H, queries, D).to(dtype), torch.randn(2, H, queries, D).to(dtype)
        weight = torch.rand(D).add(0.5)
        found = []
        for device, wide in (("cuda", False), ("cpu", True)):
            leaves = [x, weight, gate, table]
            leaves = [(each.double() if wide else each).to(device).requires_grad_() for each in leaves]
            output = normed_and_gated(number, *leaves[1:])
            run = rows.mapped if not wide else lambda function, name, x, layout: row_by_row(function, x, layout)
            out = run(output, "output", leaves[0], "bhsd")
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
            if not n and not wide:
                no_torch_operations()
        for one, other in zip(*found, strict=True):
            assert (one.cpu().double() - other).abs().max() <= limit * (1 + other.abs().max())


def test_sizes_of_captured_tensors_are_those_of_each_call():
    for queries in (5, 6, 7, 6):
        q, k, v = (x.detach() for x in inputs(queries=queries))
        table = torch.linspace(0, 1, queries * D, dtype=torch.float64).reshape(queries, D)

        def shifted(x, b, h, at, table=table):
            return x * table[(at + 1) % table.shape[0]] / len(table)

        found = opkit.attention(q, k, v, mask=Causal("bottom-right"), query=shifted)
        torch.testing.assert_close(found, formula(q, k, v, query=shifted))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_torch_maps_row_by_row_has_no_kernel():
    q, k, v = (x.detach() for x in inputs())
    edges = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)

    def counted(x, b, h, at):
        return torch.histogram(x, edges)[0]

    found = opkit.attention(q, k, v, mask=Causal("bottom-right"), query=counted, key=counted)
    torch.testing.assert_close(found, formula(q, k, v, query=counted, key=counted))


def test_second_derivatives_of_tensors_that_were_computed():
    q, k, v = inputs()
    gate = LEARNED["gate"].exp()
    out = opkit.attention(q, k, v, query=rotary, output=lambda x, b, h, i: x * torch.sigmoid(gate[b, h, i]))
    wanted, gradient = (q, LEARNED["gate"]), torch.randn_like(out)
    by_kernels = torch.autograd.grad(out, wanted, gradient, retain_graph=True)
    first = torch.autograd.grad(out, wanted, gradient, create_graph=True)
    torch.testing.assert_close(first, by_kernels)
    assert all(x.abs().max() > 0 for x in torch.autograd.grad(first[1].square().sum(), (q, v, LEARNED["gate"])))


@pytest.mark.parametrize("create_graph", [False, True])
def test_functions_of_a_loop_that_capture_its_variables(create_graph):
    q, k, v = inputs()
    gates, results, gate = [LEARNED["gate"] + n for n in range(3)], [], None
    for gate in gates:
        output = lambda x, b, h, i: x * gate[b, h, i] * x  # noqa: B023, E731
        results.append(opkit.attention(q, k, v, mask=Causal("bottom-right"), query=rotary, output=output))
    right = [formula(q, k, v, query=rotary) for _ in gates]
    right = [out * each * out for out, each in zip(right, gates, strict=True)]
    gradient = torch.randn_like(right[0]).mT.contiguous().mT
    wanted = (q, LEARNED["gate"])
    found = torch.autograd.grad(sum(results), wanted, gradient, create_graph=create_graph)
    torch.testing.assert_close(found, torch.autograd.grad(sum(right), wanted, gradient))


def test_a_function_that_captures_the_rows():
    q, k, v = inputs()
    pair = {"query": lambda x, b, h, at: x * q[b, h, at].sin()}
    found, right = opkit.attention(q, k, v, mask=Causal("bottom-right"), **pair), formula(q * q.sin(), k, v)
    torch.testing.assert_close(found, right)
    for create_graph in (False, True):
        (one,) = torch.autograd.grad(found.sum(), q, retain_graph=True, create_graph=create_graph)
        torch.testing.assert_close(one, torch.autograd.grad(right.sum(), q, retain_graph=True)[0])


def test_writes_to_captured_tensors_are_noticed():
    q, k, v = inputs()
    gate = torch.ones(H, dtype=torch.float64)

    def output(x, b, h, i):
        return x * gate[h]

    first = opkit.attention(q, k, v, output=output)
    gate.mul_(2)
    torch.testing.assert_close(opkit.attention(q, k, v, output=output), 2 * first)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()
