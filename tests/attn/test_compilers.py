"""opkit.attention in torch.compile and torch.export: no graph breaks, other lengths, gradients."""

import pytest
import torch
from attention_inputs import inputs, randn

import opkit
from opkit.attn import reference
from opkit.masks import ALiBi, Causal, KeyPadding, Not, Segments, SlidingWindow, VarLen


class Attention(torch.nn.Module):
    """A mask made within the traced function, of tensors that are arguments."""

    def forward(self, q, k, v, lengths, slopes):
        mask = (Causal("bottom-right") & SlidingWindow(3)) | Not(KeyPadding(lengths))
        bias = [ALiBi(slopes), slopes.sum().reshape(1, 1)]
        return opkit.attention(q, k, v, mask=mask, bias=bias, sinks=slopes, softcap=5.0, return_lse=True)


class Packed(torch.nn.Module):
    """Packed sequences, with a mask made outside of what is traced."""

    def __init__(self):
        super().__init__()
        self.mask = ~Segments(torch.arange(5) % 2, torch.arange(6) % 3)

    def forward(self, q, k, v, starts, bias):
        packed = [x[0].transpose(0, 1) for x in (q, k[:, :, :5], v[:, :, :5])]
        return opkit.attention(*packed, mask=VarLen(starts) & Causal(), layout="thd"), opkit.attention(
            q, k, v, mask=self.mask
        )


EXAMPLES = (
    (Attention(), (*inputs(), torch.tensor([2, 6]), randn(4).abs())),
    (Packed(), (*inputs(), torch.tensor([0, 2, 5]), randn(5, 6))),
)
each_example = pytest.mark.parametrize(("module", "args"), EXAMPLES, ids=["masks", "packed"])


@pytest.mark.sweep(2)
@each_example
@pytest.mark.parametrize("backend", ["opkit", "aot_eager", "eager"])
def test_compiled_without_a_graph_break_it_gives_the_same(module, args, backend):
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*args), module(*args))


def test_compiled_gradients_are_the_eager_ones():
    torch.compiler.reset()
    module, args = EXAMPLES[0]
    args = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in args]
    wanted = [x for x in args if x.requires_grad]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(f(*args)[0].square().sum(), wanted) for f in (compiled, module)]
    torch.testing.assert_close(*found)


def test_one_graph_serves_all_lengths():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=Causal("bottom-right") & SlidingWindow(2))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for queries, keys in ((5, 6), (3, 9), (7, 7)):
        args = inputs(queries=queries, keys=keys)
        torch.testing.assert_close(compiled(*args), function(*args))
    assert len(graphs) <= 2


@pytest.mark.sweep
@each_example
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_the_operator(module, args, strict):
    exported = torch.export.export(module, args, strict=strict)
    assert "opkit.attention.default" in {str(node.target) for node in exported.graph.nodes}
    torch.testing.assert_close(exported.module()(*args), module(*args))


@pytest.mark.xfail(
    torch.__version__ < "2.13",
    raises=torch._dynamo.exc.UserError,
    reason="torch.export of torch 2.11 and 2.12 does not see that min(8 * n, 16 * n) is 8 * n",
)
def test_an_exported_program_takes_other_lengths():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return opkit.attention(q, k, v, mask=Causal("bottom-right"), layout="bshd")

    queries, keys = torch.export.Dim("queries", min=2), torch.export.Dim("keys", min=2)
    args = tuple(x.transpose(1, 2) for x in inputs())
    exported = torch.export.export(Model(), args, dynamic_shapes=({1: queries}, {1: keys}, {1: keys}))
    others = tuple(x.transpose(1, 2) for x in inputs(queries=3, keys=11))
    torch.testing.assert_close(exported.module()(*others), Model()(*others))


def test_the_reference_can_be_forced_where_a_compiler_sees_it():
    torch.compiler.reset()
    args = inputs()

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=Causal(), kernel="reference")

    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="eager")(*args), function(*args))


@pytest.mark.parametrize("backend", ["opkit", "aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_a_named_kernel_is_part_of_the_graph(backend, operator):
    torch.compiler.reset()
    calls, args = [], [x.requires_grad_() for x in inputs()]

    @operator.register_kernel("cpu", when=lambda: False, name="counted")
    def counted(*arguments):
        calls.append(1)
        return reference.attention(*arguments)

    def function(q, k, v):
        first = opkit.attention(q, k, v, mask=Causal(), kernel="counted")
        far = opkit.attention(q, k, v, mask=lambda b, h, i, j: (i + j) % 3 != 0, kernel="counted")
        return first.square() + torch.vmap(lambda q: opkit.attention(q, k, v, kernel="counted"))(q[None])[0] * far

    want = function(*args)
    gradients = torch.autograd.grad(want.sum(), args)
    calls.clear()
    found = torch.compile(function, fullgraph=True, backend=backend)(*args)
    assert len(calls) == 3
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), args), gradients)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_keeps_a_named_kernel(strict):
    class Named(torch.nn.Module):
        def forward(self, q, k, v):
            return opkit.attention(q, k, v, kernel="tiles")

    args = inputs()
    exported = torch.export.export(Named(), args, strict=strict)
    assert "attention_with_kernel" in str(exported.graph)
    torch.testing.assert_close(exported.module()(*args), Named()(*args))


def test_named_kernels_of_float8_and_of_pages_are_parts_of_graphs():
    x, pages = torch.randn(2, 4, 16), torch.randn(4, 16, 2, 16)
    table, lengths = torch.tensor([[3, 0], [2, 1]]), torch.tensor([20, 5])

    def function(x, pages):
        q = x[None].to(torch.float8_e4m3fn)
        paged = opkit.paged_attention(
            x, pages, pages, table, lengths, bias=lambda s, b, h, i, j: s - j, kernel="decode"
        )
        return opkit.attention(q, q, q, kernel="float32"), paged

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, pages), function(x, pages))


def test_an_unknown_kernel_is_reported_while_a_compiler_traces():
    with pytest.raises(Exception, match="there is no kernel named 'tyles'"):
        torch.compile(opkit.attention, backend="aot_eager")(*inputs(), kernel="tyles")


@pytest.mark.exhaustive
def test_compiled_gradients_of_all_lengths_are_the_reference_s():
    torch.compiler.reset()

    def function(q, k, v):
        return opkit.attention(q, k, v, mask=Causal("bottom-right"))

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries, keys in ((5, 6), (3, 9)):
        args = [x.requires_grad_() for x in inputs(queries=queries, keys=keys)]
        out = opkit.attention(*args, mask=Causal("bottom-right"), kernel="reference")
        found = compiled(*args)
        torch.testing.assert_close(found, out)
        weight = randn(*out.shape, seed=5)
        pairs = [torch.autograd.grad(x, args, weight) for x in (found, out)]
        torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5)
