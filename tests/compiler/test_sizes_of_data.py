"""torch.compile(backend="opkit") of graphs with sizes that depend on the values in tensors: compiled between such operators."""

import pytest
import torch
import torch._dynamo.config

from opkit.compiler.backend import opkit_backend

pytestmark = pytest.mark.usefixtures("fresh")


def positive(x):
    y = x.sin() * 2
    at = y.relu().nonzero()
    return (at.float() * 3 + 1).sum(0), y + 1


def masked(x):
    return (x * 2)[x > 0].exp() + 1


def twice(x):
    y = x[(x > 0).nonzero().squeeze(1)] * 2
    at = (y > 1).nonzero().squeeze(1)
    return y[at].sin().sum() + y.sum(), at


def first(x):
    count = (x > 0).sum().item()
    torch._check(count <= x.shape[0])
    return (x * 2)[:count].cos().sum(), torch.zeros(count) + count


def attention(x):
    scores = torch.softmax(x[x[:, 0] > 0] @ x.t(), -1)
    return (scores * 2).sum(-1)


def different(x):
    values, places = torch.unique(x.detach().round(), return_inverse=True)
    return values * 2, places + 1, (places == 0).any().item() * x


def number_and_size(x):
    largest = x.abs().max().item()
    return x[x > 0] / largest + largest * 2


def equal(x):
    """AOTAutograd makes one node of the two masked indices, and the backward gets a size with 3 more."""
    y = torch.cat([x[x > 0], x[:3]])
    return y * torch.cat([(x * 2).cos()[x > 0], x[:3]]) + torch.cat([x[x > 0], x[:3]])


def random(x):
    ones = (x * torch.rand_like(x)).abs() > -1
    return x[ones] + torch.rand(3).sum() * 0


def written(x, to):
    to.add_(1)
    return (x > to).nonzero() + 1, to * 2


@pytest.fixture
def captured():
    """Dynamo's graphs contain such operators; else it ends graphs there."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def leaves(result):
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    "function",
    [positive, masked, twice, first, attention, different, number_and_size, equal, random],
    ids=lambda f: f.__name__,
)
def test_compiled_between(function, seen):
    """Nothing but the operators themselves runs in eager mode; results and gradients are right for any size, also 0 and 1."""
    compiled = torch.compile(function, backend=opkit_backend, options={"strict": True}, fullgraph=True)
    x = torch.randn((10, 4) if function is attention else (10,))
    one = -x.abs()
    one[3] = 2.0
    for values in (x, one, -x.abs(), x):
        own, other = (values.clone().requires_grad_() for _ in range(2))
        found, wanted = leaves(compiled(own)), leaves(function(other))
        torch.testing.assert_close(found, wanted)
        for results in (found, wanted):
            sum(each.sum() for each in results if each.requires_grad).backward()
        torch.testing.assert_close(own.grad, other.grad)
    assert len(seen) >= 2
    assert not any(graph.reason for graph in seen)


@pytest.mark.usefixtures("captured")
def test_inputs_are_written_in_the_end():
    x, to = torch.randn(10), torch.randn(10) / 10
    own, other = to.clone(), to.clone()
    compiled = torch.compile(written, backend=opkit_backend, options={"strict": True}, fullgraph=True)
    torch.testing.assert_close(compiled(x, own), written(x, other))
    torch.testing.assert_close(own, other)


@pytest.mark.usefixtures("captured")
def test_checks_of_sizes():
    compiled = torch.compile(first, backend=opkit_backend, fullgraph=True)
    compiled(torch.ones(10))

    def taken(x, count):
        size = count.item()
        torch._check(size <= x.shape[0])
        return (x * 2)[:size].cos()

    compiled = torch.compile(taken, backend=opkit_backend, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(10), torch.tensor(3)), taken(torch.ones(10), torch.tensor(3)))
    with pytest.raises(RuntimeError):
        compiled(torch.ones(10), torch.tensor(11))


@pytest.mark.usefixtures("captured")
def test_a_deep_model_with_a_masked_part():
    """Blocks repeat before and after it."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8))

    def deep(x):
        for layer in layers[:4]:
            x = torch.nn.functional.gelu(layer(x)) + x
        x = x[x[:, 0] > 0]
        for layer in layers[4:]:
            x = torch.nn.functional.gelu(layer(x)) + x
        return x.sum(0)

    x = torch.randn(9, 8)
    compiled = torch.compile(deep, backend=opkit_backend, options={"strict": True}, fullgraph=True)
    for values in (x, -x):
        torch.testing.assert_close(compiled(values), deep(values))
    (compiled(x) - deep(x)).sum().backward()
    for layer in layers:
        torch.testing.assert_close(layer.weight.grad, torch.zeros(8, 8), atol=1e-5, rtol=0)
