"""``opkit.optimize`` and ``opkit.restore``: results, gradients, what a model is afterwards, and the report."""

import copy
import importlib
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opkit


class Norm(nn.Module):
    """An RMS norm by hand, under a name that promises nothing; ``shift`` is 1 for Gemma's."""

    def __init__(self, d, shift=0.0, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))
        self.shift, self.eps = shift, eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (self.shift + self.weight)).to(x.dtype)


class WrongRMSNorm(Norm):
    """It has the name of an RMS norm, and subtracts the mean."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False), heads

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden), nn.Linear(d, hidden)
        self.down = nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            Norm(d),
            Attention(d, 2),
            Norm(d, shift=1.0),
            MLP(d, 2 * d + 1),
        )
        self.wrong = WrongRMSNorm(d)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return self.wrong(x + self.mlp(self.norm2(x)))


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(*[Block(16) for _ in range(2)]), torch.randn(3, 7, 16)


def out_and_gradients(model, x):
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [each.detach().float() for each in (out, *(parameter.grad for parameter in model.parameters()))]


@pytest.mark.parametrize("compiled", [False, True])
def test_results_and_gradients_are_those_in_float64(compiled):
    torch.manual_seed(0)
    model, x = nn.Sequential(Norm(8), Attention(8, 2)), torch.randn(3, 7, 8)
    exact = copy.deepcopy(model).double()
    opkit.optimize(model, compile=compiled, verbose=False)
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(out_and_gradients(model, x), out_and_gradients(exact, x.double()), **close)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()  # new weights are read, not copied
    exact.load_state_dict(model.state_dict())
    torch.testing.assert_close(out_and_gradients(model, x), out_and_gradients(exact, x.double()), **close)


def test_norms_and_attention_in_inference():
    model, x = small_model()
    exact = copy.deepcopy(model).double()
    opkit.optimize(model, compile=False, verbose=False)
    with torch.no_grad():
        torch.testing.assert_close(model(x), exact(x.double()).float(), rtol=1e-4, atol=1e-5)


def test_restore_gives_the_model_back():
    torch.compiler.reset()  # torch.compile takes code of models without hooks for models with hooks
    model, x = nn.Sequential(nn.Sequential(Norm(8)), Attention(8, 2)), torch.randn(3, 7, 8)
    calls = []
    model[0][0].register_forward_hook(lambda *_: calls.append(1))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    modules, state = list(model.modules()), {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        opkit.optimize(model, verbose=False)
        assert list(model.state_dict()) == list(state)
        model(x)
        opkit.restore(model)
        assert torch.equal(model(x), expected)
    assert len(calls) == 3
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    opkit.restore(model)


def test_the_report_names_what_was_changed_and_what_was_not(capsys):
    model, _ = small_model()
    report = opkit.optimize(model, compile=False)
    assert capsys.readouterr().out == f"{report}\n"
    assert {entry.path for entry in report.changed} == {
        f"{i}.{name}" for i in "01" for name in ("norm1", "norm2", "attention")
    }
    assert str(report).splitlines() == [
        "opkit.optimize(Sequential)",
        "changed:",
        "  *.norm1 (Norm, 2 modules): torch.nn.functional.rms_norm in inference",
        "  *.attention (Attention, 2 modules): scaled_dot_product_attention by opkit.attention",
        "  *.norm2 (Norm, 2 modules): torch.nn.functional.rms_norm in inference, with 1 + weight",
        "left alone:",
        "  *.mlp (MLP, 2 modules): opkit.nn.swiglu was not faster in eager mode; the compiler fuses the gate",
        "  *.wrong (WrongRMSNorm, 2 modules): its results are not those of an RMS norm with one weight",
    ]
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert opkit.optimize(model, compile=False, verbose=False) is report
    assert forwards == [vars(module).get("forward") for module in model.modules()]
    again = opkit.optimize(model, verbose=False)  # compiles what was not compiled
    assert again.compiled
    assert str(again).count("compiled with") == 1


@pytest.mark.parametrize("through", ["deepcopy", "pickle"])
def test_copies_are_independent(through):
    model, x = small_model()
    opkit.optimize(model, compile=False, verbose=False)
    if through == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert copied(x).abs().sum() > 0
    opkit.restore(copied)
    assert "forward" not in vars(copied[0].norm1)
    assert "forward" in vars(model[0].norm1)


def test_a_model_is_left_as_it_was_if_compiling_fails(monkeypatch):
    model, _ = small_model()

    def fail(*args, **kwargs):
        assert "forward" in vars(model[0].attention)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(nn.Module, "compile", fail)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="no compiler"):
        opkit.optimize(model, verbose=False)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_forwards_of_others_are_left_alone():
    model, _ = small_model()
    other = model[0].norm1.forward = lambda x: x
    report = opkit.optimize(model, compile=False, verbose=False)
    assert any(entry.path == "0.norm1" and "replaced before" in entry.reason for entry in report.left_alone)
    with pytest.raises(opkit.errors.ArgumentError, match="part of another model"):
        opkit.restore(model[1])
    own = model[1].norm1.forward
    model[1].norm1.forward = lambda x: own(x)
    with pytest.raises(opkit.errors.ArgumentError, match="was replaced after"):
        opkit.restore(model)
    model[1].norm1.forward = own
    opkit.restore(model)
    assert model[0].norm1.forward is other


def test_a_model_that_is_compiled_already_stays_compiled():
    model, _ = small_model()
    model.compile(backend="eager")
    report = opkit.optimize(model, verbose=False)
    assert "compiled already" in str(report)
    compiled = model._compiled_call_impl
    opkit.restore(model)
    assert model._compiled_call_impl is compiled


@pytest.mark.parametrize("function", [opkit.optimize, opkit.restore])
def test_other_objects_are_refused(function):
    with pytest.raises(opkit.errors.ArgumentTypeError, match="model is <built-in"):
        function(torch.relu)


def test_norms_in_mixed_dtypes_run_their_own_forward():
    model = nn.Sequential(Norm(8))
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        opkit.optimize(model, compile=False, verbose=False)
        assert torch.equal(model(x), expected)


def test_layers_of_torch_are_left_alone():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    report = opkit.optimize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), compile=False, verbose=False)
    assert not report.changed
    assert {entry.module for entry in report.left_alone} == {"MultiheadAttention", "LayerNorm"}


def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens, padding = torch.randint(1, 50, (2, 7)), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        before = model(tokens, attention_mask=padding).logits
    report = opkit.optimize(model, compile=False, verbose=False)
    assert model.config._attn_implementation == "opkit"
    assert {entry.module for entry in report.changed} == {"LlamaForCausalLM", "LlamaRMSNorm"}
    copied = copy.deepcopy(model)
    with torch.no_grad():
        found, expected = (each(tokens, attention_mask=padding).logits for each in (model, exact))
    torch.testing.assert_close(found[padding.bool()], expected[padding.bool()].float(), rtol=1e-4, atol=1e-5)
    found, expected = (each(tokens, labels=tokens) for each in (model.train(), exact))
    found.loss.backward()
    expected.loss.backward()
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad.float(), rtol=1e-3, atol=1e-5)
    opkit.restore(model.eval())
    assert (model.config._attn_implementation, copied.config._attn_implementation) == ("sdpa", "opkit")
    with torch.no_grad():
        assert torch.equal(model(tokens, attention_mask=padding).logits, before)


def test_layers_for_the_kernels_library():
    pytest.importorskip("kernels.layer", reason="kernels is not installed")  # tests/kernels may be found under the name
    kernels = importlib.import_module("kernels")
    layer = kernels.use_kernel_forward_from_hub("RMSNorm")(type("LlamaRMSNorm", (Norm,), {}))
    model, x = nn.Sequential(layer(8)), torch.randn(3, 8)
    with kernels.use_kernel_mapping({}), torch.no_grad():
        expected = model(x)
        opkit.nn.register_kernels()
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
        assert model[0].forward.__func__.__module__ == "opkit.nn.hub_layers"
        torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    assert model[0].weight.grad is not None
