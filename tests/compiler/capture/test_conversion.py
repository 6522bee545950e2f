"""FX graphs as the compiler's own: sizes as indices, and what is left to torch with the reason."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from opkit.compiler.backend import opkit_backend
from opkit.compiler.capture.conversion import Unsupported, capture
from opkit.compiler.ir.graph import OpaqueValue, Ref, TensorType, TypeName
from opkit.compiler.ir.index import index, size


def graph(function, *inputs, symbolic=False):
    mode = "symbolic" if symbolic else "fake"
    return capture(make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs), "test")


def test_nodes_types_and_arguments():
    found = graph(lambda x: torch.sum(x.t(), [0], dtype=torch.float64).to("cpu"), torch.randn(2, 3)).graph
    x, transposed, total = found.nodes
    assert x.target == "input"
    assert x.result == TensorType("f32", (index(2), index(3)), (index(3), index(1)), index(0))
    assert (transposed.target, transposed.args) == ("aten.t.default", (Ref(x.name),))
    assert (total.args[1], total.kwargs) == ([0], {"dtype": TypeName("f64")})
    assert found.outputs == (Ref(total.name),)


def test_several_results():
    found = graph(lambda x: torch.max(x, 1), torch.randn(2, 3)).graph
    most = found.nodes[1]
    assert [each.dtype for each in most.result] == ["f32", "i64"]
    assert [node.target for node in found.nodes[2:]] == ["getitem", "getitem"]


def test_devices_and_formats_can_be_turned_back():
    captured = graph(lambda x: x.clone(memory_format=torch.channels_last), torch.randn(1, 2, 3, 4))
    (clone,) = captured.graph.nodes[1:]
    assert clone.kwargs == {"memory_format": OpaqueValue("torch.channels_last")}
    assert captured.opaques == {"torch.channels_last": torch.channels_last}
    assert captured.targets["aten.clone.default"] is torch.ops.aten.clone.default


def test_sizes_are_polynomials_and_no_nodes():
    captured = graph(lambda x: x.reshape(x.shape[0] * x.shape[1]) * x.shape[0], torch.randn(4, 6), symbolic=True)
    names = list(captured.graph.sizes)
    assert sorted(captured.graph.sizes.values()) == [4, 6]
    rows, columns = (size(name, 2) for name in names)
    assert captured.graph.nodes[0].result.shape == (rows, columns)
    assert all(isinstance(node.result, TensorType) for node in captured.graph.nodes)
    assert captured.graph.nodes[-1].args[1] == rows
    assert captured.graph.nodes[-1].result.shape == (rows * columns,)


def test_quotients_remainders_and_what_is_computed_apart():
    def function(x):
        n = x.shape[0]
        return x.new_zeros(n // 3 + 1), x.new_zeros(n % 3 + 1), x.new_zeros(torch.sym_max(n, 5))

    captured = graph(function, torch.randn(7), symbolic=True)
    (name,) = [each for each in captured.graph.sizes if each not in captured.computed]
    (n,) = captured.graph.nodes[0].result.shape
    shapes = [node.result.shape for node in captured.graph.nodes[1:]]
    assert shapes[:2] == [(n // 3 + 1,), (n % 3 + 1,)]
    ((computed, text),) = captured.computed.items()
    assert captured.graph.sizes[computed] == 7
    assert eval(text, {name: 9}) == 9


def test_constants_are_held():
    table = torch.arange(3.0)
    captured = graph(lambda x: x + table, torch.randn(3))
    (held,) = captured.constants.values()
    assert torch.equal(held, table)
    assert [node.target for node in captured.graph.nodes] == ["input", "constant", "aten.add.Tensor"]


@pytest.mark.parametrize(
    ("function", "given", "reason"),
    [
        (lambda x: x.to_sparse(), torch.randn(2), "no plain strided tensor"),
        (lambda x: x.to("meta"), torch.randn(2), "runs on meta"),
    ],
)
def test_what_is_left_to_torch(function, given, reason):
    with pytest.raises(Unsupported, match=reason):
        graph(function, given)


def test_the_key_tells_strides_and_numbers_apart():
    keys = {
        graph(lambda x: x + 1, torch.randn(2, 2)).key,
        graph(lambda x: x + 1.0, torch.randn(2, 2)).key,
        graph(lambda x: x + 1, torch.randn(2, 2).t()).key,
    }
    assert len(keys) == 3


def test_a_backward_that_checks_for_errors():
    """What orders its effects is no tensor when it runs."""
    x = torch.randn(3, 3, requires_grad=True)
    values = torch.compile(torch.linalg.eigvals, backend=opkit_backend, options={"strict": True})(x)
    found = torch.autograd.grad(values.abs().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(torch.linalg.eigvals(x).abs().sum(), x))
