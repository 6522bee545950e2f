"""What takes the place of torch's scaled_dot_product_attention."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit
from opkit.errors import ArgumentError, ShapeError
from opkit.nn.functional import scaled_dot_product_attention

TORCHS = F.scaled_dot_product_attention


def r(*shape):
    return torch.randn(shape)


SHAPES = [
    ((5, 8), (7, 8), (7, 3)),
    ((2, 5, 8), (2, 7, 8), (2, 7, 3)),
    ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)),
    ((2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 3)),
    ((4, 2, 3, 5, 8), (4, 2, 3, 7, 8), (4, 2, 3, 7, 3)),
    ((4, 2, 3, 5, 8), (2, 3, 7, 8), (1, 2, 3, 7, 3)),
]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_any_leading_dimensions(shapes, dtype):
    q, k, v = (r(*shape).to(dtype) for shape in shapes)
    for how in ({}, {"is_causal": True}, {"scale": 0.3}):
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **how), TORCHS(q, k, v, **how))


@pytest.mark.sweep
@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize(
    "shape", [(5, 7), (3, 5, 7), (2, 1, 5, 7), (1, 3, 1, 7), (4, 2, 3, 5, 7), (1, 2, 1, 5, 7)], ids=str
)
def test_masks(shape, floating):
    lead = (4, 2) if len(shape) > 4 else (2,)
    q, k, v = r(*lead, 3, 5, 8), r(*lead, 3, 7, 8), r(*lead, 3, 7, 3)
    mask = r(*shape) if floating else r(*shape) > -1
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(found, TORCHS(q, k, v, attn_mask=mask))


def test_heads_that_share_keys():
    q, k, v = r(2, 6, 5, 8), r(2, 2, 7, 8), r(2, 2, 7, 3)
    found = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, TORCHS(q, k, v, enable_gqa=True))
    with pytest.raises(ShapeError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


def test_gradients():
    given = [r(2, 3, 5, 8).requires_grad_() for _ in range(3)] + [r(3, 5, 5).requires_grad_()]
    grads = [torch.autograd.grad(f(*given).square().sum(), given) for f in (scaled_dot_product_attention, TORCHS)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_dropout_is_torch_s_generator_s():
    q = r(1, 1, 64, 8)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert torch.equal(*found)
    assert not torch.equal(found[0], scaled_dot_product_attention(q, q, q, dropout_p=0.5))


def test_mistakes():
    q = r(2, 3, 5, 8)
    with pytest.raises(ArgumentError, match="not both"):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5).bool(), is_causal=True)
    with pytest.raises(ShapeError, match="each needs"):
        scaled_dot_product_attention(q, q, r(8))
    with pytest.raises(ShapeError, match="do not broadcast"):
        scaled_dot_product_attention(q, r(3, 3, 5, 8), q)


# ---- in its place ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) * 2


def operators(call):
    """The operators that a call runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Note():
        call()
    return names


def test_the_context():
    x, layer = r(1, 2, 5, 8), Layer()
    assert not any("opkit" in name for name in operators(lambda: layer(x)))
    with opkit.sdpa_override():
        assert "opkit.attention.default" in operators(lambda: layer(x))
        torch.testing.assert_close(layer(x), TORCHS(x, x, x, is_causal=True) * 2)
        other = []
        thread = threading.Thread(target=lambda: other.extend(operators(lambda: layer(x))))
        thread.start()
        thread.join()
        assert other
        assert not any("opkit" in name for name in other)
    assert not any("opkit" in name for name in operators(lambda: layer(x)))


def targets(function, *inputs):
    """The operators of the graph that is compiled, and the result."""
    found = []

    def note(module, inputs):
        found.extend(str(node.target) for node in module.graph.nodes)
        return module

    torch.compiler.reset()
    from torch._dynamo.backends.common import aot_autograd

    out = torch.compile(function, backend=aot_autograd(fw_compiler=note), fullgraph=True)(*inputs)
    return found, out


def test_compiled_within_the_context():
    x, layer = r(1, 2, 5, 8), Layer()
    with torch.no_grad(), opkit.sdpa_override():
        found, out = targets(layer, x)
    assert "opkit.attention.default" in found
    torch.testing.assert_close(out, layer(x))


def test_the_switch():
    x, layer = r(1, 2, 5, 8), Layer()
    expected = layer(x)
    opkit.set_sdpa_override(True)
    try:
        assert "opkit.attention.default" in operators(lambda: layer(x))
        torch.testing.assert_close(layer(x), expected)
        with torch.no_grad():
            assert "opkit.attention.default" in targets(layer, x)[0]
    finally:
        opkit.set_sdpa_override(False)
    assert F.scaled_dot_product_attention is TORCHS
    assert not any("opkit" in name for name in operators(lambda: layer(x)))


def test_the_switch_of_flex_attention():
    from torch.nn.attention import flex_attention as flex

    q, torchs = r(1, 2, 5, 8), flex.flex_attention
    opkit.set_sdpa_override(True)
    try:
        found = operators(lambda: flex.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2))
        assert "opkit.attention.default" in found
    finally:
        opkit.set_sdpa_override(False)
    assert flex.flex_attention is torchs


def test_the_context_after_code_was_compiled_under_the_switch():
    """torch lists the functions that a mode can override when it first compiles, and must not keep the list of that moment."""
    from torch._dynamo.variables import torch as dynamo

    for lists in (torch.overrides.get_testing_overrides, torch.overrides._get_overridable_functions):
        lists.cache_clear()
    dynamo.get_overridable_functions.cache_clear()
    test_the_switch()
    test_compiled_within_the_context()


BROADCAST = {
    "one head of v": ((3, 4, 5, 8), (3, 4, 6, 8), (3, 1, 6, 8)),
    "one head of q": ((3, 1, 5, 8), (3, 4, 6, 8), (3, 4, 6, 8)),
    "one head of k": ((3, 4, 5, 8), (3, 1, 6, 8), (3, 4, 6, 8)),
    "one batch of q": ((1, 4, 5, 8), (3, 1, 6, 8), (3, 1, 6, 8)),
    "2-D q": ((5, 8), (3, 6, 8), (3, 6, 8)),
    "2-D k, v": ((2, 3, 5, 8), (6, 8), (6, 3)),
    "no heads": ((2, 0, 5, 8), (2, 0, 5, 8), (2, 0, 5, 8)),
    "no batch": ((0, 2, 5, 8), (0, 2, 6, 8), (0, 2, 6, 8)),
    "heads of five dimensions": ((2, 3, 1, 5, 8), (3, 4, 6, 8), (1, 1, 1, 6, 8)),
}


@pytest.mark.parametrize("shapes", BROADCAST.values(), ids=BROADCAST)
def test_whatever_torch_broadcasts(shapes):
    ours, torchs = ([r(*s).double().requires_grad_() for s in shapes] for _ in range(2))
    for x, y in zip(ours, torchs, strict=True):
        x.data.copy_(y.data)
    want = TORCHS(*torchs)
    with opkit.sdpa_override():
        got = F.scaled_dot_product_attention(*ours)
    torch.testing.assert_close(got, want)
    for out in (got, want):
        out.square().sum().backward()
    for x, y in zip(ours, torchs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_heads_of_keys_and_values_that_differ():
    q, k, v = r(2, 4, 5, 8), r(2, 2, 6, 8), r(2, 1, 6, 8)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), TORCHS(q, k, v, enable_gqa=True))
    with pytest.raises(ShapeError, match=r"query has 4 heads, key 2 and value 1\. Give enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


def ran(call):
    with opkit.sdpa_override(), torch.profiler.profile(acc_events=True) as profile:
        out = call()
    return out, {event.key for event in profile.key_averages()}


def layers():
    x, pad = r(2, 6, 8), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    encoder, decoder = (
        kind(8, 2, 16, dropout=0.0, batch_first=True)
        for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    return [attend, encoder, decoder], {
        "attention": lambda: attend(x, x, x, need_weights=False)[0],
        "padding": lambda: attend(x, x, x, need_weights=False, key_padding_mask=pad, attn_mask=causal < 0)[0],
        "causal": lambda: attend(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0],
        "unbatched": lambda: attend(x[0], x[0], x[0], need_weights=False)[0],
        "encoder": lambda: encoder(x, src_key_padding_mask=pad),
        "decoder": lambda: decoder(x, x, tgt_mask=causal, tgt_is_causal=True),
    }


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_torch_run_opkits_kernel(training):
    modules, calls = layers()
    for module in modules:
        module.train(training)
    for name, call in calls.items():
        for recorded in (True, False):
            with torch.set_grad_enabled(recorded):
                out, names = ran(call)
                torch.testing.assert_close(out, call(), msg=lambda text, name=name: f"{name}: {text}")
            assert "opkit::attention" in names, (name, recorded)
            assert not any("scaled_dot_product" in each for each in names), (name, recorded)


def test_layers_of_torch_give_its_gradients_and_weights():
    (attend, *_), _ = layers()
    x = r(2, 6, 8)
    with opkit.sdpa_override():
        attend(x, x, x, need_weights=False)[0].square().sum().backward()
        out, weights = attend(x, x, x)
    got = [parameter.grad.clone() for parameter in attend.parameters()]
    attend.zero_grad()
    attend(x, x, x, need_weights=False)[0].square().sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in attend.parameters()])
    torch.testing.assert_close((out, weights), attend(x, x, x))


def test_layers_of_torch_compiled():
    (attend, *_), _ = layers()
    x = r(2, 6, 8)
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def call(x):
        with opkit.sdpa_override():
            return attend(x, x, x, need_weights=False)[0]

    torch.testing.assert_close(call(x), attend(x, x, x, need_weights=False)[0])
    assert "opkit.attention.default" in seen


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch():
    x = torch.nested.nested_tensor([r(3, 2, 8), r(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    with opkit.sdpa_override():
        out = F.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(out.values(), TORCHS(x, x, x).values())
